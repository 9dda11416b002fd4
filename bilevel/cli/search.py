"""``bilevel search``: activation search on real data, beside what a user would do instead.

One run does, for every seed side by side: the search; the network retrained at the α found; one
network for each single activation; and joint single-level training of weights and α on the
training data alone. It ends in a table, with the certified smallest eigenvalue of the kernel that
each would have at infinite width, and leaves a run directory.
"""

import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilevel
from bilevel import data, plots
from bilevel._progress import RunBar
from bilevel.cli import argmax, report
from bilevel.cli.commands import JOINT_EPOCHS, LONGER, Search
from bilevel.cli.kernels import kernel_eigenvalue
from bilevel.cli.known import CLASSES, inputs
from bilevel.cli.runs import run_directory
from bilevel.problem import side_by_side
from bilevel.protocols import LowerSolver
from bilevel.spaces.activations import (
    ActivationSpace,
    activation_space,
    sign_labels,
    unit_inputs,
)

_COLUMNS = {
    "train_error": "train",
    "valid_error": "valid",
    "test_error": "test",
    "train_loss": "train loss",
    "valid_loss": "valid loss",
    "certified_min_eigenvalue": "λ_min ≥",
}


class Task(NamedTuple):
    """The searches of all seeds as one problem; leading axis: seeds."""

    space: ActivationSpace
    solver: LowerSolver  # differentiates as asked
    w0: jax.Array  # [seeds, width, inputs]
    curvatures: jax.Array  # [seeds, h]
    train: tuple[jax.Array, jax.Array]  # [seeds, n, inputs], [seeds, n, classes]
    valid: tuple[jax.Array, jax.Array]
    test: tuple[jax.Array, jax.Array]


def run_search(config: Search) -> dict[str, Any]:
    """Run the job; print its table, write its run directory, return what `result.json` holds."""
    config.check()
    with run_directory(config, ("steps",), keeps="the search is kept as far as it came") as folder:
        return _run(config, folder)


def _run(config: Search, folder: pathlib.Path) -> dict[str, Any]:
    with report.phases(config.progress, _work(config)) as bar:
        result, found = _computed(config, folder, bar)
    _write(folder, result, found)
    _print(result, folder)
    return result


def _computed(config: Search, folder: pathlib.Path, bar: RunBar) -> tuple[dict[str, Any], Any]:
    began = time.perf_counter()
    bar.enter("data")
    task = setup(config)
    h = len(task.space.names)
    uniform = jnp.full((config.seeds, h), 1 / h)
    bar.enter("search")
    found = bilevel.search(
        side_by_side(task.space.problem),
        task.solver,
        geometry(config),
        uniform,
        task.w0,
        task.train,
        task.valid,
        steps=config.steps,
        progress=False,
        callback=_shown(config, bar, config.steps),
        checkpoint=folder / "checkpoint",
        resume=config.resume,
    )
    if found.stopped:
        raise KeyboardInterrupt(found.stopped)
    searched = time.perf_counter() - began
    bar.enter("retraining")
    corners = [jnp.zeros_like(uniform).at[:, i].set(1) for i in range(h)]
    alphas = dict(zip(("search", *task.space.names), (found.alpha, *corners), strict=True))
    networks = {}
    for i, (name, alpha) in enumerate(alphas.items(), 1):
        networks[name] = jax.block_until_ready(retrained(task, alpha))
        bar.show(i / len(alphas), name)
    singles = [networks[name] for name in task.space.names]
    bar.enter("joint training")
    networks["joint training"] = _joint(task, config, uniform, bar)
    bar.enter("certificates")
    rows = {}
    for i, (name, network) in enumerate(networks.items(), 1):
        rows[name] = _scores(task, *network)
        bar.show(i / len(networks), name)
    seconds = {"search": searched, "all": time.perf_counter() - began}
    result = _summary(config, task.space.names, np.asarray(found.alpha), rows, seconds)
    bar.enter("error of the hypergradient")
    result["hypergradient"] = hypergradient_error(task, config, found.alpha)
    result["argmax"] = argmax.judged(task.space, networks["search"], singles, task.valid, task.test)
    return result, found


def _work(config: Search) -> dict[str, float]:
    """Seconds of each phase, roughly, on two cores: compilation, and gradients of weights."""
    units = config.seeds * config.width * config.train * inputs(config.data)
    solve, networks = 2e-8 / 60 * units * config.inner_steps, len(config.activations) + 1
    found = {"unrolled": 4, "truncated": 1.75, "first-order": 1, "implicit": 3}[config.solver]
    return {
        "data": 4,
        "search": 3 + found * solve * config.steps,
        "retraining": 3 + solve * networks,
        "joint training": 3 + 2 * JOINT_EPOCHS * solve,
        "certificates": 8 + config.seeds * (networks + 1),
        "error of the hypergradient": 6 + 4 * (1 + LONGER) * solve,
    }


