"""Expectations of two kinks: truncated powers of a Gaussian pair, in closed form up to Owen's T.

For z, z' ~ N(0, 1) of correlation ``rho = q - p``, p + q = 1, and thresholds h, k >= 0,

    I_mn = E[(z - h)_+^m / m!  (z' - k)_+^n / n!],    index -1 for the point mass at the threshold,

    dI_mn/drho = I_{m-1,n-1},   dI_mn/dh = -I_{m-1,n},
    (m + 1) I_{m+1,n} = I_{m-1,n} + rho I_{m,n-1} - h I_mn    (Stein's lemma),

so that all follow from ``I_00 = P(z > h, z' > k)`` by Owen (1956), exact relative to the angle like
p. Reference for the recursion: Rosenbaum (1961).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ntk.internal.derivative_rules import custom_jvp

DENSITY = 0.3989422804014327  # of N(0, 1) at 0; a Python float takes the precision of arrays
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(20)


@functools.partial(custom_jvp, nondiff_argnums=(0,))
def truncated_powers(orders: int, h, k, p, q) -> jax.Array:
    """Return ``I_mn``, [orders, orders, ...]; the infinite slope of I_00 at p = 0 counts as 0."""
    return _power_table(orders, h, k, p, q)[1:, 1:]


@truncated_powers.defjvp
def _truncated_powers_jvp(orders, primals, tangents):
    dh, dk, dp, dq = tangents
    table = _power_table(orders, *primals)
    change = table[:-1, :-1] * (dq - dp) - table[:-1, 1:] * dh - table[1:, :-1] * dk
    return table[1:, 1:], change


def _power_table(orders: int, h, k, p, q) -> jax.Array:
    """Return ``I_mn`` for -1 <= m, n < ``orders``."""
    rho, sigma = q - p, 2 * jnp.sqrt(p * q)
    across, back = (k - h) + 2 * p * h, (h - k) + 2 * p * k  # k - rho h, h - rho k
    # The exponent of the joint density does not cancel for h = k.
    apart = (h - k) ** 2 + 4 * p * h * k
    inverse = _reciprocal_or_zero(sigma)
    joint = DENSITY**2 * inverse * jnp.exp(-apart * inverse * inverse / 2)
    at_h, at_k = _density_row(orders, h, -across, sigma), _density_row(orders, k, -back, sigma)
    # Loops keep the compiler from expanding the recursions into trees.
    counts = jnp.arange(1, orders).astype(p.dtype)

    def along(carry, x):
        before, now = carry
        density, count = x
        following = (before + rho * density - k * now) / count
        return (now, following), following

    corner = _orthant(h, k, p, sigma)
    _, first_row = jax.lax.scan(along, (at_k[0], corner), (at_h[:-1], counts))
    edge_row = jnp.concatenate([joint[None], at_h])
    start = edge_row, jnp.concatenate([at_k[:1], corner[None], first_row])

    def down(carry, x):
        before, now = carry
        edge, count = x
        following = (before[1:] + rho[None] * now[:-1] - h[None] * now[1:]) / count
        following = jnp.concatenate([edge[None], following])
        return (now, following), following

    _, rows = jax.lax.scan(down, start, (at_k[1:], counts))
    return jnp.concatenate([jnp.stack(start), rows])


def _density_row(orders: int, h, ahead, sigma) -> jax.Array:
    """Return ``I_{-1,n}``, [orders, ...]: density at h, times ``E[(ahead + sigma z)_+^n / n!]``."""
    y = _bounded_ratio(ahead, sigma)
    first = _upper(-y)

    def step(carry, count):
        before, now = carry  # `before` contains a factor sigma^2
        following = (ahead * now + before) / count
        return (sigma**2 * now, following), following

    start = sigma * DENSITY * jnp.exp(-(y**2) / 2), first
    _, higher = jax.lax.scan(step, start, jnp.arange(1, orders).astype(first.dtype))
    return DENSITY * jnp.exp(-(h**2) / 2)[None] * jnp.concatenate([first[None], higher])


def _orthant(h, k, p, sigma):
    """Return ``P(z > h, z' > k)`` for h, k >= 0, from Owen's T."""
    # Thresholds of 0 are limits, because the formula divides by them.
    tiny = 1e-150 if jnp.result_type(h).itemsize == 8 else 1e-18
    h, k = jnp.maximum(h, tiny), jnp.maximum(k, tiny)
    across, back = (k - h) + 2 * p * h, (h - k) + 2 * p * k
    return (_upper(h) + _upper(k)) / 2 - _owen(h, across, sigma) - _owen(k, back, sigma)


def _owen(h, across, sigma):
    """Return Owen's ``T(h, across / (h sigma))``, h > 0."""
    flat = h * sigma
    small = jnp.abs(across) <= flat
    # T(h, a) and T(a h, 1 / a) add up to an elementary function: integrate over a <= 1.
    below, above = _bounded_ratio(jnp.abs(across), flat), _bounded_ratio(flat, jnp.abs(across))
    slope = jnp.where(small, below, above)
    far = jnp.minimum(_bounded_ratio(jnp.abs(across), sigma), 40.0)  # a h
    start = jnp.where(small, h, far)

    def add(total, node):
        x, weight = node
        spread = 1 + (slope * x) ** 2
        return total + weight * jnp.exp(-(start**2) / 2 * spread) / spread, None

    nodes = jnp.asarray((_NODES + 1) / 2, slope.dtype), jnp.asarray(_WEIGHTS / 2, slope.dtype)
    integral = slope / (2 * jnp.pi) * jax.lax.scan(add, jnp.zeros_like(slope), nodes)[0]
    other = (_upper(h) + _upper(far)) / 2 - _upper(h) * _upper(far) - integral
    return jnp.where(across < 0, -1, 1) * jnp.where(small, integral, other)


def _upper(x):
    """Return ``P(z > x)``."""
    return jax.scipy.special.erfc(x / np.sqrt(2).item()) / 2


def _bounded_ratio(x, y):
    """Return ``x / y`` for y >= 0; 0 / 0 is 0, and other values stay finite."""
    largest = 1e300 if jnp.result_type(x).itemsize == 8 else 1e30
    ratio = x * _reciprocal_or_zero(y) + jnp.where(y > 0, 0, x * largest)
    return jnp.clip(ratio, -largest, largest)


def _reciprocal_or_zero(x):
    positive = x > 0
    return jnp.where(positive, 1 / jnp.where(positive, x, 1), 0)
