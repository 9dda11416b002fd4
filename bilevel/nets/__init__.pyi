# Public names of `bilevel.nets` and their modules, imported on first use.

from .convolution import convolve_images, max_pooling
from .fitting import fit
from .images import unit_images
from .inputs import normalized
from .training import from_scratch, train

__all__ = [
    "convolve_images",
    "fit",
    "from_scratch",
    "max_pooling",
    "normalized",
    "train",
    "unit_images",
]
