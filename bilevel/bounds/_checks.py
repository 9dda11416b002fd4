"""What the bounds share: checks of their arguments, and the sum of terms that most are."""

import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from ntk._checks import number, numbers, offending, whole
from ntk.bounds import Bound
from ntk.bounds.bound import positive

UNIT_LOSS = ("the loss is in [0, 1], else C is larger", None)


def nonnegative(name: str, x: Any) -> jax.Array:
    """``x`` as an array of floating-point numbers, none negative (or NaN) unless traced."""
    x = numbers(name, x)
    traced = isinstance(x, jax.core.Tracer)
    if x.size == 0:
        raise ValueError(f"{name}: expected at least one number, got the shape {x.shape}.")
    if not traced and not np.all(x >= 0):
        raise ValueError(f"{name}: expected numbers of at least 0, got {offending(x, x >= 0)}.")
    return jnp.asarray(x) * 1.0


def broadcast(**pair: Any) -> list[jax.Array]:
    """Two arrays of nonnegative numbers, by name, in one shape."""
    arrays = {name: nonnegative(name, x) for name, x in pair.items()}
    (first, a), (second, b) = arrays.items()
    try:
        return jnp.broadcast_arrays(a, b)
    except ValueError:
        raise ValueError(
            f"{second}: expected a shape that broadcasts with {a.shape}, {first}'s, got {b.shape}."
        ) from None


def confidence(name: str, tau: float, events: int) -> float:
    """``1 - events exp(-tau)``, for a ``tau`` that makes it positive."""
    if not math.log(events) < number(name, tau) < math.inf:
        raise ValueError(f"{name}: expected a number above log({events}), got {tau}.")
    return 1 - events * math.exp(-tau)


def positives(**numbers: Any) -> None:
    """Refuse numbers that are not positive and finite; traced ones pass."""
    for name, value in numbers.items():
        positive(name, value)


def count(name: str, value: Any) -> None:
    """Refuse a ``value`` that is not a whole number of at least 1; traced ones pass."""
    if not isinstance(value, jax.core.Tracer):
        whole(name, value, 1)


def end_to_end(
    terms: dict[str, chex.Array],
    delta: Any,
    *,
    claim: str = "L(f_selected) <= value",
    **details: Any,
) -> Bound:
    """A bound of the risk after selection: the sum of the terms and delta."""
    terms = terms | {"delta": nonnegative("delta", delta)}
    value = sum(terms.values(), jnp.zeros(()))
    return Bound(claim, value, terms, vacuous=~(value < 1), **details)
