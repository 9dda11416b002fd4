"""A network on inputs of one shape: static steps, and the numbers in them as arrays.

Steps are hashable and say nothing of weights, so that one compiled program serves all networks of
one structure: ReLU-like activations are one step, all others another.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ntk.expectations.activations import Activation, erf, gelu
from ntk.infinite.layer_expansions import kinks_at_zero
from ntk.internal.checks import concrete, describe, nan_where, real_array
from ntk.networks.records import Add, AveragePool, Elementwise, Flatten, Weights

if TYPE_CHECKING:
    from ntk.networks.network import Network

Shape = tuple[int, ...]


class Windows(NamedTuple):
    """A window at each output position, one entry for each axis of the image."""

    before: Shape  # of what the windows are on
    after: Shape
    window: Shape
    strides: Shape
    pads: tuple[tuple[int, int], ...]
    wrap: bool


class Linear(NamedTuple):
    """``dense`` and ``conv``; numbers: (c_w, c_b)."""

    windows: Windows
    bias: bool


class Kinked(NamedTuple):
    """ReLU-like activations; numbers: (left, right) slopes."""


class Smooth(NamedTuple):
    """Other activations; numbers: their weights. The activations are None in a skeleton."""

    activations: tuple[Activation, ...] | None


class Tabulated(NamedTuple):
    """A ``Smooth`` without kinks but at 0; numbers: tables of it and of its slope."""

    kinked: bool


class Closed(NamedTuple):
    """An activation whose duals are closed formulas: erf and GELU; numbers: its weight."""

    activation: Activation


class Elements(NamedTuple):
    """Any activations, in a finite network; numbers: their weights."""

    activations: tuple[Activation, ...]


class Average(NamedTuple):
    """Pooling; no numbers."""

    windows: Windows


class Diagonal(NamedTuple):
    """From here on pairs of equal positions are all that matters."""

    shape: Shape


class Flat(NamedTuple):
    """``flatten``."""

    shape: Shape


class Sum(NamedTuple):
    """``add``; numbers: (weights, numbers of the branches)."""

    branches: tuple[tuple[Any, ...], ...]
    shape: Shape
    means: bool  # whether two parts have means, so that their covariance counts


class NetworkPlan(NamedTuple):
    """What to compute."""

    steps: tuple[Any, ...]
    numbers: list[Any]
    full: bool  # whether it begins with all pairs of positions


class _Signal(NamedTuple):
    """What is known of the features when planning."""

    shape: Shape
    gaussian: bool  # at infinite width, of mean 0
    raw: bool = False  # the data themselves
    flat: bool = False  # positions side by side


def plan_network(
    network: "Network",
    shape: Shape,
    alpha: Mapping[str, Any] | None,
    dtype: Any,
    *,
    merged: bool = True,
) -> NetworkPlan:
    """The steps for inputs [n, *shape, channels].

    ``merged``: whether ReLU-like activations become one pair of slopes, as kernels want them.

    Raises
    ------
    ValueError
        For layers that do not fit the inputs or each other, or an ``alpha`` that lacks a name.
    """
    names, alpha = network.names, dict(alpha or {})
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
    steps, numbers, end = _plan_layers(
        network, _Signal(shape, False, raw=True), (alpha, dtype, merged)
    )
    if not end.gaussian or math.prod(end.shape) != 1:
        raise ValueError(
            "network: expected to end in dense, or in conv and pooling to one position, got "
            + (f"{end.shape} positions." if end.gaussian else "no layer with weights at the end.")
        )
    last = max((i for i, step in enumerate(steps) if _pools(step)), default=-1)
    if last >= 0:
        shape = _shape_after(steps[last])
        steps.insert(last + 1, Diagonal(shape))
        numbers.insert(last + 1, ())
    return NetworkPlan(tuple(steps), numbers, last >= 0)


def skeleton(steps: tuple[Any, ...]) -> tuple[Any, ...]:
    """The steps without the names of activations."""

    def bare(step):
        match step:
            case Smooth():
                return Smooth(None)
            case Sum():
                return step._replace(branches=tuple(map(skeleton, step.branches)))
        return step

    return tuple(map(bare, steps))


def _pools(step) -> bool:
    match step:
        case Average():
            return True
        case Sum():
            return any(_pools(s) for branch in step.branches for s in branch)
    return False


def _shape_after(step) -> Shape:
    return step.shape if isinstance(step, Sum) else step.windows.after


# ----------------------------------------------------------------------------- layer by layer


def _plan_layers(network: "Network", signal: _Signal, given):
    """``given``: alpha, the dtype of numbers, and ``merged``."""
    steps: list[Any] = []
    numbers: list[Any] = []
    for layer in network.layers:
        step, number, signal = _plan_layer(layer, signal, given)
        if step is not None:
            steps.append(step)
            numbers.append(number)
    return steps, numbers, signal


def _plan_layer(layer, signal: _Signal, given):
    if signal.flat and not (isinstance(layer, Weights) and layer.window is None):
        raise ValueError(f"flatten: expected dense after it, got {_combinator_name(layer)}.")
    match layer:
        case Weights():
            return _plan_weights(layer, signal, given)
        case Elementwise():
            return _plan_elementwise(layer, signal, given)
        case AveragePool():
            if not signal.shape:
                raise ValueError("average_pool: expected images or sequences, got no positions.")
            windows = _windows("average_pool", layer, signal.shape)
            shape = () if layer.window is None else windows.after
            return Average(windows), (), signal._replace(shape=shape)
        case Flatten():
            return Flat(signal.shape), (), signal._replace(shape=(), flat=True)
        case Add():
            return _plan_add(layer, signal, given)
    raise ValueError(f"network: expected layers of ntk.networks, got {describe(layer)}.")


def _combinator_name(layer) -> str:
    names = {Elementwise: "act", AveragePool: "average_pool", Flatten: "flatten", Add: "add"}
    return names.get(type(layer), "conv")


def _plan_weights(layer: Weights, signal, given):
    if layer.window is None and math.prod(signal.shape) > 1:
        raise ValueError(f"dense: expected flatten or pooling before it, got shape {signal.shape}.")
    if layer.window is not None and not signal.shape:
        raise ValueError("conv: expected images or sequences, got inputs without positions.")
    windows = _windows("conv", layer, () if layer.window is None else signal.shape)
    weight, bias = (
        _resolve_number(name, getattr(layer, name), given, least=0)
        for name in ("weight_variance", "bias_variance")
    )
    none = isinstance(layer.bias_variance, int | float) and layer.bias_variance == 0
    return Linear(windows, not none), (weight, bias), _Signal(windows.after, True)


def _plan_elementwise(layer: Elementwise, signal, given):
    if not signal.gaussian:
        raise ValueError(
            "act: expected a layer with weights between it and the last act, got none."
        )
    weights = _resolve_weights(layer.weights, given)
    signal = signal._replace(gaussian=False)
    if not given[2]:
        return Elements(layer.activations), weights, signal
    if all(s.smooth is None for s in layer.activations):
        return Kinked(), jnp.stack(kinks_at_zero(layer.activations, weights)), signal
    if len(layer.activations) == 1 and layer.activations[0] in (erf, gelu):
        return Closed(layer.activations[0]), weights[0], signal
    return Smooth(layer.activations), weights, signal


def _plan_add(layer: Add, signal, given):
    branches, numbers, ends = [], [], []
    for network in layer.branches:
        steps, number, end = _plan_layers(network, signal, given)
        branches.append(tuple(steps))
        numbers.append(number)
        ends.append(end)
    if len({(end.shape, end.flat) for end in ends}) > 1:
        shapes = [end.shape for end in ends]
        raise ValueError(f"add: expected branches of one shape, got shapes {shapes}.")
    fresh = [_has_weights(network) for network in layer.branches]
    if sum(not f for f in fresh) > 1 or (signal.raw and not all(fresh)):
        raise ValueError(
            "add: expected a layer with weights in every branch but one (on the data: in every "
            "branch), got "
            f"{sum(fresh)} of {len(fresh)}."
        )
    means = sum(not end.gaussian for end in ends) > 1
    end = _Signal(ends[0].shape, all(e.gaussian for e in ends), flat=ends[0].flat)
    return (
        Sum(tuple(branches), ends[0].shape, means),
        (_resolve_weights(layer.weights, given), numbers),
        end,
    )


def _has_weights(network: "Network") -> bool:
    for layer in network.layers:
        if isinstance(layer, Weights):
            return True
        if isinstance(layer, Add) and all(map(_has_weights, layer.branches)):
            return True
    return False


# ----------------------------------------------------------------------------- windows, numbers


def _windows(name: str, layer: Weights | AveragePool, shape: Shape) -> Windows:
    window = _value_per_axis(name, shape if layer.window is None else layer.window, shape)
    strides = _value_per_axis(name, layer.strides, shape)
    padding = getattr(layer, "padding", "VALID")
    if padding == "VALID" and any(w > s for w, s in zip(window, shape, strict=True)):
        raise ValueError(f"{name}: expected a window of at most {shape}, got {window}.")
    before, pads, after = [], [], []
    for size, w, stride in zip(shape, window, strides, strict=True):
        out = (size - w) // stride + 1 if padding == "VALID" else -(-size // stride)
        pad = max((out - 1) * stride + w - size, 0) if padding != "VALID" else 0
        if padding == "CIRCULAR" and pad > size:
            raise ValueError(f"{name}: expected a window of at most {shape}, got {window}.")
        before.append(size)
        after.append(out)
        pads.append((pad // 2, pad - pad // 2))
    wrap = padding == "CIRCULAR"
    return Windows(tuple(before), tuple(after), window, strides, tuple(pads), wrap)


def _value_per_axis(name: str, value: Any, shape: Shape) -> Shape:
    if isinstance(value, int):
        return (value,) * len(shape)
    if len(value) != len(shape):
        raise ValueError(f"{name}: expected one number for each of {len(shape)} axes, got {value}.")
    return tuple(value)


def _resolve_weights(weights, given) -> jax.Array:
    if isinstance(weights, str):
        return given[0][weights]
    return jnp.stack([_resolve_number("weights", w, given) for w in weights])


def _resolve_number(name: str, value: Any, given, least: float = -math.inf) -> jax.Array:
    alpha, dtype, _ = given
    if isinstance(value, str):
        name, value = f"alpha: {value}", alpha[value]
    value = real_array(name, value).astype(dtype)
    if value.shape:
        raise ValueError(f"{name}: expected a number, got shape {value.shape}.")
    _check_finite_value(name, value)
    if not concrete(value):
        return value if least == -math.inf else nan_where(value < least, value)
    if float(value) < least:
        raise ValueError(f"{name}: expected a nonnegative number, got {value}.")
    return value


def _check_finite_value(name: str, value: jax.Array) -> None:
    if concrete(value) and not np.isfinite(value).all():
        raise ValueError(f"{name}: expected finite numbers, got {value}.")
