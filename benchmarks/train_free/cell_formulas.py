"""Find cells of NAS-Bench-201 that are the same function: write each cell's output as a formula.

Reference: Dong & Yang, NAS-Bench-201, ICLR 2020.
"""

import itertools

from bilevel.spaces.nasbench201.genotype import EDGES, SIZES, Genotype, live_edges


def canonical(genotype: Genotype) -> str:
    """Return the cell's output as a formula, equal for isomorphic cells and for no others.

    Skips are replaced by their inputs. Operations on zero, or without effect on the output, are
    left out, and sums are sorted. A dead cell's formula is empty. If a cell has several
    convolutions of the same kind and input, they are numbered, because ``c#1(x) + c#2(x)`` and
    ``c#1(x) + c#1(x)`` differ.

    There are 5,260 formulas. The number in the literature, 6,466, comes from the same idea on
    strings: zeros stay in sums, so that ``0 + 0`` is not zero and ``x + 0`` not ``x``; a sum within
    a sum is sorted as one string; and convolutions are not numbered. An operation on zero counts as
    zero, as in the literature. For a convolution this holds at initialization; in training, the
    offset of its batch normalization can make it another constant.

    Examples
    --------
    >>> from bilevel.spaces.nasbench201.genotype import PRIMITIVES
    >>> def decode(codes):
    ...     return Genotype(tuple(PRIMITIVES[code] for code in codes))
    >>> canonical(decode([3, 1, 0, 0, 2, 1]))
    '0+nor_conv_1x1(nor_conv_3x3(0))'
    >>> canonical(decode([3, 1, 2, 0, 0, 1])) == canonical(decode([3, 1, 0, 0, 2, 1]))
    True
    >>> canonical(decode([3, 3, 0, 0, 1, 1]))
    'nor_conv_3x3#1(0)+nor_conv_3x3#2(0)'
    >>> canonical(decode([3, 0, 1, 0, 1, 1]))
    'nor_conv_3x3(0)+nor_conv_3x3(0)'
    """
    live = live_edges(genotype)
    _, terms = _formula(genotype, live, {})
    twins: dict[str, list[int]] = {}
    for edge, term in terms.items():
        twins.setdefault(term, []).append(edge)
    groups = [edges for edges in twins.values() if len(edges) > 1]
    numberings = (
        {edge: f"#{n}" for order in orders for n, edge in enumerate(order, 1)}
        for orders in itertools.product(*map(itertools.permutations, groups))
    )
    return min(_formula(genotype, live, numbers)[0] for numbers in numberings)


def _formula(
    genotype: Genotype, live: list[bool], numbers: dict[int, str]
) -> tuple[str, dict[int, str]]:
    """Return the formula of node 3, and by edge the terms that are convolutions."""
    nodes: list[list[str]] = [["0"], [], [], []]
    terms = {}
    for edge, ((source, node), name) in enumerate(zip(EDGES, genotype.operations, strict=True)):
        if live[edge] and name == "skip_connect":
            nodes[node] += nodes[source]
        elif live[edge]:
            term = f"{name}{numbers.get(edge, '')}({'+'.join(sorted(nodes[source]))})"
            nodes[node].append(term)
            if name in SIZES:
                terms[edge] = term
    return "+".join(sorted(nodes[3])), terms
