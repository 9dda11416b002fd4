"""Records of the layers of a network."""

import dataclasses
from typing import Any

from ntk.expectations.activations import Activation


@dataclasses.dataclass(frozen=True, eq=False)
class Weights:
    """``dense`` and ``conv``; for ``dense`` the window is None."""

    window: int | tuple[int, ...] | None
    strides: int | tuple[int, ...]
    padding: str
    weight_variance: Any
    bias_variance: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Elementwise:
    """``act``: activations, and their weights (numbers or names) or the name of them all."""

    activations: tuple[Activation, ...]
    weights: tuple[Any, ...] | str


@dataclasses.dataclass(frozen=True, eq=False)
class AveragePool:
    """``average_pool``; the window is None for all positions."""

    window: int | tuple[int, ...] | None
    strides: int | tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Flatten:
    """``flatten``."""


@dataclasses.dataclass(frozen=True, eq=False)
class Add:
    """``add``: branches, and their weights as those of :class:`Elementwise`."""

    branches: tuple[Any, ...]  # networks
    weights: tuple[Any, ...] | str
