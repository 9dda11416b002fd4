"""``bilevel search-skips``: activations and skip connections of every layer (Zhu et al. 2022).

All seeds are searched side by side. Then, for every seed: the network of the architecture found;
networks of one activation without skips; and as many random architectures as could be trained in
the search's gradients. All of them are corners of the space, so that one compiled program trains
them all.

``--strategy eigen-nas`` searches nothing: see :mod:`bilevel.cli.deep_search.eigen_nas`.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ntk
from bilevel.cli.deep_search import pipeline, report
from bilevel.cli.deep_search.command import DeepSearchCommand, run_deep_search
from bilevel.cli.flags.datasets import CLASSES, inputs
from bilevel.cli.flags.deep_searches import SkipSearch
from bilevel.contracts import Pytree
from bilevel.nets.evaluation import Part, error_rates
from bilevel.spaces import Space
from bilevel.spaces.activations import unit_inputs
from bilevel.spaces.skips import SkipArchitecture, SkipSpace, skip_space
from bilevel.spaces.targets import cross_entropy_problem

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


def run_skip_search(config: SkipSearch) -> dict[str, Any]:
    """Run the job; print its table, write its run directory, return what `result.json` holds."""
    config.check()
    if config.strategy == "eigen-nas":
        from bilevel.cli.deep_search.eigen_nas import run_eigen_nas

        return run_eigen_nas(config)
    began = time.perf_counter()
    space = space_from_flags(config)
    sgd = functools.partial(optax.sgd, momentum=0.9)
    gradients = pipeline.search_of(config, space, sgd, 1.0).gradients  # whatever the rate is
    budget = 1 + round(gradients / _batches(config))  # as many as take the search's gradients
    seconds = skip_gradient_seconds(config)
    work = {
        "data": 2,
        "search": 10 + seconds * config.seeds * gradients,
        "training": training_seconds(config, 1 + len(space.names) + budget),
        "errors and curvature": 3 + 0.5 * config.seeds,
    }

    def searched(run, parts):
        task = task_of(config, space, parts)
        stacked = jax.tree.map(lambda *a: jnp.stack(a), *parts)
        key, weight_key, choice_key = jax.random.split(jax.random.key(config.seed), 3)
        w0 = _initial_weights(task.space, weight_key, stacked[0])
        rate = config.weight_rate or _mean_initial_rate(task.space, w0, stacked[0])
        search = pipeline.search_of(config, task.space, sgd, rate)
        return search, pipeline.search_seeds_at_once(
            run, task.space, search, w0, stacked, key, choice_key
        )

    def networks(run, found, parts):
        task = task_of(config, space, parts)
        rows = pipeline.networks_to_train(space, found, singles_of(space), drawn_of(task, budget))
        return train_skip_networks(run, task, rows)

    def more(result, found):
        result["scores"]["supernet"]["skips"] = [float(f.alpha["skips"].sum()) for f in found]
        best = best_single(space, result["scores"])
        return {"best_single": best, "kernel_rows": kernel_rows(config)}

    ends = {"search", space.names[-1], "random"}
    return run_deep_search(
        config,
        DeepSearchCommand(
            name="skips",
            space=_used(config, space),
            work=work,
            unit=unit_inputs,
            search=searched,
            train=networks,
            more=more,
            heats=functools.partial(_skip_heatmaps, space.names),
            table=lambda result: report.network_table(result, COLUMNS, ends),
            notes=lambda result: [note.format(**result) for note in _NOTES],
        ),
        began,
    )


def space_from_flags(config: SkipSearch) -> SkipSpace:
    """The space that the flags describe."""
    return skip_space(
        config.activations,
        depth=config.depth,
        width=config.width,
        classes=CLASSES,
        parametrization=config.parametrization,
    )


def task_of(config: SkipSearch, space: SkipSpace, parts: list[list[Part]]) -> SkipTask:
    """What is trained on the rows of all seeds, in the precision asked for."""
    rest = config.seed, config.epochs, config.batch_size, config.weight_rate
    return SkipTask(_used(config, space), space.kernel, parts, *rest)


def _used(config: SkipSearch, space: SkipSpace) -> SkipSpace:
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
    return 8 + (0.4 + skip_gradient_seconds(config) * _batches(config)) * config.seeds * networks


def _batches(config: SkipSearch) -> int:
    return config.epochs * (config.train // config.batch_size)


# ----------------------------------------------------------------------------- the parts


def _initial_weights(space: Space, key: jax.Array, train: Part) -> Pytree:
    """Fresh weights of all seeds, on a leading axis."""
    keys = jax.random.split(key, len(train[1]))
    return jax.jit(jax.vmap(space.init))(keys, train)


def _mean_initial_rate(space: Space, w: Pytree, train: Part) -> float:
    """The weights' first step size: by the tangent kernel at the start, mean over the seeds."""
    alpha = space.start()

    def of_seed(w, x):
        return 1 / pipeline.default_rate(space, w, alpha, x)

    return 1 / float(jax.jit(jax.vmap(of_seed))(w, train[0]).mean())


def _in_bfloat16(space: SkipSpace) -> SkipSpace:
    """The space with activations in bfloat16, for more than two classes."""

    def apply(w, alpha, x):
        half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (w, alpha, x))
        return space.apply(*half).astype(jnp.float32)

    return dataclasses.replace(space, apply=apply, problem=cross_entropy_problem(apply))


# ----------------------------------------------------------------------------- the networks


def singles_of(space: Space) -> dict[str, SkipArchitecture]:
    """Networks of one activation without skips, by its name."""
    layers, skips = (len(space.start()[k]) for k in ("activations", "skips"))
    return {s: SkipArchitecture((s,) * layers, (False,) * skips) for s in space.names}


def drawn_of(task: SkipTask, budget: int) -> list[list[Pytree]]:
    """So many random corners for each seed."""
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
    w0, orders = _initial_weights(space, weight_key, train), jax.random.split(order_key, seeds)
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


# ----------------------------------------------------------------------------- the report


def _skip_heatmaps(names: tuple[str, ...], alpha: Pytree) -> list[report.Heatmap]:
    """Probability of each activation, and weight of the skip connection, layer by layer."""
    mixtures, skips = (np.asarray(alpha[k]) for k in ("activations", "skips"))
    values = np.column_stack([mixtures, [np.nan, *skips]])
    layers, columns = [str(layer) for layer in range(1, len(values) + 1)], [*names, "skip"]
    return [report.Heatmap("α and weight of the skip", values, columns, layers, ylabel="layer")]


COLUMNS = {"skips": ("skips", ".3g"), "min_eigenvalue": ("λ_min", ".3g")}
_NOTES = [
    "networks are trained from scratch, those of one activation without skips; * best of them by "
    "validation; best of random: by validation, as many as take the search's gradients",
    "λ_min: of the infinite-width NTK of {kernel_rows} training rows, in NTK parametrization",
]
