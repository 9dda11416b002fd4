"""``bilevel baseline``: the choice of a feature map, by search methods without hypergradients.

Ridge regression on random Fourier features of images, or a linear SVM on hashed n-grams of texts
(Khodak et al. 2020, section 2). The methods see the same rows, configurations and features; the
table has for each what it spent, and the test error of its choice, trained for itself.
"""

import dataclasses
import pathlib
import time
from typing import Any, Literal

import jax
import numpy as np

from bilevel import baselines
from bilevel import data as datasets
from bilevel.baselines import Trace
from bilevel.cli import report
from bilevel.cli.rows import Part, draw_rows
from bilevel.protocols import Selection
from bilevel.spaces import features

_METHODS = {
    "weight-sharing": baselines.weight_sharing,
    "fast-weight-sharing": baselines.fast_weight_sharing,
    "successive-halving": baselines.successive_halving,
    "hyperband": baselines.hyperband,
    "exponentiated-gradient": baselines.exponentiated_gradient,
    "random-search": baselines.random_search,
}


@dataclasses.dataclass(frozen=True)
class Baseline:
    """Which method, on what, and how large; every flag has a default."""

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
    data: Literal["digits", "mnist", "fashion-mnist", "cifar10", "imdb"] = "digits"
    """Dataset; digits ships with scikit-learn."""
    configs: int = 32
    """Configurations to choose among, drawn at random; 256 in the paper."""
    dimension: int | None = None
    """Features of a full evaluation; 512 for digits, 1024 for images, 16384 for texts."""
    train: int | None = None
    """Training rows; 700 for digits, else 2000."""
    valid: int | None = None
    """Validation rows; 500 for digits, else 1000."""
    test: int | None = None
    """Test rows at most; all of digits, else 1000."""
    penalty: float = 0.5
    """λ in λ |w|² + Σ loss."""
    seed: int = 0
    """Of rows, configurations, features and methods."""
    out: pathlib.Path = pathlib.Path("runs/baseline")
    """Run directory; a number is appended where it holds a run already."""
    resume: bool = False
    """Go on with the unfinished run in the run directory."""
    progress: bool | None = None
    """Progress bar; by default in a terminal."""


