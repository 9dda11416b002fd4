# Public names of `bilevel.spaces.nasbench201` and their modules, imported on first use.

from . import judging
from .genotype import encode, genotypes, parameter_count, trainable_layers
from .network import all_networks
from .scoring import score_networks
from .supernet import nasbench201_space

__all__ = [
    "all_networks",
    "encode",
    "genotypes",
    "judging",
    "nasbench201_space",
    "parameter_count",
    "score_networks",
    "trainable_layers",
]
