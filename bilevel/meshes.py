"""Loops inside ``jax.shard_map``: which values differ from device to device.

There every array has a type that says over which mesh axes it varies. Starts of loops are constants
or replicated weights, while what the loop makes of them varies with the data; and the gradient in
weights that do not vary is summed over the devices. So weights become varying, over the axes that
their loss varies over, before anything is differentiated or repeated: each device then solves its
own lower problem. A loss that sums over devices (``jax.lax.psum``) does not vary, nor do its
weights. Outside ``shard_map`` nothing here does anything.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from bilevel.protocols import Pytree


def varying(tree: Pytree) -> frozenset[str]:
    """The mesh axes that any leaf, an array or its type, varies over."""
    return frozenset().union(*(_axes(x) for x in jax.tree.leaves(tree)))


def _axes(x) -> frozenset[str]:
    kind = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    manual = getattr(kind, "manual_axis_type", None)  # JAX's name for it; the second is its older
    return getattr(manual, "varying", None) or getattr(kind, "vma", None) or frozenset()


def vary(tree: Pytree, axes: frozenset[str]) -> Pytree:
    """``tree``, varying over ``axes`` too."""

    def lift(x):
        missing = tuple(axes - varying(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(lift, tree)


def settled(step: Callable[[Pytree], Pytree], start: Pytree) -> Pytree:
    """``start`` of the repeated ``step``, varying over what one step makes of it."""
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return start
    return vary(start, varying((start, jax.eval_shape(step, start))))


def while_loop(unfinished: Callable, step: Callable, start: Pytree) -> Pytree:
    """:func:`jax.lax.while_loop` from a start that may vary less than its steps do."""
    return jax.lax.while_loop(unfinished, step, settled(step, start))


def do_while(unfinished: Callable, step: Callable, start: Pytree) -> Pytree:
    """A step, and then further ones while ``unfinished``; compiled once, unlike a step before."""

    def going(carry):
        state, first = carry
        return first | unfinished(state)

    def once(carry):
        return step(carry[0]), carry[1] & False  # of the same axes

    return while_loop(going, once, (start, jnp.array(True)))[0]


def repeat(step: Callable[[Pytree], Pytree], start: Pytree, times: int) -> Pytree:
    """``step(step(... start))``."""
    return jax.lax.fori_loop(0, times, lambda _, x: step(x), settled(step, start))
