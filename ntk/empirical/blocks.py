"""Empirical kernels, their diagonals and their products with vectors, block by block.

``net`` is a :class:`ntk.empirical.network_program.NetworkProgram`, and ``inputs`` are values like
its ``inputs``. A plan of None means neural-tangents.
"""

import functools
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from ntk.compat import load
from ntk.empirical import factored_gradients
from ntk.empirical.factored_gradients import GradientPlan
from ntk.empirical.network_program import NetworkProgram, replaced
from ntk.internal.batched_rows import (
    join_blocks,
    length,
    map_leading_axis,
    mirror_kernel,
    split_into_blocks,
    transpose_kernel,
    zero_padded_blocks,
)
from ntk.internal.checks import at_least_float32
from ntk.internal.jaxprs import shape_and_dtype
from ntk.internal.products import einsum
from ntk.internal.sharding import match_varying_axes, sharded
from ntk.internal.tiles import assemble, device_gram_tile_size, take_rows


def plan_for_method(net: NetworkProgram, method: str) -> GradientPlan | None:
    """Return how the gradients are computed, or None for neural-tangents."""
    if method == "neural_tangents":
        return None
    plan = factored_gradients.plan_gradients(net, factored=method != "jacobian")
    if method == "layerwise" and not plan.layered:
        raise ValueError(
            "method: expected an apply that multiplies by leaves of params for 'layerwise', got "
            "one in which no leaf is used in products alone."
        )
    return plan


_MUCH = 2**26  # bytes of per-sample gradients from which a warning is given


def warn_about_memory(net: NetworkProgram, plan: GradientPlan | None, outputs: str, rows: int):
    """Warn which parameters cost much memory."""
    variables = [shape_and_dtype(v) for v in (*net.jaxpr.constvars, *net.jaxpr.invars)]
    held = rows * (1 if outputs == "sum" else shape_and_dtype(net.jaxpr.outvars[0]).size)
    cost = {
        name: held * variables[i].size * max(4, variables[i].dtype.itemsize)
        for i, name in zip(net.trained, net.names, strict=True)
        if plan is not None and i in plan.jacobian_leaves
    }
    total = sum(cost.values())
    if total < _MUCH:
        return
    largest = sorted(cost, key=cost.__getitem__, reverse=True)
    named = [name for name in largest if cost[name] * 100 > total][:5]
    more = f" and {len(cost) - len(named)} more" if len(cost) > len(named) else ""
    warnings.warn(
        f"params: the gradients of {', '.join(named)}{more} are formed sample by sample, "
        f"{total / 1e9:.2g} GB at a time, because these are not used in products alone; "
        "a smaller batch_size takes less memory.",
        stacklevel=3,  # the caller of the kernel function
    )


def _factor_and_gram(
    net: NetworkProgram, plan: GradientPlan | None, outputs: str, tiled: bool
) -> tuple[Callable, Callable]:
    """Return ``factors(inputs, x)`` and ``gram(inputs, left, right)``, in tiles if ``tiled``.

    ``right`` is None for an exactly symmetric kernel of ``left``.
    """
    if plan is None:
        return lambda inputs, x: x, _neural_tangents_gram(net, outputs)
    letters = factored_gradients.FULL if outputs == "full" else factored_gradients.TRACE

    def gram(inputs, left, right):
        symmetric, right = right is None, left if right is None else right
        n1, n2 = length(left), length(right)
        if outputs == "full" or not tiled:
            whole = factored_gradients.gram_of_factors(plan, letters, left, right)
            return mirror_kernel(whole) if symmetric else whole

        def tile(i, j, size1, size2):
            rows, columns = take_rows(left, i, size1, n1), take_rows(right, j, size2, n2)
            return factored_gradients.gram_of_factors(plan, letters, rows, columns)

        # Two products for each layer, one for each other parameter, their sum and its copies.
        arrays = 2 * len(left.sensitivities) + len(left.jacobians) + 3
        dtype = jnp.result_type(*jax.tree.leaves((left.sensitivities, left.jacobians)))
        size = device_gram_tile_size(max(n1, n2), arrays, dtype)
        return assemble(tile, n1, n2, symmetric=symmetric, size=size)

    return functools.partial(factored_gradients.factor_gradients, plan, outputs), gram


