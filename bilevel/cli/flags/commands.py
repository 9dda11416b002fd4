"""The flags of every command. JAX is not imported, so that help and mistakes are answered at once.

A test compares the names here with those of the library.
"""

import dataclasses
import pathlib
from typing import Annotated, Any, ClassVar, Literal

from bilevel.cli.flags import rules
from bilevel.cli.flags.datasets import SOURCES, check_rows, exists, is_function
from bilevel.internal.import_function import check_module, names_function
from ntk.scores.registry import HOST_SCORES, builtin_score_names

ACTIVATIONS = ("relu", "leaky_relu", "sigmoid", "tanh", "swish", "gelu", "erf", "identity")
SCORES = tuple(sorted((*builtin_score_names(), *HOST_SCORES)))
BASELINES = ("parameters", "multiply-adds", "trainable layers", "conv edges")  # of scores
Names = Annotated[tuple[str, ...], rules.names(ACTIVATIONS)]
Data = Annotated[str, rules.form(exists, SOURCES)]
Devices = rules.Count | Literal["all"]


@dataclasses.dataclass(frozen=True)
class Output:
    """Flags that every command has in addition to those of its job."""

    quick: bool = False
    """Smaller sizes, unless given here: seconds or minutes on two cores."""
    config: pathlib.Path | None = None
    """The config.json of an earlier run: its flags, unless given here."""
    quiet: bool = False
    """No progress and no table; errors are still printed."""
    json: bool = False
    """Print the content of result.json instead of the table."""
    log: rules.Out | None = None
    """Append the content of the progress bar, phases and losses, to this file as JSON lines."""
    cache: bool = True
    """Keep compiled programs in the user's cache folder, for the next run."""


@dataclasses.dataclass(frozen=True)
class Job:
    """Flags of every job."""

    data: Data = "digits"
    """digits (ships with scikit-learn), mnist, fashion-mnist or cifar10; or your own rows: FILE.npz
    with x and y, a folder with CLASS/*.png, or MODULE:FUNCTION, which returns x and y in a dict."""
    seed: rules.Seed = 0
    """Seed of all random numbers."""
    out: rules.Out = pathlib.Path("runs/job")
    """Run directory; a number is appended if it exists."""
    progress: bool | None = None
    """Progress bar; by default in a terminal. Or --progress, --no-progress."""
    changeable: ClassVar[tuple[str, ...]] = ()  # flags that --resume may change
    # Sizes of --quick: no download. Old versions of tyro make a flag of a plain ClassVar.
    quick: ClassVar[dict[str, Any]] = {}

    def size(self, name: str) -> int:
        """Return the flag ``name``, which counts rows."""
        return getattr(self, name)

    def check(self) -> None:
        """Raise a ValueError that names the flag, if a flag cannot be used."""
        for name, hint in rules.hints(type(self)).items():
            value = getattr(self, name)
            if expected := rules.fault(hint, value):
                raise ValueError(f"{name}: {expected}, got {rules.shown(value)}.")
        self._check_together()

    def check_at_most(self, name: str, most: int, of: str = "") -> None:
        """Raise a ValueError if the flag ``name`` is larger than ``most``."""
        if (value := getattr(self, name)) > most:
            raise ValueError(f"{name}: expected at most {of or most}, got {value}.")

    def _check_together(self) -> None:
        """Raise a ValueError if flags do not fit each other; subclasses call it first."""
        # None: `bilevel train` takes the data of the search.
        if self.data is not None and is_function(self.data):
            check_module("data", self.data)
        if hasattr(self, "valid"):
            check_rows(self.data, {name: self.size(name) for name in ("train", "valid")})


@dataclasses.dataclass(frozen=True)
class Resumable(Job):
    """Flags of every job that can be resumed."""

    resume: bool = False
    """Resume the unfinished run in the run directory."""


