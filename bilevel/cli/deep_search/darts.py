"""``bilevel search-darts``: the cells of a convolutional network (Liu et al. 2019).

For every seed: the search of a supernet, the network of the genotype that it ends at trained from
scratch, and networks of random genotypes trained alike.
"""

import functools
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bilevel.cli.deep_search import images, pipeline
from bilevel.cli.deep_search import report as deep_report
from bilevel.cli.deep_search.command import DeepSearchCommand, Parts, Rows, run_deep_search
from bilevel.cli.flags.datasets import CLASSES, pixel_count
from bilevel.cli.flags.deep_searches import DartsSearch
from bilevel.cli.runtime import report
from bilevel.nets.images import unit_images
from bilevel.spaces import Space
from bilevel.spaces.darts import darts_network, darts_space, parse_genotype, plot_genotype
from bilevel.spaces.darts.genotype import EDGES
from bilevel.spaces.darts.supernet import weight_count
from bilevel.strategies import darts_sgd


def run_darts_search(config: DartsSearch) -> dict[str, Any]:
    """Run the job; print its table, write its run directory, return what `result.json` holds."""
    config.check()
    began = time.perf_counter()
    shape: dict[str, Any] = {"cells": config.cells, "channels": config.channels}
    final: dict[str, Any] = {k: getattr(config, f"final_{k}") or size for k, size in shape.items()}
    common: dict[str, Any] = {
        "classes": CLASSES,
        "dtype": jnp.bfloat16 if config.bfloat16 else None,
    }
    space = darts_space(config.operations, remat=config.remat, **common, **shape)
    network: Callable[..., Any] = functools.partial(
        darts_network, auxiliary=config.auxiliary, **common, **final
    )
    search = pipeline.search_of(config, space, darts_sgd, config.weight_rate)
    steps = config.epochs * (config.train // config.batch_size)
    sgd = darts_sgd(optax.cosine_decay_schedule(config.weight_rate, steps))
    options: dict[str, Any] = {
        "epochs": config.epochs,
        "batch_size": config.batch_size,
        "augment": images.augmentation(config.crop_and_flip, config.cutout),
        "options": lambda epoch: (config.drop_path * epoch / config.epochs,),
    }
    fit = functools.partial(images.fitted, sgd=sgd, **options)
    pixels = config.batch_size * pixel_count(config.data, config.pixels)
    operation = images.cell_gradient_seconds(pixels, len(EDGES), **shape)
    trained = (
        steps * images.cell_gradient_seconds(pixels, len(EDGES), **final) / 2
    )  # half the edges
    work = {
        "data": 5,
        **images.search_work(config.seeds, search.gradients, len(space.names) * operation),
        "training": config.seeds * (1 + config.random) * (20 + trained),
        "errors and curvature": 20 + config.seeds,
    }

    def searched(run, parts):
        first = network(space.discretize(space.start()))
        images.check_fits(first.init, parts[0][0][0].shape[1:])
        return images.search_image_space(space, search, config.seed, run, parts)

    training = network, fit, config.seed, config.random, config.epochs
    return run_deep_search(
        config,
        DeepSearchCommand(
            name="darts",
            space=space,
            work=work,
            unit=functools.partial(unit_images, pixels=config.pixels),
            search=searched,
            train=functools.partial(_train_darts_networks, space, *training),
            heats=functools.partial(_darts_heatmaps, space.names),
            draw=_save_genotype_figure,
            table=_darts_table,
            notes=_darts_notes,
        ),
        began,
    )


def _train_darts_networks(
    space: Space,
    network: Callable[..., Any],
    fit: Callable[..., Any],
    seed: int,
    random: int,
    epochs: int,
    run: pipeline.RunContext,
    seed_results: list[pipeline.SeedResult],
    parts: Parts,
) -> Rows:
    """Scores of the networks of the genotypes found, and of so many ``random`` ones."""
    keys = [pipeline.keys(seed, s)[3] for s in range(len(parts))]
    drawn = [[space.draw(k) for k in jax.random.split(key, random + 1)[1:]] for key in keys]
    orders = [jax.random.split(key, random + 2)[-1] for key in keys]

    def train(row, checkpoint, show):
        """Checkpointed; it goes on from what it finds."""
        key, own = orders[row.seed], parts[row.seed]
        state, errors = fit(network(row.architecture), key, own, checkpoint=checkpoint, show=show)
        return {
            **dict(zip(pipeline.ERRORS, errors, strict=True)),
            "skips": sum(name == "skip_connect" for name, _ in row.architecture.normal),
            "parameters": weight_count(state.w),
        }

    return pipeline.train_networks(
        run, pipeline.networks_to_train(space, seed_results, {}, drawn), epochs, train
    )


# ----------------------------------------------------------------------------- the report


def _darts_heatmaps(names: tuple[str, ...], alpha: Any) -> list[deep_report.Heatmap]:
    edges = [f"{i} → {j}" for i, j in EDGES]
    titles = {kind: f"{name} cell: α of every edge" for kind, name in _CELLS.items()}
    axes = {"normal": "edge, from node → to node", "reduce": ""}
    return [
        deep_report.Heatmap(title, np.asarray(alpha[kind]), list(names), edges, axes[kind])
        for kind, title in titles.items()
    ]


_CELLS = {"normal": "normal", "reduce": "reduction"}


def _save_genotype_figure(folder: pathlib.Path, result: dict[str, Any]) -> None:
    first = ", first seed" if len(result["architectures"]) > 1 else ""

    def draw(figure):
        plot_genotype(parse_genotype(result["architectures"][0]), figure.subplots(2, 1))
        figure.suptitle(f"genotype found{first}; {report.picture_title(result['config'])}")

    report.save_figure(folder / "genotype.png", (8.5, 7), draw)


_COLUMNS = {"skips": ("skips", ".3g"), "parameters": ("parameters", ",.0f")}


def _darts_table(result: dict[str, Any]) -> Any:
    return deep_report.network_table(result, _COLUMNS, {"search", "random"})


def _darts_notes(result: dict[str, Any]) -> list[str]:
    seconds, seeds = result["seconds"], result["config"]["seeds"]
    return [
        "networks are trained from scratch; skips: in the normal cell, of 8 edges; in the search's "
        f"time {seconds['search'] / seeds / seconds['network']:.1f} networks could be trained"
    ]
