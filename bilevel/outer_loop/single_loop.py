"""Steps of a search by a single-loop method (:mod:`bilevel.stochastic`)."""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bilevel.contracts import DescentState, Pytree, SingleLoop, Tables
from bilevel.hypergradients.error_estimate import Info, assess
from bilevel.internal.checks import (
    check_floating,
    check_losses,
    gradient_transformation,
    nan_unless_finite,
)
from bilevel.outer_loop import geometry
from bilevel.outer_loop.descent import leaves_moved
from bilevel.problem.problem import Problem, at_variables
from bilevel.problem.structure import (
    check_depends_on_alpha,
    leaves_used_by,
    with_rules,
)
from bilevel.stochastic import (
    BatchedData,
    BatchSchedule,
    draw_batch_schedule,
    full_direction,
    make_batched_data,
    tree_norm,
)
from ntk.internal.compile_cache import fresh, program
from ntk.internal.sharding import shard_like, with_automatic_axes

Data = tuple[BatchedData, BatchedData, BatchSchedule]


def prepared(method: SingleLoop, batches: Any, data: tuple, steps: int) -> Data:
    """Return ``(train, valid, key)`` in batches, with a schedule of the batches of each step."""
    train, valid = (
        make_batched_data(*side, batches) for side in (("train", data[0]), ("valid", data[1]))
    )
    key, counts = None if batches is None else data[2], (train.count, valid.count)
    return train, valid, draw_batch_schedule(key, counts, steps, method.draws)


def init_single_loop(
    problem: Problem,
    method: SingleLoop,
    optimizer: optax.GradientTransformation,
    alpha: Pytree,
    w: Pytree,
    data: Data,
) -> DescentState:
    """Return the first state; raise if the problem does not fit a single loop."""
    check_losses("problem", problem)
    if getattr(problem, "stateful", False):
        raise ValueError("problem: expected one without variables for a single loop, got stateful.")
    check_floating("alpha", alpha)
    check_floating("w0", w)
    # Strong dtypes, as a step returns them.
    alpha, w = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), (alpha, w))
    train, valid, order = data
    bare = at_variables(problem, None)
    for loss, side in ((bare.lower, train), (bare.outer, valid)):
        value = functools.partial(with_automatic_axes, loss, like=lambda: None)
        # Traced once, so that a wrong loss raises here.
        jax.eval_shape(fresh(lambda *args: value(args)), w, alpha, side.rows)  # noqa: B023
    optimizer = gradient_transformation("optimizer", optimizer)
    state = optimizer.init(alpha)
    alpha = geometry.check_descends(optimizer, state, alpha)
    _check_moved_leaves(problem, optimizer, state, alpha, w, (train.rows, valid.rows))

    def begin(alpha, w, order, train, valid):
        first = order.at(jnp.zeros((), int), method.draws)
        with_own_rules, _ = with_rules(problem, w, alpha, train.rows)
        return method.init(with_own_rules, alpha, w, first, train, valid)

    def run(*args):
        return with_automatic_axes(begin, args, lambda: None)

    args = alpha, w, order, train, valid
    inner = shard_like(program(run, *args)(*args), w)
    return DescentState(alpha, w, inner, state, jnp.zeros((), int))


def _check_moved_leaves(problem, optimizer, state, alpha, w, rows) -> None:
    """Raise if the optimizer moves a leaf of ``alpha`` that neither loss depends on."""

    def read(loss, rows):
        def value(*args):
            return with_automatic_axes(loss, args, lambda: None)

        return leaves_used_by(value, w, alpha, rows)

    bare = at_variables(problem, None)
    lower, outer = map(read, (bare.lower, bare.outer), rows)
    used = leaves_moved(optimizer, state, alpha, value=0.0, residual=0.0, memory=1)
    check_depends_on_alpha(
        alpha, [use and not (x or y) for use, x, y in zip(used, lower, outer, strict=True)]
    )


def single_loop_step(
    problem: Problem,
    method: SingleLoop,
    optimizer: optax.GradientTransformation,
    state: DescentState,
    number: jax.Array,
    data: Data,
) -> tuple[DescentState, dict[str, Any]]:
    """Take one step like :func:`bilevel.descent`, with losses and direction of its batches."""
    train, valid, order = data
    problem, _ = with_rules(problem, state.w, state.alpha, train.rows)
    indices = order.at(number, method.draws)
    direction, w, inner, metrics = method.step(
        problem, state.alpha, state.w, state.solver_state, indices, train, valid
    )
    # Products of vectors, because XLA's sums and comparisons take several times as long.
    size = tree_norm(direction)
    if method.adjoint is not None:  # the adjoint can be the first array that is not finite
        size = nan_unless_finite(size, optax.tree.vdot(*(method.adjoint(inner),) * 2))
    updates, optimizer_state = gradient_transformation("optimizer", optimizer).update(
        direction,
        state.optimizer_state,
        state.alpha,
        value=metrics["value"],
        grad=direction,
        residual=metrics.get("noisy_residual"),
        memory=method.memory(train, valid),
    )
    alpha = geometry.check_last(optimizer_state, optax.apply_updates(state.alpha, updates))
    new_state = DescentState(alpha, w, inner, optimizer_state, state.step + 1)
    return new_state, metrics | {"grad_norm": size}


def either(good: jax.Array, new: Pytree, old: Pytree) -> Pytree:
    """Return ``new`` if ``good``, else ``old``. :class:`Tables` are always new."""
    return jax.tree.map(
        lambda x, y: x if isinstance(x, Tables) else jnp.where(good, x, y),
        new,
        old,
        is_leaf=lambda x: isinstance(x, Tables),
    )


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
    adjoint = method.adjoint(state.solver_state)

    def of(w, adjoint, alpha, train, valid):
        with_own_rules, _ = with_rules(problem, w, alpha, train.rows)
        grad = full_direction(with_own_rules, w, adjoint, alpha, train, valid)
        args = at_variables(with_own_rules, None), w, alpha, train.rows, valid.rows
        return assess(*args, grad, adjoint)

    def run(*args):
        return with_automatic_axes(of, args, lambda: None)

    args = state.w, adjoint, state.alpha, train, valid
    return program(run, *args)(*args)
