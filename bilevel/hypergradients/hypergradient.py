"""Compute the hypergradient ``d/dalpha outer(w*(alpha), alpha)`` and its accuracy.

It is ``jax.grad`` of ``outer`` after the solver, also in a tilt of the lower loss, ``lower + <tilt,
w>`` at ``tilt = 0``. The derivative in the tilt is minus the adjoint ``q = H^-1 d_w outer``.
"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from bilevel.contracts import Constraint, LowerSolver, Pytree, Stateful, params_of
from bilevel.hypergradients.constrained_estimate import assess_active_set
from bilevel.hypergradients.curvature import PRODUCTS
from bilevel.hypergradients.error_estimate import Info, assess, error_rows, unmapped
from bilevel.internal import checks
from bilevel.internal.custom_rules import (
    NO_FORWARD_RULE,
    REVERSE_OVER_REVERSE,
    exact_order,
    second_derivatives,
)
from bilevel.internal.precision import narrow
from bilevel.problem.problem import Problem, at_variables, split_losses
from bilevel.problem.structure import (
    check_depends_on_alpha,
    depends_on_alpha,
    leaf_names,
    leaves_used_by,
    outputs_reading,
    with_rules,
)
from bilevel.solvers import RestartedState, detached, remember, report_of, start_of, with_report
from ntk.internal import summary
from ntk.internal.compile_cache import fresh
from ntk.internal.sharding import pcast_varying, varying, with_automatic_axes


class HyperGradient(NamedTuple):
    """Result of :func:`hypergradient`."""

    value: jax.Array  # [], outer loss at the solver's w
    grad: Pytree  # like alpha
    w: Pytree  # the solver's solution
    info: Info  # accuracy; None with diagnostics=False
    aux: Pytree = None  # {"lower": ..., "outer": ...} of a Problem(has_aux=True)

    def __repr__(self) -> str:
        size, info = summary.norm(self.grad), self.info
        rows = [("outer loss", summary.number(self.value)), ("grad", summary.arrays(self.grad))]
        if size is not None:
            rows[1] = "grad", f"norm {size:.4g}, {summary.arrays(self.grad)}"
        rows += [("w", summary.arrays(self.w))]
        if info is not None:
            rows += error_rows(info, size)
        return summary.table("HyperGradient", rows)


def hypergradient(
    problem: Problem,
    solver: LowerSolver,
    *,
    mode: str = "reverse",
    diagnostics: bool = True,
    damping: float = 0.0,
    products: int | None = None,
    difference: float | None = None,
) -> Callable[[Pytree, Pytree, Pytree, Pytree], HyperGradient]:
    """Build the hypergradient function of ``problem`` with ``solver``, with an error estimate.

    Parameters
    ----------
    problem : Problem
    solver : LowerSolver
        :func:`bilevel.unrolled`, :func:`bilevel.implicit`, :func:`bilevel.ridge`, or your own. A
        solver that draws batches itself takes ``(key, data)`` for ``train``; ``info`` then refers
        to the lower problem of one more batch.
    mode : {"reverse", "forward"}
        ``"reverse"``: cost independent of dim(alpha). ``"forward"``: memory independent of the
        number of inner steps (2 dim(alpha) copies of ``w``), cost grows with dim(alpha).
    diagnostics : bool
        Whether to fill ``info``. Up to 512 weights (1,024 for a quadratic lower loss) the Hessian
        is formed and inverted; beyond, a few linear solves are made together, or a short one
        where no claim can be made. Under ``jax.jit`` unused fields cost nothing.
    damping : float
        ``info`` then refers to the solution map of ``lower + damping / 2 |w - w0|^2``; the
        hypergradient does not change. If ``lower`` has many solutions, this is for small
        ``damping`` the nearest one to ``w0``, where gradient descent in a linear model ends.
    products : int, optional
        Maximum number of Hessian products of each linear solve for ``info``. By default their cost
        is near the hypergradient's own if the solver states it, and otherwise 1,000 products.
    difference : float, optional
        A distance in ``alpha``. ``info.slope`` is then the central difference of the outer loss
        over that distance along the hypergradient, for two more runs of the solver. It is near the
        norm of the hypergradient if the derivative is a slope; with kinks (ReLU) it may not be.

    Returns
    -------
    ``fn(alpha, w0, train, valid) -> HyperGradient(value, grad, w, info, aux)``
        Pure: works under ``jit``, ``vmap`` and further differentiation, also for hyperparameters
        that the losses close over. The value's derivative in ``w0`` is exact for
        :func:`bilevel.unrolled` (all steps differentiated) and zero for :func:`bilevel.implicit`.

    Raises
    ------
    ValueError
        If ``difference`` is not positive, or given without diagnostics, or ``solver`` is
        :func:`bilevel.projected` or :func:`bilevel.proximal` alone. The returned function raises it
        while tracing:

        - if ``mode`` is unknown, or a loss is not a floating scalar;
        - if a leaf of ``alpha`` enters neither the losses nor the solver;
        - if no leaf of ``alpha`` is differentiated, e.g. with ``backprop=0`` and an outer loss
          without ``alpha``;
        - if the outer loss uses the weights only through variables that are not differentiated;
        - if reverse mode meets a loop that ends by a test, such as a line search.

    Warns
    -----
    UserWarning
        While tracing, if some leaves of ``alpha`` cannot be reached by the derivative, for example
        a step size under :func:`bilevel.implicit`. Their hypergradient is 0.

    Examples
    --------
    >>> import bilevel
    >>> x, y = jnp.eye(3), jnp.array([1.0, 2.0, 3.0])
    >>> problem = bilevel.Problem(
    ...     lower=lambda w, alpha, batch: 0.5 * jnp.sum((batch[0] @ w - batch[1]) ** 2)
    ...     + 0.5 * alpha * jnp.sum(w**2),
    ...     outer=lambda w, alpha, batch: jnp.sum((batch[0] @ w - batch[1]) ** 2),
    ... )
    >>> fn = jax.jit(bilevel.hypergradient(problem, bilevel.implicit()))
    >>> result = fn(jnp.array(1.0), jnp.zeros(3), (x, y), (x, y))  # w* = y / 2, value |y|^2 / 4
    >>> result.value, result.grad, bool(result.info.converged)
    (Array(3.5, dtype=float...), Array(3.5, dtype=float...), True)
    """
    step = stateful_hypergradient(
        problem, solver, mode=mode, diagnostics=diagnostics, damping=damping, products=products
    )

    if difference is not None:
        checks.check_in_range("difference", difference, 0, math.inf)
        if not diagnostics:
            raise ValueError("difference: expected diagnostics=True with it, got False.")
    solve = solution(problem, solver)

    def value_at(alpha, w0, train, valid):
        w, _ = solve(alpha, w0, first_state(solver, alpha, w0), train)
        return split_losses(problem).outer(w, alpha, valid)[0]

    def slope(grad, alpha, *given):
        assert difference is not None
        size = optax.tree.norm(grad)
        scale = difference / jnp.where(size > 0, size, 1)
        ends = (optax.tree.add_scale(alpha, sign * scale, grad) for sign in (1, -1))
        above, below = (value_at(narrow(end, alpha), *given) for end in ends)
        return (above - below) / (2 * difference)

    def run(alpha, w0, train, valid):
        result = step(alpha, w0, first_state(solver, alpha, w0), train, valid)[0]
        if difference is None:
            return result
        measured_slope = detached(slope, result.grad, alpha, w0, train, valid)
        return result._replace(info=result.info._replace(slope=measured_slope))

    def fn(alpha, w0, train, valid):
        checks.check_floating("alpha", alpha)
        params, _ = _split_variables(problem, w0)
        checks.check_not_empty("w0", params)
        checks.check_floating("w0", params)
        alpha, w0 = jax.tree.map(jnp.asarray, (alpha, w0))
        check_constraint(solver, alpha, w0)
        args = alpha, w0, train, valid
        like: Any = (None, alpha, w0, None, None)  # of a HyperGradient
        return with_automatic_axes(run, args, lambda: HyperGradient(*like), compiled=True)

    return fn


def stateful_hypergradient(
    problem: Problem,
    solver: LowerSolver,
    *,
    diagnostics: bool,
    mode: str = "reverse",
    damping: float = 0.0,
    products: int | None = None,
    note: Callable[[str], None] = warnings.warn,
) -> Callable:
    """Return :func:`hypergradient` as a function that takes and returns the solver's state.

    The function takes ``wanted`` too: ``wanted()`` returns for each leaf of ``alpha`` whether its
    hypergradient is used. ``note`` receives a message about leaves that the derivative misses.
    """
    if mode not in ("reverse", "forward"):
        raise ValueError(f'mode: expected "reverse" or "forward", got {mode!r}.')
    checks.check_losses("problem", problem)
    checks.lower_solver("solver", solver)
    alone = solver.constraint is not None and solver.gradients is None and not solver.reports
    if alone and mode == "reverse":
        raise ValueError(
            "solver: expected implicit(projected(...)) or unrolled(projected(...), steps), got "
            "projected(...) or proximal(...) alone, which find w without its derivative."
        )
    given = problem
    if products is None:
        products = PRODUCTS if solver.gradients is None else max(4, solver.gradients // 8)

    def step(alpha, w0, state, train, valid, wanted=None):
        batch = solver.batch(train)
        params, variables = _split_variables(given, w0)
        problem, mapped = with_rules(given, w0, alpha, batch)
        if solver.constraint is not None:
            own = leaves_used_by(_prox_of(solver.constraint), params, alpha, None)
            mapped = [x or y for x, y in zip(mapped, own, strict=True)]
        of_problem, solve = split_losses(problem), solution(problem, solver)

        def objective(alpha, tilt, report=None):
            w, new_state = solve(alpha, w0, with_report(state, report), train, tilt)
            value, above = of_problem.outer(w, alpha, valid)
            return value, (w, new_state, above)

        first = at_variables(problem, variables)
        loss = jax.eval_shape(fresh(first.lower), params, alpha, batch)
        axes = varying(loss)
        w0, state = pcast_varying((w0, state), axes)
        direct = leaves_used_by(first.outer, params, alpha, valid)
        used = [True] * len(direct) if wanted is None else wanted()
        needed = [use and not (x or y) for use, x, y in zip(used, mapped, direct, strict=True)]
        if any(needed):  # then the solver has to use them
            by_solver = leaves_used_by(lambda _, a, __: objective(a, None)[0], None, alpha, None)
            check_depends_on_alpha(
                alpha, [x and not y for x, y in zip(needed, by_solver, strict=True)]
            )

        def own_rules():
            program = jax.make_jaxpr(first.lower)(params, alpha, batch)
            return exact_order(program) == REVERSE_OVER_REVERSE

        check_variables(problem, w0, alpha, valid)

        def check_reached(reached):
            """Raise or note if leaves that only the weights lead to are not differentiated."""
            by_weights = [use and not x for use, x in zip(used, direct, strict=True)]
            missed = [x and not y for x, y in zip(by_weights, reached(), strict=True)]
            if not any(missed):
                return
            if missed == used:
                raise ValueError(_UNREACHED)
            cut = _CLOSED_FORM if solver.closed_form else _CUT
            notes = []
            for reason, of_lower in ((_BY_SOLVER, False), (cut, True)):
                names = [x and y == of_lower for x, y in zip(missed, mapped, strict=True)]
                if any(names):
                    notes.append(reason.format(leaf_names(alpha, names)))
            note(" ".join(notes))

        check = None if all(direct) or not any(used) else check_reached
        adjoint = None
        if mode == "forward":
            of_alpha = functools.partial(objective, tilt=None)
            value, (w, state, above), grad = _forward(of_alpha, alpha, check)
        else:
            tilt = pcast_varying(optax.tree.zeros_like(params), axes)
            report = report_of(state) if solver.reports else None
            with second_derivatives(own_rules):
                (value, (w, state, above)), (grad, slope, report) = _reverse(
                    objective, (alpha, tilt, report), check
                )
            state = with_report(state, jax.lax.stop_gradient(report))
            if not solver.closed_form:
                adjoint = optax.tree.scale(-1, slope)
                state = remember(state, jax.lax.stop_gradient(adjoint))
        # A NaN must not be hidden by an outer loss without w, or by a failed adjoint.
        value = checks.nan_unless_finite(value, w)
        grad = checks.nan_unless_finite(grad, value)
        info: Any = None
        if diagnostics:
            weights, variables = _split_variables(problem, w)
            centre, _ = _split_variables(problem, start_of(state, w0))
            stated = _damped_problem(at_variables(problem, variables), damping, centre)
            limit = min(products, PRODUCTS)
            with second_derivatives(own_rules):
                at = weights, alpha, batch, valid, grad, adjoint, limit
                if solver.constraint is None:
                    info = assess(stated, *at)
                else:
                    completed = Problem(solver.constraint.completed(stated.lower), stated.outer)
                    check_set = functools.partial(assess_active_set, solver.constraint)
                    info = assess(completed, *at, check_set)
            if not any((*mapped, *direct)):
                info = unmapped(info, 4)
            elif getattr(problem, "differentiated", False):
                info = unmapped(info, 5)
        aux = None
        if getattr(problem, "has_aux", False):
            aux = {"lower": of_problem.lower(w, alpha, batch)[2], "outer": above}
        return HyperGradient(value, grad, w, info, aux), state

    return step


def check_constraint(solver: Any, alpha: Pytree, w: Pytree) -> None:
    """Raise if known values of ``alpha`` make the constraint's parameters invalid."""
    if getattr(solver, "constraint", None) is not None:
        solver.constraint.check(params_of(w), alpha)


