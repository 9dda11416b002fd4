"""How wrong a hypergradient is: residuals, an error estimate, and a bound for quadratics.

The exact hypergradient of the solution map, at the solution ``w*`` and the adjoint ``q*``, is

    G* = d_alpha outer(w*) - B(w*)' q*,     H q* = d_w outer(w*),     B = d(grad_w lower)/dalpha.

A computed ``G`` stands on an inexact ``w`` and an inexact ``q``. Both are refined: ``w`` by Newton
steps, ``q`` by conjugate gradients on its residual. The refined ``G+`` is much closer to ``G*``, so
``|G - G+|`` estimates ``|G - G*|``. For a lower loss quadratic in ``w`` one Newton step is exact up
to its linear residual, which the smallest Hessian eigenvalue turns into a bound.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from bilevel.inverse import conjugate_gradients, default_tolerance, hessian_matrix
from bilevel.meshes import while_loop
from bilevel.precision import widen, widened
from bilevel.problem import Problem, gradient, hessian_operator, is_quadratic
from bilevel.protocols import Pytree
from bilevel.solvers import detached

TOLERANCE = 1e-2
"""A hypergradient counts as converged when its estimated error is under 1 % of its norm."""

_REFINED = 1e-3  # by what factor a refinement shrinks a linear residual
_NEWTON_STEPS = 10
_CG_STEPS = 1000
_NOISE = 10  # roundings of a hypergradient in its two terms: 0.3 to 35 were measured
_ROUNDINGS = 50  # a lower gradient this many roundings of its terms is as good as zero
_BOUND_SIZE = 1024  # weights up to which the Hessian is formed for `error_bound`


class Info(NamedTuple):
    """What is known about one hypergradient's accuracy. All scalars.

    Attributes
    ----------
    stationarity : 2-norm of the lower gradient at ``w``.
    linear_residual : ``|H q - v| / |v|``, v = d outer / dw, for the adjoint ``q`` that the solver
        effectively used: an unrolled solver has one too, the truncated Neumann sum it computes.
        For a closed form and in forward mode there is none to read off; it is then that of the
        independent solve the estimate makes.
    converged : bool, whether ``error_estimate`` is under 1 % of the hypergradient's norm.
    error_estimate : estimate of the 2-norm of ``grad - exact`` for the hypergradient of the
        solution map; infinite where none can be made (a singular or indefinite Hessian).
    error_bound : upper bound of the same, up to rounding, for a lower loss quadratic in ``w`` with
        a positive definite Hessian and at most 1024 weights; infinite elsewhere.
    """

    stationarity: jax.Array
    linear_residual: jax.Array
    converged: jax.Array
    error_estimate: jax.Array
    error_bound: jax.Array


def assess(
    problem: Problem,
    w: Pytree,
    alpha: Pytree,
    train: Pytree,
    valid: Pytree,
    grad: Pytree,
    adjoint: Pytree | None,
) -> Info:
    """Assess a hypergradient ``grad`` computed at ``w`` with ``adjoint`` (None: unknown).

    Cost: about one Newton step and one warm-started adjoint solve. Nothing here is differentiated.
    """
    if adjoint is not None:
        adjoint = widen(adjoint)
    problem = Problem(widened(problem.lower, w), widened(problem.outer, w))
    check, w = functools.partial(_assess, problem), widen(w)
    return detached(check, w, alpha, train, valid, grad, adjoint)


def _assess(problem, w, alpha, train, valid, grad, adjoint) -> Info:
    slope, hvp = hessian_operator(problem.lower, w, alpha, train)
    better_w, w_refined = _refine_weights(problem.lower, w, alpha, train)
    better_q, q_left = _refine_adjoint(problem, better_w, alpha, train, valid, adjoint)
    better, magnitude = _combine(problem, better_w, better_q, alpha, train, valid)

    change = optax.tree.norm(optax.tree.sub(grad, better))
    # What the refinement left over, and the rounding of two terms that may nearly cancel.
    rounding = _NOISE * jnp.finfo(change.dtype).eps * magnitude
    estimable = w_refined & (q_left < 0.5) & jnp.isfinite(change)
    estimate = jnp.where(estimable, change * (1 + q_left) + rounding, jnp.inf)

    if adjoint is None:
        linear_residual = q_left
    else:
        force = jax.grad(problem.outer)(w, alpha, valid)
        linear_residual = _ratio(optax.tree.norm(optax.tree.sub(hvp(adjoint), force)), force)
    return Info(
        stationarity=optax.tree.norm(slope),
        linear_residual=linear_residual,
        converged=estimate <= TOLERANCE * optax.tree.norm(grad),
        error_estimate=estimate,
        error_bound=_bound(problem, better_w, better_q, alpha, train, valid, grad) + rounding,
    )


def _ratio(size: jax.Array, whole: Pytree) -> jax.Array:
    norm = optax.tree.norm(whole)
    return size / jnp.where(norm > 0, norm, 1)


def _refine_weights(lower, w, alpha, train):
    """Newton steps until the lower gradient has shrunk a hundredfold; whether it did shrink."""
    slope_of = gradient(lower, alpha, train)
    steps = 1 if is_quadratic(lower, w, alpha, train) else _NEWTON_STEPS
    slope, hvp = hessian_operator(lower, w, alpha, train)
    first = optax.tree.norm(slope)
    floor = _ROUNDINGS * jnp.finfo(first.dtype).eps * (first + optax.tree.norm(hvp(w)))

    def unfinished(carry):
        _, size, k = carry
        # Once even where the gradient is all rounding: how far it moves the result is to be seen.
        return (k < steps) & (size > 1e-2 * first) & ((k == 0) | (size > floor))

    def step(carry):
        w, size, k = carry
        slope, hvp = hessian_operator(lower, w, alpha, train)
        threshold = _REFINED * size
        d = conjugate_gradients(hvp, slope, None, steps=_CG_STEPS, threshold=threshold).x

        def after(t):
            return optax.tree.norm(slope_of(optax.tree.add_scale(w, -t, d)))

        def too_long(t):
            return ~(after(t) < (1 - 1e-4 * t) * size) & (t > 1e-3)

        t = while_loop(too_long, lambda t: t / 2, jnp.ones_like(size))
        w = optax.tree.add_scale(w, -t, d)
        return w, optax.tree.norm(slope_of(w)), k + 1

    w, size, _ = while_loop(unfinished, step, (w, first, jnp.zeros((), int)))
    return w, size <= jnp.maximum(0.1 * first, floor)


def _refine_adjoint(problem, w, alpha, train, valid, adjoint):
    """``q`` with ``H q = d_w outer`` more nearly, and the fraction of its residual that is left."""
    _, hvp = hessian_operator(problem.lower, w, alpha, train)
    force = jax.grad(problem.outer)(w, alpha, valid)
    tiny = default_tolerance(force) * optax.tree.norm(force)
    if adjoint is None:
        first, threshold = optax.tree.norm(force), tiny
        adjoint = optax.tree.zeros_like(force)
    else:
        first = optax.tree.norm(optax.tree.sub(force, hvp(adjoint)))
        threshold = _REFINED * first
    solved = conjugate_gradients(hvp, force, adjoint, steps=_CG_STEPS, threshold=threshold)
    return solved.x, solved.residual / jnp.where(first > 0, first, 1)


def _combine(problem, w, q, alpha, train, valid):
    """The hypergradient of ``(w, q)``, and the size of its two terms."""
    direct = jax.grad(problem.outer, 1)(w, alpha, valid)
    indirect = jax.grad(_work, 2)(problem.lower, w, alpha, train, q)
    magnitude = optax.tree.norm(direct) + optax.tree.norm(indirect)
    return optax.tree.sub(direct, indirect), magnitude


def _work(lower, w, alpha, train, q) -> jax.Array:
    """``<grad_w lower, q>``: its alpha-gradient is ``B' q``."""
    return jax.jvp(lambda w: lower(w, alpha, train), (w,), (q,))[1]


