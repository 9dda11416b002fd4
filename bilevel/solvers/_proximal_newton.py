"""Solve a constrained or non-smooth problem: proximal gradient steps, then Newton's method.

Spectral steps (Wright, Nowak & Figueiredo 2009) with step sizes of ABBmin (Frassoldati, Zanni &
Zanghirati 2008) find the active set. Semi-smooth Newton steps find the solution on its manifold.
"""

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from bilevel.contracts import Constraint, LinearMap, Pytree
from bilevel.internal.conjugate_gradients import solve_conjugate_gradients
from bilevel.internal.precision import uniform_hash
from bilevel.solvers._manifold import fixed_point, manifold_system, same_code
from bilevel.solvers.inverses import ratio_of_norms
from ntk.internal.sharding import pcast_varying, varying, while_loop

_POWERS = 15  # maximum number of power iterations for the first step size
_GROWTH = 0.03  # they end if the curvature grows by less; a step that is too long is shortened
_FIRST_STEPS = 50  # proximal gradient steps before Newton's method; each round doubles them
_NEAR = 1e-3  # relative residual at which the first Newton step is tried; a tenth in each round
_SAME = 10  # steps with the same code after which it is tried sooner
_MEMORY = 10  # steps within which the objective may rise
_TIE = 4  # units of roundoff of the largest weight within which a tie counts as active
_NEWTON_STEPS = 30
_CG_STEPS = 500  # Hessian products of one Newton step, and at most twice a round's gradient steps


def curvature_by_powers(hvp: LinearMap, w: Pytree, growth: float = 0.0) -> jax.Array:
    """Return the largest eigenvalue of a Hessian, to the share ``growth``; 1 if it is 0."""
    flat, unravel = ravel_pytree(w)

    def unfinished(carry):
        _, size, last, count = carry
        return (count < _POWERS) & ((count == 0) | (size - last > growth * size))

    def turn(carry):
        v, last, _, count = carry
        v = ravel_pytree(hvp(unravel(v)))[0]
        size = jnp.linalg.norm(v)
        return v / jnp.where(size > 0, size, 1), size, last, count + 1

    v = pcast_varying(uniform_hash(0, flat), varying(w))
    size = jnp.linalg.norm(v)
    zero = jnp.zeros_like(size)
    start = v / jnp.where(size > 0, size, 1), zero, zero, jnp.zeros((), int)
    largest = while_loop(unfinished, turn, start)[1]
    return jnp.where(largest > 0, largest, 1)


class _Candidate(NamedTuple):
    """Weights, and their step to the fixed point."""

    w: Pytree
    g: Pytree  # the lower gradient
    code: Pytree
    step: Pytree
    size: jax.Array  # [], the step's length, relative to w


class _Pace(NamedTuple):
    """Step sizes of the proximal gradient method, and earlier objectives."""

    length: jax.Array  # [], the next step size
    levels: jax.Array  # [_MEMORY], bounds of the last objectives minus the very last
    short: jax.Array  # [3], short step sizes of the last steps
    share: jax.Array  # [], the short step size is used if it is below this share of the long one

    def after(self, square, bend, turn, rise) -> "_Pace":
        """Return the pace after a step of this squared length and curvature (ABBmin)."""
        huge = jnp.full_like(bend, jnp.finfo(bend.dtype).max)
        curved, turned = bend > 0, turn > 0
        long = jnp.where(curved, square / jnp.where(curved, bend, 1), huge)
        short = jnp.where(curved, bend / jnp.where(turned, turn, 1), huge)
        shorts = jnp.append(self.short[1:], short)
        brief = curved & (short < self.share * jnp.where(curved, long, 0))
        return _Pace(
            length=jnp.where(brief, shorts.min(), long),
            levels=jnp.append(self.levels[1:] - rise, jnp.zeros_like(rise)),
            short=shorts,
            share=self.share * jnp.where(curved, jnp.where(brief, 0.9, 1.1), 1),
        )


