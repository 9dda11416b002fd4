"""The report of `activation_skip_search.py`: findings graded, the truth beside them, the picture.

A module of its own, so that making a table imports no search.
"""

import harness
import numpy as np
import scipy.stats
from harness import spread, standard_error

from bilevel.spaces.skips import CANDIDATES

PAPER = {"width": 1024, "runs": 5}
SKIPS = {"no skips": False, "all skips": True}
FAMILY = [CANDIDATES.index(name) for name in ("relu", "leaky_relu")]


def positive(x):
    return x.mean(axis=0) > 2 * standard_error(x)


def grouped(rows, part, by, *columns):
    """``name -> (array [runs, ...] of each column)``"""
    rows = harness.where(rows, part=part)
    names = dict.fromkeys(r[by] for r in rows)
    return {n: [np.array([r[c] for r in rows if r[by] == n]) for c in columns] for n in names}


FINDINGS = (
    "1. ReLU and LeakyReLU are the likeliest in every layer",
    "2. the first layer decides most, the last nothing",
    "3. skips are wanted in every layer",
)
COLUMNS = (
    "search",
    "differs from the paper's in",
    "runs, steps",
    "losses, training and validation",
    "1.",
    "both likeliest (one of them is), layers of {layers}",
    "their probability (0.40 at first)",
    "2.",
    "gap, first layer",
    "less the largest other",
    "last layer's",
    "3.",
    "skips over 1/2 (by 2 s.e.), of {skips}",
    "mean weight (0.50 at first)",
    "supernet's test error, %",
)
CLAIMS = """The paper's findings, graded by means over runs:

1. ReLU and LeakyReLU are the two likeliest in every layer (in part: one of them is the likeliest
   in more than half of the layers);
2. a run's gap, its largest less its smallest probability, is larger in the first layer than in
   any other, and in the last under a tenth of that (in part: larger in the first than the last);
3. the skips are over 1/2 everywhere (in part: in more than half of the layers, or not clearly).

Over and larger: by two standard errors of runs, paired."""


def graded(fully, partly) -> str:
    return "**reproduced**" if fully else "reproduced in part" if partly else "not reproduced"


def differences(sizes, reading, runs) -> str:
    """In what a search is not as the paper says."""
    found = {
        f"width ({sizes['width']} for {PAPER['width']})": sizes["width"] != PAPER["width"],
        "activations and skips at once": reading.get("moves", "jointly") == "jointly",
        "inputs' scale": not reading["unit"],
        "weights' scale": reading["parametrization"] != "as_printed",
        "rows above": not reading["held_out"],
        f"runs ({runs} for {PAPER['runs']})": runs != PAPER["runs"],
    }
    return ", ".join(name for name, differs in found.items() if differs) or "nothing that it says"


def findings(p, skips) -> list[str]:
    """Cells of the table: for each of the paper's findings the verdict, then its figures."""
    mean, layers = p.mean(axis=0), p.shape[1]
    likeliest = np.argsort(-mean, axis=-1, stable=True)
    one = np.isin(likeliest[:, 0], FAMILY).sum()
    both = np.isin(likeliest[:, :2], FAMILY).all(axis=-1).sum()
    family = p[..., FAMILY].sum(axis=-1).mean(axis=-1)
    gaps = np.ptp(p, axis=-1)  # [runs, layers]
    other = 1 + gaps.mean(axis=0)[1:].argmax()
    more = gaps[:, :1] - gaps
    flat = gaps[:, -1].mean() < 0.1 * gaps[:, 0].mean()
    wanted, clearly = (skips.mean(axis=0) > 0.5).sum(), positive(skips - 0.5).sum()
    return [
        graded(both == layers, one > layers / 2),
        f"{both} ({one})",
        spread(family),
        graded(positive(more[:, other]) and flat, positive(more[:, -1])),
        spread(gaps[:, 0]),
        f"{spread(more[:, other])} (layer {other + 1})",
        spread(gaps[:, -1]),
        graded(clearly == layers - 1, wanted > (layers - 1) / 2),
        f"{wanted} ({clearly})",
        spread(skips.mean(axis=-1)),
    ]


def kendall(a, b) -> str:
    return f"{scipy.stats.kendalltau(a, b).statistic:+.1f}"


def repeated(rows):
    """Search -> its rows, of those that two runs have ended of."""
    found = harness.where(rows, part="search")
    names = dict.fromkeys(r["search"] for r in found)
    each = {name: harness.where(found, search=name) for name in names}
    return {name: of_it for name, of_it in each.items() if len(of_it) > 1}


def column(rows, name):
    return np.array([row[name] for row in rows])


def search_table(rows) -> str:
    sizes = rows[0]["sizes"]
    lines = []
    for name, of_it in repeated(rows).items():
        first, losses, wrong = of_it[0], "-", "-"  # searched apart: two sets of shared weights
        if "losses" in first:
            losses = ", ".join(spread(part) for part in column(of_it, "losses").T)
            wrong = spread(column(of_it, "supernet"), ".1f", 100)
        own = [name, differences(sizes, first["reading"], len(of_it))]
        own += [f"{len(of_it)}, {first['steps']:,}", losses]
        parts = column(of_it, "activations"), column(of_it, "skips")
        lines.append([*own, *findings(*parts), wrong])
    counts = {"layers": sizes["depth"] - 1, "skips": sizes["depth"] - 2}
    return harness.table([name.format(**counts) for name in COLUMNS], lines)


