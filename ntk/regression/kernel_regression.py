"""Regression with a kernel: prediction, gradient flow in time, and the excess-risk term.

A network in its linear (NTK) regime, trained by gradient flow on ``1/2 |f(X) - y|^2``, predicts

    f_t(x) = f_0(x) + k(x, X) phi_t(K) (y - f_0(X)),    phi_t(K) = K^-1 (I - exp(-t K)).

In the limit, or with weight decay ``penalty``, ``f(x) = k(x, X) (K + penalty I)^-1 y``. A kernel
``[n, n]`` holds for every output separately. If outputs have a kernel with each other
(``empirical_kernel(..., outputs="full")``), K is ``[n, n, outputs, outputs]``, cross is ``[m, n,
outputs, outputs]``, and y is ``[n, outputs]``.

References: Jacot, Gabriel & Hongler (2018); Lee et al. (2019), Eqs. (8)-(11); Oymak et al. (2021).
"""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from ntk.internal.checks import real_array
from ntk.internal.products import einsum, matmul
from ntk.kernels.symmetric import flatten_outputs
from ntk.regression.gradient_flow import check_times, refined
from ntk.regression.targets import check_cross_kernel, check_training_set, cholesky, with_penalty


class KernelRegression(NamedTuple):
    """Result of :func:`kernel_regression`."""

    weights: jax.Array  # like y: (K + penalty I)^-1 y
    factor: jax.Array  # [n, n], lower Cholesky factor of K + penalty I; [n outputs, n outputs]

    def predict(self, cross: chex.Array) -> jax.Array:
        """Return ``k(x, X) weights`` [m, ...]; ``cross`` [m, n, ...] has the form of ``K``."""
        cross, (n, *outputs) = jnp.asarray(cross), self.weights.shape
        full, single = len(self.factor) != n, outputs in ([], [1])
        if full != (cross.ndim == 4) and not (single and cross.shape[2:] == (1, 1)):
            expected = ", ".join(map(str, ["m", n, *2 * outputs * full]))
            raise ValueError(f"cross: expected shape [{expected}], as K has it, got {cross.shape}.")
        if cross.ndim != 4:
            return matmul(cross, self.weights)
        return matmul(flatten_outputs(cross), self.weights.ravel()).reshape(len(cross), *outputs)

    def leave_one_out(self) -> jax.Array:
        """Return the residuals ``y_i - f_-i(x_i)`` of fits without sample i, like y.

        They are ``weights_i / (K + penalty I)^-1_ii`` (Rasmussen & Williams 2006, Eq. 5.12), where
        ``ii`` is the block of sample i for a kernel of several outputs. Time n^3.
        """
        rows = jnp.eye(len(self.factor), dtype=self.factor.dtype)
        inverse = jax.scipy.linalg.solve_triangular(self.factor, rows, lower=True)
        n, outputs = len(self.weights), len(self.factor) // len(self.weights)
        if outputs == 1:
            diagonal = jnp.sum(inverse**2, axis=0)
            return self.weights / diagonal.reshape(-1, *[1] * (self.weights.ndim - 1))
        of_sample = inverse.reshape(-1, n, outputs)
        blocks = einsum("kia,kib->iab", of_sample, of_sample)
        return jnp.linalg.solve(blocks, self.weights[..., None])[..., 0]


class ExcessRisk(NamedTuple):
    """Result of :func:`excess_risk_term`."""

    quadratic: jax.Array  # [], y'K^-1 y: the squared norm of the interpolant, summed over outputs
    normalized: jax.Array  # [], sqrt(y'K^-1 y / n)


def kernel_regression(
    K: Any, y: chex.Array, *, x: Any = None, penalty: float = 0.0
) -> KernelRegression:
    """Return the kernel (ridge) regression: the minimiser of ``|y - K w|^2 + penalty w'Kw``.

    Parameters
    ----------
    K : array [n, n] or [n, n, outputs, outputs], :class:`ntk.Kernels` or kernel function
        Kernel of the training inputs, symmetric up to rounding; the tangent kernel of a record.
    y : array [n] or [n, outputs]
        Targets.
    x : array [n, ...], optional
        Training inputs, if ``K`` is a kernel function (:func:`ntk.kernel_matrix` also computes
        ``cross``).
    penalty : float
        Added to the diagonal: weight decay, noise variance, or a remedy for a singular ``K``. No
        hidden jitter is added.

    Returns
    -------
    KernelRegression
        With ``predict(cross)`` and ``leave_one_out()``. NaN if an invalid argument is traced.

    Raises
    ------
    ValueError
        If the shapes do not fit, ``K`` is not finite and symmetric, ``y`` is not finite,
        ``penalty`` is negative, or ``K + penalty I`` is not positive definite, or singular to
        rounding: an error of 64 eps in its entries could make it singular.

    Notes
    -----
    :func:`ntk.posterior` makes the same predictions and bounds their roundoff. Time n^3 / 3, memory
    one more matrix; for a kernel of several outputs, n counts pairs of inputs and outputs.

    Examples
    --------
    >>> fit = kernel_regression(jnp.array([[2.0, 1.0], [1.0, 2.0]]), jnp.array([3.0, 0.0]))
    >>> fit.predict(jnp.array([[2.0, 1.0], [1.0, 1.0]])).round(4)
    Array([3., 1.], dtype=float...)
    >>> fit.leave_one_out().round(4)
    Array([ 3. , -1.5], dtype=float...)
    """
    training = check_training_set(K, y, x=x)
    factor = cholesky(training.matrix, penalty)
    weights = jax.scipy.linalg.cho_solve((factor, True), training.columns)
    return KernelRegression(weights.reshape(training.shape), factor)


