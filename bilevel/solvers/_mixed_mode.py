"""Differentiate the gradient of a training step in mixed mode (Kemaev et al. 2025, ICML).

The reverse pass of ``g(theta) = grad_w loss`` multiplies a vector ``v`` by the transposed Jacobian
of ``g``. The Hessian is symmetric, so this product is one forward derivative of the whole gradient,
which stores only the gradient's inputs. The product may be guarded against overflow.

    (dg/dtheta)' v  =  d/de grad_theta loss(w + e v, theta),    e = 0.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.custom_derivatives import SymbolicZero

from bilevel.contracts import Pytree
from bilevel.internal.custom_rules import FORWARD_OVER_REVERSE, REVERSE_OVER_REVERSE, exact_order
from bilevel.internal.precision import mixed_bits
from bilevel.problem.structure import outputs_reading
from ntk.internal.compile_cache import fresh
from ntk.internal.sharding import pcast_varying


def detached(function: Callable, *args: Pytree) -> Pytree:
    """Return ``function(*args)`` without derivatives, also in closed-over values and loops."""
    converted, hoisted = jax.closure_convert(fresh(function), *args)
    return converted(*jax.lax.stop_gradient((*args, *hoisted)))


def value_and_gradient(
    loss: Callable, w: Pytree, *others: Pytree, steep: bool = False
) -> tuple[Any, Pytree]:
    """Return ``jax.value_and_grad(loss, has_aux=True)(w, *others)``, differentiated in mixed mode.

    ``steep`` states whether cotangents of the gradient may overflow.
    """
    converted, hoisted = jax.closure_convert(fresh(loss), w, *others)
    args = (w, others, hoisted)

    def of(args):
        w, others, hoisted = args
        return converted(w, *others, *hoisted)

    def plain(args):
        return jax.value_and_grad(lambda w: of((w, *args[1:])), has_aux=True)(args[0])

    program = jax.make_jaxpr(of)(args)
    order = exact_order(program)
    if order == REVERSE_OVER_REVERSE or program.effects:  # e.g. a print must not run twice
        return plain(args)
    transposed = _forward_over_reverse if order == FORWARD_OVER_REVERSE else _reverse_over_forward
    mixed = jax.custom_jvp(plain)

    @functools.partial(mixed.defjvp, symbolic_zeros=True)
    def _(primals, tangents):
        (args,), (dots,) = primals, tangents
        moves, dots = moving_tangents(dots)
        outputs = mixed(args)
        if not dots:
            return outputs, tangents_of(outputs, map(jnp.zeros_like, inexact_leaves(outputs)))
        flat, tree = jax.tree.flatten(args)

        def forward(function, dots):
            def moved(*values):
                return function(jax.tree.unflatten(tree, merged(moves, values, flat)))

            return jax.jvp(moved, chosen(moves, flat), dots)[1]

        def push(dots):
            return forward(lambda args: jax.tree.leaves(plain(args)[1]), dots)

        def value(flat):
            return of(jax.tree.unflatten(tree, flat))[0]

        pull = functools.partial(transposed, value, moves, flat)
        pull = functools.partial(guarded, pull) if steep else pull
        slope_dots = with_transpose(push, pull, flat, dots, jax.tree.leaves(outputs[1]))
        output_dots = forward(lambda args: inexact_leaves(of(args)), dots)
        return outputs, tangents_of(outputs, [*output_dots, *slope_dots])

    return mixed(args)


def with_transpose(push: Callable, pull: Callable, args: Pytree, dots: tuple, like: list) -> list:
    """Return the linear ``push(dots)``, shaped like ``like``; its transpose is ``pull``.

    It is the solution of ``[[1, 0], [-push, 1]] (x, y) = (dots, 0)``, because JAX keeps the
    transpose of a linear solve in all transformations. JAX transposes a solve only if all arrays on
    the right depend on the transposed inputs, so each gets a zero that depends on all others.
    """
    coefficient = _empty_dependent_array(args)

    def matrix(x):
        zero = jnp.sum(_empty_dependent_array(x) * coefficient)
        return _plus(x[0], zero), _plus(optax.tree.sub(x[1], push(x[0])), zero)

    def solve(_, b):
        return b[0], optax.tree.add(b[1], push(b[0]))

    def transpose_solve(_, b):
        return optax.tree.add(b[0], pull(b[1])), b[1]

    zero = jnp.sum(_empty_dependent_array(dots))
    b = _plus(dots, zero), [jnp.broadcast_to(zero.astype(x.dtype), x.shape) for x in like]
    return jax.lax.custom_linear_solve(matrix, b, solve, transpose_solve)[1]


def _empty_dependent_array(tree: Pytree) -> jax.Array:
    """Return an array [0] that depends on all floating arrays of ``tree``, linearly."""

    def one(x):
        none = jnp.broadcast_to(jnp.real(x), (0, *jnp.shape(x)))
        return none.sum(tuple(range(1, none.ndim))).astype(jnp.float32)

    return functools.reduce(jnp.add, map(one, inexact_leaves(tree)))


def _plus(tree: Pytree, number: jax.Array) -> Pytree:
    return jax.tree.map(lambda x: x + number.astype(x.dtype), tree)


def _forward_over_reverse(value: Callable, moves: list[bool], flat: list, v: list) -> tuple:
    """Return ``d/de grad value(w + e v)`` in all moving arguments; the weights come first."""

    def gradient(w):
        at = [*w, *flat[len(v) :]]
        loss, pull = jax.vjp(lambda *values: value(merged(moves, values, at)), *chosen(moves, at))
        return pull(jnp.ones_like(loss))

    return jax.jvp(gradient, (flat[: len(v)],), (v,))[1]


def _reverse_over_forward(value: Callable, moves: list[bool], flat: list, v: list) -> tuple:
    """Return ``grad (v . grad_w value)`` in all moving arguments; the weights come first."""

    def along(*values):
        at = merged(moves, values, flat)
        return jax.jvp(lambda w: value([*w, *at[len(v) :]]), (at[: len(v)],), (v,))[1]

    slope, pull = jax.vjp(along, *chosen(moves, flat))
    return pull(jnp.ones_like(slope))


def chosen(flags: list[bool], items: Iterable) -> tuple:
    """Return the items whose flag is set."""
    return tuple(x for flag, x in zip(flags, items, strict=True) if flag)


def merged(flags: list[bool], values: Iterable, items: Iterable) -> list:
    """Return ``items`` with ``values`` in the places whose flag is set."""
    moved = iter(values)
    return [next(moved) if flag else x for flag, x in zip(flags, items, strict=True)]


def moving_tangents(tangents: Pytree) -> tuple[list[bool], tuple]:
    """Return whether each leaf of symbolic ``tangents`` moves, and the tangents of those."""
    dots = jax.tree.leaves(tangents, is_leaf=lambda dot: isinstance(dot, SymbolicZero))
    moves = [not isinstance(dot, SymbolicZero) for dot in dots]
    return moves, chosen(moves, dots)


def is_inexact(x: Any) -> bool:
    """Return whether a value has a floating or complex dtype."""
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def inexact_leaves(tree: Pytree) -> list:
    """Return the leaves of a floating or complex dtype."""
    return list(filter(is_inexact, jax.tree.leaves(tree)))


def tangents_of(outputs: Pytree, floating: Iterable) -> Pytree:
    """Return ``floating`` as tangents of the floating arrays, and empty tangents elsewhere."""
    moved = iter(floating)

    def one(x):
        return next(moved) if is_inexact(x) else np.zeros(jnp.shape(x), jax.dtypes.float0)

    return jax.tree.map(one, outputs)


def guarded(linear: Callable[[Pytree], Pytree], v: Pytree) -> Pytree:
    """Return ``linear(v)`` with the rule that an exact zero times an overflow is zero.

    Adam's update has the slope ``rate / eps``, 1e6, at a weight that never had a gradient. In the
    reverse pass the sensitivity to this weight overflows float32 after seven steps. Its part of the
    derivative is 0, but arithmetic gives ``inf * 0``. So ``linear`` is applied to the entries
    within half of the exponent range, and once more to the others, scaled down. If the second
    result is not 0, it is scaled up again, or becomes NaN if a large entry was not finite.
    """
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
    """Return whether it holds for any copy or device, so that all take the same branch."""
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
