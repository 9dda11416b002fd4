"""Search spaces: architectures as differentiable functions of ``alpha``."""

from bilevel.spaces import activations, darts, features, kernels, linearized, nasbench201, skips
from bilevel.spaces.space import Space, on_simplices

__all__ = [
    "Space",
    "activations",
    "darts",
    "features",
    "kernels",
    "linearized",
    "nasbench201",
    "on_simplices",
    "skips",
]
