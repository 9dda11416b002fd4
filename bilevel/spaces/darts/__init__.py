"""The DARTS cell search space (Liu, Simonyan & Yang 2019).

``darts_space``: the supernet to search; ``genotype``: what a search found; ``darts_network``: the
network of a genotype, to train from scratch (:func:`bilevel.nets.training.from_scratch`).
"""

from bilevel.spaces.darts._genotype import (
    DARTS_V1,
    DARTS_V2,
    EDGES,
    Genotype,
    draw_corner,
    genotype,
    one_hot,
    parse_genotype,
    plot_genotype,
)
from bilevel.spaces.darts.network import darts_network
from bilevel.spaces.darts.operations import PRIMITIVES
from bilevel.spaces.darts.supernet import darts_space, weight_count

__all__ = [
    "DARTS_V1",
    "DARTS_V2",
    "EDGES",
    "PRIMITIVES",
    "Genotype",
    "darts_network",
    "darts_space",
    "draw_corner",
    "genotype",
    "one_hot",
    "parse_genotype",
    "plot_genotype",
    "weight_count",
]
