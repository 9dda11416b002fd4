"""Networks to compare a found one with: random ones of its size, and those of one operation."""

from collections.abc import Iterator
from typing import Any

import chex
import jax

from bilevel.spaces.activations import activation_space
from bilevel.spaces.darts import genotype as darts
from bilevel.spaces.darts.network import reductions
from bilevel.spaces.darts.supernet import darts_space
from bilevel.spaces.nasbench201 import genotype as nasbench201
from bilevel.spaces.nasbench201.costs import parameter_count
from bilevel.spaces.nasbench201.supernet import nasbench201_space
from bilevel.spaces.skips import skip_space
from bilevel.spaces.space import Space
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
    space = _space_of(found, names, own)
    for i, k in enumerate(jax.random.split(key, max(draws, _MOST))):
        if i >= draws and others:
            break
        drawn = _draw(k, found, space)
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
            yield _operation_weights(name, channels, reduced and source < 2)


def _operation_weights(name: str, channels: int, strided: bool) -> int:
    pointwise = channels**2 + 2 * channels  # 1 x 1 convolution, scale and shift
    if name == "skip_connect":
        return strided * pointwise
    layers = {"sep": 2, "dil": 1}.get(name[:3], 0)  # none in pooling
    return layers * (int(name[-1]) ** 2 * channels + pointwise)


def _space_of(found: Blueprint, names: tuple[str, ...], own: Space | None) -> Any:
    """Return the space that the architecture was found in; ``own`` is a user-defined one."""
    if found.space == "activations":
        return activation_space(**found.sizes)
    if found.space == "skips":
        return skip_space(**found.sizes)
    if found.space == "darts":
        return darts_space(names)
    return nasbench201_space(names) if found.space == "nasbench201" else own


def _draw(key: jax.Array, like: Blueprint, space: Space) -> Blueprint:
    alpha = space.draw(key)
    leaves = like.alpha and [leaf.tolist() for leaf in jax.tree.leaves(alpha)]
    return like._replace(architecture=str(space.discretize(alpha)), alpha=leaves)
