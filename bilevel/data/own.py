"""The user's own rows, from a ``.npz`` file, a folder of images or a function; and their checks."""

import hashlib
import json
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
Parts = dict[str, tuple[np.ndarray, np.ndarray]]  # "train", "valid", "test": inputs and labels

SOURCES = "FILE.npz, a folder of images by class, or MODULE:FUNCTION"
_PARTS = "train", "valid", "test"
_KEYS = ("x", "y", *(f"{letter}_{part}" for part in _PARTS for letter in "xy"))
_SPLIT = 53  # folded into the key, so that the test rows have a random stream of their own
_CHUNK = 2**24  # values that are checked for NaN, or bytes that are hashed, at once


def load_own(source: Source, key: chex.PRNGKey) -> Dataset:
    """Return the user's rows; if test rows are missing, set a fifth of the training rows aside."""
    name, arrays = _named_arrays(source)
    parts = _by_part(name, arrays)
    for part, (x, y) in parts.items():
        _check_inputs(f"{name}: {_key('x', part, arrays)}", x)
        _check_labels(f"{name}: {_key('y', part, arrays)}", y, len(x))
    _check_alike(name, parts)
    parts, classes = _encoded(name, parts)
    x, y = parts["train"]
    if "test" not in parts:
        enough = "at least 2 rows{}, to set test rows aside"
        if classes:
            counts = np.bincount(y)
            rare = classes[int(np.argmin(counts))]
            _expect(counts.min() > 1, name, enough.format(" of every class"), f"1 of {rare!r}")
        size = max(1, round(len(y) / 5))
        _expect(size < len(y), name, enough.format(""), len(y))
        key = jax.random.fold_in(key, _SPLIT)
        split = stratified_split(key, strata(y, classes), (len(y) - size, size))
        parts["train"], parts["test"] = ((np.asarray(x[rows]), y[rows]) for rows in split)
    return Dataset(*parts["train"], *parts["test"], classes, *parts.get("valid", (None, None)))


def _named_arrays(source: Source) -> tuple[str, Mapping[str, Any]]:
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
    _expect(zipfile.is_zipfile(path), str(path), "a .npz file of numpy.savez", "another format")
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
    for key in keys:
        _expect(key in _KEYS, name, f"keys among {', '.join(_KEYS)}", repr(key))


def _key(letter: str, part: str, arrays: Mapping[str, Any]) -> str:
    """Return the key as the user spelled it: x and x_train mean the same."""
    short = part == "train" and not {"x_train", "y_train"} & set(arrays)
    return letter if short else f"{letter}_{part}"


def _by_part(name: str, arrays: Mapping[str, Any]) -> Parts:
    _check_keys(name, arrays)
    mixed = {"x", "y"} & set(arrays) and {"x_train", "y_train"} & set(arrays)
    _expect(not mixed, name, "x and y, or x_train and y_train", "a mixture")
    parts: Parts = {}
    for part in _PARTS:
        x, y = _key("x", part, arrays), _key("y", part, arrays)
        if part == "train" or {x, y} & set(arrays):
            for key in (x, y):
                keys = ", ".join(map(str, arrays)) or "no keys"
                _expect(key in arrays, name, f"the key {key}", keys)
            parts[part] = np.asanyarray(arrays[x]), _label_array(arrays[y])
    return parts


def _label_array(y: Any) -> np.ndarray:
    """Return labels as an array; tables hold strings as objects."""
    y = np.asanyarray(y)
    texts = y.dtype == object and all(isinstance(label, str) for label in y.flat)
    return y.astype(str) if texts else y


def _expect(condition: Any, name: str, expected: str, got: Any) -> None:
    if not condition:
        raise ValueError(f"{name}: expected {expected}, got {got}.")


def _check_inputs(name: str, x: np.ndarray) -> None:
    images = "images [n, h, w, c] with 1 or 3 channels"
    shape = f"shape {x.shape}"
    _expect(x.dtype.kind in "buif", name, "an array of numbers", f"dtype {x.dtype}")
    _expect(x.ndim in (2, 3, 4), name, "shape [n, d], [n, h, w] or [n, h, w, c]", x.shape)
    _expect(x.size > 0, name, "at least one row and value", shape)
    _expect(x.ndim < 4 or x.shape[-1] in (1, 3), name, images, shape)
    rows = max(1, _CHUNK // x[0].size)
    for start in range(0, len(x), rows) if x.dtype.kind == "f" else ():
        finite = np.isfinite(x[start : start + rows]).all(axis=tuple(range(1, x.ndim)))
        row = start + int(np.argmin(finite))
        _expect(finite.all(), name, "finite numbers", f"NaN or infinity in row {row}")


def _check_labels(name: str, y: np.ndarray, rows: int) -> None:
    kinds = "integers or strings (classes), or reals (regression)"
    _expect(y.dtype.kind in "buifU", name, kinds, f"dtype {y.dtype}")
    _expect(y.ndim == 1, name, "shape [n], one label a row", y.shape)
    _expect(len(y) == rows, name, f"{rows} labels, one for each row of x", len(y))
    if y.dtype.kind == "f":
        row = int(np.argmin(np.isfinite(y)))
        _expect(np.isfinite(y[row]), name, "finite numbers", f"{y[row]} in row {row}")


def _check_alike(name: str, parts: Parts) -> None:
    """Raise if a part's rows or labels are of another kind than the training rows."""
    x, y = parts["train"]
    for part, (x_other, y_other) in parts.items():
        alike = (x_other.shape[1:], x_other.dtype) == (x.shape[1:], x.dtype)
        expected = f"rows of shape {x.shape[1:]} and dtype {x.dtype} as in training"
        got = f"{x_other.shape[1:]} and {x_other.dtype}"
        _expect(alike, f"{name}: x_{part}", expected, got)
        kinds = [{"b": "i", "u": "i"}.get(a.dtype.kind, a.dtype.kind) for a in (y, y_other)]
        expected = f"labels of dtype {y.dtype} as in training"
        _expect(kinds[0] == kinds[1], f"{name}: y_{part}", expected, y_other.dtype)


def _encoded(name: str, parts: Parts) -> tuple[Parts, tuple[str, ...]]:
    """Return the parts with labels 0, 1, ..., and the class names, () for real targets."""
    labels = parts["train"][1]
    if labels.dtype.kind == "f":
        return parts, ()
    classes = np.unique(labels)
    _expect(len(classes) > 1, name, "at least 2 classes", f"only {classes[0]}")
    encoded = {}
    for part, (x, y) in parts.items():
        codes = np.minimum(np.searchsorted(classes, y), len(classes) - 1)
        unknown = y[classes[codes] != y]
        got = repr(str(unknown[0])) if len(unknown) else ""
        _expect(not got, f"{name}: y_{part}", "the classes of the training rows", got)
        encoded[part] = x, codes.astype(np.int32)
    return encoded, tuple(map(str, classes))


def digest_of(dataset: Dataset) -> str:
    """Return a digest of the values of all rows and the names of the classes."""
    state = hashlib.sha256(json.dumps(dataset.classes).encode())
    for array in dataset:
        if isinstance(array, np.ndarray):
            state.update(f"{array.dtype.str}{array.shape}".encode())
            rows = max(1, _CHUNK // max(1, array[:1].nbytes))
            for start in range(0, len(array), rows):
                state.update(np.ascontiguousarray(array[start : start + rows]).data)
    return f"sha256:{state.hexdigest()}"
