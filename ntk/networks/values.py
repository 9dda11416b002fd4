"""What the numbers and names in a description stand for: arrays."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ntk.internal.checks import concrete, nan_where, real_array


@dataclasses.dataclass(frozen=True)
class Values:
    """``alpha``, to look names up."""

    alpha: Mapping[str, jax.Array]
    dtype: Any
    finite: bool  # whether for a finite network

    def number(self, name: str, value: Any, least: float = -math.inf) -> jax.Array:
        """A number, or the entry of ``alpha`` with its name.

        Raises
        ------
        ValueError
            If it is not finite or less than ``least``, which is 0 if given. Traced numbers become
            NaN.
        """
        if isinstance(value, str):
            name, value = f"alpha: {value}", self.alpha[value]
        value = real_array(name, value).astype(self.dtype)
        if value.shape:
            raise ValueError(f"{name}: expected a number, got shape {value.shape}.")
        _check_finite_value(name, value)
        if not concrete(value):
            return value if least == -math.inf else nan_where(value < least, value)
        if float(value) < least:
            raise ValueError(f"{name}: expected a nonnegative number, got {value}.")
        return value

    def weights(self, weights: tuple[Any, ...] | str) -> jax.Array:
        """A vector, of numbers and names or by one name."""
        if isinstance(weights, str):
            return self.alpha[weights]
        return jnp.stack([self.number("weights", w) for w in weights])


def read_alpha(
    names: Mapping[str, tuple[str, ...]], alpha: Mapping[str, Any] | None, dtype: Any, finite: bool
) -> Values:
    """The entries that ``names`` asks for, checked.

    Raises
    ------
    ValueError
        If an entry is missing, has another shape or is not finite.
    """
    alpha = dict(alpha or {})
    for name, choices in names.items():
        if name not in alpha:
            raise ValueError(f"alpha: expected an entry {name!r}, got {sorted(alpha)}.")
        alpha[name] = real_array(f"alpha: {name}", alpha[name]).astype(dtype)
        if alpha[name].shape != ((len(choices),) if choices else ()):
            raise ValueError(
                f"alpha: {name}: expected {len(choices) or 'a'} number(s), got shape "
                f"{alpha[name].shape}."
            )
        _check_finite_value(f"alpha: {name}", alpha[name])
    return Values(alpha, dtype, finite)


def check_choice(weights: Any, count: int) -> tuple[Any, ...] | str:
    """Weights of ``count`` activations or branches, 1 by default, or the name of them all.

    Raises
    ------
    ValueError
        If their number is another one.
    """
    if isinstance(weights, str):
        return weights
    weights = tuple([1.0] * count if weights is None else weights)
    if len(weights) != count:
        raise ValueError(f"weights: expected {count} of them, got {len(weights)}.")
    return weights


def _check_finite_value(name: str, value: jax.Array) -> None:
    if concrete(value) and not np.isfinite(value).all():
        raise ValueError(f"{name}: expected finite numbers, got {value}.")