def _shown(config: Search, bar: RunBar, steps: int) -> Callable[[bilevel.SearchResult], None]:
    """What to call between chunks of a search of so many ``steps``: the losses' means."""
    show = bar.loop(steps, "train {task.fields[lower]:.4g}  valid {task.fields[value]:.4g}")

    def callback(found):
        last = {k: float(found.history[k][-1]) / config.seeds for k in ("lower", "value")}
        show(len(found.history["value"]), lambda: last)

    return callback


# ----------------------------------------------------------------------------- the parts


def hypergradient_error(task: Task, config: Search, alpha: jax.Array) -> dict[str, list[float]]:
    """Norm and error of each seed's hypergradient, against training ``LONGER`` times as long.

    With more weights than labels the lower Hessian is singular, and `info` has no estimate. But
    training that interpolates has an end, and with it the hypergradient of fully trained networks;
    longer training is nearer to it (`benchmarks/search_error.py`).
    """
    longer = task.space.solver(task.curvatures, LONGER * config.inner_steps)
    ours, better = (hypergradient(task, s, alpha).grad for s in (task.solver, longer))
    sizes = {"norm": better, "error": ours - better}
    return {name: np.linalg.norm(x, axis=-1).tolist() for name, x in sizes.items()}


def hypergradient(task: Task, solver: LowerSolver, alpha: jax.Array) -> bilevel.HyperGradient:
    """The hypergradients of all seeds at ``alpha`` [seeds, h], by any solver."""
    fn = bilevel.hypergradient(side_by_side(task.space.problem), solver, diagnostics=False)
    return jax.jit(fn)(alpha, task.w0, task.train, task.valid)


