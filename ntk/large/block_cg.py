"""Preconditioned conjugate gradients for several right-hand sides at once.

A pass over all entries of a kernel costs far more than products with a few vectors. So all columns
share one Krylov space: a step minimises every column's error, in the norm of A, over what all the
columns' products have found so far. Columns that depend on each other (labels one-hot, less their
mean) or converge early leave directions that are dropped.

===========  ===================================================================
letter       meaning
===========  ===================================================================
A, P         the operator, and the preconditioner, symmetric positive definite
B, X         right-hand sides and solutions, [n, q]
Q, C         the residual ``B - A X = Q C``, with ``Q' P^-1 Q = I``
S            directions: ``S' A S_old = 0``
===========  ===================================================================

Reference: O'Leary (1980), "The block conjugate gradient algorithm and related methods", in the form
of Dubrulle (2001), "Retooling the method of block conjugate gradients", which keeps Q orthonormal.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ntk.large.preconditioner import Preconditioner, precise_matmul, solve

_BELOW = 0.8  # of the tolerance: where the residual of the recurrence is to be, for a look
_STALLED = 0.9  # a look at the residual that finds more of the one before is the last


class SolverState(NamedTuple):
    """Where conjugate gradients are after some passes; arrays, to be kept and gone on from."""

    weights: jax.Array  # X [n, q]
    basis: jax.Array  # Q [n, q]
    directions: jax.Array  # S [n, q]
    factor: jax.Array  # C [q, q]
    steps: jax.Array  # []: passes over K so far
    residual: jax.Array  # [q], norms of B - A X over those of B
    computed: jax.Array  # []: whether that is so, or what the recurrence says
    before: jax.Array  # []: the largest residual that was computed before this one


def start_block_cg(P: Preconditioner, B: jax.Array) -> SolverState:
    """At X = 0."""
    Q, S, C = _orthonormal(B, solve(P, B))
    residual = _relative_residual(B, B)  # 1; 0 of what is 0, and NaN of NaN
    return SolverState(
        jnp.zeros_like(B),
        Q,
        S,
        C,
        jnp.zeros((), jnp.int32),
        residual,
        jnp.array(True),
        jnp.asarray(jnp.inf, B.dtype),
    )


def unfinished(state: SolverState, tol, most) -> jax.Array:
    """Whether another pass may help; false for NaN."""
    worst = jnp.max(state.residual)
    again = ~state.computed | ((worst > tol) & (worst < _STALLED * state.before))
    return again & (state.steps < most) & ~jnp.isnan(worst)


def step_block_cg(
    A: Callable[[jax.Array], jax.Array], P: Preconditioner, B: jax.Array, tol, most, s: SolverState
) -> SolverState:
    """One pass over A: a step, or where the residual seems small, or is to be the last, a look."""
    small = jnp.max(s.residual) <= jnp.where(s.computed, tol, _BELOW * tol)
    look = (small & ~s.computed) | (s.steps + 1 >= most)
    image = A(jnp.where(look, s.weights, s.directions))
    return jax.lax.cond(look, _recompute_residual, _take_cg_step, P, B, image, s)


def _recompute_residual(P, B, image, s: SolverState) -> SolverState:
    """The residual as it is, and a fresh start from there."""
    R = B - image
    Q, S, C = _orthonormal(R, solve(P, R))
    residual = _relative_residual(R, B)
    return SolverState(s.weights, Q, S, C, s.steps + 1, residual, jnp.array(True), s.before)


def _take_cg_step(P, B, image, s: SolverState) -> SolverState:
    energy, positive = _inverse(_inner(s.directions, image))
    weights = s.weights + precise_matmul(s.directions, energy @ s.factor)
    next_basis = s.basis - precise_matmul(image, energy)
    Q, Z, turn = _orthonormal(next_basis, solve(P, next_basis))
    factor = turn @ s.factor
    residual = jnp.where(positive, _relative_residual(precise_matmul(Q, factor), B), jnp.nan)
    # The last residual that was computed, for the next look to be held against.
    before = jnp.where(s.computed, jnp.max(s.residual), s.before)
    directions = Z + precise_matmul(s.directions, turn.T)
    return SolverState(
        weights, Q, directions, factor, s.steps + 1, residual, jnp.array(False), before
    )


def _orthonormal(W, Z):
    """``Q, P^-1 Q, C`` with ``W = Q C`` and ``Q' P^-1 Q = I``, for ``Z = P^-1 W``.

    Directions that are rounding errors of the others become 0.
    """
    Q, C = W, jnp.eye(W.shape[1], dtype=W.dtype)
    for _ in range(2):  # the second time for what the first leaves of rounding
        values, vectors = jnp.linalg.eigh(_inner(Q, Z))
        significant = values > _eigenvalue_cutoff(values)
        root = jnp.sqrt(jnp.where(significant, values, 1))
        narrow = vectors * jnp.where(significant, 1 / root, 0)[None]
        Q, Z = precise_matmul(Q, narrow), precise_matmul(Z, narrow)
        C = (vectors * jnp.where(significant, root, 0)[None]).T @ C
    return Q, Z, C


def _inverse(T):
    """The inverse of T >= 0, 0 where T is rounding; whether T is that."""
    values, vectors = jnp.linalg.eigh(T)
    significant = values > _eigenvalue_cutoff(values)
    positive = values[0] >= -100 * _eigenvalue_cutoff(values)
    inverse = jnp.where(significant, 1 / jnp.where(significant, values, 1), 0)
    return (vectors * inverse[None]) @ vectors.T, positive


def _eigenvalue_cutoff(values):
    eps = jnp.finfo(values.dtype).eps
    return 10 * len(values) * eps * jnp.max(jnp.abs(values))


def _inner(a, b):
    gram = precise_matmul(a.T, b)
    return (gram + gram.T) / 2


def _column_norms(R):
    return jnp.sqrt(jnp.sum(R**2, axis=0))


def _relative_residual(R, B):
    lengths = _column_norms(B)
    return _column_norms(R) / jnp.where(lengths > 0, lengths, 1)
