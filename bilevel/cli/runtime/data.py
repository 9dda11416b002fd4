"""``--data`` of a run: facts about the rows, rows to draw, and the digest of the user's rows.

Built-in datasets are known before they are read. The user's rows are read before the run begins.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bilevel.cli.flags.commands import Job
from bilevel.cli.flags.datasets import CLASSES, ROWS, SHAPES, check_sum, is_function, is_own
from bilevel.data import datasets
from bilevel.data.own import digest_of
from bilevel.data.splits import Rows, standardized
from bilevel.internal.import_function import imported
from bilevel.nets.images import pooling_factor

FILE = "data.json"  # in the run directory: the digest of own rows
_SIZES = "rows", "train", "valid", "test"  # flags that count rows
_SHOWN = 5  # names of classes in the line of the data


class Data(NamedTuple):
    """The rows of a run. ``dataset`` and ``digest`` are None for built-in datasets."""

    source: str
    shape: tuple[int, ...]  # of a row: (h, w, c) of images, (d,) of vectors
    classes: int  # 0 for real targets
    dataset: datasets.Dataset | None = None
    digest: str | None = None
    seed: int = 0  # draws the test rows of own data, if it has none

    @property
    def inputs(self) -> int:
        """The number of values in a row."""
        return math.prod(self.shape)

    def image_shape(self, pixels: int | None) -> tuple[int, int, int]:
        """Return the shape (h, w, c) of images that are averaged down to ``pixels``."""
        height, width, channels = self.shape
        factor = pooling_factor((height, width), pixels)
        return height // factor, width // factor, channels

    def test_rows(self, config: Any) -> int:
        """Return the number of test rows that ``--test`` means."""
        if self.dataset is not None:
            return min(config.test, len(self.dataset.y_test))
        total, separate = ROWS[self.source]
        return min(config.test, separate or total - config.train - config.valid)

    def draw(self, keys: Sequence[Any] | jax.Array, **sizes: int) -> list[list[Rows]]:
        """Return training, validation and test rows for every key; own vectors standardized."""
        splits = datasets.draw_splits(self.dataset or self.source, keys, **sizes)
        return [self._prepared(parts) for parts in splits]

    def _prepared(self, parts: list[Rows]) -> list[Rows]:
        """Return rows in JAX's floating-point dtype; own vectors are standardized."""
        if self.dataset is None:
            return parts
        parts = standardized(parts) if len(self.shape) == 1 else parts
        narrow = parts[0][0].dtype == np.float64 and jnp.result_type(float) == np.float32
        return [(x.astype(np.float32) if narrow else x, y) for x, y in parts]

    def training_rows(self, key: jax.Array, count: int) -> np.ndarray:
        """Return training rows [count, ...], with all classes in their proportions."""
        dataset = self.dataset or load_builtin(self.source, count)
        if count > (total := len(dataset.y_train)):
            raise ValueError(f"rows: expected at most {total}, got {count}.")
        return self._prepared(datasets.draw_part(dataset, key, "train", count))[0][0]

    def record(self) -> dict[str, Any]:
        """Return the entry ``data`` of ``result.json``."""
        entry: dict[str, Any] = {"source": self.source, "digest": self.digest}
        if self.dataset is None:
            return entry
        sizes = (self.dataset.y_train, self.dataset.y_valid, self.dataset.y_test)
        normalization = "bytes / 255" if self.dataset.x_train.dtype == np.uint8 else "none"
        if len(self.shape) == 1:
            normalization = "columns of mean 0 and variance 1 on the training rows"
        return entry | {
            "seed": self.seed,
            "rows": [0 if y is None else len(y) for y in sizes],
            "shape": list(self.shape),
            "classes": list(self.dataset.classes),
            "normalization": normalization,
        }


def opened(
    config: Any, given: Collection[str] = (), *, images: bool, labels: bool = True
) -> tuple[Any, Data]:
    """Return the flags and the data of a run; sizes not ``given`` shrink to the user's own rows."""
    if not is_own(config.data):
        return config, Data(config.data, SHAPES.get(config.data, ()), CLASSES)
    data = own_data(config.data, config.seed, images=images, labels=labels)
    return _with_sizes(config, given, data.dataset), data


