"""Step sizes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from bilevel.contracts import Pytree
from bilevel.internal.checks import positive
from bilevel.problem.problem import Problem
from bilevel.stochastic import _metric
from bilevel.stochastic._blocks import BatchedData

Rate = float | jax.Array | Callable[[jax.Array], jax.Array]
"""A positive number, or a schedule: ``rate(steps done) -> number``, such as optax's."""


def check_rate(name: str, rate: Any) -> Any:
    """Raise unless ``rate`` is a positive number or a schedule."""
    if not callable(rate):
        positive(name, rate)
    return rate


def rate_at(rate: Rate, number: jax.Array) -> Any:
    """Return the rate of a step."""
    return rate(number) if callable(rate) else rate


def against(x: Pytree, direction: Pytree, rate: Any) -> Pytree:
    """Return ``x - rate * direction``, in the dtypes of ``x``."""
    return jax.tree.map(lambda x, d: (x - rate * d).astype(x.dtype), x, direction)


class Mover(NamedTuple):
    """How weights and adjoint move together."""

    init: Callable[..., Pytree]  # (problem, w, alpha, train) -> state, in Tables: may be large
    # (pair, directions, state, number, those four, shorter: a factor) -> (pair, state)
    move: Callable[..., tuple]


def mover(rate: Rate | None) -> Mover:
    """Return steps with this rate; None takes steps in a measured metric."""
    if rate is not None:
        fixed = rate

        def by_rate(pair, along, state, number, *_, shorter):
            return against(pair, along, rate_at(fixed, number)), state

        return Mover(lambda *_: (), by_rate)

    def in_metric(
        pair, along, state, number, problem: Problem, w, alpha, train: BatchedData, shorter
    ):
        state = _metric.renewed(state, number, problem, w, alpha, train)
        return _metric.metric_step(state, pair, along, shorter), state

    return Mover(_metric.unmeasured, in_metric)
