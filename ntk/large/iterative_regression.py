"""Kernel regression without the kernel's matrix: conjugate gradients, and their error.

The fit is that of :func:`ntk.kernel_regression`, ``f(x) = k(x, X) w`` with ``A w = y`` for ``A = K
+ penalty I``, of a kernel known by its products: :mod:`ntk.large.kernel_operator`. Conjugate
gradients end at some w with the residual ``r = y - A w``, computed from w itself.

**The error of predictions** is ``e = k(x, X) A^-1 r``. By the inequality of Cauchy and Schwarz in
the product ``u' A^-1 v``, ``e^2 <= (k' A^-1 k) (r' A^-1 r)`` for ``k = k(X, x)``. The kernel of X
and x together is positive semidefinite, and so is the penalty on X. By the Schur complement of
``[A, k; k', k(x, x)]``, ``k' A^-1 k <= k(x, x)``. With a lower bound lambda of the smallest
eigenvalue of A, ``r' A^-1 r <= |r|^2 / lambda``. Together

    |e| <= sqrt(k(x, x) / lambda) |r|,

for every x, which is about ``sqrt(n)`` times smaller than ``|k| |r| / lambda``. As K >= 0, the
penalty is such a lambda. The bound holds for the computed entries of K. It does not include
rounding in the entries, in r and in ``k(x, X) w``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from ntk.internal import checks
from ntk.internal.compile_cache import program
from ntk.internal.sharding import without_explicit_axes
from ntk.large.block_cg import SolverState, solve_block_cg
from ntk.large.kernel_operator import Operator
from ntk.large.partial_cholesky import PartialCholesky, check_square_operator
from ntk.large.preconditioner import inverse_diagonal, ridge_preconditioner, solve


class IterativeRegression(NamedTuple):
    """Result of :func:`iterative_regression`."""

    weights: jax.Array  # like y: w, nearly (K + penalty I)^-1 y
    residual: jax.Array  # [] or [outputs]: |y - (K + penalty I) w|, computed from w
    relative: jax.Array  # the same over |y|
    steps: jax.Array  # []: passes over the pairs of inputs
    penalty: jax.Array  # []

    def predict(self, cross: Any) -> jax.Array:
        """Return ``k(x, X) weights``, [m] or [m, outputs]; ``cross`` is ``K.at(x)`` or [m, n]."""
        return cross @ self.weights

    def error_bound(self, prior: chex.Array, *, smallest: Any = 0.0) -> jax.Array:
        """Bound the error of predictions due to too few steps, by the module's formula.

        ``|k(x, X) (w - A^-1 y)| <= sqrt(k(x, x) / (smallest + penalty)) |y - A w|``, [m] or
        [m, outputs]; infinite if ``smallest`` and the penalty are 0.

        Parameters
        ----------
        prior : array [m]
            The kernel ``k(x, x)`` of each input with itself: ``K.at(x).diagonal()``.
        smallest : float
            A lower bound of the smallest eigenvalue of K, such as the lower end of
            :func:`ntk.eigenvalue_interval` (with its probability).

        Raises
        ------
        ValueError
            If ``prior`` is not [m], or ``smallest`` is negative.
        """
        prior = checks.float_array("prior", prior)
        if prior.ndim != 1:
            raise ValueError(f"prior: expected shape [m], got {prior.shape}.")
        smallest = checks.nonnegative_number("smallest", smallest)
        size = jnp.sqrt(prior / (self.penalty + smallest))
        return jnp.multiply.outer(size, self.residual)


def iterative_regression(
    K: Operator,
    y: chex.Array,
    *,
    penalty: float = 0.0,
    preconditioner: PartialCholesky | None = None,
    tol: float = 1e-4,
    steps: int = 1000,
    start: SolverState | None = None,
    callback: Callable[[SolverState], Any] | None = None,
) -> IterativeRegression:
    """Fit kernel (ridge) regression by conjugate gradients: a kernel of any size, several outputs.

    Parameters
    ----------
    K : KernelOperator or EmpiricalOperator
        Kernel of the training inputs, symmetric, positive semidefinite.
    y : array [n] or [n, outputs]
        Targets.
    penalty : float
        Added to the diagonal: weight decay, or noise variance. No other jitter is added.
    preconditioner : PartialCholesky, optional
        Of K. Default: its diagonal. Each doubling of the rank saves about a quarter of the steps,
        and costs ``n rank`` numbers of memory.
    tol : float
        Tolerance for the residual of each output, relative to the norm of its targets.
    steps : int
        Maximum number of passes over all pairs of inputs.
    start : SolverState, optional
        State from the callback of an earlier call with the same arguments, to resume from.
    callback : function, optional
        Called after every pass with a SolverState: its ``steps``, ``residual`` [outputs] (relative;
        ``computed`` from the weights, or by the recurrence), and all that ``start`` needs. Each
        pass is then a separate call of a compiled program. Not called if an argument is traced.

    Returns
    -------
    IterativeRegression
        With ``predict(cross)`` and ``error_bound(prior)``. If ``relative`` is over ``tol``, steps
        were too few or rounding dominates.

    Raises
    ------
    ValueError
        If an argument is out of its range or has a wrong shape, or K and the penalty turn out not
        to be positive definite. With traced arguments the result is NaN then.

    Notes
    -----
    A step costs one product of K with as many columns as ``y`` has, and the preconditioner's ``4 n
    rank`` multiply-adds for each. The residual is computed anew at the end, which costs a pass. If
    it is over ``tol``, the iteration continues. Memory in addition to K's: the factor, and four
    arrays like ``y``. Float32 reaches relative residuals of about 1e-5 for 60,000 rows. Method:
    O'Leary (1980); Dubrulle (2001).

    Examples
    --------
    >>> from ntk import KernelOperator
    >>> x, y = jnp.array([[1.0, 0.0], [1.0, 1.0], [0.0, 2.0]]), jnp.array([1.0, 3.0, 4.0])
    >>> K = KernelOperator(lambda a, b: a @ b.T, x)
    >>> fit = iterative_regression(K, y, penalty=1.0)
    >>> new = K.at(jnp.array([[2.0, 1.0]]))
    >>> fit.predict(new).round(4), bool(fit.error_bound(new.diagonal())[0] < 1e-2)
    (Array([3.2353], dtype=float...), True)
    """
    check_square_operator(K)
    y = checks.regression_targets(y, K.shape[0])
    ridge = checks.nonnegative_number("penalty", penalty).astype(K.dtype)
    columns = without_explicit_axes(y.astype(checks.common_dtype(y, K.dtype)).reshape(len(y), -1))
    weights, *residuals, passes = solve_block_cg(
        K, columns, ridge, preconditioner, tol, steps, start, callback
    )
    residual, relative = (r.reshape(y.shape[1:]) for r in residuals)
    fit = IterativeRegression(weights.reshape(y.shape), residual, relative, passes, ridge)
    if checks.concrete(fit) and np.isnan(relative).any():
        raise ValueError(
            "K: expected a positive definite kernel (a larger penalty makes it one) with finite "
            "entries, got one with a product that is negative or NaN."
        )
    return fit


class LeaveOneOut(NamedTuple):
    """Result of :func:`leave_one_out_estimate`."""

    residuals: jax.Array  # like y: y_i minus the prediction at x_i of the fit without it
    standard_error: jax.Array  # like y: of each residual, to first order
    steps: jax.Array  # []: passes over the pairs of inputs


def leave_one_out_estimate(
    K: Operator,
    fit: IterativeRegression,
    *,
    key: chex.PRNGKey,
    probes: int = 16,
    preconditioner: PartialCholesky | None = None,
    tol: float = 1e-3,
    steps: int = 1000,
) -> LeaveOneOut:
    """Estimate the residuals of the fits without each sample: ``y_i - f_-i(x_i)``.

    Parameters
    ----------
    K : KernelOperator or EmpiricalOperator
        The kernel of the fit.
    fit : IterativeRegression
        With this K.
    key : PRNG key
        For the signs.
    probes : int
        Number of vectors of random signs, at least 2. The error falls with its square root.
    preconditioner : PartialCholesky, optional
        Of K. It adds no standard error for the part that it explains, and shortens the solves.
    tol, steps : float, int
        Relative tolerance of the solves, and maximum number of passes over all pairs of inputs.

    Raises
    ------
    ValueError
        If ``fit`` has another type or size, or an argument is out of its range.

    Notes
    -----
    The residual of the fit without sample i is ``w_i / (A^-1)_ii`` with ``A = K + penalty I``
    (Rasmussen & Williams 2006, Eq. 5.12). For random signs z and the preconditioner P, with a known
    diagonal of its inverse, ``(A^-1)_ii = (P^-1)_ii + E[z_i ((A^-1 - P^-1) z)_i]``. The spread over
    z gives the standard error. One solve with ``probes`` right-hand sides; ``tol`` adds an error of
    that size. Estimates below the bound ``1 / A_ii`` are replaced by it. Source: Bekas, Kokiopoulou
    & Saad (2007), "An estimator for the diagonal of a matrix".

    Examples
    --------
    >>> from ntk import KernelOperator
    >>> K = KernelOperator(lambda a, b: a @ b.T, jnp.eye(3))
    >>> fit = iterative_regression(K, jnp.array([1.0, 2.0, 3.0]), penalty=1.0)
    >>> leave_one_out_estimate(K, fit, key=jax.random.key(0), probes=2).residuals
    Array([1., 2., 3.], dtype=float...)
    """
    check_square_operator(K)
    checks.prng_key("key", key)
    if not isinstance(fit, IterativeRegression):
        raise ValueError(f"fit: expected an IterativeRegression, got {checks.describe(fit)}.")
    n = K.shape[0]
    if len(fit.weights) != n:
        raise ValueError(f"fit: expected {n} weights, as K has rows, got {len(fit.weights)}.")
    probes = checks.integer("probes", probes, 2)
    dtype = fit.weights.dtype
    signs = jax.random.rademacher(key, (n, probes), dtype)
    solution, *_, passes = solve_block_cg(K, signs, fit.penalty, preconditioner, tol, steps)

    def estimate(K, preconditioner, fit, signs, solution):
        diagonal = K.diagonal().astype(dtype)
        P = ridge_preconditioner(preconditioner, diagonal, fit.penalty)
        draws = signs * (solution - solve(P, signs))
        error = jnp.std(draws, axis=1, ddof=1) / probes**0.5
        inverse = inverse_diagonal(P) + jnp.mean(draws, axis=1)
        inverse = jnp.maximum(inverse, 1 / (diagonal + fit.penalty))
        over = (1 / inverse).reshape(-1, *[1] * (fit.weights.ndim - 1))
        residuals = fit.weights * over
        return residuals, jnp.abs(residuals * over) * error.reshape(over.shape)

    given = K, preconditioner, fit, signs, solution
    residuals, error = program(estimate, *given)(*given)
    return LeaveOneOut(residuals, error, passes)
