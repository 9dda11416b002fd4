"""The linear system of a constrained solution, in the tangent space of its active manifold.

The solution is the fixed point ``w = prox(w - eta grad_w lower)``. With the projection ``P`` on the
tangent space, the curvature ``K`` of the manifold and the Hessian ``H``, an error ``r`` of the
fixed point (for derivatives: that of the right-hand side) changes the solution by

    d = (r - P r) + x,    P (H + K) P x = P (r / eta + K P r - H (r - P r)).

Without a known tangent space, the derivative ``D`` of the operator replaces it:

    d = r + D y,    ((D - D^2) / eta + D H D) y = D (r / eta - H r).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from bilevel.contracts import Constraint, LinearMap, Pytree


class System(NamedTuple):
    """A change of the solution: ``d = direct(r) + after(x)`` with ``operator(x) = before(r)``."""

    operator: LinearMap  # symmetric
    regular: LinearMap  # the same on the tangent space, and 1 / eta outside of it
    before: LinearMap
    after: LinearMap
    direct: LinearMap


def smooth_system(hvp: LinearMap) -> System:
    """Return the system of a stationary point; ``r`` is minus the change of the gradient."""

    def same(v):
        return v

    return System(hvp, hvp, same, same, optax.tree.zeros_like)


def manifold_system(
    constraint: Constraint,
    hvp: LinearMap,
    code: Pytree,
    w: Pytree,
    g: Pytree,
    alpha: Pytree,
    eta: jax.Array,
) -> System:
    """Return the system of a constrained solution with this code."""
    tangent, curvature = constraint.tangent, constraint.curvature
    if tangent is None:
        return _without_tangent(constraint, hvp, code, w, g, alpha, eta)

    def along(v):
        return tangent(code, w, alpha, v)

    def bend(v):
        return curvature(code, w, g, alpha, v)

    def operator(v):
        v = along(v)
        return along(optax.tree.add(hvp(v), bend(v)))

    def direct(r):
        return optax.tree.sub(r, along(r))

    def before(r):
        inside = along(r)
        pulled = optax.tree.sub(bend(inside), hvp(direct(r)))
        return along(optax.tree.add(_over(inside, eta), pulled))

    return System(operator, regularized(operator, along, 1 / eta), before, along, direct)


def regularized(operator: LinearMap, along: LinearMap, outside: jax.Array) -> LinearMap:
    """Return ``operator`` with the curvature ``outside`` in directions that ``along`` removes."""

    def regular(v):
        removed = optax.tree.sub(v, along(v))
        return optax.tree.add(operator(v), optax.tree.scale(outside, removed))

    return regular


def _without_tangent(constraint, hvp, code, w, g, alpha, eta) -> System:
    z = optax.tree.add_scale(w, -eta, g)
    _, slope = jax.linearize(lambda z: constraint.prox(code, z, alpha, eta), z)

    def operator(y):
        q = slope(y)
        bent = _over(optax.tree.sub(q, slope(q)), eta)
        return optax.tree.add(bent, slope(hvp(q)))

    def before(r):
        return slope(optax.tree.sub(_over(r, eta), hvp(r)))

    return System(operator, operator, before, slope, lambda r: r)


def _over(tree: Pytree, eta: jax.Array) -> Pytree:
    return optax.tree.scale(1 / eta, tree)


def same_code(one: Pytree, other: Pytree) -> jax.Array:
    """Return whether two codes agree in all entries."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    equal = [jnp.array_equal(x, y) for x, y in pairs]
    return jnp.stack(equal).all() if equal else jnp.array(True)


def fixed_point(constraint: Constraint) -> Callable:
    """Return ``(code, w, g, alpha, eta) -> prox(w - eta g)``."""
    return lambda code, w, g, alpha, eta: constraint.prox(
        code, optax.tree.add_scale(w, -eta, g), alpha, eta
    )
