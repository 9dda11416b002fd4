"""Compute hypergradients of constrained lower problems by active sets, in 80-bit floats.

This module is independent of the library: it uses NumPy and SciPy only. A **piece** is the smooth
manifold of one active set. On it a solution satisfies equations, and its derivative in ``alpha`` is

    w' = c' - Z (Z'(H + K) Z)^-1 Z'(H c' + B + l')

with a basis ``Z`` of the tangent space, the movement ``c'`` of the manifold, the curvature ``K`` of
manifold and term, and the slope ``l`` of the term. The problem is convex, so a point with a zero
reduced slope and positive margins is the solution, however it was found.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import scipy.linalg

LONG = np.longdouble


class Piece(NamedTuple):
    """A smooth manifold, with the term's derivatives along it."""

    w: np.ndarray  # [p], the given point, moved onto the manifold
    basis: np.ndarray  # [p, m], orthonormal
    slope: np.ndarray  # [p]
    slope_jacobian: np.ndarray  # [p, dim alpha]
    movement: np.ndarray  # [p, dim alpha]
    curvature: np.ndarray  # [p, p]


class Term(NamedTuple):
    """A set or a non-smooth term."""

    prox: Callable[..., np.ndarray]  # (z, alpha, step) -> w
    identify: Callable[..., np.ndarray]  # (w, alpha) -> code, where w is a proximal point
    piece: Callable[..., Piece]  # (code, w, slope of f, alpha) -> Piece
    margins: Callable[..., tuple]  # (code, w, slope of f, alpha) -> (slacks, multipliers)


class Convex(NamedTuple):
    """A problem; ``smooth`` returns slope, Hessian and mixed derivative of ``f``."""

    smooth: Callable[..., tuple]  # (w, alpha) -> (g [p], H [p, p], B [p, dim alpha])
    outer: Callable[..., tuple]  # (w, alpha, code) -> (value, slope in w, slope in alpha)
    term: Term


class Truth(NamedTuple):
    w: np.ndarray
    code: np.ndarray
    value: Any
    grad: np.ndarray  # [dim alpha]
    margin: float  # the smallest one, relative to the weights or to the slopes
    condition: float  # of Z'(H + K)Z; 1 if the tangent space is empty


# ----------------------------------------------------------------------------- linear algebra


def complement(a):
    """Return an orthonormal basis [p, p - 1] of the vectors orthogonal to ``a``."""
    u = a / np.sqrt(np.sum(a**2))
    u = u.copy()
    u[0] += 1 if u[0] >= 0 else -1
    return (np.eye(len(a), dtype=a.dtype) - 2 * np.outer(u, u) / np.sum(u**2))[:, 1:]


def solve(matrix, right):
    """Solve in the dtype of ``matrix`` by float64 factors and refinement."""
    if not len(matrix):
        return right
    factors = scipy.linalg.lu_factor(matrix.astype(float), check_finite=False)
    x, smallest = np.zeros_like(right), np.inf
    for _ in range(12):
        residual = right - matrix @ x
        norm = np.sqrt(np.sum(residual**2))
        if not norm < smallest / 2:
            break
        smallest, best = norm, x
        x = x + scipy.linalg.lu_solve(factors, residual.astype(float), check_finite=False)
    return best


# ----------------------------------------------------------------------------- the terms


def columns(selected):
    """Return the unit vectors of the selected weights."""
    return np.eye(len(selected), dtype=LONG)[:, selected]


def flat(w, alpha, basis, **parts):
    """Return a piece without curvature, slope or movement, except for ``parts``."""
    p, d = len(w), len(alpha)
    nothing = np.zeros((p, d), LONG)
    zero = {"slope": np.zeros(p, LONG), "slope_jacobian": nothing, "movement": nothing}
    return Piece(**({"w": w, "basis": basis, "curvature": np.zeros((p, p), LONG)} | zero | parts))


