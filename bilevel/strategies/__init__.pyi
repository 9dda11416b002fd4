# Public names of `bilevel.strategies` and their modules, imported on first use.

from .methods import darts, gaea, joint, unrolled, weight_sharing
from .optimizers import darts_sgd, on_sets
from .strategy import Strategy, best_drawn, run, stack_strategies
from .train_free import eigen_nas, nasi, te_nas

__all__ = [
    "Strategy",
    "best_drawn",
    "darts",
    "darts_sgd",
    "eigen_nas",
    "gaea",
    "joint",
    "nasi",
    "on_sets",
    "run",
    "stack_strategies",
    "te_nas",
    "unrolled",
    "weight_sharing",
]