@dataclasses.dataclass(frozen=True)
class Search(Resumable):
    """Search the activation of a one-hidden-layer network, and compare with every baseline."""

    out: rules.Out = pathlib.Path("runs/search")
    activations: Names = ("relu", "leaky_relu", "sigmoid", "tanh", "swish", "gelu")
    """Candidates."""
    geometry: Literal["exponentiate", "project", "softmax"] = "exponentiate"
    """The update that keeps α on the simplex."""
    solver: Literal["unrolled", "truncated", "first-order", "implicit"] = "unrolled"
    """Hypergradient: through all inner steps, the last quarter, none, or implicit (damped CG)."""
    outer: Literal["hinge", "logistic", "squared"] = "hinge"
    """Validation loss; the training loss is the squared one."""
    seeds: rules.Count = 1
    """Independent searches side by side: own splits, own initial weights."""
    devices: Devices = 1
    """Devices that the searches are spread over, a divisor of their number; or all."""
    distributed: bool = False
    """One of multiple processes, each started with this line: use the devices of all."""
    steps: rules.Count = 20
    """Outer steps."""
    inner_steps: Annotated[int, rules.between(1, 10**7)] = 50
    """Gradient steps of the weights in each outer step."""
    width: rules.Size = 512
    """Hidden units."""
    train: rules.Sample = 300
    """Training rows."""
    valid: rules.Sample = 300
    """Validation rows."""
    test: rules.Sample = 2000
    """Test rows at most."""
    weight_rate: rules.Rate | None = None
    """Learning rate of the weights (SGD with Nesterov's momentum 0.9); by default 1 over the
    curvature of the training loss, for each network."""
    alpha_rate: rules.Rate = 0.3
    """Learning rate of α (Adam)."""
    changeable: ClassVar[tuple[str, ...]] = "steps", "devices", "distributed"
    quick: ClassVar[dict[str, Any]] = dict(steps=5, width=128, train=100, valid=100, test=500)


@dataclasses.dataclass(frozen=True)
class Certify(Job):
    """Certify the smallest eigenvalue of the kernel over all mixtures of activations."""

    out: rules.Out = pathlib.Path("runs/certify")
    activations: Names = ("relu", "tanh", "swish")
    """Candidates: the vertices of the simplex."""
    kernel: rules.Importable | None = None
    """MODULE:FUNCTION instead, a function that returns a kernel function k(x1, x2) of images
    [n, h, w, c], or several by name, which are mixed; as in my_module:my_kernels."""
    pixels: rules.Size | None = None
    """Average images down to at most this side, for --kernel."""
    rows: rules.Sample = 300
    """Training rows, drawn with all classes in their proportions."""
    rtol: Annotated[float, rules.between(1e-9, 0.5)] = 1e-3
    """Relative gap between the two ends of the bracket."""
    quick: ClassVar[dict[str, Any]] = dict(rows=50)

    def _check_together(self) -> None:
        super()._check_together()
        if self.kernel is not None:
            check_module("kernel", self.kernel)
        if self.pixels is not None and self.kernel is None:
            raise ValueError(f"pixels: expected --kernel next to it, got {self.pixels} alone.")


@dataclasses.dataclass(frozen=True)
class Baseline(Resumable):
    """Choose a feature map by weight sharing, Hyperband, random search and the like."""

    data: Data | Literal["imdb"] = "digits"
    """digits (ships with scikit-learn), mnist, fashion-mnist, cifar10 or imdb; or your own rows:
    FILE.npz with x and y, a folder with CLASS/*.png, or MODULE:FUNCTION, which returns x and y in a
    dict."""
    out: rules.Out = pathlib.Path("runs/baseline")
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
    configs: rules.Count = 32
    """Configurations to choose among, drawn at random; 256 in the paper."""
    dimension: Annotated[int, rules.between(1, 2**30)] | None = None
    """Features of a full evaluation; 512 for digits, 1024 for images, 16384 for texts."""
    train: rules.Size | None = None
    """Training rows; 700 for digits, else 2000."""
    valid: rules.Size | None = None
    """Validation rows; 500 for digits, else 1000."""
    test: rules.Size | None = None
    """Test rows at most; all of digits, else 1000."""
    penalty: rules.Rate = 0.5
    """Weight λ of the penalty in λ |w|² + Σ loss."""
    devices: Devices = 1
    """Devices that the rows are spread over, a divisor of their number; or all. Images only."""
    changeable: ClassVar[tuple[str, ...]] = ("devices",)
    quick: ClassVar[dict[str, Any]] = dict(configs=8, dimension=128, train=200, valid=200, test=500)

    def _check_together(self) -> None:
        super()._check_together()
        if self.data == "imdb" and self.devices != 1:
            raise ValueError(
                f"devices: expected 1 for texts, which the host computes, got {self.devices}."
            )

    def size(self, name: str) -> int:
        """Return a flag; if it is None, its default for the data."""
        given = getattr(self, name)
        return given if given is not None else _SIZES.get(self.data, _OF_IMAGES)[name]


