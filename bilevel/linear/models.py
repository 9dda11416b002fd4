"""Ridge regression on features that need not fit into memory.

This is the inner solver of feature-map selection (Khodak et al. 2020, section 2).
"""

import math
from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from bilevel.internal.checks import check_finite, concrete, real_array, real_number
from bilevel.linear import matrices
from bilevel.linear.matrices import Blocks, Features, Sparse, sweep
from ntk.internal.products import matmul
from ntk.large.block_cg import solve_block_cg
from ntk.large.kernel_operator import Operator
from ntk.large.partial_cholesky import PartialCholesky, partial_cholesky

_CG_STEPS = 10_000  # maximum number of passes
_RANK = 512  # of the preconditioner
_PANELS = 6  # per side of the Gram matrix; by symmetry 21 of the 36 tiles are computed


class LinearFit(NamedTuple):
    """Result of :func:`ridge_weights`."""

    w: jax.Array  # [d] or [d, c]
    residual: jax.Array  # [], |gradient at w| / |gradient at 0|, largest over the c outputs


def ridge_weights(
    features: Features,
    y: chex.Array,
    penalty: float | chex.Array,
    *,
    method: str = "auto",
    memory: int = 2**31,
) -> LinearFit:
    """Fit ridge regression, ``w = argmin 1/2 |Phi w - y|^2 + 1/2 penalty |w|^2``.

    Parameters
    ----------
    features : array [n, d], sparse matrix of SciPy or JAX, or bilevel.linear.matrices.Blocks
        ``Phi``; Blocks generate a few rows or columns at a time.
    y : array [n] or [n, c]
    penalty : scalar >= 0
        0 gives least squares for n >= d, and the interpolant of least norm for n < d. Both need
        features of full rank; otherwise the direct methods give NaN.
    method : {"auto", "primal", "dual", "cg"}
        "primal" factorizes ``Phi'Phi + penalty I`` [d, d], "dual" ``Phi Phi' + penalty I``
        [n, n]; "cg" needs no such matrix. "auto" takes the smaller matrix if three copies of it fit
        into ``memory``, and "cg" otherwise or for sparse features.
    memory : int
        Working memory in bytes, besides the arguments. A block of ``Blocks`` takes up to a quarter.

    Returns
    -------
    LinearFit
        ``w`` [d] or [d, c], and the relative norm of the gradient there. The goal of "cg" is
        eps^(3/4) (2e-12 in float64, 6e-6 in float32); it stops earlier if roundoff dominates.

    Raises
    ------
    ValueError
        If shapes do not fit, numbers are NaN, the penalty is negative, or the method is unknown.

    Notes
    -----
    Time: ``7/12 n d min(n, d)`` multiply-adds for the Gram matrix and a Cholesky factorization;
    "cg": ``2 n d c`` for each step of block conjugate gradients (:func:`ntk.iterative_regression`).
    Dense features with 2048 rows and columns or more get a preconditioner of rank 512, which costs
    ``512 n d`` (in ``Blocks`` twice that) and up to an eighth of ``memory``. ``Blocks`` are
    generated once if half of ``memory`` holds them (next to the matrices of a direct method).
    Otherwise "primal" generates them twice, "dual" three times, "cg" once per step and about eight
    times more. For derivatives in the features or the penalty use :func:`bilevel.ridge`.

    Examples
    --------
    >>> ridge_weights(jnp.array([[1.0], [2.0]]), jnp.array([1.0, 3.0]), 2.0).w
    Array([1.], dtype=float...)
    """
    features, y = matrices.checked_features(features), real_array("y", y)
    if y.ndim not in (1, 2) or len(y) != features.shape[0] or y.size == 0:
        raise ValueError(f"y: expected {features.shape[0]} rows, got shape {y.shape}.")
    for name, a in (("features", features), ("y", y)):
        if isinstance(a, jax.Array):
            check_finite(name, a)
    known = concrete(real_number("penalty", penalty))
    if known and not 0 <= penalty < np.inf:
        raise ValueError(f"penalty: expected a finite number >= 0, got {penalty}.")
    allowed = ("auto", "cg") if isinstance(features, Sparse) else ("auto", "primal", "dual", "cg")
    if method not in allowed:
        raise ValueError(
            f"method: expected one of {', '.join(allowed)} for {type(features).__name__} "
            f"features, got {method!r}."
        )
    if method == "auto":
        dtype = matrices.dtype_of(features)
        sparse = isinstance(features, Sparse)
        # checked_features makes the shape a pair.
        method = "cg" if sparse else default_method(features.shape, dtype, memory)  # type: ignore[arg-type]
    return _solve_ridge(features, y, penalty, method, memory)


