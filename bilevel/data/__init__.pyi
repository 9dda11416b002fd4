# Public names of `bilevel.data` and their modules, imported on first use.

from .datasets import draw_splits, load, stratified_split

__all__ = ["draw_splits", "load", "stratified_split"]
