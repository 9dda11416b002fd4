"""Differentiate the gradient of a training step in mixed mode (Kemaev et al. 2025, ICML).

The reverse pass of ``g(theta) = grad_w loss`` (``theta``: weights, alpha and batch) multiplies a
vector ``v`` by the transposed Jacobian of ``g``. The Hessian is symmetric, so this product is one
forward derivative of the whole gradient, which stores the inputs of the gradient only:

    (dg/dtheta)' v  =  d/de grad_theta loss(w + e v, theta),    e = 0.

Custom rules may break the symmetry; :mod:`bilevel.internal.custom_rules` then gives an exact order.
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
from bilevel.solvers._overflow import guarded
from ntk.internal.compile_cache import fresh


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
        step = _Step(of, plain, args, moves)
        if not dots:
            return outputs, tangents_of(outputs, map(jnp.zeros_like, inexact_leaves(outputs)))
        pull = functools.partial(transposed, step)
        pull = functools.partial(guarded, pull) if steep else pull
        slope_dots = with_transpose(step.push, pull, step.flat, dots, jax.tree.leaves(outputs[1]))
        return outputs, tangents_of(outputs, [*step.push_outputs(dots), *slope_dots])

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


class _Step:
    """A loss and its gradient as functions of the arguments that move."""

    def __init__(self, of: Callable, plain: Callable, args: Pytree, moves: list[bool]):
        self.of, self.plain, self.moves = of, plain, moves
        self.flat, self.tree = jax.tree.flatten(args)
        self.count = len(jax.tree.leaves(args[0]))  # of the weights' arrays, which come first
        self.moving = chosen(moves, self.flat)

    def args(self, flat: list) -> Pytree:
        return jax.tree.unflatten(self.tree, flat)

    def merged(self, values: Iterable, flat: list) -> list:
        return merged(self.moves, values, flat)

    def value(self, flat: list) -> jax.Array:
        return self.of(self.args(flat))[0]

    def push(self, dots: tuple) -> list:
        """Return the forward derivative of the gradient along ``dots``."""

        def gradient(*values):
            loss_and_gradient = self.plain(self.args(self.merged(values, self.flat)))
            return jax.tree.leaves(loss_and_gradient[1])

        return jax.jvp(gradient, self.moving, dots)[1]

    def push_outputs(self, dots: tuple) -> list:
        """Return the forward derivative of the value and of the floating arrays in aux."""

        def outputs(*values):
            return inexact_leaves(self.of(self.args(self.merged(values, self.flat))))

        return jax.jvp(outputs, self.moving, dots)[1]


def _forward_over_reverse(step: _Step, v: list) -> tuple:
    """Return ``d/de grad loss(w + e v)`` in all moving arguments."""

    def gradient(w):
        flat = [*w, *step.flat[step.count :]]
        moving = chosen(step.moves, flat)
        value, pull = jax.vjp(lambda *values: step.value(step.merged(values, flat)), *moving)
        return pull(jnp.ones_like(value))

    return jax.jvp(gradient, (step.flat[: step.count],), (v,))[1]


def _reverse_over_forward(step: _Step, v: list) -> tuple:
    """Return ``grad (v . grad_w loss)`` in all moving arguments."""

    def along(*values):
        flat = step.merged(values, step.flat)
        own, others = flat[: step.count], flat[step.count :]
        return jax.jvp(lambda w: step.value([*w, *others]), (own,), (v,))[1]

    slope, pull = jax.vjp(along, *step.moving)
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
