"""Sums over windows, of arrays with axes of positions: for one input, or for both of a pair.

Positions of two inputs are flattened, in one of two layouts:

========  ==================  ==========================================================
layout    arrays of pairs     pairs of positions
========  ==================  ==========================================================
diagonal  [P, n1, n2]         equal positions: all that ``flatten`` needs
full      [1, n1 P, n2 P]     all, as pooling mixes them
========  ==================  ==========================================================

A convolution shifts both positions together, so it is a separable sum over one offset on each axis.
Pooling moves the positions of both inputs separately.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ntk.internal.checks import integer

Axes = tuple[int, ...]
Shape = tuple[int, ...]
Window = int | Sequence[int]


class Windows(NamedTuple):
    """A window at each output position, one entry for each axis of the image."""

    before: Shape  # of the input positions
    after: Shape
    window: Shape
    strides: Shape
    pads: tuple[tuple[int, int], ...]
    wrap: bool

    @property
    def size(self) -> int:
        """Return the number of positions in a window."""
        return math.prod(self.window)

    def position_counts(self) -> tuple[int, int]:
        """Return the numbers of positions before and after."""
        return math.prod(self.before), math.prod(self.after)


NO_POSITIONS = Windows((), (), (), (), (), False)


def place_windows(combinator: str, window, strides, padding: str, shape: Shape) -> Windows:
    """Return windows on images of this shape; a window of None is the whole image."""
    window = _value_per_axis(combinator, shape if window is None else window, shape)
    strides = _value_per_axis(combinator, strides, shape)
    if padding == "VALID" and any(w > s for w, s in zip(window, shape, strict=True)):
        raise ValueError(f"{combinator}: expected a window of at most {shape}, got {window}.")
    pads, after = [], []
    for size, w, stride in zip(shape, window, strides, strict=True):
        out = (size - w) // stride + 1 if padding == "VALID" else -(-size // stride)
        pad = max((out - 1) * stride + w - size, 0) if padding != "VALID" else 0
        if padding == "CIRCULAR" and pad > size:
            raise ValueError(f"{combinator}: expected a window of at most {shape}, got {window}.")
        after.append(out)
        pads.append((pad // 2, pad - pad // 2))
    wrap = padding == "CIRCULAR"
    return Windows(tuple(shape), tuple(after), window, strides, tuple(pads), wrap)


def _value_per_axis(combinator: str, value: Any, shape: Shape) -> Shape:
    if isinstance(value, int):
        return (value,) * len(shape)
    if len(value) != len(shape):
        expected = f"one number for each of {len(shape)} axes"
        raise ValueError(f"{combinator}: expected {expected}, got {value}.")
    return tuple(value)


def check_window(name: str, value: Any) -> int | tuple[int, ...]:
    """Return a window or strides, checked: an int, or a tuple with one for each axis."""
    if isinstance(value, list | tuple):
        return tuple(integer(name, v, 1) for v in value)
    return integer(name, value, 1)


def sums(x: jax.Array, windows: Windows, axes: Sequence[Axes]) -> jax.Array:
    """Sum over each window; the axes in ``axes[i]`` move together along the image's axis i."""
    for i, together in enumerate(axes):
        if windows.window[i] > 1 or windows.strides[i] > 1:
            x = _sum_along_axes(x, windows, i, together)
    return x


def _sum_along_axes(x: jax.Array, windows: Windows, i: int, axes: Axes) -> jax.Array:
    padded = _pad_axes(x, windows, i, axes)
    stride, count = windows.strides[i], windows.after[i]

    def shifted(offset):
        index = [slice(None)] * x.ndim
        for axis in axes:
            index[axis] = slice(offset, offset + (count - 1) * stride + 1, stride)
        return padded[tuple(index)]

    return functools.reduce(jnp.add, map(shifted, range(windows.window[i])))


def _pad_axes(x: jax.Array, windows: Windows, i: int, axes: Axes) -> jax.Array:
    if not any(windows.pads[i]):
        return x
    width = [windows.pads[i] if axis in axes else (0, 0) for axis in range(x.ndim)]
    return jnp.pad(x, width, mode="wrap" if windows.wrap else "constant")


