"""Kernel regression without the kernel's matrix: conjugate gradients, and their error.

The fit is that of :func:`ntk.kernel_regression`, ``f(x) = k(x, X) w`` with ``A w = y`` for ``A = K
+ penalty I``, of a kernel known by its products: :mod:`ntk.large.kernel_operator`. Conjugate
gradients end at some w with the residual ``r = y - A w``, computed from w itself.

**The error of predictions** is ``e = k(x, X) A^-1 r``. By the inequality of Cauchy and Schwarz in
the product ``u' A^-1 v``,

    e^2 <= (k' A^-1 k) (r' A^-1 r),    k = k(X, x).

The kernel of X and x together is positive semidefinite, and so is the penalty on X. By the Schur
complement of ``[A, k; k', k(x, x)]``, ``k' A^-1 k <= k(x, x)``. With a lower bound lambda of the
smallest eigenvalue of A, ``r' A^-1 r <= |r|^2 / lambda``. Together

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

from ntk.internal.checks import (
    common_dtype,
    concrete,
    float_array,
    nonnegative_number,
    regression_targets,
)
from ntk.internal.sharding import without_explicit_axes
from ntk.large.block_cg import SolverState, solve_block_cg
from ntk.large.kernel_operator import Operator
from ntk.large.partial_cholesky import PartialCholesky, check_square_operator


class IterativeRegression(NamedTuple):
    """Result of :func:`iterative_regression`."""

    weights: jax.Array  # like y: w, nearly (K + penalty I)^-1 y
    residual: jax.Array  # [] or [outputs]: |y - (K + penalty I) w|, computed from w
    relative: jax.Array  # the same over |y|
    steps: jax.Array  # []: passes over the pairs of inputs
    penalty: jax.Array  # []

    def predict(self, cross: Any) -> jax.Array:
        """Return the predictions ``k(x, X) weights``, [m] or [m, outputs].

        Parameters
        ----------
        cross : operator or array [m, n]
            Kernel of the inputs to predict at with the training inputs: ``K.at(x)``.
        """
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
            A lower bound of the smallest eigenvalue of K, such as 0. With the lower end of
            :func:`ntk.eigenvalue_interval` the bound has its probability; with an estimate, it is
            an estimate.

        Raises
        ------
        ValueError
            If ``prior`` is not [m], or ``smallest`` is negative.
        """
        prior = float_array("prior", prior)
        if prior.ndim != 1:
            raise ValueError(f"prior: expected shape [m], got {prior.shape}.")
        smallest = nonnegative_number("smallest", smallest)
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
        pass is then a separate call of a compiled program. If an argument is traced, the
        callback is not called.

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
    All columns of ``y`` share one block Krylov space: a step costs one product ``K @ S`` with the
    same number of columns, and the preconditioner's ``4 n rank`` multiply-adds for each. The
    residual is computed anew at the end, which costs a pass. If it is over ``tol``, the iteration
    continues. Memory in addition to K's: the factor, and four arrays like ``y``. Float32 reaches
    relative residuals of about 1e-5 for 60,000 rows. Method: O'Leary (1980); Dubrulle (2001).

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
    check_square_operator("K", K)
    y = regression_targets(y, K.shape[0])
    ridge = nonnegative_number("penalty", penalty).astype(K.dtype)
    columns = without_explicit_axes(y.astype(common_dtype(y, K.dtype)).reshape(len(y), -1))
    done = solve_block_cg(K, columns, ridge, preconditioner, tol, steps, start, callback)
    residual, relative = (r.reshape(y.shape[1:]) for r in (done.residual, done.relative))
    fit = IterativeRegression(done.solution.reshape(y.shape), residual, relative, done.steps, ridge)
    if concrete(fit) and np.isnan(relative).any():
        raise ValueError(
            "K: expected a positive definite kernel (a larger penalty makes it one) with finite "
            "entries, got one with a product that is negative or NaN."
        )
    return fit
