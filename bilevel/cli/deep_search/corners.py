"""``bilevel search-skips`` and ``search-own``: search spaces whose networks are their corners.

One compiled program trains all networks from scratch. In the space of Zhu et al. (2022) all seeds
are searched side by side; networks of one activation without skips are trained too, and as many
random ones as the gradients of the search could train. ``--strategy eigen-nas`` does not search. It
ranks random architectures by the smallest eigenvalue of their infinite kernel (Algorithm 1 there),
and trains the best and as many random ones.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ntk
from bilevel import strategies
from bilevel.cli.deep_search import run
from bilevel.cli.runtime.command_run import Result
from bilevel.contracts import Pytree
from bilevel.discretize import diagnostics
from bilevel.internal.import_function import called
from bilevel.nets import training
from bilevel.nets.evaluation import Part, error_rates
from bilevel.nets.fitting import default_rate
from bilevel.nets.several import NetworkToTrain, Row, Scores, by_network
from bilevel.spaces import Space
from bilevel.spaces.skips import SkipArchitecture, SkipSpace, skip_space
from bilevel.spaces.targets import cross_entropy_problem
from bilevel.strategies.train_free import EigenNAS, eigen_nas

_KERNEL_ROWS = 100  # rows of the kernel for the smallest eigenvalue: a second for ten networks
_KERNEL_NOTE = "λ_min: of the infinite-width NTK of {} training rows, in NTK parametrization"


class _CornerRun(run.DeepSearchRun):
    """A space whose networks are trained from scratch at its corners."""

    def facts(self, row: NetworkToTrain, corner: Pytree) -> dict[str, Any]:
        """Return scores of a network besides its errors."""
        return {}

    def train_corners(self, given: list[Row], seed_keys: list[Any], **singles: Any) -> list[Row]:
        """Return scores of networks after SGD, by one program for all.

        Each seed has the keys of initial weights, of the order of rows, and of random networks.
        """
        config, space, rates = self.config, self.space, error_rates(self.space)
        init = jax.jit(space.init)

        @jax.jit
        def fit(key, w, corner, rows):
            steps = config.epochs * (len(rows[1]) // config.batch_size)
            first: Any = config.weight_rate or default_rate(space, w, corner, rows[0])
            cosine = optax.cosine_decay_schedule(1.0, steps)
            sgd = optax.sgd(lambda step: first * cosine(step), momentum=0.9)
            sizes = {"epochs": config.epochs, "batch_size": config.batch_size}
            lower = space.problem.lower
            return training.train(key, lower, corner, w, rows, optimizer=sgd, **sizes).last

        def train(row, checkpoint, show):
            corner, parts = space.one_hot(row.architecture), self.parts[row.seed]
            init_key, order_key, *_ = seed_keys[row.seed]
            w = fit(order_key, init(init_key, parts[0]), corner, parts[0])
            errors = rates(w, corner, parts, config.batch_size)
            show(config.epochs, float("nan"))
            return dict(zip(run.ERRORS, errors, strict=True)) | self.facts(row, corner)

        return self.train_networks(given, [keys[2:] for keys in seed_keys], train, **singles)


class _OwnRun(_CornerRun):
    """A space of the user."""

    sizes, rows_of_alpha = ("space",), "simplex"

    def prepare(self) -> None:
        self.name = self.config.space
        self.space = called("space", self.name, self.data.classes)
        if not isinstance(self.space, Space):
            kind = type(self.space).__name__
            raise ValueError(
                f"space: expected {self.name} to return a bilevel.spaces.Space, got a {kind}."
            )

    def train(self, found: list[Row]) -> list[Row]:
        config = self.config
        training_keys = [run.keys(config.seed, s)[3] for s in range(len(self.parts))]
        seed_keys = [jax.random.split(key, config.random + 2) for key in training_keys]
        return self.train_corners(found, seed_keys)

    def heatmaps(self, alpha: Pytree) -> list[run.Heatmap]:
        """Return a table for each leaf of alpha on simplices, with a row for each simplex."""
        heats: list[run.Heatmap] = []
        for leaf in diagnostics.simplices(self.space.sets, alpha):
            values = np.asarray(jnp.reshape(leaf, (-1, leaf.shape[-1])))
            count, choices = values.shape
            names = self.space.names if len(self.space.names) == choices else range(choices)
            heats.append(("α", values, [*map(str, names)], [*map(str, range(count))]))
        return heats

    def notes(self, result: dict[str, Any]) -> list[str]:
        return [
            "networks are trained from scratch, at the corners of the space that stand for them"
        ]


class _SkipRun(_CornerRun):
    """Activations and skip connections."""

    images = False
    name = "skips"
    sizes, rows_of_alpha = ("width", "depth"), "layer"
    columns: ClassVar = {"skips": ("skips", ".3g"), "min_eigenvalue": ("λ_min", ".3g")}
    space: SkipSpace

    def prepare(self) -> None:
        """Make the space, and the networks of one activation without skips."""
        config, self.copies = self.config, self.config.seeds
        self.kernel_rows = min(_KERNEL_ROWS, config.train)
        names = "activations", "depth", "width", "parametrization"
        space = skip_space(classes=self.data.classes, **{k: getattr(config, k) for k in names})
        layers, skips = (len(space.start()[k]) for k in ("activations", "skips"))
        self.singles = {s: SkipArchitecture((s,) * layers, (False,) * skips) for s in space.names}
        self.ends = "search", "eigen-nas", space.names[-1], "random"
        self.space = _in_bfloat16(space) if config.bfloat16 else space

    def search(self) -> list[run.SeedResult]:
        """Search for all seeds at once. The losses in a history are means over all seeds."""
        train, valid, _ = jax.tree.map(lambda *a: jnp.stack(a), *self.parts)
        seeds = self.copies
        key, weight_key, choice_key = jax.random.split(jax.random.key(self.config.seed), 3)
        w0 = jax.jit(jax.vmap(self.space.init))(jax.random.split(weight_key, seeds), train)
        self.strategy = self.make_strategy(self.config.weight_rate or self._mean_rate(w0, train))
        alpha = jax.tree.map(lambda a: jnp.stack([a] * seeds), self.space.start())
        copies = strategies.stack_strategies(self.strategy, seeds)
        self.bars.enter("search")
        place = self.folder / "checkpoint"
        search_result = self.search_from(copies, alpha, w0, (train, valid), key, place)
        if search_result.stopped:
            raise KeyboardInterrupt(search_result.stopped)
        alpha = search_result.alpha
        if self.strategy.draws:
            best = jax.jit(jax.vmap(self.choose_drawn_alpha))
            alpha = best(jax.random.split(choice_key, seeds), search_result.w, valid)
        history = {k: np.asarray(v) for k, v in search_result.history.items() if k != "alpha"}
        history = {k: v / seeds if k in ("lower", "value") else v for k, v in history.items()}

        def of_seed(i):
            path = jax.tree.map(lambda a: np.asarray(a[:, i]), search_result.history["alpha"])
            ours, w = jax.tree.map(lambda a: a[i], (alpha, search_result.w))
            return run.SeedResult(ours, w, history | {"alpha": path})

        return [of_seed(i) for i in range(seeds)]

    def _mean_rate(self, w: Pytree, train: Part) -> float:
        """Return the first step size of the weights by the tangent kernel, mean over the seeds."""
        space, alpha = self.space, self.space.start()
        inverses = jax.vmap(lambda w, x: 1 / default_rate(space, w, alpha, x))
        return 1 / float(jax.jit(inverses)(w, train[0]).mean())

    def train(self, found: list[Row]) -> list[Row]:
        config = self.config
        batches = config.epochs * (config.train // config.batch_size)
        # The number of networks that the gradients of the search could train.
        budget = 1 + round(config.steps * self.strategy.gradients / batches)
        return self.train_with_random(found, budget)

    def train_with_random(self, given: list[Row], budget: int) -> list[Row]:
        """Return scores of networks: ``given``, singles, and ``budget`` random ones a seed."""
        key = jax.random.fold_in(jax.random.key(self.config.seed), 1)
        draw_key, weight_key, order_key = jax.random.split(key, 3)
        keys = weight_key, order_key, *jax.random.split(draw_key, budget)
        by_seed = zip(*(jax.random.split(k, self.copies) for k in keys), strict=True)
        return self.train_corners(given, [*by_seed], **self.singles)

    def facts(self, row: NetworkToTrain, corner: Pytree) -> dict[str, Any]:
        """Return the skips, and the infinite NTK's smallest eigenvalue, in float64."""
        facts = {"skips": sum(row.architecture.skips)}
        if "random" in row.name:
            return facts
        rows = self.parts[row.seed][0][0][:_KERNEL_ROWS]
        with jax.enable_x64(True):
            x, corner = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), float), (rows, corner))
            # Corners of one simplex share a program.
            value = float(ntk.min_eigenvalue(self.space.kernel(corner, x).ntk))
        return facts | {"min_eigenvalue": value}

    def best_single(self, scores: Scores) -> str:
        return min(self.space.names, key=lambda name: np.mean(scores[name]["valid_error"]))

    def summary(self, networks: Scores) -> dict[str, Any]:
        result = super().summary(networks)
        skips = [float(f.alpha["skips"].sum()) for f in self.seed_results]
        result["scores"]["supernet"]["skips"] = skips
        best = self.best_single(networks)
        return result | {"best_single": best, "kernel_rows": self.kernel_rows}

    def heatmaps(self, alpha: Pytree) -> list[run.Heatmap]:
        """Return the probabilities of activations and the weights of skips, layer by layer."""
        mixtures, skips = (np.asarray(alpha[k]) for k in ("activations", "skips"))
        values = np.column_stack([mixtures, [np.nan, *skips]])
        layers = [str(layer) for layer in range(1, len(values) + 1)]
        return [("α and weight of the skip", values, [*self.space.names, "skip"], layers)]

    def notes(self, result: dict[str, Any]) -> list[str]:
        return [
            "networks are trained from scratch, those of one activation without skips; * best of "
            "them by validation; best of random: by validation, with as many networks as the "
            "search's gradients could train",
            _KERNEL_NOTE.format(self.kernel_rows),
        ]