def box(low, high, row=None):
    """Bounds ``alpha -> (value [p], jacobian [p, dim alpha])``; ``row``: also ``row'w = 0``."""

    def prox(z, alpha, step):
        bounds = low(alpha)[0], high(alpha)[0]
        if row is None:
            return np.clip(z, *bounds)
        reach = np.max(np.abs(z)) + np.max(np.abs(bounds[1])) + 1
        ends, middle = [-reach, reach], 0.0
        while ends[0] < middle < ends[1]:
            ends[int(row @ np.clip(z - middle * row, *bounds) <= 0)] = middle
            middle = (ends[0] + ends[1]) / 2
        w = np.clip(z - middle * row, *bounds)
        free = (w == z - middle * row).astype(z.dtype)
        return w - free * row * (row @ w) / max(np.sum(free), 1)

    def identify(w, alpha):
        return (w >= high(alpha)[0]).astype(int) - (w <= low(alpha)[0])

    def piece(code, w, g, alpha):
        (lower, dl), (upper, du) = low(alpha), high(alpha)
        w = np.where(code < 0, lower, np.where(code > 0, upper, w))
        movement = np.where(code[:, None] < 0, dl, np.where(code[:, None] > 0, du, 0))
        free = code == 0
        basis = columns(free)
        if row is not None and np.any(free):
            normal = np.where(free, row, 0) / np.sum(free)
            w, movement = w - normal * (row @ w), movement - np.outer(normal, row @ movement)
            basis = basis @ complement(row[free].astype(LONG))
        return flat(w, alpha, basis, movement=movement)

    def margins(code, w, g, alpha):
        free = code == 0
        if row is not None and np.any(free):
            g = g - row * np.mean((row * g)[free])
        undetermined = [LONG(0)] if row is not None and not np.any(free) else []
        slacks = np.concatenate([(w - low(alpha)[0])[free], (high(alpha)[0] - w)[free]])
        return slacks, np.append((-code * g)[~free], undetermined)

    return Term(prox, identify, piece, margins)


def simplex_threshold(z, total):
    """Return the shift of the projection on the simplex of this sum."""
    ordered = np.sort(z)[::-1]
    shifts = (np.cumsum(ordered) - total) / np.arange(1, len(z) + 1)
    return shifts[np.sum(ordered > shifts) - 1]


def simplex():
    def prox(z, alpha, step):
        return np.maximum(z - simplex_threshold(z, 1), 0)

    def piece(code, w, g, alpha):
        support = code > 0
        w = np.where(support, w, 0)
        w = w + support * (1 - np.sum(w)) / np.sum(support)
        return flat(w, alpha, columns(support) @ complement(np.ones(np.sum(support), LONG)))

    def margins(code, w, g, alpha):
        support = code > 0
        return w[support], g[~support] - np.mean(g[support])

    return Term(prox, lambda w, alpha: (w > 0).astype(int), piece, margins)


def l2_ball(radius):
    """Radius ``alpha -> (value, jacobian [dim alpha])``. The code has one entry."""

    def prox(z, alpha, step):
        return z * min(1, radius(alpha)[0] / np.linalg.norm(z.astype(float)))

    def identify(w, alpha):
        norm = np.linalg.norm(w.astype(float))
        return np.array([int(norm >= float(radius(alpha)[0]) * (1 - 1e-12))])

    def piece(code, w, g, alpha):
        if not code[0]:
            return flat(w, alpha, np.eye(len(w), dtype=LONG))
        r, dr = radius(alpha)
        w = w * (r / np.sqrt(np.sum(w**2)))
        curvature = -(w @ g) / r**2 * np.eye(len(w), dtype=LONG)
        return flat(w, alpha, complement(w), movement=np.outer(w / r, dr), curvature=curvature)

    def margins(code, w, g, alpha):
        r = radius(alpha)[0]
        if code[0]:
            return np.empty(0), np.array([-(w @ g) / r])
        return np.array([r - np.sqrt(np.sum(w**2))]), np.empty(0)

    return Term(prox, identify, piece, margins)


def l1_ball(radius):
    """The last entry of the code says whether the ball is active; the others are signs."""

    def prox(z, alpha, step):
        r = radius(alpha)[0]
        if np.sum(np.abs(z)) <= r:
            return z
        return np.sign(z) * np.maximum(np.abs(z) - simplex_threshold(np.abs(z), r), 0)

    def identify(w, alpha):
        active = float(np.sum(np.abs(w))) >= float(radius(alpha)[0]) * (1 - 1e-12)
        return np.append(np.sign(w).astype(int) * active, int(active))

    def piece(code, w, g, alpha):
        if not code[-1]:
            return flat(w, alpha, np.eye(len(w), dtype=LONG))
        r, dr = radius(alpha)
        s, support = code[:-1], code[:-1] != 0
        w = np.where(support, w, 0)
        normal = s.astype(LONG) / np.sum(support)
        w = w + normal * (r - s @ w)
        basis = columns(support) @ complement(s[support].astype(LONG))
        return flat(w, alpha, basis, movement=np.outer(normal, dr))

    def margins(code, w, g, alpha):
        if not code[-1]:
            return np.array([radius(alpha)[0] - np.sum(np.abs(w))]), np.empty(0)
        s, support = code[:-1], code[:-1] != 0
        multiplier = -np.mean((s * g)[support])
        return (s * w)[support], np.append(multiplier - np.abs(g[~support]), multiplier)

    return Term(prox, identify, piece, margins)


