"""Residuals of a hypergradient, an estimate of its error, and a bound for quadratic losses.

The exact hypergradient of the solution map, at the solution ``w*`` and the adjoint ``q*``, is

    G* = d_alpha outer(w*) - B(w*)' q*,     H q* = d_w outer(w*),     B = d(grad_w lower)/dalpha.

The distance of a computed ``G`` to the ``G+`` of refined ``w`` and ``q`` estimates its error.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from jax.extend import core
from jax.flatten_util import ravel_pytree

from bilevel.contracts import LinearMap, Pytree
from bilevel.hypergradients.curvature import PRODUCTS, is_small, is_symmetric
from bilevel.hypergradients.refinement import NOISE, combine, finite_or_zero, refine, unbounded
from bilevel.internal.custom_rules import FORWARD_OVER_REVERSE, exact_order
from bilevel.internal.precision import coarsest_eps, uniform_hash, widen, widened
from bilevel.problem.problem import Problem, hessian_operator, mixed_product
from bilevel.problem.structure import hoist_constants, is_quadratic
from bilevel.solvers import detached
from bilevel.solvers.inverses import ratio_of_norms, ratio_to_norm
from ntk.internal import summary
from ntk.internal.products import has_coarse_products
from ntk.internal.sharding import pcast_varying, varying

TOLERANCE = 1e-2
"""A hypergradient counts as converged when its estimated error is under 1 % of its norm."""

_SPREADS = 3  # rounding of one sample, in spreads of a few samples
_SHARED = 2  # safety factor: samples can share rounding, as that of a kernel's entries
_ROUNDINGS = 3  # rounding of a sum, in units of roundoff of its terms
_DRAWS = 8  # random multiples of terms, which do not cancel
_PROBES = 16  # random products that bound the norm of the outer Hessian
_JACOBIAN_SIZE = 2**20  # entries up to which a Jacobian is formed for `error_bound`


class Info(NamedTuple):
    """The accuracy of one hypergradient. All fields are scalars.

    Attributes
    ----------
    stationarity : float
        2-norm of the lower gradient at ``w``.
    linear_residual : float
        ``|H q - v| / |v|`` with v = d outer / dw, for the adjoint ``q`` that the solver used (for
        unrolling, its truncated Neumann sum). Closed forms and forward mode expose no adjoint:
        then it is that of an independent solve for the estimate, or infinite without one.
    converged : bool
        Whether ``error_estimate`` is under 1 % of the hypergradient's norm. Its part from rounding
        counts three times.
    error_estimate : float
        Estimate of the 2-norm of ``grad - exact``, where ``exact`` is the hypergradient of the
        solution map. Infinite if an estimate is impossible.
    error_bound : float
        Upper bound of the same norm, with measured parts: for rounding, six times the spread of
        samples and some units of roundoff of all terms, and beyond 32 weights the outer Hessian's
        norm, three times that of random products. Finite for a lower loss that is quadratic in
        ``w``, with a positive definite Hessian and at most 1024 weights.
    reason : int8
        The reason for an infinite estimate, or 0. :func:`explain` gives it in words. With
        ``jax_debug_infs`` the dtype's largest number replaces infinity in all fields.
    slope : float, optional
        Central difference of the outer loss along the hypergradient, if asked for by
        ``hypergradient(..., difference=step)``.
    """

    stationarity: jax.Array
    linear_residual: jax.Array
    converged: jax.Array
    error_estimate: jax.Array
    error_bound: jax.Array
    reason: jax.Array
    slope: jax.Array | None = None

    def __repr__(self) -> str:
        names = "stationarity", "linear_residual", "error_estimate", "error_bound", "slope"
        rows = [(name, getattr(self, name)) for name in names]
        lines = [(name, summary.number(x, ".2g")) for name, x in rows if x is not None]
        return summary.table("Info", lines + error_rows(self)[-1:])


def error_rows(info: Info, size: float | None = None) -> list[tuple[str, str]]:
    """Return the lines on the error in the table of a hypergradient of norm ``size``."""
    reason, error, converged = map(
        summary.value, (info.reason, info.error_estimate, info.converged)
    )
    if reason is None or error is None or converged is None:
        return [
            ("error", summary.arrays(info.error_estimate)),
            ("converged", summary.arrays(info.converged)),
        ]
    if reason:
        return [("error", "no estimate"), ("converged", f"no: {REASONS[int(reason)]}")]
    percent = 100 * error / size if size else 0.0
    share = f", {percent:{'.2g' if percent < 10 else ',.0f'}} % of the norm" if size else ""
    verdict = "yes" if converged else "no: the error is over 1 % of the norm"
    return [("error", f"about {error:.2g}{share}"), ("converged", verdict)]


REASONS = (
    "",
    "a weight, a loss or a derivative is not finite",
    "the lower Hessian is not found positive definite, which is usual for neural networks (a "
    "saddle, weights that the loss leaves free, rounding, or too few Hessian products)",
    "Newton's steps from these weights do not come to rest: kinks, a minimum far away, or a custom "
    "derivative rule in the lower loss that is not its derivative",
    "the losses do not depend on alpha, only the solver does: their solution map is constant",
    "derivatives pass through variables, which the solution map does not know",
    "squares of the hypergradient are under the numbers' range: multiply the losses by a constant",
    "the Jacobian of the lower gradient is not symmetric: a custom derivative rule in the lower "
    "loss (custom_jvp, custom_vjp) is not its derivative, so the gradient is not one of any loss",
    "the weights' type (bfloat16, float16) is too coarse: its rounding hides Newton's last steps; "
    "pass weights in float32",
    "the lower loss asks for matrix products in TF32 or bfloat16: their rounding hides Newton's "
    "last steps; ask for the precision 'highest', or for none",
    "your own projection or proximal operator has no margins, so the active set is unknown",
    "the active set of the constraints or of the non-smooth term is not found from these weights: "
    "give the forward solver more steps or a smaller tolerance, or scale the weights",
    "nearly degenerate: rounding decides whether a constraint or a zero of the non-smooth term is "
    "active, so the two sides may have different derivatives; move alpha, or use float64",
    "an equality constraint has no free weight, so its multiplier is not determined (for an SVM, "
    "its bias): loosen the bounds, or use a regularized bias",
    "the lower loss has no curvature in a free direction of the active set, so the solution is not "
    "unique: add a ridge, or use more rows",
)
"""Reasons for an infinite estimate, indexed by ``Info.reason``."""


def explain(info: Info | None) -> str:
    """Return one sentence with the estimated error, or the reason for a missing estimate.

    Examples
    --------
    >>> import bilevel
    >>> problem = bilevel.Problem(
    ...     lower=lambda w, alpha, batch: (w - alpha) ** 3,  # at w = alpha it is flat
    ...     outer=lambda w, alpha, batch: w,
    ... )
    >>> fn = jax.jit(bilevel.hypergradient(problem, bilevel.unrolled(0.1, 1)))
    >>> explain(fn(1.0, 1.0, None, None).info)
    'no estimate of the error: the lower Hessian is not found positive definite, ...'
    """
    if info is None:
        return "no estimate of the error: diagnostics were not asked for"
    if int(info.reason):
        return f"no estimate of the error: {REASONS[int(info.reason)]}"
    verdict = "converged" if info.converged else "not converged"
    return f"{verdict}: the hypergradient's error is about {float(info.error_estimate):.1e}"


def unmapped(info: Info, reason: int) -> Info:
    """Return ``info`` without an estimate, for a derivative that is not the solution map's."""
    infinite = jnp.full_like(info.error_estimate, unbounded(info.error_estimate))
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
    check: Callable[..., Info] | None = None,
) -> Info:
    """Assess a hypergradient ``grad`` computed at ``w`` with ``adjoint``, or as ``check`` does."""
    if adjoint is not None:
        adjoint = widen(adjoint)
    problem = Problem(widened(problem.lower, w), widened(problem.outer, w))
    check = functools.partial(check or _assess_widened, problem, products, coarsest_eps(w))
    # The refined hypergradient must be free of the rounding that it measures.
    with jax.default_matmul_precision("highest"):
        return detached(check, widen(w), alpha, train, valid, grad, adjoint)


