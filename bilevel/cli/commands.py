"""The flags of every command.

Nothing here imports JAX, so that help and mistakes are there at once: what a check or an estimate
of memory needs beyond this is imported when it runs, and names are written out (a test holds them
against the spaces').
"""

import dataclasses
import math
import pathlib
from typing import Annotated, Literal

from bilevel.cli import flags
from bilevel.cli.known import CLASSES, check_rows, inputs, pixel_count

ACTIVATIONS = ("relu", "leaky_relu", "sigmoid", "tanh", "swish", "gelu", "erf", "identity")
DARTS_OPERATIONS = (
    *("none", "max_pool_3x3", "avg_pool_3x3", "skip_connect"),
    *("sep_conv_3x3", "sep_conv_5x5", "dil_conv_3x3", "dil_conv_5x5"),
)
NASBENCH201_OPERATIONS = ("none", "skip_connect", "nor_conv_1x1", "nor_conv_3x3", "avg_pool_3x3")
SCORES = (
    *("eigen_nas", "min_eigenvalue", "certified_min_eigenvalue", "cosine_min_eigenvalue"),
    *("condition_number", "spectral_entropy", "label_energy", "log_traces", "knas"),
    *("knas_released", "te_nas", "nasi", "grad_norm", "snip", "grasp", "fisher", "zico", "jacov"),
    *("synflow", "naswot", "regions", "l2_norm"),
)
BASELINES = ("parameters", "multiply-adds", "trainable layers", "conv edges")  # of scores

_DartsOperations = Annotated[tuple[str, ...], flags.Names(DARTS_OPERATIONS)]
_NasBench201Operations = Annotated[tuple[str, ...], flags.Names(NASBENCH201_OPERATIONS)]
_Names = Annotated[tuple[str, ...], flags.Names(ACTIVATIONS)]
Images = Literal["digits", "mnist", "fashion-mnist", "cifar10"]

JOINT_EPOCHS = 10  # joint training takes as many times the inner steps of one lower solve
LONGER = 4  # the hypergradient is held against that through so many times the inner steps


@dataclasses.dataclass(frozen=True)
class Output:
    """Flags that every command has beside those of its job."""

    quick: bool = False
    """Smaller sizes, where none are given here: seconds or minutes on two cores."""
    config: pathlib.Path | None = None
    """The config.json of an earlier run: its flags, where none are given here."""
    quiet: bool = False
    """No progress and no table; errors are still printed."""
    json: bool = False
    """Print what result.json holds, instead of the table."""
    cache: bool = True
    """Keep compiled programs in the user's cache folder, for the next run."""


@dataclasses.dataclass(frozen=True)
class Job(flags.Flags):
    """Flags of every job."""

    data: Images = "digits"
    """Dataset; digits ships with scikit-learn."""
    seed: flags.Seed = 0
    """Seed of all random numbers."""
    out: flags.Out = pathlib.Path("runs/job")
    """Run directory; a number is appended where it holds a run already."""
    progress: bool | None = None
    """Progress bar; by default in a terminal."""


@dataclasses.dataclass(frozen=True)
class Resumable(Job):
    """Flags of every job that goes on where it was."""

    resume: bool = False
    """Go on with the unfinished run in the run directory."""


