"""What searches of convolutional networks share: images, batches, and how weights are trained."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bilevel.cli import deep
from bilevel.cli.rows import Part
from bilevel.protocols import Pytree
from bilevel.spaces.convolution import average_pool

ERRORS = {"train error": "train", "validation error": "valid", "test error": "test"}
"""Keys of results, and headings of tables."""


def normalized(parts: list[Part], pixels: int | None) -> list[tuple[jax.Array, jax.Array]]:
    """Images [n, h, w, c] and labels, each channel of the first part with mean 0 and variance 1.

    Averaged down to at most ``pixels`` a side, by a factor that divides it.
    """
    if pixels is not None and pixels < 1:
        raise ValueError(f"pixels: expected at least 1, got {pixels}.")
    xs = [x[..., None] if x.ndim == 3 else x for x, _ in parts]
    side = xs[0].shape[1]
    factor = next(f for f in range(1, side + 1) if side % f == 0 and side // f <= (pixels or side))
    if factor > 1:
        xs = [np.asarray(average_pool(jnp.asarray(x), factor, stride=factor)) for x in xs]
    mean, deviation = xs[0].mean((0, 1, 2)), xs[0].std((0, 1, 2))
    labels = [jnp.asarray(y) for _, y in parts]
    return [(jnp.asarray((x - mean) / deviation), y) for x, y in zip(xs, labels, strict=True)]


@functools.cache  # the same functions for every seed, so that they are compiled once
def plan(config: Any, space: Any) -> deep.Plan:
    """The strategy of ``config`` in a space with the fields of ``DartsSpace``."""

    def geometry(cells, others):
        return cells

    parts = space.problem, sgd, config.learning_rate, geometry, space.draw
    return deep.plan(config, *parts)


def sgd(rate: optax.Schedule) -> optax.GradientTransformation:
    """DARTS's, of weights."""
    return optax.chain(
        optax.clip_by_global_norm(5.0),
        optax.add_decayed_weights(3e-4),
        optax.sgd(rate, momentum=0.9),
    )


def tangent(v: Pytree) -> Pytree:
    """Directions along simplices, which are the last axes."""
    return jax.tree.map(lambda p: p - p.mean(axis=-1, keepdims=True), v)


class Batches(NamedTuple):
    """Several parts' rows in batches of one size, for programs that are compiled once."""

    rows: tuple[jax.Array, jax.Array]  # images [k, size, h, w, c], labels [k, size]
    weights: jax.Array  # [parts, k]: of the batches' means in the parts'


def in_batches(parts: list[tuple[jax.Array, jax.Array]], size: int) -> Batches:
    """A part's last batch is its last rows, and counts by those that the one before has not."""
    size = min(size, *(len(labels) for _, labels in parts))
    rows, weights = [], []
    for x, labels in parts:
        n = len(labels)
        starts = np.minimum(np.arange(0, n, size), n - size)
        index = starts[:, None] + np.arange(size)
        rows.append((x[index], labels[index]))
        weights.append(np.diff(starts, prepend=-size) / n)
    stacked = jax.tree.map(lambda *a: jnp.concatenate(a), *rows)
    return Batches(stacked, jnp.asarray(jax.scipy.linalg.block_diag(*weights)))


def over_batches(mean: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """``f(w, alpha, batches) -> [parts]``, of a mean over a batch's rows."""

    def of_all(w, alpha, batches):
        return batches.weights @ jax.lax.map(lambda batch: mean(w, alpha, batch), batches.rows)

    return of_all
