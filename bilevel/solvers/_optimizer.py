"""Differentiate optimizer steps correctly even if a gradient is exactly 0.

Adam's update ``m / (sqrt(v) + eps)`` has the slope ``1 / eps`` at a zero gradient with a zero
history, where the infinite slope of ``sqrt`` times the zero slope of ``v = g^2`` is NaN. The value
is the optimizer's own, bit for bit. Its derivative has replacements that agree in the limit:

- ``sqrt``, ``rsqrt``, ``cbrt``, ``pow`` and ``div`` have slope 0 where theirs is infinite. The
  root's argument is a second moment at its minimum, so the omitted term tends to 0.
- ``where(v > 0, f(v), 0)`` (Adagrad, SM3) is ``f`` at ``v = 0`` too, if v is computed from
  gradients, weights or floating state. Other branches are kept.
- ``log`` has slope 0 at 0 if ``where``, ``maximum`` or ``clip`` discard its value, as in learned
  optimizers. If the value is used, the derivative is NaN.
- The root of a negative number is 0: RAdam takes one in the branch that it does not choose.

If the update mixes entries (a norm, a learned rate), its transpose is guarded against overflow.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from bilevel.contracts import Pytree
from bilevel.internal.checks import concrete
from bilevel.solvers import _mixed_mode as mixed_mode
from bilevel.solvers._mixed_mode import chosen, inexact_leaves, is_inexact, merged
from ntk.internal.compile_cache import fresh
from ntk.internal.jaxprs import bind, inner_jaxprs, interpret, operation_names


def with_limits(update: Callable, *args: Pytree) -> Pytree:
    """Return ``update(*args)`` with these derivatives, also in closed-over values."""
    # Closed-over traced values become arguments, also integers (a schedule's count of steps).
    closed, shapes = jax.make_jaxpr(fresh(update), return_shape=True)(*args)
    if not _has_limits(closed):  # gradient descent, with or without momentum and weight decay
        return update(*args)
    structure = jax.tree.structure(shapes)
    traced = [not concrete(c) for c in closed.consts]
    hoisted = chosen(traced, closed.consts)

    def constants(hoisted):
        return merged(traced, hoisted, closed.consts)

    def converted(args, hoisted):
        inputs = jax.tree.leaves(args)
        outputs = jax.core.eval_jaxpr(closed.jaxpr, constants(hoisted), *inputs)
        # Outputs that do not depend on the inputs are Python numbers (DoG's "not the first step").
        types = jax.tree.leaves(shapes)
        arrays = map(lambda x, s: jnp.asarray(x, s.dtype) if jnp.isscalar(x) else x, outputs, types)
        return jax.tree.unflatten(structure, arrays)

    @jax.custom_jvp
    def values(args):
        return converted(*args)

    @values.defjvp
    def values_jvp(primals, tangents):
        # JAX forgets a rule inside another rule inside a loop, so these are plain operations.
        def values(args):
            own = core.ClosedJaxpr(closed.jaxpr, constants(args[1]))
            inputs = jax.tree.leaves(args[0])
            limits = _evaluate_with_slopes(own, [_Known(x, own=True, given=True) for x in inputs])
            exact = jax.tree.leaves(mixed_mode.detached(converted, *args))
            changes = [x - jax.lax.stop_gradient(x) for x in inputs if _is_floating(x)]
            zero = jnp.zeros((), jnp.float32)
            moved = sum((jnp.sum(x).astype(jnp.float32) for x in changes), zero)
            slopes = map(functools.partial(_with_slope, moved), exact, limits)
            return jax.tree.unflatten(structure, slopes)

        if entrywise:
            return jax.jvp(values, primals, tangents)
        return _guarded_jvp(values, primals, tangents)

    moving = [_is_floating(v.aval) for v in closed.jaxpr.invars]
    entrywise = not any(map(_is_floating, hoisted)) and _is_entrywise(closed, moving)
    # A transpose of all outputs would include loops without a reverse derivative.
    entrywise = entrywise or "while" in operation_names(closed)
    return values((args, hoisted))


def _guarded_jvp(function: Callable, primals: tuple, tangents: tuple) -> tuple:
    """Apply ``jax.jvp``; in its transpose, exact zeros cancel cotangents that overflowed."""
    flat, tree = jax.tree.flatten(jax.tree.map(jnp.asarray, primals))
    moves = list(map(is_inexact, flat))
    moving = chosen(moves, flat)
    dots = tuple(map(jnp.asarray, chosen(moves, jax.tree.leaves(tangents))))

    def floats(*values):
        return inexact_leaves(function(*jax.tree.unflatten(tree, merged(moves, values, flat))))

    def push(dots):
        return jax.jvp(floats, moving, dots)[1]

    def pull(v):
        return jax.vjp(floats, *moving)[1](v)

    outputs = function(*primals)
    like, guarded_pull = inexact_leaves(outputs), functools.partial(mixed_mode.guarded, pull)
    output_dots = mixed_mode.with_transpose(push, guarded_pull, moving, dots, like)
    return outputs, mixed_mode.tangents_of(outputs, output_dots)


def _is_floating(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def is_steep(update: Callable, *args: Pytree) -> bool:
    """Return whether slopes of ``update(*args)`` may reach 1 / eps: it divides, or takes roots."""
    return _has_limits(jax.make_jaxpr(fresh(update))(*args))


def _has_limits(program: core.ClosedJaxpr) -> bool:
    return bool(operation_names(program) & {*_REPLACEMENTS, "gt"})


def _is_entrywise(closed: core.ClosedJaxpr, moving: list[bool]) -> bool:
    """Return whether each output entry depends only on the same entries of the moving inputs."""
    moves = {v for v, m in zip(closed.jaxpr.invars, moving, strict=True) if m}
    for eqn in closed.jaxpr.eqns:
        own = [isinstance(v, core.Var) and v in moves for v in eqn.invars]
        if not any(own):
            continue
        shapes = {v.aval.shape for v, m in zip(eqn.invars, own, strict=True) if m}
        if eqn.primitive.name in ("jit", "pjit"):
            entrywise = _is_entrywise(inner_jaxprs(eqn)[0], own)
        else:
            entrywise = eqn.primitive.name in _ENTRYWISE
        if not entrywise or any({v.aval.shape} != shapes for v in eqn.outvars):
            return False
        moves |= {v for v in eqn.outvars if _is_floating(v.aval)}
    return True


_ENTRYWISE = (
    *("add", "add_any", "sub", "neg", "mul", "div", "max", "min", "abs", "sign", "square", "sqrt"),
    *("rsqrt", "cbrt", "pow", "integer_pow", "exp", "log", "tanh", "logistic", "select_n", "clamp"),
    *("convert_element_type", "copy", "stop_gradient", "broadcast_in_dim", "reshape", "is_finite"),
    *("gt", "ge", "lt", "le", "eq", "ne"),
)


def _with_slope(moved: jax.Array, value: jax.Array, limit: "_Known") -> jax.Array:
    """Return ``value`` with the derivative of ``limit``; NaN where that is unknown."""
    if not is_inexact(value):
        return value
    away = jax.lax.stop_gradient(limit.value) - limit.value
    # Subtracting a zero leaves even the sign of a zero.
    value = value - jnp.where(jnp.isfinite(limit.value), away, 0)
    if limit.unknown is None:
        return value
    root = jnp.where(limit.unknown, moved, 1)
    return value - jnp.where(limit.unknown, jnp.sqrt(root * root), 0).astype(value.dtype)


class _Known(NamedTuple):
    """A value of the program and its known properties."""

    value: Any
    own: bool = False  # a floating input, or computed from one
    given: bool = False  # an input itself
    zero: bool = False  # for certain
    unknown: Any = None  # mask of entries with an unknown slope; None: all are known
    opened: Any = None  # ``v >= 0`` for a guard ``v > 0``


def _evaluate_with_slopes(closed: core.ClosedJaxpr, inputs: list[_Known]) -> list[_Known]:
    return interpret(
        closed, inputs, _apply_with_slopes, constant=_known_constant, enter=("jit", "pjit")
    )


def _known_constant(value: Any) -> _Known:
    literal = not isinstance(value, jax.Array) and np.ndim(value) == 0
    return _Known(value, zero=literal and not np.any(value))


def _apply_with_slopes(equation: core.JaxprEqn, inputs: list[_Known]) -> list[_Known]:
    name = equation.primitive.name
    values = [x.value for x in inputs]
    # Integers are counts of steps; values computed from them get no limit.
    floating = [_is_floating(x) for x in values]
    inputs = [x._replace(own=x.own and real) for x, real in zip(inputs, floating, strict=True)]
    own, first = any(x.own for x in inputs), inputs[0] if inputs else _Known(None)
    if name in _RESHAPING:
        opened, unknown = first.opened, first.unknown
        if name != "convert_element_type":
            masks = opened, unknown
            moved = [m if m is None else bind(equation, [m, *values[1:]])[0] for m in masks]
            opened, unknown = moved
        return [first._replace(value=bind(equation, values)[0], opened=opened, unknown=unknown)]
    if name == "gt" and first.own and not first.given and inputs[1].zero:
        return [_Known(bind(equation, values)[0], own, opened=values[0] >= 0)]
    if name == "cond":
        branches = [_branch(closed, inputs[1:]) for closed in equation.params["branches"]]
        outputs, unknown = jax.lax.switch(values[0], branches, *values[1:])
        return [_Known(x, own, unknown=u) for x, u in zip(outputs, unknown, strict=True)]
    if floating[:1] == [True] and name in _REPLACEMENTS:
        outputs = [_REPLACEMENTS[name](*values)]
    elif name == "select_n" and first.opened is not None and inputs[1].zero:
        shut = inputs[2].unknown
        opened = first.opened if shut is None else values[0] | (first.opened & ~shut)
        inputs[0] = first._replace(value=opened)
        outputs = bind(equation, [opened, *values[1:]])
    else:
        outputs = bind(equation, values)
    return [_Known(x, own, unknown=_unknown_slopes(name, inputs, x)) for x in outputs]


def _unknown_slopes(name: str, inputs: list[_Known], output: jax.Array) -> Any:
    """Return the entries of ``output`` that depend on entries with an unknown slope."""
    if name == "log" and inputs[0].own:
        at_zero = inputs[0].value == 0
        return at_zero if inputs[0].unknown is None else at_zero | inputs[0].unknown
    if all(x.unknown is None for x in inputs):
        return None
    masks = [_mask(x) for x in inputs]
    if name == "select_n" and inputs[0].unknown is None:
        return jax.lax.select_n(inputs[0].value, *masks[1:])
    if name in ("max", "min"):
        x, y = (x.value if name == "max" else -x.value for x in inputs)
        return (masks[0] & (x >= y)) | (masks[1] & (y >= x))
    if name == "clamp":
        low, x, high = (x.value for x in inputs)
        return functools.reduce(jnp.logical_or, masks) & (x >= low) & (x <= high)
    if name in _ENTRYWISE:
        return functools.reduce(jnp.logical_or, masks)
    anything = functools.reduce(jnp.logical_or, [jnp.any(mask) for mask in masks])
    return jnp.broadcast_to(anything, jnp.shape(output))


def _mask(x: _Known) -> jax.Array:
    return jnp.zeros(jnp.shape(x.value), bool) if x.unknown is None else x.unknown


_RESHAPING = ("broadcast_in_dim", "reshape", "squeeze", "convert_element_type", "copy")


def _branch(closed: core.ClosedJaxpr, inputs: list[_Known]) -> Callable:
    def branch(*values):
        given = [x._replace(value=v, opened=None) for x, v in zip(inputs, values, strict=True)]
        outputs = _evaluate_with_slopes(closed, given)
        return [x.value for x in outputs], [_mask(x) for x in outputs]

    return branch


def _with_finite_slope(operation: Callable) -> Callable:
    """Return ``operation(x, ...)`` with slope 0 where its slope in ``x`` is infinite."""

    def finite(x, *operands):
        fixed = jax.lax.stop_gradient(x)
        others = jax.lax.stop_gradient(operands)
        slope = jax.jvp(lambda x: operation(x, *others), (fixed,), (jnp.ones_like(x),))[1]
        infinite = ~jnp.isfinite(slope) & ~jnp.isnan(x)
        ordinary = jnp.where(infinite, jnp.ones_like(x), x)
        return jnp.where(infinite, operation(fixed, *others), operation(ordinary, *operands))

    return finite


def _divide(x, y):
    zero = y == 0
    fixed = jax.lax.stop_gradient(x) / jax.lax.stop_gradient(y)
    return jnp.where(zero, fixed, x / jnp.where(zero, jnp.ones_like(y), y))


_REPLACEMENTS = {
    "sqrt": _with_finite_slope(lambda x: jax.lax.sqrt(jnp.where(x < 0, 0, x))),
    "rsqrt": _with_finite_slope(jax.lax.rsqrt),
    "cbrt": _with_finite_slope(jax.lax.cbrt),
    "pow": _with_finite_slope(jax.lax.pow),
    "div": _divide,
    "log": _with_finite_slope(jax.lax.log),
}
