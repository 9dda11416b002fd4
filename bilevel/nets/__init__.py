"""Parts of neural networks: convolution, layers, images, training from scratch, errors."""

from bilevel.nets import convolution, evaluation, images, layers, training

__all__ = ["convolution", "evaluation", "images", "layers", "training"]
