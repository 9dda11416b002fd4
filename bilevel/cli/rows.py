"""Training, validation and test rows of a dataset, drawn at random."""

from typing import Any

import jax
import numpy as np

from bilevel import data as datasets
from bilevel.cli.known import ROWS

Part = tuple[Any, Any]  # rows and their labels

_CIFAR_BATCH = 10_000  # rows in each of its files


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