def _prox_of(constraint: Constraint) -> Callable:
    """Return what the constraint computes of ``(w, alpha, batch)``."""

    def of(w, alpha, batch):
        smooth = 0.0 if constraint.smooth is None else constraint.smooth(w, alpha)
        return constraint.prox(constraint.blank(w), w, alpha, 1.0), smooth

    return of


def solution(problem: Problem, solver: LowerSolver) -> Callable:
    """Return ``(alpha, w0, state, train, tilt=None) -> (w, state)`` for the problem's form of w."""
    losses, stateful = split_losses(problem), getattr(problem, "stateful", False)

    def solve(alpha, w0, state, train, tilt=None):
        def updating(w, alpha, batch):
            loss, variables, _ = losses.lower(w, alpha, batch)
            params = w.params if stateful else w
            return loss if tilt is None else loss + optax.tree.vdot(tilt, params), variables

        if stateful and solver.stateful:
            return solver.run(updating, alpha, w0, state, train)

        def whole(params):
            return Stateful(params, w0.variables) if stateful else params

        def lower(params, alpha, batch):
            return updating(whole(params), alpha, batch)[0]

        if stateful and isinstance(state, RestartedState):
            raise ValueError(
                "solver: expected restarted(unrolled(...)) for a stateful problem, got one whose "
                "runs have no variables: they would not begin from the first ones."
            )
        params, state = solver.run(lower, alpha, w0.params if stateful else w0, state, train)
        if not stateful:
            return params, state
        variables = updating(whole(params), alpha, solver.batch(train))[1]
        return Stateful(params, variables), state

    return solve


