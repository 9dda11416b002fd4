"""Results as lines of JSON, resumable; the table of counts made from them."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.reliability.case import FAILURES, RAW, SILENT, VERDICTS

Line = dict[str, Any]


class Records:
    """A file of lines; those of another seed stay, and count for nothing."""

    def __init__(self, path: Path, seed: int):
        self.path, self.seed = path, seed
        self.lines = of_seed(path, seed)

    def knows(self, part: str, name: str, block: int, inputs: int) -> bool:
        """Whether a block is there, with as many inputs."""
        line = self.lines.get((part, name, block))
        return line is not None and sum(line["counts"].values()) == inputs

    def add(self, part: str, name: str, block: int, counts: Counter, listed: list[str]) -> None:
        """One block of a part's inputs under a name."""
        counted = {verdict: counts[verdict] for verdict in VERDICTS if counts[verdict]}
        line = {"part": part, "name": name, "block": block, "seed": self.seed, "counts": counted}
        line |= {"listed": listed} if listed else {}
        self.lines[part, name, block] = line
        harness.append(self.path, line)


def of_seed(path: Path, seed: int) -> dict[tuple[str, str, int], Line]:
    """The last line of every block."""
    lines = harness.where(harness.read(path), seed=seed)
    return {(line["part"], line["name"], line["block"]): line for line in lines}


def totals(lines: Iterable[Line], by: str) -> dict[str, Counter]:
    """Counts of verdicts by a field of the lines."""
    counters: dict[str, Counter] = {}
    for line in lines:
        counters.setdefault(line[by], Counter()).update(line["counts"])
    return counters


def failures(counts: Counter) -> int:
    """How many are silent, or raw."""
    return sum(counts[verdict] for verdict in FAILURES)


def table_by_seed(rows: Iterable[Line]) -> str:
    """The counts of each seed, by the last line of every block."""
    last = {(row["seed"], row["part"], row["name"], row["block"]): row for row in rows}
    return table(last.values(), by="seed")


def table(lines: Iterable[Line], by: str = "part") -> str:
    """The counts as Markdown."""
    heads = (
        "inputs",
        "right",
        "refused or flagged",
        "no answer",
        "silent: wrong",
        "silent: NaN swallowed",
        "raw errors",
        "of them, arguments of a wrong type",
    )
    counters = totals(lines, by)
    whole: Counter = sum(counters.values(), Counter())
    rows = []
    for name, counts in (*counters.items(), ("all", whole)):
        cells = (
            sum(counts.values()),
            counts["right"],
            counts["refused"] + counts["flagged"],
            counts["no answer"],
            *(counts[verdict] for verdict in SILENT),
            sum(counts[verdict] for verdict in RAW),
            counts["misfit"],
        )
        rows.append([name, *(f"{cell:,}" for cell in cells)])
    return harness.table([by, *heads], rows)
