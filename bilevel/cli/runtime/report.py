"""The files of a run and its printed output: the same for all commands."""

import decimal
import json
import pathlib
import shlex
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import scipy.special
from rich.console import Console
from rich.table import Column, Table

from bilevel.outer_loop.metrics_log import without_nan
from bilevel.plots import appearance
from bilevel.runs import records


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
    return f"{_rows_in_title(config)}; errors in %{spread}"


def compare_errors(ours: np.ndarray, baseline: np.ndarray, rows: int) -> str:
    """Compare two test errors [seeds]: the difference in points, its 95 % interval, a verdict.

    The interval is Student's of the seeds' differences. For one seed it is that of Agresti & Caffo
    (2000) for independent rows, which is too wide, as both networks have the same rows.
    """
    ours, baseline = np.asarray(ours), np.asarray(baseline)
    differences, seeds = ours - baseline, len(ours)
    if by_seeds := bool(np.ptp(differences) > 1e-9):
        center = differences.mean()
        error = standard_error_over_seeds(differences)
        width = scipy.special.stdtrit(seeds - 1, 0.975) * error
    else:
        rates = [(np.mean(rate) * rows + 1) / (rows + 2) for rate in (ours, baseline)]
        center = rates[0] - rates[1]
        width = 1.96 * np.sqrt(sum(rate * (1 - rate) for rate in rates) / (rows + 2))
    low, high = 100 * (center - width), 100 * (center + width)
    verdict = "no clear difference" if low <= 0 <= high else "clearly worse"
    verdict = "clearly better" if high < 0 else verdict
    basis = f"{seeds} seeds" if by_seeds else f"{rows} test rows"
    return (
        f"{verdict} ({100 * differences.mean():+.1f} points, 95 % interval {low:+.1f} to "
        f"{high:+.1f}, from {basis})"
    )


def print_next(console: Console, folder: pathlib.Path) -> None:
    """Print the command that trains the network of a search."""
    line = shlex.join(["bilevel", "train", str(folder)])
    console.print(f"train and save the network: {line}", soft_wrap=True)


def figure_title(config: dict[str, Any]) -> str:
    """Return the title of a figure."""
    several = f"{config['seeds']} seeds drawn from " if config["seeds"] > 1 else ""
    return f"{_rows_in_title(config)}; {several}seed {config['seed']}"


def _rows_in_title(config: dict[str, Any]) -> str:
    return f"{config['data']}: {config['train']} training, {config['valid']} validation rows"


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


def standard_error_over_seeds(x: np.ndarray) -> float:
    """Return the standard error of the mean of ``x`` [seeds]; NaN for one seed."""
    return float(x.std(ddof=1) / np.sqrt(len(x))) if len(x) > 1 else float("nan")


def cell(x: np.ndarray, form: str) -> str:
    """Format the mean of ``x`` [seeds] with its standard error."""
    error = standard_error_over_seeds(x)
    digits = ",.0f" if error >= 100 else ".2g"  # .2g would print 1000 as 1e+03
    return f"{x.mean():{form}}" + (f" ± {error:{digits}}" if len(x) > 1 else "")


def format_bound(x: float, digits: int, upper: bool = False) -> str:
    """Format a lower or ``upper`` bound, rounded so that the printed value is a bound too."""
    rounding = decimal.ROUND_CEILING if upper else decimal.ROUND_FLOOR
    context = decimal.Context(prec=digits, rounding=rounding)
    return f"{context.create_decimal_from_float(float(x)):.{digits}g}"


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
