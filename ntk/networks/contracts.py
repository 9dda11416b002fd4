"""The contract of a layer: read this first, and to write a layer of your own.

A layer has two sides, which may be one class:

* A :class:`Layer` is the description, what a combinator puts into a
  :class:`~ntk.networks.Network`: a record of numbers and of names, which are entries of ``alpha``.
* A :class:`LayerStep` is what is computed. It is static and hashable (a frozen dataclass), and its
  numbers are arrays that its methods are given: one compiled program serves all networks of one
  structure.

A new layer is one file, with these methods and a function that returns ``Network((MyLayer(),))``:

=============================  ==================================================================
method                         what it gives
=============================  ==================================================================
:meth:`Layer.plan`             the step, its numbers, and what is known of the features behind it
:meth:`Layer.entries`          the numbers and names in the description; none by default
:meth:`LayerStep.features`     the layer on single inputs, at infinite width
:meth:`LayerStep.pairs`        the layer on pairs of inputs, at infinite width
:meth:`LayerStep.apply`        the layer of the finite network
=============================  ==================================================================

The other methods have defaults, for layers that act at each position on its own, without weights. A
layer with weights asks for them in ``apply`` and has ``weighted = True``.
:mod:`ntk.networks.moments` and :mod:`ntk.networks.position_pairs` have the formulas of all layers,
the records that these methods take and return, and the arithmetic that layers share.
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
    gaussian: bool  # at infinite width, of mean 0
    raw: bool = False  # the data themselves
    flat: bool = False  # positions side by side


class Planned(NamedTuple):
    """A layer on features of one shape."""

    step: "LayerStep"
    numbers: Any  # arrays, a pytree
    signal: Signal  # behind the layer


class FiniteLayer(Protocol):
    """The argument ``finite`` of :meth:`LayerStep.apply`."""

    features: int  # that a layer with weights returns

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

    ``numbers`` are those that :meth:`Layer.plan` returned. ``before`` are the features below:
    :class:`ntk.networks.moments.Moments`, or ``Raw`` before the first layer with weights. A method
    that a class lacks raises ``NotImplementedError``.
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

    # ------------------------------------------------------- of layers with weights or windows

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
        """Return about how many numbers an input stores for it, after ``positions`` positions."""
        return 20 * max(self.position_counts(), default=positions)

    def patch_values(self, channels: int) -> int | None:
        """Return how many numbers an input's patches take, if the layer is on the data."""
        return None

    # ------------------------------------------------- of layers with functions or other layers

    def visit(
        self, numbers: Any, before: Any, state: Any, full: bool, how: "Resolution"
    ) -> "LayerFeatures":
        """Run :meth:`features` in a separate program.

        ``state`` is that of all pairs of positions of each input, if pooling follows. ``full`` says
        whether they are needed, ``how`` is the resolution of expansions.
        """
        return compiled_features(self, numbers, before)

    def skeleton(self) -> "LayerStep":
        """Return the step without names of activations: pairs are compiled for it."""
        return self

    def tabulate(self, numbers: Any, how: "Resolution", dtype: Any) -> tuple["LayerStep", Any]:
        """Return the step and its numbers with tables of its functions."""
        return self, numbers

    def table_values(self, numbers: Any, site: "LayerFeatures") -> Iterator["Expansion"]:
        """Yield expansions by its tables at the norms below."""
        yield from ()


@functools.partial(jax.jit, static_argnums=0)
def compiled_features(step: LayerStep, numbers: Any, before: Any) -> "LayerFeatures":
    """Run :meth:`LayerStep.features`, compiled once for each step and shape."""
    return step.features(numbers, before)
