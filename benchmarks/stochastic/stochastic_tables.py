"""The tables and the figure of the measurements by ``stochastic.py``."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from benchmarks import harness

FIRST = "value", "slope", "error"  # the first of these in a row counts
RIVAL = {"soba": "soba", "saba": "saba", "spaba": "srba", "amigo": "amigo", "f2sa": "f2sa"}
UNTUNED = "saba untuned", "spaba untuned"
SIDES = {"ours": (*UNTUNED, *RIVAL, "ma_soba"), "theirs": tuple(RIVAL.values())}
CLEANING = "cleaning50", "cleaning70", "cleaning90"
PROBLEMS = {
    "ijcnn1": "ijcnn1: h less its minimum",
    "simulated": "simulated: squared slope",
    "covtype": "covtype: validation error",
    "cleaning50": "cleaning, 50 %: test error",
    "small": "ijcnn1 with few rows: h",
    "tiny": "few quadratics: squared slope",
}
EARLY, LATE = 3, -1  # of the marks: half a second, five seconds
AIMS = {"ijcnn1": 3, "cleaning50": 25}  # times the benchmark's steps per second, of SABA
SAME = 1.05  # closer rates count as equal: two copies of one program differ by more
TESTED = 10_000  # rows for counting cleaning's error
ROWS = {"covtype": 92_962, "cleaning50": TESTED}


def scores(row: harness.Row) -> list[float]:
    """Return the scores at the marks that were reached."""
    return next((row[name] for name in FIRST if name in row), [])


def last(row: harness.Row) -> float:
    """Return the last score, or infinity if the course diverged."""
    return math.inf if row.get("diverged") or not scores(row) else scores(row)[-1]


# ----------------------------------------------------------------------------- of many rows


def at_best(rows: list[harness.Row], **key: str) -> list[harness.Row]:
    """Return all seeds of one method's courses, at the steps that were best with the first."""
    of = harness.where(rows, part="course", **key)
    first = harness.where(of, seed=0)
    if not first:
        return []
    best = min(first, key=last)
    return harness.where(of, step=best["step"], ratio=best["ratio"])


def least(rows: list[harness.Row], race: str) -> float:
    """Return the value to subtract from scores: ijcnn1's minimum, else 0."""
    optima = harness.where(rows, part="optimum", race=race)
    return optima[0]["value"] if optima else 0.0


def score(rows: list[harness.Row], mark: int, race: str, side: str, method: str) -> float:
    """Return the median over seeds: NaN without any, infinity for seeds that diverged before."""
    courses, below = at_best(rows, race=race, side=side, method=method), least(rows, race)
    count = max((len(row["seconds"]) for row in courses), default=0)
    whole = [row for row in courses if len(row["seconds"]) == count > 0]
    values = [scores(row)[min(mark, count - 1)] - below for row in whole]
    values += [math.inf] * (len(courses) - len(whole))
    return float(np.median(values)) if values else math.nan


def cleaned(rows: list[harness.Row], **key: str) -> tuple[float, ...]:
    """Return final test error and AUC, medians over seeds that did not diverge, or nothing."""
    ran = [row for row in at_best(rows, **key) if not row.get("diverged")]
    return tuple(np.median([(row["error"][-1], row["auc"][-1]) for row in ran], 0)) if ran else ()


def best_of_theirs(rows: list[harness.Row], race: str) -> tuple[str, float]:
    by_method = {m: score(rows, LATE, race, "theirs", m) for m in RIVAL.values()}
    by_method = {m: s for m, s in by_method.items() if not math.isnan(s)} or {"none": math.nan}
    name = min(by_method, key=lambda m: by_method[m])
    return name, by_method[name]


def races(rows: list[harness.Row], names: Iterable[str]) -> list[str]:
    measured = {row["race"] for row in harness.where(rows, part="course")}
    return [name for name in names if name in measured]


# ----------------------------------------------------------------------------- tables


def speed(rows: list[harness.Row]) -> str:
    """Return a table of CPU times of a step, ours and theirs in turns."""
    lines = []
    for row in (r for r in harness.where(rows, part="time") if "ours" in r):
        other = row.get("theirs")
        beside = (f"{other:.1f}", f"{other / row['ours']:.2f}") if other else ("", "")
        lines.append((row["race"], f"`{row['method']}`", f"{row['ours']:.1f}", *beside))
    return harness.table(("problem", "method", "ours, us", "theirs, us", "times as fast"), lines)


def shown(value: float) -> str:
    if math.isnan(value):
        return ""
    return f"{value:.4g}" if math.isfinite(value) else "diverged"


def courses(rows: list[harness.Row]) -> str:
    """Return a table of scores at half a second and at five, medians over the seeds."""

    def cell(**key):
        early, late = (shown(score(rows, mark, **key)) for mark in (EARLY, LATE))
        return f"{early}; {late} ({len(at_best(rows, **key))})" if late else ""

    names = races(rows, PROBLEMS)
    return by_method(names, [PROBLEMS[name] for name in names], cell)


def cleaning(rows: list[harness.Row]) -> str:
    """Return a table of test error and AUC after five seconds, by corruption."""

    def cell(**key):
        if ends := cleaned(rows, **key):
            return f"{100 * ends[0]:.1f}, {ends[1]:.3f}"
        return "diverged" * bool(at_best(rows, **key))

    names = races(rows, CLEANING)
    return by_method(names, [f"{name[-2:]} %: error in %, AUC" for name in names], cell)


