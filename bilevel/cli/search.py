"""``bilevel search``: activation search on real data, beside what a user would do instead.

One run does, for every seed side by side: the search; the network retrained at the α found; one
network for each single activation; and joint single-level training of weights and α on the
training data alone. It ends in a table, with the certified smallest eigenvalue of the kernel that
each would have at infinite width, and leaves a run directory.
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilevel
from bilevel.cli import argmax_advice
from bilevel.cli.flags import from_config_file
from bilevel.cli.flags.commands import JOINT_EPOCHS, LONGER, Search
from bilevel.cli.flags.datasets import CLASSES, inputs
from bilevel.cli.kernel_eigenvalue import kernel_eigenvalue
from bilevel.cli.runtime import report
from bilevel.cli.runtime.devices import count_for, here, spread_over_devices
from bilevel.cli.runtime.run_directory import run_directory
from bilevel.contracts import LowerSolver
from bilevel.data import datasets
from bilevel.nets.evaluation import wrong_rows
from bilevel.plots import plots
from bilevel.problem.problem import stack_problems
from bilevel.runs.progress import RunBar
from bilevel.spaces.activations import ActivationSpace, activation_space
from bilevel.strategies.activation_search import (
    ActivationTask,
    hypergradient_error,
    judge_argmax,
    set_up,
    solver,
    train_weights,
)

_COLUMNS = {
    "train_error": "train",
    "valid_error": "valid",
    "test_error": "test",
    "train_loss": "train loss",
    "valid_loss": "valid loss",
    "certified_min_eigenvalue": "λ_min ≥",
}


class ActivationSearchPlan(NamedTuple):
    """What a run does, in values of the library."""

    task: ActivationTask  # over the devices
    solver: LowerSolver
    longer: LowerSolver  # of ``LONGER`` times the steps: what the hypergradient is held against
    optimizer: optax.GradientTransformation  # of alpha
    steps: int  # of alpha
    joint_steps: int  # of weights and alpha together
    joint_rate: float | jax.Array  # of the weights then


def run_search(config: Search) -> dict[str, Any]:
    """Run the job; print its table, write its run directory, return what `result.json` holds."""
    config.check()
    with run_directory(config, keeps="the search is kept as far as it came") as folder:
        with report.phases(config.progress, _search_phase_seconds(config)) as bar:
            began = time.perf_counter()
            bar.enter("data")
            plan = _plan_search(config)
            result, search_result = _search_and_compare(
                plan, folder, bar, began, resume=config.resume
            )
        result = {"config": from_config_file.flags_of(config)} | result | report.origin()
        _write_search(folder, result, search_result)
        _print_search(result, folder)
        return result


def _plan_search(config: Search) -> ActivationSearchPlan:
    """Data, problem, solvers and optimizer of all seeds: the last place that reads a flag."""
    count_for(config.devices, config.seeds, "seeds")
    space = activation_space(
        config.activations, width=config.width, classes=CLASSES, outer=config.outer
    )
    assert isinstance(space, ActivationSpace)  # the width is finite
    seeds = jax.random.split(jax.random.key(config.seed), config.seeds)
    keys = [jax.random.split(key) for key in seeds]  # of the rows, of the weights
    sizes = {"train": config.train, "valid": config.valid, "test": config.test}
    rows = datasets.draw_splits(config.data, [of_rows for of_rows, _ in keys], **sizes)
    task = set_up(space, rows, [of_weights for _, of_weights in keys], classes=CLASSES)
    # But for the curvatures: solvers have them as constants.
    w0, *parts = spread_over_devices(config.devices, config.seeds, "seeds", (task.w0, *task[3:]))
    task = ActivationTask(task.space, w0, task.curvatures, *parts)
    steps = config.inner_steps
    return ActivationSearchPlan(
        task,
        solver(task, steps, config.solver, config.weight_rate),
        solver(task, LONGER * steps, rate=config.weight_rate),
        _optimizer(config.geometry, config.alpha_rate),
        config.steps,
        JOINT_EPOCHS * steps,
        config.weight_rate or 1 / task.curvatures.max(axis=-1)[:, None, None],
    )


def _optimizer(geometry: str, rate: float) -> optax.GradientTransformation:
    adam = optax.adam(rate)
    if geometry == "softmax":
        return bilevel.softmax(adam)
    if geometry == "project":
        # Adam moves every entry by its rate, and the whole simplex is only 1 wide.
        slower = optax.scale(0.1)
        return optax.chain(bilevel.tangent(), adam, slower, bilevel.project("simplex"))
    return optax.chain(bilevel.tangent(), adam, bilevel.exponentiate())


def _search_and_compare(
    plan: ActivationSearchPlan, folder: pathlib.Path, bar: RunBar, began: float, *, resume: bool
) -> tuple[dict[str, Any], bilevel.SearchResult]:
    task = plan.task
    names, seeds = task.space.names, len(task.w0)
    uniform = jnp.full((seeds, len(names)), 1 / len(names))
    bar.enter("search")
    search_result = bilevel.search(
        stack_problems(_with_losses_as_aux(task.space.problem)),
        plan.solver,
        plan.optimizer,
        uniform,
        task.w0,
        task.train,
        task.valid,
        steps=plan.steps,
        progress=False,
        callback=_loss_callback(bar, plan.steps, seeds),
        history=("alpha", "aux", "grad_norm", "lower", "value"),  # alpha's too, however large
        checkpoint=folder / "checkpoint",
        resume=resume,
    )
    if search_result.stopped:
        raise KeyboardInterrupt(search_result.stopped)
    searched = time.perf_counter() - began
    search_result = dataclasses.replace(
        search_result, alpha=here(search_result.alpha), w=here(search_result.w)
    )
    bar.enter("retraining")
    corners = [jnp.zeros_like(uniform).at[:, i].set(1) for i in range(len(names))]
    alphas = dict(zip(("search", *names), (search_result.alpha, *corners), strict=True))
    networks = {}
    for i, (name, alpha) in enumerate(alphas.items(), 1):
        networks[name] = here(jax.block_until_ready(train_weights(task, plan.solver, alpha))), alpha
        bar.show(i / len(alphas), name)
    bar.enter("joint training")
    networks["joint training"] = here(_train_jointly(plan, uniform, bar))
    bar.enter("certificates")
    task = ActivationTask(task.space, *here(tuple(task[1:])))
    verdict = judge_argmax(
        task, search_result.alpha, networks["search"][0], [networks[n] for n in names]
    )
    rows = {}
    for i, (name, network) in enumerate(networks.items(), 1):
        rows[name] = _errors_and_eigenvalues(task, *network)
        bar.show(i / len(networks), name)
    seconds = {"search": searched, "all": time.perf_counter() - began}
    result = _summarize_scores(names, np.asarray(search_result.alpha), rows, seconds)
    bar.enter("error of the hypergradient")
    gap = hypergradient_error(task, plan.solver, plan.longer, search_result.alpha)
    result["hypergradient"] = {name: x.tolist() for name, x in gap._asdict().items()}
    result["argmax"] = argmax_advice.verdict_entries(task, verdict)
    if search_result.report.compared:
        result["predicted_ratio"] = float(search_result.report.ratio)
    return result, search_result


def _with_losses_as_aux(problem: bilevel.Problem) -> bilevel.Problem:
    """The problem with its losses as auxiliary outputs: side by side they stay those of a seed."""

    def with_value_as_aux(loss):
        def loss_twice(w, alpha, batch):
            value = loss(w, alpha, batch)
            return value, value

        return loss_twice

    return bilevel.Problem(
        with_value_as_aux(problem.lower), with_value_as_aux(problem.outer), has_aux=True
    )


def _search_phase_seconds(config: Search) -> dict[str, float]:
    """Seconds of each phase, roughly, on two cores: compilation, and gradients of weights."""
    units = config.seeds * config.width * config.train * inputs(config.data)
    solve, networks = 2e-8 / 60 * units * config.inner_steps, len(config.activations) + 1
    relative_cost = {"unrolled": 4, "truncated": 1.75, "first-order": 1, "implicit": 3}[
        config.solver
    ]
    return {
        "data": 4,
        "search": 3 + relative_cost * solve * config.steps,
        "retraining": 3 + solve * networks,
        "joint training": 3 + 2 * JOINT_EPOCHS * solve,
        "certificates": 8 + config.seeds * (networks + 1),
        "error of the hypergradient": 6 + 4 * (1 + LONGER) * solve,
    }


def _loss_callback(bar: RunBar, steps: int, seeds: int) -> Callable[[bilevel.SearchResult], None]:
    """What to call between chunks of a search of so many ``steps``: the losses' means."""
    show = bar.loop(steps, "train {task.fields[lower]:.4g}  valid {task.fields[value]:.4g}")

    def callback(so_far):
        last = {k: float(so_far.history[k][-1]) / seeds for k in ("lower", "value")}
        show(len(so_far.history["value"]), lambda: last)

    return callback


