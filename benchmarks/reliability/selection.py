"""Baselines, data, checkpoints, pictures: brute force over configurations, round trips."""

import functools
import math
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

import bilevel
from benchmarks.reliability.case import Case, first, near, that
from benchmarks.reliability.registry import generates
from bilevel import baselines, data
from bilevel.contracts import Evaluation, Shared
from bilevel.runs import checkpoint


def _selection(errors):
    def share(key, configs, probabilities, resource, *, whole=False):
        return Shared(np.array([errors[c] for c in configs]), np.full(len(configs), 10))

    return baselines.Selection(lambda key, config, resource: errors[config], share)


def _method(method, extra, rng, dtype) -> Case:
    count = int(rng.choice([1, 2, 7]))
    errors = rng.permutation(count) / 10 + 0.05
    arguments = {
        "key": jax.random.key(0),
        "configs": list(range(count)),
        "problem": _selection(errors),
        "budget": int(rng.choice([4, 100])),
    }
    kinds = {"key": "key", "configs": "sequence", "problem": "record", "budget": "count"} | {
        name: kind for name, (kind, _) in extra.items()
    }
    arguments |= {name: value for name, (_, value) in extra.items()}

    def call(key, configs, problem, budget, **options):
        return method(key, configs, problem, budget, progress=False, retrain_test=False, **options)

    def check(trace):
        # Noise-free: every method has to find the best; Hyperband, of those that it draws.
        seen = range(count)
        if method is baselines.hyperband:
            seen = np.unique(np.concatenate(trace.candidates))
        best = min(seen, key=lambda i: errors[i])
        return first(
            that(trace.best == best, f"best {trace.best} of errors {errors.tolist()}"),
            that(len(trace.calls) == len(trace.valid), "rows of different numbers"),
            "" if not len(trace.valid) else near("error", trace.valid[-1], errors[best], 1e-6),
        )

    fine = ("problem: a function",)
    return Case(call, arguments, check, kinds, fine=fine, answer=lambda t: (t.best, t.valid))


for _name, _extra in {
    "random_search": {"evaluations": ("count?", None)},
    "successive_halving": {"eta": ("positive", 2.0), "minimum": ("count", 1)},
    "hyperband": {"eta": ("positive", 3.0), "minimum": ("count", 1)},
    "weight_sharing": {},
    "fast_weight_sharing": {"growth": ("positive", math.sqrt(2))},
}.items():
    generates(f"bilevel.baselines.{_name}")(
        functools.partial(_method, getattr(baselines, _name), _extra)
    )


@generates("bilevel.baselines.exponentiated_gradient")
def exponentiated_gradient(rng, dtype) -> Case:
    case = _method(
        baselines.exponentiated_gradient,
        {"rounds": ("count", 60), "rate": ("positive", 5.0)},
        rng,
        dtype,
    )

    def check(trace):
        return that(0 <= trace.best < len(case.arguments["configs"]), f"best {trace.best}")

    return case._replace(check=check)


@generates("bilevel.baselines.random_search with errors that are not finite")
def broken_errors(rng, dtype) -> Case:
    """NaN for some configurations: the best of the others; for all: refused."""
    errors = rng.permutation(5) / 10.0
    errors[rng.random(5) < 0.5] = rng.choice([np.nan, np.inf, -np.inf])
    finite = np.isfinite(errors)
    method = [baselines.random_search, baselines.successive_halving][rng.integers(2)]
    call = functools.partial(method, jax.random.key(0), list(range(5)), progress=False)
    arguments = {"problem": lambda key, config, resource: float(errors[config]), "budget": 8}
    if not finite.any():
        return Case(call, arguments, lambda r: "", {}, mistake="no finite error")
    best = int(np.nanargmin(np.where(finite, errors, np.nan)))
    check = lambda trace: that(trace.best == best, f"best {trace.best} of {errors.tolist()}")
    return Case(call, arguments, check, {})


# ----------------------------------------------------------------------------- data


