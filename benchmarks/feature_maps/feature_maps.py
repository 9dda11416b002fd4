"""Does weight sharing find good feature maps, and what does it save?  (Khodak et al. 2020)

Ridge regression on random Fourier features of CIFAR-10, or a squared-hinge SVM on hashed n-grams of
IMDb (smaller, three trials). Rows and the draw of the features are the same throughout, as the
paper's split is; every trial has its own configurations, the same for all methods, and its own
random choices.

1. Figure 1: validation accuracy of 32 configurations with shared weights against standalone ones.
2. Figures 2 and 3: retrained test error of the incumbent against solver calls, and against seconds.
   The incumbent is trained again by itself, with all features, outside the clock. Beside the
   paper's methods exponentiated gradient, as its released code has it, at the learning rate that
   is best on configurations of their own (part "tuning"; with 4,096 features on all of CIFAR-10).
3. The same ridge problems by scikit-learn, and Hyperband by Optuna (dependency group `peers`):
   with CIFAR-10 in the default size only. `--peers` with no name behind it leaves Optuna out.

Seconds are wall time on all cores, without compilation: every program is run once before the first
trial. Projections of rows and hashes of texts are in them: each method starts with none.

Each trial of each method is a row, written as it ends; what the results file holds is not measured
again, and a method that was cut short goes on with the solves in its journal.

    # CIFAR-10, a quarter of an hour, two cores
    python benchmarks/feature_maps/feature_maps.py
    python benchmarks/feature_maps/feature_maps.py --data imdb     # IMDb
    python benchmarks/feature_maps/feature_maps.py --data digits   # what --quick runs, in a minute
    python benchmarks/feature_maps/feature_maps.py --alternatives  # part 3 alone, again
    # 24,000 + 6,000 images, 16,384 features
    python benchmarks/feature_maps/feature_maps.py --full
    # ... in the time that there is
    python benchmarks/feature_maps/feature_maps.py --full --features 2048
    python benchmarks/feature_maps/feature_maps.py --full --data imdb # all 50,000 reviews
    python benchmarks/feature_maps/feature_maps.py --smoke         # digits, all parts, tiny: 10 s
    python benchmarks/feature_maps/feature_maps.py --table         # the results files as Markdown
"""

import dataclasses
import functools
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

import bilevel.data
from benchmarks import harness
from benchmarks.feature_maps import feature_maps_tables as tables
from bilevel import baselines, linear
from bilevel.contracts import Shared
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
    draws: int = 3  # of configurations, to tune exponentiated gradient on


SIZES = {
    "smoke": Sizes(40, 20, 20, 16, (16,), configs=4, trials=2, evaluations=2, draws=1),
    "digits": Sizes(800, 500, 497, 256, (64, 256), configs=32, trials=3, evaluations=16),
    "cifar10": Sizes(6000, 2000, 2000, 2048, (256, 1024, 2048)),
    "imdb": Sizes(3000, 1500, 1500, 2**16, (2**12, 2**16), configs=64, trials=3),
}
FULL = {  # the paper: 40,000 + 10,000 images and 100,000 features; IMDb as here
    "cifar10": Sizes(24_000, 6000, 10_000, 2**14, (2**10, 2**12, 2**14), draws=1),
    "imdb": Sizes(25_000, 12_500, 12_500, 2**18, (2**12, 2**15, 2**18), draws=1),
}
TUNED = {"cifar10": 2**12}  # features of the tuning, where all of them would take hours
ROUNDS = 8  # of exponentiated gradient: as many solves as weight sharing makes of 256
RIDGE = 1024, 2048, 4096  # features of the ridge problems in part 3
CLOCK = "each method's own projections and hashes"

RATES = 0.25, 1.0, 4.0, 16.0, 64.0  # of exponentiated gradient
METHODS = {
    "weight sharing": baselines.weight_sharing,
    "fast weight sharing": baselines.fast_weight_sharing,
    "random search": baselines.random_search,
    "successive halving": functools.partial(baselines.successive_halving, eta=4),
    "Hyperband": functools.partial(baselines.hyperband, eta=4),
    "exponentiated gradient": baselines.exponentiated_gradient,
}


def with_features(sizes, count):
    """The same with so many features."""
    fewer = tuple(d for d in sizes.dimensions if d <= count)
    return dataclasses.replace(sizes, dimension=count, dimensions=fewer)


