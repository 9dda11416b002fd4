"""Genotypes of NAS-Bench-201: one operation on each edge of one cell.

A cell has the nodes 0 (its input) to 3 (its output), so there are ``5**6 = 15,625`` genotypes. All
15 cells of the network are equal, in three stages of 16, 32 and 64 channels with a residual block
before the second and the third.

Reference: Dong & Yang, NAS-Bench-201, ICLR 2020; Dong, Liu, Musial & Gabrys, NATS-Bench, TPAMI 2021
(there the "topology" space).
"""

import functools
import itertools
import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from bilevel.internal.checks import describe, one_of
from bilevel.spaces.cells import edges_by_node

PRIMITIVES = ("none", "skip_connect", "nor_conv_1x1", "nor_conv_3x3", "avg_pool_3x3")
"""The columns of ``alpha``. A convolution is ReLU, convolution, batch normalisation."""

EDGES = edges_by_node((1, 2, 3))
"""The rows of ``alpha``: (source, node), by node, then by source, as in the official text."""

SIZES = {"nor_conv_1x1": 1, "nor_conv_3x3": 3}
"""Kernel sizes of the operations with weights."""

_TEXT = "|{}~0|+|{}~0|{}~1|+|{}~0|{}~1|{}~2|"
_PATTERN = re.compile(re.escape(_TEXT).replace(r"\{\}", r"(\w+)"))


class Genotype(NamedTuple):
    """A cell; ``str`` gives the official string, :func:`parse_genotype` reads it."""

    operations: tuple[str, ...]  # six names of PRIMITIVES, in the order of EDGES

    def __str__(self) -> str:
        """Return the benchmark's string."""
        return _TEXT.format(*self.operations)


def parse_genotype(text: str) -> Genotype:
    """Read a genotype from the official string, ``|op~0|+|op~0|op~1|+|op~0|op~1|op~2|``."""
    if not isinstance(text, str):
        raise ValueError(f"text: expected a genotype's text, got {describe(text)}.")
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"text: expected {_TEXT.format(*['op'] * 6)}, got {text[:160]!r}.")
    parsed = Genotype(match.groups())
    check_operations(parsed)
    return parsed


def check_operations(genotype: Genotype) -> None:
    """Raise ``ValueError`` unless a genotype has six operations among ``PRIMITIVES``."""
    if not isinstance(genotype, Genotype):
        raise ValueError(f"genotype: expected a Genotype, got {describe(genotype)}.")
    operations = genotype.operations
    if len(operations) != len(EDGES):
        raise ValueError(f"operations: expected {len(EDGES)}, got {len(operations)}.")
    for name in operations:
        one_of("operations", name, PRIMITIVES)


@functools.cache
def genotypes() -> tuple[Genotype, ...]:
    """Return all 15,625, by operations in the order of ``PRIMITIVES``, the last edge fastest.

    A genotype's index is its row of :func:`encode` read as a number of base 5. It differs from the
    benchmark's own index.

    Examples
    --------
    >>> len(genotypes()), str(genotypes()[3])
    (15625, '|none~0|+|none~0|none~1|+|none~0|none~1|nor_conv_3x3~2|')
    """
    return tuple(map(Genotype, itertools.product(PRIMITIVES, repeat=len(EDGES))))


def encode(genotypes: Genotype | Iterable[Genotype]) -> np.ndarray:
    """Return the operations as indices into ``PRIMITIVES``: int32 [m, 6], or [6] for one genotype.

    Raises
    ------
    ValueError
        If an argument is not a Genotype.

    Examples
    --------
    >>> encode(genotypes()[-2:])
    array([[4, 4, 4, 4, 4, 3], [4, 4, 4, 4, 4, 4]], dtype=int32)
    """
    if isinstance(genotypes, Genotype):
        return encode([genotypes])[0]
    rows = []
    for genotype in genotypes:
        check_operations(genotype)
        rows.append([PRIMITIVES.index(name) for name in genotype.operations])
    return np.array(rows, np.int32).reshape(-1, len(EDGES))


def live_edges(genotype: Genotype) -> list[bool]:
    """Return whether each edge is on a path without ``none`` from node 0 to node 3."""
    check_operations(genotype)
    carries = [name != "none" for name in genotype.operations]
    reached, used = {0}, {3}
    for (source, node), carried in zip(EDGES, carries, strict=True):
        if carried and source in reached:
            reached.add(node)
    # Backwards, every edge out of a node comes before those into it.
    for (source, node), carried in zip(EDGES[::-1], carries[::-1], strict=True):
        if carried and node in used:
            used.add(source)
    return [
        carried and source in reached and node in used
        for (source, node), carried in zip(EDGES, carries, strict=True)
    ]
