"""Kernel regression without the kernel's matrix: conjugate gradients, and how far off they are.

The fit is that of :func:`ntk.kernel_regression`, ``f(x) = k(x, X) w`` with ``A w = y`` for
``A = K + penalty I``, of a kernel known by its products: :mod:`ntk.operator`. Conjugate gradients
end at some w with the residual ``r = y - A w``, computed from w and not from their recurrence.

**What the residual says of predictions.** They are off by ``e = k(x, X) A^-1 r``. By the inequality
of Cauchy and Schwarz in the product ``u' A^-1 v``,

    e^2 <= (k' A^-1 k) (r' A^-1 r),    k = k(X, x).

The kernel of X and x together is positive semidefinite, and so is the penalty on X: of
``[A, k; k', k(x, x)]`` the Schur complement says ``k' A^-1 k <= k(x, x)``. With a number lambda
that is not over the smallest eigenvalue of A, ``r' A^-1 r <= |r|^2 / lambda``. Together

    |e| <= sqrt(k(x, x) / lambda) |r|,

for every x, and smaller than ``|k| |r| / lambda`` by some ``sqrt(n)``. The penalty is such a
lambda, as K >= 0: that needs no estimate. It is a bound for the numbers that K's entries are,
rounding in the entries, in r and in ``k(x, X) w`` not counted.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from ntk import _block_cg
from ntk._block_cg import SolverState
from ntk._checks import array, concrete, finite, floats, function, number, positive, short, whole
from ntk._placement import automatic
from ntk._preconditioner import preconditioner
from ntk._programs import program
from ntk.operator import Operator
from ntk.partial_cholesky import PartialCholesky, square


class IterativeRegression(NamedTuple):
    """Result of :func:`iterative_regression`."""

    weights: jax.Array  # like y: w, nearly (K + penalty I)^-1 y
    residual: jax.Array  # [] or [outputs]: |y - (K + penalty I) w|, computed from w
    relative: jax.Array  # the same over |y|
    steps: jax.Array  # []: passes over the pairs of inputs
    penalty: jax.Array  # []

    def predict(self, cross: Any) -> jax.Array:
        """Predictions ``k(x, X) weights``.

        Parameters
        ----------
        cross : operator or array [m, n]
            Kernel of the inputs to predict at with the training inputs: ``K.at(x)``.

        Returns
        -------
        array [m] or [m, outputs]
        """
        return cross @ self.weights

    def error_bound(self, prior: chex.Array, *, smallest: Any = 0.0) -> jax.Array:
        """A bound of what predictions are off by for want of more steps, as the module has it.

        ``|k(x, X) (w - A^-1 y)| <= sqrt(k(x, x) / (smallest + penalty)) |y - A w|``

        Parameters
        ----------
        prior : array [m]
            The kernel ``k(x, x)`` of each input with itself: ``K.at(x).diagonal()``.
        smallest : float
            A number that is not over the smallest eigenvalue of K: 0 always is one. With a lower
            end of :func:`ntk.eigenvalue_interval` the bound has its probability; with an
            estimate, it is an estimate.

        Returns
        -------
        array [m] or [m, outputs]
            Infinite where ``smallest`` and penalty are 0.

        Raises
        ------
        ValueError
            If ``prior`` is no list of numbers, or ``smallest`` negative.
        """
        prior, smallest = floats("prior", prior), number("smallest", smallest)
        if prior.ndim != 1:
            raise ValueError(f"prior: expected shape [m], got {prior.shape}.")
        if concrete(smallest) and not smallest >= 0:
            raise ValueError(f"smallest: expected a nonnegative number, got {smallest}.")
        size = jnp.sqrt(prior / (self.penalty + smallest))
        return jnp.multiply.outer(size, self.residual)


def iterative_regression(
    K: Operator,
    y: chex.Array,
    *,
    penalty: float = 0.0,
    partial: PartialCholesky | None = None,
    tol: float = 1e-4,
    steps: int = 1000,
    start: SolverState | None = None,
    callback: Callable[[SolverState], Any] | None = None,
) -> IterativeRegression:
    """Kernel (ridge) regression by conjugate gradients: a kernel of any size, several outputs.

    Parameters
    ----------
    K : KernelOperator or EmpiricalOperator
        Kernel of the training inputs, symmetric, positive semidefinite.
    y : array [n] or [n, outputs]
        Targets.
    penalty : float
        Added to the diagonal: weight decay, or noise variance. There is no hidden jitter.
    partial : PartialCholesky, optional
        Of K, for the preconditioner; its diagonal alone by default. Each doubling of the rank
        saves a third of the steps or so, and costs memory, ``n rank`` numbers.
    tol : float
        Of the residual of each output, relative to the norm of its targets.
    steps : int
        The most passes over all pairs of inputs.
    start : SolverState, optional
        Where an earlier call with the same arguments was, as its callback was told: go on there.
    callback : function, optional
        Called after every pass with a SolverState: its ``steps``, ``residual`` [outputs]
        (relative; ``computed`` from the weights, or what the recurrence says), and all that is
        needed to go on. Each pass is then a call of a compiled program, otherwise all are one.
        Not called where an argument is traced.

    Returns
    -------
    IterativeRegression
        With ``predict(cross)`` and ``error_bound(prior)``. If ``relative`` is over ``tol``, steps
        were too few, or rounding has the last word: look at it.

    Raises
    ------
    ValueError
        If the shapes do not fit, ``y`` is not finite, ``penalty`` is negative, ``tol`` not
        positive, or K and the penalty turn out not to be positive definite. Where an argument is
        traced, the result is NaN then.

    Notes
    -----
    All columns of ``y`` share one block Krylov space: a step costs one product ``K @ S`` for as
    many columns, and the preconditioner's ``4 n rank`` multiply-adds for each. The residual is
    computed anew at the end, which costs a pass too; where that is over ``tol``, the iteration goes
    on from it. Memory beside K's: the factor, and four arrays like ``y``. In float32 relative
    residuals of some 1e-5 can be reached where K has 60,000 rows.

    References
    ----------
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
    square("K", K)
    y = array("y", y)
    if y.ndim not in (1, 2) or y.shape[0] != K.shape[0] or not y.size:
        n = K.shape[0]
        raise ValueError(f"y: expected shape [{n}] or [{n}, outputs], got {y.shape}.")
    finite("y", y, "targets")
    ridge = checked_penalty(penalty, K.dtype)
    columns = automatic(y.astype(jnp.result_type(y, K.dtype)).reshape(len(y), -1))
    # All of one length: what a direction adds is held against the largest.
    largest = jnp.max(jnp.abs(columns), axis=0)  # whose square may be too large a number, or none
    scaled = columns / jnp.where(largest > 0, largest, 1)
    scale = largest * jnp.sqrt(jnp.sum(scaled**2, axis=0))
    unit = columns / jnp.where(scale > 0, scale, 1)
    state = solved(K, unit, ridge, partial, tol, steps, start, callback)
    shape = y.shape[1:]
    relative = state.residual.reshape(shape)
    weights = (state.weights * scale).reshape(y.shape)
    found = IterativeRegression(
        weights, relative * scale.reshape(shape), relative, state.steps, ridge
    )
    if concrete(found) and np.isnan(relative).any():
        raise ValueError(
            "K: expected a positive definite kernel (a larger penalty makes it one) with finite "
            "entries, got one with a product that is negative or NaN."
        )
    return found


