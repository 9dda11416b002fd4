"""``bilevel search``: activation search on real data, compared with its alternatives.

For every seed, one run computes four results:

- the search;
- the network retrained at the α found;
- one network for each single activation;
- joint single-level training of weights and α on the training data alone.

The run prints a table with the certified smallest eigenvalue of each kernel at infinite width, and
writes a run directory.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.linalg
from rich.console import Console

import bilevel
import ntk
from bilevel.cli import argmax_advice
from bilevel.cli.flags.commands import Search
from bilevel.cli.runtime import memory, report
from bilevel.cli.runtime.command_run import CommandRun, Result
from bilevel.cli.runtime.devices import count_for, here, spread_over_devices
from bilevel.nets.evaluation import wrong_rows
from bilevel.plots import plots
from bilevel.problem.problem import stack_problems
from bilevel.runs.progress import Phases
from bilevel.spaces.activations import ACTIVATIONS, ActivationSpace, activation_space
from bilevel.strategies.activation_search import (
    ActivationTask,
    hypergradient_error,
    judge_argmax,
    set_up,
    solver,
    train_weights,
)
from ntk.expectations.activations import Activation
from ntk.spectrum.certificate import certified_min_eigenvalue

_JOINT_EPOCHS = 10  # joint training takes as many times the inner steps of one lower solve
_LONGER = 4  # the hypergradient is compared with that of 4 times the inner steps

_COLUMNS: report.Columns = {
    "test_error": ("test", ".1f"),
    "valid_error": ("valid", ".1f"),
    "train_error": ("train", ".1f"),
    "valid_loss": ("valid loss", ".3g"),
    "train_loss": ("train loss", ".3g"),
    "certified_min_eigenvalue": ("λ_min ≥", lambda x: report.format_lower_bound(x.mean(), 3)),
}


class _SearchRun(CommandRun):
    """A search with its alternatives, for all seeds at once."""

    keeps = "the search so far is saved"
    search_result: bilevel.SearchResult

    def arrays(self) -> list[memory.Parts]:
        """Return the arrays alive together during the comparison with longer training."""
        config = self.config
        copies, choices, n = config.seeds, len(config.activations), config.train
        inputs, classes = self.data.inputs, self.data.classes
        w = memory.shape(copies, config.width, inputs)
        outputs = (classes,) if classes > 2 else ()
        rows = memory.shape(copies, n, inputs), memory.shape(copies, n, *outputs)
        alpha = memory.shape(copies, choices)

        def longer_training(alpha, w, curvatures, train):
            task = ActivationTask(self._space(), w, curvatures, train, train, train)
            way = solver(task, _LONGER * config.inner_steps, rate=config.weight_rate)
            lower = stack_problems(task.space.problem).lower
            return way.run(lower, alpha, w, way.init(w), train)[0]

        with jax.enable_x64(True):
            x = memory.shape(n, inputs, dtype="float64")
            mixture = memory.shape(choices, dtype="float64")
            kernel = jax.eval_shape(
                lambda *a: hidden_layer_kernel(*a, config.activations), x, mixture
            )
        kept = memory.kept_for_backward(longer_training, alpha, w, alpha, rows)
        shapes = {
            ("seeds", "width"): [w] * (3 + choices),  # of every network, the start, momentum
            ("seeds", "width", "inner_steps"): kept,
            ("seeds", "steps"): [memory.shape(copies * config.steps, choices)],
            ("train",): kernel,
        }
        return [shapes]

    def _space(self) -> ActivationSpace:
        config = self.config
        space = activation_space(
            config.activations, width=config.width, classes=self.data.classes, outer=config.outer
        )
        assert isinstance(space, ActivationSpace)  # the width is finite
        return space

    def _task(self) -> ActivationTask:
        """Return data and initial weights of all seeds, over the devices."""
        config = self.config
        count_for(config.devices, config.seeds, "seeds")
        seeds = jax.random.split(jax.random.key(config.seed), config.seeds)
        keys = [jax.random.split(key) for key in seeds]  # of the rows, of the weights
        sizes = {"train": config.train, "valid": config.valid, "test": config.test}
        rows = self.data.draw([of_rows for of_rows, _ in keys], **sizes)
        space, weight_keys = self._space(), [of_weights for _, of_weights in keys]
        task = set_up(space, rows, weight_keys, classes=self.data.classes)
        # Curvatures stay on one device, because solvers use them as constants.
        w0, *parts = spread_over_devices(
            config.devices, config.seeds, "seeds", (task.w0, *task[3:])
        )
        return ActivationTask(task.space, w0, task.curvatures, *parts)

    def result(self) -> tuple[Result, dict[str, Any]]:
        config, task = self.config, self._task()
        names, seeds = task.space.names, len(task.w0)
        training = solver(task, config.inner_steps, config.solver, config.weight_rate)
        # numpy makes constants of the host, so that no programs are compiled for them.
        dtype = task.w0.dtype
        uniform = jax.device_put(np.full((seeds, len(names)), 1 / len(names), dtype))
        self.bars.enter("search")
        search_result = bilevel.search(
            stack_problems(_with_losses_as_aux(task.space.problem)),
            training,
            _optimizer(config.geometry, config.alpha_rate),
            uniform,
            task.w0,
            task.train,
            task.valid,
            steps=config.steps,
            progress=False,
            callback=_loss_callback(self.bars, config.steps, seeds),
            history=("alpha", "aux", "grad_norm", "lower", "value"),  # also a large alpha
            checkpoint=self.folder / "checkpoint",
            resume=config.resume,
        )
        if search_result.stopped:
            raise KeyboardInterrupt(search_result.stopped)
        searched = self.seconds()
        search_result = dataclasses.replace(
            search_result, alpha=here(search_result.alpha), w=here(search_result.w)
        )
        self.bars.enter("retraining")
        vertices = np.eye(len(names), dtype=dtype)[:, None].repeat(seeds, axis=1)
        alphas = dict(zip(("search", *names), (search_result.alpha, *vertices), strict=True))
        show, networks = self.bars.loop(len(alphas), "{network}"), {}
        for i, (name, alpha) in enumerate(alphas.items(), 1):
            w = jax.block_until_ready(train_weights(task, training, alpha))
            networks[name] = here(w), alpha
            show(i, lambda name=name: {"network": name})  # type: ignore[misc]
        self.bars.enter("joint training")
        networks["joint training"] = here(_train_jointly(config, task, uniform, self.bars))
        self.bars.enter("certificates")
        task = ActivationTask(task.space, *here(tuple(task[1:])))
        verdict = judge_argmax(
            task, search_result.alpha, networks["search"][0], [networks[n] for n in names]
        )
        show, rows = self.bars.loop(len(networks), "{network}"), {}
        for i, (name, network) in enumerate(networks.items(), 1):
            rows[name] = _errors_and_eigenvalues(task, *network)
            show(i, lambda name=name: {"network": name})  # type: ignore[misc]
        result = _summarize_scores(names, np.asarray(search_result.alpha), rows)
        result["seconds"] = {"search": searched, "all": self.seconds()}
        self.bars.enter("error of the hypergradient")
        longer = solver(task, _LONGER * config.inner_steps, rate=config.weight_rate)
        gap = hypergradient_error(task, training, longer, search_result.alpha)
        result["hypergradient"] = {name: x.tolist() for name, x in gap._asdict().items()}
        result["argmax"] = argmax_advice.verdict_entries(task, verdict)
        if search_result.report.compared:
            result["predicted_ratio"] = float(search_result.report.ratio)
        self.search_result = search_result
        arrays = {"alpha": search_result.alpha, "w": search_result.w}
        return result, arrays | {f"history_{k}": v for k, v in self._history().items()}

    def _history(self) -> dict[str, np.ndarray]:
        """Return the history, with the losses of each seed [steps, seeds]."""
        history = dict(self.search_result.history)
        history |= {f"{name}_of_seeds": loss for name, loss in history.pop("aux").items()}
        return jax.tree.map(np.asarray, history)

    def save_figures(self, result: Result) -> None:
        names, config, history = result["names"], result["config"], self._history()
        losses = history["outer_of_seeds"].T, history["lower_of_seeds"].T
        runs = [{"value": value, "lower": lower} for value, lower in zip(*losses, strict=True)]

        def draw(figure):
            axes = figure.subplot_mosaic(
                [["alpha", "outer"], ["alpha", "lower"]], width_ratios=(5, 4)
            )
            uniform = np.full(len(names), 1 / len(names))
            plots.alpha_path(history["alpha"], names, axes["alpha"], start=uniform)
            outer, lower = plots.losses(runs, (axes["outer"], axes["lower"]))
            outer.set_ylabel(f"validation loss\n({config['outer']})")
            lower.set_ylabel("training loss\n(squared)")
            figure.suptitle(report.figure_title(config))

        report.save_figure(self.folder / self.figure, (11, 4.4), draw)

    def show(self, console: Console, result: Result) -> tuple[str, str]:
        config, seeds = result["config"], result["config"]["seeds"]
        title, ends = report.table_title(config), ("search", result["names"][-1])
        best = result["best_single"]
        table = report.score_table(title, result["scores"], _COLUMNS, ends=ends, starred=best)
        console.print(table)
        console.print(
            "* the single activation with the smallest test error; λ_min ≥: certified lower bound "
            "for the infinite-width kernel of the training rows, whose entries are exact to "
            f"{result['entry_error']:.0e}"
        )
        mixture = report.mixture(np.mean(result["alpha"], axis=0), result["names"])
        console.print(f"α found: {mixture}" + (" (mean over seeds)" if seeds > 1 else ""))
        console.print(argmax_advice.describe_advice(result))
        console.print(argmax_advice.theory(result["argmax"]))
        norm, off = (np.asarray(result["hypergradient"][k]) for k in ("norm", "error"))
        relative = np.divide(off, norm, out=np.zeros_like(off), where=off > 0)
        console.print(
            f"hypergradient error at this α: {report.cell(100 * relative, '.0f')} % (compared with "
            f"training {_LONGER} times as long)"
        )
        if "predicted_ratio" in result:
            console.print(
                "the validation loss changed by the hypergradients' prediction times "
                f"{result['predicted_ratio']:.2g} (1 would be exact)"
            )
        seconds = result["seconds"]
        times = f"{seconds['all']:.0f} s, of which search {seconds['search']:.0f} s"
        report.print_next(console, self.folder)
        return _result_sentence(result), times


def _optimizer(geometry: str, rate: float) -> optax.GradientTransformation:
    adam = optax.adam(rate)
    if geometry == "softmax":
        return bilevel.softmax(adam)
    if geometry == "project":
        # Adam moves every entry by its rate, but the simplex has width 1.
        slower = optax.scale(0.1)
        return optax.chain(bilevel.tangent(), adam, slower, bilevel.project("simplex"))
    return optax.chain(bilevel.tangent(), adam, bilevel.exponentiate())


def _with_losses_as_aux(problem: bilevel.Problem) -> bilevel.Problem:
    """Return the problem with its losses as auxiliary outputs, which records each seed's loss."""

    def twice(loss):
        return lambda w, alpha, batch: (loss(w, alpha, batch),) * 2

    return bilevel.Problem(twice(problem.lower), twice(problem.outer), has_aux=True)


