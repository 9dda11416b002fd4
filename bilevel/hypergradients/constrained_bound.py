"""A bound of the error for quadratic lower losses with linear constraints or terms.

The refined weights have a gradient ``g`` in the tangent space, so the solution of their active set
is at most ``|g| / mu`` away, with ``mu`` a lower bound of the reduced Hessian's eigenvalues. If no
margin can change its sign on the way, this active set is that of the exact solution.
"""

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from bilevel.contracts import Constraint, Pytree
from bilevel.hypergradients.constrained_refinement import RefinedSolution, combine_terms
from bilevel.hypergradients.error_estimate import (
    is_large_jacobian,
    quadratic_error_bound,
    rounding_of_mixed,
    rounding_of_terms,
)
from bilevel.hypergradients.refinement import unbounded
from bilevel.problem.hoist import hoist_constants
from bilevel.problem.problem import Problem, hessian_operator
from bilevel.problem.structure import leaves_used_by
from bilevel.solvers._manifold import manifold_system

_CLEAR = 10  # a margin keeps its sign above this multiple of its change to first order


def constrained_error_bound(
    problem: Problem,
    constraint: Constraint,
    refined: RefinedSolution,
    alpha: Pytree,
    train: Pytree,
    valid: Pytree,
    grad: Pytree,
) -> jax.Array:
    """Bound ``|grad - G*|`` up to rounding; infinite if the active set can change.

    It is infinite for curved manifolds, too: balls and groups.
    """
    w, code, eta, floor = refined.w, refined.code, refined.eta, refined.floor
    assert constraint.margins is not None and floor is not None
    of_active_set = constraint.margins
    lower = hoist_constants(problem.lower, w, alpha, train)
    g, hvp = hessian_operator(lower, w, alpha, train)
    system = manifold_system(constraint, hvp, code, w, g, alpha, eta)
    flat, unravel = ravel_pytree(w)

    def bend(_, v, __):
        return constraint.curvature(code, w, g, alpha, v)

    curved = any(leaves_used_by(bend, None, w, None))
    if curved or is_large_jacobian(flat, alpha):
        return jnp.full((), unbounded(flat), flat.dtype)

    def along(v):
        return ravel_pytree(system.after(unravel(v)))[0]

    def pulls(v):
        """Return the force and the margins at weights of the manifold."""
        w = unravel(flat + along(v - flat))
        slopes = jax.grad(lower)(w, alpha, train)
        force = jax.grad(problem.outer)(w, alpha, valid)
        margins = of_active_set(code, w, slopes, alpha)
        # A set without margins has an empty vector in another dtype.
        return along(ravel_pytree(force)[0]), ravel_pytree(margins)[0].astype(flat.dtype)

    def combined(pair):
        w, q = unravel(flat + along(pair[0] - flat)), unravel(along(pair[1]))
        slopes = jax.grad(lower)(w, alpha, train)
        force = jax.grad(problem.outer)(w, alpha, valid)
        given = problem, constraint, code, eta, w, slopes, hvp, q, force
        return ravel_pytree(combine_terms(*given, alpha, train, valid)[0])[0]

    pair = jnp.stack([flat, ravel_pytree(refined.adjoint)[0]])
    force, margins = pulls(flat)
    turning, moving = jax.jacfwd(pulls)(flat)
    few = ravel_pytree(alpha)[0].size < flat.size
    jacobian = (jax.jacrev if few else jax.jacfwd)(combined)(pair)
    step = constraint.step(code, w, g, alpha, eta)
    slope = optax.tree.norm(system.before(step)) + optax.tree.norm(system.direct(step)) / eta
    left = jnp.linalg.norm(ravel_pytree(system.operator(refined.adjoint))[0] - force)
    reach = slope / jnp.where(floor > 0, floor, 1)
    change = _CLEAR * reach * jnp.linalg.norm(moving, axis=1)
    same = jnp.all(~jnp.isfinite(margins) | (margins > change))
    jacobians, residuals = (turning, jacobian), (slope, left)
    bound = quadratic_error_bound(grad, refined.grads, jacobians, residuals, floor)

    # The contributions of weights at two bounds can cancel to many digits.
    def moving_set(nu):
        z = optax.tree.add_scale(w, -eta, g)
        return jax.vjp(lambda alpha: constraint.prox(code, z, alpha, eta), alpha)[1](nu)[0]

    q = refined.adjoint
    pulls_of_set = jax.grad(problem.outer)(w, alpha, valid), optax.tree.scale(1 / eta, q), hvp(q)
    bound += rounding_of_terms(moving_set, *pulls_of_set)
    bound += rounding_of_mixed(problem, w, alpha, train, q)
    return jnp.where(same, bound, unbounded(bound))
