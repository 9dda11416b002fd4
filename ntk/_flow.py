"""``phi_t(K) r``, the path of gradient flow, by the eigenvalues of K, with its derivative.

``phi_t(K) = K^-1 (I - exp(-t K))``, for singular K and infinite t too.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ntk._checks import array, concrete, nan_unless, offending


def times(t: Any, dtype: Any) -> jax.Array:
    """``t`` as an array of nonnegative times; NaN where it is traced and is negative."""
    t = array("t", t).astype(dtype)
    if concrete(t) and not (np.asarray(t) >= 0).all():
        raise ValueError(f"t: expected nonnegative times, got {offending(t, np.asarray(t) >= 0)}.")
    return jnp.where(t >= 0, t, jnp.nan)


@jax.custom_jvp
def _flow(K, r, t):
    """``phi_t(K) r`` for r [n, outputs], by the eigenvalues of K."""
    values, V = _eigh(K)
    return V @ (_phi(values, t)[:, None] * (V.T @ r))


@_flow.defjvp
def _(primals, tangents):
    # The derivative of eigh has poles at multiple eigenvalues; that of a function of K has none:
    # dphi(K) = V (phi[a, b] o V' dK V) V' with the divided differences of phi (Daleckii-Krein).
    (K, r, t), (dK, dr, dt) = primals, tangents
    values, V = _eigh(K)
    phi = _phi(values, t)[:, None]
    inside = V.T @ r
    slope = (_divided_differences(values, t) * (V.T @ dK @ V)) @ inside
    slope += phi * (V.T @ dr) + dt * jnp.exp(-_product(t, values))[:, None] * inside
    return V @ (phi * inside), V @ slope


flows = jax.jit(jax.vmap(_flow, in_axes=(None, None, 0)))


def _eigh(K):
    values, V = jnp.linalg.eigh(K)
    rounding = len(K) * jnp.finfo(K.dtype).eps * jnp.max(jnp.abs(values))
    # Of a matrix [[NaN]] the vector is 1, and its value counts as not positive below.
    V = nan_unless(jnp.isfinite(values).all(), V)
    return jnp.where(values > rounding, values, 0), V


def _product(t, values):
    """``t * values``, with 0 * inf = 0."""
    return jnp.where(values > 0, t * jnp.where(values > 0, values, 1), 0)


def _phi(a, t):
    """``(1 - exp(-t a)) / a``, which is t at a = 0; but 0 there at t = inf: nothing has moved."""
    at_zero = jnp.where(jnp.isinf(t), 0, t)
    return jnp.where(a > 0, -jnp.expm1(-_product(t, a)) / jnp.where(a > 0, a, 1), at_zero)


def _divided_differences(values, t):
    """``(phi(a) - phi(b)) / (a - b)`` for all pairs, without cancellation."""
    a = jnp.minimum(values[:, None], values)
    b = jnp.maximum(values[:, None], values)
    finite = jnp.where(jnp.isinf(t), 0, t)
    x, y = finite * a, finite * b
    # (D - phi(a)) / b, where D = (exp(-x) - exp(-y)) / (b - a) has a stable form.
    half = (y - x) / 2
    ratio = jnp.where(half > 0, -jnp.expm1(-2 * half) / jnp.where(half > 0, 2 * half, 1), 1)
    safe = jnp.where(b > 0, b, 1)
    exact = (finite * jnp.exp(-x) * ratio - _phi(a, finite)) / safe
    series = -(finite**2) * (
        1 / 2 - (x + y) / 6 + (x * x + x * y + y * y) / 24 - (x + y) * (x * x + y * y) / 120
    )
    limit = jnp.where(a > 0, -1 / (jnp.where(a > 0, a, 1) * safe), 0)
    return jnp.where(jnp.isinf(t), limit, jnp.where(y < 1e-2, series, exact))
