"""Refine the weights and the adjoint of a hypergradient by Newton steps, until they converge.

Samples start from values that differ in the last digits; their spread measures rounding.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from bilevel.contracts import Pytree
from bilevel.hypergradients.curvature import formed, iterative, probed
from bilevel.internal.precision import uniform_hash
from bilevel.problem.problem import hessian_operator, lower_gradient, mixed_product
from bilevel.solvers.inverses import ratio_to_norm
from bilevel.solvers.minimizers import make_newton
from ntk.internal.sharding import match_varying_axes, pcast_varying, varying, while_loop

NOISE = 10  # rounding error of a hypergradient, in roundoff of its terms (measured: 0.3 to 35)
_NEWTON_STEPS = 20  # maximum number of steps towards the solution, if the loss is not quadratic
_REFINEMENTS = 12  # maximum number of Newton steps that refine w and q
_SAMPLES = 6  # samples of the hypergradient, which measure the effect of rounding
_COSTLY_SAMPLES = 4  # samples if each takes two iterative solves
_NEAR = 1e-3  # Newton step, relative to the weights, that the Hessian at the weights is good for
_SHRINKS = 0.03  # ratio of two small steps above which rounding dominates: solves err by 0.001
_JITTER = 0.3  # units of roundoff that refined weights are moved by


class Refined(NamedTuple):
    """The refined weights and adjoint, samples of their hypergradient, and residuals."""

    w: Pytree
    adjoint: Pytree
    grads: Pytree  # like alpha, leading axis: samples of the refined hypergradient
    magnitude: jax.Array  # the size of its two terms
    slope_norm: jax.Array  # of the lower gradient at ``w``
    residual_norm: jax.Array  # |H q - v|
    definite: jax.Array  # bool: the Hessian is, outside directions that do not matter
    leak: jax.Array  # bound of the contribution of such directions
    settled: jax.Array  # bool: Newton's steps have converged
    last_step: jax.Array  # length of the last Newton step, relative to ``w``
    floor: jax.Array | None  # proved lower bound of the Hessian's eigenvalues, if it is formed


def refine(problem, fixed, products, quadratic, dense, w, alpha, train, valid, adjoint) -> Refined:
    """Refine ``w`` and ``adjoint``, and sample the hypergradient; ``fixed`` has alpha's values."""
    # Sensitivities to weights without a gradient overflow; Newton's steps begin at 0 there.
    q = optax.tree.zeros_like(w) if adjoint is None else finite_or_zero(adjoint)

    def hvp_at(w):
        return hessian_operator(fixed.lower, w, alpha, train)[1]

    def minimum():
        solver = make_newton(_NEWTON_STEPS, None, products, leaves=False)  # stays near w
        return solver.run(fixed.lower, alpha, w, (), train)[0]

    def refined(near, system):
        return _refine_solution(problem, fixed, system, near, w, q, alpha, train, valid)

    if dense:
        near = w if quadratic else minimum()
        return refined(near, formed(hvp_at(near), near))
    spectrum = lowest, _, definite = probed(hvp_at(w), w, products)
    axes = varying((w, q, train, valid))

    def moved():
        near = minimum()
        return pcast_varying((near, probed(hvp_at(near), near, products)), axes)

    def known():
        near, facts = pcast_varying((w, spectrum), axes)
        if not quadratic:
            step = optax.tree.norm(jax.grad(fixed.lower)(w, alpha, train)) / lowest
            far = step > _NEAR * optax.tree.norm(w)
            near, facts = jax.lax.cond(far, moved, lambda: (near, facts))
        return pcast_varying(refined(near, iterative(hvp_at(near), near, products, facts)), axes)

    # A Hessian that is not definite here is not worth further solves.
    return jax.lax.cond(definite, known, lambda: _unknown_refinement(w, q, alpha, axes))