def verdict_table(rows) -> str:
    """The grades alone: a row for each finding, a column for each search."""
    found = repeated(rows)
    head = ["the paper's finding"]
    head += [f"{name}, {len(r)} runs of {r[0]['steps']:,} steps" for name, r in found.items()]
    grades = [
        findings(column(r, "activations"), column(r, "skips"))[place]
        for place in (0, 3, 7)
        for r in found.values()
    ]
    lines = [[name, *grades[i * len(found) :][: len(found)]] for i, name in enumerate(FINDINGS)]
    return harness.table(head, lines)


def truth_table(rows) -> str:
    """Each activation's test error and loss, and scores beside it: searches', the kernel's."""
    trained = grouped(rows, "network", "network", "test", "loss")
    kernels = grouped(rows, "kernel", "network", "λ_min", "mean diagonal")
    truth = {label: [trained[f"{a}, {label}"] for a in CANDIDATES] for label in SKIPS}
    lines, scores = [], {}
    for label, of_each in truth.items():
        lines += [[f"test error, %, {label}", *(spread(e, ".1f", 100) for e, _ in of_each), "", ""]]
        lines += [[f"test loss, {label}", *(spread(loss) for _, loss in of_each), "", ""]]
    for name, of_it in repeated(rows).items():
        scores[f"mean probability, {name}"] = column(of_it, "activations").mean(axis=(0, 1))
    for label in SKIPS:
        smallest, diagonal = np.squeeze([kernels[f"{a}, {label}"] for a in CANDIDATES], -1).T
        scores[f"λ_min, {label}"] = smallest
        scores[f"λ_min / mean diagonal, {label}"] = smallest / diagonal
    for name, score in scores.items():
        errors = [[e.mean() for e, _ in of_each] for of_each in truth.values()]
        agreement = [kendall(score, -np.array(e)) for e in errors]
        lines += [[name, *(f"{s:.2g}" for s in score), *agreement]]
    head = ["one activation", *CANDIDATES, *(f"τ, {label}" for label in SKIPS)]
    return harness.table(head, lines)


def others(rows) -> str:
    trained = grouped(rows, "network", "network", "test")
    found = [
        f"{name} {spread(e, '.1f', 100)} %"
        for name, (e,) in trained.items()
        if "skips" not in name and len(e) > 1
    ]
    return f"Test errors of other networks: {'; '.join(found) or 'none trained'}."


def report(rows) -> str:
    sizes = rows[0]["sizes"]
    devices = dict.fromkeys(row["device"] for row in harness.where(rows, part="environment"))
    taken = [  # of searches that went through all their steps in one process
        row["seconds"] / row.get("timed_steps", row["steps"])
        for row in harness.where(rows, part="search")
        if row.get("timed_steps", row["steps"]) >= row["steps"]
    ]
    parts = [
        f"{sizes['data']}: {sizes['train']} + {sizes['train']} rows, {sizes['test']} test rows, "
        f"L = {sizes['depth']}, m = {sizes['width']} (mean ± s.e.); {'; '.join(devices)}; "
        f"{np.median(taken) if taken else np.nan:.2g} s for a step of the search.",
        CLAIMS,
        search_table(rows),
    ]
    trained = {row["network"] for row in harness.where(rows, part="network")}
    if all(f"{a}, {label}" in trained for a in CANDIDATES for label in SKIPS):
        parts += [truth_table(rows), "τ: Kendall's, of the row with the accuracies (five items)."]
    return "\n\n".join([*parts, others(rows)])


def picture(rows, path):
    found = repeated(rows)
    across = min(2, len(found))
    height = -(-len(found) // across)
    size = {"figsize": (7.5 * across, 4 * height), "width_ratios": (5, 1) * across}
    with harness.picture(path, height, 2 * across, **size) as (_, axes):
        draw(found, axes)


def draw(found, axes):
    pairs = np.reshape(axes, (-1, 2))
    for pair in pairs[len(found) :].ravel():
        pair.axis("off")
    for pair, (name, of_it) in zip(pairs, found.items(), strict=False):
        p, skips = column(of_it, "activations"), column(of_it, "skips")
        for ax, values, columns, first in (
            (pair[0], p, CANDIDATES, 1),
            (pair[1], skips[..., None], ("skip",), 2),
        ):
            mean = values.mean(axis=0)
            ax.grid(False)
            ax.imshow(mean, vmin=0, vmax=1, cmap="Blues", aspect="auto")
            for i, j in np.ndindex(mean.shape):
                ink = "white" if mean[i, j] > 0.6 else "black"
                ax.text(j, i, spread(values[:, i, j]), ha="center", va="center", color=ink, size=8)
            ax.set_xticks(range(len(columns)), columns)
            ax.set_yticks(range(len(mean)), range(first, first + len(mean)))
        pair[0].set(ylabel="layer", title=f"{name} ({of_it[0]['steps']} steps): probability")
        pair[1].set_title(f"weight, {len(p)} runs")
