"""Apply linear maps with the rule that an exact zero times an overflow is zero.

Adam's update has the slope ``rate / eps``, 1e6, at a weight that never had a gradient. In the
reverse pass the sensitivity to this weight overflows float32 after seven steps. Its part of the
derivative is 0, but arithmetic gives ``inf * 0``. So a linear map is applied to the entries within
half of the exponent range, and once more to the others, scaled down. If the second result is not
exactly 0, it is scaled up again, or becomes NaN if a large entry was not finite.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from bilevel.contracts import Pytree
from bilevel.internal.precision import mixed_bits
from bilevel.problem.structure import outputs_reading
from ntk.internal.sharding import pcast_varying


def guarded(linear: Callable[[Pytree], Pytree], v: Pytree) -> Pytree:
    """Return ``linear(v)``, where exact zeros in ``linear`` cancel entries that overflowed."""
    leaves = jax.tree.leaves(v)
    results, tree = jax.tree.flatten(jax.eval_shape(linear, v))
    # Results that do not read v stay constant zeros, so that unreached leaves are still detected.
    reads = outputs_reading(linear, v)
    dtypes = [x.dtype for x in [*leaves, *results]]
    exponent = min(int(jnp.finfo(dtype).maxexp) for dtype in dtypes) // 2

    def part(v):
        return [x for x, read in zip(jax.tree.leaves(linear(v)), reads, strict=True) if read]

    def in_two():
        halves = jax.lax.map(
            part, jax.tree.map(functools.partial(_split_by_magnitude, exponent), v)
        )
        finite = _all([jnp.isfinite(x).all() for x in leaves])

        def joined(pair):
            small, large = pair
            raised = jnp.where(finite, small + large * 2.0**exponent, jnp.nan)
            return jnp.where(large == 0, small, raised)

        return jax.tree.map(joined, halves)

    computed = iter(jax.lax.cond(_anywhere(_overflows(leaves, exponent)), in_two, lambda: part(v)))
    zeros = [jnp.zeros(x.shape, x.dtype) for x in results]
    return jax.tree.unflatten(
        tree, [next(computed) if read else zero for zero, read in zip(zeros, reads, strict=True)]
    )


def _all(conditions: list[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.logical_and, conditions)


def _overflows(leaves: list[jax.Array], exponent: int) -> jax.Array:
    """Return whether an entry may be ``2**exponent`` or more, or NaN: by the sum of squares."""
    limit = 2.0 ** (2 * exponent - 1)
    return ~_all([jnp.vdot(x, x) < limit for x in leaves])


def _split_by_magnitude(exponent: int, x: jax.Array) -> jax.Array:
    """Return the small entries of ``x``, and the large ones times ``2**-exponent``."""
    bits = mixed_bits(jnp.arange(x.size, dtype=jnp.uint32))
    unit = jnp.asarray(2.0**-24, jnp.float32)
    hashes = (1 + (bits >> 8).astype(jnp.float32) * unit).astype(x.dtype).reshape(x.shape)
    large = ~(jnp.abs(x) < 2.0**exponent)  # NaN compares false
    raised = jnp.where(jnp.isfinite(x), x * 2.0**-exponent, hashes)
    return jnp.stack([jnp.where(large, 0, x), jnp.where(large, raised, 0)])


@jax.custom_batching.custom_vmap
def _anywhere(condition: jax.Array) -> jax.Array:
    """Return whether the condition holds for any copy of ``vmap`` or device of ``shard_map``."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if not axes:
        return condition
    return (
        jax.lax.pmax(pcast_varying(condition.astype(jnp.int32), frozenset(axes)), tuple(axes)) > 0
    )


@_anywhere.def_vmap
def _anywhere_batched(
    size: int, batched: list[bool], condition: jax.Array
) -> tuple[jax.Array, bool]:
    return _anywhere(condition.any()), False