def excess_risk_term(K: Any, y: chex.Array, *, x: Any = None) -> ExcessRisk:
    """Return ``y'K^-1 y`` and ``sqrt(y'K^-1 y / n)``, the data-dependent terms of risk bounds.

    The first term of Oymak et al. (2021), Theorem 3, is ``2 B sqrt(y'K^-1 y / n)``. Their Theorem 2
    also needs a factor R, the largest l1 norm of alpha; the paper omits R, and the theorem is false
    for R > 1. Zhu et al. (2022), Theorem 3, bounds the same term from above by ``sqrt(y'y / (n
    lambda_min))``, which for labels of +-1 does not decrease in n.

    Parameters
    ----------
    K, y, x
        As in :func:`kernel_regression`; several outputs are summed over.

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
    training = check_training_set(K, y, x=x)
    factor = cholesky(training.matrix, 0.0)
    whitened = jax.scipy.linalg.solve_triangular(factor, training.columns, lower=True)
    quadratic = jnp.sum(whitened**2)
    return ExcessRisk(quadratic, jnp.sqrt(quadratic / len(y)))


def gradient_flow(
    K: Any,
    y: chex.Array,
    t: chex.Array | float,
    *,
    x: Any = None,
    f0: chex.Array | float = 0.0,
    cross: chex.Array | None = None,
    cross_f0: chex.Array | float = 0.0,
    penalty: float = 0.0,
) -> jax.Array:
    """Return predictions after training up to ``t``: ``f_0(x) + k(x, X) phi_t(K) (y - f_0(X))``.

    The flow is ``df/dt = -K (f - y)``, of the loss ``1/2 |f(X) - y|^2`` summed, not averaged:
    T steps of gradient descent of size eta on the summed loss are ``t = eta T``, on the mean
    squared error ``t = 2 eta T / n``.

    Parameters
    ----------
    K, y
        As in :func:`kernel_regression`, but ``K`` can be singular.
    t : float or array [...]
        Nonnegative times; ``inf`` is the limit, kernel regression.
    x : array [n, ...], optional
        Training inputs, if ``K`` is a kernel function.
    f0 : float or array like y
        Predictions on the training inputs at time 0.
    cross : array [m, n] or [m, n, outputs, outputs], optional
        Kernel of the inputs to predict at with the training inputs. Default: predict at the
        training inputs.
    cross_f0 : float or array [m] or [m, outputs]
        Predictions at the inputs of ``cross`` at time 0.
    penalty : float
        Weight decay towards the weights at time 0: ``phi_t(K + penalty I)``, not ``phi_t(K)``.

    Returns
    -------
    array [..., m] or [..., m, outputs]
        Axes of ``t`` first. Differentiable once in all arguments, also at multiple eigenvalues.

    Raises
    ------
    ValueError
        If the shapes do not fit, an argument is not finite, ``K`` is not symmetric, or a ``t`` or
        the ``penalty`` is negative. Also if errors of 64 eps in the entries of kernels can move
        predictions at time ``t`` by a tenth of ``y - f0``. A traced ``t`` gives NaN instead.

    Notes
    -----
    Time: about 10 n^3 for the eigendecomposition, n^2 m for errors, then n^2 + n m per time and
    output. If no eigenvalue is between n eps and the root of eps, relative to the largest, smaller
    eigenvalues count as 0, because the kernel has a lower rank. A direction where ``K`` is
    singular to rounding moves like one of eigenvalue 0 for ``t`` under ``1 / (n eps |K|)``, and
    then returns: in the limit it does not move.

    Examples
    --------
    >>> K, y = jnp.diag(jnp.array([1.0, 0.0])), jnp.array([1.0, 1.0])
    >>> gradient_flow(K, y, jnp.array([0.0, 1.0, jnp.inf]))[:, 0]
    Array([0.  , 0.63, 1.  ], dtype=float...)
    """
    training = check_training_set(K, y, x=x)
    matrix, shape = training.matrix, training.shape
    t = check_times(t, matrix.dtype)
    f0, cross_f0 = real_array("f0", f0), real_array("cross_f0", cross_f0)
    if cross is None:
        cross, cross_f0, there = matrix, f0, shape
    else:
        cross, there = check_cross_kernel("cross", cross, training)
    for name, start, expected in (("f0", f0, shape), ("cross_f0", cross_f0, there)):
        if start.shape not in ((), expected):
            raise ValueError(f"{name}: expected a number or shape {expected}, got {start.shape}.")
    columns = training.columns - f0.reshape(training.columns.shape if f0.ndim else ())
    moved = refined(with_penalty(matrix, penalty), cross.astype(matrix.dtype), columns, t.ravel())
    return cross_f0 + matmul(cross, moved).reshape(*t.shape, *there)
