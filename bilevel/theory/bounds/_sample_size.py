"""How many validation rows a bound asks for."""

from collections.abc import Callable

from bilevel.internal.checks import function, positive
from ntk.bounds import Bound

_CAP = 10**15  # rows; every integer up to it is exact in float64


def sample_size(gap: float, bound: Callable[[float], Bound]) -> int:
    """The fewest validation rows for which a bound is at most ``gap``.

    Doubling, then bisection: right for every bound that falls as the number of rows grows. What the
    bound assumes of the number of rows is in ``bound(rows).assumptions``.

    Parameters
    ----------
    gap : float
        What the bound's value shall not exceed.
    bound : function
        ``n_valid -> Bound``, with ``n_valid`` a float; not traced. Compile it with ``jax.jit`` if
        it is slow: it is called about ``2 log2(rows)`` times.

    Returns
    -------
    int

    Raises
    ------
    ValueError
        For a gap that is not positive, or that 10^15 rows do not reach; for what is no function.

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
        return float(bound(float(rows)).value) <= gap  # not in the rounding of the bound

    below, rows = 0, 1
    while not reached(rows):
        if rows == _CAP:
            raise ValueError(f"gap: expected a value that up to {_CAP:.0e} rows reach, got {gap}.")
        below, rows = rows, min(2 * rows, _CAP)
    while rows - below > 1:
        middle = (below + rows) // 2
        below, rows = (below, middle) if reached(middle) else (middle, rows)
    return rows
