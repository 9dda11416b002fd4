"""``(K + penalty I) X = B`` by block conjugate gradients: checked, scaled, to the end.

Where nothing is told or gone on from, X has derivatives, by the rule of linear systems: ``A dX =
dB - dA X``, solved as X was.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ntk.internal.checks import concrete, describe, function, integer, positive, real_number
from ntk.internal.compile_cache import program
from ntk.large import block_cg
from ntk.large.block_cg import SolverState
from ntk.large.kernel_operator import Operator
from ntk.large.partial_cholesky import PartialCholesky
from ntk.large.preconditioner import check_preconditioner, ridge_preconditioner


class Solved(NamedTuple):
    """Result of :func:`solve_block_cg`."""

    solution: jax.Array  # X [n, q]; NaN if A is not positive definite
    residual: jax.Array  # [q], |B - A X|, computed from X
    relative: jax.Array  # [q], over |B|
    steps: jax.Array  # []


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
    given = real_number("penalty", penalty)
    if concrete(given) and not given >= 0:
        raise ValueError(f"penalty: expected a nonnegative number, got {penalty}.")
    return jnp.where(penalty >= 0, penalty, jnp.nan).astype(dtype)


def solve_block_cg(
    K: Operator,
    B: jax.Array,
    penalty: jax.Array,
    preconditioner: PartialCholesky | None,
    tol: float,
    steps: int,
    start: SolverState | None = None,
    callback: Callable[[SolverState], Any] | None = None,
) -> Solved:
    """``(K + penalty I) X = B`` for B [n, q]: :func:`ntk.iterative_regression` has the arguments.

    Raises
    ------
    ValueError
        If an argument is not of the expected kind.

    Examples
    --------
    >>> from ntk import KernelOperator
    >>> K = KernelOperator(lambda a, b: a @ b.T, jnp.eye(2))
    >>> solve_block_cg(K, jnp.ones((2, 1)), jnp.array(1.0), None, 1e-3, 9).solution.T
    Array([[0.5, 0.5]], dtype=float...)
    """
    positive("tol", tol)
    steps = integer("steps", steps, 1)
    _check_solve_arguments(K, B, preconditioner, start, callback)

    def begin(K, preconditioner, penalty, B):
        P = ridge_preconditioner(preconditioner, K.diagonal().astype(B.dtype), penalty)
        unit, scale = _normalize_columns(B)
        return P, unit, scale, block_cg.start_block_cg(P, unit)

    def once(K, P, penalty, unit, state):
        return block_cg.step_block_cg(
            lambda v: _regularized_product(K, penalty, v), P, unit, tol, steps, state
        )

    def every(K, P, penalty, unit, state):
        return jax.lax.while_loop(
            lambda s: block_cg.unfinished(s, tol, steps),
            lambda s: once(K, P, penalty, unit, s),
            state,
        )

    def whole_solve(K, preconditioner, penalty, B):
        def solve(_, B):
            P, unit, scale, state = begin(K, preconditioner, penalty, B)
            solved = _unscale_solution(every(K, P, penalty, unit, state), scale)
            return solved.solution, solved

        solution, solved = jax.lax.custom_linear_solve(
            lambda v: _regularized_product(K, penalty, v), B, solve, symmetric=True, has_aux=True
        )
        return solved._replace(solution=solution)

    given = K, preconditioner, penalty, B
    if callback is None and start is None:
        return program(whole_solve, *given)(*given)
    P, unit, scale, state = program(begin, *given)(*given)
    state = state if start is None else jax.tree.map(jnp.asarray, start)
    given = K, P, penalty, unit
    if callback is None or not concrete(given, state):
        return _unscale_solution(program(every, *given, state)(*given, state), scale)
    run = program(once, *given, state)
    while block_cg.unfinished(state, tol, steps):
        state = run(*given, state)
        callback(state)
    return _unscale_solution(state, scale)


def _regularized_product(K: Operator, penalty, v):
    return (K @ v + penalty * v).astype(v.dtype)


def _normalize_columns(B):
    """Columns of one length, against which what a direction adds is held; and their lengths."""
    largest = jnp.max(jnp.abs(B), axis=0)  # whose square may be too large a number, or none
    scaled = B / jnp.where(largest > 0, largest, 1)[None]
    scale = largest * jnp.sqrt(jnp.sum(scaled**2, axis=0))
    return B / jnp.where(scale > 0, scale, 1)[None], scale


def _unscale_solution(state: SolverState, scale) -> Solved:
    failed = jnp.isnan(state.residual).any()
    solution = jnp.where(failed, jnp.nan, state.weights * scale[None])
    return Solved(solution, state.residual * scale, state.residual, state.steps)


def _check_solve_arguments(K, B, preconditioner, start, callback):
    n, q = B.shape
    check_preconditioner(preconditioner, n)
    if start is not None and not isinstance(start, SolverState):
        raise ValueError(f"start: expected a SolverState, got {describe(start)}.")
    if start is not None and jnp.shape(start.weights) != (n, q):
        raise ValueError(
            f"start: expected weights of shape {(n, q)}, got {jnp.shape(start.weights)}."
        )
    if callback is not None:
        function("callback", callback, "of a SolverState")