@dataclasses.dataclass(frozen=True)
class Search(Resumable):
    """What to search, on what, and how; every flag has a default."""

    out: flags.Out = pathlib.Path("runs/search")
    """Run directory; a number is appended where it holds a run already."""
    activations: _Names = ("relu", "leaky_relu", "sigmoid", "tanh", "swish", "gelu")
    """Candidates."""
    geometry: Literal["exponentiate", "project", "softmax"] = "exponentiate"
    """How α stays on the simplex."""
    solver: Literal["unrolled", "truncated", "first-order", "implicit"] = "unrolled"
    """Hypergradient: through all inner steps, the last quarter, none, or implicit (damped CG)."""
    outer: Literal["hinge", "logistic", "squared"] = "hinge"
    """Validation loss; the training loss is the squared one."""
    seeds: flags.Count = 1
    """Independent searches side by side: own splits, own initial weights."""
    steps: flags.Count = 20
    """Outer steps."""
    inner_steps: Annotated[int, flags.Whole(1, 10**7)] = 50
    """Gradient steps of the weights in each outer step."""
    width: flags.Size = 512
    """Hidden units."""
    train: flags.Sample = 300
    """Training rows."""
    valid: flags.Sample = 300
    """Validation rows."""
    test: flags.Sample = 2000
    """Test rows at most."""
    alpha_rate: flags.Rate = 0.3
    """Learning rate of α (Adam)."""

    def check(self) -> None:
        """Raise for flags that cannot be used, before anything is loaded."""
        super().check()
        check_rows(self.data, {"train": self.train, "valid": self.valid})

    def memory(self) -> dict[tuple[str, ...], int]:
        """Weights with their gradient, momentum and start; outputs; history; a kernel."""
        h, units = len(self.activations), self.seeds * self.width
        weights = 4 * units * inputs(self.data)
        found = {
            ("seeds", "width"): 4 * weights,
            ("seeds", "width", "train"): 4 * units * self.train,
            ("seeds", "steps"): 4 * self.seeds * self.steps * h,
            ("seeds", "inner_steps"): 4 * self.seeds * JOINT_EPOCHS * self.inner_steps * h,
            ("train",): 3 * 8 * self.train**2,
        }
        # The weights at every boundary of unrolled blocks, and in one.
        kept = 2 * weights * math.isqrt(LONGER * self.inner_steps)
        return found | {("seeds", "width", "inner_steps"): kept}


@dataclasses.dataclass(frozen=True)
class DeepSearch(Resumable):
    """Flags of every search with shared weights."""

    out: flags.Out = pathlib.Path("runs/search")
    """Run directory; a number is appended where it holds a run already."""
    strategy: Literal[
        "darts-first",
        "darts-second",
        "darts-second-difference",
        "gaea",
        "gaea-single-level",
        "random",
        "joint",
        "unrolled",
    ] = "darts-first"
    """DARTS of first order, of second order, exactly or by its paper's finite difference;
    exponentiated gradient, on validation or on training batches; random search with weight
    sharing; DARTS on training batches alone; DARTS through 5 inner steps."""
    seeds: flags.Count = 1
    """Independent runs: own splits, own initial weights."""
    steps: flags.Count = 600
    """Outer steps of the search."""
    batch_size: flags.Size = 64
    """Rows in a minibatch."""
    epochs: flags.Epochs = 30
    """Passes over the training rows when a network is trained from scratch."""
    weight_rate: flags.Rate | None = None
    """Learning rate of the weights (SGD with momentum 0.9, cosine decay); by default 3 over the
    mean diagonal entry of the tangent kernel at the start."""
    alpha_rate: flags.Rate | None = None
    """Learning rate of α; by default 6 / steps for Adam, 100 / steps for exponentiated gradient."""
    samples: flags.Count = 200
    """Architectures that random search compares at the shared weights."""
    train: flags.Sample = 500
    """Training rows."""
    valid: flags.Size = 500
    """Validation rows."""
    test: flags.Size = 2000
    """Test rows at most."""
    bfloat16: bool = False
    """Activations in bfloat16; weights and losses stay as they are."""

    def check(self) -> None:
        """Raise for flags that no space could use, before anything is loaded."""
        super().check()
        check_rows(self.data, {"train": self.train, "valid": self.valid})
        if self.batch_size > (least := min(self.train, self.valid)):
            raise ValueError(
                f"batch_size: expected at most the {least} rows of a split, got {self.batch_size}."
            )


