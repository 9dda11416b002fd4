"""Differentiate a stationary point by the implicit function theorem."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.custom_derivatives import SymbolicZero

from bilevel.contracts import Constraint, Inverse, LinearMap, Loss, LowerSolver, Point, Pytree
from bilevel.internal import checks
from bilevel.internal.custom_rules import linearize_custom_rules
from bilevel.internal.precision import coarsest_eps, narrow, widen
from bilevel.solvers._manifold import System, fixed_point, manifold_system, smooth_system
from bilevel.solvers._mixed_mode import chosen, detached, merged, moving_tangents
from bilevel.solvers.constrained import ProximalState
from bilevel.solvers.inverses import Outcome, ReportingInverse, cg, solve_and_report
from bilevel.solvers.minimizers import newton
from ntk.internal.derivative_rules import custom_jvp

_STATIONARY = 1e-3  # relative size of a lower gradient that counts as stationary


class AdjointReport(NamedTuple):
    """The outcome of the last linear solve for an adjoint: scalars, 0 before the first."""

    residual: jax.Array  # |v - H q| / |v| with v = d outer / dw
    failed: jax.Array  # 1 if the adjoint q does not solve its system, else 0
    indefinite: jax.Array  # 1 if a direction without positive curvature ended the solve, else 0
    # Norm of the lower gradient at w, relative to |w| times the largest curvature that the solve
    # has met; 0 if the inverse has met none.
    stationarity: jax.Array
    moving: jax.Array  # 1 if that is over 0.1 %, or ten units of roundoff of the weights, else 0


class ImplicitState(NamedTuple):
    """State of :func:`implicit`."""

    forward: Pytree  # the forward solver's
    adjoint: Pytree  # like w: H^-1 dF/dw of the previous outer step, where the next solve starts
    report: AdjointReport  # on that solve


def implicit(forward: LowerSolver | None = None, inverse: Inverse | None = None) -> LowerSolver:
    """Apply the implicit function theorem at the solution of ``forward``.

    Differentiating ``grad_w lower(w(alpha), alpha) = 0`` gives

        dw/dalpha = -H^-1 d(grad_w lower)/dalpha,

    so a hypergradient takes one solve with the lower Hessian ``H``, for any ``forward``.

    Parameters
    ----------
    forward : LowerSolver, optional
        Any lower solver; its own derivative is not used. :func:`newton` by default.
    inverse : Inverse, optional
        How to apply ``H^-1``; :func:`bilevel.cg` by default.

    Returns
    -------
    LowerSolver
        Its state contains the forward solver's state and the last adjoint as a warm start. The
        derivative in the starting point is zero, because a solution does not depend on it. (For
        meta-learned initializations use :func:`unrolled`.)

    Raises
    ------
    ValueError
        If ``forward`` is not a lower solver or draws batches, or ``inverse`` is not an inverse, or
        it is :func:`bilevel.gram` for a constrained problem. At run time, if another solver hides
        the active set of ``forward``.

    Notes
    -----
    Derivatives of every order are those of the stationarity condition, in forward, reverse and
    nested modes, if ``inverse`` solves its system (``cg``, ``dense``). If ``forward`` stops before
    stationarity, they are those of the nearby problem ``lower(w) - <residual, w>``, which ``w``
    solves; ``info.error_estimate`` measures the difference.

    For :func:`bilevel.projected` and :func:`bilevel.proximal` the condition is the fixed point
    ``w = prox(w - eta grad_w lower)`` at the active set of ``w``, and the linear system that of the
    free directions. The derivative in the parameters of the set or term is included.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> lower = lambda w, alpha, batch: jnp.sum(0.5 * alpha * w**2 - w)
    >>> solver = implicit(newton(), cg())
    >>> w = jnp.zeros(1)
    >>> run = lambda alpha: solver.run(lower, alpha, w, solver.init(w), None)[0][0]
    >>> value, slope = jax.jit(jax.value_and_grad(run))(2.0)
    >>> round(float(value), 6), round(float(slope), 6)
    (0.5, -0.25)
    """
    forward = newton() if forward is None else checks.lower_solver("forward", forward)
    inverse = cg() if inverse is None else checks.inverse_map("inverse", inverse)
    if forward.batches is not None:
        raise ValueError(
            "forward: expected a solver of one lower problem, got one that draws batches; "
            "the implicit function theorem needs all rows, or one batch that the search draws."
        )

    is_gram = getattr(inverse, "__qualname__", "").startswith("gram.")
    if forward.constraint is not None and is_gram:
        raise ValueError(
            "inverse: expected cg, dense, neumann, nystrom or scale for a constrained problem, "
            "got gram, which does not know the active set."
        )

    def init(w):
        return ImplicitState(forward.init(w), optax.tree.zeros_like(w), no_report(w))

    def init_at(alpha, w):
        return ImplicitState(forward.start(alpha, w), optax.tree.zeros_like(w), no_report(w))

    def run(lower, alpha, w, state, batch):
        def solve(alpha, w, state, batch):
            return forward.run(lower, alpha, w, state, batch)

        w, forward_state = detached(solve, alpha, w, state.forward, batch)
        if forward.constraint is None:
            condition = _stationary(lower, w, alpha, batch)
        else:
            condition = _constrained(forward.constraint, lower, forward_state, w, alpha, batch)
        w = _with_derivative(condition, inverse, w, alpha, batch, state)
        return w, ImplicitState(forward_state, state.adjoint, state.report)

    return LowerSolver(
        init,
        run,
        init_at=init_at,
        reports=True,
        of_alpha=True,
        inner=forward.inner,
        constraint=forward.constraint,
    )


def no_report(w: Pytree) -> AdjointReport:
    """Return the report before the first solve."""
    # A weak float64 would give float32.
    dtypes = (jax.dtypes.canonicalize_dtype(x.dtype) for x in jax.tree.leaves(widen(w)))
    return AdjointReport(*jnp.zeros((5,), checks.at_least_float32(*dtypes)))


class _Condition(NamedTuple):
    """The equation of a solution, as functions of ``(w, alpha, batch, hoisted)``."""

    forcing: Callable  # its derivative in all but w changes the solution
    linearize: Callable  # returns its residual and the system of these changes
    hoisted: Pytree


def _stationary(lower: Loss, w: Pytree, alpha: Pytree, batch: Pytree) -> _Condition:
    slope, hoisted = jax.closure_convert(jax.grad(lower), w, alpha, batch)

    def forcing(w, alpha, batch, hoisted):
        return optax.tree.scale(-1, slope(w, alpha, batch, *hoisted))

    def linearize(w, alpha, batch, hoisted):
        residual, hvp = linearize_custom_rules(lambda w: slope(w, alpha, batch, *hoisted), w)
        return residual, smooth_system(lambda v: widen(hvp(narrow(v, w))))

    return _Condition(forcing, linearize, hoisted)


def _constrained(
    constraint: Constraint,
    lower: Loss,
    state: ProximalState,
    w: Pytree,
    alpha: Pytree,
    batch: Pytree,
) -> _Condition:
    """Return the condition ``w = prox(w - eta grad_w lower)`` for the active set in ``state``."""
    if not isinstance(state, ProximalState):
        raise ValueError(
            "forward: expected projected(...) or proximal(...), alone or unrolled, got one inside "
            "another solver, which hides the active set; restarted(implicit(...)) restarts it."
        )
    code, eta = jax.lax.stop_gradient((state.code, state.step))
    smooth = constraint.completed(lower)
    slope, of_slope = jax.closure_convert(jax.grad(smooth), w, alpha, batch)
    wide = widen(w)
    # Parameters may be traced values that the constraint closes over.
    own = {"prox": jax.closure_convert(constraint.prox, code, wide, alpha, eta)}
    if constraint.tangent is not None:
        own["tangent"] = jax.closure_convert(constraint.tangent, code, wide, alpha, wide)
        own["curvature"] = jax.closure_convert(constraint.curvature, code, wide, wide, alpha, wide)
    hoisted = of_slope, {name: values for name, (_, values) in own.items()}, code, eta

    def converted(of_own):

        def bound(name):
            return lambda *args: own[name][0](*args, *of_own[name])

        return constraint._replace(**{name: bound(name) for name in own})

    def forcing(w, alpha, batch, hoisted):
        of_slope, of_own, code, eta = hoisted
        g = widen(slope(w, alpha, batch, *of_slope))
        return fixed_point(converted(of_own))(code, widen(w), g, alpha, eta)

    def linearize(w, alpha, batch, hoisted):
        of_slope, of_own, code, eta = hoisted
        g, hvp = linearize_custom_rules(lambda w: slope(w, alpha, batch, *of_slope), w)
        product = lambda v: widen(hvp(narrow(v, w)))  # noqa: E731
        g, at, set_ = widen(g), widen(w), converted(of_own)
        moved = fixed_point(set_)(code, at, g, alpha, eta)
        residual = optax.tree.scale(1 / eta, optax.tree.sub(moved, at))
        return residual, manifold_system(set_, product, code, at, g, alpha, eta)

    return _Condition(forcing, linearize, hoisted)


def _with_derivative(
    condition: _Condition,
    inverse: Inverse,
    w: Pytree,
    alpha: Pytree,
    batch: Pytree,
    state: ImplicitState,
) -> Pytree:
    """Return ``w`` with the derivative of the solution of ``condition`` attached.

    The rule calls itself on the primal, so derivatives of every order use it. A reverse pass
    returns cotangents only, so the solve's report is the cotangent of ``state.report``.
    """
    hoisted = condition.hoisted
    solver, captured = _without_closure(inverse, condition, w, alpha, batch)
    condition = condition._replace(hoisted=None)  # the rule below gets them as arguments

    @custom_jvp
    def root(w, args):
        return w

    @functools.partial(root.defjvp, symbolic_zeros=True)
    def root_jvp(primals, tangents):
        w, args = primals
        w = root(w, args)
        flat, tree = jax.tree.flatten(args)
        moves, dots = moving_tangents(tangents[1])
        if not dots:
            return w, optax.tree.zeros_like(w)

        def forcing_of(*values):
            alpha, batch, hoisted, *_ = jax.tree.unflatten(tree, merged(moves, values, flat))
            return condition.forcing(w, alpha, batch, hoisted)

        forcing = widen(jax.jvp(forcing_of, chosen(moves, flat), dots)[1])
        alpha, batch, hoisted, start, captured, _ = args
        residual, system = condition.linearize(w, alpha, batch, hoisted)
        point = Point(w, alpha, batch)
        solve = functools.partial(solver, hoisted=hoisted, captured=captured)
        report_dot = tangents[1][-1]
        reports = not isinstance(report_dot[0], SymbolicZero)

        def product(b):
            v, report_part = b
            changed = system.regular(v)
            return changed, _coupled(report_part, changed)

        def solved(start):
            def run(product, b):
                size = optax.tree.norm(widen(residual))
                x, outcome = solve(_seen_by(inverse, system), b[0], start, point)
                return x, _report(outcome, size, w) if reports else ()

            return run

        b = system.before(forcing)
        x, reported = jax.lax.custom_linear_solve(
            product,
            (b, _coupled(report_dot, b) if reports else ()),
            # Only the adjoint system resembles the one of the previous outer step.
            solve=solved(None),
            transpose_solve=solved(system.after(widen(start))),
            symmetric=True,
        )
        x = _coupled(x, reported) if reports else x
        w_dot = optax.tree.add(system.direct(forcing), system.after(x))
        return w, narrow(checks.nan_unless_finite(w_dot, residual), w)

    return root(w, (alpha, batch, hoisted, state.adjoint, captured, state.report))


def _coupled(tree: Pytree, other: Pytree) -> Pytree:
    """Return ``tree``, with a derivative in ``other`` that is 0 without JAX knowing it.

    JAX transposes a linear solve only if every part of its right-hand side is differentiated.
    """
    total = sum(jnp.sum(x) for x in jax.tree.leaves(other))
    return jax.tree.map(lambda x: x + jnp.where(False, total, 0).astype(x.dtype), tree)


def _report(outcome: Outcome, slope: jax.Array, w: Pytree) -> AdjointReport:
    scale = outcome.curvature * optax.tree.norm(widen(w))
    known = scale > 0
    stationarity = jnp.where(known, slope / jnp.where(known, scale, 1), 0)
    moving = stationarity > max(_STATIONARY, 10 * coarsest_eps(w))
    numbers = outcome.residual, outcome.failed, outcome.indefinite, stationarity, moving
    return AdjointReport(*(jnp.asarray(x, slope.dtype) for x in numbers))


def _seen_by(inverse: Inverse, system: System) -> LinearMap:
    """Return the matrix of the system that ``inverse`` should get."""
    of_range = isinstance(inverse, ReportingInverse) and inverse.of_range
    return system.operator if of_range else system.regular


def _without_closure(
    inverse: Inverse, condition: _Condition, w: Pytree, alpha: Pytree, batch: Pytree
) -> tuple[Callable, list]:
    """Return ``inverse`` without the traced values it closes over (e.g. a damping), and these."""

    def apply(hvp, b, x0, point, *, hoisted, captured):
        return solve_and_report(inverse, hvp, b, x0, point)

    def apply_captured(hvp, b, x0, point, *, hoisted, captured):
        start = optax.tree.zeros_like(b) if x0 is None else x0
        return converted(*point, hoisted, b, start, *captured)

    def solve(w, alpha, batch, hoisted, b, x0):
        system = condition.linearize(w, alpha, batch, hoisted)[1]
        return solve_and_report(inverse, _seen_by(inverse, system), b, x0, Point(w, alpha, batch))

    wide = widen(w)
    given = w, alpha, batch, condition.hoisted, wide, wide
    converted, captured = jax.closure_convert(solve, *given)
    return (apply_captured if captured else apply), captured


def remember(state: Pytree, adjoint: Pytree) -> Pytree:
    """Return ``state`` with ``adjoint`` as the next warm start, if any; 0 after a failed solve."""
    if not isinstance(state, ImplicitState):
        return state
    failed = state.report.failed > 0
    start = jax.tree.map(lambda x: jnp.where(failed, jnp.zeros_like(x), x), adjoint)
    return state._replace(adjoint=start)


def report_of(state: Pytree) -> AdjointReport | None:
    """Return the report in a solver's state, or None."""
    return getattr(state, "report", None)


def with_report(state: Pytree, report: AdjointReport | None) -> Pytree:
    """Return ``state`` with this report, unless it is None."""
    return state if report is None else state._replace(report=report)
