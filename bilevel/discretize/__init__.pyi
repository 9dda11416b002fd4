# Public names of `bilevel.discretize` and their modules, imported on first use.

from . import diagnostics
from .choices import argmax, rank_by_alpha, top_k
from .conditions import ConditionSix, condition_six
from .factors import factor_simplex, simplex_factors, simplex_from_factors
from .judgement import Judgement, judge_choice
from .rankings import Agreement, Ranking, rank_agreement, rank_by_shared_weights

__all__ = [
    "Agreement",
    "ConditionSix",
    "Judgement",
    "Ranking",
    "argmax",
    "condition_six",
    "diagnostics",
    "factor_simplex",
    "judge_choice",
    "rank_agreement",
    "rank_by_alpha",
    "rank_by_shared_weights",
    "simplex_factors",
    "simplex_from_factors",
    "top_k",
]