@dataclasses.dataclass(frozen=True)
class SkipSearch(DeepSearch):
    """What to search, on what, and how; every flag has a default."""

    activations: _Names = ACTIVATIONS[:5]
    """Candidates of every layer."""
    depth: Annotated[int, flags.Whole(3, 1000)] = 5
    """Layers of weights, the last one included."""
    width: flags.Size = 64
    """Hidden units of a layer."""
    parametrization: Literal["ntk", "as_printed", "he"] = "ntk"
    """Initialisation: of the paper's theory, of its Algorithm 1, or He's."""

    def memory(self) -> dict[tuple[str, ...], int]:
        """Weights with their gradient and momentum; a batch's outputs; rows; history."""
        hidden = self.depth - 2
        sizes = inputs(self.data) + hidden * self.width + CLASSES
        simplices = (self.depth - 1) * len(self.activations)
        images = 4 * inputs(self.data) * self.seeds
        return {
            ("seeds", "width", "depth"): 3 * 4 * self.seeds * self.width * sizes,
            ("seeds", "batch_size", "width"): 4 * self.seeds * self.batch_size * self.width,
            ("seeds", "train"): images * self.train,
            ("seeds", "valid"): images * self.valid,
            ("seeds", "steps"): 4 * self.seeds * self.steps * (simplices + hidden),
        }


@dataclasses.dataclass(frozen=True)
class DartsSearch(DeepSearch):
    """What to search, on what, and how; every flag has a default."""

    steps: flags.Count = 300
    """Outer steps of the search."""
    operations: _DartsOperations = DARTS_OPERATIONS
    """Candidates on every edge."""
    cells: flags.Layers = 3
    """Cells of the supernet; DARTS has 8 on CIFAR-10."""
    channels: flags.Size = 8
    """Channels of the first cell; DARTS has 16."""
    final_cells: flags.Layers | None = None
    """Cells of networks trained from scratch; by default as in the supernet; DARTS has 20."""
    final_channels: flags.Size | None = None
    """Channels of the first cell of networks trained from scratch; DARTS has 36."""
    pixels: flags.Size | None = None
    """Average images down to at most this side."""
    weight_rate: flags.Rate = 0.025
    """Learning rate of the weights (SGD with momentum 0.9, cosine decay, weight decay 3e-4,
    gradients clipped at norm 5)."""
    random: flags.CountOrNone = 2
    """Random genotypes to train beside the one found."""
    drop_path: Annotated[float, flags.Share()] = 0.0
    """Probability of dropping a path, rising linearly from 0 to this while a network is trained
    from scratch; DARTS has 0.2."""
    cutout: flags.CountOrNone = 0
    """Side of the square cut out of training images, in pixels; 0: none; DARTS has 16."""
    crop_and_flip: bool = False
    """Move and mirror training images, as DARTS does on CIFAR-10."""
    auxiliary: bool = False
    """A second classifier in training from scratch, as DARTS has; images of 29 pixels or more."""
    remat: bool = True
    """Save memory: compute each edge again in the backward pass."""

    def memory(self) -> dict[tuple[str, ...], int]:
        """Weights with their gradient and momentum; a batch's images in the stem; history."""
        from bilevel.spaces.darts import EDGES

        images = self.batch_size * pixel_count(self.data, self.pixels)
        cells, channels = self.final_cells or self.cells, self.final_channels or self.channels
        pointwise = len(EDGES) * sum(_POINTWISE.get(name, 0) for name in self.operations)
        alpha = 2 * len(EDGES) * len(self.operations)
        return {
            ("cells", "channels"): 3 * 4 * _squares(self.cells, self.channels) * (4 + pointwise),
            ("final_cells", "final_channels"): 3 * 4 * 4 * _squares(cells, channels),
            ("batch_size", "channels"): 2 * images * _STEM * self.channels,
            ("batch_size", "final_channels"): 2 * images * _STEM * channels,
            ("seeds", "steps"): 4 * self.seeds * self.steps * alpha,
        }


