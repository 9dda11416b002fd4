# Public names of `bilevel.discretize` and their modules, imported on first use.

from .conditions import condition_six
from .diagnostics import alpha_curvature, entropy
from .rankings import argmax, rank_agreement, rank_by_alpha, rank_by_shared_weights, top_k

__all__ = [
    "alpha_curvature",
    "argmax",
    "condition_six",
    "entropy",
    "rank_agreement",
    "rank_by_alpha",
    "rank_by_shared_weights",
    "top_k",
]