def load_builtin(source: str, count: int | None) -> datasets.Dataset:
    """Load a built-in dataset, but of cifar10 only the files with ``count`` training rows."""
    size = None
    if source == "cifar10" and count is not None:
        size = -(-count // datasets.BATCH_ROWS) * datasets.BATCH_ROWS
    return datasets.load(source, train_size=size)


def own_data(source: str, seed: int, *, images: bool, labels: bool) -> Data:
    """Return the user's rows, if they are ``images`` and have ``labels`` where a run needs them.

    ``seed`` draws the test rows.
    """
    try:
        own = imported("data", source) if is_function(source) else source
        dataset = datasets.load(own, jax.random.key(seed))
    except ImportError as error:  # without Pillow
        raise ValueError(str(error)) from error
    shape = dataset.x_train.shape[1:]
    shape = (*shape, 1) if len(shape) == 2 else shape
    if images and len(shape) == 1:
        raise ValueError(
            f"data: expected images [n, h, w] or [n, h, w, c] for this command, got vectors "
            f"{dataset.x_train.shape} in {source}."
        )
    if labels and not dataset.classes:
        raise ValueError(
            "data: expected class labels, integers or strings, for this command, got real targets "
            f"in {source}."
        )
    return Data(source, shape, len(dataset.classes), dataset, digest_of(dataset), seed)


def _with_sizes(config: Any, given: Collection[str], dataset: Any) -> Any:
    """Return the flags with default sizes that fit the rows of own data."""
    rows, valid = len(dataset.y_train), dataset.y_valid
    pools: dict[tuple[str, ...], int] = {("rows", "train", "valid"): rows}
    if valid is not None:
        pools = {("rows", "train"): rows, ("valid",): len(valid)}
    sizes: dict[str, Any] = {}
    for pool, total in pools.items():
        wanted = {name: config.size(name) for name in pool if hasattr(config, name)}
        if "train" in wanted and "valid" not in wanted and valid is None:
            total -= 1  # `bilevel rank` draws one validation row, and does not use it
        sizes |= _shrunk(config, given, wanted, total)
    if "batch_size" in vars(config):
        least = min(size for name, size in sizes.items() if name != "rows")
        sizes |= _shrunk(config, given, {"batch_size": config.batch_size}, least)
    fitted = dataclasses.replace(config, **sizes)
    fitted.check()
    return fitted


def _shrunk(
    config: Job, given: Collection[str], wanted: dict[str, int], total: int
) -> dict[str, int]:
    """Return sizes of at most ``total`` together; only defaults that are not ``given`` shrink."""
    free = {
        name: size
        for name, size in wanted.items()
        if name not in given
        and getattr(config, name) in (getattr(type(config), name), config.quick.get(name))
    }
    left = total - (sum(wanted.values()) - sum(free.values()))
    if sum(free.values()) > left >= len(free) > 0:
        share = left / sum(free.values())
        wanted = wanted | {name: max(1, int(share * size)) for name, size in free.items()}
    check_sum(config.data, wanted, total)
    return wanted


def description(config: Any, data: Data) -> str:
    """Return the line about own data: rows, classes, normalization and split."""
    entry, kind = data.record(), "vectors" if len(data.shape) == 1 else "images"
    names = ", ".join(entry["classes"][:_SHOWN]) + (", ..." if data.classes > _SHOWN else "")
    targets = f"{data.classes} classes ({names})" if data.classes else "real targets"
    counts = zip(entry["rows"], ("training", "validation", "test"), strict=True)
    numbers = ", ".join(f"{count:,} {part}" for count, part in counts if count)
    used = {name: config.size(name) for name in _SIZES if hasattr(config, name)}
    if "test" in used:
        used["test"] = min(used["test"], entry["rows"][2])
    sizes = ", ".join(f"{size:,} {name}" for name, size in used.items())
    return (
        f"{data.source}: {numbers} {kind} of {' x '.join(map(str, data.shape))}, "
        f"{targets}; normalization: {entry['normalization']}; this run takes {sizes}"
    )


def save_or_check_digest(folder: pathlib.Path, data: Data | None, resumed: bool) -> None:
    """Write the digest of own data into a new run directory; compare it in a ``resumed`` one."""
    if data is None or data.digest is None:
        return
    if not resumed:
        (folder / FILE).write_text(json.dumps(data.record(), indent=2) + "\n")
        return
    try:
        before = json.loads((folder / FILE).read_bytes())["digest"]
    except (OSError, ValueError, LookupError, TypeError):
        before = "none"
    if before != data.digest:
        raise ValueError(
            f"data: expected the rows of the run to resume, {before}, got {data.digest} in "
            f"{data.source}."
        )
