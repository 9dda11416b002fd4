"""How wrong a hypergradient is: residuals, an error estimate, and a bound for quadratics.

The exact hypergradient of the solution map, at the solution ``w*`` and the adjoint ``q*``, is

    G* = d_alpha outer(w*) - B(w*)' q*,     H q* = d_w outer(w*),     B = d(grad_w lower)/dalpha.

A computed ``G`` stands on an inexact ``w`` and an inexact ``q``. Both are refined by Newton steps,
whose solves know the smallest curvature (:mod:`bilevel.hypergradients.curvature`), until they stay.
The refined ``G+`` is much closer to ``G*``, so ``|G - G+|`` estimates ``|G - G*|``. How far
rounding moves ``G+`` is measured too: from starts that differ in the last digits only. For a lower
loss quadratic in ``w`` the smallest eigenvalue turns the residuals that are left into a bound.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from bilevel.contracts import Pytree
from bilevel.hypergradients.curvature import (
    PRODUCTS,
    curvature,
    hessian_eigenpairs,
    is_small,
    is_symmetric,
)
from bilevel.internal.custom_rules import FORWARD_OVER_REVERSE, exact_order
from bilevel.internal.decomposition_order import after
from bilevel.internal.meshes import do_while, pcast_varying, repeat_step, varying
from bilevel.internal.precision import coarsest_eps, mixed_bits, widen, widened
from bilevel.problem.hoist import hoist_constants
from bilevel.problem.problem import Problem, hessian_operator, lower_gradient, mixed_product
from bilevel.problem.structure import is_quadratic
from bilevel.solvers import detached
from bilevel.solvers.minimizers import local_newton

TOLERANCE = 1e-2
"""A hypergradient counts as converged when its estimated error is under 1 % of its norm."""

_NOISE = 10  # the rounding error of a hypergradient, in roundings of its terms: 0.3 to 35 measured
_NEWTON_STEPS = 20  # most steps towards the solution, where the lower loss is not quadratic
_REFINEMENTS = 8  # most Newton steps that refine w, and that refine q
_SAMPLES = 8  # of the hypergradient, to see how far rounding moves it
_COSTLY_SAMPLES = 3  # the same where each sample takes an iterative solve or two
_BOUND_SIZE = 1024  # weights up to which the Hessian is formed for `error_bound`


class Info(NamedTuple):
    """What is known about one hypergradient's accuracy. All scalars.

    Attributes
    ----------
    stationarity : 2-norm of the lower gradient at ``w``.
    linear_residual : ``|H q - v| / |v|``, v = d outer / dw, for the adjoint ``q`` that the solver
        effectively used: an unrolled solver has one too, the truncated Neumann sum it computes.
        For a closed form and in forward mode there is none to read off; it is then that of the
        independent solve the estimate makes, infinite where it makes none.
    converged : bool, whether ``error_estimate`` is under 1 % of the hypergradient's norm, its part
        from rounding counted three times.
    error_estimate : estimate of the 2-norm of ``grad - exact`` for the hypergradient of the
        solution map; infinite where none can be made.
    error_bound : upper bound of the same, up to rounding, for a lower loss quadratic in ``w`` with
        a positive definite Hessian and at most 1024 weights; infinite elsewhere.
    reason : int8, why the estimate is infinite, 0 where it is not; in words: :func:`explain`.
        With ``jax_debug_infs`` the dtype's largest number stands for infinity in all fields.
    slope : central difference of the outer loss along the hypergradient, if
        ``hypergradient(..., difference=step)`` asked for it, else None. It is near the norm of the
        hypergradient if that is the slope of the loss over such a step.
    """

    stationarity: jax.Array
    linear_residual: jax.Array
    converged: jax.Array
    error_estimate: jax.Array
    error_bound: jax.Array
    reason: jax.Array
    slope: jax.Array | None = None


REASONS = (
    "",
    "a weight, a loss or a derivative is not finite",
    "the lower Hessian is not found positive definite: a saddle, directions in which the weights "
    "are free, curvature lost in rounding, or more Hessian products needed than were allowed",
    "Newton's steps from these weights do not come to rest: kinks, a minimum far away, or a custom "
    "derivative rule in the lower loss that is not its derivative",
    "the losses do not depend on alpha, only the solver does: their solution map is constant",
    "derivatives pass through variables, which the solution map does not know",
    "squares of the hypergradient are under the numbers' range: multiply the losses by a constant",
    "the Jacobian of the lower gradient is not symmetric: a custom derivative rule in the lower "
    "loss (custom_jvp, custom_vjp) is not its derivative, so the gradient is not one of any loss",
    "the weights' type (bfloat16, float16) is too coarse: its rounding hides Newton's last steps; "
    "pass weights in float32",
)
"""By ``Info.reason``: why there is no estimate."""


def explain(info: Info | None) -> str:
    """One sentence: the estimated error, or why there is none.

    Examples
    --------
    >>> import bilevel
    >>> problem = bilevel.Problem(
    ...     lower=lambda w, alpha, batch: jnp.sum((w[0] - alpha) ** 2),
    ...     outer=lambda w, alpha, batch: jnp.sum(w),
    ... )
    >>> fn = jax.jit(bilevel.hypergradient(problem, bilevel.implicit()))
    >>> explain(fn(jnp.ones(()), jnp.zeros(2), None, None).info)
    'no estimate of the error: the lower Hessian is not found positive definite: ...'
    """
    if info is None:
        return "no estimate of the error: diagnostics were not asked for"
    if int(info.reason):
        return f"no estimate of the error: {REASONS[int(info.reason)]}"
    verdict = "converged" if info.converged else "not converged"
    return f"{verdict}: the hypergradient's error is about {float(info.error_estimate):.1e}"


def unmapped(info: Info, reason: int) -> Info:
    """``info`` for a derivative that is not the solution map's: no estimate, for this reason."""
    infinite = jnp.full_like(info.error_estimate, _unbounded(info.error_estimate))
    no = jnp.zeros_like(info.converged)
    return info._replace(
        converged=no,
        error_estimate=infinite,
        error_bound=infinite,
        reason=jnp.full_like(info.reason, reason),
    )