def _loss_callback(bars: Phases, steps: int, seeds: int) -> Callable[[bilevel.SearchResult], None]:
    """Return a callback that shows the losses' means over the seeds."""
    show = bars.loop(steps, "train {lower:.4g}  valid {value:.4g}")

    def callback(so_far):
        last = {k: float(np.asarray(so_far.history[k])[-1]) / seeds for k in ("lower", "value")}
        show(len(so_far.history["value"]), lambda: last)

    return callback


def _train_jointly(
    config: Search, task: ActivationTask, alpha: jax.Array, bars: Phases
) -> tuple[jax.Array, jax.Array]:
    """Train on a single level: weights and α descend the training loss together."""
    steps = _JOINT_EPOCHS * config.inner_steps
    rate = config.weight_rate or 1 / np.asarray(task.curvatures).max(axis=-1)[:, None, None]
    lower, show = stack_problems(task.space.problem).lower, bars.loop(steps, "")
    result = bilevel.search(
        bilevel.Problem(lower, lower),
        bilevel.unrolled(optax.sgd(rate, 0.9, nesterov=True), 1, backprop=0),
        _optimizer(config.geometry, config.alpha_rate),
        alpha,
        task.w0,
        task.train,
        task.train,
        steps=steps,
        progress=False,
        callback=lambda so_far: show(len(so_far.history["value"]), dict),
    )
    if result.stopped:
        raise KeyboardInterrupt
    return result.w, result.alpha


