"""Networks to compare a found one with: random ones of its size, and those of one operation."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import chex
import jax

from bilevel.spaces.darts import genotype as darts
from bilevel.spaces.darts.operations import reductions
from bilevel.spaces.nasbench201 import genotype as nasbench201
from bilevel.spaces.nasbench201.costs import parameter_count
from bilevel.spaces.skips import skip_space
from bilevel.spaces.space import Space, on_simplices
from bilevel.spaces.trained import Blueprint

_MOST = 50  # draws, if all before equal the architecture found


def random_of_same_size(
    key: chex.PRNGKey, found: Blueprint, names: tuple[str, ...], draws: int, own: Space | None
) -> Blueprint | None:
    """Return the drawn architecture with the number of weights nearest to that of the found one.

    ``names`` are the candidates. The found architecture itself does not count. The result is None
    if the space has one architecture only. Only networks of cells differ in size.
    """
    size = weight_excess(found)
    others: list[Blueprint] = []
    draw = _DRAWS.get(found.space, functools.partial(_draw_own, own))
    for i, k in enumerate(jax.random.split(key, max(draws, _MOST))):
        if i >= draws and others:
            break
        drawn = draw(k, found, names)
        if drawn.architecture != found.architecture:
            others.append(drawn)
    return min(others, key=lambda b: abs(weight_excess(b) - size), default=None)


def single_operations(found: Blueprint, names: tuple[str, ...]) -> dict[str, Blueprint]:
    """Return the networks of cells with one operation on all edges; nothing for other spaces.

    In a DARTS cell every node takes both inputs of the cell.
    """
    if found.space not in ("darts", "nasbench201"):
        return {}

    def cell(name):
        if found.space == "nasbench201":
            return nasbench201.Genotype((name,) * len(nasbench201.EDGES))
        pairs = ((name, 0), (name, 1)) * len(darts.NODES)
        return darts.Genotype(pairs, darts.NODES, pairs, darts.NODES)

    singles = {name: str(cell(name)) for name in names if name != "none"}
    return {k: found._replace(architecture=v) for k, v in singles.items()}


def weight_excess(blueprint: Blueprint) -> int:
    """Count the weights of a network of cells, up to a constant; 0 for other spaces."""
    sizes = {k: blueprint.sizes.get(k) for k in ("cells", "channels")}
    if blueprint.space == "nasbench201":
        cell = nasbench201.parse_genotype(blueprint.architecture)
        return parameter_count(cell, **sizes)  # type: ignore[arg-type]
    if blueprint.space == "darts":
        genotype = darts.parse_genotype(blueprint.architecture)
        return sum(_edge_weights(genotype, **sizes))  # type: ignore[arg-type]
    return 0


def _edge_weights(genotype: darts.Genotype, cells: int, channels: int) -> Iterator[int]:
    """Yield the weights of every edge of a DARTS network."""
    for cell in range(cells):
        reduced = cell in reductions(cells)
        channels *= 1 + reduced
        for name, source in genotype.reduce if reduced else genotype.normal:
            yield _OPERATION_WEIGHTS[name](channels, reduced and source < 2)


def _separable_weights(size: int, times: int) -> Callable[[int, bool], int]:
    # Depthwise and 1 x 1 convolution, scale and shift.
    return lambda c, strided: times * (size**2 * c + c**2 + 2 * c)


_OPERATION_WEIGHTS: dict[str, Callable[[int, bool], int]] = {
    "max_pool_3x3": lambda c, strided: 0,
    "avg_pool_3x3": lambda c, strided: 0,
    "skip_connect": lambda c, strided: strided * (c**2 + 2 * c),
    "sep_conv_3x3": _separable_weights(3, 2),
    "sep_conv_5x5": _separable_weights(5, 2),
    "dil_conv_3x3": _separable_weights(3, 1),
    "dil_conv_5x5": _separable_weights(5, 1),
}


def _draw_activation(key, found, names):
    choice = on_simplices(names)
    alpha = choice.draw(key)
    return found._replace(architecture=choice.discretize(alpha), alpha=[alpha.tolist()])


def _draw_skips(key, found, names):
    space = skip_space(**found.sizes)
    return found._replace(architecture=str(space.discretize(space.draw(key))))


def _draw_darts(key, found, names):
    return found._replace(architecture=str(darts.genotype(darts.draw_corner(key, names), names)))


def _draw_nasbench201(key, found, names):
    drawn = on_simplices(names, (len(nasbench201.EDGES),))
    cell = nasbench201.Genotype(drawn.discretize(drawn.draw(key)))
    return found._replace(architecture=str(cell))


_DRAWS: dict[str, Callable[[jax.Array, Blueprint, tuple[str, ...]], Blueprint]] = {
    "activations": _draw_activation,
    "skips": _draw_skips,
    "darts": _draw_darts,
    "nasbench201": _draw_nasbench201,
}


def _draw_own(own: Any, key: jax.Array, found: Blueprint, names: tuple[str, ...]) -> Blueprint:
    alpha = own.draw(key)
    leaves = [leaf.tolist() for leaf in jax.tree.leaves(alpha)]
    return found._replace(architecture=str(own.discretize(alpha)), alpha=leaves)
