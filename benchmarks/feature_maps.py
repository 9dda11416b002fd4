"""Does weight sharing find good feature maps, and what does it save?  (Khodak et al. 2020)

Ridge regression on random Fourier features of CIFAR-10, or a squared-hinge SVM on hashed n-grams of
IMDb (smaller, three trials). Rows and the draw of the features are the same throughout, as the
paper's split is; every trial has its own configurations, the same for all methods, and its own
random choices.

1. Figure 1: validation accuracy of 32 configurations with shared weights against standalone ones.
2. Figures 2 and 3: oracle test error of the incumbent against solver calls, and against seconds.
   The oracle trains the incumbent for itself, with all features, outside the clock.
3. The same ridge problems by scikit-learn, and Hyperband by Optuna (dependency group `peers`).

Seconds are wall time on all cores, without compilation (a trial before the first is thrown away)
and without what all methods share: projections of all rows, hashes of all texts.

    python benchmarks/feature_maps.py                    # CIFAR-10, ten minutes on two cores
    python benchmarks/feature_maps.py --data imdb        # IMDb
    python benchmarks/feature_maps.py --data digits      # what --quick runs, in a minute
    python benchmarks/feature_maps.py --full             # the paper's sizes; for an accelerator
    python benchmarks/feature_maps.py --table            # the results files as Markdown
"""

import dataclasses
import functools
import importlib.util
import itertools
import sys
import time

import harness
import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

import bilevel.data
from bilevel import baselines, linear, plots
from bilevel.spaces import features


@dataclasses.dataclass(frozen=True)
class Sizes:
    train: int
    valid: int
    test: int
    dimension: int  # features of a full evaluation
    dimensions: tuple[int, ...]  # of Figure 1
    configs: int = 256
    trials: int = 10
    evaluations: int = 16  # of random search


SIZES = {
    "digits": Sizes(800, 500, 497, 256, (64, 256), configs=32, trials=3, evaluations=16),
    "cifar10": Sizes(6000, 2000, 2000, 2048, (256, 1024, 2048)),
    "imdb": Sizes(3000, 1500, 1500, 2**16, (2**12, 2**16), configs=64, trials=3),
}
FULL = {
    "cifar10": Sizes(40_000, 10_000, 10_000, 100_000, (1000, 10_000, 100_000), evaluations=256),
    "imdb": Sizes(25_000, 12_500, 12_500, 2**24, (2**12, 2**18, 2**24), evaluations=256),
}
COMPARED = 32  # configurations in Figure 1

METHODS = {
    "weight sharing": baselines.weight_sharing,
    "fast weight sharing": baselines.fast_weight_sharing,
    "random search": baselines.random_search,
    "successive halving": functools.partial(baselines.successive_halving, eta=4),
    "Hyperband": functools.partial(baselines.hyperband, eta=4),
}


