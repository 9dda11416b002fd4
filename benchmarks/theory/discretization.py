"""Is the largest alpha the best choice, and does the geometry of alpha matter?

Roberts et al.: if Condition 6 holds, the activation with the largest alpha is the best one at the
shared weights. Li et al. (GAEA): exponentiated gradient is faster and sparser than softmax (DARTS).

1. Random instances under the theorem's assumptions: outputs f_i of three kinds, alpha uniform on
   the simplex, y = f_alpha. How often is argmax alpha best, with and without the condition?
2. Searches among six activations on images, in a finite network and at infinite width: is argmax
   alpha best at the shared weights, and best of the networks trained for one activation each?
3. The same searches by softmax, exponentiated gradient and projection, each with plain gradient
   descent and with Adam: where do they end, after how many steps, and how sparse is alpha?

Losses are squared errors, and the best activation is decided on test rows. Every lower problem
starts from the same weights, so all methods descend the same function of alpha. A method's learning
rate is the one of its grid with the smallest final validation loss, averaged over seeds that are
used for nothing else.

    python benchmarks/theory/discretization.py            # ten minutes on two cores
"""

import functools
import itertools
import json
import math
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.stats

import bilevel
import bilevel.data
from benchmarks import harness
from benchmarks.harness import spread
from bilevel import LowerSolver
from bilevel.discretize import condition_six
from bilevel.spaces import activation_space, unit_inputs
from bilevel.spaces.activations import ACTIVATIONS
from bilevel.spaces.targets import predict_labels, sign_labels

MEASURES = ("bilevel/discretize", "bilevel/spaces/activations.py", "bilevel/spaces/targets.py")

NAMES = ("relu", "leaky_relu", "sigmoid", "tanh", "swish", "gelu")
UNIFORM, PENALTY = np.full(len(NAMES), 1 / len(NAMES), np.float32), 0.01


class Sizes(NamedTuple):
    instances: int = 4000  # of each kind and each h = 2, ..., 6
    data: tuple[str, ...] = ("digits", "fashion-mnist")
    widths: tuple[float, ...] = (64, math.inf)
    rows: int = 150  # for training, and the same number for validation
    test: int = 400
    inner_steps: int = 30
    steps: int = 30
    tuning: int = 3  # seeds
    seeds: int = 12


SMOKE = Sizes(20, ("digits",), (16,), rows=20, test=20, inner_steps=2, steps=2, tuning=2, seeds=2)
QUICK = Sizes(400, ("digits",), (32,), rows=100, inner_steps=15, steps=15, tuning=2, seeds=4)

# ----------------------------------------------------------------------------- 1. random instances


def gaussian(rng, count, h):
    return rng.normal(size=(count, h, h))


def correlated(rng, count, h):
    """Draw functions as similar as ReLU-like ones: correlation 0.9, scales apart by about e."""
    own, common = rng.normal(size=(count, h, h)), rng.normal(size=(count, h, 1))
    return (0.9**0.5 * common + 0.1**0.5 * own) * np.exp(rng.normal(size=(count, 1, h)) / 2)


def activations(rng, count, h, width=16, n=64):
    """Draw random activations on one random hidden layer, with inputs on the unit sphere of R^8."""
    x, w = rng.normal(size=(count, n, 8)), rng.normal(size=(count, width, 8))
    z = x / np.linalg.norm(x, axis=-1, keepdims=True) @ np.swapaxes(w, 1, 2)
    signs = np.where(np.arange(width) % 2, 1, -1) / width**0.5
    every = np.stack([s(z) @ signs for s in ACTIVATIONS.values()], axis=-1)
    picks = rng.permuted(np.tile(np.arange(len(ACTIVATIONS)), (count, 1)), axis=1)[:, None, :h]
    return np.take_along_axis(every, picks, axis=-1)


KINDS = {"Gaussian": gaussian, "correlated": correlated, "activations": activations}


@jax.jit
@jax.vmap
def compare_choices(f, alpha):
    verdict = condition_six(f, alpha, f @ alpha)
    holds = verdict.difference >= -1e-10 * verdict.D.max()  # D_1 = D_2 for h = 2, up to rounding
    better, larger = verdict.L[:, None] < verdict.L, alpha[:, None] > alpha
    best, condition = verdict.argmax == jnp.argmin(verdict.L), holds[:, verdict.argmax].all()
    return {
        "pairs": better.sum(),
        "pairs, condition": (better & holds).sum(),
        "pairs, conclusion": (better & larger).sum(),
        "violations": (better & holds & ~larger).sum(),
        "best": best,
        "condition": condition,
        "best, condition": best & condition,
    }


