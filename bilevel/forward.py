"""Forward solvers: they find ``w`` only; :func:`bilevel.implicit` gives it its derivative.

``newton`` for smooth, strongly convex lower losses; ``lbfgs`` where Hessian products are dear;
``solved`` where the user, or another library, solves the lower problem.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from bilevel.checks import at_least, function, nan_unless_finite, whole
from bilevel.inverse import conjugate_gradients, largest
from bilevel.meshes import do_while, varying, while_loop
from bilevel.precision import like_start, narrow, rounding, widen, widened
from bilevel.problem import held, hessian_operator, is_quadratic
from bilevel.protocols import LowerSolver, Pytree


def newton(steps: int = 100, tol: float | None = None, cg_steps: int = 500) -> LowerSolver:
    """Newton's method with conjugate gradients and a backtracking line search: finds ``w`` only.

    For smooth, strongly convex lower losses. A quadratic one (recognised while tracing) takes one
    long step and short ones that mend its rounding; elsewhere the linear solves start loose and
    tighten with the gradient. Use it inside :func:`bilevel.implicit`.

    Parameters
    ----------
    steps : int
        Most Newton steps; it stops sooner at ``tol`` or when nothing shrinks any more.
    tol : float, optional
        Stationarity ``|g|`` relative to ``|g| + |H w|`` at the start, and the last step relative to
        ``w``: where directions are soft, a small gradient alone says little. 1e-9 in float64, one
        rounding in narrower types by default.
    cg_steps : int
        Most Hessian products per Newton step.

    Returns
    -------
    LowerSolver

    Raises
    ------
    ValueError
        If ``steps`` or ``cg_steps`` is under 1, or ``tol`` negative.

    Notes
    -----
    Memory: 8 copies of ``w``. Nocedal & Wright (2006), Algorithm 7.1.

    Examples
    --------
    >>> solver = newton()
    >>> lower = lambda w, alpha, batch: jnp.cosh(w - alpha).sum()
    >>> w = jnp.zeros(1)
    >>> solver.run(lower, jnp.ones(1), w, (), None)[0].round(4)
    Array([1.], dtype=float...)
    """
    steps, cg_steps = whole("steps", steps, 1), whole("cg_steps", cg_steps, 1)
    if tol is not None:
        at_least("tol", tol, 0)

    def run(lower, alpha, w, state, batch):
        relative = _stationarity_tolerance(w) if tol is None else tol
        own, w, lower = w, widen(w), widened(lower, w)
        lower = held(lower, w, alpha, batch)
        exact = is_quadratic(lower, w, alpha, batch)
        lower, slope, scale = _in_own_units(lower, w, alpha, batch)
        target = relative * scale

        def loss(w):
            return lower(w, alpha, batch)

        def unfinished(carry):
            *_, size, moved, k, progress = carry
            far = (size > target) | (moved > relative)
            return (k < steps) & far & (size > 0) & progress

        def step(carry):
            w, value, slope, size, moved, k, _ = carry
            _, hvp = hessian_operator(lower, w, alpha, batch)
            forcing = 0.0 if exact else jnp.minimum(0.1, jnp.sqrt(size / scale))
            # At the target, what is left of the gradient hides soft directions under its rounding.
            aim = jnp.maximum(0.5 * target, forcing * size)
            threshold = jnp.where(size > target, aim, min(1e-4, relative) * size)
            solved = conjugate_gradients(hvp, slope, None, steps=cg_steps, threshold=threshold)
            w_after, after = _backtrack(loss, w, value, solved.x, slope)
            moved_after = _relative_change(w, w_after)
            slope_after = jax.grad(loss)(w_after)
            size_after = optax.tree.norm(slope_after)
            # Rounding has the last word where neither the loss, the gradient nor the step shrinks.
            progress = (
                (size_after < 0.5 * size)
                | (value - after > _slack(value))
                | (moved_after < 0.5 * moved)
            )
            found = w_after, after, slope_after, size_after, moved_after
            kept = optax.tree.where(progress, found, carry[:5])
            return *kept, k + 1, progress

        size = optax.tree.norm(slope)
        infinite = jnp.full_like(size, jnp.inf)
        start = (w, loss(w), slope, size, infinite, jnp.zeros((), int), jnp.array(True))
        w, value, _, size, *_ = while_loop(unfinished, step, start)
        return narrow(nan_unless_finite(w, value, size, target), own), state

    return LowerSolver(init=lambda w: (), run=run)


def _in_own_units(
    lower: Callable, w: Pytree, alpha: Pytree, batch: Pytree
) -> tuple[Callable, Pytree, jax.Array]:
    """``lower`` times a power of 2 that brings its derivatives near 1; its slope; |g| + |H w|.

    The squares of tiny or huge slopes leave the numbers' range, and line searches try steps of
    sizes near 1. A power of 2 changes no rounding.
    """
    slope, hvp = hessian_operator(lower, w, alpha, batch)
    bent = hvp(w)
    size = jnp.maximum(largest(slope), largest(bent))
    known = (size > 0) & jnp.isfinite(size)
    exponent = jnp.clip(-jnp.frexp(jnp.where(known, size, 1))[1], -100, 100)
    unit = jnp.ldexp(jnp.ones_like(size), exponent)

    def scaled(w, alpha, batch):
        return unit * lower(w, alpha, batch)

    slope, bent = optax.tree.scale(unit, slope), optax.tree.scale(unit, bent)
    return scaled, slope, optax.tree.norm(slope) + optax.tree.norm(bent)


def _relative_change(before: Pytree, after: Pytree) -> jax.Array:
    size = optax.tree.norm(after)
    return optax.tree.norm(optax.tree.sub(after, before)) / jnp.where(size > 0, size, 1)


def _stationarity_tolerance(w: Pytree) -> float:
    # An error in w is amplified by the condition number, and again where d_w outer cancels.
    return max(1e-9, rounding(w))


def _backtrack(
    loss: Callable, w: Pytree, value: jax.Array, direction: Pytree, slope: Pytree
) -> tuple[Pytree, jax.Array]:
    """``w - t direction`` for the largest t = 1, 1/2, ... that lowers the loss; and its loss."""
    decrease = optax.tree.vdot(direction, slope)

    def moved(t):  # a loss of wider numbers than the weights' does not widen them
        return optax.tree.add_scale(w, -t.astype(decrease.dtype), direction)

    def at(t):
        return loss(moved(t))

    # A loss may be rounded far worse than its value says: sqrt(1 + r^2) - 1 is. So a decrease that
    # is small is not looked for, and the gradient has to tell.
    small = jnp.sqrt(jnp.finfo(value.dtype).eps) * jnp.abs(value)
    slack = jnp.where(decrease < small, small, _slack(value))

    def too_long(carry):
        t, trial = carry
        return ~(trial <= value - 1e-4 * t * decrease + slack) & (t > 1e-6)

    def halve(carry):
        t = carry[0] / 2
        return t, at(t)

    t, trial = do_while(too_long, halve, (jnp.full_like(value, 2), value))
    return moved(t), trial


def _slack(value: jax.Array) -> jax.Array:
    # Near the minimum a decrease drowns in the rounding of the loss.
    return 10 * jnp.finfo(value.dtype).eps * jnp.abs(value)


def lbfgs(steps: int = 200, tol: float | None = None, memory: int = 10) -> LowerSolver:
    """L-BFGS with a strong-Wolfe line search (optax): finds ``w`` only, from gradients alone.

    For smooth lower losses whose Hessian products are dear. Use it inside :func:`bilevel.implicit`.

    Parameters
    ----------
    steps : int
        Most iterations.
    tol : float, optional
        As in :func:`newton`.
    memory : int
        Pairs of differences kept, two copies of ``w`` each.

    Returns
    -------
    LowerSolver

    Raises
    ------
    ValueError
        If ``steps`` or ``memory`` is under 1, or ``tol`` negative; when run with weights that vary
        over a mesh axis.

    Examples
    --------
    >>> lower = lambda w, alpha, batch: jnp.cosh(w - alpha).sum()
    >>> lbfgs().run(lower, jnp.ones(1), jnp.zeros(1), (), None)[0].round(3)
    Array([1.], dtype=float...)
    """
    steps = whole("steps", steps, 1)
    if tol is not None:
        at_least("tol", tol, 0)
    optimizer = optax.lbfgs(memory_size=whole("memory", memory, 1))

    def run(lower, alpha, w, state, batch):
        if varying(w):
            raise ValueError(
                "lbfgs: expected weights that do not vary over a mesh axis, got some that do; "
                "optax's line search needs jax.shard_map(..., check_vma=False) there, or newton()."
            )
        relative = _stationarity_tolerance(w) if tol is None else tol
        own, w, lower = w, widen(w), widened(lower, w)
        lower = held(lower, w, alpha, batch)
        lower, slope, scale = _in_own_units(lower, w, alpha, batch)
        target = relative * scale

        promotion = jax.config.jax_numpy_dtype_promotion  # type: ignore[attr-defined]

        def loss(w):
            with jax.numpy_dtype_promotion(promotion):  # optax calls it in another, below
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
        start = (w, optimizer.init(w), loss(w), slope, jnp.zeros((), int))
        w, _, value, slope, _ = while_loop(unfinished, step, start)
        return narrow(nan_unless_finite(w, value, slope, target), own), state

    return LowerSolver(init=lambda w: (), run=run)


def solved(solve: Callable[[Pytree, Pytree, Pytree], Pytree] | None = None) -> LowerSolver:
    """Already solved: the user hands in ``w*``. Use it inside :func:`bilevel.implicit`.

    Parameters
    ----------
    solve : ``solve(alpha, w, batch) -> w``, optional
        Any traceable solver, another library's included. By default ``w0`` itself is the solution.

    Returns
    -------
    LowerSolver

    Raises
    ------
    ValueError
        If ``solve`` is no function; when it runs, where it returns weights that are not of the
        shapes of ``w0``.

    Examples
    --------
    >>> lower = lambda w, alpha, batch: jnp.sum(0.5 * (w - alpha) ** 2)
    >>> import bilevel
    >>> solver = bilevel.implicit(solved(lambda alpha, w, batch: alpha))
    >>> w = jnp.zeros(1)
    >>> jax.jacobian(lambda a: solver.run(lower, a, w, solver.init(w), None)[0])(jnp.ones(1))
    Array([[1.]], dtype=float...)
    """
    if solve is not None:
        function("solve", solve, "(alpha, w, batch) -> w")

    def run(lower, alpha, w, state, batch):
        solution = w if solve is None else like_start("solve", solve(alpha, w, batch), w)
        value, slope = jax.value_and_grad(lower)(solution, alpha, batch)
        # Weights that are not finite say so themselves, and spoil a tilted loss.
        known = jnp.isfinite(optax.tree.norm(solution))
        return nan_unless_finite(solution, jnp.where(known, value, 0), slope), state

    return LowerSolver(init=lambda w: (), run=run)
