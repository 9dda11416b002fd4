"""``bilevel search``: activation search on real data, compared with its alternatives.

For every seed: the search, the network retrained at the α found, one network for each single
activation, and joint single-level training of weights and α on the training data alone.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilevel
from bilevel.cli.runtime import devices, memory, report
from bilevel.cli.runtime.command_run import CommandRun, Result
from bilevel.nets.evaluation import compare_errors, standard_error_over_seeds, wrong_rows
from bilevel.plots import plots
from bilevel.problem.problem import stack_problems
from bilevel.spaces.activations import ACTIVATIONS, ActivationSpace, activation_space
from bilevel.spaces.kernels import mixture_eigenvalue
from bilevel.strategies import activation_search as steps
from bilevel.strategies.activation_search import ActivationTask
from ntk.bounds.bound import rounded

_JOINT_EPOCHS = 10  # joint training takes as many times the inner steps of one lower solve
_LONGER = 4  # the hypergradient is compared with that of 4 times the inner steps

_COLUMNS: report.Columns = {
    "test_error": ("test", ".1f"),
    "valid_error": ("valid", ".1f"),
    "train_error": ("train", ".1f"),
    "valid_loss": ("valid loss", ".3g"),
    "train_loss": ("train loss", ".3g"),
    "certified_min_eigenvalue": ("λ_min ≥", lambda x: rounded(x.mean(), 3)),
}


class _SearchRun(CommandRun):
    """A search with its alternatives, for all seeds at once."""

    keeps = "the search so far is saved"
    trainable = True
    history: dict[str, np.ndarray]  # with the losses of each seed [steps, seeds]

    def prepare(self) -> None:
        config, classes = self.config, self.data.classes
        sizes: dict[str, Any] = {"width": config.width, "classes": classes, "outer": config.outer}
        self.space: Any = activation_space(config.activations, **sizes)

    def arrays(self) -> list[memory.Parts]:
        """Return the arrays alive together during the comparison with longer training."""
        config = self.config
        names, copies, n = config.activations, config.seeds, config.train
        inputs, classes = self.data.inputs, self.data.classes
        w = memory.shape(copies, config.width, inputs)
        outputs = (classes,) if classes > 2 else ()
        rows = memory.shape(copies, n, inputs), memory.shape(copies, n, *outputs)
        alpha = memory.shape(copies, len(names))

        def longer_training(alpha, w, curvatures, train):
            task = ActivationTask(self.space, w, curvatures, train, train, train)
            way = steps.solver(task, _LONGER * config.inner_steps, rate=config.weight_rate)
            lower = stack_problems(task.space.problem).lower
            return way.run(lower, alpha, w, way.init(w), train)[0]

        kept = memory.kept_for_backward(longer_training, alpha, w, alpha, rows)
        shapes = {
            ("seeds", "width"): [w] * (3 + len(names)),  # of every network, the start, momentum
            ("seeds", "width", "inner_steps"): kept,
            ("seeds", "steps"): [memory.shape(copies * config.steps, len(names))],
            ("train",): [memory.shape(n, n, dtype="float64")] * 2,  # the kernel and its errors
        }
        return [shapes]

    def _task(self) -> ActivationTask:
        """Return data and initial weights of all seeds, over the devices."""
        config = self.config
        devices.count_for(config.devices, config.seeds, "seeds")
        seeds = jax.random.split(jax.random.key(config.seed), config.seeds)
        keys = [jax.random.split(key) for key in seeds]  # of the rows, of the weights
        row_keys, weight_keys = zip(*keys, strict=True)
        sizes = {"train": config.train, "valid": config.valid, "test": config.test}
        rows = self.data.draw(row_keys, **sizes)
        task = steps.set_up(self.space, rows, weight_keys, classes=self.data.classes)
        # Curvatures stay on one device, because solvers use them as constants.
        arrays = task.w0, *task[3:]
        w0, *parts = devices.spread_over_devices(config.devices, config.seeds, "seeds", arrays)
        return ActivationTask(task.space, w0, task.curvatures, *parts)

    def result(self) -> tuple[Result, dict[str, Any]]:
        config, task = self.config, self._task()
        names, seeds = task.space.names, len(task.w0)
        training = steps.solver(task, config.inner_steps, config.solver, config.weight_rate)
        # numpy makes constants of the host, so that no programs are compiled for them.
        dtype = task.w0.dtype
        uniform = jax.device_put(np.full((seeds, len(names)), 1 / len(names), dtype))
        self.bars.enter("search")
        text = "train {lower:.4g}  valid {value:.4g}"
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
            callback=self.losses_in_the_bar(config.steps, text, seeds),
            history=("alpha", "aux", "grad_norm", "lower", "value"),  # also a large alpha
            checkpoint=self.folder / "checkpoint",
            resume=config.resume,
        )
        if search_result.stopped:
            raise KeyboardInterrupt(search_result.stopped)
        searched = self.seconds()
        last_alpha, last_w = devices.here((search_result.alpha, search_result.w))
        self.bars.enter("retraining")
        vertices = np.eye(len(names), dtype=dtype)[:, None].repeat(seeds, axis=1)
        alphas = dict(zip(("search", *names), (last_alpha, *vertices), strict=True))
        networks = {}
        for name, alpha in self._in_the_bar(alphas):
            w = jax.block_until_ready(steps.train_weights(task, training, alpha))
            networks[name] = devices.here(w), alpha
        self.bars.enter("joint training")
        networks["joint training"] = devices.here(self._train_jointly(task, uniform))
        self.bars.enter("certificates")
        task = ActivationTask(task.space, *devices.here(tuple(task[1:])))
        singles = [networks[name] for name in names]
        verdict = steps.judge_argmax(task, last_alpha, networks["search"][0], singles)
        bar = self._in_the_bar(networks)
        rows = {name: _errors_and_eigenvalues(task, *network) for name, network in bar}
        best = min(names, key=lambda name: float(rows[name]["test_error"].mean()))
        gap = rows["search"]["test_error"] - rows[best]["test_error"]
        result = {
            "names": list(names),
            "alpha": np.asarray(last_alpha).tolist(),
            "scores": {row: {k: v.tolist() for k, v in s.items()} for row, s in rows.items()},
            "best_single": best,
            "gap": [float(gap.mean()), standard_error_over_seeds(gap)],
            "entry_error": max(float(s["entry_error"].max()) for s in rows.values()),
            "seconds": {"search": searched, "all": self.seconds()},
        }
        self.bars.enter("error of the hypergradient")
        longer = steps.solver(task, _LONGER * config.inner_steps, rate=config.weight_rate)
        distance = steps.hypergradient_error(task, training, longer, last_alpha)
        result["hypergradient"] = {name: x.tolist() for name, x in distance._asdict().items()}
        result["argmax"] = _verdict_entries(task, verdict)
        if search_result.report.compared:
            result["predicted_ratio"] = float(search_result.report.ratio)
        history = dict(search_result.history)
        history |= {f"{name}_of_seeds": loss for name, loss in history.pop("aux").items()}
        self.history = jax.tree.map(np.asarray, history)
        arrays = {"alpha": last_alpha, "w": last_w}
        return result, arrays | {f"history_{k}": v for k, v in self.history.items()}

    def _train_jointly(self, task: ActivationTask, alpha: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Train on a single level: weights and α descend the training loss together."""
        config = self.config
        count = _JOINT_EPOCHS * config.inner_steps
        rate = config.weight_rate or 1 / np.asarray(task.curvatures).max(axis=-1)[:, None, None]
        lower, show = stack_problems(task.space.problem).lower, self.bars.loop(count, "")
        result = bilevel.search(
            bilevel.Problem(lower, lower),
            bilevel.unrolled(optax.sgd(rate, 0.9, nesterov=True), 1, backprop=0),
            _optimizer(config.geometry, config.alpha_rate),
            alpha,
            task.w0,
            task.train,
            task.train,
            steps=count,
            progress=False,
            callback=lambda so_far: show(len(so_far.history["value"]), dict),
        )
        if result.stopped:
            raise KeyboardInterrupt
        return result.w, result.alpha

    def _in_the_bar(self, items: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield the items, and show the names of finished ones."""
        show = self.bars.loop(len(items), "{network}")
        for i, (name, item) in enumerate(items.items(), 1):
            yield name, item
            show(i, functools.partial(dict, network=name))

    def draw(self, figure: Any, result: Result) -> None:
        names, config, history = result["names"], result["config"], self.history
        losses = history["outer_of_seeds"].T, history["lower_of_seeds"].T
        runs = [{"value": value, "lower": lower} for value, lower in zip(*losses, strict=True)]
        mosaic = [["alpha", "outer"], ["alpha", "lower"]]
        axes = figure.subplot_mosaic(mosaic, width_ratios=(5, 4))
        uniform = np.full(len(names), 1 / len(names))
        plots.alpha_path(history["alpha"], names, axes["alpha"], start=uniform)
        outer, lower = plots.losses(runs, (axes["outer"], axes["lower"]))
        outer.set_ylabel(f"validation loss\n({config['outer']})")
        lower.set_ylabel("training loss\n(squared)")
        figure.suptitle(report.figure_title(config))

    def show(self, result: Result) -> tuple[str, str]:
        config, seeds = result["config"], result["config"]["seeds"]
        title, ends = report.table_title(config), ("search", result["names"][-1])
        best = result["best_single"]
        table = report.score_table(title, result["scores"], _COLUMNS, ends=ends, starred=best)
        self.console.print(table)
        self.console.print(
            "* the single activation with the smallest test error; λ_min ≥: certified lower bound "
            "for the infinite-width kernel of the training rows, whose entries are exact to "
            f"{result['entry_error']:.0e}"
        )
        mixture = report.mixture(np.mean(result["alpha"], axis=0), result["names"])
        self.console.print(f"α found: {mixture}" + (" (mean over seeds)" if seeds > 1 else ""))
        self.console.print(describe_advice(result))
        self.console.print(_theory(result["argmax"]))
        norm, off = (np.asarray(result["hypergradient"][k]) for k in ("norm", "error"))
        relative = np.divide(off, norm, out=np.zeros_like(off), where=off > 0)
        self.console.print(
            f"hypergradient error at this α: {report.cell(100 * relative, '.0f')} % (compared with "
            f"training {_LONGER} times as long)"
        )
        if "predicted_ratio" in result:
            self.console.print(
                "the validation loss changed by the hypergradients' prediction times "
                f"{result['predicted_ratio']:.2g} (1 would be exact)"
            )
        seconds = result["seconds"]
        times = f"{seconds['all']:.0f} s, of which search {seconds['search']:.0f} s"
        ours, single = (np.array(result["scores"][k]["test_error"]) for k in ("search", best))
        verdict = compare_errors(ours, single, result["argmax"]["test_rows"])
        return (
            f"test error {100 * ours.mean():.1f} % with the search, {100 * single.mean():.1f} % "
            f"with {best}, the best single activation: {verdict}."
        ), times


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


def _errors_and_eigenvalues(task: ActivationTask, w, alpha) -> dict[str, np.ndarray]:
    """Return errors and losses of trained networks, and eigenvalues of kernels; [seeds] each."""
    parts = {"train": task.train, "valid": task.valid, "test": task.test}
    scores = _errors_and_losses(task.space, w, alpha, parts)
    rows = zip(np.asarray(task.train[0]), np.asarray(alpha), strict=True)
    activations = tuple(ACTIVATIONS[name] for name in task.space.names)
    eigenvalues = [mixture_eigenvalue(x, activations, a) for x, a in rows]
    columns = "min_eigenvalue", "certified_min_eigenvalue", "entry_error"
    scores |= zip(columns, np.transpose(eigenvalues), strict=True)
    return {name: np.asarray(x) for name, x in scores.items()}


@functools.partial(jax.jit, static_argnums=0)
def _errors_and_losses(space: ActivationSpace, w, alpha, parts) -> dict[str, jax.Array]:
    def error(w, alpha, batch):
        x, y = batch
        return jnp.mean(wrong_rows(space.predict, space.apply(w, alpha, x), space.predict(y)))

    scores = {f"{name}_error": jax.vmap(error)(w, alpha, part) for name, part in parts.items()}
    scores["train_loss"] = jax.vmap(space.problem.lower)(w, alpha, parts["train"])
    scores["valid_loss"] = jax.vmap(space.problem.outer)(w, alpha, parts["valid"])
    return scores


def _verdict_entries(task: ActivationTask, verdict: steps.ArgmaxVerdict) -> dict[str, Any]:
    """Return the entries of the verdict on the argmax in ``result.json``."""
    names = np.array(task.space.names)
    by = {
        name: {
            "as_good": judgement.as_good.tolist(),
            "rank": judgement.rank.tolist(),
            "best": names[judgement.best].tolist(),
            "alone": np.asarray(judgement.mean, float).tolist(),
            "mixture": np.asarray(verdict.mixture[name], float).tolist(),
        }
        for name, judgement in verdict.by.items()
    }
    return {
        "choice": names[verdict.choice].tolist(),
        "discretise": verdict.discretise.tolist(),
        "by": by,
        "valid_rows": task.valid[1].shape[1],
        "condition_six": verdict.condition_six.condition.tolist(),
        "stationarity": verdict.stationarity.tolist(),
        "test_rows": task.test[1].shape[1],
    }


def describe_advice(result: dict[str, Any]) -> str:
    """Say whether to use the argmax alone or keep the mixture."""
    argmax, names, outer = result["argmax"], result["names"], f"{result['config']['outer']} loss"
    seeds, yes = len(argmax["choice"]), sum(argmax["discretise"])
    rows = f"{argmax['valid_rows']} validation rows"
    if seeds > 1:
        return (
            f"argmax of α: use it alone in {yes} of {seeds} seeds, keep the mixture in "
            f"{seeds - yes} (alone, if retrained it is as good as every other activation, by "
            f"{outer} and by error on {rows})"
        )
    loss, error = ({k: v[0] for k, v in argmax["by"][by].items()} for by in ("loss", "error"))
    percent = dict(zip(names, (f"{100 * e:.1f} %" for e in error["alone"]), strict=True))
    choice, mixture = argmax["choice"][0], f"{100 * error['mixture']:.1f} %"
    if yes:
        return (
            f"argmax of α: use {choice} alone; retrained it has {percent[choice]} error on {rows}, "
            f"as good as every other activation by {outer} and by error (mixture: {mixture})"
        )
    by, at_fault, other = (outer, loss, error) if not loss["as_good"] else ("error", error, loss)
    second = "error" if by == outer else outer
    also = f", although as good as the first by {second}" if other["as_good"] else ""
    return (
        f"argmax of α: keep the mixture ({mixture} error on {rows}); {choice} retrained alone has "
        f"{percent[choice]} and is number {at_fault['rank']} of {len(names)} by {by}{also}; the "
        f"first by {by} is {at_fault['best']} ({percent[at_fault['best']]})"
    )


def _theory(argmax: dict[str, Any]) -> str:
    """Describe the conclusion of Roberts et al. at the shared weights."""
    seeds, condition = len(argmax["choice"]), argmax["condition_six"]
    words = {1: "holds", -1: "fails", 0: "is undecided"}
    verdict = words[condition[0]] if seeds == 1 else f"holds in {condition.count(1)} of {seeds}"
    stationarity = 100 * max(argmax["stationarity"])
    return (
        f"Condition 6 of Roberts et al., under which the argmax is the best at the shared weights: "
        f"{verdict} (95 % confidence, squared loss, {argmax['test_rows']} test rows); α is "
        f"stationary to {stationarity:.2g} % of this loss{' or less' if seeds > 1 else ''}"
    )
