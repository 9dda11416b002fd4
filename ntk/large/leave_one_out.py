"""Leave-one-out residuals of a large kernel, estimated from a few solves with random signs.

The residual of sample i for the fit without it is ``w_i / (A^-1)_ii`` (Rasmussen & Williams 2006,
Eq. 5.12), ``A = K + penalty I``. For a vector z of independent random signs ``z_i (A^-1 z)_i`` has
the mean ``(A^-1)_ii``. Its variance is the sum of squares of the other entries of row i (Bekas,
Kokiopoulou & Saad 2007). The diagonal of ``P^-1`` is known for the preconditioner P, so only the
difference is estimated:

    (A^-1)_ii = (P^-1)_ii + E[z_i ((A^-1 - P^-1) z)_i]

The standard error of the mean over the vectors z is estimated from their spread. The solves end at
a tolerance, which adds an error of that size.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from ntk.internal.checks import describe, integer, prng_key
from ntk.internal.compile_cache import program
from ntk.large.block_cg import solve_block_cg
from ntk.large.iterative_regression import IterativeRegression
from ntk.large.kernel_operator import Operator
from ntk.large.partial_cholesky import PartialCholesky, check_square_operator
from ntk.large.preconditioner import inverse_diagonal, ridge_preconditioner, solve


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
        Number of vectors of random signs, at least 2. The standard error falls with its square
        root.
    preconditioner : PartialCholesky, optional
        Of K. It adds no standard error for the part that it explains, and shortens the solves.
    tol : float
        Relative tolerance of the solves.
    steps : int
        Maximum number of passes over all pairs of inputs.

    Raises
    ------
    ValueError
        If ``fit`` has another type or size, or an argument is out of its range.

    Notes
    -----
    One solve with ``probes`` right-hand sides. Estimates of ``(A^-1)_ii`` below its lower bound
    ``1 / A_ii`` are replaced by the bound. Source: Bekas, Kokiopoulou & Saad (2007), "An estimator
    for the diagonal of a matrix".

    Examples
    --------
    >>> from ntk import KernelOperator, iterative_regression
    >>> K = KernelOperator(lambda a, b: a @ b.T, jnp.eye(3))
    >>> fit = iterative_regression(K, jnp.array([1.0, 2.0, 3.0]), penalty=1.0)
    >>> leave_one_out_estimate(K, fit, key=jax.random.key(0), probes=2).residuals
    Array([1., 2., 3.], dtype=float...)
    """
    check_square_operator("K", K)
    prng_key("key", key)
    if not isinstance(fit, IterativeRegression):
        raise ValueError(f"fit: expected an IterativeRegression, got {describe(fit)}.")
    n = K.shape[0]
    if len(fit.weights) != n:
        raise ValueError(f"fit: expected {n} weights, as K has rows, got {len(fit.weights)}.")
    probes = integer("probes", probes, 2)
    dtype = fit.weights.dtype
    signs = jax.random.rademacher(key, (n, probes), dtype)
    done = solve_block_cg(K, signs, fit.penalty, preconditioner, tol, steps)

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

    given = K, preconditioner, fit, signs, done.solution
    residuals, error = program(estimate, *given)(*given)
    return LeaveOneOut(residuals, error, done.steps)