def l1(weights):
    """Weights ``alpha -> (value [p], jacobian [p, dim alpha])``; zero means no penalty."""

    def prox(z, alpha, step):
        return np.sign(z) * np.maximum(np.abs(z) - step * weights(alpha)[0], 0)

    def identify(w, alpha):
        return np.where(weights(alpha)[0] > 0, np.sign(w), 2).astype(int)

    def piece(code, w, g, alpha):
        a, da = weights(alpha)
        s = np.where(code == 2, 0, code)
        parts = {"slope": s * a, "slope_jacobian": s[:, None] * da}
        return flat(np.where(code == 0, 0, w), alpha, columns(code != 0), **parts)

    def margins(code, w, g, alpha):
        signed, zero = np.abs(code) == 1, code == 0
        return (code * w)[signed], (weights(alpha)[0] - np.abs(g))[zero]

    return Term(prox, identify, piece, margins)


def group_l1(weights, groups):
    """Weights ``alpha -> (value [groups], jacobian)``; the code has one entry per group."""

    def norms(x):
        return np.array([np.sqrt(np.sum(x[group] ** 2)) for group in groups])

    def prox(z, alpha, step):
        w = z.copy()
        for group, a, norm in zip(groups, weights(alpha)[0], norms(z), strict=True):
            w[group] *= max(0, 1 - step * a / norm) if norm else 0
        return w

    def piece(code, w, g, alpha):
        active = np.zeros(len(w), bool)
        for group, on in zip(groups, code, strict=True):
            active[group] = on
        w = np.where(active, w, 0)
        whole = flat(w, alpha, columns(active))
        slope, jacobian, curvature = whole.slope, 0 * whole.movement, whole.curvature
        for group, on, a, da in zip(groups, code, *weights(alpha), strict=True):
            if on:
                norm = np.sqrt(np.sum(w[group] ** 2))
                e = w[group] / norm
                slope[group], jacobian[group] = a * e, np.outer(e, da)
                block = np.eye(len(e), dtype=LONG) - np.outer(e, e)
                curvature[np.ix_(group, group)] = a / norm * block
        return whole._replace(slope_jacobian=jacobian)

    def margins(code, w, g, alpha):
        on = code > 0
        return norms(w)[on], (weights(alpha)[0] - norms(g))[~on]

    return Term(prox, lambda w, alpha: (norms(w) > 0).astype(int), piece, margins)


def affine(matrix, right):
    """``matrix w = right(alpha)`` with ``right: alpha -> (value, jacobian)``; no decisions."""
    gram = (matrix @ matrix.T).astype(LONG)
    basis = scipy.linalg.null_space(matrix.astype(float)).astype(LONG)

    def prox(z, alpha, step):
        b = right(alpha)[0]
        return z - matrix.T @ solve(gram, (matrix @ z - b).astype(LONG)).astype(z.dtype)

    def piece(code, w, g, alpha):
        b, db = right(alpha)
        w = w - matrix.T @ solve(gram, (matrix @ w - b).astype(LONG))
        return flat(w, alpha, basis, movement=matrix.T @ solve(gram, db.astype(LONG)))

    def margins(code, w, g, alpha):
        return np.empty(0), np.empty(0)

    return Term(prox, lambda w, alpha: np.zeros(0, int), piece, margins)


# ----------------------------------------------------------------------------- the solution


def accelerated(problem, w, alpha, steps):
    """Take accelerated proximal gradient steps with restart."""
    w = w.astype(float)
    moved, momentum = w, 1.0
    step = 1 / np.linalg.norm(problem.smooth(w, alpha)[1].astype(float), 2)
    for _ in range(steps):
        z = moved - step * problem.smooth(moved, alpha, order=1)[0].astype(float)
        new = problem.term.prox(z, alpha, step).astype(float)
        if (moved - new) @ (new - w) > 0:
            momentum = 1.0
        after = (1 + np.sqrt(1 + 4 * momentum**2)) / 2
        moved = new + (momentum - 1) / after * (new - w)
        w, momentum = new, after
    return w


def code_at(problem, w, alpha):
    """Return the proximal point of ``w`` and its code."""
    g, H, _ = problem.smooth(w, alpha)
    step = 1 / np.linalg.norm(H.astype(float), 2)
    new = problem.term.prox((w - step * g).astype(float), alpha.astype(float), step)
    return new, problem.term.identify(new, alpha.astype(float))


def newton_step(problem, code, w, alpha):
    """Return the point after one Newton step on the manifold of ``code``, or None if singular."""
    g, H, _ = problem.smooth(w, alpha)
    piece = problem.term.piece(code, w, g, alpha)
    g, H, _ = problem.smooth(piece.w, alpha)
    piece = problem.term.piece(code, piece.w, g, alpha)
    Z = piece.basis
    reduced = Z.T @ (H + piece.curvature) @ Z
    if len(reduced):
        values = np.linalg.eigvalsh(reduced.astype(float))
        if not values[0] > 1e-15 * values[-1]:
            return None
    w = piece.w - Z @ solve(reduced, Z.T @ (g + piece.slope))
    return problem.term.piece(code, w, problem.smooth(w, alpha)[0], alpha).w


