"""What the campaign consists of: which inputs, under which names, in which order."""

from typing import NamedTuple

from reliability import (  # noqa: F401 (they register themselves)
    architectures,
    eigenvalue_bounds,
    feature_maps,
    hypergradients,
    kernels,
    mixtures,
    searching,
    selection,
    simplices,
    theorems,
    train_free,
)
from reliability.case import Outcome
from reliability.registry import GENERATORS, attack, uncovered

__all__ = ["Block", "Outcome", "one", "plan", "uncovered"]

OTHERS = {}


class Block(NamedTuple):
    """Some inputs of one name."""

    part: str
    name: str
    number: int
    inputs: range


def plan(inputs: int, *, quick: bool, only: str | None, block: int) -> list[Block]:
    """All blocks, those of a name together, so that compiled programs are shared."""
    each = 4 if quick else max(block, -(-inputs // len(GENERATORS)))
    counts = {("functions", name): each for name in GENERATORS}
    counts |= {(part, part): few if quick else many for part, (_, few, many) in OTHERS.items()}
    chosen = {
        (part, name): count
        for (part, name), count in counts.items()
        if only is None or only == part or name.startswith(only)
    }
    return [
        Block(part, name, i, range(i * block, min((i + 1) * block, count)))
        for (part, name), count in chosen.items()
        for i in range(-(-count // block))
    ]


def one(name: str, seed: int, number: int) -> Outcome:
    """One input, and what came of it."""
    if name in OTHERS:
        return OTHERS[name][0](seed, number)
    return attack(name, seed, number)