_OF_IMAGES = {"dimension": 1024, "train": 2000, "valid": 1000, "test": 1000}
_SIZES = {
    "digits": {"dimension": 512, "train": 700, "valid": 500, "test": 2000},
    "imdb": _OF_IMAGES | {"dimension": 16384},
}


TOTAL = 15_625  # networks in the benchmark
_DEFAULT_SCORES = ("eigen_nas", "min_eigenvalue", "naswot", "synflow")
_Scores = Annotated[tuple[str, ...], rules.names((*SCORES, "all"), functions=True)]
_Parts = Annotated[tuple[str, ...], rules.names((*SCORES, *BASELINES), least=0, functions=True)]


@dataclasses.dataclass(frozen=True)
class Rank(Resumable):
    """Rank the networks of NAS-Bench-201 by train-free scores, and judge the scores."""

    data: Data = "cifar10"
    """Images of the batch that networks are scored on: digits (ships with scikit-learn), mnist,
    fashion-mnist, cifar10, or your own: FILE.npz with x and y, a folder with CLASS/*.png, or
    MODULE:FUNCTION, which returns x and y in a dict."""
    out: rules.Out = pathlib.Path("runs/rank")
    scores: _Scores = _DEFAULT_SCORES
    """Names in ntk.scores, or 'all' for every one of them; MODULE:FUNCTION for a score of your own,
    score(key, apply, params, batch), larger is better."""
    aggregate: _Parts = ()
    """Scores and baselines whose log ranks are added up, as one more score; by default all
    scores."""
    networks: Annotated[int, rules.between(2, TOTAL)] | Literal["all"] = 200
    """How many networks to draw, or all 15,625."""
    k: rules.Count = 20
    """Number of networks with the best scores whose validation accuracy is looked up."""
    pool: rules.Count = 300
    """Number of networks that these k are chosen from; many pools of this size are drawn."""
    batch_size: Annotated[int, rules.between(2)] = 32
    """Rows in the batch."""
    cells: rules.Layers = 5
    """Cells of each of the three stages; the benchmark has 5."""
    channels: rules.Channels = 16
    """Channels of the first stage; the benchmark has 16."""
    pixels: rules.Size | None = None
    """Average images down to at most this side."""
    devices: Devices = 1
    """Devices that the networks scored side by side are spread over; or all."""
    distributed: bool = False
    """One of multiple processes, each started with this line: use the devices of all."""
    at_once: rules.Count = 1
    """Networks side by side in one program: 1 on a CPU, dozens on an accelerator."""
    judged: bool = True
    """Whether to compare the scores with the accuracies in the benchmark's table; on your own
    images only if given."""
    epochs: Annotated[int, rules.between(0, 10_000)] = 0
    """Passes over the training rows for training the chosen network; 0: no training."""
    train: rules.Sample = 500
    """Training rows of that network; the batch of the scores is drawn from them."""
    test: rules.Size = 1000
    """Test rows at most."""
    changeable: ClassVar[tuple[str, ...]] = (
        *("networks", "scores", "aggregate", "k", "pool"),
        *("devices", "at_once", "distributed"),
    )
    quick: ClassVar[dict[str, Any]] = dict(
        data="digits", networks=20, k=5, pool=10, cells=1, channels=4, pixels=16
    )

    def _check_together(self) -> None:
        super()._check_together()
        check_rows(self.data, {"train": self.train}, reserved=1)
        for name in self.own_scores:
            check_module("scores", name)
        if "all" in self.scores and len(self.scores) > 1 + len(self.own_scores):
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
        self.check_at_most("k", self.pool, f"the {self.pool} of --pool")
        self.check_at_most("batch_size", self.train, f"the {self.train} training rows")

    @property
    def score_names(self) -> tuple[str, ...]:
        """The requested scores. If these are all, the default ones are first."""
        if "all" not in self.scores:
            return self.scores
        others = (name for name in SCORES if name not in _DEFAULT_SCORES)
        return (*_DEFAULT_SCORES, *others, *self.own_scores)

    @property
    def own_scores(self) -> tuple[str, ...]:
        """The user-defined scores, as MODULE:FUNCTION."""
        return tuple(name for name in self.scores if names_function(name))

    @property
    def count(self) -> int:
        """The number of networks."""
        return TOTAL if self.networks == "all" else self.networks