def run_baseline(config: Baseline) -> dict[str, Any]:
    """Run the job; print its table, write its run directory, return what `result.json` holds."""
    began = time.perf_counter()
    if config.configs < 1:
        raise ValueError(f"configs: expected at least 1, got {config.configs}.")
    if not 0 < config.penalty < float("inf"):
        raise ValueError(f"penalty: expected a positive number, got {config.penalty}.")
    names = list(_METHODS) if config.method == "all" else [config.method]
    keys = jax.random.split(jax.random.key(config.seed), 4)
    screen = report.screen()
    with screen.status("data"):
        parts = _parts(config, keys[0])
    dimension = _size(config, "dimension", 512, 1024, 16384)
    problem, candidates = _problem(config, parts, dimension, *keys[1:3])
    folder = report.run_directory(config)
    traces: dict[str, Trace] = {}
    for name in names:
        halves = name in ("successive-halving", "hyperband")
        options: dict[str, Any] = {"minimum": max(1, dimension // 64)} if halves else {}
        trace = _METHODS[name](
            keys[3],
            candidates,
            problem,
            dimension,
            journal=folder / f"{name}.jsonl",
            resume=config.resume,
            progress=config.progress,
            **options,
        )
        if trace.stopped:
            print(f"{trace.stopped}; go on with --resume --out {folder}")
            return {}
        traces[name] = trace
    result = {
        "config": report.flags(config),
        "rows": [len(labels) for _, labels in parts],
        "dimension": dimension,
        "methods": {name: _summary(trace) for name, trace in traces.items()},
        "seconds": time.perf_counter() - began,
        **report.machine(),
    }
    report.write(folder, result, _arrays(traces))
    _picture(folder, traces)
    _print(screen, result, folder)
    return result


# ----------------------------------------------------------------------------- the parts


def _size(config: Baseline, field: str, digits: int, images: int, texts: int) -> int:
    """A field of the configuration; where it is None, its default for the data."""
    given = getattr(config, field)
    if given is not None and given < 1:
        raise ValueError(f"{field}: expected at least 1, got {given}.")
    return given or {"digits": digits, "imdb": texts}.get(config.data, images)


def _parts(config: Baseline, key: jax.Array) -> list[Part]:
    """Training, validation and test rows with their labels."""
    train = _size(config, "train", 700, 2000, 2000)
    valid = _size(config, "valid", 500, 1000, 1000)
    test = _size(config, "test", 2000, 1000, 1000)
    if config.data == "digits":
        data = datasets.load("digits")
    else:
        wanted = 10_000 * -(-(train + valid) // 10_000) if config.data == "cifar10" else None
        data = datasets.load(config.data, train_size=wanted, test_size=test)
    return draw_rows(config.data, data, key, train, valid, test)


def _problem(
    config: Baseline, parts: list, dimension: int, data_key: jax.Array, config_key: jax.Array
) -> tuple[Selection, list]:
    if config.data == "imdb":
        # lambda |w|^2 + sum = 2 lambda (1/2 |w|^2 + C sum)
        problem = features.text_selection(*parts, cost=0.5 / config.penalty)
        return problem, features.sample_text(config_key, config.configs)
    problem = features.fourier_selection(
        data_key, *parts, dimension=dimension, penalty=config.penalty
    )
    return problem, features.sample_fourier(config_key, config.configs)


# ----------------------------------------------------------------------------- the report


def _summary(trace: Trace) -> dict[str, Any]:
    calls = len(trace.calls)  # none for one configuration: nothing to choose
    return {
        "found": features.describe(trace.configs[trace.best]),
        "best": int(trace.best),
        "calls": calls,
        "seconds": float(trace.seconds[-1]) if calls else 0.0,
        "valid": float(trace.valid[-1]) if calls else None,
        "test": float(trace.test[-1]) if calls else None,
    }


def _arrays(traces: dict[str, Trace]) -> dict[str, np.ndarray]:
    columns = "round", "resource", "calls", "seconds", "incumbent", "valid", "test"
    return {
        f"{name} {column}": np.asarray(getattr(trace, column))
        for name, trace in traces.items()
        for column in columns
    }


def _picture(folder: pathlib.Path, traces: dict[str, Trace]) -> None:
    if (plt := report.pyplot()) is None:
        return
    from bilevel import plots

    shown = {name: trace for name, trace in traces.items() if len(trace.calls)}
    if not shown:
        return
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=True)
    for ax, against in zip(axes, ("calls", "seconds"), strict=True):
        plots.traces(shown, against, ax)
    axes[1].get_legend().remove()  # the same as on the left
    figure.savefig(folder / "baseline.png", dpi=150)
    plt.close(figure)


def _print(screen: Any, result: dict[str, Any], folder: pathlib.Path) -> None:
    from rich.table import Table

    config, (train, valid, test) = result["config"], result["rows"]
    title = f"{config['data']}: {config['configs']} configurations of up to {result['dimension']} "
    table = Table(title=title + f"features; {train} + {valid} + {test} rows; errors in %")
    table.add_column("method", no_wrap=True)
    for heading in ("solves", "s", "valid", "test"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("configuration found")
    for name, row in result["methods"].items():
        known = [row[part] for part in ("valid", "test")]
        errors = ["-" if error is None else f"{100 * error:.1f}" for error in known]
        table.add_row(name, str(row["calls"]), f"{row['seconds']:.1f}", *errors, row["found"])
    screen.print(table)
    screen.print(
        "valid: by the method's own scores, with shared weights where it shares; test: of the "
        "configuration found,\ntrained for itself with all features, which is outside the clock; "
        "s: with compilation"
    )
    screen.print(f"all {result['seconds']:.0f} s; results in {folder}")
