"""The accuracy of a hypergradient of a constrained lower problem.

The hypergradient is that of the solution's active set. The estimate is the distance to a refined
hypergradient (:mod:`bilevel.hypergradients.constrained_refinement`). The refined active set can
differ. The estimate is infinite if rounding could change the refined set, because the derivative
then differs from side to side.
"""

import functools

import jax
import jax.numpy as jnp
import optax

from bilevel.contracts import Constraint, Pytree
from bilevel.hypergradients.constrained_bound import constrained_error_bound
from bilevel.hypergradients.constrained_refinement import refine_constrained
from bilevel.hypergradients.curvature import PRODUCTS, is_small
from bilevel.hypergradients.error_estimate import (
    Estimate,
    Info,
    adjoint_residual,
    hidden_steps,
    is_asymmetric,
)
from bilevel.hypergradients.refinement import ratio_to_norm, unbounded
from bilevel.internal.precision import coarsest_eps, widen, widened
from bilevel.problem.hoist import hoist_constants
from bilevel.problem.problem import Problem, hessian_operator
from bilevel.problem.structure import is_quadratic
from bilevel.solvers import detached
from bilevel.solvers._manifold import manifold_system

# In error_estimate.REASONS.
_NOT_FINITE, _SQUARES, _ASYMMETRIC, _NARROW, _COARSE, _OWN_OPERATOR = 1, 6, 7, 8, 9, 10
_NOT_SETTLED, _DEGENERATE, _UNDETERMINED, _FLAT = 11, 12, 13, 14


def assess_constrained(
    problem: Problem,
    constraint: Constraint,
    w: Pytree,
    alpha: Pytree,
    train: Pytree,
    valid: Pytree,
    grad: Pytree,
    adjoint: Pytree | None,
    products: int = PRODUCTS,
) -> Info:
    """Assess a hypergradient ``grad`` computed at ``w`` with ``adjoint`` (None: unknown).

    Cost: a further run of the forward solver from ``w``, and the reduced Hessian and its inverse
    up to 512 weights (1024 if the lower loss is quadratic). Beyond, some ten solves of at most
    ``products`` Hessian products each. The result has no derivative.
    """
    if adjoint is not None:
        adjoint = widen(adjoint)
    problem = Problem(widened(constraint.completed(problem.lower), w), widened(problem.outer, w))
    check = functools.partial(_assess_active_set, problem, constraint, products, coarsest_eps(w))
    # The refined hypergradient must be free of the rounding that it measures.
    with jax.default_matmul_precision("highest"):
        return detached(check, widen(w), alpha, train, valid, grad, adjoint)


def _assess_active_set(
    problem, constraint, products, coarse, w, alpha, train, valid, grad, adjoint
) -> Info:
    lower = hoist_constants(problem.lower, w, alpha, train)
    g, hvp = hessian_operator(lower, w, alpha, train)
    force = jax.grad(problem.outer)(w, alpha, valid)
    curvature = ratio_to_norm(optax.tree.norm(hvp(g)), g)
    eta = 1 / jnp.where(curvature > 0, curvature, 1)
    code = constraint.identify(w, g, alpha, eta)
    stationarity = optax.tree.norm(constraint.step(code, w, g, alpha, eta)) / eta
    far = jnp.full_like(eta, unbounded(eta))
    residual = far
    if adjoint is not None:
        system = manifold_system(constraint, hvp, code, w, g, alpha, eta)
        residual = adjoint_residual(system.operator, adjoint, system.after(force))
    if constraint.margins is None:
        reason = jnp.asarray(_OWN_OPERATOR, jnp.int8)
        return Info(stationarity, residual, jnp.array(False), far, far, reason)

    quadratic = is_quadratic(lower, w, alpha, train)
    dense = is_small(w, quadratic)
    given = problem, constraint, w, adjoint, alpha, train, valid
    refined = refine_constrained(*given, products=products, dense=dense)
    estimate = Estimate.of(grad, refined.grads, refined.magnitude)
    finite = jnp.isfinite(stationarity + optax.tree.norm(force) + optax.tree.norm(grad))
    settled = refined.settled & refined.right & jnp.isfinite(estimate.size)
    program = jax.make_jaxpr(problem.lower)(w, alpha, train)
    rounded, multiplied = hidden_steps(program, coarse, refined.last_step)
    wrong = {
        _NOT_FINITE: ~finite,
        _ASYMMETRIC: is_asymmetric(program, hvp, w),
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
        bound = constrained_error_bound(problem, constraint, refined, alpha, train, valid, grad)
        bound = jnp.where(reason == 0, bound, far)
    linear_residual = refined.linear_residual if adjoint is None else residual
    return estimate.info(stationarity, linear_residual, reason, bound)
