"""``bilevel rank``: train-free scores of NAS-Bench-201's networks, judged by their accuracies.

Networks are drawn, scored at their initial weights on one batch of ``--data``, and held against the
benchmark's accuracies on CIFAR-10, CIFAR-100 and ImageNet16-120, beside scores that look at nothing
but the genotype. With ``--epochs`` the network of the best score (of the first of ``--scores``) is
then trained from scratch on ``--data``: Algorithm 1 of Zhu et al. (2022), with Eigen-NAS.
"""

import functools
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from bilevel.cli.deep_search import images, pipeline
from bilevel.cli.flags import from_config_file
from bilevel.cli.flags.commands import Rank
from bilevel.cli.flags.datasets import CLASSES, pixel_count
from bilevel.cli.flags.import_function import imported, takes
from bilevel.cli.runtime import report
from bilevel.cli.runtime.devices import count_for, spread_over_devices
from bilevel.cli.runtime.run_directory import run_directory
from bilevel.data import datasets
from bilevel.nets.images import crop_and_flip, unit_images
from bilevel.plots import plots
from bilevel.runs.progress import RunBar, progress_bar
from bilevel.spaces.nasbench201 import all_networks, encode, genotypes, parameter_count
from bilevel.spaces.nasbench201.genotype import EDGES, Genotype
from bilevel.spaces.nasbench201.judging.printed_accuracies import PRINTED
from bilevel.spaces.nasbench201.judging.table import (
    DATASETS,
    RUN_SETS,
    BenchmarkTable,
    load_table,
    published_scores,
)
from bilevel.spaces.nasbench201.judging.verdicts import (
    BASELINES,
    correlations,
    judge,
    paper_protocol,
    seed_ceiling,
    sum_of_log_ranks,
)
from bilevel.spaces.nasbench201.network import nasbench201_network
from bilevel.spaces.nasbench201.scoring import Score, Scored, score_networks
from ntk.scores.registry import builtin_score_names, score_description

Rows = tuple[jax.Array, jax.Array]  # images, labels

_ALL = "sum of log ranks"


class RankPlan(NamedTuple):
    """What a run scores, judges and trains, in values of the library."""

    names: tuple[str, ...]  # of scores
    functions: dict[str, Score]  # the user's own among them
    shape: dict[str, int]  # of every network: classes, cells, channels
    drawn: np.ndarray  # rows of the benchmark's table, in random order
    at_once: int  # networks scored side by side
    spread: Callable[[Any], Any]  # puts their genotypes on devices
    train: Rows
    test: Rows
    batch: Rows  # that the networks are scored on
    keys: jax.Array  # of the initial weights, of the training, and of the user's own scores
    table: BenchmarkTable | None  # accuracies to judge by
    aggregate: tuple[str, ...]  # scores and baselines to be summed up
    k: int
    pool: int
    seed: int


class Training(NamedTuple):
    """How the chosen network is trained, as the benchmark trains."""

    epochs: int
    batch_size: int
    augment: Callable[..., jax.Array] | None


def run_rank(config: Rank) -> dict[str, Any]:
    """Run the job; print its tables, write its run directory, return what `result.json` holds."""
    config.check()
    functions = _import_scores(config.own_scores)
    with run_directory(config, keeps="the scores saved so far are kept") as folder:
        with report.phases(config.progress, _rank_phase_seconds(config)) as bar:
            began = time.perf_counter()
            bar.enter("data")
            plan, training = _plan_ranking(config, functions)
            progress = report.progress_within_phase(config.progress)
            result, scored = _score_and_train(plan, training, folder, bar, progress)
            result["seconds"] = time.perf_counter() - began
        result = {"config": from_config_file.flags_of(config)} | result | report.origin()
        report.write_results(folder, result, {"rows": plan.drawn, **scored.values})
        if plan.table is not None:
            _save_ranking_figure(folder, result, scored, plan.table, plan.drawn)
        _print_ranking(result, folder)
        return result


def _import_scores(names: tuple[str, ...]) -> dict[str, Score]:
    """The functions MODULE:FUNCTION, each of ``(key, apply, params, batch)``."""
    functions = {name: imported("scores", name) for name in names}
    for name, function in functions.items():
        takes("scores", name, function, 4)
    return functions