def by_method(names: list[str], head: list[str], cell: Callable[..., str]) -> str:
    """Return a table with a line for each method and ``cell(race, side, method)`` in it."""
    lines = []
    for side, method in [(side, m) for side, methods in SIDES.items() for m in methods]:
        cells = [cell(race=name, side=side, method=method) for name in names]
        lines.append((f"{method} ({'ours' if side == 'ours' else 'benchmark'})", *cells))
    return harness.table(("method", *head), lines)


def verdicts(rows: list[harness.Row]) -> str:
    """Return a line for each aim: whether it is reached, and the measurement."""
    aims = [*_speed_verdicts(rows), *_untuned_verdicts(rows), *_cleaning_verdicts(rows)]
    words = {True: "yes", False: "**no**"}
    return "\n".join(f"- {words.get(reached, reached)}: {text}" for reached, text in aims)


def _speed_verdicts(rows):
    times = [row for row in harness.where(rows, part="time") if "theirs" in row]
    for row in times:
        ratio = row["theirs"] / row["ours"]
        if row["method"] == "saba" and row["race"] in AIMS:
            aim = AIMS[row["race"]]
            yield ratio >= aim, f"`saba` on {row['race']}: {ratio:.1f} times their steps; aim {aim}"
    slow = [row for row in times if row["ours"] > SAME * row["theirs"]]
    slower = [f"`{r['method']}` on {r['race']} ({r['theirs'] / r['ours']:.2f} times)" for r in slow]
    text = f"no method slower by more than {SAME - 1:.0%}: {', '.join(slower) or 'none is'}"
    if times:
        yield not slower, f"{text}, of {len(times)}"


def _untuned_verdicts(rows):
    for race in races(rows, PROBLEMS):
        name, bar = best_of_theirs(rows, race)
        ours = {m: score(rows, EARLY, race, "ours", m) for m in UNTUNED}
        if math.isnan(bar) or any(map(math.isnan, ours.values())):
            continue
        text = ", ".join(f"`{m.split()[0]}()` {shown(value)}" for m, value in ours.items())
        text = f"untuned, {race}: {text} after 0.5 s; their best, {name}, {shown(bar)} after 5 s"
        best = min(ours.values())
        yield best <= bar if race not in ROWS else _level(best, bar, ROWS[race]), text


def _level(error: float, bar: float, rows: int) -> bool | str:
    """Return whether an error is smaller, or a string if both agree within a standard error."""
    chance = math.sqrt(bar * (1 - bar) / rows)
    level = abs(error - bar) <= chance
    return f"level (standard error {chance:.4f})" if level else error < bar


def _cleaning_verdicts(rows):
    for race in races(rows, CLEANING):
        sides = {}
        for side, methods in SIDES.items():
            ends = {m: cleaned(rows, race=race, side=side, method=m) for m in methods}
            sides[side] = {m: pair for m, pair in ends.items() if pair}
        if not all(sides.values()):
            continue
        rival = min(sides["theirs"], key=lambda m: sides["theirs"][m])
        bar, bar_auc = sides["theirs"][rival]
        level = {m: pair for m, pair in sides["ours"].items() if pair[1] >= bar_auc}
        level = level or sides["ours"]
        best = min(level, key=lambda m: level[m])
        error, auc = level[best]
        yield (
            auc >= bar_auc and _level(error, bar, TESTED),
            f"{race}: ours at best, {best}: error {100 * error:.2f} %, AUC {auc:.3f}; "
            f"theirs, {rival}: {100 * bar:.2f} %, {bar_auc:.3f}",
        )


def report(rows: list[harness.Row]) -> str:
    parts = [speed] if harness.where(rows, part="time") else []
    parts += [courses] if races(rows, PROBLEMS) else []
    parts += [cleaning] if races(rows, CLEANING) else []
    return "\n\n".join(filter(None, (part(rows) for part in (*parts, verdicts))))


# ----------------------------------------------------------------------------- the picture


def draw(rows: list[harness.Row], path: Path) -> None:
    """Draw medians and quartiles over seeds of both untuned methods and the best of theirs."""
    from bilevel.plots.appearance import COLOURS

    names = races(rows, PROBLEMS)
    lines = -(-len(names) // 2)
    with harness.picture(path, lines, 2, figsize=(9, 3.8 * lines), squeeze=False) as (_, axes):
        for ax in axes.flat[len(names) :]:
            ax.set_axis_off()
        for ax, race in zip(axes.flat, names, strict=False):
            theirs = [("theirs", m) for m in ("soba", "saba", "srba")]
            for i, (side, method) in enumerate([("ours", m) for m in UNTUNED] + theirs):
                _course(
                    ax, rows, race, side, method, color=COLOURS[i + (side == "theirs")],
                    linestyle="-" if side == "ours" else "--", marker="os^Dv"[i], markersize=4,
                )  # fmt: skip
            ax.set(xscale="log", yscale="log", xlabel="CPU seconds", title=PROBLEMS[race])
        axes.flat[min(1, len(names) - 1)].legend(loc="lower left")  # a panel corner without courses


def _course(ax, rows, race, side, method, **look) -> None:
    courses = at_best(rows, race=race, side=side, method=method)
    if not courses:
        return
    marks = min(len(row["seconds"]) for row in courses)
    seconds = np.median([row["seconds"][:marks] for row in courses], 0)
    values = np.array([scores(row)[:marks] for row in courses]) - least(rows, race)
    low, middle, high = np.percentile(values, (25, 50, 75), axis=0)
    label = method if side == "ours" else f"{method} (benchmark, tuned)"
    ax.plot(seconds, middle, label=label, **look)
    ax.fill_between(seconds, low, high, color=look["color"], alpha=0.2, linewidth=0)