def extract_patches(x: jax.Array, windows: Windows) -> jax.Array:
    """Return each window's entries, [n, P, C] -> [n, P', window, C]; zeros outside the image."""
    x = x.reshape(len(x), *windows.before, x.shape[-1])
    for i in range(len(windows.before)):
        x = _pad_axes(x, windows, i, (1 + i,))
    patches = []
    for offsets in itertools.product(*map(range, windows.window)):
        steps = zip(offsets, windows.after, windows.strides, strict=True)
        index = [slice(o, o + (n - 1) * stride + 1, stride) for o, n, stride in steps]
        part = x[(slice(None), *index)]
        patches.append(part.reshape(len(x), -1, x.shape[-1]))
    return jnp.stack(patches, 2)


def as_pair_rows(x: jax.Array, full: bool) -> jax.Array:
    """Return [n, P, ...] of single inputs as [G, A, ...], to meet [G, B, ...]."""
    if full:
        return x.reshape(1, x.shape[0] * x.shape[1], *x.shape[2:])
    return jnp.swapaxes(x, 0, 1)


def outer(a: jax.Array, b: jax.Array, full: bool) -> jax.Array:
    """Return products of [n1, P] and [n2, P], [G, A, B]."""
    return as_pair_rows(a, full)[:, :, None] * as_pair_rows(b, full)[:, None, :]


def sum_over_positions(x: jax.Array, full: bool, n1: int, n2: int) -> jax.Array:
    """Return the sum [n1, n2] over all pairs of positions."""
    if not full:
        return x.sum(0)
    return x.reshape(n1, -1, n2, x.shape[2] // n2).sum(1).sum(2)


def shares(windows: Windows) -> float:
    """Return the largest total share of one entry in the means of all windows."""
    per_axis = zip(windows.window, windows.strides, windows.after, strict=True)
    return math.prod(min(-(-window // stride), n) / window for window, stride, n in per_axis)


def min_over_positions(x: jax.Array, full: bool, n1: int, n2: int) -> jax.Array:
    """Return the smallest entry [n1, n2] over all pairs of positions."""
    if not full:
        return x.min(0)
    return x.reshape(n1, -1, n2, x.shape[2] // n2).min((1, 3))


def equal_positions(x: jax.Array, n1: int, n2: int) -> jax.Array:
    """Go from the full layout to the diagonal one."""
    x = x.reshape(n1, -1, n2, x.shape[2] // n2)
    return jnp.moveaxis(jnp.diagonal(x, axis1=1, axis2=3), 2, 0)


def sum_pair_windows(x: jax.Array, windows: Windows, full: bool, n1: int, n2: int) -> jax.Array:
    """Sum over the window of pairs [G, A, B], with both positions shifted together."""
    k, positions = len(windows.before), math.prod(windows.after)
    if full:
        x = x.reshape(n1, *windows.before, n2, *windows.before)
        x = sums(x, windows, [(1 + i, 2 + k + i) for i in range(k)])
        return x.reshape(1, n1 * positions, n2 * positions)
    x = x.reshape(*windows.before, n1, n2)
    return sums(x, windows, [(i,) for i in range(k)]).reshape(-1, n1, n2)


def pooled(x: jax.Array, windows: Windows, n1: int, n2: int) -> jax.Array:
    """Sum over the windows of both inputs, of pairs in the full layout."""
    k, positions = len(windows.before), math.prod(windows.after)
    x = x.reshape(n1, *windows.before, n2, *windows.before)
    x = sums(x, windows, [(1 + i,) for i in range(k)])
    x = sums(x, windows, [(2 + k + i,) for i in range(k)])
    return x.reshape(1, n1 * positions, n2 * positions)


def single(x: jax.Array, windows: Windows) -> jax.Array:
    """Sum over the window of single inputs [n, P]."""
    x = x.reshape(len(x), *windows.before)
    return sums(x, windows, [(1 + i,) for i in range(x.ndim - 1)]).reshape(len(x), -1)
