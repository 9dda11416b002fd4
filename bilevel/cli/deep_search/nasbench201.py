"""``bilevel search-nasbench201``: search a cell with known accuracies.

For every seed: the search of a supernet, and its genotype. Nothing is trained from scratch, because
the benchmark's table has the test accuracies of all 15,625 networks, as Dong & Yang (2020) trained
them.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from bilevel.cli.deep_search.report import ERRORS, Heatmap, SeedResult
from bilevel.cli.deep_search.run import DeepSearchRun
from bilevel.cli.runtime import report
from bilevel.spaces import Space
from bilevel.spaces.nasbench201 import nasbench201_space
from bilevel.spaces.nasbench201.genotype import EDGES, supernet_cost
from bilevel.spaces.nasbench201.judging import table
from bilevel.spaces.nasbench201.judging.table import DATASETS
from bilevel.spaces.nasbench201.judging.verdicts import standing
from bilevel.strategies import darts_sgd


class _NasBench201Run(DeepSearchRun):
    """The cell of NAS-Bench-201."""

    name = "nasbench201"
    sizes = "cells", "channels"
    weight_optimizer = staticmethod(darts_sgd)

    def make_space(self) -> Space:
        """Return the space of the supernet; load the table of accuracies."""
        config, self.known = self.config, table.load_table()
        self.shape: dict[str, Any] = {name: getattr(config, name) for name in self.sizes}
        dtype = jnp.bfloat16 if config.bfloat16 else None
        options: dict[str, Any] = {"dtype": dtype, "remat": config.remat, **self.shape}
        return nasbench201_space(config.operations, classes=self.data.classes, **options)

    def more(self, result: dict[str, Any], seed_results: list[SeedResult]) -> dict[str, Any]:
        config, names = self.config, self.space.names
        samples = config.steps * self.strategy.gradients * config.batch_size
        budget = samples / (config.epochs * config.train) * supernet_cost(names, **self.shape)
        genotypes = [self.space.discretize(f.alpha) for f in seed_results]
        rivals = max(1, int(budget))
        return {
            "skips": [g.operations.count("skip_connect") for g in genotypes],
            "budget": budget,
            "benchmark": standing(self.known, genotypes, operations=names, budget=rivals),
        }

    def heatmaps(self, alpha: Any) -> list[Heatmap]:
        edges, axis = [f"{i} → {j}" for i, j in EDGES], "edge, from node → to node"
        return [Heatmap("α of every edge", np.asarray(alpha), list(self.space.names), edges, axis)]

    def table(self, result: dict[str, Any]) -> Any:
        config, benchmark = result["config"], result["benchmark"]
        others = {"random": "random", "best_of_random": f"best of {int(result['budget'])} random"}
        others = {k: heading for k, heading in others.items() if k in benchmark["cifar10"]}
        others["optimum"] = "optimum"
        drawn = report.result_table(
            f"test accuracies in % of networks found on {config['data']}",
            "data set",
            *("search", "rank of 15,625", *others.values()),
        )
        for name, label in DATASETS.items():
            scores = benchmark[name]
            cells = [report.cell(np.array(scores["accuracy"]), ".2f")]
            cells.append(report.cell(np.array(scores["rank"]), ",.0f"))
            drawn.add_row(label, *cells, *(f"{scores[k]:.2f}" for k in others))
        return drawn

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
