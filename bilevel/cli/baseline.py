"""``bilevel baseline``: the choice of a feature map, by search methods without hypergradients.

Ridge regression on random Fourier features of images, or a linear SVM on hashed n-grams of texts
(Khodak et al. 2020, section 2). The methods see the same rows, configurations and features; the
table has for each what it spent, and the test error of its choice, trained for itself.
"""

import functools
import pathlib
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from bilevel import baselines
from bilevel.baselines import Trace
from bilevel.cli.flags import from_config_file
from bilevel.cli.flags.commands import Baseline
from bilevel.cli.runtime import report
from bilevel.cli.runtime.devices import spread_over_devices
from bilevel.cli.runtime.run_directory import run_directory
from bilevel.contracts import Selection
from bilevel.data import datasets
from bilevel.plots import plots
from bilevel.runs.progress import RunBar
from bilevel.spaces import features

_METHODS = {
    "weight-sharing": baselines.weight_sharing,
    "fast-weight-sharing": baselines.fast_weight_sharing,
    "successive-halving": baselines.successive_halving,
    "hyperband": baselines.hyperband,
    "exponentiated-gradient": baselines.exponentiated_gradient,
    "random-search": baselines.random_search,
}


class BaselinePlan(NamedTuple):
    """What a run does, in values of the library."""

    problem: Selection
    candidates: list[Any]  # configurations, as `bilevel.spaces.features` draws them
    rows: list[int]  # of training, validation and test
    dimension: int
    key: jax.Array


def run_baseline(config: Baseline) -> dict[str, Any]:
    """Run the job; print its table, write its run directory, return what `result.json` holds."""
    config.check()
    methods = [*_METHODS] if config.method == "all" else [config.method]
    with run_directory(config, keeps="solves are kept") as folder:
        with report.phases(config.progress, {"data": 1.0} | dict.fromkeys(methods, 1.0)) as bar:
            began = time.perf_counter()
            bar.enter("data")
            plan = _plan_baseline(config)
            progress = report.progress_within_phase(config.progress)
            how: dict[str, Any] = {"resume": config.resume, "progress": progress}
            traces = {name: _trace(plan, name, folder, bar, **how) for name in methods}
        result = {
            "config": from_config_file.flags_of(config),
            "rows": plan.rows,
            "dimension": plan.dimension,
            "methods": {name: _summarize_trace(trace) for name, trace in traces.items()},
            "seconds": time.perf_counter() - began,
            **report.origin(),
        }
        report.write_results(folder, result, _trace_arrays(traces))
        _save_trace_figure(folder, result, traces)
        _print_baseline(result, folder)
        return result


def _plan_baseline(config: Baseline) -> BaselinePlan:
    """Data, candidates and the problem of choosing one."""
    row_key, data_key, config_key, key = jax.random.split(jax.random.key(config.seed), 4)
    sizes = {name: config.size(name) for name in ("train", "valid", "test")}
    (parts,) = datasets.draw_splits(config.data, [row_key], **sizes)
    dimension = config.size("dimension")
    if config.data == "imdb":
        # lambda |w|^2 + sum = 2 lambda (1/2 |w|^2 + C sum)
        problem = features.text_selection(*parts, cost=0.5 / config.penalty)
        candidates: list[Any] = features.sample_text(config_key, config.configs)
    else:
        count = sum(len(labels) for _, labels in parts)
        problem = features.fourier_selection(
            data_key,
            *parts,
            dimension=dimension,
            penalty=config.penalty,
            place=functools.partial(spread_over_devices, config.devices, count, "rows"),
        )
        candidates = features.sample_fourier(config_key, config.configs)
    rows = [len(labels) for _, labels in parts]
    return BaselinePlan(problem, candidates, rows, dimension, key)


def _trace(
    plan: BaselinePlan,
    name: str,
    folder: pathlib.Path,
    bar: RunBar,
    *,
    resume: bool,
    progress: bool | None,
) -> Trace:
    """One method's search."""
    bar.enter(name)
    halves = name in ("successive-halving", "hyperband")
    options: dict[str, Any] = {"minimum": max(1, plan.dimension // 64)} if halves else {}
    trace = _METHODS[name](
        plan.key,
        plan.candidates,
        plan.problem,
        plan.dimension,
        journal=folder / f"{name}.jsonl",
        resume=resume,
        progress=progress,
        **options,
    )
    if trace.stopped:
        raise KeyboardInterrupt(trace.stopped)
    return trace


# ----------------------------------------------------------------------------- the report


def _summarize_trace(trace: Trace) -> dict[str, Any]:
    calls = len(trace.calls)  # none for one configuration: nothing to choose
    return {
        "found": str(trace.configs[trace.best]),
        "best": int(trace.best),
        "calls": calls,
        "seconds": float(trace.seconds[-1]) if calls else 0.0,
        "valid": float(trace.valid[-1]) if calls else None,
        "test": float(trace.test[-1]) if calls else None,
    }


def _trace_arrays(traces: dict[str, Trace]) -> dict[str, np.ndarray]:
    columns = "round", "resource", "calls", "seconds", "incumbent", "valid", "test"
    return {
        f"{name}_{column}".replace("-", "_"): np.asarray(getattr(trace, column))
        for name, trace in traces.items()
        for column in columns
    }


def _save_trace_figure(
    folder: pathlib.Path, result: dict[str, Any], traces: dict[str, Trace]
) -> None:
    shown = {name: trace for name, trace in traces.items() if len(trace.calls)}
    if not shown:
        return

    def draw(figure):
        axes = figure.subplots(1, 2, sharey=True)
        for ax, against in zip(axes, ("calls", "seconds"), strict=True):
            plots.traces(shown, against, ax).get_legend().remove()  # one below is for both
        axes[1].set_ylabel("")
        lines = axes[0].get_lines()
        figure.legend(handles=lines, loc="outside lower center", ncols=min(6, len(lines)))
        figure.suptitle(f"{_baseline_title(result)}; seed {result['config']['seed']}")

    report.save_figure(folder / "baseline.png", (11, 4.4), draw)


def _baseline_title(result: dict[str, Any]) -> str:
    config, (train, valid, test) = result["config"], result["rows"]
    of = f"{config['data']}: {config['configs']} configurations of up to {result['dimension']} "
    return of + f"features; {train} + {valid} + {test} rows"


def _print_baseline(result: dict[str, Any], folder: pathlib.Path) -> None:
    from rich.table import Table

    screen = report.screen()
    table = Table(title=f"{_baseline_title(result)}; errors in %")
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
