"""Helpers of the bounds: checks of arguments, the confidence of events, and sums of terms."""

import math
from typing import Any

import chex
import jax
import jax.numpy as jnp

from bilevel.internal.checks import nonnegative, positive, real_number
from ntk.bounds import Bound

UNIT_LOSS = ("the loss is in [0, 1], else C is larger", None)


def broadcast_nonnegative(**pair: Any) -> list[jax.Array]:
    """Return two arrays of nonnegative numbers, given by name, in one shape."""
    arrays = {name: nonnegative(name, x) for name, x in pair.items()}
    (first, a), (second, b) = arrays.items()
    try:
        return jnp.broadcast_arrays(a, b)
    except ValueError:
        raise ValueError(
            f"{second}: expected a shape that broadcasts with {a.shape}, {first}'s, got {b.shape}."
        ) from None


def confidence(name: str, tau: float, events: int) -> float:
    """Return ``1 - events exp(-tau)``; raise ``ValueError`` if this is not positive."""
    if not math.log(events) < real_number(name, tau) < math.inf:
        raise ValueError(f"{name}: expected a number above log({events}), got {tau}.")
    return 1 - events * math.exp(-tau)


def log_product(*factors: tuple[Any, int]) -> jax.Array:
    """Return the logarithm of a product of ``(number, exponent)`` powers, which can overflow."""
    return sum((exponent * jnp.log(number) for number, exponent in factors), jnp.zeros(()))


def end_to_end(
    terms: dict[str, chex.Array],
    delta: Any,
    *,
    claim: str = "L(f_selected) <= value",
    **details: Any,
) -> Bound:
    """Return a bound of the risk after selection: the sum of the terms and ``delta``."""
    terms = terms | {"delta": nonnegative("delta", delta)}
    value = sum(terms.values(), jnp.zeros(()))
    return Bound(claim, value, terms, vacuous=~(value < 1), **details)


def check_range(delta: float, B: float = 1.0, events: int = 3) -> None:
    """Check that ``0 < delta < 1 / events``, and that ``B`` is positive."""
    if not 0 < real_number("delta", delta) < 1 / events:
        raise ValueError(f"delta: expected a number in (0, 1/{events}), got {delta}.")
    one_positive("B", B)


def one_positive(name: str, value: Any) -> Any:
    """Return one floating-point number; a concrete one must be positive and finite."""
    real_number(name, value)
    return positive(name, value)
