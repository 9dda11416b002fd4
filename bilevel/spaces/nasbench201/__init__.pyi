# Public names of `bilevel.spaces.nasbench201` and their modules, imported on first use.

from . import judging
from ._all_networks import AllNetworks, all_networks
from ._costs import conv_edges, multiply_adds, parameter_count, supernet_cost, trainable_layers
from ._genotype import (
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
from .network import nasbench201_network
from .supernet import nasbench201_space

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
    "judging",
    "multiply_adds",
    "nasbench201_network",
    "nasbench201_space",
    "one_hot",
    "parameter_count",
    "parse_genotype",
    "supernet_cost",
    "trainable_layers",
]
