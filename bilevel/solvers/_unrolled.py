"""Differentiate the optimizer's own steps."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name

from bilevel.contracts import Constraint, Inner, LowerSolver, Pytree, Stateful, params_of
from bilevel.internal import checks, memory
from bilevel.internal.precision import like_variables, narrow
from bilevel.problem.problem import mixed_product
from bilevel.problem.structure import depends_on_alpha, is_quadratic
from bilevel.solvers._manifold import fixed_point
from bilevel.solvers._mixed_mode import detached, value_and_gradient
from bilevel.solvers._optimizer import is_steep, with_limits
from bilevel.solvers._proximal_newton import curvature_by_powers
from bilevel.solvers.constrained import ProximalState, first_state
from ntk.internal.compile_cache import fresh
from ntk.internal.sharding import match_varying_axes

_SHARE = 1 / 8  # of the device's memory for the carries of all steps; beyond, blocks run twice
_SAFE = 2  # number of steps of slope 1 / eps = 1e8 that cannot overflow float32


def unrolled(
    optimizer: optax.GradientTransformation | float | LowerSolver | Callable[[Pytree], Any],
    steps: int,
    *,
    backprop: int | None = None,
    batches: Callable[[jax.Array, Pytree], Pytree] | None = None,
    average: Callable[[Pytree], jax.Array] | None = None,
) -> LowerSolver:
    """Run ``steps`` optimizer steps and differentiate through them.

    Parameters
    ----------
    optimizer : optax.GradientTransformation, float, function, or LowerSolver
        Any optax optimizer with a differentiable update. A float is the step size of plain gradient
        descent and may be traced. A function ``alpha -> optimizer`` makes rates, momenta and
        schedules hyperparameters; the kind of optimizer may not depend on ``alpha``.
        :func:`bilevel.projected` and :func:`bilevel.proximal` stand for plain projected or proximal
        gradient steps. Their step size is the inverse of the largest curvature at the start, halved
        if a step meets a larger curvature.
    steps : int
        Number of steps T.
    backprop : int, optional
        Number of last steps to differentiate; all by default. ``steps=1, backprop=1`` is
        second-order DARTS, ``backprop=0`` first-order DARTS (Liu, Simonyan & Yang 2019).
    batches : ``batches(key, data) -> batch``, optional
        Every step draws its own batch with its own key: :func:`bilevel.minibatches`, or a function
        that passes the key to a loss with dropout. The solver then takes ``(key, data)`` as its
        batch, which :func:`bilevel.search` provides.
    average : ``average(alpha) -> weights [T]``, optional
        The solution is ``sum_t weights_t w_t`` over the iterates after each step. Weights that
        depend on ``alpha`` learn when to stop. By default it is the last iterate. With
        ``backprop=K`` the weights of the first T - K iterates are not differentiated either.

    Returns
    -------
    LowerSolver
        Its state is the optimizer's. The derivative in the starting point is exact if every step is
        differentiated, and zero if ``backprop < steps``.

    Raises
    ------
    ValueError
        If ``steps`` is under 1, ``backprop`` is not in 0..steps, or ``batches`` is given with
        projected or proximal steps. At run time, if a function of ``alpha`` returns no optimizer,
        or no weights [T].

    Notes
    -----
    Time: T lower gradients, and about 2 T for the derivative (mixed mode: Kemaev et al. 2025,
    Scalable Meta-Learning via Mixed-Mode Differentiation, ICML). Memory in reverse mode: one copy
    of ``w`` and of the optimizer's state per step, and of the gradient if the update is not linear
    in it. If these exceed an eighth of the device's memory: 2 sqrt(T) copies, and T more lower
    gradients, because blocks of sqrt(T) steps run twice on the same batches. Under ``vmap`` one
    copy of the problem is counted. The activations inside a step are never stored.

    Custom derivative rules in the loss (``jax.custom_jvp``, ``jax.custom_vjp``) need not be true
    derivatives: gradient reversal and straight-through estimators get the exact derivative of the
    steps. Your own ``custom_vjp`` rule loses the saving of mixed mode.

    Examples
    --------
    >>> lower = lambda w, alpha, batch: 0.5 * jnp.sum((w - alpha) ** 2)
    >>> solver = unrolled(0.5, steps=2)
    >>> w = jnp.zeros(1)
    >>> run = lambda alpha: solver.run(lower, alpha, w, solver.init(w), None)[0]
    >>> run(jnp.ones(1)), jax.jacobian(run)(jnp.ones(1))
    (Array([0.75], dtype=float...), Array([[0.75]], dtype=float...))
    """
    steps = checks.integer("steps", steps, 1)
    last = steps if backprop is None else backprop
    if isinstance(last, bool) or last not in range(steps + 1):
        raise ValueError(f"backprop: expected None or 0 to steps={steps}, got {backprop}.")
    if batches is not None:
        checks.function("batches", batches, "(key, data) -> batch")
    constraint = optimizer.constraint if isinstance(optimizer, LowerSolver) else None
    if constraint is not None and batches is not None:
        raise ValueError("batches: expected None with projected or proximal steps, got a function.")
    rule_at, init, init_at = _rule(optimizer)

    def run(lower, alpha, w, state, batch):
        stateful = isinstance(w, Stateful)
        w, variables = w if stateful else (w, None)

        smooth = None if constraint is None else constraint.smooth

        def loss(w, variables, alpha, batch):
            if stateful:
                value, after = lower(Stateful(w, variables), alpha, batch)
                after = like_variables(after, variables)
            else:
                value, after = lower(w, alpha, batch), None
            return value if smooth is None else value + smooth(w, alpha), after

        def step(carry, alpha, batch):
            w, variables, state, number, total = carry
            if batches is not None:
                key, data = batch
                batch = batches(jax.random.fold_in(key, number), data)
            before = variables

            def value_of(w):
                return loss(w, before, alpha, batch)[0]

            def update(slope, state, w, value):
                extra_args = {"value": value, "grad": slope, "value_fn": value_of}
                return rule_at(alpha).update(slope, state, w, **extra_args)

            value = jax.eval_shape(value_of, w)
            steep = constraint is None and last > _SAFE and is_steep(update, w, state, w, value)
            given = w, before, alpha, batch
            (value, variables), slope = value_and_gradient(loss, *given, steep=steep)
            slope = checkpoint_name(slope, slope_name)
            apply = update if constraint is not None else functools.partial(with_limits, update)
            updates, state = apply(slope, state, w, value)
            # A loss can be NaN with finite gradients: a hinge passes none on.
            w = _nan_unless_loss_finite(optax.apply_updates(w, updates), value)
            if average is not None:
                weight = _averaging_weights(average, alpha, steps)[number]
                total = jax.tree.map(lambda t, x: t + weight.astype(x.dtype) * x, total, w)
            number = None if number is None else number + 1
            return w, variables, state, number, total

        def first_steps(carry, alpha, batch):
            return _repeat_scanned(lambda c: step(c, alpha, batch), carry, steps - last)

        if constraint is not None:
            w = checks.nan_unless(constraint.check(w, alpha), w)
            given = w, variables, alpha, batch
            state = _with_step_size(state, lambda *args: loss(*args)[0], *given)
        slope_name = f"gradient of {id(run)}"  # not that of a solver inside the loss
        counted = batches is not None or average is not None
        total = None if average is None else optax.tree.zeros_like(w)
        carry = (w, variables, state, jnp.zeros((), int) if counted else None, total)
        if last < steps:
            carry = detached(first_steps, carry, alpha, batch)
        final_carry = _repeat_checkpointed(lambda c: step(c, alpha, batch), carry, last, slope_name)
        w, variables, state, _, total = final_carry
        w = w if average is None else total
        return Stateful(w, variables) if stateful else w, state

    return LowerSolver(
        init,
        run,
        gradients=steps + 3 * last,
        init_at=init_at,
        batches=batches,
        stateful=True,
        inner=Inner(rule_at, steps) if constraint is None else None,
        constraint=constraint,
    )


def _rule(optimizer: Any) -> tuple[Callable, Callable, Callable | None]:
    """Return the optimizer as a function of alpha, and ``init`` and ``init_at`` of its solver."""
    if isinstance(optimizer, LowerSolver) and optimizer.constraint is not None:
        proximal = _proximal_steps(optimizer.constraint)
        return proximal, lambda w: proximal(None).init(params_of(w)), None
    if not _is_function_of_alpha(optimizer):
        if isinstance(optimizer, int | float | np.generic | np.ndarray | jax.Array):
            optimizer = optax.sgd(optimizer)
        rule = checks.gradient_transformation("optimizer", optimizer)
        return lambda alpha: rule, lambda w: rule.init(params_of(w)), None

    def init(w):
        raise ValueError("init: the optimizer depends on alpha; call solver.start(alpha, w).")

    rule_at = functools.partial(_optimizer_at, optimizer)
    return rule_at, init, lambda alpha, w: rule_at(alpha).init(params_of(w))


def _optimizer_at(make: Any, alpha: Pytree) -> optax.GradientTransformationExtraArgs:
    try:
        made = make(alpha)
    except TypeError:  # a schedule takes a number, and alpha may be a tree
        if not _is_of_optax(make):
            raise
        made = make
    if not isinstance(made, optax.GradientTransformation | optax.MultiSteps):
        raise ValueError(
            "optimizer: expected a function alpha -> optax optimizer, got "
            f"{'a schedule' if made is make else f'one that returns {checks.describe(made)}'}; "
            "a schedule of steps goes into optax.sgd(schedule)."
        )
    return checks.gradient_transformation("optimizer", made)


def _is_function_of_alpha(optimizer: Any) -> bool:
    """Return whether it is a user's function of alpha, and not an uncalled factory of optax."""
    if not callable(optimizer) or isinstance(optimizer, optax.MultiSteps):
        return False
    return not _is_of_optax(optimizer) or "<locals>" in optimizer.__qualname__


