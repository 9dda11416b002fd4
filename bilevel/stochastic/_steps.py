"""Step sizes."""

from collections.abc import Callable
from typing import Any

import jax

from bilevel.checks import positive
from bilevel.protocols import Pytree

Rate = float | jax.Array | Callable[[jax.Array], jax.Array]
"""A positive number, or a schedule: ``rate(steps done) -> number``, such as optax's."""


def checked(name: str, rate: Any) -> Any:
    """Refuse what is neither a positive number nor a schedule."""
    if not callable(rate):
        positive(name, rate)
    return rate


def at(rate: Rate, number: jax.Array) -> Any:
    """The rate of a step."""
    return rate(number) if callable(rate) else rate


def against(x: Pytree, direction: Pytree, rate: Any) -> Pytree:
    """``x - rate * direction``, in the dtypes of ``x``."""
    return jax.tree.map(lambda x, d: (x - rate * d).astype(x.dtype), x, direction)