def _split_variables(problem: Problem, w: Pytree) -> tuple[Pytree, Pytree]:
    """Return ``params`` and ``variables``; ``w`` and None if the problem is not stateful."""
    if not getattr(problem, "stateful", False):
        return w, None
    if not isinstance(w, Stateful):
        raise ValueError(
            "w0: expected a bilevel.Stateful(params, variables), as stateful=True says, "
            f"got {checks.describe(w)}."
        )
    return w.params, w.variables


def _damped_problem(problem: Problem, damping, centre: Pytree) -> Problem:
    if isinstance(damping, float | int) and damping == 0:
        return problem

    def lower(w, alpha, batch):
        away = optax.tree.sub(w, centre)
        return problem.lower(w, alpha, batch) + 0.5 * damping * optax.tree.vdot(away, away)

    return dataclasses.replace(problem, lower=lower)


def check_variables(problem: Problem, w: Pytree, alpha: Pytree, valid: Pytree) -> None:
    """Raise for an outer loss that depends on the weights only through variables."""
    if not getattr(problem, "stateful", False) or getattr(problem, "differentiated", False):
        return
    outer = split_losses(problem).outer

    def reads(field):
        def loss(_, value, batch):
            return outer(w._replace(**{field: value}), alpha, batch)[0]

        return depends_on_alpha(loss, None, getattr(w, field), valid)

    if not reads("params") and reads("variables"):
        raise ValueError(
            "outer: expected to depend on params, got a loss of variables alone, which are not "
            "differentiated: its hypergradient would be 0. For averages of the weights: "
            "Problem(..., differentiated=True)."
        )


