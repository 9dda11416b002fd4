"""Genotypes of NAS-Bench-201, one operation on each edge of one cell, and their networks' costs.

A cell has the nodes 0 (its input) to 3 (its output), so there are ``5**6 = 15,625`` genotypes. All
15 cells of the network are equal, in three stages of 16, 32 and 64 channels with a residual block
before the second and the third.

Reference: Dong & Yang, NAS-Bench-201, ICLR 2020; Dong, Liu, Musial & Gabrys, NATS-Bench, TPAMI 2021
(there the "topology" space).
"""

import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bilevel.internal.checks import describe, integer, one_of
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
    names = zip(EDGES, genotype.operations, strict=True)
    carrying = [edge for edge, name in names if name != "none"]
    reached, used = {0}, {3}
    for source, node in carrying:
        if source in reached:
            reached.add(node)
    for source, node in reversed(carrying):  # every edge out of a node comes before those into it
        if node in used:
            used.add(source)
    return [edge in carrying and edge[0] in reached and edge[1] in used for edge in EDGES]


def _convolutions(
    genotype: Genotype, channels: int, cells: int, pixels: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yield numbers of equal convolutions with their weights, normalised channels, output's side.

    Operations without effect on the output are included.
    """
    check_operations(genotype)
    integer("channels", channels, 1)
    integer("cells", cells, 1)
    yield 1, 9 * 3 * channels, channels, pixels
    for stage in range(3):
        c, side = channels << stage, pixels >> stage
        if stage:
            yield 1, 9 * (c // 2) * c, c, side
            yield 1, 9 * c * c, c, side
            yield 1, c // 2 * c, 0, side
        for name, size in SIZES.items():
            yield cells * genotype.operations.count(name), size**2 * c * c, c, side


def parameter_count(
    genotype: Genotype, *, classes: int = 10, channels: int = 16, cells: int = 5
) -> int:
    """Count the weights of convolutions, batch normalisations and the classifier.

    By default ``73,306 + 243,040 n_3 + 28,000 n_1`` with n_k convolutions of size k in the cell,
    including those without effect on the output. The benchmark records the same, except for 150 of
    its networks with one convolution more or less.

    Parameters
    ----------
    genotype : Genotype
    classes : int
        10 for CIFAR-10, 100 for CIFAR-100, 120 for ImageNet16-120.
    channels, cells : int
        Channels of the first stage; cells per stage.

    Raises
    ------
    ValueError
        If ``genotype`` is not a Genotype, or a number is under 1.

    Examples
    --------
    >>> parameter_count(genotypes()[0]), parameter_count(genotypes()[3])
    (73306, 316346)
    """
    last_norm, classifier = 8 * channels, (4 * channels + 1) * classes
    layers = _convolutions(genotype, channels, cells, 4)
    return sum((n * (weights + 2 * c) for n, weights, c, _ in layers), last_norm + classifier)


def multiply_adds(
    genotype: Genotype, *, pixels: int = 32, classes: int = 10, channels: int = 16, cells: int = 5
) -> int:
    """Count the multiply-adds of one image [pixels, pixels, 3] in convolutions and the classifier.

    By default ``7,783,040 + 35,389,440 n_3 + 3,932,160 n_1``. As in the benchmark, padding counts
    like pixels, and operations without effect on the output are included.
    """
    layers = _convolutions(genotype, channels, cells, pixels)
    return sum((n * weights * side**2 for n, weights, _, side in layers), 4 * channels * classes)


def trainable_layers(genotype: Genotype, *, cells: int = 5) -> int:
    """Count the convolutions and linear layers that the output depends on.

    In a cell, layers on a path without ``none`` from its input to its output count. Outside the
    cells all layers count, even if dead cells cut them off: the stem, three in each residual block,
    and the classifier. Batch normalisations do not count.

    Raises
    ------
    ValueError
        If ``genotype`` is not a Genotype.

    Examples
    --------
    >>> print(genotypes()[9393])
    |nor_conv_3x3~0|+|none~0|none~1|+|none~0|nor_conv_3x3~1|nor_conv_3x3~2|
    >>> trainable_layers(genotypes()[9393]), trainable_layers(genotypes()[3])
    (38, 8)
    """
    live = zip(genotype.operations, live_edges(genotype), strict=True)
    return 8 + 3 * cells * sum(name in SIZES and used for name, used in live)


def conv_edges(genotype: Genotype) -> int:
    """Count the edges with a convolution, with or without effect on the output."""
    return sum(name in SIZES for name in genotype.operations)


def supernet_cost(
    operations: Sequence[str] = PRIMITIVES, *, cells: int = 5, channels: int = 16
) -> float:
    """Return multiply-adds of the supernet over the mean of those of all its networks.

    The supernet runs every operation on every edge, a network runs one.
    """

    def cost(name):
        return multiply_adds(Genotype((name,) * len(EDGES)), cells=cells, channels=channels)

    outside = cost("none")
    inside = sum(cost(name) - outside for name in operations)
    return (outside + inside) / (outside + inside / len(operations))
