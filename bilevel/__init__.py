"""Differentiable bilevel optimization in JAX: flat public names.

A newcomer's path through the code: ``problem``, ``inverse``, ``forward``, ``solvers``,
``estimate``, ``_hypergradient``, ``geometry``, ``_search``.
"""

from bilevel import baselines, bounds, checkpoint, data, linear, plots, spaces
from bilevel._hypergradient import HyperGradient, hypergradient
from bilevel._search import DescentState, NonFiniteError, SearchResult, descent, search
from bilevel.estimate import Info
from bilevel.forward import lbfgs, newton, solved
from bilevel.geometry import exponentiate, project, softmax, tangent
from bilevel.inverse import cg, dense, gram, neumann, nystrom, scale
from bilevel.problem import Problem, side_by_side
from bilevel.protocols import LowerSolver
from bilevel.solvers import implicit, restarted, ridge, unrolled

__all__ = [
    "DescentState",
    "HyperGradient",
    "Info",
    "LowerSolver",
    "NonFiniteError",
    "Problem",
    "SearchResult",
    "baselines",
    "bounds",
    "cg",
    "checkpoint",
    "data",
    "dense",
    "descent",
    "exponentiate",
    "gram",
    "hypergradient",
    "implicit",
    "lbfgs",
    "linear",
    "neumann",
    "newton",
    "nystrom",
    "plots",
    "project",
    "restarted",
    "ridge",
    "scale",
    "search",
    "side_by_side",
    "softmax",
    "solved",
    "spaces",
    "tangent",
    "unrolled",
]