def _neural_tangents_gram(net: NetworkProgram, outputs: str):
    nt = load.neural_tangents()
    method = nt.NtkImplementation.NTK_VECTOR_PRODUCTS

    def gram(inputs, x1, x2):
        symmetric, x2 = x2 is None, x1 if x2 is None else x2

        def batch(trained, x):
            merged = replaced(inputs, net.trained, trained)
            y = jax.vmap(functools.partial(net.outputs, merged))(x)
            return y.sum(1, keepdims=True) if outputs == "sum" else y

        kernel = nt.empirical_ntk_fn(batch, trace_axes=(), vmap_axes=0, implementation=method)
        k = kernel(x1, x2, [inputs[i] for i in net.trained])
        k = k if outputs == "full" else jnp.einsum("abii->ab", k)
        return mirror_kernel(k) if symmetric else k

    return gram


def blockwise_kernel(net, plan, outputs, batch_size, mesh, inputs, x1, x2):
    """Return the tangent kernel of ``x1`` and ``x2``, of ``x1`` with itself if ``x2`` is None."""
    # The compiler divides a whole product among the devices on which the caller has placed rows.
    tiled = mesh is not None or len(jax.local_devices()) == 1
    factors, gram = _factor_and_gram(net, plan, outputs, tiled)
    # The derivative of a batched kernel forms each block again instead of storing all blocks.
    again = jax.checkpoint if batch_size else lambda function: function
    how = factors, gram, again, batch_size
    if mesh is None:
        return _kernel_on_one_device(*how, inputs, x1, x2)
    return _kernel_on_mesh(*how, mesh, inputs, x1, x2)


