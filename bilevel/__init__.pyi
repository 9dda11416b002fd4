# The public names of `bilevel`, and where they are: each is imported when it is first used.

from . import (
    activation_search,
    baselines,
    bounds,
    checkpoint,
    data,
    diagnostics,
    discretize,
    judging,
    linear,
    nets,
    plots,
    spaces,
    spectral,
    strategies,
    train_free,
)
from ._descent import descent
from ._hypergradient import HyperGradient, hypergradient
from ._log import log
from ._processes import LostProcessError
from ._search import NonFiniteError, SearchResult, search
from ._search_report import SearchReport
from ._stream import stream
from ._training_error import standard_error, truncation
from .batches import jointly, minibatches, partition
from .discretize import (
    argmax,
    condition_six,
    factor_simplex,
    rank_agreement,
    rank_by_alpha,
    rank_by_shared_weights,
    top_k,
)
from .estimate import Info, explain
from .forward import lbfgs, newton, solved
from .geometry import exponentiate, project, softmax, tangent
from .inverse import cg, dense, gram, neumann, nystrom, scale
from .problem import Problem, side_by_side
from .protocols import DescentState, LowerSolver, SingleLoop, Stateful
from .solvers import distilled, implicit, one_step, restarted, ridge, unrolled
from .spectral import (
    simplex_start,
    spectral_alpha,
    spectral_estimator,
    spectral_limits,
    spectral_predict,
)
from .stability import lipschitz
from .stochastic import amigo, bome, f2sa, ma_soba, meha, paced, saba, soba, spaba

__version__: str

__all__ = [
    "DescentState",
    "HyperGradient",
    "Info",
    "LostProcessError",
    "LowerSolver",
    "NonFiniteError",
    "Problem",
    "SearchReport",
    "SearchResult",
    "SingleLoop",
    "Stateful",
    "activation_search",
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
    "diagnostics",
    "discretize",
    "distilled",
    "explain",
    "exponentiate",
    "f2sa",
    "factor_simplex",
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
    "rank_agreement",
    "rank_by_alpha",
    "rank_by_shared_weights",
    "restarted",
    "ridge",
    "saba",
    "scale",
    "search",
    "side_by_side",
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
    "spectral_predict",
    "standard_error",
    "strategies",
    "stream",
    "tangent",
    "top_k",
    "train_free",
    "truncation",
    "unrolled",
]
