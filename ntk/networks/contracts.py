"""The contract of a layer: read this first, and to write your own layer.

A layer has two sides, which may be one class:

* A :class:`Layer` is the description: numbers, and names of entries in ``alpha``. A combinator puts
  it into a :class:`~ntk.networks.Network`.
* A :class:`LayerStep` is the computation. It is static and hashable (a frozen dataclass). Its
  methods get the numbers as arrays, so one compiled program serves all networks of one structure.

A new layer is one file:

* its description, with :meth:`Layer.plan`, and :meth:`Layer.entries` if it has numbers or names;
* its step, with :meth:`LayerStep.features`, :meth:`LayerStep.pairs` and :meth:`LayerStep.apply`;
* a function that returns ``Network((MyLayer(),))``.

The other methods have defaults for layers without weights that act on each position separately. A
layer with weights asks for them in ``apply`` and has ``weighted = True``.
:mod:`ntk.networks.moments` and :mod:`ntk.networks.position_pairs` have the formulas of all layers,
and the records that these methods take and return.
"""

import functools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import jax

if TYPE_CHECKING:
    from ntk.expectations.hermite import Expansion
    from ntk.infinite.layer_expansions import Resolution
    from ntk.networks.moments import LayerFeatures
    from ntk.networks.plan import Values
    from ntk.networks.position_pairs import PairState, Tile

Shape = tuple[int, ...]


class Signal(NamedTuple):
    """Facts about the features when planning."""

    shape: Shape  # of the positions
    gaussian: bool  # Gaussian of mean 0 at infinite width
    raw: bool = False  # the data
    flat: bool = False  # all positions in one vector


class Planned(NamedTuple):
    """A layer on features of one shape."""

    step: "LayerStep"
    numbers: Any  # arrays, a pytree
    signal: Signal  # behind the layer


class FiniteLayer(Protocol):
    """The argument ``finite`` of :meth:`LayerStep.apply`."""

    features: int  # number of output features of a layer with weights

    def weights(self, dtype: Any, **shapes: Shape) -> dict[str, jax.Array]:
        """Return standard normal weights of the layer, by their names."""


class Layer:
    """The description of a layer: an immutable record."""

    combinator: ClassVar[str] = "a layer"  # its name in messages
    after_flatten: ClassVar[bool] = False  # whether it may follow ``flatten``

    def plan(self, signal: Signal, values: "Values") -> Planned:
        """Return the step for these features; ``values`` looks up numbers and names.

        Raises
        ------
        ValueError
            If the layer does not fit the features.
        """
        raise NotImplementedError

    def entries(self) -> Iterable[tuple[Any, tuple[str, ...] | None]]:
        """Return the values that may be names of entries in ``alpha``, as pairs.

        A pair is ``(value or tuple of values, None)``, or a vector's name with its entries' names.
        """
        return ()

    def has_weights(self) -> bool:
        """Return whether two such layers have independent outputs."""
        return False


class LayerStep:
    """The computation of a layer: static and hashable, a frozen dataclass.

    ``numbers`` come from :meth:`Layer.plan`. ``before`` are the features below:
    :class:`ntk.networks.moments.Moments`, or ``Raw`` before the first layer with weights. Methods
    without a default raise ``NotImplementedError``.
    """

    weighted: ClassVar[bool] = False  # whether its finite layer has weights
    makes_outputs: ClassVar[bool] = False  # whether the number of its features may be chosen

    def features(self, numbers: Any, before: Any) -> "LayerFeatures":
        """Return the layer on single inputs; compiled."""
        raise NotImplementedError

    def pairs(
        self, numbers: Any, a: "LayerFeatures", b: "LayerFeatures", state: "PairState", tile: "Tile"
    ) -> "PairState":
        """Return the layer on pairs of inputs, with the features ``a`` and ``b`` of single ones."""
        raise NotImplementedError

    def apply(self, numbers: Any, x: jax.Array, finite: FiniteLayer) -> jax.Array:
        """Return the output of the finite network's layer, [n, ..., channels]."""
        raise NotImplementedError

    # For layers with weights or windows.

    def pairs_of_data(
        self, numbers: Any, a: "LayerFeatures", b: "LayerFeatures", tile: "Tile"
    ) -> "PairState | None":
        """Return the layer on pairs of the data; None if it is not a Gaussian process yet."""
        return None

    def pools(self) -> bool:
        """Return whether it needs all pairs of positions, instead of equal ones only."""
        return False

    def position_counts(self) -> tuple[int, ...]:
        """Return the numbers of positions inside the layer, if it changes them."""
        return ()

    def values_per_input(self, positions: int) -> int:
        """Return about how many numbers an input of ``positions`` positions stores here."""
        return 20 * max(self.position_counts(), default=positions)

    def patch_values(self, channels: int) -> int | None:
        """Return how many numbers an input's patches take, if the layer is on the data."""
        return None

    # For layers with functions or other layers.

    def visit(
        self, numbers: Any, before: Any, state: Any, full: bool, how: "Resolution"
    ) -> "LayerFeatures":
        """Run :meth:`features` in a separate program.

        If pooling follows, ``state`` holds all pairs of positions of each input. ``full`` is true
        if they are needed, and ``how`` is the resolution of expansions.
        """
        return compiled_features(self, numbers, before)

    def skeleton(self) -> "LayerStep":
        """Return the step without names of activations: pairs are compiled for it."""
        return self

    def tabulate(self, numbers: Any, how: "Resolution", dtype: Any) -> tuple["LayerStep", Any]:
        """Return the step and its numbers with tables of its functions."""
        return self, numbers

    def table_values(self, numbers: Any, site: "LayerFeatures") -> Iterator["Expansion"]:
        """Yield expansions by its tables at the norms below, from the layer's features."""
        yield from ()


@functools.partial(jax.jit, static_argnums=0)
def compiled_features(step: LayerStep, numbers: Any, before: Any) -> "LayerFeatures":
    """Run :meth:`LayerStep.features`, compiled once for each step and shape."""
    return step.features(numbers, before)
