"""The files of a run and its printed output: the same for all commands."""

import json
import pathlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from bilevel.nets.evaluation import standard_error_over_seeds
from bilevel.outer_loop.metrics_log import without_nan
from bilevel.plots import appearance
from bilevel.runs import records

_ROWS = "{data}: {train} training, {valid} validation rows"


def write_results(folder: pathlib.Path, result: dict[str, Any], arrays: dict[str, Any]) -> None:
    """Write ``result.json``, and ``arrays.npz`` without pickle."""
    with records.warn_if_disk_full(f"out: results in {folder}"):
        with records.atomic_write(folder / "result.json") as file:
            file.write(dump_without_nan(result).encode() + b"\n")
        with records.atomic_write(folder / "arrays.npz") as file:
            records.savez(file, arrays)


def dump_without_nan(result: Any) -> str:
    """Return ``result`` as JSON, with null for NaN and infinity."""
    return json.dumps(without_nan(result), indent=2, allow_nan=False)


def save_figure(path: pathlib.Path, size: tuple[float, float], draw: Callable[[Any], None]) -> None:
    """Save a figure of ``size`` inches that ``draw`` draws; without matplotlib, nothing."""
    try:
        from matplotlib.figure import Figure  # without pyplot, so that no window opens
    except ImportError:
        return
    with appearance.style():
        figure = Figure(size, layout="constrained")
        draw(figure)
        with records.warn_if_disk_full(f"out: {path}"), records.atomic_write(path) as file:
            figure.savefig(file, dpi=150, format="png")


def table_title(config: dict[str, Any]) -> str:
    """Return the title of a table of errors."""
    spread = f", mean ± s.e. of {config['seeds']} seeds" if config["seeds"] > 1 else ""
    return f"{_ROWS.format(**config)}; errors in %{spread}"


def figure_title(config: dict[str, Any]) -> str:
    """Return the title of a figure."""
    several = f"{config['seeds']} seeds drawn from " if config["seeds"] > 1 else ""
    return f"{_ROWS.format(**config)}; {several}seed {config['seed']}"


def screen(table: bool) -> Console:
    """Return the console of the tables; it prints nothing in a call without a ``table``.

    A pipe or a file is 110 columns wide. Names contain square brackets and colons.
    """
    options: dict[str, Any] = {"markup": False, "emoji": False, "quiet": not table}
    console = Console(**options)
    return console if console.is_terminal else Console(width=110, **options)


def mixture(alpha: Any, names: Any) -> str:
    """Format a point of a simplex as ``0.83 tanh + 0.17 relu``, without entries under 0.005."""
    pairs = sorted(zip(alpha, names, strict=True), reverse=True)
    return " + ".join(f"{a:.2f} {name}" for a, name in pairs if a >= 0.005)


def cell(x: np.ndarray, form: str) -> str:
    """Format the mean of ``x`` [seeds] with its standard error."""
    error = standard_error_over_seeds(x)
    digits = ",.0f" if error >= 100 else ".2g"  # .2g would print 1000 as 1e+03
    return f"{x.mean():{form}}" + (f" ± {error:{digits}}" if len(x) > 1 else "")


Columns = Mapping[str, tuple[str, str | Callable[[np.ndarray], str]]]
"""The columns of a table by key: heading, and format of a value or of all seeds' values."""


def score_table(
    title: str,
    scores: Mapping[str, Any],
    columns: Columns,
    *,
    first: str = "network",
    ends: Collection[str] = (),
    starred: str | None = None,
) -> Any:
    """Return a table of ``scores``, by network and key, with errors in %; rules below ``ends``."""

    def text(row, key, form):
        if key not in row:
            return ""
        values = np.atleast_1d(row[key]) * (100 if key.endswith("_error") else 1)
        return form(values) if callable(form) else cell(values, form)

    table = result_table(title, first, *(heading for heading, _ in columns.values()))
    for name, row in scores.items():
        cells = [text(row, key, form) for key, (_, form) in columns.items()]
        table.add_row(name + " *" * (name == starred), *cells, end_section=name in ends)
    return table


def result_table(title: str, first: str, *headings: str) -> Any:
    """Return a table to print, with a left column ``first`` and right-aligned columns."""
    columns = [Column(heading, justify="right", no_wrap=True) for heading in headings]
    return Table(Column(first, no_wrap=True), *columns, title=title)
