"""Advice of ``bilevel search`` on its argmax: discretise, or keep the mixture."""

from typing import Any

import numpy as np

from bilevel.strategies.activation_search import ActivationTask, ArgmaxVerdict


def verdict_entries(task: ActivationTask, verdict: ArgmaxVerdict) -> dict[str, Any]:
    """Return the entries of a verdict in ``result.json``."""
    names = np.array(task.space.names)
    by = {
        name: {
            "as_good": judgement.as_good.tolist(),
            "rank": judgement.rank.tolist(),
            "best": names[judgement.best].tolist(),
            "alone": np.asarray(judgement.mean, float).tolist(),
            "mixture": np.asarray(verdict.mixture[name], float).tolist(),
        }
        for name, judgement in verdict.by.items()
    }
    return {
        "choice": names[verdict.choice].tolist(),
        "discretise": verdict.discretise.tolist(),
        "by": by,
        "valid_rows": task.valid[1].shape[1],
        "condition_six": verdict.condition_six.condition.tolist(),
        "stationarity": verdict.stationarity.tolist(),
        "test_rows": task.test[1].shape[1],
    }


def describe_advice(result: dict[str, Any]) -> str:
    """Say whether to use the argmax alone or keep the mixture."""
    argmax, names, outer = result["argmax"], result["names"], f"{result['config']['outer']} loss"
    seeds, yes = len(argmax["choice"]), sum(argmax["discretise"])
    rows = f"{argmax['valid_rows']} validation rows"
    if seeds > 1:
        return (
            f"argmax of α: use it alone in {yes} of {seeds} seeds, keep the mixture in "
            f"{seeds - yes} (alone, if retrained it is as good as every other activation, by "
            f"{outer} and by error on {rows})"
        )
    loss, error = ({k: v[0] for k, v in argmax["by"][by].items()} for by in ("loss", "error"))
    percent = dict(zip(names, (f"{100 * e:.1f} %" for e in error["alone"]), strict=True))
    choice, mixture = argmax["choice"][0], f"{100 * error['mixture']:.1f} %"
    if yes:
        return (
            f"argmax of α: use {choice} alone; retrained it has {percent[choice]} error on {rows}, "
            f"as good as every other activation by {outer} and by error (mixture: {mixture})"
        )
    by, at_fault, other = (outer, loss, error) if not loss["as_good"] else ("error", error, loss)
    second = "error" if by == outer else outer
    also = f", although as good as the first by {second}" if other["as_good"] else ""
    return (
        f"argmax of α: keep the mixture ({mixture} error on {rows}); {choice} retrained alone has "
        f"{percent[choice]} and is number {at_fault['rank']} of {len(names)} by {by}{also}; the "
        f"first by {by} is {at_fault['best']} ({percent[at_fault['best']]})"
    )


def theory(argmax: dict[str, Any]) -> str:
    """Describe the conclusion of Roberts et al. at the shared weights."""
    seeds, condition = len(argmax["choice"]), argmax["condition_six"]
    words = {1: "holds", -1: "fails", 0: "is undecided"}
    verdict = words[condition[0]] if seeds == 1 else f"holds in {condition.count(1)} of {seeds}"
    stationarity = 100 * max(argmax["stationarity"])
    return (
        f"Condition 6 of Roberts et al., under which the argmax is the best at the shared weights: "
        f"{verdict} (95 % confidence, squared loss, {argmax['test_rows']} test rows); α is "
        f"stationary to {stationarity:.2g} % of this loss{' or less' if seeds > 1 else ''}"
    )
