"""Derivatives of functions' own that loops do not lose.

Where the reverse pass of a loop (``lax.scan``, ``lax.map``) is differentiated once more, JAX takes
its body apart to bring out what does not change from pass to pass. Functions with a derivative of
their own (``jax.custom_jvp``) are opened in it, and second derivatives are then those of their
code: infinite where the rule knows a limit, 0 where a loop ended early. What ``jax.checkpoint``
holds is not opened.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal

from ntk.internal.compile_cache import fresh
from ntk.internal.jaxprs import bind, inner_jaxprs, scan_operands


def custom_jvp(function: Callable, nondiff_argnums: tuple[int, ...] = ()) -> Any:
    """``jax.custom_jvp``, with ``defjvp``, whose rule is kept by loops too.

    What the rule computes besides the value is computed in the reverse pass, not kept for it.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> @custom_jvp
    ... def cube(x):
    ...     return jax.lax.stop_gradient(x) ** 3
    >>> @cube.defjvp
    ... def _(primals, tangents):
    ...     (x,), (dx,) = primals, tangents
    ...     return cube(x), 3 * x**2 * dx
    >>> looped = lambda x: jax.lax.map(lambda k: cube(k * x) ** 2, jnp.ones(1))[0]
    >>> float(jax.grad(jax.grad(looped))(2.0))  # 30 x^4
    480.0
    """
    rule = jax.custom_jvp(function, nondiff_argnums=nondiff_argnums)
    held: Any = jax.checkpoint(rule, prevent_cse=False, static_argnums=nondiff_argnums)
    wrapped: Any = functools.wraps(function)(lambda *args: held(*args))
    wrapped.defjvp = rule.defjvp
    return wrapped


_RULE = "custom_jvp_call"  # what is left of a custom_vjp after a reverse pass is ordinary code
_JITS = ("jit", "pjit")
_CHECKPOINTS = ("checkpoint", "remat2")


def may_be_lost(program: ClosedJaxpr, inside: bool = False) -> bool:
    """Whether a loop of the program has functions with derivatives of their own in it.

    Examples
    --------
    >>> relu = jax.nn.relu
    >>> looped = jax.make_jaxpr(lambda x: jax.lax.map(relu, x))(jax.numpy.ones(2))
    >>> may_be_lost(looped), may_be_lost(jax.make_jaxpr(relu)(1.0))
    (True, False)
    """
    for eqn in program.jaxpr.eqns:
        name = eqn.primitive.name
        if inside and name == _RULE:
            return True
        if name in ("scan", *_JITS, *_CHECKPOINTS):
            within = inside or name == "scan"
            if any(may_be_lost(body, within) for body in inner_jaxprs(eqn)):
                return True
    return False


def in_loops(function: Callable) -> Callable:
    """``function`` of arrays, whose loops keep the derivatives of functions in them.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> rounded = jax.custom_jvp(jnp.rint)
    >>> rounded.defjvps(lambda dx, rounded, x: dx)
    >>> total = lambda x: jax.lax.map(lambda k: rounded(k * x) ** 2, jnp.ones(1))[0]
    >>> float(jax.grad(jax.grad(in_loops(total)))(2.0))  # where JAX alone says 0
    2.0
    """

    def wrapped(*args):
        program, shapes = jax.make_jaxpr(fresh(function), return_shape=True)(*args)
        outputs = _evaluate_program(program, jax.tree.leaves(args), inside=False)
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return wrapped


def _evaluate_program(program: ClosedJaxpr, inputs: list, *, inside: bool) -> list:
    """The program's outputs; ``inside`` a loop, functions with rules are held."""
    jaxpr = program.jaxpr
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*program.consts, *inputs), strict=True))

    def read(variables):
        return [v.val if isinstance(v, Literal) else known[v] for v in variables]

    for eqn in jaxpr.eqns:
        outputs = _evaluate_equation(eqn, read(eqn.invars), inside)
        known |= zip(eqn.outvars, outputs, strict=True)
    return read(jaxpr.outvars)


def _hold_rule(eqn: Any) -> Callable:
    """The function that the equation calls, with its derivative, held."""

    def plain(*values):
        return tuple(bind(eqn, list(values)))

    held = custom_jvp(plain)

    @held.defjvp
    def _(primals, tangents):
        # The value by the held function: what a second derivative differentiates once more.
        return held(*primals), jax.jvp(plain, primals, tangents)[1]

    return held


def _evaluate_equation(eqn: Any, values: list, inside: bool) -> list:
    name, params = eqn.primitive.name, eqn.params
    if inside and name == _RULE:
        return list(_hold_rule(eqn)(*values))
    loop = name == "scan"
    lost = (may_be_lost(body, inside or loop) for body in inner_jaxprs(eqn))
    if name not in ("scan", *_JITS, *_CHECKPOINTS) or not any(lost):
        return bind(eqn, values)
    (body,) = inner_jaxprs(eqn)
    if name in _JITS:
        return _evaluate_program(body, values, inside=inside)
    if name in _CHECKPOINTS:
        options = {key: params[key] for key in ("prevent_cse", "policy")}
        held = jax.checkpoint(
            lambda *values: _evaluate_program(body, list(values), inside=inside), **options
        )
        return held(*values)
    constant, carried = scan_operands(eqn)

    def step(carry, x):
        outputs = _evaluate_program(body, [*values[:constant], *carry, *x], inside=True)
        return outputs[:carried], outputs[carried:]

    first, xs = values[constant : constant + carried], values[constant + carried :]
    options = {key: params[key] for key in ("length", "reverse", "unroll")}
    carry, stacked = jax.lax.scan(step, first, xs, **options)
    return [*carry, *stacked]
