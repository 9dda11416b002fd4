"""Refine the weights, the active set and the adjoint of a constrained lower problem.

The forward solver continues from the given weights until its active set and its Newton steps rest.
Samples around the result start from weights, an adjoint and an alpha with other last digits. Each
takes Newton steps on the active manifold. The spread of their hypergradients measures rounding. The
spread of their margins shows whether rounding could change the active set.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from bilevel.contracts import Constraint, LinearMap, Loss, Pytree
from bilevel.hypergradients.curvature import curvature
from bilevel.hypergradients.refinement import finite_or_zero, jitter, ratio_to_norm
from bilevel.internal.precision import uniform_hash
from bilevel.problem.hoist import hoist_constants
from bilevel.problem.problem import Problem, hessian_operator, mixed_product
from bilevel.solvers._manifold import System, fixed_point, manifold_system
from bilevel.solvers.constrained import forward_solver

_STEPS = 3000  # maximum number of proximal gradient steps towards the solution
_SAMPLES = 8
_COSTLY_SAMPLES = 4  # samples if each takes iterative solves
_NEWTON_STEPS = 2  # of each sample's weights
_ADJOINT_STEPS = 3
_JITTER = 0.3  # units of roundoff that a sample's weights are moved by after their last step
_CURVED = 30  # the smallest curvature counts above this multiple of the roundoff of the largest
_CLEAR = 10  # a margin is clear above this multiple of its scatter


class RefinedSolution(NamedTuple):
    """Samples of the refined hypergradient, and the tests that it has passed."""

    grads: Pytree  # like alpha, leading axis: samples of the refined hypergradient
    magnitude: jax.Array  # the size of its three terms
    linear_residual: jax.Array  # of the refined adjoint
    definite: jax.Array  # bool: the free directions have curvature
    settled: jax.Array  # bool: Newton's steps rest
    determined: jax.Array  # bool: no multiplier is undetermined
    right: jax.Array  # bool: no margin is clearly negative
    decided: jax.Array  # bool: all margins are clear
    last_step: jax.Array  # length of the last Newton step, relative to the weights


def refine_constrained(
    problem: Problem,
    constraint: Constraint,
    w: Pytree,
    adjoint: Pytree | None,
    alpha: Pytree,
    train: Pytree,
    valid: Pytree,
    *,
    products: int,
    dense: bool,
) -> RefinedSolution:
    """Refine ``w`` and ``adjoint``, and sample the hypergradient around them.

    The lower loss contains the constraint's smooth part. The reduced Hessian is formed if
    ``dense``.
    """
    start = optax.tree.zeros_like(w) if adjoint is None else finite_or_zero(adjoint)
    # The lower loss has the smooth part already.
    solver = forward_solver(constraint._replace(smooth=None), _STEPS, None)
    near, (code, eta) = solver.run(problem.lower, alpha, w, solver.init(w), train)

    def system_at(lower: Loss, w: Pytree, alpha: Pytree) -> tuple[Pytree, Pytree, System]:
        """Return the step to the fixed point, the gradient, and the system for changes of w."""
        g, hvp = hessian_operator(lower, w, alpha, train)
        step = constraint.step(code, w, g, alpha, eta)
        return step, g, manifold_system(constraint, hvp, code, w, g, alpha, eta)

    *_, system = system_at(hoist_constants(problem.lower, near, alpha, train), near, alpha)
    spectrum = curvature(_regular(system, near, eta), near, products, dense)
    count = _SAMPLES if dense else _COSTLY_SAMPLES
    eps = jnp.finfo(eta.dtype).eps
    way = optax.tree.norm(optax.tree.sub(near, w))

    def solve(b: Pytree, least: jax.Array) -> Pytree:
        """Solve to a thousandth, or to an error of ``least``."""
        aim = jnp.maximum(1e-3 * optax.tree.norm(b), least * spectrum.lowest)
        return spectrum.solve(b, aim)

    def sample(number):
        moves = (number > 0).astype(eta.dtype)
        at = _shaken(4 * number, alpha, 0.5 * moves)
        lower = hoist_constants(problem.lower, near, at, train)

        def newton(_, carry):
            own, _ = carry
            step, _, system = system_at(lower, own, at)
            least = jnp.maximum(5e-3 * way, eps * spectrum.condition * optax.tree.norm(own))
            x = system.after(solve(system.before(step), least))
            change = optax.tree.add(system.direct(step), x)
            return optax.tree.add(own, change), optax.tree.norm(change)

        moved = (jitter(4 * number + 1, near, moves), jnp.zeros_like(eta))
        rounds = _NEWTON_STEPS if dense else 1
        own, last = jax.lax.fori_loop(0, rounds, newton, moved)
        margins = _margins_near(constraint, code, 4 * number + 2, own, lower, at, train, eta, moves)
        own = jitter(4 * number + 2, own, _JITTER * moves)
        _, g, _ = system_at(lower, own, at)
        # The outer loss may ask whether a weight is at its bound.
        own = fixed_point(constraint)(code, own, g, at, eta)
        _, g, system = system_at(lower, own, at)
        force = jax.grad(problem.outer)(own, at, valid)
        right = system.after(force)

        def refine(_, carry):
            q, _, _ = carry
            left = optax.tree.sub(system.operator(q), right)
            least = 5e-3 * optax.tree.norm(optax.tree.sub(q, start))
            rounding = eps * spectrum.condition * optax.tree.norm(q)
            x = system.after(solve(left, jnp.maximum(least, rounding)))
            return optax.tree.sub(q, x), optax.tree.norm(left), optax.tree.norm(x)

        first = system.after(jitter(4 * number + 3, start, moves))
        zero = jnp.zeros_like(eta)
        rounds = _ADJOINT_STEPS if dense else 2
        q, left, last_q = jax.lax.fori_loop(0, rounds, refine, (first, zero, zero))
        grad, size = _combine_terms(problem, constraint, code, eta, own, q, force, at, train, valid)
        steps = jnp.stack([last, last_q, optax.tree.norm(own), optax.tree.norm(q)])
        gaps = optax.tree.sub(own, w), optax.tree.sub(q, start)
        ways = jnp.stack([*map(optax.tree.norm, gaps)])
        return grad, size, margins, steps, ways, ratio_to_norm(left, right)

    numbers = jnp.arange(count, dtype=jnp.uint32)
    grads, sizes, margins, steps, ways, residuals = spectrum.batch(sample)(numbers)
    determined, right, decided = _judged(margins, eta)
    relative = jnp.minimum(100 * eps * spectrum.condition, 0.1)
    limits = jnp.maximum(0.01 * ways[0], relative * steps[0, 2:])
    return RefinedSolution(
        grads=grads,
        magnitude=sizes[0],
        linear_residual=residuals[0],
        definite=spectrum.definite & (_CURVED * eps * spectrum.condition < 1),
        settled=(steps[0, :2] <= limits).all(),
        determined=determined,
        right=right,
        decided=decided,
        last_step=steps[0, 0] / jnp.where(steps[0, 2] > 0, steps[0, 2], 1),
    )


def _shaken(number, alpha: Pytree, roundings: jax.Array) -> Pytree:
    """Return ``alpha`` moved by units of roundoff of each entry."""
    flat, unravel = ravel_pytree(alpha)
    noise = unravel(uniform_hash(number, flat))

    def one(a, uniform):
        size = roundings.astype(a.dtype) * jnp.finfo(a.dtype).eps * jnp.abs(a)
        return a + size * uniform.astype(a.dtype)

    return jax.tree.map(one, alpha, noise)


def _regular(system: System, like: Pytree, eta: jax.Array) -> LinearMap:
    """Return the reduced Hessian, with a curvature outside the tangent space between its own."""
    flat, unravel = ravel_pytree(like)
    b = system.after(unravel(uniform_hash(0, flat)))
    square = optax.tree.vdot(b, b)
    bend = optax.tree.vdot(b, system.operator(b)) / jnp.where(square > 0, square, 1)
    sigma = jnp.where(bend > 0, bend, 1 / eta)

    def regular(v):
        inside = system.after(v)
        outside = optax.tree.scale(sigma, optax.tree.sub(v, inside))
        return optax.tree.add(system.operator(inside), outside)

    return regular


def _margins_near(constraint, code, number, w, lower, alpha, train, eta, moves) -> Pytree:
    """Return the margins near ``w``, moved by roundoff of the weights and of a gradient step."""
    g = jax.grad(lower)(w, alpha, train)
    flat, unravel = ravel_pytree(w)
    size = jnp.sqrt(jnp.mean(flat**2)) + eta * jnp.sqrt(jnp.mean(ravel_pytree(g)[0] ** 2))
    noise = _JITTER * moves * jnp.finfo(eta.dtype).eps * (jnp.abs(flat) + size)
    near = unravel(flat + noise * uniform_hash(number, flat))
    return constraint.margins(code, near, jax.grad(lower)(near, alpha, train), alpha)


def _combine_terms(problem, constraint, code, eta, w, q, force, alpha, train, valid):
    """Return the hypergradient at ``(w, q)`` with this active set, and the size of its terms."""
    g, hvp = hessian_operator(problem.lower, w, alpha, train)
    z = optax.tree.add_scale(w, -eta, g)
    nu = optax.tree.sub(optax.tree.add_scale(force, 1 / eta, q), hvp(q))
    direct = jax.grad(problem.outer, 1)(w, alpha, valid)
    indirect = mixed_product(lambda w, alpha: problem.lower(w, alpha, train), w, alpha, q)
    moving = jax.vjp(lambda alpha: constraint.prox(code, z, alpha, eta), alpha)[1](nu)[0]
    grad = optax.tree.add(optax.tree.sub(direct, indirect), moving)
    return grad, sum(optax.tree.norm(x) for x in (direct, indirect, moving))


def _judged(margins: Pytree, like: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return whether all margins are determined, whether none is wrong, and whether all are clear.

    The first sample is the refined solution.
    """
    leaves = [x.reshape(len(x), -1) for x in jax.tree.leaves(margins)]
    if not leaves:
        yes = like == like
        return yes, yes, yes
    values = jnp.concatenate(leaves, 1)
    margin = values[0]
    bounded = jnp.isfinite(margin)
    scatter = jnp.max(jnp.abs(jnp.where(bounded, values - margin, 0)), axis=0)
    determined = ~jnp.isnan(margin).any()
    right = (~bounded | (margin > -_CLEAR * scatter)).all()
    decided = (~bounded | (margin > _CLEAR * scatter)).all()
    return determined, right, decided & ~jnp.isneginf(margin).any()