def _errors_and_eigenvalues(
    task: ActivationTask, w: jax.Array, alpha: jax.Array
) -> dict[str, np.ndarray]:
    """Return errors and losses of trained networks, and eigenvalues of kernels; [seeds] each."""
    parts = {"train": task.train, "valid": task.valid, "test": task.test}
    scores = _errors_and_losses(task.space, w, alpha, parts)
    rows = zip(np.asarray(task.train[0]), np.asarray(alpha), strict=True)
    eigenvalues = [kernel_eigenvalue(x, task.space.names, a) for x, a in rows]
    columns = "min_eigenvalue", "certified_min_eigenvalue", "entry_error"
    scores |= zip(columns, np.transpose(eigenvalues), strict=True)
    return {name: np.asarray(x) for name, x in scores.items()}


@functools.partial(jax.jit, static_argnums=0)
def _errors_and_losses(
    space: ActivationSpace, w: jax.Array, alpha: jax.Array, parts: dict[str, Any]
) -> dict[str, jax.Array]:
    def error(w, alpha, batch):
        x, y = batch
        return jnp.mean(wrong_rows(space.predict, space.apply(w, alpha, x), space.predict(y)))

    scores = {f"{name}_error": jax.vmap(error)(w, alpha, part) for name, part in parts.items()}
    scores["train_loss"] = jax.vmap(space.problem.lower)(w, alpha, parts["train"])
    scores["valid_loss"] = jax.vmap(space.problem.outer)(w, alpha, parts["valid"])
    return scores


