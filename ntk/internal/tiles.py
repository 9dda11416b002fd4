"""Choose the tiles in which a kernel [n, n] is computed, from the device's memory and kind.

On a CPU a tile must fit the cache of a core. On an accelerator few tiles are better: it starts some
hundred operations for each, and it holds all arrays of a tile in its memory.
"""

import math

import jax
import numpy as np

CPU_TILE = 256
"""Rows and columns of a tile on a CPU."""

_RESULTS = 3  # arrays [n, n] that the caller gets
_OWN, _LAYER = 16, 6  # arrays of a tile's size: for the tile, and for the derivative of a layer
_POSITIONS = 64  # the same for networks of layers that mix positions
_SMALL = 64  # tiles may always use this part of the memory
_LARGEST, _STEP = 8192, 128  # rows of a tile; tiles are multiples of the second


def tile_size(memory: int, kind: str, n: int, layers: int, itemsize: int) -> int:
    """Return the number of rows and columns of a tile of a kernel [n, n].

    Parameters
    ----------
    memory : int
        Bytes of the device; without effect on a CPU.
    kind : str
        Name of JAX's backend: "cpu", "gpu" or "tpu".
    n : int
        Rows or columns of the kernel, the larger number.
    layers : int
        Layers of the network, 1 or more.
    itemsize : int
        Bytes of a number.

    Returns
    -------
    int
        Tiles and results together take at most 1.5 times the results, or the results and a 64th of
        the memory. Never more than n.
    """
    if kind == "cpu":
        return min(CPU_TILE, n)
    results = _RESULTS * itemsize * n**2
    budget = min(max(results // 2, memory // _SMALL), (memory - results) * 4 // 5)
    most = math.isqrt(max(budget, 0) // (itemsize * (_OWN + _LAYER * layers)))
    most = min(max(most, CPU_TILE), _LARGEST)
    if n <= most:
        return n
    equal = -(-n // -(-n // most))
    return min(-(-equal // _STEP) * _STEP, most)


def tile_entries(memory: int, itemsize: int) -> int:
    """Return the entries of a tile on an accelerator if rows have many positions each.

    The tile's arrays take at most a 16th of the memory.
    """
    return max(memory // 16 // (itemsize * _POSITIONS), CPU_TILE**2)


def device_tile_size(n: int, layers: int, dtype: np.dtype) -> int:
    """Return :func:`tile_size` on JAX's default device."""
    return tile_size(_memory(), jax.default_backend(), n, layers, dtype.itemsize)


def device_tile_entries(dtype: np.dtype) -> int:
    """Return :func:`tile_entries` on JAX's default device, an accelerator."""
    return tile_entries(_memory(), dtype.itemsize)


def _memory() -> int:
    """Return the bytes of the default device, or 8 GiB if it does not count them."""
    stats = None if jax.default_backend() == "cpu" else jax.devices()[0].memory_stats()
    return int((stats or {}).get("bytes_limit", 2**33))
