"""Weights of several dtypes: each leaf keeps its own, solvers compute in one.

Inner products and step lengths are scalars that go round in loops, so they need one dtype: the
widest among the weights, and at least float32. The weights are widened to it on the way into a
solver, and the losses narrow them again; where all have that dtype already, nothing happens.
"""

import jax
import jax.numpy as jnp

from bilevel.protocols import Loss, Pytree


def widen(w: Pytree) -> Pytree:
    """Every leaf in the widest dtype among them, at least float32.

    Examples
    --------
    >>> widen([jnp.ones(1, jnp.bfloat16), jnp.ones(1, jnp.float32)])
    [Array([1.], dtype=float32), Array([1.], dtype=float32)]
    """
    dtype = jnp.result_type(jnp.float32, *(x.dtype for x in jax.tree.leaves(w)))
    return jax.tree.map(lambda x: x.astype(dtype), w)


def narrow(w: Pytree, like: Pytree) -> Pytree:
    """Every leaf in the dtype of its counterpart."""
    return jax.tree.map(lambda x, y: x.astype(y.dtype), w, like)


def rounding(w: Pytree) -> float:
    """The coarsest rounding among the leaves."""
    return max(float(jnp.finfo(x.dtype).eps) for x in jax.tree.leaves(w))


def widened(loss: Loss, like: Pytree) -> Loss:
    """``loss`` as a function of widened weights."""
    return lambda w, alpha, batch: loss(narrow(w, like), alpha, batch)
