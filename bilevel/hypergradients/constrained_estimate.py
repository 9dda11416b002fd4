"""The accuracy of a hypergradient of a constrained lower problem: its distance to a refined one."""

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from bilevel.hypergradients import error_estimate
from bilevel.hypergradients.constrained_refinement import combine_terms, refine_constrained
from bilevel.hypergradients.curvature import is_small
from bilevel.hypergradients.refinement import unbounded
from bilevel.problem.problem import hessian_operator
from bilevel.problem.structure import hoist_constants, is_quadratic, leaves_used_by
from bilevel.solvers._manifold import manifold_system
from bilevel.solvers.inverses import ratio_of_norms

# In error_estimate.REASONS.
_NOT_FINITE, _SQUARES, _ASYMMETRIC, _NARROW, _COARSE, _OWN_OPERATOR = 1, 6, 7, 8, 9, 10
_NOT_SETTLED, _DEGENERATE, _UNDETERMINED, _FLAT = 11, 12, 13, 14

_CLEAR = 10  # a margin keeps its sign above this multiple of its change to first order


def assess_active_set(
    constraint, problem, products, coarse, w, alpha, train, valid, grad, adjoint
) -> error_estimate.Info:
    """Assess a hypergradient of a constrained problem; the lower loss has its smooth part."""
    lower = hoist_constants(problem.lower, w, alpha, train)
    g, hvp = hessian_operator(lower, w, alpha, train)
    force = jax.grad(problem.outer)(w, alpha, valid)
    curvature = ratio_of_norms(hvp(g), g)
    eta = 1 / jnp.where(curvature > 0, curvature, 1)
    code = constraint.identify(w, g, alpha, eta)
    stationarity = optax.tree.norm(constraint.step(code, w, g, alpha, eta)) / eta
    far = jnp.full_like(eta, unbounded(eta))
    residual = far
    if adjoint is not None:
        system = manifold_system(constraint, hvp, code, w, g, alpha, eta)
        residual = error_estimate.adjoint_residual(system.operator, adjoint, system.after(force))
    if constraint.margins is None:
        reason = jnp.asarray(_OWN_OPERATOR, jnp.int8)
        return error_estimate.Info(stationarity, residual, jnp.array(False), far, far, reason)

    quadratic = is_quadratic(lower, w, alpha, train)
    dense = is_small(w, quadratic)
    given = problem, constraint, w, adjoint, alpha, train, valid
    refined = refine_constrained(*given, products=products, dense=dense)
    estimate = error_estimate.Estimate.of(grad, refined.grads, refined.magnitude)
    finite = jnp.isfinite(stationarity + optax.tree.norm(force) + optax.tree.norm(grad))
    settled = refined.settled & refined.right & jnp.isfinite(estimate.size)
    program = jax.make_jaxpr(problem.lower)(w, alpha, train)
    rounded, multiplied = error_estimate.hidden_steps(program, coarse, refined.last_step)
    wrong = {
        _NOT_FINITE: ~finite,
        _ASYMMETRIC: error_estimate.is_asymmetric(program, hvp, w),
        _UNDETERMINED: ~refined.determined,
        _FLAT: ~refined.definite,
        _NARROW: ~settled & rounded,
        _COARSE: ~settled & multiplied,
        _NOT_SETTLED: ~settled,
        _DEGENERATE: ~refined.decided,
        _SQUARES: estimate.lost,
    }
    reason = jnp.select(list(wrong.values()), list(wrong), 0).astype(jnp.int8)
    bound = far
    if quadratic and dense:
        bound = _active_set_bound(problem, constraint, refined, alpha, train, valid, grad)
        bound = jnp.where(reason == 0, bound, far)
    linear_residual = refined.linear_residual if adjoint is None else residual
    return estimate.info(stationarity, linear_residual, reason, bound)


def _active_set_bound(problem, constraint, refined, alpha, train, valid, grad) -> jax.Array:
    """Bound ``|grad - G*|`` for a quadratic lower loss with linear constraints or terms.

    The exact solution of the refined active set is at most ``|g| / mu`` away: ``g`` is the gradient
    in the tangent space, ``mu`` a lower bound of the reduced eigenvalues. The bound is finite if no
    margin can change its sign on the way, and the manifold is not curved (balls and groups).
    """
    w, code, eta, floor = refined.w, refined.code, refined.eta, refined.floor
    lower = hoist_constants(problem.lower, w, alpha, train)
    g, hvp = hessian_operator(lower, w, alpha, train)
    system = manifold_system(constraint, hvp, code, w, g, alpha, eta)
    flat, unravel = ravel_pytree(w)

    def bend(_, v, __):
        return constraint.curvature(code, w, g, alpha, v)

    curved = any(leaves_used_by(bend, None, w, None))
    if curved or error_estimate.is_large_jacobian(flat, alpha):
        return jnp.full((), unbounded(flat), flat.dtype)

    def along(v):
        return ravel_pytree(system.after(unravel(v)))[0]

    def pulls(v):
        """Return the force and the margins at weights of the manifold."""
        w = unravel(flat + along(v - flat))
        slopes = jax.grad(lower)(w, alpha, train)
        force = jax.grad(problem.outer)(w, alpha, valid)
        margins = constraint.margins(code, w, slopes, alpha)
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
    bound = error_estimate.quadratic_error_bound(grad, refined.grads, jacobians, residuals, floor)

    # The contributions of weights at two bounds can cancel to many digits.
    def moving_set(nu):
        z = optax.tree.add_scale(w, -eta, g)
        return jax.vjp(lambda alpha: constraint.prox(code, z, alpha, eta), alpha)[1](nu)[0]

    q = refined.adjoint
    pulls_of_set = jax.grad(problem.outer)(w, alpha, valid), optax.tree.scale(1 / eta, q), hvp(q)
    bound += error_estimate.rounding_of_terms(moving_set, *pulls_of_set)
    bound += error_estimate.rounding_of_mixed(problem, w, alpha, train, q)
    return jnp.where(same, bound, unbounded(bound))
