"""``bilevel train RUN``: train the network that a search found, from scratch.

For every seed, the run trains the architecture found, a random one of the same size, and for cells
the best single operation. All seeds share their rows: those of the search for training, and test
rows that the search has not seen. The single operation is chosen by a shorter training of each on
four fifths of the training rows, by the error on the last fifth.
"""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console

from bilevel.cli import found
from bilevel.cli.deep_search.networks import (
    NetworkToTrain,
    augmentation,
    by_network,
    train_all,
)
from bilevel.cli.deep_search.report import compare_with_random
from bilevel.cli.deep_search.run import default_rate
from bilevel.cli.flags.datasets import ROWS
from bilevel.cli.runtime import memory, report
from bilevel.cli.runtime.command_run import CommandRun, Result
from bilevel.cli.runtime.data import Data
from bilevel.data import datasets
from bilevel.nets.evaluation import Part
from bilevel.nets.fitting import Fitted, fit
from bilevel.nets.inputs import image_scale, row_scale, with_scale
from bilevel.nets.training import TrainableNetwork
from bilevel.plots import plots
from bilevel.runs.fingerprint import digest
from bilevel.spaces.darts.supernet import weight_count
from bilevel.spaces.trained import Blueprint, random_of_same_size, save_network, single_operations
from bilevel.strategies import darts_sgd

_CELL_RATE = 0.025  # learning rate of networks of cells, as in DARTS
_EPOCHS, _STEPS = 30, 1000  # at least, by default
_SHORTER = 5  # single operations are compared after this fraction of the epochs: they are many
_NEAR = 0.8  # of a constant prediction's error, and above: nothing was learned
_CURVES = "losses", "errors"
_COLUMNS: report.Columns = {
    "test_error": ("test", ".1f"),
    "train_loss": ("train loss", ".3g"),
    "parameters": ("parameters", ",.0f"),
}


