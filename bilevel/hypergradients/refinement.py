"""Refine the weights and the adjoint behind a hypergradient by Newton steps, until they stay.

The solves know the smallest curvature (:mod:`bilevel.hypergradients.curvature`). The refined
hypergradient is sampled from starts that differ in the last digits only, which shows how far
rounding moves it.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from bilevel.contracts import Pytree
from bilevel.hypergradients.curvature import curvature, is_small
from bilevel.internal.precision import mixed_bits
from bilevel.problem.problem import hessian_operator, lower_gradient, mixed_product
from bilevel.problem.structure import is_quadratic
from bilevel.solvers.minimizers import local_newton
from ntk.internal.sharding import do_while, pcast_varying, repeat_step, varying

NOISE = 10  # the rounding error of a hypergradient, in roundings of its terms: 0.3 to 35 measured
_NEWTON_STEPS = 20  # most steps towards the solution, where the lower loss is not quadratic
_REFINEMENTS = 8  # most Newton steps that refine w, and that refine q
_SAMPLES = 8  # of the hypergradient, to see how far rounding moves it
_COSTLY_SAMPLES = 3  # the same where each sample takes an iterative solve or two


class Refined(NamedTuple):
    """The refined weights and adjoint, and what is known about their hypergradient."""

    w: Pytree
    adjoint: Pytree
    grads: Pytree  # like alpha, leading axis: samples of the refined hypergradient
    magnitude: jax.Array  # the size of its two terms
    linear_residual: jax.Array
    definite: jax.Array  # bool, the Hessian, but for directions that do not matter
    leak: jax.Array  # what such directions may contribute
    settled: jax.Array  # bool: Newton's steps have come to rest
    last_step: jax.Array  # of Newton's method, relative to ``w``
    spectrum: tuple[jax.Array, jax.Array] | None  # of the Hessian, where it is decomposed


def refine(problem, fixed, products, w, alpha, train, valid, grad, adjoint) -> Refined:
    """Refine ``w`` and ``adjoint``, and sample the hypergradient around them.

    ``fixed`` is the problem at this alpha, for all but derivatives in alpha.
    """
    # Sensitivities to weights without a gradient overflow; Newton's steps begin at 0 there.
    q = optax.tree.zeros_like(w) if adjoint is None else finite_or_zero(adjoint)
    quadratic = is_quadratic(fixed.lower, w, alpha, train)
    _, hvp = hessian_operator(fixed.lower, w, alpha, train)

    def refined(system=None):
        near = w
        if not quadratic:
            solver = local_newton(_NEWTON_STEPS, products)
            near = solver.run(fixed.lower, alpha, w, (), train)[0]
        if system is None or not quadratic:
            _, hvp = hessian_operator(fixed.lower, near, alpha, train)
            system = curvature(hvp, near, products)
        return _refine_solution(problem, fixed, system, near, w, q, alpha, train, valid, grad)

    if is_small(w):
        return refined()
    # Where the Hessian is not even definite here, no more is spent on it.
    system = curvature(hvp, w, products)
    axes = varying((w, q, grad, train, valid))
    return jax.lax.cond(
        system.definite,
        lambda: pcast_varying(refined(system), axes),
        lambda: pcast_varying(_unknown_refinement(w, q, alpha), axes),
    )


def sample_count(w) -> int:
    """Return the number of samples of the refined hypergradient."""
    return _SAMPLES if is_small(w) else _COSTLY_SAMPLES


def _unknown_refinement(w, q, alpha) -> Refined:
    """Placeholders, without NaN for `jax_debug_nans`: ``definite`` says that nothing is known."""
    missing = jax.tree.map(lambda a: jnp.zeros((sample_count(w), *a.shape), a.dtype), alpha)
    zero, no = jnp.zeros_like(optax.tree.norm(w)), jnp.array(False)
    unsolved = jnp.full_like(zero, unbounded(zero))
    return Refined(w, q, missing, zero, unsolved, no, zero, no, zero, None)


def _refine_solution(problem, fixed, system, near, w, q, alpha, train, valid, grad) -> Refined:
    """``near`` and ``q`` refined until they stay, and the hypergradients around them."""
    slope_of = lower_gradient(fixed.lower, alpha, train)
    rounding = jnp.finfo(system.lowest.dtype).eps * system.condition
    # The decomposition's solves are cheap, but of soft directions only as good as their curvature.
    enough, rounds = (0.0, 2) if is_small(near) else (1e-4, 1)
    count = sample_count(near)

    def newton_step(w):
        return system.solve(slope_of(w))

    def adjoint_residual(w):
        _, hvp = hessian_operator(fixed.lower, w, alpha, train)
        force = jax.grad(fixed.outer)(w, alpha, valid)
        return lambda q: optax.tree.sub(hvp(q), force), force

    near, w_settled, last_step = _settle(newton_step, near, w, rounding, enough)
    residual_of, force = adjoint_residual(near)
    q, q_settled, _ = _settle(lambda q: system.solve(residual_of(q)), q, q, rounding, enough)
    better, magnitude = combine(problem, near, q, alpha, train, valid)
    definite, leak, shifts = system.definite, jnp.zeros_like(magnitude), None
    if system.free is not None:
        free, leak = jax.lax.cond(
            system.flat,
            lambda: _unfelt(problem, fixed, system, near, alpha, train, valid),
            lambda: (system.flat, leak),
        )
        definite = definite | free
        shifts = _shifts(near, system.free, count)

    def sample(number):
        w_near, q_near = _jitter(2 * number, near), _jitter(2 * number + 1, q)
        if shifts is not None:
            w_near = optax.tree.add(w_near, ravel_pytree(near)[1](shifts[number]))
        w_near = repeat_step(lambda w: optax.tree.sub(w, newton_step(w)), w_near, rounds)
        # Newton's step ends on one rounding of the minimum, often the same from everywhere. Where
        # the outer gradient nearly cancels, as without noise, it is as good as any other.
        w_near = _jitter(2 * (number + count), w_near, 0.3)
        residual_of, _ = adjoint_residual(w_near)
        q_near = repeat_step(
            lambda q: optax.tree.sub(q, system.solve(residual_of(q))), q_near, rounds
        )
        return combine(problem, w_near, q_near, alpha, train, valid)[0]

    change = optax.tree.norm(optax.tree.sub(grad, better))
    grads = jax.lax.cond(
        # Where solves are cheap, the samples are.
        is_small(near) | (10 * rounding * magnitude > change),
        lambda: jax.lax.map(sample, jnp.arange(count, dtype=jnp.uint32)),
        lambda: jax.tree.map(lambda g: jnp.stack([g] * count), better),
    )
    return Refined(
        w=near,
        adjoint=q,
        grads=grads,
        magnitude=magnitude,
        linear_residual=ratio_to_norm(optax.tree.norm(residual_of(q)), force),
        definite=definite,
        leak=leak,
        settled=w_settled & q_settled,
        last_step=ratio_to_norm(last_step, near),
        spectrum=system.spectrum,
    )


def _unfelt(problem, fixed, system, w, alpha, train, valid):
    """Whether no derivative has a part in the free directions; what rounding hides of it.

    The hypergradient then does not depend on them: a shift of all particles, or of all logits. Both
    factors of a free direction's term, ``(v . n) (B' n) / curvature``, have to be 0 up to rounding,
    and so has the gradient, or there is no minimum. The second result is that term with the largest
    curvature that rounding hides.
    """
    flat, unravel = ravel_pytree(w)
    slope, hvp = hessian_operator(fixed.lower, w, alpha, train)
    force, turning = jax.linearize(lambda w: jax.grad(fixed.outer)(w, alpha, valid), w)

    def part(x):
        return jnp.linalg.norm(system.free.T @ ravel_pytree(x)[0])

    def mixed(n):
        product = mixed_product(lambda w, a: problem.lower(w, a, train), w, alpha, unravel(n))
        return optax.tree.norm(product)

    # Random combinations of the free directions, and of all.
    draws = jax.random.normal(jax.random.key(2), (4, flat.size), flat.dtype)
    draws = pcast_varying(draws, varying(flat))
    vectors = jnp.concatenate([draws[:2] @ system.free.T, draws[2:]])
    *free, one, other = jax.lax.map(mixed, vectors)
    pulled, crossed, whole = part(force), jnp.maximum(*free), jnp.maximum(one, other)
    # Eigenvectors are known to the rounding over the gap in the spectrum.
    eps = jnp.finfo(flat.dtype).eps
    allowed = jnp.minimum(100 * eps * system.condition, jnp.sqrt(eps))
    # A sum may cancel: its rounding is that of its terms.
    terms = optax.tree.norm(slope) + optax.tree.norm(hvp(w))
    outer_terms = optax.tree.norm(force) + optax.tree.norm(turning(w))
    unfelt = (
        (part(slope) <= allowed * terms)
        & (pulled <= allowed * outer_terms)
        & (crossed <= allowed * whole)
    )
    least = NOISE * eps * system.condition * system.lowest
    return unfelt, pulled * crossed / least


def _shifts(w, free, count):
    """Random moves of ``w`` along the free directions, by much more than rounding: [count, p]."""
    flat, _ = ravel_pytree(w)
    drawn = pcast_varying(jax.random.normal(jax.random.key(3), (count, flat.size)), varying(flat))
    size = jnp.finfo(flat.dtype).eps ** 0.25 * jnp.sqrt(jnp.mean(flat**2))
    return size * ((drawn.astype(flat.dtype) @ free) @ free.T)


def _settle(step, x, start, rounding, enough):
    """``x - step(x)``, again while steps shrink; whether the last is small; its length.

    Small: against the way from ``start``, or against ``rounding``, relative to ``x``.
    """

    def way(x):
        return optax.tree.norm(optax.tree.sub(x, start))

    def unfinished(carry):
        x, size, previous, k = carry
        return (k < _REFINEMENTS) & (size < 0.5 * previous) & (size > enough * way(x))

    def once(carry):
        x, size, _, k = carry
        d = step(x)
        after = optax.tree.norm(d)
        # A step that is longer than the last leads away.
        shrinking = after < size
        x = jax.tree.map(lambda a, b: jnp.where(shrinking, a - b, a), x, d)
        return x, jnp.where(shrinking, after, size), size, k + 1

    most = jnp.full_like(rounding, jnp.finfo(rounding.dtype).max)
    nothing = x, most, most, jnp.zeros((), int)
    x, size, *_ = do_while(unfinished, once, nothing)
    allowed = jnp.minimum(100 * rounding, 0.1) * optax.tree.norm(x)
    return x, (size <= jnp.maximum(0.01 * way(x), allowed)) & jnp.isfinite(size), size


def _jitter(number, tree, roundings=1.0):
    """``tree``, its last digits drawn at random.

    By a hash: JAX's generators, better than this asks for, take a third of the compilation.
    """
    flat, unravel = ravel_pytree(tree)
    bits = jnp.arange(flat.size, dtype=jnp.uint32) + number * jnp.uint32(0x9E3779B9)
    bits = mixed_bits(bits)
    uniform = (bits ^ (bits >> 16)).astype(flat.dtype) / 2.0**31 - 1

    def one(x, uniform):
        size = roundings * jnp.finfo(x.dtype).eps * (jnp.abs(x) + jnp.sqrt(jnp.mean(x**2)))
        return x + math.sqrt(3) * size * uniform  # of variance 1

    return jax.tree.map(one, tree, unravel(uniform))


def combine(problem, w, q, alpha, train, valid):
    """The hypergradient of ``(w, q)``, and the size of its two terms."""
    direct = jax.grad(problem.outer, 1)(w, alpha, valid)
    indirect = mixed_product(lambda w, alpha: problem.lower(w, alpha, train), w, alpha, q)
    magnitude = optax.tree.norm(direct) + optax.tree.norm(indirect)
    return optax.tree.sub(direct, indirect), magnitude


def unbounded(like: jax.Array) -> float:
    """Infinity; the largest number of the dtype if `jax_debug_infs` would raise at infinity."""
    raising = jax.config.jax_debug_infs  # type: ignore[attr-defined]
    return float(jnp.finfo(like.dtype).max) if raising else jnp.inf


def finite_or_zero(tree: Pytree) -> Pytree:
    """Return ``tree`` with 0 in the place of values that are not finite."""
    return jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0), tree)


def ratio_to_norm(size: jax.Array, whole: Pytree) -> jax.Array:
    """Return ``size`` over the norm of ``whole``, or ``size`` if that norm is 0."""
    norm = optax.tree.norm(whole)
    return size / jnp.where(norm > 0, norm, 1)