def checked_penalty(penalty: Any, dtype: Any) -> jax.Array:
    """The penalty as an array; NaN where it is traced and negative.

    Raises
    ------
    ValueError
        If it is no nonnegative number.

    Examples
    --------
    >>> checked_penalty(-1.0, jnp.float32)
    Traceback (most recent call last):
    ValueError: penalty: expected a nonnegative number, got -1.0.
    """
    given = number("penalty", penalty)
    if concrete(given) and not given >= 0:
        raise ValueError(f"penalty: expected a nonnegative number, got {penalty}.")
    return jnp.where(penalty >= 0, penalty, jnp.nan).astype(dtype)


def solved(
    K: Operator,
    B: jax.Array,
    penalty: jax.Array,
    partial: PartialCholesky | None,
    tol: float,
    steps: int,
    start: SolverState | None = None,
    callback: Callable[[SolverState], Any] | None = None,
) -> SolverState:
    """``(K + penalty I) X = B`` for B [n, q]: :func:`iterative_regression` has the arguments.

    Raises
    ------
    ValueError
        For a partial factor, a tolerance, steps, a start or a callback that are none.

    Examples
    --------
    >>> from ntk import KernelOperator
    >>> K = KernelOperator(lambda a, b: a @ b.T, jnp.eye(2))
    >>> solved(K, jnp.ones((2, 1)), jnp.array(1.0), None, 1e-3, 9).weights.T
    Array([[0.5, 0.5]], dtype=float...)
    """
    positive("tol", tol)
    steps = whole("steps", steps, 1)
    _check(K, B, partial, start, callback)

    def begin(K, partial, penalty, B):
        P = preconditioner(partial, K.diagonal().astype(B.dtype), penalty)
        return P, _block_cg.start(P, B)

    def once(K, P, penalty, B, state):
        def A(v):
            return K @ v + penalty * v

        return _block_cg.step(A, P, B, tol, steps, state)

    def all_steps(K, P, penalty, B, state):
        return jax.lax.while_loop(
            lambda s: _block_cg.unfinished(s, tol, steps),
            lambda s: once(K, P, penalty, B, s),
            state,
        )

    P, state = program(begin, K, partial, penalty, B)(K, partial, penalty, B)
    state = state if start is None else jax.tree.map(jnp.asarray, start)
    given = K, P, penalty, B
    if callback is None or not concrete(given, state):
        state = program(all_steps, *given, state)(*given, state)
    else:
        run = program(once, *given, state)
        while _block_cg.unfinished(state, tol, steps):
            state = run(*given, state)
            callback(state)
    failed = jnp.isnan(state.residual).any()
    return state._replace(weights=jnp.where(failed, jnp.nan, state.weights))


def _check(K, B, partial, start, callback):
    n, q = B.shape
    if partial is not None and not isinstance(partial, PartialCholesky):
        raise ValueError(f"partial: expected the result of partial_cholesky, got {short(partial)}.")
    if partial is not None and len(partial.factor) != n:
        raise ValueError(f"partial: expected {n} rows, as K has, got {len(partial.factor)}.")
    if start is not None and not isinstance(start, SolverState):
        raise ValueError(f"start: expected a SolverState, got {short(start)}.")
    if start is not None and jnp.shape(start.weights) != (n, q):
        raise ValueError(
            f"start: expected weights of shape {(n, q)}, got {jnp.shape(start.weights)}."
        )
    if callback is not None:
        function("callback", callback, "of a SolverState")
