"""Checks of arguments. An error message is one sentence and names the argument."""

import functools
import operator
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def concrete(*trees: Any) -> bool:
    """Return whether no leaf is traced by ``jit``, ``vmap`` or ``grad``."""
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(trees))


def check_finite(name: str, tree: Any, what: str = "numbers") -> None:
    """Raise ``ValueError`` if a leaf has NaN or infinity; traced leaves pass."""
    for leaf in jax.tree.leaves(tree):
        inexact = jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
        if inexact and concrete(leaf) and not _all_finite(leaf):
            raise ValueError(f"{name}: expected finite {what}, got NaN or infinity.")


def _all_finite(x: Any) -> bool:
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        with jax.ensure_compile_time_eval():  # all processes together, with one answer
            return bool(jnp.isfinite(x).all())
    # numpy computes at once even while JAX traces another function.
    return bool(np.isfinite(np.asarray(x)).all())


def nan_unless(good: Any, tree: Any) -> Any:
    """Return ``tree`` where ``good`` holds, and NaN elsewhere; ``good`` broadcasts with the leaves.

    The NaN is a factor, so every derivative becomes NaN too. :func:`nan_where` fits single entries.
    """
    factor = jnp.where(good, 1.0, jnp.nan)

    def of_leaf(x):
        missing = range(jnp.ndim(x) - factor.ndim)
        return x * jnp.expand_dims(factor, tuple(missing)).astype(jnp.result_type(x))

    return jax.tree.map(of_leaf, tree)


def nan_where(bad: Any, value: jax.Array) -> jax.Array:
    """Return ``value``, but NaN where ``bad``; derivatives that depend on these are not finite."""
    # `jnp.where` would give derivatives of 0, which look right. Two factors of the largest finite
    # number turn all values except 0 into infinity.
    huge = jnp.where(bad, jnp.finfo(value.dtype).max, 1).astype(value.dtype)
    return value * huge * huge + jnp.where(bad, jnp.nan, 0).astype(value.dtype)


def is_sparse(value: Any) -> bool:
    """Return whether ``value`` is a sparse matrix of SciPy or JAX."""
    return hasattr(value, "todense")


def check_dense(name: str, value: Any) -> None:
    """Raise ``ValueError`` for a sparse matrix: ``jnp.asarray`` would read JAX's row by row."""
    if is_sparse(value):
        kind = type(value).__name__
        raise ValueError(f"{name}: expected a dense array, got a {kind}: call todense().")


def real_array(name: str, value: Any) -> jax.Array:
    """Return ``value`` as an array of real numbers, with its dtype."""
    check_dense(name, value)
    try:
        x = jnp.asarray(value)
    except OverflowError:  # Python integers beyond the range of JAX's integers
        x = jnp.asarray(value, float)
    except (TypeError, ValueError):
        raise ValueError(f"{name}: expected an array of numbers, got {describe(value)}.") from None
    _check_real_dtype(name, x.dtype)
    return x


def common_dtype(*values: Any) -> np.dtype:
    """Return the dtype to which JAX promotes arrays or dtypes by default."""
    # The user's flag for strict promotion concerns implicit casts of arrays, not this function.
    with jax.numpy_dtype_promotion("standard"):
        if all(isinstance(value, np.dtype | type) for value in values):
            # This form avoids JAX's warning for the float64 of NumPy arrays.
            return jnp.dtype(functools.reduce(jnp.promote_types, values))
        return jnp.result_type(*values)


def at_least_float32(*values: Any) -> np.dtype:
    """Return the common dtype of arrays or dtypes, at least float32."""
    return common_dtype(jnp.float32, *values)


def float_array(name: str, value: Any) -> jax.Array:
    """Return ``value`` as an array of real floating-point numbers of at least 32 bits."""
    x = real_array(name, value)
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    return x.astype(at_least_float32(x.dtype) if floating else float)


def numpy_array(name: str, value: Any) -> Any:
    """Return ``value`` as a numpy array of real numbers. Tracers are unchanged."""
    check_dense(name, value)
    try:
        x = value if isinstance(value, jax.core.Tracer) else np.asarray(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name}: expected numbers, got {describe(value)}.") from None
    if x.dtype.kind in "OUS":
        raise ValueError(f"{name}: expected numbers, got {describe(value)}.")
    _check_real_dtype(name, x.dtype)
    return x


