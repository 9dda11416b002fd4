"""The flags of the searches with shared weights: see :mod:`bilevel.cli.flags.commands`."""

import dataclasses
import json
import pathlib
from typing import Annotated, Any, ClassVar, Literal

from bilevel.cli.flags import rules
from bilevel.cli.flags.commands import ACTIVATIONS, Data, Names, Resumable
from bilevel.internal.import_function import check_module

DARTS_OPERATIONS = (
    *("none", "max_pool_3x3", "avg_pool_3x3", "skip_connect"),
    *("sep_conv_3x3", "sep_conv_5x5", "dil_conv_3x3", "dil_conv_5x5"),
)
NASBENCH201_OPERATIONS = ("none", "skip_connect", "nor_conv_1x1", "nor_conv_3x3", "avg_pool_3x3")
Strategy = Literal[
    "darts-first",
    "darts-second",
    "darts-second-difference",
    "gaea",
    "gaea-single-level",
    "random",
    "joint",
    "unrolled",
]


@dataclasses.dataclass(frozen=True)
class DeepSearch(Resumable):
    """Flags of every search with shared weights."""

    out: rules.Out = pathlib.Path("runs/search")
    strategy: Strategy = "darts-first"
    """DARTS of first order, of second order, exactly or by its paper's finite difference;
    exponentiated gradient, on validation or on training batches; random search with weight
    sharing; DARTS on training batches alone; DARTS through 5 inner steps."""
    seeds: rules.Count = 1
    """Independent runs: own splits, own initial weights."""
    steps: rules.Count = 600
    """Outer steps of the search."""
    batch_size: rules.Size = 64
    """Rows in a minibatch."""
    epochs: rules.Epochs = 30
    """Passes over the training rows when a network is trained from scratch."""
    weight_rate: rules.Rate | None = None
    """Learning rate of the weights (SGD with momentum 0.9, cosine decay); by default 3 over the
    mean diagonal entry of the tangent kernel at the start."""
    alpha_rate: rules.Rate | None = None
    """Learning rate of α; by default 6 / steps for Adam, 100 / steps for exponentiated gradient."""
    samples: rules.Count = 200
    """Architectures that random search compares at the shared weights."""
    train: rules.Sample = 500
    """Training rows."""
    valid: rules.Size = 500
    """Validation rows."""
    test: rules.Size = 2000
    """Test rows at most."""
    bfloat16: bool = False
    """Activations in bfloat16; weights and losses do not change."""

    def _check_together(self) -> None:
        super()._check_together()
        least = min(self.train, self.valid)
        self.check_at_most("batch_size", least, f"the {least} rows of a split")


@dataclasses.dataclass(frozen=True)
class SkipSearch(DeepSearch):
    """Search activations and skip connections of a deep network, layer by layer."""

    strategy: Strategy | Literal["eigen-nas"] = "darts-first"  # type: ignore[assignment]
    """As in the other searches; or eigen-nas: of --samples random architectures, train the --kept
    ones whose infinite kernel has the largest smallest eigenvalue."""
    kept: rules.Count = 5
    """Architectures that eigen-nas trains, next to as many random ones."""
    activations: Names = ACTIVATIONS[:5]
    """Candidates of every layer."""
    depth: Annotated[int, rules.between(3, 1000)] = 5
    """Layers of weights, the last one included."""
    width: rules.Size = 64
    """Hidden units of a layer."""
    parametrization: Literal["ntk", "as_printed", "he"] = "ntk"
    """Initialisation: of the paper's theory, of its Algorithm 1, or He's."""
    quick: ClassVar[dict[str, Any]] = dict(
        depth=4, width=32, steps=200, epochs=10, samples=50, test=1000
    )

    def _check_together(self) -> None:
        super()._check_together()
        if self.strategy == "eigen-nas":
            self.check_at_most("kept", self.samples, f"the {self.samples} samples")


@dataclasses.dataclass(frozen=True)
class CellSearch(DeepSearch):
    """Flags of every search of cells."""

    steps: rules.Count = 300
    pixels: rules.Size | None = None
    """Average images down to at most this side."""
    weight_rate: rules.Rate = 0.025
    """Learning rate of the weights (SGD with momentum 0.9, cosine decay, weight decay 3e-4,
    gradients clipped at norm 5)."""
    quick: ClassVar[dict[str, Any]] = dict(
        channels=4, pixels=16, steps=100, batch_size=32, samples=20, test=1000
    )


@dataclasses.dataclass(frozen=True)
class DartsSearch(CellSearch):
    """Search the cells of a convolutional network."""

    operations: Annotated[tuple[str, ...], rules.names(DARTS_OPERATIONS)] = DARTS_OPERATIONS
    """Candidates on every edge."""
    cells: rules.Layers = 3
    """Cells of the supernet; DARTS has 8 on CIFAR-10."""
    channels: rules.Channels = 8
    """Channels of the first cell; DARTS has 16."""
    final_cells: rules.Layers | None = None
    """Cells of networks trained from scratch; by default as in the supernet; DARTS has 20."""
    final_channels: rules.Channels | None = None
    """Channels of the first cell of networks trained from scratch; DARTS has 36."""
    random: rules.CountOrNone = 2
    """Random genotypes to train next to the one found."""
    drop_path: Annotated[float, rules.between(0, under=1)] = 0.0
    """Probability of dropping a path, rising linearly from 0 to this while a network is trained
    from scratch; DARTS has 0.2."""
    cutout: rules.CountOrNone = 0
    """Side of the square cut out of training images, in pixels; 0: none; DARTS has 16."""
    crop_and_flip: bool = False
    """Move and mirror training images, as DARTS does on CIFAR-10."""
    auxiliary: bool = False
    """A second classifier in training from scratch, as DARTS has; images of 29 pixels or more."""
    remat: bool = True
    """Save memory: compute each edge again in the backward pass."""
    quick: ClassVar[dict[str, Any]] = CellSearch.quick | dict(
        operations=("none", "max_pool_3x3", "skip_connect", "sep_conv_3x3"), epochs=10, random=1
    )