@generates("bilevel.data.load")
def load(rng, dtype) -> Case:
    def check(dataset):
        return first(
            that(len(dataset.x_train) == len(dataset.y_train) == size, "another number of rows"),
            that(
                dataset.x_train.min() >= 0 and dataset.x_train.max() <= 1, "pixels outside [0, 1]"
            ),
            that(set(np.unique(dataset.y_train)) <= set(range(10)), "other labels"),
        )

    size = int(rng.integers(1, 1438))
    kinds = {"name": "name", "train_size": "count?", "test_size": "count?"}
    return Case(data.load, {"name": "digits", "train_size": size, "test_size": None}, check, kinds)


@generates("bilevel.data.stratified_split")
def split(rng, dtype) -> Case:
    labels = rng.integers(0, int(rng.choice([1, 2, 10])), int(rng.choice([3, 50])))
    n = len(labels)
    first_part = int(rng.integers(1, n))
    sizes = (first_part, int(rng.integers(1, n - first_part + 1)))

    def check(parts):
        rows = np.concatenate(parts)
        counts = [[np.sum(labels[p] == c) for c in np.unique(labels)] for p in parts]
        ideal = [[len(p) * np.mean(labels == c) for c in np.unique(labels)] for p in parts]
        return first(
            that(len(set(rows.tolist())) == len(rows) == sum(sizes), "parts overlap"),
            that(np.all(abs(np.array(counts) - ideal) < 1), "classes out of proportion"),
        )

    kinds = {"key": "key", "labels": "array", "sizes": "sequence"}
    arguments = {"key": jax.random.key(int(rng.integers(9))), "labels": labels, "sizes": sizes}
    fine = ("labels: nan", "labels: inf", "labels: complex", "labels: a scalar")
    kinds = {"key": "key", "sizes": "sequence"}
    return Case(data.stratified_split, arguments, check, kinds, fine=fine)


# ----------------------------------------------------------------------------- checkpoints


def _drawn_tree(rng):
    dtypes = [np.float64, np.float32, np.int32, np.bool_, np.uint8]
    shapes = [(), (3,), (2, 0), (2, 3)]
    leaves = [
        (rng.normal(size=shapes[rng.integers(4)]) * 100).astype(dtypes[rng.integers(5)])
        for _ in range(int(rng.integers(1, 5)))
    ]
    leaves = [x if x.size else np.ones(2) for x in leaves]
    return {"a": leaves[0], "rest": tuple(leaves[1:])}


@generates(
    "bilevel.runs.checkpoint.save",
    "bilevel.runs.checkpoint.restore",
    "bilevel.runs.checkpoint.latest",
)
def checkpoints(rng, dtype) -> Case:
    tree, step = _drawn_tree(rng), int(rng.integers(0, 1000))

    def call(step, tree):
        with tempfile.TemporaryDirectory() as folder:
            checkpoint.save(folder, step, tree)
            like = jax.tree.map(np.zeros_like, tree)
            return checkpoint.latest(folder), checkpoint.restore(folder, like)

    def check(restored):
        same = all(
            np.asarray(a).dtype == np.asarray(b).dtype and np.array_equal(a, b)
            for a, b in zip(jax.tree.leaves(restored[1]), jax.tree.leaves(tree), strict=True)
        )
        return first(that(restored[0] == step, f"step {restored[0]}"), that(same, "another tree"))

    return Case(call, {"step": step, "tree": tree}, check, {"step": "whole"})


@generates("bilevel.runs.checkpoint.restore of another tree")
def other_checkpoints(rng, dtype) -> Case:
    """Another structure, another shape of the same bytes, another dtype of the same bytes."""
    others = {
        "a leaf more": ({"a": np.ones(4)}, {"a": np.ones(4), "b": np.ones(1)}),
        "another shape": ({"a": np.ones((2, 3))}, {"a": np.ones((3, 2))}),
        "another dtype": ({"a": np.ones(4)}, {"a": np.ones(4, np.int64)}),
        "another size": ({"a": np.ones(4)}, {"a": np.ones(5)}),
        "other names": ({"a": np.ones(2), "b": np.zeros(2)}, {"b": np.ones(2), "c": np.zeros(2)}),
    }
    what = str(rng.choice(list(others)))

    def call(checkpoint_tree, like):
        with tempfile.TemporaryDirectory() as folder:
            checkpoint.save(folder, 1, checkpoint_tree)
            return checkpoint.restore(folder, like)

    saved, like = others[what]
    arguments = {"checkpoint_tree": saved, "like": like}
    return Case(call, arguments, lambda r: "", {}, mistake=what)


