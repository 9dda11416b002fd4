# Public names of `bilevel.theory` and their modules, imported on first use.

from . import bounds, spectral

__all__ = [
    "bounds",
    "spectral",
]
