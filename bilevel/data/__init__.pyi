# Public names of `bilevel.data` and their modules, imported on first use.

from .datasets import Dataset, draw_splits, load, stratified_split
from .files import check_digest, find_file, read_file

__all__ = [
    "Dataset",
    "check_digest",
    "draw_splits",
    "find_file",
    "load",
    "read_file",
    "stratified_split",
]
