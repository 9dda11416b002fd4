"""``bilevel search-nasbench201``: a cell whose network's accuracies are known.

For every seed: the search of a supernet, and the genotype that it ends at. Nothing is trained from
scratch: the benchmark's table has the test accuracies of all 15,625 networks, as Dong & Yang (2020)
trained them.
"""

import functools
import time
from typing import Any

import jax.numpy as jnp
import numpy as np

from bilevel.cli.deep_search import images, pipeline
from bilevel.cli.deep_search import report as deep_report
from bilevel.cli.deep_search.command import DeepSearchCommand, run_deep_search
from bilevel.cli.flags.datasets import CLASSES, pixel_count
from bilevel.cli.flags.deep_searches import NasBench201Search
from bilevel.cli.runtime import report
from bilevel.nets.images import unit_images
from bilevel.spaces.nasbench201 import nasbench201_space
from bilevel.spaces.nasbench201.costs import supernet_cost
from bilevel.spaces.nasbench201.genotype import EDGES
from bilevel.spaces.nasbench201.judging import table
from bilevel.spaces.nasbench201.judging.standing import standing
from bilevel.spaces.nasbench201.judging.table import DATASETS
from bilevel.strategies import darts_sgd


def run_nasbench201_search(config: NasBench201Search) -> dict[str, Any]:
    """Run the job; print its table, write its run directory, return what `result.json` holds."""
    config.check()
    began, known = time.perf_counter(), table.load_table()
    shape: dict[str, Any] = {"cells": config.cells, "channels": config.channels}
    dtype = jnp.bfloat16 if config.bfloat16 else None
    space = nasbench201_space(
        config.operations, classes=CLASSES, dtype=dtype, remat=config.remat, **shape
    )
    search = pipeline.search_of(config, space, darts_sgd, config.weight_rate)
    passes = search.gradients * config.batch_size / (config.epochs * config.train)
    budget = passes * supernet_cost(space.names, **shape)
    pixels = config.batch_size * pixel_count(config.data, config.pixels)
    operation = images.cell_gradient_seconds(pixels, len(EDGES), 7 * config.cells, config.channels)
    work = {
        "data": 4,
        **images.search_work(config.seeds, search.gradients, len(space.names) * operation),
        "errors and curvature": 20 + config.seeds,
    }

    def more(result, seed_results):
        genotypes = [space.discretize(f.alpha) for f in seed_results]
        rivals = max(1, int(budget))
        return {
            "skips": [g.operations.count("skip_connect") for g in genotypes],
            "budget": budget,
            "benchmark": standing(known, genotypes, operations=space.names, budget=rivals),
        }

    return run_deep_search(
        config,
        DeepSearchCommand(
            name="nasbench201",
            space=space,
            work=work,
            unit=functools.partial(unit_images, pixels=config.pixels),
            search=functools.partial(images.search_image_space, space, search, config.seed),
            more=more,
            heats=functools.partial(_nasbench201_heatmaps, space.names),
            table=_benchmark_accuracies,
            notes=_nasbench201_notes,
        ),
        began,
    )


# ----------------------------------------------------------------------------- the report


def _nasbench201_heatmaps(names: tuple[str, ...], alpha: Any) -> list[deep_report.Heatmap]:
    edges, axis = [f"{i} → {j}" for i, j in EDGES], "edge, from node → to node"
    return [deep_report.Heatmap("α of every edge", np.asarray(alpha), list(names), edges, axis)]


def _benchmark_accuracies(result: dict[str, Any]) -> Any:
    from rich.table import Table

    config, benchmark = result["config"], result["benchmark"]
    shown = Table(
        title=report.table_title(config).replace("errors", "test accuracies of the networks"),
        caption="accuracies are the benchmark's, of networks trained for 200 epochs on CIFAR-10, "
        f"CIFAR-100 and ImageNet16-120; the search saw {config['data']}",
    )
    others = {"random": "random", "best_of_random": f"best of {int(result['budget'])} random"}
    others = {k: heading for k, heading in others.items() if k in benchmark["cifar10"]}
    others["optimum"] = "optimum"
    shown.add_column("data set", no_wrap=True)
    for heading in ("search", "rank of 15,625", *others.values()):
        shown.add_column(heading, justify="right", no_wrap=True)
    for name, label in DATASETS.items():
        scores = benchmark[name]
        cells = [report.cell(np.array(scores["accuracy"]), ".2f")]
        cells.append(report.cell(np.array(scores["rank"]), ",.0f"))
        shown.add_row(label, *cells, *(f"{scores[k]:.2f}" for k in others))
    return shown


def _nasbench201_notes(result: dict[str, Any]) -> list[str]:
    skips, supernet = np.array(result["skips"]), result["scores"]["supernet"]
    errors = [report.cell(100 * np.array(supernet[name]), ".1f") for name in pipeline.ERRORS]
    return [
        f"skip_connect on {report.cell(skips, '.3g')} of {len(EDGES)} edges",
        "supernet's own errors in %: train {}, valid {}, test {}".format(*errors),
        f"in each search's multiply-adds {result['budget']:.2g} random networks could be trained "
        f"on as many rows for {result['config']['epochs']} epochs",
    ]
