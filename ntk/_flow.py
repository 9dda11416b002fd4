"""``phi_t(K) r``, the path of gradient flow, by the eigenvalues of K, with its derivative.

``phi_t(K) = K^-1 (I - exp(-t K))``, for singular K and infinite t too.

What an eigenvalue under n eps max |eigenvalue| is, rounding decides. Where that may be seen, from
about its inverse on, such a direction is taken back to where it began: ``phi_t = t exp(-t n eps
max)``. So a path is bounded, whatever the noise, and leads to its limit, in which only directions
with a kernel have moved.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ntk._checks import array, concrete, nan_unless, numbers, offending


def times(t: Any, dtype: Any) -> jax.Array:
    """``t`` as an array of nonnegative times; NaN where it is traced and is negative."""
    if concrete(t):
        # In numpy: `jax_debug_infs` would raise at infinite times, which are the limit.
        t = numbers("t", t).astype(dtype)
        if not (t >= 0).all():
            raise ValueError(f"t: expected nonnegative times, got {offending(t, t >= 0)}.")
        return t
    t = array("t", t).astype(dtype)
    return jnp.where(t >= 0, t, jnp.nan)


@jax.custom_jvp
def flow(K, r, t):
    """``phi_t(K) r`` for r [n, outputs], by the eigenvalues of K."""
    values, V, rounding = _eigh(K)
    return V @ (_phi(values, t, rounding)[:, None] * (V.T @ r))


@flow.defjvp
def _(primals, tangents):
    # The derivative of eigh has poles at multiple eigenvalues; that of a function of K has none:
    # dphi(K) = V (phi[a, b] o V' dK V) V' with the divided differences of phi (Daleckii-Krein).
    (K, r, t), (dK, dr, dt) = primals, tangents
    values, V, rounding = _eigh(K)
    phi = _phi(values, t, rounding)[:, None]
    inside = V.T @ r
    slope = (_divided_differences(values, t, rounding) * (V.T @ dK @ V)) @ inside
    in_time = jnp.where(values > 0, jnp.exp(-_product(t, values)), _rate_at_zero(t, rounding))
    slope += phi * (V.T @ dr) + dt * in_time[:, None] * inside
    return V @ (phi * inside), V @ slope


flows = jax.jit(jax.vmap(flow, in_axes=(None, None, 0)))


def _eigh(K):
    values, V = jnp.linalg.eigh(K)
    rounding = len(K) * jnp.finfo(K.dtype).eps * jnp.max(jnp.abs(values))
    # Of a matrix [[NaN]] the vector is 1, and its value counts as not positive below.
    V = nan_unless(jnp.isfinite(values).all(), V)
    return jnp.where(values > rounding, values, 0), V, rounding


def _product(t, values):
    """``t * values``, with 0 * inf = 0."""
    return jnp.where(values > 0, t * jnp.where(values > 0, values, 1), 0)


def _finite(t):
    return jnp.where(jnp.isinf(t), 0, t)


def _at_zero(t, rounding):
    """``phi_t`` in a direction that rounding decides; 0 in the limit."""
    return _finite(t) * jnp.exp(-_finite(t) * rounding)


def _rate_at_zero(t, rounding):
    """The derivative of that in t."""
    past = _finite(t) * rounding
    return jnp.where(jnp.isinf(t), 0, (1 - past) * jnp.exp(-past))


def _phi(a, t, rounding):
    """``(1 - exp(-t a)) / a``, and at a = 0 t, as long as that is known."""
    moved = -jnp.expm1(-_product(t, a)) / jnp.where(a > 0, a, 1)
    return jnp.where(a > 0, moved, _at_zero(t, rounding))


def _divided_differences(values, t, rounding):
    """``(phi(a) - phi(b)) / (a - b)`` for all pairs, without cancellation."""
    a = jnp.minimum(values[:, None], values[None])
    b = jnp.maximum(values[:, None], values[None])
    finite = _finite(t)
    x, y = finite * a, finite * b
    # (D - phi(a)) / b, where D = (exp(-x) - exp(-y)) / (b - a) has a stable form.
    half = (y - x) / 2
    ratio = jnp.where(half > 0, -jnp.expm1(-2 * half) / jnp.where(half > 0, 2 * half, 1), 1)
    safe = jnp.where(b > 0, b, 1)
    exact = (finite * jnp.exp(-x) * ratio - _phi(a, finite, rounding)) / safe
    series = -(finite**2) * (
        1 / 2 - (x + y) / 6 + (x * x + x * y + y * y) / 24 - (x + y) * (x * x + y * y) / 120
    )
    series = jnp.where(a > 0, series, series * jnp.exp(-finite * rounding))
    # Of the pseudo-inverse, as long as its rank stays.
    limit = jnp.where(a > 0, -1 / (jnp.where(a > 0, a, 1) * safe), jnp.where(b > 0, 1 / safe**2, 0))
    return jnp.where(jnp.isinf(t), limit, jnp.where(y < 1e-2, series, exact))
