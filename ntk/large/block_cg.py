"""Preconditioned conjugate gradients for several right-hand sides at once.

A pass over all entries of a kernel costs far more than products with a few vectors. So all columns
share one Krylov space: a step minimises every column's error, in the norm of A, over all products
so far. Columns may depend on each other or converge early: we drop redundant directions.

The operator A and the preconditioner P are symmetric positive definite. B and X [n, q] are the
right-hand sides and solutions. The residual is ``B - A X = Q C`` with ``Q' P^-1 Q = I``. The
directions S satisfy ``S' A S_old = 0``. Without a callback or a start, X has derivatives:
``A dX = dB - dA X``, solved by the same method.

References: O'Leary (1980), "The block conjugate gradient algorithm and related methods"; Dubrulle
(2001), "Retooling the method of block conjugate gradients". His form keeps Q orthonormal.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ntk.internal.checks import concrete, describe, function, integer, positive
from ntk.internal.compile_cache import program
from ntk.internal.products import matmul
from ntk.large.kernel_operator import Operator
from ntk.large.partial_cholesky import PartialCholesky, check_preconditioner
from ntk.large.preconditioner import Preconditioner, ridge_preconditioner, solve

_BELOW = 0.8  # share of the tolerance at which the true residual is computed
_STALLED = 0.9  # stop if a true residual is above this share of the one before


class SolverState(NamedTuple):
    """The state of conjugate gradients after some passes. A later call can resume from it."""

    weights: jax.Array  # X [n, q]
    basis: jax.Array  # Q [n, q]
    directions: jax.Array  # S [n, q]
    factor: jax.Array  # C [q, q]
    steps: jax.Array  # []: passes over K so far
    residual: jax.Array  # [q], norms of B - A X over those of B
    computed: jax.Array  # []: whether they are computed from X, or by the recurrence
    before: jax.Array  # []: the largest residual computed from X before this one


def solve_block_cg(
    K: Operator,
    B: jax.Array,
    penalty: jax.Array,
    preconditioner: PartialCholesky | None,
    tol: float,
    steps: int,
    start: SolverState | None = None,
    callback: Callable[[SolverState], Any] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Solve ``(K + penalty I) X = B`` for B [n, q] as :func:`ntk.iterative_regression` does.

    Return X (NaN if A is not positive definite), ``|B - A X|`` [q], its ratio to ``|B|``, and the
    number of passes.
    """
    positive("tol", tol)
    steps = integer("steps", steps, 1)
    check_preconditioner(preconditioner, len(B))
    if start is not None and not isinstance(start, SolverState):
        raise ValueError(f"start: expected a SolverState, got {describe(start)}.")
    if start is not None and (got := jnp.shape(start.weights)) != B.shape:
        raise ValueError(f"start: expected weights of shape {B.shape}, got {got}.")
    if callback is not None:
        function("callback", callback, "of a SolverState")

    def begin(K, preconditioner, penalty, B):
        P = ridge_preconditioner(preconditioner, K.diagonal().astype(B.dtype), penalty)
        unit, scale = _normalize_columns(B)
        return P, unit, scale, start_block_cg(P, unit)

    def once(K, P, penalty, unit, state):
        product = functools.partial(_regularized_product, K, penalty)
        return step_block_cg(product, P, unit, tol, steps, state)

    def every(K, P, penalty, unit, state):
        step = functools.partial(once, K, P, penalty, unit)
        return jax.lax.while_loop(lambda s: unfinished(s, tol, steps), step, state)

    def whole_solve(K, preconditioner, penalty, B):
        def solve(_, B):
            P, unit, scale, state = begin(K, preconditioner, penalty, B)
            solution, *details = _unscale_solution(every(K, P, penalty, unit, state), scale)
            return solution, details

        solution, details = jax.lax.custom_linear_solve(
            lambda v: _regularized_product(K, penalty, v), B, solve, symmetric=True, has_aux=True
        )
        return solution, *details

    given = K, preconditioner, penalty, B
    if callback is None and start is None:
        return program(whole_solve, *given)(*given)
    P, unit, scale, state = program(begin, *given)(*given)
    state = state if start is None else jax.tree.map(jnp.asarray, start)
    given = K, P, penalty, unit
    if callback is None or not concrete(given, state):
        return _unscale_solution(program(every, *given, state)(*given, state), scale)
    run = program(once, *given, state)
    while unfinished(state, tol, steps):
        state = run(*given, state)
        callback(state)
    return _unscale_solution(state, scale)


def _regularized_product(K: Operator, penalty, v):
    return (K @ v + penalty * v).astype(v.dtype)


