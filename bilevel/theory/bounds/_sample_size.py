"""Invert a bound: find the number of validation rows that it needs."""

import bisect
from collections.abc import Callable

from bilevel.internal.checks import function, positive
from ntk.bounds import Bound

_CAP = 10**15  # rows; every integer up to it is exact in float64


def sample_size(gap: float, bound: Callable[[float], Bound]) -> int:
    """Return the smallest number of validation rows for which a bound is at most ``gap``.

    The search doubles the number of rows, then bisects. The bound must fall with the number of
    rows.

    Parameters
    ----------
    gap : float
    bound : function
        ``n_valid -> Bound``, with ``n_valid`` a float; not traced. It is called about
        ``2 log2(rows)`` times. Its ``assumptions`` can need more rows.

    Raises
    ------
    ValueError
        If ``gap`` is not positive or not reached by 10^15 rows, or ``bound`` is not a function.

    Examples
    --------
    >>> import math
    >>> from bilevel.theory.bounds import khodak_theorem_a2
    >>> sample_size(0.1, lambda n: khodak_theorem_a2(math.log(256), n))
    1083
    """
    positive("gap", gap)
    function("bound", bound, "n_valid -> Bound")

    def reached(rows: int) -> bool:
        return float(bound(float(rows)).value) <= gap  # as Python floats: no rounding of gap

    below, rows = 0, 1
    while not reached(rows):
        if rows == _CAP:
            raise ValueError(f"gap: expected a value that up to {_CAP:.0e} rows reach, got {gap}.")
        below, rows = rows, min(2 * rows, _CAP)
    return bisect.bisect_left(range(rows), True, lo=below + 1, key=reached)
