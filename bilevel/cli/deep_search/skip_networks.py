"""The networks that ``bilevel search-skips`` trains from scratch: the same for all strategies."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import ntk
from bilevel.cli.deep_search import pipeline
from bilevel.cli.flags.datasets import CLASSES, inputs
from bilevel.cli.flags.deep_searches import SkipSearch
from bilevel.contracts import Pytree
from bilevel.nets.evaluation import Part, error_rates
from bilevel.spaces import Space
from bilevel.spaces.skips import SkipArchitecture, SkipSpace, skip_space
from bilevel.spaces.targets import cross_entropy_problem

COLUMNS = {"skips": ("skips", ".3g"), "min_eigenvalue": ("λ_min", ".3g")}
_KERNEL_ROWS = 100  # of the kernel whose smallest eigenvalue is shown: a second for ten networks


class SkipTask(NamedTuple):
    """What is searched, on what; then what is trained, and how."""

    space: SkipSpace  # in the precision asked for
    kernel: Callable[..., ntk.Kernels]
    parts: list[list[Part]]  # of each seed: training, validation, test rows
    seed: int
    epochs: int
    batch_size: int
    weight_rate: float | None


def space_from_flags(config: SkipSearch) -> SkipSpace:
    """The space that the flags describe."""
    return skip_space(
        config.activations,
        depth=config.depth,
        width=config.width,
        classes=CLASSES,
        parametrization=config.parametrization,
    )


def skip_task(config: SkipSearch, space: SkipSpace, parts: list[list[Part]]) -> SkipTask:
    """What is trained on the rows of all seeds, in the precision asked for."""
    training = config.seed, config.epochs, config.batch_size, config.weight_rate
    return SkipTask(used_space(config, space), space.kernel, parts, *training)


def used_space(config: SkipSearch, space: SkipSpace) -> SkipSpace:
    """Return the space in the precision asked for."""
    return _in_bfloat16(space) if config.bfloat16 else space


def kernel_rows(config: SkipSearch) -> int:
    """How many training rows the kernels are of."""
    return min(_KERNEL_ROWS, config.train)


def skip_gradient_seconds(config: SkipSearch) -> float:
    """How long a gradient of a minibatch takes, roughly, on two cores."""
    weights = config.width * (inputs(config.data) + (config.depth - 2) * config.width)
    return 1e-8 * config.batch_size * weights


def training_seconds(config: SkipSearch, networks: int) -> float:
    """How long so many networks for each seed take to train from scratch."""
    network_seconds = 0.4 + skip_gradient_seconds(config) * training_batches(config)
    return 8 + network_seconds * config.seeds * networks


def training_batches(config: SkipSearch) -> int:
    """Return the number of minibatches that the training of one network takes."""
    return config.epochs * (config.train // config.batch_size)


def _in_bfloat16(space: SkipSpace) -> SkipSpace:
    """The space with activations in bfloat16, for more than two classes."""

    def apply(w, alpha, x):
        half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (w, alpha, x))
        return space.apply(*half).astype(jnp.float32)

    return dataclasses.replace(space, apply=apply, problem=cross_entropy_problem(apply))


def initial_weights(space: Space, key: jax.Array, train: Part) -> Pytree:
    """Fresh weights of all seeds, on a leading axis."""
    keys = jax.random.split(key, len(train[1]))
    return jax.jit(jax.vmap(space.init))(keys, train)


def single_activation_networks(space: Space) -> dict[str, SkipArchitecture]:
    """Networks of one activation without skips, by its name."""
    layers, skips = (len(space.start()[k]) for k in ("activations", "skips"))
    return {s: SkipArchitecture((s,) * layers, (False,) * skips) for s in space.names}


def draw_corners(task: SkipTask, budget: int) -> list[list[Pytree]]:
    """Draw ``budget`` random corners of the space for each seed."""
    seeds = len(task.parts)
    keys = jax.random.split(_training_keys(task)[0], budget)
    draws = [jax.random.split(k, seeds) for k in keys]
    return [[task.space.draw(of_all[seed]) for of_all in draws] for seed in range(seeds)]


def _training_keys(task: SkipTask) -> jax.Array:
    """The keys of random architectures, initial weights, and the order of the rows."""
    return jax.random.split(jax.random.fold_in(jax.random.key(task.seed), 1), 3)


def train_skip_networks(
    run: pipeline.RunContext, task: SkipTask, rows: list[pipeline.NetworkToTrain]
) -> list[dict[str, Any]]:
    """The scores of all rows' networks, trained; of those not random with their eigenvalue."""
    space, seeds = task.space, len(task.parts)
    _, weight_key, order_key = _training_keys(task)
    train = jax.tree.map(lambda *a: jnp.stack(a), *(of_seed[0] for of_seed in task.parts))
    w0, orders = initial_weights(space, weight_key, train), jax.random.split(order_key, seeds)
    fit = pipeline.corner_trainer(space, task.epochs, task.batch_size, task.weight_rate)
    rates = error_rates(space)

    def of_row(row, checkpoint, show):
        corner, parts = space.one_hot(row.architecture), task.parts[row.seed]
        w = fit(orders[row.seed], jax.tree.map(lambda a: a[row.seed], w0), corner, parts[0])
        errors = rates(w, corner, parts, task.batch_size)
        scores = dict(zip(pipeline.ERRORS, errors, strict=True))
        scores["skips"] = sum(row.architecture.skips)
        if "random" not in row.name:
            scores["min_eigenvalue"] = _architecture_min_eigenvalue(
                task.kernel, corner, parts[0][0]
            )
        show(task.epochs, float("nan"))
        return scores

    return pipeline.train_networks(run, rows, task.epochs, of_row)


def best_single(space: Space, scores: pipeline.Scores) -> str:
    """The activation whose network without skips has the smallest validation error."""
    return min(space.names, key=lambda name: np.mean(scores[name]["valid_error"]))


def _architecture_min_eigenvalue(kernel: Callable, corner: Pytree, x: jax.Array) -> float:
    """The smallest eigenvalue of the architecture's NTK at infinite width, in float64."""
    with jax.enable_x64(True):
        x, corner = jax.tree.map(
            lambda a: jnp.asarray(np.asarray(a), float), (x[:_KERNEL_ROWS], corner)
        )
        # The corner of the simplex stands for the architecture: one program serves all of them.
        return float(ntk.min_eigenvalue(kernel(corner, x).ntk))
