"""Steps of a search by a single-loop method (:mod:`bilevel.stochastic`)."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bilevel import stochastic
from bilevel.contracts import DescentState, Pytree, SingleLoop
from bilevel.hypergradients.error_estimate import Info, assess
from bilevel.internal import checks
from bilevel.outer_loop import geometry
from bilevel.outer_loop.descent import automatic, leaves_moved, run_once
from bilevel.problem.problem import Problem, at_variables
from bilevel.problem.structure import check_depends_on_alpha, leaves_used_by, with_rules
from ntk.internal.sharding import shard_like

Data = tuple[stochastic.BatchedData, stochastic.BatchedData, stochastic.BatchSchedule]
Method = tuple[Problem, SingleLoop, optax.GradientTransformation]


def prepared(method: SingleLoop, batches: Any, data: tuple, steps: int) -> Data:
    """Return ``(train, valid, key)`` in batches, with a schedule of the batches of each step."""
    sides = ("train", data[0]), ("valid", data[1])
    train, valid = (stochastic.make_batched_data(*side, batches) for side in sides)
    key, counts = None if batches is None else data[2], (train.count, valid.count)
    return train, valid, stochastic.draw_batch_schedule(key, counts, steps, method.draws)


def init_single_loop(parts: Method, alpha: Pytree, w: Pytree, data: Data) -> DescentState:
    """Return the first state; raise if the problem does not fit a single loop."""
    problem, method, optimizer = parts
    checks.check_losses("problem", problem)
    if getattr(problem, "stateful", False):
        raise ValueError("problem: expected one without variables for a single loop, got stateful.")
    checks.check_floating("w0", w)
    # Strong dtypes, as a step returns them.
    alpha, w = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), (alpha, w))
    train, valid, order = data
    bare = at_variables(problem, None)
    # Traced here, so that a wrong loss raises before the optimizer does.
    sides = (bare.lower, train), (bare.outer, valid)
    enters = [leaves_used_by(automatic(loss), w, alpha, side.rows) for loss, side in sides]
    optimizer = checks.gradient_transformation("optimizer", optimizer)
    state = optimizer.init(alpha)
    alpha = geometry.check_descends(optimizer, state, alpha)
    moved = leaves_moved(optimizer, state, alpha)
    needed = [moves and not any(used) for moves, *used in zip(moved, *enters, strict=True)]
    check_depends_on_alpha(alpha, needed)

    def begin(alpha, w, order, train, valid):
        first = order.at(jnp.zeros((), int), method.draws)
        with_own_rules, _ = with_rules(problem, w, alpha, train.rows)
        return method.init(with_own_rules, alpha, w, first, train, valid)

    inner = shard_like(run_once(begin, alpha, w, order, train, valid), w)
    return DescentState(alpha, w, inner, state, jnp.zeros((), int))


def single_loop_step(
    parts: Method, state: DescentState, number: jax.Array, data: Data
) -> tuple[DescentState, dict[str, Any]]:
    """Take one step like :func:`bilevel.descent`, with losses and direction of its batches."""
    (problem, method, optimizer), (train, valid, order) = parts, data
    problem, _ = with_rules(problem, state.w, state.alpha, train.rows)
    indices = order.at(number, method.draws)
    direction, w, inner, metrics = method.step(
        problem, state.alpha, state.w, state.solver_state, indices, train, valid
    )
    # Products of vectors, because XLA's sums and comparisons take several times as long.
    size = stochastic.tree_norm(direction)
    if method.adjoint is not None:  # the adjoint can be the first array that is not finite
        size = checks.nan_unless_finite(size, optax.tree.vdot(*(method.adjoint(inner),) * 2))
    extra_args = {"residual": metrics.get("noisy_residual"), "memory": method.memory(train, valid)}
    extra_args |= {"value": metrics["value"], "grad": direction}
    updates, optimizer_state = checks.gradient_transformation("optimizer", optimizer).update(
        direction, state.optimizer_state, state.alpha, **extra_args
    )
    alpha = geometry.check_last(optimizer_state, optax.apply_updates(state.alpha, updates))
    new_state = DescentState(alpha, w, inner, optimizer_state, state.step + 1)
    return new_state, metrics | {"grad_norm": size}


_WORTHLESS = 100.0  # a residual above this is not caused by noise of batches


def warn_if_lost(history: dict[str, jax.Array]) -> None:
    """Warn if the adjoint diverged, so that the last directions of ``alpha`` are wrong."""
    last = np.asarray(history.get("noisy_residual", ()))[-1:]
    worst = last.max(initial=0.0)  # over all copies of the search
    if worst > _WORTHLESS:
        warnings.warn(
            f"search: the adjoint's residual is {worst:.0e} times the outer gradient, so that "
            "alpha's last directions are worthless; a smaller step_size of the solver helps.",
            stacklevel=3,
        )


def info(problem: Problem, method: SingleLoop, state: DescentState, data: Data) -> Info:
    """Return the error estimate of the method's last direction, recomputed on all data."""
    assert method.adjoint is not None
    train, valid, _ = data

    def estimate(w, adjoint, alpha, train, valid):
        with_own_rules, _ = with_rules(problem, w, alpha, train.rows)
        grad = stochastic.full_direction(with_own_rules, w, adjoint, alpha, train, valid)
        args = at_variables(with_own_rules, None), w, alpha, train.rows, valid.rows
        return assess(*args, grad, adjoint)

    adjoint = method.adjoint(state.solver_state)
    return run_once(estimate, state.w, adjoint, state.alpha, train, valid)