def _bound(problem, w, q, alpha, train, valid, grad) -> jax.Array:
    """``|grad - G+|`` plus how far ``G+``, refined by the factorised Hessian, can be from ``G*``.

    With mu the smallest Hessian eigenvalue, |w - w*| <= |g| / mu exactly for a quadratic, and

        |G+ - G*| <= L |w - w*| + |B| |q - q*|,
        |q - q*| <= (|H q - v| + |d^2_ww outer| |w - w*|) / mu,    L = |d_w (d_alpha outer - B'q)|,

    all norms Frobenius at the refined point; the factor 2 pays for products of two residuals.
    """
    flat, unravel = ravel_pytree(w)
    flat_alpha, unravel_alpha = ravel_pytree(alpha)
    feasible = flat.size <= _BOUND_SIZE and flat.size * flat_alpha.size <= _BOUND_SIZE**2
    if not feasible or not is_quadratic(problem.lower, w, alpha, train):
        return jnp.full((), jnp.inf, flat.dtype)

    def slope(w, alpha):
        return ravel_pytree(jax.grad(problem.lower)(unravel(w), unravel_alpha(alpha), train))[0]

    def force(w):
        return ravel_pytree(jax.grad(problem.outer)(unravel(w), alpha, valid))[0]

    def combined(w, q):
        return ravel_pytree(_combine(problem, unravel(w), unravel(q), alpha, train, valid)[0])[0]

    _, hvp = hessian_operator(problem.lower, w, alpha, train)
    matrix = hessian_matrix(hvp, w)
    eigenvalues, vectors = jnp.linalg.eigh(matrix)
    slack = flat.size * jnp.finfo(flat.dtype).eps * jnp.linalg.norm(matrix)
    mu = eigenvalues[0] - slack

    def solve(b):
        return vectors @ ((vectors.T @ b) / eigenvalues)

    flat = flat - solve(slope(flat, flat_alpha))
    flat_q = ravel_pytree(q)[0]
    flat_q = flat_q + solve(force(flat) - matrix @ flat_q)
    change = jnp.linalg.norm(ravel_pytree(grad)[0] - combined(flat, flat_q))

    w_error = jnp.linalg.norm(slope(flat, flat_alpha)) / mu
    q_residual = jnp.linalg.norm(matrix @ flat_q - force(flat))
    q_error = (q_residual + jnp.linalg.norm(jax.jacfwd(force)(flat)) * w_error) / mu
    cross = jnp.linalg.norm(jax.jacfwd(slope, 1)(flat, flat_alpha))
    sensitivity = jnp.linalg.norm(jax.jacfwd(combined)(flat, flat_q))
    bound = change + 2 * (sensitivity * w_error + cross * q_error)
    return jnp.where(mu > 0, bound, jnp.inf)
