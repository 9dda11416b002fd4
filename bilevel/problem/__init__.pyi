# Public names of `bilevel.problem` and their modules, imported on first use.

from .problem import Problem, stack_problems
from .structure import is_quadratic

__all__ = ["Problem", "is_quadratic", "stack_problems"]
