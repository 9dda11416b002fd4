"""The report of `activation_skip_search.py`: graded findings, true test errors, the figure."""

import numpy as np
from scipy.stats import kendalltau

from benchmarks import harness
from benchmarks.harness import spread
from benchmarks.verdicts import clearly, grade
from bilevel.spaces.skips import CANDIDATES

PAPER = {"width": 1024, "runs": 5}
TRAVEL = 6.0  # rate of alpha times steps: 3e-4 times DARTS's 50 epochs of CIFAR-10
DARTS = {"steps": 23_000, "rate": 3e-4}  # 50 epochs of 30,000 rows in batches of 64
SKIPS = {"no skips": False, "all skips": True}
FAMILY = [CANDIDATES.index(name) for name in ("relu", "leaky_relu")]


def grouped(rows, part, by, *columns):
    """Return ``name -> (array [runs, ...] of each column)``."""
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
    "runs, steps",
    "differs from the paper ({paper})",
    "losses, training and validation",
    "1. both likeliest; by 2 s.e. (one of them), of {layers} layers",
    "2. gap, first layer",
    "minus the largest other",
    "last layer (a tenth of the first minus it)",
    "3. skips over 1/2 (by 2 s.e.), of {skips}",
    "supernet's test error, %",
)


def differing(sizes, reading, steps) -> list[str]:
    """Return the settings, except the number of runs, that differ from the paper's."""
    moves = reading.get("moves", "jointly")
    rate = (2 if moves == "in turn" else 1) * TRAVEL / steps
    differences_by_name = {
        f"width {sizes['width']:,}": sizes["width"] != PAPER["width"],
        "both at once": moves == "jointly",
        f"{steps:,} steps": steps != DARTS["steps"],
        f"rate {rate:.2g}": steps != DARTS["steps"],
        "inputs' scale": not reading["unit"],
        "weights' scale": reading["parametrization"] != "as_printed",
        "rows above": not reading["held_out"],
    }
    return [name for name, differs in differences_by_name.items() if differs]


def findings(p, skips, papers=True) -> tuple[list[str], list[str]]:
    """Return the verdicts on the paper's findings, and the cells of their measurements.

    ``papers`` says whether the setting is the paper's. A run's gap is its largest probability less
    its smallest one. Finding 1 holds in part if one of the two is the likeliest in more than half
    of the layers. Finding 2: the gap is larger in the first layer than in any other, and in the
    last under a tenth of that (in part: larger than in the last). Finding 3: skips are over 1/2
    everywhere (in part: in more than half of the layers, or not clearly).
    """
    mean, layers = p.mean(axis=0), p.shape[1]
    likeliest = np.argsort(-mean, axis=-1, stable=True)
    one = np.isin(likeliest[:, 0], FAMILY).sum()
    both = np.isin(likeliest[:, :2], FAMILY).all(axis=-1).sum()
    leads = p[..., FAMILY, None] - np.delete(p, FAMILY, axis=-1)[..., None, :]
    leading = clearly(leads).all(axis=(-1, -2)).sum()
    gaps = np.ptp(p, axis=-1)  # [runs, layers]
    other = 1 + gaps.mean(axis=0)[1:].argmax()
    more = gaps[:, :1] - gaps
    below = 0.1 * gaps[:, 0] - gaps[:, -1]
    decided = clearly(more[:, other]) and clearly(below)
    wanted, wide_open = (skips.mean(axis=0) > 0.5).sum(), clearly(skips - 0.5).sum()
    held = (
        (leading == layers, one > layers / 2),
        (decided, clearly(more[:, -1])),
        (wide_open == layers - 1, wanted > (layers - 1) / 2),
    )
    cells = [
        f"{both}; {leading} ({one})",
        spread(gaps[:, 0]),
        f"{spread(more[:, other])} (layer {other + 1})",
        f"{spread(gaps[:, -1])} ({spread(below, '.3f')})",
        f"{wanted} ({wide_open})",
    ]
    return [grade(fully, partly, papers_setting=papers) for fully, partly in held], cells


def repeated(rows):
    """Return the rows by search, for searches with at least two complete runs."""
    searches = harness.where(rows, part="search")
    names = dict.fromkeys(r["search"] for r in searches)
    each = {name: harness.where(searches, search=name) for name in names}
    return {name: of_it for name, of_it in each.items() if len(of_it) > 1}


def column(rows, name):
    return np.array([row[name] for row in rows])


def findings_of(sizes, rows) -> tuple[list[str], list[str]]:
    """Return :func:`findings` for the rows of one search."""
    papers = not differing(sizes, rows[0]["reading"], rows[0]["steps"])
    return findings(column(rows, "activations"), column(rows, "skips"), papers)


