"""``bilevel search-own``: a space of the user's own, ``--space MODULE:FUNCTION``.

For every seed: the search by any strategy, the architecture that it ends at trained from scratch at
its corner of the space, and random architectures trained alike.
"""

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bilevel.cli.deep_search import images, pipeline, report
from bilevel.cli.deep_search.command import DeepSearchCommand, Parts, Rows, run_deep_search
from bilevel.cli.flags.datasets import CLASSES
from bilevel.cli.flags.deep_searches import OwnSearch
from bilevel.cli.flags.import_function import called
from bilevel.contracts import Pytree
from bilevel.discretize import diagnostics
from bilevel.nets.evaluation import error_rates
from bilevel.nets.images import unit_images
from bilevel.spaces import Space


def run_own_search(config: OwnSearch) -> dict[str, Any]:
    """Run the job; print its table, write its run directory, return what `result.json` holds."""
    config.check()
    began, space = time.perf_counter(), _import_space(config.space)
    work = {"data": 5.0, **images.search_work(config.seeds, config.steps, 0.1)}
    work["training"] = config.seeds * (1 + config.random) * config.epochs
    work["errors and curvature"] = 10.0
    search_at = functools.partial(
        pipeline.search_of, config, space, functools.partial(optax.sgd, momentum=0.9)
    )

    def searched(run, parts):
        train = parts[0][0]
        images.check_fits(space.init, train)
        w = jax.jit(space.init)(pipeline.keys(config.seed, 0)[1], train)
        rate = config.weight_rate or float(pipeline.default_rate(space, w, space.start(), train[0]))
        return images.search_image_space(space, search_at(rate), config.seed, run, parts)

    fit = pipeline.corner_trainer(space, config.epochs, config.batch_size, config.weight_rate)
    training = config.seed, config.random, config.epochs, config.batch_size
    return run_deep_search(
        config,
        DeepSearchCommand(
            name=config.space,
            space=space,
            work=work,
            unit=functools.partial(unit_images, pixels=config.pixels),
            search=searched,
            train=functools.partial(_train_own_networks, space, fit, *training),
            heats=functools.partial(_simplex_heatmaps, space),
            table=lambda result: report.network_table(result, {}, {"search", "random"}),
            notes=lambda _: [
                "networks are trained from scratch, at the corners of the space that stand for them"
            ],
        ),
        began,
    )


def _import_space(name: str) -> Space:
    """The space that MODULE:FUNCTION makes."""
    space = called("space", name, CLASSES)
    if not isinstance(space, Space):
        kind = type(space).__name__
        raise ValueError(f"space: expected {name} to return a bilevel.spaces.Space, got a {kind}.")
    return space


def _train_own_networks(
    space: Space,
    fit: Any,
    seed: int,
    random: int,
    epochs: int,
    batch_size: int,
    run: pipeline.RunContext,
    seed_results: list[pipeline.SeedResult],
    parts: Parts,
) -> Rows:
    """Scores of the networks of the corners found, and of so many ``random`` ones."""
    init, rates = jax.jit(space.init), error_rates(space)
    keys = [jax.random.split(pipeline.keys(seed, s)[3], random + 2) for s in range(len(parts))]
    drawn = [[space.draw(key) for key in of_seed[2:]] for of_seed in keys]

    def train(row, checkpoint, show):
        own, (init_key, order_key, *_) = parts[row.seed], keys[row.seed]
        corner = space.one_hot(row.architecture)
        w = fit(order_key, init(init_key, own[0]), corner, own[0])
        show(epochs, float("nan"))
        return dict(zip(pipeline.ERRORS, rates(w, corner, own, batch_size), strict=True))

    return pipeline.train_networks(
        run, pipeline.networks_to_train(space, seed_results, {}, drawn), epochs, train
    )


def _simplex_heatmaps(space: Space, alpha: Pytree) -> list[report.Heatmap]:
    """Every leaf of alpha that is on simplices: a row for each of them."""
    heats: list[report.Heatmap] = []
    for leaf in diagnostics.simplices(space.sets, alpha):
        values = np.asarray(jnp.reshape(leaf, (-1, leaf.shape[-1])))
        rows = [str(i) for i in range(len(values))]
        columns = list(space.names) if len(space.names) == values.shape[1] else []
        columns = columns or [str(i) for i in range(values.shape[1])]
        heats.append(report.Heatmap("α", values, columns, rows, "simplex" if not heats else ""))
    return heats
