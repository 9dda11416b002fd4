"""``bilevel search --space skips``: activations and skip connections of every layer (Zhu 2022).

For every seed side by side: the search; its architecture trained from scratch; networks of one
activation without skips; and as many random architectures as could be trained in the time of the
search. All of them are corners of the space, so that one compiled program trains them all.
"""

import functools
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilevel
import ntk
from bilevel import plots
from bilevel._progress import RunBar
from bilevel.cli import deep, report
from bilevel.cli.commands import SkipSearch
from bilevel.cli.known import inputs
from bilevel.cli.rows import draw_rows, load
from bilevel.cli.runs import run_directory
from bilevel.nets.training import train
from bilevel.problem import Problem, side_by_side
from bilevel.protocols import Pytree
from bilevel.spaces.activations import unit_inputs
from bilevel.spaces.skips import SkipSpace, geometry, skip_space

_KERNEL_ROWS = 100
_SCALE_ROWS = 32  # for the NTK's mean diagonal entry


class _Task(NamedTuple):
    """What all parts of a run share; leading axis of arrays: seeds."""

    space: SkipSpace  # in the precision asked for
    init: Callable[[jax.Array], Pytree]  # fresh weights of all seeds
    train: tuple[jax.Array, jax.Array]  # [seeds, n, inputs], [seeds, n]
    valid: tuple[jax.Array, jax.Array]
    test: tuple[jax.Array, jax.Array]


def run_skip_search(config: SkipSearch) -> dict[str, Any]:
    """Run the job; print its table, write its run directory, return what `result.json` holds."""
    config.check()
    with run_directory(config, keeps="the search is kept as far as it came") as folder:
        return _run(config, folder)


def _run(config: SkipSearch, folder: pathlib.Path) -> dict[str, Any]:
    with report.phases(config, _work(config)) as bar:
        result, parts = _computed(config, folder, bar)
    _write(folder, result, *parts)
    _print(result, folder)
    return result


def _work(config: SkipSearch) -> dict[str, float]:
    """Seconds of each phase, roughly, on two cores: compilation, and gradients of minibatches."""
    weights = config.width * (inputs(config.data) + (config.depth - 2) * config.width)
    gradient = 1e-8 * config.seeds * config.batch_size * weights
    batches = config.epochs * (config.train // config.batch_size)
    names = len(config.activations)
    return {
        "data": 2,
        "search": 10 + gradient * deep.search_gradients(config),
        "training": 3 + gradient * batches * (1 + names + _budget(config)),
        "kernels": 8 + 0.4 * config.seeds * (1 + names),
        "curvature": 3 + 0.5 * config.seeds,
    }


def _computed(
    config: SkipSearch, folder: pathlib.Path, bar: RunBar
) -> tuple[dict[str, Any], tuple[dict, Pytree, Pytree]]:
    began = time.perf_counter()
    bar.enter("data")
    task = _task(config)
    key, weight_key, best_key = jax.random.split(jax.random.key(config.seed), 3)
    bar.enter("search")
    found = _search(task, config, key, weight_key, folder / "checkpoint")
    if found.stopped:
        raise KeyboardInterrupt(found.stopped)
    alpha = found.alpha
    if config.strategy == "random":
        alpha = _best_drawn(task, config, best_key, found.w)
    searched = time.perf_counter() - began
    rows, w = _rows(task, config, found.w, alpha, bar)
    bar.enter("curvature")
    result = _summary(task, config, found.w, alpha, rows)
    result["seconds"] = {"search": searched, "all": time.perf_counter() - began}
    return result, (found.history, alpha, w)


def _budget(config: SkipSearch) -> int:
    """Random networks that could be trained in the search's gradients, and one more."""
    one = config.epochs * (config.train // config.batch_size)
    return 1 + round(deep.search_gradients(config) / one)


# ----------------------------------------------------------------------------- the parts


def _task(config: SkipSearch) -> _Task:
    data = load(config.data, config.train, config.valid, config.test)
    space = skip_space(
        config.activations,
        depth=config.depth,
        width=config.width,
        classes=len(data.classes),
        parametrization=config.parametrization,
    )
    parts = []
    for key in jax.random.split(jax.random.key(config.seed), config.seeds):
        rows = draw_rows(config.data, data, key, config.train, config.valid, config.test)
        xs = unit_inputs(*(x for x, _ in rows))
        parts.append([(x, jnp.asarray(y)) for x, (_, y) in zip(xs, rows, strict=True)])
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *parts)
    length = stacked[0][0].shape[-1]

    @jax.jit
    def init(key):
        return jax.vmap(lambda k: space.init(k, length))(jax.random.split(key, config.seeds))

    return _Task(_in_bfloat16(space) if config.bfloat16 else space, init, *stacked)


def _in_bfloat16(space: SkipSpace) -> SkipSpace:
    """The space with activations in bfloat16, for more than two classes."""

    def apply(w, alpha, x):
        half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (w, alpha, x))
        return space.apply(*half).astype(jnp.float32)

    def loss(w, alpha, batch):
        x, labels = batch
        f = apply(w, alpha, x)
        return optax.softmax_cross_entropy_with_integer_labels(f, labels).mean()

    return space._replace(apply=apply, problem=Problem(loss, loss))


