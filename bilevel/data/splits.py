"""Datasets as arrays, and stratified splits of their rows."""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import chex
import jax
import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from bilevel.internal.checks import integer, prng_key

Rows = tuple[np.ndarray, np.ndarray]
"""Inputs [n, ...] and labels [n]."""


class Dataset(NamedTuple):
    """Training and test rows of one dataset, and validation rows if the user has set them aside."""

    # [n, h, w] or [n, h, w, 3] float32 in [0, 1], or [n] str objects; own rows: as stored
    x_train: np.ndarray
    y_train: np.ndarray  # [n] int32, or real targets
    x_test: np.ndarray
    y_test: np.ndarray
    classes: tuple[str, ...]  # label i is called classes[i]; () for real targets
    x_valid: np.ndarray | None = None
    y_valid: np.ndarray | None = None


def stratified_split(
    key: chex.PRNGKey, labels: chex.Array, sizes: Iterable[int]
) -> tuple[np.ndarray, ...]:
    """Split a labelled sample into disjoint stratified parts.

    A part of n rows contains the floor or the ceiling of n N_c / N rows of class c, if N_c of the N
    samples are of class c. The order within a part is random.

    Parameters
    ----------
    key : jax PRNG key
    labels : array, [N]
    sizes : sequence of int
        The size of each part: at least 1 each, at most N together.

    Returns
    -------
    tuple of int arrays
        The indices of each part, ``[sizes[p]]``.

    Raises
    ------
    ValueError
        If ``key`` is not a PRNG key, ``labels`` not a vector, a part empty, or the sum above N.

    Examples
    --------
    >>> labels = np.repeat([0, 1], [60, 40])
    >>> train, valid = stratified_split(jax.random.key(0), labels, (50, 10))
    >>> np.bincount(labels[train]), np.bincount(labels[valid])
    (array([30, 20]), array([6, 4]))
    """
    prng_key("key", key)
    labels = np.asarray(labels)
    if labels.ndim != 1:
        raise ValueError(f"labels: expected a vector, got shape {labels.shape}.")
    sizes = list(sizes) if isinstance(sizes, Iterable) else sizes
    if not isinstance(sizes, list) or not sizes:
        raise ValueError(f"sizes: expected at least one, got {sizes!r}.")
    sizes = [integer(f"sizes[{i}]", size, 1) for i, size in enumerate(sizes)]
    unassigned = len(labels) - sum(sizes)
    if unassigned < 0:
        raise ValueError(
            f"sizes: expected at most the {len(labels)} samples together, got {sum(sizes)}."
        )
    seed = np.asarray(jax.random.key_data(key)).ravel()
    # numpy may change the stream of default_rng, but not that of RandomState.
    order = np.random.RandomState(seed).permutation(len(labels))
    _, first, codes = np.unique(labels[order], return_index=True, return_inverse=True)
    # Classes are numbered in random order, so that rounding does not favour the same ones.
    codes = np.argsort(np.argsort(first))[codes]
    quotas = _quotas(np.array([*sizes, unassigned]), np.bincount(codes))
    owner = np.empty(len(labels), int)
    parts = np.tile(np.arange(len(sizes) + 1), len(first))
    owner[np.argsort(codes, kind="stable")] = np.repeat(parts, quotas.T.ravel())
    return tuple(order[owner == part] for part in range(len(sizes)))


def _quotas(sizes, counts):
    """Return integers next to sizes x counts / N, with sizes as row and counts as column sums.

    The ideal table is a fractional flow, so a maximum flow above the floors finds an integer one.
    """
    floors, remainders = np.divmod(np.outer(sizes, counts), counts.sum())
    part, label = slice(1, len(sizes) + 1), slice(len(sizes) + 1, -1)
    capacity = np.zeros((len(sizes) + len(counts) + 2,) * 2, np.int32)
    capacity[0, part] = sizes - floors.sum(1)
    capacity[part, label] = remainders > 0
    capacity[label, -1] = counts - floors.sum(0)
    flow = maximum_flow(csr_array(capacity), 0, len(capacity) - 1).flow.toarray()
    return floors + flow[part, label]


def strata(y: np.ndarray, classes: tuple[str, ...]) -> np.ndarray:
    """Return labels to split by: real targets count as one class."""
    return y if classes else np.zeros(len(y), int)


def check_row_counts(train: int, valid: int, rows: int, reserved: str = "") -> None:
    """Raise ``ValueError`` if there are fewer ``rows`` than training and validation take."""
    if train + valid > rows:
        raise ValueError(
            f"train, valid: expected at most {rows} rows together{reserved}, got {train + valid}."
        )


def drawn(data: Dataset, key: chex.PRNGKey, train: int, valid: int, test: int) -> list[Rows]:
    """Return the three parts of one key, each drawn from its rows."""
    draw = functools.partial(draw_part, data, key)
    tests = draw("test", min(test, len(data.y_test)))
    if data.y_valid is None:
        check_row_counts(train, valid, len(data.y_train))
        return [*draw("train", train, valid), *tests]
    check_row_counts(train, 0, len(data.y_train))
    check_row_counts(0, valid, len(data.y_valid))
    return [*draw("train", train), *draw("valid", valid), *tests]


def draw_part(data: Dataset, key: chex.PRNGKey, part: str, *sizes: int) -> list[Rows]:
    """Draw floating-point rows and labels from "train", "valid" or "test", for each size."""
    x, y = getattr(data, f"x_{part}"), getattr(data, f"y_{part}")
    parts = stratified_split(key, strata(y, data.classes), sizes)
    return [(_floating(np.asarray(x[rows])), y[rows]) for rows in parts]


def draw_rows(key: chex.PRNGKey, part: Rows, count: int) -> Rows:
    """Return ``count`` rows with all classes in their proportions, or all rows in their order."""
    if count == len(part[1]):
        return part
    (rows,) = stratified_split(key, part[1], [count])
    return part[0][rows], part[1][rows]


def joined(first: Rows, second: Any) -> Rows:
    """Return the rows of two parts."""
    return np.concatenate([first[0], second[0]]), np.concatenate([first[1], second[1]])


def _floating(x):
    """Return bytes in [0, 1], and other integers as floating-point numbers without rounding."""
    if x.dtype == np.uint8:
        return x / np.float32(255)
    if x.dtype.kind in "fO":  # texts are objects
        return x if x.itemsize in (4, 8) else x.astype(np.float32)
    return x.astype(np.float32 if x.itemsize < 4 else np.float64)


def standardized(parts: list[Rows]) -> list[Rows]:
    """Return vectors with columns of mean 0 and variance 1 on the training rows."""
    x = parts[0][0]
    mean = x.mean(axis=0, dtype=np.float64)
    deviation = x.std(axis=0, dtype=np.float64)
    scale = np.where(x.max(axis=0) > x.min(axis=0), deviation, 1)
    return [(((a - mean) / scale).astype(x.dtype), y) for a, y in parts]
