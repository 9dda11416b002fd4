"""``P = D + F F'``, close to a kernel with its penalty, with a cheap inverse.

F is a partial Cholesky factor. D is the residual diagonal, raised to its mean (it is 0 at pivots),
plus the penalty. By Woodbury's identity, ``P^-1 = D^-1 - D^-1 F R^-T R^-1 F' D^-1`` for
``R R' = I + F' D^-1 F``.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ntk.internal.products import matmul
from ntk.large.partial_cholesky import PartialCholesky

_ROWS = 4096  # of the factor that are scaled at a time


class Preconditioner(NamedTuple):
    """``D + F F'``."""

    diagonal: jax.Array  # D [n], positive
    factor: jax.Array  # F [n, r]; r may be 0
    root: jax.Array  # R [r, r], lower triangular


def factor_and_residual(partial: PartialCholesky | None, diagonal) -> tuple[jax.Array, jax.Array]:
    """Return F and the residual diagonal; without a factor F is empty."""
    if partial is None:
        return jnp.zeros((len(diagonal), 0), diagonal.dtype), diagonal
    return partial.factor, partial.residual_diagonal


def ridge_preconditioner(partial: PartialCholesky | None, diagonal, penalty) -> Preconditioner:
    """Return P for ``K + penalty I``; without a factor it is K's ``diagonal`` [n]."""
    factor, residual = factor_and_residual(partial, diagonal)
    D = jnp.maximum(residual, jnp.mean(residual)) + penalty
    return make_preconditioner(factor, D, jnp.max(diagonal))


def make_preconditioner(factor, diagonal, largest) -> Preconditioner:
    """Return P from D, raised above the rounding of entries up to ``largest``."""
    floor = 100 * jnp.finfo(diagonal.dtype).eps * largest
    diagonal = jnp.maximum(diagonal, jnp.where(floor > 0, floor, 1))
    gram = _weighted_gram(factor, diagonal) + jnp.eye(factor.shape[1], dtype=factor.dtype)
    return Preconditioner(diagonal, factor, jax.lax.linalg.cholesky(gram, symmetrize_input=False))


def solve(P: Preconditioner, v: jax.Array) -> jax.Array:
    """Return ``P^-1 v`` for v [n, q]."""
    scaled = v / P.diagonal[:, None]
    inner = matmul(P.factor.T, scaled)
    for transposed in (False, True):
        inner = jax.lax.linalg.triangular_solve(
            P.root, inner, left_side=True, lower=True, transpose_a=transposed
        )
    return scaled - matmul(P.factor, inner) / P.diagonal[:, None]


def preconditioner_product(P: Preconditioner, v: jax.Array) -> jax.Array:
    """Return ``P v`` for v [n, q]."""
    return P.diagonal[:, None] * v + matmul(P.factor, matmul(P.factor.T, v))


def inverse_diagonal(P: Preconditioner) -> jax.Array:
    """Return the diagonal of ``P^-1`` [n]."""

    def of_row(row):
        half = jax.lax.linalg.triangular_solve(P.root, row[:, None], left_side=True, lower=True)
        return jnp.sum(half**2)

    if not P.factor.shape[1]:
        return 1 / P.diagonal
    explained = jax.lax.map(of_row, P.factor, batch_size=min(_ROWS, len(P.factor)))
    return 1 / P.diagonal - explained / P.diagonal**2


def sample_with_covariance(P: Preconditioner, key, count: int) -> jax.Array:
    """Draw from N(0, P), [n, count]."""
    one, two = jax.random.split(key)
    n, r = P.factor.shape
    inner = jax.random.normal(one, (r, count), P.diagonal.dtype)
    own = jax.random.normal(two, (n, count), P.diagonal.dtype)
    return jnp.sqrt(P.diagonal)[:, None] * own + matmul(P.factor, inner)


def _weighted_gram(factor, diagonal) -> jax.Array:
    """Return ``F' D^-1 F``, without a scaled copy of F."""
    n, r = factor.shape
    size = min(_ROWS, n)

    def add(i, total):
        start = jnp.minimum(i * size, n - size)  # the last block is shifted back, and masked
        rows = jax.lax.dynamic_slice_in_dim(factor, start, size)
        weights = 1 / jax.lax.dynamic_slice_in_dim(diagonal, start, size)
        weights = jnp.where(start + jnp.arange(size) >= i * size, weights, 0)
        return total + matmul(rows.T, rows * weights[:, None])

    return jax.lax.fori_loop(0, -(-n // size), add, jnp.zeros((r, r), factor.dtype))