def _search(
    task: _Task, config: SkipSearch, key: jax.Array, weight_key: jax.Array, checkpoint: pathlib.Path
) -> bilevel.SearchResult:
    space, w0 = task.space, task.init(weight_key)
    alpha = jax.tree.map(lambda a: jnp.stack([a] * config.seeds), space.start())
    scale = jax.jit(jax.vmap(functools.partial(deep.kernel_diagonal, space.apply)))
    rate = config.learning_rate / float(scale(w0, alpha, task.train[0][:, :_SCALE_ROWS]).mean())
    draw = functools.partial(_draw, space)
    sgd = functools.partial(optax.sgd, momentum=0.9)
    one = deep.plan(config, space.problem, sgd, rate, geometry, draw)

    def of_all_seeds(key, data):
        return jax.vmap(one.batches)(jax.random.split(key, config.seeds), data)

    plan = one._replace(problem=side_by_side(one.problem), batches=of_all_seeds)
    parts = _simplices, alpha, w0, task.train, task.valid, key, checkpoint
    return deep.run(config, plan, *parts, copies=config.seeds)


def _simplices(alpha: Pytree) -> list[jax.Array]:
    return [alpha["activations"]]


def _draw(space: SkipSpace, key: jax.Array) -> Pytree:
    """An architecture drawn uniformly, as the corner that stands for it."""
    mixtures, skips = (space.start()[k] for k in ("activations", "skips"))
    keys = jax.random.split(key)
    chosen = jax.random.randint(keys[0], mixtures.shape[:1], 0, len(space.names))
    kept = jax.random.bernoulli(keys[1], shape=skips.shape)
    one_hot = jax.nn.one_hot(chosen, len(space.names), dtype=mixtures.dtype)
    return {"activations": one_hot, "skips": kept.astype(skips.dtype)}


def _best_drawn(task: _Task, config: SkipSearch, key: jax.Array, w: Pytree) -> Pytree:
    draw = functools.partial(_draw, task.space)

    def best(key, w, batch):
        return deep.best_drawn(key, config.samples, task.space.problem.outer, draw, w, batch)

    return jax.jit(jax.vmap(best))(jax.random.split(key, config.seeds), w, task.valid)


def _rows(
    task: _Task, config: SkipSearch, supernet: Pytree, alpha: Pytree, bar: RunBar
) -> tuple[dict[str, dict[str, np.ndarray]], Pytree]:
    """Scores [seeds] of every network in the table, and the weights of the search's."""
    space, seeds = task.space, config.seeds
    keys = jax.random.split(jax.random.fold_in(jax.random.key(config.seed), 1), 3)
    networks = {"search": _corners(space, alpha)}
    none = jax.tree.map(jnp.zeros_like, alpha)
    for i, name in enumerate(space.names):
        networks[name] = none | {"activations": none["activations"].at[..., i].set(1)}
    budget = _budget(config)
    draw = jax.vmap(functools.partial(_draw, space))
    for i, key in enumerate(jax.random.split(keys[0], budget)):
        networks[f"random {i + 1}"] = draw(jax.random.split(key, seeds))

    scores, weights, w0 = {}, None, task.init(keys[1])
    retrain, score = _trainer(task, config), _scorer(task)
    bar.enter("training")
    for i, (name, corners) in enumerate(networks.items(), 1):
        w = retrain(keys[2], w0, corners)
        weights = w if name == "search" else weights
        scores[name] = jax.tree.map(np.asarray, score(w, corners))
        bar.show(i / len(networks), name)
    drawn = [scores.pop(f"random {i + 1}") for i in range(budget)]
    stacked = {k: np.stack([s[k] for s in drawn]) for k in drawn[0]}  # [budget, seeds]
    best = stacked["validation error"].argmin(axis=0)[None]
    scores[f"best of {budget} random"] = {
        k: np.take_along_axis(v, best, axis=0)[0] for k, v in stacked.items()
    }
    scores["random"] = {k: v.mean(axis=0) for k, v in stacked.items()}
    scores["supernet"] = jax.tree.map(np.asarray, score(supernet, alpha))
    bar.enter("kernels")
    for i, name in enumerate(own := ("search", *space.names), 1):
        scores[name]["min eigenvalue"] = _min_eigenvalues(task, networks[name])
        bar.show(i / len(own), name)
    return scores, weights


