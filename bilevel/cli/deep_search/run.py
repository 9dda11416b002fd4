"""The common run of all searches with shared weights, from the flags of a command to its table.

For every seed, a run searches by a strategy and discretizes. Then it trains the network of this
architecture from scratch, next to others, or looks up accuracies in the table of the space.
"""

import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bilevel import strategies
from bilevel.cli.runtime import memory, report
from bilevel.cli.runtime.command_run import CommandRun, Result
from bilevel.contracts import Pytree
from bilevel.discretize import diagnostics
from bilevel.nets.evaluation import Part, compare_errors, error_rates
from bilevel.nets.fitting import default_rate
from bilevel.nets.images import unit_images
from bilevel.nets.several import NetworkToTrain, Row, Scores, by_network, train_all
from bilevel.outer_loop.search_result import SearchResult
from bilevel.plots import plots
from bilevel.problem.problem import split_losses
from bilevel.spaces import Space
from bilevel.spaces.activations import unit_inputs
from bilevel.strategies import Strategy

ERRORS = {"train_error": "train", "valid_error": "valid", "test_error": "test"}
"""Keys of results, and headings of tables, which show them in reverse order."""

_UNROLLED = 5  # steps of the strategy of that name

STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "darts-first": strategies.darts,
    "darts-second": functools.partial(strategies.darts, order=2),
    "darts-second-difference": functools.partial(strategies.darts, order=2, radius=0.01),
    "gaea": strategies.gaea,
    "gaea-single-level": functools.partial(strategies.gaea, on_training_rows=True),
    "random": strategies.weight_sharing,
    "joint": strategies.joint,
    "unrolled": functools.partial(strategies.unrolled, steps=_UNROLLED),
}
# The rate of alpha times the steps, for exponentiated gradient, and for DARTS's Adam on CIFAR-10.
_GAEA_TRAVEL, _ADAM_TRAVEL = 100.0, 6.0


Heatmap = tuple[str, np.ndarray, list[str], list[str]]
"""A title, values from 0 to 1, and the names of columns and rows, for :func:`plots.heatmap`."""


class SeedResult(NamedTuple):
    """The search of one seed."""

    alpha: Pytree  # after the choice among random architectures, if the strategy draws them
    w: Pytree
    history: dict[str, Any]  # name -> [steps, ...]


