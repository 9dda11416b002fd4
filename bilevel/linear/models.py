"""Linear models on fixed features, too many to hold: ridge regression and the squared-hinge SVM.

The inner solver of feature-map selection, where features are given and only their weights are
learned. With ``Phi`` [n, d] the features of n rows, both models minimise

    1/2 |m * (Phi w - y)|^2 + 1/2 penalty |w|^2,

with the mask m = 1 for ridge regression, and m_i = [y_i f_i < 1] for the SVM: as y = +-1,
``max(0, 1 - y f)^2 = m (f - y)^2``, and ``1/2 |w|^2 + cost sum max(0, 1 - y f)^2`` is the objective
above with ``penalty = 1 / (2 cost)``, times ``2 cost``. Newton's method with conjugate gradients
(CG) thus solves either, through ``v -> Phi v`` and ``r -> Phi' r`` alone.

``Phi`` is an array, a sparse matrix of SciPy or JAX, or
:class:`bilevel.linear.matrices.Blocks`, which generates a few rows or columns at a time. Every fit
says how exact it is: ``residual``.

=======  =============================================================
letter   meaning
=======  =============================================================
Phi      features [n, d]
y        targets [n] or [n, c]; the SVM's are +-1, one-vs-rest
w, f     weights [d] or [d, c]; predictions ``f = Phi w``
penalty  alpha of scikit-learn's Ridge; ``1 / (2 C)`` of its LinearSVC
=======  =============================================================

References: Khodak et al. 2020, section 2; Keerthi & DeCoste 2005, "A modified finite Newton method
for fast solution of large scale linear SVMs".
"""

from functools import partial
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from bilevel.internal.checks import (
    check_finite,
    check_in_range,
    concrete,
    nan_unless,
    real_array,
    real_number,
)
from bilevel.internal.conjugate_gradients import solve_conjugate_gradients
from bilevel.linear.matrices import (
    Blocks,
    Features,
    Sparse,
    as_columns,
    block_starts,
    checked_features,
    dtype_of,
    features_product,
    split_rows,
    sweep,
)

_NEWTON_STEPS = 100  # most steps
_CG_STEPS = 1000  # most iterations of one solve
_PATIENCE = 3  # Newton steps without progress, after which rounding is reached
_LINE_STEPS = 20  # Newton steps or bisections of one line search
_PANELS = 6  # a side of the Gram matrix; by symmetry 21 of the 36 tiles are computed


class LinearFit(NamedTuple):
    """Result of :func:`ridge_weights` and :func:`svm_weights`."""

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
    """Ridge regression, ``w = argmin 1/2 |Phi w - y|^2 + 1/2 penalty |w|^2``.

    Parameters
    ----------
    features : array [n, d], sparse matrix of SciPy or JAX, or bilevel.linear.matrices.Blocks
    y : array [n] or [n, c]
    penalty : scalar >= 0
        At 0, where the features have full rank: least squares for n >= d, and the interpolant of
        least norm for n < d. The direct methods give NaN where they have not.
    method : {"auto", "primal", "dual", "cg"}
        "primal" factorises ``Phi'Phi + penalty I`` [d, d], "dual" ``Phi Phi' + penalty I`` [n, n];
        "cg" makes no such matrix. "auto" takes the smaller matrix if three of it fit in
        ``memory``, else "cg", as always for Sparse.
    memory : int
        Bytes to work in, besides the arguments. A block of ``Blocks`` takes up to a quarter.

    Returns
    -------
    LinearFit
        ``w`` [d] or [d, c], and the relative norm of the gradient there, whichever the method: "cg"
        aims at rounding to the power 3/4 (2e-12 in float64, 6e-6 in float32) and gives up where
        rounding stops it.

    Raises
    ------
    ValueError
        For shapes that do not fit, NaN, a negative penalty, an unknown method.

    Notes
    -----
    Time: ``7/12 n d min(n, d)`` multiply-adds for the Gram matrix, which is symmetric, and a
    Cholesky factorisation; "cg": ``2 n d c`` for each of some ``sqrt(condition)``
    iterations. ``Blocks`` are generated twice by "primal", three times by "dual" and once per
    iteration by "cg". For derivatives in the features or the penalty use :func:`bilevel.ridge`.

    Examples
    --------
    >>> ridge_weights(jnp.array([[1.0], [2.0]]), jnp.array([1.0, 3.0]), 2.0).w
    Array([1.], dtype=float...)
    """
    features, y = _check_features_and_targets(features, y)
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
        fits = 3 * min(n, d) ** 2 * dtype_of(features).itemsize <= memory
        direct = "primal" if d <= n else "dual"
        method = direct if fits and not isinstance(features, Sparse) else "cg"
    return _solve_ridge(features, y, penalty, method, memory)


