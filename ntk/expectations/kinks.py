"""Find the kinks of an elementwise function by bisection, and measure its jumps.

A function is assumed to be *piecewise smooth*: JAX's derivatives are bounded on each piece.
:func:`find_kinks` searches for jumps of ``f``, ``f'`` and ``f''`` in about two thousand cells. Each
cell is bisected towards the part with the larger error of the trapezoid rule, until two
neighbouring numbers remain. A smooth function does not jump between them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Function = Callable[[Any], jax.Array]
Kink = tuple[float, tuple[float, ...]]
"""A place, and the jumps of the function and its derivatives there, right minus left."""

ORDERS = 8  # number of derivatives with measured jumps, including the function itself
_MOST = 16  # maximum number of kinks of one function
_JUMP = 1e-7  # the smallest jump that counts, relative to the derivative's size around it


def elementwise_derivative(fn: Function) -> Function:
    """Return ``fn'``, elementwise."""
    return lambda z: jax.jvp(fn, (z,), (jnp.ones_like(z),))[1]


def derivatives_in_float64(fn: Function, count: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return ``z -> [count, n]``: fn and its derivatives, in float64."""
    functions = [fn]
    for _ in range(count - 1):
        functions.append(elementwise_derivative(functions[-1]))
    every = jax.jit(lambda z: jnp.stack([jnp.broadcast_to(f(z), z.shape) for f in functions]))

    def values(z):
        with jax.ensure_compile_time_eval(), jax.enable_x64(True):
            return np.asarray(every(jnp.asarray(np.asarray(z, float))), float)

    return values


def find_kinks(fn: Function) -> tuple[float, ...]:
    """Return the places where ``fn``, its slope or its second derivative jumps, ascending."""
    values = derivatives_in_float64(fn, 4)
    edges = probe_points()
    _check_elementwise(values, edges)
    places: list[float] = []
    left, right = edges[:-1], edges[1:]
    sizes = _derivative_sizes(values, edges)
    while len(left):
        new, cells = _bisect(values, left, right, sizes)
        if set(new) <= set(places):
            break
        # The same cell can have another kink.
        ends = [(a, _point_next_to(t, -1)) for t, (a, _) in zip(new, cells, strict=True)]
        ends += [(_point_next_to(t, 1), b) for t, (_, b) in zip(new, cells, strict=True)]
        left, right = np.array([e for e in ends if e[0] < e[1]]).reshape(-1, 2).T
        places = sorted({*places, *new})
        if len(places) > _MOST:
            got = ", ".join(f"{t:g}" for t in places[:3])
            raise ValueError(
                f"fn: expected at most {_MOST} kinks and jumps, found more, at {got}, ...; a "
                "function with more has no kernel here."
            )
    return tuple(places)


def jumps(fn: Function, places: tuple[float, ...]) -> tuple[Kink, ...]:
    """Return the jumps of ``fn`` and its first derivatives, 8 in all, at each of the places."""
    if not places:
        return ()
    sides = np.array([[_point_next_to(t, -1), _point_next_to(t, 1)] for t in places])
    values = derivatives_in_float64(fn, ORDERS)(sides.ravel()).reshape(ORDERS, -1, 2)
    size = np.abs(values).max(2)
    near = probe_points()
    known = np.abs(derivatives_in_float64(fn, 3)(near)[:, np.abs(near) < 3])
    bounded = size[:3] <= 1e4 * (1 + known.max(1, keepdims=True))
    for t, good in zip(places, bounded.all(0) & np.isfinite(size).all(0), strict=True):
        if not good:
            expected = "bounded derivatives on both sides of its kinks"
            raise ValueError(f"fn: expected {expected}, got one at {t:g} without.")
    jump_sizes = values[..., 1] - values[..., 0]
    # The two sides are a distance apart, and a slope over this distance is not a jump.
    change = np.ptp(sides, axis=1) * np.concatenate([size[1:], 0 * size[:1]])
    jump_sizes = np.where(np.abs(jump_sizes) > 1e-12 * size + 2 * change, jump_sizes, 0)
    return tuple((t, tuple(jump_sizes[:, i].tolist())) for i, t in enumerate(places))


def linear_sides(fn: Function) -> tuple[float, float] | None:
    """Return (left, right) slopes of a function that is linear on both sides of 0, else None."""
    z = probe_points()
    values = derivatives_in_float64(fn, 1)(z)[0]
    slopes = values / z
    left, right = slopes[z < 0], slopes[z > 0]
    for side in (left, right):
        if np.ptp(side) > 1e-14 * np.abs(side).max() + 1e-300:
            return None
    return float(np.median(left)), float(np.median(right))


def probe_points() -> np.ndarray:
    """Return about two thousand points, |z| from 1e-6 to 120, none of them a round number."""
    uniform = np.arange(0.0123456789, 12, 1 / 64)
    far = 12 * 2 ** (np.arange(0.123, 3.4, 1 / 16))
    near = 0.0123456789 * 2 ** -(np.arange(0.123, 14, 0.25))
    half = np.concatenate([near[::-1], uniform, far])
    return np.concatenate([-1.0000123 * half[::-1], half])


def _check_elementwise(values, z) -> None:
    f, slopes = values(z)[:2]
    if not np.array_equal(values(z[::-1])[0], f[::-1], equal_nan=True):
        got = "values that depend on their neighbours"
        raise ValueError(f"fn: expected an elementwise function, got {got}.")
    if not (finite := np.isfinite(f) & np.isfinite(slopes)).all():
        at = z[np.argmin(finite)]
        expected = "finite values and slopes on all of the line"
        raise ValueError(f"fn: expected {expected}, got one that is not finite at {at:.3g}.")
    # Custom slopes, as in straight-through estimators, have other kernels.
    h = 1e-5 * np.abs(z)
    change = (values(z + h)[0] - values(z - h)[0]) / (2 * h)
    allowed = 1e-3 * (np.abs(slopes) + np.abs(change)) + 1e-9 * (1 + np.abs(f)) / h
    wrong = np.abs(change - slopes) > allowed
    # A kink within h of a point of the grid is rare.
    if wrong.mean() > 0.01:
        slope, rate, at = (x[wrong][0] for x in (slopes, change, z))
        raise ValueError(
            "fn: expected an elementwise function with its own derivative, got slope "
            f"{slope:.3g} and changes by {rate:.3g}, at {at:.3g}."
        )


def _derivative_sizes(values, z) -> Callable[[np.ndarray], np.ndarray]:
    """Return ``t -> [3, n]``: the largest sizes of the derivatives up to about ``|t|``."""
    order = np.argsort(np.abs(z))
    largest = np.maximum.accumulate(np.abs(values(z[order])[:3]), axis=1)

    def sizes(t):
        reach = np.searchsorted(np.abs(z[order]), np.maximum(2 * np.abs(t), 3))
        return largest[:, np.minimum(reach, len(z) - 1)]

    return sizes


def _bisect(values, left, right, sizes):
    """Return the kinks, at most one in each cell, and their cells."""
    orders = 3
    a, b = np.tile(left, orders), np.tile(right, orders)
    order = np.repeat(np.arange(orders), len(left))
    pick = np.arange(len(a))

    def derivative_pair(z):
        # Singular derivatives are not jumps.
        derivatives = np.nan_to_num(values(z), nan=0.0, posinf=1e300, neginf=-1e300)
        return derivatives[order, pick], derivatives[order + 1, pick]

    (ga, da), (gb, db) = derivative_pair(a), derivative_pair(b)
    for _ in range(72):
        c = a + 0.4567 * (b - a)  # halving would miss a kink exactly in the middle
        gc, dc = derivative_pair(c)
        with np.errstate(over="ignore", invalid="ignore"):
            before = np.abs(gc - ga - (c - a) * (da + dc) / 2)
            after = np.abs(gb - gc - (b - c) * (dc + db) / 2)
        first = before >= after
        a, ga, da = (np.where(first, x, y) for x, y in ((a, c), (ga, gc), (da, dc)))
        b, gb, db = (np.where(first, x, y) for x, y in ((c, b), (gc, gb), (dc, db)))
    # A change of f without a jump of f comes from one of its derivatives.
    before, after = values(a)[:3], values(b)[:3]
    size = np.abs(before) + np.abs(after)
    is_jump = (np.abs(after - before) > _JUMP * size + 1e-9 * sizes(a)).any(0)
    kinks: dict[float, tuple[float, float]] = {}
    for i in np.flatnonzero(is_jump):
        cell = i % len(left)
        kinks[_round(a[i], b[i])] = (left[cell], right[cell])
    return list(kinks), list(kinks.values())


def _round(a: float, b: float) -> float:
    """Return the shortest number within rounding of the interval."""
    middle = (a + b) / 2
    if abs(middle) < 1e-14:
        return 0.0
    for digits in range(1, 16):
        near = float(f"{middle:.{digits}g}")
        if abs(near - middle) < 4e-16 * abs(middle):
            return near
    return float(middle)


def _point_next_to(t: float, side: int) -> float:
    """Return a number just next to ``t``."""
    return t + side * (8 * np.finfo(float).eps * abs(t) if t else 1e-30)
