"""NAS-Bench-201: 15,625 networks whose accuracies are known (Dong & Yang 2020).

``all_networks``: all of them as one function of a genotype; ``nasbench201_network``: one,
to be trained from scratch; ``nasbench201_space``: the supernet to search; ``scoring``, a module of
its own: train-free scores of many networks. What networks reach when trained, and what a ranking of
them is worth, is in :mod:`bilevel.judging`.
"""

from bilevel.spaces.nasbench201._all_networks import AllNetworks, all_networks
from bilevel.spaces.nasbench201._costs import (
    conv_edges,
    multiply_adds,
    parameter_count,
    supernet_cost,
    trainable_layers,
)
from bilevel.spaces.nasbench201._genotype import (
    EDGES,
    PRIMITIVES,
    Genotype,
    canonical,
    decode,
    draw_corner,
    draw_genotype,
    encode,
    genotype,
    genotypes,
    is_dead,
    one_hot,
    parse_genotype,
)
from bilevel.spaces.nasbench201.network import nasbench201_network
from bilevel.spaces.nasbench201.supernet import nasbench201_space

__all__ = [
    "EDGES",
    "PRIMITIVES",
    "AllNetworks",
    "Genotype",
    "all_networks",
    "canonical",
    "conv_edges",
    "decode",
    "draw_corner",
    "draw_genotype",
    "encode",
    "genotype",
    "genotypes",
    "is_dead",
    "multiply_adds",
    "nasbench201_network",
    "nasbench201_space",
    "one_hot",
    "parameter_count",
    "parse_genotype",
    "supernet_cost",
    "trainable_layers",
]