def svm_weights(
    features: Features,
    y: chex.Array,
    cost: float | chex.Array = 1.0,
    *,
    tolerance: float | None = None,
    memory: int = 2**31,
) -> LinearFit:
    """Squared-hinge SVM, ``w = argmin 1/2 |w|^2 + cost sum_i max(0, 1 - y_i f_i)^2``.

    scikit-learn's ``LinearSVC(C=cost, loss="squared_hinge", fit_intercept=False)`` for labels +-1,
    one column per class. Newton's method with conjugate gradients on the rows with ``y f < 1`` and
    an exact line search ends in finitely many steps (Keerthi & DeCoste 2005). ``tolerance`` is
    that of ``residual``, by default rounding to the power 3/4.
    """
    features, y = _check_features_and_targets(features, y)
    check_in_range("cost", cost, 0, np.inf)
    if concrete(y) and not bool(jnp.all(jnp.abs(y) == 1)):
        raise ValueError(f"y: expected labels -1 and 1, got {float(y[jnp.abs(y) != 1][0]):g}.")
    return _svm(features, y, cost, tolerance, memory)


def predict(features: Features, w: chex.Array, *, memory: int = 2**31) -> jax.Array:
    """Predictions ``f = Phi w``."""
    features, w = checked_features(features), real_array("w", w)
    if w.ndim not in (1, 2) or w.shape[0] != features.shape[1]:
        raise ValueError(f"w: expected {features.shape[1]} rows, got shape {w.shape}.")
    return _compute_predictions(features, w, memory)


@partial(jax.jit, static_argnames=("method", "memory"))
def _solve_ridge(features, y, penalty, method: str, memory: int) -> LinearFit:
    targets = as_columns(y).astype(dtype_of(features))
    penalty = jnp.asarray(penalty, targets.dtype)
    if method == "cg":
        size = jnp.max(jnp.abs(targets))  # squares of small numbers vanish
        size = jnp.where(size > 0, size, 1)
        w, residual = _newton_cg(features, targets / size, penalty, None, memory, hinge=False)
        w = w * size
    else:
        solve = _solve_primal if method == "primal" else _solve_dual
        w = solve(features, targets, penalty, memory)
        # Slopes at w and at 0 in one pass.
        errors = sweep(features, w, lambda f, y: jnp.hstack([f - y, y]), (targets,), memory)[1]
        slope, at_zero = jnp.split(errors, 2, axis=1)
        residual = _relative_norm(slope + penalty * w, at_zero)
    return LinearFit(w.reshape(-1, *y.shape[1:]), jnp.max(residual))


@partial(jax.jit, static_argnames=("tolerance", "memory"))
def _svm(features, y, cost, tolerance: float | None, memory: int) -> LinearFit:
    labels = as_columns(y).astype(dtype_of(features))
    penalty = 0.5 / jnp.asarray(cost, labels.dtype)
    w, residual = _newton_cg(features, labels, penalty, tolerance, memory, hinge=True)
    return LinearFit(w.reshape(-1, *y.shape[1:]), jnp.max(residual))


