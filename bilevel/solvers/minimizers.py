"""Forward solvers: they find ``w`` only; :func:`bilevel.implicit` adds its derivative."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from bilevel.contracts import Loss, LowerSolver, Pytree
from bilevel.internal.checks import check_at_least, function, integer, nan_unless_finite
from bilevel.internal.conjugate_gradients import (
    ConjugateGradients,
    largest_magnitude,
    packing,
    solve_conjugate_gradients,
)
from bilevel.internal.precision import coarsest_eps, like_start, narrow, widen, widened
from bilevel.problem.problem import hessian_operator
from bilevel.problem.structure import hoist_constants, is_quadratic
from bilevel.solvers.inverses import ratio_of_norms
from ntk.internal.sharding import varying, while_loop


def newton(steps: int = 100, tol: float | None = None, cg_steps: int = 500) -> LowerSolver:
    """Find a lower minimum by Newton's method with conjugate gradients and a line search.

    For smooth lower losses; fastest if they are strongly convex. A quadratic loss (recognized while
    tracing) takes one long step and short ones that reduce its rounding error. Use it inside
    :func:`bilevel.implicit`, which gives the derivative.

    A loss need not be convex, only bounded below. Along negative curvature the step goes that way;
    in the first iteration this is the gradient. The result is a stationary point, in practice a
    local minimum. A start with a gradient of exactly 0 is stationary already: break its symmetry.

    Parameters
    ----------
    steps : int
        Maximum number of Newton steps. Iteration stops earlier at ``tol``, or if rounding hides any
        progress.
    tol : float, optional
        Iteration stops if ``|g|``, relative to ``|g| + |H w|`` at the start, and the last step,
        relative to ``w``, are both under ``tol``. A small gradient alone does not say that ``w`` is
        near the solution in directions of low curvature. Default: 1e-9 in float64, and one unit of
        roundoff in narrower types.
    cg_steps : int
        Maximum number of Hessian products per Newton step.

    Raises
    ------
    ValueError
        If ``steps`` or ``cg_steps`` is under 1, or ``tol`` negative.

    Notes
    -----
    Memory: 8 copies of ``w``.

    References
    ----------
    Nocedal & Wright (2006), Numerical Optimization, Algorithm 7.1.

    Examples
    --------
    >>> lower = lambda w, alpha, batch: jnp.sum((w**2 - alpha) ** 2)  # a maximum at 0
    >>> w = jnp.array([0.1, -0.1])
    >>> newton().run(lower, 4.0, w, (), None)[0].round(4)
    Array([ 2., -2.], dtype=float...)
    """
    return make_newton(steps, tol, cg_steps, leaves=True)


def make_newton(steps: int, tol: float | None, cg_steps: int, leaves: bool) -> LowerSolver:
    """Return :func:`newton`; unless it ``leaves``, it takes no steps along negative curvature."""
    steps, cg_steps = integer("steps", steps, 1), integer("cg_steps", cg_steps, 1)
    if tol is not None:
        check_at_least("tol", tol, 0)

    def run(lower, alpha, w, state, batch):
        relative = _stationarity_tolerance(w) if tol is None else tol
        own, w, lower = w, widen(w), widened(lower, w)
        of_leaves = hoist_constants(lower, w, alpha, batch)
        exact = is_quadratic(of_leaves, w, alpha, batch)
        # A flat or concave quadratic loss is unbounded below.
        bound = exact or not leaves
        pack, unpack = packing(w)
        of_packed = lambda w, *rest: of_leaves(unpack(w), *rest)  # noqa: E731
        in_units, w, value, slope, scale, unit = _own_units(of_packed, pack(w), alpha, batch)
        lower_of_leaves, lower = in_units(of_leaves), in_units(of_packed)
        target = relative * scale

        def loss(w):
            return lower(w, alpha, batch)

        def moved_loss(w, length, direction):
            """Return the loss at ``w + length direction``; every leaf moves on its own device."""
            moved = optax.tree.add_scale(unpack(w), length, unpack(direction))
            return lower_of_leaves(moved, alpha, batch)

        def unfinished(carry):
            *_, size, moved, k, caution = carry
            far = (size > target) | (moved > relative)
            return (k < steps) & far & (size > 0) & (caution < _STUCK)

        def step(carry):
            w, value, slope, size, moved, k, caution = carry
            _, hvp = hessian_operator(lower, w, alpha, batch)
            forcing = 0.0 if exact else jnp.minimum(0.1, jnp.sqrt(size / scale))
            # At the target, the gradient's roundoff hides low-curvature directions.
            aim = jnp.maximum(0.5 * target, forcing * size)
            threshold = jnp.where(size > target, aim, min(1e-4, relative) * size)
            if not bound:
                threshold = jnp.where(caution == _STEEPEST, 2 * size, threshold)
            solved = solve_conjugate_gradients(
                hvp, slope, None, steps=cg_steps, threshold=threshold
            )
            convex, direction = jnp.array(True), solved.x
            if not bound:
                convex, direction = _direction(solved, slope, w, caution)
            lenient = convex & (caution < _PLAIN)
            w_after, after, lowered = _line_search(
                moved_loss, w, value, direction, slope, convex, lenient
            )
            moved_after = ratio_of_norms(optax.tree.sub(w_after, w), w_after)
            slope_after = jax.grad(loss)(w_after)
            size_after = optax.tree.norm(slope_after)
            # If neither the loss, the gradient nor the step shrinks, roundoff dominates.
            progress = (
                (size_after < 0.5 * size)
                | (value - after > _loss_roundoff(value))
                | (moved_after < 0.5 * moved)
            )
            cautious = jnp.array(_STUCK)
            if not bound:
                progress &= lowered
                cautious = jnp.where(size > target, caution + 1, _STUCK)
            candidate = w_after, after, slope_after, size_after, moved_after
            accepted = optax.tree.where(progress, candidate, carry[:5])
            return *accepted, k + 1, jnp.where(progress, 0, cautious)

        size = optax.tree.norm(slope)
        most = jnp.full_like(size, jnp.finfo(size.dtype).max)
        zero = jnp.zeros((), int)
        start = w, value, slope, size, most, zero, zero
        w, value, _, size, *_ = while_loop(unfinished, step, start)
        w = unpack(optax.tree.scale(unit, w))
        return narrow(nan_unless_finite(w, value, size, target), own), state

    return LowerSolver(init=lambda w: (), run=run)


# After a step without progress the next one is more cautious: first without the direction of
# negative curvature and with a strict line search, then along the gradient.
_PLAIN, _STEEPEST, _STUCK = 1, 2, 3


def _own_units(lower: Loss, w: Pytree, alpha: Pytree, batch: Pytree) -> tuple:
    """Return ``(in_units, w, value, slope, scale, unit)`` in units, powers of 2, near 1.

    ``in_units`` converts a loss, ``scale`` is ``|g| + |H w|``, and ``unit`` that of the weights.
    Squares of tiny or huge numbers leave the numbers' range, and line searches try steps near 1.
    """
    slope, hvp = hessian_operator(lower, w, alpha, batch)
    bent = hvp(w)
    size = jnp.maximum(largest_magnitude(slope), largest_magnitude(bent))
    exponent, limits = _exponent(size), jnp.finfo(size.dtype)
    # The distance to the minimum is slope / curvature. We multiply the Hessian by a vector of
    # size 1 / slope, so that the product is in range if the distance is.
    inverse = _power(-exponent, size)
    turned = hvp(optax.tree.scale(inverse, optax.tree.scale(inverse, slope)))
    way = -_exponent(largest_magnitude(turned))
    length = jnp.where(largest_magnitude(w) > 0, _exponent(largest_magnitude(w)), way)
    length = jnp.where(jnp.abs(length) > limits.nmant, length, 0)
    value = lower(w, alpha, batch)
    # A large constant in the loss may not overflow.
    room = limits.maxexp - 8 - jnp.maximum(_exponent(value), 0)
    unit = _power(length, size)
    of_loss = _power(jnp.minimum(-exponent - length, room), size)

    def in_units(lower):
        return lambda w, alpha, batch: of_loss * lower(optax.tree.scale(unit, w), alpha, batch)

    w, slope = optax.tree.scale(_power(-length, size), w), optax.tree.scale(of_loss * unit, slope)
    bent = optax.tree.scale(of_loss * unit, bent)
    scale = optax.tree.norm(slope) + optax.tree.norm(bent)
    return in_units, w, of_loss * value, slope, scale, unit


def _power(exponent: jax.Array, like: jax.Array) -> jax.Array:
    """Return 2 to this exponent, or the nearest normal number."""
    limits = jnp.finfo(like.dtype)
    exponent = jnp.clip(exponent, limits.minexp, limits.maxexp - 2)
    return jnp.ldexp(jnp.ones_like(like), exponent)


def _exponent(size: jax.Array) -> jax.Array:
    """Return the exponent of the power of 2 next to ``size``; 0 if ``size`` is 0 or not finite."""
    known = (size != 0) & jnp.isfinite(size)
    return jnp.frexp(jnp.where(known, size, 1))[1]


def _stationarity_tolerance(w: Pytree) -> float:
    # An error in w is amplified by the condition number, and again where d_w outer cancels.
    return max(1e-9, coarsest_eps(w))


def _direction(
    solved: ConjugateGradients, slope: Pytree, w: Pytree, caution: jax.Array
) -> tuple[jax.Array, Pytree]:
    """Return whether the loss curves up along the step of conjugate gradients, and a step."""
    newton = optax.tree.norm(solved.x) > 0
    extended = (caution < _PLAIN) & (optax.tree.norm(solved.downhill) > 0)
    length = 1 + optax.tree.norm(w)
    steepest = optax.tree.scale(length / optax.tree.norm(slope), slope)
    longer = optax.tree.add(solved.x, solved.downhill)
    # Small curvature would make the step too long. The line search can extend it again.
    size = optax.tree.norm(longer)
    longer = optax.tree.scale(jnp.minimum(1, 10 * length / jnp.where(size > 0, size, 1)), longer)
    direction = optax.tree.where(newton, solved.x, steepest)
    return newton & ~extended, optax.tree.where(extended, longer, direction)


def _line_search(
    moved_loss: Callable,
    w: Pytree,
    value: jax.Array,
    direction: Pytree,
    slope: Pytree,
    convex: jax.Array,
    lenient: jax.Array,
) -> tuple[Pytree, jax.Array, jax.Array]:
    """Return ``w - t direction``, its loss, and whether ``t`` was found.

    A ``convex`` step takes the first t = 1, 1/2, ... that lowers the loss. For other steps t grows,
    1, 2, 4, ..., while the loss falls, or shrinks until it does. A ``lenient`` search accepts a
    small increase if only a small decrease is predicted.
    """
    decrease = optax.tree.vdot(direction, slope)

    # A loss may have much more roundoff than its value suggests, e.g. sqrt(1 + r^2) - 1. So we do
    # not require small decreases, and let the gradient decide.
    small = jnp.sqrt(jnp.finfo(value.dtype).eps) * jnp.abs(value)
    slack = jnp.where(lenient & (decrease < small), small, _loss_roundoff(value))
    # Below the length `hidden`, roundoff hides the decrease.
    hidden = 0.01 * _loss_roundoff(value) / jnp.where(decrease > 0, decrease, 1)
    shortest = jnp.where(convex, 1e-6, jnp.maximum(hidden, 1e-30))

    def together(*scalars):
        """Return one array of all scalars of a trial, so that one operation writes them."""
        return jnp.stack([x.astype(value.dtype) for x in scalars])

    def unfinished(scalars):
        return scalars[-1] == 0

    def step(scalars):
        t, best_t, best, grows, *_ = scalars
        # A loss in a wider dtype does not widen the weights.
        trial = moved_loss(w, -t.astype(decrease.dtype), direction)
        enough = trial <= value - 1e-4 * t * decrease + slack
        # Roundoff may hide the first decreases.
        lower = (trial < best) | ((best == value) & (trial <= value))
        better = convex | (lower & jnp.isfinite(trial))
        best_t, best = jnp.where(better, t, best_t), jnp.where(better, trial, best)
        grows = ~convex & jnp.where(t == 1, enough & better, grows > 0)
        lowered = jnp.where(convex, enough, best_t > 0)
        ends = jnp.where(grows, ~better | (t > 1e9), (enough & better) | ~(t > shortest))
        return together(jnp.where(grows, 2 * t, t / 2), best_t, best, grows, lowered, ends)

    one = jnp.ones_like(value)
    scalars = while_loop(unfinished, step, together(one, 0 * one, value, *3 * [0 * one]))
    _, t, best, _, lowered, _ = scalars
    return optax.tree.add_scale(w, -t.astype(decrease.dtype), direction), best, lowered > 0


def _loss_roundoff(value: jax.Array) -> jax.Array:
    # Near the minimum a decrease drowns in the rounding of the loss.
    return 10 * jnp.finfo(value.dtype).eps * jnp.abs(value)


def lbfgs(steps: int = 200, tol: float | None = None, memory: int = 10) -> LowerSolver:
    """Find a lower minimum by L-BFGS with a strong-Wolfe line search (optax), from gradients alone.

    For smooth lower losses with expensive Hessian products. Use it inside :func:`bilevel.implicit`.

    Parameters
    ----------
    steps : int
        Maximum number of iterations.
    tol : float, optional
        Iteration stops if ``|g|``, relative to ``|g| + |H w|`` at the start, is below ``tol``.
        Default: 1e-9 in float64, and one unit of roundoff in narrower types.
    memory : int
        Number of stored pairs of differences, two copies of ``w`` each.

    Raises
    ------
    ValueError
        If ``steps`` or ``memory`` is under 1, or ``tol`` negative; at run time, if the weights vary
        over a mesh axis.

    Examples
    --------
    >>> lower = lambda w, alpha, batch: jnp.cosh(w - alpha).sum()
    >>> lbfgs().run(lower, jnp.ones(1), jnp.zeros(1), (), None)[0].round(3)
    Array([1.], dtype=float...)
    """
    steps = integer("steps", steps, 1)
    if tol is not None:
        check_at_least("tol", tol, 0)
    optimizer = optax.lbfgs(memory_size=integer("memory", memory, 1))

    def run(lower, alpha, w, state, batch):
        if varying(w):
            raise ValueError(
                "lbfgs: expected weights that do not vary over a mesh axis, got some that do; "
                "optax's line search needs jax.shard_map(..., check_vma=False) there, or newton()."
            )
        relative = _stationarity_tolerance(w) if tol is None else tol
        own, w, lower = w, widen(w), widened(lower, w)
        lower = hoist_constants(lower, w, alpha, batch)
        in_units, w, value, slope, scale, unit = _own_units(lower, w, alpha, batch)
        lower = in_units(lower)
        target = relative * scale

        promotion = jax.config.jax_numpy_dtype_promotion  # type: ignore[attr-defined]

        def loss(w):
            with jax.numpy_dtype_promotion(promotion):  # optax calls it under "standard", below
                return lower(w, alpha, batch)

        def unfinished(carry):
            *_, slope, k = carry
            return (k < steps) & (optax.tree.norm(slope) > target)

        def step(carry):
            w, state, value, slope, k = carry
            # Optax's L-BFGS relies on the promotion of its counters, whatever the user's setting.
            with jax.numpy_dtype_promotion("standard"):
                updates, state = optimizer.update(
                    slope, state, w, value=value, grad=slope, value_fn=loss
                )
            w = optax.apply_updates(w, updates)
            return w, state, *jax.value_and_grad(loss)(w), k + 1

        # The curvature pairs belong to one alpha: a fresh memory for each run.
        start = w, optimizer.init(w), value, slope, jnp.zeros((), int)
        w, _, value, slope, _ = while_loop(unfinished, step, start)
        w = optax.tree.scale(unit, w)
        return narrow(nan_unless_finite(w, value, slope, target), own), state

    return LowerSolver(init=lambda w: (), run=run)


def solved(solve: Callable[[Pytree, Pytree, Pytree], Pytree] | None = None) -> LowerSolver:
    """Use a lower solution that the user computes. Use it inside :func:`bilevel.implicit`.

    Parameters
    ----------
    solve : ``solve(alpha, w, batch) -> w``, optional
        Any traceable solver, also of another library. By default ``w0`` itself is the solution.

    Raises
    ------
    ValueError
        If ``solve`` is not a function; at run time, if it returns weights of other shapes than
        ``w0``.

    Examples
    --------
    >>> lower = lambda w, alpha, batch: jnp.sum(0.5 * (w - alpha) ** 2)
    >>> import bilevel
    >>> solver = bilevel.implicit(solved(lambda alpha, w, batch: alpha))
    >>> w = jnp.zeros(1)
    >>> run = lambda alpha: solver.run(lower, alpha, w, solver.init(w), None)[0]
    >>> jax.jit(jax.jacobian(run))(jnp.ones(1))
    Array([[1.]], dtype=float...)
    """
    if solve is not None:
        function("solve", solve, "(alpha, w, batch) -> w")

    def run(lower, alpha, w, state, batch):
        solution = w if solve is None else like_start("solve", solve(alpha, w, batch), w)
        value, slope = jax.value_and_grad(lower)(solution, alpha, batch)
        # If weights are not finite, a tilted loss is not either; the weights show it already.
        known = jnp.isfinite(optax.tree.norm(solution))
        return nan_unless_finite(solution, jnp.where(known, value, 0), slope), state

    return LowerSolver(init=lambda w: (), run=run)