class ProximalProblem(NamedTuple):
    """A lower problem at one alpha, without derivatives."""

    constraint: Constraint
    loss: Callable[[Pytree], jax.Array]
    hessian: Callable[[Pytree], Callable]
    alpha: Pytree
    quadratic: bool
    short: float  # Newton's steps below this share of the weights end the iteration
    aim: chex.Numeric  # so does this residual

    def solve(self, w, state, steps) -> tuple:
        """Alternate between proximal gradient and Newton steps until these converge."""
        eta = 1 / curvature_by_powers(self.hessian(w), w, _GROWTH)
        warm = state.step > 0

        def round_(carry):
            point, eta, pace, budget, near, used, _ = carry
            aim = jnp.maximum(near, self.aim)
            left = jnp.minimum(budget, steps - used)
            point, eta, pace, count = self.descend(point, eta, pace, left, aim)
            # The last active set may fit better than the one that a single step shows.
            first = warm & (used == 0) & (point.size > self.aim)
            code = optax.tree.where(first, state.code, point.code)
            point = self.of(point.w, point.g, code, eta)
            point, done = self.newton(point, eta, 2 * budget)
            used += jnp.maximum(count, 1)
            return point, eta, pace, 2 * budget, near / 10, used, done

        def unfinished(carry):
            point, *_, used, done = carry
            return ~done & (used < steps) & ~jnp.isnan(point.size)

        dtype = eta.dtype
        zero, no = jnp.zeros((), int), jnp.array(False)
        near, huge = jnp.asarray(_NEAR, dtype), jnp.full_like(eta, jnp.finfo(dtype).max)
        levels = jnp.append(jnp.full(_MEMORY - 1, -huge / 2), jnp.zeros_like(eta))
        pace = _Pace(eta, levels, jnp.stack([huge] * 3), jnp.full_like(eta, 0.5))
        start = self.at(w, eta), eta, pace, zero + _FIRST_STEPS, near, zero, no
        (w, g, *_, size), eta, *_ = while_loop(unfinished, round_, start)
        return *self.with_ties(w, g, eta), eta, size

    def with_ties(self, w, g, eta) -> tuple[Pytree, Pytree]:
        """Return weights and their code, with constraints active that rounding alone releases."""
        code = self.constraint.identify(w, g, self.alpha, eta)
        tangent = self.constraint.tangent
        if tangent is None:
            return w, code
        flat, unravel = ravel_pytree(w)
        v = unravel(pcast_varying(uniform_hash(0, flat), varying(flat)))
        rounding = _TIE * jnp.finfo(eta.dtype).eps * jnp.max(jnp.abs(flat)) / eta

        def freedom(code):
            along = tangent(code, w, self.alpha, v)
            return optax.tree.vdot(along, along)

        for push in (rounding, -rounding):
            pushed = jax.tree.map(lambda x, push=push: x + push, g)
            other = self.constraint.identify(w, pushed, self.alpha, eta)
            tied = freedom(other) < freedom(code)
            near = fixed_point(self.constraint)(other, w, g, self.alpha, eta)
            w, code = optax.tree.where(tied, (near, other), (w, code))
        return w, code

    def at(self, w, eta, g=None) -> _Candidate:
        """Return the point ``w`` with its own code; ``g`` is the gradient, if it is known."""
        g = jax.grad(self.loss)(w) if g is None else g
        return self.of(w, g, self.constraint.identify(w, g, self.alpha, eta), eta)

    def of(self, w, g, code, eta) -> _Candidate:
        """Return the point ``w`` with this gradient and code."""
        step = self.constraint.step(code, w, g, self.alpha, eta)
        return _Candidate(w, g, code, step, ratio_of_norms(step, optax.tree.add(w, step)))

    def descend(self, point, eta, pace, budget, near) -> tuple:
        """Take proximal gradient steps until the residual is below ``near``."""
        eps = jnp.finfo(eta.dtype).eps
        huge = jnp.full_like(eta, jnp.finfo(eta.dtype).max)

        def unfinished(carry):
            point, *_, same, count = carry
            settled = (point.size <= near) | ((same >= _SAME) & (point.size <= 30 * near))
            return (count < budget) & ~((count > 0) & settled) & ~jnp.isnan(point.size)

        def move(carry):
            point, value, eta, pace, same, count = carry
            w, g, length = point.w, point.g, pace.length
            code = self.constraint.identify(w, g, self.alpha, length)
            after = fixed_point(self.constraint)(code, w, g, self.alpha, length)
            value_after, g_after = jax.value_and_grad(self.loss)(after)
            d, turn = optax.tree.sub(after, w), optax.tree.sub(g_after, g)
            square, bend = optax.tree.vdot(d, d), optax.tree.vdot(d, turn)
            whole = optax.tree.vdot(after, after)
            # The curvature between two points shows a step size that is too large.
            clear = square > eps * whole
            curvature = jnp.where(clear, bend / jnp.where(square > 0, square, 1), 0)
            eta = jnp.where(curvature * eta > 1.05, 1 / (1.05 * curvature), eta)
            value_after = value_after.astype(eta.dtype)
            distance = bend / 2
            if not self.quadratic:  # except for steps that change the loss by its rounding
                known = value_after - value - optax.tree.vdot(g, d)
                small = jnp.abs(bend) <= 100 * eps * jnp.abs(value)
                distance = jnp.where(small, distance, known)
            rise = distance - square / length
            good = rise <= pace.levels.max() - 1e-4 * square / length
            good |= ~(square > eps * eps * whole)  # NaN: give up
            if self.quadratic:
                good |= length <= eta

            point_after = self.at(after, eta, g_after)
            pace_after = pace.after(square, bend, optax.tree.vdot(turn, turn), rise)
            length_after = jnp.clip(pace_after.length, eta, eta / jnp.sqrt(eps))
            same_after = jnp.where(same_code(point_after.code, point.code), same + 1, 0)
            moved = (
                *(point_after, value_after, eta),
                *(pace_after._replace(length=length_after), same_after),
            )
            retry = (
                *(point._replace(size=huge), value, jnp.minimum(eta, length)),
                *(pace._replace(length=length / 2), 0 * same),
            )
            return *optax.tree.where(good, moved, retry), count + 1

        zero = jnp.zeros((), int)
        value = jnp.zeros_like(eta)  # of use only if the loss is not quadratic
        if not self.quadratic:
            value = self.loss(point.w).astype(eta.dtype)
        start = point, value, eta, pace, zero, zero
        point, _, eta, pace, _, count = while_loop(unfinished, move, start)
        return point, eta, pace, count

    def newton(self, point, eta, products) -> tuple[_Candidate, jax.Array]:
        """Take Newton steps on the active manifold while they make progress."""
        eps = jnp.finfo(eta.dtype).eps

        def unfinished(carry):
            _, _, count, going, done = carry
            return going & ~done & (count < _NEWTON_STEPS)

        def move(carry):
            point, moved, count, _, _ = carry
            system = manifold_system(
                *(self.constraint, self.hessian(point.w), point.code),
                *(point.w, point.g, self.alpha, eta),
            )
            right = system.before(point.step)
            forcing = jnp.clip(point.size, 10 * eps, 1e-2)
            solved = solve_conjugate_gradients(
                system.operator,
                right,
                None,
                steps=jnp.minimum(_CG_STEPS, products).astype(eta.dtype),
                threshold=forcing * optax.tree.norm(right),
            )
            change = optax.tree.add(system.direct(point.step), system.after(solved.x))
            trial = self.at(optax.tree.add(point.w, change), eta)
            # The step's own code is exact there, and the next one is known from its slope.
            w = fixed_point(self.constraint)(trial.code, trial.w, trial.g, self.alpha, eta)
            after = self.at(w, eta)
            stays = same_code(point.code, trial.code) & same_code(point.code, after.code)
            moved_after = ratio_of_norms(optax.tree.sub(w, point.w), w)
            lowers = self.lowers(point, trial, after, eta)
            progress = (after.size < 0.5 * point.size) | (stays & (moved_after < 0.5 * moved))
            rounded = stays & (after.size <= 100 * eps)
            done = (stays & (moved_after <= self.short)) | (rounded & ~progress)
            done = (done | (after.size <= self.aim)) & lowers
            progress &= lowers
            better = progress | (done & (after.size <= point.size))
            result = optax.tree.where(better, (after, moved_after), (point, moved))
            return *result, count + 1, progress, done

        zero, no = jnp.zeros((), int), jnp.array(False)
        huge = jnp.full_like(eta, jnp.finfo(eta.dtype).max)
        start = point, huge, zero, ~no, point.size <= self.aim
        point, _, _, _, done = while_loop(unfinished, move, start)
        return point, done

    def lowers(self, before, trial, after, eta) -> jax.Array:
        """Return whether the whole objective at ``after`` is not larger than at ``before``.

        ``after`` is the proximal point of ``trial``, so ``u`` below is a subgradient there. A
        singular reduced Hessian makes Newton's step huge; its residual alone may look small.
        """
        eps = jnp.finfo(eta.dtype).eps
        way = optax.tree.sub(after.w, before.w)
        pull = optax.tree.scale(1 / eta, optax.tree.sub(after.w, trial.w))
        u = optax.tree.sub(optax.tree.sub(after.g, trial.g), pull)
        bend = optax.tree.vdot(way, optax.tree.sub(after.g, before.g)) / 2
        length = optax.tree.norm(way)
        # The old point's rounding is allowed; that of a huge step must not hide an increase.
        old = optax.tree.norm(before.g) + optax.tree.norm(before.w) / eta
        new = optax.tree.norm(after.g) + (optax.tree.norm(after.w) + optax.tree.norm(trial.w)) / eta
        slack = eps * length * (100 * old - 4 * new)
        return optax.tree.vdot(u, way) <= bend + slack