class DeepSearchRun(CommandRun):
    """A search with shared weights. Subclasses add the parts of one space."""

    images = True
    keeps = "searches and networks so far are saved"
    trainable = True
    name: str  # of the space, in `result.json`
    rows_of_alpha: str  # in the figure
    sizes: tuple[str, ...]  # flags that set the number of weights
    columns: ClassVar[dict[str, tuple[str, str]]] = {}  # of the table: heading and format by key
    ends: tuple[str, ...] = "search", "random"  # networks above a rule in the table
    copies = 1  # searches side by side
    weight_optimizer: Callable[..., optax.GradientTransformation] = staticmethod(
        functools.partial(optax.sgd, momentum=0.9)
    )

    space: Space  # set by `prepare`

    # Set when the run begins.
    parts: list[list[Part]]  # of every seed: training, validation, test rows
    strategy: Strategy
    seed_results: list[SeedResult]

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of an input."""
        return self.data.image_shape(self.config.pixels) if self.images else (self.data.inputs,)

    def unit(self, *xs: Any) -> Any:
        """Return the inputs in the form of the space, normalised by the first of ``xs``."""
        return unit_images(*xs, pixels=self.config.pixels) if self.images else unit_inputs(*xs)

    def weight_rate(self) -> float:
        """Return the first learning rate of the weights, by default that of the first seed."""
        if self.config.weight_rate:
            return self.config.weight_rate
        train = self.parts[0][0]
        w = jax.jit(self.space.init)(keys(self.config.seed, 0)[1], train)
        return float(default_rate(self.space, w, self.space.start(), train[0]))

    def train(self, found: list[Row]) -> list[Row]:
        """Return scores of networks trained from scratch: those ``found`` by seed, and others."""
        return []

    def heatmaps(self, alpha: Pytree) -> list[Heatmap]:
        """Return alpha of the first seed as tables."""
        raise NotImplementedError

    def table(self, result: dict[str, Any]) -> Any:
        """Return the table for the screen: the test error decides, so it is first."""
        errors = {key: (heading, ".1f") for key, heading in reversed(ERRORS.items())}
        title, best = report.table_title(result["config"]), result.get("best_single")
        columns = errors | self.columns
        return report.score_table(title, result["scores"], columns, ends=self.ends, starred=best)

    def notes(self, result: dict[str, Any]) -> list[str]:
        """Return the lines below the table."""
        raise NotImplementedError

    def result_sentence(self, result: dict[str, Any]) -> str:
        """Return the result in one sentence: the search compared with its baseline."""
        return compare_with_random(result["scores"], len(self.parts[0][2][1]))

    def result(self) -> tuple[Result, dict[str, Any]]:
        """Search, train, and return the entries that all spaces have."""
        self.parts = self._draw_splits()
        seed_results = self.seed_results = self.search()
        searched = self.seconds()
        rows = self.train([{"search": self.space.discretize(f.alpha)} for f in seed_results])
        result = self.summary(by_network(rows) if rows else {})
        result["seconds"] = {"search": searched}
        if rows:
            result["seconds"]["network"] = float(np.mean([row["seconds"] for row in rows]))
        result["seconds"]["all"] = self.seconds()
        arrays: dict[str, np.ndarray] = {}
        for seed, of_seed in enumerate(seed_results):
            trees = {"alpha": of_seed.alpha, "history": of_seed.history}
            for path, leaf in jax.tree_util.tree_leaves_with_path(trees):
                arrays[f"{name_in_arrays(path)}_{seed}"] = np.asarray(leaf)
        return result, arrays

    def draw(self, figure: Any, result: Result) -> None:
        """Draw the first seed's alpha, and the losses of all seeds."""
        heats = self.heatmaps(self.seed_results[0].alpha)
        places = [f"alpha {i}" for i in range(len(heats))]
        first = ", of the first seed" if len(self.seed_results) > 1 else ""
        figure.set_size_inches(5 * len(heats) + 5, 4.8)
        mosaic = [[*places, "outer"], [*places, "lower"]]
        axes = figure.subplot_mosaic(mosaic, width_ratios=(*[4] * len(places), 3))
        for place, (title, values, columns, rows) in zip(places, heats, strict=True):
            ax = plots.heatmap(values, columns, rows, axes[place])
            ax.set(title=title + first, ylabel=self.rows_of_alpha if place == places[0] else "")
        histories = [f.history for f in self.seed_results]
        outer, lower = plots.losses(histories, (axes["outer"], axes["lower"]))
        outer.set_ylabel(f"{result['alpha_rows']} loss (nats)\nof α's minibatch")
        lower.set_ylabel("training loss (nats)\nof the weights' minibatch")
        figure.suptitle(report.figure_title(result["config"]))

    def show(self, result: Result) -> tuple[str, str]:
        """Print the table, the architectures found, and notes."""
        self.console.print(self.table(result))
        for seed, architecture in enumerate(result["architectures"]):
            named = f"seed {seed}: " if self.config.seeds > 1 else "found: "
            self.console.print(named + architecture, soft_wrap=True)  # to be copied
        if "curvature" in result:
            entropy, curvature = (np.array(result[k]) for k in ("entropy", "curvature"))
            self.console.print(
                f"entropy of α, mean over simplices: {report.cell(entropy, '.2f')} (maximum "
                f"{np.log(len(result['names'])):.2f})"
            )
            self.console.print(
                "largest eigenvalue of the validation loss's Hessian in α, of one batch: "
                f"{report.cell(curvature, '.3g')}"
            )
            self.console.print(result["known_error"])
        for note in self.notes(result):
            self.console.print(note)
        seconds = result["seconds"]
        search = f"{self.config.strategy} {seconds['search']:.0f} s"
        return self.result_sentence(result), f"{seconds['all']:.0f} s, of which {search}"

    def arrays(self) -> list[memory.Parts]:
        """Return the shapes alive together in the search."""
        config, key = self.config, jax.eval_shape(jax.random.key, 0)
        size = config.batch_size
        batch = memory.shape(size, *self.row_shape), memory.shape(size, dtype="int32")
        w, alpha = jax.eval_shape(self.space.init, key, batch), self.space.start()
        lower = split_losses(self.space.problem).lower
        residuals = memory.kept_for_backward(lambda *a: lower(*a)[0], w, alpha, batch)
        tests = self.data.test_rows(config)
        rows = memory.shape(config.seeds, config.train + config.valid + tests, *self.row_shape)
        shapes = {
            ("seeds", *self.sizes): [w] * 3 * self.copies,  # with gradient and momentum
            ("batch_size", *self.sizes): [residuals] * self.copies,
            ("seeds", "steps"): [alpha] * config.seeds,
            ("seeds", "train", "valid"): rows,
        }
        return [shapes]

    def _draw_splits(self) -> list[list[Part]]:
        """Return each seed's training, validation and test rows, normalised."""
        config = self.config
        draws = jax.random.split(jax.random.key(config.seed), config.seeds)
        drawn = self.data.draw(draws, train=config.train, valid=config.valid, test=config.test)
        return [normalised(rows, self.unit) for rows in drawn]

    def summary(self, networks: Scores) -> dict[str, Any]:
        """Return entries of ``result.json``, here those that all spaces have."""
        self.bars.enter("errors and curvature")
        space, size, seed_results = self.space, self.config.batch_size, self.seed_results
        rates = error_rates(space)
        curvature = diagnostics.alpha_curvature(space.problem.outer, space.sets)
        supernet, curvatures = [], []
        for seed_result, of_seed in zip(seed_results, self.parts, strict=True):
            supernet.append(rates(seed_result.w, seed_result.alpha, of_seed, size))
            batch = jax.tree.map(lambda a: a[:size], of_seed[1])
            curvatures.append(curvature(seed_result.w, seed_result.alpha, batch))
        columns = dict(zip(ERRORS, np.transpose(supernet).tolist(), strict=True))
        return {
            "space": self.name,
            "names": list(space.names),
            "architectures": [str(space.discretize(f.alpha)) for f in seed_results],
            "alpha": [_nested_lists(f.alpha) for f in seed_results],
            "entropy": [_mean_entropy(space, f.alpha) for f in seed_results],
            "scores": networks | {"supernet": columns},
            "curvature": curvatures,
            "alpha_rows": "training" if self.strategy.on_training_rows else "validation",
            "known_error": self.strategy.error,
        }

    def make_strategy(self, rate: float) -> Strategy:
        """Return the strategy of the flags; the weights' rate has a cosine from ``rate`` to 0."""
        config = self.config
        inner = _UNROLLED if config.strategy == "unrolled" else 1
        schedule = optax.cosine_decay_schedule(rate, inner * config.steps)
        travel = _GAEA_TRAVEL if config.strategy.startswith("gaea") else _ADAM_TRAVEL
        options: dict[str, Any] = {"weight_optimizer": self.weight_optimizer(schedule)}
        if config.strategy != "random":  # which leaves alpha at the start
            options["alpha_optimizer"] = config.alpha_rate or travel / config.steps
        return STRATEGIES[config.strategy](self.space, batch_size=config.batch_size, **options)

    def search(self) -> list[SeedResult]:
        """Search for all seeds, one after the other; every program is compiled once."""
        self.strategy = self.make_strategy(self.weight_rate())
        init, seed_results = jax.jit(self.space.init), []
        choose, seeds = jax.jit(self.choose_drawn_alpha), len(self.parts)
        for number, (train, valid, _) in enumerate(self.parts):
            search_key, init_key, choice_key, _ = keys(self.config.seed, number)
            self.bars.enter("search" if seeds == 1 else f"search {number + 1} of {seeds}")
            start = self.space.start(), init(init_key, train)
            place = self.folder / "search" / str(number)
            data = train, valid
            search_result = self.search_from(self.strategy, *start, data, search_key, place)
            if search_result.stopped:
                raise KeyboardInterrupt(f"{search_result.stopped} of seed {number}")
            drawn = self.strategy.draws
            alpha = choose(choice_key, search_result.w, valid) if drawn else search_result.alpha
            history = jax.tree.map(np.asarray, search_result.history)
            seed_results.append(SeedResult(alpha, search_result.w, history))
        return seed_results

    def choose_drawn_alpha(self, key: jax.Array, w: Pytree, rows: Part) -> Pytree:
        """Return the best of the architectures that random search draws at the end."""
        sizes = {"samples": self.config.samples, "batch_size": self.config.batch_size}
        return strategies.best_drawn(key, self.space, w, rows, **sizes)

    def search_from(
        self, strategy: Strategy, alpha, w, data: tuple[Part, Part], key, place: pathlib.Path
    ) -> SearchResult:
        """Search once, with epochs and the entropy of alpha in the bar."""
        config, (train, valid) = self.config, data
        steps_per_epoch = np.shape(train[1])[-1] / config.batch_size
        text = "epoch {epoch:.1f}  train {lower:.3f}  valid {value:.3f}  entropy {entropy:.2f}"

        def more(so_far):
            epoch = len(so_far.history["value"]) / steps_per_epoch
            return {"epoch": epoch, "entropy": _mean_entropy(self.space, so_far.alpha)}

        return strategies.run(
            strategy,
            alpha,
            w,
            train,
            valid,
            steps=config.steps,
            key=key,
            progress=False,
            checkpoint=place,
            resume=config.resume,
            callback=self.losses_in_the_bar(config.steps, text, self.copies, more),
            history=("alpha", "grad_norm", "lower", "value"),  # also a large alpha
        )

    def train_networks(
        self, found: list[Row], draws: list[Any], train: Callable[..., Row], **singles: Any
    ) -> list[Row]:
        """Return the scores of architectures: of each seed those ``found``, ``singles``, and drawn.

        ``draws`` has the keys of each seed.
        """
        self.bars.enter("training")
        rows, space = [], self.space
        for seed, (own, of_seed) in enumerate(zip(found, draws, strict=True)):
            drawn = [space.discretize(space.draw(key)) for key in of_seed]
            random = {f"random {i}": architecture for i, architecture in enumerate(drawn, 1)}
            named = own | singles | random
            rows += [NetworkToTrain(name, seed, network) for name, network in named.items()]
        return train_all(self.folder, rows, self.config.epochs, train)


