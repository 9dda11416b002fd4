"""Bounds on every weight, linear equations, and bounds with one equation."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bilevel.constraints import _members as members
from bilevel.contracts import Constraint
from bilevel.internal.checks import concrete, describe, offending
from ntk.internal.products import matmul

_RANK = 1e-12  # singular values of equations below this share of the largest one count as 0


def affine(matrix: Any, right: Any) -> Constraint:
    """Require ``matrix @ w = right``, with ``w`` in the order of ``ravel_pytree``.

    Parameters
    ----------
    matrix : array [m, p] or [p]
        Known values. Rows may be linearly dependent. Its pseudo-inverse is computed once.
    right : array [m], or ``right(alpha) -> array [m]``
        Right-hand sides that some weights attain.
    """
    if not concrete(matrix):
        raise ValueError("matrix: expected known values, got traced ones.")
    try:
        rows = np.atleast_2d(np.asarray(matrix, np.float64))
    except (TypeError, ValueError):
        raise ValueError(f"matrix: expected an array [m, p], got {describe(matrix)}.") from None
    if rows.ndim != 2 or 0 in rows.shape:
        raise ValueError(f"matrix: expected an array [m, p], got shape {np.shape(matrix)}.")
    if not np.isfinite(rows).all():
        number = offending(rows, np.isfinite(rows))
        raise ValueError(f"matrix: expected finite numbers, got {number}.")
    inverse = np.linalg.pinv(rows, rcond=_RANK)
    unreachable = np.eye(len(rows)) - rows @ inverse

    def check(a, b, inverse):
        size = jnp.linalg.norm(b)
        missed = jnp.linalg.norm(matmul(jnp.asarray(unreachable, b.dtype), b))
        eps = float(jnp.finfo(b.dtype).eps)
        expected = "right-hand sides that some weights attain (a set that is not empty)"
        return members.require("right", missed <= 1000 * eps * len(rows) * size, expected, missed)

    if not callable(right):
        known = np.asarray(right, np.float64) if concrete(right) else None
        if known is not None and known.shape in ((), (len(rows),)):
            values = np.broadcast_to(known, (len(rows),))
            missed = np.linalg.norm(unreachable @ values)
            if not missed <= 1e-6 * np.linalg.norm(values):
                raise ValueError(
                    "right: expected right-hand sides that some weights attain, got an empty set: "
                    f"every w misses them by {missed:.3g}."
                )

    def resolved(w, alpha):
        leaves = optax.tree.size(w)
        if leaves != rows.shape[1]:
            raise ValueError(
                f"matrix: expected {leaves} columns, one per weight, got {rows.shape[1]}."
            )
        value = members.value_at(right, alpha)
        if jnp.shape(value) not in ((), (len(rows),)):
            raise ValueError(
                f"right: expected one number per row of the matrix, {len(rows)}, "
                f"got shape {jnp.shape(value)}."
            )
        dtype = jnp.result_type(*jax.tree.leaves(w))
        b = jnp.broadcast_to(jnp.asarray(value, dtype), (len(rows),))
        return jnp.asarray(rows, dtype), b, jnp.asarray(inverse, dtype)

    return members.on_vector(
        parameters=resolved,
        blank=lambda size: (),
        identify=lambda w, g, eta, *_: (),
        prox=lambda code, z, eta, a, b, inverse: z - matmul(inverse, matmul(a, z) - b),
        step=lambda code, w, g, eta, a, b, inverse: (
            -eta * (g - matmul(inverse, matmul(a, g))) - matmul(inverse, matmul(a, w) - b)
        ),
        tangent=lambda code, w, v, a, b, inverse: v - matmul(inverse, matmul(a, v)),
        margins=lambda code, w, g, *_: (),
        check=check,
    )


def box(low: Any = -math.inf, high: Any = math.inf) -> Constraint:
    """Require ``low <= w <= high`` for every weight.

    Parameters
    ----------
    low, high : float, tree like ``w``, or function of alpha
        Bounds; infinite for none.
    """
    _check_bounds(low, high)
    return members.on_vector(
        parameters=lambda w, alpha: (
            members.per_weight("low", low, w, alpha),
            members.per_weight("high", high, w, alpha),
        ),
        blank=lambda size: jnp.zeros(size, jnp.int8),
        identify=_identify,
        prox=lambda code, z, eta, low, high: _choose(code, low, high, z),
        step=lambda code, w, g, eta, low, high: _choose(code, low - w, high - w, -eta * g),
        tangent=lambda code, w, v, *_: jnp.where(code == 0, v, 0),
        margins=_margins,
        check=_ordered,
    )


def nonnegative() -> Constraint:
    """Require nonnegative weights."""
    return box(0.0)


def box_equality(low: Any, high: Any, coefficients: Any = 1.0, total: Any = 0.0) -> Constraint:
    """Require ``low <= w <= high`` and ``coefficients . w = total``: the dual of an SVM.

    Parameters
    ----------
    low, high, coefficients : float, tree like ``w``, or function of alpha
        Bounds may be infinite. For an SVM the coefficients are the labels, -1 or 1.
    total : float, or ``total(alpha) -> scalar``

    Notes
    -----
    The SVM's bias is the equation's multiplier. An outer loss that uses the bias has to compute it
    from ``w`` and ``alpha``.
    """
    _check_bounds(low, high)

    def parameters(w, alpha):
        vectors = (("low", low), ("high", high), ("coefficients", coefficients))
        sum_of_weights = members.scalar_parameter("total", total, w, alpha)
        return *(members.per_weight(name, x, w, alpha) for name, x in vectors), sum_of_weights

    def square(code, y):
        size = jnp.sum(jnp.where(code == 0, y**2, 0))
        return jnp.where(size > 0, size, 1)

    def mean(code, y, x):  # the part of x along y, on free weights
        return jnp.sum(jnp.where(code == 0, y * x, 0)) / square(code, y)

    def excess(code, z, low, high, y, total):
        fixed = jnp.sum(jnp.where(code == 0, 0, y * _choose(code, low, high, z)))
        free = jnp.sum(jnp.where(code == 0, y * z, 0))
        return (free + fixed - total) / square(code, y)

    def prox(code, z, eta, low, high, y, total):
        return _choose(code, low, high, z - y * excess(code, z, low, high, y, total))

    def step(code, w, g, eta, low, high, y, total):
        away = excess(code, w, low, high, y, total)
        along = -eta * (g - y * mean(code, y, g)) - y * away
        return _choose(code, low - w, high - w, along)

    def margins(code, w, g, low, high, y, total):
        multiplier = -mean(code, y, g)
        determined = jnp.any((code == 0) & (y != 0))
        slope = g + jnp.where(y == 0, 0, jnp.where(determined, multiplier, jnp.nan) * y)
        # One free weight alone is fixed by the equation, but it can still reach a bound.
        return _margins(code, w, slope, low, high)

    return members.on_vector(
        parameters=parameters,
        blank=lambda size: jnp.zeros(size, jnp.int8),
        identify=_identify_with_equation,
        prox=prox,
        step=step,
        tangent=lambda code, w, v, low, high, y, total: jnp.where(
            code == 0, v - y * mean(code, y, v), 0
        ),
        margins=margins,
        check=lambda low, high, y, total: _ordered(low, high) & _reachable(low, high, y, total),
    )


def _choose(code: jax.Array, low: jax.Array, high: jax.Array, free: jax.Array) -> jax.Array:
    return jnp.where(code < 0, low, jnp.where(code > 0, high, free))


def _identify(w, g, eta, low, high):
    # The difference w - low keeps a small gradient that w - eta g would lose.
    at_low, at_high = w - low <= eta * g, high - w <= -eta * g
    return jnp.where(at_low, -1, jnp.where(at_high, 1, 0)).astype(jnp.int8)


def _margins(code, w, g, low, high):
    slack = jnp.where(code == 0, jnp.minimum(w - low, high - w), jnp.where(code < 0, g, -g))
    return jnp.where(low == high, jnp.inf, slack)


def _identify_with_equation(w, g, eta, low, high, y, total):
    """Find the multiplier ``t`` with ``y . clip(z - t y) = total``: the sum falls in ``t``."""
    z, moves = w - eta * g, y != 0
    slope = jnp.where(moves, y, 1)
    ends = jnp.stack([(z - low) / slope, (z - high) / slope])
    inside = jnp.where((low < z) & (z < high), jnp.inf, -jnp.inf)
    # Weight i is free for multipliers between first[i] and last[i].
    first = jnp.where(moves, ends.min(0), -inside)
    last = jnp.where(moves, ends.max(0), inside)
    breaks = jnp.sort(jnp.concatenate([first, last]))
    usable = jnp.isfinite(breaks)

    def surplus(t):
        return jnp.sum(jnp.where(moves, y * jnp.clip(z - t * y, low, high), 0)) - total

    def halve(_, pair):
        below, above = pair
        middle = (below + above) // 2
        break_ = jnp.where(usable[middle], breaks[middle], 0)
        # Breaks of minus infinity come first: the sum is too large there.
        high_sum = jnp.where(usable[middle], surplus(break_) >= 0, breaks[middle] < 0)
        return jnp.where(high_sum, middle, below), jnp.where(high_sum, above, middle)

    count = len(breaks)
    start = jnp.zeros((), int) - 1, jnp.zeros((), int) + count
    rounds = max(1, math.ceil(math.log2(count + 1)))
    below, above = jax.lax.fori_loop(0, rounds, halve, start)
    left = jnp.where(below >= 0, breaks[jnp.maximum(below, 0)], -jnp.inf)
    right = jnp.where(above < count, breaks[jnp.minimum(above, count - 1)], jnp.inf)
    free = (first <= left) & (last >= right) & (left < right)
    # The bound at which a fixed weight is on this piece: z - t y for small or large t.
    beyond = left >= last  # t is past the piece on which the weight is free
    fixed = jnp.where(beyond == (y > 0), low, high)
    size = jnp.sum(jnp.where(free, y**2, 0))
    terms = jnp.where(moves, y * jnp.where(free, z, fixed), 0)
    t = (jnp.sum(terms) - total) / jnp.where(size > 0, size, 1)
    t = jnp.clip(jnp.where(size > 0, t, left), left, right)
    stays = jnp.where(moves, (first < t) & (t < last), (low < z) & (z < high))
    at_low = jnp.where(moves, (t >= last) == (y > 0), z <= low)
    return jnp.where(stays, 0, jnp.where(at_low, -1, 1)).astype(jnp.int8)


def _check_bounds(low: Any, high: Any) -> None:
    for name, bound in (("low", low), ("high", high)):
        members.check_at_once(name, bound, lambda x: ~np.isnan(x), "bounds that are not NaN")
    if callable(low) or callable(high):
        return
    lows, highs = jax.tree.leaves(low), jax.tree.leaves(high)
    count = max(len(lows), len(highs))
    pairs = zip(*(x * count if len(x) == 1 else x for x in (lows, highs)), strict=False)
    for a, b in pairs:
        # Bounds of different shapes are reported with the weights.
        comparable = 0 in (np.ndim(a), np.ndim(b)) or np.shape(a) == np.shape(b)
        if concrete(a, b) and comparable:
            members.require("high", np.asarray(a) <= np.asarray(b), "bounds of at least low", b)


def _ordered(low: jax.Array, high: jax.Array) -> jax.Array:
    return members.require("high", low <= high, "bounds of at least low", high)


def _reachable(low, high, y, total):
    # A coefficient of 0 times an infinite bound would be NaN.
    low, high = jnp.where(y == 0, 0, low), jnp.where(y == 0, 0, high)
    least = jnp.sum(jnp.minimum(y * low, y * high))
    most = jnp.sum(jnp.maximum(y * low, y * high))
    slack = 100 * jnp.finfo(low.dtype).eps * (jnp.abs(total) + jnp.abs(least) + jnp.abs(most))
    slack = jnp.where(jnp.isfinite(slack), slack, 0)
    expected = "a sum of the weights within their bounds"
    reachable = (least - slack <= total) & (total <= most + slack)
    return members.require("total", reachable, expected, total)
