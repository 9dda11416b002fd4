"""The simplex, and the Euclidean projection on it."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax

from bilevel.constraints._members import check_at_once, require, scalar_parameter
from bilevel.contracts import Constraint, Pytree
from bilevel.internal.checks import at_least_float32


def project_simplex(point: chex.Array) -> jax.Array:
    """Project the last axis of ``point`` onto the probability simplex, in the Euclidean norm."""
    limit = jnp.finfo(point.dtype).max / 8
    # The clip keeps differences of huge values in range. NaN stays NaN.
    wide = jnp.clip(point, -limit, limit).astype(at_least_float32(point.dtype))
    projected = above_threshold(wide, 1)
    return (projected / jnp.sum(projected, axis=-1, keepdims=True)).astype(point.dtype)


def above_threshold(point: jax.Array, total: chex.Numeric) -> jax.Array:
    """Return ``max(point - tau, 0)`` on the last axis, with the ``tau`` of this total."""
    # Entries more than `total` under the largest project to 0, so clipping them changes nothing,
    # and keeps the sums below exact for points of any size.
    near = jnp.maximum(point - jnp.max(point, axis=-1, keepdims=True), -total)
    # With k entries above 0, each loses (their sum - total) / k; the largest of these is the loss.
    count = jnp.arange(1, point.shape[-1] + 1, dtype=near.dtype)
    totals = jnp.cumsum(jnp.sort(near, axis=-1, descending=True), axis=-1)
    losses = (totals - total) / jnp.broadcast_to(count, totals.shape)
    return jnp.maximum(near - jnp.max(losses, axis=-1, keepdims=True), 0)


def simplex(total: Any = 1.0) -> Constraint:
    """Require nonnegative weights with a given sum, on the last axis of every leaf.

    Parameters
    ----------
    total : float, or ``total(alpha) -> scalar``
        The sum, positive.

    Examples
    --------
    >>> import bilevel
    >>> lower = lambda w, alpha, batch: jnp.sum((w - alpha) ** 2)
    >>> solver = bilevel.implicit(bilevel.projected("simplex"))
    >>> w, alpha = jnp.zeros(3), jnp.array([0.9, 0.5, -1.0])
    >>> solver.run(lower, alpha, w, solver.init(w), None)[0].round(4)
    Array([0.7, 0.3, 0. ], dtype=float...)
    """
    check_at_once("total", total, lambda x: x > 0, "a positive number")

    def of(w, alpha):
        return scalar_parameter("total", total, w, alpha)

    def blank(w):
        _check_axes(w)
        return jax.tree.map(lambda x: jnp.ones(x.shape, bool), w)

    def identify(w, g, alpha, eta):
        size = of(w, alpha)
        return jax.tree.map(lambda w, g: above_threshold(w - eta * g, size) > 0, w, g)

    def prox(code, z, alpha, eta):
        size = of(z, alpha)
        return jax.tree.map(lambda s, z: jnp.where(s, z - _mean(s, z, size), 0), code, z)

    def step(code, w, g, alpha, eta):
        size = of(w, alpha)

        def on_leaf(s, w, g):
            return jnp.where(s, -eta * (g - _mean(s, g)) - _mean(s, w, size), -w)

        return jax.tree.map(on_leaf, code, w, g)

    def tangent(code, w, alpha, v):
        return jax.tree.map(lambda s, v: jnp.where(s, v - _mean(s, v), 0), code, v)

    def margins(code, w, g, alpha):
        def on_leaf(s, w, g):
            # One weight alone keeps the whole sum: it has no decision.
            inside = jnp.where(_support_size(s) > 1, w, jnp.inf)
            return jnp.where(s, inside, g - _mean(s, g))

        return jax.tree.map(on_leaf, code, w, g)

    def check(w, alpha):
        _check_axes(w)
        size = of(w, alpha)
        return require("total", size > 0, "a positive number", size)

    def curvature(code, w, g, alpha, v):
        return optax.tree.zeros_like(v)

    return Constraint(blank, identify, prox, step, tangent, curvature, margins, check)


def _check_axes(w: Pytree) -> None:
    for x in jax.tree.leaves(w):
        if jnp.ndim(x) == 0 or x.shape[-1] == 0:
            raise ValueError(
                "w0: expected a simplex on the last axis of every leaf, got a leaf of shape "
                f"{jnp.shape(x)}."
            )


def _support_size(support: jax.Array) -> jax.Array:
    return jnp.maximum(jnp.sum(support, -1, keepdims=True), 1)


def _mean(support: jax.Array, x: jax.Array, total: chex.Numeric = 0.0) -> jax.Array:
    """Return the mean of ``x`` on the support, after ``total`` is subtracted from the sum."""
    excess = jnp.sum(jnp.where(support, x, 0), -1, keepdims=True) - total
    return excess / _support_size(support).astype(x.dtype)