def _train_jointly(
    plan: ActivationSearchPlan, alpha: jax.Array, bar: RunBar
) -> tuple[jax.Array, jax.Array]:
    """Single-level training: weights and α descend the training loss together."""
    task, steps = plan.task, plan.joint_steps
    lower = stack_problems(task.space.problem).lower
    result = bilevel.search(
        bilevel.Problem(lower, lower),
        bilevel.unrolled(optax.sgd(plan.joint_rate, 0.9, nesterov=True), 1, backprop=0),
        plan.optimizer,
        alpha,
        task.w0,
        task.train,
        task.train,
        steps=steps,
        progress=False,
        callback=lambda so_far: bar.show(len(so_far.history["value"]) / steps, ""),
    )
    if result.stopped:
        raise KeyboardInterrupt
    return result.w, result.alpha


def _errors_and_eigenvalues(
    task: ActivationTask, w: jax.Array, alpha: jax.Array
) -> dict[str, np.ndarray]:
    """Errors and losses of trained networks, eigenvalues of their kernels; [seeds] each."""
    space, parts = task.space, (task.train, task.valid, task.test)

    def error(w, alpha, batch):
        x, y = batch
        return jnp.mean(wrong_rows(space.predict, space.apply(w, alpha, x), space.predict(y)))

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