def default_method(shape: tuple[int, int], dtype: Any, memory: int) -> str:
    """Return the method of :func:`ridge_weights` for features [n, d] that are not sparse."""
    n, d = shape
    if 3 * min(n, d) ** 2 * np.dtype(dtype).itemsize > memory:
        return "cg"
    return "primal" if d <= n else "dual"


def predict(features: Features, w: chex.Array, *, memory: int = 2**31) -> jax.Array:
    """Return predictions ``f = Phi w``."""
    features, w = matrices.checked_features(features), real_array("w", w)
    if w.ndim not in (1, 2) or w.shape[0] != features.shape[1]:
        raise ValueError(f"w: expected {features.shape[1]} rows, got shape {w.shape}.")
    return matrices.features_product(features, w, memory)


@partial(jax.jit, static_argnames=("method", "memory"))
def _solve_ridge(features, y, penalty, method: str, memory: int) -> LinearFit:
    targets = matrices.as_columns(y).astype(matrices.dtype_of(features))
    penalty = jnp.asarray(penalty, targets.dtype)
    if isinstance(features, Blocks):
        numbers = 2 * math.prod(features.shape)
        numbers += 0 if method == "cg" else 3 * min(features.shape) ** 2
        if numbers * targets.dtype.itemsize <= memory:
            features = matrices.as_array(features, memory)
    solve = {"primal": _solve_primal, "dual": _solve_dual, "cg": _solve_by_cg}[method]
    w = solve(features, targets, penalty, memory)
    # One pass gives the slopes at w and at 0.
    errors = sweep(features, w, lambda f, y: jnp.hstack([f - y, y]), (targets,), memory)[1]
    slope, at_zero = jnp.split(errors, 2, axis=1)
    residual = _relative_norm(slope + penalty * w, at_zero)
    return LinearFit(w.reshape(-1, *y.shape[1:]), jnp.max(residual))


def _solve_primal(features, y, penalty, memory):
    """Return ``(Phi'Phi + penalty I)^-1 Phi'y`` by Cholesky."""
    if not isinstance(features, Blocks):
        return _solve_by_cholesky(
            _lower_gram(features), penalty, matrices.transposed_product(features, y)
        )
    n, d = features.shape
    starts, size = matrices.block_starts(n, d, y.dtype, memory)

    def add(sums, block):
        start, y = block
        phi = features.rows(start, size)
        return (sums[0] + _lower_gram(phi), sums[1] + matrices.transposed_product(phi, y)), None

    zero = jnp.zeros((d, d), y.dtype), jnp.zeros((d, y.shape[1]), y.dtype)
    (gram, moment), _ = jax.lax.scan(add, zero, (starts, matrices.split_rows(y, len(starts), size)))
    return _solve_by_cholesky(gram, penalty, moment)