def kernel_eigenvalue(x: Any, names: tuple[str, ...], alpha: Any) -> tuple[float, float, float]:
    """Return the smallest eigenvalue of ``K_alpha``, its certified bound, and the entries' error.

    This is the kernel of Oymak et al. 2021, section 4.2: the network has one hidden layer of
    infinite width with trained weights and activation ``sum_i alpha_i s_i``. The inputs ``x`` are
    unit vectors. The bound holds for all kernels within the error, so it is always in float64.
    """
    with jax.enable_x64(True):
        x, alpha = (np.asarray(a, float) for a in (x, alpha))
        kernel, error = map(np.asarray, hidden_layer_kernel(x, alpha, names))
    (value,) = scipy.linalg.eigvalsh(kernel, subset_by_index=[0, 0])
    return float(value), certified_min_eigenvalue(kernel, error), float(error.max())


@functools.partial(jax.jit, static_argnames="names")
def hidden_layer_kernel(x, alpha, names):
    """Return the kernel and the errors of its entries.

    One program serves all ``alpha``. A program of all pairs of activations compiles three times as
    long.
    """
    layer: dict[Activation, Any] = {}
    for name, weight in zip(names, alpha, strict=True):
        layer[ACTIVATIONS[name]] = layer.get(ACTIVATIONS[name], 0.0) + weight
    kernels = ntk.network_kernel(x, activations=[layer], variances=(1.0, 1.0))
    # The NNGP is the part of the output weights; both kernels have the error.
    kernel = kernels.ntk - kernels.nngp
    return kernel, 2 * kernels.error


def _summarize_scores(names, alpha, rows) -> dict[str, Any]:
    means = {name: float(rows[name]["test_error"].mean()) for name in names}
    best = min(means, key=lambda name: means[name])
    gap = rows["search"]["test_error"] - rows[best]["test_error"]
    return {
        "names": list(names),
        "alpha": alpha.tolist(),
        "scores": {row: {k: v.tolist() for k, v in s.items()} for row, s in rows.items()},
        "best_single": best,
        "gap": [float(gap.mean()), report.standard_error_over_seeds(gap)],
        "entry_error": max(float(s["entry_error"].max()) for s in rows.values()),
    }


def _result_sentence(result: dict[str, Any]) -> str:
    best, rows = result["best_single"], result["argmax"]["test_rows"]
    ours, single = (np.array(result["scores"][k]["test_error"]) for k in ("search", best))
    return (
        f"test error {100 * ours.mean():.1f} % with the search, {100 * single.mean():.1f} % with "
        f"{best}, the best single activation: {report.compare_errors(ours, single, rows)}."
    )
