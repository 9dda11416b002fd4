"""``bilevel baseline``: choose a feature map by search methods without hypergradients.

Ridge regression on random Fourier features of images, or a linear SVM on hashed n-grams of texts
(Khodak et al. 2020, section 2). All methods use the same rows, configurations and features.
"""

import functools
from typing import Any

import jax
import numpy as np

from bilevel import baselines
from bilevel.baselines import Trace
from bilevel.cli.runtime import memory, report
from bilevel.cli.runtime.command_run import CommandRun, Result
from bilevel.cli.runtime.devices import spread_over_devices
from bilevel.contracts import Selection
from bilevel.nets.evaluation import compare_errors
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
_PARTS = "train", "valid", "test"
_KEPT = 2**31  # bytes of projections that stay in memory; larger ones are computed in blocks


class _BaselineRun(CommandRun):
    """A choice by one method or all of them, on the same rows and configurations."""

    keeps = "the solves so far are saved"
    figure = "baseline.png"
    traces: dict[str, Trace]

    def arrays(self) -> list[memory.Parts]:
        """Return the weights, phases and configurations, and projections of rows in memory."""
        config, dimension = self.config, self.config.size("dimension")
        configs = memory.shape(config.configs, 32)
        if config.data == "imdb":
            return [{("dimension",): memory.shape(dimension), ("configs",): configs}]
        kinds = len(fourier.PREPROCESS) * len(fourier.KERNELS)
        projections = memory.shape(kinds, sum(map(config.size, _PARTS)), dimension)
        kept = projections if memory.bytes_of(projections) <= _KEPT else None
        weights = memory.shape(dimension, self.data.classes + 1)
        return [{("dimension",): weights, ("dimension", "train"): kept, ("configs",): configs}]

    def result(self) -> tuple[Result, dict[str, Any]]:
        config = self.config
        row_key, data_key, config_key, key = jax.random.split(jax.random.key(config.seed), 4)
        sizes = {name: config.size(name) for name in _PARTS}
        (parts,) = self.data.draw([row_key], **sizes)
        problem, candidates = self._problem_and_candidates(parts, data_key, config_key)
        self.traces = {}
        for name in _METHODS if config.method == "all" else [config.method]:
            self.bars.enter(name)
            self.traces[name] = self._trace(name, key, candidates, problem)
        if not any(len(trace.calls) for trace in self.traces.values()):
            self.figure = ""
        result = {
            "rows": [len(labels) for _, labels in parts],
            "dimension": config.size("dimension"),
            "methods": {name: _summarize_trace(trace) for name, trace in self.traces.items()},
            "seconds": self.seconds(),
        }
        columns = "round", "resource", "calls", "seconds", "incumbent", "valid", "test"
        arrays = {
            f"{name}_{column}".replace("-", "_"): np.asarray(getattr(trace, column))
            for name, trace in self.traces.items()
            for column in columns
        }
        return result, arrays

    def _problem_and_candidates(self, parts, data_key, config_key) -> tuple[Selection, list[Any]]:
        config = self.config
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

    def _trace(self, name: str, key: jax.Array, candidates: list[Any], problem: Selection) -> Trace:
        dimension = self.config.size("dimension")
        halves = name in ("successive-halving", "hyperband")
        options: dict[str, Any] = {"minimum": max(1, dimension // 64)} if halves else {}
        options |= {"journal": self.folder / f"{name}.jsonl", "resume": self.config.resume}
        trace = _METHODS[name](key, candidates, problem, dimension, **options)
        if trace.stopped:
            raise KeyboardInterrupt(trace.stopped)
        return trace

    def draw(self, figure: Any, result: Result) -> None:
        axes = figure.subplots(1, 2, sharey=True)
        shown = {name: trace for name, trace in self.traces.items() if len(trace.calls)}
        for ax, against in zip(axes, ("calls", "seconds"), strict=True):
            plots.traces(shown, against, ax).get_legend().remove()  # one legend is enough
        axes[1].set_ylabel("")
        lines = axes[0].get_lines()
        figure.legend(handles=lines, loc="outside lower center", ncols=min(6, len(lines)))
        figure.suptitle(f"{_title(result)}; seed {result['config']['seed']}")

    def show(self, result: Result) -> tuple[str, str]:
        title = f"{_title(result)}; errors in %"
        table = report.result_table(title, "method", "test", "valid", "solves", "seconds")
        table.add_column("configuration found")
        for name, row in result["methods"].items():
            known = [row[part] for part in ("test", "valid")]
            errors = ["-" if error is None else f"{100 * error:.1f}" for error in known]
            table.add_row(name, *errors, str(row["calls"]), f"{row['seconds']:.1f}", row["found"])
        self.console.print(table)
        self.console.print(
            "test: error of the configuration found, trained separately with all features (not in "
            "the seconds); valid: validation error by the method's own scores, with shared weights "
            "if it shares them; solves: trainings; seconds include compilation"
        )
        return _result_sentence(result), f"{result['seconds']:.0f} s"


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


def _title(result: dict[str, Any]) -> str:
    config, (train, valid, test) = result["config"], result["rows"]
    of = f"{config['data']}: {config['configs']} configurations of up to {result['dimension']} "
    return of + f"features; {train} + {valid} + {test} rows"


def _result_sentence(result: dict[str, Any]) -> str:
    known = {n: row for n, row in result["methods"].items() if row["test"] is not None}
    if not known:
        return "there is one configuration only, so no method had a choice."
    best = min(known, key=lambda name: (known[name]["test"], known[name]["seconds"]))
    found, error = known[best]["found"], known[best]["test"]
    sentence = f"{best} has the smallest test error, {100 * error:.1f} %, with {found}"
    if "random-search" in known and best != "random-search":
        other = known["random-search"]["test"]
        verdict = compare_errors(np.array([error]), np.array([other]), result["rows"][2])
        sentence += f"; random-search has {100 * other:.1f} %: {verdict}"
    return f"{sentence}."
