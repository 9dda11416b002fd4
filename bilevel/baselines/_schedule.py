"""Orders and geometric schedules, robust to rounding errors."""

import math
from collections.abc import Sequence

import numpy as np


def ranked(
    candidates: Sequence[int] | np.ndarray, errors: Sequence[float] | np.ndarray
) -> np.ndarray:
    """Return the candidates by rising error, then rising index, with NaN last."""
    return np.asarray(candidates)[np.lexsort((np.asarray(candidates), np.asarray(errors)))]


def ceil(x: float) -> int:
    """Return the integer above ``x``, up to rounding errors: ceil(9 * 3**.5**2) is 27."""
    return round(x) if _is_whole(x) else math.ceil(x)


def floor(x: float) -> int:
    """Return the integer below ``x``, up to rounding errors."""
    return round(x) if _is_whole(x) else math.floor(x)


def _is_whole(x: float) -> bool:
    return abs(x - round(x)) <= 1e-12 * abs(x)


def resources(budget: int, growth: float, rounds: int) -> list[int]:
    """Return ``ceil(budget * growth^(t - rounds))`` for t = 1 ... rounds, ending in ``budget``."""
    budgets = [ceil(budget * float(growth) ** (t - rounds)) for t in range(1, rounds + 1)]
    return [*budgets[:-1], budget] if budgets else []