_STEM = 3  # the stem has so many times the channels of the first cell


# How many pointwise (1 x 1) convolutions an operation has.
_POINTWISE = {"sep_conv_3x3": 2, "sep_conv_5x5": 2, "dil_conv_3x3": 1, "dil_conv_5x5": 1}


def _squares(cells: int, channels: int) -> int:
    """The sum over cells of their channels squared: the weights of a 1 x 1 convolution in each."""
    from bilevel.spaces.darts.operations import reductions

    total, reduced = 0, reductions(cells)
    for cell in range(cells):
        channels *= 1 + (cell in reduced)
        total += channels**2
    return total


@dataclasses.dataclass(frozen=True)
class NasBench201Search(DeepSearch):
    """What to search, on what, and how; every flag has a default."""

    steps: flags.Count = 300
    """Outer steps of the search."""
    epochs: flags.Epochs = 200
    """Passes over the training rows that training one network takes (the benchmark: 200), to say
    how many random networks could be trained in the time of the search."""
    operations: Annotated[tuple[str, ...], flags.Names(NASBENCH201_OPERATIONS)] = (
        NASBENCH201_OPERATIONS
    )
    """Candidates on every edge."""
    cells: flags.Layers = 5
    """Cells of each of the supernet's three stages."""
    channels: flags.Size = 16
    """Channels of the first stage."""
    pixels: flags.Size | None = None
    """Average images down to at most this side."""
    weight_rate: flags.Rate = 0.025
    """Learning rate of the weights (SGD with momentum 0.9, cosine decay, weight decay 3e-4,
    gradients clipped at norm 5)."""
    remat: bool = True
    """Save memory: compute each cell again in the backward pass."""

    def memory(self) -> dict[tuple[str, ...], int]:
        """Weights with their gradient and momentum; a batch's images in the stem; history."""
        from bilevel.spaces.nasbench201 import EDGES

        images = self.batch_size * pixel_count(self.data, self.pixels)
        alpha = len(EDGES) * len(self.operations)
        weights = convolution_weights(self.operations, self.cells, self.channels)
        return {
            ("cells", "channels"): 3 * 4 * weights,
            ("batch_size", "channels"): 2 * images * self.channels,
            ("seeds", "steps"): 4 * self.seeds * self.steps * alpha,
        }


def convolution_weights(operations: tuple[str, ...], cells: int, channels: int) -> int:
    """The number of weights in the convolutions of all edges of all cells.

    The three stages have one, two and four times ``channels``.
    """
    from bilevel.spaces.nasbench201._genotype import EDGES, SIZES

    each = sum(SIZES.get(name, 0) ** 2 for name in operations)
    return len(EDGES) * cells * (1 + 4 + 16) * channels**2 * each


@dataclasses.dataclass(frozen=True)
class OwnSearch(DeepSearch):
    """What to search, on what, and how; every flag but ``--space`` has a default."""

    space: Annotated[str, flags.Importable()] = ""
    """MODULE:FUNCTION, a function of the number of classes that returns a bilevel.spaces.Space on
    images [n, h, w, c] and labels [n]; the module is looked for in the working directory too."""
    pixels: flags.Size | None = None
    """Average images down to at most this side."""
    random: flags.CountOrNone = 2
    """Random architectures to train beside the one found."""

    def memory(self) -> dict[tuple[str, ...], int]:
        """The rows only: how large the network is is not known."""
        row = 4 * pixel_count(self.data, self.pixels)
        return {("train",): row * self.train, ("valid",): row * self.valid}