def _rank_phase_seconds(config: Rank) -> dict[str, float]:
    """Seconds of each phase, roughly, on two cores: compilation, and gradients of a batch."""
    pixels = config.batch_size * pixel_count(config.data, config.pixels)
    gradient = 9 / 2.5e10 * pixels * len(EDGES) * 3 * config.cells * config.channels**2
    batches = config.epochs * (config.train // config.batch_size)
    return {
        "data": 5,
        "scores": len(config.score_names) * (15 + gradient * config.count),
        "judging": 2,
        "training": 30 + gradient * batches if config.epochs else 0,
    }


def _plan_ranking(config: Rank, functions: dict[str, Score]) -> tuple[RankPlan, Training]:
    """Data, networks and how they are judged: the last place that reads a flag."""
    count_for(config.devices, config.at_once, "networks at once")
    unit = functools.partial(unit_images, pixels=config.pixels)
    sizes = {"train": config.train, "test": config.test}
    (rows,) = datasets.draw_splits(config.data, [jax.random.key(config.seed)], valid=1, **sizes)
    train, _, test = pipeline.normalised(rows, unit)
    plan = RankPlan(
        names=config.score_names,
        functions=functions,
        shape={"classes": CLASSES, "cells": config.cells, "channels": config.channels},
        # RandomState, not default_rng, whose stream may change from one numpy to the next. Fewer
        # networks are the first of more.
        drawn=np.random.RandomState(config.seed).permutation(len(genotypes()))[: config.count],
        at_once=config.at_once,
        spread=functools.partial(
            spread_over_devices, config.devices, config.at_once, "networks at once"
        ),
        train=train,
        test=test,
        batch=_first_rows(jax.random.key(config.seed + 1), train, config.batch_size),
        keys=jax.random.split(jax.random.key(config.seed), 3),
        table=load_table() if config.judged else None,
        aggregate=config.aggregate,
        k=config.k,
        pool=config.pool,
        seed=config.seed,
    )
    augment = crop_and_flip if config.data == "cifar10" else None
    return plan, Training(config.epochs, min(config.batch_size, config.train), augment)


def _first_rows(key: jax.Array, rows: Rows, size: int) -> Rows:
    """Some rows in random order, with all classes in their proportions."""
    x, y = rows
    (chosen,) = datasets.stratified_split(key, np.asarray(y), (size,))
    return x[chosen], y[chosen]


def _score_and_train(
    plan: RankPlan, training: Training, folder: pathlib.Path, bar: RunBar, progress: bool | None
) -> tuple[dict[str, Any], Scored]:
    networks = all_networks(**plan.shape)
    cells = [genotypes()[row] for row in plan.drawn]
    x, _ = plan.train
    w = jax.jit(lambda key: networks.init(key, x.shape[1:]))(plan.keys[0])
    jax.eval_shape(networks.apply, w, encode(cells[0]), plan.batch[0])
    bar.enter("scores")
    scored = score_networks(
        plan.names,
        networks,
        w,
        cells,
        plan.batch,
        at_once=plan.at_once,
        place=plan.spread,
        progress=progress,
        file=folder / "scores.npz",
        functions=plan.functions,
        key=plan.keys[2],
    )
    result: dict[str, Any] = {
        "networks": len(plan.drawn),
        "seconds_per_network": scored.seconds,
        "compile_seconds": scored.compile_seconds,
    }
    bar.enter("judging")
    if plan.table is not None:
        result |= _judge_scores(plan, scored, plan.table)
    chosen = _best_by_score(cells, scored.oriented()[plan.names[0]])
    result["chosen"] = {"genotype": str(chosen), "score": plan.names[0]}
    if training.epochs:
        bar.enter("training")
        result["chosen"] |= _train_chosen_network(plan, training, chosen, folder, progress)
    return result, scored


def _best_by_score(cells: list[Genotype], score: np.ndarray) -> Genotype:
    return cells[int(np.argmax(np.where(np.isnan(score), -np.inf, score)))]


# ----------------------------------------------------------------------------- judging


def _judge_scores(plan: RankPlan, scored: Scored, table: BenchmarkTable) -> dict[str, Any]:
    """Correlations, choices, the papers' protocol, agreement with published scores."""
    scores, rows = scored.oriented(), plan.drawn
    if len(parts := _scores_to_aggregate(plan.aggregate, scores, rows)) > 1:
        scores[_ALL] = sum_of_log_ranks(*parts)
    pool = plan.pool if plan.pool < len(rows) else None
    lines = judge(scores, table, rows, k=plan.k, pool=pool, seed=plan.seed)
    protocol = {
        name: paper_protocol(score, table, rows, k=plan.k, pool=pool or len(rows), seed=plan.seed)
        for name, score in scores.items()
    }
    ceilings = {}
    for name in RUN_SETS:
        ceiling = seed_ceiling(table, name)
        between = float(np.mean(list(ceiling.pairs.values())))
        ceilings[name] = {"between_two_runs": between, "with_the_mean": ceiling.ceiling}
    return {
        "judged": lines,
        "protocol": protocol,
        "published": _published_agreement(scores, rows),
        "seed_ceiling": ceilings,
    }


def _published_agreement(scores: dict[str, np.ndarray], rows: np.ndarray) -> dict[str, Any]:
    """Correlations with the scores that others published, if that table has been made."""
    try:
        published = published_scores()
    except FileNotFoundError:
        return {}
    agreement = {}
    for name in sorted(set(builtin_score_names()) & set(scores)):
        theirs = score_description(name).published
        if theirs is None:
            continue
        known = np.isfinite(published[theirs][rows])
        if known.sum() > 1:
            pair = correlations(scores[name][known], published[theirs][rows][known])
            agreement[name] = {"rho": pair.rho, "tau": pair.tau, "networks": int(known.sum())}
    return agreement


def _scores_to_aggregate(
    aggregate: tuple[str, ...], scores: dict[str, np.ndarray], rows: np.ndarray
) -> list[np.ndarray]:
    """The scores and baselines that are aggregated, for the networks ``rows``."""
    cells = [genotypes()[row] for row in rows]
    return [
        scores[name] if name in scores else np.array([*map(BASELINES[name], cells)])
        for name in aggregate or scores
    ]


# ----------------------------------------------------------------------------- Algorithm 1


def _train_chosen_network(
    plan: RankPlan,
    training: Training,
    genotype: Genotype,
    folder: pathlib.Path,
    progress: bool | None,
) -> dict[str, Any]:
    """The chosen network trained from scratch as the benchmark trains, and its test error."""
    network = nasbench201_network(genotype, **plan.shape)
    epochs, size, augment = training
    steps = epochs * (len(plan.train[1]) // size)
    sgd = optax.chain(
        optax.add_decayed_weights(5e-4),
        optax.sgd(optax.cosine_decay_schedule(0.1, steps), momentum=0.9, nesterov=True),
    )
    text, fields = "loss {task.fields[loss]:.3f}", ("loss",)
    with progress_bar(progress, "training", epochs, text, fields) as show:

        def show_epoch(epoch, loss):
            show(epoch, lambda: {"loss": loss})

        _, errors = images.fitted(
            network,
            plan.keys[1],
            [plan.train, plan.test],
            sgd=sgd,
            epochs=epochs,
            batch_size=size,
            checkpoint=folder / "network" / "".join(map(str, encode(genotype))),
            show=show_epoch,
            augment=augment,
        )
    return {
        "parameters": parameter_count(genotype, **plan.shape),
        "train_error": errors[0],
        "test_error": errors[1],
    }


# ----------------------------------------------------------------------------- the screen


def _save_ranking_figure(
    folder: pathlib.Path,
    result: dict[str, Any],
    scored: Scored,
    table: BenchmarkTable,
    rows: np.ndarray,
) -> None:
    config = result["config"]
    accuracy = table.accuracy["cifar10-test"][rows]
    names = list(scored.values)
    columns = min(4, len(names))
    lines = -(-len(names) // columns)

    def draw(figure):
        axes = figure.subplots(lines, columns, squeeze=False)
        for ax in axes.flat[len(names) :]:
            ax.set_axis_off()
        for name, ax in zip(names, axes.flat, strict=False):
            plots.ranking(scored.oriented()[name], accuracy, ax)
            ax.set(title=name, ylabel="")
        for ax in axes[:, 0]:
            ax.set_ylabel("CIFAR-10 test accuracy (%)")
        figure.suptitle(
            f"{len(rows)} networks of NAS-Bench-201, scored on {config['batch_size']} rows of "
            f"{config['data']}, seed {config['seed']}; triangles: lower than shown"
        )

    report.save_figure(folder / "ranking.png", (3.4 * columns, 0.4 + 3 * lines), draw)


def _print_ranking(result: dict[str, Any], folder: pathlib.Path) -> None:
    screen = report.screen()
    if "judged" in result:
        _print_judged(screen, result)
    config, chosen = result["config"], result["chosen"]
    for name, agreement in result.get("published", {}).items():
        screen.print(
            f"{name}: Spearman's rho {agreement['rho']:.3f} with the published score, on "
            f"{agreement['networks']} networks"
        )
    seconds = ", ".join(f"{k} {s:.2f}" for k, s in result["seconds_per_network"].items())
    screen.print(f"seconds per network on {result['device']}: {seconds}")
    screen.print(f"best by {chosen['score']}: {chosen['genotype']}", markup=False)
    if "test_error" in chosen:
        screen.print(
            f"trained for {config['epochs']} epochs on {config['train']} rows of "
            f"{config['data']}: {100 * chosen['test_error']:.1f} % test error, "
            f"{100 * chosen['train_error']:.1f} % training error, "
            f"{chosen['parameters']:,} parameters"
        )
    screen.print(f"{result['seconds']:.0f} s; results in {folder}")


def _print_judged(screen: Any, result: dict[str, Any]) -> None:
    from rich.table import Table as Screen

    config, count = result["config"], result["networks"]
    sets = ("cifar10_valid", *(f"{d}_test" for d in DATASETS))
    heads = ["CIFAR-10 valid.", *DATASETS.values()]
    table = Screen(
        title=f"{count} networks scored on {config['batch_size']} rows of {config['data']}: "
        "rank correlation with accuracy in the benchmark, tau / rho"
    )
    table.add_column("score", no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for line in result["judged"]:
        cells = [f"{line[f'{s}_tau']:.3f} / {line[f'{s}_rho']:.3f}" for s in sets]
        table.add_row(line["score"], *cells)
    screen.print(table)
    ceilings = ", ".join(
        f"{name} {c['between_two_runs']:.3f} and {c['with_the_mean']:.3f}"
        for name, c in result["seed_ceiling"].items()
    )
    screen.print(
        f"the most that chance in training allows, tau between two runs of one network, and of a "
        f"perfect score with their mean (all 15,625): {ceilings}"
    )
    table = _by_dataset(
        f"test accuracy (%) of the best score's network, and gain of the best of k = {config['k']} "
        "over the best of k random ones"
    )
    for line in result["judged"]:
        pairs = [
            (line[f"{d}_top_one"], line[f"{d}_gain"], line[f"{d}_gain_error"]) for d in DATASETS
        ]
        table.add_row(
            line["score"], *(f"{top:.2f}  {gain:+.2f} ± {e:.2f}" for top, gain, e in pairs)
        )
    screen.print(table)
    table = _by_dataset(
        f"test accuracy (%) by the protocol of KNAS and Eigen-NAS, k = {config['k']}, "
        "mean ± standard deviation; and as printed"
    )
    for name, figures in result["protocol"].items():
        table.add_row(name, *(_format_mean(*figures[d]) for d in DATASETS))
    table.add_section()
    for name, printed in PRINTED.items():
        table.add_row(f"printed: {name}", *(_format_mean(*figure) for figure in printed))
    screen.print(table)


def _by_dataset(title: str) -> Any:
    from rich.table import Table as Screen

    table = Screen(title=title)
    table.add_column("score", no_wrap=True)
    for head in DATASETS.values():
        table.add_column(head, justify="right", no_wrap=True)
    return table


def _format_mean(mean: float, deviation: float) -> str:
    return f"{mean:.2f}" if math.isnan(deviation) else f"{mean:.2f} ± {deviation:.2f}"
