"""Join the small leaves of a pytree into one array, so that solvers run fewer operations.

A device starts every operation of a loop separately. Steps and inner products over one array take
one operation instead of one for each leaf.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from bilevel.contracts import Pytree
from ntk.internal.sharding import pcast_varying, varying

_SMALL = 2**16
"""Entries up to which a leaf is joined. For larger leaves a copy costs more than an operation."""


def packing(like: Pytree) -> tuple[Callable[[Pytree], Pytree], Callable[[Pytree], Pytree]]:
    """Return ``pack``, which joins the small leaves of trees like this one, and its inverse.

    Leaves of several dtypes stay apart.
    """
    leaves, tree = jax.tree.flatten(like)
    small = [x.size <= _SMALL for x in leaves]
    if sum(small) < 2 or len({x.dtype for x in leaves}) > 1:
        return lambda tree: tree, lambda packed: packed
    shapes = [x.shape for x, joins in zip(leaves, small, strict=True) if joins]
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])

    def pack(tree):
        leaves = jax.tree.leaves(tree)
        joined = [x.ravel() for x, joins in zip(leaves, small, strict=True) if joins]
        apart = [x for x, joins in zip(leaves, small, strict=True) if not joins]
        return [jnp.concatenate(pcast_varying(joined, varying(joined))), *apart]

    def unpack(packed):
        joined, *apart = packed
        pieces = jnp.split(joined, ends[:-1])
        parts = iter([x.reshape(shape) for x, shape in zip(pieces, shapes, strict=True)])
        rest = iter(apart)
        return jax.tree.unflatten(tree, [next(parts if joins else rest) for joins in small])

    return pack, unpack
