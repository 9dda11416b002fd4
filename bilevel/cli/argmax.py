"""What ``bilevel search`` says of its argmax: discretise, or keep the mixture."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bilevel.discretize import ConditionSix, condition_six, judge_choice
from bilevel.spaces.activations import ActivationSpace, losses_by_row

Network = tuple[jax.Array, jax.Array]  # weights and alpha of all seeds
Batch = tuple[jax.Array, jax.Array]  # [seeds, n, inputs], [seeds, n, classes]

_DIVERGED = 1e6  # the loss of a network whose training diverged: larger than any other


def judged(
    space: ActivationSpace, found: Network, singles: list[Network], valid: Batch, test: Batch
) -> dict[str, Any]:
    """Is each seed's argmax, trained alone, as good as any? By the validation rows of all.

    No weights were fitted to those, only α was, whose argmax is the choice to be judged. At the
    shared weights, which Condition 6 is about, choices of small outputs look better than they are.
    """
    names, (_, alpha) = np.array(space.names), found
    choices = np.asarray(alpha).argmax(axis=1)
    by_row = [losses_by_row(space, *network, valid) for network in (*singles, found)]
    by: dict[str, Any] = {}
    for name in ("loss", "error"):
        *alone, mixture = [_finite(losses[name]) for losses in by_row]
        verdicts = [
            judge_choice(np.stack(losses, axis=1), choice)
            for *losses, choice in zip(*alone, choices, strict=True)
        ]
        by[name] = {
            "as_good": [bool(v.as_good) for v in verdicts],
            "rank": [int(v.rank) for v in verdicts],
            "best": names[[int(v.best) for v in verdicts]].tolist(),
            "alone": [np.asarray(v.mean, float).tolist() for v in verdicts],
            "mixture": mixture.mean(axis=1).astype(float).tolist(),
        }
    theory = _condition_six(space, *found, test)
    return {
        "choice": names[choices].tolist(),
        "discretise": np.logical_and(*(by[name]["as_good"] for name in by)).tolist(),
        "by": by,
        "valid_rows": valid[1].shape[1],
        "condition_six": theory.condition.tolist(),
        "stationarity": (theory.stationarity / theory.L_alpha).tolist(),
        "test_rows": test[1].shape[1],
    }


def _finite(losses: jax.Array) -> np.ndarray:
    """A network whose training diverged is worse than any other."""
    return np.nan_to_num(np.asarray(losses), nan=_DIVERGED, posinf=_DIVERGED)


@functools.partial(jax.jit, static_argnums=0)
def _condition_six(
    space: ActivationSpace, w: jax.Array, alpha: jax.Array, batch: Batch
) -> ConditionSix:
    def of_one_seed(w, alpha, x, y):
        vertices = jnp.eye(len(space.names), dtype=alpha.dtype)
        outputs = jax.vmap(space.apply, (None, 0, None), 1)(w, vertices, x)
        return condition_six(outputs, alpha, y)

    return jax.vmap(of_one_seed)(w, alpha, *batch)


def sentence(result: dict[str, Any]) -> str:
    """Whether to take the argmax alone or keep the mixture, by what they are when trained."""
    found, names, outer = result["argmax"], result["names"], f"{result['config']['outer']} loss"
    seeds, yes = len(found["choice"]), sum(found["discretise"])
    basis = f"by {outer} and by error on {found['valid_rows']} validation rows"
    if seeds > 1:
        return (
            f"argmax: discretise in {yes} of {seeds} seeds, where it is as good as any activation "
            f"retrained alone, {basis}; keep the mixture in {seeds - yes}"
        )
    loss, error = ({k: v[0] for k, v in found["by"][by].items()} for by in ("loss", "error"))
    percent = dict(zip(names, (f"{100 * e:.1f} %" for e in error["alone"]), strict=True))
    choice, mixture = found["choice"][0], f"{100 * error['mixture']:.1f} %"
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
        f"({found['valid_rows']} validation rows)"
    )


def theory(found: dict[str, Any]) -> str:
    """What Roberts et al. would say, of the shared weights."""
    seeds, condition = len(found["choice"]), found["condition_six"]
    words = {1: "holds", -1: "fails", 0: "is undecided"}
    verdict = words[condition[0]] if seeds == 1 else f"holds in {condition.count(1)} of {seeds}"
    off = f"α stationary to {100 * max(found['stationarity']):.2g} % of its loss"
    return (
        f"at the shared weights Condition 6 {verdict} (squared loss, 95 %, {found['test_rows']} "
        f"test rows), {off}{' or better' if seeds > 1 else ''}"
    )
