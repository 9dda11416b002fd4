"""Convolutions and pooling of images [n, h, w, c] that differentiate fast on a CPU too.

    y[n, i, j, o] = sum_{a, b, c} x[n, s i + d a - p, s j + d b - p, c] k[a, b, c, o]

with k = ``kernel`` [size, size, channels / groups, outputs] and s, d, p = ``stride``, ``dilation``,
``padding``.

XLA's CPU code is slow for a convolution's gradient in its weights, and for depthwise convolutions
altogether. A convolution is linear in ``x`` and in ``k``. So its derivative consists of two linear
maps, of dx and of dk, and reverse mode runs their transposes. Here the maps and their transposes
are fast programs. Dense convolutions are a primitive, because JAX's own transpose would be slow:

=============  ===========================================  ========================================
map            written as                                   its transpose
=============  ===========================================  ========================================
dx, depthwise  pixels, added to the outputs they reach      weighted sum of shifted copies of dy
dx, dense      XLA's convolution, or products               the same, of dy with the turned kernel
dk, depthwise  example by example, weights at all pixels    sum over examples, then over pixels
dk, dense      XLA's convolution, or products               dy' times patches of x, in small batches
=============  ===========================================  ========================================

Forward mode, higher derivatives and vmap work, which a ``jax.custom_vjp`` would forbid. The
backward pass recomputes shifted copies and patches. Other devices, and arrays on a mesh with
explicit axes, use XLA's convolution.
"""

import functools
import operator
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from bilevel.internal.checks import as_floating, at_least_float32, images, integer, real_array
from ntk.internal.sharding import explicit_mesh, pcast_varying, varying

_BLOCK_BYTES = 5 << 18  # of a block's patches: more would leave a CPU core's cache
_FEW = 16  # channels: XLA's convolutions of so few take up to twice the time of products


class _Window(NamedTuple):
    """The sizes of a sliding window; hashable, so that it can be a static argument."""

    size: int
    stride: int
    dilation: int
    padding: int

    @property
    def reach(self) -> int:
        return self.dilation * (self.size - 1)

    def positions(self, length: int) -> int:
        return (length + 2 * self.padding - self.reach - 1) // self.stride + 1


def convolve_images(
    x: chex.Array,
    kernel: chex.Array,
    *,
    stride: int = 1,
    dilation: int = 1,
    padding: int | None = None,
    groups: int = 1,
) -> jax.Array:
    """Cross-correlate images with a square kernel.

    On the CPU, gradients of dense (``groups=1``) and depthwise (``groups = c = outputs``)
    convolutions take the fast forms of this module, and depthwise ones their values too; 16-bit
    inputs are computed in float32. XLA computes other groups.

    Parameters
    ----------
    x : array [n, h, w, c]
    kernel : array [size, size, c / groups, outputs]
    stride, dilation : int
    padding : int, optional
        Zeros around the image. The default keeps its size at stride 1 (odd ``size``).
    groups : int
        The channels are split into as many groups, each with its own kernel.

    Returns
    -------
    array [n, h', w', outputs], ``h' = (h + 2 padding - dilation (size - 1) - 1) // stride + 1``

    Raises
    ------
    ValueError
        If shapes do not fit together, or the window does not fit into the image.

    Examples
    --------
    >>> x = jnp.arange(9.0).reshape(1, 3, 3, 1)
    >>> convolve_images(x, jnp.ones((3, 3, 1, 1)))[0, :, :, 0]
    Array([[ 8., 15., 12.],
           [21., 36., 27.],
           [20., 33., 24.]], dtype=float...)
    """
    x, kernel = as_floating("x", x), real_array("kernel", kernel)
    groups = integer("groups", groups, 1)
    if kernel.ndim != 4 or kernel.shape[0] != kernel.shape[1] or not kernel.size:
        raise ValueError(f"kernel: expected [size, size, c / groups, outputs], got {kernel.shape}.")
    size, _, channels, outputs = kernel.shape
    if x.ndim != 4 or x.shape[-1] != channels * groups or outputs % groups:
        raise ValueError(
            f"x: expected [n, h, w, {channels * groups}] for a kernel {kernel.shape} in {groups} "
            f"groups, got {x.shape}."
        )
    window = _make_window(x, size, stride, dilation, padding)
    if size == 1 and groups == 1 and window.padding == 0:
        pixels = x[:, ::stride, ::stride]
        # With one axis of pixels, the kernel's gradient takes a third of the time on a CPU.
        return (pixels.reshape(-1, channels) @ kernel[0, 0]).reshape(*pixels.shape[:3], outputs)
    # On a mesh with explicit axes, blocks of images could not be cut from a device's part.
    fast = jax.default_backend() == "cpu" and explicit_mesh((x, kernel)) is None
    if fast and groups == 1:
        return _widely(_dense_convolution, x, kernel, window)
    if fast and groups == outputs and channels == 1:
        return _widely(_depthwise, x, kernel, window)
    return _xla_convolution(x, kernel, window, groups)