def _assess_widened(problem, products, coarse, w, alpha, train, valid, grad, adjoint) -> Info:
    fixed = Problem(
        hoist_constants(problem.lower, w, alpha, train),
        hoist_constants(problem.outer, w, alpha, valid),
    )
    slope, hvp = hessian_operator(fixed.lower, w, alpha, train)
    force = jax.grad(fixed.outer)(w, alpha, valid)
    quadratic = is_quadratic(fixed.lower, w, alpha, train)
    dense = is_small(w, quadratic)
    given = quadratic, dense, w, alpha, train, valid, adjoint
    refined = refine(problem, fixed, products, *given)
    estimated = Estimate.of(grad, refined.grads, refined.magnitude, refined.leak)
    stationarity = optax.tree.norm(slope)
    finite = jnp.isfinite(stationarity + optax.tree.norm(force) + optax.tree.norm(grad))
    settled = refined.settled & jnp.isfinite(estimated.size)
    program = jax.make_jaxpr(problem.lower)(w, alpha, train)
    asymmetric = is_asymmetric(program, hvp, w)
    rounded, multiplied = hidden_steps(program, coarse, refined.last_step)
    restless = ~settled & rounded, ~settled & multiplied, ~settled
    wrong = ~finite, asymmetric, ~refined.definite, *restless, estimated.lost
    reason = jnp.select(wrong, [1, 7, 2, 8, 9, 3, 6], 0).astype(jnp.int8)

    bound = jnp.full_like(estimated.size, unbounded(estimated.size))
    linear_residual = jnp.minimum(ratio_to_norm(refined.residual_norm, force), bound)
    if adjoint is not None:
        linear_residual = adjoint_residual(hvp, adjoint, force)
    if quadratic and dense:
        bound = _smooth_error_bound(problem, fixed, refined, alpha, train, valid, grad)
    bound = jnp.where(asymmetric, unbounded(bound), bound)
    return estimated.info(stationarity, linear_residual, reason, bound)


