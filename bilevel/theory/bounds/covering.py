"""Covering numbers of sets of architectures, and the effective dimension they define.

N(eps) is the number of balls of radius eps, with centres in Delta, that cover the set Delta of
alphas. A *covering* is a function ``radii [...] -> log N [...]``, or an upper bound of it. The
effective dimension h_eff of Oymak et al. (2021), Definition 1, is the exponent of the growth

    N(eps) <= (C_bar / eps)^h_eff,    0 < eps <= C_bar.
"""

import math
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from bilevel.internal.checks import (
    check_finite,
    concrete,
    count,
    integer,
    nonnegative,
    numpy_array,
    offending,
    positive,
)

Covering = Callable[[jax.Array], jax.Array]
"""Radii [...] to (upper bounds of) the logarithms of covering numbers [...]."""


def effective_dimension(log_covering_numbers: Any, radii: Any, *, C_bar: float) -> jax.Array:
    """Return the smallest h_eff with ``N(eps) <= (C_bar / eps)^h_eff`` at all given radii.

        h_eff = max_eps log N(eps) / log(C_bar / eps)

    The paper (Definition 1) requires the inequality at *all* eps > 0. This is impossible: N >= 1,
    and the right side is below 1 for eps > C_bar. Here eps <= C_bar. The value is infinite if
    N(C_bar) > 1.

    Parameters
    ----------
    log_covering_numbers, radii : array [m]
        log N at the radii, which are in (0, C_bar].
    C_bar : float
        For a ball, h_eff is at most the dimension with C_bar = 3 R.

    Raises
    ------
    ValueError
        If a radius is out of range, a logarithm negative, or the shapes differ.

    Examples
    --------
    >>> radii = jnp.array([0.01, 0.1, 1.0])
    >>> effective_dimension(ball_covering(9, 1.0)(radii), radii, C_bar=3.0).round(2)
    Array(8.37, dtype=float...)
    """
    positive("C_bar", C_bar)
    logs, radii = nonnegative("log_covering_numbers", log_covering_numbers), _check_radii(radii)
    if logs.shape != radii.shape:
        raise ValueError(f"radii: expected shape {logs.shape} as the logs, got {radii.shape}.")
    if concrete(radii) and np.any(np.asarray(radii) > C_bar):
        raise ValueError(f"radii: expected numbers of at most C_bar = {C_bar}, got {radii.max()}.")
    scale = jnp.log(C_bar / radii)
    # NaN stays NaN. At the largest radius both are 0; 0 / 0 would raise under `jax_debug_nans`.
    dimension = jnp.max(jnp.where(logs == 0, 0.0, logs / jnp.where(logs == 0, 1.0, scale)))
    return jnp.where(((radii > 0) & (radii <= C_bar)).all(), dimension, jnp.nan)


def ball_covering(dim: int, R: float) -> Covering:
    """Return the covering of a convex set in a Euclidean ball.

        log N(eps) <= dim log(1 + 2 R / eps),    and 0 for eps >= R

    Parameters
    ----------
    dim : int
        Dimension of the set's affine hull: h - 1 for the simplex, less for few free parameters.
    R : float
        Radius of a ball that contains the set: sqrt(h) / 2 for the box [0, 1]^h.

    Raises
    ------
    ValueError
        If ``dim`` or ``R`` is not positive.

    Examples
    --------
    >>> ball_covering(2, 1.0)(jnp.array([0.1, 0.5, 1.0])).round(3)
    Array([6.089, 3.219, 0. ], dtype=float...)
    """
    count("dim", dim)
    positive("R", R)

    def logs(radii):
        return jnp.where(radii >= R, 0.0, dim * jnp.log1p(2 * R / radii))

    return _of_radii(logs)


