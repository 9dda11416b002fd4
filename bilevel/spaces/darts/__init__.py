"""The DARTS cell search space (Liu, Simonyan & Yang 2019).

``darts_space`` is the supernet to search; its ``discretize`` gives a genotype. ``darts_network`` is
the network of a genotype, to train from scratch (:func:`bilevel.nets.from_scratch`).
"""

from bilevel.spaces.darts.genotype import parse_genotype, plot_genotype
from bilevel.spaces.darts.network import darts_network
from bilevel.spaces.darts.supernet import darts_space

__all__ = ["darts_network", "darts_space", "parse_genotype", "plot_genotype"]
