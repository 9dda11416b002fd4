"""A network on inputs of one shape: static steps, and their numbers as arrays.

Steps are hashable and do not contain weights. So one compiled program serves all networks of one
structure. All ReLU-like activations are one step, and all others are another.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from ntk.internal.checks import check_finite, concrete, describe, nan_where, real_array
from ntk.networks.contracts import Layer, LayerStep, Shape, Signal
from ntk.networks.walk import Diagonal

if TYPE_CHECKING:
    from ntk.networks.network import Network


@dataclasses.dataclass(frozen=True)
class Values:
    """The entries of ``alpha``, by name."""

    alpha: Mapping[str, jax.Array]
    dtype: Any
    finite: bool  # whether they are for a finite network

    def number(self, name: str, value: Any, least: float = -math.inf) -> jax.Array:
        """Return a number, or the named entry of ``alpha``. Tracers below ``least`` become NaN."""
        if isinstance(value, str):
            name, value = f"alpha: {value}", self.alpha[value]
        value = real_array(name, value).astype(self.dtype)
        if value.shape:
            raise ValueError(f"{name}: expected a number, got shape {value.shape}.")
        check_finite(name, value)
        if not concrete(value):
            return value if least == -math.inf else nan_where(value < least, value)
        if float(value) < least:
            raise ValueError(f"{name}: expected a nonnegative number, got {value}.")
        return value

    def weights(self, weights: tuple[Any, ...] | str) -> jax.Array:
        """Return a vector, given as numbers and names or by one name."""
        if isinstance(weights, str):
            return self.alpha[weights]
        return jnp.stack([self.number("weights", w) for w in weights])


def read_alpha(
    names: Mapping[str, tuple[str, ...]], alpha: Mapping[str, Any] | None, dtype: Any, finite: bool
) -> Values:
    """Return the entries of ``alpha`` for ``names``, checked."""
    alpha = dict(alpha or {})
    for name, choices in names.items():
        if name not in alpha:
            raise ValueError(f"alpha: expected an entry {name!r}, got {sorted(alpha)}.")
        value = alpha[name] = real_array(f"alpha: {name}", alpha[name]).astype(dtype)
        if value.shape != ((len(choices),) if choices else ()):
            expected = f"{len(choices) or 'a'} number(s)"
            raise ValueError(f"alpha: {name}: expected {expected}, got shape {value.shape}.")
        check_finite(f"alpha: {name}", value)
    return Values(alpha, dtype, finite)


def check_choice(weights: Any, count: int) -> tuple[Any, ...] | str:
    """Return weights of ``count`` activations or branches, 1 by default, or their common name."""
    if isinstance(weights, str):
        return weights
    weights = tuple([1.0] * count if weights is None else weights)
    if len(weights) != count:
        raise ValueError(f"weights: expected {count} weights, got {len(weights)}.")
    return weights


class NetworkPlan(NamedTuple):
    """Static steps and their numbers."""

    steps: tuple[LayerStep, ...]
    numbers: list[Any]
    full: bool  # whether it begins with all pairs of positions


def plan_network(
    network: "Network", shape: Shape, alpha: Mapping[str, Any] | None, dtype: Any, *, finite=False
) -> NetworkPlan:
    """Return the steps for inputs [n, *shape, channels], of a ``finite`` network or for kernels."""
    values = read_alpha(network.names, alpha, dtype, finite)
    steps, numbers, end = plan_layers(network, Signal(shape, False, raw=True), values)
    if not end.gaussian or math.prod(end.shape) != 1:
        got = f"{end.shape} positions" if end.gaussian else "no layer with weights at the end"
        raise ValueError(
            f"network: expected to end in dense, or in conv and pooling to one position, got {got}."
        )
    last = max((i for i, step in enumerate(steps) if step.pools()), default=-1)
    if last >= 0:
        steps.insert(last + 1, Diagonal())
        numbers.insert(last + 1, ())
    return NetworkPlan(tuple(steps), numbers, last >= 0)


def plan_layers(network: "Network", signal: Signal, values: Values) -> tuple[list, list, Signal]:
    """Return steps, numbers, and facts about the features at the end."""
    steps, numbers = [], []
    for layer in network.layers:
        if not isinstance(layer, Layer):
            raise ValueError(f"network: expected layers of ntk.networks, got {describe(layer)}.")
        if signal.flat and not layer.after_flatten:
            raise ValueError(f"flatten: expected dense after it, got {layer.combinator}.")
        step, number, signal = layer.plan(signal, values)
        steps.append(step)
        numbers.append(number)
    return steps, numbers, signal
