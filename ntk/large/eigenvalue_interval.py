"""An interval for the smallest eigenvalue of a large kernel, by block Lanczos from random starts.

Lanczos on K itself finds the upper end of the spectrum. The lower end is crowded, and takes
thousands of products. So we precondition with ``P = F F' + s I``: F is a partial Cholesky factor,
and s is the mean of the residual diagonal. The eigenvalues of ``P^-1 K`` are then spread over a
factor of some tens at most. Let mu be the smallest of them; then ``K >= mu P >= mu s I``.

- ``upper`` is a **certificate**, rounding aside: the Rayleigh quotient of a computed vector.
- ``lower`` is ``s`` times a lower bound of mu that **holds with probability 1 - failure**, over the
  random starts, for every K. By Kuczynski & Wozniakowski (1992), Theorem 4.2, the largest
  Ritz value theta of a positive semidefinite C after k steps from one random start has

      P[theta < (1 - e) lambda_max] <= 1.648 sqrt(n) exp(-sqrt(e) (2k - 1)).

  All b starts of a block would have to fail: the probability is raised to the power b. We apply
  it to C and to ``lambda_max(C) I - C``, which has the same Lanczos spaces: it bounds both ends.

``C = P^-1/2 K P^-1/2`` is not formed. A start z in its space is ``P^-1/2 z`` here, and vectors are
orthonormal in the product ``u' P v``.
"""

import functools
import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from ntk.internal.checks import integer, nan_unless, prng_key, real_number
from ntk.internal.compile_cache import program
from ntk.internal.products import matmul
from ntk.large.kernel_operator import Operator
from ntk.large.partial_cholesky import (
    PartialCholesky,
    check_preconditioner,
    check_semidefinite,
    check_square_operator,
)
from ntk.large.preconditioner import (
    factor_and_residual,
    make_preconditioner,
    preconditioner_product,
    sample_with_covariance,
    solve,
)


class EigenvalueInterval(NamedTuple):
    """Result of :func:`eigenvalue_interval`: lower <= lambda_min <= upper."""

    lower: jax.Array  # [], at least 0; a bound with probability 1 - failure over the key
    upper: jax.Array  # [], a Rayleigh quotient: certain, except for rounding
    estimate: jax.Array  # [], s times the smallest Ritz value: the limit of lower, not a bound
    vector: jax.Array  # [n], of unit length: v'Kv is `upper`


def eigenvalue_interval(
    K: Operator,
    *,
    key: chex.PRNGKey,
    preconditioner: PartialCholesky | None = None,
    steps: int = 50,
    block: int = 8,
    failure: float = 1e-3,
) -> EigenvalueInterval:
    """Return an interval with the smallest eigenvalue of a positive semidefinite kernel.

    Parameters
    ----------
    K : KernelOperator or EmpiricalOperator
        Symmetric, positive semidefinite.
    key : PRNG key
        For the random starts.
    preconditioner : PartialCholesky, optional
        Of K. Without it most kernels take far more steps.
    steps : int
        Passes over all pairs of inputs, at least 2; ``steps * block`` at most n.
    block : int
        Number of starts.
    failure : float
        Probability that ``lower`` is not a lower bound, between 0 and 1.

    Raises
    ------
    ValueError
        If an argument is out of its range, or K turns out not to be finite and positive
        semidefinite. If K is traced, the result is NaN then.

    Notes
    -----
    Memory: two bases of ``steps * block`` vectors. The ratio of ``upper`` and ``estimate`` is about
    1.0 to 1.5 if the factor leaves an even diagonal. Source: Kuczynski & Wozniakowski (1992),
    "Estimating the largest eigenvalue by the power and Lanczos algorithms with a random start".

    Examples
    --------
    >>> from ntk import KernelOperator
    >>> K = KernelOperator(lambda a, b: a @ b.T, jnp.diag(jnp.arange(1.0, 11.0)))
    >>> result = eigenvalue_interval(K, key=jax.random.key(0), steps=10, block=1)
    >>> bool(result.lower <= 1), result.upper.round(3)
    (True, Array(1., dtype=float...))
    """
    check_square_operator(K)
    prng_key("key", key)
    steps, block = integer("steps", steps, 2), integer("block", block, 1)
    n = K.shape[0]
    if steps * block > n:
        got = f"{steps} times {block}"
        raise ValueError(f"steps: expected steps times block at most the {n} rows of K, got {got}.")
    if not 0 < real_number("failure", failure) < 1:
        raise ValueError(f"failure: expected a probability between 0 and 1, got {failure}.")
    check_preconditioner(preconditioner, n)
    missed = missed_part(n, steps, block, float(failure) / 2)
    run = functools.partial(_interval, steps=steps, block=block, missed=missed)
    interval = program(run, K, preconditioner, key)(K, preconditioner, key)
    check_semidefinite(jnp.isfinite(interval.upper))
    return interval