def assess(
    problem: Problem,
    w: Pytree,
    alpha: Pytree,
    train: Pytree,
    valid: Pytree,
    grad: Pytree,
    adjoint: Pytree | None,
    products: int = PRODUCTS,
) -> Info:
    """Assess a hypergradient ``grad`` computed at ``w`` with ``adjoint`` (None: unknown).

    Cost: the Hessian's decomposition up to 512 weights; beyond, some five solves of at most
    ``products`` Hessian products, and one only where the Hessian is not found positive definite.
    Nothing here is differentiated.
    """
    if adjoint is not None:
        adjoint = widen(adjoint)
    problem = Problem(widened(problem.lower, w), widened(problem.outer, w))
    check, w = functools.partial(_assess_widened, problem, products, coarsest_eps(w)), widen(w)
    return detached(check, w, alpha, train, valid, grad, adjoint)


def _assess_widened(problem, products, coarse, w, alpha, train, valid, grad, adjoint) -> Info:
    fixed = Problem(
        hoist_constants(problem.lower, w, alpha, train),
        hoist_constants(problem.outer, w, alpha, valid),
    )
    slope, hvp = hessian_operator(fixed.lower, w, alpha, train)
    force = jax.grad(fixed.outer)(w, alpha, valid)
    solved = after((grad, adjoint), w)
    refined = _refine(problem, fixed, products, solved, alpha, train, valid, grad, adjoint)
    better = jax.tree.map(lambda g: g.mean(0), refined.grads)
    deviations = jax.tree.map(lambda g, mean: g - mean[None], refined.grads, better)
    spread = optax.tree.norm(deviations) / jnp.sqrt(_sample_count(w) - 1)
    change = optax.tree.norm(optax.tree.sub(grad, better))
    # The rounding of two terms that may nearly cancel.
    noise = _NOISE * jnp.finfo(change.dtype).eps
    hidden = noise * refined.magnitude
    estimate = jnp.maximum(change, spread) + hidden + refined.leak
    stationarity = optax.tree.norm(slope)
    finite = jnp.isfinite(stationarity + optax.tree.norm(force) + optax.tree.norm(grad))
    settled = refined.settled & jnp.isfinite(estimate)
    lost = _squares_lost(refined.magnitude, (grad, better))
    asymmetric = jnp.array(False)
    if exact_order(jax.make_jaxpr(problem.lower)(w, alpha, train)) != FORWARD_OVER_REVERSE:
        asymmetric = ~is_symmetric(hvp, w)
    # Losses round the weights to their type: Newton's steps end at that rounding.
    narrower = coarse > jnp.finfo(change.dtype).eps
    rounded = ~settled & narrower & (refined.last_step <= 10 * coarse)
    wrong = ~finite, asymmetric, ~refined.definite, rounded, ~settled, lost
    reason = jnp.select(wrong, [1, 7, 2, 8, 3, 6], 0).astype(jnp.int8)
    estimate = jnp.where(reason == 0, estimate, _unbounded(estimate))

    if adjoint is None:
        linear_residual = refined.linear_residual
    else:
        known = jnp.isfinite(optax.tree.norm(adjoint))
        rest = optax.tree.sub(hvp(_finite_or_zero(adjoint)), force)
        ratio = _ratio_to_norm(optax.tree.norm(rest), force)
        linear_residual = jnp.where(known, ratio, _unbounded(ratio))
    bound = _quadratic_error_bound(problem, fixed, refined, alpha, train, valid, grad)
    return Info(
        stationarity=stationarity,
        linear_residual=linear_residual,
        # Of a few samples of rounding, the spread is known to a factor of two or three. Norms
        # overflow: an infinite estimate is not under 1 % of an infinite norm.
        converged=(reason == 0) & (estimate + 2 * spread <= TOLERANCE * optax.tree.norm(grad)),
        error_estimate=estimate,
        error_bound=jnp.where(
            (bound < _unbounded(bound)) & ~lost & ~asymmetric,
            (1 + noise) * bound + hidden,
            _unbounded(bound),
        ),
        reason=reason,
    )


