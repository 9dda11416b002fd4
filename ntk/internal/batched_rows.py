"""Split samples into blocks of rows, and join the blocks of a kernel."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def length(x) -> int:
    """Return the number of samples."""
    return len(jax.tree.leaves(x)[0])


def map_leading_axis(function, xs):
    """Run ``lax.map``. A single step runs without a loop."""
    if length(xs) == 1:
        only = function(jax.tree.map(lambda x: x[0], xs))
        return jax.tree.map(lambda y: y[None], only)
    return lax.map(function, xs)


def split_into_blocks(x, size: int | None, multiple: int = 1):
    """Return a ``multiple`` of blocks [blocks, size, ...], padded with copies of the first row."""
    n = length(x)
    size = min(size or n, -(-n // multiple))
    count = -(-n // (size * multiple)) * multiple

    def cut(x):
        filler = jnp.broadcast_to(x[:1], (count * size - n, *x.shape[1:]))
        return jnp.concatenate([x, filler]).reshape(count, size, *x.shape[1:])

    return jax.tree.map(cut, x)


def zero_padded_blocks(v, size: int):
    """Return ``v`` [n, ...] in blocks [blocks, size, ...], padded with zeros."""
    padding = [(0, -len(v) % size), *((0, 0) for _ in v.shape[1:])]
    return jnp.pad(v, padding).reshape(-1, size, *v.shape[1:])


def transpose_kernel(k):
    """Return ``K(x', x)_ji`` for ``K(x, x')_ij``."""
    return k.T if k.ndim == 2 else k.transpose(1, 0, 3, 2)


def mirror_kernel(k):
    """Return an exactly symmetric kernel by copying the upper triangle to the lower one."""
    n, o = k.shape[0], k.shape[2:3]
    index = np.arange(n * math.prod(o)).reshape(n, 1, *o, *(1 for _ in o))
    return jnp.where(index <= transpose_kernel(index), k, transpose_kernel(k))


def join_blocks(blocks, n1: int, n2: int):
    """Return [t1, t2, b1, b2, ...] as [n1, n2, ...]."""
    t1, t2, b1, b2 = blocks.shape[:4]
    return jnp.swapaxes(blocks, 1, 2).reshape(t1 * b1, t2 * b2, *blocks.shape[4:])[:n1, :n2]
