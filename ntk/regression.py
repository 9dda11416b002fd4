"""Regression with a kernel: prediction, gradient flow in time, and the excess-risk term.

A network in its linear (NTK) regime, trained by gradient flow on ``1/2 |f(X) - y|^2``, predicts

    f_t(x) = f_0(x) + k(x, X) phi_t(K) (y - f_0(X)),    phi_t(K) = K^-1 (I - exp(-t K)),

and in the limit, or with weight decay ``penalty``, ``f(x) = k(x, X) (K + penalty I)^-1 y``: one
Cholesky factorisation gives that, its leave-one-out residuals, and ``y'K^-1 y``. The flow takes one
eigendecomposition.

=======  ==========================================================
letter   meaning
=======  ==========================================================
K        kernel of the n training inputs, [n, n], positive definite
k(x, X)  `cross` [m, n], kernel of m other inputs with those
y        targets, [n] or [n, outputs]
f_0      predictions before training
t        time: number of steps times their size
=======  ==========================================================

References: Jacot, Gabriel & Hongler (2018); Lee et al. (2019), Eqs. (8)-(11); Oymak et al. (2021).
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from ntk._checks import array, number, offending
from ntk._symmetric import symmetric
from ntk.spectrum import min_eigenvalue


class KernelRegression(NamedTuple):
    """Result of :func:`kernel_regression`."""

    weights: jax.Array  # like y: (K + penalty I)^-1 y
    factor: jax.Array  # [n, n], lower Cholesky factor of K + penalty I

    def predict(self, cross: chex.Array) -> jax.Array:
        """Predictions ``cross @ weights``: [m, n] -> [m] or [m, outputs]."""
        return cross @ self.weights

    def leave_one_out(self) -> jax.Array:
        """Residuals ``y_i - f_-i(x_i)`` of the fits without sample i, like y, without refitting.

        They are ``weights_i / (K + penalty I)^-1_ii`` (Rasmussen & Williams 2006, Eq. 5.12); n^3.
        """
        identity = jnp.eye(len(self.factor), dtype=self.factor.dtype)
        inverse = jax.scipy.linalg.solve_triangular(self.factor, identity, lower=True)
        diagonal = jnp.sum(inverse**2, axis=0)
        return self.weights / diagonal.reshape(-1, *[1] * (self.weights.ndim - 1))


class ExcessRisk(NamedTuple):
    """Result of :func:`excess_risk_term`."""

    quadratic: jax.Array  # [], y'K^-1 y: the squared norm of the interpolant, summed over outputs
    normalized: jax.Array  # [], sqrt(y'K^-1 y / n)


def kernel_regression(K: chex.Array, y: chex.Array, *, penalty: float = 0.0) -> KernelRegression:
    """Kernel (ridge) regression: the minimiser of ``|y - K w|^2 + penalty w'Kw``.

    Parameters
    ----------
    K : array [n, n]
        Kernel of the training inputs, symmetric up to rounding.
    y : array [n] or [n, outputs]
        Targets.
    penalty : float
        Added to the diagonal: weight decay, noise variance, or a cure for a singular ``K``. There
        is no hidden jitter.

    Returns
    -------
    KernelRegression
        With ``predict(cross)`` and ``leave_one_out()``. NaN where an argument is traced, so that no
        error can be raised, and is not what it has to be.

    Raises
    ------
    ValueError
        If the shapes do not fit, ``K`` is not finite and symmetric, ``y`` is not finite,
        ``penalty`` is negative, or ``K + penalty I`` is not positive definite.

    Notes
    -----
    Time n^3 / 3, memory one matrix more.

    Examples
    --------
    >>> fit = kernel_regression(jnp.array([[2.0, 1.0], [1.0, 2.0]]), jnp.array([3.0, 0.0]))
    >>> fit.predict(jnp.array([[2.0, 1.0], [1.0, 1.0]])).round(4)
    Array([3., 1.], dtype=float...)
    >>> fit.leave_one_out().round(4)
    Array([ 3. , -1.5], dtype=float...)
    """
    K, y = _data(K, y)
    factor = _cholesky(K, penalty)
    return KernelRegression(jax.scipy.linalg.cho_solve((factor, True), y), factor)


def excess_risk_term(K: chex.Array, y: chex.Array) -> ExcessRisk:
    """``y'K^-1 y``, and ``sqrt(y'K^-1 y / n)``: what the excess-risk bounds consist of.

    The first term of Oymak et al. (2021), Theorem 3, is ``2 B sqrt(y'K^-1 y / n)``; that of their
    Theorem 2 needs a factor R besides, the largest l1 norm of alpha, which the paper omits and
    without which it is false for R > 1. Zhu et al. (2022), Theorem 3, bounds the same term from
    above by ``sqrt(y'y / (n lambda_min))``, which for labels of +-1 does not decrease in n.

    Parameters
    ----------
    K : array [n, n]
        Kernel of the training inputs, symmetric up to rounding.
    y : array [n] or [n, outputs]
        Targets; several outputs are summed over.

    Returns
    -------
    ExcessRisk

    Raises
    ------
    ValueError
        If the shapes do not fit, ``K`` is not finite, symmetric and positive definite, or ``y`` is
        not finite.

    Examples
    --------
    >>> risk = excess_risk_term(jnp.diag(jnp.array([1.0, 4.0])), jnp.array([1.0, 2.0]))
    >>> risk.quadratic, risk.normalized
    (Array(2., dtype=float...), Array(1., dtype=float...))
    """
    K, y = _data(K, y)
    whitened = jax.scipy.linalg.solve_triangular(_cholesky(K, 0.0), y, lower=True)
    quadratic = jnp.sum(whitened**2)
    return ExcessRisk(quadratic, jnp.sqrt(quadratic / len(y)))


def gradient_flow(
    K: chex.Array, y: chex.Array, t, *, f0=0.0, cross: chex.Array | None = None, cross_f0=0.0
) -> jax.Array:
    """Predictions after training for a time ``t``: ``f_0(x) + k(x, X) phi_t(K) (y - f_0(X))``.

    The flow is ``df/dt = -K (f - y)``, of the loss ``1/2 |f(X) - y|^2`` summed, not averaged:
    T steps of gradient descent of size eta on the summed loss are ``t = eta T``, on the mean
    squared error ``t = 2 eta T / n``.

    Parameters
    ----------
    K, y
        As in :func:`kernel_regression`; ``K`` may be singular.
    t : float or array [...]
        Times, not negative; ``inf`` is the limit, kernel regression.
    f0 : float or array like y
        Predictions on the training inputs at time 0.
    cross : array [m, n], optional
        Kernel of other inputs with the training inputs: predict there; on the latter by default.
    cross_f0 : float or array [m] or [m, outputs]
        Predictions there at time 0.

    Returns
    -------
    array [..., m] or [..., m, outputs]
        Axes of ``t`` first. Differentiable once in everything, for multiple eigenvalues too.

    Raises
    ------
    ValueError
        If the shapes do not fit, ``K`` is not finite and symmetric, or a ``t`` is negative.

    Notes
    -----
    Time: some 10 n^3 for the eigendecomposition, then n^2 per time and output. Directions in which
    ``K`` is singular to rounding do not move.

    Examples
    --------
    >>> K, y = jnp.diag(jnp.array([1.0, 0.0])), jnp.array([1.0, 1.0])
    >>> gradient_flow(K, y, jnp.array([0.0, 1.0, jnp.inf]))[:, 0]
    Array([0.  , 0.63, 1.  ], dtype=float...)
    """
    K, y = _data(K, y)
    t = array("t", t).astype(K.dtype)
    if not isinstance(t, jax.core.Tracer) and not (np.asarray(t) >= 0).all():
        raise ValueError(f"t: expected nonnegative times, got {offending(t, np.asarray(t) >= 0)}.")
    f0, cross_f0 = array("f0", f0), array("cross_f0", cross_f0)
    cross = None if cross is None else array("cross", cross)
    if cross is None:
        cross, cross_f0 = K, f0
    elif cross.ndim != 2 or cross.shape[1] != len(K):
        raise ValueError(f"cross: expected shape [m, {len(K)}], got {cross.shape}.")
    others = (len(cross), *y.shape[1:])
    for name, start, shape in (("f0", f0, y.shape), ("cross_f0", cross_f0, others)):
        if start.shape not in ((), shape):
            raise ValueError(f"{name}: expected a number or shape {shape}, got {start.shape}.")
    columns = (y - f0).reshape(len(K), -1)
    moved = _flows(K, columns, t.ravel())
    return cross_f0 + (cross @ moved).reshape(*t.shape, *others)


@jax.custom_jvp
def _flow(K, r, t):
    """``phi_t(K) r`` for r [n, outputs], by the eigenvalues of K."""
    values, V = _eigh(K)
    return V @ (_phi(values, t)[:, None] * (V.T @ r))


@_flow.defjvp
def _(primals, tangents):
    # The derivative of eigh has poles at multiple eigenvalues; that of a function of K has none:
    # dphi(K) = V (phi[a, b] o V' dK V) V' with the divided differences of phi (Daleckii-Krein).
    (K, r, t), (dK, dr, dt) = primals, tangents
    values, V = _eigh(K)
    phi = _phi(values, t)[:, None]
    inside = V.T @ r
    slope = (_divided_differences(values, t) * (V.T @ dK @ V)) @ inside
    slope += phi * (V.T @ dr) + dt * jnp.exp(-_product(t, values))[:, None] * inside
    return V @ (phi * inside), V @ slope


_flows = jax.jit(jax.vmap(_flow, in_axes=(None, None, 0)))


def _eigh(K):
    values, V = jnp.linalg.eigh(K)
    rounding = len(K) * jnp.finfo(K.dtype).eps * jnp.max(jnp.abs(values))
    return jnp.where(values > rounding, values, 0), V


def _product(t, values):
    """``t * values``, with 0 * inf = 0."""
    return jnp.where(values > 0, t * jnp.where(values > 0, values, 1), 0)


def _phi(a, t):
    """``(1 - exp(-t a)) / a``, which is t at a = 0; but 0 there at t = inf: nothing has moved."""
    at_zero = jnp.where(jnp.isinf(t), 0, t)
    return jnp.where(a > 0, -jnp.expm1(-_product(t, a)) / jnp.where(a > 0, a, 1), at_zero)


def _divided_differences(values, t):
    """``(phi(a) - phi(b)) / (a - b)`` for all pairs, without cancellation."""
    a = jnp.minimum(values[:, None], values)
    b = jnp.maximum(values[:, None], values)
    finite = jnp.where(jnp.isinf(t), 0, t)
    x, y = finite * a, finite * b
    # (D - phi(a)) / b, where D = (exp(-x) - exp(-y)) / (b - a) has a stable form.
    half = (y - x) / 2
    ratio = jnp.where(half > 0, -jnp.expm1(-2 * half) / jnp.where(half > 0, 2 * half, 1), 1)
    safe = jnp.where(b > 0, b, 1)
    exact = (finite * jnp.exp(-x) * ratio - _phi(a, finite)) / safe
    series = -(finite**2) * (
        1 / 2 - (x + y) / 6 + (x * x + x * y + y * y) / 24 - (x + y) * (x * x + y * y) / 120
    )
    limit = jnp.where(a > 0, -1 / (jnp.where(a > 0, a, 1) * safe), 0)
    return jnp.where(jnp.isinf(t), limit, jnp.where(y < 1e-2, series, exact))


def _data(K, y):
    K, y = symmetric(K), array("y", y)
    if y.ndim not in (1, 2) or y.shape[0] != K.shape[0] or not y.size:
        n = K.shape[0]
        raise ValueError(f"y: expected shape [{n}] or [{n}, outputs], got {y.shape}.")
    dtype = jnp.promote_types(jnp.result_type(K, y), jnp.float32)
    if not isinstance(y, jax.core.Tracer) and not np.isfinite(y).all():
        raise ValueError("y: expected finite targets, got NaN or infinity.")
    return K.astype(dtype), y.astype(dtype)


def _cholesky(K, penalty):
    if not isinstance(number("penalty", penalty), jax.core.Tracer) and not penalty >= 0:
        raise ValueError(f"penalty: expected a nonnegative number, got {penalty}.")
    penalty = jnp.where(penalty >= 0, penalty, jnp.nan)
    shifted = K + penalty * jnp.eye(len(K), dtype=K.dtype)
    factor = jax.lax.linalg.cholesky(shifted, symmetrize_input=False)
    if not isinstance(factor, jax.core.Tracer) and np.isnan(factor[-1, -1]):
        raise ValueError(
            "K: expected a positive definite matrix (a larger penalty makes it one), "
            f"got a smallest eigenvalue of {float(min_eigenvalue(shifted)):.3g}."
        )
    return factor
