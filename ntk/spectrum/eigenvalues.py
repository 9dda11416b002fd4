"""Smallest eigenvalues of kernels: of matrices, and of kernels given as products.

The smallest eigenvalue of a positive definite ``K`` is the largest one of ``K^-1``. Lanczos finds
it in a few dozen steps, with one Cholesky factorisation and two triangular solves per step. If
eigenvalues crowd around the smallest, we use ``K - sigma I`` from just below it. For a kernel given
as ``v -> K v`` we use Lanczos on ``-K``. Eager calls on a CPU use :mod:`ntk.spectrum.on_host`.

In the code, lambda is the smallest eigenvalue of K and v its unit eigenvector. The rows of V are
Lanczos' orthonormal basis, ``T = V A V'`` for ``A = K^-1`` or ``A = -K``, and theta is T's largest
eigenvalue. Reference: Wu & Simon (2000), "Thick-restart Lanczos method for large symmetric
eigenvalue problems". :mod:`ntk.spectrum.certificate` has certified values.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from ntk.internal.checks import concrete
from ntk.internal.compile_cache import fresh
from ntk.internal.products import matmul
from ntk.kernels.functions import as_kernel_matrix
from ntk.kernels.record import Kernels
from ntk.kernels.symmetric import host_matrix, square_matrix, symmetric_matrix
from ntk.spectrum.on_host import BASIS, CYCLES, SMALL, STEP, TRIES, eigenvector_by_lapack
from ntk.spectrum.verified_cholesky import threads

_RESTARTS = 300  # maximum number of restarts of Lanczos for products


class Eigenpair(NamedTuple):
    """Result of :func:`smallest_eigenpair`."""

    value: jax.Array  # [], the Rayleigh quotient of `vector`: lambda, or above it
    vector: jax.Array  # [n], of unit length; [n o] if K is [n, n, o, o], outputs fastest
    residual: jax.Array  # [], |K v - lambda v|: an eigenvalue is within this distance of `value`


def min_eigenvalue(
    K: chex.Array | Kernels | Callable[..., Any], *, x: Any = None, size: int | None = None
) -> jax.Array:
    """Return the smallest eigenvalue of a kernel, ``min_v v'Kv / v'v``, differentiable in ``K``.

    Parameters
    ----------
    K : array [n, n] or [n, n, o, o], :class:`ntk.Kernels` or callable
        Symmetric matrix. A kernel of o outputs is the matrix ``[n o, n o]`` of all pairs of an
        input and an output (``empirical_kernel(..., outputs="full")``). With ``x``, a kernel
        function (:func:`ntk.kernel_matrix`); with ``size``, the product ``v [n] -> K v [n]``. The
        tangent kernel of a record is taken.
    x : array [n, ...], optional
        Inputs, if ``K`` is a kernel function.
    size : int, optional
        n, if ``K`` is a product.

    Returns
    -------
    scalar
        The value; NaN for a traced ``K`` that is not finite and symmetric. The derivative is
        ``v v'``; at a multiple eigenvalue it is one of many subgradients (of -lambda). Second
        derivatives raise NotImplementedError.

    Raises
    ------
    ValueError
        If ``K`` is not a finite non-empty square matrix, symmetric up to rounding, or ``x`` or
        ``size`` is missing or superfluous.

    Notes
    -----
    The error is about one rounding of ``K``, relative ``eps |K| / lambda``, or 1e-11 of lambda
    (float32: 1e-6) if several eigenvalues are that close to it. ``K`` may be indefinite or
    singular. Time: n^3 / 3 and about 50 to 150 times 2 n^2, two or three times that for crowded
    eigenvalues. Eager calls on a CPU use LAPACK, compile nothing, and need one more matrix.
    Elsewhere, eager sizes up to 6 % apart share a compiled program, of five matrices' memory.

    For products see :func:`smallest_eigenpair`; its residual shows whether Lanczos converged. An
    eager call compiles a product each time, so jit the caller.

    Examples
    --------
    >>> K = jnp.array([[2.0, 1.0], [1.0, 2.0]])
    >>> min_eigenvalue(K)
    Array(1., dtype=float...)
    >>> jax.grad(min_eigenvalue)(K)
    Array([[ 0.5, -0.5], [-0.5,  0.5]], dtype=float...)
    >>> min_eigenvalue(lambda v: K @ v, size=2)
    Array(1., dtype=float...)
    >>> min_eigenvalue(lambda x1, x2: x1 @ x2.T, x=jnp.diag(jnp.array([2.0, 3.0])))
    Array(4., dtype=float...)
    """
    return smallest_eigenpair(K, x=x, size=size).value


def smallest_eigenpair(
    K: chex.Array | Kernels | Callable[..., Any], *, x: Any = None, size: int | None = None
) -> Eigenpair:
    """Return the smallest eigenvalue, its unit eigenvector, and the residual ``|K v - lambda v|``.

    Only ``value`` has a derivative. The sign of ``vector`` is arbitrary, and so is the vector
    within the eigenspace of a multiple eigenvalue.

    A product is called about ``sqrt(|K| / gap)`` times the number of digits, where ``gap`` is the
    distance to the next eigenvalue: about ten times if it is well separated, thousands of times at
    the crowded lower end of a smooth kernel. After about 10,000 calls it stops, with a value that
    is too large and a residual that shows this. Memory: 48 vectors.

    Parameters
    ----------
    K, x, size
        As in :func:`min_eigenvalue`.

    Raises
    ------
    ValueError
        If ``K`` is not a finite non-empty square matrix, symmetric up to rounding, or ``x`` or
        ``size`` is missing or superfluous.

    Examples
    --------
    >>> pair = smallest_eigenpair(jnp.diag(jnp.array([3.0, 1.0, 2.0])))
    >>> pair.value, jnp.abs(pair.vector)
    (Array(1., dtype=float...), Array([0., 1., 0.], dtype=float...))
    >>> bool(pair.residual < 1e-6)
    True
    """
    if x is not None or not callable(K):
        if size is not None:
            raise ValueError(f"size: expected None with a matrix or inputs, got {size}.")
        matrix = symmetric_matrix(square_matrix(as_kernel_matrix(K, x)))
        return _eigenpair(_eigenvector_of_matrix, _matrix_product, matrix)
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"size: expected the positive size of the product K, got {size}.")
    # Arrays that K closes over become arguments, so that gradients reach them.
    product, arrays = jax.closure_convert(fresh(K), jnp.zeros(size))
    find = functools.partial(_eigenvector_of_product, product, size)
    return _eigenpair(find, lambda v, arrays: product(v, *arrays), arrays)


def eigenvalues(K: chex.Array | Kernels | Callable[..., Any], *, x: Any = None) -> jax.Array:
    """Return all eigenvalues of a symmetric matrix, ascending: [n, n] -> [n], in about 10 n^3.

    ``K`` and ``x`` are as in :func:`min_eigenvalue`. A kernel ``[n, n, o, o]`` has n o eigenvalues.
    NaN for a traced ``K`` that is not finite and symmetric.

    Raises
    ------
    ValueError
        If ``K`` is not a finite non-empty square matrix, symmetric up to rounding.

    Examples
    --------
    >>> eigenvalues(jnp.array([[2.0, 1.0], [1.0, 2.0]]))
    Array([1., 3.], dtype=float...)
    """
    return jnp.linalg.eigvalsh(symmetric_matrix(square_matrix(as_kernel_matrix(K, x))))


def _matrix_product(v, K):
    return matmul(K, v)


def _differentiable_eigenpair(find, product, arrays) -> Eigenpair:
    return _rayleigh(product, find(arrays), arrays)


@functools.partial(jax.jit, static_argnums=0)
def _rayleigh(product, vector, arrays) -> Eigenpair:
    image = product(vector, arrays)
    value = matmul(vector, image)
    return Eigenpair(value, vector, _scaled_norm(image - value * vector))


_eigenpair = jax.custom_jvp(_differentiable_eigenpair, nondiff_argnums=(0, 1))
# The derivative of `_eigenpair` uses this copy; the copy's derivative, a second one, raises.
_constant_eigenpair = jax.custom_jvp(_differentiable_eigenpair, nondiff_argnums=(0, 1))


@_eigenpair.defjvp
def _(find, product, primals, tangents):
    pair = _constant_eigenpair(find, product, *primals)
    _, slope = jax.jvp(
        lambda arrays: matmul(pair.vector, product(pair.vector, arrays)), primals, tangents
    )
    return pair, Eigenpair(slope, jnp.zeros_like(pair.vector), jnp.zeros_like(pair.residual))


@_constant_eigenpair.defjvp
def _(find, product, primals, tangents):
    raise NotImplementedError("K: expected first derivatives only, got a second derivative.")


def _eigenvector_of_matrix(K: jax.Array) -> jax.Array:
    n = len(K)
    if not concrete(K):
        return _smallest_eigenvector(K)
    matrix = host_matrix(K)
    if matrix is not None:
        with threads(n):
            return jnp.asarray(eigenvector_by_lapack(matrix))
    if n <= SMALL:
        return _smallest_eigenvector(K)
    # Similar sizes share a program, because compilation takes seconds.
    step = max(64, 1 << (n - 1).bit_length() >> 4)
    # Rows whose length is a power of two compete for the same lines of a cache.
    return _smallest_eigenvector(_pad_with_eigenvalue(K, -n % step + 8))[:n]


@functools.partial(jax.jit, static_argnums=1)
def _pad_with_eigenvalue(K: jax.Array, rows: int) -> jax.Array:
    """Return ``K`` with ``rows`` more eigenvalues, not smaller than its own."""
    most = jnp.max(jnp.sum(jnp.abs(K), axis=1))
    n = len(K)
    beyond = jnp.arange(n + rows)[:, None] >= n
    return jnp.pad(K, (0, rows)) + jnp.where(beyond & jnp.eye(n + rows, dtype=bool), most, 0)


@jax.jit
def _smallest_eigenvector(K: jax.Array) -> jax.Array:
    if K.shape[0] <= SMALL:
        return jnp.linalg.eigh(K, symmetrize_input=False)[1][:, 0]
    eps = jnp.finfo(K.dtype).eps
    norm = jnp.max(jnp.sum(jnp.abs(K), axis=1))
    K = K / jnp.where(norm > 0, norm, 1)

    def enough(theta, shift):
        # An error r of theta is an error r / theta^2 of lambda = 1 / theta - shift. With a shift,
        # lambda is negative, 0 to rounding, or crowded, so the error is not relative to lambda.
        value = jnp.abs(1 / theta - shift)
        allowed = jnp.maximum(_relative_tolerance(eps) * value, jnp.where(shift == 0, 0, eps))
        return jnp.maximum(allowed * theta, 10 * eps) * theta

    def unfinished(carry):
        _, theta, residual, shift, tries = carry
        return (residual > enough(theta, shift)) & (tries < TRIES)  # false for NaN

    def nearer(carry):
        # Eigenvalues that are crowded relative to 0 are far apart relative to a close shift.
        vector, theta, residual, shift, tries = carry
        value, error = 1 / theta - shift, residual / theta**2
        first = tries == 0
        distance = jnp.where(first, 0, 2 * error + 20 * eps)
        factor, shift = _shifted_cholesky(K, jnp.where(first, 0, value), distance, shift)
        solve = _cholesky_solver(factor)
        guess = vector + 0.1 * _random_vector(tries, len(K), K.dtype)
        vector, theta, residual = _lanczos(solve, guess, lambda t, _: enough(t, shift), CYCLES)
        # One more step removes components of distant eigenvalues.
        vector = solve(vector)
        return vector / _scaled_norm(vector), theta, residual, shift, tries + 1

    one = jnp.ones((), K.dtype)
    start = jnp.zeros(len(K), K.dtype), one, jnp.inf * one, 4 * one, 0
    return jax.lax.while_loop(unfinished, nearer, start)[0]


def _eigenvector_of_product(product, size: int, arrays) -> jax.Array:
    dtype = jnp.zeros(()).dtype
    eps = jnp.finfo(dtype).eps

    def enough(theta, norm):
        return jnp.maximum(_relative_tolerance(eps) * jnp.abs(theta), 10 * eps * norm)

    start = _random_vector(0, size, dtype)
    return _lanczos(lambda v: -product(v, *arrays), start, enough, _RESTARTS)[0]


def _scaled_norm(v) -> jax.Array:
    """Return the length of a vector, also if squares of its entries overflow or underflow."""
    largest = jnp.max(jnp.abs(v))
    return largest * jnp.linalg.norm(v / jnp.where(largest > 0, largest, 1))


def _relative_tolerance(eps) -> float:
    return max(1e-11, 10 * float(eps))


def _random_vector(i, n: int, dtype) -> jax.Array:
    v = jax.random.normal(jax.random.fold_in(jax.random.key(0), i), (n,), dtype)
    return v / _scaled_norm(v)


def _shifted_cholesky(K, value, distance, limit):
    """Return ``U`` of ``U' U = K + shift I``, |K| <= 1, and ``shift = distance - value``.

    The distance grows until there is a factor; the shift ``limit`` always suffices. The factor is
    NaN only if ``K`` has a NaN or an infinity.
    """
    smallest = 10 * jnp.finfo(K.dtype).eps

    def cholesky(shift):
        diagonal = jnp.arange(len(K))
        shifted = K.at[diagonal, diagonal].add(shift)
        # LAPACK stores columns. With both transposes XLA need not rearrange K or the factor.
        return jax.lax.linalg.cholesky(shifted.T, symmetrize_input=False).T

    def failed(carry):
        factor, shift, _ = carry
        return jnp.isnan(factor[-1, -1]) & (shift < limit)

    def retry(carry):
        distance = jnp.maximum(16 * carry[2], smallest)
        shift = jnp.minimum(distance - value, limit)
        return cholesky(shift), shift, distance

    shift = jnp.minimum(distance - value, limit)
    return jax.lax.while_loop(failed, retry, (cholesky(shift), shift, distance))[:2]


def _cholesky_solver(U):
    """Return ``v -> (U' U)^-1 v`` by matrix-vector products, 4 times as fast as triangular solves.

    The strips right of the inverted diagonal blocks are stored, because a loop would copy slices at
    every step. Every strip is compiled; twelve are nearly as fast as more.
    """
    n = U.shape[0]
    size = max(128, -(-n // 12))
    strips = []
    for i in range(0, n, size):
        j = min(i + size, n)
        inverse = jax.lax.linalg.triangular_solve(
            U[i:j, i:j], jnp.eye(j - i, dtype=U.dtype), left_side=True, lower=False
        )
        strips.append((j - i, inverse, U[i:j, j:]))

    def solve(v):
        parts = []
        for size, inverse, right in strips:
            parts.append(matmul(v[:size], inverse))
            v = v[size:] - matmul(parts[-1], right)
        done = jnp.zeros(0, v.dtype)
        for part, (_, inverse, right) in zip(reversed(parts), reversed(strips), strict=True):
            done = jnp.concatenate([matmul(inverse, part - matmul(right, done)), done])
        return done

    return solve


def _lanczos(matvec, start, enough, cycles: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the largest eigenvalue of a symmetric ``matvec``: vector [n], theta, residual.

    It stops at a residual of ``enough(theta, largest |theta|)``, or after ``cycles`` restarts.
    """
    n, dtype = len(start), start.dtype
    m = min(n, BASIS)
    keep = max(m // 3, 1)
    eps = jnp.finfo(dtype).eps
    place = jnp.arange(m)

    def expand(j, carry):
        V, T, v, _ = carry
        V = V.at[j].set(v)
        w = matvec(v)
        h = matmul(V, w)  # T's column j, with the coupling to vectors from before a restart
        scale = _scaled_norm(w)
        w = w - matmul(h, V)
        # In an invariant subspace w is noise; a random direction leads to the other subspaces.
        exhausted = _scaled_norm(w) <= 10 * eps * scale
        w = jnp.where(exhausted, _random_vector(j + 1, n, dtype), w)
        again = matmul(V, w)
        w = w - matmul(again, V)
        length = _scaled_norm(w)
        h = h + jnp.where(exhausted, 0, again)
        T = T.at[:, j].set(h).at[j].set(h)
        return V, T, w / length, jnp.where(exhausted, 0, length)

    def unfinished(carry):
        *_, cycle, _, theta, residual, norm = carry
        return (residual > enough(theta, norm)) & (cycle < cycles)  # false for NaN

    def extend(carry):
        V, T, v, basis_size, cycle, *_ = carry
        filled = jnp.minimum(basis_size + STEP, m)
        before = V, T, v, jnp.zeros((), dtype)
        V, T, v, beta = jax.lax.fori_loop(basis_size, filled, expand, before)
        # Unfilled rows get values below all eigenvalues, so that they sort first.
        low = -2 * jnp.sum(jnp.abs(T)) - 1
        theta, S = jnp.linalg.eigh(T + jnp.diag(jnp.where(place < filled, 0, low)))
        residual = beta * jnp.abs(S[filled - 1, -1])
        norm = jnp.max(jnp.where(theta > low / 2, jnp.abs(theta), 0))
        best = matmul(S[:, -1], V)
        full = filled == m
        V = jnp.where(full, jnp.zeros_like(V).at[:keep].set(matmul(S[:, -keep:].T, V)), V)
        T = jnp.where(full, jnp.zeros_like(T).at[:keep, :keep].set(jnp.diag(theta[-keep:])), T)
        basis_size, cycle = jnp.where(full, keep, filled), jnp.where(full, cycle + 1, cycle)
        return V, T, v, basis_size, cycle, best, theta[-1], residual, norm

    one = jnp.ones((), dtype)
    basis = jnp.zeros((m, n), dtype), jnp.zeros((m, m), dtype), start / _scaled_norm(start)
    carry = *basis, 0, 0, start, one, jnp.inf * one, one
    *_, best, theta, residual, _ = jax.lax.while_loop(unfinished, extend, carry)
    return best / _scaled_norm(best), theta, residual