@partial(jax.jit, static_argnames="memory")
def _compute_predictions(features, w, memory: int) -> jax.Array:
    return features_product(features, as_columns(w), memory).reshape(-1, *w.shape[1:])


def _solve_primal(features, y, penalty, memory):
    """``(Phi'Phi + penalty I)^-1 Phi'y`` by Cholesky."""
    if not isinstance(features, Blocks):
        return _solve_by_cholesky(_lower_gram(features), penalty, features.T @ y)
    n, d = features.shape
    starts, size = block_starts(n, d, y.dtype, memory)

    def add(sums, block):
        start, y = block
        phi = features.rows(start, size)
        return (sums[0] + _lower_gram(phi), sums[1] + phi.T @ y), None

    zero = jnp.zeros((d, d), y.dtype), jnp.zeros((d, y.shape[1]), y.dtype)
    (gram, moment), _ = jax.lax.scan(add, zero, (starts, split_rows(y, len(starts), size)))
    return _solve_by_cholesky(gram, penalty, moment)


def _solve_dual(features, y, penalty, memory):
    """``Phi' (Phi Phi' + penalty I)^-1 y`` by Cholesky."""
    if not isinstance(features, Blocks):
        return features.T @ _solve_by_cholesky(_lower_gram(features.T), penalty, y)
    n, d = features.shape
    starts, size = block_starts(d, n, y.dtype, memory)

    def add(gram, start):
        return gram + _lower_gram(features.columns(start, size).T), None

    gram, _ = jax.lax.scan(add, jnp.zeros((n, n), y.dtype), starts)
    coefficients = _solve_by_cholesky(gram, penalty, y)
    w = jax.lax.map(lambda start: features.columns(start, size).T @ coefficients, starts)
    return w.reshape(-1, y.shape[1])[:d]


def _lower_gram(a: jax.Array) -> jax.Array:
    """``a'a``, with zeros for the tiles above the diagonal."""
    # Copies of the panels: XLA would slice `a` anew, and slowly, for each of the products.
    panels = jax.lax.optimization_barrier(jnp.array_split(a, min(_PANELS, a.shape[1]), axis=1))
    tiles = [
        [
            p.T @ q if i >= j else jnp.zeros((p.shape[1], q.shape[1]), a.dtype)
            for j, q in enumerate(panels)
        ]
        for i, p in enumerate(panels)
    ]
    return jnp.block(tiles)


def _solve_by_cholesky(gram, penalty, b):
    matrix = gram + penalty * jnp.eye(len(gram), dtype=gram.dtype)
    factor = jax.lax.linalg.cholesky(matrix, symmetrize_input=False)
    return jax.scipy.linalg.cho_solve((factor, True), b)


