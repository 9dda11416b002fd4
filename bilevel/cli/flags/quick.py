"""Sizes of ``--quick``: seconds or minutes on two cores, and no download."""

import dataclasses
from typing import Any

from bilevel.cli.flags.commands import Baseline, Certify, Job, Rank, Search
from bilevel.cli.flags.deep_searches import (
    DartsSearch,
    NasBench201Search,
    OwnSearch,
    SkipSearch,
    Train,
)

QUICK: dict[type[Job], Job] = {
    Search: Search(steps=5, width=128, train=100, valid=100, test=500),
    SkipSearch: SkipSearch(depth=4, width=32, steps=200, epochs=10, samples=50, test=1000),
    DartsSearch: DartsSearch(
        operations=("none", "max_pool_3x3", "skip_connect", "sep_conv_3x3"),
        channels=4,
        pixels=16,
        steps=100,
        epochs=10,
        batch_size=32,
        samples=20,
        test=1000,
        random=1,
    ),
    NasBench201Search: NasBench201Search(
        cells=1, channels=4, pixels=16, steps=100, batch_size=32, samples=20, test=1000
    ),
    OwnSearch: OwnSearch(steps=100, epochs=10, samples=20, test=1000, random=1),
    Train: Train(epochs=5, test=500, random=5, single=False),
    Certify: Certify(rows=50),
    Baseline: Baseline(configs=8, dimension=128, train=200, valid=200, test=500),
    Rank: Rank(data="digits", networks=20, k=5, pool=10, cells=1, channels=4, pixels=16),
}
"""The defaults with ``--quick``."""


def sizes(kind: type[Job]) -> dict[str, Any]:
    """Return the flags of a command that ``--quick`` sets, by name."""
    quick, usual = dataclasses.asdict(QUICK[kind]), dataclasses.asdict(kind())
    return {name: value for name, value in quick.items() if value != usual[name]}
