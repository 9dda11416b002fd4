"""Training of networks from scratch, one by one: those of a finished training are not repeated."""

import functools
import pathlib
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from bilevel.nets.evaluation import Part, error_rates
from bilevel.nets.images import crop_and_flip, cutout
from bilevel.nets.training import TrainableNetwork, TrainingState, from_scratch, run_epochs
from bilevel.runs import journal
from bilevel.runs.fingerprint import fingerprint
from bilevel.runs.progress import progress_bar


class NetworkToTrain(NamedTuple):
    """A network to be trained from scratch, for one seed."""

    name: str
    seed: int
    architecture: Any


def train_all(
    folder: pathlib.Path,
    rows: list[NetworkToTrain],
    epochs: int,
    train: Callable[..., dict[str, Any]],
    **header: Any,
) -> list[dict[str, Any]]:
    """Return the scores of all networks. A resumed run reads finished ones from its journal.

    ``train(row, checkpoint, show)`` returns a row's scores; ``show(epochs done, loss)``. A run with
    another ``header`` cannot be resumed.
    """
    words = [re.sub(" at 0x[0-9a-f]+", "", str(row)) for row in rows]  # addresses change
    header = {"version": 1, **header, "networks": fingerprint(words)}
    text = "{network}, seed {seed}  loss {loss:.3f}"
    scores = []
    with (
        journal.opened(folder / "networks.jsonl", True, header) as known,
        progress_bar(None, "training", len(rows) * epochs, text) as show,
    ):
        for i, row in enumerate(rows):

            def shown(epoch, loss, done=i * epochs, row=row):
                values = {"network": row.name, "seed": row.seed, "loss": loss}
                show(done + epoch, lambda: values)

            def timed(place=folder / "networks" / str(i), row=row, shown=shown):
                began = time.perf_counter()
                own = train(row, place, shown)
                seconds = time.perf_counter() - began
                about = {"network": row.name, "seed": row.seed}
                architecture = str(row.architecture)
                return about | {"architecture": architecture, **own, "seconds": seconds}

            scores.append(known.cached(f"network {i}", timed))
    return scores


def augmentation(moved: bool, cut: int) -> Callable[[jax.Array, jax.Array], jax.Array] | None:
    """Return the augmentation of training images: crop and flip, and a square ``cut`` out."""
    if not (moved or cut):
        return None

    def augment(key, x):
        keys = jax.random.split(key)
        x = crop_and_flip(keys[0], x) if moved else x
        return cutout(keys[1], x, cut) if cut else x

    return augment


def fitted(
    network: TrainableNetwork,
    key: jax.Array,
    parts: list[Part],
    *,
    sgd: optax.GradientTransformation,
    epochs: int,
    batch_size: int,
    checkpoint: pathlib.Path,
    show: Callable[[int, float], None],
    augment: Callable | None = None,
    options: Callable[[int], tuple] = lambda epoch: (),
) -> tuple[TrainingState, list[float]]:
    """Train a network from scratch; return its state, and its errors on all ``parts``."""
    program = from_scratch(network, sgd, batch_size=batch_size, augment=augment)
    run = functools.partial(run_epochs, program, key, parts[0], epochs=epochs, options=options)
    state, _ = run(checkpoint=checkpoint, callback=show)
    return state, error_rates(network)(state.w, state.averages, parts, batch_size)


Scores = dict[str, dict[str, list[float]]]
"""A value for each seed, by network and column."""


def by_network(rows: list[dict[str, Any]]) -> Scores:
    """Return the columns of every network; for numbered ones, the best by validation and the means.

    "random 1", "random 2" and so on of a seed become "best of 2 random" and "random".
    """
    scores, seeds = {}, 1 + max(row["seed"] for row in rows)
    for name in dict.fromkeys(_group(row["network"]) for row in rows):
        own = [row for row in rows if _group(row["network"]) == name]
        if own[0]["network"] == name:
            scores[name] = _score_columns(own)
            continue
        drawn = [[row for row in own if row["seed"] == s] for s in range(seeds)]
        if (budget := len(drawn[0])) > 1:
            best = [min(networks, key=lambda r: r["valid_error"]) for networks in drawn]
            scores[f"best of {budget} {name}"] = _score_columns(best)
        means = [_score_columns(networks) for networks in drawn]
        scores[name] = {k: [float(np.mean(m[k])) for m in means] for k in means[0]}
    return scores


def _group(name: str) -> str:
    """Return a network's name without its number."""
    group, _, number = name.rpartition(" ")
    return group if group and number.isdigit() else name


def _score_columns(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    known = {k for row in rows for k, v in row.items() if isinstance(v, int | float)} - {"seed"}
    return {k: [row[k] for row in rows] for k in rows[0] if k in known}
