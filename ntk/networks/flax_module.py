"""The finite network of a description, in flax, in the same parametrization.

All weights are standard normal; the network has the factors ``sqrt(c_w / fan_in)`` and
``sqrt(c_b)``. Its tangent kernel tends to the infinite one as the width grows.
"""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from ntk.internal.checks import float_array
from ntk.networks.contracts import Shape
from ntk.networks.plan import plan_network

if TYPE_CHECKING:
    from ntk.networks.network import Network

_normal = nn.initializers.normal(1.0)


class Module(nn.Module):
    """A finite network, from :meth:`ntk.networks.Network.module`."""

    network: "Network"
    width: int
    outputs: int

    @nn.compact
    def __call__(self, x: chex.Array, alpha: Mapping[str, Any] | None = None) -> jax.Array:
        """Return [n, outputs] for inputs [n, ..., channels]."""
        if isinstance(x, list) or not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            x = float_array("x", x)
        if x.ndim < 2:
            raise ValueError(f"x: expected inputs [n, ..., channels], got shape {x.shape}.")
        plan = plan_network(self.network, x.shape[1:-1], alpha, x.dtype, finite=True)
        last = max(i for i, step in enumerate(plan.steps) if step.weighted)
        if not plan.steps[last].makes_outputs:
            expected = "dense or conv to make the outputs"
            raise ValueError(f"network: expected {expected}, got add at the end.")
        for i, (step, numbers) in enumerate(zip(plan.steps, plan.numbers, strict=True)):
            x = step.apply(numbers, x, _Scope(self.outputs if i == last else self.width))
        return x.reshape(len(x), self.outputs)


@dataclasses.dataclass
class _Scope:
    """The part of the module that a layer sees."""

    features: int

    def weights(self, dtype: Any, **shapes: Shape) -> dict[str, jax.Array]:
        """Return parameters in a separate submodule."""
        return Weighted(tuple(shapes.items()))(dtype)


class Weighted(nn.Module):
    """Standard normal weights of one layer."""

    shapes: tuple[tuple[str, Shape], ...]

    @nn.compact
    def __call__(self, dtype: Any) -> dict[str, jax.Array]:
        """Return the weights, by their names."""
        return {name: self.param(name, _normal, shape, dtype) for name, shape in self.shapes}
