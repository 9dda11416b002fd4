"""Differentiable bilevel optimization in JAX: flat public names.

A newcomer's path through the code: ``problem``, ``inverse``, ``forward``, ``solvers``,
``estimate``, ``_hypergradient``, ``geometry``, ``_search``.
"""

from bilevel import (
    baselines,
    bounds,
    checkpoint,
    data,
    discretize,
    linear,
    plots,
    spaces,
    spectral,
)
from bilevel._hypergradient import HyperGradient, hypergradient
from bilevel._search import DescentState, NonFiniteError, SearchResult, descent, search
from bilevel.discretize import (
    argmax,
    condition_six,
    factor_simplex,
    rank_agreement,
    rank_by_alpha,
    rank_by_shared_weights,
    top_k,
)
from bilevel.estimate import Info, explain
from bilevel.forward import lbfgs, newton, solved
from bilevel.geometry import exponentiate, project, softmax, tangent
from bilevel.inverse import cg, dense, gram, neumann, nystrom, scale
from bilevel.problem import Problem, side_by_side
from bilevel.protocols import LowerSolver
from bilevel.solvers import implicit, one_step, restarted, ridge, unrolled
from bilevel.spectral import (
    simplex_start,
    spectral_alpha,
    spectral_estimator,
    spectral_limits,
    spectral_predict,
)
from bilevel.stability import lipschitz

__all__ = [
    "DescentState",
    "HyperGradient",
    "Info",
    "LowerSolver",
    "NonFiniteError",
    "Problem",
    "SearchResult",
    "argmax",
    "baselines",
    "bounds",
    "cg",
    "checkpoint",
    "condition_six",
    "data",
    "dense",
    "descent",
    "discretize",
    "explain",
    "exponentiate",
    "factor_simplex",
    "gram",
    "hypergradient",
    "implicit",
    "lbfgs",
    "linear",
    "lipschitz",
    "neumann",
    "newton",
    "nystrom",
    "one_step",
    "plots",
    "project",
    "rank_agreement",
    "rank_by_alpha",
    "rank_by_shared_weights",
    "restarted",
    "ridge",
    "scale",
    "search",
    "side_by_side",
    "simplex_start",
    "softmax",
    "solved",
    "spaces",
    "spectral",
    "spectral_alpha",
    "spectral_estimator",
    "spectral_limits",
    "spectral_predict",
    "tangent",
    "top_k",
    "unrolled",
]
