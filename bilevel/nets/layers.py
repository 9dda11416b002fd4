"""Parts of convolutional networks: convolution, batch normalisation, initial weights.

Supernets and train-free scores use :class:`Standardize`, with the batch's own statistics. Networks
trained from scratch use ``flax.linen.BatchNorm``.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from bilevel.internal.checks import at_least_float32
from bilevel.nets.convolution import convolve_images

Norm = Callable[[], nn.Module]

# U(-1, 1) / sqrt(fan-in), as `draw_parameters` draws it.
_uniform = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


class Conv(nn.Module):
    """Convolution without bias; float32 parameters, arithmetic in the dtype of ``x``."""

    features: int
    size: int = 1
    stride: int = 1
    dilation: int = 1
    padding: int | None = None
    depthwise: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[n, h, w, c] -> [n, h', w', features]."""
        groups = x.shape[-1] if self.depthwise else 1
        shape = (self.size, self.size, x.shape[-1] // groups, self.features)
        kernel = self.param("kernel", _uniform, shape)
        return convolve_images(
            x,
            kernel.astype(x.dtype),
            stride=self.stride,
            dilation=self.dilation,
            padding=self.padding,
            groups=groups,
        )


class Standardize(nn.Module):
    """Batch normalisation by the batch's own statistics, in float32 or wider; no state."""

    affine: bool = False  # adds the learned scale and shift

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[n, h, w, c] -> the same, each channel with mean 0 and variance 1."""
        full = x.astype(at_least_float32(x.dtype))
        axes = 0, 1, 2
        centred = full - full.mean(axes, keepdims=True)
        out = centred * jax.lax.rsqrt(jnp.mean(centred**2, axes, keepdims=True) + 1e-5)
        if self.affine:
            scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
            bias = self.param("bias", nn.initializers.zeros, x.shape[-1:])
            scale, bias = (jnp.expand_dims(a, (0, 1, 2)).astype(out.dtype) for a in (scale, bias))
            out = out * scale + bias
        return out.astype(x.dtype)


def draw_parameters(key: chex.PRNGKey, shapes: Any) -> Any:
    """Draw kernels from U(-1, 1) / sqrt(fan-in), as the references do; scales are 1, biases 0.

    The network is not run, because compiling it would take time.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(shapes)
    bounds = [_initial_bound(*leaf) for leaf in leaves]
    sizes = [math.prod(leaf.shape) for _, leaf in leaves]
    # One draw cut into pieces: hundreds of separate draws would take minutes to compile.
    uniform = jax.random.uniform(key, (sum(sizes),), jnp.float32, -1, 1)
    runs = itertools.groupby(zip(bounds, sizes, strict=True), key=lambda pair: pair[0])
    lengths = [(bound, sum(size for _, size in run)) for bound, run in runs]
    # With jnp, so that `jax.eval_shape` allocates no large arrays.
    factors, offsets = (
        jnp.concatenate([jnp.full(n, bound[i], jnp.float32) for bound, n in lengths])
        for i in range(2)
    )
    pieces = jnp.split(uniform * factors + offsets, list(itertools.accumulate(sizes[:-1])))
    drawn = [piece.reshape(leaf.shape) for piece, (_, leaf) in zip(pieces, leaves, strict=True)]
    return jax.tree.unflatten(structure, drawn)


def _initial_bound(path: Any, leaf: Any) -> tuple[float, float]:
    """Return the factor and the offset of the uniform draw for a parameter of this path."""
    if path[-1].key == "kernel":  # [..., size, size, c, outputs] or [c, outputs]
        return 1 / math.sqrt(math.prod(leaf.shape[-4:-1])), 0.0
    return 0.0, float(path[-1].key == "scale")


def batch_norm(train: bool, dtype: Any) -> Norm:
    """Make batch normalisation layers with running averages, for arithmetic in ``dtype``."""
    return functools.partial(
        nn.BatchNorm, use_running_average=not train, momentum=0.9, epsilon=1e-5, dtype=dtype
    )


def pixel_means(x: jax.Array) -> jax.Array:
    """Return the means over pixels [n, c] of ``x`` [n, h, w, c], in float32 or wider."""
    return x.mean((1, 2), dtype=at_least_float32(x.dtype))


def cast_images(x: chex.Array, dtype: Any) -> jax.Array:
    """Return images in ``dtype``, by default their own or float32."""
    x = jnp.asarray(x)  # numpy's float64 becomes JAX's own dtype
    return x.astype(at_least_float32(x.dtype) if dtype is None else dtype)
