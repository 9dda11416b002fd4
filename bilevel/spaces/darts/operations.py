"""The eight operations of the DARTS cell, on images [n, h, w, channels] (Liu et al. 2019).

======================  ===============================================================
operation               program, for stride s
======================  ===============================================================
``none``                zeros; mixtures skip it
``max_pool_3x3``        padding 1
``avg_pool_3x3``        padding 1, mean over the pixels inside the image
``skip_connect``        identity; :class:`FactorizedReduce` at stride 2
``sep_conv_3x3, 5x5``   twice [ReLU, depthwise k x k, 1 x 1, norm], stride s then 1
``dil_conv_3x3, 5x5``   ReLU, depthwise k x k of dilation 2 and stride s, 1 x 1, norm
======================  ===============================================================

``norm()`` makes the normalisation layer: :class:`Standardize` in the supernet, batch normalisation
with running averages in networks trained from scratch.
"""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from bilevel.nets.convolution import average_pooling, max_pooling
from bilevel.nets.layers import Conv, Norm

PRIMITIVES = (
    "none",
    "max_pool_3x3",
    "avg_pool_3x3",
    "skip_connect",
    "sep_conv_3x3",
    "sep_conv_5x5",
    "dil_conv_3x3",
    "dil_conv_5x5",
)
"""The candidates, in the order of ``alpha``."""


class ReluConvNorm(nn.Module):
    """ReLU, 1 x 1 convolution, norm."""

    channels: int
    norm: Norm

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [n, h, w, c] to [n, h, w, channels]."""
        return self.norm()(Conv(self.channels)(nn.relu(x)))


class FactorizedReduce(nn.Module):
    """ReLU, two 1 x 1 convolutions of stride 2, the second one pixel off, norm.

    An odd side gets a zero at its end for the second; the reference requires even sides.
    """

    channels: int
    norm: Norm

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [n, h, w, c] to [n, ceil(h / 2), ceil(w / 2), channels]."""
        x = nn.relu(x)
        odd = [(0, 0), (0, x.shape[1] % 2), (0, x.shape[2] % 2), (0, 0)]
        half = self.channels // 2
        even = Conv(half, stride=2)(x)
        shifted = Conv(self.channels - half, stride=2)(jnp.pad(x, odd)[:, 1:, 1:])
        return self.norm()(jnp.concatenate([even, shifted], axis=-1))


class SeparableConv(nn.Module):
    """Twice ReLU, depthwise and 1 x 1 convolution, norm; the stride is the first one's."""

    channels: int
    stride: int
    norm: Norm
    size: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [n, h, w, channels] to [n, h', w', channels]."""
        for stride in (self.stride, 1):
            x = Conv(self.channels, self.size, stride, depthwise=True)(nn.relu(x))
            x = self.norm()(Conv(self.channels)(x))
        return x


class DilatedConv(nn.Module):
    """ReLU, depthwise convolution of dilation 2, 1 x 1 convolution, norm."""

    channels: int
    stride: int
    norm: Norm
    size: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [n, h, w, channels] to [n, h', w', channels]."""
        x = Conv(self.channels, self.size, self.stride, 2, depthwise=True)(nn.relu(x))
        return self.norm()(Conv(self.channels)(x))


def run_operation(
    name: str, x: jax.Array, channels: int, stride: int, norm: Norm, pool_norm: Norm | None = None
) -> jax.Array:
    """Apply an operation other than ``none`` inside a module; ``pool_norm`` follows pooling."""
    if name == "skip_connect":
        return x if stride == 1 else FactorizedReduce(channels, norm)(x)
    if name in _POOLS:
        x = _POOLS[name](x, 3, stride=stride, padding=1)
        return x if pool_norm is None else pool_norm()(x)
    return _CONVOLUTIONS[name](channels, stride, norm)(x)


_POOLS = {"max_pool_3x3": max_pooling, "avg_pool_3x3": average_pooling}
_CONVOLUTIONS: dict[str, Callable[..., nn.Module]] = {
    "sep_conv_3x3": functools.partial(SeparableConv, size=3),
    "sep_conv_5x5": functools.partial(SeparableConv, size=5),
    "dil_conv_3x3": functools.partial(DilatedConv, size=3),
    "dil_conv_5x5": functools.partial(DilatedConv, size=5),
}


def reductions(cells: int) -> set[int]:
    """Return the cells, counted from 0, that halve the image and double the channels."""
    return {cells // 3, 2 * cells // 3}