def parts_of(data, sizes, key):
    wanted = sizes.train + sizes.valid
    if data == "digits":
        loaded = bilevel.data.load("digits")
        x = np.concatenate([loaded.x_train, loaded.x_test])
        y = np.concatenate([loaded.y_train, loaded.y_test])
        rows = bilevel.data.split(key, y, (sizes.train, sizes.valid, sizes.test))
        return [(x[r], y[r]) for r in rows]
    # IMDb's files have their rows in a random order already; CIFAR-10's first batches will do.
    size = -(-wanted // 10_000) * 10_000 if data == "cifar10" else None
    loaded = load(data, size)
    train, valid = bilevel.data.split(key, loaded.y_train, (sizes.train, sizes.valid))
    (test,) = bilevel.data.split(key, loaded.y_test, (sizes.test,))
    drawn = [(loaded.x_train[r], loaded.y_train[r]) for r in (train, valid)]
    return [*drawn, (loaded.x_test[test], loaded.y_test[test])]


load = functools.cache(lambda data, size: bilevel.data.load(data, train_size=size))


def problem_of(data, sizes, key):
    split_key, feature_key = jax.random.split(key)
    parts = parts_of(data, sizes, split_key)
    if data == "imdb":
        problem = features.text_selection(*parts)
        # Hash every text in every way.
        ways = itertools.product(*(features.CHOICES[name] for name in features.HASHING))
        every = [
            features.text_config(**dict(zip(features.HASHING, way, strict=True))) for way in ways
        ]
        problem.share(key, every, np.full(len(every), 1 / len(every)), 1024)
        return problem
    # Where it is large, room for the dual matrix [n, n], but not for all features at once (a
    # block takes a quarter); below, for projections of all rows.
    memory = 2**35 if sizes.train > 10_000 else 2**31
    return features.fourier_selection(feature_key, *parts, dimension=sizes.dimension, memory=memory)


def configs_of(data, key, count):
    sample = features.sample_text if data == "imdb" else features.sample_fourier
    return sample(key, count)


# ------------------------------------------------------------------------------ 1. correlation


def correlation(data, sizes, problem, key) -> list[dict]:
    """Shared-weight and standalone validation accuracy, a row for each dimension."""
    configs = configs_of(data, key, COMPARED)
    uniform = np.full(COMPARED, 1 / COMPARED)
    rows = []
    for dimension in sizes.dimensions:
        shared = problem.share(key, configs, uniform, dimension, whole=True).errors
        alone = [problem.evaluate(key, c, dimension).valid for c in configs]
        rows.append(
            {
                "part": "correlation",
                "dimension": dimension,
                "shared": (1 - shared).tolist(),
                "standalone": (1 - np.array(alone)).tolist(),
                "pearson": scipy.stats.pearsonr(shared, alone).statistic,
                "spearman": scipy.stats.spearmanr(shared, alone).statistic,
            }
        )
    return rows


# ------------------------------------------------------------------------------ 2. search


def search(data, sizes, problem, key) -> list[dict]:
    """A row for each method and trial; the first trial compiles, and is left out."""
    rows = []
    for trial in range(-1, sizes.trials):
        trial_key = jax.random.fold_in(key, trial + 1)
        configs = configs_of(data, trial_key, sizes.configs)
        for name, method in METHODS.items():
            options = {"evaluations": sizes.evaluations} if name == "random search" else {}
            if name in ("successive halving", "Hyperband"):
                options["minimum"] = max(1, sizes.dimension // 64)
            trace = method(
                jax.random.fold_in(trial_key, 0), configs, problem, sizes.dimension, **options,
                progress=False,
            )  # fmt: skip
            if trial >= 0:
                columns = "calls", "seconds", "resource", "valid", "test"
                arrays = {c: np.asarray(getattr(trace, c)).tolist() for c in columns}
                rows.append({"part": "search", "method": name, "trial": trial, **arrays})
                print(f"  trial {trial}: {name:20s} {arrays['calls'][-1]:4d} solves "
                      f"{arrays['seconds'][-1]:7.2f} s  test error "
                      f"{100 * arrays['test'][-1]:.1f} %", flush=True)  # fmt: skip
    return rows


# ------------------------------------------------------------------------------ 3. alternatives


def seconds_of(call) -> float:
    return float(np.median(harness.seconds(call)))


def ridge_solve(n, d, outputs=10, penalty=0.5) -> dict:
    """The same float32 ridge problem by the library and by scikit-learn."""
    from sklearn.linear_model import Ridge

    rng = np.random.default_rng(0)
    phi = (np.sqrt(2 / d) * np.cos(3 * rng.normal(size=(n, d)))).astype(np.float32)
    y = np.where(rng.random((n, outputs)) < 0.1, 1, -1).astype(np.float32)
    on_device = jnp.asarray(phi), jnp.asarray(y)
    solve = jax.jit(lambda phi, y: linear.ridge_weights(phi, y, penalty).w)
    product = jax.jit(lambda phi: phi.T @ phi)
    model = Ridge(penalty, fit_intercept=False, solver="cholesky")
    gram = phi.T.astype(float) @ phi + penalty * np.eye(d)
    truth = np.linalg.solve(gram, phi.T.astype(float) @ y)

    def error(w):
        return float(np.abs(w - truth).max() / np.abs(truth).max())

    return {
        "part": "ridge",
        "n": n,
        "dimension": d,
        "seconds": seconds_of(lambda: solve(*on_device)),
        "scikit-learn seconds": seconds_of(lambda: model.fit(phi, y).coef_),
        "matrix product seconds": seconds_of(lambda: product(on_device[0])),
        "error": error(np.asarray(solve(*on_device))),
        "scikit-learn error": error(model.coef_.T),
    }


def optuna_hyperband(sizes, key, seconds, target) -> dict:
    """Hyperband by Optuna, random features and ridge regression by scikit-learn.

    Stops once the validation error of a configuration at full dimension is ``target``, or after
    ``seconds``.
    """
    import optuna
    from sklearn.linear_model import Ridge
    from sklearn.preprocessing import MinMaxScaler, Normalizer, StandardScaler

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    parts = parts_of("cifar10", sizes, jax.random.split(key)[0])
    xs = [x.reshape(len(x), -1).astype(np.float32) for x, _ in parts]
    labels = [y for _, y in parts]
    targets = 2 * np.eye(10, dtype=np.float32)[labels[0]] - 1
    scalers = {"minmax": MinMaxScaler, "unit": Normalizer, "standardize": StandardScaler}
    lowest, curve, start = sizes.dimension // 64, [], time.perf_counter()

    def objective(trial):
        name = trial.suggest_categorical("preprocess", ["none", *scalers])
        kernel = trial.suggest_categorical("kernel", ["gaussian", "laplace"])
        gamma = trial.suggest_float("gamma", 1e-5, 10, log=True)
        scaler = scalers[name]().fit(xs[0]) if name in scalers else None
        held = [scaler.transform(x) if scaler else x for x in xs]
        rng, d = np.random.default_rng(0), lowest
        while True:
            shape = xs[0].shape[1], d
            draw = rng.normal(size=shape) if kernel == "gaussian" else rng.standard_cauchy(shape)
            scale = np.sqrt(2 * gamma) if kernel == "gaussian" else gamma
            w, b = (scale * draw).astype(np.float32), rng.uniform(0, 2 * np.pi, d)
            phis = [np.sqrt(2 / d) * np.cos(x @ w + b.astype(np.float32)) for x in held]
            model = Ridge(0.5, fit_intercept=False).fit(phis[0], targets)
            valid, test = (
                float(np.mean(model.predict(phi).argmax(1) != y))
                for phi, y in zip(phis[1:], labels[1:], strict=True)
            )
            if d >= sizes.dimension:
                curve.append((time.perf_counter() - start, valid, test))
                return valid
            trial.report(valid, d)
            if trial.should_prune():
                raise optuna.TrialPruned
            d = min(4 * d, sizes.dimension)

    def enough(study, trial):
        if (
            time.perf_counter() - start > seconds
            or min((v for _, v, _ in curve), default=1) <= target
        ):
            study.stop()

    pruner = optuna.pruners.HyperbandPruner(lowest, sizes.dimension, reduction_factor=4)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0), pruner=pruner)
    study.optimize(objective, callbacks=[enough])
    best = min(curve, key=lambda row: row[1]) if curve else (float("nan"),) * 3
    return {
        "part": "optuna",
        "seconds": time.perf_counter() - start,
        "trials": len(study.trials),
        "valid": best[1],
        "test": best[2],
        "target": target,
        "reached": best[1] <= target,
    }


