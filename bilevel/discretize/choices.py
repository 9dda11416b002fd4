"""Discrete choices from alpha; simplices are the last axis of a leaf.

NaN raises ``ValueError``. In a traced alpha, NaN counts as the largest entry.
"""

from typing import Any

import jax
import jax.numpy as jnp

from bilevel.contracts import Pytree
from bilevel.internal.checks import concrete, integer, real_array


def argmax(alpha: Pytree) -> Pytree:
    """Return the index of the largest entry of every simplex (last axis), the first of equal ones.

    Raises
    ------
    ValueError
        If a leaf is empty or, not traced, has NaN.

    Examples
    --------
    >>> argmax({"edge": jnp.array([[0.2, 0.8], [0.5, 0.5]])})
    {'edge': Array([1, 0], dtype=int...)}
    """
    return jax.tree.map(lambda a: jnp.argmax(_check_alpha(a), axis=-1), alpha)


def top_k(alpha: Pytree, k: int) -> Pytree:
    """Return the indices [..., k] of the k largest entries of every simplex, best first.

    Raises
    ------
    ValueError
        If a leaf is empty or, not traced, has NaN, or ``k`` is not from 1 to their number.

    Examples
    --------
    >>> top_k(jnp.array([0.2, 0.5, 0.3]), 2)
    Array([1, 2], dtype=int...)
    """
    k = integer("k", k, 1)

    def largest(a):
        a = _check_alpha(a)
        if k > a.shape[-1]:
            raise ValueError(f"k: expected 1 to {a.shape[-1]}, got {k}.")
        return jax.lax.top_k(a, k)[1]

    return jax.tree.map(largest, alpha)


def rank_by_alpha(alpha: Pytree) -> Pytree:
    """Return the indices [..., h] of every simplex, largest entry first, equal ones in their order.

    Raises
    ------
    ValueError
        If a leaf is empty or, not traced, has NaN.

    Examples
    --------
    >>> rank_by_alpha(jnp.array([0.2, 0.5, 0.3]))
    Array([1, 2, 0], dtype=int...)
    """

    def descending(a):  # negation fails for bools and wraps for bytes
        return jnp.argsort(_check_alpha(a), axis=-1, stable=True, descending=True)

    return jax.tree.map(descending, alpha)


def _check_alpha(alpha: Any) -> jax.Array:
    alpha = real_array("alpha", alpha)
    if alpha.ndim == 0 or alpha.size == 0:
        raise ValueError(f"alpha: expected entries on the last axis, got shape {alpha.shape}.")
    if concrete(alpha) and bool(jnp.isnan(alpha).any()):
        raise ValueError("alpha: expected numbers, got NaN.")
    return alpha
