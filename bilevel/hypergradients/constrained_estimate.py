"""The accuracy of a hypergradient of a constrained lower problem."""

import functools

import jax
import jax.numpy as jnp
import optax

from bilevel.contracts import Constraint, Pytree
from bilevel.hypergradients.error_estimate import Info
from bilevel.hypergradients.refinement import finite_or_zero, ratio_to_norm, unbounded
from bilevel.internal.precision import widen, widened
from bilevel.problem.hoist import hoist_constants
from bilevel.problem.problem import Problem, hessian_operator
from bilevel.solvers import detached
from bilevel.solvers._manifold import manifold_system

_OWN_OPERATOR, _NOT_ESTIMATED = 10, 11  # in error_estimate.REASONS


def assess_constrained(
    problem: Problem,
    constraint: Constraint,
    w: Pytree,
    alpha: Pytree,
    train: Pytree,
    valid: Pytree,
    grad: Pytree,
    adjoint: Pytree | None,
) -> Info:
    """Return the residuals of a hypergradient; its error is not estimated."""
    if adjoint is not None:
        adjoint = widen(adjoint)
    problem = Problem(widened(constraint.completed(problem.lower), w), widened(problem.outer, w))
    check = functools.partial(_residuals, problem, constraint)
    return detached(check, widen(w), alpha, train, valid, grad, adjoint)


def _residuals(problem, constraint, w, alpha, train, valid, grad, adjoint) -> Info:
    lower = hoist_constants(problem.lower, w, alpha, train)
    g, hvp = hessian_operator(lower, w, alpha, train)
    force = jax.grad(problem.outer)(w, alpha, valid)
    turned = hvp(g)
    curvature = ratio_to_norm(optax.tree.norm(turned), g)
    eta = 1 / jnp.where(curvature > 0, curvature, 1)
    code = constraint.identify(w, g, alpha, eta)
    step = constraint.step(code, w, g, alpha, eta)
    system = manifold_system(constraint, hvp, code, w, g, alpha, eta)
    right = system.after(force)
    far = jnp.full_like(eta, unbounded(eta))
    residual = far
    if adjoint is not None:
        known = jnp.isfinite(optax.tree.norm(adjoint))
        error = optax.tree.sub(system.operator(finite_or_zero(adjoint)), right)
        residual = jnp.where(known, ratio_to_norm(optax.tree.norm(error), right), far)
    reason = _OWN_OPERATOR if constraint.margins is None else _NOT_ESTIMATED
    return Info(
        stationarity=optax.tree.norm(step) / eta,
        linear_residual=residual,
        converged=jnp.array(False),
        error_estimate=far,
        error_bound=far,
        reason=jnp.asarray(reason, jnp.int8),
    )
