"""``bilevel search --space darts``: the cells of a convolutional network (Liu et al. 2019).

For every seed, one after the other: the search of a supernet, the genotype that it ends at, the
network of that genotype trained from scratch, and networks of random genotypes trained alike. A
run that was interrupted goes on where it was, in a search or in a network's training.
"""

import json
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bilevel._progress import progress_bar
from bilevel.cli import convolutional, deep, report
from bilevel.cli.commands import DartsSearch
from bilevel.cli.convolutional import ERRORS
from bilevel.cli.known import pixel_count
from bilevel.cli.rows import load
from bilevel.cli.runs import run_directory
from bilevel.protocols import Pytree
from bilevel.spaces.darts import (
    EDGES,
    DartsNetwork,
    DartsSpace,
    Genotype,
    crop_and_flip,
    cutout,
    darts_network,
    darts_space,
    draw_genotype,
    parameter_count,
    parse_genotype,
    training,
)

_KINDS = ("normal", "reduce")


class _Task(NamedTuple):
    """What all parts of a run share."""

    space: DartsSpace
    classes: int
    splits: list[list[tuple[jax.Array, jax.Array]]]  # of each seed: training, validation, test rows

    @property
    def shape(self) -> tuple[int, ...]:
        return self.splits[0][0][0].shape[1:]


def run_darts_search(config: DartsSearch) -> dict[str, Any]:
    """Run the job; print its table, write its run directory, return what `result.json` holds."""
    config.check()
    with run_directory(
        config, keeps="searches and trainings are kept as far as they came"
    ) as folder:
        return _run(config, folder)


def _run(config: DartsSearch, folder: pathlib.Path) -> dict[str, Any]:
    began = time.perf_counter()
    with report.phases(config, _work(config)) as bar:
        bar.enter("data")
        task = _task(config)
        start = time.perf_counter()
        found = convolutional.search_seeds(config, task.space, task.splits, folder, bar)
        searched = time.perf_counter() - start
        bar.enter("training")
        rows = _networks(task, config, [alpha for _, alpha in found], folder)
        bar.enter("errors and curvature")
        result = _summary(task, config, found, rows)
    result["seconds"] = {"search": searched, "all": time.perf_counter() - began}
    _write(folder, result, found)
    _print(result, folder)
    return result