def adjoint_residual(operator: LinearMap, adjoint: Pytree, right: Pytree) -> jax.Array:
    """Return ``|operator(adjoint) - right| / |right|``, infinite if the adjoint is not finite."""
    error = optax.tree.sub(operator(finite_or_zero(adjoint)), right)
    ratio = ratio_of_norms(error, right)
    return jnp.where(jnp.isfinite(optax.tree.norm(adjoint)), ratio, unbounded(ratio))


class Estimate(NamedTuple):
    """The estimated error of a hypergradient, from samples of the refined one."""

    size: jax.Array
    spread: jax.Array  # of the samples
    hidden: jax.Array  # rounding of terms that may nearly cancel, which the samples share
    norm: jax.Array  # of the hypergradient
    lost: jax.Array  # bool: squares underflow

    @classmethod
    def of(cls, grad: Pytree, samples: Pytree, magnitude: jax.Array, more: chex.Numeric = 0.0):
        """Return the estimate; ``magnitude`` is the size of the terms, ``more`` is added."""
        better = jax.tree.map(lambda g: g.mean(0), samples)
        deviations = jax.tree.map(lambda g, mean: g - mean[None], samples, better)
        spread = optax.tree.norm(deviations) / jnp.sqrt(len(jax.tree.leaves(samples)[0]) - 1)
        change = optax.tree.norm(optax.tree.sub(grad, better))
        hidden = NOISE * jnp.finfo(change.dtype).eps * magnitude
        size = jnp.maximum(change, spread) + hidden + more
        # Squares underflow if a nonzero hypergradient has a norm of about 0.
        limits = jnp.finfo(magnitude.dtype)
        least = (float(limits.tiny) / float(limits.eps)) ** 0.5
        lost = (magnitude < least) & jnp.any(ravel_pytree((grad, better))[0] != 0)
        return cls(size, spread, hidden, optax.tree.norm(grad), lost)

    def info(
        self,
        stationarity: jax.Array,
        linear_residual: jax.Array,
        reason: jax.Array,
        bound: jax.Array,
    ) -> Info:
        """Return the information on the hypergradient; ``bound`` is without rounding."""
        # The refined hypergradient in the bound is one sample: rounding moves it like the others.
        rounding = _SHARED * (self.hidden + _SPREADS * self.spread)
        rounded = (1 + NOISE * jnp.finfo(bound.dtype).eps) * bound + rounding
        far = jnp.full_like(self.size, unbounded(self.size))
        estimate = jnp.where(reason == 0, self.size, far)
        return Info(
            stationarity=stationarity,
            linear_residual=linear_residual,
            # A few samples give the spread of rounding up to a factor of 2 or 3. Norms can
            # overflow; an infinite estimate is not below 1 % of an infinite norm.
            converged=(reason == 0) & (estimate + 2 * self.spread <= TOLERANCE * self.norm),
            error_estimate=estimate,
            error_bound=jnp.where((bound < far) & ~self.lost, rounded, far),
            reason=reason,
        )


def is_asymmetric(program: core.ClosedJaxpr, hvp: LinearMap, w: Pytree) -> jax.Array:
    """Return whether a custom rule of the lower loss makes its Hessian asymmetric."""
    if exact_order(program) == FORWARD_OVER_REVERSE:
        return jnp.array(False)
    return ~is_symmetric(hvp, w)


