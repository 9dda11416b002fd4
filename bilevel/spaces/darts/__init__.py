"""The DARTS cell search space (Liu, Simonyan & Yang 2019).

``darts_space``: the supernet to search, whose ``discretize`` gives the genotype that was found;
``darts_network``: the network of a genotype, to train from scratch
(:func:`bilevel.nets.from_scratch`).
"""

from bilevel.spaces.darts.genotype import parse_genotype, plot_genotype
from bilevel.spaces.darts.network import darts_network
from bilevel.spaces.darts.supernet import darts_space

__all__ = [
    "darts_network",
    "darts_space",
    "parse_genotype",
    "plot_genotype",
]
