# Public names of `bilevel.nets` and their modules, imported on first use.

from .convolution import convolve_images, max_pooling
from .images import unit_images
from .training import from_scratch, train

__all__ = [
    "convolve_images",
    "from_scratch",
    "max_pooling",
    "train",
    "unit_images",
]