def _work(config: DartsSearch) -> dict[str, float]:
    """Seconds of each phase, roughly, on two cores: compilation, and gradients of minibatches."""
    pixels = config.batch_size * pixel_count(config.data, config.pixels)
    operation = _PASSES * pixels * len(EDGES) * config.cells * config.channels**2
    cells, channels = config.final_cells or config.cells, config.final_channels or config.channels
    network = _PASSES * pixels * len(EDGES) * cells * channels**2 / 2  # half of a cell's edges
    batches = config.epochs * (config.train // config.batch_size)
    return {
        "data": 5,
        **convolutional.search_work(config, len(config.operations) * operation),
        "training": config.seeds * (1 + config.random) * (20 + batches * network),
        "errors and curvature": 20 + config.seeds,
    }


_PASSES = 3 * 4 / 5e9  # forward, and backward for two; a few products a weight; products a second


# ----------------------------------------------------------------------------- the search


def _task(config: DartsSearch) -> _Task:
    data = load(config.data, config.train, config.valid, config.test)
    space = darts_space(
        config.operations,
        classes=len(data.classes),
        cells=config.cells,
        channels=config.channels,
        dtype=jnp.bfloat16 if config.bfloat16 else None,
        remat=config.remat,
    )
    task = _Task(space, len(data.classes), convolutional.splits(config, data))
    # Are the images large enough for both networks? The shapes say.
    jax.eval_shape(lambda key: space.init(key, task.shape), jax.random.key(0))
    network = _network(task, config, space.discretize(space.start()))
    jax.eval_shape(lambda key: network.init(key, task.shape), jax.random.key(0))
    return task


# ----------------------------------------------------------------------------- the networks


class _Row(NamedTuple):
    """A network trained from scratch, of one seed."""

    name: str
    seed: int
    genotype: Genotype


def _networks(
    task: _Task, config: DartsSearch, alphas: list[Pytree], folder: pathlib.Path
) -> list[dict[str, Any]]:
    """Scores of all networks; those of a run that is resumed are read, not computed again."""
    rows = []
    for seed, alpha in enumerate(alphas):
        rows.append(_Row("search", seed, task.space.discretize(alpha)))
        keys = jax.random.split(convolutional.keys(config, seed)[3], config.random + 1)[1:]
        drawn = [task.space.discretize(task.space.draw(key)) for key in keys]
        rows += [_Row(f"random {i + 1}", seed, genotype) for i, genotype in enumerate(drawn)]
    path = folder / "networks.json"
    scores = json.loads(path.read_text()) if path.exists() else []
    text = "{task.fields[network]}, seed {task.fields[seed]}  loss {task.fields[loss]:.3f}"
    total = len(rows) * config.epochs
    with progress_bar(
        config.progress, "training", total, text, ("network", "seed", "loss")
    ) as show:
        for i, row in enumerate(rows[len(scores) :], len(scores)):

            def show_epoch(epoch, loss, done=i * config.epochs, row=row):
                values = {"network": row.name, "seed": row.seed, "loss": loss}
                show(done + epoch, lambda: values)

            scores.append(_trained(task, config, row, folder / "networks" / str(i), show_epoch))
            path.write_text(json.dumps(scores, indent=2) + "\n")
    return scores


def _trained(
    task: _Task,
    config: DartsSearch,
    row: _Row,
    checkpoint: pathlib.Path,
    show: Callable[[int, float], None],
) -> dict[str, Any]:
    """The network's errors; its training is checkpointed, and goes on from what it finds."""
    began = time.perf_counter()
    network, parts = _network(task, config, row.genotype), task.splits[row.seed]
    steps = config.epochs * (config.train // config.batch_size)
    descent = convolutional.sgd(optax.cosine_decay_schedule(config.learning_rate, steps))
    program = training(
        network, descent, batch_size=config.batch_size, augment=_augmentation(config)
    )
    key = jax.random.split(convolutional.keys(config, row.seed)[3], config.random + 2)[-1]
    run = program, key, parts[0], config.epochs, checkpoint, show
    state, _ = convolutional.train_from_scratch(
        *run, lambda i: (config.drop_path * i / config.epochs,)
    )
    errors = convolutional.errors(network)(state.w, state.averages, parts, config.batch_size)
    return {
        "network": row.name,
        "seed": row.seed,
        "genotype": str(row.genotype),
        **dict(zip(ERRORS, errors, strict=True)),
        "skips": _skips(row.genotype),
        "parameters": parameter_count(state.w),
        "seconds": time.perf_counter() - began,
    }


def _network(task: _Task, config: DartsSearch, genotype: Genotype) -> DartsNetwork:
    return darts_network(
        genotype,
        classes=task.classes,
        cells=config.final_cells or config.cells,
        channels=config.final_channels or config.channels,
        auxiliary=config.auxiliary,
        dtype=jnp.bfloat16 if config.bfloat16 else None,
    )


def _augmentation(config: DartsSearch) -> Callable[[jax.Array, jax.Array], jax.Array] | None:
    if not (config.cutout or config.crop_and_flip):
        return None

    def augment(key, x):
        keys = jax.random.split(key)
        x = crop_and_flip(keys[0], x) if config.crop_and_flip else x
        return cutout(keys[1], x, config.cutout) if config.cutout else x

    return augment


def _skips(genotype: Genotype) -> int:
    return sum(name == "skip_connect" for name, _ in genotype.normal)


# ----------------------------------------------------------------------------- the report


def _summary(task: _Task, config: DartsSearch, found: list, rows: list[dict]) -> dict[str, Any]:
    space = task.space
    scores: dict[str, dict[str, list]] = {
        "search": _columns([row for row in rows if row["network"] == "search"])
    }
    if config.random:
        drawn = [[r for r in rows if r["seed"] == s][1:] for s in range(config.seeds)]
        if config.random > 1:
            best = [min(networks, key=lambda r: r["validation error"]) for networks in drawn]
            scores[f"best of {config.random} random"] = _columns(best)
        means = [_columns(networks) for networks in drawn]
        scores["random"] = {k: [float(np.mean(m[k])) for m in means] for k in means[0]}

    curvature = deep.top_curvature(space.problem.outer, convolutional.tangent)
    wrong = convolutional.errors(space)
    shared, curvatures = [], []
    for (result, alpha), parts in zip(found, task.splits, strict=True):
        errors = wrong(result.w, alpha, parts, config.batch_size)
        shared.append(dict(zip(ERRORS, errors, strict=True)))
        batch = jax.tree.map(lambda a: a[: config.batch_size], parts[1])
        curvatures.append(curvature(result.w, alpha, batch))
    scores["supernet"] = _columns(shared)
    return {
        "space": "darts",
        "config": report.flags(config),
        "names": list(space.names),
        "genotypes": [str(space.discretize(alpha)) for _, alpha in found],
        "alpha": [{k: np.asarray(v).tolist() for k, v in alpha.items()} for _, alpha in found],
        "entropy": [
            {k: float(deep.entropy(alpha[k]).mean()) for k in _KINDS} for _, alpha in found
        ],
        "scores": scores,
        "curvature": curvatures,
        "seconds of a network": float(np.mean([r["seconds"] for r in rows])),
        **report.origin(),
    }


def _columns(rows: list[dict[str, Any]]) -> dict[str, list]:
    return {k: [row[k] for row in rows] for k in (*ERRORS, *dict(_SIZES)) if k in rows[0]}


def _write(folder: pathlib.Path, result: dict, found: list) -> None:
    arrays: dict[str, Any] = {}
    for seed, (search, alpha) in enumerate(found):
        history = jax.tree.map(np.asarray, search.history)
        path = history.pop("alpha")
        named = {f"history_{k}": v for k, v in history.items()}
        named |= {f"history_alpha_{k}": path[k] for k in _KINDS}
        named |= {f"alpha_{k}": alpha[k] for k in _KINDS}
        arrays |= {f"{name}_{seed}": value for name, value in named.items()}
    report.write(folder, result, arrays)
    title = report.picture_title(result["config"])
    first = ", first seed" if len(found) > 1 else ""

    def draw_search(figure):
        mosaic = [[*_KINDS, "outer"], [*_KINDS, "lower"]]
        axes = figure.subplot_mosaic(mosaic, width_ratios=(4, 4, 3))
        edges = [f"{i} → {j}" for i, j in EDGES]
        for kind in _KINDS:
            report.heat_map(np.asarray(found[0][1][kind]), axes[kind], result["names"], edges)
            cell = "normal" if kind == "normal" else "reduction"
            axes[kind].set_title(f"{cell} cell: α of every edge{first}")
        axes[_KINDS[0]].set_ylabel("edge, from node → to node")
        histories = [search.history for search, _ in found]
        deep.draw_losses(result["config"]["strategy"], histories, (axes["outer"], axes["lower"]))
        figure.suptitle(title)

    def draw_found(figure):
        draw_genotype(parse_genotype(result["genotypes"][0]), figure.subplots(2, 1))
        figure.suptitle(f"genotype found{first}; {title}")

    report.picture(folder / "search.png", (15, 5), draw_search)
    report.picture(folder / "genotype.png", (8.5, 7), draw_found)


_SIZES = (("skips", ".3g"), ("parameters", ",.0f"))


def _print(result: dict[str, Any], folder: pathlib.Path) -> None:
    from rich.table import Table

    config, seeds = result["config"], result["config"]["seeds"]
    table = Table(title=report.title(config))
    table.add_column("network", no_wrap=True)
    for heading in (*ERRORS.values(), *dict(_SIZES)):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, scores in result["scores"].items():
        cells = [report.cell(100 * np.asarray(scores[c]), ".1f") for c in ERRORS]
        cells += [report.cell(np.asarray(scores[c]), f) if c in scores else "" for c, f in _SIZES]
        table.add_row(name, *cells, end_section=name in ("search", "random"))
    console = report.screen()
    console.print(table)
    for seed, genotype in enumerate(result["genotypes"]):
        named = f"seed {seed}: " if seeds > 1 else "found: "
        console.print(named + genotype, soft_wrap=True)  # to be copied
    largest = np.log(len(result["names"]))
    entropies = [np.mean([e[kind] for e in result["entropy"]]) for kind in _KINDS]
    console.print(
        "entropy of α, mean over edges: normal {:.2f}, reduction {:.2f}, of at most {:.2f}".format(
            *entropies, largest
        )
    )
    curvature = np.array(result["curvature"])
    console.print(
        "largest eigenvalue of the validation loss's Hessian in α, of one batch: "
        f"{report.cell(curvature, '.3g')}"
    )
    console.print(deep.known_error(config["strategy"]))
    seconds, each = result["seconds"], result["seconds of a network"]
    console.print(
        "networks are trained from scratch; skips: in the normal cell, of 8 edges; in the search's "
        f"time {seconds['search'] / seeds / each:.1f} networks could be trained"
    )
    console.print(
        f"{config['strategy']} {seconds['search']:.0f} s, all {seconds['all']:.0f} s; results in "
        f"{folder}"
    )
