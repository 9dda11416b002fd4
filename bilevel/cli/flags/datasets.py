"""Built-in datasets before they are loaded, and the form of ``--data``. JAX is not imported."""

import os

from bilevel.internal.import_function import names_function

# Rows for training, and separate rows for the test; those of digits are drawn from all rows.
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
SOURCES = f"{', '.join(SHAPES)}, FILE.npz, a folder of images, or MODULE:FUNCTION"


def is_own(data: str) -> bool:
    """Return whether ``--data`` names rows of the user."""
    return data not in ROWS


def exists(data: str) -> bool:
    """Return whether ``--data`` names images that are built in, or a source of own rows."""
    if data.endswith(".npz"):
        return os.path.isfile(data)
    return data in SHAPES or os.path.isdir(data) or names_function(data)


def is_function(data: str) -> bool:
    """Return whether ``--data`` is MODULE:FUNCTION."""
    return is_own(data) and not data.endswith(".npz") and not os.path.isdir(data)


def check_rows(data: str, sizes: dict[str, int], reserved: int = 0) -> None:
    """Raise if built-in rows are too few for ``sizes``, by flag, and ``reserved`` more."""
    if not is_own(data):
        total, own_test_rows = ROWS[data]
        # For the test, at the least.
        check_sum(data, sizes, total - reserved - (0 if own_test_rows else 2))


def check_sum(data: str, sizes: dict[str, int], rows: int) -> None:
    """Raise if ``sizes``, by flag, are more than ``rows`` together."""
    for name, size in sizes.items():
        if size > rows:
            raise ValueError(f"{name}: expected at most {rows} of the rows of {data}, got {size}.")
        rows -= size