def first_state(solver: LowerSolver, alpha: Pytree, w: Pytree) -> Pytree:
    """Return the solver's first state. It has no derivative, so it may not depend on ``alpha``."""
    if solver.init_at is not None and depends_on_alpha(
        lambda _, alpha, __: solver.start(alpha, w), None, alpha, None
    ):
        raise ValueError(
            "solver: expected an optimizer whose state at the start does not depend on alpha, got "
            "one that keeps alpha's values there (optax.inject_hyperparams does); use them as "
            "they are, optax.sgd(alpha), or begin anew at every step, restarted(solver)."
        )
    return solver.start(alpha, w)


def _reverse(objective, inputs: tuple, check: Callable | None):
    """Return value, auxiliary output and all gradients; ``check`` gets the reached leaves."""
    value, pull, aux = jax.vjp(objective, *inputs, has_aux=True)
    one = jnp.ones_like(value)
    if check is not None:
        check(lambda: outputs_reading(lambda slope: pull(slope)[0], one))
    return (value, aux), pull(one)


_UNREACHED = (
    "alpha: expected a way to the outer loss that is differentiated, got none (backprop=0, "
    "a stop_gradient, a sign, or a term without w): its hypergradient would be 0."
)
_CLOSED_FORM = (
    "{}: the lower loss reads it, but the solver's closed form does not, so its hypergradient is "
    "always 0; check that the solver has the same penalty as the lower loss."
)
_BY_SOLVER = (
    "{}: only the solver reads it, and this solver's derivative does not pass through its steps, "
    "so its hypergradient is always 0; unrolled(...) with backprop=None differentiates them."
)
_CUT = (
    "{}: the lower loss reads it, but no derivative leads from there to the outer loss "
    "(backprop=0, a stop_gradient, a sign, or a term without w), so its hypergradient is always 0; "
    "unrolled(...) with backprop=None or implicit(...) differentiates the weights in it."
)


def _forward(objective, alpha, check: Callable | None):
    """Return value, auxiliary output and gradient, by one forward derivative per coordinate."""
    flat, unravel = ravel_pytree(alpha)

    def push(direction):
        try:
            value, tangent, aux = jax.jvp(objective, (alpha,), (direction,), has_aux=True)
        except TypeError as error:
            if NO_FORWARD_RULE not in str(error):
                raise
            raise ValueError(
                'mode: expected "reverse" for a solver (one_step) or a loss that has a rule for '
                'reverse mode alone, got "forward".'
            ) from error
        return value, aux, tangent

    if check is not None:
        check(lambda: leaves_used_by(lambda _, v, __: push(v)[2], None, alpha, None))
    basis = jnp.eye(flat.size, dtype=flat.dtype)
    push_flat = jax.vmap(lambda v: push(unravel(v)), out_axes=(None, None, 0))
    value, aux, grad = push_flat(basis)
    return value, aux, unravel(grad.astype(flat.dtype))