def _mean_entropy(space: Space, alpha: Pytree) -> float:
    """Return the mean entropy of the simplices in ``alpha``, or 0 without simplices."""
    entropies = [diagnostics.entropy(p) for p in diagnostics.simplices(space.sets, alpha)]
    return float(np.mean(np.concatenate([np.ravel(e) for e in entropies]))) if entropies else 0.0


def _nested_lists(alpha: Any) -> Any:
    """Return nested lists; for user-defined pytree nodes, a dict of lists by path."""
    lists = jax.tree.map(lambda a: np.asarray(a).tolist(), alpha)
    try:
        json.dumps(lists)
    except TypeError:
        leaves = jax.tree_util.tree_leaves_with_path(alpha)
        return {jax.tree_util.keystr(path): np.asarray(a).tolist() for path, a in leaves}
    return lists


def name_in_arrays(path: tuple[Any, ...]) -> str:
    """Return the name of a leaf in ``arrays.npz``."""
    return "_".join(str(getattr(key, "key", key)) for key in path)


def name_of_found(scores: dict[str, Any]) -> str:
    """Return the name of the network found by the search; "" if the search trained none."""
    return next((name for name in scores if name.endswith(("search", "eigen-nas"))), "")


def compare_with_random(scores: dict[str, dict[str, list[float]]], test_rows: int) -> str:
    """Compare the network found with random ones, in one sentence."""
    name, baseline = name_of_found(scores), next((n for n in scores if n.endswith("random")), "")
    ours = np.array(scores[name]["test_error"])
    sentence = f"test error {100 * ours.mean():.1f} % with {name}"
    if baseline:
        theirs = np.array(scores[baseline]["test_error"])
        verdict = compare_errors(ours, theirs, test_rows)
        sentence += f", {100 * theirs.mean():.1f} % with {baseline}: {verdict}"
    return f"{sentence}."


def keys(seed: int, number: int) -> jax.Array:
    """Return the four keys of seed ``number``: of search, initial weights, choice and training."""
    return jax.random.split(jax.random.fold_in(jax.random.key(seed), number), 4)


def normalised(rows: list[Part], unit: Callable[..., Any]) -> list[Part]:
    """Return the parts with their inputs normalised by ``unit(*inputs)``."""
    xs = unit(*(x for x, _ in rows))
    return [(x, jnp.asarray(y)) for x, (_, y) in zip(xs, rows, strict=True)]
