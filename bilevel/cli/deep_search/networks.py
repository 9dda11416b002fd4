"""Training of convolutional networks from scratch."""

import functools
import pathlib
from collections.abc import Callable

import jax
import optax

from bilevel.nets.evaluation import Part, error_rates
from bilevel.nets.images import crop_and_flip, cutout
from bilevel.nets.training import TrainableNetwork, TrainingState, from_scratch, run_epochs


def augmentation(moved: bool, cut: int) -> Callable[[jax.Array, jax.Array], jax.Array] | None:
    """Return the augmentation of training images: crop and flip, and a square ``cut`` out."""
    if not (moved or cut):
        return None

    def augment(key, x):
        keys = jax.random.split(key)
        x = crop_and_flip(keys[0], x) if moved else x
        return cutout(keys[1], x, cut) if cut else x

    return augment


def fitted(
    network: TrainableNetwork,
    key: jax.Array,
    parts: list[Part],
    *,
    sgd: optax.GradientTransformation,
    epochs: int,
    batch_size: int,
    checkpoint: pathlib.Path,
    show: Callable[[int, float], None],
    augment: Callable | None = None,
    options: Callable[[int], tuple] = lambda epoch: (),
) -> tuple[TrainingState, list[float]]:
    """Train a network from scratch; return its state, and its errors on all ``parts``."""
    program = from_scratch(network, sgd, batch_size=batch_size, augment=augment)
    run = functools.partial(run_epochs, program, key, parts[0], epochs=epochs, options=options)
    state, _ = run(checkpoint=checkpoint, callback=show)
    return state, error_rates(network)(state.w, state.averages, parts, batch_size)
