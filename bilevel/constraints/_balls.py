"""The l2 and the l1 ball around 0, of all weights together."""

from typing import Any

import jax.numpy as jnp

from bilevel.constraints._members import nonnegative_scalar, on_vector
from bilevel.constraints._simplex import above_threshold
from bilevel.contracts import Constraint
from ntk.internal.products import matmul


def l2_ball(radius: Any = 1.0) -> Constraint:
    """Require ``|w|_2 <= radius``.

    Parameters
    ----------
    radius : float, or ``radius(alpha) -> scalar``

    Examples
    --------
    >>> import bilevel
    >>> lower = lambda w, alpha, batch: jnp.sum((w - jnp.array([3.0, 4.0])) ** 2)
    >>> solver = bilevel.implicit(bilevel.projected("l2_ball", lambda alpha: alpha))
    >>> w = jnp.zeros(2)
    >>> solver.run(lower, 1.0, w, solver.init(w), None)[0].round(4)
    Array([0.6, 0.8], dtype=float...)
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

    return on_vector(
        **nonnegative_scalar("radius", radius),
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

    Examples
    --------
    >>> import bilevel
    >>> lower = lambda w, alpha, batch: jnp.sum((w - jnp.array([0.9, -0.5, 0.1])) ** 2)
    >>> solver = bilevel.implicit(bilevel.projected("l1_ball", lambda alpha: alpha))
    >>> w = jnp.zeros(3)
    >>> solver.run(lower, 1.0, w, solver.init(w), None)[0].round(4)
    Array([ 0.7, -0.3,  0. ], dtype=float...)
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

    return on_vector(
        **nonnegative_scalar("radius", radius),
        blank=lambda size: (jnp.zeros(size, jnp.int8), jnp.zeros((), bool)),
        identify=identify,
        prox=prox,
        step=step,
        tangent=tangent,
        margins=margins,
    )
