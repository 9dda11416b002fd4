# Public names of `bilevel.discretize` and their modules, imported on first use.

from .choices import argmax, rank_by_alpha, top_k
from .conditions import condition_six
from .diagnostics import alpha_curvature, entropy
from .rankings import rank_agreement, rank_by_shared_weights

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
