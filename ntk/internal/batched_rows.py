"""Rows of a kernel in batches, and over devices."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from ntk.internal.checks import concrete


def length(x) -> int:
    """Return the number of samples."""
    return len(jax.tree.leaves(x)[0])


def map_leading_axis(function, xs):
    """Run ``lax.map``, without a loop around a single step."""
    if length(xs) == 1:
        only = function(jax.tree.map(lambda x: x[0], xs))
        return jax.tree.map(lambda y: y[None], only)
    return lax.map(function, xs)


def split_into_blocks(x, size: int, multiple: int = 1):
    """Return rows in blocks [blocks, size, ...]; the first row fills up the last ones."""
    n = length(x)
    count = -(-n // (size * multiple)) * multiple

    def cut(x):
        filler = jnp.broadcast_to(x[:1], (count * size - n, *x.shape[1:]))
        return jnp.concatenate([x, filler]).reshape(count, size, *x.shape[1:])

    return jax.tree.map(cut, x)


def transpose_kernel(k):
    """Return ``K(x', x)_ji`` for ``K(x, x')_ij``."""
    return k.T if k.ndim == 2 else k.transpose(1, 0, 3, 2)


def mirror_kernel(k):
    """Return an exactly symmetric kernel: the upper triangle replaces the lower one."""
    n, o = k.shape[0], k.shape[2:3]
    index = np.arange(n * math.prod(o)).reshape(n, 1, *o, *(1 for _ in o))
    return jnp.where(index <= transpose_kernel(index), k, transpose_kernel(k))


def join_blocks(blocks, n1: int, n2: int):
    """Return [t1, t2, b1, b2, ...] as [n1, n2, ...]."""
    t1, t2, b1, b2 = blocks.shape[:4]
    return jnp.swapaxes(blocks, 1, 2).reshape(t1 * b1, t2 * b2, *blocks.shape[4:])[:n1, :n2]


def sharded(function, mesh, *specs):
    """Return ``function`` with its rows divided among the devices of ``mesh``, if there is one."""
    if mesh is None:
        return function
    # Samples are independent: no device needs another's. Without check_vma, which would sum the
    # sensitivities of perturbations that are the same everywhere.
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P("rows"), check_vma=False)


def mesh_for(*arrays) -> jax.sharding.Mesh | None:
    """Return all local devices, unless the caller has placed or traces the arrays."""
    devices = jax.local_devices()
    leaves = jax.tree.leaves(arrays)
    placed = not concrete(leaves) or any(getattr(x, "committed", False) for x in leaves)
    if len(devices) == 1 or placed or getattr(jax.config, "jax_default_device", None) is not None:
        return None
    return jax.sharding.Mesh(np.array(devices), ("rows",))
