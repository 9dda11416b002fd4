"""The report of `feature_maps.py`: methods compared, Figure 3's claim, alternatives, the figure."""

import functools

import numpy as np

from benchmarks import harness
from bilevel import plots

COMPARED = 32  # configurations in Figure 1
NAMES = (
    "weight sharing",
    "fast weight sharing",
    "random search",
    "successive halving",
    "Hyperband",
    "exponentiated gradient",
)


def tuned(rows) -> dict[float, float]:
    """Return the mean validation error of exponentiated gradient's choice by its rate."""
    tuning = harness.where(rows, part="tuning")
    rates = sorted({row["rate"] for row in tuning})
    return {r: np.mean([row["valid"] for row in harness.where(tuning, rate=r)]) for r in rates}


def best_rate(rows) -> float:
    """Return the middle one of the best rates."""
    errors = tuned(rows)
    best = [rate for rate, error in errors.items() if error == min(errors.values())]
    return best[len(best) // 2]


def at(row, against, limit, column="test"):
    """Return the value of a curve at ``limit``, or NaN before its first point."""
    reached = np.searchsorted(row[against], limit, "right")
    return row[column][reached - 1] if reached else np.nan


spread = functools.partial(harness.spread, scale=100)


def by_dimension(rows):
    return sorted(harness.where(rows, part="correlation"), key=lambda row: row["dimension"])


def of_method(rows, name):
    return sorted(harness.where(rows, part="search", method=name), key=lambda r: r["trial"])


def paired(rows, *names):
    """Return the rows of these methods by trial, for trials that all of them have completed."""
    by_trial = [{row["trial"]: row for row in of_method(rows, name)} for name in names]
    return [
        tuple(of[trial] for of in by_trial)
        for trial in by_trial[0]
        if all(trial in of for of in by_trial)
    ]


def gaps(rows, rival) -> tuple[list[str], bool]:
    """Return fast weight sharing minus a rival, as table cells, and whether it is ahead in time."""
    pairs = paired(rows, "fast weight sharing", rival)
    at_time = [f["test"][-1] - at(r, "seconds", f["seconds"][-1]) for f, r in pairs]
    known = [gap for gap in at_time if not np.isnan(gap)]
    last = [f["test"][-1] - r["test"][-1] for f, r in pairs]
    ratio = np.mean([r["seconds"][-1] / f["seconds"][-1] for f, r in pairs])
    first = spread(known) if len(known) > 1 else "-"
    ahead = len(known) > 1 and 100 * np.mean(known) < -200 * harness.standard_error(known)
    nothing_yet = len(pairs) - len(known)
    return [rival, first, f"{nothing_yet} of {len(pairs)}", spread(last), f"{ratio:.1f}"], ahead


def fast_table(rows) -> str:
    """Return a table of Figure 3's claim: fast weight sharing against three rivals."""
    lines = []
    for rival in ("random search", "successive halving", "Hyperband"):
        if len(paired(rows, "fast weight sharing", rival)) < 2:
            continue
        cells, ahead = gaps(rows, rival)
        lines.append([*cells, "**yes**" if ahead else "no"])
    head = [
        "fast weight sharing minus ...",
        "points when it ends",
        "trials where the other has no incumbent yet",
        "points at both ends",
        "the other's seconds / its own",
        "ahead when it ends (by two s.e.)",
    ]
    return harness.table(head, lines)


def verdicts(rows) -> str:
    """Return the paper's claims and our measurements."""
    lines = [
        f"shared and standalone accuracy, {row['dimension']} features, {COMPARED} "
        f"configurations: Pearson {row['pearson']:.2f}, Spearman {row['spearman']:.2f}"
        for row in by_dimension(rows)
    ]
    pairs = paired(rows, "weight sharing", "random search")
    if len(pairs) > 1:
        gap = [w["test"][-1] - at(r, "calls", w["calls"][-1]) for w, r in pairs]
        calls = pairs[0][0]["calls"][-1]
        lines.append(
            f"weight sharing minus random search after {calls} solves each: {spread(gap)} points"
        )
    if tuned(rows):
        tried = ", ".join(f"{rate:g}: {100 * error:.2f} %" for rate, error in tuned(rows).items())
        lines.append(f"exponentiated gradient's rate by validation error: {tried}")
    return "\n".join(f"- {line}" for line in lines)


def title(rows) -> str:
    head, sizes = rows[0], rows[0]["sizes"]
    ended = [len(of_method(rows, name)) for name in NAMES]
    trials = min((count for count in ended if count), default=0)
    return (
        f"{head['data']}: {sizes['configs']} configurations, up to {sizes['dimension']:,} "
        f"features, {sizes['train']:,} + {sizes['valid']:,} + {sizes['test']:,} rows, "
        f"{trials} trials; {head['device']}; seconds with "
        f"{head.get('clock', 'neither projections nor hashes')}."
    )


def method_table(rows) -> str:
    lines = []
    for name in NAMES:
        trials = of_method(rows, name)
        if len(trials) < 2:
            continue
        calls, seconds = (np.mean([r[k][-1] for r in trials]) for k in ("calls", "seconds"))
        test = spread([r["test"][-1] for r in trials])
        if name == "exponentiated gradient":
            name += f", rate {best_rate(rows):g}"
        lines.append([name, f"{calls:.0f}", f"{seconds:.1f}", test])
    return harness.table(["method", "solves", "seconds", "test error, %, ± s.e."], lines)


def report(rows) -> str:
    return "\n\n".join([title(rows), method_table(rows), fast_table(rows), verdicts(rows)])


@harness.figure(1, 3, figsize=(16, 4.5))
def picture(rows, axes):
    from types import SimpleNamespace

    about = "shared against standalone; retrained test error of the incumbent"
    axes[0].figure.suptitle(f"{rows[0]['data']}: {about}")
    for row in by_dimension(rows):
        label = f"{row['dimension']} features, Spearman {row['spearman']:.2f}"
        axes[0].plot(row["shared"], row["standalone"], "o", label=label, alpha=0.7)
    axes[0].set(xlabel="accuracy with shared weights", ylabel="standalone accuracy")
    axes[0].legend()

    def curve(row):
        return SimpleNamespace(**{c: np.array(row[c]) for c in ("calls", "seconds", "test")})

    curves = {name: [*map(curve, of_method(rows, name))] for name in NAMES}
    curves = {name: of_trials for name, of_trials in curves.items() if of_trials}
    comparable = {n: c for n, c in curves.items() if n not in ("successive halving", "Hyperband")}
    curves = comparable | curves  # the same colors in both
    plots.traces(comparable, "calls", axes[1]).get_legend().remove()  # one at the right is for both
    plots.traces(curves, "seconds", axes[2]).legend(loc="center left", bbox_to_anchor=(1, 0.5))
    axes[2].set_xlabel("seconds, without compilation")  # see `warm_up`
