# Public names of `bilevel.strategies` and their modules, imported on first use.

from . import activation_search, train_free
from .methods import darts, gaea, joint, unrolled, weight_sharing
from .optimizers import darts_sgd, exponentiated, logits, on_sets
from .strategy import Strategy, best_drawn, run, stack_strategies

__all__ = [
    "Strategy",
    "activation_search",
    "best_drawn",
    "darts",
    "darts_sgd",
    "exponentiated",
    "gaea",
    "joint",
    "logits",
    "on_sets",
    "run",
    "stack_strategies",
    "train_free",
    "unrolled",
    "weight_sharing",
]
