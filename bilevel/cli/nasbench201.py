"""``bilevel search --space nasbench201``: a cell whose network's accuracies are known.

For every seed, one after the other: the search of a supernet, and the genotype that it ends at.
Nothing is trained from scratch: the benchmark's table has the test accuracies of all 15,625
networks, as Dong & Yang (2020) trained them. A run that was interrupted goes on where it was.
"""

import pathlib
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bilevel.cli import convolutional, deep, report
from bilevel.cli.commands import NasBench201Search
from bilevel.cli.known import pixel_count
from bilevel.cli.rows import Part, load
from bilevel.cli.runs import run_directory
from bilevel.judging.verdicts import DATASETS, best_of_k_random
from bilevel.spaces.nasbench201 import (
    EDGES,
    Genotype,
    NasBench201Space,
    multiply_adds,
    nasbench201_space,
    table,
)


class _Task(NamedTuple):
    """What all parts of a run share."""

    space: NasBench201Space
    splits: list[list[Part]]  # of each seed: training, validation, test rows


def run_nasbench201_search(config: NasBench201Search) -> dict[str, Any]:
    """Run the job; print its table, write its run directory, return what `result.json` holds."""
    config.check()
    with run_directory(config, keeps="searches are kept as far as they came") as folder:
        return _run(config, folder)


def _run(config: NasBench201Search, folder: pathlib.Path) -> dict[str, Any]:
    began = time.perf_counter()
    with report.phases(config, _work(config)) as bar:
        bar.enter("data")
        known = table.load_table()  # first: were it damaged, the search would be for nothing
        task = _task(config)
        start = time.perf_counter()
        found = convolutional.search_seeds(config, task.space, task.splits, folder, bar)
        searched = time.perf_counter() - start
        bar.enter("errors and curvature")
        summary = _summary(task, config, known, found)
    summary["seconds"] = {"search": searched, "all": time.perf_counter() - began}
    _write(folder, summary, found)
    _print(summary, folder)
    return summary


def _work(config: NasBench201Search) -> dict[str, float]:
    """Seconds of each phase, roughly, on two cores: compilation, and gradients of minibatches."""
    pixels = config.batch_size * pixel_count(config.data, config.pixels)
    operation = 3 * 9 / 5e9 * pixels * len(EDGES) * 3 * config.cells * config.channels**2
    search = convolutional.search_work(config, len(config.operations) * operation)
    return {"data": 4, **search, "errors and curvature": 20 + config.seeds}


# ----------------------------------------------------------------------------- the search


def _task(config: NasBench201Search) -> _Task:
    data = load(config.data, config.train, config.valid, config.test)
    space = nasbench201_space(
        config.operations,
        classes=len(data.classes),
        cells=config.cells,
        channels=config.channels,
        dtype=jnp.bfloat16 if config.bfloat16 else None,
        remat=config.remat,
    )
    task = _Task(space, convolutional.splits(config, data))
    # Are the images large enough? The shapes say.
    jax.eval_shape(lambda key: space.init(key, _shape(task)), jax.random.key(0))
    return task


def _shape(task: _Task) -> tuple[int, ...]:
    return task.splits[0][0][0].shape[1:]


# ----------------------------------------------------------------------------- the report


def _summary(
    task: _Task, config: NasBench201Search, known: table.Table, found: list
) -> dict[str, Any]:
    space = task.space
    wrong = convolutional.errors(space)
    curvature = deep.top_curvature(space.problem.outer, convolutional.tangent)
    supernet, curvatures = [], []
    for (result, alpha), parts in zip(found, task.splits, strict=True):
        supernet.append(wrong(result.w, alpha, parts, config.batch_size))
        batch = jax.tree.map(lambda a: a[: config.batch_size], parts[1])
        curvatures.append(curvature(result.w, alpha, batch))
    genotypes = [space.discretize(alpha) for _, alpha in found]
    networks = _networks_of_the_same_cost(config)
    return {
        "space": "nasbench201",
        "config": report.flags(config),
        "names": list(space.names),
        "genotypes": [str(genotype) for genotype in genotypes],
        "skips": [genotype.operations.count("skip_connect") for genotype in genotypes],
        "alpha": [np.asarray(alpha).tolist() for _, alpha in found],
        "entropy": [float(deep.entropy(alpha).mean()) for _, alpha in found],
        "benchmark": _looked_up(known, genotypes, space.names, int(networks)),
        "budget": networks,
        "supernet": dict(zip(convolutional.ERRORS, np.transpose(supernet).tolist(), strict=True)),
        "curvature": curvatures,
        **report.origin(),
    }


