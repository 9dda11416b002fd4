# Public names of `bilevel.problem` and their modules, imported on first use.

from .problem import Problem, side_by_side
from .structure import is_quadratic

__all__ = ["Problem", "is_quadratic", "side_by_side"]
