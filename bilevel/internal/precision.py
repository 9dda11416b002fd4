"""Weights of several dtypes: each leaf keeps its own, solvers compute in one.

Inner products and step lengths are scalars that go round in loops, so they need one dtype: the
widest among the weights, and at least float32. The weights are widened to it on the way into a
solver, and the losses narrow them again; where all have that dtype already, nothing happens.
Of data there is the other limit of a dtype: numbers whose squares leave its range.
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
    """Every leaf in the widest dtype among them, at least float32."""
    dtype = at_least_float32(*(x.dtype for x in jax.tree.leaves(w)))
    return jax.tree.map(lambda x: x.astype(dtype), w)


def narrow(w: Pytree, like: Pytree) -> Pytree:
    """Every leaf in the dtype of its counterpart."""

    def cast(x, y):  # what is no number, as a key among the variables, has one dtype only
        return x if x.dtype == y.dtype else x.astype(y.dtype)

    return jax.tree.map(cast, w, like)


def like_start(name: str, w: Pytree, like: Pytree) -> Pytree:
    """``w`` from a user's function in the dtypes of ``like``, the weights it was to be like.

    Else loops over weights, of inner or outer steps, would end with other ones than they begin.
    """
    structure, expected = str(jax.tree.structure(w)), str(jax.tree.structure(like))
    if structure != expected:
        raise ValueError(f"{name}: expected a tree like w0, {expected}, got {structure}.")
    leaves = jax.tree_util.tree_leaves_with_path(w)
    for (path, x), y in zip(leaves, jax.tree.leaves(like), strict=True):
        if jnp.shape(x) != jnp.shape(y):
            where = f"{name}{jax.tree_util.keystr(path)}"
            raise ValueError(
                f"{where}: expected weights of w0's shape {jnp.shape(y)}, got {jnp.shape(x)}."
            )
    return narrow(jax.tree.map(jnp.asarray, w), like)


def like_variables(variables: Pytree, like: Pytree) -> Pytree:
    """Return variables of a loss in the dtypes of ``like``, the variables that it was given.

    Loops over inner or outer steps would otherwise end with other types than they began with.
    """
    like = jax.tree.map(jnp.asarray, like)
    new, old = str(jax.tree.structure(variables)), str(jax.tree.structure(like))
    if new != old:
        raise ValueError(f"lower: expected variables of the form of w0's, {old}, got {new}.")
    leaves = jax.tree_util.tree_leaves_with_path(variables)
    for (path, x), y in zip(leaves, jax.tree.leaves(like), strict=True):
        if jnp.shape(x) != jnp.shape(y):
            where = jax.tree_util.keystr(path)
            raise ValueError(
                f"lower: expected variables{where} of w0's shape {jnp.shape(y)}, "
                f"got {jnp.shape(x)}."
            )
        if jnp.issubdtype(y.dtype, jnp.integer) and jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            raise ValueError(
                f"lower: expected variables{jax.tree_util.keystr(path)} of integers, as in w0, got "
                f"{jnp.result_type(x)}; begin from floating variables."
            )
    return narrow(jax.tree.map(jnp.asarray, variables), like)


def coarsest_eps(w: Pytree) -> float:
    """The coarsest rounding among the leaves."""
    return max(float(jnp.finfo(x.dtype).eps) for x in jax.tree.leaves(w))


def widened(loss: Loss, like: Pytree) -> Loss:
    """``loss`` as a function of widened weights."""
    return lambda w, alpha, batch: loss(narrow(w, like), alpha, batch)


def squarable(parts: list[Any]) -> list[Any]:
    """Arrays in 32 bits or more, in a unit (a power of two) in which the first can be squared."""
    parts = [a.astype(at_least_float32(a.dtype)) for a in parts]
    numbers: Any = jnp if isinstance(parts[0], jax.Array) else np
    _, exponent = numbers.frexp(numbers.abs(parts[0]).max())
    return [numbers.ldexp(a, -exponent) for a in parts]


def mixed_bits(bits: jax.Array) -> jax.Array:
    """Hash each of some uint32: cheaper to compile than JAX's generators (MurmurHash3)."""
    for factor in (0x85EBCA6B, 0xC2B2AE35):  # MurmurHash3's last mixing
        bits = (bits ^ (bits >> 16)) * jnp.uint32(factor)
    return bits


def uniform_hash(numbers: chex.Numeric, like: jax.Array) -> jax.Array:
    """Return a vector of mean 0 and variance 1 of ``like``'s size for each of the ``numbers``.

    JAX's generators, better than this asks for, would take a third of a program's compilation.
    """
    seeds = jnp.asarray(numbers, jnp.uint32)[..., None] * jnp.uint32(0x9E3779B9)
    places = jnp.arange(like.size, dtype=jnp.uint32).reshape((1,) * (seeds.ndim - 1) + (-1,))
    bits = mixed_bits(places + seeds)
    return math.sqrt(3) * ((bits ^ (bits >> 16)).astype(like.dtype) / 2.0**31 - 1)
