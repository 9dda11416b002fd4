"""Search spaces: architectures as differentiable functions of ``alpha``."""

from bilevel.spaces import activations, features, kernels

__all__ = ["activations", "features", "kernels"]
