"""All pairs of two sets of inputs: their angles, exactly, and arrays computed tile by tile.

An angle theta is stored as ``p = (1 - cos theta) / 2`` and ``q = (1 + cos theta) / 2``, both to
full relative precision. Kernels with a kink have slopes of ``1 / theta``, so a rounded Gram matrix
would lose half of the digits of near-duplicates.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from ntk.expectations.gaussian import reciprocal, root
from ntk.internal.products import matmul
from ntk.internal.tiles import CPU_TILE


class UnitRows(NamedTuple):
    """Rows of unit norm as ``high + low``; products of ``high`` parts are exact in any order."""

    high: jax.Array  # [n, d], multiples of 2^-25 (float32: 2^-11)
    low: jax.Array  # [n, d]
    square_high: jax.Array  # [n]
    square_low: jax.Array  # [n]; the two add up to the squared norm


def normalize_rows(x: chex.Array, norms: chex.Array) -> UnitRows:
    """Return rows over their norms [n]; rows of norm 0 stay 0."""
    unit = x * reciprocal(norms)[:, None]
    grid = 2.0 ** {8: 25, 4: 11}.get(unit.dtype.itemsize, 4)
    high = jax.lax.stop_gradient(jnp.round(unit * grid) / grid)
    low = unit - high
    return UnitRows(high, low, (high * high).sum(1), (low * (2 * high + low)).sum(1))


def half_chords(a: UnitRows, b: UnitRows) -> tuple[jax.Array, jax.Array]:
    """Return ``((1 - rho) / 2, (1 + rho) / 2)`` [n1, n2], both to full relative precision."""
    high = matmul(a.high, b.high.T)
    one, other = jnp.concatenate([a.high, a.low], 1), jnp.concatenate([b.low, b.high + b.low], 1)
    low = matmul(one, other.T)
    squares_high = a.square_high[:, None] + b.square_high[None]
    squares_low = a.square_low[:, None] + b.square_low[None]
    apart = jnp.maximum((squares_high - 2 * high) + (squares_low - 2 * low), 0)
    along = jnp.maximum((squares_high + 2 * high) + (squares_low + 2 * low), 0)
    # The angle of an input of norm 0 does not matter, because its covariances are 0.
    total = 2 * (squares_high + squares_low)  # apart + along
    known = total > 0.5
    return tuple(
        jnp.where(known, part / jnp.where(known, total, 1), 0.5) for part in (apart, along)
    )  # type: ignore[return-value]


def half_chord_errors(a: UnitRows, b: UnitRows, p: chex.Array, q: chex.Array) -> jax.Array:
    """Return a bound of the error of the smaller one of p and q, which the larger one shares.

    Unit rows are rounded (``eps sqrt(pq)``), the quotient has three roundings, and the products of
    the low parts are rounded as well.
    """
    eps = float(jnp.finfo(p.dtype).eps)
    low = (root((rows.low**2).sum(1)) for rows in (a, b))
    error = eps * (2.5 * jnp.sqrt(p * q) + jnp.add.outer(*low) + 4 * eps)
    return jax.lax.stop_gradient(error)


def assemble(tile: Callable[..., Any], n1: int, n2: int, *, symmetric: bool, size: int) -> Any:
    """Return arrays [n1, n2] from ``tile(i, j, size1, size2)``, a pytree of [size1, size2] blocks.

    If ``symmetric``, only the upper triangle is computed, and the result is exactly symmetric. A
    side's last tile overlaps its neighbour instead of being padded. ``size`` is the maximum number
    of rows and columns of a tile.
    """
    size1, size2 = min(size, n1), min(size, n2)
    if (size1, size2) == (n1, n2):
        whole = tile(0, 0, n1, n2)
        return jax.tree.map(mirror_triangle, whole) if symmetric else whole
    starts1, starts2 = (
        np.minimum(np.arange(0, n, step), n - step) for n, step in ((n1, size1), (n2, size2))
    )
    corners = [(i, j) for i in starts1 for j in starts2 if not symmetric or i <= j]
    # Tiles are recomputed in reverse mode; otherwise every tile would store all its layers.
    compute = jax.checkpoint(functools.partial(tile, size1=size1, size2=size2))

    def step(totals, corner):
        i, j = corner
        blocks = compute(i, j)

        def put(total, block):
            if not symmetric:
                return jax.lax.dynamic_update_slice(total, block, (i, j))
            block = _once(jax.lax.cond(i == j, mirror_triangle, lambda block: block, block))
            total = jax.lax.dynamic_update_slice(total, block, (i, j))
            return jax.lax.dynamic_update_slice(total, block.T, (j, i))

        return jax.tree.map(put, totals, blocks), None

    shapes = jax.eval_shape(compute, 0, 0)
    empty = jax.tree.map(lambda s: jnp.zeros((n1, n2), s.dtype), shapes)
    return jax.lax.scan(step, empty, jnp.asarray(corners))[0]


def pad_rows(x: chex.Array | None) -> jax.Array | None:
    """Return ``x`` [n, d] padded with copies of its last row, so that few shapes are compiled.

    The padded length is a power of two up to one tile, and whole tiles beyond. Inputs of more than
    8 tiles are returned unchanged, because running takes longer than compiling there.
    """
    if x is None or len(x) > 8 * CPU_TILE:
        return x
    n = len(x)
    rows = max(16, 1 << (n - 1).bit_length()) if n <= CPU_TILE else n + -n % CPU_TILE
    return jnp.asarray(np.pad(np.asarray(x), ((0, rows - len(x)), (0, 0)), "edge"))


def mirror_triangle(kernel: chex.Array) -> jax.Array:
    """Return the upper triangle of [..., n, n] on both sides.

    XLA takes minutes to compile a choice by index, ``where(i <= j, ...)``.
    """
    kernel = _once(kernel)
    return jnp.triu(kernel) + jnp.swapaxes(jnp.triu(kernel, 1), -1, -2)


def _once(block: chex.Array) -> jax.Array:
    """Return the block, computed once. Computed for each side, the two may be rounded unequally."""
    return jax.lax.optimization_barrier(block)


def same_inputs(i: Any, j: Any, size1: int, size2: int) -> jax.Array:
    """Return [size1, size2]: whether an input meets itself, in the tile that begins at (i, j)."""
    return (i + jnp.arange(size1))[:, None] == (j + jnp.arange(size2))[None]


def take_rows(rows: Any, start: int | jax.Array, size: int, n: int) -> Any:
    """Return rows ``start .. start + size`` of every leaf with n of them."""
    if size == n:
        return rows
    return jax.tree.map(
        lambda x: jax.lax.dynamic_slice_in_dim(x, start, size) if x.shape[0] == n else x, rows
    )