def _solve_dual(features, y, penalty, memory):
    """Return ``Phi' (Phi Phi' + penalty I)^-1 y`` by Cholesky."""
    if not isinstance(features, Blocks):
        return matmul(features.T, _solve_by_cholesky(_lower_gram(features.T), penalty, y))
    n, d = features.shape
    starts, size = matrices.block_starts(d, n, y.dtype, memory)

    def add(gram, start):
        return gram + _lower_gram(features.columns(start, size).T), None

    gram, _ = jax.lax.scan(add, jnp.zeros((n, n), y.dtype), starts)
    coefficients = _solve_by_cholesky(gram, penalty, y)
    w = jax.lax.map(lambda start: matmul(features.columns(start, size).T, coefficients), starts)
    return w.reshape(-1, y.shape[1])[:d]


def _lower_gram(a: jax.Array) -> jax.Array:
    """Return ``a'a``, with zeros for the tiles above the diagonal."""
    # Without copies of the panels, XLA slices `a` slowly for each product.
    panels = jax.lax.optimization_barrier(jnp.array_split(a, min(_PANELS, a.shape[1]), axis=1))

    def tile(i, j):
        p, q = panels[i], panels[j]
        return matmul(p.T, q) if i >= j else jnp.zeros((p.shape[1], q.shape[1]), a.dtype)

    sides = range(len(panels))
    return jnp.block([[tile(i, j) for j in sides] for i in sides])


def _solve_by_cholesky(gram, penalty, b):
    matrix = gram + penalty * jnp.eye(len(gram), dtype=gram.dtype)
    factor = jax.lax.linalg.cholesky(matrix, symmetrize_input=False)
    return jax.scipy.linalg.cho_solve((factor, True), b)


def _solve_by_cg(features, y, penalty, memory):
    """Return ``(Phi'Phi + penalty I)^-1 Phi'y`` by block conjugate gradients from 0."""
    gram, d, dtype = _Gram(features, memory), features.shape[1], y.dtype
    moment = sweep(features, jnp.zeros((d, 1), dtype), lambda _, y: y, (y,), memory)[1]
    partial_factor = PartialCholesky(
        jnp.zeros((d, 0), dtype), jnp.ones(d, dtype), jnp.zeros(0, int)
    )
    rank = min(_RANK, memory // (8 * d * dtype.itemsize))
    if min(features.shape) >= 4 * rank > 0 and not isinstance(features, Sparse):
        # The draw of pivots changes the number of steps, not the solution.
        partial_factor = partial_cholesky(gram, rank, key=jax.random.key(0))
    # With the same number for every column, weights without a penalty have the least norm.
    mean = jnp.mean(partial_factor.residual_diagonal)
    partial_factor = partial_factor._replace(residual_diagonal=jnp.full(d, mean))
    tolerance = float(jnp.finfo(dtype).eps) ** 0.75
    return solve_block_cg(gram, moment, penalty, partial_factor, tolerance, _CG_STEPS)[0]


class _Gram(Operator):
    """``Phi'Phi``: a pass over the features for a product."""

    arrays, static = ("features",), ("memory", "dtype")

    def __init__(self, features: Features, memory: int):
        self.features, self.memory, self._programs = features, memory, {}
        self.dtype = matrices.dtype_of(features)

    @property
    def shape(self) -> tuple[int, int]:
        return self.features.shape[1], self.features.shape[1]

    def _product(self, v):
        return sweep(self.features, v, lambda f: f, (), self.memory)[1]

    def _columns(self, indices):
        if isinstance(self.features, jax.Array):
            return matrices.transposed_product(self.features, self.features[:, indices])
        return self._product(jax.nn.one_hot(indices, self.shape[0], axis=0, dtype=self.dtype))

    def _diagonal(self):
        return matrices.column_squares(self.features, self.memory)


def _relative_norm(gradient, start):
    """Return ``|gradient| / |start|`` by column; 0 if both are 0."""
    largest = jnp.max(jnp.abs(start), axis=0)  # scaled first, as its square may underflow
    unit = jnp.where(largest > 0, largest, 1)[None]
    norm, scale = (jnp.linalg.norm(slope / unit, axis=0) for slope in (gradient, start))
    return norm / jnp.where((scale == 0) & (norm == 0), 1, scale)