@dataclasses.dataclass(frozen=True)
class Certify(Job):
    """Which kernel, on what, and how exactly; every flag has a default."""

    out: flags.Out = pathlib.Path("runs/certify")
    """Run directory; a number is appended where it holds a run already."""
    activations: _Names = ("relu", "tanh", "swish")
    """Candidates: the vertices of the simplex."""
    rows: flags.Sample = 300
    """Training rows, drawn with all classes in their proportions."""
    rtol: Annotated[float, flags.Positive(1e-9, 0.5)] = 1e-3
    """Relative gap between the two ends of the bracket."""

    def memory(self) -> dict[tuple[str, ...], int]:
        """All pairs of activations, in float64."""
        return {("rows",): 8 * (len(self.activations) * self.rows) ** 2}


@dataclasses.dataclass(frozen=True)
class Baseline(Resumable):
    """Which method, on what, and how large; every flag has a default."""

    data: Images | Literal["imdb"] = "digits"  # type: ignore[assignment]
    """Dataset; digits ships with scikit-learn."""
    out: flags.Out = pathlib.Path("runs/baseline")
    """Run directory; a number is appended where it holds a run already."""
    method: Literal[
        "all",
        "weight-sharing",
        "fast-weight-sharing",
        "successive-halving",
        "hyperband",
        "exponentiated-gradient",
        "random-search",
    ] = "all"
    """Random search evaluates every configuration."""
    configs: flags.Count = 32
    """Configurations to choose among, drawn at random; 256 in the paper."""
    dimension: flags.Size | None = None
    """Features of a full evaluation; 512 for digits, 1024 for images, 16384 for texts."""
    train: flags.Size | None = None
    """Training rows; 700 for digits, else 2000."""
    valid: flags.Size | None = None
    """Validation rows; 500 for digits, else 1000."""
    test: flags.Size | None = None
    """Test rows at most; all of digits, else 1000."""
    penalty: flags.Rate = 0.5
    """Weight λ of the penalty in λ |w|² + Σ loss."""

    def check(self) -> None:
        """Raise for flags that cannot be used, before anything is loaded."""
        super().check()
        check_rows(self.data, {name: self.size(name) for name in ("train", "valid")})
        from bilevel.spaces.features.text import BINS

        if self.size("dimension") > BINS:
            raise ValueError(f"dimension: expected at most {BINS}, got {self.dimension}.")

    def memory(self) -> dict[tuple[str, ...], int]:
        """Weights and phases of all features; the configurations."""
        columns = 1 if self.data == "imdb" else CLASSES + 1
        return {
            ("dimension",): 4 * self.size("dimension") * columns,
            ("configs",): 128 * self.configs,
        }

    def size(self, name: str) -> int:
        """A flag; where it is None, its default for the data."""
        given = getattr(self, name)
        return given if given is not None else _SIZES.get(self.data, _OF_IMAGES)[name]


_OF_IMAGES = {"dimension": 1024, "train": 2000, "valid": 1000, "test": 1000}


_SIZES = {
    "digits": {"dimension": 512, "train": 700, "valid": 500, "test": 2000},
    "imdb": _OF_IMAGES | {"dimension": 16384},
}


TOTAL = 15_625  # networks in the benchmark


_Scores = Annotated[tuple[str, ...], flags.Names((*SCORES, "all"))]


_Parts = Annotated[tuple[str, ...], flags.Names((*SCORES, *BASELINES), least=0)]


