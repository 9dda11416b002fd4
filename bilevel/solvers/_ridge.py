"""Solve ridge regression on features in closed form."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from bilevel.contracts import LowerSolver, Pytree
from bilevel.internal.checks import check_dense, common_dtype, describe, function, nan_unless_finite
from ntk.internal.products import matmul


def ridge(
    features: Callable[[Pytree, jax.Array], jax.Array], penalty: Callable[[Pytree], jax.Array]
) -> LowerSolver:
    """Solve ridge regression on features in closed form.

        w(alpha) = argmin_w 1/2 |Phi w - y|^2 + 1/2 penalty |w|^2,    Phi = features(alpha, x)

    Parameters
    ----------
    features : ``features(alpha, x) -> [n, p]``
    penalty : ``penalty(alpha) -> scalar >= 0``
        Or a vector [p], one penalty per weight. 0 is the ridgeless limit: least squares for
        n >= p, and the minimum-norm interpolant for n < p. Both need full rank.

    Returns
    -------
    LowerSolver
        For batches ``(x, y)`` with ``y`` [n] or [n, c]; ``w`` is [p] or [p, c]. Features and labels
        may be integers. Primal (p x p) if n >= p or the penalty is a vector, else dual (n x n). It
        does not call the problem's ``lower``, which should be the loss above up to a positive
        factor: ``info.error_estimate`` checks this. It is infinite in the ridgeless limit with
        n < p, where that Hessian is singular, though the gradient is right.

    Raises
    ------
    ValueError
        If an argument is not a function. At run time, if the features are not a matrix with one row
        per label, or ``w0`` has another shape than the solution.

    Notes
    -----
    Cost: one factorization, which its derivative reuses. The ridgeless predictor does not change
    when the features are scaled, so for features linear in alpha its hypergradient satisfies
    ``alpha . grad = 0`` (Oymak et al. 2021, Definition 2).

    Examples
    --------
    >>> solver = ridge(lambda alpha, x: alpha * x, lambda alpha: 0.0)
    >>> batch = (jnp.array([[1.0], [1.0]]), jnp.array([2.0, 4.0]))
    >>> solver.run(None, 2.0, jnp.zeros(1), (), batch)[0]
    Array([1.5], dtype=float...)
    """
    function("features", features, "(alpha, x) -> [n, p]")
    function("penalty", penalty, "alpha -> penalty")

    def run(lower, alpha, w, state, batch):
        x, y = batch
        phi = features(alpha, x)
        for name, value in (("features", phi), ("labels", y)):
            check_dense(name, value)
        dtype = common_dtype(*jax.tree.leaves(w), phi, y)
        if not jnp.issubdtype(dtype, jnp.floating):  # integers would lose the derivative
            dtype = jnp.result_type(float)
        phi, y = jnp.asarray(phi, dtype), jnp.asarray(y, dtype)
        if phi.ndim != 2 or phi.shape[0] != y.shape[0]:
            raise ValueError(
                f"features: expected a matrix with {y.shape[0]} rows, one per label, "
                f"got shape {phi.shape}."
            )
        decay = jnp.asarray(penalty(alpha), phi.dtype)
        n, p = phi.shape
        if n >= p or decay.ndim == 1:
            weights = _solve_penalized_gram(phi.T, decay, matmul(phi.T, y))
        else:
            weights = matmul(phi.T, _solve_penalized_gram(phi, decay, y))
        return nan_unless_finite(_cast_like(w, weights), decay), state

    return LowerSolver(init=lambda w: (), run=run, closed_form=True, of_alpha=True)


def _cast_like(w: Pytree, weights: jax.Array) -> jax.Array:
    if w is None:  # the solver runs alone
        return weights
    shape = jnp.shape(w) if hasattr(w, "dtype") else describe(w)
    if shape != weights.shape:
        raise ValueError(
            f"w0: expected an array of shape {weights.shape}, as features and labels say, "
            f"got {shape}."
        )
    return weights.astype(w.dtype)


def _solve_penalized_gram(a: jax.Array, decay: jax.Array, b: jax.Array) -> jax.Array:
    """Solve ``(a a' + diag(decay)) x = b`` by Cholesky; its derivative applies ``a`` and ``a'``."""
    per_row = decay if decay.ndim == 0 or b.ndim == 1 else decay[:, None]
    matrix = matmul(a, a.T) + jnp.diag(jnp.broadcast_to(decay, a.shape[:1]))
    factor = jax.scipy.linalg.cho_factor(jax.lax.stop_gradient(matrix), lower=True)
    return jax.lax.custom_linear_solve(
        lambda v: matmul(a, matmul(a.T, v)) + per_row * v,
        b,
        solve=lambda _, b: jax.scipy.linalg.cho_solve(factor, b),
        symmetric=True,
    )
