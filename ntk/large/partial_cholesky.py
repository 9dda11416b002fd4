"""Partial Cholesky factors of kernels, from a few columns: ``K = F F' + residual``, residual >= 0.

Pivots are drawn in blocks, with probabilities proportional to the residual diagonal, so rows that
earlier columns explain are left out. The trace of the residual is then nearly that of the best
approximation of a somewhat smaller rank. A factor of rank r computes ``n r`` entries of K.
"""

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from ntk.internal.checks import concrete, describe, integer, nan_unless, prng_key
from ntk.internal.compile_cache import program
from ntk.internal.products import matmul
from ntk.large.kernel_operator import Operator

_BLOCK = 128  # pivots drawn at a time


class PartialCholesky(NamedTuple):
    """Result of :func:`partial_cholesky`."""

    factor: jax.Array  # F [n, rank]
    residual_diagonal: jax.Array  # [n], the diagonal of K - F F'
    pivots: jax.Array  # [rank], the columns that were taken


def partial_cholesky(K: Operator, rank: int, *, key: chex.PRNGKey) -> PartialCholesky:
    """Compute the randomly pivoted partial Cholesky factor of a kernel: ``F F' <= K``.

    Parameters
    ----------
    K : KernelOperator or EmpiricalOperator
        Symmetric, positive semidefinite.
    rank : int
        Number of columns of F, from 1 to n.
    key : PRNG key
        For the pivots.

    Returns
    -------
    PartialCholesky
        ``residual_diagonal`` is 0 at the pivots. Columns beyond K's rank are 0 up to ``sqrt(eps)``.

    Raises
    ------
    ValueError
        If an argument is out of its range, or the columns show that ``K`` is not finite and
        positive semidefinite. If ``K`` is traced, the factor is NaN then.

    Notes
    -----
    Time: ``n rank`` entries of K and ``n rank^2`` multiply-adds. Memory: the factor, and some
    blocks of 128 columns. Rounding adds ``128 eps`` of the largest entry to the residual. Source:
    Chen, Epperly, Tropp & Webber (2023), "Randomly pivoted Cholesky", Algorithm 2.2 with blocks
    (section 2.3).

    Examples
    --------
    >>> from ntk import KernelOperator
    >>> x = jnp.array([[1.0, 0.0], [0.0, 2.0], [1.0, 2.0]])
    >>> result = partial_cholesky(KernelOperator(lambda a, b: a @ b.T, x), 2, key=jax.random.key(0))
    >>> result.factor @ result.factor.T
    Array([[1., 0., 1.],
           [0., 4., 4.],
           [1., 4., 5.]], dtype=float...)
    """
    check_square_operator(K)
    prng_key("key", key)
    rank = integer("rank", rank, 1)
    if rank > K.shape[0]:
        raise ValueError(f"rank: expected at most the {K.shape[0]} rows of K, got {rank}.")
    run = functools.partial(_factor_partially, rank=rank)
    factorization, good = program(run, K, key)(K, key)
    check_semidefinite(good)
    return factorization


def check_square_operator(K: Operator) -> None:
    """Raise ``ValueError`` if ``K`` is not a square operator."""
    if not isinstance(K, Operator):
        got = type(K).__name__
        raise ValueError(f"K: expected a KernelOperator or an EmpiricalOperator, got a {got}.")
    if K.shape[0] != K.shape[1]:
        raise ValueError(f"K: expected as many rows as columns, got shape {K.shape}.")


def check_preconditioner(preconditioner: PartialCholesky | None, n: int) -> None:
    """Raise ``ValueError`` if ``preconditioner`` does not fit a kernel with ``n`` rows."""
    if preconditioner is None:
        return
    if not isinstance(preconditioner, PartialCholesky):
        got = describe(preconditioner)
        raise ValueError(f"preconditioner: expected the result of partial_cholesky, got {got}.")
    if (rows := len(preconditioner.factor)) != n:
        raise ValueError(f"preconditioner: expected {n} rows, as K has, got {rows}.")


def check_semidefinite(good: jax.Array) -> None:
    """Raise ``ValueError`` if a concrete ``good`` is false: K is not positive semidefinite."""
    if concrete(good) and not good:
        raise ValueError(
            "K: expected a positive semidefinite kernel with finite entries, got one with a "
            "product that is negative or NaN."
        )


def _factor_partially(K: Operator, key, rank: int) -> tuple[PartialCholesky, jax.Array]:
    """Return the factor, and whether it is finite."""
    n = K.shape[0]
    count = -(-rank // _BLOCK)
    size = -(-rank // count)
    whole_diagonal = K.diagonal()
    dtype, largest = whole_diagonal.dtype, jnp.max(whole_diagonal)
    noise = size * jnp.finfo(dtype).eps * largest

    def step(carry, i):
        factor, residual = carry
        # The largest values of log(weight) + Gumbel noise are a draw without replacement.
        chance = jnp.log(jnp.where(residual > noise, residual, 0))
        chance += jax.random.gumbel(jax.random.fold_in(key, i), (n,), dtype)
        pivots = jax.lax.top_k(chance, size)[1]
        good = (residual[pivots] > noise) & (i * size + jnp.arange(size) < rank)
        columns = K.columns(pivots).astype(dtype)
        columns -= matmul(factor, factor[pivots].T)
        columns = jnp.where(good, columns, 0)
        # Pivots without a significant residual get the identity, so that their columns stay 0.
        corner = jnp.where(good[:, None], columns[pivots], 0)
        corner = (corner + corner.T) / 2 + jnp.diag(jnp.where(good, noise, 1))
        root = jax.lax.linalg.cholesky(corner, symmetrize_input=False)
        new = jax.lax.linalg.triangular_solve(
            root, columns, left_side=False, lower=True, transpose_a=True
        )
        residual = jnp.maximum(residual - jnp.sum(new**2, axis=1), 0)
        residual = residual.at[jnp.where(good, pivots, n)].set(0, mode="drop")
        return (jax.lax.dynamic_update_slice(factor, new, (0, i * size)), residual), pivots

    start = jnp.zeros((n, count * size), dtype), whole_diagonal
    (factor, residual), pivots = jax.lax.scan(step, start, jnp.arange(count))
    factor = nan_unless(jnp.min(whole_diagonal) >= -jnp.abs(noise), factor[:, :rank])
    factorization = PartialCholesky(factor, residual, pivots.reshape(-1)[:rank])
    return factorization, jnp.isfinite(factor).all()
