# The public names of `bilevel`, and where they are: each is imported when it is first used.

from . import baselines, data, discretize, linear, nets, plots, spaces, strategies
from .contracts import LowerSolver, SingleLoop, Stateful
from .discretize import (
    argmax,
    condition_six,
    rank_agreement,
    rank_by_alpha,
    rank_by_shared_weights,
    top_k,
)
from .hypergradients.error_estimate import Info, explain
from .hypergradients.hypergradient import HyperGradient, hypergradient
from .hypergradients.short_training import standard_error, truncation
from .internal.processes import LostProcessError
from .outer_loop.batches import jointly, minibatches, partition
from .outer_loop.descent import descent
from .outer_loop.geometry import exponentiate, project, softmax, tangent
from .outer_loop.history import History
from .outer_loop.metrics_log import log
from .outer_loop.search import search
from .outer_loop.search_result import NonFiniteError, SearchResult
from .outer_loop.stream import stream
from .problem.problem import Problem, stack_problems
from .runs import checkpoint
from .solvers import distilled, implicit, one_step, restarted, ridge, unrolled
from .solvers.constrained import projected, proximal
from .solvers.inverses import cg, dense, gram, neumann, nystrom, scale
from .solvers.minimizers import lbfgs, newton, solved
from .spaces.nasbench201 import judging
from .stochastic import amigo, bome, f2sa, ma_soba, meha, paced, saba, soba, spaba
from .theory import bounds, spectral
from .theory.spectral import simplex_start, spectral_alpha, spectral_estimator, spectral_limits
from .theory.stability import lipschitz

__version__: str

__all__ = [
    "History",
    "HyperGradient",
    "Info",
    "LostProcessError",
    "LowerSolver",
    "NonFiniteError",
    "Problem",
    "SearchResult",
    "SingleLoop",
    "Stateful",
    "amigo",
    "argmax",
    "baselines",
    "bome",
    "bounds",
    "cg",
    "checkpoint",
    "condition_six",
    "data",
    "dense",
    "descent",
    "discretize",
    "distilled",
    "explain",
    "exponentiate",
    "f2sa",
    "gram",
    "hypergradient",
    "implicit",
    "jointly",
    "judging",
    "lbfgs",
    "linear",
    "lipschitz",
    "log",
    "ma_soba",
    "meha",
    "minibatches",
    "nets",
    "neumann",
    "newton",
    "nystrom",
    "one_step",
    "paced",
    "partition",
    "plots",
    "project",
    "projected",
    "proximal",
    "rank_agreement",
    "rank_by_alpha",
    "rank_by_shared_weights",
    "restarted",
    "ridge",
    "saba",
    "scale",
    "search",
    "simplex_start",
    "soba",
    "softmax",
    "solved",
    "spaba",
    "spaces",
    "spectral",
    "spectral_alpha",
    "spectral_estimator",
    "spectral_limits",
    "stack_problems",
    "standard_error",
    "strategies",
    "stream",
    "tangent",
    "top_k",
    "truncation",
    "unrolled",
]
