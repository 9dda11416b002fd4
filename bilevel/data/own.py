"""The user's own rows, from a ``.npz`` file, a folder of images or a function; and their checks.

Every mistake in the data raises one message that starts with the name of the source.
"""

import os
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np

from bilevel.data.image_folders import read_folder
from bilevel.data.splits import Dataset, strata, stratified_split
from bilevel.internal.import_function import called, names_function, takes

Source = str | os.PathLike[str] | Callable[[], Mapping[str, Any]] | Mapping[str, Any]
Parts = dict[str, tuple[np.ndarray, np.ndarray]]
"""Inputs and labels of "train" and, if they are given, "valid" and "test"."""

SOURCES = "FILE.npz, a folder of images by class, or MODULE:FUNCTION"
_PARTS = "train", "valid", "test"
_KEYS = ("x", "y", *(f"{letter}_{part}" for part in _PARTS for letter in "xy"))
_SPLIT = 53  # folded into the key, so that the test rows have a random stream of their own
_CHUNK = 2**24  # values that are checked for NaN at once


def load_own(source: Source, key: chex.PRNGKey) -> Dataset:
    """Return the user's rows; if test rows are missing, set a fifth of the training rows aside."""
    name, parts, classes = _read(source)
    x, y = parts["train"]
    if "test" not in parts:
        if classes and (counts := np.bincount(y)).min() < 2:
            raise ValueError(
                f"{name}: expected at least 2 rows of every class, to set test rows aside, got 1 "
                f"of {classes[int(np.argmin(counts))]!r}."
            )
        size = max(1, round(len(y) / 5))
        if size == len(y):
            raise ValueError(
                f"{name}: expected at least 2 rows, to set test rows aside, got {len(y)}."
            )
        key = jax.random.fold_in(key, _SPLIT)
        split = stratified_split(key, strata(y, classes), (len(y) - size, size))
        parts["train"], parts["test"] = ((np.asarray(x[rows]), y[rows]) for rows in split)
    return Dataset(*parts["train"], *parts["test"], classes, *parts.get("valid", (None, None)))


def _read(source: Source) -> tuple[str, Parts, tuple[str, ...]]:
    """Return the source's name, all parts, and the names of the classes, () for real targets.

    Inputs keep their dtype. Labels are int32, in the order of the sorted class names.
    """
    name, arrays = _arrays(source)
    parts = _by_part(name, arrays)
    for part, (x, y) in parts.items():
        _check_inputs(f"{name}: {_key('x', part, arrays)}", x)
        _check_labels(f"{name}: {_key('y', part, arrays)}", y, len(x))
    _check_alike(name, parts)
    return name, *_encoded(name, parts)


