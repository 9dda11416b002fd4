"""Costs of a genotype's network (weights, multiply-adds, layers) and of a supernet."""

from collections.abc import Iterator, Sequence

from bilevel.internal.checks import integer
from bilevel.spaces.nasbench201.genotype import (
    EDGES,
    PRIMITIVES,
    SIZES,
    Genotype,
    check_operations,
    live_edges,
)


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
    >>> from bilevel.spaces.nasbench201 import genotypes
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
    >>> from bilevel.spaces.nasbench201 import genotypes
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
