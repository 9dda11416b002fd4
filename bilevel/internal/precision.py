"""Support weights of several dtypes: each leaf keeps its dtype, solvers compute in one.

Scalars that a loop carries need one dtype: the widest among the weights, and at least float32.
Solvers widen the weights on entry, and the losses narrow them again.
"""

import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from bilevel.contracts import Loss, Pytree
from ntk.internal.checks import at_least_float32


def widen(w: Pytree) -> Pytree:
    """Return every leaf in the widest dtype among them, at least float32."""
    dtype = at_least_float32(*(x.dtype for x in jax.tree.leaves(w)))
    return jax.tree.map(lambda x: x.astype(dtype), w)


def narrow(w: Pytree, like: Pytree) -> Pytree:
    """Return every leaf in the dtype of its counterpart."""

    def cast(x, y):  # keys among the variables have one dtype only
        return x if x.dtype == y.dtype else x.astype(y.dtype)

    return jax.tree.map(cast, w, like)


def like_start(name: str, w: Pytree, like: Pytree) -> Pytree:
    """Return a user's ``w`` in the dtypes of ``like``; raise for another structure."""
    _check_form(w, like, f"{name}: expected a tree like w0", f"{name}{{}}: expected weights")
    return narrow(jax.tree.map(jnp.asarray, w), like)


def like_variables(variables: Pytree, like: Pytree) -> Pytree:
    """Return variables of a loss in the dtypes of ``like``, the variables that it was given."""
    like = jax.tree.map(jnp.asarray, like)
    form = "lower: expected variables of the form of w0's"
    _check_form(variables, like, form, "lower: expected variables{}")
    leaves = jax.tree_util.tree_leaves_with_path(variables)
    for (path, x), y in zip(leaves, jax.tree.leaves(like), strict=True):
        if jnp.issubdtype(y.dtype, jnp.integer) and jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            raise ValueError(
                f"lower: expected variables{jax.tree_util.keystr(path)} of integers, as in w0, got "
                f"{jnp.result_type(x)}; begin from floating variables."
            )
    return narrow(jax.tree.map(jnp.asarray, variables), like)


def _check_form(tree: Pytree, like: Pytree, form: str, leaf: str) -> None:
    """Raise unless ``tree`` has the structure and the shapes of ``like``."""
    structure, expected = str(jax.tree.structure(tree)), str(jax.tree.structure(like))
    if structure != expected:
        raise ValueError(f"{form}, {expected}, got {structure}.")
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    for (path, x), y in zip(leaves, jax.tree.leaves(like), strict=True):
        if jnp.shape(x) != jnp.shape(y):
            where = leaf.format(jax.tree_util.keystr(path))
            raise ValueError(f"{where} of w0's shape {jnp.shape(y)}, got {jnp.shape(x)}.")


def coarsest_eps(w: Pytree) -> float:
    """Return the largest machine epsilon among the leaves."""
    return max(float(jnp.finfo(x.dtype).eps) for x in jax.tree.leaves(w))


def widened(loss: Loss, like: Pytree) -> Loss:
    """Return ``loss`` as a function of widened weights."""
    return lambda w, alpha, batch: loss(narrow(w, like), alpha, batch)


def squarable(parts: list[Any]) -> list[Any]:
    """Return arrays in 32 bits or more, scaled by a power of two so that squares stay in range."""
    parts = [a.astype(at_least_float32(a.dtype)) for a in parts]
    numbers: Any = jnp if isinstance(parts[0], jax.Array) else np
    _, exponent = numbers.frexp(numbers.abs(parts[0]).max())
    return [numbers.ldexp(a, -exponent) for a in parts]


def mixed_bits(bits: jax.Array) -> jax.Array:
    """Hash uint32 numbers by MurmurHash3's last mixing; JAX's generators compile more slowly."""
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        bits = (bits ^ (bits >> 16)) * jnp.uint32(factor)
    return bits


def uniform_hash(numbers: chex.Numeric, like: jax.Array) -> jax.Array:
    """Return a vector of mean 0 and variance 1 of ``like``'s size for each of the ``numbers``."""
    seeds = jnp.asarray(numbers, jnp.uint32)[..., None] * jnp.uint32(0x9E3779B9)
    places = jnp.arange(like.size, dtype=jnp.uint32).reshape((1,) * (seeds.ndim - 1) + (-1,))
    bits = mixed_bits(places + seeds)
    return math.sqrt(3) * ((bits ^ (bits >> 16)).astype(like.dtype) / 2.0**31 - 1)