class _EigenNasRun(_SkipRun):
    """A ranking by the smallest eigenvalue, without a search."""

    figure = ""  # nothing was searched

    def result(self) -> tuple[Result, dict[str, Any]]:
        self.parts, seeds = self._draw_splits(), range(self.config.seeds)
        self.bars.enter("eigenvalues")
        rankings = [self._ranking(seed) for seed in seeds]
        ranked = self.seconds()
        kept = [enumerate(ranking.architectures, 1) for ranking in rankings]
        corners = [{f"eigen-nas {i}": a for i, a in of_seed} for of_seed in kept]
        networks = self.train_with_random(corners, self.config.kept)
        scores = by_network(networks)
        own = [row for row in networks if row["network"].startswith("eigen-nas")]
        own.sort(key=lambda row: row["valid_error"])
        best = [next(row for row in own if row["seed"] == seed) for seed in seeds]
        result = {
            "space": self.name,
            "names": list(self.space.names),
            "architectures": [row["architecture"] for row in best],
            "scores": scores,
            "best_single": self.best_single(scores),
            "kernel_rows": self.kernel_rows,
            "seconds": {"search": ranked, "all": self.seconds()},
        }
        return result, {f"eigenvalues_{s}": f.eigenvalues for s, f in enumerate(rankings)}

    def _ranking(self, seed: int) -> EigenNAS:
        """Rank the pool by the kernel of the seed's first training rows, in float64."""
        config, x = self.config, self.parts[seed][0][0][: self.kernel_rows]
        draw = run.keys(config.seed, seed)[0]
        with jax.enable_x64(True):
            x = jnp.asarray(np.asarray(x), float)
            return eigen_nas(draw, self.space, x, pool=config.samples, keep=config.kept)

    def notes(self, result: dict[str, Any]) -> list[str]:
        kept, samples = self.config.kept, self.config.samples
        return [
            f"eigen-nas: the {kept} of {samples} random architectures with the largest λ_min, "
            f"trained from scratch; random: {kept} with any λ_min; best of: by validation",
            _KERNEL_NOTE.format(self.kernel_rows),
        ]


def _in_bfloat16(space: SkipSpace) -> SkipSpace:
    """Return the space with activations in bfloat16, for more than two classes."""

    def apply(w, alpha, x):
        half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (w, alpha, x))
        return space.apply(*half).astype(jnp.float32)

    return dataclasses.replace(space, apply=apply, problem=cross_entropy_problem(apply))


def skip_run(config: Any, *call: Any) -> _SkipRun:
    """Return the run of the strategy."""
    return (_EigenNasRun if config.strategy == "eigen-nas" else _SkipRun)(config, *call)
