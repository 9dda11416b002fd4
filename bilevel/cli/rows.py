"""Training, validation and test rows of a dataset, drawn at random."""

import math
from typing import Any

import jax
import numpy as np

from bilevel import data as datasets

Part = tuple[Any, Any]  # rows and their labels

# What is known of a dataset before it is loaded; the test rows of digits are taken of all its rows.
ROWS = {
    "digits": (1797, 0),
    "mnist": (60_000, 10_000),
    "fashion-mnist": (60_000, 10_000),
    "cifar10": (50_000, 10_000),
    "imdb": (25_000, 25_000),
}
SHAPES = {
    "digits": (8, 8, 1),
    "mnist": (28, 28, 1),
    "fashion-mnist": (28, 28, 1),
    "cifar10": (32, 32, 3),
}
CLASSES = 10  # of all of these

_CIFAR_BATCH = 10_000  # rows in each of its files


def check_rows(data: str, sizes: dict[str, int], kept: int = 0) -> None:
    """Raise if the training rows are too few for ``sizes``, by flag, and ``kept`` more."""
    total, own_test_rows = ROWS[data]
    left = total - kept - (0 if own_test_rows else 2)  # for the test, at the least
    for name, size in sizes.items():
        if size > left:
            raise ValueError(f"{name}: expected at most {left} of the rows of {data}, got {size}.")
        left -= size


def inputs(data: str) -> int:
    """Numbers in a row of images."""
    return math.prod(SHAPES[data])


def load(name: str, train: int, valid: int, test: int) -> datasets.Dataset:
    """The dataset to draw from: of CIFAR-10 only as many of its files as hold so many rows."""
    if name == "digits":
        return datasets.load(name)
    sizes = {"test_size": min(test, ROWS[name][1])}
    if name == "cifar10":
        sizes["train_size"] = -(-(train + valid) // _CIFAR_BATCH) * _CIFAR_BATCH
    return datasets.load(name, **sizes)


def draw_rows(
    name: str, data: datasets.Dataset, key: jax.Array, train: int, valid: int, test: int
) -> list[Part]:
    """``train`` and ``valid`` rows of the training set, and the test set.

    Digits has no test set of its own: whatever rows are not used are, at most ``test`` of them.
    """
    if name != "digits":
        rows = datasets.split(key, data.y_train, (train, valid))
        return [*((data.x_train[r], data.y_train[r]) for r in rows), (data.x_test, data.y_test)]
    x = np.concatenate([data.x_train, data.x_test])
    y = np.concatenate([data.y_train, data.y_test])
    test = min(test, len(x) - train - valid)
    return [(x[r], y[r]) for r in datasets.split(key, y, (train, valid, test))]