def _normalize_columns(B):
    """Return columns of length 1, so that one cutoff fits all of them, and their lengths."""
    largest = jnp.max(jnp.abs(B), axis=0)  # scaled first, as its square may over- or underflow
    scaled = B / jnp.where(largest > 0, largest, 1)[None]
    scale = largest * jnp.sqrt(jnp.sum(scaled**2, axis=0))
    return B / jnp.where(scale > 0, scale, 1)[None], scale


def _unscale_solution(state: SolverState, scale):
    failed = jnp.isnan(state.residual).any()
    solution = jnp.where(failed, jnp.nan, state.weights * scale[None])
    return solution, state.residual * scale, state.residual, state.steps


def start_block_cg(P: Preconditioner, B: jax.Array) -> SolverState:
    """Return the state at X = 0."""
    Q, S, C = _orthonormal(B, solve(P, B))
    residual = _relative_residual(B, B)  # 1, but 0 for columns of 0 and NaN for columns of NaN
    never, before = jnp.zeros((), jnp.int32), jnp.asarray(jnp.inf, B.dtype)
    return SolverState(jnp.zeros_like(B), Q, S, C, never, residual, jnp.array(True), before)


def unfinished(state: SolverState, tol, most) -> jax.Array:
    """Return whether another pass can help. NaN gives False."""
    worst = jnp.max(state.residual)
    again = ~state.computed | ((worst > tol) & (worst < _STALLED * state.before))
    return again & (state.steps < most) & ~jnp.isnan(worst)


def step_block_cg(
    A: Callable[[jax.Array], jax.Array], P: Preconditioner, B: jax.Array, tol, most, s: SolverState
) -> SolverState:
    """Take one pass over A: a step, or the true residual if it seems small or is the last."""
    small = jnp.max(s.residual) <= jnp.where(s.computed, tol, _BELOW * tol)
    look = (small & ~s.computed) | (s.steps + 1 >= most)
    image = A(jnp.where(look, s.weights, s.directions))
    return jax.lax.cond(look, _recompute_residual, _take_cg_step, P, B, image, s)


def _recompute_residual(P, B, image, s: SolverState) -> SolverState:
    R = B - image
    Q, S, C = _orthonormal(R, solve(P, R))
    residual = _relative_residual(R, B)
    return SolverState(s.weights, Q, S, C, s.steps + 1, residual, jnp.array(True), s.before)


def _take_cg_step(P, B, image, s: SolverState) -> SolverState:
    energy, positive = _inverse(_inner(s.directions, image))
    weights = s.weights + matmul(s.directions, matmul(energy, s.factor))
    next_basis = s.basis - matmul(image, energy)
    Q, Z, turn = _orthonormal(next_basis, solve(P, next_basis))
    factor = matmul(turn, s.factor)
    residual = jnp.where(positive, _relative_residual(matmul(Q, factor), B), jnp.nan)
    # The next true residual is compared with the last one.
    before = jnp.where(s.computed, jnp.max(s.residual), s.before)
    directions, steps = Z + matmul(s.directions, turn.T), s.steps + 1
    return SolverState(weights, Q, directions, factor, steps, residual, jnp.array(False), before)


def _orthonormal(W, Z):
    """Return ``Q, P^-1 Q, C`` with ``W = Q C`` and ``Q' P^-1 Q = I``, for ``Z = P^-1 W``."""
    # Directions that are rounding errors of the others become 0.
    Q, C = W, jnp.eye(W.shape[1], dtype=W.dtype)
    for _ in range(2):  # the second time removes rounding errors of the first
        values, vectors = jnp.linalg.eigh(_inner(Q, Z))
        significant = values > _eigenvalue_cutoff(values)
        root = jnp.sqrt(jnp.where(significant, values, 1))
        narrow = vectors * jnp.where(significant, 1 / root, 0)[None]
        Q, Z = matmul(Q, narrow), matmul(Z, narrow)
        C = matmul((vectors * jnp.where(significant, root, 0)[None]).T, C)
    return Q, Z, C


def _inverse(T):
    """Return the inverse of T >= 0, with 0 for eigenvalues within rounding, and whether T >= 0."""
    values, vectors = jnp.linalg.eigh(T)
    significant = values > _eigenvalue_cutoff(values)
    positive = values[0] >= -100 * _eigenvalue_cutoff(values)
    inverse = jnp.where(significant, 1 / jnp.where(significant, values, 1), 0)
    return matmul(vectors * inverse[None], vectors.T), positive


def _eigenvalue_cutoff(values):
    return 10 * len(values) * jnp.finfo(values.dtype).eps * jnp.max(jnp.abs(values))


def _inner(a, b):
    gram = matmul(a.T, b)
    return (gram + gram.T) / 2


def _relative_residual(R, B):
    lengths, residuals = (jnp.sqrt(jnp.sum(columns**2, axis=0)) for columns in (B, R))
    return residuals / jnp.where(lengths > 0, lengths, 1)