def _is_of_optax(value: Any) -> bool:
    return (getattr(value, "__module__", "") or "").startswith("optax")


def _averaging_weights(average: Callable, alpha: Pytree, steps: int) -> jax.Array:
    weights = jnp.asarray(average(alpha))
    if weights.shape != (steps,):
        raise ValueError(f"average: expected {steps} weights, got shape {weights.shape}.")
    return weights


def one_step(
    optimizer: optax.GradientTransformation | float | Callable[[Pytree], Any],
    *,
    radius: float | None = None,
) -> LowerSolver:
    r"""Take one optimizer step with its derivative in ``alpha``: second-order DARTS, at any scale.

        w' = w - xi g(w, alpha),    g = grad_w lower,    v = (dw'/dg)^T (cotangent of w')
        (dg/d alpha)^T v  =  grad_alpha (v . grad_w lower(w, alpha))
                          ~  (grad_alpha lower(w + e v) - grad_alpha lower(w - e v)) / 2e

    The first form is exact, reverse mode over one forward derivative. The second is the paper's
    central difference, Eq. (8), used if ``radius`` is given: e = radius / \|v\|. Its error is
    O(radius^2), plus roundoff of the order of 1 / radius.

    ``unrolled(optimizer, 1)`` has the same numbers, up to roundoff, about the same time and memory
    (mixed mode), and derivatives of any order and in the starting point.

    Parameters
    ----------
    optimizer : optax.GradientTransformation, float, or function
        A float is the step size of plain gradient descent. A function ``alpha -> optimizer``
        makes rates hyperparameters, as in :func:`bilevel.unrolled`.
    radius : float, optional
        Distance from ``w``, in the 2-norm, of the central difference; 0.01 in the paper. By default
        the derivative is exact.

    Returns
    -------
    LowerSolver
        Its state is the optimizer's. Reverse mode only; zero derivative in the starting point.

    Raises
    ------
    ValueError
        If ``radius`` is not positive; at run time, if the optimizer uses a line search.

    Notes
    -----
    Memory: 3 copies of ``w``, and that of one lower gradient in ``alpha`` (twice that if exact).

    References
    ----------
    Liu, Simonyan & Yang (2019), DARTS: Differentiable Architecture Search, Eqs. (7) and (8).

    Examples
    --------
    >>> lower = lambda w, alpha, batch: jnp.sum(jnp.cosh(w - alpha))
    >>> def slope(solver):
    ...     w = jnp.zeros(1)
    ...     run = lambda alpha: solver.run(lower, alpha, w, solver.init(w), None)[0][0]
    ...     return jax.jit(jax.grad(run))
    >>> alpha = jnp.ones(1)
    >>> exact = slope(unrolled(0.5, 1))(alpha)
    >>> slope(one_step(0.5))(alpha) - exact, slope(one_step(0.5, radius=0.1))(alpha) - exact
    (Array([0.], dtype=float...), Array([0.00128...], dtype=float...))
    """
    if radius is not None:
        checks.check_in_range("radius", radius, 0, math.inf)
    if isinstance(optimizer, LowerSolver):
        raise ValueError(
            "optimizer: expected an optax optimizer, a step size or a function of alpha, got a "
            "lower solver; unrolled(projected(...), 1) takes one projected step."
        )
    rule_at, init, init_at = _rule(optimizer)
    of_outer = mixed_product if radius is None else functools.partial(_central_difference, radius)

    def run(lower, alpha, w, state, batch):
        lower, hoisted = jax.closure_convert(fresh(lower), w, alpha, batch)

        def loss(w, outer, batch):
            return lower(w, outer[0], batch, *outer[1])

        def update(alpha, slope, state, w, value):
            extra_args = {"value": value, "grad": slope, "value_fn": _no_line_search}
            return rule_at(alpha).update(slope, state, w, **extra_args)

        def moved(alpha, slope, w, state, value):
            updates, state = with_limits(update, alpha, slope, state, w, value)
            return checks.nan_unless_finite(optax.apply_updates(w, updates), value), state

        def forward(outer, w, state, batch):
            value, slope = jax.value_and_grad(loss)(w, outer, batch)
            return moved(outer[0], slope, w, state, value), (value, slope, outer, w, state, batch)

        step = jax.custom_vjp(lambda *args: forward(*args)[0])

        def backward(residuals, cotangents):
            value, slope, outer, w, state, batch = residuals

            def of_slope(slope, value, alpha):
                return moved(alpha, slope, w, state, value)

            _, pull = jax.vjp(of_slope, slope, value, outer[0])
            v, of_value, of_alpha = pull(cotangents)
            outer_cotangent = of_outer(lambda w, outer: loss(w, outer, batch), w, outer, v)
            if depends_on_alpha(
                lambda _, value, __: update(outer[0], slope, state, w, value), None, value, None
            ):
                direct = jax.grad(lambda outer: of_value * loss(w, outer, batch))(outer)
                outer_cotangent = optax.tree.add(outer_cotangent, direct)
            if init_at is not None:
                outer_cotangent = optax.tree.add(outer_cotangent[0], of_alpha), outer_cotangent[1]
            return outer_cotangent, None, None, None

        step.defvjp(forward, backward)
        return step((alpha, hoisted), w, state, batch)

    inner = Inner(rule_at, 1)
    return LowerSolver(init, run, gradients=4, init_at=init_at, inner=inner)


