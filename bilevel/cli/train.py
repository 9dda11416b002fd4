"""``bilevel train RUN``: train the network that a search found, from scratch.

For every seed, the run trains the architecture found, a random one of the same size, and for cells
the best single operation. All seeds share their rows: those of the search for training, and test
rows that the search has not seen.
"""

import functools
from typing import Any

import jax
import numpy as np
import optax

from bilevel.cli.deep_search import run
from bilevel.cli.flags.datasets import CLASSES, ROWS, SHAPES, is_own
from bilevel.cli.runtime import memory, report
from bilevel.cli.runtime.command_run import CommandRun, Result
from bilevel.cli.runtime.data import Data, load_builtin, own_data
from bilevel.data import datasets
from bilevel.data.splits import draw_rows, joined
from bilevel.internal.import_function import called
from bilevel.nets.evaluation import Part
from bilevel.nets.fitting import default_rate, fit
from bilevel.nets.images import augmentation
from bilevel.nets.inputs import image_scale, row_scale, with_scale
from bilevel.nets.several import NetworkToTrain, by_network, train_all
from bilevel.nets.training import TrainableNetwork
from bilevel.plots import plots
from bilevel.runs.fingerprint import digest
from bilevel.spaces import Space
from bilevel.spaces.darts.supernet import weight_count
from bilevel.spaces.space import finite_weights
from bilevel.spaces.trained import Blueprint, random_of_same_size, save_network, single_operations
from bilevel.strategies import darts_sgd

_CELLS = "darts", "nasbench201"
_VECTORS = "activations", "skips"  # spaces of networks of vectors of unit norm
_CELL_RATE = 0.025  # learning rate of networks of cells, as in DARTS
_EPOCHS, _STEPS = 30, 1000  # at least, by default
_SHORTER = 5  # single operations are compared after this fraction of the epochs: they are many
_NEAR = 0.8  # of a constant prediction's error, and above: nothing was learned
_CURVES = "losses", "errors"
_FILE = "network-{}.npz"
_COLUMNS: report.Columns = {
    "test_error": ("test", ".1f"),
    "train_loss": ("train loss", ".3g"),
    "parameters": ("parameters", ",.0f"),
}
_Program = tuple[TrainableNetwork, optax.GradientTransformation]