def search_table(rows) -> str:
    sizes = rows[0]["sizes"]
    lines = []
    for name, of_it in repeated(rows).items():
        first, losses, wrong = of_it[0], "-", "-"  # searched apart: two sets of shared weights
        if "losses" in first:
            losses = ", ".join(spread(part) for part in column(of_it, "losses").T)
            wrong = spread(column(of_it, "supernet"), ".1f", 100)
        differs = differing(sizes, first["reading"], first["steps"])
        differs += [f"{len(of_it)} runs"] * (len(of_it) != PAPER["runs"])
        differs = ", ".join(differs) or "nothing that it says"
        own = [name, f"{len(of_it)}, {first['steps']:,}", differs, losses]
        lines.append([*own, *findings_of(sizes, of_it)[1], wrong])
    paper = f"width {PAPER['width']:,}, {DARTS['steps']:,} steps, rate {DARTS['rate']}, "
    paper += f"{PAPER['runs']} runs"
    names = {"layers": sizes["depth"] - 1, "skips": sizes["depth"] - 2, "paper": paper}
    return harness.table([name.format(**names) for name in COLUMNS], lines)


def verdict_table(rows) -> str:
    """Return the verdicts: a row for each finding, a column for each search, the paper's first."""
    sizes, by_search = rows[0]["sizes"], repeated(rows)

    def distance(of_it):
        return len(differing(sizes, of_it[0]["reading"], of_it[0]["steps"]))

    by_search = dict(sorted(by_search.items(), key=lambda item: distance(item[1])))
    head = [f"{name}, {len(r)} runs of {r[0]['steps']:,} steps" for name, r in by_search.items()]
    head[0] += " (nearest to the paper)"
    columns = [findings_of(sizes, of_it)[0] for of_it in by_search.values()]
    lines = zip(FINDINGS, *columns, strict=True)
    return harness.table(["the paper's finding", *head], lines)


def truth_table(rows) -> str:
    """Return each activation's test error and loss, with the searches' and the kernel's scores."""
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
        agreement = [f"{kendalltau(score, -np.array(e)).statistic:+.1f}" for e in errors]
        lines += [[name, *(f"{s:.2g}" for s in score), *agreement]]
    head = ["one activation", *CANDIDATES, *(f"τ, {label}" for label in SKIPS)]
    return harness.table(head, lines)


def others(rows) -> str:
    trained = grouped(rows, "network", "network", "test")
    shown = {name: e for name, (e,) in trained.items() if "skips" not in name and len(e) > 1}
    errors = [f"{name} {spread(e, '.1f', 100)} %" for name, e in shown.items()]
    return f"Test errors of other networks: {'; '.join(errors) or 'none trained'}."


def report(rows) -> str:
    sizes = rows[0]["sizes"]
    devices = dict.fromkeys(row["device"] for row in harness.where(rows, part="environment"))
    taken = [  # of searches that ran all steps in one process
        row["seconds"] / row.get("timed_steps", row["steps"])
        for row in harness.where(rows, part="search")
        if row.get("timed_steps", row["steps"]) >= row["steps"]
    ]
    parts = [
        f"{sizes['data']}: {sizes['train']} + {sizes['train']} rows, {sizes['test']} test rows, "
        f"L = {sizes['depth']}, m = {sizes['width']} (mean ± s.e.); {'; '.join(devices)}; "
        f"{np.median(taken) if taken else np.nan:.2g} s for a step of the search.",
        verdict_table(rows),
        search_table(rows),
    ]
    trained = {row["network"] for row in harness.where(rows, part="network")}
    if all(f"{a}, {label}" in trained for a in CANDIDATES for label in SKIPS):
        parts += [truth_table(rows), "τ: Kendall's, of the row with the accuracies (five items)."]
    return "\n\n".join([*parts, others(rows)])


def picture(rows, path):
    by_search = repeated(rows)
    across = min(2, len(by_search))
    height = -(-len(by_search) // across)
    size = {"figsize": (7.5 * across, 4 * height), "width_ratios": (5, 1) * across}
    with harness.picture(path, height, 2 * across, **size) as (_, axes):
        draw(by_search, axes)


def draw(by_search, axes):
    pairs = np.reshape(axes, (-1, 2))
    for pair in pairs[len(by_search) :].ravel():
        pair.axis("off")
    for pair, (name, of_it) in zip(pairs, by_search.items(), strict=False):
        p, skips = column(of_it, "activations"), column(of_it, "skips")
        panels = (p, CANDIDATES, 1), (skips[..., None], ("skip",), 2)
        for ax, (values, columns, first) in zip(pair, panels, strict=True):
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