def missed_part(n: int, steps: int, block: int, failure: float) -> float:
    """Return e of the module's bound: the relative deficit of the largest Ritz value."""
    root = (math.log(1.648 * math.sqrt(n)) - math.log(failure) / block) / (2 * steps - 1)
    return min(root**2, 1.0)


def _interval(K, preconditioner, key, steps, block, missed) -> EigenvalueInterval:
    diagonal = K.diagonal()
    factor, residual = factor_and_residual(preconditioner, diagonal)
    level = jnp.full_like(diagonal, jnp.mean(residual))
    P = make_preconditioner(factor, level, jnp.max(diagonal))
    level = P.diagonal[0]
    V, PV, T = _lanczos_basis(K, P, sample_with_covariance(P, key, block), steps)
    # Dropped vectors are 0; adding `far` makes their Ritz values the largest.
    live = jnp.diagonal(matmul(V.T, PV)) > 0.5
    far = 2 * jnp.sum(jnp.abs(T)) + 1
    values = jnp.linalg.eigvalsh(T + jnp.diag(jnp.where(live, 0, far)))
    low = values[0]
    high = jnp.max(jnp.where(values < far / 2, values, low))
    # lambda_max is at most high / (1 - e). Lanczos misses at most a part e of the spread.
    share = min(missed, 0.999)
    lower = low - share / (1 - share) * (high / (1 - share) - low)
    lower = jnp.where(missed < 1, jnp.maximum(lower * level, 0), 0)
    vector = matmul(V, _least_combination(T, matmul(V.T, V)))
    vector = vector / jnp.linalg.norm(vector)
    upper = jnp.vdot(vector, K @ vector)
    # The proof of `lower` needs K >= 0, so a quotient below 0 by more than rounding gives NaN.
    fits = upper >= -jnp.sqrt(jnp.finfo(upper.dtype).eps) * jnp.max(jnp.abs(diagonal))
    return EigenvalueInterval(*nan_unless(fits, (lower, upper, low * level, vector)))


def _least_combination(T, G):
    """Return coefficients u that nearly minimise ``u'Tu / u'Gu``, the Rayleigh quotient of K."""
    sizes, turn = jnp.linalg.eigh(G)
    # Combinations much shorter than the longest are long in P, so K is not small there.
    significant = sizes > 1e-3 * sizes[-1]
    turn = turn * jnp.where(significant, 1 / jnp.sqrt(jnp.where(significant, sizes, 1)), 0)[None]
    inner = matmul(turn.T, matmul(T, turn))
    far = 2 * jnp.sum(jnp.abs(inner)) + 1
    _, vectors = jnp.linalg.eigh(inner + jnp.diag(jnp.where(significant, 0, far)))
    return matmul(turn, vectors[:, 0])


def _lanczos_basis(K, P, start, steps):
    """Return bases V and P V [n, steps block] with ``V' P V = I``, and ``T = V' K V``."""
    n, b = start.shape
    V = jnp.zeros((n, steps * b), start.dtype)

    def step(carry, j):
        V, PV, T, v, size = carry
        for _ in range(2):  # the second time removes rounding errors of the first
            v = _orthonormalize(P, v - matmul(V, matmul(PV.T, v)), size)
            size = jnp.ones(b, v.dtype)
        image = (K @ v).astype(v.dtype)
        V = jax.lax.dynamic_update_slice(V, v, (0, j * b))
        PV = jax.lax.dynamic_update_slice(PV, preconditioner_product(P, v), (0, j * b))
        T = jax.lax.dynamic_update_slice(T, matmul(V.T, image), (0, j * b))
        following = solve(P, image)
        return (V, PV, T, following, jnp.sqrt(jnp.sum(image * following, axis=0))), None

    first = solve(P, start)
    none = jnp.zeros((steps * b, steps * b), start.dtype)
    carry = V, V, none, first, jnp.sqrt(jnp.sum(start * first, axis=0))
    (V, PV, T, *_), _ = jax.lax.scan(step, carry, jnp.arange(steps))
    upper = jnp.triu(T)
    return V, PV, upper + jnp.triu(upper, 1).T


def _orthonormalize(P, v, size):
    """Return combinations of columns of P-lengths ``size``, orthonormal in ``u' P v``, or 0."""
    eps = jnp.finfo(v.dtype).eps
    v = v / jnp.where(size > 0, size, 1)[None]
    gram = matmul(v.T, preconditioner_product(P, v))
    values, vectors = jnp.linalg.eigh((gram + gram.T) / 2)
    least = jnp.maximum((1000 * eps) ** 2, 10 * len(values) * eps * values[-1])
    significant = values > least
    scale = jnp.where(significant, 1 / jnp.sqrt(jnp.where(significant, values, 1)), 0)
    return matmul(v, vectors * scale[None])
