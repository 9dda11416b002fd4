"""Train several networks from scratch, one by one: a finished training is not repeated."""

import functools
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from bilevel.nets.evaluation import Part, error_rates
from bilevel.nets.training import TrainableNetwork, TrainingState, from_scratch, run_epochs
from bilevel.runs import journal
from bilevel.runs.fingerprint import fingerprint
from bilevel.runs.progress import progress_bar

Row = dict[str, Any]
"""The scores of a network, with its name and seed."""


class NetworkToTrain(NamedTuple):
    """A network to be trained from scratch, for one seed."""

    name: str
    seed: int
    architecture: Any


def train_all(
    folder: Path, rows: list[NetworkToTrain], epochs: int, train: Callable[..., Row], **header: Any
) -> list[Row]:
    """Return the scores of all networks. A run resumes from its journal, if it has the ``header``.

    ``train(row, checkpoint, show)`` returns a row's scores; ``show(epochs done, loss)``.
    """
    words = [re.sub(" at 0x[0-9a-f]+", "", str(row)) for row in rows]  # addresses change
    header = {"version": 1, **header, "networks": fingerprint(words)}
    text = "{network}, seed {seed}  loss {loss:.3f}"
    with (
        journal.opened(folder / "networks.jsonl", True, header) as known,
        progress_bar(None, "training", len(rows) * epochs, text) as show,
    ):

        def timed(i, row):
            began, about = time.perf_counter(), {"network": row.name, "seed": row.seed}

            def shown(epoch, loss):
                show(i * epochs + epoch, lambda: about | {"loss": loss})

            own = train(row, folder / "networks" / str(i), shown)
            seconds = time.perf_counter() - began
            return about | {"architecture": str(row.architecture), **own, "seconds": seconds}

        return [
            known.cached(f"network {i}", functools.partial(timed, i, row))
            for i, row in enumerate(rows)
        ]


def fitted(
    network: TrainableNetwork,
    key: jax.Array,
    parts: list[Part],
    sgd: optax.GradientTransformation,
    batch_size: int,
    augment: Callable[..., jax.Array] | None,
    **options: Any,
) -> tuple[TrainingState, list[float]]:
    """Train by ``run_epochs(**options)``; return the state, and the errors on all ``parts``."""
    program = from_scratch(network, sgd, batch_size=batch_size, augment=augment)
    state, _ = run_epochs(program, key, parts[0], **options)
    return state, error_rates(network)(state.w, state.averages, parts, batch_size)


Scores = dict[str, dict[str, list[float]]]
"""A value for each seed, by network and column."""


def by_network(rows: list[Row]) -> Scores:
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
    return re.sub(r"(?<=.) \d+$", "", name)


def _score_columns(rows: list[Row]) -> dict[str, list[float]]:
    known = {k for row in rows for k, v in row.items() if isinstance(v, int | float)} - {"seed"}
    return {k: [row[k] for row in rows] for k in rows[0] if k in known}