class _TrainRun(CommandRun):
    """Trainings of the network found and of its rivals."""

    keeps = "networks so far are saved"
    figure, size = "learning.png", (8, 3.6)

    blueprint: Blueprint  # of the network found
    mixture: Blueprint | None = None  # at the alpha found, if this is a network of the same size
    own: Space | None = None  # a user-defined space

    def prepare(self) -> None:
        config, scores = self.config, self.searched["scores"]
        errors = scores[run.name_of_found(scores) or "supernet"]["valid_error"]
        self.number = int(np.argmin(errors)) if config.search is None else config.search
        self.train_rows, test, self.classes = self._rows()
        self.test_rows = test[0][: config.test], test[1][: config.test]
        count = len(self.train_rows[1])
        config.check_at_most("batch_size", count, f"the {count} training rows")
        self._read_network()
        x, pixels = self.train_rows[0], self.before.get("pixels")
        self.scale = row_scale(x) if self.space in _VECTORS else image_scale(x, pixels)
        self.programs: dict[str, _Program] = {}
        self.per_epoch = count // config.batch_size
        self.epochs = config.epochs or max(_EPOCHS, -(-_STEPS // self.per_epoch))

    def opened(self, config: Any) -> tuple[Any, Data]:
        """Return the flags and the rows, by default those of the search, with its test rows."""
        self.searched = config.search_result()
        self.before = self.searched["config"]
        self.names = tuple(self.searched["names"])  # candidates
        self.space = self.searched.get("space", "activations")
        source = config.data or self.before["data"]
        if not is_own(source):
            return config, Data(source, SHAPES[source], CLASSES)
        same = source == self.before["data"]
        seed = self.before["seed"] if same else config.seed
        data = own_data(source, seed, images=self.space not in _VECTORS, labels=True)
        if same and (digest := self.searched.get("data", {}).get("digest")) != data.digest:
            raise ValueError(
                f"data: expected the rows of the search, {digest}, got {data.digest} in {source}; "
                "the search may have seen their test rows."
            )
        return config, data

    def _rows(self) -> tuple[Part, Part, tuple[str, ...]]:
        """Return rows for training, test rows that the search has not seen, and the classes."""
        config, before, data = self.config, self.before, self.data
        default = before["train"] + before["valid"]
        if data.source == before["data"] and not ROWS.get(data.source, (0, 1))[1]:
            # The search has drawn its test rows from all rows.
            if config.train not in (None, default):
                raise ValueError(
                    f"train: expected the {default} rows of the search, since {data.source} has no "
                    f"separate test rows, got {config.train}."
                )
            draws = jax.random.split(jax.random.key(before["seed"]), before["seeds"])
            sizes = {name: before[name] for name in ("train", "valid", "test")}
            ((train, valid, test),) = data.draw([draws[self.number]], **sizes)
            return joined(train, valid), test, datasets.load(data.source).classes
        wanted = None if config.train == "all" else config.train or default
        loaded = data.dataset or load_builtin(data.source, wanted)
        train, test = (loaded.x_train, loaded.y_train), (loaded.x_test, loaded.y_test)
        if loaded.x_valid is not None:
            train = joined(train, (loaded.x_valid, loaded.y_valid))
        total = len(train[1])
        count = total if config.train == "all" else config.train or min(default, total)
        if count > total:
            raise ValueError(f"train: expected at most the {total} of {data.source}, got {count}.")
        train_key, test_key = jax.random.split(jax.random.key(config.seed))
        if data.dataset is not None:  # a folder's rows may be sorted by class
            test = draw_rows(test_key, test, min(config.test, len(test[1])))
        return draw_rows(train_key, train, count), test, loaded.classes

    def _read_network(self) -> None:
        """Read the architecture found, with the sizes of the network to train."""
        config, before, result, space = self.config, self.before, self.searched, self.space
        alpha, sizes = None, {"classes": len(self.classes)}
        if space == "activations":
            sizes |= {k: before[k] for k in ("activations", "width")}
            names, weights = self.names, np.array(result["alpha"][self.number], float)
            weights = finite_weights("alpha", weights, (len(names),))
            architecture = names[int(weights.argmax())]
            alpha = [np.eye(len(names))[weights.argmax()].tolist()]
            mixed = report.mixture(weights, names)
            self.mixture = Blueprint(space, mixed, sizes, [weights.tolist()])
        else:
            architecture = result["architectures"][self.number]
        if space in _CELLS:
            for name in ("cells", "channels"):
                sizes[name] = getattr(config, name) or before.get(f"final_{name}") or before[name]
            sizes["bfloat16"] = before["bfloat16"]
        elif space == "skips":
            sizes |= {k: before[k] for k in ("activations", "depth", "width", "parametrization")}
        elif space != "activations":
            alpha = self._read_own(architecture)
        self.blueprint = Blueprint(space, architecture, sizes, alpha)

    def _read_own(self, expected: str) -> list[Any]:
        """Read a user-defined space; return the leaves of the vertex of its architecture."""
        self.own = space = called("space", self.space, len(self.classes))
        leaves, structure = jax.tree_util.tree_flatten_with_path({"alpha": space.start()})
        with np.load(self.config.run / "arrays.npz", allow_pickle=False) as arrays:
            values = [arrays.get(f"{run.name_in_arrays(path)}_{self.number}") for path, _ in leaves]
        architecture = None
        if [np.shape(v) for v in values] == [np.shape(like) for _, like in leaves]:
            architecture = space.discretize(jax.tree.unflatten(structure, values)["alpha"])
        if str(architecture) != expected:
            raise ValueError(
                f"space: expected {self.space} as in the run, which finds {expected!r}, got "
                f"{str(architecture)!r}; the space has changed."
            )
        return [np.asarray(a).tolist() for a in jax.tree.leaves(space.one_hot(architecture))]

    def arrays(self) -> list[memory.Parts]:
        """Return the shapes alive together when a network is trained."""
        network, _ = self._program(self.blueprint, self.epochs)
        key, shape = jax.eval_shape(jax.random.key, 0), self.train_rows[0].shape[1:]
        w, averages = jax.eval_shape(lambda key: network.init(key, shape), key)
        size = self.config.batch_size
        batch = memory.shape(size, *shape), memory.shape(size, dtype="int32")
        kept = memory.kept_for_backward(network.loss, w, averages, batch, key, has_aux=True)
        return [{("batch_size",): ([w] * 4, kept)}]

    def result(self) -> tuple[Result, dict[str, Any]]:
        train, test = self.train_rows, self.test_rows
        self.bars.enter("training")
        rows = self._train("", self._networks(), (train, test), self.epochs)
        rows += self._best_single() if self.config.single else []
        curves = {
            name: {key: [row[key] for row in rows if row["network"] == name] for key in _CURVES}
            for name in dict.fromkeys(row["network"] for row in rows)
        }
        result = {
            "classes": list(self.classes),
            "rows": {"train": len(train[1]), "test": len(test[1])},
            # Of always predicting the most frequent training class.
            "constant_error": float(np.mean(test[1] != np.bincount(train[1]).argmax())),
            "space": self.space,
            "search": self.number,
            "architectures": [self.blueprint.architecture],
            "mixture": self.mixture and self.mixture.architecture,
            "scores": by_network(rows),
            "curves": curves,
            "files": [str(self.folder / _FILE.format(i + 1)) for i in range(self.config.seeds)],
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

    def draw(self, figure: Any, result: Result) -> None:
        plots.learning_curves(result["curves"], figure.subplots(1, 2))

    def show(self, result: Result) -> tuple[str, str]:
        config, rows, scores = self.config, result["rows"], result["scores"]
        spread = f", mean ± s.e. of {config.seeds} seeds" if config.seeds > 1 else ""
        title = (
            f"{self.data.source}: {rows['train']} training, {rows['test']} test rows, "
            f"{self.epochs} epochs; test errors in %{spread}"
        )
        self.console.print(report.score_table(title, scores, _COLUMNS))
        self.console.print(f"search: {result['architectures'][0]}", soft_wrap=True)
        if "mixture" in scores:
            self.console.print(f"mixture: at the α found, {result['mixture']}")
        if "random" in scores:
            self.console.print(
                f"random: of {config.random} architectures drawn from the space, a new one for "
                "each seed, the nearest in number of weights"
            )
        if any(name.startswith("only ") for name in scores):
            self.console.print(
                "only: the single operation on all edges that is best on a fifth of the training "
                "rows, after a fifth of the epochs"
            )
        constant = result["constant_error"]
        self.console.print(f"always the most frequent class: {100 * constant:.1f} % wrong")
        if np.mean(scores["search"]["test_error"]) > _NEAR * constant:
            self.console.print(
                "The network is hardly better than a constant. Train longer (--epochs) or on more "
                "rows (--train), or check the labels."
            )
        self.console.print("to predict in Python:")
        for line in loading_lines(result):
            self.console.print(f"    {line}", soft_wrap=True)
        seconds = result["seconds"]
        times = f"{seconds['all']:.0f} s, of which one network {seconds['network']:.0f} s"
        return run.compare_with_random(scores, rows["test"]), times

    def _networks(self) -> list[NetworkToTrain]:
        """Return the networks found, then random ones; seeds of one kind share a program."""
        config, names, seeds = self.config, self.names, range(self.config.seeds)
        networks = [NetworkToTrain("search", seed, self.blueprint) for seed in seeds]
        if self.mixture is not None:
            networks += [NetworkToTrain("mixture", seed, self.mixture) for seed in seeds]
        key = jax.random.fold_in(jax.random.key(config.seed), 1)
        for seed in seeds if config.random else ():
            draw = jax.random.fold_in(key, seed)
            drawn = random_of_same_size(draw, self.blueprint, names, config.random, self.own)
            networks += [NetworkToTrain("random", seed, drawn)] if drawn else []
        return networks

    def _best_single(self) -> list[dict[str, Any]]:
        """Return the scores of the single operation that is best on a fifth of the rows."""
        singles = single_operations(self.blueprint, self.names)
        if not singles:
            return []
        x, y = self.train_rows
        best = next(iter(singles))
        if len(singles) > 1:
            self.bars.enter("single operations")
            valid = max(1, len(y) // 5)
            key = jax.random.fold_in(jax.random.key(self.config.seed), 2)
            fitted, judged = datasets.stratified_split(key, y, (len(y) - valid, valid))
            networks = [NetworkToTrain(name, 0, b) for name, b in singles.items()]
            parts = (x[fitted], y[fitted]), (x[judged], y[judged])
            rows = self._train("single", networks, parts, max(1, self.epochs // _SHORTER))
            best = min(rows, key=lambda row: row["test_error"])["network"]
        self.bars.enter("best single operation")
        seeds = range(self.config.seeds)
        networks = [NetworkToTrain(f"only {best}", seed, singles[best]) for seed in seeds]
        return self._train("only", networks, (self.train_rows, self.test_rows), self.epochs)

    def _train(
        self, folder: str, networks: list[NetworkToTrain], parts: tuple[Part, Part], epochs: int
    ) -> list[dict[str, Any]]:
        """Return the scores of all networks, from the journal in ``folder`` if it has them."""
        config, (train, test) = self.config, parts

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
                facts = row.architecture, self.scale, train[0].shape[1:], self.classes
                file = self.folder / _FILE.format(row.seed + 1)
                save_network(file, *facts, fitted.w, fitted.averages)
            return {
                "train_loss": float(fitted.losses[-1]),
                "test_error": float(fitted.errors[-1]),
                "parameters": weight_count(fitted.w),
                **{key: getattr(fitted, key).tolist() for key in _CURVES},
            }

        return train_all(self.folder / folder, networks, epochs, one, data=digest(parts))

    def _program(self, blueprint: Blueprint, epochs: int) -> _Program:
        """Return a network and its optimizer: the same for all seeds, which share a program."""
        if (name := f"{blueprint}, {epochs} epochs") not in self.programs:
            config, x = self.config, self.train_rows[0]
            augment = augmentation(config.crop_and_flip, config.cutout)
            network: Any = with_scale(blueprint.network(self.own), self.scale, augment)
            rate: Any = config.weight_rate
            sgd: Any = functools.partial(optax.sgd, momentum=0.9)
            if self.space in _CELLS:
                rate, sgd = rate or _CELL_RATE, darts_sgd
            elif not rate:
                w, averages = network.init(jax.random.key(config.seed), x.shape[1:])
                rate = float(default_rate(network, w, averages, x))
            schedule = optax.cosine_decay_schedule(rate, epochs * self.per_epoch)
            self.programs[name] = network, sgd(schedule)
        return self.programs[name]


def loading_lines(result: dict[str, Any]) -> list[str]:
    """Return the lines of Python that load the first network and predict test rows."""
    path, data = result["files"][0], result["data"]
    module, _, function = result["space"].partition(":")  # a user-defined space
    own = f", {function}({len(result['classes'])})" if function else ""
    key = f", jax.random.key({data['seed']})" if data.get("seed") else ""
    # The run has drawn its test rows from all rows, if the dataset is not split officially.
    whole = not ROWS.get(data["source"], (0, 1))[1]
    note = "new ones: the run was trained on some of these" if whole else "new ones"
    return [
        *(["import jax"] if key else []),
        "import bilevel",
        *([f"from {module} import {function}"] if function else []),
        f"network = bilevel.spaces.load_network({path!r}{own})",
        f"images = bilevel.data.load({data['source']!r}{key}).x_test  # or {note}",
        "labels = network.predict(images)",
        "print([network.classes[label] for label in labels[:10]])",
    ]