def _looked_up(
    known: table.Table, genotypes: list[Genotype], names: tuple[str, ...], budget: int
) -> dict[str, dict[str, Any]]:
    """Test accuracies and ranks by the benchmark, of each data set.

    Rank 1 is the best of all networks. Random networks and the optimum are among those of the
    operations ``names``. Of ``budget`` random networks the best is that by CIFAR-10 validation, as
    a genotype found on one data set is judged on all.
    """
    rows = [table.row(known, genotype) for genotype in genotypes]
    others = np.array([set(names) >= set(g.operations) for g in known.genotypes])
    budget = min(budget, others.sum())
    found = {}
    for name in DATASETS:
        test = known.accuracy[f"{name}-test"]
        found[name] = {
            "accuracy": test[rows].tolist(),
            "rank": [int(1 + np.sum(test > test[row])) for row in rows],
            "random": float(test[others].mean()),
            "optimum": float(test[others].max()),
        }
        if budget > 1:
            valid = known.accuracy["cifar10-valid"][others]
            best = best_of_k_random(valid, test[others], budget)
            found[name][f"best of {budget} random"] = best
    return found


def _networks_of_the_same_cost(config: NasBench201Search) -> float:
    """How many random networks could be trained in the search's multiply-adds.

    The supernet runs every operation on every edge, a network one.
    """

    def cost(operation):
        genotype = Genotype((operation,) * len(EDGES))
        return multiply_adds(genotype, cells=config.cells, channels=config.channels)

    outside = cost("none")
    inside = sum(cost(name) - outside for name in config.operations)
    ratio = (outside + inside) / (outside + inside / len(config.operations))
    passes = deep.search_gradients(config) * config.batch_size / config.train
    return ratio * passes / config.epochs


def _write(folder: pathlib.Path, result: dict[str, Any], found: list) -> None:
    arrays: dict[str, Any] = {}
    for seed, (search, alpha) in enumerate(found):
        arrays |= {f"history_{k}_{seed}": np.asarray(v) for k, v in search.history.items()}
        arrays[f"alpha_{seed}"] = alpha
    report.write(folder, result, arrays)

    def draw(figure):
        axes = figure.subplot_mosaic([["alpha", "outer"], ["alpha", "lower"]])
        edges = [f"{i} → {j}" for i, j in EDGES]
        report.heat_map(np.asarray(found[0][1]), axes["alpha"], result["names"], edges)
        first = ", of the first seed" if len(found) > 1 else ""
        axes["alpha"].set(title=f"α of every edge{first}", ylabel="edge, from node → to node")
        histories = [search.history for search, _ in found]
        deep.draw_losses(result["config"]["strategy"], histories, (axes["outer"], axes["lower"]))
        figure.suptitle(report.picture_title(result["config"]))

    report.picture(folder / "search.png", (11, 4.6), draw)


def _print(result: dict[str, Any], folder: pathlib.Path) -> None:
    from rich.table import Table

    config, seeds = result["config"], result["config"]["seeds"]
    benchmark = result["benchmark"]
    rows = f"{config['train']} training, {config['valid']} validation rows"
    spread = f", mean ± s.e. of {seeds} seeds" if seeds > 1 else ""
    shown = Table(
        title=f"test accuracy in %{spread}; searched on {config['data']}, {rows}",
        caption="accuracies are the benchmark's, of networks trained for 200 epochs on CIFAR-10, "
        f"CIFAR-100 and ImageNet16-120; the search saw {config['data']}",
    )
    others = [k for k in benchmark["cifar10"] if k not in ("accuracy", "rank", "optimum")]
    shown.add_column("data set", no_wrap=True)
    for heading in ("search", "rank of 15,625", *others, "optimum"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for name, label in DATASETS.items():
        scores = benchmark[name]
        cells = [report.cell(np.array(scores["accuracy"]), ".2f")]
        cells.append(report.cell(np.array(scores["rank"]), ",.0f"))
        shown.add_row(label, *cells, *(f"{scores[k]:.2f}" for k in (*others, "optimum")))
    console = report.screen()
    console.print(shown)
    for seed, genotype in enumerate(result["genotypes"]):
        named = f"seed {seed}: " if seeds > 1 else "found: "
        console.print(named + genotype, soft_wrap=True, markup=False)  # to be copied
    skips, entropies = np.array(result["skips"]), np.array(result["entropy"])
    console.print(
        f"skip_connect on {report.cell(skips, '.3g')} of {len(EDGES)} edges; entropy of α, mean "
        f"over edges: {report.cell(entropies, '.2f')} of at most {np.log(len(result['names'])):.2f}"
    )
    errors = [report.cell(100 * np.array(e), ".1f") for e in result["supernet"].values()]
    console.print("supernet's own errors in %: train {}, valid {}, test {}".format(*errors))
    curvature = np.array(result["curvature"])
    console.print(
        "largest eigenvalue of the validation loss's Hessian in α, of one batch: "
        f"{report.cell(curvature, '.3g')}"
    )
    console.print(deep.known_error(config["strategy"]))
    console.print(
        f"in each search's multiply-adds {result['budget']:.2g} random networks "
        f"could be trained on as many rows for {config['epochs']} epochs"
    )
    seconds = result["seconds"]
    console.print(
        f"{config['strategy']} {seconds['search']:.0f} s, all {seconds['all']:.0f} s; results in "
        f"{folder}"
    )