def _no_line_search(w: Pytree) -> jax.Array:
    raise ValueError(
        "optimizer: expected one that one_step can differentiate, got a line search, whose trial "
        "steps depend on alpha; implicit(lbfgs()) has one."
    )


def _central_difference(
    radius: float, loss: Callable, w: Pytree, alpha: Pytree, v: Pytree
) -> Pytree:
    """Return ``grad_alpha (v . grad_w loss)`` by a central difference."""
    norm = optax.tree.norm(v)
    e = radius / jnp.where(norm > 0, norm, 1)
    # With a loop, XLA compiles the gradient once.
    ends = jax.lax.map(
        lambda e: jax.grad(loss, 1)(narrow(optax.tree.add_scale(w, e, v), w), alpha),
        jnp.stack([e, -e]),
    )
    return jax.tree.map(lambda x: (x[0] - x[1]) / (2 * e), ends)


def _repeat_scanned(step: Callable, carry: Pytree, times: int) -> Pytree:
    if times == 0:  # JAX would trace and differentiate a loop without iterations
        return carry
    return jax.lax.scan(
        lambda c, _: (step(c), None), match_varying_axes(step, carry), length=times
    )[0]


def _repeat_checkpointed(step: Callable, carry: Pytree, times: int, slope_name: str) -> Pytree:
    """Run ``times`` steps; the reverse pass keeps all carries, or 2 sqrt(times) of them."""
    carry = match_varying_axes(step, carry)
    # No common-subexpression barrier is needed inside a scan (jax.checkpoint's documentation).
    policy = jax.checkpoint_policies.save_only_these_names(slope_name)
    step = jax.checkpoint(step, prevent_cse=False, policy=policy)
    # The gradient of a step is kept too if the optimizer's derivative needs it.
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((carry, carry[0])))
    if times * size <= _SHARE * memory.total_memory():
        return _repeat_scanned(step, carry, times)
    # Blocks, then a shorter or equal rest that is kept, because the reverse pass begins there.
    # The second runs of blocks reuse its memory: at most 2 sqrt(times) carries together.
    length = math.isqrt(times - 1) + 1
    blocks = (times - 1) // length
    block = jax.checkpoint(
        functools.partial(_repeat_scanned, step, times=length), prevent_cse=False
    )
    return _repeat_scanned(step, _repeat_scanned(block, carry, blocks), times - blocks * length)


def _nan_unless_loss_finite(w: Pytree, value: jax.Array) -> Pytree:
    """Return ``w``, NaN if the loss is not finite. The reverse pass needs no loss for this."""
    mark = jax.lax.stop_gradient(jnp.where(jnp.isfinite(value), 0, jnp.nan))
    # Subtracting a zero leaves even the sign of a zero.
    return jax.tree.map(lambda x: x - mark.astype(x.dtype), w)


def _proximal_steps(constraint: Constraint) -> Callable[[Pytree], optax.GradientTransformation]:
    """Return ``alpha -> optimizer`` with the update ``prox(w - eta g) - w`` at constant ``eta``."""

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


def _with_step_size(
    state: ProximalState, loss: Callable, w: Pytree, *args: Pytree
) -> ProximalState:
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
