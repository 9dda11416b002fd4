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
    """Say whether to take the argmax alone or keep the mixture."""
    argmax, names, outer = result["argmax"], result["names"], f"{result['config']['outer']} loss"
    seeds, yes = len(argmax["choice"]), sum(argmax["discretise"])
    basis = f"by {outer} and by error on {argmax['valid_rows']} validation rows"
    if seeds > 1:
        return (
            f"argmax: discretise in {yes} of {seeds} seeds, where it is as good as any activation "
            f"retrained alone, {basis}; keep the mixture in {seeds - yes}"
        )
    loss, error = ({k: v[0] for k, v in argmax["by"][by].items()} for by in ("loss", "error"))
    percent = dict(zip(names, (f"{100 * e:.1f} %" for e in error["alone"]), strict=True))
    choice, mixture = argmax["choice"][0], f"{100 * error['mixture']:.1f} %"
    if yes:
        return (
            f"argmax {choice}: discretise; retrained alone it has {percent[choice]}, as good as "
            f"any of {len(names)} {basis} (the mixture has {mixture})"
        )
    by, at_fault, other = (outer, loss, error) if not loss["as_good"] else ("error", error, loss)
    rank = "last" if at_fault["rank"] == len(names) else f"number {at_fault['rank']}"
    unlike = f"; by {'error' if by == outer else outer} it is as good as any"
    return (
        f"argmax {choice}: keep the mixture ({mixture}): retrained alone, {choice} has "
        f"{percent[choice]}, {rank} of {len(names)} by {by}; {at_fault['best']} is best by it, "
        f"{percent[at_fault['best']]}{unlike if other['as_good'] else ''} "
        f"({argmax['valid_rows']} validation rows)"
    )


def theory(argmax: dict[str, Any]) -> str:
    """Describe the conclusion of Roberts et al. at the shared weights."""
    seeds, condition = len(argmax["choice"]), argmax["condition_six"]
    words = {1: "holds", -1: "fails", 0: "is undecided"}
    verdict = words[condition[0]] if seeds == 1 else f"holds in {condition.count(1)} of {seeds}"
    off = f"α stationary to {100 * max(argmax['stationarity']):.2g} % of its loss"
    return (
        f"at the shared weights Condition 6 {verdict} (squared loss, 95 %, {argmax['test_rows']} "
        f"test rows), {off}{' or better' if seeds > 1 else ''}"
    )
