# Public names of `bilevel.spaces.nasbench201.judging` and their modules, imported on first use.

from .table import load_table
from .verdicts import best_of_k, best_of_k_random, correlations, sum_of_log_ranks

__all__ = [
    "best_of_k",
    "best_of_k_random",
    "correlations",
    "load_table",
    "sum_of_log_ranks",
]
