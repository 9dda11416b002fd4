"""Search spaces: architectures as differentiable functions of ``alpha``."""

from bilevel.spaces import activations, kernels

__all__ = ["activations", "kernels"]
