# Public names of `bilevel.spaces` and their modules, imported on first use.

from . import darts, features, nasbench201
from .activations import activation_space, unit_inputs
from .kernels import kernel_function_space, kernel_mixture_space, network_space
from .linearized import linearized_space
from .skips import skip_space
from .space import Space, on_simplices
from .trained import load_network, network_at

__all__ = [
    "Space",
    "activation_space",
    "darts",
    "features",
    "kernel_function_space",
    "kernel_mixture_space",
    "linearized_space",
    "load_network",
    "nasbench201",
    "network_at",
    "network_space",
    "on_simplices",
    "skip_space",
    "unit_inputs",
]
