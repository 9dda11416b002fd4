"""Facts about a dataset before it is loaded. JAX is not imported."""

import math
from typing import Any

# Rows for training, and separate rows for the test. The test rows of digits are drawn from the
# training rows.
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


def check_rows(data: str, sizes: dict[str, int], reserved: int = 0) -> None:
    """Raise if the training rows are too few for ``sizes``, by flag, and ``reserved`` more."""
    total, own_test_rows = ROWS[data]
    left = total - reserved - (0 if own_test_rows else 2)  # for the test, at the least
    for name, size in sizes.items():
        if size > left:
            raise ValueError(f"{name}: expected at most {left} of the rows of {data}, got {size}.")
        left -= size


def inputs(data: str) -> int:
    """Return how many values an image has."""
    return math.prod(SHAPES[data])


def image_shape(config: Any) -> tuple[int, int, int]:
    """Return the shape (h, w, c) of the images that the flags ``data`` and ``pixels`` ask for."""
    from bilevel.nets.images import pooling

    side, _, channels = SHAPES[config.data]
    side //= pooling(side, config.pixels)
    return side, side, channels
