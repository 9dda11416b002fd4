"""Custom derivative rules that survive inside loops.

When JAX differentiates the reverse pass of a loop (``lax.scan``, ``lax.map``) once more, it moves
constant parts out of the body. This opens functions with a ``jax.custom_jvp`` rule, so their second
derivatives ignore the rule. ``jax.checkpoint`` protects a function from this.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from ntk.internal.compile_cache import fresh
from ntk.internal.jaxprs import bind, bind_scan, inner_jaxprs, interpret


def custom_jvp(function: Callable, nondiff_argnums: tuple[int, ...] = ()) -> Any:
    """Return ``jax.custom_jvp`` of the function, with ``defjvp`` and a rule that survives in loops.

    The reverse pass computes the rule's intermediate values instead of storing them.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> cube = custom_jvp(lambda x: jax.lax.stop_gradient(x) ** 3)
    >>> rule = lambda x, dx: (cube(*x), 3 * x[0] ** 2 * dx[0])
    >>> _ = cube.defjvp(rule)
    >>> looped = lambda x: jax.lax.map(lambda k: cube(k * x) ** 2, jnp.ones(1))[0]
    >>> float(jax.grad(jax.grad(looped))(2.0))  # 30 x^4
    480.0
    """
    rule = jax.custom_jvp(function, nondiff_argnums=nondiff_argnums)
    held: Any = jax.checkpoint(rule, prevent_cse=False, static_argnums=nondiff_argnums)
    wrapped: Any = functools.wraps(function)(lambda *args: held(*args))
    wrapped.defjvp = rule.defjvp
    return wrapped


_RULE = "custom_jvp_call"  # after a reverse pass, a custom_vjp is ordinary code
_JITS = ("jit", "pjit")
_CHECKPOINTS = ("checkpoint", "remat2")


def may_be_lost(program: ClosedJaxpr, inside: bool = False) -> bool:
    """Return whether a loop of the program contains a function with its own derivative."""
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
    """Return ``function`` of arrays, with custom derivative rules that survive in its loops.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> rounded = jax.custom_jvp(jnp.rint)
    >>> rounded.defjvps(lambda dx, rounded, x: dx)
    >>> total = lambda x: jax.lax.map(lambda k: rounded(k * x) ** 2, jnp.ones(1))[0]
    >>> float(jax.grad(jax.grad(in_loops(total)))(2.0))  # JAX alone returns 0
    2.0
    """

    def wrapped(*args):
        program, shapes = jax.make_jaxpr(fresh(function), return_shape=True)(*args)
        outputs = interpret(program, jax.tree.leaves(args), _evaluate_equation)
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return wrapped


def _evaluate_equation(eqn: JaxprEqn, values: list, inside: bool = False) -> list:
    """Return the equation's outputs; ``inside`` a loop, derivative rules are protected."""
    name = eqn.primitive.name
    if inside and name == _RULE:
        return list(_hold_rule(eqn)(*values))
    inside |= name == "scan"
    lost = (may_be_lost(body, inside) for body in inner_jaxprs(eqn))
    if name not in ("scan", *_JITS, *_CHECKPOINTS) or not any(lost):
        return bind(eqn, values)
    (body,) = inner_jaxprs(eqn)

    def evaluate(values):
        return interpret(body, values, functools.partial(_evaluate_equation, inside=inside))

    if name == "scan":
        return bind_scan(eqn, evaluate, values)
    if name in _CHECKPOINTS:
        options = {key: eqn.params[key] for key in ("prevent_cse", "policy")}
        return jax.checkpoint(evaluate, **options)(values)
    return evaluate(values)


def _hold_rule(eqn: JaxprEqn) -> Callable:
    """Return the equation's function and derivative rule, protected by a checkpoint."""

    def plain(*values):
        return tuple(bind(eqn, list(values)))

    held = custom_jvp(plain)

    @held.defjvp
    def _(primals, tangents):
        # A second derivative differentiates this value, so it comes from the protected function.
        return held(*primals), jax.jvp(plain, primals, tangents)[1]

    return held