# ----------------------------------------------------------------------------- pictures


def _plots():
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.close("all")
    return bilevel.plots


def _lines(ax) -> list:
    return [line.get_ydata() for line in ax.lines]


@generates("bilevel.plots.alpha_path")
def alpha_path(rng, dtype) -> Case:
    alpha = rng.dirichlet(np.ones(3), int(rng.integers(1, 6)))
    call = lambda alpha, names: _plots().alpha_path(alpha, names)
    check = lambda ax: near("lines", np.array(_lines(ax)).T, alpha, 1e-12)
    arguments = {"alpha": alpha, "names": ["a", "b", "c"]}
    return Case(call, arguments, check, {})


@generates("bilevel.plots.losses")
def losses(rng, dtype) -> Case:
    history = {k: rng.normal(size=4) for k in ("value", "lower")}
    call = lambda history: _plots().losses(history)
    truth = [history["value"], history["lower"]]
    check = lambda axes: near("lines", [_lines(ax)[0] for ax in axes], truth, 1e-12)
    return Case(call, {"history": history}, check, {})


@generates("bilevel.plots.error_estimates")
def error_estimates(rng, dtype) -> Case:
    steps, true, estimated = [1, 10, 100], 10 ** rng.normal(size=3), 10 ** rng.normal(size=3)
    call = lambda true, estimated: _plots().error_estimates(steps, true, {"cg": estimated})
    check = lambda ax: near("lines", _lines(ax), [true, estimated], 1e-12)
    return Case(call, {"true": true, "estimated": estimated}, check, {})


@generates("bilevel.plots.spectrum")
def spectrum(rng, dtype) -> Case:
    values = 10 ** rng.normal(size=5)
    call = lambda values: _plots().spectrum({"relu": values})
    check = lambda ax: near("line", _lines(ax)[0], np.sort(values)[::-1], 1e-12)
    return Case(call, {"values": values}, check, {})


@generates("bilevel.plots.simplex_min_eigenvalue")
def simplex_min_eigenvalue(rng, dtype) -> Case:
    alphas = np.vstack([np.eye(3), rng.dirichlet(np.ones(3), 5)])
    values = rng.uniform(0.1, 1, 8)
    call = lambda alphas, values: _plots().simplex_min_eigenvalue(alphas, values)
    check = lambda ax: near("colours", ax.collections[0].get_array(), values, 1e-12)
    return Case(call, {"alphas": alphas, "values": values}, check, {})


@generates("bilevel.plots.traces")
def traces(rng, dtype) -> Case:
    errors = rng.permutation(5) / 10 + 0.05
    evaluate = lambda key, c, resource: Evaluation(errors[c], errors[c])
    trace = baselines.random_search(
        jax.random.key(0), list(range(5)), evaluate, 8, retrain_test=True, progress=False
    )
    call = lambda methods, against: _plots().traces(methods, against)
    check = lambda ax: near("line", _lines(ax)[0], trace.test, 1e-12)
    return Case(call, {"methods": {"a": trace}, "against": "calls"}, check, {"against": "name"})


@generates("bilevel.plots.ranking")
def ranking(rng, dtype) -> Case:
    score, accuracy = rng.normal(size=8), rng.uniform(50, 90, 8)
    call = lambda score, accuracy: _plots().ranking(score, accuracy)
    ranks = score.argsort().argsort() + 1
    check = lambda ax: near(
        "ranks", np.asarray(ax.collections[0].get_offsets())[:, 0], ranks, 1e-12
    )
    return Case(call, {"score": score, "accuracy": jnp.asarray(accuracy)}, check, {})
