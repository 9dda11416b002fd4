"""Gaussian expectations: of one variable, and of a pair at a kink in closed form.

With z ~ N(0, 1) and a pair ``(u, u') = (sx z, sy z')`` of correlation rho:

    mean        E[f(s z)]                      Gauss-Legendre panels on both half lines
    hermite     E[f(s z) h_k(z)]               the same; closed form at a kink
    kinked_pair E[f(u) g(u')]                  closed form, f and g kinked

A correlation comes as ``p = (1 - rho) / 2`` and ``q = (1 + rho) / 2``: the angle between the
inputs is ``theta = 2 atan2(sqrt p, sqrt q)``, exact where rho itself rounds to 1. Panels end at 0,
so kinks do no harm, and shrink towards it, so that any scale ``s`` up to 1e4 is resolved.

Reference: Cho & Saul (2009) for the kinked pairs; Daniely, Frostig & Singer (2016) for the duals.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from ntk.activations import Activation

DENSITY = 0.3989422804014327  # of N(0, 1) at 0; a Python number, for it to take any precision
_END = 13.0  # the density there is 2e-37


@functools.cache
def half_line(terms: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Nodes z > 0 and weights (with the density of N(0, 1)) [m], in float64.

    ``terms``: Hermite functions up to this degree are integrated too, 24 nodes for at most 16
    radians of the fastest.
    """
    width = min(0.5, 16 / np.sqrt(max(terms, 1)))
    uniform = np.linspace(0, _END, int(np.ceil(_END / width)) + 1)
    graded = uniform[1] * 2.0 ** np.arange(-14, 0)
    edges = np.concatenate([[0], graded, uniform[1:]])
    nodes, weights = np.polynomial.legendre.leggauss(24 if terms > 256 else 16)
    half = np.diff(edges)[:, None] / 2
    z = (edges[:-1, None] + half * (nodes + 1)).ravel()
    return z, (half * weights).ravel() * DENSITY * np.exp(-(z**2) / 2)


def mean(fn: Callable[[jax.Array], jax.Array], scale: jax.Array) -> jax.Array:
    """``E[fn(scale z)]``, z ~ N(0, 1), of an elementwise function smooth off 0; shape of ``scale``.

    Examples
    --------
    >>> bool(jnp.allclose(mean(lambda u: u**2, jnp.array([1.0, 3.0])), jnp.array([1.0, 9.0])))
    True
    """
    scale = jnp.asarray(scale)
    z, weights = (jnp.asarray(x, scale.dtype) for x in half_line())
    u = scale[..., None] * z
    return (fn(u) + fn(-u)) @ weights