def _unknown_refinement(w, q, alpha, axes) -> Refined:
    """Return placeholders. They hold no NaN, for `jax_debug_nans`; ``definite`` is False."""
    missing = jax.tree.map(lambda a: jnp.zeros((_COSTLY_SAMPLES, *a.shape), a.dtype), alpha)
    zero, no = jnp.zeros_like(optax.tree.norm(w)), jnp.array(False)
    unsolved = jnp.full_like(zero, unbounded(zero))
    missing = Refined(w, q, missing, zero, zero, unsolved, no, zero, no, zero, None)
    return pcast_varying(missing, axes)


class _Iterate(NamedTuple):
    """A vector between two Newton steps; scalars are from the last evaluation of its residual."""

    x: Pytree
    residual: jax.Array  # its norm
    step: jax.Array  # length of the next Newton step
    small: jax.Array  # bool: this step is negligible
    rounds: jax.Array  # int: number of steps taken
    done: jax.Array  # bool


def _refine_solution(problem, fixed, system, near, w, q, alpha, train, valid) -> Refined:
    dense = system.floor is not None
    rounding = jnp.finfo(system.lowest.dtype).eps * system.condition
    relative = jnp.minimum(100 * rounding, 0.1)
    count = _SAMPLES if dense else _COSTLY_SAMPLES
    shifts = _shifts(near, system.free, count) if dense else None

    def settled(residual, start, given, number=None, noise=None):
        """Take Newton steps while they shrink; ``given`` is the vector that is to be assessed."""

        def once(now):
            right = residual(now.x)
            size, length, way = _norms(right, now.x, optax.tree.sub(now.x, given))
            # A step is negligible compared with the distance from the start, or with rounding.
            limit = jnp.maximum(0.01 * way, relative * length)
            if dense:  # solves are cheap and continue down to rounding
                distance = optax.tree.norm(system.solve(right))
                shrinks = distance < 0.5 * now.step
            else:
                distance = size / system.lowest
                shrinks = distance < jnp.where(distance <= limit, _SHRINKS, 0.5) * now.step
                shrinks &= (distance > 1e-3 * way) | (now.rounds == 0)
            done = (now.rounds >= _REFINEMENTS) | ~shrinks
            aim = jnp.maximum(1e-3 * size, 5e-3 * way * system.lowest)
            step = system.solve(right, jnp.where(done, 2 * size, aim))
            moved = optax.tree.sub(now.x, step)
            # Newton's steps often end on the same rounding of the minimum from every start. The
            # jitter draws another one, which is equally good and shows the spread.
            moved = moved if noise is None else jitter(number, moved, noise)
            x = optax.tree.where(done, now.x, moved)
            return _Iterate(x, size, distance, distance <= limit, now.rounds + 1, done)

        most = jnp.full_like(rounding, jnp.finfo(rounding.dtype).max)
        no = jnp.array(False)
        first = _Iterate(start, most, most, no, jnp.zeros((), int), no)
        return while_loop(lambda now: ~now.done, once, first)

    def sample(number):
        moves = (number > 0).astype(rounding.dtype)
        first_w, first_q = jitter(2 * number, near, moves), jitter(2 * number + 1, q, moves)
        if shifts is not None:
            shift = ravel_pytree(near)[1](moves * shifts[number])
            first_w = optax.tree.add(first_w, shift)
        slope = lower_gradient(fixed.lower, alpha, train)
        last_w = settled(slope, first_w, w, 2 * count + number, _JITTER * moves)
        force = jax.grad(fixed.outer)(last_w.x, alpha, valid)
        hvp = hessian_operator(fixed.lower, last_w.x, alpha, train)[1]
        last_q = settled(lambda q: optax.tree.sub(hvp(q), force), first_q, q)
        return last_w, last_q, combine(problem, last_w.x, last_q.x, alpha, train, valid)

    numbers = jnp.arange(count, dtype=jnp.uint32)
    *first, (grads, magnitudes) = system.batch(sample)(numbers)
    first_w, first_q = jax.tree.map(lambda x: x[0], first)
    definite, leak = system.definite, jnp.zeros_like(magnitudes[0])
    if dense:

        def unfelt(_):
            return _unfelt(problem, fixed, system, first_w.x, alpha, train, valid)

        otherwise = match_varying_axes(unfelt, (system.flat, leak))
        axes = varying(otherwise)
        free, leak = jax.lax.cond(
            system.flat, lambda x: pcast_varying(unfelt(x), axes), lambda x: x, otherwise
        )
        definite = definite | free
    return Refined(
        w=first_w.x,
        adjoint=first_q.x,
        grads=grads,
        magnitude=magnitudes[0],
        slope_norm=first_w.residual,
        residual_norm=first_q.residual,
        definite=definite,
        leak=leak,
        settled=first_w.small & first_q.small,
        last_step=ratio_to_norm(first_w.step, first_w.x),
        floor=system.floor,
    )


