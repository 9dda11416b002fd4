"""``bilevel search-own``: search a user-defined space, ``--space MODULE:FUNCTION``.

For every seed: the search by any strategy, its architecture trained from scratch at the corner of
the space, and random architectures trained the same way.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bilevel.cli.deep_search.report import ERRORS, Heatmap
from bilevel.cli.deep_search.run import DeepSearchRun, default_rate, keys
from bilevel.contracts import Pytree
from bilevel.discretize import diagnostics
from bilevel.internal.import_function import called
from bilevel.nets.evaluation import error_rates
from bilevel.spaces import Space


class _OwnRun(DeepSearchRun):
    """A space of the user."""

    sizes = ("space",)

    def make_space(self) -> Space:
        self.name = self.config.space
        space = called("space", self.name, self.data.classes)
        if not isinstance(space, Space):
            kind = type(space).__name__
            raise ValueError(
                f"space: expected {self.name} to return a bilevel.spaces.Space, got a {kind}."
            )
        return space

    def weight_rate(self) -> float:
        if self.config.weight_rate:
            return self.config.weight_rate
        train = self.parts[0][0]
        w = jax.jit(self.space.init)(keys(self.config.seed, 0)[1], train)
        return float(default_rate(self.space, w, self.space.start(), train[0]))

    def train(self, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return scores of the networks of the corners found, and of ``--random`` others."""
        config, space = self.config, self.space
        init, rates, fit = jax.jit(space.init), error_rates(space), self.corner_trainer()
        seed_keys = [
            jax.random.split(keys(config.seed, s)[3], config.random + 2)
            for s in range(len(self.parts))
        ]
        drawn = [[space.draw(key) for key in of_seed[2:]] for of_seed in seed_keys]

        def train(row, checkpoint, show):
            own, (init_key, order_key, *_) = self.parts[row.seed], seed_keys[row.seed]
            corner = space.one_hot(row.architecture)
            w = fit(order_key, init(init_key, own[0]), corner, own[0])
            show(config.epochs, float("nan"))
            return dict(zip(ERRORS, rates(w, corner, own, config.batch_size), strict=True))

        return self.train_networks(found, drawn, train)

    def heatmaps(self, alpha: Pytree) -> list[Heatmap]:
        """Return a table for each leaf of alpha on simplices, with a row for each simplex."""
        heats: list[Heatmap] = []
        for leaf in diagnostics.simplices(self.space.sets, alpha):
            values = np.asarray(jnp.reshape(leaf, (-1, leaf.shape[-1])))
            count, choices = values.shape
            names = self.space.names if len(self.space.names) == choices else range(choices)
            rows, ylabel = [*map(str, range(count))], "" if heats else "simplex"
            heats.append(Heatmap("α", values, [*map(str, names)], rows, ylabel))
        return heats

    def notes(self, result: dict[str, Any]) -> list[str]:
        return [
            "networks are trained from scratch, at the corners of the space that stand for them"
        ]
