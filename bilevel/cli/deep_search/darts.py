"""``bilevel search-darts``: search the cells of a convolutional network (Liu et al. 2019).

For every seed: the search of a supernet, the network of its genotype trained from scratch, and
networks of random genotypes trained the same way.
"""

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bilevel.cli.deep_search import networks
from bilevel.cli.deep_search.report import ERRORS, Heatmap
from bilevel.cli.deep_search.run import DeepSearchRun, keys
from bilevel.cli.runtime import memory, report
from bilevel.nets.evaluation import Part
from bilevel.spaces import Space
from bilevel.spaces.darts import darts_network, darts_space, parse_genotype, plot_genotype
from bilevel.spaces.darts.genotype import EDGES
from bilevel.spaces.darts.supernet import weight_count
from bilevel.strategies import darts_sgd

_CELLS = {"normal": "normal", "reduce": "reduction"}


class _DartsRun(DeepSearchRun):
    """Cells of convolutions and poolings."""

    name = "darts"
    sizes = "cells", "channels"
    weight_optimizer = staticmethod(darts_sgd)
    columns: ClassVar = {"skips": ("skips", ".3g"), "parameters": ("parameters", ",.0f")}

    def make_space(self) -> Space:
        """Return the space of the supernet; set the sizes of networks trained from scratch."""
        config = self.config
        shape: dict[str, Any] = {name: getattr(config, name) for name in self.sizes}
        final = {k: getattr(config, f"final_{k}") or size for k, size in shape.items()}
        dtype = jnp.bfloat16 if config.bfloat16 else None
        common: dict[str, Any] = {"classes": self.data.classes, "dtype": dtype}
        self.network: Callable[..., Any] = functools.partial(
            darts_network, auxiliary=config.auxiliary, **common, **final
        )
        return darts_space(config.operations, remat=config.remat, **common, **shape)

    def network_arrays(self, batch: Part) -> list[memory.Parts]:
        network, key = self.network(self.space.discretize(self.space.start())), batch[1]
        key = jax.eval_shape(jax.random.key, 0)
        w, averages = jax.eval_shape(lambda key: network.init(key, batch[0].shape[1:]), key)
        arguments = w, averages, batch, key, memory.shape()  # the last one is `drop_path`
        residuals = memory.kept_for_backward(network.loss, *arguments, has_aux=True)
        sizes = tuple(f"final_{name}" for name in self.sizes)
        return [{sizes: [w] * 3, ("batch_size", *sizes): residuals}]

    def train(self, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return scores of the networks of the genotypes found, and of ``--random`` others."""
        config, random = self.config, self.config.random
        seed_keys = [keys(config.seed, s)[3] for s in range(len(self.parts))]
        drawn = [
            [self.space.draw(k) for k in jax.random.split(key, random + 1)[1:]] for key in seed_keys
        ]
        orders = [jax.random.split(key, random + 2)[-1] for key in seed_keys]
        steps = config.epochs * (config.train // config.batch_size)
        fit = functools.partial(
            networks.fitted,
            sgd=darts_sgd(optax.cosine_decay_schedule(config.weight_rate, steps)),
            epochs=config.epochs,
            batch_size=config.batch_size,
            augment=networks.augmentation(config.crop_and_flip, config.cutout),
            options=lambda epoch: (config.drop_path * epoch / config.epochs,),
        )

        def train(row, checkpoint, show):
            network, key = self.network(row.architecture), orders[row.seed]
            state, errors = fit(
                network, key, self.parts[row.seed], checkpoint=checkpoint, show=show
            )
            return {
                **dict(zip(ERRORS, errors, strict=True)),
                "skips": sum(name == "skip_connect" for name, _ in row.architecture.normal),
                "parameters": weight_count(state.w),
            }

        return self.train_networks(found, drawn, train)

    def heatmaps(self, alpha: Any) -> list[Heatmap]:
        edges = [f"{i} → {j}" for i, j in EDGES]
        axes = {"normal": "edge, from node → to node", "reduce": ""}
        return [
            Heatmap(
                f"{name} cell: α of every edge",
                np.asarray(alpha[kind]),
                list(self.space.names),
                edges,
                axes[kind],
            )
            for kind, name in _CELLS.items()
        ]

    def save_figures(self, result: dict[str, Any]) -> None:
        super().save_figures(result)
        first = ", first seed" if len(result["architectures"]) > 1 else ""

        def draw(figure):
            plot_genotype(parse_genotype(result["architectures"][0]), figure.subplots(2, 1))
            title = report.figure_title(result["config"])
            figure.suptitle(f"genotype found{first}; {title}")

        report.save_figure(self.folder / "genotype.png", (8.5, 7), draw)

    def notes(self, result: dict[str, Any]) -> list[str]:
        seconds, seeds = result["seconds"], self.config.seeds
        return [
            "networks are trained from scratch; skips: in the normal cell, of 8 edges; in the "
            f"search's time {seconds['search'] / seeds / seconds['network']:.1f} networks could be "
            "trained"
        ]