def _newton_cg(features, y, penalty, tolerance, memory, *, hinge: bool):
    """Newton-CG from 0 on the module's objective: ``w`` [d, c] and residuals [c]."""
    eps = jnp.finfo(y.dtype).eps
    tolerance = eps**0.75 if tolerance is None else tolerance

    def mask(f, y):
        # Asked this way round, a row of NaN counts, and is seen.
        return 1 - (y * f >= 1).astype(f.dtype) if hinge else jnp.ones_like(f)

    def gradient(w):
        f, slope = sweep(features, w, lambda f, y: mask(f, y) * (f - y), (y,), memory)
        return f, slope + penalty * w

    def objective(w, f):
        return jnp.sum(mask(f, y) * (f - y) ** 2, axis=0) + penalty * jnp.sum(w**2, axis=0)

    def unfinished(state):
        *_, residual, _, _, since, k = state
        return jnp.any(residual > tolerance) & (since < _PATIENCE) & (k < _NEWTON_STEPS)

    def step(state):
        w, f, g, residual, best, least, since, k = state
        active = mask(f, y)

        def hessian(v):
            return sweep(features, v, lambda f, m: m * f, (active,), memory)[1] + penalty * v

        # A mask that is about to change deserves no exact solve: superlinear convergence suffices.
        accuracy = tolerance / (2 * residual)
        if hinge:
            accuracy = jnp.maximum(accuracy, jnp.minimum(0.1, residual))
        p = _cg_by_column(hessian, jnp.where(residual > tolerance, -g, 0), accuracy)
        if hinge:
            f_p = features_product(features, p, memory)
            length = _exact_step(lambda t: mask(f + t[None] * f_p, y), f - y, f_p, w, p, penalty)
            p = p * length[None]
        w = w + p
        f, g = gradient(w)
        residual = _relative_norm(g, start)
        better = jnp.max(residual) < jnp.max(best[1])
        best = jax.tree.map(partial(jnp.where, better), (w, residual), best)
        # While rows come and go the gradient may grow, and the objective falls with every step.
        reached = objective(w, f)
        progress = better | jnp.any(reached < (1 - 4 * eps) * least)
        least = jnp.minimum(reached, least)
        return w, f, g, residual, best, least, jnp.where(progress, 0, since + 1), k + 1

    w = jnp.zeros((features.shape[1], y.shape[1]), y.dtype)
    f, start = gradient(w)
    residual = _relative_norm(start, start)
    zero = jnp.zeros((), int)
    state = w, f, start, residual, (w, residual), objective(w, f), zero, zero
    w, residual = jax.lax.while_loop(unfinished, step, state)[4]
    return nan_unless(jnp.isfinite(residual), w), residual


def _exact_step(mask, r, f_p, w, p, penalty):
    """``argmin_t`` of the objective at ``w + t p``, one t per column.

    The derivative in t is piecewise linear and increasing: Newton's method, kept in the bracket
    that its sign gives.
    """
    w_p, p_p = jnp.sum(w * p, axis=0), jnp.sum(p * p, axis=0)

    def narrow(_, bracket):
        low, t, high = bracket
        active = mask(t)
        slope = jnp.sum(active * (r + t[None] * f_p) * f_p, axis=0) + penalty * (w_p + t * p_p)
        curvature = jnp.sum(active * f_p**2, axis=0) + penalty * p_p
        low, high = jnp.where(slope < 0, t, low), jnp.where(slope < 0, high, t)
        newton = t - slope / jnp.where(curvature > 0, curvature, 1)
        inside = (low <= newton) & (newton <= high)
        return low, jnp.where(inside, newton, (low + high) / 2), high

    one = jnp.ones_like(p_p)
    return jax.lax.fori_loop(0, _LINE_STEPS, narrow, (0 * one, one, jnp.inf * one))[1]


def _cg_by_column(product, b, relative):
    """CG on each column of ``b`` until its residual is under ``relative * |b|``."""

    def solve(b, aim):
        def one(v):
            return product(v[:, None])[:, 0]

        return solve_conjugate_gradients(one, b, None, steps=_CG_STEPS, threshold=aim).x

    aims = relative * jnp.linalg.norm(b, axis=0)
    return jax.vmap(solve, in_axes=(1, 0), out_axes=1)(b, aims)


def _relative_norm(gradient, start):
    """``|gradient| / |start|`` by column; 0 where both are."""
    norm, scale = jnp.linalg.norm(gradient, axis=0), jnp.linalg.norm(start, axis=0)
    return norm / jnp.where((scale == 0) & (norm == 0), 1, scale)


def _check_features_and_targets(features, y) -> tuple[Features, jax.Array]:
    features, y = checked_features(features), real_array("y", y)
    if y.ndim not in (1, 2) or len(y) != features.shape[0] or y.size == 0:
        raise ValueError(f"y: expected {features.shape[0]} rows, got shape {y.shape}.")
    for name, a in (("features", features), ("y", y)):
        if isinstance(a, jax.Array):
            check_finite(name, a)
    return features, y
