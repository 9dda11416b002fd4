"""Elementwise functions of all pairs of positions, strip by strip of a tile.

XLA does not fuse a loop with later operations. Fused, each later layer would compute its own arc
cosines, down to the data. A strip also stays in the processor's cache.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

ENTRIES = 2**15  # of a strip, at most where the shape allows

Arrays = Sequence[jax.Array]


def map_strips(
    fn: Callable[..., tuple[jax.Array, ...]],
    entries: Arrays,
    *,
    left: Arrays = (),
    right: Arrays = (),
    pairs: Arrays = (),
    full: bool,
) -> tuple[jax.Array, ...]:
    """Return ``fn(entries, left, right, pairs)`` of broadcasting arrays, shaped like the entries.

    ``entries`` are [G, A, B] as in :mod:`ntk.networks.windows`; ``full`` names their layout.
    ``left`` and ``right`` are of single inputs, [n1, P] and [n2, P]; ``pairs`` are [n1, n2].
    """
    shape = entries[0].shape
    groups, a, b = shape
    if not full and groups > 1:  # some positions at a time
        count = count_loop_parts(groups, a * b)
        entries = [x.reshape(count, -1, a, b) for x in entries]
        left = [x.T.reshape(count, -1, a, 1) for x in left]
        right = [x.T.reshape(count, -1, 1, b) for x in right]
        return _map_and_reshape(lambda x: fn(*x, pairs), (entries, left, right), shape)
    if not full:  # some inputs
        count = count_loop_parts(a, b)
        rows = (
            [x.reshape(count, -1, b) for x in (*entries, *pairs)],
            [x.reshape(count, -1, 1) for x in left],
        )
        right, k = [x.reshape(1, b) for x in right], len(entries)
        return _map_and_reshape(lambda x: fn(x[0][:k], x[1], right, x[0][k:]), rows, shape)
    n1, n2 = (side[0].shape[0] if side else 0 for side in (left, right))
    if pairs:
        n1, n2 = pairs[0].shape
    n1, n2 = n1 or 1, n2 or 1
    count = n1 * count_loop_parts(a // n1, b)  # a part of one input's positions
    entries = [x.reshape(count, -1, n2, b // n2) for x in entries]
    left = [x.reshape(count, -1, 1, 1) for x in left]
    pairs = [jnp.repeat(x, count // n1, 0).reshape(count, 1, n2, 1) for x in pairs]
    right = [x.reshape(1, n2, -1) for x in right]
    return _map_and_reshape(lambda x: fn(x[0], x[1], right, x[2]), (entries, left, pairs), shape)


def _map_and_reshape(fn, arrays, shape) -> tuple[jax.Array, ...]:
    return tuple(x.reshape(shape) for x in jax.lax.map(fn, arrays))


def count_loop_parts(length: int, per_entry: int) -> int:
    """Return the fewest equal parts of an axis, each small enough for a strip.

    An entry has ``per_entry`` numbers. There are at least two parts, or the loop would vanish.
    """
    divisors = [k for k in range(2, length + 1) if length % k == 0] or [1]
    return next((k for k in divisors if length // k * per_entry <= ENTRIES), divisors[-1])
