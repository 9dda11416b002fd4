"""Lemma 5 of Roberts et al.: a point of the simplex as a mixture of a vertex and a face point."""

import chex
import jax
import jax.numpy as jnp

from bilevel.internal.checks import at_least_float32, nan_where, simplex_slack


def factor_simplex(alpha: chex.Array, i: int | chex.Array) -> jax.Array:
    """Return ``gamma`` in ``alpha = alpha_i e_i + (1 - alpha_i) gamma`` (Lemma 5).

    ``alpha`` is [..., h]. ``gamma = alpha_{-i} / (1 - alpha_i)`` has a 0 at vertex i. It is NaN for
    ``alpha_i = 1`` or a traced ``i`` out of range. The paper has i = 1 and interior alpha, and h =
    3 in Lemma 2.
    """
    alpha = _on_simplex(jnp.asarray(alpha))
    h = alpha.shape[-1]
    others = jnp.where(jnp.arange(h) == i, 0, alpha)
    others = nan_where((i < 0) | (i >= h), others)
    # The sum is 1 - alpha_i without its cancellation near a vertex.
    total = jnp.sum(others, axis=-1, keepdims=True)
    # XLA multiplies by a reciprocal, and x (1 / x) need not be 1; for h = 2 gamma must be exact.
    gamma = others / total
    rounded = jnp.where((others == total) & (total > 0), 1, gamma)
    return gamma + jax.lax.stop_gradient(rounded - gamma)  # the derivative of a constant 1 is 0


def _on_simplex(alpha: jax.Array) -> jax.Array:
    """Return ``alpha``, NaN off the simplex."""
    total = alpha.astype(at_least_float32(alpha.dtype)).sum(-1, keepdims=True)
    near = jnp.abs(total - 1) <= simplex_slack(alpha.dtype)
    return nan_where(~((alpha >= 0).all(-1, keepdims=True) & near), alpha)
