"""Your own images: from a folder of PNG files to a trained network, and labels of new images.

    python own_images.py                           # digits of scikit-learn; needs Pillow
    python own_images.py --folder photos           # photos/CLASS/*.png, all of one size

Without ``--folder`` a public data set plays the part of your images: it is written as PNG files
first. A DARTS search then finds a convolutional cell, its network is trained from scratch, and it
predicts the test images. Every step prints its seconds. The same with commands::

    bilevel search-darts --data photos
    bilevel train runs/search
"""

import argparse
import contextlib
import pathlib
import tempfile
import time

import jax
import numpy as np
import optax

import bilevel
from bilevel.nets import fit, normalized, unit_images
from bilevel.spaces import darts

OPERATIONS = "skip_connect", "max_pool_3x3", "sep_conv_3x3"
SIZE = {"cells": 1, "channels": 8}


def write_folder(folder, data="digits", count=1500):
    """Write images of a public data set as ``folder/CLASS/NUMBER.png``."""
    from PIL import Image

    rows = bilevel.data.load(data)
    for i, (x, label) in enumerate(zip(rows.x_train[:count], rows.y_train, strict=False)):
        place = pathlib.Path(folder) / rows.classes[label].replace("/", " ")
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.uint8(255 * x)).save(place / f"{i}.png")


def searched(data, steps, key):
    """Search a cell with half of the training images; the other half chooses it."""
    draw_key, init_key, search_key = jax.random.split(key, 3)
    half = len(data.y_train) // 2
    ((train, valid, _),) = bilevel.data.draw_splits(
        data, [draw_key], train=half, valid=half, test=1
    )
    x_train, x_valid = unit_images(train[0], valid[0])
    train, valid = (x_train, train[1]), (x_valid, valid[1])
    space = darts.darts_space(OPERATIONS, classes=len(data.classes), **SIZE)
    strategy = bilevel.strategies.darts(
        space, weight_optimizer=optax.adam(3e-3), alpha_optimizer=0.03, batch_size=32
    )
    w = space.init(init_key, train)
    result = bilevel.strategies.run(
        strategy, space.start(), w, train, valid, steps=steps, key=search_key
    )
    return space.discretize(result.alpha)


def trained(genotype, data, epochs, key):
    """Train the network of the cell on all training images."""
    network = darts.darts_network(genotype, auxiliary=False, classes=len(data.classes), **SIZE)
    network = normalized(network, data.x_train)
    train, test = (data.x_train, data.y_train), (data.x_test, data.y_test)
    return network, fit(key, network, train, test=test, optimizer=0.05, epochs=epochs)


@contextlib.contextmanager
def timed(step, seconds):
    """Print the seconds of a step, and add them to ``seconds``."""
    began = time.perf_counter()
    yield
    seconds[step] = time.perf_counter() - began
    print(f"{step:<22}{seconds[step]:6.1f} s")


def main(folder=None, data="digits", count=1500, steps=200, epochs=30):
    """Return the test error, the labels of five test images, and the seconds of every step."""
    seconds: dict[str, float] = {}
    keys = jax.random.split(jax.random.key(0))
    with tempfile.TemporaryDirectory() as place:
        if folder is None:
            folder = pathlib.Path(place) / data
            with timed("write the folder", seconds):
                write_folder(folder, data, count)
        with timed("read the folder", seconds):
            rows = bilevel.data.load(folder)
    print(f"{len(rows.y_train)} training, {len(rows.y_test)} test images {rows.x_train.shape[1:]}")
    with timed("search", seconds):
        genotype = searched(rows, steps, keys[0])
    print(genotype.reduce)
    with timed("train", seconds):
        network, result = trained(genotype, rows, epochs, keys[1])
    with timed("predict", seconds):
        outputs = network.apply(result.w, result.averages, rows.x_test[:5])
    names = [rows.classes[label] for label in network.predict(outputs)]
    print(f"test error {100 * result.errors[-1]:.1f} %; five images: {', '.join(names)}")
    return result.errors[-1], names, seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", help="images by class, CLASS/*.png")
    parser.add_argument("--data", default="digits", help="the public data set, without --folder")
    parser.add_argument("--count", type=int, default=1500, help="its images")
    main(**vars(parser.parse_args()))