def parts_of(data, sizes, key):
    wanted = sizes.train + sizes.valid
    if data == "digits":
        loaded = bilevel.data.load("digits")
        x = np.concatenate([loaded.x_train, loaded.x_test])
        y = np.concatenate([loaded.y_train, loaded.y_test])
        rows = bilevel.data.stratified_split(key, y, (sizes.train, sizes.valid, sizes.test))
        return [(x[r], y[r]) for r in rows]
    # IMDb's files have their rows in a random order already; CIFAR-10's first batches will do.
    size = -(-wanted // 10_000) * 10_000 if data == "cifar10" else None
    loaded = load(data, size)
    official = {"train": (loaded.x_train, loaded.y_train), "test": (loaded.x_test, loaded.y_test)}

    def drawn(half, *counts):
        x, y = official[half]
        return [(x[rows], y[rows]) for rows in bilevel.data.stratified_split(key, y, counts)]

    if wanted > len(loaded.y_train):  # as in the paper, the official test half is halved
        return [*drawn("train", sizes.train), *drawn("test", sizes.valid, sizes.test)]
    return [*drawn("train", sizes.train, sizes.valid), *drawn("test", sizes.test)]


load = functools.cache(lambda data, size: bilevel.data.load(data, train_size=size))


def problem_of(data, sizes, key):
    split_key, feature_key = jax.random.split(key)
    parts = parts_of(data, sizes, split_key)
    if data == "imdb":
        return features.text_selection(*parts)
    # Below, room for projections of all rows; where it is large, for the dual matrix [n, n].
    memory = 2**32 if sizes.train > 10_000 else 2**31
    return features.fourier_selection(feature_key, *parts, dimension=sizes.dimension, memory=memory)


def configs_of(data, key, count):
    sample = features.sample_text if data == "imdb" else features.sample_fourier
    return sample(key, count)


# ------------------------------------------------------------------------------ 1. correlation


def correlation(data, sizes, key, dimension, once) -> dict:
    """Shared-weight and standalone validation accuracy: a row for a dimension.

    ``once(identity, of) -> row``: what the results hold, or ``of()``, which they hold from then on.
    """
    problem, configs = problem_of(data, sizes, key), configs_of(data, key, tables.COMPARED)
    uniform = np.full(tables.COMPARED, 1 / tables.COMPARED)
    shared = problem.share(key, configs, uniform, dimension, whole=True).errors

    def error(i):
        identity = {"part": "standalone", "dimension": dimension, "index": i}
        row = once(identity, lambda: {"valid": problem.evaluate(key, configs[i], dimension).valid})
        return row["valid"]

    alone = [error(i) for i in range(len(configs))]
    return {
        "shared": (1 - shared).tolist(),
        "standalone": (1 - np.array(alone)).tolist(),
        "pearson": scipy.stats.pearsonr(shared, alone).statistic,
        "spearman": scipy.stats.spearmanr(shared, alone).statistic,
    }


# ------------------------------------------------------------------------------ 2. search


def options_of(name, sizes, rate) -> dict:
    if name == "random search":
        return {"evaluations": sizes.evaluations}
    if name in ("successive halving", "Hyperband"):
        return {"minimum": max(1, sizes.dimension // 64)}
    if name == "exponentiated gradient":
        return {"rounds": ROUNDS, "rate": rate}
    return {}


def searched(data, sizes, problem, key, name, trial, rate, **recording):
    """The trace of a method: a trial's configurations are the same for all of them."""
    trial_key = jax.random.fold_in(key, trial + 1)
    configs, own = configs_of(data, trial_key, sizes.configs), jax.random.fold_in(trial_key, 0)
    options = options_of(name, sizes, rate) | recording
    return METHODS[name](own, configs, problem, sizes.dimension, progress=False, **options)


def search(data, sizes, key, name, trial, rate, journal, retrained) -> dict:
    """A row; ``retrained(trial, index, config)``: the test error of a configuration by itself."""
    problem = problem_of(data, sizes, key)  # anew: whoever projects or hashes pays for it
    recording = {"journal": journal, "resume": True} if journal else {}
    trace = searched(data, sizes, problem, key, name, trial, rate, retrain_test=False, **recording)
    columns = "calls", "seconds", "resource", "valid"
    row = {column: np.asarray(getattr(trace, column)).tolist() for column in columns}
    # What the method itself trained with all features has its test error already.
    row["test"] = [
        retrained(trial, i, trace.configs[i]) if i >= 0 and np.isnan(known) else known
        for i, known in zip(trace.incumbent.tolist(), trace.test.tolist(), strict=True)
    ]
    print(f"  trial {trial}: {name:22s} {row['calls'][-1]:4d} solves {row['seconds'][-1]:7.2f} s "
          f"test error {100 * row['test'][-1]:.1f} %", flush=True)  # fmt: skip
    return row


def tuning(data, sizes, key, rate, draw) -> dict:
    """Of exponentiated gradient at a rate: the validation error of what it chose."""
    fewer = min(sizes.dimension, TUNED.get(data, sizes.dimension))
    sizes = dataclasses.replace(sizes, dimension=fewer)
    problem, name = problem_of(data, sizes, key), "exponentiated gradient"
    trace = searched(data, sizes, problem, key, name, 1000 + draw, rate, retrain_test=False)
    best = trace.configs[trace.best]
    return {"valid": problem.evaluate(key, best, sizes.dimension).valid}


def warm_up(data, sizes, key) -> None:
    """Compile what the searches run: each method's sizes are found on a problem without one."""
    asked = set()

    def evaluate(key, config, resource):
        asked.add(("evaluate", resource))
        return 0.5

    def share(key, configs, probabilities, resource):
        asked.add(("share", resource))
        return Shared(np.full(len(configs), 0.5), np.ones(len(configs), int))

    nothing = baselines.Selection(evaluate, share)
    for name in METHODS:
        searched(data, sizes, nothing, key, name, -1, RATES[0], retrain_test=False)
    problem, configs = problem_of(data, sizes, key), configs_of(data, key, sizes.configs)
    uniform = np.full(len(configs), 1 / len(configs))
    for kind, resource in sorted(asked):
        if kind == "share":
            problem.share(key, configs, uniform, resource)
        else:
            problem.evaluate(key, configs[0], resource)


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


def optuna_hyperband(data, sizes, key, seconds, target) -> dict:
    """Hyperband by Optuna, random features and ridge regression by scikit-learn.

    Stops once the validation error of a configuration at full dimension is ``target``, or after
    ``seconds``.
    """
    import optuna
    from sklearn.linear_model import Ridge
    from sklearn.preprocessing import MinMaxScaler, Normalizer, StandardScaler

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    parts = parts_of(data, sizes, jax.random.split(key)[0])
    xs = [x.reshape(len(x), -1).astype(np.float32) for x, _ in parts]
    labels = [y for _, y in parts]
    targets = 2 * np.eye(10, dtype=np.float32)[labels[0]] - 1
    scalers = {"minmax": MinMaxScaler, "unit": Normalizer, "standardize": StandardScaler}
    lowest, curve, start = max(1, sizes.dimension // 64), [], time.perf_counter()

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


def alternatives(data, sizes, key, searched, dimensions, peers) -> list[dict]:
    """Optuna gets the same rows, and five times the seconds that our first trial took."""
    rows = [ridge_solve(sizes.train, d) for d in dimensions]
    if "optuna" in peers:
        ours = tables.of_method(searched, "Hyperband")[0]
        seconds = ours["seconds"][-1]
        optuna_row = optuna_hyperband(data, sizes, key, 5 * seconds, ours["valid"][-1])
        rows.append(optuna_row | {"our seconds": seconds, "our test": ours["test"][-1]})
    return rows


def parsed():
    """The flags, with the data of a run, and with ``compared``: whether it measures part 3."""
    flags = harness.command_line(
        __file__,
        __doc__,
        tables.report,
        full=True,
        peers=("optuna",),
        compares=lambda parsed: parsed.data in (None, "cifar10") and parsed.size == "default",
        data={"choices": [name for name in SIZES if name != "smoke"], "help": "default: cifar10"},
        trials={"type": int, "help": "default: 10; IMDb and digits 3"},
        features={"type": int, "help": "of a full evaluation, if not as usual; own results file"},
        alternatives={"action": "store_true", "help": "part 3 alone, done again"},
    )
    data = flags.data or ("digits" if flags.small else "cifar10")
    if flags.small and data != "digits":
        flags.error(f"--data: expected digits with --{flags.size}, got {data}")
    if flags.size == "full" and data not in FULL:
        flags.error(f"--data: expected {' or '.join(FULL)} with --full, got {data}")
    if flags.trials is not None and flags.trials < 2:
        flags.error(f"--trials: expected at least 2, got {flags.trials}")
    if flags.alternatives and flags.trials is not None:
        flags.error("--alternatives: expected no --trials, which is of the other parts")
    flags.data, flags.compared = data, data == "cifar10" and flags.size == "default"
    if flags.alternatives and not flags.compared:
        got = data if flags.size == "default" else f"--{flags.size}"
        flags.error(f"--alternatives: expected cifar10 in the default size, got {got}")
    if flags.peers and not (flags.compared or flags.smoke):
        got = data if flags.size == "default" else f"--{flags.size}"
        flags.error(f"--peers: expected cifar10 in the default size, got {got}")
    return flags


def main() -> None:
    flags = parsed()
    data, full = flags.data, flags.size == "full"
    sizes = SIZES["smoke"] if flags.smoke else (FULL if full else SIZES)[data]
    sizes = dataclasses.replace(sizes, trials=flags.trials or sizes.trials)
    key, path = jax.random.key(0), harness.named(flags.results, data)
    if flags.features:
        sizes = with_features(sizes, flags.features)
        path = harness.named(path, str(flags.features))
    rows = harness.read(path) if path else []
    if flags.alternatives:
        if not tables.of_method(rows, "Hyperband"):
            sys.exit(f"--alternatives: expected the other parts' rows in {path}, got none.")
    else:
        rows = measured(data, sizes, key, path, rows)
    if flags.compared or flags.smoke:  # a second run measures part 3 again
        rows = [r for r in rows if r["part"] not in ("ridge", "optuna")]
        dimensions = sizes.dimensions if flags.smoke else RIDGE
        rows += alternatives(data, sizes, key, rows, dimensions, flags.peers)
    harness.finish(rows, path, tables.report, tables.picture)


def measured(data, sizes, key, path, rows) -> list[dict]:
    """The rows of parts 1 and 2: those that there are, and the others as they come."""
    about = {"data": data, "sizes": dataclasses.asdict(sizes), "clock": CLOCK}
    if not rows:
        rows = [harness.environment("scipy", "scikit-learn", "optuna", **about)]
        harness.append(path, *rows)
    elif (
        not harness.same_sizes(rows, about["sizes"], but=("trials",))
        or rows[0].get("clock") != CLOCK
    ):
        sys.exit(f"{path}: expected rows of these sizes and this clock; move the file away.")

    def keep(row):
        rows.append(row)
        harness.append(path, row)

    def once(identity, of):
        if not harness.where(rows, **identity):
            keep(identity | of())
        return harness.where(rows, **identity)[0]

    tasks = [
        (
            {"part": "tuning", "rate": rate, "draw": draw},
            functools.partial(tuning, data, sizes, key, rate, draw),
        )
        for rate in RATES
        for draw in range(sizes.draws)
    ]

    judge = problem_of(data, sizes, key)  # of its own: no method uses the rows that it hashes

    def retrained(trial, index, config):
        """Of a trial's configuration, whichever methods choose it."""
        identity = {"part": "oracle", "trial": trial, "index": index}
        row = once(identity, lambda: {"test": judge.evaluate(key, config, sizes.dimension).test})
        return row["test"]

    def one(name, trial):
        journal = path and path.with_name(f"{path.stem}_{name}_{trial}.journal")
        return search(data, sizes, key, name, trial, tables.best_rate(rows), journal, retrained)

    tasks += [
        ({"part": "search", "method": name, "trial": trial}, functools.partial(one, name, trial))
        for trial in range(sizes.trials)
        for name in METHODS
    ]
    tasks += [
        (
            {"part": "correlation", "dimension": d},
            lambda d=d: correlation(data, sizes, key, d, once),
        )
        for d in sizes.dimensions
    ]
    left = [(identity, of) for identity, of in tasks if not harness.where(rows, **identity)]
    if any(identity["part"] == "search" for identity, _ in left):
        warm_up(data, sizes, key)
    for identity, of in left:
        keep(identity | of())
    return rows


if __name__ == "__main__":
    main()
