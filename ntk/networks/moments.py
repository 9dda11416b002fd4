"""The effect of every layer on single inputs: second moments, means and tangents at each position.

With s2 the second moment of the features at a position, mu their mean and t the tangent kernel of
an input with itself, as in :mod:`ntk.networks.position_pairs` for two inputs:

========  ==============================  ==========  ==============================
layer     s2                              mu          t
========  ==============================  ==========  ==============================
weights   c_w mean s2 + c_b               0           s2 + c_w mean t
act       E s(u)^2, u ~ N(0, s2)          E s(u)      E s'(u)^2 t
pool      mean of S over two positions    mean mu     mean of T over two positions
flatten   mean s2                         mean mu     mean t
add       sum w^2 s2 + 2 w w' mu mu'      sum w mu    sum w^2 t
========  ==============================  ==========  ==============================

Means are over the window or all positions. Errors are bounded per input: ``noise`` is the relative
error of s2, and ``mean_noise`` the error of mu.
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
    """The table's columns after a layer, and bounds of their errors."""

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
