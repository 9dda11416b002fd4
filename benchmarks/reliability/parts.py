"""What the campaign consists of: which inputs, under which names, in which order."""

from typing import NamedTuple

from benchmarks.reliability import (  # noqa: F401 (they register themselves)
    architectures,
    eigenvalue_bounds,
    eigenvalues,
    feature_maps,
    hypergradients,
    kernel_functions,
    kernels,
    mixtures,
    operators,
    papers,
    searching,
    selection,
    shared_weights,
    simplices,
    single_loops,
    solver_options,
    theorems,
    train_free,
    training,
)
from benchmarks.reliability.case import Outcome
from benchmarks.reliability.commands import commands
from benchmarks.reliability.crashes import disks, flips, kills, writers
from benchmarks.reliability.nonfinite import nonfinite
from benchmarks.reliability.registry import GENERATORS, NOT_COVERED, attack, uncovered

__all__ = ["GENERATORS", "NOT_COVERED", "Block", "Outcome", "one", "plan", "uncovered"]

# What one input of a part does, how many make its short form, how many the whole.
OTHERS = {
    "nonfinite": (nonfinite, 6, 300),
    "commands": (commands, 4, 400),
    "kills": (kills, 2, 200),
    "flips": (flips, 2, 300),
    "disks": (disks, 1, 60),
    "writers": (writers, 1, 40),
}


class Block(NamedTuple):
    """Some inputs of one name."""

    part: str
    name: str
    number: int
    inputs: range


def plan(inputs: int, *, quick: bool, only: str | None, block: int) -> list[Block]:
    """All blocks, those of a name together, so that compiled programs are shared."""
    each = 2 if quick else -(-inputs // len(GENERATORS))
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
