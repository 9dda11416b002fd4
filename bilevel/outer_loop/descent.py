"""One outer step of descent in ``alpha``, as a pair of pure functions."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from bilevel.contracts import DescentState, LowerSolver, Pytree, params_of
from bilevel.hypergradients.hypergradient import (
    check_constraint,
    first_state,
    solution,
    stateful_hypergradient,
)
from bilevel.internal.checks import check_floating, gradient_transformation
from bilevel.outer_loop import geometry
from bilevel.problem.problem import Problem, split_losses
from bilevel.problem.structure import outputs_reading
from ntk.internal.compile_cache import program
from ntk.internal.sharding import with_automatic_axes


def descent(
    problem: Problem,
    solver: LowerSolver,
    optimizer: optax.GradientTransformation,
    *,
    diagnostics: bool = False,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return one outer step as a pair of pure functions.

    Parameters
    ----------
    problem, solver
        As in :func:`bilevel.hypergradient`.
    optimizer : optax.GradientTransformation
        Optimizer of ``alpha``, including its geometry (:func:`bilevel.exponentiate`, ...). It
        receives ``value`` and ``value_fn`` if it takes them (``optax.lbfgs``, Polyak's steps);
        ``value_fn(alpha)`` solves the lower problem from the weights of the step.
    diagnostics : bool
        Whether ``metrics`` also has the fields of :class:`bilevel.Info`, at their cost.

    Returns
    -------
    init : ``init(alpha, w) -> DescentState``
    step : ``step(state, (train, valid)) -> (state, metrics)``
        ``metrics`` has the scalars ``value`` (outer loss) and ``lower`` (lower loss) at the new
        ``w`` and the old ``alpha``, ``grad_norm``, the 2-norm of the hypergradient, and ``aux`` if
        the problem has it. If the weights depend on ``alpha`` alone (:func:`bilevel.implicit`,
        :func:`bilevel.ridge`, :func:`bilevel.restarted`, without batches), it has ``predicted``:
        the change of ``value`` that the hypergradient predicts for this step.

    Raises
    ------
    ValueError
        In ``init``, if a geometry comes without an optimizer that descends. In ``step``, if a
        transformation moves alpha after its geometry. A traced alpha becomes NaN instead.

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


def noted_descent(problem, solver, optimizer, diagnostics, note) -> tuple[Callable, Callable]:
    """Return the functions of :func:`descent`; warnings during tracing go to ``note``."""
    optimizer = gradient_transformation("optimizer", optimizer)
    hypergradient = stateful_hypergradient(problem, solver, diagnostics=diagnostics, note=note)
    repeats = solver.of_alpha and solver.batches is None and not getattr(problem, "stateful", False)
    losses, solve = split_losses(problem), solution(problem, solver)

    def init(alpha, w):
        check_floating("alpha", alpha)
        check_floating("w0", params_of(w))
        alpha, w = jax.tree.map(jnp.asarray, (alpha, w))
        check_constraint(solver, alpha, w)
        state = optimizer.init(alpha)
        alpha = geometry.check_descends(optimizer, state, alpha)
        return DescentState(alpha, w, first_state(solver, alpha, w), state, jnp.zeros((), int))

    def step(state, data):
        return with_automatic_axes(on_one_mesh, (state, data), lambda: (state, None))

    def on_one_mesh(state, data):
        train, valid = data
        args = state.alpha, state.w, state.solver_state, train, valid
        # An optimizer such as ``set_to_zero`` does not need the derivative of its leaves.
        wanted = functools.partial(leaves_moved, optimizer, state.optimizer_state, state.alpha)
        hyper, solver_state = hypergradient(*args, wanted=wanted)

        def value_at(alpha):
            w, _ = solve(alpha, state.w, state.solver_state, train)
            return losses.outer(w, alpha, valid)[0]

        # Line searches and step sizes by the loss read these arguments.
        extra_args = {"value": hyper.value, "grad": hyper.grad, "value_fn": value_at}
        updates, optimizer_state = optimizer.update(
            hyper.grad, state.optimizer_state, state.alpha, **extra_args
        )
        lower = losses.lower(hyper.w, state.alpha, solver.batch(train))[0]
        metrics = {"value": hyper.value, "lower": lower, "grad_norm": optax.tree.norm(hyper.grad)}
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


def automatic(function: Callable) -> Callable:
    """Return ``function`` computed with automatic axes; its results are replicated."""
    return lambda *args: with_automatic_axes(function, args, lambda: None)


def run_once(function: Callable, *args: Any) -> Any:
    """Return ``function(*args)``, computed with automatic axes as one compiled program."""
    return program(automatic(function), *args)(*args)


def leaves_moved(
    optimizer: optax.GradientTransformationExtraArgs, state: optax.OptState, alpha: Pytree
) -> list[bool]:
    """Return for each leaf of ``alpha`` whether its update depends on the hypergradient."""
    extra_args = geometry.trial_arguments(lambda _: jnp.zeros(()), alpha)

    def moved(g):
        return optimizer.update(g, state, alpha, grad=g, **extra_args)[0]

    return outputs_reading(moved, alpha)
