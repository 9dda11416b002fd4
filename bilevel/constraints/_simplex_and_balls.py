"""The simplex, the Euclidean projection on it, and the l2 and l1 balls around 0."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax

from bilevel.constraints import _members as members
from bilevel.contracts import Constraint, Pytree
from bilevel.internal.checks import at_least_float32
from ntk.internal.products import matmul


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
    """
    members.check_at_once("total", total, lambda x: x > 0, "a positive number")

    def of(w, alpha):
        return members.scalar_parameter("total", total, w, alpha)

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
        return members.require("total", size > 0, "a positive number", size)

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


def l2_ball(radius: Any = 1.0) -> Constraint:
    """Require ``|w|_2 <= radius``.

    Parameters
    ----------
    radius : float, or ``radius(alpha) -> scalar``
    """

    def excess(w, g, eta, radius):
        """Return ``|z|^2 - radius^2`` of ``z = w - eta g``, without loss of a small gradient."""
        size = jnp.linalg.norm(w)
        return (size - radius) * (size + radius) - 2 * eta * matmul(w, g) + eta**2 * matmul(g, g)

    def norm(active, z):
        square = matmul(z, z)
        return jnp.sqrt(jnp.where(active & (square > 0), square, 1))

    def step(active, w, g, eta, radius):
        size = norm(active, w - eta * g)
        shorter = -excess(w, g, eta, radius) / (radius + size)  # radius - |z|
        return jnp.where(active, (shorter * w - eta * radius * g) / size, -eta * g)

    def tangent(active, w, v, radius):
        return v - jnp.where(active, matmul(w, v) / norm(active, w) ** 2, 0) * w

    def margins(active, w, g, radius):
        multiplier = -matmul(w, g) / matmul(w, w)
        return jnp.where(active, multiplier, radius - jnp.linalg.norm(w))

    def curvature(active, w, g, v, radius):
        bend = jnp.where(active, -matmul(w, g) / norm(active, w) ** 2, 0)
        return bend * tangent(active, w, v, radius)

    return members.on_vector(
        **members.nonnegative_scalar("radius", radius),
        blank=lambda size: jnp.zeros((), bool),
        identify=lambda w, g, eta, radius: excess(w, g, eta, radius) >= 0,
        prox=lambda active, z, eta, radius: jnp.where(active, radius / norm(active, z), 1) * z,
        step=step,
        tangent=tangent,
        curvature=curvature,
        margins=margins,
    )


def l1_ball(radius: Any = 1.0) -> Constraint:
    """Require ``|w|_1 <= radius``.

    Parameters
    ----------
    radius : float, or ``radius(alpha) -> scalar``
    """

    def identify(w, g, eta, radius):
        z = w - eta * g
        size = jnp.abs(z)
        active = jnp.sum(size) >= radius
        inside = active & (above_threshold(size, radius) > 0)
        return jnp.where(inside, jnp.sign(z), 0).astype(jnp.int8), active

    def in_dtype(code, like):
        signs, active = code
        return signs.astype(like.dtype), active

    def count(signs):
        return jnp.maximum(jnp.sum(jnp.abs(signs)), 1)

    def excess(signs, z, radius):
        return (jnp.sum(signs * z) - radius) / count(signs)

    def prox(code, z, eta, radius):
        signs, active = in_dtype(code, z)
        on_sphere = jnp.where(signs != 0, z - signs * excess(signs, z, radius), 0)
        return jnp.where(active, on_sphere, z)

    def step(code, w, g, eta, radius):
        signs, active = in_dtype(code, w)
        along = -eta * (g - signs * (jnp.sum(signs * g) / count(signs)))
        on_sphere = jnp.where(signs != 0, along - signs * excess(signs, w, radius), -w)
        return jnp.where(active, on_sphere, -eta * g)

    def tangent(code, w, v, radius):
        signs, active = in_dtype(code, v)
        along = v - signs * (jnp.sum(signs * v) / count(signs))
        return jnp.where(active, jnp.where(signs != 0, along, 0), v)

    def margins(code, w, g, radius):
        signs, active = in_dtype(code, w)
        multiplier = -jnp.sum(signs * g) / count(signs)
        slack = jnp.where(signs != 0, signs * w, multiplier - jnp.abs(g))
        # One weight alone has the whole radius: its size has no decision.
        slack = jnp.where((signs != 0) & (count(signs) == 1), jnp.inf, slack)
        whole = jnp.where(active, multiplier, radius - jnp.sum(jnp.abs(w)))
        return jnp.where(active, slack, jnp.inf), whole

    return members.on_vector(
        **members.nonnegative_scalar("radius", radius),
        blank=lambda size: (jnp.zeros(size, jnp.int8), jnp.zeros((), bool)),
        identify=identify,
        prox=prox,
        step=step,
        tangent=tangent,
        margins=margins,
    )