def _unbounded(like: jax.Array) -> float:
    """Infinity; the largest number of the dtype if `jax_debug_infs` would raise at infinity."""
    raising = jax.config.jax_debug_infs  # type: ignore[attr-defined]
    return float(jnp.finfo(like.dtype).max) if raising else jnp.inf


def _squares_lost(magnitude: jax.Array, grads: Pytree) -> jax.Array:
    """Whether norms of what is not 0 are 0, or nearly so, for the range of squares."""
    limits = jnp.finfo(magnitude.dtype)
    least = (float(limits.tiny) / float(limits.eps)) ** 0.5
    return (magnitude < least) & jnp.any(ravel_pytree(grads)[0] != 0)


def _finite_or_zero(tree: Pytree) -> Pytree:
    return jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0), tree)


def _ratio_to_norm(size: jax.Array, whole: Pytree) -> jax.Array:
    norm = optax.tree.norm(whole)
    return size / jnp.where(norm > 0, norm, 1)


# ------------------------------------------------------------------------------ the refinement


class _Refined(NamedTuple):
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


def _refine(problem, fixed, products, w, alpha, train, valid, grad, adjoint) -> _Refined:
    """``fixed``: the problem at this alpha, for all but derivatives in alpha."""
    # Sensitivities to weights without a gradient overflow; Newton's steps begin at 0 there.
    q = optax.tree.zeros_like(w) if adjoint is None else _finite_or_zero(adjoint)
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


def _sample_count(w) -> int:
    return _SAMPLES if is_small(w) else _COSTLY_SAMPLES


def _unknown_refinement(w, q, alpha) -> _Refined:
    """Placeholders, without NaN for `jax_debug_nans`: ``definite`` says that nothing is known."""
    missing = jax.tree.map(lambda a: jnp.zeros((_sample_count(w), *a.shape), a.dtype), alpha)
    zero, no = jnp.zeros_like(optax.tree.norm(w)), jnp.array(False)
    unsolved = jnp.full_like(zero, _unbounded(zero))
    return _Refined(w, q, missing, zero, unsolved, no, zero, no, zero, None)