def _make_window(x, size, stride, dilation, padding) -> _Window:
    size, stride = integer("size", size, 1), integer("stride", stride, 1)
    dilation = integer("dilation", dilation, 1)
    padding = dilation * (size - 1) // 2 if padding is None else integer("padding", padding, 0)
    window = _Window(size, stride, dilation, padding)
    if window.padding > window.reach:
        raise ValueError(
            f"padding: expected less than the window's {window.reach + 1} pixels, got {padding}."
        )
    if min(map(window.positions, x.shape[1:3])) < 1:
        raise ValueError(
            f"x: expected images of at least {window.reach + 1 - 2 * window.padding} pixels a "
            f"side, got {x.shape[1:3]}."
        )
    return window


@functools.partial(jax.jit, static_argnums=(0, 3))  # so that equal shapes are traced once
def _widely(rule, x, kernel, window):
    # 16 bits are too coarse for sums over all pixels of a batch.
    wide = at_least_float32(x.dtype)
    return rule(x.astype(wide), kernel.astype(wide), window).astype(x.dtype)


def _xla_convolution(x, kernel, window, groups=1, kernel_axes="HWIO"):
    return lax.conv_general_dilated(
        x,
        kernel,
        (window.stride,) * 2,
        [(window.padding,) * 2] * 2,
        rhs_dilation=(window.dilation,) * 2,
        dimension_numbers=("NHWC", kernel_axes, "NHWC"),
        feature_group_count=groups,
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _dense_convolution(x, kernel, window):
    return _xla_convolution(x, kernel, window)


@functools.partial(_dense_convolution.defjvp, symbolic_zeros=True)
def _dense_derivative(window, primals, tangents):
    x, kernel = primals
    maps = (lambda dx: _bilinear(dx, kernel, window), lambda dk: _bilinear(x, dk, window))
    return _with_tangent(_bilinear(x, kernel, window), maps, tangents)


def _bilinear(x, kernel, window):
    """Compute the dense convolution, as a primitive with its own transposes and batching."""
    # One device's part of the images and a shared kernel: the kernel's gradient sums over devices.
    x, kernel = pcast_varying((x, kernel), varying((x, kernel)))
    return _bilinear_p.bind(x, kernel, window=window)


def _in_its_precision(rule):
    """Let JAX run a rule of the primitive after the end of a caller's `jax.enable_x64` block."""

    @functools.wraps(rule)
    def run(first, *others, window):
        with jax.enable_x64(first.dtype == np.float64):
            return rule(first, *others, window=window)

    return run


@_in_its_precision
def _dense_value(x, kernel, *, window):
    if max(x.shape[-1], kernel.shape[-1]) > _FEW:
        return _xla_convolution(x, kernel, window)
    if x.shape[-1] == 1:
        return _patch_convolution(x, kernel, window)
    return (_row_convolution if window.stride == 1 else _xla_convolution)(x, kernel, window)


def _abstract_bilinear(x, kernel, *, window):
    return jax.make_jaxpr(functools.partial(_dense_value, window=window))(x, kernel).out_avals[0]


@_in_its_precision
def _transposed_in_x(dy, x, kernel, *, window):
    if window.stride == 1 and max(x.aval.shape[-1], dy.shape[-1]) <= _FEW:
        turned = jnp.flip(kernel.swapaxes(2, 3), (0, 1))
        return _bilinear(dy, turned, window._replace(padding=window.reach - window.padding))
    # The transpose flips the kernel, which cancels this flip. XLA would merge a remaining `reverse`
    # into the backward convolution, ten times slower inside a loop.
    turned = jnp.flip(jnp.flip(kernel, (0, 1)).swapaxes(2, 3), (0, 1))
    forward = functools.partial(_xla_convolution, window=window, kernel_axes="HWOI")
    return jax.linear_transpose(lambda x: forward(x, turned), x.aval)(dy)[0]


@_in_its_precision
def _transposed_in_kernel(dy, x, kernel, *, window):
    if window.stride == 1:
        return _row_gradient(x, dy, window)
    return jax.linear_transpose(lambda k: _patch_convolution(x, k, window), kernel.aval)(dy)[0]


def _batched_bilinear(arguments, axes, *, window):
    x, kernel = (
        a if axis is None else jnp.moveaxis(a, axis, 0)
        for a, axis in zip(arguments, axes, strict=True)
    )
    if axes[1] is None:
        y = _bilinear(x.reshape(-1, *x.shape[2:]), kernel, window)
        return y.reshape(*x.shape[:2], *y.shape[1:]), 0
    if axes[0] is None:
        return lax.map(lambda kernel: _bilinear(x, kernel, window), kernel), 0
    return lax.map(lambda pair: _bilinear(pair[0], pair[1], window), (x, kernel)), 0


_bilinear_p = Primitive("dense_convolution")
_bilinear_p.def_impl(_dense_value)
_bilinear_p.def_abstract_eval(_abstract_bilinear)
mlir.register_lowering(_bilinear_p, mlir.lower_fun(_dense_value, multiple_results=False))
ad.defbilinear(_bilinear_p, _transposed_in_x, _transposed_in_kernel)
batching.primitive_batchers[_bilinear_p] = _batched_bilinear


def _patch_convolution(x, kernel, window):
    """Compute the dense convolution by products with the patches of a few images at a time."""

    def convolved(images, flat):
        patches = jnp.concatenate(_shifted(images, window), -1)
        return patches.reshape(-1, patches.shape[-1]) @ flat.T

    body = jax.checkpoint(convolved, prevent_cse=False)  # reverse mode stores only x
    shape = len(x), *map(window.positions, x.shape[1:3]), kernel.shape[-1]
    flat = kernel.reshape(-1, kernel.shape[-1]).T
    (blocks,) = _blocks(shape[1] * shape[2] * flat.shape[1], x)
    return lax.map(lambda images: body(images, flat), blocks).reshape(shape)


def _row_convolution(x, kernel, window):
    """Compute the dense convolution at stride 1 by products with the rows of patches.

    One product serves all ``size`` rows of the kernel. Its outputs are then shifted and added.
    """
    height, channels, outputs = x.shape[1], x.shape[3], kernel.shape[-1]
    rows, columns = map(window.positions, x.shape[1:3])
    flat = kernel.transpose(1, 2, 0, 3).reshape(window.size * channels, -1)

    def convolved(images, flat):
        y = _patch_rows(images, window) @ flat
        y = _pad_height(y.reshape(len(images), height, columns, -1), window.padding)
        parts = enumerate(jnp.split(y, window.size, -1))
        return sum(part[:, a * window.dilation :][:, :rows] for a, part in parts)

    body = jax.checkpoint(convolved, prevent_cse=False)  # reverse mode stores only x
    (blocks,) = _blocks(height * columns * window.size * (channels + outputs), x)
    y = lax.map(lambda images: body(images, flat), blocks)
    return y.reshape(len(x), rows, columns, outputs)


def _row_gradient(x, dy, window):
    """Return the gradient of the kernel at stride 1, a product of the rows of patches."""
    height, channels, outputs = x.shape[1], x.shape[3], dy.shape[-1]

    def add(total, block):
        images, dy = block
        dy = _pad_height(dy, window.reach - window.padding)
        firsts = [window.reach - a * window.dilation for a in range(window.size)]
        shifted = jnp.concatenate([dy[:, first : first + height] for first in firsts], -1)
        product = _patch_rows(images, window).T @ shifted.reshape(-1, window.size * outputs)
        return total + product, None

    blocks = _blocks(height * dy.shape[2] * window.size * (channels + outputs), x, dy)
    zeros = jnp.zeros((window.size * channels, window.size * outputs), x.dtype)
    zeros = pcast_varying(zeros, varying((x, dy)))
    total, _ = lax.scan(jax.checkpoint(add, prevent_cse=False), zeros, blocks)
    shape = window.size, channels, window.size, outputs
    return total.reshape(shape).transpose(2, 0, 1, 3)


def _patch_rows(x, window):
    """Return the row of a patch at each pixel [n h w', size c], for all rows of the images."""
    step, columns = window.dilation, window.positions(x.shape[2])
    x = jnp.pad(x, [(0, 0), (0, 0), (window.padding,) * 2, (0, 0)])
    shifted = [x[:, :, b * step : b * step + columns] for b in range(window.size)]
    return jnp.concatenate(shifted, -1).reshape(-1, window.size * x.shape[-1])


def _pad_height(x, count):
    return jnp.pad(x, [(0, 0), (count, count), (0, 0), (0, 0)])


def _blocks(numbers, *arrays):
    """Split the first axis of ``arrays`` into blocks that need ``numbers`` for each image."""
    n = len(arrays[0])
    most = max(1, min(n, _BLOCK_BYTES // (numbers * arrays[0].dtype.itemsize)))
    block = next(b for b in range(most, 0, -1) if n % b == 0)
    return [a.reshape(n // block, block, *a.shape[1:]) for a in arrays]


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _depthwise(x, kernel, window):
    return _weighted_sum(_shifted(x, window), kernel.reshape(-1, x.shape[-1]))


@functools.partial(_depthwise.defjvp, symbolic_zeros=True)
def _depthwise_derivative(window, primals, tangents):
    x, kernel = primals

    def along_x(dx):
        return _scatter_convolution(materialized(dx, kernel[0, 0, 0, 0]), kernel, window)

    def along_kernel(dk):
        n, height, width, channels = x.shape
        out = window.positions(height), window.positions(width), channels
        # At stride 1, a row's pixels and channels are merged into one axis: long loops are faster.
        unit = channels if window.stride == 1 else 1

        def weighted(image, everywhere):
            return _weighted_sum(_shifted(image, window, unit), everywhere)

        body = jax.checkpoint(weighted, prevent_cse=False)  # reverse mode stores only x
        # The weights broadcast to all pixels: their gradients are then sums over examples alone.
        everywhere = [jnp.broadcast_to(d, out) for d in dk.reshape(-1, channels)]
        everywhere = [d.reshape(out[0], out[1] * unit, -1) for d in everywhere]
        rows = x.reshape(n, height, width * unit, -1)
        return lax.map(lambda image: body(image, everywhere), rows).reshape(n, *out)

    return _with_tangent(_depthwise(x, kernel, window), (along_x, along_kernel), tangents)


def materialized(x: chex.Array, number: chex.Array) -> jax.Array:
    """Return ``x``; on a CPU, it and its cotangent are written to memory here.

    XLA would otherwise fuse elementwise programs where that costs time: with an update in place on
    one core, or sums over windows with each other. It does not fuse across a branch, so there is
    one here (XLA removes barriers before). ``number`` is any scalar unknown at compile time.
    """
    if jax.default_backend() != "cpu":
        return x
    # XLA would remove the branch if both sides were the same program: -(-x) is x in another one.
    return lax.cond(number > 0, lambda x: x, lambda x: lax.neg(lax.neg(x)), x)


def _with_tangent(y, maps, tangents):
    """Return ``y`` and the sum of ``map(tangent)`` over tangents that are not symbolic zeros."""
    pairs = zip(maps, tangents, strict=True)
    parts = [along(t) for along, t in pairs if not isinstance(t, SymbolicZero)]
    return y, functools.reduce(operator.add, parts) if parts else jnp.zeros_like(y)


def _weighted_sum(arrays, weights):
    def product(a, w):
        return a * jnp.expand_dims(w, tuple(range(jnp.ndim(a) - jnp.ndim(w))))

    pairs = zip(arrays, weights, strict=True)
    return functools.reduce(operator.add, (product(a, w) for a, w in pairs))


def _shifted(x, window, unit=1):
    """Return the size^2 shifted views of ``x`` [..., h, w unit, c]; units above 1 need stride 1."""
    *batch, height, width, channels = x.shape
    rows, columns = window.positions(height), window.positions(width // unit) * unit
    p, s, step = window.padding, window.stride, window.dilation
    x = jnp.pad(x, [(0, 0)] * len(batch) + [(p, p), (p * unit, p * unit), (0, 0)])
    views = []
    for a, b in np.ndindex(window.size, window.size):
        first = (a * step, b * step * unit)
        last = (first[0] + s * (rows - 1) + 1, first[1] + s * (columns - 1) + 1)
        zeros, ones = [0] * len(batch), [1] * len(batch)
        views.append(lax.slice(x, (*zeros, *first, 0), (*batch, *last, channels), (*ones, s, s, 1)))
    return views


def _scatter_convolution(x, kernel, window):
    """Compute the depthwise convolution by adding each pixel to the outputs it reaches.

    Pixel u times k[a] goes to place ``u + reach - d a`` of a buffer in which output i is at
    ``s i + reach - p``. The transpose reads shifted copies of the buffer's cotangent.
    """
    n, height, width, channels = x.shape
    reach, s = window.reach, window.stride
    zero = jnp.zeros((), x.dtype)
    placed = []
    for a, b in np.ndindex(window.size, window.size):
        low = (reach - a * window.dilation, reach - b * window.dilation)
        edges = [(0, 0, 0), *((lo, reach - lo, 0) for lo in low), (0, 0, 0)]
        placed.append(lax.pad(x * kernel[a, b, 0][None, None, None], zero, edges))
    start = reach - window.padding
    stop = [start + s * (window.positions(length) - 1) + 1 for length in (height, width)]
    total = functools.reduce(operator.add, placed)
    return lax.slice(total, (0, start, start, 0), (n, *stop, channels), (1, s, s, 1))


def max_pooling(x: chex.Array, size: int, *, stride: int = 1, padding: int = 0) -> jax.Array:
    """Return the largest value in each window of ``x`` [n, h, w, c]; padding counts as -infinity.

    Equal values share the gradient.

    Raises
    ------
    ValueError
        If ``x`` is not images, or the window does not fit.

    Examples
    --------
    >>> x = jnp.arange(9.0).reshape(1, 3, 3, 1)
    >>> max_pooling(x, 3, stride=2, padding=1)[0, :, :, 0]
    Array([[4., 5.],
           [7., 8.]], dtype=float...)
    """
    x = as_floating("x", images("x", x))
    return _separable(jnp.maximum, -jnp.inf, x, _make_window(x, size, stride, 1, padding))


def average_pooling(x: chex.Array, size: int, *, stride: int = 1, padding: int = 0) -> jax.Array:
    """Return the mean of each window of ``x`` [n, h, w, c] over the pixels inside the image."""
    x = as_floating("x", images("x", x))
    window = _make_window(x, size, stride, 1, padding)
    rows, columns = (_counts(window, length) for length in x.shape[1:3])
    share = 1 / (rows[:, None] * columns)[..., None]
    return _separable(operator.add, 0, x, window) * jnp.asarray(share, x.dtype)[None]


def _counts(window: _Window, length: int) -> np.ndarray:
    """Count the pixels inside the image at each of a window's positions along an axis."""
    start = window.stride * np.arange(window.positions(length)) - window.padding
    return np.minimum(start + window.size, length) - np.maximum(start, 0)


@functools.partial(jax.jit, static_argnums=(0, 1, 3))
def _separable(combine, neutral, x, window):
    """Combine windows along rows, then along columns: 2 (size - 1) operations."""
    for axis in (1, 2):
        p, span = window.padding, window.stride * (window.positions(x.shape[axis]) - 1) + 1
        edges = [(p, p) if i == axis else (0, 0) for i in range(4)]
        padded = jnp.pad(x, edges, constant_values=neutral)
        starts = range(window.size)
        views = (lax.slice_in_dim(padded, a, a + span, window.stride, axis) for a in starts)
        x = functools.reduce(combine, views)
    return x
