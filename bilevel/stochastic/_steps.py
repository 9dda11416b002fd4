"""Step sizes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from bilevel.contracts import Pytree
from bilevel.internal.checks import positive
from bilevel.stochastic import _metric

Rate = float | jax.Array | Callable[[jax.Array], jax.Array]
"""A positive number, or a schedule: ``rate(steps done) -> number``, such as optax's."""


def as_schedule(name: str, rate: Rate) -> Callable[[jax.Array], Any]:
    """Return ``rate`` as a schedule; raise unless it is one or a positive number."""
    if callable(rate):
        return rate
    positive(name, rate)
    return lambda number: rate


def against(x: Pytree, direction: Pytree, rate: Any) -> Pytree:
    """Return ``x - rate * direction``, in the dtypes of ``x``."""
    return jax.tree.map(lambda x, d: (x - rate * d).astype(x.dtype), x, direction)


class Mover(NamedTuple):
    """How weights and adjoint move together."""

    init: Callable[..., Pytree]  # (problem, w, alpha, train) -> state, in Tables: may be large
    # (pair, directions, state, number, those four, shorter: a factor) -> (pair, state)
    move: Callable[..., tuple]


def mover(step_size: Rate | None) -> Mover:
    """Return steps of this size; None takes steps in a measured metric."""
    if step_size is None:
        return Mover(_metric.unmeasured, _step_in_metric)
    rate = as_schedule("step_size", step_size)

    def step_by_rate(pair, along, state, number, *_, shorter):
        return against(pair, along, rate(number)), state

    return Mover(lambda *_: (), step_by_rate)


def _step_in_metric(pair, along, state, number, *problem_and_point, shorter):
    state = _metric.renewed(state, number, *problem_and_point)
    return _metric.metric_step(state, pair, along, shorter), state
