"""``bilevel search-darts`` and ``search-nasbench201``: search the cells of a convolutional network.

For every seed: the search of a supernet, and its genotype. In the space of Liu et al. (2019) its
network is trained from scratch, next to those of random genotypes. For NAS-Bench-201, the table of
Dong & Yang (2020) has the test accuracies of all 15,625 networks.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bilevel.cli.deep_search.run import ERRORS, DeepSearchRun, Heatmap, keys
from bilevel.cli.runtime import memory, report
from bilevel.nets.images import augmentation
from bilevel.nets.several import Row, Scores, fitted
from bilevel.nets.training import TrainableNetwork
from bilevel.spaces import Space
from bilevel.spaces.darts import darts_network, darts_space, parse_genotype, plot_genotype
from bilevel.spaces.darts.genotype import EDGES as DARTS_EDGES
from bilevel.spaces.darts.supernet import weight_count
from bilevel.spaces.nasbench201 import nasbench201_space
from bilevel.spaces.nasbench201.genotype import EDGES, supernet_cost
from bilevel.spaces.nasbench201.judging import table
from bilevel.spaces.nasbench201.judging.verdicts import standing
from bilevel.strategies import darts_sgd


class _CellRun(DeepSearchRun):
    """Cells of any kind."""

    sizes = "cells", "channels"
    rows_of_alpha = "edge, from node → to node"
    weight_optimizer = staticmethod(darts_sgd)
    supernet: Callable[..., Space]

    def prepare(self) -> None:
        config = self.config
        self.shape: dict[str, Any] = {name: getattr(config, name) for name in self.sizes}
        dtype = jnp.bfloat16 if config.bfloat16 else None
        self.common: dict[str, Any] = {"classes": self.data.classes, "dtype": dtype}
        sizes = self.common | self.shape
        self.space = self.supernet(config.operations, remat=config.remat, **sizes)


class _DartsRun(_CellRun):
    """Cells of convolutions and poolings."""

    name = "darts"
    supernet = staticmethod(darts_space)
    columns: ClassVar = {"skips": ("skips", ".3g"), "parameters": ("parameters", ",.0f")}

    def network(self, genotype: Any) -> TrainableNetwork:
        """Return the network to be trained from scratch."""
        final = {k: getattr(self.config, f"final_{k}") or size for k, size in self.shape.items()}
        return darts_network(genotype, auxiliary=self.config.auxiliary, **self.common, **final)

    def arrays(self) -> list[memory.Parts]:
        """Return the shapes alive together in training from scratch, and in the search."""
        network = self.network(self.space.discretize(self.space.start()))
        key, shape, size = jax.eval_shape(jax.random.key, 0), self.row_shape, self.config.batch_size
        w, averages = jax.eval_shape(lambda key: network.init(key, shape), key)
        batch = memory.shape(size, *shape), memory.shape(size, dtype="int32")
        arguments = w, averages, batch, key, memory.shape()  # the last one is `drop_path`
        residuals = memory.kept_for_backward(network.loss, *arguments, has_aux=True)
        sizes = tuple(f"final_{name}" for name in self.sizes)
        return [{sizes: [w] * 3, ("batch_size", *sizes): residuals}, *super().arrays()]

    def train(self, found: list[Row]) -> list[Row]:
        config, random = self.config, self.config.random
        seed_keys = [keys(config.seed, s)[3] for s in range(len(self.parts))]
        draws = [jax.random.split(key, random + 1)[1:] for key in seed_keys]
        orders = [jax.random.split(key, random + 2)[-1] for key in seed_keys]
        steps = config.epochs * (config.train // config.batch_size)
        sgd = darts_sgd(optax.cosine_decay_schedule(config.weight_rate, steps))
        augment = augmentation(config.crop_and_flip, config.cutout)

        def train(row, checkpoint, show):
            state, errors = fitted(
                self.network(row.architecture),
                orders[row.seed],
                self.parts[row.seed],
                *(sgd, config.batch_size, augment),
                epochs=config.epochs,
                checkpoint=checkpoint,
                callback=show,
                options=lambda epoch: (config.drop_path * epoch / config.epochs,),
            )
            return {
                **dict(zip(ERRORS, errors, strict=True)),
                "skips": sum(name == "skip_connect" for name, _ in row.architecture.normal),
                "parameters": weight_count(state.w),
            }

        return self.train_networks(found, draws, train)

    def heatmaps(self, alpha: Any) -> list[Heatmap]:
        edges, names = [f"{i} → {j}" for i, j in DARTS_EDGES], list(self.space.names)
        normal, reduction = np.asarray(alpha["normal"]), np.asarray(alpha["reduce"])
        return [
            ("normal cell: α of every edge", normal, names, edges),
            ("reduction cell: α of every edge", reduction, names, edges),
        ]

    def save_figures(self, result: dict[str, Any]) -> None:
        super().save_figures(result)
        first = ", first seed" if len(result["architectures"]) > 1 else ""

        def draw(figure):
            plot_genotype(parse_genotype(result["architectures"][0]), figure.subplots(2, 1))
            figure.suptitle(f"genotype found{first}; {report.figure_title(result['config'])}")

        report.save_figure(self.folder / "genotype.png", (8.5, 7), draw)

    def notes(self, result: dict[str, Any]) -> list[str]:
        seconds, seeds = result["seconds"], self.config.seeds
        return [
            "networks are trained from scratch; skips: in the normal cell, of 8 edges; in the "
            f"search's time {seconds['search'] / seeds / seconds['network']:.1f} networks could be "
            "trained"
        ]


class _NasBench201Run(_CellRun):
    """The cell of NAS-Bench-201."""

    name = "nasbench201"
    supernet = staticmethod(nasbench201_space)

    def prepare(self) -> None:
        self.known = table.load_table()
        super().prepare()

    def summary(self, networks: Scores) -> dict[str, Any]:
        config, names = self.config, self.space.names
        samples = config.steps * self.strategy.gradients * config.batch_size
        budget = samples / (config.epochs * config.train) * supernet_cost(names, **self.shape)
        genotypes = [self.space.discretize(f.alpha) for f in self.seed_results]
        rivals = max(1, int(budget))
        return super().summary(networks) | {
            "skips": [g.operations.count("skip_connect") for g in genotypes],
            "budget": budget,
            "benchmark": standing(self.known, genotypes, operations=names, budget=rivals),
        }

    def heatmaps(self, alpha: Any) -> list[Heatmap]:
        edges, names = [f"{i} → {j}" for i, j in EDGES], list(self.space.names)
        return [("α of every edge", np.asarray(alpha), names, edges)]

    def table(self, result: dict[str, Any]) -> Any:
        columns: report.Columns = {
            "accuracy": ("search", ".2f"),
            "rank": ("rank of 15,625", ",.0f"),
            "random": ("random", ".2f"),
            "best_of_random": (f"best of {int(result['budget'])} random", ".2f"),
            "optimum": ("optimum", ".2f"),
        }
        benchmark = {label: result["benchmark"][name] for name, label in table.DATASETS.items()}
        known = {k: v for k, v in columns.items() if k in result["benchmark"]["cifar10"]}
        title = f"test accuracies in % of networks found on {result['config']['data']}"
        return report.score_table(title, benchmark, known, first="data set")

    def result_sentence(self, result: dict[str, Any]) -> str:
        scores, budget = result["benchmark"]["cifar10"], int(result["budget"])
        rank, accuracy = (np.mean(scores[k]) for k in ("rank", "accuracy"))
        rivals = {"a random network": "random", f"the best of {budget} random": "best_of_random"}
        others = [f"{n} {scores[k]:.2f} %" for n, k in rivals.items() if k in scores]
        return (
            f"the network found has {accuracy:.2f} % test accuracy on CIFAR-10, rank {rank:,.0f} "
            f"of 15,625; expected for {', for '.join(others)}; optimum {scores['optimum']:.2f} %."
        )

    def notes(self, result: dict[str, Any]) -> list[str]:
        skips, supernet = np.array(result["skips"]), result["scores"]["supernet"]
        errors = [report.cell(100 * np.array(supernet[name]), ".1f") for name in ERRORS]
        return [
            "accuracies are the benchmark's, of networks trained for 200 epochs on each data set",
            f"skip_connect on {report.cell(skips, '.3g')} of {len(EDGES)} edges",
            "supernet's own errors in %: train {}, valid {}, test {}".format(*errors),
            f"in each search's multiply-adds {result['budget']:.2g} random networks could be "
            f"trained on as many rows for {self.config.epochs} epochs",
        ]