def projection_seconds(sizes, key) -> float:
    """What all configurations share, and the searches leave out: projections of all rows."""
    configs = configs_of("cifar10", key, sizes.configs)
    uniform = np.full(sizes.configs, 1 / sizes.configs)

    def share(problem):
        start = time.perf_counter()
        problem.share(key, configs, uniform, sizes.dimension)
        return time.perf_counter() - start

    share(problem_of("cifar10", sizes, key))  # compiles
    problem = problem_of("cifar10", sizes, key)
    return share(problem) - share(problem)


def alternatives(sizes, key, searched) -> list[dict]:
    """Optuna gets the same rows, and five times the seconds that our first trial took."""
    rows = [ridge_solve(sizes.train, d) for d in (1024, 2048, 4096)]
    if importlib.util.find_spec("optuna") is None:
        print("  Optuna is not installed (dependency group `peers`): left out")
        return rows
    ours = of_method(searched, "Hyperband")[0]
    seconds = ours["seconds"][-1] + projection_seconds(sizes, key)
    found = optuna_hyperband(sizes, key, 5 * seconds, ours["valid"][-1])
    return [*rows, found | {"our seconds": seconds, "our test": ours["test"][-1]}]


# ------------------------------------------------------------------------------ the report


def at(row, against, limit, column="test"):
    """The value of a curve at ``limit``: NaN before its first point."""
    reached = np.searchsorted(row[against], limit, "right")
    return row[column][reached - 1] if reached else np.nan