def real_number(name: str, value: Any) -> Any:
    """Return one real number as a numpy array. Tracers are unchanged."""
    x = numpy_array(name, value)
    if x.shape != ():
        raise ValueError(f"{name}: expected a number, got shape {x.shape}.")
    return x


def nonnegative_number(name: str, value: Any) -> jax.Array:
    """Return one number of at least 0. A traced negative number becomes NaN."""
    number = real_number(name, value)
    if concrete(number) and not number >= 0:
        raise ValueError(f"{name}: expected a nonnegative number, got {value}.")
    return jnp.where(number >= 0, number, jnp.nan)


def regression_targets(y: Any, n: int) -> jax.Array:
    """Return the finite targets ``y`` of ``n`` inputs, [n] or [n, outputs]."""
    y = real_array("y", y)
    if y.ndim not in (1, 2) or y.shape[0] != n or not y.size:
        raise ValueError(f"y: expected shape [{n}] or [{n}, outputs], got {y.shape}.")
    check_finite("y", y, "targets")
    return y


def positive(name: str, number: Any) -> Any:
    """Return ``number`` in floating point if it is positive and finite. Tracers pass."""
    value = numpy_array(name, number)
    if concrete(value):
        good = (value > 0) & (value < np.inf)
        if not good.all():
            raise ValueError(f"{name}: expected a positive number, got {offending(value, good)}.")
    # Products of integers could leave the range of their dtype.
    if isinstance(number, float) or jnp.issubdtype(getattr(number, "dtype", int), jnp.floating):
        return number
    return float(value) if concrete(value) and not value.shape else value.astype(float)


def function(name: str, value: Any, form: str) -> None:
    """Raise ``ValueError`` if ``value`` cannot be called."""
    if not callable(value):
        raise ValueError(f"{name}: expected a function {form}, got {describe(value)}.")


def sequence(name: str, value: Any, what: str = "a sequence") -> tuple:
    """Return ``value`` as a tuple. Strings raise ``ValueError``."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(f"{name}: expected {what}, got {describe(value)}.")
    return tuple(value)


def integer(name: str, value: Any, least: int) -> int:
    """Return ``value`` as an int of at least ``least``; numpy's integers are accepted."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except (TypeError, jax.errors.TracerIntegerConversionError):
        raise ValueError(f"{name}: expected an integer, got {describe(value)}.") from None
    if number < least:
        raise ValueError(f"{name}: expected at least {least}, got {number}.")
    return number


def one_of(name: str, value: Any, options: Iterable[str]) -> None:
    """Raise ``ValueError`` if ``value`` is not one of the names in ``options``."""
    if not isinstance(value, str) or value not in options:
        raise ValueError(f"{name}: expected one of {', '.join(options)}, got {describe(value)}.")


def prng_key(name: str, key: Any) -> None:
    """Raise ``ValueError`` if ``key`` is not one PRNG key, typed or of the old style (uint32)."""
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if shape != () if typed else dtype != jnp.uint32 or not shape or len(shape) != 1:
        got = f"keys of shape {shape}" if typed else describe(key)
        raise ValueError(f"{name}: expected a PRNG key such as jax.random.key(0), got {got}.")


def offending(x: Any, allowed: Any) -> Any:
    """Return the first entry of an array that is not allowed."""
    return np.asarray(x)[~np.asarray(allowed)].ravel()[0]


def describe(value: Any) -> str:
    """Return a short description of a value for an error message."""
    name = getattr(value, "__name__", None)
    if callable(value) and name is not None:
        return f"the function {name}"
    if value is None or isinstance(value, str | int | float | bool):
        return repr(value)
    if isinstance(value, jax.Array):  # traced ones have other names
        return f"an array of shape {value.shape}"
    return f"a {type(value).__name__}"


def _check_real_dtype(name: str, dtype: Any) -> None:
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise ValueError(f"{name}: expected real numbers, got {dtype}.")
    if not any(jnp.issubdtype(dtype, kind) for kind in (jnp.number, jnp.bool_)):
        raise ValueError(f"{name}: expected numbers, got {dtype}.")
