"""What the commands of convolutional networks share: estimates, augmentation, training."""

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import optax

from bilevel.cli.deep_search import pipeline
from bilevel.nets.evaluation import Part, error_rates
from bilevel.nets.images import crop_and_flip, cutout
from bilevel.nets.training import TrainableNetwork, TrainingState, from_scratch, run_epochs
from bilevel.spaces import Space

# Seconds for each weight and pixel: 3 passes (a backward pass costs two forward ones), a few
# products a weight, at 5e9 products a second.
_PASSES = 3 * 4 / 5e9


def check_fits(init: Callable[[jax.Array, Any], Any], like: Any) -> None:
    """Raise if the images are too small for a network, before anything is computed."""
    jax.eval_shape(lambda key: init(key, like), jax.random.key(0))


def search_image_space(
    space: Space,
    search: pipeline.DeepSearchPlan,
    seed: int,
    run: pipeline.RunContext,
    parts: list[list[Part]],
) -> tuple[pipeline.DeepSearchPlan, list[pipeline.SeedResult]]:
    """The searches of all seeds, once it is known that the images are large enough."""
    check_fits(space.init, parts[0][0])
    return search, pipeline.search_seeds_in_turn(run, space, search, parts, seed)


def search_work(seeds: int, gradients: int, seconds: float) -> dict[str, float]:
    """Seconds of each search's phase, given those of a gradient; the first search compiles."""
    search_seconds = gradients * seconds
    return {pipeline.search_label(i, seeds): search_seconds + 50 * (i == 0) for i in range(seeds)}


def cell_gradient_seconds(pixels: int, edges: int, cells: int, channels: int) -> float:
    """Seconds of a minibatch's gradient, roughly, on two cores, with one operation on each edge."""
    return _PASSES * pixels * edges * cells * channels**2


def augmentation(moved: bool, cut: int) -> Callable[[jax.Array, jax.Array], jax.Array] | None:
    """The augmentation of training images: moved and mirrored, and with a square ``cut`` out."""
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
    """A network trained from scratch, and its errors on all ``parts``."""
    program = from_scratch(network, sgd, batch_size=batch_size, augment=augment)
    run = functools.partial(run_epochs, program, key, parts[0], epochs=epochs, options=options)
    state, _ = run(checkpoint=checkpoint, callback=show)
    return state, error_rates(network)(state.w, state.averages, parts, batch_size)
