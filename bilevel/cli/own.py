"""``bilevel search-own``: a space of the user's own, ``--space MODULE:FUNCTION``.

For every seed: the search by any strategy, the architecture that it ends at trained from scratch at
its corner of the space, and random architectures trained alike.
"""

import functools
import importlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bilevel import diagnostics
from bilevel.cli import deep, images, report
from bilevel.cli.commands import OwnSearch
from bilevel.cli.known import CLASSES
from bilevel.cli.runs import run_directory
from bilevel.nets.evaluation import Part, error_rates
from bilevel.nets.training import train
from bilevel.protocols import Pytree
from bilevel.spaces import Space

_SCALE_ROWS = 32  # rows that the mean diagonal entry of the tangent kernel is taken over
_RATE = 3.0  # the default learning rate of the weights is this over that entry


class _Training(NamedTuple):
    """How the networks of architectures are trained."""

    random: int  # how many random architectures are trained beside the one found
    epochs: int
    batch_size: int
    rate: float


def run_own_search(config: OwnSearch) -> dict[str, Any]:
    """Run the job; print its table, write its run directory, return what `result.json` holds."""
    config.check()
    space = imported(config.space)
    keeps = "searches and networks are kept as far as they came"
    with run_directory(config, keeps=keeps) as folder:
        networks = config.seeds * (1 + config.random)
        work = {"data": 5.0, **images.search_work(config.seeds, config.steps, 0.1)}
        work |= {"training": networks * config.epochs, "errors and curvature": 10}
        with report.phases(config.progress, work) as bar:
            bar.enter("data")
            draws = jax.random.split(jax.random.key(config.seed), config.seeds)
            sizes = {"train": config.train, "valid": config.valid, "test": config.test}
            parts = images.parts_of(config.data, draws, config.pixels, **sizes)
            rate = config.weight_rate or _RATE / _scale(space, deep.keys(config.seed, 0)[1], parts)
            plan = deep.strategy(
                config.strategy,
                space,
                functools.partial(optax.sgd, momentum=0.9),
                weight_rate=rate,
                alpha_rate=config.alpha_rate,
                steps=config.steps,
                batch_size=config.batch_size,
            )
            run = deep.Run(folder, bar, config.progress, config.resume)
            search = deep.Search(plan, config.steps, config.batch_size, config.samples)
            training = _Training(config.random, config.epochs, config.batch_size, rate)
            name, flags = config.space, report.flags(config)
            result, found = _computed(run, name, space, search, training, parts, config.seed, flags)
        report.write(folder, result, deep.arrays_of(found))
        deep.picture(folder / "search.png", result, found, _heats(space, found[0].alpha))
        note = "networks are trained from scratch, at the corner of the space that they are"
        deep.show(result, folder, deep.table(result, {}, {"search", "random"}), [note])
    return result


def imported(name: str) -> Space:
    """The space that MODULE:FUNCTION makes.

    Raises
    ------
    ValueError
        For a module or a function that is not there, or returns something else.
    """
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:  # where `python -m` would look too
        sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"space: expected MODULE:FUNCTION, got {name!r} ({error}).") from None
    if not callable(make):
        raise ValueError(f"space: expected {name} to be a function, got {make!r}.")
    space = make(CLASSES)
    if not isinstance(space, Space):
        kind = type(space).__name__
        raise ValueError(f"space: expected {name} to return a bilevel.spaces.Space, got a {kind}.")
    return space


def _scale(space: Space, key: jax.Array, parts: list[list[Part]]) -> float:
    """The tangent kernel's mean diagonal entry at the start of the first search."""
    train = parts[0][0]
    w, alpha = jax.jit(space.init)(key, train), space.start()
    return float(diagnostics.kernel_diagonal(space.apply, w, alpha, train[0][:_SCALE_ROWS]))


def _computed(
    run: deep.Run,
    name: str,
    space: Space,
    search: deep.Search,
    training: _Training,
    parts: list[list[Part]],
    seed: int,
    flags: dict[str, Any],
) -> tuple[dict[str, Any], list[deep.Found]]:
    began = time.perf_counter()
    images.check_fits(space.init, parts[0][0])
    found = deep.one_by_one(run, space, search, parts, seed)
    searched = time.perf_counter() - began
    keys = [jax.random.split(deep.keys(seed, s)[3], training.random + 2) for s in range(len(parts))]
    drawn = [[space.draw(key) for key in of_seed[2:]] for of_seed in keys]
    rows = deep.rows_of(space, found, {}, drawn)
    init, fit, rates = jax.jit(space.init), _trainer(space, training), error_rates(space)

    def trained(row, checkpoint, show):
        own, (init_key, order_key, *_) = parts[row.seed], keys[row.seed]
        corner = space.one_hot(row.architecture)
        w = fit(order_key, init(init_key, own[0]), corner, own[0])
        show(training.epochs, float("nan"))
        return dict(zip(deep.ERRORS, rates(w, corner, own, training.batch_size), strict=True))

    networks = deep.trained(run, rows, training.epochs, trained)
    run.bar.enter("errors and curvature")
    result = deep.summary(name, space, search, found, parts, flags)
    result["scores"] = deep.by_network(networks) | result["scores"]
    each = float(np.mean([row["seconds"] for row in networks]))
    seconds = {"search": searched, "network": each, "all": time.perf_counter() - began}
    return result | {"seconds": seconds}, found


def _trainer(
    space: Space, training: _Training
) -> Callable[[jax.Array, Pytree, Pytree, Part], Pytree]:
    """``(key, w0, corner, rows) -> w`` after SGD, one program for all architectures."""

    @jax.jit
    def fit(key, w, corner, rows):
        steps = training.epochs * (len(rows[1]) // training.batch_size)
        sgd = optax.sgd(optax.cosine_decay_schedule(training.rate, steps), momentum=0.9)
        sizes = {"epochs": training.epochs, "batch_size": training.batch_size}
        return train(key, space.problem.lower, corner, w, rows, optimizer=sgd, **sizes).last

    return fit


def _heats(space: Space, alpha: Pytree) -> list[deep.Heat]:
    """Every leaf of alpha that is on simplices: a row for each of them."""
    heats: list[deep.Heat] = []
    for leaf in diagnostics.simplices(space.sets, alpha):
        values = np.asarray(jnp.reshape(leaf, (-1, leaf.shape[-1])))
        rows = [str(i) for i in range(len(values))]
        columns = list(space.names) if len(space.names) == values.shape[1] else []
        columns = columns or [str(i) for i in range(values.shape[1])]
        heats.append(deep.Heat("α", values, columns, rows, "simplex" if not heats else ""))
    return heats
