"""Load real datasets as arrays, with checked files, and split them."""

import csv
import importlib.util
import io
import math
import os
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import chex
import jax
import numpy as np
import pooch

from bilevel.data import files, own
from bilevel.data.splits import Dataset, check_row_counts, draw_part, drawn, stratified_split
from bilevel.internal.checks import integer, prng_key, sequence

__all__ = ["Dataset", "draw_part", "draw_splits", "load", "stratified_split"]


class Source(NamedTuple):
    """One file on a public host, and the files with the content that it carries."""

    url: str
    digest: str  # of the file at `url`
    files: dict[str, str]  # name -> digest of the content, however it is compressed

    @property
    def file(self) -> str:
        """Return the name of the file at `url`."""
        return self.url.rpartition("/")[2]


def _idx_sources(host, *digests):
    names = (f"{a}-{b}-ubyte" for a in ("train", "t10k") for b in ("images-idx3", "labels-idx1"))
    return tuple(
        Source(f"{host}/{name}.gz", f"md5:{packed}", {name: f"md5:{content}"})
        for name, (packed, content) in zip(names, digests, strict=True)
    )


# In the order of their rows: training before test.
_BATCHES = {
    "data_batch_1.bin": "md5:5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "md5:5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "md5:942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "md5:ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "md5:53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "md5:803d5f7f4d78ea53de84dbe85f74fb6d",
}
_REVIEWS = "sha256:f84cfe56c2688ab62f00b141848a3349086eb295ca716c78d429108c0ed92823"
SOURCES: dict[str, tuple[Source, ...]] = {
    "mnist": _idx_sources(
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        ("f68b3c2dcbeaaa9fbdd348bbdeb94873", "6bbc9ace898e44ae57da46a324031adb"),
        ("d53e105ee54ea40749a09fcbcd1e9432", "a25bea736e30d166cdddb491f175f624"),
        ("9fb629c4189551a2d022fa330f9573f3", "2646ac647ad5339dbf082846283269ea"),
        ("ec29112dd5afa0611ce80d1b7f02629c", "27ae3e4e09519cfbb04c329615203637"),
    ),
    "fashion-mnist": _idx_sources(
        # The authors' repository; the host in its README does not offer https.
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/"
        "b2617bb6d3ffa2e429640350f613e3291e10b141/data/fashion",
        ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "f4a8712d7a061bf5bd6d2ca38dc4d50a"),
        ("25c81989df183df01b3e8a0aad5dffbe", "9018921c3c673c538a1fc5bad174d6f9"),
        ("bef4ecab320f06d8554ea6380940ec79", "8181f5470baa50b63fa0f6fddb340f0a"),
        ("bb300cfdad3c16e7a12a480ee83cd310", "15d484375f8d13e6eb1aabb0c3f46965"),
    ),
    "cifar10": (
        Source(
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            "md5:c32a1d4ab5d03f1284b67883e8d87530",
            _BATCHES,
        ),
    ),
    "imdb": (
        Source(
            "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
            "md5:7c2ac02c03563afcf9b574c7e56c153a",
            # The digest of the folder is that of its reviews written as the csv file.
            {"imdb_reviews.csv": _REVIEWS, "aclImdb": _REVIEWS},
        ),
    ),
}
_CLOTHES = "T-shirt/top, Trouser, Pullover, Dress, Coat, Sandal, Shirt, Sneaker, Bag, Ankle boot"
_THINGS = "airplane, automobile, bird, cat, deer, dog, frog, horse, ship, truck"


