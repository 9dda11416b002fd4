"""Gaussian expectations: of one variable by quadrature, and of a pair at a kink in closed form.

A pair ``(u, u') = (sx z, sy z')`` has its correlation as ``p = (1 - rho) / 2`` and
``q = (1 + rho) / 2``. The angle between the inputs is ``theta = 2 atan2(sqrt p, sqrt q)``, exact
even if rho rounds to 1. Inverse trigonometric functions are polynomials: XLA's take ten times
longer. Panels end at 0, where a kink may be, and they shrink towards 0 for large scales.

Reference: Cho & Saul (2009) for the kinked pairs; Daniely, Frostig & Singer (2016) for the duals.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from ntk.expectations.truncated_powers import DENSITY
from ntk.internal.derivative_rules import custom_jvp

_END = 13.0  # integrals over N(0, 1) end here, at a density of 8e-38


class Grid(NamedTuple):
    """Nodes z > 0 on panels, and orthonormal Hermite polynomials h_k at them."""

    z: Any  # [m]
    roots: Any  # [m], of the weights, which include the density of N(0, 1)
    even: Any  # [m, K / 2], roots times h_0, h_2, ...
    odd: Any  # [m, K / 2]
    last: Any  # [nodes, 3], to a panel's last Legendre coefficients
    mass: Any  # [panels], probability


def panels(width: float = 0.5) -> np.ndarray:
    """Return edges from 0 to 13, at most ``width`` apart, and closer towards 0: down to 3e-8."""
    uniform = np.linspace(0, _END, int(np.ceil(_END / width)) + 1)
    return np.concatenate([[0], uniform[1] * 2.0 ** np.arange(-24, 0), uniform[1:]])


@functools.lru_cache(maxsize=4)
def hermite_grid(terms: int, width: float = 0.5) -> Grid:
    """Return a float64 grid to expand piecewise smooth functions in ``terms`` polynomials."""
    nodes, weights = np.polynomial.legendre.leggauss(24)
    edges = panels(min(width, 16 / np.sqrt(terms)))
    half = np.diff(edges)[:, None] / 2
    z = edges[:-1, None] + half * (nodes + 1)
    density = half * weights * DENSITY * np.exp(-(z**2) / 2)
    z, roots = z.ravel(), np.sqrt(density.ravel())
    # h_k alone overflows; times the root of the density it is of order 1.
    even, odd = parts = [np.empty((terms // 2, len(z))) for _ in range(2)]
    even[0], odd[0] = roots, z * roots
    for k in range(1, terms - 1):
        one, other = parts[k % 2][k // 2], parts[1 - k % 2]
        other[(k + 1) // 2] = (z * one - np.sqrt(k) * other[(k - 1) // 2]) / np.sqrt(k + 1)
    degrees = np.arange(21, 24)
    legendre = np.polynomial.legendre.legvander(nodes, 23)[:, degrees]
    last = legendre * weights[:, None] * (degrees + 0.5)
    return Grid(z, roots, even.T, odd.T, last, density.sum(1))


def gaussian_mean(
    fn: Callable[[jax.Array], jax.Array], scale: chex.Array, places: tuple[float, ...] = ()
) -> jax.Array:
    """Return ``E[fn(scale z)]``, z ~ N(0, 1), elementwise; kinks may be at 0 and ``places``."""
    scale = jnp.asarray(scale)
    edges: Any = panels()
    edges = jnp.asarray(np.concatenate([-edges[:0:-1], edges]), scale.dtype)
    edges = jnp.broadcast_to(edges, (*scale.shape, len(edges)))
    if places:
        kinks = jnp.asarray(places, scale.dtype) * reciprocal(scale)[..., None]
        edges = jnp.sort(jnp.concatenate([edges, jnp.clip(kinks, -_END, _END)], -1), -1)
    rule = np.polynomial.legendre.leggauss(24)
    nodes, weights = (jnp.asarray(x, scale.dtype) for x in rule)
    half = (edges[..., 1:] - edges[..., :-1])[..., None] / 2
    nodes, weights = (x.reshape(*[1] * (half.ndim - 1), -1) for x in (nodes, weights))
    z = edges[..., :-1, None] + half * (nodes + 1)
    weights = half * weights * DENSITY * jnp.exp(-(z**2) / 2)
    z, weights = (x.reshape(*scale.shape, -1) for x in (z, weights))
    return (fn(scale[..., None] * z) * weights).sum(-1)


@functools.cache
def kink_series(degree: int, terms: int) -> tuple[np.ndarray, float]:
    """Return Hermite coefficients of relu (degree 1) or step (0), and the norm of the remainder."""
    at_zero = np.zeros(terms)
    at_zero[0] = 1
    for k in range(2, terms, 2):
        at_zero[k] = -np.sqrt((k - 1) / k) * at_zero[k - 2]
    coefficients = DENSITY * at_zero
    # By parts: E[f h_k] = E[f' h_{k-1}] / sqrt(k).
    for first in (0.5, DENSITY)[: degree + 1]:
        higher = coefficients[:-1] / np.sqrt(np.arange(1, terms))
        coefficients = np.concatenate([[first], higher])
    return coefficients, float(np.sqrt(max(0.5 - np.sum(coefficients**2), 0)))


@functools.cache
def arc_polynomials(size: int) -> np.ndarray:
    """Return coefficients [2, n] of two polynomials in 4 m - 1, lowest power first, m <= 1/2.

    They interpolate ``asin(sqrt m) / sqrt m`` and ``(t - sin t) / m^1.5``, t = 2 asin(sqrt m), at n
    Chebyshev points: 21 are exact to 1e-17, and 9, for numbers of ``size`` 4 bytes, to 1e-8.
    """
    count = 21 if size == 8 else 9
    # Power series in m: of asin, and of t - sin t with sin t = 2 sqrt(m) sqrt(1 - m).
    k = np.arange(60)
    asin = np.cumprod(np.concatenate([[1.0], (2 * k[1:] - 1) / (2 * k[1:])])) / (2 * k + 1)
    root = np.cumprod(np.concatenate([[1.0], (k[1:] - 1.5) / k[1:]]))  # of sqrt(1 - m)
    gap = 2 * (asin - root)[1:]
    points = np.polynomial.chebyshev.chebpts1(count)
    m = (points + 1) / 4
    values = [np.polynomial.polynomial.polyval(m, series) for series in (asin, gap)]
    fits = [np.polynomial.chebyshev.chebfit(points, v, count - 1) for v in values]
    powers = [np.polynomial.chebyshev.cheb2poly(fit) for fit in fits]
    # numpy drops trailing zeros, and the last coefficient can round to 0.
    return np.array([np.pad(p, (0, count - len(p))) for p in powers])


def horner(coefficients: np.ndarray, x: jax.Array) -> jax.Array:
    """Return the polynomial with these coefficients, lowest power first."""
    total = jnp.full_like(x, coefficients[-1])
    for c in coefficients[-2::-1].tolist():
        total = total * x + c
    return total


@custom_jvp
def arcsine(x: chex.Array, square: chex.Array) -> jax.Array:
    """Return ``asin(x)``; ``square`` is ``1 - x^2`` without cancellation, for x near 1 and -1."""
    size = jnp.abs(x)
    middle = square >= 0.5
    m = jnp.where(middle, x * x, square / (2 * (1 + size)))
    angle = jnp.where(middle, size, jnp.sqrt(m))
    angle = angle * horner(arc_polynomials(m.dtype.itemsize)[0], 4 * m - 1)
    # Near 1 and -1, asin(x) = pi / 2 - 2 asin(sqrt((1 - x) / 2)).
    return jnp.sign(x) * jnp.where(middle, angle, jnp.pi / 2 - 2 * angle)


@arcsine.defjvp
def _arcsine_jvp(primals, tangents):
    (x, square), (dx, _) = primals, tangents
    steep = jnp.where(square > 0, jax.lax.rsqrt(jnp.where(square > 0, square, 1)), 0)
    return arcsine(x, square), steep * dx


@custom_jvp
def arc_cosines(p: chex.Array, q: chex.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return ``(E[step step], E[relu relu], 1/2 - E[relu relu])`` of unit variances."""
    near = p <= q
    m = jnp.minimum(p, q)
    root = jnp.sqrt(m)
    asin, gap = (horner(c, 4 * m - 1) for c in arc_polynomials(m.dtype.itemsize))
    t, gap = 2 * root * asin, m * root * gap
    step = jnp.where(near, jnp.pi - t, t) / (2 * jnp.pi)
    small = jnp.where(near, gap + 2 * m * (jnp.pi - t), 2 * m * t - gap) / (2 * jnp.pi)
    return step, jnp.where(near, 0.5 - small, small), jnp.where(near, small, 0.5 - small)


