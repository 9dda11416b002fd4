"""The report of a search with shared weights: ``result.json``, a figure, lines on the screen."""

import json
import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np

from bilevel.cli.runtime import report
from bilevel.contracts import Pytree
from bilevel.discretize import diagnostics
from bilevel.plots import plots
from bilevel.spaces import Space

ERRORS = {"train_error": "train", "valid_error": "valid", "test_error": "test"}
"""Keys of results, and headings of tables, which show them in reverse order."""


class SeedResult(NamedTuple):
    """The search of one seed."""

    alpha: Pytree  # after the choice among random architectures, if the strategy draws them
    w: Pytree
    history: dict[str, Any]  # name -> [steps, ...]


def mean_entropy(space: Space, alpha: Pytree) -> float:
    """Return the mean entropy of the simplices in ``alpha``, or 0 without simplices."""
    entropies = [diagnostics.entropy(p) for p in diagnostics.simplices(space.sets, alpha)]
    return float(np.mean(np.concatenate([np.ravel(e) for e in entropies]))) if entropies else 0.0


def nested_lists(alpha: Any) -> Any:
    """Return nested lists; for user-defined pytree nodes, a dict of lists by path."""
    lists = jax.tree.map(lambda a: np.asarray(a).tolist(), alpha)
    try:
        json.dumps(lists)
    except TypeError:
        leaves = jax.tree_util.tree_leaves_with_path(alpha)
        return {jax.tree_util.keystr(path): np.asarray(a).tolist() for path, a in leaves}
    return lists


def arrays_of(seed_results: list[SeedResult]) -> dict[str, np.ndarray]:
    """Return ``alpha`` and history of every seed, each leaf named by its path."""
    arrays: dict[str, np.ndarray] = {}
    for seed, result in enumerate(seed_results):
        trees = {"alpha": result.alpha, "history": result.history}
        for path, leaf in jax.tree_util.tree_leaves_with_path(trees):
            arrays[f"{name_in_arrays(path)}_{seed}"] = np.asarray(leaf)
    return arrays


def name_in_arrays(path: tuple[Any, ...]) -> str:
    """Return the name of a leaf in ``arrays.npz``."""
    return "_".join(str(getattr(key, "key", key)) for key in path)


class Heatmap(NamedTuple):
    """Values from 0 to 1 in cells, for the figure of an alpha."""

    title: str
    values: np.ndarray  # [rows, columns]
    columns: list[str]
    rows: list[str]
    ylabel: str


def save_search_figure(
    path: pathlib.Path, result: dict[str, Any], seed_results: list[SeedResult], heats: list[Heatmap]
) -> None:
    """Save ``search.png``: the first seed's alpha in cells, and the losses of all seeds."""
    places = [f"alpha {i}" for i in range(len(heats))]
    first = ", of the first seed" if len(seed_results) > 1 else ""

    def draw(figure):
        mosaic = [[*places, "outer"], [*places, "lower"]]
        axes = figure.subplot_mosaic(mosaic, width_ratios=(*[4] * len(places), 3))
        for place, heat in zip(places, heats, strict=True):
            report.heat_map(heat.values, axes[place], heat.columns, heat.rows)
            axes[place].set(title=heat.title + first, ylabel=heat.ylabel)
        histories = [f.history for f in seed_results]
        outer, lower = plots.losses(histories, (axes["outer"], axes["lower"]))
        outer.set_ylabel(f"{result['alpha_rows']} loss (nats)\nof α's minibatch")
        lower.set_ylabel("training loss (nats)\nof the weights' minibatch")
        figure.suptitle(report.figure_title(result["config"]))

    report.save_figure(path, (5 * len(heats) + 5, 4.8), draw)


# ----------------------------------------------------------------------------- the screen


def network_table(
    result: dict[str, Any], columns: dict[str, tuple[str, str]], ends: set[str]
) -> Any:
    """Return a table of the errors of all networks, and of ``columns``: see ``score_table``."""
    # The test error decides, so it is first.
    errors = {key: (heading, ".1f") for key, heading in reversed(ERRORS.items())}
    title, best = report.table_title(result["config"]), result.get("best_single")
    return report.score_table(title, result["scores"], errors | columns, ends=ends, starred=best)


def name_of_found(scores: dict[str, Any]) -> str:
    """Return the name of the network found by the search; "" if the search trained none."""
    return next((name for name in scores if name.endswith(("search", "eigen-nas"))), "")


def compare_with_random(scores: dict[str, dict[str, list[float]]], test_rows: int) -> str:
    """Compare the network found with random ones, in one sentence."""
    name, baseline = name_of_found(scores), next((n for n in scores if n.endswith("random")), "")
    ours = np.array(scores[name]["test_error"])
    sentence = f"test error {100 * ours.mean():.1f} % with {name}"
    if baseline:
        theirs = np.array(scores[baseline]["test_error"])
        verdict = report.compare_errors(ours, theirs, test_rows)
        sentence += f", {100 * theirs.mean():.1f} % with {baseline}: {verdict}"
    return f"{sentence}."
