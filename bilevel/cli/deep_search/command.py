"""The one program of all searches with shared weights: from the flags of a command to its table.

A command says what is its own in a :class:`DeepSearchCommand`: the space, how its images are
normalised, how networks are trained from scratch, what the table and the pictures show.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from bilevel.cli.deep_search import pipeline
from bilevel.cli.deep_search import report as deep_report
from bilevel.cli.flags.deep_searches import DeepSearch
from bilevel.cli.runtime import report
from bilevel.contracts import Pytree
from bilevel.nets.evaluation import Part
from bilevel.spaces import Space

Parts = list[list[Part]]
"""Training, validation and test rows of every seed."""

Rows = list[dict[str, Any]]
"""Scores of networks trained from scratch, one by one."""


def _no_entries(*_: Any) -> dict[str, Any]:
    return {}


class DeepSearchCommand(NamedTuple):
    """What is a command's own in a search with shared weights."""

    name: str  # of the space, in `result.json`
    space: Space
    work: Mapping[str, float]  # seconds of each phase
    unit: Callable[..., Any]  # normalises images
    search: Callable[
        [pipeline.RunContext, Parts], tuple[pipeline.DeepSearchPlan, list[pipeline.SeedResult]]
    ]
    heats: Callable[[Pytree], list[deep_report.Heatmap]]  # of the first seed's alpha
    table: Callable[[dict[str, Any]], Any]  # of the result, for the screen
    notes: Callable[[dict[str, Any]], list[str]]
    train: Callable[[pipeline.RunContext, list[pipeline.SeedResult], Parts], Rows] = lambda *_: []
    more: Callable[[dict[str, Any], list[pipeline.SeedResult]], dict[str, Any]] = (
        _no_entries  # of the result
    )
    draw: Callable[[Any, dict[str, Any]], Any] = _no_entries  # a second picture, into the folder


def run_deep_search(config: DeepSearch, program: DeepSearchCommand, began: float) -> dict[str, Any]:
    """Run the job; print its table, write its run directory, return what `result.json` holds."""
    with pipeline.running(config, program.work) as run:
        parts = pipeline.draw_splits(config, program.unit)
        search, seed_results = program.search(run, parts)
        searched = time.perf_counter() - began
        rows = program.train(run, seed_results, parts)
        scores = pipeline.by_network(rows) if rows else {}
        result = deep_report.summarize_search(
            run, program.name, program.space, search, seed_results, parts, scores
        )
        result |= program.more(result, seed_results)
        result["seconds"] = {"search": searched}
        if rows:
            result["seconds"]["network"] = float(np.mean([row["seconds"] for row in rows]))
        result["seconds"]["all"] = time.perf_counter() - began
        report.write_results(run.folder, result, deep_report.arrays_of(seed_results))
        heats = program.heats(seed_results[0].alpha)
        deep_report.save_search_figure(run.folder / "search.png", result, seed_results, heats)
        program.draw(run.folder, result)
    deep_report.show(result, run.folder, program.table(result), program.notes(result))
    return result