def load(
    source: own.Source,
    key: chex.PRNGKey | None = None,
    *,
    train_size: int | None = None,
    test_size: int | None = None,
    download: bool = True,
) -> Dataset:
    """Load a built-in dataset, or your own rows, as numpy arrays.

    Own rows are arrays ``x``, ``y`` by name: the keys of a ``.npz`` file or of a dict. ``x_test``,
    ``y_test``, ``x_valid`` and ``y_valid`` are optional; ``x_train`` and ``y_train`` mean ``x`` and
    ``y``. Shapes of ``x``: ``[n, d]``, ``[n, h, w]`` or ``[n, h, w, c]`` with 1 or 3 channels.
    ``y [n]`` are integers or strings (classes), or reals (regression).

    Parameters
    ----------
    source : str, path, callable or mapping
        One of

        - ``"digits"``, ``"mnist"``, ``"fashion-mnist"``, ``"cifar10"``, ``"imdb"``. ``digits`` is
          not split officially: here its last 360 rows are the test rows;
        - ``"FILE.npz"``, read without pickle;
        - a folder of images of one size, ``CLASS/*.png`` or ``train/CLASS/*.png`` next to ``test/``
          and ``valid/``; also ``.jpg``. It needs Pillow;
        - ``"MODULE:FUNCTION"``, or a function without arguments: it returns a mapping;
        - a mapping of arrays.
    key : jax PRNG key, optional
        Draws a fifth of own rows for testing, stratified, if there are no test rows. Default:
        ``jax.random.key(0)``.
    train_size, test_size : int, optional
        Use only the first rows of a built-in dataset; by default all. The rows of ``imdb`` are
        first put in a fixed random order. ``cifar10`` reads only the batches that contain the rows.
    download : bool
        Whether to download files that neither ``$BILEVEL_DATA`` nor the user cache contains.

    Returns
    -------
    Dataset
        Built-in images are float32 in [0, 1], ``[n, h, w]`` or ``[n, h, w, 3]``; texts are ``str``
        objects, ``[n]``. Own rows keep their dtype and stay on the host. Labels are int32, ``[n]``,
        and index ``classes``; real targets keep their values, and ``classes`` is empty.

    Raises
    ------
    FileNotFoundError
        If a file is missing or cannot be downloaded.
    ImportError
        If ``source`` is a folder and Pillow is missing.
    ValueError
        If the source is unknown, a file is damaged, or rows are fewer than the sizes. If own arrays
        are missing, empty, not finite, of other shapes, or have one class or unknown labels.

    Notes
    -----
    Memory: the arrays; twice as much while test rows are set aside. Memory maps stay memory maps
    if the source has test rows. Use :func:`draw_splits` for rows scaled for training.

    Examples
    --------
    >>> digits = load("digits", train_size=1000)
    >>> digits.x_train.shape, digits.x_test.shape, digits.classes[3]
    ((1000, 8, 8), (360, 8, 8), '3')
    >>> own = load({"x": np.eye(10), "y": ["cat", "dog"] * 5})
    >>> own.x_train.shape, own.y_test, own.classes
    ((8, 10), array([0, 1], dtype=int32), ('cat', 'dog'))
    """
    if not (isinstance(source, str) and source in _DATASETS):
        if not (callable(source) or isinstance(source, str | os.PathLike | Mapping)):
            raise TypeError(
                f"source: expected one of {', '.join(_DATASETS)}, {own.SOURCES}, a function or a "
                f"mapping, got {source!r}."
            )
        if train_size is not None or test_size is not None:
            raise ValueError("train_size, test_size: expected None for own rows; use draw_splits.")
        key = jax.random.key(0) if key is None else key
        prng_key("key", key)
        return own.load_own(source, key)
    for argument, size in (("train_size", train_size), ("test_size", test_size)):
        if size is not None:
            integer(argument, size, 1)
    read, classes = _DATASETS[source]
    train, test = read(source, train_size, download)
    x_train, y_train = _scaled_first_rows(f"{source}: train_size", train_size, *train)
    x_test, y_test = _scaled_first_rows(f"{source}: test_size", test_size, *test)
    return Dataset(x_train, y_train, x_test, y_test, classes)