@arc_cosines.defjvp
def _arc_cosines_jvp(primals, tangents):
    p, q = primals
    drho = tangents[1] - tangents[0]
    step, relu, gap = arc_cosines(p, q)
    steep = reciprocal(4 * jnp.pi * root(p * q))  # 0 where it is infinite
    return (step, relu, gap), (steep * drho, step * drho, -step * drho)


def kinked_pair(f, g, sx, sy, p, q) -> jax.Array:
    """Return ``E[f(u) g(u')]`` for kinked activations f and g; elementwise in sx, sy, p, q."""
    if f.degree < g.degree:
        return kinked_pair(g, f, sy, sx, p, q)
    # A sum of four terms, because f = left z^d + (right - left) relu^(1 - d).
    (lf, rf), (lg, rg) = f.kink, g.kink
    jf, jg = rf - lf, rg - lg
    rho = q - p
    step, relu, _ = arc_cosines(p, q)
    match f.degree, g.degree:
        case 1, 1:
            return sx * sy * (lf * lg * rho + (lf * jg + jf * lg) * rho / 2 + jf * jg * relu)
        case 1, 0:
            return sx * DENSITY * (lf * jg * rho + jf * lg + jf * jg * q)
        case 0, 0:
            return lf * lg + (lf * jg + jf * lg) / 2 + jf * jg * step
        case 1, -1:
            return DENSITY**2 * sx * reciprocal(sy) * 2 * jnp.sqrt(p * q) * jf * jg
        case 0, -1:
            return DENSITY * reciprocal(sy) * (lf + rf) / 2 * jg + 0 * p
        case _:  # infinite at correlations 1 and -1, and 0 here, like the slope of a step's dual
            return DENSITY**2 * jf * jg * reciprocal(sx * sy * 2 * jnp.sqrt(p * q))


def kinked_gap(jumps: Any, p: jax.Array, q: jax.Array) -> jax.Array:
    """Return ``E[f(z) f(z)] - E[f(z) f(z')]``, f kinked of degree 1; exact at small angles."""
    left, right = jumps
    return 2 * p * left * right + (right - left) ** 2 * arc_cosines(p, q)[2]


def root(x: chex.Array) -> jax.Array:
    """Return the square root, with derivative 0 at 0."""
    positive = ~(x <= 0)  # true for NaN, so that NaN stays
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, x, 1)), 0)


def reciprocal(x: chex.Array) -> jax.Array:
    """Return ``1 / x``, and 0 at 0."""
    positive = ~(x <= 0)  # true for NaN, so that NaN stays
    return jnp.where(positive, 1 / jnp.where(positive, x, 1), 0)
