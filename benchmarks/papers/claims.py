"""The papers' claims on each page of the documentation, with verdicts computed from the rows.

`tools/tables.py` writes these tables. :mod:`benchmarks.verdicts` holds the rule.
"""

import functools
from collections.abc import Iterator

import numpy as np

from benchmarks import harness, verdicts
from benchmarks.deep_search import gaea
from benchmarks.feature_maps import feature_maps_tables
from benchmarks.harness import Row, where
from benchmarks.theory import concentration, lipschitz, spectral
from benchmarks.verdicts import clearly, grade, grade_gains

Claim = tuple[str, str, str]  # the claim, its verdict, the measurement
HEAD = "claim", "verdict", "measured here"


@functools.cache
def rows_of(name: str) -> list[Row]:
    """Return the rows of a results file."""
    return harness.read(harness.RESULTS / f"{name}.jsonl")


def rule(_: list[Row]) -> str:
    """Return the rule of the verdicts."""
    return verdicts.RULE


# ----------------------------------------------------------------------------- theory


def theory(_: list[Row]) -> str:
    """Return the claims of the papers with theorems."""
    parts = uniform_convergence, lipschitz_training, one_eigenvector, largest_alpha, sparser
    return harness.table(HEAD, [claim for part in parts for claim in part()])


def uniform_convergence() -> Iterator[Claim]:
    rows, names = rows_of("concentration"), ("risk", "gradient")
    last = [where(r, h=concentration.FACES[-1]) for _, r in concentration.of_searches(rows)]
    slopes = [concentration.exponent(of_search, name) for of_search in last for name in names]
    rate = all(abs(slope + 0.5) < 0.03 + 3 * error for slope, error in slopes)
    shown = " to ".join(f"{f(s for s, _ in slopes):.2f}" for f in (max, min))
    yield (
        "validation and test agree over all alpha, up to sqrt(h / n_V) (Oymak et al., Theorem 1)",
        grade(False, rate, papers_setting=False),
        f"exponents of n_V {shown}; sqrt(h) only on an instance with a known answer",
    )
    lost = max(row["excess"] / row["risk"] for of_search in last for row in of_search)
    yield (
        "selection loses at most twice the largest gap (Theorem 1, Eq. 3)",
        grade(lost <= 2, lost <= 2, papers_setting=True),
        f"at most {lost:.2g} times the gap, so Eq. (3) is loose",
    )


def lipschitz_training() -> Iterator[Claim]:
    flat = {}
    for network in lipschitz.NETWORKS:
        judged = lipschitz.verdicts(rows_of("lipschitz"), network)
        flat[network] = [holds for holds, text in judged if text.startswith("flat")]
    holding = [name for name, both in flat.items() if all(both)]
    yield (
        "distances of weights stay proportional to Δα, at every width (Assumption 1, Figure 2)",
        grade(len(holding) == len(flat), np.any([*flat.values()]), papers_setting=False),
        "; ".join(
            f"{name} network: {'flat' if width else 'not flat'} in the width, "
            f"{'flat' if delta else 'not flat'} in Δα"
            for name, (width, delta) in flat.items()
        ),
    )


def one_eigenvector() -> Iterator[Claim]:
    cells = where(rows_of("spectral"), part="diagram")
    inside = []
    for cell in cells:
        p, h = cell["p"] / cell["n"], cell["h"] / cell["n"]
        if p <= 1:
            continue  # the theorem assumes more features than rows
        _, overlap, _, risk = map(float, spectral.exact_and_bounds(p, h))
        inside.append(cell["overlap"][0] >= overlap and cell["risk"][0] <= risk)
    yield (
        "bounds (11) and (12) of the spectral estimator (Theorem 4)",
        grade(all(inside), np.mean(inside) > 0.5, papers_setting=True),
        f"they hold in {sum(inside)} of {len(inside)} cells, and say little: see the exact limits",
    )


def largest_alpha() -> Iterator[Claim]:
    instances = [row for row in rows_of("discretization") if "violations" in row]
    violations = sum(row["violations"] for row in instances)
    pairs = sum(row["pairs"] for row in instances)
    yield (
        "under Condition 6 the largest alpha is the best choice (Roberts et al., Theorem 7)",
        grade(violations == 0, False, papers_setting=True),
        f"{violations} violations in {pairs:,} ordered pairs; real searches break its assumption",
    )