class _TrainRun(CommandRun):
    """Trainings of the network found and of its rivals."""

    keeps = "networks so far are saved"
    figure = "learning.png"

    def opened(self, config: Any) -> tuple[Any, Data]:
        """Return the flags and the data, by default those of the search."""
        self.searched = config.search_result()
        return config, found.open_data(config, self.searched)

    def __init__(self, config: Any):
        super().__init__(config)
        self.number = found.best_search(self.searched) if config.search is None else config.search
        self.rows = found.draw_rows(config, self.searched, self.data, self.number)
        classes = len(self.rows.classes)
        self.found = found.read_found(config, self.searched, classes, self.number)
        x, vectors = self.rows.train[0], self.found.blueprint.space in found.VECTORS
        self.scale = row_scale(x) if vectors else image_scale(x, self.found.pixels)
        self.programs: dict[str, tuple[TrainableNetwork, optax.GradientTransformation]] = {}
        self.per_epoch = len(self.rows.train[1]) // config.batch_size
        self.epochs = config.epochs or max(_EPOCHS, -(-_STEPS // self.per_epoch))

    def arrays(self) -> list[memory.Parts]:
        """Return the shapes alive together when a network is trained."""
        network, _ = self._program(self.found.blueprint, self.epochs)
        key, shape = jax.eval_shape(jax.random.key, 0), self.rows.train[0].shape[1:]
        w, averages = jax.eval_shape(lambda key: network.init(key, shape), key)
        size = self.config.batch_size
        batch = memory.shape(size, *shape), memory.shape(size, dtype="int32")
        kept = memory.kept_for_backward(network.loss, w, averages, batch, key, has_aux=True)
        return [{("batch_size",): ([w] * 4, kept)}]

    def result(self) -> tuple[Result, dict[str, Any]]:
        config, blueprint = self.config, self.found.blueprint
        self.bars.enter("training")
        parts = self.rows.train, self.rows.test
        rows = self._train(self.folder, self._networks(), *parts, self.epochs)
        rows += self._best_single() if config.single else []
        curves = {
            name: {key: [row[key] for row in rows if row["network"] == name] for key in _CURVES}
            for name in dict.fromkeys(row["network"] for row in rows)
        }
        files = [str(_file(self.folder, seed)) for seed in range(config.seeds)]
        result = {
            "classes": list(self.rows.classes),
            "rows": {k: len(getattr(self.rows, k)[1]) for k in ("train", "test")},
            "constant_error": self._constant_error(),
            "space": blueprint.space,
            "search": self.number,
            "architectures": [blueprint.architecture],
            "mixture": self.found.mixture and self.found.mixture.architecture,
            "scores": by_network(rows),
            "curves": curves,
            "files": files,
            "seconds": {
                "network": float(np.mean([row["seconds"] for row in rows])),
                "all": self.seconds(),
            },
        }
        arrays = {
            f"{key}_{name.replace(' ', '_')}": np.array(values)
            for name, curve in curves.items()
            for key, values in curve.items()
        }
        return result, arrays

    def save_figures(self, result: Result) -> None:
        def draw(figure):
            plots.learning_curves(result["curves"], figure.subplots(1, 2))

        report.save_figure(self.folder / self.figure, (8, 3.6), draw)

    def show(self, console: Console, result: Result) -> tuple[str, str]:
        config, rows, scores = self.config, result["rows"], result["scores"]
        spread = f", mean ± s.e. of {config.seeds} seeds" if config.seeds > 1 else ""
        title = (
            f"{self.data.source}: {rows['train']} training, {rows['test']} test rows, "
            f"{self.epochs} epochs; test errors in %{spread}"
        )
        console.print(report.score_table(title, scores, _COLUMNS))
        console.print(f"search: {result['architectures'][0]}", soft_wrap=True)
        if "mixture" in scores:
            console.print(f"mixture: at the α found, {result['mixture']}")
        if "random" in scores:
            console.print(
                f"random: of {config.random} architectures drawn from the space, a new one for "
                "each seed, the nearest in number of weights"
            )
        if any(name.startswith("only ") for name in scores):
            console.print(
                "only: the single operation on all edges that is best on a fifth of the training "
                "rows, after a fifth of the epochs"
            )
        constant = result["constant_error"]
        console.print(f"always the most frequent class: {100 * constant:.1f} % wrong")
        if np.mean(scores["search"]["test_error"]) > _NEAR * constant:
            console.print(
                "The network is hardly better than a constant. Train longer (--epochs) or on more "
                "rows (--train), or check the labels."
            )
        console.print("to predict in Python:")
        for line in loading_lines(result):
            console.print(f"    {line}", soft_wrap=True)
        seconds = result["seconds"]
        times = f"{seconds['all']:.0f} s, of which one network {seconds['network']:.0f} s"
        return compare_with_random(scores, rows["test"]), times

    def _constant_error(self) -> float:
        """Return the test error of always predicting the most frequent training class."""
        constant = np.bincount(self.rows.train[1]).argmax()
        return float(np.mean(self.rows.test[1] != constant))

    # ------------------------------------------------------------------------- networks

    def _networks(self) -> list[NetworkToTrain]:
        """Return the networks found, then random ones; seeds of one kind share a program."""
        config, blueprint = self.config, self.found.blueprint
        names, own, key = self.found.names, self.found.own, jax.random.key(config.seed)
        seeds = range(config.seeds)
        networks = [NetworkToTrain("search", seed, blueprint) for seed in seeds]
        if self.found.mixture is not None:
            networks += [NetworkToTrain("mixture", seed, self.found.mixture) for seed in seeds]
        for seed in seeds if config.random else ():
            draw = jax.random.fold_in(jax.random.fold_in(key, 1), seed)
            drawn = random_of_same_size(draw, blueprint, names, config.random, own)
            networks += [NetworkToTrain("random", seed, drawn)] if drawn else []
        return networks

    def _best_single(self) -> list[dict[str, Any]]:
        """Return the scores of the single operation that is best on a fifth of the rows."""
        singles = single_operations(self.found.blueprint, self.found.names)
        if not singles:
            return []
        x, y = self.rows.train
        best = next(iter(singles))
        if len(singles) > 1:
            self.bars.enter("single operations")
            valid = max(1, len(y) // 5)
            key = jax.random.fold_in(jax.random.key(self.config.seed), 2)
            fitted, judged = datasets.stratified_split(key, y, (len(y) - valid, valid))
            networks = [NetworkToTrain(name, 0, b) for name, b in singles.items()]
            parts = (x[fitted], y[fitted]), (x[judged], y[judged])
            epochs = max(1, self.epochs // _SHORTER)
            rows = self._train(self.folder / "single", networks, *parts, epochs)
            best = min(rows, key=lambda row: row["test_error"])["network"]
        self.bars.enter("best single operation")
        seeds = range(self.config.seeds)
        networks = [NetworkToTrain(f"only {best}", seed, singles[best]) for seed in seeds]
        return self._train(self.folder / "only", networks, (x, y), self.rows.test, self.epochs)

    def _train(
        self,
        folder: pathlib.Path,
        networks: list[NetworkToTrain],
        train: Part,
        test: Part,
        epochs: int,
    ) -> list[dict[str, Any]]:
        """Return the scores of all networks, from the journal in ``folder`` if it has them."""
        config = self.config

        def one(row, checkpoint, show):
            network, optimizer = self._program(row.architecture, epochs)
            fitted = fit(
                jax.random.fold_in(jax.random.key(config.seed), 3 + row.seed),
                network,
                train,
                test=test,
                optimizer=optimizer,
                epochs=epochs,
                batch_size=config.batch_size,
                checkpoint=checkpoint,
                progress=False,
                callback=show,
            )
            if row.name == "search":
                self._save(row, fitted)
            return {
                "train_loss": float(fitted.losses[-1]),
                "test_error": float(fitted.errors[-1]),
                "parameters": weight_count(fitted.w),
                **{key: getattr(fitted, key).tolist() for key in _CURVES},
            }

        return train_all(folder, networks, epochs, one, data=digest((train, test)))

    def _program(
        self, blueprint: Blueprint, epochs: int
    ) -> tuple[TrainableNetwork, optax.GradientTransformation]:
        """Return a network and its optimizer: the same for all seeds, which share a program."""
        if (name := f"{blueprint}, {epochs} epochs") not in self.programs:
            config = self.config
            augment = augmentation(config.crop_and_flip, config.cutout)
            network = with_scale(blueprint.network(self.found.own), self.scale, augment)
            steps = epochs * self.per_epoch
            if blueprint.space in found.CELLS:
                rate: Any = config.weight_rate or _CELL_RATE
                optimizer = darts_sgd(optax.cosine_decay_schedule(rate, steps))
            else:
                rate = config.weight_rate or self._default_rate(network)
                optimizer = optax.sgd(optax.cosine_decay_schedule(rate, steps), momentum=0.9)
            self.programs[name] = network, optimizer
        return self.programs[name]

    def _default_rate(self, network: TrainableNetwork) -> float:
        x = self.rows.train[0]
        w, averages = network.init(jax.random.key(self.config.seed), x.shape[1:])
        return float(default_rate(network, w, averages, jnp.asarray(x[:32])))  # type: ignore[arg-type]

    def _save(self, row: NetworkToTrain, fitted: Fitted) -> None:
        """Save trained parameters, with all that predictions of new rows need."""
        shape, classes = self.rows.train[0].shape[1:], self.rows.classes
        where = _file(self.folder, row.seed)
        parameters = fitted.w, fitted.averages
        save_network(where, row.architecture, self.scale, shape, classes, *parameters)


def _file(folder: pathlib.Path, seed: int) -> pathlib.Path:
    return folder / f"network-{seed + 1}.npz"


def loading_lines(result: dict[str, Any]) -> list[str]:
    """Return the lines of Python that load the first network and predict test rows."""
    path, space, data = result["files"][0], result["space"], result["data"]
    lines, own, key = ["import bilevel"], "", ""
    if ":" in space:
        module, _, function = space.partition(":")
        lines.append(f"from {module} import {function}")
        own = f", {function}({len(result['classes'])})"
    if data.get("seed"):
        lines.insert(0, "import jax")
        key = f", jax.random.key({data['seed']})"
    # The run has drawn its test rows from all rows, if the dataset is not split officially.
    whole = not ROWS.get(data["source"], (0, 1))[1]
    note = "new ones: the run was trained on some of these" if whole else "new ones"
    return [
        *lines,
        f"network = bilevel.spaces.load_network({path!r}{own})",
        f"images = bilevel.data.load({data['source']!r}{key}).x_test  # or {note}",
        "labels = network.predict(images)",
        "print([network.classes[label] for label in labels[:10]])",
    ]
