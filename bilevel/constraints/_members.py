"""Build constraints from functions of one vector, and resolve their parameters."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from bilevel.contracts import Constraint, Pytree
from bilevel.internal.checks import concrete, describe


def on_vector(
    *,
    parameters: Callable[[Pytree, Pytree], tuple],
    blank: Callable[[int], Pytree],
    identify: Callable,
    prox: Callable,
    step: Callable,
    tangent: Callable,
    margins: Callable,
    check: Callable[..., Any],
    curvature: Callable | None = None,
) -> Constraint:
    """Return a constraint on all weights as one vector. Its members take the parameters last."""

    def vector(tree):
        return ravel_pytree(tree)[0]

    def on_trees(member, last):
        """Return ``member`` as a function of trees; ``last`` converts the argument after alpha."""

        def applied(code, w, *args):
            *trees, alpha, final = args
            flat, unravel = ravel_pytree(w)
            values = parameters(w, alpha)
            return unravel(member(code, flat, *map(vector, trees), last(final), *values))

        return applied

    bend = curvature or (lambda code, w, g, v, *_: jnp.zeros_like(v))
    return Constraint(
        blank=lambda w: blank(optax.tree.size(w)),
        identify=lambda w, g, alpha, eta: identify(
            vector(w), vector(g), eta, *parameters(w, alpha)
        ),
        prox=on_trees(prox, lambda eta: eta),
        step=on_trees(step, lambda eta: eta),
        tangent=on_trees(tangent, vector),
        curvature=on_trees(bend, vector),
        margins=lambda code, w, g, alpha: margins(
            code, vector(w), vector(g), *parameters(w, alpha)
        ),
        check=lambda w, alpha: check(*parameters(w, alpha)),
    )


def value_at(parameter: Any, alpha: Pytree) -> Any:
    """Return a parameter: a value, or a function of alpha."""
    return parameter(alpha) if callable(parameter) else parameter


def per_weight(name: str, parameter: Any, w: Pytree, alpha: Pytree) -> jax.Array:
    """Return a parameter of every weight as a vector, from a number or a tree like ``w``."""
    value = value_at(parameter, alpha)
    leaves, structure = jax.tree.flatten(w)
    values, form = jax.tree.flatten(value)
    if str(form) != str(structure):
        if not _is_leaf(value) or jnp.ndim(value):
            raise ValueError(
                f"{name}: expected a number or a tree like the weights, {structure}, "
                f"got {describe(value)}."
            )
        values = values * len(leaves)
    dtype = jnp.result_type(*leaves)
    parts = []
    for x, v in zip(leaves, values, strict=True):
        shape = jnp.shape(x)
        if not _broadcasts(jnp.shape(v), shape):
            raise ValueError(
                f"{name}: expected a number or the shape {shape} of the weights, "
                f"got shape {jnp.shape(v)}."
            )
        parts.append(jnp.broadcast_to(jnp.asarray(v, dtype), shape).ravel())
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]


def _is_leaf(value: Any) -> bool:
    leaves = jax.tree.leaves(value)
    return len(leaves) == 1 and leaves[0] is value


def _broadcasts(shape: tuple[int, ...], onto: tuple[int, ...]) -> bool:
    try:
        return np.broadcast_shapes(shape, onto) == onto
    except ValueError:
        return False


def scalar_parameter(name: str, parameter: Any, w: Pytree, alpha: Pytree) -> jax.Array:
    """Return a scalar parameter in the dtype of the weights."""
    value = value_at(parameter, alpha)
    if not _is_leaf(value) or jnp.ndim(value):
        raise ValueError(f"{name}: expected one number, got {describe(value)}.")
    return jnp.asarray(value, jnp.result_type(*jax.tree.leaves(w)))


def require(name: str, good: Any, expected: str, value: Any) -> jax.Array:
    """Return whether all entries are good; raise with the worst entry if they are known."""
    if concrete(good) and not np.all(good):
        values = np.broadcast_to(np.asarray(value, np.float64), np.shape(good))
        worst = values[~np.asarray(good)].flat[0]
        raise ValueError(f"{name}: expected {expected}, got {worst:.6g}.")
    return good.all()


def require_nonnegative(name: str, value: jax.Array) -> jax.Array:
    """Return whether no entry is negative or NaN; raise if they are known."""
    return require(name, value >= 0, "numbers of at least 0", value)


def check_at_once(name: str, parameter: Any, good: Callable, expected: str) -> None:
    """Raise for a known parameter with a wrong entry, when the constraint is built."""
    if callable(parameter):
        return
    for x in jax.tree.leaves(parameter):
        if not concrete(x):
            continue
        # PRNG keys have a dtype that NumPy does not know.
        dtype = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
        if not jnp.issubdtype(dtype, jnp.number):
            raise ValueError(f"{name}: expected numbers or a function of alpha, got {describe(x)}.")
        require(name, good(np.asarray(x)), expected, x)


def nonnegative_scalar(name: str, parameter: Any) -> dict[str, Callable]:
    """Return ``parameters`` and ``check`` of a constraint with this parameter alone."""
    check_at_once(name, parameter, lambda x: x >= 0, "a number of at least 0")
    return {
        "parameters": lambda w, alpha: (scalar_parameter(name, parameter, w, alpha),),
        "check": functools.partial(require_nonnegative, name),
    }
