"""All positions into one vector: ``flatten``."""

import dataclasses
from typing import Any, ClassVar

import jax

from ntk.networks.contracts import FiniteLayer, Layer, LayerStep, Planned, Signal
from ntk.networks.moments import LayerFeatures, Moments, Raw, epsilon
from ntk.networks.network import Network
from ntk.networks.position_pairs import PairState, Tile, state_of_moments
from ntk.networks.values import Values
from ntk.networks.windows import equal_positions, outer


def flatten() -> Network:
    """All positions into one vector, for a ``dense`` that follows.

    Returns
    -------
    Network

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from ntk import networks as nets
    >>> nets.serial(flatten(), nets.dense()).kernel(jnp.ones((1, 5, 2))).nngp
    Array([[1.]], dtype=float...)
    """
    return Network((Flatten(),))


@dataclasses.dataclass(frozen=True)
class Flatten(Layer, LayerStep):
    """``flatten``: the description and the step."""

    combinator: ClassVar[str] = "flatten"

    def plan(self, signal: Signal, values: Values) -> Planned:
        """The layer itself; no numbers."""
        return Planned(self, (), signal._replace(shape=(), flat=True))

    def features(self, numbers: Any, before: Raw | Moments) -> LayerFeatures:
        """Means over all positions; of the data, all channels."""
        if isinstance(before, Raw):
            return LayerFeatures(before, Raw(before.x.reshape(len(before.x), 1, -1)))
        square, tangent, mean = (x.mean(1, keepdims=True) for x in before[:3])
        noise = before.noise + 8 * epsilon(square)
        return LayerFeatures(before, Moments(square, tangent, mean, noise, before.mean_noise))

    def pairs(
        self, numbers: Any, a: LayerFeatures, b: LayerFeatures, state: PairState, tile: Tile
    ) -> PairState:
        """Means over pairs of equal positions."""
        n1, n2 = state.slack.shape
        p, tangent = state.p, state.tangent
        if tile.full:
            p, tangent = (equal_positions(x, n1, n2) for x in (p, tangent))
        second = outer(a.before.norm, b.before.norm, False) * (1 - 2 * p)
        eps = epsilon(p)
        error = state.second_error + 8 * eps
        second, tangent = (x.mean(0, keepdims=True) for x in (second, tangent))
        errors = error, state.tangent_error + 8 * eps, state.tangent_excess / len(p)
        return state_of_moments(second, tangent, errors, a, b, tile)

    def apply(self, numbers: Any, x: jax.Array, finite: FiniteLayer) -> jax.Array:
        """[n, ..., channels] -> [n, all]."""
        return x.reshape(len(x), -1)
