"""One outer step of descent in ``alpha``, as a pair of pure functions."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from bilevel.contracts import DescentState, LowerSolver, Pytree, params_of
from bilevel.hypergradients.hypergradient import first_state, solution, stateful_hypergradient
from bilevel.internal.checks import check_floating, gradient_transformation
from bilevel.outer_loop import geometry
from bilevel.problem.problem import Problem, split_losses
from bilevel.problem.structure import outputs_reading
from ntk.internal.sharding import with_automatic_axes


def descent(
    problem: Problem,
    solver: LowerSolver,
    optimizer: optax.GradientTransformation,
    *,
    diagnostics: bool = False,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """One outer step as a pair of pure functions.

    Parameters
    ----------
    problem, solver
        As in :func:`bilevel.hypergradient`.
    optimizer : optax.GradientTransformation
        Of ``alpha``, its geometry included (:func:`bilevel.exponentiate`, ...). One that asks for
        ``value`` or ``value_fn`` (``optax.lbfgs``, ``contrib.reduce_on_plateau``, Polyak's steps)
        is told: ``value_fn(alpha)`` solves the lower problem from the step's weights.
    diagnostics : bool
        Whether ``metrics`` has the fields of :class:`bilevel.Info` too, at their cost.

    Returns
    -------
    init : ``init(alpha, w) -> DescentState``
        Refuses a geometry without an optimizer that descends.
    step : ``step(state, (train, valid)) -> (state, metrics)``
        ``metrics``: ``value`` (outer loss) and ``lower`` (lower loss) at the new ``w`` and the old
        ``alpha``, and ``grad_norm``, the 2-norm of the hypergradient; all scalars. And ``aux``,
        if the problem has it. And ``predicted``, if the weights are a function of ``alpha`` alone
        (:func:`bilevel.implicit`, :func:`bilevel.ridge`, :func:`bilevel.restarted`, without
        batches): the change of ``value`` that the hypergradient predicts for this step.
        Refuses a transformation that moves alpha after its geometry did.

    Raises
    ------
    ValueError
        For what these two refuse. Where arrays are traced and nothing can be raised, alpha becomes
        NaN instead.

    Examples
    --------
    >>> import bilevel
    >>> problem = Problem(
    ...     lower=lambda w, alpha, batch: 0.5 * jnp.sum((w - alpha) ** 2),
    ...     outer=lambda w, alpha, batch: jnp.sum((w - batch) ** 2),
    ... )
    >>> init, step = descent(problem, bilevel.implicit(), optax.sgd(0.25))
    >>> state, metrics = jax.jit(step)(init(jnp.zeros(1), jnp.zeros(1)), (None, jnp.ones(1)))
    >>> state.alpha, metrics["value"]
    (Array([0.5], dtype=float...), Array(1., dtype=float...))
    """
    return noted_descent(problem, solver, optimizer, diagnostics, warnings.warn)


def noted_descent(
    problem: Problem,
    solver: LowerSolver,
    optimizer: optax.GradientTransformation,
    diagnostics: bool,
    note: Callable[[str], None],
) -> tuple[Callable, Callable]:
    """Make the two functions of :func:`descent`; their warnings while tracing go to ``note``."""
    optimizer = gradient_transformation("optimizer", optimizer)
    hypergradient = stateful_hypergradient(problem, solver, diagnostics=diagnostics, note=note)
    repeats = solver.of_alpha and solver.batches is None and not getattr(problem, "stateful", False)
    losses = split_losses(problem)
    solve = solution(problem, solver)

    def init(alpha, w):
        check_floating("alpha", alpha)
        check_floating("w0", params_of(w))
        alpha, w = jax.tree.map(jnp.asarray, (alpha, w))
        state = optimizer.init(alpha)
        alpha = geometry.check_descends(optimizer, state, alpha)
        return DescentState(alpha, w, first_state(solver, alpha, w), state, jnp.zeros((), int))

    def step(state, data):
        return with_automatic_axes(on_one_mesh, (state, data), lambda: (state, None))

    def on_one_mesh(state, data):
        train, valid = data

        def wanted():
            """For each leaf of alpha, whether the optimizer moves it (not ``set_to_zero``)."""
            return hypergradient_leaves(optimizer, state)

        given = state.alpha, state.w, state.solver_state, train, valid
        hyper, solver_state = hypergradient(*given, wanted=wanted)

        def value_at(alpha):
            w, _ = solve(alpha, state.w, state.solver_state, train)
            return losses.outer(w, alpha, valid)[0]

        # What line searches and step sizes by the loss ask for; others do not look.
        extra_args = {"value": hyper.value, "grad": hyper.grad, "value_fn": value_at}
        updates, optimizer_state = optimizer.update(
            hyper.grad, state.optimizer_state, state.alpha, **extra_args
        )
        metrics = {
            "value": hyper.value,
            "lower": losses.lower(hyper.w, state.alpha, solver.batch(train))[0],
            "grad_norm": optax.tree.norm(hyper.grad),
        }
        if hyper.info is not None:
            metrics |= {k: x for k, x in hyper.info._asdict().items() if x is not None}
        if hyper.aux is not None:
            metrics["aux"] = hyper.aux
        alpha = optax.apply_updates(state.alpha, updates)
        alpha = geometry.check_last(optimizer_state, alpha)
        if repeats:
            metrics["predicted"] = optax.tree.vdot(hyper.grad, optax.tree.sub(alpha, state.alpha))
        return DescentState(alpha, hyper.w, solver_state, optimizer_state, state.step + 1), metrics

    return init, step


def hypergradient_leaves(
    optimizer: optax.GradientTransformationExtraArgs, state: DescentState
) -> list[bool]:
    """Return for each leaf of ``alpha`` whether a step of descent uses its hypergradient."""
    value = {"value": jnp.zeros(()), "value_fn": lambda _: jnp.zeros(())}
    return leaves_moved(optimizer, state.optimizer_state, state.alpha, **value)


def leaves_moved(
    optimizer: optax.GradientTransformationExtraArgs,
    optimizer_state: optax.OptState,
    alpha: Pytree,
    **extra: Any,
) -> list[bool]:
    """Return for each leaf of ``alpha`` whether its update depends on the hypergradient.

    ``extra`` are values, of any size, that the optimizer's ``update`` takes besides the gradient.
    """

    def moved(g):
        return optimizer.update(g, optimizer_state, alpha, grad=g, **extra)[0]

    return outputs_reading(moved, alpha)