def _summarize_scores(names, alpha, rows, seconds) -> dict[str, Any]:
    means = {name: float(rows[name]["test_error"].mean()) for name in names}
    best = min(means, key=lambda name: means[name])
    gap = rows["search"]["test_error"] - rows[best]["test_error"]
    return {
        "names": list(names),
        "alpha": alpha.tolist(),
        "scores": {row: {k: v.tolist() for k, v in s.items()} for row, s in rows.items()},
        "best_single": best,
        "gap": [float(gap.mean()), report.standard_error_over_seeds(gap)],
        "seconds": seconds,
        "entry_error": max(float(s["entry_error"].max()) for s in rows.values()),
    }


def _write_search(folder, result, search_result) -> None:
    names, config = result["names"], result["config"]
    history = {k: np.asarray(v) for k, v in search_result.history.items() if k != "aux"}
    losses = jax.tree.map(np.asarray, search_result.history["aux"])  # [steps, seeds]
    history |= {f"{name}_of_seeds": values for name, values in losses.items()}
    runs = [
        {"value": value, "lower": lower}
        for value, lower in zip(losses["outer"].T, losses["lower"].T, strict=True)
    ]
    arrays = {"alpha": search_result.alpha, "w": search_result.w}
    report.write_results(
        folder, result, arrays | {f"history_{name}": values for name, values in history.items()}
    )

    def draw(figure):
        axes = figure.subplot_mosaic([["alpha", "outer"], ["alpha", "lower"]], width_ratios=(5, 4))
        uniform = np.full(len(names), 1 / len(names))
        plots.alpha_path(history["alpha"], names, axes["alpha"], start=uniform)
        outer, lower = plots.losses(runs, (axes["outer"], axes["lower"]))
        outer.set_ylabel(f"validation loss\n({config['outer']})")
        lower.set_ylabel("training loss\n(squared)")
        figure.suptitle(report.picture_title(config))

    report.save_figure(folder / "search.png", (11, 4.4), draw)


def _print_search(result: dict[str, Any], folder: pathlib.Path) -> None:
    from rich.table import Table

    config, seeds = result["config"], result["config"]["seeds"]
    table = Table(title=report.table_title(config))
    table.add_column("network", no_wrap=True)
    for heading in _COLUMNS.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for name, scores in result["scores"].items():
        cells = [report.cell(100 * np.asarray(scores[c]), ".1f") for c in _COLUMNS if "error" in c]
        cells += [report.cell(np.asarray(scores[c]), ".3g") for c in _COLUMNS if "loss" in c]
        cells += [report.format_lower_bound(np.mean(scores["certified_min_eigenvalue"]), 3)]
        marked = name + (" *" if name == result["best_single"] else "")
        table.add_row(marked, *cells, end_section=name in ("search", result["names"][-1]))
    console = report.screen()
    console.print(table)
    mixture = report.mixture(np.mean(result["alpha"], axis=0), result["names"])
    console.print(f"α found: {mixture}" + (" (mean over seeds)" if seeds > 1 else ""))
    norm, off = (np.asarray(result["hypergradient"][k]) for k in ("norm", "error"))
    relative = np.divide(off, norm, out=np.zeros_like(off), where=off > 0)
    console.print(
        f"hypergradient there: {report.cell(100 * relative, '.0f')} % from that of training "
        f"{LONGER} times as long"
    )
    if "predicted_ratio" in result:
        console.print(
            f"change of the validation loss: {result['predicted_ratio']:.2g} times what the "
            "hypergradients predicted"
        )
    console.print(argmax_advice.describe_advice(result))
    console.print(argmax_advice.theory(result["argmax"]))
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
