"""Products with a kernel matrix that is computed tile by tile, and never kept.

``tile(x1, x2)`` is the kernel of two sets of inputs, ``tile(x)`` that of one with itself. A tile is
multiplied as soon as it is there, from both sides where it stands for two: every pair of inputs is
computed once. Rows beyond the last are copies of the first, times 0.

Over devices, each keeps its rows of the inputs. Those of the others come by in a ring, half way
round, and what is summed for them goes with them and home at the end: every pair is computed once
(with an even number of devices, those half way round twice), by all devices at once. For a product
``n / 2`` rows of inputs, vector and result go through each link.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from ntk.internal.batched_rows import split_into_blocks

Tile = Callable[..., jax.Array]


def even(n: int, most: int) -> int:
    """The size of the fewest equal parts of n that are at most ``most``."""
    return -(-n // -(-n // most))


def symmetric_product(tile: Tile, x: jax.Array, v: jax.Array, most: int) -> jax.Array:
    """``K v`` [n, q] of the kernel of x [n, ...] with itself."""
    size = even(len(x), most)
    xs, vs = split_into_blocks(x, size), _zero_padded_blocks(v, size)
    total = lax.map(lambda block: _mean_split_product(_again(tile)(block[0]), block[1]), (xs, vs))
    pairs = np.triu_indices(len(xs), 1)
    total, _ = _add_pair_products(tile, xs, xs, vs, vs, pairs, total)
    return total.reshape(-1, v.shape[1])[: len(x)]


def rectangular(tile: Tile, x1: jax.Array, x2: jax.Array, v: jax.Array, most: int) -> jax.Array:
    """``K(x1, x2) v`` [n1, q]."""
    size1, size2 = even(len(x1), most), even(len(x2), most)
    others, vs = split_into_blocks(x2, size2), _zero_padded_blocks(v, size2)

    def row(rows):
        def add(total, block):
            return total + _mean_split_product(_again(tile)(rows, block[0]), block[1]), None

        return lax.scan(add, _zeros_for_rows(rows, v), (others, vs))[0]

    return lax.map(row, split_into_blocks(x1, size1)).reshape(-1, v.shape[1])[: len(x1)]


def tiled_columns(tile: Tile, x1: jax.Array, x2: jax.Array, most: int) -> jax.Array:
    """``K(x1, x2)`` itself [n1, n2], where x2 are few."""
    columns = lax.map(lambda rows: tile(rows, x2), split_into_blocks(x1, even(len(x1), most)))
    return columns.reshape(-1, len(x2))[: len(x1)]


def tiled_diagonal(tile: Tile, x: jax.Array, most: int) -> jax.Array:
    """``K(x_i, x_i)`` [n]."""
    return lax.map(lambda row: tile(row[None])[0, 0], x, batch_size=min(most, len(x)) or None)


def ring(tile: Tile, x: jax.Array, v: jax.Array, most: int, axis: str, devices: int) -> jax.Array:
    """Own rows of ``K v``, in a ``shard_map``; ``x`` and ``v`` are own rows too."""
    size = even(len(x), most)
    xs, vs = split_into_blocks(x, size), _zero_padded_blocks(v, size)
    total = symmetric_product(tile, x, v, most)
    every = np.divmod(np.arange(len(xs) ** 2), len(xs))
    nothing = jnp.zeros_like(vs)

    def come(moving):
        return _shift_devices(moving, axis, devices, -1)

    def step(carry, _):
        total, moving = carry
        xo, vo, theirs = come(moving)
        total, theirs = _add_pair_products(tile, xs, xo, vs, vo, every, total, theirs)
        return (total, (xo, vo, theirs)), None

    half = (devices - 1) // 2
    carry = nothing, (xs, vs, nothing)
    (mine, moving), _ = lax.scan(step, carry, length=half)
    total += _unblock_rows(mine, total)
    total += _unblock_rows(_shift_devices(moving[2], axis, devices, half), total)
    if devices % 2 == 0:  # the two that are half way round each other each take their own rows
        xo, vo, _ = come(moving)
        whole, others = (a.reshape(-1, *a.shape[2:]) for a in (xo, vo))
        total += rectangular(tile, x, whole, others, most)
    return total


def map_over_mesh(mesh: Mesh, function: Callable, into: tuple, out: Any) -> Callable:
    """``function`` of a device's own parts."""
    return jax.shard_map(function, mesh=mesh, in_specs=into, out_specs=out, check_vma=False)


def _add_pair_products(tile, xs, others, vs, ws, pairs, total, theirs=None):
    """For every pair (i, j) of blocks ``K_ij w_j`` added to row i, and ``K_ij' v_i`` to row j.

    Of ``total``, both, where ``theirs`` is None.
    """
    one = theirs is None

    def step(carry, pair):
        total, theirs = carry
        i, j = pair
        block = _again(tile)(xs[i], others[j])
        total = total.at[i].add(_mean_split_product(block, ws[j]))
        back = _mean_split_product(block.T, vs[i])
        if one:
            return (total.at[j].add(back), None), None
        return (total, theirs.at[j].add(back)), None

    if not len(pairs[0]):
        return total, theirs
    return lax.scan(step, (total, theirs), tuple(map(jnp.asarray, pairs)))[0]


def _again(tile: Tile) -> Tile:
    """Computed again in reverse mode: tiles would be kept, and they are all of K."""
    return jax.checkpoint(tile)


def _mean_split_product(tile, v):
    """``tile @ v``: the tile's mean apart, by which all sums would be large and then cancel.

    Entries of kernels have much in common. On images of MNIST their mean is five times what they
    spread, and the error of the product in float32 is some seven times smaller so.
    """
    mean = lax.stop_gradient(jnp.mean(tile))  # which drops out
    return jnp.matmul(tile - mean, v, precision="highest") + mean * _pairwise_sum(v)[None]


def _pairwise_sum(v):
    """Over rows, two by two: what a long sum loses in one go is the same in all rows of ``K v``."""
    while len(v) > 1:
        v = jnp.pad(v, ((0, len(v) % 2), (0, 0)))
        v = v[::2] + v[1::2]
    return v[0]


def _zero_padded_blocks(v, size: int):
    """``v`` [n, q] in blocks [blocks, size, q], zeros at the end."""
    v = jnp.pad(v, ((0, -len(v) % size), (0, 0)))
    return v.reshape(-1, size, v.shape[1])


def _zeros_for_rows(rows, v):
    return jnp.zeros((len(rows), v.shape[1]), v.dtype)


def _unblock_rows(of_blocks, total):
    return of_blocks.reshape(-1, total.shape[1])[: len(total)]


def _shift_devices(tree, axis: str, devices: int, distance: int):
    """Every device's to the one ``distance`` further on."""
    way = [(i, (i + distance) % devices) for i in range(devices)]
    return jax.tree.map(lambda leaf: lax.ppermute(leaf, axis, way), tree)
