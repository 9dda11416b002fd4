"""``bilevel rank``: train-free scores of NAS-Bench-201's networks, judged by their accuracies.

Networks are scored at their initial weights on one batch of ``--data``. The scores, and baselines
of the genotype, are compared with the benchmark's accuracies. With ``--epochs`` the network of the
best score is then trained from scratch: Algorithm 1 of Zhu et al. (2022), with Eigen-NAS.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
import optax

from bilevel.cli.deep_search import run
from bilevel.cli.runtime import memory, report
from bilevel.cli.runtime.command_run import CommandRun, Result
from bilevel.cli.runtime.devices import count_for, spread_over_devices
from bilevel.data import datasets
from bilevel.internal.import_function import imported, takes
from bilevel.nets.images import crop_and_flip, unit_images
from bilevel.nets.several import fitted
from bilevel.plots import plots
from bilevel.spaces.nasbench201 import all_networks, encode, genotypes, parameter_count
from bilevel.spaces.nasbench201.genotype import Genotype
from bilevel.spaces.nasbench201.judging import table as benchmark
from bilevel.spaces.nasbench201.judging import verdicts
from bilevel.spaces.nasbench201.network import nasbench201_network
from bilevel.spaces.nasbench201.scoring import score_networks
from ntk.scores.registry import builtin_score_names, score_description

_ALL = "sum of log ranks"


class _RankRun(CommandRun):
    """Scores of networks, their judgement, and the training of the best one."""

    images = True
    keeps = "the scores so far are saved"

    def prepare(self) -> None:
        config = self.config
        if self.data.dataset is not None and "judged" not in self.given:
            # The table is about other images.
            config = self.config = dataclasses.replace(config, judged=False)
        self.functions = {name: imported("scores", name) for name in config.own_scores}
        for name, function in self.functions.items():
            takes("scores", name, function, 4)  # (key, apply, params, batch)
        sizes = {"cells": config.cells, "channels": config.channels}
        self.shape = sizes | {"classes": self.data.classes}
        self.figure = "ranking.png" if config.judged else ""

    def arrays(self) -> list[memory.Parts]:
        """Return all weights, their gradient, and the arrays that a network's gradient keeps."""
        config, networks = self.config, all_networks(**self.shape)
        image = self.data.image_shape(config.pixels)
        key = jax.eval_shape(jax.random.key, 0)
        w = jax.eval_shape(lambda key: networks.init(key, image), key)
        x, cell = memory.shape(config.batch_size, *image), encode(genotypes()[-1])
        residuals = memory.kept_for_backward(lambda w, x: networks.apply(w, cell, x), w, x)
        flags = "at_once", "batch_size", "channels"
        return [{("cells", "channels"): [w, w], flags: [residuals] * config.at_once}]

    def result(self) -> tuple[Result, dict[str, Any]]:
        config = self.config
        devices = config.devices, config.at_once, "networks at once"
        count_for(*devices)
        self.table = benchmark.load_table() if config.judged else None
        # The stream of RandomState is the same in all versions of numpy. A smaller count draws the
        # first networks of a larger one. These are rows in the benchmark's table.
        permutation = np.random.RandomState(config.seed).permutation(len(genotypes()))
        self.rows = permutation[: config.count]
        unit = functools.partial(unit_images, pixels=config.pixels)
        sizes = {"train": config.train, "test": config.test}
        (splits,) = self.data.draw([jax.random.key(config.seed)], valid=1, **sizes)
        train, _, test = run.normalised(splits, unit)
        # The batch of the scores has all classes in their proportions.
        batch_key = jax.random.key(config.seed + 1)
        (chosen,) = datasets.stratified_split(batch_key, np.asarray(train[1]), (config.batch_size,))
        # Keys of the initial weights, of the training, and of user-defined scores.
        init_key, training_key, score_key = jax.random.split(jax.random.key(config.seed), 3)
        candidates = all_networks(**self.shape)
        cells = [genotypes()[row] for row in self.rows]
        w = jax.jit(lambda key: candidates.init(key, train[0].shape[1:]))(init_key)
        self.bars.enter("scores")
        self.scored = scored = score_networks(
            config.score_names,
            candidates,
            w,
            cells,
            (train[0][chosen], train[1][chosen]),
            at_once=config.at_once,
            place=functools.partial(spread_over_devices, *devices),
            file=self.folder / "scores.npz",
            functions=self.functions,
            key=score_key,
        )
        result: Result = {
            "networks": len(self.rows),
            "seconds_per_network": scored.seconds,
            "compile_seconds": scored.compile_seconds,
        }
        self.bars.enter("judging")
        if self.table is not None:
            result |= self._judge_scores(self.table, cells)
        first = config.score_names[0]
        score = scored.oriented()[first]
        best = cells[int(np.argmax(np.where(np.isnan(score), -np.inf, score)))]
        result["chosen"] = {"genotype": str(best), "score": first}
        if config.epochs:
            self.bars.enter("training")
            result["chosen"] |= self._train_chosen_network(best, training_key, [train, test])
        result["seconds"] = self.seconds()
        return result, {"rows": self.rows, **scored.values}

    def _judge_scores(self, table: benchmark.BenchmarkTable, cells: list[Genotype]) -> Result:
        """Return correlations, choices, the papers' protocol, agreement with published scores."""
        config, rows, scores = self.config, self.rows, self.scored.oriented()
        parts = [
            scores[name] if name in scores else np.array([*map(verdicts.BASELINES[name], cells)])
            for name in config.aggregate or scores
        ]
        if len(parts) > 1:
            scores[_ALL] = verdicts.sum_of_log_ranks(*parts)
        pool = config.pool if config.pool < len(rows) else None
        options: dict[str, Any] = {"k": config.k, "seed": config.seed}
        protocol = {
            name: verdicts.paper_protocol(score, table, rows, pool=pool or len(rows), **options)
            for name, score in scores.items()
        }
        ceilings = {}
        for name in benchmark.RUN_SETS:
            ceiling = verdicts.seed_ceiling(table, name)
            between = float(np.mean(list(ceiling.pairs.values())))
            ceilings[name] = {"between_two_runs": between, "with_the_mean": ceiling.ceiling}
        return {
            "judged": verdicts.judge(scores, table, rows, pool=pool, **options),
            "protocol": protocol,
            "published": _published_agreement(scores, rows),
            "seed_ceiling": ceilings,
        }

    def _train_chosen_network(self, genotype: Genotype, key: Any, parts: list[run.Part]) -> Result:
        """Train the chosen network from scratch like the benchmark; return its errors."""
        config, size = self.config, min(self.config.batch_size, self.config.train)
        steps = config.epochs * (len(parts[0][1]) // size)
        sgd = optax.chain(
            optax.add_decayed_weights(5e-4),
            optax.sgd(optax.cosine_decay_schedule(0.1, steps), momentum=0.9, nesterov=True),
        )
        augment = crop_and_flip if config.data == "cifar10" else None
        show = self.bars.loop(config.epochs, "loss {loss:.3f}")
        _, errors = fitted(
            nasbench201_network(genotype, **self.shape),
            key,
            parts,
            *(sgd, size, augment),
            epochs=config.epochs,
            checkpoint=self.folder / "network" / "".join(map(str, encode(genotype))),
            callback=lambda epoch, loss: show(epoch, lambda: {"loss": loss}),
        )
        return {
            "parameters": parameter_count(genotype, **self.shape),
            "train_error": errors[0],
            "test_error": errors[1],
        }

    def draw(self, figure: Any, result: Result) -> None:
        assert self.table is not None
        config, scores = result["config"], self.scored.oriented()
        accuracy = self.table.accuracy["cifar10-test"][self.rows]
        columns = min(4, len(scores))
        lines = -(-len(scores) // columns)
        figure.set_size_inches(3.4 * columns, 0.4 + 3 * lines)
        axes = figure.subplots(lines, columns, squeeze=False)
        for ax in axes.flat[len(scores) :]:
            ax.set_axis_off()
        for (name, score), ax in zip(scores.items(), axes.flat, strict=False):
            plots.ranking(score, accuracy, ax)
            ax.set(title=name, ylabel="")
        for ax in axes[:, 0]:
            ax.set_ylabel("CIFAR-10 test accuracy (%)")
        figure.suptitle(
            f"{len(self.rows)} networks of NAS-Bench-201, scored on {config['batch_size']} "
            f"rows of {config['data']}, seed {config['seed']}; triangles: lower than shown"
        )

    def show(self, result: Result) -> tuple[str, str]:
        if "judged" in result:
            self._print_judged(result)
        config, chosen = result["config"], result["chosen"]
        for name, agreement in result.get("published", {}).items():
            self.console.print(
                f"{name}: Spearman's rho {agreement['rho']:.3f} with the published score, on "
                f"{agreement['networks']} networks"
            )
        seconds = ", ".join(f"{k} {s:.2f}" for k, s in result["seconds_per_network"].items())
        self.console.print(f"seconds per network on {result['device']}: {seconds}")
        self.console.print(f"best by {chosen['score']}: {chosen['genotype']}", markup=False)
        if "test_error" in chosen:
            self.console.print(
                f"trained for {config['epochs']} epochs on {config['train']} rows of "
                f"{config['data']}: {100 * chosen['test_error']:.1f} % test error, "
                f"{100 * chosen['train_error']:.1f} % training error, "
                f"{chosen['parameters']:,} parameters"
            )
        return _result_sentence(result), f"{result['seconds']:.0f} s"

    def _print_judged(self, result: Result) -> None:
        config, count = result["config"], result["networks"]
        sets = ("cifar10_valid", *(f"{d}_test" for d in benchmark.DATASETS))
        table = report.result_table(
            f"{count} networks scored on {config['batch_size']} rows of {config['data']}: "
            "correlation with the benchmark's accuracies,\nKendall's tau / Spearman's rho",
            "score",
            *("CIFAR-10 valid.", *benchmark.DATASETS.values()),
        )
        scores = sum(line["score"] not in verdicts.BASELINES for line in result["judged"])
        for number, line in enumerate(result["judged"], 1):  # baselines of the genotype are last
            cells = [f"{line[f'{s}_tau']:.3f} / {line[f'{s}_rho']:.3f}" for s in sets]
            table.add_row(line["score"], *cells, end_section=number == scores)
        self.console.print(table)
        ceilings = "; ".join(
            f"{name} {c['between_two_runs']:.3f}, {c['with_the_mean']:.3f}"
            for name, c in result["seed_ceiling"].items()
        )
        self.console.print(
            "highest possible tau, because training is random (all 15,625 networks), for one run "
            f"and for the mean of runs: {ceilings}"
        )
        title = (
            "test accuracy (%) of the best score's network, and gain of the best of "
            f"k = {config['k']} over the best of k random ones"
        )
        table = report.result_table(title, "score", *benchmark.DATASETS.values())
        keys = "top_one", "gain", "gain_error"
        for line in result["judged"]:
            figures = [[line[f"{d}_{key}"] for key in keys] for d in benchmark.DATASETS]
            cells = [f"{top:.2f}  {gain:+.2f} ± {error:.2f}" for top, gain, error in figures]
            table.add_row(line["score"], *cells)
        self.console.print(table)
        title = (
            f"test accuracy (%) by the protocol of KNAS and Eigen-NAS, k = {config['k']}, "
            "mean ± standard deviation; and as printed"
        )
        table = report.result_table(title, "score", *benchmark.DATASETS.values())
        for name, figures in result["protocol"].items():
            table.add_row(name, *(_format_mean(*figures[d]) for d in benchmark.DATASETS))
        table.add_section()
        for name, printed in verdicts.PRINTED.items():
            table.add_row(f"printed: {name}", *(_format_mean(*figure) for figure in printed))
        self.console.print(table)


def _published_agreement(scores: dict[str, np.ndarray], rows: np.ndarray) -> dict[str, Any]:
    """Return correlations with published scores, if their table exists."""
    try:
        published = benchmark.published_scores()
    except FileNotFoundError:
        return {}
    agreement = {}
    for name in sorted(set(builtin_score_names()) & set(scores)):
        theirs = score_description(name).published
        if theirs is None:
            continue
        known = np.isfinite(published[theirs][rows])
        if known.sum() > 1:
            pair = verdicts.correlations(scores[name][known], published[theirs][rows][known])
            agreement[name] = {"rho": pair.rho, "tau": pair.tau, "networks": int(known.sum())}
    return agreement


def _result_sentence(result: dict[str, Any]) -> str:
    count, chosen = result["networks"], result["chosen"]
    if "judged" not in result:
        return f"{chosen['score']} chose {chosen['genotype']} among {count} networks."
    taus = {line["score"]: line["cifar10_test_tau"] for line in result["judged"]}
    finite = {name: tau for name, tau in taus.items() if not math.isnan(tau)}
    scores = [name for name in finite if name not in verdicts.BASELINES]
    simple = [name for name in finite if name in verdicts.BASELINES]
    if not scores:
        return f"no score has a rank correlation on these {count} networks."
    best = max(scores, key=lambda name: finite[name])
    # The variance of tau is at most 2 (1 - tau^2) / n (Kendall 1938).
    error = math.sqrt(2 * (1 - finite[best] ** 2) / count)
    baseline = ""
    if simple:
        rival = max(simple, key=lambda name: finite[name])
        baseline = f"; the best baseline, {rival}, has {finite[rival]:.2f}"
    return (
        f"{best} ranks {count} networks best, with Kendall's tau {finite[best]:.2f} to the test "
        f"accuracy on CIFAR-10 (standard error at most {error:.2f}){baseline}."
    )


def _format_mean(mean: float, deviation: float) -> str:
    return f"{mean:.2f}" if math.isnan(deviation) else f"{mean:.2f} ± {deviation:.2f}"
