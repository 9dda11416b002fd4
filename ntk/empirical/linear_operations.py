"""Operations that are linear in a weight, with a gradient in factors.

This module defines the a and y of a layer ``y_p = W' a_p`` (:mod:`ntk.empirical.kernels`) for
``dot_general``, ``conv_general_dilated``, ``gather`` and ``dynamic_slice``.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from ntk.internal.jaxprs import shape_and_dtype


class TableRows(NamedTuple):
    """The row of a table that each position reads: columns with one nonzero entry."""

    row: jax.Array  # [positions]
    value: jax.Array  # [positions], the entry


class Product(NamedTuple):
    """How an operation multiplies by a weight, for one sample."""

    layout: tuple  # equal for operations with the same layout of gradients
    keep: Callable[..., Any]  # the operation's operands -> the argument of columns
    columns: Callable[[Any], Any]  # a, [positions, groups, inputs per group], or TableRows
    outputs: Callable[[jax.Array], jax.Array]  # y, [positions, groups, outputs per group]
    rows: int | None = None  # of a table


def product_with_operand(eqn: JaxprEqn, operand: int) -> Product | None:
    """Return how the operation is linear in this operand; None if that is unknown."""
    of = {
        "dot_general": _dot,
        "conv_general_dilated": _convolution_product,
        "gather": _gather,
        "dynamic_slice": _slice,
    }
    product_of = of.get(eqn.primitive.name)
    return product_of and product_of(eqn, operand)


def _dot(eqn: JaxprEqn, operand: int) -> Product:
    contracted, batched = eqn.params["dimension_numbers"]
    other = 1 - operand
    summed = sorted(zip(contracted[operand], contracted[other], strict=True))
    own = tuple(d for d, _ in summed)
    shape, batch = shape_and_dtype(eqn.invars[other]).shape, tuple(batched[other])
    summed_there = tuple(d for _, d in summed)
    free = tuple(d for d in range(len(shape)) if d not in (*summed_there, *batch))

    def size(dims):
        return math.prod(shape[d] for d in dims)

    def columns(a):
        a = a.transpose(*free, *batch, *summed_there)
        return a.reshape(size(free), size(batch), size(summed_there))

    def outputs(y):  # [batch, free of the first operand, free of the second one]
        if operand == 0:
            return y.reshape(size(batch), -1, size(free)).transpose(2, 0, 1)
        return jnp.swapaxes(y.reshape(size(batch), size(free), -1), 0, 1)

    layout = "dot", tuple(batched[operand]), own
    return Product(layout, lambda *operands: operands[other], columns, outputs)


def _convolution_product(eqn: JaxprEqn, operand: int) -> Product | None:
    if operand == 0 or eqn.params["batch_group_count"] != 1:
        return None
    numbers, groups = eqn.params["dimension_numbers"], eqn.params["feature_group_count"]
    (batch, channels, *space), (_, _, *window) = numbers.lhs_spec, numbers.rhs_spec
    size = tuple(shape_and_dtype(eqn.invars[1]).shape[d] for d in window)
    names = "window_strides", "padding", "lhs_dilation", "rhs_dilation"
    options = [eqn.params[name] for name in names]

    def columns(a):
        return _window_patches(a.transpose(batch, *space, channels), size, groups, *options)

    def outputs(y):
        batch, channels, *space = numbers.out_spec
        y = y.transpose(batch, *space, channels)
        return y.reshape(math.prod(y.shape[:-1]), groups, -1)

    layout = "convolution", tuple(numbers.rhs_spec), groups
    return Product(layout, lambda a, _: a, columns, outputs)


def _window_patches(x, size, groups, strides, padding, spread, dilation):
    """Return patches of ``x`` [b, *space, c], [positions, groups, window and channels]."""
    edges = [(low, high, s - 1) for (low, high), s in zip(padding, spread, strict=True)]
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *edges, (0, 0, 0)])
    for axis, k in enumerate(size):  # [b, ..., n, ..., c] to [b, ..., steps, k, ..., c]
        window = (k - 1) * dilation[axis] + 1
        steps = (x.shape[1 + 2 * axis] - window) // strides[axis] + 1
        at = strides[axis] * np.arange(steps)[:, None] + dilation[axis] * np.arange(k)
        x = jnp.take(x, at, axis=1 + 2 * axis, mode="clip")
    rank, channels = len(size), x.shape[-1]
    x = jnp.moveaxis(x, range(2, 2 * rank + 1, 2), range(-1 - rank, -1))
    x = x.reshape(math.prod(x.shape[: 1 + rank]), math.prod(size), groups, channels // groups)
    return jnp.swapaxes(x, 1, 2).reshape(len(x), groups, -1)


def _row_axis(eqn: JaxprEqn) -> int | None:
    """Return the axis along which whole rows are read, one at a time."""
    shape, sizes = shape_and_dtype(eqn.invars[0]).shape, eqn.params["slice_sizes"]
    cut = [k for k, (size, length) in enumerate(zip(sizes, shape, strict=True)) if size != length]
    return cut[0] if len(cut) == 1 and sizes[cut[0]] == 1 else None


def _gather(eqn: JaxprEqn, operand: int) -> Product | None:
    numbers, axis = eqn.params["dimension_numbers"], _row_axis(eqn)
    mode = getattr(eqn.params["mode"], "name", "")
    if operand == 1 or axis is None or axis not in numbers.start_index_map:
        return None
    alone = len(numbers.start_index_map) == 1
    known = mode in ("CLIP", "PROMISE_IN_BOUNDS") or (mode == "FILL_OR_DROP" and alone)
    if not known or numbers.operand_batching_dims:
        return None
    length = shape_and_dtype(eqn.invars[0]).shape[axis]
    dtype = shape_and_dtype(eqn.outvars[0]).dtype
    column, offsets = numbers.start_index_map.index(axis), numbers.offset_dims

    def keep(_, indices):
        index = indices[..., column].reshape(-1)
        clipped = jnp.clip(index, 0, length - 1)
        # Gradients of rows out of range are dropped, as in JAX, unless the mode clips them.
        inside = jnp.ones(index.shape, bool) if mode == "CLIP" else clipped == index
        return TableRows(clipped, inside.astype(dtype))

    def outputs(y):
        positions = [d for d in range(y.ndim) if d not in offsets]
        count = math.prod(y.shape[d] for d in positions)
        return y.transpose(*positions, *offsets).reshape(count, 1, -1)

    return Product(("rows", axis), keep, lambda rows: rows, outputs, length)


def _slice(eqn: JaxprEqn, operand: int) -> Product | None:
    axis = _row_axis(eqn)
    if operand != 0 or axis is None:
        return None
    length = shape_and_dtype(eqn.invars[0]).shape[axis]
    dtype = shape_and_dtype(eqn.outvars[0]).dtype

    def keep(_, *starts):
        index = jnp.clip(starts[axis], 0, length - 1).reshape(1)
        return TableRows(index, jnp.ones(1, dtype))

    return Product(("rows", axis), keep, lambda rows: rows, lambda y: y.reshape(1, 1, -1), length)
