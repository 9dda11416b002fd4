"""Search spaces: architectures as differentiable functions of ``alpha``."""

from bilevel.spaces import (
    activations,
    convolution,
    darts,
    features,
    kernels,
    layers,
    nasbench201,
    scratch,
    skips,
    training,
)

__all__ = [
    "activations",
    "convolution",
    "darts",
    "features",
    "kernels",
    "layers",
    "nasbench201",
    "scratch",
    "skips",
    "training",
]
