"""``bilevel search-skips``: activations and skip connections of every layer (Zhu et al. 2022).

All seeds are searched side by side. Then, for every seed: the network of the architecture found;
networks of one activation without skips; and as many random architectures as could be trained in
the search's gradients. All of them are corners of the space, so that one compiled program trains
them all.
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
from bilevel import data, diagnostics
from bilevel.cli import deep, report
from bilevel.cli.commands import SkipSearch
from bilevel.cli.known import CLASSES, inputs
from bilevel.cli.runs import run_directory
from bilevel.nets.evaluation import Part, error_rates
from bilevel.nets.training import train
from bilevel.protocols import Pytree
from bilevel.spaces import Space
from bilevel.spaces.activations import unit_inputs
from bilevel.spaces.skips import SkipArchitecture, SkipSpace, skip_space
from bilevel.spaces.targets import cross_entropy
from bilevel.strategies import Strategy

_KERNEL_ROWS = 100  # rows of the kernel whose least eigenvalue is shown: a second for 10 networks
_SCALE_ROWS = 32  # rows that the mean diagonal entry of the tangent kernel is taken over
_RATE = 3.0  # the default learning rate of the weights is this over that entry


class _Task(NamedTuple):
    """What is searched, on what; then what is trained, and how."""

    space: Space  # in the precision asked for
    kernel: Callable[..., ntk.Kernels]
    parts: list[list[Part]]  # of each seed: training, validation, test rows
    seed: int
    epochs: int
    batch_size: int
    weight_rate: float | None
    budget: int  # how many random networks are trained


def run_skip_search(config: SkipSearch) -> dict[str, Any]:
    """Run the job; print its table, write its run directory, return what `result.json` holds."""
    config.check()
    keeps = "searches and networks are kept as far as they came"
    with run_directory(config, keeps=keeps) as folder:
        space = skip_space(
            config.activations,
            depth=config.depth,
            width=config.width,
            classes=CLASSES,
            parametrization=config.parametrization,
        )
        batches = config.epochs * (config.train // config.batch_size)
        gradients = config.steps * deep.gradients(config.strategy, space)
        budget = 1 + round(gradients / batches)  # trained with as many gradients as a search
        weights = config.width * (inputs(config.data) + (config.depth - 2) * config.width)
        networks = config.seeds * (1 + len(space.names) + budget)
        seconds = 1e-8 * config.batch_size * weights  # of a gradient, roughly, on two cores
        work = {
            "data": 2,
            "search": 10 + seconds * config.seeds * gradients,
            "training": 8 + (0.4 + seconds * batches) * networks,
            "curvature": 3 + 0.5 * config.seeds,
        }
        with report.phases(config.progress, work) as bar:
            bar.enter("data")
            draws = jax.random.split(jax.random.key(config.seed), config.seeds)
            sizes = {"train": config.train, "valid": config.valid, "test": config.test}
            task = _Task(
                _in_bfloat16(space) if config.bfloat16 else space,
                space.kernel,
                [_unit(rows) for rows in data.samples(config.data, draws, **sizes)],
                config.seed,
                config.epochs,
                config.batch_size,
                config.weight_rate,
                budget,
            )
            plan = functools.partial(
                deep.strategy,
                config.strategy,
                task.space,
                functools.partial(optax.sgd, momentum=0.9),
                alpha_rate=config.alpha_rate,
                steps=config.steps,
                batch_size=config.batch_size,
            )
            run = deep.Run(folder, bar, config.progress, config.resume)
            length = config.steps, config.samples
            result, found = _computed(run, task, plan, length, report.flags(config))
        report.write(folder, result, deep.arrays_of(found))
        deep.picture(folder / "search.png", result, found, [_heat(space, found[0].alpha)])
        _print(result, folder)
    return result


def _computed(
    run: deep.Run,
    task: _Task,
    plan: Callable[..., Strategy],
    length: tuple[int, int],
    flags: dict[str, Any],
) -> tuple[dict[str, Any], list[deep.Found]]:
    began, space = time.perf_counter(), task.space
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *task.parts)
    key, weight_key, choice_key = jax.random.split(jax.random.key(task.seed), 3)
    w0 = _initial(space, weight_key, stacked[0])
    rate = task.weight_rate or _RATE / _scale(space, w0, stacked[0])
    steps, samples = length
    search = deep.Search(plan(weight_rate=rate), steps, task.batch_size, samples)
    found = deep.side_by_side(run, space, search, w0, stacked, key, choice_key)
    searched = time.perf_counter() - began
    networks = _networks(run, task, found, stacked[0])
    run.bar.enter("curvature")
    result = deep.summary("skips", space, search, found, task.parts, flags)
    result["scores"] = networks | result["scores"]
    result["scores"]["supernet"]["skips"] = [float(f.alpha["skips"].sum()) for f in found]
    result["best_single"] = min(
        space.names, key=lambda name: np.mean(networks[name]["valid_error"])
    )
    result["kernel_rows"] = min(_KERNEL_ROWS, len(task.parts[0][0][1]))
    result["seconds"] = {"search": searched, "all": time.perf_counter() - began}
    return result, found


# ----------------------------------------------------------------------------- the parts


def _unit(rows: list[Part]) -> list[Part]:
    xs = unit_inputs(*(x for x, _ in rows))
    return [(x, jnp.asarray(y)) for x, (_, y) in zip(xs, rows, strict=True)]


def _initial(space: Space, key: jax.Array, train: Part) -> Pytree:
    """Fresh weights of all seeds, on a leading axis."""
    keys = jax.random.split(key, len(train[1]))
    return jax.jit(jax.vmap(space.init))(keys, train)


def _scale(space: Space, w: Pytree, train: Part) -> float:
    """The tangent kernel's mean diagonal entry at the start of the search, over all seeds."""
    alpha = space.start()

    def of_seed(w, x):
        return diagnostics.kernel_diagonal(space.apply, w, alpha, x)

    return float(jax.jit(jax.vmap(of_seed))(w, train[0][:, :_SCALE_ROWS]).mean())


