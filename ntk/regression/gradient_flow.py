"""``phi_t(K) r`` by the eigenvalues of K, for ``phi_t(K) = K^-1 (I - exp(-t K))``, and derivatives.

Eigenvalues under n eps max |eigenvalue| are roundoff. From about the time of their inverse on,
roundoff would be visible, so the direction returns to its start: ``phi_t = t exp(-t n eps max)``.
A path is therefore bounded and leads to its limit, where only directions with a kernel have moved.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ntk.internal.checks import concrete, nan_unless, numpy_array, offending, real_array
from ntk.internal.products import matmul
from ntk.regression.targets import kernel_entry_error

_ALLOWED = 0.1  # error relative to the targets: one correct digit


def check_times(t: Any, dtype: Any) -> jax.Array:
    """Return ``t`` as an array of nonnegative times; traced negative times become NaN."""
    if concrete(t):
        # We use numpy, because `jax_debug_infs` would raise for infinite times.
        t = numpy_array("t", t).astype(dtype)
        if not (t >= 0).all():
            raise ValueError(f"t: expected nonnegative times, got {offending(t, t >= 0)}.")
        return t
    t = real_array("t", t).astype(dtype)
    return jnp.where(t >= 0, t, jnp.nan)


@jax.custom_jvp
def flow(K, r, t):
    """Return ``phi_t(K) r`` for r [n, outputs], by the eigenvalues of K."""
    values, V, rounding = _eigh(K)
    return matmul(V, _phi(values, t, rounding)[:, None] * matmul(V.T, r))


@flow.defjvp
def _(primals, tangents):
    # The derivative of eigh has poles at multiple eigenvalues, the derivative of phi(K) does not:
    # dphi(K) = V (phi[a, b] o V' dK V) V' with the divided differences of phi (Daleckii-Krein).
    (K, r, t), (dK, dr, dt) = primals, tangents
    values, V, rounding = _eigh(K)
    phi = _phi(values, t, rounding)[:, None]
    inside = matmul(V.T, r)
    turned = matmul(matmul(V.T, dK), V)
    slope = matmul(_divided_differences(values, t, rounding) * turned, inside)
    past = _zero_if_infinite(t) * rounding
    rate_at_zero = jnp.where(jnp.isinf(t), 0, (1 - past) * jnp.exp(-past))
    in_time = jnp.where(values > 0, jnp.exp(-_zero_safe_product(t, values)), rate_at_zero)
    slope += phi * matmul(V.T, dr) + dt * in_time[:, None] * inside
    return matmul(V, phi * inside), matmul(V, slope)


flows = jax.jit(jax.vmap(flow, in_axes=(None, None, 0)))


def refined(K, cross, r, t):
    """Return ``phi_t(K) r`` for all times [times, n, outputs].

    Raise ``ValueError``, or return NaN if traced, if rounding can move predictions by a tenth of r.
    """
    moved, error = _flows_and_error(K, cross, r, t)
    good = ~(error > _ALLOWED)  # NaN passes, and stays NaN in the result
    if not concrete(good):
        return nan_unless(good[:, None, None], moved)
    if not good.all():
        latest = _latest_accurate_time(K, cross, r)
        raise ValueError(
            f"t: expected at most {latest:.2g} for this kernel in {K.dtype}, got "
            f"{float(offending(t, good)):.3g}: the kernel is singular to rounding, and predictions "
            f"may be off by {_ALLOWED:.0%} of the targets or more. Add a penalty, stop earlier, or "
            "compute kernels in float64 (jax_enable_x64)."
        )
    return moved


@jax.jit
def _flows_and_error(K, cross, r, t):
    return flows(K, r, t), _error(*jax.lax.stop_gradient((K, cross, r, t)))


def _error(K, cross, r, t):
    """Return the largest error of ``cross phi_t(K) r`` from rounded entries, over r: [times]."""
    # To first order it is (dcross - cross phi dK) phi r. Relative sizes keep squares in range.
    values, V, rounding = _eigh(K)
    top = rounding / (len(K) * jnp.finfo(K.dtype).eps)
    top = jnp.where(top > 0, top, 1)
    size = jnp.sqrt(jnp.maximum(jnp.diagonal(K) / top, 0))
    rows, largest = cross / top, jnp.max(jnp.abs(r), axis=0)
    columns = r / jnp.where(largest > 0, largest, 1)[None]
    # A lower bound of another input's variance follows from its covariances.
    scale = jnp.where(size > 0, size, 1)
    own = jnp.max(jnp.where(size[None] > 0, jnp.abs(rows) / scale[None], 0), axis=1)
    # If a row exceeds roundoff in a direction, the kernel is not singular there.
    along, directions = matmul(rows, V), size[:, None] * V
    error, lengths = kernel_entry_error(K.dtype), jnp.linalg.norm(directions, axis=0)
    noise = error * own[:, None] * lengths[None]
    noise += rounding / top * jnp.linalg.norm(rows, axis=1, keepdims=True)
    seen = (jnp.abs(along) > noise).any(axis=0)
    eigenvalues, errors, seen = (x[None] for x in (values / top, error * lengths**2, seen))
    weights = _error_weights(eigenvalues, errors, seen, rounding / top, (t * top)[:, None])
    through = jnp.sqrt(matmul(weights**2, (along**2).T))
    reach = jnp.max(own[None] + jnp.max(size) * through, axis=1)
    at = matmul(directions, weights[..., None] * matmul(V.T, columns)[None])
    return error * reach * jnp.max(jnp.linalg.norm(at, axis=1), axis=-1)


def _error_weights(values, errors, seen, rounding, t):
    """Return ``phi_t`` of every direction, times its error over an entry's error: [times, n].

    A gap above the roundoff directions shows that K has a lower rank. Without the gap, or if a row
    has them (``seen``), these directions can have any eigenvalue up to roundoff.
    """
    eps = jnp.finfo(values.dtype).eps
    gap = ~((values > 0) & (values < jnp.sqrt(eps))).any()
    none = _at_zero(t, rounding) * eps / kernel_entry_error(values.dtype)
    lost = jnp.where(gap & ~seen, none, jnp.minimum(t, 1 / rounding))
    least = jnp.maximum(values - errors, rounding)
    return jnp.where(values > 0, _phi(least, t, rounding), lost)


def _latest_accurate_time(K, cross, r) -> float:
    """Return the largest time with an allowed error, to a few percent, from below."""
    early, late = -60.0, 60.0  # logarithms of the time, over that of the largest eigenvalue
    top = float(jnp.max(jnp.abs(K)))
    for _ in range(12):
        middle = (early + late) / 2
        error = float(_jitted_error(K, cross, r, jnp.full(1, np.exp(middle) / top, K.dtype))[0])
        early, late = (middle, late) if error <= _ALLOWED else (early, middle)
    return 0.95 * float(np.exp(early)) / top


_jitted_error = jax.jit(_error)


def _eigh(K):
    values, V = jnp.linalg.eigh(K)
    rounding = len(K) * jnp.finfo(K.dtype).eps * jnp.max(jnp.abs(values))
    # For [[NaN]] the vector is 1, and the value would become 0 below.
    V = nan_unless(jnp.isfinite(values).all(), V)
    return jnp.where(values > rounding, values, 0), V, rounding


def _zero_safe_product(t, values):
    """Return ``t * values``, with inf * 0 = 0."""
    return jnp.where(values > 0, t * jnp.where(values > 0, values, 1), 0)


def _zero_if_infinite(t):
    return jnp.where(jnp.isinf(t), 0, t)


def _at_zero(t, rounding):
    """Return ``phi_t`` for a roundoff direction; 0 in the limit."""
    return _zero_if_infinite(t) * jnp.exp(-_zero_if_infinite(t) * rounding)


def _phi(a, t, rounding):
    """Return ``(1 - exp(-t a)) / a``, and :func:`_at_zero` for a = 0."""
    moved = -jnp.expm1(-_zero_safe_product(t, a)) / jnp.where(a > 0, a, 1)
    return jnp.where(a > 0, moved, _at_zero(t, rounding))


def _divided_differences(values, t, rounding):
    """Return ``(phi(a) - phi(b)) / (a - b)`` for all pairs, without cancellation."""
    a = jnp.minimum(values[:, None], values[None])
    b = jnp.maximum(values[:, None], values[None])
    finite = _zero_if_infinite(t)
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
    # The limit is the pseudo-inverse, with constant rank.
    limit = jnp.where(a > 0, -1 / (jnp.where(a > 0, a, 1) * safe), jnp.where(b > 0, 1 / safe**2, 0))
    return jnp.where(jnp.isinf(t), limit, jnp.where(y < 1e-2, series, exact))