def sparser() -> Iterator[Claim]:
    rows = rows_of("gaea")
    tuned = {method: gaea.best_rate(rows, method)[0] for method in gaea.METHODS}
    quarter = gaea.LOOKS // 4 - 1

    def gain(rates, name, look):
        both = [gaea.of(rows, method, rates[method]) for method in gaea.METHODS]
        own, other = (np.array([row[name][look] for row in of_method]) for of_method in both)
        return other - own

    texts, clear, signs = [], [], []
    for name, rates in {"the authors' rates": gaea.DEFAULT, "tuned rates": tuned}.items():
        sparse, fast = gain(rates, "entropy", -1), gain(rates, "valid_loss", quarter)
        clear.append(clearly(sparse) and clearly(fast))
        signs.append(sparse.mean() > 0 and fast.mean() > 0)
        texts.append(
            f"{name}: entropy lower by {harness.spread(sparse, '.3f')}, "
            f"loss at a quarter by {harness.spread(fast, '.4f')}"
        )
    yield (
        "exponentiated gradient is faster and ends sparser than softmax with Adam (Li et al.)",
        grade(all(clear), any(signs), papers_setting=False),
        "; ".join(texts),
    )


# ----------------------------------------------------------------------------- feature maps


FEATURES = {"CIFAR-10": "feature_maps_full_cifar10_2048", "IMDb": "feature_maps_full_imdb"}


def feature_maps(_: list[Row]) -> str:
    """Return the claims of Khodak et al. 2020, by data."""
    lines: dict[str, list[str]] = {}
    for name in FEATURES.values():
        for claim, verdict, text in weight_sharing(rows_of(name)):
            lines.setdefault(claim, []).append(f"{verdict}: {text}")
    return harness.table(["claim", *FEATURES], [[claim, *cells] for claim, cells in lines.items()])


def weight_sharing(rows: list[Row]) -> Iterator[Claim]:
    """Yield the claims; no data set has the paper's number of features."""
    whole = rows_of("feature_maps_full_cifar10") if rows[0]["data"] == "cifar10" else rows
    correlated = feature_maps_tables.by_dimension(whole)
    text = ", ".join(f"{row['pearson']:.2f} ({row['dimension']:,})" for row in correlated)
    yield (
        "shared weights correlate with standalone accuracy",
        grade(False, correlated[-1]["pearson"] > 0, papers_setting=False),
        f"Pearson (features) {text}",
    )
    pairs = feature_maps_tables.paired(rows, "weight sharing", "random search")
    ahead = [feature_maps_tables.at(r, "calls", w["calls"][-1]) - w["test"][-1] for w, r in pairs]
    yield "weight sharing beats random search per solve", *_gain(ahead)
    for rival in "successive halving", "random search", "Hyperband":
        pairs = feature_maps_tables.paired(rows, "fast weight sharing", rival)
        ahead = [
            feature_maps_tables.at(r, "seconds", f["seconds"][-1]) - f["test"][-1] for f, r in pairs
        ]
        ahead = [gain for gain in ahead if not np.isnan(gain)]
        yield f"fast weight sharing beats {rival} in time (Figure 3)", *_gain(ahead)


def _gain(points: list[float]) -> tuple[str, str]:
    """Return the verdict on a gain over all trials, and the gain in points of test error."""
    text = f"{feature_maps_tables.spread(points)} points" if points else "no trials"
    return grade_gains(points, papers_setting=False), text


# ----------------------------------------------------------------------------- learned images


def learned_images(_: list[Row]) -> str:
    """Return the claim of Nguyen, Chen & Lee 2021 on the gallery's runs, one for each line."""
    parts = where(rows_of("gallery"), part="inducing_points")
    rows = [row for part in parts for row in part["rows"]]
    better = [row["learned"] < row["random"] for row in rows]
    text = f"fewer errors than random images in {sum(better)} of {len(better)} runs"
    claim = "learned images are better than the same number of real ones"
    return harness.table(HEAD, [(claim, grade(False, all(better), papers_setting=False), text)])
