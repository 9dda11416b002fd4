"""The accuracy of a hypergradient of a constrained lower problem: its distance to a refined one.

Samples of the refined one start from values with other last digits, and take Newton steps on the
active manifold. The spread of their hypergradients and margins measures rounding.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from bilevel.contracts import Constraint, LinearMap, Loss, Pytree
from bilevel.hypergradients import error_estimate
from bilevel.hypergradients.curvature import Curvature, curvature, is_small
from bilevel.hypergradients.refinement import finite_or_zero, jitter, unbounded
from bilevel.internal.precision import uniform_hash
from bilevel.problem.problem import Problem, hessian_operator, mixed_product
from bilevel.problem.structure import hoist_constants, is_quadratic, leaves_used_by
from bilevel.solvers._manifold import System, fixed_point, manifold_system, regularized
from bilevel.solvers.constrained import forward_solver
from bilevel.solvers.inverses import ratio_of_norms, ratio_to_norm
from ntk.internal.sharding import pcast_varying, varying

# In error_estimate.REASONS.
_NOT_FINITE, _SQUARES, _ASYMMETRIC, _NARROW, _COARSE, _OWN_OPERATOR = 1, 6, 7, 8, 9, 10
_NOT_SETTLED, _DEGENERATE, _UNDETERMINED, _FLAT = 11, 12, 13, 14

_STEPS = 3000  # maximum number of proximal gradient steps towards the solution
_SAMPLES = 8
_COSTLY_SAMPLES = 4  # samples if each takes iterative solves
_NEWTON_STEPS = 2  # of each sample's weights
_ADJOINT_STEPS = 3
_JITTER = 0.3  # units of roundoff that a sample's weights are moved by after their last step
_CURVED = 30  # the smallest curvature counts above this multiple of the roundoff of the largest
_CLEAR = 10  # a margin is clear above this multiple of its scatter, or of its change to first order


def assess_active_set(
    constraint, problem, products, coarse, w, alpha, train, valid, grad, adjoint
) -> error_estimate.Info:
    """Assess a hypergradient of a constrained problem; the lower loss has its smooth part."""
    lower = hoist_constants(problem.lower, w, alpha, train)
    g, hvp = hessian_operator(lower, w, alpha, train)
    force = jax.grad(problem.outer)(w, alpha, valid)
    steepness = ratio_of_norms(hvp(g), g)
    eta = 1 / jnp.where(steepness > 0, steepness, 1)
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
    refined = _refine(problem, constraint, products, dense, w, alpha, train, valid, adjoint)
    estimate = error_estimate.Estimate.of(grad, refined.grads, refined.first.magnitude)
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
    linear_residual = refined.first.residual if adjoint is None else residual
    return estimate.info(stationarity, linear_residual, reason, bound)


def _active_set_bound(problem, constraint, refined, alpha, train, valid, grad) -> jax.Array:
    """Bound ``|grad - G*|`` for a quadratic lower loss with linear constraints or terms.

    The exact solution of the refined active set is at most ``|g| / mu`` away: ``g`` is the gradient
    in the tangent space, ``mu`` a lower bound of the reduced eigenvalues. The bound is finite if no
    margin can change its sign on the way, and the manifold is not curved (balls and groups).
    """
    w, code, eta, floor = refined.first.w, refined.code, refined.eta, refined.floor
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
        return ravel_pytree(_combine_terms(*given, alpha, train, valid)[0])[0]

    pair = jnp.stack([flat, ravel_pytree(refined.first.q)[0]])
    force, margins = pulls(flat)
    turning, moving = jax.jacfwd(pulls)(flat)
    few = ravel_pytree(alpha)[0].size < flat.size
    jacobian = (jax.jacrev if few else jax.jacfwd)(combined)(pair)
    step = constraint.step(code, w, g, alpha, eta)
    slope = optax.tree.norm(system.before(step)) + optax.tree.norm(system.direct(step)) / eta
    left = jnp.linalg.norm(ravel_pytree(system.operator(refined.first.q))[0] - force)
    reach = slope / jnp.where(floor > 0, floor, 1)
    change = _CLEAR * reach * jnp.linalg.norm(moving, axis=1)
    same = jnp.all(~jnp.isfinite(margins) | (margins > change))
    given = jnp.linalg.norm(turning), jacobian, (slope, left), floor
    bound = error_estimate.quadratic_error_bound(grad, refined.grads, *given)

    # The contributions of weights at two bounds can cancel to many digits.
    def moving_set(nu):
        z = optax.tree.add_scale(w, -eta, g)
        return jax.vjp(lambda alpha: constraint.prox(code, z, alpha, eta), alpha)[1](nu)[0]

    q = refined.first.q
    pulls_of_set = jax.grad(problem.outer)(w, alpha, valid), optax.tree.scale(1 / eta, q), hvp(q)
    bound += error_estimate.rounding_of_terms(moving_set, *pulls_of_set)
    bound += error_estimate.rounding_of_mixed(problem, w, alpha, train, q)
    return jnp.where(same, bound, unbounded(bound))


class _Sample(NamedTuple):
    """The refined solution and its hypergradient, from values with other last digits."""

    w: Pytree  # on the active manifold
    q: Pytree  # the adjoint, in the tangent space
    grad: Pytree
    magnitude: jax.Array  # the size of its three terms
    margins: Pytree
    steps: jax.Array  # [2], lengths of the last steps of w and q
    sizes: jax.Array  # [2], norms of w and q
    ways: jax.Array  # [2], distances from the given w and q
    residual: jax.Array  # of the adjoint before its last step, relative


class _RefinedSolution(NamedTuple):
    """Samples of the refined hypergradient, and the tests that it has passed."""

    first: _Sample  # the refined solution itself
    code: Pytree  # the active set
    eta: jax.Array  # the step size of its fixed point
    grads: Pytree  # like alpha, leading axis: samples of the refined hypergradient
    definite: jax.Array  # bool: the free directions have curvature
    settled: jax.Array  # bool: Newton's steps rest
    determined: jax.Array  # bool: no multiplier is undetermined
    right: jax.Array  # bool: no margin is clearly negative
    decided: jax.Array  # bool: all margins are clear
    last_step: jax.Array  # length of the last Newton step, relative to the weights
    floor: jax.Array | None  # proved lower bound of the reduced eigenvalues, if these are formed


class _Refinement(NamedTuple):
    """A lower problem with its refined active set."""

    problem: Problem
    constraint: Constraint
    train: Pytree
    valid: Pytree
    w: Pytree  # the given weights and adjoint
    adjoint: Pytree
    near: Pytree  # the refined weights
    code: Pytree
    eta: jax.Array
    shake: jax.Array  # size of the weights and of a gradient step: their rounding moves margins

    def system(self, lower: Loss, w: Pytree, alpha: Pytree) -> tuple[Pytree, LinearMap, System]:
        """Return the gradient, Hessian products, and the system for changes of the solution."""
        g, hvp = hessian_operator(lower, w, alpha, self.train)
        given = self.code, w, g, alpha, self.eta
        return g, hvp, manifold_system(self.constraint, hvp, *given)

    def sample(self, number: jax.Array, alpha: Pytree, spectrum: Curvature) -> _Sample:
        """Refine once more, from values with other last digits if ``number`` is not 0."""
        moves = (number > 0).astype(self.eta.dtype)
        alpha = jitter(4 * number, alpha, 0.5 * moves, entrywise=True)
        lower = hoist_constants(self.problem.lower, self.near, alpha, self.train)
        start = jitter(4 * number + 1, self.near, moves)
        w, w_step = self.newton(lower, start, alpha, spectrum)
        noise = _JITTER * moves
        margins = self.margins(lower, 4 * number + 2, w, alpha, noise)
        w = jitter(4 * number + 2, w, noise)
        g = jax.grad(lower)(w, alpha, self.train)
        # The outer loss may ask whether a weight is at its bound.
        w = fixed_point(self.constraint)(self.code, w, g, alpha, self.eta)
        g, hvp, system = self.system(lower, w, alpha)
        force = jax.grad(self.problem.outer)(w, alpha, self.valid)
        start = system.after(jitter(4 * number + 3, self.adjoint, moves))
        q, q_step, residual = self.refined_adjoint(system, start, force, spectrum)
        given = self.constraint, self.code, self.eta, w, g, hvp, q, force
        grad, size = _combine_terms(self.problem, *given, alpha, self.train, self.valid)
        ways = optax.tree.sub(w, self.w), optax.tree.sub(q, self.adjoint)
        return _Sample(
            w=w,
            q=q,
            grad=grad,
            magnitude=size,
            margins=margins,
            steps=jnp.stack([w_step, q_step]),
            sizes=jnp.stack([*map(optax.tree.norm, (w, q))]),
            ways=jnp.stack([*map(optax.tree.norm, ways)]),
            residual=residual,
        )

    def newton(self, lower, w, alpha, spectrum) -> tuple[Pytree, jax.Array]:
        """Take Newton steps on the manifold; return the weights and the length of the last."""
        way = optax.tree.norm(optax.tree.sub(self.near, self.w))

        def move(_, carry):
            w, _ = carry
            g, _, system = self.system(lower, w, alpha)
            step = self.constraint.step(self.code, w, g, alpha, self.eta)
            solved = _solve_step(spectrum, system.before(step), way, w)
            change = optax.tree.add(system.direct(step), system.after(solved))
            return optax.tree.add(w, change), optax.tree.norm(change)

        rounds = 1 if spectrum.floor is None else _NEWTON_STEPS
        return jax.lax.fori_loop(0, rounds, move, (w, jnp.zeros_like(self.eta)))

    def refined_adjoint(self, system, q, force, spectrum) -> tuple[Pytree, jax.Array, jax.Array]:
        """Return the adjoint, the length of its last step, and the residual before this step."""
        right, zero = system.after(force), jnp.zeros_like(self.eta)

        def move(_, carry):
            q, _, _ = carry
            left = optax.tree.sub(system.operator(q), right)
            way = optax.tree.norm(optax.tree.sub(q, self.adjoint))
            x = system.after(_solve_step(spectrum, left, way, q))
            return optax.tree.sub(q, x), optax.tree.norm(x), optax.tree.norm(left)

        rounds = 2 if spectrum.floor is None else _ADJOINT_STEPS
        q, step, left = jax.lax.fori_loop(0, rounds, move, (q, zero, zero))
        return q, step, ratio_to_norm(left, right)

    def margins(self, lower, number, w, alpha, noise) -> Pytree:
        """Return the margins near ``w``, moved by roundoff of the weights and of their slopes."""
        flat, unravel = ravel_pytree(w)
        size = noise * jnp.finfo(noise.dtype).eps * (jnp.abs(flat) + self.shake)
        near = unravel(flat + size * uniform_hash(number, flat))
        slopes = jax.grad(lower)(near, alpha, self.train)
        assert self.constraint.margins is not None
        return self.constraint.margins(self.code, near, slopes, alpha)


def _refine(
    problem, constraint, products, dense, w, alpha, train, valid, adjoint
) -> _RefinedSolution:
    """Refine ``w`` and ``adjoint``, and sample the hypergradient around them."""
    start = optax.tree.zeros_like(w) if adjoint is None else finite_or_zero(adjoint)
    # The lower loss has the smooth part already.
    solver = forward_solver(constraint._replace(smooth=None), _STEPS, None)
    near, (code, eta) = solver.run(problem.lower, alpha, w, solver.init(w), train)
    given = problem, constraint, train, valid, w, start, near, code, eta
    lower = hoist_constants(problem.lower, near, alpha, train)
    g, _, system = _Refinement(*given, eta).system(lower, near, alpha)
    refinement = _Refinement(*given, _root_mean_square(near) + eta * _root_mean_square(g))
    spectrum = curvature(_regular(system, near, eta), near, products, dense)
    numbers = jnp.arange(_SAMPLES if dense else _COSTLY_SAMPLES, dtype=jnp.uint32)

    def drawn():
        return spectrum.batch(lambda n: refinement.sample(n, alpha, spectrum))(numbers)

    samples = drawn() if dense else _drawn_if(spectrum.definite, drawn, (w, start, train, valid))
    first = jax.tree.map(lambda x: x[0], samples)
    determined, right, decided = _judged(samples.margins, eta)
    rounding = jnp.finfo(eta.dtype).eps * spectrum.condition
    limits = jnp.maximum(0.01 * first.ways, jnp.minimum(100 * rounding, 0.1) * first.sizes)
    return _RefinedSolution(
        first=first,
        code=code,
        eta=eta,
        grads=samples.grad,
        definite=spectrum.definite & (_CURVED * rounding < 1),
        settled=(first.steps <= limits).all(),
        determined=determined,
        right=right,
        decided=decided,
        last_step=ratio_to_norm(first.steps[0], first.w),
        floor=spectrum.floor,
    )


def _drawn_if(definite: jax.Array, drawn: Callable, given: Pytree) -> Any:
    """Return ``drawn()``, or zeros: without curvature the samples are not worth their solves."""
    axes = varying(given)

    def missing():
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(drawn))

    return jax.lax.cond(
        definite, lambda: pcast_varying(drawn(), axes), lambda: pcast_varying(missing(), axes)
    )


def _solve_step(spectrum: Curvature, b: Pytree, way: jax.Array, like: Pytree) -> Pytree:
    """Solve for a step to a thousandth, to 0.5 % of the way so far, or to rounding."""
    rounding = jnp.finfo(way.dtype).eps * spectrum.condition * optax.tree.norm(like)
    least = jnp.maximum(5e-3 * way, rounding) * spectrum.lowest
    return spectrum.solve(b, jnp.maximum(1e-3 * optax.tree.norm(b), least))


def _root_mean_square(tree: Pytree) -> jax.Array:
    return jnp.sqrt(jnp.mean(ravel_pytree(tree)[0] ** 2))


def _regular(system: System, like: Pytree, eta: jax.Array) -> LinearMap:
    """Return the reduced Hessian, with a curvature outside the tangent space between its own."""
    flat, unravel = ravel_pytree(like)
    b = system.after(unravel(uniform_hash(0, flat)))
    square = optax.tree.vdot(b, b)
    bend = optax.tree.vdot(b, system.operator(b)) / jnp.where(square > 0, square, 1)
    return regularized(system.operator, system.after, jnp.where(bend > 0, bend, 1 / eta))


def _combine_terms(problem, constraint, code, eta, w, g, hvp, q, force, alpha, train, valid):
    """Return the hypergradient at ``(w, q)`` with this active set, and the size of its terms."""
    z = optax.tree.add_scale(w, -eta, g)
    nu = optax.tree.sub(optax.tree.add_scale(force, 1 / eta, q), hvp(q))
    direct = jax.grad(problem.outer, 1)(w, alpha, valid)
    indirect = mixed_product(lambda w, alpha: problem.lower(w, alpha, train), w, alpha, q)
    moving = jax.vjp(lambda alpha: constraint.prox(code, z, alpha, eta), alpha)[1](nu)[0]
    grad = optax.tree.add(optax.tree.sub(direct, indirect), moving)
    return grad, sum(optax.tree.norm(x) for x in (direct, indirect, moving))


def _judged(margins: Pytree, like: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return whether all margins are determined, none is wrong, and all are clear."""
    leaves = [x.reshape(len(x), -1) for x in jax.tree.leaves(margins)]
    if not leaves:
        yes = like == like
        return yes, yes, yes
    values = jnp.concatenate(leaves, 1)
    margin = values[0]
    bounded = jnp.isfinite(margin)
    scatter = jnp.max(jnp.abs(jnp.where(bounded[None], values - margin[None], 0)), axis=0)
    determined = ~jnp.isnan(margin).any()
    right = (~bounded | (margin > -_CLEAR * scatter)).all()
    decided = (~bounded | (margin > _CLEAR * scatter)).all()
    return determined, right, decided & ~jnp.isneginf(margin).any()