def draw_splits(
    source: str | Dataset,
    keys: Sequence[chex.PRNGKey] | jax.Array,
    *,
    train: int,
    valid: int,
    test: int,
) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """Draw training, validation and test rows of a dataset for every key.

    ``train`` and ``valid`` rows are drawn from the training rows, stratified; own validation rows
    have priority. Test rows are the first ``test`` official ones, or drawn from the test rows of a
    :class:`Dataset`; all if there are fewer. For digits all parts are drawn from all rows.

    Parameters
    ----------
    source : str or Dataset
        A name or result of :func:`load`. CIFAR-10 reads only the files with ``train + valid`` rows.
    keys : sequence of jax PRNG keys
    train, valid, test : int

    Returns
    -------
    list, for every key, of ``[(x_train, y_train), (x_valid, y_valid), (x_test, y_test)]``
        Inputs are floating point. Bytes are divided by 255.

    Raises
    ------
    FileNotFoundError
        If a file is missing or cannot be downloaded.
    ValueError
        If a file is damaged, there are too few rows, or ``keys`` are not PRNG keys.

    Examples
    --------
    >>> (parts,) = draw_splits("digits", [jax.random.key(0)], train=100, valid=50, test=20)
    >>> [(x.shape, y.shape) for x, y in parts]
    [((100, 8, 8), (100,)), ((50, 8, 8), (50,)), ((20, 8, 8), (20,))]
    """
    for argument, size in {"train": train, "valid": valid, "test": test}.items():
        integer(argument, size, 1)
    if getattr(keys, "shape", None) == ():
        raise ValueError("keys: expected a sequence of PRNG keys, got one.")
    keys = sequence("keys", keys, "a sequence of PRNG keys")
    for i, key in enumerate(keys):
        prng_key(f"keys[{i}]", key)
    if isinstance(source, Dataset):
        return [drawn(source, key, train, valid, test) for key in keys]
    if source not in _DATASETS:
        raise ValueError(
            f"source: expected one of {', '.join(_DATASETS)}, or a Dataset of load, got {source!r}."
        )
    if source == "digits":
        data = load(source)
        x = np.concatenate([data.x_train, data.x_test])
        y = np.concatenate([data.y_train, data.y_test])
        check_row_counts(train, valid, len(y) - 1, " and one to test")
        data = data._replace(x_train=x, y_train=y)
        sizes = train, valid, min(test, len(y) - train - valid)
        return [draw_part(data, key, "train", *sizes) for key in keys]
    test_rows, train_size = 25_000 if source == "imdb" else 10_000, None
    if source == "cifar10":
        train_size = min(-(-(train + valid) // BATCH_ROWS), 5) * BATCH_ROWS
    data = load(source, train_size=train_size, test_size=min(test, test_rows))
    check_row_counts(train, valid, len(data.y_train))
    last = data.x_test, data.y_test
    return [[*draw_part(data, key, "train", train, valid), last] for key in keys]


def _scaled_first_rows(what, size, x, y):
    """Return the first `size` rows, with bytes scaled to [0, 1]."""
    if size is not None and size > len(y):
        raise ValueError(f"{what} must be at most {len(y)}, got {size}")
    x, y = x[:size], y[:size].astype(np.int32)
    return (x / np.float32(255) if x.dtype == np.uint8 else x), y


# One reader per format: (name, train_size, download) -> (x_train, y_train), (x_test, y_test).


def _read_digits(name, train_size, download):
    # The file of sklearn.datasets.load_digits, without its import, which takes more than a second.
    spec = importlib.util.find_spec("sklearn")
    assert spec is not None and spec.submodule_search_locations
    (folder,) = spec.submodule_search_locations
    table = np.loadtxt(Path(folder) / "datasets/data/digits.csv.gz", delimiter=",")
    pixels, labels = table[:, :-1], table[:, -1].astype(int)
    images = (pixels / 16).astype(np.float32).reshape(-1, 8, 8)
    return (images[:-360], labels[:-360]), (images[-360:], labels[-360:])


def _read_idx(name, train_size, download):
    folder = _folder(name, download)
    digests = [item for source in SOURCES[name] for item in source.files.items()]
    arrays = [_idx_array(folder, file, digest) for file, digest in digests]
    return arrays[:2], arrays[2:]


def _idx_array(folder, file, digest):
    """Return the array of an idx file: magic 2048 + rank, the dimensions, then unsigned bytes."""
    path, content = files.read_file(folder, file)
    rank = 3 if "idx3" in file else 1
    start = 4 + 4 * rank
    magic, *shape = struct.unpack(f">{1 + rank}I", content[:start].ljust(start, b"\0"))
    if magic != 2048 + rank:
        raise ValueError(f"{path}: expected idx magic {2048 + rank}, got {magic}")
    files.check_length(path, content, start + math.prod(shape), f"the shape {shape} in its header")
    files.check_digest(path, content, digest)
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


BATCH_ROWS = 10_000  # rows in each file of CIFAR-10


def _read_cifar10(name, train_size, download):
    folder, (source,) = _folder(name, download), SOURCES[name]
    *batches, test_batch = source.files
    total = BATCH_ROWS * len(batches)
    wanted = min(total, train_size or total)
    archive = files.find_file(folder, source.file)
    missing = (i for i, batch in enumerate(batches) if not files.find_file(folder, batch))
    held = BATCH_ROWS * (len(batches) if archive else next(missing, len(batches)))
    if 0 < held < wanted:
        raise ValueError(
            f"{folder}: expected {wanted:,} training rows, got {held:,} of {total:,}: ask for at "
            f"most {held:,}"
        )
    packed = {}
    if archive:
        for member, content in files.members(archive, source.digest, r"_batch.*\.bin$"):
            packed[Path(member).name] = archive / member, content
    parts = []
    for file in (*batches[: math.ceil(wanted / BATCH_ROWS)], test_batch):
        path, content = packed.get(file) or files.read_file(folder, file)
        parts.append(_cifar_batch(path, content, source.files[file]))
    *train, test = parts
    return [np.concatenate(arrays) for arrays in zip(*train, strict=True)], test


def _cifar_batch(path, content, digest):
    """Return images and labels of a batch; a record is a label and three 32 x 32 planes, RGB."""
    files.check_length(path, content, BATCH_ROWS * 3073, f"{BATCH_ROWS} records of 3073")
    files.check_digest(path, content, digest)
    records = np.frombuffer(content, np.uint8).reshape(-1, 3073)
    images = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), records[:, 0]


def _read_imdb(name, train_size, download):
    folder, (source,) = _folder(name, download), SOURCES[name]
    path = files.find_file(folder, *source.files, source.file)
    assert path is not None  # _folder has seen it
    if path.name.startswith("imdb_reviews.csv"):
        _, content = files.read_file(folder, "imdb_reviews.csv")
    else:
        content = _imdb_csv(path, source.digest)
    files.check_digest(path, content, source.files["imdb_reviews.csv"])
    rows = list(csv.reader(io.StringIO(content.decode(), newline="")))
    return [_imdb_part([row for row in rows if row[0] == part]) for part in ("train", "test")]


def _imdb_part(rows):
    """Return texts and labels, in a fixed random order."""
    rows = [rows[i] for i in np.random.RandomState(0).permutation(len(rows))]
    _, labels, _, _, texts = zip(*rows, strict=True)
    return np.array(texts, dtype=object), np.array(labels, dtype=np.int32)


def _imdb_csv(path, digest):
    """Return the reviews of the official folder or archive as the content of imdb_reviews.csv."""
    pattern = r"(train|test)/(neg|pos)/(\d+)_(\d+)\.txt$"
    rows = []
    for name, text in files.members(path, digest, pattern):
        part, label, number, rating = re.findall(pattern, name)[0]
        rows.append((part, int(label == "pos"), rating, int(number), text.decode(errors="replace")))
    rows.sort(key=lambda row: (row[0] == "test", row[1], row[3]))
    table = io.StringIO(newline="")
    writer = csv.writer(table, lineterminator="\n")
    writer.writerows([("split", "label", "rating", "review_id", "text"), *rows])
    return table.getvalue().encode()


_DATASETS = {
    "digits": (_read_digits, tuple("0123456789")),
    "mnist": (_read_idx, tuple("0123456789")),
    "fashion-mnist": (_read_idx, tuple(_CLOTHES.split(", "))),
    "cifar10": (_read_cifar10, tuple(_THINGS.split(", "))),
    "imdb": (_read_imdb, ("negative", "positive")),
}


def _folder(name, download):
    """Return the first folder with files of a dataset; if needed, download them into the cache."""
    folders, root = files.data_folders(name), files.user_cache()
    cache = root and root / name
    missing = {
        folder: [s for s in SOURCES[name] if not files.find_file(folder, s.file, *s.files)]
        for folder in folders
    }
    chosen = next((f for f in folders if len(missing[f]) < len(SOURCES[name])), None)
    if download and cache and chosen in (None, cache):
        for source in missing[cache]:
            _download(source, cache)
        return cache
    if chosen is None:
        searched = files.in_words(folders)
        raise FileNotFoundError(f"{name}: expected its files in {searched}, got none")
    return chosen


def _download(source, folder):
    try:
        pooch.retrieve(source.url, source.digest, fname=source.file, path=folder)
    except OSError as error:
        raise FileNotFoundError(
            f"{source.url}: expected a download, got {type(error).__name__}; put {source.file} "
            f"into {folder}, or into {folder.name}/ of the folder that BILEVEL_DATA names"
        ) from error
    except ValueError as error:  # a wrong digest, which pooch reports in several sentences
        raise ValueError(f"{source.url}: {str(error).partition('. ')[0]}") from error