def _cyclic_columns(t: int, first: int) -> np.ndarray:
    """Return the columns of each of t rows of blocks of a symmetric kernel, from ``first`` on."""
    # Row i takes columns i .. i + t/2, cyclically. So every row has the same work, and each pair of
    # blocks is computed once (or twice at a distance t/2).
    return (np.arange(t)[:, None] + np.arange(first, t // 2 + 1)) % t


def _kernel_on_one_device(factors, gram, again, batch_size, inputs, x1, x2):
    """Write every row of blocks into the kernel as soon as it is computed."""
    symmetric, x2 = x2 is None, x1 if x2 is None else x2
    n1, n2 = length(x1), length(x2)
    size1, size2 = min(batch_size or n1, n1), min(batch_size or n2, n2)
    if (size1, size2) == (n1, n2):
        left = factors(inputs, x1)
        return gram(inputs, left, None if symmetric else factors(inputs, x2))
    # The last block overlaps its neighbour.
    starts1, starts2 = (
        np.minimum(np.arange(0, n, size), n - size) for n, size in ((n1, size1), (n2, size2))
    )
    t = len(starts1)
    columns = starts2[_cyclic_columns(t, 1)] if symmetric else np.tile(starts2, (t, 1))

    @again
    def row(i, columns):
        left = factors(inputs, take_rows(x1, i, size1, n1))

        @again
        def entry(j):
            return gram(inputs, left, factors(inputs, take_rows(x2, j, size2, n2)))

        return gram(inputs, left, None) if symmetric else None, map_leading_axis(entry, columns)

    def write(kernel, block, i, j):
        return lax.dynamic_update_slice(kernel, block, (i, j, *[0] * (block.ndim - 2)))

    def step(kernel, corners):
        i, columns = corners
        diagonal, blocks = row(i, columns)

        def put(kernel, block_and_column):
            block, j = block_and_column
            kernel = write(kernel, block, i, j)
            return write(kernel, transpose_kernel(block), j, i) if symmetric else kernel, None

        kernel, _ = lax.scan(put, kernel, (blocks, columns))
        # If blocks overlap, the last one on the diagonal makes the kernel symmetric.
        return write(kernel, diagonal, i, i) if symmetric else kernel, None

    corners = jnp.asarray(starts1), jnp.asarray(columns)
    first = jax.tree.map(lambda x: x[0], corners)
    block = jax.eval_shape(row, *first)[1]
    kernel = jnp.zeros((n1, n2, *block.shape[3:]), block.dtype)
    kernel = match_varying_axes(lambda kernel: step(kernel, first)[0], kernel)
    return lax.scan(step, kernel, corners)[0]


def _kernel_on_mesh(factors, gram, again, batch_size, mesh, inputs, x1, x2):
    """Divide the rows of blocks among the devices."""
    n1, n2 = length(x1), length(x1 if x2 is None else x2)
    blocks1 = split_into_blocks(x1, batch_size, mesh.size)
    t = length(blocks1)
    if x2 is None:
        blocks2, columns = blocks1, _cyclic_columns(t, 0)
    else:
        blocks2 = split_into_blocks(x2, batch_size)
        columns = np.tile(np.arange(length(blocks2)), (t, 1))

    def rows(inputs, blocks1, columns, blocks2):
        @again
        def row(block_and_columns):
            block, columns = block_and_columns
            left = factors(inputs, block)

            @again
            def entry(column):
                other = jax.tree.map(lambda x: x[column], blocks2)
                return gram(inputs, left, factors(inputs, other))

            if x2 is not None:
                return map_leading_axis(entry, columns)
            diagonal = gram(inputs, left, None)[None]
            return jnp.concatenate([diagonal, map_leading_axis(entry, columns[1:])])

        return map_leading_axis(row, (blocks1, columns))

    run = sharded(rows, mesh, (P(), P("rows"), P("rows"), P()), P("rows"))
    kernel_blocks = run(inputs, blocks1, jnp.asarray(columns), blocks2)
    if x2 is not None:
        return join_blocks(kernel_blocks, n1, n2)
    row = np.arange(t)[:, None]
    mirrored = jnp.zeros((t, t, *kernel_blocks.shape[2:]), kernel_blocks.dtype)
    mirrored = mirrored.at[columns, row].set(jax.vmap(jax.vmap(transpose_kernel))(kernel_blocks))
    # Each block at a distance t/2 was computed twice, and its copies may be rounded unequally.
    return mirror_kernel(join_blocks(mirrored.at[row, columns].set(kernel_blocks), n1, n1))


def norms(net, plan, outputs, batch_size, mesh, inputs, x):
    """Return the squared norms of the gradients at each sample: the kernel's diagonal."""
    blocks_of_x = split_into_blocks(x, batch_size, 1 if mesh is None else mesh.size)

    def rows(inputs, blocks):
        def of(block):
            factors = factored_gradients.factor_gradients(plan, outputs, inputs, block)
            return factored_gradients.gram_of_factors(
                plan, factored_gradients.NORMS, factors, factors
            )

        return map_leading_axis(of, blocks)

    run = sharded(rows, mesh, (P(), P("rows")), P("rows"))
    return run(inputs, blocks_of_x).reshape(-1)[: length(x)]


def blockwise_vector_product(net, batch_size, inputs, x, v, at=None):
    """Return ``J(at) J(x)' v``; ``at`` is x by default."""

    def outputs(trained, block):
        merged = replaced(inputs, net.trained, trained)
        y = jax.vmap(functools.partial(net.outputs, merged))(block)
        return y.sum(1) if v.ndim == 1 else y

    trained = [inputs[i] for i in net.trained]
    out = jax.eval_shape(outputs, trained, x)
    if v.shape != out.shape:
        raise ValueError(f"v: expected the shape [n] or [n, o] = {list(out.shape)}, got {v.shape}.")
    blocks_of_x = split_into_blocks(x, batch_size)
    cotangents = zero_padded_blocks(v.astype(out.dtype), min(batch_size or len(v), len(v)))

    def pull(total, block_and_cotangent):
        block, cotangent = block_and_cotangent
        _, pullback = jax.vjp(lambda trained: outputs(trained, block), trained)
        return jax.tree.map(jnp.add, total, pullback(cotangent)[0]), None

    zeros = jax.tree.map(jnp.zeros_like, trained)
    if len(cotangents) == 1:
        only = jax.tree.map(lambda x: x[0], blocks_of_x)
        direction, _ = pull(zeros, (only, cotangents[0]))
    else:
        direction, _ = lax.scan(pull, zeros, (blocks_of_x, cotangents))

    def push(block):
        return jax.jvp(lambda trained: outputs(trained, block), (trained,), (direction,))[1]

    rows = blocks_of_x if at is None else split_into_blocks(at, batch_size)
    products = map_leading_axis(push, rows).reshape(-1, *v.shape[1:])
    return products[: length(x if at is None else at)]


def nngp(net, outputs, batch_size, inputs, x1, x2):
    """Return the kernel of the outputs, without gradients."""

    def of(x):
        rows = split_into_blocks(x, batch_size)
        y = map_leading_axis(jax.vmap(functools.partial(net.outputs, inputs)), rows)
        y = y.reshape(-1, y.shape[-1])[: length(x)]
        return y.astype(at_least_float32(y.dtype))

    y1 = of(x1)
    y2 = y1 if x2 is None else of(x2)
    if outputs == "full":
        k = einsum("ai,bj->abij", y1, y2)
    else:
        k = einsum("ai,bi->ab", y1, y2) / y1.shape[1]
    return mirror_kernel(k) if x2 is None else k
