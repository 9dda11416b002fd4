"""Proximal gradient steps as an optimizer, for :func:`bilevel.unrolled`."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from bilevel.contracts import Constraint, Pytree
from bilevel.problem.structure import is_quadratic
from bilevel.solvers._detached import detached
from bilevel.solvers._manifold import fixed_point
from bilevel.solvers._proximal_newton import curvature_by_powers
from bilevel.solvers.constrained import ProximalState, first_state


def proximal_steps(constraint: Constraint) -> Callable[[Pytree], optax.GradientTransformation]:
    """Return ``alpha -> optimizer`` with the update ``prox(w - eta g) - w``, for constant ``eta``."""

    def rule_at(alpha):
        def update(g, state, w, *, value_fn, **_):
            eta = state.step
            if not is_quadratic(lambda w, *_: value_fn(w), w, alpha, None):
                shorter = functools.partial(_halved_step_size, constraint, jax.grad(value_fn))
                eta = detached(shorter, g, w, alpha, eta)
            code = detached(constraint.identify, w, g, alpha, eta)
            after = fixed_point(constraint)(code, w, g, alpha, eta)
            return optax.tree.sub(after, w), ProximalState(code, eta)

        init = functools.partial(first_state, constraint)
        return optax.GradientTransformationExtraArgs(init, update)

    return rule_at


def with_step_size(state: ProximalState, loss: Callable, w: Pytree, *args: Pytree) -> ProximalState:
    """Return the state with the inverse of the largest curvature of the loss as its step size."""

    def step(w, *args):
        _, hvp = jax.linearize(jax.grad(lambda w: loss(w, *args)), w)
        return 1 / curvature_by_powers(hvp, w)

    return state._replace(step=detached(step, w, *args))


def _halved_step_size(constraint, gradient, g, w, alpha, eta) -> jax.Array:
    """Return ``eta``, halved until the curvature along the step is at most ``1 / eta``."""
    eps = jnp.finfo(eta.dtype).eps
    size, slope = optax.tree.norm(w), optax.tree.norm(g)

    def too_long(eta):
        code = constraint.identify(w, g, alpha, eta)
        step = constraint.step(code, w, g, alpha, eta)
        turn = optax.tree.sub(gradient(optax.tree.add(w, step)), g)
        length = optax.tree.norm(step)
        rounding = 10 * eps * (slope + size / eta) * length
        steep = ~(optax.tree.vdot(step, turn) <= length**2 / eta + rounding)
        return steep & (eta > eps * eps)

    return jax.lax.while_loop(too_long, lambda eta: eta / 2, eta)