def _refine_solution(problem, fixed, system, near, w, q, alpha, train, valid, grad) -> _Refined:
    """``near`` and ``q`` refined until they stay, and the hypergradients around them."""
    slope_of = lower_gradient(fixed.lower, alpha, train)
    rounding = jnp.finfo(system.lowest.dtype).eps * system.condition
    # The decomposition's solves are cheap, but of soft directions only as good as their curvature.
    enough, rounds = (0.0, 2) if is_small(near) else (1e-4, 1)
    count = _sample_count(near)

    def newton_step(w):
        return system.solve(slope_of(w))

    def adjoint_residual(w):
        _, hvp = hessian_operator(fixed.lower, w, alpha, train)
        force = jax.grad(fixed.outer)(w, alpha, valid)
        return lambda q: optax.tree.sub(hvp(q), force), force

    near, w_settled, last_step = _settle(newton_step, near, w, rounding, enough)
    residual_of, force = adjoint_residual(near)
    q, q_settled, _ = _settle(lambda q: system.solve(residual_of(q)), q, q, rounding, enough)
    better, magnitude = _combine(problem, near, q, alpha, train, valid)
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
        return _combine(problem, w_near, q_near, alpha, train, valid)[0]

    change = optax.tree.norm(optax.tree.sub(grad, better))
    grads = jax.lax.cond(
        # Where solves are cheap, the samples are.
        is_small(near) | (10 * rounding * magnitude > change),
        lambda: jax.lax.map(sample, jnp.arange(count, dtype=jnp.uint32)),
        lambda: jax.tree.map(lambda g: jnp.stack([g] * count), better),
    )
    return _Refined(
        w=near,
        adjoint=q,
        grads=grads,
        magnitude=magnitude,
        linear_residual=_ratio_to_norm(optax.tree.norm(residual_of(q)), force),
        definite=definite,
        leak=leak,
        settled=w_settled & q_settled,
        last_step=_ratio_to_norm(last_step, near),
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
    least = _NOISE * eps * system.condition * system.lowest
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
        kept = after < size
        x = jax.tree.map(lambda a, b: jnp.where(kept, a - b, a), x, d)
        return x, jnp.where(kept, after, size), size, k + 1

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


def _combine(problem, w, q, alpha, train, valid):
    """The hypergradient of ``(w, q)``, and the size of its two terms."""
    direct = jax.grad(problem.outer, 1)(w, alpha, valid)
    indirect = mixed_product(lambda w, alpha: problem.lower(w, alpha, train), w, alpha, q)
    magnitude = optax.tree.norm(direct) + optax.tree.norm(indirect)
    return optax.tree.sub(direct, indirect), magnitude


def _quadratic_error_bound(problem, fixed, refined, alpha, train, valid, grad) -> jax.Array:
    """``|grad - G+|`` plus how far ``G+``, refined by the factorised Hessian, can be from ``G*``.

    With mu the smallest Hessian eigenvalue, |w - w*| <= |g| / mu exactly for a quadratic, and

        |G+ - G*| <= L |w - w*| + |B| |q - q*|,
        |q - q*| <= (|H q - v| + |d^2_ww outer| |w - w*|) / mu,    L = |d_w (d_alpha outer - B'q)|,

    all norms Frobenius at the refined point; the factor 2 pays for products of two residuals.
    """
    w, q = refined.w, refined.adjoint
    flat, unravel = ravel_pytree(w)
    flat_alpha, unravel_alpha = ravel_pytree(alpha)
    feasible = flat.size <= _BOUND_SIZE and flat.size * flat_alpha.size <= _BOUND_SIZE**2
    if not feasible or not is_quadratic(fixed.lower, w, alpha, train):
        return jnp.full((), _unbounded(flat), flat.dtype)

    def slope(w):
        return ravel_pytree(jax.grad(fixed.lower)(unravel(w), alpha, train))[0]

    def slope_at(alpha):
        return ravel_pytree(jax.grad(problem.lower)(unravel(flat), unravel_alpha(alpha), train))[0]

    def force(w):
        return ravel_pytree(jax.grad(fixed.outer)(unravel(w), alpha, valid))[0]

    def combined(w, q):
        found = _combine(problem, unravel(w), unravel(q), alpha, train, valid)[0]
        return (ravel_pytree(found)[0],) * 2

    _, hvp = hessian_operator(fixed.lower, w, alpha, train)
    eigenvalues, vectors = refined.spectrum or hessian_eigenpairs(hvp, w)
    slack = flat.size * jnp.finfo(flat.dtype).eps * jnp.linalg.norm(eigenvalues)
    mu = eigenvalues[0] - slack

    def residual(q):
        return ravel_pytree(hvp(unravel(q)))[0] - force(flat)

    def solve(b):
        return vectors @ ((vectors.T @ b) / eigenvalues)

    flat = flat - solve(slope(flat))
    flat_q = ravel_pytree(q)[0]
    flat_q = flat_q - solve(residual(flat_q))
    turning, best = jax.jacfwd(combined, has_aux=True)(flat, flat_q)
    change = jnp.linalg.norm(ravel_pytree(grad)[0] - best)

    w_error = jnp.linalg.norm(slope(flat)) / mu
    turned = jnp.linalg.norm(jax.jacfwd(force)(flat)) * w_error
    q_error = (jnp.linalg.norm(residual(flat_q)) + turned) / mu
    cross = jnp.linalg.norm(jax.jacfwd(slope_at)(flat_alpha))
    bound = change + 2 * (jnp.linalg.norm(turning) * w_error + cross * q_error)
    return jnp.where(mu > 0, bound, _unbounded(bound))