def _arrays(source: Source) -> tuple[str, Mapping[str, Any]]:
    """Return the name of a source for messages, and its arrays by key."""
    if isinstance(source, Mapping):
        return "source", source
    if callable(source):
        name = getattr(source, "__name__", "source")
        takes("source", name, source, 0)
        arrays = source()
    else:
        name = os.fspath(source)
        path = Path(name)
        if path.suffix == ".npz":
            return name, _read_npz(path)
        if path.is_dir():
            return name, read_folder(path)
        if not names_function(name):
            raise ValueError(f"source: expected a built-in name, {SOURCES}, got {name!r}.")
        arrays = called("source", name)
    if not isinstance(arrays, Mapping):
        kind = type(arrays).__name__
        raise ValueError(f"{name}: expected a dict with the arrays x and y, got a {kind}.")
    return name, arrays


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    """Return all arrays of a file; nothing is unpickled."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: expected a file, got no such file.")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path}: expected a .npz file of numpy.savez, got another format.")
    try:
        with np.load(path, allow_pickle=False) as file:
            _check_keys(str(path), file.files)
            return {key: file[key] for key in file.files}
    except (OSError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: expected an intact .npz file, got: {error}.") from None
    except ValueError as error:
        if "Object arrays" in str(error):
            raise ValueError(
                f"{path}: expected arrays of numbers or strings, got dtype object, which numpy "
                "would have to unpickle."
            ) from None
        raise


def _check_keys(name: str, keys: Any) -> None:
    if unknown := [key for key in keys if key not in _KEYS]:
        raise ValueError(f"{name}: expected keys among {', '.join(_KEYS)}, got {unknown[0]!r}.")


def _key(letter: str, part: str, arrays: Mapping[str, Any]) -> str:
    """Return the key as the user spelled it: x and x_train mean the same."""
    short = part == "train" and not {"x_train", "y_train"} & set(arrays)
    return letter if short else f"{letter}_{part}"


def _by_part(name: str, arrays: Mapping[str, Any]) -> Parts:
    _check_keys(name, arrays)
    if {"x", "y"} & set(arrays) and {"x_train", "y_train"} & set(arrays):
        raise ValueError(f"{name}: expected x and y, or x_train and y_train, got a mixture.")
    parts: Parts = {}
    for part in _PARTS:
        x, y = _key("x", part, arrays), _key("y", part, arrays)
        given = [key for key in (x, y) if key in arrays]
        if given or part == "train":
            for key in (x, y):
                if key not in arrays:
                    keys = ", ".join(map(str, arrays)) or "no keys"
                    raise ValueError(f"{name}: expected the key {key}, got {keys}.")
            parts[part] = np.asanyarray(arrays[x]), _label_array(arrays[y])
    return parts


def _label_array(y: Any) -> np.ndarray:
    """Return labels as an array; tables hold strings as objects."""
    y = np.asanyarray(y)
    texts = y.dtype == object and all(isinstance(label, str) for label in y.flat)
    return y.astype(str) if texts else y


def _check_inputs(name: str, x: np.ndarray) -> None:
    if x.dtype.kind not in "buif":
        raise ValueError(f"{name}: expected an array of numbers, got dtype {x.dtype}.")
    if x.ndim not in (2, 3, 4):
        raise ValueError(
            f"{name}: expected shape [n, d], [n, h, w] or [n, h, w, c], got {x.shape}."
        )
    if x.size == 0:
        raise ValueError(f"{name}: expected at least one row and value, got shape {x.shape}.")
    if x.ndim == 4 and x.shape[-1] not in (1, 3):
        raise ValueError(
            f"{name}: expected images [n, h, w, c] with 1 or 3 channels, got shape {x.shape}."
        )
    rows = max(1, _CHUNK // x[0].size)
    for start in range(0, len(x), rows) if x.dtype.kind == "f" else ():
        finite = np.isfinite(x[start : start + rows]).reshape(len(x[start : start + rows]), -1)
        if not finite.all():
            row = start + int(np.argmin(finite.all(axis=1)))
            raise ValueError(f"{name}: expected finite numbers, got NaN or infinity in row {row}.")


def _check_labels(name: str, y: np.ndarray, rows: int) -> None:
    if y.dtype.kind not in "buifU":
        raise ValueError(
            f"{name}: expected integers or strings (classes), or reals (regression), got dtype "
            f"{y.dtype}."
        )
    if y.ndim != 1:
        raise ValueError(f"{name}: expected shape [n], one label a row, got {y.shape}.")
    if len(y) != rows:
        raise ValueError(f"{name}: expected {rows} labels, one for each row of x, got {len(y)}.")
    if y.dtype.kind == "f" and not np.isfinite(y).all():
        row = int(np.argmin(np.isfinite(y)))
        raise ValueError(f"{name}: expected finite numbers, got {y[row]} in row {row}.")


def _check_alike(name: str, parts: Parts) -> None:
    """Raise if a part's rows or labels are of another kind than the training rows."""
    x, y = parts["train"]
    for part, (x_other, y_other) in parts.items():
        if (x_other.shape[1:], x_other.dtype) != (x.shape[1:], x.dtype):
            raise ValueError(
                f"{name}: x_{part}: expected rows of shape {x.shape[1:]} and dtype {x.dtype} as in "
                f"training, got {x_other.shape[1:]} and {x_other.dtype}."
            )
        kinds = [{"b": "i", "u": "i"}.get(a.dtype.kind, a.dtype.kind) for a in (y, y_other)]
        if kinds[0] != kinds[1]:
            raise ValueError(
                f"{name}: y_{part}: expected labels of dtype {y.dtype} as in training, got "
                f"{y_other.dtype}."
            )


def _encoded(name: str, parts: Parts) -> tuple[Parts, tuple[str, ...]]:
    """Return the parts with labels 0, 1, ..., and the names of the classes."""
    labels = parts["train"][1]
    if labels.dtype.kind == "f":
        return parts, ()
    classes = np.unique(labels)
    if len(classes) < 2:
        raise ValueError(f"{name}: expected at least 2 classes, got only {classes[0]}.")
    encoded = {}
    for part, (x, y) in parts.items():
        codes = np.minimum(np.searchsorted(classes, y), len(classes) - 1)
        if not (known := classes[codes] == y).all():
            raise ValueError(
                f"{name}: y_{part}: expected the classes of the training rows, got "
                f"{str(y[~known][0])!r}."
            )
        encoded[part] = x, codes.astype(np.int32)
    return encoded, tuple(map(str, classes))