def _norms(*trees: Pytree) -> jax.Array:
    """Return the 2-norms of trees of equal shapes, by one reduction for each leaf."""
    leaves = zip(*map(jax.tree.leaves, trees), strict=True)
    squares = [jnp.sum(jnp.stack(x).reshape(len(trees), -1) ** 2, axis=1) for x in leaves]
    return jnp.sqrt(sum(squares))


def _unfelt(problem, fixed, system, w, alpha, train, valid):
    """Return whether the derivatives vanish along free directions, and a bound of their term.

    The hypergradient then does not depend on these directions (a shift of all particles, or of all
    logits): both factors of their term, ``(v . n) (B' n) / curvature``, and the gradient are 0.
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
    draws = pcast_varying(uniform_hash(jnp.arange(4), flat), varying(flat))
    vectors = jnp.concatenate([draws[:2] @ system.free.T, draws[2:]])
    *free, one, other = jax.lax.map(mixed, vectors)
    pulled, crossed, whole = part(force), jnp.maximum(*free), jnp.maximum(one, other)
    # The error of eigenvectors is the rounding over the gap in the spectrum.
    eps = jnp.finfo(flat.dtype).eps
    allowed = jnp.minimum(100 * eps * system.condition, jnp.sqrt(eps))
    # A sum can cancel; its rounding is that of its terms.
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
    """Return random moves of ``w`` along the free directions, far above rounding: [count, p]."""
    flat, _ = ravel_pytree(w)
    drawn = pcast_varying(uniform_hash(4 + jnp.arange(count), flat), varying(flat))
    size = jnp.finfo(flat.dtype).eps ** 0.25 * jnp.sqrt(jnp.mean(flat**2))
    return size * ((drawn @ free) @ free.T)


def jitter(number, tree, roundings, *, entrywise=False):
    """Return ``tree`` with its last digits drawn at random; if ``entrywise``, zeros stay."""
    flat, unravel = ravel_pytree(tree)

    def one(x, uniform):
        size = jnp.abs(x) if entrywise else jnp.abs(x) + jnp.sqrt(jnp.mean(x**2))
        return x + roundings.astype(x.dtype) * jnp.finfo(x.dtype).eps * size * uniform

    return jax.tree.map(one, tree, unravel(uniform_hash(number, flat)))


def combine(problem, w, q, alpha, train, valid):
    """Return the hypergradient of ``(w, q)``, and the size of its two terms."""
    direct = jax.grad(problem.outer, 1)(w, alpha, valid)
    indirect = mixed_product(lambda w, alpha: problem.lower(w, alpha, train), w, alpha, q)
    magnitude = optax.tree.norm(direct) + optax.tree.norm(indirect)
    return optax.tree.sub(direct, indirect), magnitude


def unbounded(like: jax.Array) -> float:
    """Return infinity, or the dtype's largest number if `jax_debug_infs` would raise."""
    raising = jax.config.jax_debug_infs  # type: ignore[attr-defined]
    return float(jnp.finfo(like.dtype).max) if raising else jnp.inf


def finite_or_zero(tree: Pytree) -> Pytree:
    """Return ``tree`` with its values that are not finite replaced by 0."""
    return jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0), tree)
