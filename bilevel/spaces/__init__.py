"""Search spaces: architectures as differentiable functions of ``alpha``."""

from bilevel.spaces import activations

__all__ = ["activations"]
