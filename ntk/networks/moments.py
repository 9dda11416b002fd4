"""The effect of every layer on single inputs: second moments, means and tangents at each position.

The second moment s2 and the tangent kernel t of an input with itself are S and T of
:mod:`ntk.networks.position_pairs` at equal inputs. The mean mu is 0 after weights and E s(u) after
an activation. Pooling and ``flatten`` take its mean, and ``add`` is sum w mu. Errors are bounded
per input: ``noise`` is the relative error of s2, and ``mean_noise`` the error of mu.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ntk.expectations.gaussian import root
from ntk.expectations.hermite import Expansion


class Raw(NamedTuple):
    """The data, before the first layer with weights."""

    x: jax.Array  # [n, P, C]


class Moments(NamedTuple):
    """Second moments, tangents and means after a layer, and bounds of their errors."""

    square: jax.Array  # [n, P], s2
    tangent: jax.Array  # [n, P], t
    mean: jax.Array  # [n, P], mu
    noise: jax.Array  # [n]
    mean_noise: jax.Array  # [n]

    @property
    def norm(self) -> jax.Array:
        """Return the root of s2, [n, P]."""
        return root(self.square)


class LayerFeatures(NamedTuple):
    """One layer on single inputs: all that pairs of them need."""

    before: Any  # Raw or Moments
    after: Any
    value: Expansion | None = None  # of a smooth activation and its slope, [n, P, ...]
    slope: Expansion | None = None
    gain: Any = None  # [n], factor of relative errors in pooling or a sum
    tangent_gain: Any = None
    branches: tuple[Any, ...] = ()  # of a sum: the sites of each
    units: Any = None  # of the data's patches, UnitRows [n, P, ...]


def epsilon(x: jax.Array) -> float:
    """Return the roundoff unit of an array."""
    return float(jnp.finfo(x.dtype).eps)