def _corners(space: SkipSpace, alpha: Pytree) -> Pytree:
    """The architectures that ``alpha`` discretizes to, as corners; leading axis: seeds."""
    corners = [space.one_hot(a) for a in _architectures(space, alpha)]
    return jax.tree.map(lambda *a: jnp.stack(a), *corners)


def _architectures(space: SkipSpace, alpha: Pytree) -> list:
    seeds = len(alpha["skips"])
    return [space.discretize(jax.tree.map(lambda a: a[s], alpha)) for s in range(seeds)]  # noqa: B023


def _trainer(task: _Task, config: SkipSearch) -> Callable[[jax.Array, Pytree, Pytree], Pytree]:
    """``(key, w0, alpha) -> w``: the networks of all seeds after SGD from ``w0``."""
    space = task.space
    steps = config.epochs * (config.train // config.batch_size)
    cosine = optax.cosine_decay_schedule(config.learning_rate, steps)

    def one(key, w, alpha, data):
        scale = deep.kernel_diagonal(space.apply, w, alpha, data[0][:_SCALE_ROWS])
        sgd = optax.sgd(lambda step: cosine(step) / scale, momentum=0.9)
        sizes = {"epochs": config.epochs, "batch_size": config.batch_size}
        return train(key, space.problem.lower, alpha, w, data, optimizer=sgd, **sizes).last

    @jax.jit
    def trained(key, w0, alpha, data):
        return jax.vmap(one)(jax.random.split(key, config.seeds), w0, alpha, data)

    return lambda key, w0, alpha: trained(key, w0, alpha, task.train)


def _scorer(task: _Task) -> Callable[[Pytree, Pytree], dict[str, jax.Array]]:
    space, parts = task.space, {"train": task.train, "validation": task.valid, "test": task.test}

    def error(w, alpha, batch):
        x, labels = batch
        return jnp.mean(space.predict(space.apply(w, alpha, x)) != labels)

    @jax.jit
    def scores(w, alpha, parts):
        errors = {f"{k} error": jax.vmap(error)(w, alpha, part) for k, part in parts.items()}
        return errors | {"skips": alpha["skips"].sum(axis=-1)}

    return lambda w, alpha: scores(w, alpha, parts)


def _min_eigenvalues(task: _Task, alpha: Pytree) -> np.ndarray:
    """Of the architectures' NTKs at infinite width, in float64; [seeds]."""
    values = []
    for s, rows in enumerate(task.train[0]):
        with jax.enable_x64(True):
            x, a = jax.tree.map(
                lambda t: jnp.asarray(np.asarray(t), float),
                (rows[:_KERNEL_ROWS], jax.tree.map(lambda t: t[s], alpha)),  # noqa: B023
            )
            # As a mixture, though it is a corner: compiled once for all architectures.
            values.append(float(ntk.min_eigenvalue(task.space.kernel(a, x).ntk)))
    return np.array(values)


# ----------------------------------------------------------------------------- the report


def _summary(
    task: _Task, config: SkipSearch, w: Pytree, alpha: Pytree, rows: dict
) -> dict[str, Any]:
    space = task.space
    curvature = deep.top_curvature(space.problem.outer, _tangent)
    curvatures = [
        curvature(*jax.tree.map(lambda a: a[s], (w, alpha, task.valid)))  # noqa: B023
        for s in range(config.seeds)
    ]
    best = min(space.names, key=lambda name: rows[name]["validation error"].mean())
    return {
        "space": "skips",
        "config": report.flags(config),
        "names": list(space.names),
        "architectures": [str(a) for a in _architectures(space, alpha)],
        "alpha": {k: np.asarray(v).tolist() for k, v in alpha.items()},
        "scores": {row: {k: v.tolist() for k, v in s.items()} for row, s in rows.items()},
        "best single": best,
        "entropy": np.asarray(deep.entropy(alpha["activations"])).tolist(),
        "curvature": curvatures,
        "kernel rows": min(_KERNEL_ROWS, config.train),
        **report.origin(),
    }


def _tangent(v: Pytree) -> Pytree:
    mixtures = v["activations"]
    return v | {"activations": mixtures - mixtures.mean(axis=-1, keepdims=True)}


def _write(folder: pathlib.Path, result: dict, history: dict, alpha: Pytree, w: Pytree) -> None:
    history = jax.tree.map(np.asarray, history)
    path = history["alpha"]  # [steps, seeds, ...]
    arrays = {f"history_{k}": v for k, v in history.items() if k != "alpha"}
    for name, tree in {"history_alpha": path, "alpha": alpha, "w": w}.items():
        arrays |= {f"{name}_{k}": v for k, v in tree.items()}
    report.write(folder, result, arrays)

    def draw(figure):
        left, middle, right = figure.subplots(1, 3, width_ratios=(1.1, 1, 1))
        names, seeds = result["names"], result["config"]["seeds"]
        mixtures, skips = (np.asarray(alpha[k]).mean(0) for k in ("activations", "skips"))
        _heat_map(mixtures, skips, names, left)
        mean = f", mean of {seeds} seeds" if seeds > 1 else ""
        left.set_title(f"α and weight of the skip{mean}")
        uniform = np.full(len(names), 1 / len(names))
        plots.alpha_path(path["activations"][:, :, 0], names, middle, start=uniform)
        middle.set_title("activations of the first layer")
        layers = [f"layer {layer}" for layer in range(2, 2 + len(skips))]
        plots.alpha_path(path["skips"], layers, right, start=np.full(len(skips), 0.5))
        right.set(title="skip connections", ylabel=right.get_ylabel().replace("α", "weight"))
        figure.suptitle(report.picture_title(result["config"]))

    report.picture(folder / "search.png", (14, 4.4), draw)


def _heat_map(mixtures: np.ndarray, skips: np.ndarray, names: list[str], ax: Any) -> None:
    """Probability of each activation, and weight of the skip connection, layer by layer."""
    table = np.column_stack([mixtures, [np.nan, *skips]])
    layers = [str(layer) for layer in range(1, len(table) + 1)]
    report.heat_map(table, ax, [*names, "skip"], layers, fontsize=9)
    ax.axvline(len(names) - 0.5, color="black", linewidth=0.8)
    ax.set_ylabel("layer")


_COLUMNS = {"train error": "train", "validation error": "valid", "test error": "test"}


def _print(result: dict[str, Any], folder: pathlib.Path) -> None:
    from rich.table import Table

    config, seeds = result["config"], result["config"]["seeds"]
    table = Table(title=report.title(config))
    table.add_column("network", no_wrap=True)
    for heading in (*_COLUMNS.values(), "skips", "λ_min"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, scores in result["scores"].items():
        cells = [report.cell(100 * np.asarray(scores[c]), ".1f") for c in _COLUMNS]
        cells.append(report.cell(np.asarray(scores["skips"]), ".3g"))
        values = scores.get("min eigenvalue")
        cells.append(report.cell(np.asarray(values), ".3g") if values else "")
        marked = name + ", no skips" * (name in result["names"])
        marked += " *" * (name == result["best single"])
        last = name in ("search", result["names"][-1], "random")
        table.add_row(marked, *cells, end_section=last)
    console = report.screen()
    console.print(table)
    for seed, architecture in enumerate(result["architectures"]):
        console.print((f"seed {seed}: " if seeds > 1 else "found: ") + architecture)
    entropies = np.mean(result["entropy"], axis=0)
    console.print(
        f"entropy of the activations by layer: {' '.join(f'{e:.2f}' for e in entropies)}, of at "
        f"most {np.log(len(result['names'])):.2f}"
    )
    curvature = np.array(result["curvature"])
    console.print(
        f"largest eigenvalue of the validation loss's Hessian in α: {report.cell(curvature, '.3g')}"
    )
    console.print(deep.known_error(config["strategy"]))
    console.print(
        "networks are trained from scratch; * best single activation by validation; best of "
        "random: by validation, as many as take the search's gradients"
    )
    console.print(
        f"λ_min: of the infinite-width NTK of {result['kernel rows']} training rows, in NTK "
        "parametrization"
    )
    seconds = result["seconds"]
    console.print(
        f"{config['strategy']} {seconds['search']:.0f} s, all {seconds['all']:.0f} s; results in "
        f"{folder}"
    )
