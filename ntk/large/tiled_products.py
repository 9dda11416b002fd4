"""Products with a kernel matrix that is computed tile by tile, and never stored.

``tile(x1, x2)`` is the kernel of two sets of inputs, ``tile(x)`` of one set with itself. A tile is
multiplied at once, from both sides if it also represents its transpose: every pair of inputs is
computed once. Rows beyond the last are copies of the first, times 0. Reverse mode computes tiles
again (``jax.checkpoint``), because all tiles together are as large as K.

Each device has its rows of the inputs. The rows of the other devices pass by in a ring, half way
round. Their sums travel with them and then return. So all devices compute every pair once (with an
even number of devices, pairs half way round twice).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ntk.internal.batched_rows import split_into_blocks, zero_padded_blocks
from ntk.internal.products import matmul

Tile = Callable[..., jax.Array]


def even(n: int, most: int) -> int:
    """Return the size of the fewest equal parts of n that are at most ``most``."""
    return -(-n // -(-n // most))


def symmetric_product(tile: Tile, x: jax.Array, v: jax.Array, most: int) -> jax.Array:
    """Return ``K v`` [n, q] of the kernel of x [n, ...] with itself."""
    size = even(len(x), most)
    xs, vs = split_into_blocks(x, size), zero_padded_blocks(v, size)
    kept = jax.checkpoint(tile)
    total = lax.map(lambda block: _mean_split_product(kept(block[0]), block[1]), (xs, vs))
    pairs = np.triu_indices(len(xs), 1)
    total, _ = _add_pair_products(tile, xs, xs, vs, vs, pairs, total)
    return _unblock_rows(total, v)


def rectangular(tile: Tile, x1: jax.Array, x2: jax.Array, v: jax.Array, most: int) -> jax.Array:
    """Return ``K(x1, x2) v`` [n1, q]."""
    size1, size2 = even(len(x1), most), even(len(x2), most)
    others, vs = split_into_blocks(x2, size2), zero_padded_blocks(v, size2)

    def row(rows):
        def add(total, block):
            return total + _mean_split_product(jax.checkpoint(tile)(rows, block[0]), block[1]), None

        start = jnp.zeros((len(rows), v.shape[1]), v.dtype)
        return lax.scan(add, start, (others, vs))[0]

    return lax.map(row, split_into_blocks(x1, size1)).reshape(-1, v.shape[1])[: len(x1)]


def tiled_columns(tile: Tile, x1: jax.Array, x2: jax.Array, most: int) -> jax.Array:
    """Return ``K(x1, x2)`` itself [n1, n2], for few x2."""
    columns = lax.map(lambda rows: tile(rows, x2), split_into_blocks(x1, even(len(x1), most)))
    return columns.reshape(-1, len(x2))[: len(x1)]


def tiled_diagonal(tile: Tile, x: jax.Array, most: int) -> jax.Array:
    """Return ``K(x_i, x_i)`` [n]."""
    return lax.map(lambda row: tile(row[None])[0, 0], x, batch_size=min(most, len(x)) or None)


def ring(tile: Tile, x: jax.Array, v: jax.Array, most: int, axis: str, devices: int) -> jax.Array:
    """Return this device's rows of ``K v`` in a ``shard_map``, for its rows of ``x`` and ``v``."""
    size = even(len(x), most)
    xs, vs = split_into_blocks(x, size), zero_padded_blocks(v, size)
    total = symmetric_product(tile, x, v, most)
    every = np.divmod(np.arange(len(xs) ** 2), len(xs))
    nothing = jnp.zeros_like(vs)

    def step(carry, _):
        total, moving = carry
        xo, vo, theirs = _shift_devices(moving, axis, devices, -1)
        total, theirs = _add_pair_products(tile, xs, xo, vs, vo, every, total, theirs)
        return (total, (xo, vo, theirs)), None

    half = (devices - 1) // 2
    carry = nothing, (xs, vs, nothing)
    (mine, moving), _ = lax.scan(step, carry, length=half)
    total += _unblock_rows(mine, total)
    total += _unblock_rows(_shift_devices(moving[2], axis, devices, half), total)
    if devices % 2 == 0:  # two devices half way round from each other each compute their rows
        xo, vo, _ = _shift_devices(moving, axis, devices, -1)
        whole, others = (a.reshape(-1, *a.shape[2:]) for a in (xo, vo))
        total += rectangular(tile, x, whole, others, most)
    return total


def _add_pair_products(tile, xs, others, vs, ws, pairs, total, theirs=None):
    """Add ``K_ij w_j`` to row i for every pair (i, j) of blocks, and ``K_ij' v_i`` to row j.

    The second sum goes to ``theirs``, or to ``total`` too if it is None.
    """
    one = theirs is None

    def step(carry, pair):
        total, theirs = carry
        i, j = pair
        block = jax.checkpoint(tile)(xs[i], others[j])
        total = total.at[i].add(_mean_split_product(block, ws[j]))
        back = _mean_split_product(block.T, vs[i])
        if one:
            return (total.at[j].add(back), None), None
        return (total, theirs.at[j].add(back)), None

    if not len(pairs[0]):
        return total, theirs
    return lax.scan(step, (total, theirs), tuple(map(jnp.asarray, pairs)))[0]


def _mean_split_product(tile, v):
    """Return ``tile @ v``, with the tile's mean multiplied separately to avoid cancellation.

    On images of MNIST this makes the error of the product in float32 about seven times smaller.
    """
    mean = lax.stop_gradient(jnp.mean(tile))  # the result does not depend on it
    return matmul(tile - mean, v) + mean * _pairwise_sum(v)[None]


def _pairwise_sum(v):
    """Sum rows pairwise: the error of a long sum would be common to all rows of ``K v``."""
    while len(v) > 1:
        v = jnp.pad(v, ((0, len(v) % 2), (0, 0)))
        v = v[::2] + v[1::2]
    return v[0]


def _unblock_rows(of_blocks, total):
    return of_blocks.reshape(-1, total.shape[1])[: len(total)]


def _shift_devices(tree, axis: str, devices: int, distance: int):
    """Send every device's arrays to the device ``distance`` positions ahead."""
    way = [(i, (i + distance) % devices) for i in range(devices)]
    return jax.tree.map(lambda leaf: lax.ppermute(leaf, axis, way), tree)
