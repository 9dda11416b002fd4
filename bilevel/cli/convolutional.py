"""What searches of convolutional networks share: images, batches, and how weights are trained."""

import functools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bilevel import SearchResult
from bilevel._progress import RunBar
from bilevel.checkpoint import saving
from bilevel.cli import deep
from bilevel.cli.known import pooling
from bilevel.cli.rows import Part, draw_rows
from bilevel.data import Dataset
from bilevel.nets.convolution import average_pool
from bilevel.nets.training import TrainingState
from bilevel.protocols import Pytree

ERRORS = {"train error": "train", "validation error": "valid", "test error": "test"}
"""Keys of results, and headings of tables."""

_SAVE_SECONDS = 30.0  # between two checkpoints of a network in training


def splits(config: Any, data: Dataset) -> list[list[tuple[jax.Array, jax.Array]]]:
    """Of each seed: training, validation and test rows, normalised."""
    keys = jax.random.split(jax.random.key(config.seed), config.seeds)
    sizes = config.train, config.valid, config.test
    return [normalized(draw_rows(config.data, data, key, *sizes), config.pixels) for key in keys]


def normalized(parts: list[Part], pixels: int | None) -> list[tuple[jax.Array, jax.Array]]:
    """Images [n, h, w, c] and labels, each channel of the first part with mean 0 and variance 1.

    Averaged down to at most ``pixels`` a side, by a factor that divides it.
    """
    xs = [x[..., None] if x.ndim == 3 else x for x, _ in parts]
    factor = pooling(xs[0].shape[1], pixels)
    if factor > 1:
        xs = [np.asarray(average_pool(jnp.asarray(x), factor, stride=factor)) for x in xs]
    mean, deviation = xs[0].mean((0, 1, 2)), xs[0].std((0, 1, 2))
    labels = [jnp.asarray(y) for _, y in parts]
    return [(jnp.asarray((x - mean) / deviation), y) for x, y in zip(xs, labels, strict=True)]


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


def errors(model: Any) -> Callable[..., list[float]]:
    """``(w, other, parts, batch_size) ->`` each part's share of wrong rows, compiled once.

    ``model`` has ``apply(w, other, x)``: a network, ``other`` its running averages, or a space.
    """

    def wrong(w, other, batch):
        x, labels = batch
        return jnp.mean(model.predict(model.apply(w, other, x)) != labels)

    shares = jax.jit(over_batches(wrong))

    def of_parts(w, other, parts, batch_size):
        return shares(w, other, in_batches(parts, batch_size)).tolist()

    return of_parts


def keys(config: Any, seed: int) -> jax.Array:
    """Of the search, its initial weights, the choice after it, and networks trained then."""
    return jax.random.split(jax.random.fold_in(jax.random.key(config.seed), seed), 4)


def search_work(config: Any, gradient: float) -> dict[str, float]:
    """Seconds of :func:`search_seeds`'s phases, by those of a ``gradient``; the first compiles."""
    each = gradient * deep.search_gradients(config)
    return {_search_label(config, s): each + 50 * (s == 0) for s in range(config.seeds)}


def _search_label(config: Any, seed: int) -> str:
    return "search" if config.seeds == 1 else f"search {seed + 1} of {config.seeds}"


def search_seeds(
    config: Any,
    space: Any,
    splits: list[list[Part]],
    folder: pathlib.Path,
    bar: RunBar,
) -> list[tuple[SearchResult, Pytree]]:
    """Each seed's search and the alpha chosen, one after the other.

    ``space`` has the fields of ``DartsSpace``; all leaves of its alpha are on simplices.
    """

    def geometry(cells, others):
        return cells

    # The same functions for every seed, so that they are compiled once.
    plan = deep.plan(config, space.problem, sgd, config.learning_rate, geometry, space.draw)
    init = jax.jit(space.init, static_argnums=1)
    choose, found = _best_drawn(config, space), []
    for seed, (train, valid, _) in enumerate(splits):
        search_key, init_key, choice_key, _ = keys(config, seed)
        start = space.start(), init(init_key, train[0].shape[1:])
        place = folder / "search" / str(seed)
        label = _search_label(config, seed)
        bar.enter(label)
        parts = plan, jax.tree.leaves, *start, train, valid, search_key, place
        result = deep.run(config, *parts, label=label)
        if result.stopped:
            raise KeyboardInterrupt(f"{result.stopped} of seed {seed}")
        random = config.strategy == "random"
        found.append((result, choose(choice_key, result.w, valid) if random else result.alpha))
    return found


def _best_drawn(config: Any, space: Any) -> Callable[[jax.Array, Pytree, Part], Pytree]:
    """``(key, w, rows) -> alpha``, the choice of random search, compiled once for all seeds."""
    losses = over_batches(space.problem.outer)

    def loss(w, alpha, batches):
        return losses(w, alpha, batches)[0]

    @jax.jit
    def best(key, w, batches):
        return deep.best_drawn(key, config.samples, loss, space.draw, w, batches)

    return lambda key, w, rows: best(key, w, in_batches([rows], config.batch_size))


def train_from_scratch(
    training: tuple[Callable, Callable],
    key: jax.Array,
    rows: tuple[jax.Array, jax.Array],
    epochs: int,
    checkpoint: pathlib.Path,
    show: Callable[[int, float], None],
    options: Callable[[int], tuple] = lambda i: (),
) -> tuple[TrainingState, float]:
    """State and last loss of ``training`` after ``epochs``, from the checkpoint that it finds.

    ``options(i)``: the loss's, in epoch ``i``. ``show(i, loss)`` is called after it.
    """
    init, epoch = training
    init_key, order_key = jax.random.split(key)
    state = jax.jit(lambda key: init(key, rows[0].shape[1:]))(init_key)
    loss = jnp.full((), jnp.nan, jnp.result_type(float))
    run = jax.jit(epoch, donate_argnums=1)
    with saving(checkpoint, seconds=_SAVE_SECONDS) as saver:
        first = saver.step or 0
        if first:
            state, loss = jax.tree.map(jnp.asarray, saver.restore((state, loss)))
        for i in range(first, epochs):
            state, loss = run(jax.random.fold_in(order_key, i), state, rows, *options(i))
            loss = loss.astype(jnp.result_type(float))
            show(i + 1, float(loss))
            saver.save(i + 1, functools.partial(tuple, (state, loss)), last=i + 1 == epochs)
    return state, float(loss)