@dataclasses.dataclass(frozen=True)
class NasBench201Search(CellSearch):
    """Search the cell of NAS-Bench-201, and look up the accuracy of its network."""

    epochs: rules.Epochs = 200
    """Passes over the training rows that training one network takes (the benchmark: 200), to say
    how many random networks could be trained in the time of the search."""
    operations: Annotated[tuple[str, ...], rules.names(NASBENCH201_OPERATIONS)] = (
        NASBENCH201_OPERATIONS
    )
    """Candidates on every edge."""
    cells: rules.Layers = 5
    """Cells of each of the supernet's three stages."""
    channels: rules.Channels = 16
    """Channels of the first stage."""
    remat: bool = True
    """Save memory: compute each cell again in the backward pass."""
    quick: ClassVar[dict[str, Any]] = CellSearch.quick | dict(cells=1)


@dataclasses.dataclass(frozen=True)
class OwnSearch(DeepSearch):
    """Search a space of your own, --space MODULE:FUNCTION."""

    space: rules.Importable = ""
    """MODULE:FUNCTION, a function of the number of classes that returns a bilevel.spaces.Space on
    images [n, h, w, c] and labels [n]; the module is looked for in the working directory too."""
    pixels: rules.Size | None = None
    """Average images down to at most this side."""
    random: rules.CountOrNone = 2
    """Random architectures to train next to the one found."""
    quick: ClassVar[dict[str, Any]] = dict(steps=100, epochs=10, samples=20, test=1000, random=1)

    def _check_together(self) -> None:
        super()._check_together()
        check_module("space", self.space)


@dataclasses.dataclass(frozen=True)
class Train(Resumable):
    """Train the network that a search found, from scratch; as in bilevel train runs/search."""

    run: rules.Out | None = None
    """Run directory of the finished search. The flag's name may be left out, if it comes first."""
    search: rules.CountOrNone | None = None
    """Number of the search in RUN, from 0; by default the one of smallest validation error."""
    data: Data | None = None  # type: ignore[assignment]
    """Dataset or your own rows, as in the searches; by default those of RUN."""
    out: rules.Out = pathlib.Path("runs/train")
    seeds: rules.Count = 1
    """Independent trainings: own initial weights, own order of the rows. Take 3 or more for a
    standard error."""
    epochs: rules.Epochs | None = None
    """Passes over the training rows; by default 30, or more for at least 1,000 steps: 5 minutes for
    a network of search-darts on images of 28 x 28, with two cores."""
    batch_size: rules.Size = 64
    """Rows in a minibatch."""
    weight_rate: rules.Rate | None = None
    """Learning rate (SGD with momentum 0.9, cosine decay); by default 0.025 for networks of cells,
    for others 3 over the mean diagonal entry of the tangent kernel at the start."""
    train: rules.Sample | Literal["all"] | None = None
    """Training rows, or all; by default as many as RUN had for training and validation."""
    test: rules.Size = 2000
    """Test rows at most."""
    random: rules.CountOrNone = 20
    """Architectures to draw for each seed. The nearest to the found one in number of weights is
    trained for comparison; 0: none."""
    single: bool = True
    """Train the best single operation too, for networks of cells. To choose it, each candidate is
    trained for a fifth of the epochs: in all 4.4 times the time of one network of DARTS."""
    cells: rules.Layers | None = None
    """Cells, for networks of cells; by default as in RUN. DARTS has 20 on CIFAR-10."""
    channels: rules.Channels | None = None
    """Channels of the first cell, for networks of cells; by default as in RUN. DARTS has 36."""
    crop_and_flip: bool = False
    """Move and mirror training images."""
    cutout: rules.CountOrNone = 0
    """Side of the square cut out of training images, in pixels; 0: none."""
    quick: ClassVar[dict[str, Any]] = dict(epochs=5, test=500, random=5, single=False)

    def _check_together(self) -> None:
        super()._check_together()
        result = self.search_result()
        searches = len(result["alpha"] if "alpha" in result else result["architectures"])
        if self.search is not None:
            self.check_at_most("search", searches - 1)
        if isinstance(self.train, int):
            self.check_at_most("batch_size", self.train, f"the {self.train} training rows")
        cells = result.get("space") in ("darts", "nasbench201")
        if not cells and (size := self.cells or self.channels):
            flag = "cells" if self.cells else "channels"
            raise ValueError(f"{flag}: expected a search of cells in {self.run}, got {size}.")

    def search_result(self) -> dict[str, Any]:
        """Return the content of ``result.json`` in RUN."""
        if self.run is None:
            raise ValueError("run: expected a finished search, as in bilevel train RUN, got none.")
        try:
            result = json.loads((self.run / "result.json").read_bytes())
        except (OSError, ValueError):
            result = None
        if not isinstance(result, dict) or not {"alpha", "architectures"} & set(result):
            got = "no result.json" if result is None else "a run of another command"
            raise ValueError(
                f"run: expected the directory of a finished search, got {rules.shown(self.run)} "
                f"({got})."
            )
        return result
