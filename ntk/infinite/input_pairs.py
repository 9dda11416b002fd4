"""All pairs of two sets of inputs: their angles, exactly.

An angle theta is stored as ``p = (1 - cos theta) / 2`` and ``q = (1 + cos theta) / 2``, both to
full relative precision. Kernels with a kink have slopes of ``1 / theta``, so a rounded Gram matrix
would lose half of the digits of near-duplicates.
"""

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
    p, q = (jnp.where(known, x / jnp.where(known, total, 1), 0.5) for x in (apart, along))
    return p, q


def half_chord_errors(a: UnitRows, b: UnitRows, p: chex.Array, q: chex.Array) -> jax.Array:
    """Return a bound of the error of the smaller one of p and q, which the larger one shares."""
    # Rounded are unit rows (`eps sqrt(pq)`), the quotient (three times) and the low products.
    eps = float(jnp.finfo(p.dtype).eps)
    low = (root((rows.low**2).sum(1)) for rows in (a, b))
    error = eps * (2.5 * jnp.sqrt(p * q) + jnp.add.outer(*low) + 4 * eps)
    return jax.lax.stop_gradient(error)


def pad_rows(x: chex.Array | None) -> jax.Array | None:
    """Return ``x`` [n, d] padded with copies of its last row, so that few shapes are compiled.

    The padded length is a power of two up to one tile, and whole tiles beyond, up to 8.
    """
    if x is None or len(x) > 8 * CPU_TILE:
        return x
    n = len(x)
    rows = max(16, 1 << (n - 1).bit_length()) if n <= CPU_TILE else n + -n % CPU_TILE
    return jnp.asarray(np.pad(np.asarray(x), ((0, rows - len(x)), (0, 0)), "edge"))


def same_inputs(i: Any, j: Any, size1: int, size2: int) -> jax.Array:
    """Return [size1, size2]: whether an input meets itself, in the tile that begins at (i, j)."""
    return (i + jnp.arange(size1))[:, None] == (j + jnp.arange(size2))[None]
