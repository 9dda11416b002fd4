"""A network on inputs of one shape: static steps, and the numbers in them as arrays.

Steps are hashable and say nothing of weights, so that one compiled program serves all networks of
one structure: ReLU-like activations are one step, all others another.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ntk.internal.checks import describe
from ntk.networks.contracts import Layer, LayerStep, Shape, Signal
from ntk.networks.values import Values, read_alpha
from ntk.networks.walk import Diagonal

if TYPE_CHECKING:
    from ntk.networks.network import Network


class NetworkPlan(NamedTuple):
    """What to compute."""

    steps: tuple[LayerStep, ...]
    numbers: list[Any]
    full: bool  # whether it begins with all pairs of positions


def plan_network(
    network: "Network",
    shape: Shape,
    alpha: Mapping[str, Any] | None,
    dtype: Any,
    *,
    finite: bool = False,
) -> NetworkPlan:
    """The steps for inputs [n, *shape, channels].

    ``finite``: whether for a finite network; for kernels, ReLU-like activations become one pair of
    slopes.

    Raises
    ------
    ValueError
        For layers that do not fit the inputs or each other, or an ``alpha`` that lacks a name.
    """
    values = read_alpha(network.names, alpha, dtype, finite)
    steps, numbers, end = plan_layers(network, Signal(shape, False, raw=True), values)
    if not end.gaussian or math.prod(end.shape) != 1:
        raise ValueError(
            "network: expected to end in dense, or in conv and pooling to one position, got "
            + (f"{end.shape} positions." if end.gaussian else "no layer with weights at the end.")
        )
    last = max((i for i, step in enumerate(steps) if step.pools()), default=-1)
    if last >= 0:
        steps.insert(last + 1, Diagonal())
        numbers.insert(last + 1, ())
    return NetworkPlan(tuple(steps), numbers, last >= 0)


def plan_layers(
    network: "Network", signal: Signal, values: Values
) -> tuple[list[LayerStep], list[Any], Signal]:
    """Steps, numbers, and what is known of the features at the end.

    Raises
    ------
    ValueError
        For layers that do not fit each other.
    """
    steps: list[LayerStep] = []
    numbers: list[Any] = []
    for layer in network.layers:
        if not isinstance(layer, Layer):
            raise ValueError(f"network: expected layers of ntk.networks, got {describe(layer)}.")
        if signal.flat and not layer.after_flatten:
            raise ValueError(f"flatten: expected dense after it, got {layer.combinator}.")
        step, number, signal = layer.plan(signal, values)
        steps.append(step)
        numbers.append(number)
    return steps, numbers, signal
