"""The one place of argument checks: one sentence each, naming the argument and the cure."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from bilevel.protocols import Inverse, LowerSolver, Pytree


def at_least(name: str, value, least) -> None:
    """Refuse a number under ``least``; traced values pass: they have no value to look at yet."""
    if not isinstance(value, jax.core.Tracer) and not value >= least:
        raise ValueError(f"{name}: expected at least {least}, got {value}.")


def whole(name: str, value, least: int) -> int:
    """``value`` as an int of at least ``least``; numpy's integers are welcome.

    Examples
    --------
    >>> whole("steps", 2.5, 1)
    Traceback (most recent call last):
    ValueError: steps: expected a whole number, got 2.5.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except (TypeError, jax.errors.TracerIntegerConversionError):
        raise ValueError(f"{name}: expected a whole number, got {value!r}.") from None
    at_least(name, number, least)
    return number


def floating(name: str, tree: Pytree) -> None:
    """Refuse anything but real floating arrays, with the path of the leaf."""
    for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        where = f"{name}{jax.tree_util.keystr(path)}"
        try:
            dtype = jnp.result_type(x)
        except (TypeError, ValueError):
            raise ValueError(
                f"{where}: expected floating arrays, got {_short(x)}; keep the arrays in {name} "
                "and close the losses over the rest (equinox.partition splits a module so)."
            ) from None
        if jnp.issubdtype(dtype, jnp.complexfloating):
            raise ValueError(
                f"{where}: expected real floating arrays, got {dtype}; "
                "hand in real and imaginary parts as two arrays."
            )
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                f"{where}: expected floating arrays, got {dtype}; convert it with "
                "jnp.asarray(x, float), or close the losses over it if it does not change."
            )


def nan_unless_finite(tree: Pytree, *witnesses: Pytree) -> Pytree:
    """``tree``, NaN everywhere where any number among the witnesses is not finite.

    A loop that runs while a residual is above its target ends at a NaN, with an iterate that looks
    good: what it returns goes through here. By a factor, so that derivatives become NaN too.

    Examples
    --------
    >>> nan_unless_finite(jnp.ones(2), jnp.array(1.0)), nan_unless_finite(1.0, jnp.inf)
    (Array([1., 1.], dtype=float...), Array(nan, dtype=float...))
    """
    finite = jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(witnesses)]).all()
    factor = jnp.where(finite, 1.0, jnp.nan)
    return jax.tree.map(lambda x: x * factor.astype(jnp.result_type(x)), tree)


def scalar_loss(name: str, value: Any) -> None:
    """Refuse a loss's output that is not one floating number."""
    if isinstance(value, tuple | list | dict):
        raise ValueError(
            f"{name}: expected a loss that returns a floating scalar, got a {type(value).__name__} "
            "of several values; return the loss alone, without auxiliary outputs."
        )
    if jnp.shape(value) != () or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        raise ValueError(
            f"{name}: expected a loss that returns a floating scalar, "
            f"got shape {jnp.shape(value)} of {jnp.result_type(value)}."
        )


def lower_solver(name: str, value: Any) -> LowerSolver:
    """Refuse what is not a lower solver, with the cure for the usual slips."""
    if isinstance(value, LowerSolver):
        return value
    if isinstance(value, optax.GradientTransformation | optax.MultiSteps):
        cure = "wrap it: unrolled(optimizer, steps)"
    elif _made_here(value):
        cure = "an inverse goes into implicit(inverse=...)"
    elif _factory(value):
        cure = f"call it: {value.__name__}(...)"
    elif callable(value):
        cure = "hand it to solved(...) inside implicit(...) if it solves the lower problem"
    else:
        cure = "bilevel.implicit() and bilevel.unrolled(step_size, steps) make one"
    raise ValueError(f"{name}: expected a LowerSolver, got {_short(value)}; {cure}.")


def inverse_map(name: str, value: Any) -> Inverse:
    """Refuse what is not an inverse-Hessian-vector product."""
    if callable(value) and not _factory(value):
        return value
    cure = f"call it: {value.__name__}(...)" if _factory(value) else "bilevel.cg() makes one"
    raise ValueError(f"{name}: expected an inverse, got {_short(value)}; {cure}.")


def _factory(value: Any) -> bool:
    """Whether ``value`` is one of this package's functions, whose brackets were forgotten."""
    return callable(value) and _ours(value) and "<locals>" not in value.__qualname__


def _made_here(value: Any) -> bool:
    """Whether ``value`` is a function that one of this package's functions returned."""
    return callable(value) and _ours(value) and "<locals>" in value.__qualname__


def _ours(value: Any) -> bool:
    return hasattr(value, "__qualname__") and (value.__module__ or "").startswith("bilevel.")


def gradient_transformation(name: str, value: Any) -> None:
    """Refuse what is not an optax optimizer, with the cure for the usual slips."""
    if isinstance(value, optax.GradientTransformation):
        return
    if isinstance(value, optax.MultiSteps):
        cure = "hand in its .gradient_transformation()"
    elif callable(value):
        cure = "call it if it makes an optimizer, or hand it to optax.sgd if it is a schedule"
    else:
        cure = "optax.sgd(step_size) makes one"
    raise ValueError(f"{name}: expected an optax optimizer, got {_short(value)}; {cure}.")


def prng_key(name: str, key: Any) -> None:
    """Refuse what is not one PRNG key, typed or of the old style (uint32)."""
    dtype = getattr(key, "dtype", None)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not typed and dtype != jnp.uint32:
        raise ValueError(f"{name}: expected a PRNG key such as jax.random.key(0), got {key!r}.")


def function(name: str, value: Any, form: str) -> None:
    """Refuse what cannot be called."""
    if not callable(value):
        raise ValueError(f"{name}: expected a function {form}, got {_short(value)}.")


def _short(value: Any) -> str:
    name = getattr(value, "__name__", None)
    if callable(value) and name is not None:
        return f"the function {name}"
    if value is None or isinstance(value, str | int | float | bool):
        return repr(value)
    return f"a {type(value).__name__}"