def settle(problem, w, alpha, code=None):
    """Change codes and take Newton steps until they rest; return the point and code, or None."""
    if code is None:
        w, code = code_at(problem, w, alpha)
    w, seen, last = w.astype(LONG), {code.tobytes()}, np.inf
    for _ in range(60):
        new = newton_step(problem, code, w, alpha)
        if new is None or not np.all(np.isfinite(new.astype(float))):
            return None
        length, w = np.sqrt(np.sum((new - w) ** 2)), new
        rest = 1e-14 * np.sqrt(np.sum(w**2))
        proximal, changed = code_at(problem, w, alpha)
        if not np.array_equal(changed, code):
            slacks, multipliers = problem.term.margins(code, w, problem.smooth(w, alpha)[0], alpha)
            if min([0, *slacks, *multipliers]) < 0:  # else a tie within float64's rounding
                if changed.tobytes() in seen:
                    return None
                seen.add(changed.tobytes())
                code, last, w = changed, np.inf, proximal.astype(LONG)
                continue
        if length == 0 or rest > length > last / 2:
            return w, code
        last = length
    return None


def solution(problem, alpha, start):
    """Return the verified solution and its code, or None."""
    proximal = start
    for steps in (0, 100, 400, 3000, 20_000):
        proximal = accelerated(problem, proximal, alpha.astype(float), steps) if steps else start
        settled = settle(problem, proximal, alpha)
        if settled is not None:
            w, code = settled
            margins = problem.term.margins(code, w, problem.smooth(w, alpha)[0], alpha)
            if min([0, *margins[0], *margins[1]]) >= 0:
                return w, code
    return None


def hypergradient(problem, alpha, w, code):
    """Return the :class:`Truth` at a solution."""
    g, H, B = problem.smooth(w, alpha)
    piece = problem.term.piece(code, w, g, alpha)
    Z, movement = piece.basis, piece.movement
    reduced = Z.T @ (H + piece.curvature) @ Z
    right = Z.T @ (H @ movement + B + piece.slope_jacobian)
    derivative = movement - Z @ solve(reduced, right)
    value, v, direct = problem.outer(w, alpha, code)
    values = np.linalg.eigvalsh(reduced.astype(float)) if len(reduced) else np.ones(1)
    slacks, multipliers = problem.term.margins(code, w, g, alpha)
    sizes = np.sqrt(np.mean(w**2)), np.sqrt(np.mean((np.abs(H) @ np.abs(w)) ** 2))
    relative = [np.min(m) / s for m, s in zip((slacks, multipliers), sizes, strict=True) if len(m)]
    margin = float(min([np.inf, *relative]))
    condition = float(values[-1] / max(values[0], 1e-300))
    return Truth(w, code, value, direct + v @ derivative, margin, condition)


def truth(problem, alpha, start):
    """Return the :class:`Truth`, or None if no solution was found."""
    alpha = np.asarray(alpha, LONG)
    solved = solution(problem, alpha, np.asarray(start, float))
    return None if solved is None else hypergradient(problem, alpha, *solved)


def near_a_kink(problem, alpha, start, direction, distance):
    """Move ``alpha`` along ``direction`` to ``distance`` from the next change of the active set.

    The distance is relative to the step from ``alpha`` to the change. Without a change within a
    step of 3, or if the path leaves the piece, the result is None.
    """
    alpha = np.asarray(alpha, LONG)
    solved = solution(problem, alpha, start)
    if solved is None:
        return None
    w, code = solved

    def margins(t):
        at, moved = alpha + t * direction, w
        for _ in range(6):
            moved = newton_step(problem, code, moved, at)
            if moved is None:
                return np.full(1, np.nan)
        every = problem.term.margins(code, moved, problem.smooth(moved, at)[0], at)
        return np.concatenate(every)

    first, h = margins(0), LONG(1e-6)
    slopes = (margins(h) - first) / h
    slopes = np.where(np.isinf(first), 0, slopes)  # infinite bounds
    if not len(first) or np.any(np.isnan(slopes)):
        return None
    steps = np.where(slopes == 0, LONG(np.inf), -first / slopes)
    i = np.argmin(np.abs(steps))
    t = steps[i]
    for _ in range(8):
        if not abs(t) < 3:
            return None
        here, ahead = margins(t), margins(t + h)
        if min(len(here), len(ahead)) <= i:  # a Newton step failed
            return None
        t = t - here[i] * h / (ahead[i] - here[i])
    return alpha + t * (1 - LONG(distance)) * direction
