# Public names of `bilevel.runs` and their modules, imported on first use.

from . import checkpoint

__all__ = [
    "checkpoint",
]