def simplex_covering(h: int, *, copies: int = 1) -> Covering:
    """Return the covering of the probability simplex with h vertices, or of a product, by a grid.

        log N(eps) <= log C(h + k - 1, k),    k = ceil(min(sqrt(h) / (2 eps), (1 - 1/h) / eps^2))

    The centres are the points with coordinates that are multiples of 1 / k. From
    eps = sqrt(1 - 1/h) on, the barycentre is enough.

    Parameters
    ----------
    h, copies : int
        Number of vertices; number of simplices in a product, e.g. one for each edge or layer.
        N(eps) is at most the number of one simplex at ``eps / sqrt(copies)``, to the power of
        ``copies``.

    Raises
    ------
    ValueError
        If ``h`` or ``copies`` is not a positive integer.

    Examples
    --------
    >>> simplex_covering(9)(jnp.array([0.1, 0.5, 1.0]))
    Array([13.1..., 5.1..., 0. ], dtype=float...)
    """
    for name, number in ("h", h), ("copies", copies):
        integer(name, number, 1)
    spread = 1 - 1 / h

    def logs(radii):
        radii = radii / math.sqrt(copies)
        k = jnp.ceil(jnp.minimum(math.sqrt(h) / 2 / radii, spread / radii**2))
        per_copy = jnp.log1p(
            k[..., None] / jnp.arange(1, h, dtype=k.dtype).reshape(*[1] * k.ndim, -1)
        ).sum(-1)
        return copies * jnp.where(radii**2 >= spread, 0.0, per_copy)

    return _of_radii(logs)


def sparse_covering(h: int, s: int, R: float) -> Covering:
    """Return the covering of the vectors in a ball with at most s nonzero entries.

        log N(eps) <= log C(h, s) + s log(1 + 2 R / eps),    and 0 for eps >= R

    Parameters
    ----------
    h, s, R : int, int, float
        Number of entries, largest number of nonzero entries, largest Euclidean norm.

    Raises
    ------
    ValueError
        Unless 1 <= s <= h and R is positive.

    Examples
    --------
    >>> sparse_covering(224, 2, 1.0)(jnp.array([0.1])).round(3)
    Array([16.215], dtype=float...)
    """
    if not integer("s", s, 1) <= integer("h", h, 1):
        raise ValueError(f"s: expected a number in [1, h = {h}], got {s}.")
    ball, supports = ball_covering(s, R), math.log(math.comb(h, s))

    def logs(radii):
        ball_logs = ball(radii)
        return jnp.where(ball_logs <= 0, 0.0, supports + ball_logs)

    return _of_radii(logs)


def finite_covering(points: chex.Array) -> Covering:
    """Return a covering of finitely many alphas, by farthest-first traversal.

    The count is at most the covering number at ``eps / 2``, because the centres are more than eps
    apart (Gonzalez 1985, "Clustering to minimize the maximum intercluster distance").

    Parameters
    ----------
    points : array [m, h]

    Raises
    ------
    ValueError
        If ``points`` is not a matrix, is empty or not finite.

    Examples
    --------
    >>> points = jnp.array([[0.0], [0.1], [1.0], [1.1]])
    >>> jnp.exp(finite_covering(points)(jnp.array([0.05, 0.5, 2.0]))).round(2)
    Array([4., 2., 1.], dtype=float...)
    """
    points = numpy_array("points", points)
    if points.ndim != 2 or points.size == 0:
        raise ValueError(f"points: expected shape [m, h], got {points.shape}.")
    check_finite("points", points, "entries")
    points = jnp.asarray(points) * 1.0

    def farthest(distances, _):
        centre = points[jnp.argmax(distances)]
        distances = jnp.minimum(distances, jnp.linalg.norm(points - centre[None], axis=1))
        return distances, distances.max()

    # needed[k]: the radius with which the first k + 1 centres cover all.
    start = jnp.linalg.norm(points - points[:1], axis=1)
    _, later = jax.lax.scan(farthest, start, length=len(points) - 1)
    needed = jnp.append(start.max(), later)

    def logs(radii):
        uncovered = jax.vmap(lambda radius: jnp.sum(needed > radius, dtype=radii.dtype))
        log_counts = jnp.log1p(uncovered(radii.ravel()).reshape(radii.shape))
        # Traced points are not checked. A NaN would count as a covered point.
        return jnp.where(jnp.isnan(needed).any(), jnp.nan, log_counts)

    return _of_radii(logs)


def _of_radii(logs: Callable[[jax.Array], jax.Array]) -> Covering:
    """Return ``logs`` of checked radii; NaN if a traced radius is not positive."""

    def covering(radii: jax.Array) -> jax.Array:
        radii = _check_radii(radii)
        return jnp.where(radii > 0, logs(radii), jnp.nan)

    return covering


def _check_radii(radii: Any) -> jax.Array:
    radii = numpy_array("radii", radii)
    if radii.size == 0:
        raise ValueError(f"radii: expected at least one, got the shape {radii.shape}.")
    if concrete(radii) and not np.all(radii > 0):
        raise ValueError(f"radii: expected positive numbers, got {offending(radii, radii > 0)}.")
    return jnp.asarray(radii) * 1.0