@functools.cache
def _hermite_tables(terms: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Nodes z [m], and ``weight_i h_k(z_i)`` [m, terms / 2] for even and for odd k."""
    z, weights = half_line(terms)
    # h_k times the root of the density stays of order 1 where h_k alone overflows.
    root = np.exp(-(z**2) / 4)
    functions = np.empty((terms, len(z)))
    functions[0] = root
    functions[1] = z * root
    for k in range(1, terms - 1):
        functions[k + 1] = (z * functions[k] - np.sqrt(k) * functions[k - 1]) / np.sqrt(k + 1)
    table = (functions * (weights / root)).T
    return z, np.ascontiguousarray(table[:, ::2]), np.ascontiguousarray(table[:, 1::2])


def hermite(fn: Callable[[jax.Array], jax.Array], scale: jax.Array, terms: int) -> jax.Array:
    """``a_k = E[fn(scale z) h_k(z)]``, [..., terms], of an elementwise function smooth off 0.

    h_k are the orthonormal Hermite polynomials, so ``E[fn(scale z)^2] = sum_k a_k^2``. Even and odd
    parts are taken apart: coefficients that vanish by symmetry are exactly 0.

    Parameters
    ----------
    fn : elementwise function, an :class:`~ntk.activations.Activation` for instance.
    scale : array [...], standard deviations.
    terms : int, even.

    Examples
    --------
    >>> coefficients = hermite(jnp.tanh, jnp.array(1.0), 64)
    >>> round(float(coefficients[1]), 6), float(coefficients[2])
    (0.605706, 0.0)
    """
    if terms < 2 or terms % 2:
        raise ValueError(f"terms: expected an even number of at least 2, got {terms}.")
    scale = jnp.asarray(scale)
    z, even, odd = (table.astype(scale.dtype) for table in _hermite_tables(terms))
    u = scale[..., None] * z
    right, left = fn(u), fn(-u)
    pairs = ((right + left) @ even, (right - left) @ odd)
    return jnp.stack(pairs, axis=-1).reshape(*scale.shape, terms)


@functools.cache
def kink_coefficients(degree: int, terms: int) -> np.ndarray:
    """Hermite coefficients [terms] of relu (degree 1), step (0) or the point mass at 0 (-1)."""
    at_zero = np.zeros(terms)
    at_zero[0] = 1
    for k in range(2, terms, 2):
        at_zero[k] = -np.sqrt((k - 1) / k) * at_zero[k - 2]
    coefficients = DENSITY * at_zero
    # By parts: E[f h_k] = E[f' h_{k-1}] / sqrt(k).
    for first in (0.5, DENSITY)[: degree + 1]:
        rest = coefficients[:-1] / np.sqrt(np.arange(1, terms))
        coefficients = np.concatenate([[first], rest])
    return coefficients


@functools.cache
def _arc_polynomials() -> np.ndarray:
    """Of ``asin(sqrt m) / sqrt m`` and ``(t - sin t) / m^1.5``, t = 2 asin(sqrt m), 0 <= m <= 1/2.

    [2, 24], lowest power first, in 4 m - 1; both are analytic up to m = 1, so that the
    interpolation at 24 Chebyshev points is exact to 1e-17. XLA's own inverse functions take ten
    times longer than everything else in a layer of ReLUs.
    """
    # Power series in m: of asin, and of t - sin t = sum of what its double angle leaves.
    k = np.arange(60)
    asin = np.cumprod(np.concatenate([[1.0], (2 * k[1:] - 1) / (2 * k[1:])])) / (2 * k + 1)
    root = np.cumprod(np.concatenate([[1.0], (k[1:] - 1.5) / k[1:]]))  # of sqrt(1 - m)
    gap = 2 * (asin - root)[1:]
    points = np.polynomial.chebyshev.chebpts1(24)
    m = (points + 1) / 4
    values = [np.polynomial.polynomial.polyval(m, series) for series in (asin, gap)]
    fits = [np.polynomial.chebyshev.chebfit(points, v, 23) for v in values]
    return np.array([np.polynomial.chebyshev.cheb2poly(fit) for fit in fits])


@jax.custom_jvp
def arc_cosines(p: jax.Array, q: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``(E[step step], E[relu relu], 1/2 - E[relu relu])`` of unit variances; elementwise.

    With the angle theta, ``(pi - theta) / 2 pi`` and ``(sin theta + (pi - theta) rho) / 2 pi``
    (Cho & Saul 2009, orders 0 and 1), all three exact relative to themselves at every angle. The
    infinite slope of the first at rho = +-1 counts as 0.
    """
    near = p <= q
    m = jnp.minimum(p, q)
    root = jnp.sqrt(m)
    asin, gap = (_horner(c, 4 * m - 1) for c in _arc_polynomials())
    t, gap = 2 * root * asin, m * root * gap
    step = jnp.where(near, jnp.pi - t, t) / (2 * jnp.pi)
    small = jnp.where(near, gap + 2 * m * (jnp.pi - t), 2 * m * t - gap) / (2 * jnp.pi)
    return step, jnp.where(near, 0.5 - small, small), jnp.where(near, small, 0.5 - small)


@arc_cosines.defjvp
def _arc_cosines_jvp(primals, tangents):
    p, q = primals
    drho = tangents[1] - tangents[0]
    step, relu, gap = arc_cosines(p, q)
    steep = reciprocal(4 * jnp.pi * jnp.sqrt(p * q))
    return (step, relu, gap), (steep * drho, step * drho, -step * drho)


def _horner(coefficients: np.ndarray, x: jax.Array) -> jax.Array:
    total = jnp.full_like(x, coefficients[-1])
    for c in coefficients[-2::-1].tolist():
        total = total * x + c
    return total


def kinked_pair(f: Activation, g: Activation, jumps, sx, sy, p, q) -> jax.Array:
    """``E[f(u) g(u')]`` for kinked f and g; elementwise in sx, sy, p, q.

    ``jumps``: ((left, right) of f, of g), which replace the fields ``kink`` and may be traced. With
    ``f = left z^d + (right - left) relu^(1 - d)`` it is a sum of four terms. A point mass against a
    point mass at the correlations 1 and -1, infinite, is 0 here: the slope of a step's dual there.
    """
    if f.degree < g.degree:
        return kinked_pair(g, f, jumps[::-1], sy, sx, p, q)
    (lf, rf), (lg, rg) = jumps
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
        case _:
            return DENSITY**2 * jf * jg * reciprocal(sx * sy * 2 * jnp.sqrt(p * q))


def kinked_gap(jumps, p, q) -> jax.Array:
    """``E[f(z) f(z)] - E[f(z) f(z')]``, f kinked of degree 1: exact down to the smallest angle."""
    left, right = jumps
    return 2 * p * left * right + (right - left) ** 2 * arc_cosines(p, q)[2]


def root(x: jax.Array) -> jax.Array:
    """Square root, with derivative 0 at 0."""
    positive = x > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, x, 1)), 0)


def reciprocal(x: jax.Array) -> jax.Array:
    """``1 / x``, and 0 at 0."""
    positive = x > 0
    return jnp.where(positive, 1 / jnp.where(positive, x, 1), 0)
