"""``bilevel search-skips``: search activations and skip connections (Zhu et al. 2022).

All seeds are searched side by side. Then the run trains three kinds of networks for every seed:

- the network of the architecture found;
- networks of one activation without skips;
- as many random architectures as the gradients of the search could train.

All are vertices of the space, so one compiled program trains all of them.

``--strategy eigen-nas`` does not search. It ranks ``--samples`` random architectures for every seed
by the smallest eigenvalue of their infinite kernel (Algorithm 1 there). It trains the best
``--kept`` from scratch, and the best by validation is the result. The same number of random ones is
trained too: they differ only in the eigenvalue.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

import ntk
from bilevel import strategies
from bilevel.cli.deep_search import report as deep_report
from bilevel.cli.deep_search.networks import Scores, by_network
from bilevel.cli.deep_search.report import ERRORS, Heatmap, SeedResult
from bilevel.cli.deep_search.run import DeepSearchRun, default_rate, keys
from bilevel.cli.runtime.command_run import Result
from bilevel.contracts import Pytree
from bilevel.nets.evaluation import Part, error_rates
from bilevel.spaces.activations import unit_inputs
from bilevel.spaces.skips import SkipArchitecture, SkipSpace, skip_space
from bilevel.spaces.targets import cross_entropy_problem
from bilevel.strategies.train_free import EigenNAS, eigen_nas

_KERNEL_ROWS = 100  # rows of the kernel for the smallest eigenvalue: a second for ten networks


class _SkipRun(DeepSearchRun):
    """Activations and skip connections."""

    images = False
    name = "skips"
    sizes = "width", "depth"
    columns: ClassVar = {"skips": ("skips", ".3g"), "min_eigenvalue": ("λ_min", ".3g")}
    space: SkipSpace

    def make_space(self) -> SkipSpace:
        """Return the space; set the networks of one activation without skips."""
        config, self.copies = self.config, self.config.seeds
        self.kernel_rows = min(_KERNEL_ROWS, config.train)
        space = skip_space(
            config.activations,
            depth=config.depth,
            width=config.width,
            classes=self.data.classes,
            parametrization=config.parametrization,
        )
        layers, skips = (len(space.start()[k]) for k in ("activations", "skips"))
        self.singles = {s: SkipArchitecture((s,) * layers, (False,) * skips) for s in space.names}
        return _in_bfloat16(space) if config.bfloat16 else space

    @property
    def row_shape(self) -> tuple[int, ...]:
        return (self.data.inputs,)

    def unit(self, *xs: Any) -> Any:
        return unit_inputs(*xs)

    # ------------------------------------------------------------------------- the search

    def search(self) -> list[SeedResult]:
        """Search for all seeds at once. The losses in a history are means over all seeds."""
        train, valid, _ = jax.tree.map(lambda *a: jnp.stack(a), *self.parts)
        seeds = self.copies
        key, weight_key, choice_key = jax.random.split(jax.random.key(self.config.seed), 3)
        w0 = self._initial_weights(weight_key, train)
        self.strategy = self.make_strategy(self.config.weight_rate or self._mean_rate(w0, train))
        alpha = jax.tree.map(lambda a: jnp.stack([a] * seeds), self.space.start())
        copies = strategies.stack_strategies(self.strategy, seeds)
        self.bars.enter("search")
        search_result = self.search_from(
            copies, alpha, w0, (train, valid), key, self.folder / "checkpoint"
        )
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
            return SeedResult(ours, w, history | {"alpha": path})

        return [of_seed(i) for i in range(seeds)]

    def _initial_weights(self, key: jax.Array, train: Part) -> Pytree:
        return jax.jit(jax.vmap(self.space.init))(jax.random.split(key, self.copies), train)

    def _mean_rate(self, w: Pytree, train: Part) -> float:
        """Return the first step size of the weights by the tangent kernel, mean over the seeds."""
        alpha = self.space.start()

        def of_seed(w, x):
            return 1 / default_rate(self.space, w, alpha, x)

        return 1 / float(jax.jit(jax.vmap(of_seed))(w, train[0]).mean())

    # ------------------------------------------------------------------------- the networks

    def train(self, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        config = self.config
        batches = config.epochs * (config.train // config.batch_size)
        # The number of networks that the gradients of the search could train.
        budget = 1 + round(config.steps * self.strategy.gradients / batches)
        return self.train_corners(found, budget)

    def train_corners(self, found: list[dict[str, Any]], budget: int) -> list[dict[str, Any]]:
        """Return scores of networks, also of ``budget`` random ones for each seed.

        Networks that are not random have an eigenvalue too.
        """
        config, space = self.config, self.space
        key = jax.random.fold_in(jax.random.key(config.seed), 1)
        draw_key, weight_key, order_key = jax.random.split(key, 3)
        draws = [jax.random.split(k, self.copies) for k in jax.random.split(draw_key, budget)]
        drawn = [[space.draw(of_all[s]) for of_all in draws] for s in range(self.copies)]
        train = jax.tree.map(lambda *a: jnp.stack(a), *(of_seed[0] for of_seed in self.parts))
        w0 = self._initial_weights(weight_key, train)
        orders = jax.random.split(order_key, self.copies)
        fit, rates = self.corner_trainer(), error_rates(space)

        def of_row(row, checkpoint, show):
            corner, parts = space.one_hot(row.architecture), self.parts[row.seed]
            w = fit(orders[row.seed], jax.tree.map(lambda a: a[row.seed], w0), corner, parts[0])
            errors = rates(w, corner, parts, config.batch_size)
            scores = dict(zip(ERRORS, errors, strict=True))
            scores["skips"] = sum(row.architecture.skips)
            if "random" not in row.name:
                scores["min_eigenvalue"] = self._min_eigenvalue(corner, parts[0][0])
            show(config.epochs, float("nan"))
            return scores

        return self.train_networks(found, drawn, of_row)

    def _min_eigenvalue(self, corner: Pytree, x: jax.Array) -> float:
        """Return the smallest eigenvalue of the NTK at infinite width, in float64."""
        with jax.enable_x64(True):
            x, corner = jax.tree.map(
                lambda a: jnp.asarray(np.asarray(a), float), (x[:_KERNEL_ROWS], corner)
            )
            # Corners of one simplex share a program.
            return float(ntk.min_eigenvalue(self.space.kernel(corner, x).ntk))

    def best_single(self, scores: Scores) -> str:
        return min(self.space.names, key=lambda name: np.mean(scores[name]["valid_error"]))

    # ------------------------------------------------------------------------- the report

    def more(self, result: dict[str, Any], seed_results: list[SeedResult]) -> dict[str, Any]:
        skips = [float(f.alpha["skips"].sum()) for f in seed_results]
        result["scores"]["supernet"]["skips"] = skips
        best = self.best_single(result["scores"])
        return {"best_single": best, "kernel_rows": self.kernel_rows}

    def heatmaps(self, alpha: Pytree) -> list[Heatmap]:
        """Return the probabilities of activations and the weights of skips, layer by layer."""
        mixtures, skips = (np.asarray(alpha[k]) for k in ("activations", "skips"))
        values = np.column_stack([mixtures, [np.nan, *skips]])
        layers = [str(layer) for layer in range(1, len(values) + 1)]
        columns = [*self.space.names, "skip"]
        return [Heatmap("α and weight of the skip", values, columns, layers, ylabel="layer")]

    def table(self, result: dict[str, Any]) -> Any:
        ends = {"search", "eigen-nas", self.space.names[-1], "random"}
        return deep_report.network_table(result, self.columns, ends)

    def notes(self, result: dict[str, Any]) -> list[str]:
        return [
            "networks are trained from scratch, those of one activation without skips; * best of "
            "them by validation; best of random: by validation, with as many networks as the "
            "search's gradients could train",
            self.kernel_note(),
        ]

    def kernel_note(self) -> str:
        """Return the note on the column λ_min."""
        return (
            f"λ_min: of the infinite-width NTK of {self.kernel_rows} training rows, in NTK "
            "parametrization"
        )


class _EigenNasRun(_SkipRun):
    """A ranking by the smallest eigenvalue, without a search."""

    def result(self) -> tuple[Result, dict[str, Any]]:
        self.parts, seeds = self._draw_splits(), range(self.config.seeds)
        self.bars.enter("eigenvalues")
        rankings = [self._ranking(seed) for seed in seeds]
        ranked = self.seconds()
        ranked_by_seed = [
            {f"eigen-nas {i}": a for i, a in enumerate(best.architectures, 1)} for best in rankings
        ]
        networks = self.train_corners(ranked_by_seed, self.config.kept)
        scores = by_network(networks)
        result = {
            "space": self.name,
            "names": list(self.space.names),
            "architectures": [_best_by_validation(networks, seed) for seed in seeds],
            "scores": scores,
            "best_single": self.best_single(scores),
            "kernel_rows": self.kernel_rows,
            "seconds": {"search": ranked, "all": self.seconds()},
        }
        eigenvalues = {f"eigenvalues_{seed}": f.eigenvalues for seed, f in enumerate(rankings)}
        return result, eigenvalues

    def save_figures(self, result: Result) -> None:
        pass  # nothing was searched

    def _ranking(self, seed: int) -> EigenNAS:
        """Rank the pool by the kernel of the seed's first training rows, in float64."""
        config, x = self.config, self.parts[seed][0][0][: self.kernel_rows]
        draw = keys(config.seed, seed)[0]
        with jax.enable_x64(True):
            x = jnp.asarray(np.asarray(x), float)
            return eigen_nas(draw, self.space, x, pool=config.samples, keep=config.kept)

    def notes(self, result: dict[str, Any]) -> list[str]:
        kept, samples = self.config.kept, self.config.samples
        return [
            f"eigen-nas: the {kept} of {samples} random architectures with the largest λ_min, "
            f"trained from scratch; random: {kept} with any λ_min; best of: by validation",
            self.kernel_note(),
        ]


def _best_by_validation(networks: list[dict[str, Any]], seed: int) -> str:
    """Return the ranked architecture of a seed with the smallest validation error."""
    own = [
        row for row in networks if row["seed"] == seed and row["network"].startswith("eigen-nas")
    ]
    return min(own, key=lambda row: row["valid_error"])["architecture"]


def _in_bfloat16(space: SkipSpace) -> SkipSpace:
    """Return the space with activations in bfloat16, for more than two classes."""

    def apply(w, alpha, x):
        half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (w, alpha, x))
        return space.apply(*half).astype(jnp.float32)

    return dataclasses.replace(space, apply=apply, problem=cross_entropy_problem(apply))


def skip_run(config: Any) -> _SkipRun:
    """Return the run of the strategy."""
    return (_EigenNasRun if config.strategy == "eigen-nas" else _SkipRun)(config)