def instances(kind: str, h: int, count: int) -> dict:
    """Return counts. The rows of an instance are its whole population, so every case is decided."""
    rng = np.random.default_rng(h)
    with jax.enable_x64(True):
        # Only F = E f f' matters: h rows are enough.
        f = np.linalg.qr(KINDS[kind](rng, count, h), mode="r")
        outcomes = compare_choices(f, rng.dirichlet(np.ones(h), count))
        counts = {name: int(x.sum()) for name, x in outcomes.items()}
    return {"part": "instances", "kind": kind, "h": h, "instances": count} | counts


# ----------------------------------------------------------------------------- 2. searches


class Task(NamedTuple):
    """A search; ``data`` has everything that differs between seeds: w0, train, valid, test, ..."""

    problem: bilevel.Problem
    solver: Callable  # data -> LowerSolver
    outputs: Callable  # (w, alpha, x) -> [n, h, classes], of each activation at the shared w
    prepare: Callable  # (key, x of training rows) -> fields of data in addition to the rows
    inputs: Callable  # (x, x of training rows) -> inputs of the losses


@functools.cache
def finite(width: int, inner_steps: int) -> Task:
    space = activation_space(NAMES, width=width, classes=10, outer="squared")

    def prepare(key, x):
        w0 = space.init(key, (x, None))
        return {"w0": w0, "curvatures": jax.jit(space.curvatures)(w0, x)}

    def outputs(w, alpha, x):
        return jax.vmap(lambda e: space.apply(w, e, x), out_axes=1)(jnp.eye(len(NAMES)))

    def solver(data):
        return space.solver(data["curvatures"], inner_steps)

    return Task(space.problem, solver, outputs, prepare, lambda x, _: x)


@functools.cache
def infinite() -> Task:
    """Return ridge regression in the tangent features phi_alpha = sum_i alpha_i phi_i.

    The shared weights are theta = sum_j alpha_j phi_j(X)'w, so ``f_i(x) = sum_j alpha_j K_ij(x, X)
    w``.
    """
    space = activation_space(NAMES, width=math.inf, classes=10, outer="squared")

    def fixed(fn):
        return lambda a, alpha, *b: fn(a, {"mixture": alpha, "log_penalty": jnp.log(PENALTY)}, *b)

    def outputs(w, alpha, blocks):
        return jnp.einsum("j,ijmn,no->mio", alpha, blocks, w)

    problem = bilevel.Problem(fixed(space.problem.lower), fixed(space.problem.outer))
    solver = LowerSolver(lambda w: (), fixed(space.solver.run), closed_form=True)
    prepare = lambda key, x: {"w0": jnp.zeros((len(x), 10))}  # noqa: E731
    return Task(problem, lambda data: solver, outputs, prepare, space.blocks)


