"""Inverse trigonometric functions by polynomials; XLA's functions take ten times longer."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np

from ntk.internal.derivative_rules import custom_jvp


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
    """Return ``asin(x)`` to one unit of roundoff; its infinite slope at 1 and -1 counts as 0.

    ``square`` is ``1 - x^2``, without cancellation. Near 1 and -1 it determines the angle:
    ``asin(x) = pi / 2 - 2 asin(sqrt((1 - x) / 2))``.
    """
    size = jnp.abs(x)
    middle = square >= 0.5
    m = jnp.where(middle, x * x, square / (2 * (1 + size)))
    angle = jnp.where(middle, size, jnp.sqrt(m))
    angle = angle * horner(arc_polynomials(m.dtype.itemsize)[0], 4 * m - 1)
    return jnp.sign(x) * jnp.where(middle, angle, jnp.pi / 2 - 2 * angle)


@arcsine.defjvp
def _arcsine_jvp(primals, tangents):
    (x, square), (dx, _) = primals, tangents
    steep = jnp.where(square > 0, jax.lax.rsqrt(jnp.where(square > 0, square, 1)), 0)
    return arcsine(x, square), steep * dx
