"""Ridge regression on features that need not fit into memory.

This is the inner solver of feature-map selection (Khodak et al. 2020, section 2).
"""

from functools import partial
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from bilevel.internal.checks import check_finite, concrete, nan_unless, real_array, real_number
from bilevel.internal.conjugate_gradients import solve_conjugate_gradients
from bilevel.linear import matrices
from bilevel.linear.matrices import Blocks, Features, Sparse, sweep
from ntk.internal.products import matmul

_NEWTON_STEPS = 100  # maximum number of steps
_CG_STEPS = 1000  # maximum number of iterations of one solve
_PATIENCE = 3  # Newton steps without progress, after which roundoff dominates
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
        [n, n]; "cg" needs no matrix. "auto" takes the smaller matrix if three copies of it fit
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
    "cg": ``2 n d c`` for each of about ``sqrt(condition)`` iterations. ``Blocks`` are generated
    twice by "primal", three times by "dual" and once per iteration by "cg". For derivatives in the
    features or the penalty use :func:`bilevel.ridge`.

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
        n, d = features.shape
        fits = 3 * min(n, d) ** 2 * matrices.dtype_of(features).itemsize <= memory
        direct = "primal" if d <= n else "dual"
        method = direct if fits and not isinstance(features, Sparse) else "cg"
    return _solve_ridge(features, y, penalty, method, memory)


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
    if method == "cg":
        size = jnp.max(jnp.abs(targets))  # squares of small numbers underflow
        size = jnp.where(size > 0, size, 1)
        w, residual = _newton_cg(features, targets / size, penalty, memory)
        w = w * size
    else:
        solve = _solve_primal if method == "primal" else _solve_dual
        w = solve(features, targets, penalty, memory)
        # One pass gives the slopes at w and at 0.
        errors = sweep(features, w, lambda f, y: jnp.hstack([f - y, y]), (targets,), memory)[1]
        slope, at_zero = jnp.split(errors, 2, axis=1)
        residual = _relative_norm(slope + penalty * w, at_zero)
    return LinearFit(w.reshape(-1, *y.shape[1:]), jnp.max(residual))


def _solve_primal(features, y, penalty, memory):
    """Return ``(Phi'Phi + penalty I)^-1 Phi'y`` by Cholesky."""
    if not isinstance(features, Blocks):
        return _solve_by_cholesky(_lower_gram(features), penalty, matmul(features.T, y))
    n, d = features.shape
    starts, size = matrices.block_starts(n, d, y.dtype, memory)

    def add(sums, block):
        start, y = block
        phi = features.rows(start, size)
        return (sums[0] + _lower_gram(phi), sums[1] + matmul(phi.T, y)), None

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


def _newton_cg(features, y, penalty, memory):
    """Return ``w`` [d, c] and residuals [c] of Newton steps by conjugate gradients from 0."""
    eps = jnp.finfo(y.dtype).eps
    tolerance = eps**0.75

    def gradient(w):
        f, slope = sweep(features, w, lambda f, y: f - y, (y,), memory)
        return f, slope + penalty * w

    def objective(w, f):
        return jnp.sum((f - y) ** 2, axis=0) + penalty * jnp.sum(w**2, axis=0)

    def hessian(v):
        return sweep(features, v, lambda f: f, (), memory)[1] + penalty * v

    def unfinished(state):
        *_, residual, _, _, since, k = state
        return jnp.any(residual > tolerance) & (since < _PATIENCE) & (k < _NEWTON_STEPS)

    def step(state):
        w, g, residual, best, least, since, k = state
        accuracy = tolerance / (2 * residual)
        w = w + _cg_by_column(hessian, jnp.where(residual > tolerance, -g, 0), accuracy)
        f, g = gradient(w)
        residual = _relative_norm(g, start)
        better = jnp.max(residual) < jnp.max(best[1])
        best = jax.tree.map(partial(jnp.where, better), (w, residual), best)
        # The gradient may grow while the objective falls.
        reached = objective(w, f)
        progress = better | jnp.any(reached < (1 - 4 * eps) * least)
        least = jnp.minimum(reached, least)
        return w, g, residual, best, least, jnp.where(progress, 0, since + 1), k + 1

    w = jnp.zeros((features.shape[1], y.shape[1]), y.dtype)
    f, start = gradient(w)
    residual = _relative_norm(start, start)
    zero = jnp.zeros((), int)
    state = w, start, residual, (w, residual), objective(w, f), zero, zero
    w, residual = jax.lax.while_loop(unfinished, step, state)[3]
    return nan_unless(jnp.isfinite(residual), w), residual


def _cg_by_column(product, b, relative):
    """Solve for each column of ``b`` until its residual is below ``relative * |b|``."""

    def one(v):
        return product(v[:, None])[:, 0]

    def solve(b, aim):
        return solve_conjugate_gradients(one, b, None, steps=_CG_STEPS, threshold=aim).x

    aims = relative * jnp.linalg.norm(b, axis=0)
    return jax.vmap(solve, in_axes=(1, 0), out_axes=1)(b, aims)


def _relative_norm(gradient, start):
    """Return ``|gradient| / |start|`` by column; 0 if both are 0."""
    norm, scale = jnp.linalg.norm(gradient, axis=0), jnp.linalg.norm(start, axis=0)
    return norm / jnp.where((scale == 0) & (norm == 0), 1, scale)
