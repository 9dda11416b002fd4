"""Lower solvers: pure functions from ``alpha`` to ``w``, differentiable in ``alpha``.

``unrolled`` differentiates the optimizer's own steps. ``implicit`` differentiates the stationarity
condition ``grad_w lower(w, alpha) = 0`` at whatever ``w`` a forward solver found. ``ridge`` is the
closed form for features. Solvers that only find ``w``, for ``implicit``, are in ``forward``.

================  ==========================  =====================================================
solver            derivative                  memory, in copies of w
================  ==========================  =====================================================
``unrolled``      of T steps, exact           min(T, O(sqrt(T))); forward mode: 2
``one_step``      of one step, exact          3, however large the graph of a gradient
``implicit``      at the solution, exact      that of the inverse; 6 for ``cg``
``ridge``         closed form, exact          the features and one min(n, p)^2 matrix
================  ==========================  =====================================================
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.custom_derivatives import SymbolicZero

from bilevel.forward import newton
from bilevel.inverse import cg
from bilevel.protocols import Inverse, Loss, LowerSolver, Point, Pytree

_KEPT_STEPS = 128  # a trajectory this short, and this small, is kept whole for the reverse pass
_KEPT_BYTES = 2**26

# ----------------------------------------------------------------------------- unrolled


def unrolled(
    optimizer: optax.GradientTransformation | float, steps: int, *, backprop: int | None = None
) -> LowerSolver:
    """``steps`` optimizer steps, differentiated through.

    Parameters
    ----------
    optimizer : optax.GradientTransformation or float
        Any optax optimizer whose update is differentiable; a float is plain gradient descent with
        that step size, which may be traced.
    steps : int
        Number of steps T.
    backprop : int, optional
        How many of the last steps to differentiate: all by default. ``steps=1, backprop=1`` is
        second-order DARTS, ``backprop=0`` first-order DARTS (Liu, Simonyan & Yang 2019).

    Returns
    -------
    LowerSolver
        Its state is the optimizer's. The derivative with respect to the starting point is exact
        when every step is differentiated, and zero when ``backprop < steps``.

    Raises
    ------
    ValueError
        If ``steps`` is under 1, or ``backprop`` is not in 0..steps.

    Notes
    -----
    Time T lower gradients, and about three times that for the derivative. Memory in reverse mode:
    one copy of ``w`` and of the optimizer's state per step while the whole trajectory is short (up
    to 128 steps and 64 MiB); beyond that 2 sqrt(T) copies, in blocks of sqrt(T) steps that are run
    once more. What a step computes inside (activations) is never stored: its gradient is taken
    again when its derivative is.

    Examples
    --------
    >>> lower = lambda w, alpha, batch: 0.5 * jnp.sum((w - alpha) ** 2)
    >>> solver = unrolled(0.5, steps=2)
    >>> w = jnp.zeros(1)
    >>> run = lambda alpha: solver.run(lower, alpha, w, solver.init(w), None)[0]
    >>> run(jnp.ones(1)), jax.jacobian(run)(jnp.ones(1))
    (Array([0.75], dtype=float...), Array([[0.75]], dtype=float...))
    """
    if steps < 1:
        raise ValueError(f"steps: expected at least 1, got {steps}.")
    last = steps if backprop is None else backprop
    if not 0 <= last <= steps:
        raise ValueError(f"backprop: expected None or 0 to steps={steps}, got {backprop}.")
    if not isinstance(optimizer, optax.GradientTransformation):
        optimizer = optax.sgd(optimizer)
    optimizer = optax.with_extra_args_support(optimizer)

    def run(lower, alpha, w, state, batch):
        def step(carry, alpha, batch):
            w, state = carry
            value, slope = jax.value_and_grad(lower)(w, alpha, batch)
            updates, state = optimizer.update(
                slope, state, w, value=value, grad=slope, value_fn=lambda w: lower(w, alpha, batch)
            )
            return optax.apply_updates(w, updates), state

        def first_steps(carry, alpha, batch):
            return _repeat(lambda c: step(c, alpha, batch), carry, steps - last)

        carry = (w, state)
        if last < steps:
            carry = detached(first_steps, carry, alpha, batch)
        return _repeat_checkpointed(lambda c: step(c, alpha, batch), carry, last)

    return LowerSolver(init=optimizer.init, run=run)


def one_step(
    optimizer: optax.GradientTransformation | float, *, radius: float | None = None
) -> LowerSolver:
    r"""One optimizer step and its derivative in ``alpha``, for large networks: second-order DARTS.

        w' = w - xi g(w, alpha),    g = grad_w lower,    v = (dw'/dg)^T (cotangent of w')
        (dg/d alpha)^T v  =  grad_alpha (v . grad_w lower(w, alpha))
                          ~  (grad_alpha lower(w + e v) - grad_alpha lower(w - e v)) / 2e

    The first form is exact, reverse mode over one forward derivative; the second is the paper's
    central difference, Eq. (8), taken if there is a ``radius``: e = radius / \|v\|. It is wrong by
    O(radius^2), and by roundings of the order of 1 / radius.

    ``unrolled(optimizer, 1)`` has the same numbers, to rounding, and derivatives of any order and
    in the starting point; it differentiates the gradient in reverse mode once more, which for
    convolutional networks takes many times the memory.

    Parameters
    ----------
    optimizer : optax.GradientTransformation or float
        A float is plain gradient descent with that step size.
    radius : float, optional
        How far from ``w``, in the 2-norm, the gradients of the central difference are taken; the
        paper has 0.01. By default the derivative is exact.

    Returns
    -------
    LowerSolver
        Its state is the optimizer's. The derivative in the starting point is zero. Reverse mode
        only.

    Raises
    ------
    ValueError
        If ``radius`` is not positive.

    Notes
    -----
    Memory: 3 copies of ``w``, and what one lower gradient in ``alpha`` takes, exactly twice that.

    Examples
    --------
    >>> lower = lambda w, alpha, batch: jnp.sum(jnp.cosh(w - alpha))
    >>> def slope(solver):
    ...     w = jnp.zeros(1)
    ...     return jax.grad(lambda a: solver.run(lower, a, w, solver.init(w), None)[0][0])
    >>> alpha = jnp.ones(1)
    >>> exact = slope(unrolled(0.5, 1))(alpha)
    >>> slope(one_step(0.5))(alpha) - exact, slope(one_step(0.5, radius=0.1))(alpha) - exact
    (Array([0.], dtype=float...), Array([0.00128...], dtype=float...))

    References
    ----------
    Liu, Simonyan & Yang (2019), DARTS: Differentiable Architecture Search, Eqs. (7) and (8).
    """
    if radius is not None and not radius > 0:
        raise ValueError(f"radius: expected a positive number, got {radius}.")
    if not isinstance(optimizer, optax.GradientTransformation):
        optimizer = optax.sgd(optimizer)

    def run(lower, alpha, w, state, batch):
        lower, hoisted = jax.closure_convert(lower, w, alpha, batch)

        def loss(w, outer, batch):
            return lower(w, outer[0], batch, *outer[1])

        def moved(slope, w, state):
            updates, state = optimizer.update(slope, state, w)
            return optax.apply_updates(w, updates), state

        @jax.custom_vjp
        def step(outer, w, state, batch):
            return moved(jax.grad(loss)(w, outer, batch), w, state)

        def forward(outer, w, state, batch):
            slope = jax.grad(loss)(w, outer, batch)
            return moved(slope, w, state), (slope, outer, w, state, batch)

        def backward(kept, cotangents):
            slope, outer, w, state, batch = kept
            (v,) = jax.vjp(lambda slope: moved(slope, w, state), slope)[1](cotangents)
            of_outer = _mixed_product if radius is None else functools.partial(_difference, radius)
            return of_outer(lambda w, outer: loss(w, outer, batch), w, outer, v), None, None, None

        step.defvjp(forward, backward)
        return step((alpha, hoisted), w, state, batch)

    return LowerSolver(init=optimizer.init, run=run)


def _mixed_product(loss: Callable, w: Pytree, alpha: Pytree, v: Pytree) -> Pytree:
    """``grad_alpha (v . grad_w loss)``."""
    return jax.grad(lambda alpha: jax.jvp(lambda w: loss(w, alpha), (w,), (v,))[1])(alpha)


def _difference(radius: float, loss: Callable, w: Pytree, alpha: Pytree, v: Pytree) -> Pytree:
    """The same by a central difference."""
    norm = optax.tree.norm(v)
    e = radius / jnp.where(norm > 0, norm, 1)
    # A loop, so that both ends are one program.
    ends = jax.lax.map(
        lambda e: jax.grad(loss, 1)(optax.tree.add_scale(w, e, v), alpha), jnp.stack([e, -e])
    )
    return jax.tree.map(lambda x: (x[0] - x[1]) / (2 * e), ends)


class RestartedState(NamedTuple):
    """State of :func:`restarted`."""

    start: Pytree  # like w: where every run begins


def restarted(solver: LowerSolver) -> LowerSolver:
    """``solver``, begun anew from the first ``w`` at every outer step.

    A search otherwise goes on from the last weights (warm start), so that what it returns depends
    on its path. Restarted, ``w`` is the fixed algorithm ``A(alpha)`` of the papers, and the search
    minimises a well-defined function of ``alpha``. The ``w`` given to ``run`` is ignored; the
    derivative with respect to the starting point is that of the ``w`` given to ``init``.

    Examples
    --------
    >>> solver = restarted(unrolled(0.5, steps=1))
    >>> lower = lambda w, alpha, batch: 0.5 * jnp.sum((w - alpha) ** 2)
    >>> state = solver.init(jnp.zeros(1))
    >>> solver.run(lower, jnp.ones(1), jnp.full(1, 99.0), state, None)[0]
    Array([0.5], dtype=float...)
    """

    def run(lower, alpha, w, state, batch):
        return solver.run(lower, alpha, state.start, solver.init(state.start), batch)[0], state

    return LowerSolver(RestartedState, run, solver.closed_form)


def _repeat(step: Callable, carry: Pytree, times: int) -> Pytree:
    if times == 0:  # a loop that is never entered would still be traced, and differentiated
        return carry
    return jax.lax.scan(lambda c, _: (step(c), None), carry, length=times)[0]


def _repeat_checkpointed(step: Callable, carry: Pytree, times: int) -> Pytree:
    """``times`` steps; reverse mode keeps carries only, every one or one in sqrt(times)."""
    # No common-subexpression barrier is needed inside a scan (jax.checkpoint's documentation).
    step = jax.checkpoint(step, prevent_cse=False)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(carry))
    if times <= _KEPT_STEPS and times * size <= _KEPT_BYTES:
        return _repeat(step, carry, times)
    length = math.isqrt(times)
    block = jax.checkpoint(functools.partial(_repeat, step, times=length), prevent_cse=False)
    # The remainder goes first, so that no step is masked and none is wasted.
    carry = _repeat(step, carry, times % length)
    return _repeat(block, carry, times // length)


def detached(function: Callable, *args: Pytree) -> Pytree:
    """``function(*args)`` cut off from differentiation, closed-over values included.

    Stopping the inputs rather than the output keeps JAX from tracing a derivative only to throw it
    away, and lets ``function`` contain loops that have no reverse mode.
    """
    converted, hoisted = jax.closure_convert(function, *args)
    return converted(*jax.lax.stop_gradient((*args, *hoisted)))


# ----------------------------------------------------------------------------- implicit


class ImplicitState(NamedTuple):
    """State of :func:`implicit`."""

    forward: Pytree  # the forward solver's
    adjoint: Pytree  # like w: H^-1 dF/dw of the previous outer step, where the next solve starts


def implicit(forward: LowerSolver | None = None, inverse: Inverse | None = None) -> LowerSolver:
    """The implicit function theorem at the solution that ``forward`` finds.

    Differentiating ``grad_w lower(w(alpha), alpha) = 0`` gives

        dw/dalpha = -H^-1 d(grad_w lower)/dalpha,

    one solve with the lower Hessian ``H`` per hypergradient, whatever ``forward`` did.

    Parameters
    ----------
    forward : LowerSolver, optional
        Any lower solver; its own derivative is not used. :func:`newton` by default.
    inverse : Inverse, optional
        How to apply ``H^-1``; :func:`bilevel.cg` by default.

    Returns
    -------
    LowerSolver
        Its state holds the forward solver's state and the last adjoint as a warm start. The
        derivative with respect to the starting point ``w`` is zero: a solution does not depend on
        where the search for it began (for meta-learned initialisations use :func:`unrolled`).

    Notes
    -----
    Derivatives of every order are those of the stationarity condition, in forward, reverse and
    nested modes, provided ``inverse`` solves its system (``cg``, ``dense``). Where ``forward``
    stops short of stationarity they are the derivatives of the nearby problem
    ``lower(w) - <residual, w>``, whose solution ``w`` is; ``info.error_estimate`` says how much
    that matters. Cost: ``forward`` plus, per hypergradient, one linear solve.

    Examples
    --------
    >>> lower = lambda w, alpha, batch: jnp.sum(0.5 * alpha * w**2 - w)
    >>> solver = implicit(newton(), cg())
    >>> w = jnp.zeros(1)
    >>> run = lambda alpha: solver.run(lower, alpha, w, solver.init(w), None)[0][0]
    >>> alpha = jnp.array(2.0)
    >>> [round(float(f(alpha)), 6) for f in (run, jax.grad(run), jax.hessian(run))]
    [0.5, -0.25, 0.25]
    """
    forward = newton() if forward is None else forward
    inverse = cg() if inverse is None else inverse

    def init(w):
        return ImplicitState(forward.init(w), optax.tree.zeros_like(w))

    def run(lower, alpha, w, state, batch):
        def solve(alpha, w, state, batch):
            return forward.run(lower, alpha, w, state, batch)

        w, forward_state = detached(solve, alpha, w, state.forward, batch)
        w = _stationary(lower, inverse, w, alpha, batch, state.adjoint)
        return w, ImplicitState(forward_state, state.adjoint)

    return LowerSolver(init, run)


def _stationary(
    lower: Loss, inverse: Inverse, w: Pytree, alpha: Pytree, batch: Pytree, start: Pytree
) -> Pytree:
    """``w`` itself, with the derivative of the root of ``grad_w lower`` attached.

    The rule calls itself on the primal, so each further order of differentiation meets the same
    rule, and a first derivative costs a single linear solve.
    """
    slope, hoisted = jax.closure_convert(jax.grad(lower), w, alpha, batch)
    solver, captured = _without_closure(inverse, slope, hoisted, w, alpha, batch)

    @jax.custom_jvp
    def root(w, args):
        return w

    @functools.partial(root.defjvp, symbolic_zeros=True)
    def root_jvp(primals, tangents):
        w, args = primals
        w = root(w, args)
        flat, tree = jax.tree.flatten(args)
        flat_dots = jax.tree.leaves(tangents[1], is_leaf=lambda t: isinstance(t, SymbolicZero))
        moving = [not isinstance(t, SymbolicZero) for t in flat_dots]
        if not any(moving):
            return w, optax.tree.zeros_like(w)

        def slope_of(*values):
            """The lower gradient at ``w``, of the arguments that are differentiated only."""
            moved = iter(values)
            merged = [next(moved) if m else x for m, x in zip(moving, flat, strict=True)]
            alpha, batch, hoisted, *_ = jax.tree.unflatten(tree, merged)
            return slope(w, alpha, batch, *hoisted)

        def select(items):
            return tuple(x for m, x in zip(moving, items, strict=True) if m)

        _, forcing = jax.jvp(slope_of, select(flat), select(flat_dots))
        alpha, batch, hoisted, start, captured = args
        _, hvp = jax.linearize(lambda w: slope(w, alpha, batch, *hoisted), w)
        point = Point(w, alpha, batch)
        solve = functools.partial(solver, hoisted=hoisted, captured=captured)
        w_dot = jax.lax.custom_linear_solve(
            hvp,
            optax.tree.scale(-1, forcing),
            # Only the adjoint system resembles the one of the previous outer step.
            solve=lambda hvp, b: solve(hvp, b, None, point),
            transpose_solve=lambda hvp, b: solve(hvp, b, start, point),
            symmetric=True,
        )
        return w, w_dot

    return root(w, (alpha, batch, hoisted, start, captured))


def _without_closure(
    inverse: Inverse, slope: Callable, hoisted: list, w: Pytree, alpha: Pytree, batch: Pytree
) -> tuple[Callable, list]:
    """``inverse`` as a function of the traced values it closes over (a damping, say), and those.

    A custom rule may not close over values that are being differentiated. Few inverses close over
    any; only those linearise the gradient a second time.
    """

    def apply(hvp, b, x0, point, *, hoisted, captured):
        return inverse(hvp, b, x0, point)

    def apply_captured(hvp, b, x0, point, *, hoisted, captured):
        start = optax.tree.zeros_like(b) if x0 is None else x0
        return converted(*point, hoisted, b, start, *captured)

    def solve(w, alpha, batch, hoisted, b, x0):
        _, hvp = jax.linearize(lambda w: slope(w, alpha, batch, *hoisted), w)
        return inverse(hvp, b, x0, Point(w, alpha, batch))

    converted, captured = jax.closure_convert(solve, w, alpha, batch, hoisted, w, w)
    return (apply_captured if captured else apply), captured


def remember(state: Pytree, adjoint: Pytree) -> Pytree:
    """``state`` with ``adjoint`` as the next linear solve's warm start, where it keeps one."""
    return state._replace(adjoint=adjoint) if isinstance(state, ImplicitState) else state


# ----------------------------------------------------------------------------- ridge


def ridge(
    features: Callable[[Pytree, jax.Array], jax.Array], penalty: Callable[[Pytree], jax.Array]
) -> LowerSolver:
    """Ridge regression on features in closed form.

        w(alpha) = argmin_w 1/2 |Phi w - y|^2 + 1/2 penalty |w|^2,    Phi = features(alpha, x)

    Parameters
    ----------
    features : ``features(alpha, x) -> [n, p]``
    penalty : ``penalty(alpha) -> scalar >= 0``
        Or a vector [p], one penalty per weight. 0 is the ridgeless limit: least squares for
        n >= p, and the minimum-norm interpolant for n < p (full rank needed in both).

    Returns
    -------
    LowerSolver
        For batches ``(x, y)`` with ``y`` [n] or [n, c]; ``w`` is [p] or [p, c]. Primal (p x p)
        when n >= p or the penalty is a vector, else dual (n x n). It does not call the problem's
        ``lower``, which should be the loss above up to a positive factor: the hypergradient's
        ``error_estimate`` checks the closed form against it. In the ridgeless limit with n < p
        that Hessian is singular and the estimate is infinite, though the gradient is right.

    Raises
    ------
    ValueError
        If the features are not a matrix with one row per label.

    Notes
    -----
    One factorisation; its derivative reuses it. The ridgeless predictor does not change when the
    features are scaled, so its hypergradient satisfies ``alpha . grad = 0`` for features linear in
    alpha (a free test). Oymak et al. 2021, Definition 2.

    Examples
    --------
    >>> solver = ridge(lambda alpha, x: alpha * x, lambda alpha: 0.0)
    >>> batch = (jnp.array([[1.0], [1.0]]), jnp.array([2.0, 4.0]))
    >>> solver.run(None, 2.0, jnp.zeros(1), (), batch)[0]
    Array([1.5], dtype=float...)
    """

    def run(lower, alpha, w, state, batch):
        x, y = batch
        phi = features(alpha, x)
        if phi.ndim != 2 or phi.shape[0] != y.shape[0]:
            raise ValueError(
                f"features: expected a matrix with {y.shape[0]} rows, one per label, "
                f"got shape {phi.shape}."
            )
        decay = jnp.asarray(penalty(alpha), phi.dtype)
        n, p = phi.shape
        if n >= p or decay.ndim == 1:
            return _solve_gram(phi.T, decay, phi.T @ y), state
        return phi.T @ _solve_gram(phi, decay, y), state

    return LowerSolver(init=lambda w: (), run=run, closed_form=True)


def _solve_gram(a: jax.Array, decay: jax.Array, b: jax.Array) -> jax.Array:
    """Solve ``(a a' + diag(decay)) x = b`` by Cholesky, for ``decay`` scalar or vector.

    Differentiated as a linear solve with ``a`` and ``a'`` applied in turn: cheaper than through the
    factorisation, whose m x m cotangent never exists.
    """
    per_row = decay if decay.ndim == 0 or b.ndim == 1 else decay[:, None]
    matrix = a @ a.T + jnp.diag(jnp.broadcast_to(decay, a.shape[:1]))
    factor = jax.scipy.linalg.cho_factor(jax.lax.stop_gradient(matrix), lower=True)
    return jax.lax.custom_linear_solve(
        lambda v: a @ (a.T @ v) + per_row * v,
        b,
        solve=lambda _, b: jax.scipy.linalg.cho_solve(factor, b),
        symmetric=True,
    )