def small(images):
    """Shrink Fashion-MNIST's images to 7 x 7 pixels, close to the 8 x 8 of digits."""
    n, side, _ = images.shape
    return images if side == 8 else images.reshape(n, 7, side // 7, 7, side // 7).mean((2, 4))


def seeds_of(task: Task, name: str, sizes: Sizes, count: int, seed: int) -> dict:
    """Return the stacked data of ``count`` seeds."""
    keys = [jax.random.split(key) for key in jax.random.split(jax.random.key(seed), count)]
    counts = {"train": sizes.rows, "valid": sizes.rows, "test": sizes.test}
    drawn, of_seeds = bilevel.data.draw_splits(name, [rows for rows, _ in keys], **counts), []
    for (_, key), parts in zip(keys, drawn, strict=True):
        xs = unit_inputs(*(small(x) for x, _ in parts))
        data = task.prepare(key, xs[0])
        for part, x, (_, y) in zip(("train", "valid", "test"), xs, parts, strict=True):
            data[part] = task.inputs(x, xs[0]), sign_labels(y, 10)
        of_seeds.append(data)
    return jax.tree.map(lambda *x: jnp.stack(x), *of_seeds)


def trained(task: Task, data: dict, alpha):
    solver, w0 = task.solver(data), data["w0"]
    return solver.run(task.problem.lower, alpha, w0, solver.init(w0), data["train"])[0]


def standalone(task: Task, data: dict):
    """Return test losses and errors [h] of networks trained for one activation each."""

    def one(alpha):
        w, (x, y) = trained(task, data, alpha), data["test"]
        f = jnp.einsum("nho,h->no", task.outputs(w, alpha, x), alpha)
        error = jnp.mean(predict_labels(f) != predict_labels(y))
        return {"loss": task.problem.outer(w, alpha, data["test"]), "error": error}

    return jax.lax.map(one, jnp.eye(len(NAMES)))


def examined(task: Task, data: dict, alpha):
    """Evaluate each activation at the weights shared at ``alpha``, on the test rows."""
    x, y = data["test"]
    verdict = condition_six(task.outputs(trained(task, data, alpha), alpha, x), alpha, y)
    wanted = "condition", "nearest", "trust", "L", "L_alpha", "realizability", "stationarity"
    return {name: getattr(verdict, name) for name in wanted}


def slope(task: Task, data: dict, alpha):
    fn = bilevel.hypergradient(task.problem, task.solver(data), diagnostics=False)
    return fn(alpha, data["w0"], data["train"], data["valid"])[:2]


# ----------------------------------------------------------------------------- 3. geometries

GEOMETRIES = {
    "exponentiated": lambda inner: optax.chain(bilevel.tangent(), inner, bilevel.exponentiate()),
    "softmax": bilevel.softmax,
    "projection": lambda inner: optax.chain(bilevel.tangent(), inner, bilevel.project("simplex")),
}
OPTIMIZERS = {"gradient": optax.sgd, "Adam": optax.adam}
RATES = {  # at finite and at infinite width
    ("exponentiated", "gradient"): ((1, 3, 10, 30), (30, 100, 300, 1000)),
    ("softmax", "gradient"): ((10, 30, 100), (100, 300, 1000, 3000)),
    ("projection", "gradient"): ((0.1, 0.3, 1, 3), (3, 10, 30)),
    ("exponentiated", "Adam"): ((0.1, 0.3, 1), (0.3, 1, 3)),
    ("softmax", "Adam"): ((0.1, 0.3, 1), (0.3, 1, 3)),
    ("projection", "Adam"): ((0.01, 0.03, 0.1, 0.3), (0.01, 0.03, 0.1, 0.3)),
}


@functools.cache
def compiled(fn: Callable, task: Task, seeds: int):
    """Map ``fn`` over the leading axis, ``seeds`` at a time; return numpy arrays."""
    run = jax.jit(jax.vmap(functools.partial(fn, task)))

    def all_of(*args):
        starts = range(0, len(args[0]["w0"]), seeds)
        parts = [run(*jax.tree.map(lambda x, i=i: x[i : i + seeds], args)) for i in starts]
        return jax.tree.map(lambda *x: np.concatenate(x), *parts)

    return all_of


@functools.partial(jax.jit, static_argnums=0)
def update(method: tuple[str, str], rate, grad, state, alpha):
    """Take a step of the method. With ``state`` None it is the first step."""
    descent = GEOMETRIES[method[0]](OPTIMIZERS[method[1]](rate))
    change, state = descent.update(grad, descent.init(alpha) if state is None else state, alpha)
    return optax.apply_updates(alpha, change), state


def descend(gradient: Callable, method: tuple[str, str], rate: float, data: dict, steps: int):
    """Return alphas [seeds, steps + 1, h] from the uniform one on, and their validation losses."""
    alpha, state, path = jnp.tile(UNIFORM, (len(data["w0"]), 1)), None, []
    for _ in range(steps + 1):
        value, grad = gradient(data, alpha)
        path.append((np.asarray(alpha), value))
        alpha, state = update(method, float(rate), grad, state, alpha)
    alphas, values = zip(*path, strict=True)
    return {"alphas": np.stack(alphas, 1), "values": np.stack(values, 1)}


def searches(name: str, width: float, sizes: Sizes) -> list[dict]:
    task = infinite() if width == math.inf else finite(int(width), sizes.inner_steps)
    tuning = seeds_of(task, name, sizes, sizes.tuning, seed=1)
    data = seeds_of(task, name, sizes, sizes.seeds, seed=0)
    gradient, judge = (compiled(fn, task, sizes.tuning) for fn in (slope, examined))
    alone, rows = compiled(standalone, task, sizes.tuning)(data), []
    for method, grids in RATES.items():
        grid = grids[width == math.inf]
        tried = [descend(gradient, method, rate, tuning, sizes.steps) for rate in grid]
        losses = [float(t["values"][:, -1].mean()) for t in tried]
        rate = grid[int(np.argmin(losses))]
        course = descend(gradient, method, rate, data, sizes.steps)
        row = {"part": "search", "data": name, "width": str(width), "method": method}
        row |= {"rate": rate, "rates": grid, "tuning losses": losses, "alone": alone}
        rows.append(row | course | judge(data, course["alphas"][:, -1]))
    return rows


# ----------------------------------------------------------------------------- the report


def percent(hits, chosen=True) -> str:
    """Format the share among the chosen. Rows are independent, columns (methods) need not be."""
    chosen = np.broadcast_to(chosen, hits.shape)
    total, hits = chosen.sum(), hits & chosen
    share = hits.sum() / max(total, 1)
    error = np.linalg.norm((hits - share * chosen).reshape(len(hits), -1).sum(1)) / max(total, 1)
    return f"{100 * share:.0f} ± {100 * error:.0f}" if total else "-"


class Found(NamedTuple):
    """All searches. The leading axes are settings, seeds and methods."""

    settings: list[tuple[str, str]]
    rates: np.ndarray  # [settings, methods], as strings
    x: dict[str, np.ndarray]

    def of(self, name, geometry, optimizer):
        """Return a field of these methods: [settings * seeds, ...]."""
        x = self.x[name][:, :, list(RATES).index((geometry, optimizer))]
        return x.reshape(-1, *x.shape[2:])


def collected(rows) -> Found:
    rows = harness.where(rows, part="search")
    settings = list(dict.fromkeys((r["data"], r["width"]) for r in rows))

    def stacked(values):
        values = np.array(values)
        return values.reshape(len(settings), len(RATES), *values.shape[1:]).swapaxes(1, 2)

    arrays = "alphas", "values", "condition", "trust", "L", "L_alpha", "stationarity"
    x = {name: stacked([r[name] for r in rows]) for name in arrays}
    loss, error = (stacked([r["alone"][k] for r in rows]) for k in ("loss", "error"))
    alpha = x["alphas"][..., -1, :]
    picks, shared = alpha.argmax(-1, keepdims=True), x["L"].argmin(-1, keepdims=True)
    picked, chosen = (np.take_along_axis(loss, i, -1)[..., 0] for i in (picks, shared))
    near = x["values"] <= 1.01 * x["values"].min(axis=(2, 3), keepdims=True)
    x |= {
        "picks": picks[..., 0],
        "best at shared weights": (picks == shared)[..., 0],
        "best alone": picked == loss.min(-1),
        "least error alone": np.take_along_axis(error, picks, -1)[..., 0] <= error.min(-1),
        "best at shared weights is best alone": chosen == loss.min(-1),
        "excess loss": picked / loss.min(-1) - 1,
        "gap": x["stationarity"] / x["L_alpha"],
        "steps": np.where(near.any(-1), near.argmax(-1), near.shape[-1]),
        "reached": near.any(-1),
        "entropy": -np.sum(x["alphas"] * np.log(np.maximum(x["alphas"], 1e-30)), axis=-1),
        "entries": (alpha > 0.01).sum(-1),
    }
    scores = {"α": alpha, "shared": -x["L"], "alone": -loss}
    for a, b in (("α", "shared"), ("α", "alone"), ("shared", "alone")):
        for fn in (scipy.stats.kendalltau, scipy.stats.spearmanr):
            pairs = zip(*(scores[s].reshape(-1, len(NAMES)) for s in (a, b)), strict=True)
            x[f"{a}, {b}, {fn.__name__}"] = np.reshape([fn(*p)[0] for p in pairs], alpha.shape[:3])
    edge = [r["rate"] in (r["rates"][0], r["rates"][-1]) for r in rows]
    rates = [f"{r['rate']:g}" + " (edge)" * e for r, e in zip(rows, edge, strict=True)]
    return Found(settings, np.reshape(rates, (len(settings), -1)), x)


ASKED = "best at shared weights", "best alone", "least error alone"
MORE = "best at shared weights is best alone"


def instance_table(rows) -> str:
    head = ["instances", "ordered pairs", "Condition 6, %", "conclusion, %", "violations"]
    head += ["argmax best, %", "Condition 6 for argmax, %", "argmax best without it, %"]
    lines = []
    for kind in KINDS:
        mine = harness.where(rows, kind=kind)
        n = {k: sum(r[k] for r in mine) for k, v in mine[0].items() if not isinstance(v, str)}
        of = [(n[k], n["instances"]) for k in ("best", "condition")]
        of.append((n["best"] - n["best, condition"], n["instances"] - n["condition"]))
        line = [kind, n["pairs"]]
        line += [f"{100 * n[f'pairs, {k}'] / n['pairs']:.1f}" for k in ("condition", "conclusion")]
        shares = [(k / m, (k / m * (1 - k / m) / m) ** 0.5) for k, m in of]
        shown = [f"{100 * p:.1f} ± {100 * e:.1f}" for p, e in shares]
        lines.append([*line, n["violations"], *shown])
    return harness.table(head, lines)


def search_table(rows) -> str:
    collection = collected(rows)
    x, ranked = collection.x, [k for k in collection.x if k.endswith("kendalltau")]
    head = ["all methods", *(f"argmax {k}, %" for k in ASKED), f"{MORE}, %"]
    head += ["argmax's excess loss, %", "gap / loss, median"]
    head += [f"{k.removesuffix(', kendalltau')}: τ (ρ)" for k in ranked]
    lines = []
    for i, setting in enumerate(collection.settings):
        line = [", ".join(setting), *(percent(x[k][i]) for k in (*ASKED, MORE))]
        line += [spread(x["excess loss"][i].mean(1), ".0f", 100), f"{np.median(x['gap'][i]):.3f}"]
        rho = [x[k.replace("kendalltau", "spearmanr")][i].mean() for k in ranked]
        taus = [spread(x[k][i].mean(1), ".2f") for k in ranked]
        lines.append(line + [f"{t} ({r:.2f})" for t, r in zip(taus, rho, strict=True)])
    return harness.table(head, lines)


def verdict_table(rows) -> str:
    x, lines = collected(rows).x, []
    for name in ("condition", "trust"):
        for value, word in ((1, "yes"), (0, "undecided"), (-1, "no")):
            chosen = (x[name] == value).reshape(-1, len(RATES))
            shares = [percent(x[k].reshape(chosen.shape), chosen) for k in ASKED]
            lines.append([f"{name}: {word}", chosen.sum(), *shares])
    return harness.table(["verdict", "searches", *(f"argmax {k}, %" for k in ASKED)], lines)


def method_table(rows) -> str:
    """Return means over the settings by method; standard errors over all searches."""
    collection, lines = collected(rows), []
    for method in RATES:
        names = "steps", "entropy", "entries", "reached"
        steps, entropy, entries, reached = (collection.of(name, *method) for name in names)
        cells = spread(steps, ".1f"), percent(reached), spread(entropy[:, -1])
        lines.append([", ".join(method), *cells, spread(entries, ".1f")])
    head = "method", "steps to 1 %", "reached, %", "entropy", "entries over 0.01"
    return harness.table(head, lines)


def verdicts(rows):
    collection = collected(rows)
    for optimizer in OPTIMIZERS:
        for a, b in itertools.combinations(("exponentiated", "softmax", "projection"), 2):
            picks = (collection.of("picks", geometry, optimizer) for geometry in (a, b))
            share = percent(np.not_equal(*picks))
            yield f"argmax of {a} and {b} differs, {optimizer}: {share} %"
    for ours, theirs in (("gradient", "gradient"), ("Adam", "Adam"), ("gradient", "Adam")):
        for claim, name, form in (("faster", "steps", ".1f"), ("sparser", "entropy", ".2f")):
            gap = collection.of(name, "exponentiated", ours)
            gap = gap - collection.of(name, "softmax", theirs)
            gap = gap if name == "steps" else gap[:, -1]
            z = gap.mean() / harness.standard_error(gap)
            word = "seen" if z < -2 else "the other way round" if z > 2 else "not clear"
            yield (
                f"exponentiated ({ours}) {claim} than softmax ({theirs}): {word} in this set-up; "
                f"{name} differ by {spread(gap, form)}"
            )


@harness.figure(2, 2, figsize=(12, 8))
def picture(rows, axes) -> None:
    collection = collected(rows)
    for i, kind in enumerate(KINDS):
        mine = [r for r in rows if r.get("kind") == kind and r["h"] > 2]  # h = 2: it always holds
        names = "h", "instances", "condition", "best", "best, condition"
        h, instances, condition, best, both = np.array([[r[k] for k in names] for r in mine]).T
        n, share = instances - condition, (best - both) / (instances - condition)
        error, label = 196 * (share * (1 - share) / n) ** 0.5, f"{kind}, Condition 6 fails"
        axes[0, 0].bar(h + 0.25 * (i - 1), 100 * share, 0.23, yerr=error, label=label)
    axes[0, 0].axhline(100, color="k", lw=1, ls="--", label="Condition 6 holds: always")
    axes[0, 0].set(xlabel="activations h", xticks=h, ylabel="argmax best at shared weights, %")
    axes[0, 0].set_title("random instances with y = f_α, 95 %")
    for i, name in enumerate((*ASKED, MORE)):
        x = 100 * collection.x[name].mean(-1)
        at, error = np.arange(len(x)) + 0.2 * (i - 1.5), 1.96 * x.std(1, ddof=1) / x.shape[1] ** 0.5
        label = name if name == MORE else f"argmax {name}"
        axes[0, 1].bar(at, x.mean(1), 0.18, yerr=error, label=label)
    axes[0, 1].axhline(100 / len(NAMES), color="k", lw=1, ls=":", label="chance")
    words = [f"{data}\nwidth {width.replace('inf', '∞')}" for data, width in collection.settings]
    axes[0, 1].set(xticks=range(len(words)), xticklabels=words, ylabel="% of searches")
    axes[0, 1].set_title("searches among six activations, all methods, 95 %")
    least = collection.x["values"].min(axis=(2, 3)).reshape(-1, 1)
    for geometry, optimizer in RATES:
        color, style = f"C{list(GEOMETRIES).index(geometry)}", "--" if optimizer == "Adam" else "-"
        look = {"color": color, "ls": style, "label": f"{geometry}, {optimizer}"}
        excess = 100 * (collection.of("values", geometry, optimizer) / least - 1)
        axes[1, 0].semilogy(excess.mean(0), **look)
        axes[1, 1].plot(collection.of("entropy", geometry, optimizer).mean(0), **look)
    axes[1, 0].set(xlabel="outer step", ylabel="validation loss over the best (%)")
    axes[1, 1].set(xlabel="outer step", ylabel="entropy of α (nats)")
    for ax in axes[0]:
        ax.set(ylim=(0, 140), yticks=range(0, 101, 20))
    for ax in axes.flat:
        ax.legend(fontsize=8, ncols=2 if ax in axes[0] else 1)


def report(rows) -> str:
    tables = instance_table, search_table, verdict_table, method_table
    parts = [make(rows) for make in tables]
    return "\n\n".join([*parts, "\n".join(f"- {line}" for line in verdicts(rows))])


def main() -> None:
    flags = harness.command_line(__file__, __doc__, report)
    sizes = {"smoke": SMOKE, "quick": QUICK, "default": Sizes()}[flags.size]
    start = time.perf_counter()
    counts = range(2, 4 if flags.smoke else 7)
    rows = [instances(kind, h, sizes.instances) for kind in KINDS for h in counts]
    for name in sizes.data:
        for width in sizes.widths:
            rows += searches(name, width, sizes)
    seconds = {"seconds": time.perf_counter() - start, "cpu seconds": time.process_time()}
    rows = [harness.environment("optax", **seconds, sizes=repr(sizes)), *rows]
    numbers = lambda x: np.asarray(x, float).round(6).tolist()  # noqa: E731
    rows = [json.loads(json.dumps(row, default=numbers)) for row in rows]
    harness.finish(rows, flags.results, report, picture)


if __name__ == "__main__":
    main()