def setup(config: Search) -> Task:
    """The problem and the data of all seeds."""
    space = activation_space(
        config.activations, width=config.width, classes=CLASSES, outer=config.outer
    )
    assert isinstance(space, ActivationSpace)  # the width is finite
    seeds = jax.random.split(jax.random.key(config.seed), config.seeds)
    keys = [jax.random.split(key) for key in seeds]  # of the rows, of the weights
    sizes = {"train": config.train, "valid": config.valid, "test": config.test}
    parts, weights = [], []
    for rows, (_, weight_key) in zip(
        data.samples(config.data, [key for key, _ in keys], **sizes), keys, strict=True
    ):
        xs = unit_inputs(*(x for x, _ in rows))
        ys = [sign_labels(y, CLASSES) for _, y in rows]
        parts.append(tuple(zip(xs, ys, strict=True)))
        weights.append(space.init(weight_key, parts[-1][0]))
    train, valid, test = jax.tree.map(lambda *x: jnp.stack(x), *parts)
    w0 = jnp.stack(weights)
    curvatures = jax.jit(jax.vmap(space.curvatures))(w0, train[0])
    backprop = {"truncated": max(1, config.inner_steps // 4), "first-order": 0}.get(config.solver)
    solver = space.solver(curvatures, config.inner_steps, backprop=backprop)
    if config.solver == "implicit":
        # With more weights than labels the Hessian is singular; of all responses of the weights,
        # damping picks a small one.
        damping = 1e-2 * curvatures.max()
        solver = bilevel.implicit(solver, bilevel.cg(steps=config.inner_steps, damping=damping))
    return Task(space, solver, w0, curvatures, train, valid, test)


def geometry(config: Search) -> optax.GradientTransformation:
    """The optimizer of α."""
    adam = optax.adam(config.alpha_rate)
    if config.geometry == "softmax":
        return bilevel.softmax(adam)
    if config.geometry == "project":
        # Adam moves every entry by its rate, and the whole simplex is only 1 wide.
        slower = optax.scale(0.1)
        return optax.chain(bilevel.tangent(), adam, slower, bilevel.project("simplex"))
    return optax.chain(bilevel.tangent(), adam, bilevel.exponentiate())


def retrained(task: Task, alpha: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Weights trained from the start at this ``alpha`` [seeds, h], and ``alpha``."""
    return _train(task.solver, side_by_side(task.space.problem), alpha, task.w0, task.train), alpha


_train = jax.jit(
    lambda solver, problem, alpha, w, batch: solver.run(
        problem.lower, alpha, w, solver.init(w), batch
    )[0],
    static_argnums=(0, 1),
)


def _joint(
    task: Task, config: Search, alpha: jax.Array, bar: RunBar
) -> tuple[jax.Array, jax.Array]:
    """Single-level training: weights and α descend the training loss together."""
    lower = side_by_side(task.space.problem).lower
    rate = 1 / task.curvatures.max(axis=-1)[:, None, None]
    steps = JOINT_EPOCHS * config.inner_steps
    result = bilevel.search(
        bilevel.Problem(lower, lower),
        bilevel.unrolled(optax.sgd(rate, 0.9, nesterov=True), 1, backprop=0),
        geometry(config),
        alpha,
        task.w0,
        task.train,
        task.train,
        steps=steps,
        progress=False,
        callback=lambda found: bar.show(len(found.history["value"]) / steps, ""),
    )
    if result.stopped:
        raise KeyboardInterrupt
    return result.w, result.alpha


def _scores(task: Task, w: jax.Array, alpha: jax.Array) -> dict[str, np.ndarray]:
    """Errors and losses of trained networks, eigenvalues of their kernels; [seeds] each."""
    space, parts = task.space, (task.train, task.valid, task.test)

    def error(w, alpha, batch):
        x, y = batch
        truth = space.predict(y)
        return jnp.mean(space.predict(space.apply(w, alpha, x)) != truth)

    scores = {
        f"{name}_error": jax.vmap(error)(w, alpha, part)
        for name, part in zip(("train", "valid", "test"), parts, strict=True)
    }
    scores["train_loss"] = jax.vmap(space.problem.lower)(w, alpha, task.train)
    scores["valid_loss"] = jax.vmap(space.problem.outer)(w, alpha, task.valid)
    eigenvalues = [
        kernel_eigenvalue(x, space.names, a) for x, a in zip(task.train[0], alpha, strict=True)
    ]
    columns = "min_eigenvalue", "certified_min_eigenvalue", "entry_error"
    scores |= zip(columns, np.transpose(eigenvalues), strict=True)
    return {name: np.asarray(x) for name, x in scores.items()}


# ----------------------------------------------------------------------------- the report


def _summary(config, names, alpha, rows, seconds) -> dict[str, Any]:
    means = {name: float(rows[name]["test_error"].mean()) for name in names}
    best = min(means, key=lambda name: means[name])
    gap = rows["search"]["test_error"] - rows[best]["test_error"]
    return {
        "config": report.flags(config),
        "names": list(names),
        "alpha": alpha.tolist(),
        "scores": {row: {k: v.tolist() for k, v in s.items()} for row, s in rows.items()},
        "best_single": best,
        "gap": [float(gap.mean()), report.standard_error(gap)],
        "seconds": seconds,
        "entry_error": max(float(s["entry_error"].max()) for s in rows.values()),
        **report.origin(),
    }


def _write(folder, result, found) -> None:
    names, config = result["names"], result["config"]
    history = {k: np.asarray(v) for k, v in found.history.items()}
    arrays = {"alpha": found.alpha, "w": found.w}
    report.write(
        folder, result, arrays | {f"history_{name}": values for name, values in history.items()}
    )

    def draw(figure):
        axes = figure.subplot_mosaic([["alpha", "outer"], ["alpha", "lower"]], width_ratios=(5, 4))
        uniform, seeds = np.full(len(names), 1 / len(names)), config["seeds"]
        plots.alpha_path(history["alpha"], names, axes["alpha"], start=uniform)
        outer, lower = plots.losses(history, (axes["outer"], axes["lower"]), scale=seeds)
        mean = f"\nmean of {seeds} seeds" if seeds > 1 else ""
        outer.set_ylabel(f"validation loss\n({config['outer']}){mean}")
        lower.set_ylabel(f"training loss\n(squared){mean}")
        figure.suptitle(report.picture_title(config))

    report.picture(folder / "search.png", (11, 4.4), draw)


def _print(result: dict[str, Any], folder: pathlib.Path) -> None:
    from rich.table import Table

    config, seeds = result["config"], result["config"]["seeds"]
    table = Table(title=report.title(config))
    table.add_column("network", no_wrap=True)
    for heading in _COLUMNS.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for name, scores in result["scores"].items():
        cells = [report.cell(100 * np.asarray(scores[c]), ".1f") for c in _COLUMNS if "error" in c]
        cells += [report.cell(np.asarray(scores[c]), ".3g") for c in _COLUMNS if "loss" in c]
        cells += [report.at_least(np.mean(scores["certified_min_eigenvalue"]), 3)]
        marked = name + (" *" if name == result["best_single"] else "")
        table.add_row(marked, *cells, end_section=name in ("search", result["names"][-1]))
    console = report.screen()
    console.print(table)
    found = report.mixture(np.mean(result["alpha"], axis=0), result["names"])
    console.print(f"α found: {found}" + (" (mean over seeds)" if seeds > 1 else ""))
    norm, off = (np.asarray(result["hypergradient"][k]) for k in ("norm", "error"))
    relative = np.divide(off, norm, out=np.zeros_like(off), where=off > 0)
    console.print(
        f"hypergradient there: {report.cell(100 * relative, '.0f')} % from that of training "
        f"{LONGER} times as long"
    )
    console.print(argmax.sentence(result))
    console.print(argmax.theory(result["argmax"]))
    gap, error = result["gap"]
    spread = f" ± {100 * error:.2f}" if seeds > 1 else ""
    console.print(
        f"* best single activation; the search's test error minus its: {100 * gap:+.2f}{spread}"
    )
    console.print(
        "λ_min ≥: certified, of the infinite-width kernel of the training rows, for entries exact "
        f"to {result['entry_error']:.0e}"
    )
    seconds = result["seconds"]
    console.print(
        f"search {seconds['search']:.0f} s, all {seconds['all']:.0f} s; results in {folder}"
    )