def spread(x) -> str:
    return harness.spread(x, scale=100)


def of_method(rows, name):
    return sorted(harness.where(rows, part="search", method=name), key=lambda r: r["trial"])


def verdicts(rows) -> list[str]:
    """What the paper says, and what was measured here."""
    lines = []
    for row in harness.where(rows, part="correlation"):
        lines.append(
            f"shared and standalone accuracy, {row['dimension']} features, {COMPARED} "
            f"configurations: Pearson {row['pearson']:.2f}, Spearman {row['spearman']:.2f}"
        )
    sharing, fast, random, band = (
        of_method(rows, name)
        for name in ("weight sharing", "fast weight sharing", "random search", "Hyperband")
    )
    gap = [
        w["test"][-1] - at(r, "calls", w["calls"][-1]) for w, r in zip(sharing, random, strict=True)
    ]
    calls = sharing[0]["calls"][-1]
    lines.append(
        f"weight sharing minus random search after {calls} solves each: {spread(gap)} points"
    )
    gap = [f["test"][-1] - h["test"][-1] for f, h in zip(fast, band, strict=True)]
    ratio = [h["seconds"][-1] / f["seconds"][-1] for f, h in zip(fast, band, strict=True)]
    lines.append(
        f"fast weight sharing minus Hyperband, both to their ends: {spread(gap)} points, "
        f"Hyperband taking {np.mean(ratio):.1f} times as long"
    )
    at_time = [at(h, "seconds", f["seconds"][-1]) for f, h in zip(fast, band, strict=True)]
    gap = [f["test"][-1] - t for f, t in zip(fast, at_time, strict=True)]
    known = [g for g in gap if not np.isnan(g)]
    lines.append(
        "fast weight sharing minus Hyperband when the former ends: "
        + (f"{spread(known)} points" if known else "Hyperband has no incumbent yet")
        + f" ({len(known)} of {len(gap)} trials)"
    )
    return lines


def title(rows) -> str:
    head, sizes = rows[0], rows[0]["sizes"]
    return (
        f"{head['data']}: {sizes['configs']} configurations, up to {sizes['dimension']:,} "
        f"features, {sizes['train']:,} + {sizes['valid']:,} + {sizes['test']:,} rows, "
        f"{sizes['trials']} trials; {head['device']}."
    )


def method_table(rows) -> str:
    lines = []
    for name in METHODS:
        found = of_method(rows, name)
        calls, seconds = (np.mean([r[k][-1] for r in found]) for k in ("calls", "seconds"))
        test = spread([r["test"][-1] for r in found])
        lines.append([name, f"{calls:.0f}", f"{seconds:.1f}", test])
    return harness.table(["method", "solves", "seconds", "test error, %, ± s.e."], lines)


