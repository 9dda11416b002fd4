"""The common run of all searches with shared weights, from the flags of a command to its table.

For every seed, a run searches by a strategy and discretizes. Then it trains the network of this
architecture from scratch, next to others. If the space has a table of accuracies, it looks them up
instead. An interrupted run resumes in a search or in a network's training.
"""

import functools
import pathlib
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console

from bilevel import strategies
from bilevel.cli.deep_search import report as deep_report
from bilevel.cli.deep_search.networks import NetworkToTrain, Scores, by_network, train_all
from bilevel.cli.deep_search.report import ERRORS, Heatmap, SeedResult
from bilevel.cli.runtime import memory, report
from bilevel.cli.runtime.command_run import CommandRun, Result
from bilevel.contracts import Pytree
from bilevel.discretize import diagnostics
from bilevel.nets import training
from bilevel.nets.evaluation import Part, error_rates
from bilevel.nets.images import unit_images
from bilevel.outer_loop.search_result import SearchResult
from bilevel.problem.problem import split_losses
from bilevel.spaces import Space
from bilevel.strategies import Strategy

_UNROLLED = 5  # steps of the strategy of that name
_RATE = 3.0  # learning rate of the weights times the tangent kernel's mean diagonal entry
_SCALE_ROWS = 32  # rows for this mean; more would not change the rate's first digit


def _weight_sharing_without_rate(space: Space, *, alpha_optimizer: Any, **options: Any) -> Strategy:
    return strategies.weight_sharing(space, **options)


STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "darts-first": strategies.darts,
    "darts-second": functools.partial(strategies.darts, order=2),
    "darts-second-difference": functools.partial(strategies.darts, order=2, radius=0.01),
    "gaea": strategies.gaea,
    "gaea-single-level": functools.partial(strategies.gaea, on_training_rows=True),
    "random": _weight_sharing_without_rate,
    "joint": strategies.joint,
    "unrolled": functools.partial(strategies.unrolled, steps=_UNROLLED),
}
# The rate of alpha times the steps, for exponentiated gradient, and for DARTS's Adam on CIFAR-10.
_GAEA_TRAVEL, _ADAM_TRAVEL = 100.0, 6.0


