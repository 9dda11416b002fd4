"""Features [n, h, p] of h maps: given, computed in blocks of columns, or known by their kernels."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import chex
import jax
import jax.numpy as jnp

from bilevel.internal.checks import at_least_float32, check_finite, real_array


@partial(jax.tree_util.register_dataclass, data_fields=("block",), meta_fields=("count",))
@dataclasses.dataclass(frozen=True, eq=False)
class Columns:
    """Features [n, h, p], computed a few of their p columns at a time.

    ``block(j) -> [n, h, b]`` returns columns ``j b`` to ``(j + 1) b`` for a traced ``j``, with
    zeros for columns beyond p. ``count`` is the number of blocks, p / b rounded up. A ``block``
    made by ``jax.tree_util.Partial`` passes its arrays as arguments. Other functions are compiled
    once per function object, with the arrays they close over.
    """

    block: Callable[[Any], jax.Array]
    count: int

    def __post_init__(self) -> None:
        # JAX also rebuilds the record with placeholders, which are not functions.
        if callable(self.block) and not isinstance(self.block, jax.tree_util.Partial):
            object.__setattr__(self, "block", jax.tree_util.Partial(self.block))


Features: TypeAlias = chex.Array | Columns


def sum_over_blocks(term: Callable, *features: Any) -> jax.Array:
    """Return ``sum_j term(block j of each)``; an array is one block."""
    if not isinstance(features[0], Columns):
        return term(*features)

    def add(total, j):
        return total + term(*(f.block(j) for f in features)), None

    shape = jax.eval_shape(lambda: term(*(f.block(0) for f in features)))
    return jax.lax.scan(add, jnp.zeros(shape.shape, shape.dtype), jnp.arange(features[0].count))[0]


def block_shape(features: Features) -> tuple[int, ...]:
    """Return the shape of one block, or of the array."""
    one = jax.eval_shape(features.block, 0) if isinstance(features, Columns) else features
    return one.shape


def is_kernels(features: Features) -> bool:
    """Return whether the features are given by their kernels [h, h, n, n]."""
    return not isinstance(features, Columns) and features.ndim == 4


def check_features_and_labels(features: Features, labels: Any) -> tuple[Features, jax.Array]:
    """Return both as floating arrays, labels [n, c], after checking that their shapes fit."""
    if isinstance(features, Columns):
        if features.count < 1:
            raise ValueError(f"features: expected at least 1 block, got {features.count}.")
    else:
        features = as_finite_floating("features", features)
    shape = block_shape(features)
    kernels = is_kernels(features) and (shape[0], shape[2]) == (shape[1], shape[3])
    if 0 in shape or not (kernels or len(shape) == 3):
        raise ValueError(
            f"features: expected shape [n, h, p] or kernels [h, h, n, n], got {shape}."
        )
    n = shape[2] if kernels else shape[0]
    y = as_finite_floating("labels", labels)
    if y.ndim not in (1, 2) or len(y) != n or not y.size:
        raise ValueError(f"labels: expected shape [{n}] or [{n}, c], got {y.shape}.")
    return features, y.reshape(n, -1)


def as_finite_floating(name: str, a: Any) -> jax.Array:
    """Return ``a`` as a floating-point array; concrete entries must be finite."""
    a = real_array(name, a)
    a = a.astype(at_least_float32(a.dtype))
    check_finite(name, a)
    return a