def ridge_table(rows) -> str:
    lines = []
    for r in harness.where(rows, part="ridge"):
        ours, theirs = r["seconds"], r["scikit-learn seconds"]
        lines.append(
            [
                f"{r['n']} x {r['dimension']}",
                f"{ours:.3f} s, {r['error']:.0e}",
                f"{theirs:.3f} s ({theirs / ours:.1f}×), {r['scikit-learn error']:.0e}",
                f"{r['matrix product seconds']:.3f} s",
            ]
        )
    head = "ridge, float32", "bilevel", "scikit-learn", "bare product Φ'Φ"
    return harness.table(head, lines)


def optuna(rows) -> str:
    (r,) = harness.where(rows, part="optuna")
    reached = "reached it" if r["reached"] else "had not reached it"
    times = r["seconds"] / r["our seconds"]
    return (
        f"Hyperband by Optuna with scikit-learn, one trial: {reached} (validation error "
        f"{100 * r['target']:.1f} %) after {r['seconds']:.0f} s and {r['trials']} "
        f"configurations, {times:.1f} times our {r['our seconds']:.1f} s (projections "
        f"included, as in its own time); test error "
        f"{100 * r['test']:.1f} % against {100 * r['our test']:.1f} %."
    )


def methods(rows) -> str:
    """The comparison of the methods, and what the paper says of them."""
    said = "\n".join(f"- {line}" for line in verdicts(rows))
    return "\n\n".join([title(rows), method_table(rows), said])


def report(rows) -> str:
    parts = [methods(rows)]
    parts += [ridge_table(rows)] if harness.where(rows, part="ridge") else []
    parts += [optuna(rows)] if harness.where(rows, part="optuna") else []
    return "\n\n".join(parts)


def picture(rows, path):
    with harness.picture(path, 1, 3, figsize=(16, 4.5)) as (figure, axes):
        draw(rows, axes)
        about = "shared against standalone; oracle test error of the incumbent"
        figure.suptitle(f"{rows[0]['data']}: {about}")


def draw(rows, axes):
    from types import SimpleNamespace

    for row in harness.where(rows, part="correlation"):
        label = f"{row['dimension']} features, Spearman {row['spearman']:.2f}"
        axes[0].plot(row["shared"], row["standalone"], "o", label=label, alpha=0.7)
    axes[0].set(xlabel="accuracy with shared weights", ylabel="standalone accuracy")
    axes[0].legend()
    curves = {
        name: [
            SimpleNamespace(**{c: np.array(r[c]) for c in ("calls", "seconds", "test")})
            for r in of_method(rows, name)
        ]
        for name in METHODS
    }
    comparable = {n: c for n, c in curves.items() if n not in ("successive halving", "Hyperband")}
    plots.traces(comparable, "calls", axes[1]).get_legend().remove()  # one at the right is for both
    plots.traces(curves, "seconds", axes[2]).legend(loc="center left", bbox_to_anchor=(1, 0.5))


def main() -> None:
    flags = harness.command_line(
        __file__,
        __doc__,
        report,
        full=True,
        data={"choices": SIZES, "default": "cifar10"},
        trials={"type": int, "help": "default: 10; IMDb and digits 3"},
        alternatives={"action": "store_true", "help": "part 3 alone, done again"},
    )
    data, full = "digits" if flags.quick else flags.data, flags.size == "full"
    if full and data not in FULL:
        sys.exit(f"--full: expected --data {' or '.join(FULL)}, got {data}")
    sizes = (FULL if full else SIZES)[data]
    sizes = dataclasses.replace(sizes, trials=flags.trials or sizes.trials)
    key, path = jax.random.key(0), harness.named(flags.results, data)
    if flags.alternatives:
        rows = [r for r in harness.read(path) if r["part"] not in ("ridge", "optuna")]
    else:
        problem = problem_of(data, sizes, key)
        about = {"data": data, "sizes": dataclasses.asdict(sizes)}
        rows = [harness.environment("scipy", "scikit-learn", "optuna", **about)]
        rows += correlation(data, sizes, problem, key)
        rows += search(data, sizes, problem, key)
    if data == "cifar10" and not full:
        rows += alternatives(sizes, key, rows)
    harness.finish(rows, path, report, picture)


if __name__ == "__main__":
    main()