class DeepSearchRun(CommandRun):
    """A search with shared weights on images. Subclasses add the parts of one space."""

    images = True
    keeps = "searches and networks so far are saved"
    name: str  # of the space, in `result.json`
    sizes: tuple[str, ...]  # flags that set the number of weights
    columns: ClassVar[dict[str, tuple[str, str]]] = {}  # of the table: heading and format by key
    copies = 1  # searches side by side
    weight_optimizer: Callable[..., optax.GradientTransformation] = staticmethod(
        functools.partial(optax.sgd, momentum=0.9)
    )

    # Set when the run begins.
    parts: list[list[Part]]  # of every seed: training, validation, test rows
    strategy: Strategy
    seed_results: list[SeedResult]

    def __init__(self, config: Any):
        super().__init__(config)
        self.singles: dict[str, Any] = {}  # architectures of one operation, to compare with
        self.space: Space = self.make_space()

    # ------------------------------------------------------------------------- a space's own

    def make_space(self) -> Space:
        """Return the space of the flags and the data."""
        raise NotImplementedError

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of an input."""
        return self.data.image_shape(self.config.pixels)

    def unit(self, *xs: Any) -> Any:
        """Return the inputs in the form of the space, normalised by the first of ``xs``."""
        return unit_images(*xs, pixels=self.config.pixels)

    def weight_rate(self) -> float:
        """Return the learning rate of the weights at the start of the search."""
        return self.config.weight_rate

    def network_arrays(self, batch: Part) -> list[memory.Parts]:
        """Return the shapes alive together in training from scratch, if the space adds any."""
        return []

    def train(self, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return scores of networks trained from scratch: those ``found`` by seed, and others."""
        return []

    def more(self, result: dict[str, Any], seed_results: list[SeedResult]) -> dict[str, Any]:
        """Return further entries of ``result.json``."""
        return {}

    def heatmaps(self, alpha: Pytree) -> list[Heatmap]:
        """Return alpha of the first seed as tables."""
        raise NotImplementedError

    def table(self, result: dict[str, Any]) -> Any:
        """Return the table for the screen."""
        return deep_report.network_table(result, self.columns, {"search", "random"})

    def notes(self, result: dict[str, Any]) -> list[str]:
        """Return the lines below the table."""
        raise NotImplementedError

    def result_sentence(self, result: dict[str, Any]) -> str:
        """Return the result in one sentence: the search compared with its baseline."""
        return deep_report.compare_with_random(result["scores"], len(self.parts[0][2][1]))

    # ------------------------------------------------------------------------- the run

    def result(self) -> tuple[Result, dict[str, Any]]:
        """Search, train, and return the entries that all spaces have."""
        self.parts = self._draw_splits()
        seed_results = self.seed_results = self.search()
        searched = self.seconds()
        rows = self.train([{"search": self.space.discretize(f.alpha)} for f in seed_results])
        result = self._summary(seed_results, by_network(rows) if rows else {})
        result |= self.more(result, seed_results)
        result["seconds"] = {"search": searched}
        if rows:
            result["seconds"]["network"] = float(np.mean([row["seconds"] for row in rows]))
        result["seconds"]["all"] = self.seconds()
        return result, deep_report.arrays_of(seed_results)

    def save_figures(self, result: Result) -> None:
        """Save ``search.png``: the first seed's alpha, and the losses of all seeds."""
        heats = self.heatmaps(self.seed_results[0].alpha)
        path = self.folder / self.figure
        deep_report.save_search_figure(path, result, self.seed_results, heats)

    def show(self, console: Console, result: Result) -> tuple[str, str]:
        """Print the table, the architectures found, and notes."""
        console.print(self.table(result))
        for seed, architecture in enumerate(result["architectures"]):
            named = f"seed {seed}: " if self.config.seeds > 1 else "found: "
            console.print(named + architecture, soft_wrap=True)  # to be copied
        if "curvature" in result:
            entropy, curvature = (np.array(result[k]) for k in ("entropy", "curvature"))
            console.print(
                f"entropy of α, mean over simplices: {report.cell(entropy, '.2f')} (maximum "
                f"{np.log(len(result['names'])):.2f})"
            )
            console.print(
                "largest eigenvalue of the validation loss's Hessian in α, of one batch: "
                f"{report.cell(curvature, '.3g')}"
            )
            console.print(result["known_error"])
        for note in self.notes(result):
            console.print(note)
        seconds = result["seconds"]
        search = f"{self.config.strategy} {seconds['search']:.0f} s"
        report.print_next(console, self.folder)
        return self.result_sentence(result), f"{seconds['all']:.0f} s, of which {search}"

    def arrays(self) -> list[memory.Parts]:
        """Return the shapes alive together in the search, and in the training of a network."""
        config, key = self.config, jax.eval_shape(jax.random.key, 0)
        batch = (
            memory.shape(config.batch_size, *self.row_shape),
            memory.shape(config.batch_size, dtype="int32"),
        )
        networks = self.network_arrays(batch)
        w, alpha = jax.eval_shape(self.space.init, key, batch), self.space.start()
        lower = split_losses(self.space.problem).lower
        residuals = memory.kept_for_backward(
            lambda *arguments: lower(*arguments)[0], w, alpha, batch
        )
        tests = self.data.test_rows(config)
        rows = memory.shape(config.seeds, config.train + config.valid + tests, *self.row_shape)
        search = {
            ("seeds", *self.sizes): [w] * 3 * self.copies,  # with gradient and momentum
            ("batch_size", *self.sizes): [residuals] * self.copies,
            ("seeds", "steps"): [alpha] * config.seeds,
            ("seeds", "train", "valid"): rows,
        }
        return [*networks, search]

    def _draw_splits(self) -> list[list[Part]]:
        """Return each seed's training, validation and test rows, normalised."""
        config = self.config
        draws = jax.random.split(jax.random.key(config.seed), config.seeds)
        sizes = {"train": config.train, "valid": config.valid, "test": config.test}
        drawn = self.data.draw(draws, **sizes)
        return [normalised(rows, self.unit) for rows in drawn]

    def _summary(self, seed_results: list[SeedResult], networks: Scores) -> dict[str, Any]:
        """Return the entries of ``result.json`` that all spaces have."""
        self.bars.enter("errors and curvature")
        space, size = self.space, self.config.batch_size
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
            "alpha": [deep_report.nested_lists(f.alpha) for f in seed_results],
            "entropy": [deep_report.mean_entropy(space, f.alpha) for f in seed_results],
            "scores": networks | {"supernet": columns},
            "curvature": curvatures,
            "alpha_rows": "training" if self.strategy.on_training_rows else "validation",
            "known_error": self.strategy.error,
        }

    # ------------------------------------------------------------------------- the search

    def make_strategy(self, rate: float) -> Strategy:
        """Return the strategy of the flags; the weights' rate has a cosine from ``rate`` to 0."""
        config = self.config
        inner = _UNROLLED if config.strategy == "unrolled" else 1
        schedule = optax.cosine_decay_schedule(rate, inner * config.steps)
        travel = _GAEA_TRAVEL if config.strategy.startswith("gaea") else _ADAM_TRAVEL
        return STRATEGIES[config.strategy](
            self.space,
            weight_optimizer=self.weight_optimizer(schedule),
            alpha_optimizer=config.alpha_rate or travel / config.steps,
            batch_size=config.batch_size,
        )

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
            search_result = self.search_from(
                self.strategy, *start, (train, valid), search_key, place
            )
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
        self,
        strategy: Strategy,
        alpha: Pytree,
        w: Pytree,
        data: tuple[Part, Part],
        key: jax.Array,
        checkpoint: pathlib.Path,
    ) -> SearchResult:
        """Search once, with epochs and the entropy of alpha in the bar."""
        config, (train, valid) = self.config, data
        steps_per_epoch = np.shape(train[1])[-1] / config.batch_size
        text = "epoch {epoch:.1f}  train {lower:.3f}  valid {value:.3f}  entropy {entropy:.2f}"
        show = self.bars.loop(config.steps, text)

        def shown(search_result):
            last = {
                k: float(np.asarray(search_result.history[k])[-1]) / self.copies
                for k in ("lower", "value")
            }
            done = len(search_result.history["value"]) / steps_per_epoch
            entropy = deep_report.mean_entropy(self.space, search_result.alpha)
            return last | {"epoch": done, "entropy": entropy}

        def callback(search_result):
            show(len(search_result.history["value"]), lambda: shown(search_result))

        return strategies.run(
            strategy,
            alpha,
            w,
            train,
            valid,
            steps=config.steps,
            key=key,
            progress=False,
            checkpoint=checkpoint,
            resume=config.resume,
            callback=callback,
            history=("alpha", "grad_norm", "lower", "value"),  # also a large alpha
        )

    # ------------------------------------------------------------------------- the networks

    def train_networks(
        self,
        found: list[dict[str, Any]],
        drawn: list[list[Pytree]],
        train: Callable[..., dict[str, Any]],
    ) -> list[dict[str, Any]]:
        """Return the scores of each seed's architectures: ``found``, singles, and ``drawn``."""
        self.bars.enter("training")
        rows = []
        for seed, (own, corners) in enumerate(zip(found, drawn, strict=True)):
            random = {f"random {i}": self.space.discretize(a) for i, a in enumerate(corners, 1)}
            named = own | self.singles | random
            rows += [NetworkToTrain(name, seed, network) for name, network in named.items()]
        return train_all(self.folder, rows, self.config.epochs, train)

    def corner_trainer(self) -> Callable[[jax.Array, Pytree, Pytree, Part], Pytree]:
        """Return ``(key, w0, corner, rows) -> w`` after SGD, one program for all architectures."""
        config, space = self.config, self.space

        @jax.jit
        def fit(key, w, corner, rows):
            steps = config.epochs * (len(rows[1]) // config.batch_size)
            first: Any = config.weight_rate or default_rate(space, w, corner, rows[0])
            cosine = optax.cosine_decay_schedule(1.0, steps)
            sgd = optax.sgd(lambda step: first * cosine(step), momentum=0.9)
            sizes = {"epochs": config.epochs, "batch_size": config.batch_size}
            lower = space.problem.lower
            return training.train(key, lower, corner, w, rows, optimizer=sgd, **sizes).last

        return fit


def keys(seed: int, number: int) -> jax.Array:
    """Return the four keys of seed ``number``: of search, initial weights, choice and training."""
    return jax.random.split(jax.random.fold_in(jax.random.key(seed), number), 4)


def normalised(rows: list[Part], unit: Callable[..., Any]) -> list[Part]:
    """Return the parts with their inputs normalised by ``unit(*inputs)``."""
    xs = unit(*(x for x, _ in rows))
    return [(x, jnp.asarray(y)) for x, (_, y) in zip(xs, rows, strict=True)]


def default_rate(space: Space, w: Pytree, alpha: Pytree, x: jax.Array) -> jax.Array:
    """Return the default first step size of the weights: 3 / (mean tangent kernel diagonal)."""
    return _RATE / diagnostics.kernel_diagonal(space.apply, w, alpha, x[:_SCALE_ROWS])