@dataclasses.dataclass(frozen=True)
class Rank(Resumable):
    """Which networks, which scores, on what; every flag has a default."""

    data: Images = "cifar10"
    """Dataset of the batch that networks are scored on; digits ships with scikit-learn."""
    out: flags.Out = pathlib.Path("runs/rank")
    """Run directory; a number is appended where it holds a run already."""
    scores: _Scores = ("eigen_nas", "min_eigenvalue", "naswot", "synflow")
    """Names in ntk.scores, or 'all' for every one of them."""
    aggregate: _Parts = ()
    """Scores and baselines whose log ranks are added up, as one more score; by default all
    scores."""
    networks: Annotated[int, flags.Whole(2, TOTAL)] | Literal["all"] = 200
    """How many networks to draw, or all 15,625."""
    k: flags.Count = 20
    """How many networks with the best scores have their validation accuracy looked up."""
    pool: flags.Count = 300
    """How many networks these k are chosen from; many such pools are drawn of those scored."""
    batch_size: Annotated[int, flags.Whole(2)] = 32
    """Rows in the batch."""
    cells: flags.Layers = 5
    """Cells of each of the three stages; the benchmark has 5."""
    channels: flags.Size = 16
    """Channels of the first stage; the benchmark has 16."""
    pixels: flags.Size | None = None
    """Average images down to at most this side."""
    at_once: flags.Count = 1
    """Networks side by side in one program: 1 on a CPU, dozens on an accelerator."""
    judged: bool = True
    """Whether to hold the scores against the accuracies in the benchmark's table."""
    epochs: Annotated[int, flags.Whole(0, 10_000)] = 0
    """Passes over the training rows in which the chosen network is trained; 0: it is not."""
    train: flags.Sample = 500
    """Training rows of that network; the batch of the scores is drawn from them."""
    test: flags.Size = 1000
    """Test rows at most."""

    def check(self) -> None:
        """Raise for flags that cannot be used, before anything is loaded."""
        super().check()
        check_rows(self.data, {"train": self.train}, kept=1)
        if "all" in self.scores and len(self.scores) > 1:
            raise ValueError(f"scores: expected names, or all, got {' '.join(self.scores)}.")
        for name in self.aggregate:
            if name not in (known := (*self.score_names, *BASELINES)):
                raise ValueError(
                    f"aggregate: expected names among {', '.join(known)}, got {name!r}."
                )
        if not max(2, self.k) <= self.count:
            raise ValueError(
                f"networks: expected {max(2, self.k)} (--k) to {TOTAL}, or all, got {self.count}."
            )
        if self.k > self.pool:
            raise ValueError(f"k: expected at most the {self.pool} of --pool, got {self.k}.")
        if self.batch_size > self.train:
            raise ValueError(
                f"batch_size: expected at most the {self.train} training rows, "
                f"got {self.batch_size}."
            )

    def memory(self) -> dict[tuple[str, ...], int]:
        """Weights of all operations and their gradient; a batch's images in the stem."""
        images = self.batch_size * pixel_count(self.data, self.pixels)
        weights = convolution_weights(NASBENCH201_OPERATIONS, self.cells, self.channels)
        return {
            ("cells", "channels"): 2 * 4 * weights,
            ("at_once", "batch_size", "channels"): 2 * self.at_once * images * self.channels,
        }

    @property
    def score_names(self) -> tuple[str, ...]:
        """The scores that were asked for."""
        return SCORES if self.scores == ("all",) else self.scores

    @property
    def count(self) -> int:
        """The number of networks."""
        return TOTAL if self.networks == "all" else self.networks


QUICK: dict[type[Job], Job] = {
    Search: Search(steps=5, width=128, train=100, valid=100, test=500),
    SkipSearch: SkipSearch(depth=4, width=32, steps=200, epochs=10, samples=50, test=1000),
    DartsSearch: DartsSearch(
        operations=("none", "max_pool_3x3", "skip_connect", "sep_conv_3x3"),
        channels=4,
        pixels=16,
        steps=100,
        epochs=10,
        batch_size=32,
        samples=20,
        test=1000,
        random=1,
    ),
    NasBench201Search: NasBench201Search(
        cells=1, channels=4, pixels=16, steps=100, batch_size=32, samples=20, test=1000
    ),
    OwnSearch: OwnSearch(steps=100, epochs=10, samples=20, test=1000, random=1),
    Certify: Certify(rows=50),
    Baseline: Baseline(configs=8, dimension=128, train=200, valid=200, test=500),
    Rank: Rank(networks=20, k=5, pool=10, cells=1, channels=4, pixels=16),
}
"""The defaults with ``--quick``."""
