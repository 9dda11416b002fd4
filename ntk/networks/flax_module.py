"""The finite network of a description, in flax, in the same parametrization.

All weights are standard normal; the factors ``sqrt(c_w / fan_in)`` and ``sqrt(c_b)`` are in the
network. Its tangent kernel tends to the infinite one as the width grows.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from ntk.infinite.layer_expansions import evaluate_layer
from ntk.internal.checks import float_array, integer
from ntk.networks.plan import Average, Diagonal, Elements, Flat, Linear, Sum, Windows, plan_network

if TYPE_CHECKING:
    from ntk.networks.network import Network

_normal = nn.initializers.normal(1.0)


class Module(nn.Module):
    """Made by :meth:`ntk.networks.Network.module`."""

    network: "Network"
    width: int
    outputs: int

    @nn.compact
    def __call__(self, x: chex.Array, alpha: Mapping[str, Any] | None = None) -> jax.Array:
        """[n, outputs] of inputs [n, ..., channels]."""
        if isinstance(x, list) or not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            x = float_array("x", x)
        if x.ndim < 2:
            raise ValueError(f"x: expected inputs [n, ..., channels], got shape {x.shape}.")
        found = plan_network(self.network, x.shape[1:-1], alpha, x.dtype, merged=False)
        last = max(i for i, s in enumerate(found.steps) if isinstance(s, Linear | Sum))
        if isinstance(found.steps[last], Sum):
            raise ValueError(
                "network: expected dense or conv to make the outputs, got add at the end."
            )
        for i, (step, numbers) in enumerate(zip(found.steps, found.numbers, strict=True)):
            x = _apply_plan_step(step, numbers, x, self.outputs if i == last else self.width)
        return x.reshape(len(x), self.outputs)


class Weighted(nn.Module):
    """``sqrt(c_w / fan_in) W * x + sqrt(c_b) b``."""

    windows: Windows
    features: int
    bias: bool

    @nn.compact
    def __call__(
        self, x: jax.Array, weight_variance: chex.Array, bias_variance: chex.Array
    ) -> jax.Array:
        """[n, ..., channels] -> [n, ..., features]."""
        windows, channels = self.windows, x.shape[-1]
        shape = (*windows.window, channels, self.features)
        kernel = self.param("kernel", _normal, shape, x.dtype)
        kernel = kernel * jnp.sqrt(weight_variance * self.features / kernel.size)
        if windows.window:
            pads = list(windows.pads)
            if windows.wrap:
                x, pads = jnp.pad(x, [(0, 0), *pads, (0, 0)], mode="wrap"), [(0, 0)] * len(pads)
            axes = "HW"[: len(pads)]
            form = (f"N{axes}C", f"{axes}IO", f"N{axes}C")
            out = jax.lax.conv_general_dilated(
                x, kernel, windows.strides, pads, dimension_numbers=form
            )
        else:
            out = x.reshape(len(x), channels) @ kernel
        if self.bias:
            shift = self.param("bias", _normal, (self.features,), x.dtype)
            out = out + jnp.sqrt(bias_variance) * shift
        return out


def _apply_plan_step(step, numbers, x, features):
    """One step of a plan; submodules are those of the module that calls."""
    match step:
        case Linear():
            return Weighted(step.windows, features, step.bias)(x, *numbers)
        case Elements():
            return evaluate_layer(step.activations, numbers, x)
        case Average():
            return nn.avg_pool(x, step.windows.window, step.windows.strides, "VALID")
        case Flat():
            return x.reshape(len(x), -1)
        case Sum():
            weights, inner = numbers
            parts = []
            for k, steps in enumerate(step.branches):
                part = x
                for s, number in zip(steps, inner[k], strict=True):
                    part = _apply_plan_step(s, number, part, features)
                parts.append(weights[k] * part)
            return sum(parts)
    assert isinstance(step, Diagonal)  # of kernels alone
    return x


def module(network: "Network", *, width: int, outputs: int = 1) -> nn.Module:
    """The finite network; see :meth:`ntk.networks.Network.module`.

    Raises
    ------
    ValueError
        If a number is not a positive whole one.
    """
    return Module(network, integer("width", width, 1), integer("outputs", outputs, 1))