def hidden_steps(
    program: core.ClosedJaxpr, coarse: float, last_step: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return whether rounding of the weights, and of coarse products, can hide Newton's steps."""
    # Losses round the weights to their dtype, so Newton's steps end at that rounding.
    narrower = coarse > jnp.finfo(last_step.dtype).eps
    rounded = narrower & (last_step <= 10 * coarse)
    # Products of TF32 have 10 bits, and products of bfloat16 have 7.
    return rounded, has_coarse_products(program) & (last_step <= 10 * 2.0**-8)


def _smooth_error_bound(problem, fixed, refined, alpha, train, valid, grad) -> jax.Array:
    """Bound ``|grad - G*|`` by ``|grad - G+|`` and a bound of the refined ``G+``'s error."""
    flat, unravel = ravel_pytree(refined.w)
    if is_large_jacobian(flat, alpha):
        return jnp.full((), unbounded(flat), flat.dtype)

    def force(w):
        return ravel_pytree(jax.grad(fixed.outer)(unravel(w), alpha, valid))[0]

    def combined(pair):
        w, q = map(unravel, pair)
        return ravel_pytree(combine(problem, w, q, alpha, train, valid)[0])[0]

    pair = jnp.stack([flat, ravel_pytree(refined.adjoint)[0]])
    bend = frobenius_bound(jax.linearize(force, flat)[1], flat)
    residuals = refined.slope_norm, refined.residual_norm
    given = bend, jax.jacfwd(combined)(pair), residuals, refined.floor
    bound = quadratic_error_bound(grad, refined.grads, *given)
    return bound + rounding_of_mixed(problem, refined.w, alpha, train, refined.adjoint)


def frobenius_bound(product: Callable, like: jax.Array) -> jax.Array:
    """Bound the Frobenius norm of a linear map, for more than 32 columns by random products.

    Three times the root mean square of 16 products is less in at most 4 of 10^6 cases (rank 1).
    """
    few = like.size <= 2 * _PROBES
    vectors = jnp.eye(like.size) if few else uniform_hash(jnp.arange(_PROBES), like)
    vectors = pcast_varying(vectors.astype(like.dtype), varying(like))
    return (1 if few else 3 / _PROBES**0.5) * jnp.linalg.norm(jax.vmap(product)(vectors))


def rounding_of_mixed(problem, w, alpha, train, q) -> jax.Array:
    """Return the rounding of the product of ``q`` with the mixed derivative, by its terms."""

    def mixed(q):
        return mixed_product(lambda w, a: problem.lower(w, a, train), w, alpha, q)

    return rounding_of_terms(mixed, q)


def rounding_of_terms(pull: LinearMap, *parts: Pytree) -> jax.Array:
    """Return the rounding of ``pull`` of the sum of ``parts``, also if its terms cancel."""
    _, unravel = ravel_pytree(parts[0])
    sizes = jnp.sum(jnp.stack([jnp.abs(ravel_pytree(x)[0]) for x in parts]), axis=0)
    draws = pcast_varying(uniform_hash(jnp.arange(_DRAWS), sizes), varying(sizes))
    norms = jax.lax.map(lambda draw: optax.tree.norm(pull(unravel(draw * sizes))), draws)
    return _ROUNDINGS * jnp.finfo(sizes.dtype).eps * jnp.linalg.norm(norms) / _DRAWS**0.5


def is_large_jacobian(flat: jax.Array, alpha: Pytree) -> bool:
    """Return whether a bound would need too much memory."""
    return flat.size * ravel_pytree(alpha)[0].size > _JACOBIAN_SIZE


def quadratic_error_bound(
    grad: Pytree,
    samples: Pytree,
    bend: jax.Array,
    jacobian: jax.Array,
    residuals: tuple[jax.Array, jax.Array],
    floor: jax.Array,
) -> jax.Array:
    """Bound ``|grad - G*|`` by ``|grad - G+|`` and a bound of the refined ``G+``'s error.

    With mu (``floor``) a lower bound of the eigenvalues, |w - w*| <= |g| / mu for a quadratic, and

        |G+ - G*| <= L |w - w*| + |B| |q - q*|,
        |q - q*| <= (|H q - v| + |d^2_ww outer| |w - w*|) / mu,    L = |d_w (d_alpha outer - B'q)|,

    in Frobenius norms. ``bend`` is that of v's Jacobian, and ``jacobian`` [d, 2, p] is that of G in
    (w, q). ``residuals`` are |g| and |H q - v|. The first of ``samples`` is G+.
    """
    mu = jnp.where(floor > 0, floor, 1)
    change = optax.tree.norm(jax.tree.map(lambda g, best: g - best[0], grad, samples))
    w_error = residuals[0] / mu
    q_error = (residuals[1] + bend * w_error) / mu
    # B' is minus the derivative in q.
    turning, cross = jnp.sqrt(jnp.sum(jacobian**2, (0, 2)))
    bound = change + 2 * (turning * w_error + cross * q_error)
    return jnp.where(floor > 0, bound, unbounded(bound))
