"""``bilevel baseline``: choose a feature map by search methods without hypergradients.

Ridge regression on random Fourier features of images, or a linear SVM on hashed n-grams of texts
(Khodak et al. 2020, section 2). All methods use the same rows, configurations and features. The
table shows the cost of each method, and the test error of its choice after separate training.
"""

import functools
import pathlib
import time
from typing import Any

import jax
import numpy as np

from bilevel import baselines
from bilevel.baselines import Trace
from bilevel.cli.flags import from_config_file
from bilevel.cli.flags.commands import Baseline
from bilevel.cli.runtime import memory, report
from bilevel.cli.runtime.data import Data, opened
from bilevel.cli.runtime.devices import spread_over_devices
from bilevel.cli.runtime.run_directory import run_directory
from bilevel.contracts import Selection
from bilevel.plots import plots
from bilevel.spaces import features
from bilevel.spaces.features import fourier

_METHODS = {
    "weight-sharing": baselines.weight_sharing,
    "fast-weight-sharing": baselines.fast_weight_sharing,
    "successive-halving": baselines.successive_halving,
    "hyperband": baselines.hyperband,
    "exponentiated-gradient": baselines.exponentiated_gradient,
    "random-search": baselines.random_search,
}
_KEPT = 2**31  # bytes of projections that stay in memory; larger ones are computed in blocks


def run_baseline(config: Baseline) -> dict[str, Any]:
    """Run the job; print its table, write its run directory, return what `result.json` holds."""
    methods = [*_METHODS] if config.method == "all" else [config.method]
    config, data = opened(config, images=False)
    with (
        memory.fitting(config, _arrays(config, data)),
        run_directory(config, data, keeps="the solves so far are saved") as folder,
    ):
        with report.phases(config.progress) as bars:
            began = time.perf_counter()
            bars.enter("data")
            row_key, data_key, config_key, key = jax.random.split(jax.random.key(config.seed), 4)
            (parts,) = data.draw([row_key], **_row_counts(config))
            problem, candidates = _problem_and_candidates(config, parts, data_key, config_key)
            traces = {}
            for name in methods:
                bars.enter(name)
                traces[name] = _trace(config, name, folder, key, candidates, problem)
        result = {
            "config": from_config_file.flags_of(config),
            "data": data.record(),
            "rows": [len(labels) for _, labels in parts],
            "dimension": config.size("dimension"),
            "methods": {name: _summarize_trace(trace) for name, trace in traces.items()},
            "seconds": time.perf_counter() - began,
            **report.origin(),
        }
        report.write_results(folder, result, _trace_arrays(traces))
        _save_trace_figure(folder, result, traces)
        _print_baseline(result, folder)
        return result


def _row_counts(config: Baseline) -> dict[str, int]:
    return {name: config.size(name) for name in ("train", "valid", "test")}


def _arrays(config: Baseline, data: Data) -> memory.Parts:
    """Return the weights, phases and configurations, and projections of rows in memory."""
    dimension, configs = config.size("dimension"), memory.shape(config.configs, 32)
    if config.data == "imdb":
        return {("dimension",): memory.shape(dimension), ("configs",): configs}
    rows, kinds = sum(_row_counts(config).values()), len(fourier.PREPROCESS) * len(fourier.KERNELS)
    projections = memory.shape(kinds, rows, dimension)
    return {
        ("dimension",): memory.shape(dimension, data.classes + 1),
        ("dimension", "train"): projections if memory.bytes_of(projections) <= _KEPT else None,
        ("configs",): configs,
    }


def _problem_and_candidates(
    config: Baseline, parts: list[Any], data_key: jax.Array, config_key: jax.Array
) -> tuple[Selection, list[Any]]:
    """Return the selection problem, and the configurations."""
    if config.data == "imdb":
        # lambda |w|^2 + sum = 2 lambda (1/2 |w|^2 + C sum)
        problem = features.text_selection(*parts, cost=0.5 / config.penalty)
        return problem, features.sample_text(config_key, config.configs)
    count = sum(len(labels) for _, labels in parts)
    problem = features.fourier_selection(
        data_key,
        *parts,
        dimension=config.size("dimension"),
        penalty=config.penalty,
        memory=_KEPT,
        place=functools.partial(spread_over_devices, config.devices, count, "rows"),
    )
    return problem, features.sample_fourier(config_key, config.configs)


def _trace(
    config: Baseline,
    name: str,
    folder: pathlib.Path,
    key: jax.Array,
    candidates: list[Any],
    problem: Selection,
) -> Trace:
    """Run the search of one method."""
    dimension, halves = config.size("dimension"), name in ("successive-halving", "hyperband")
    options: dict[str, Any] = {"minimum": max(1, dimension // 64)} if halves else {}
    options |= {"journal": folder / f"{name}.jsonl", "resume": config.resume}
    trace = _METHODS[name](key, candidates, problem, dimension, **options)
    if trace.stopped:
        raise KeyboardInterrupt(trace.stopped)
    return trace


# ----------------------------------------------------------------------------- the report


def _summarize_trace(trace: Trace) -> dict[str, Any]:
    calls = len(trace.calls)  # 0 for one configuration
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
            plots.traces(shown, against, ax).get_legend().remove()  # one legend below is enough
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
    screen, title = report.screen(), f"{_baseline_title(result)}; errors in %"
    table = report.result_table(title, "method", "test", "valid", "solves", "seconds")
    table.add_column("configuration found")
    for name, row in result["methods"].items():
        known = [row[part] for part in ("test", "valid")]
        errors = ["-" if error is None else f"{100 * error:.1f}" for error in known]
        table.add_row(name, *errors, str(row["calls"]), f"{row['seconds']:.1f}", row["found"])
    screen.print(table)
    screen.print(
        "test: error of the configuration found, trained separately with all features (not in the "
        "seconds); valid: validation error by the method's own scores, with shared weights if it "
        "shares them; solves: trainings; seconds include compilation"
    )
    times = f"{result['seconds']:.0f} s"
    report.print_end(screen, _result_sentence(result), folder, "baseline.png", times)


def _result_sentence(result: dict[str, Any]) -> str:
    known = {n: row for n, row in result["methods"].items() if row["test"] is not None}
    if not known:
        return "there is one configuration only, so no method had a choice."
    best = min(known, key=lambda name: (known[name]["test"], known[name]["seconds"]))
    found, error = known[best]["found"], known[best]["test"]
    sentence = f"{best} has the smallest test error, {100 * error:.1f} %, with {found}"
    if "random-search" in known and best != "random-search":
        other = known["random-search"]["test"]
        verdict = report.compare_errors(np.array([error]), np.array([other]), result["rows"][2])
        sentence += f"; random-search has {100 * other:.1f} %: {verdict}"
    return f"{sentence}."
