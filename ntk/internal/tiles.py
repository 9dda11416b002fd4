"""Compute a kernel [n, n] in tiles, and choose them from the device's memory and kind.

On a CPU a tile must fit the cache of a core. On an accelerator few tiles are better: it starts some
hundred operations for each, and it holds all arrays of a tile in its memory.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

CPU_TILE = 256  # rows and columns of a tile on a CPU
_RESULTS = 3  # arrays [n, n] that the caller gets
_OWN, _LAYER = 16, 6  # arrays of a tile's size: for the tile, and for the derivative of a layer
_POSITIONS = 64  # the same for networks of layers that mix positions
_CPU_GRAM = 1024  # rows of its tiles on a CPU, which multiplies larger matrices faster
_CPU_ENTRIES, _CPU_STRIP = 2**22, 2**15
_SMALL = 64  # tiles may always use this part of the memory
_LARGEST, _STEP = 8192, 128  # rows of a tile; tiles are multiples of the second


def tile_size(memory: int, kind: str, n: int, layers: int, itemsize: int) -> int:
    """Return the number of rows and columns of a tile of a kernel [n, n] of a network.

    ``memory`` is in bytes; ``kind`` is the name of JAX's backend. Tiles and results together take
    at most 1.5 times the results, or the results and a 64th of the memory.
    """
    if kind == "cpu":
        return min(CPU_TILE, n)
    results = _RESULTS * itemsize * n**2
    budget = max(results // 2, memory // _SMALL)
    return _equal_parts(n, budget, memory - results, itemsize * (_OWN + _LAYER * layers))


def _equal_parts(n: int, budget: int, left: int, per_entry: int) -> int:
    """Return the rows of nearly equal tiles in the budget, and in most of the memory ``left``."""
    budget = max(min(budget, left * 4 // 5), 0)
    most = min(max(math.isqrt(budget // per_entry), CPU_TILE), _LARGEST)
    if n <= most:
        return n
    equal = -(-n // -(-n // most))
    return min(-(-equal // _STEP) * _STEP, most)


def tile_entries(memory: int, itemsize: int) -> int:
    """Return the entries of an accelerator's tile, in a 16th of its memory, for many positions."""
    return max(memory // 16 // (itemsize * _POSITIONS), CPU_TILE**2)


def gram_tile_size(memory: int, kind: str, n: int, arrays: int, itemsize: int) -> int:
    """Return :func:`tile_size` for a Gram matrix [n, n], with ``arrays`` of the tile's size."""
    if kind == "cpu":
        return min(_CPU_GRAM, n)
    result = itemsize * n**2
    return _equal_parts(n, max(result // 6, memory // 256), memory - result, itemsize * arrays)


def device_gram_tile_size(n: int, arrays: int, dtype: np.dtype) -> int:
    """Return :func:`gram_tile_size` on JAX's default device."""
    return gram_tile_size(_memory(), jax.default_backend(), n, arrays, dtype.itemsize)


def device_strip_entries() -> int:
    """Return the entries of a tile that are computed together: they fit the cache of a CPU."""
    if jax.default_backend() == "cpu":
        return _CPU_STRIP
    return max(_CPU_STRIP, device_tile_entries(np.dtype("float32")))


def device_tile_size(n: int, layers: int, dtype: np.dtype) -> int:
    """Return :func:`tile_size` on JAX's default device."""
    return tile_size(_memory(), jax.default_backend(), n, layers, dtype.itemsize)


def device_tile_entries(dtype: np.dtype) -> int:
    """Return :func:`tile_entries` on JAX's default device, an accelerator."""
    return tile_entries(_memory(), dtype.itemsize)


def device_chunk_entries(dtype: np.dtype) -> int:
    """Return the entries of arrays that are held at a time: they fit the cache of a CPU."""
    cpu = jax.default_backend() == "cpu"
    return _CPU_ENTRIES if cpu else max(_CPU_ENTRIES, device_tile_entries(dtype))


def _memory() -> int:
    """Return the bytes of the default device, or 8 GiB if it does not count them."""
    stats = None if jax.default_backend() == "cpu" else jax.devices()[0].memory_stats()
    return int((stats or {}).get("bytes_limit", 2**33))


def assemble(tile: Callable[..., Any], n1: int, n2: int, *, symmetric: bool, size: int) -> Any:
    """Return arrays [n1, n2] from ``tile(i, j, size1, size2)``, a pytree of [size1, size2] blocks.

    If ``symmetric``, only the upper triangle is computed, and the result is exactly symmetric. A
    side's last tile overlaps its neighbour. Tiles have at most ``size`` rows and columns.
    """
    size1, size2 = min(size, n1), min(size, n2)
    if (size1, size2) == (n1, n2):
        whole = tile(0, 0, n1, n2)
        return jax.tree.map(mirror_triangle, whole) if symmetric else whole
    sides = (n1, size1), (n2, size2)
    starts1, starts2 = (np.minimum(np.arange(0, n, step), n - step) for n, step in sides)
    corners = [(i, j) for i in starts1 for j in starts2 if not symmetric or i <= j]
    # Tiles are recomputed in reverse mode; otherwise every tile would store all its layers.
    compute = jax.checkpoint(functools.partial(tile, size1=size1, size2=size2))

    def step(totals, corner):
        i, j = corner
        blocks = compute(i, j)

        def put(total, block):
            if not symmetric:
                return jax.lax.dynamic_update_slice(total, block, (i, j))
            block = _once(jax.lax.cond(i == j, mirror_triangle, lambda block: block, block))
            total = jax.lax.dynamic_update_slice(total, block, (i, j))
            return jax.lax.dynamic_update_slice(total, block.T, (j, i))

        return jax.tree.map(put, totals, blocks), None

    shapes = jax.eval_shape(compute, 0, 0)
    empty = jax.tree.map(lambda s: jnp.zeros((n1, n2), s.dtype), shapes)
    return jax.lax.scan(step, empty, jnp.asarray(corners))[0]


def mirror_triangle(kernel: chex.Array) -> jax.Array:
    """Return the upper triangle of [..., n, n] on both sides."""
    kernel = _once(kernel)
    # XLA takes minutes to compile a choice by index, `where(i <= j, ...)`.
    return jnp.triu(kernel) + jnp.swapaxes(jnp.triu(kernel, 1), -1, -2)


def _once(block: chex.Array) -> jax.Array:
    """Return the block, computed once. Computed for each side, the two may be rounded unequally."""
    return jax.lax.optimization_barrier(block)


def take_rows(rows: Any, start: int | jax.Array, size: int, n: int) -> Any:
    """Return rows ``start .. start + size`` of every leaf with n of them."""
    if size == n:
        return rows
    return jax.tree.map(
        lambda x: jax.lax.dynamic_slice_in_dim(x, start, size) if x.shape[0] == n else x, rows
    )
