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
    from ntk.networks.position_pairs import PairState, Tile
    from ntk.networks.values import Values

Shape = tuple[int, ...]


class Signal(NamedTuple):
    """What is known of the features when planning."""

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
    """What :meth:`LayerStep.apply` is given by the finite network."""

    features: int  # that a layer with weights returns

    def weights(self, dtype: Any, **shapes: Shape) -> dict[str, jax.Array]:
        """Standard normal weights of the layer, by their names."""


class Layer:
    """A layer as it is described: a record that is not changed."""

    combinator: ClassVar[str] = "a layer"  # its name in messages
    after_flatten: ClassVar[bool] = False  # whether it may follow ``flatten``

    def plan(self, signal: Signal, values: "Values") -> Planned:
        """The step for these features; ``values`` has what numbers and names stand for.

        Raises
        ------
        ValueError
            If the layer does not fit the features.
        """
        raise NotImplementedError

    def entries(self) -> Iterable[tuple[Any, tuple[str, ...] | None]]:
        """What may have a name: pairs of a value, or a tuple of values, and None.

        Or of a value, whose name would be that of a vector, and the names of the vector's entries.
        """
        return ()

    def has_weights(self) -> bool:
        """Return whether its outputs are independent of those of another such layer."""
        return False


class LayerStep:
    """A layer as it is computed: static and hashable, a frozen dataclass.

    ``numbers`` are those that :meth:`Layer.plan` returned, ``before`` the features below:
    :class:`ntk.networks.moments.Moments`, or ``Raw`` before the first layer with weights.
    """

    weighted: ClassVar[bool] = False  # whether its finite layer has weights
    makes_outputs: ClassVar[bool] = False  # whether the number of its features may be chosen

    def features(self, numbers: Any, before: Any) -> "LayerFeatures":
        """The layer on single inputs; compiled.

        Raises
        ------
        NotImplementedError
            If the class does not have it.
        """
        raise NotImplementedError

    def pairs(
        self, numbers: Any, a: "LayerFeatures", b: "LayerFeatures", state: "PairState", tile: "Tile"
    ) -> "PairState":
        """The layer on pairs of inputs, whose single ones have features ``a`` and ``b``.

        Raises
        ------
        NotImplementedError
            If the class does not have it.
        """
        raise NotImplementedError

    def apply(self, numbers: Any, x: jax.Array, finite: FiniteLayer) -> jax.Array:
        """The layer of the finite network, [n, ..., channels].

        Raises
        ------
        NotImplementedError
            If the class does not have it.
        """
        raise NotImplementedError

    # ------------------------------------------------------- of layers with weights or windows

    def pairs_of_data(
        self, numbers: Any, a: "LayerFeatures", b: "LayerFeatures", tile: "Tile"
    ) -> "PairState | None":
        """The layer on pairs of the data; None if its output is no Gaussian process yet."""
        return None

    def pools(self) -> bool:
        """Return whether it needs all pairs of positions, not only equal ones."""
        return False

    def position_counts(self) -> tuple[int, ...]:
        """How many positions there are on the way through it, if it changes them."""
        return ()

    def values_per_input(self, positions: int) -> int:
        """About how many numbers an input keeps for it, behind so many positions."""
        return 20 * max(self.position_counts(), default=positions)

    def patch_values(self, channels: int) -> int | None:
        """How many numbers an input's patches take, if it is on the data."""
        return None

    # ------------------------------------------------- of layers with functions or other layers

    def visit(
        self, numbers: Any, before: Any, state: Any, full: bool, how: "Resolution"
    ) -> "LayerFeatures":
        """:meth:`features`, in a program of its own.

        ``state``: of all pairs of positions of each input, if pooling follows; ``full``: whether
        they are needed; ``how``: the resolution of expansions.
        """
        return compiled_features(self, numbers, before)

    def skeleton(self) -> "LayerStep":
        """The step as programs for pairs are compiled for it: without names of activations."""
        return self

    def tabulate(self, numbers: Any, how: "Resolution", dtype: Any) -> tuple["LayerStep", Any]:
        """The step and its numbers with tables of its functions."""
        return self, numbers

    def table_values(self, numbers: Any, site: "LayerFeatures") -> Iterator["Expansion"]:
        """Expansions by its tables at the norms below."""
        yield from ()


@functools.partial(jax.jit, static_argnums=0)
def compiled_features(step: LayerStep, numbers: Any, before: Any) -> "LayerFeatures":
    """:meth:`LayerStep.features`, compiled once for each step and shape."""
    return step.features(numbers, before)