def _in_bfloat16(space: SkipSpace) -> SkipSpace:
    """The space with activations in bfloat16, for more than two classes."""

    def apply(w, alpha, x):
        half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (w, alpha, x))
        return space.apply(*half).astype(jnp.float32)

    return dataclasses.replace(space, apply=apply, problem=cross_entropy(apply))


# ----------------------------------------------------------------------------- the networks


def _networks(run: deep.Run, task: _Task, found: list[deep.Found], train: Part) -> deep.Scores:
    space, seeds = task.space, len(task.parts)
    keys = jax.random.split(jax.random.fold_in(jax.random.key(task.seed), 1), 3)
    layers, skips = (len(space.start()[k]) for k in ("activations", "skips"))
    singles = {s: SkipArchitecture((s,) * layers, (False,) * skips) for s in space.names}
    draws = [jax.random.split(k, seeds) for k in jax.random.split(keys[0], task.budget)]
    drawn = [[space.draw(of_all[seed]) for of_all in draws] for seed in range(seeds)]
    rows = deep.rows_of(space, found, singles, drawn)
    w0, orders = _initial(space, keys[1], train), jax.random.split(keys[2], seeds)
    fit, rates = _trainer(task), error_rates(space)

    def trained(row, checkpoint, show):
        corner, parts = space.one_hot(row.architecture), task.parts[row.seed]
        w = fit(orders[row.seed], jax.tree.map(lambda a: a[row.seed], w0), corner, parts[0])
        errors = rates(w, corner, parts, task.batch_size)
        scores = dict(zip(deep.ERRORS, errors, strict=True))
        scores["skips"] = sum(row.architecture.skips)
        if "random" not in row.name:
            scores["min_eigenvalue"] = _min_eigenvalue(task.kernel, corner, parts[0][0])
        show(task.epochs, float("nan"))
        return scores

    return deep.by_network(deep.trained(run, rows, task.epochs, trained))


def _trainer(task: _Task) -> Callable[[jax.Array, Pytree, Pytree, Part], Pytree]:
    """``(key, w0, corner, rows) -> w`` after SGD, one program for all architectures."""
    space, sizes = task.space, {"epochs": task.epochs, "batch_size": task.batch_size}

    @jax.jit
    def fit(key, w, corner, rows):
        steps = task.epochs * (len(rows[1]) // task.batch_size)
        rate: Any = task.weight_rate
        if rate is None:
            x = rows[0][:_SCALE_ROWS]
            rate = _RATE / diagnostics.kernel_diagonal(space.apply, w, corner, x)
        cosine = optax.cosine_decay_schedule(1.0, steps)
        sgd = optax.sgd(lambda step: rate * cosine(step), momentum=0.9)
        return train(key, space.problem.lower, corner, w, rows, optimizer=sgd, **sizes).last

    return fit


def _min_eigenvalue(kernel: Callable, corner: Pytree, x: jax.Array) -> float:
    """The smallest eigenvalue of the architecture's NTK at infinite width, in float64."""
    with jax.enable_x64(True):
        x, corner = jax.tree.map(
            lambda a: jnp.asarray(np.asarray(a), float), (x[:_KERNEL_ROWS], corner)
        )
        # The corner of the simplex stands for the architecture: one program serves all of them.
        return float(ntk.min_eigenvalue(kernel(corner, x).ntk))


# ----------------------------------------------------------------------------- the report


def _heat(space: Space, alpha: Pytree) -> deep.Heat:
    """Probability of each activation, and weight of the skip connection, layer by layer."""
    mixtures, skips = (np.asarray(alpha[k]) for k in ("activations", "skips"))
    values = np.column_stack([mixtures, [np.nan, *skips]])
    layers = [str(layer) for layer in range(1, len(values) + 1)]
    return deep.Heat(
        "α and weight of the skip", values, [*space.names, "skip"], layers, ylabel="layer"
    )


_COLUMNS = {"skips": ("skips", ".3g"), "min_eigenvalue": ("λ_min", ".3g")}
_NOTES = [
    "networks are trained from scratch, those of one activation without skips; * best of them by "
    "validation; best of random: by validation, as many as take the search's gradients",
    "λ_min: of the infinite-width NTK of {kernel_rows} training rows, in NTK parametrization",
]


def _print(result: dict[str, Any], folder: Any) -> None:
    ends = {"search", result["names"][-1], "random"}
    notes = [note.format(**result) for note in _NOTES]
    deep.show(result, folder, deep.table(result, _COLUMNS, ends), notes)
