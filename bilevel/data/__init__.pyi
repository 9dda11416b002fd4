# Public names of `bilevel.data` and their modules, imported on first use.

from .datasets import Dataset, load, samples, split
from .files import check_digest, find_file, read_file

__all__ = [
    "Dataset",
    "check_digest",
    "find_file",
    "load",
    "read_file",
    "samples",
    "split",
]
