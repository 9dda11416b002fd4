"""Does weight sharing find good feature maps, and what does it save?  (Khodak et al. 2020)

The problems are ridge regression on random Fourier features of CIFAR-10, and a squared-hinge SVM on
hashed n-grams of IMDb (smaller, three trials). All trials use the same rows and the same draw of
the features, as the paper uses one split. Every trial has separate configurations, which all
methods share, and separate random choices.

1. Figure 1: validation accuracy of 32 configurations with shared weights against standalone ones.
2. Figures 2 and 3: retrained test error of the incumbent against solver calls, and against seconds.
   The incumbent is retrained alone, with all features, outside the clock. In addition to the
   paper's methods we run exponentiated gradient as in its released code. Its learning rate is tuned
   on separate configurations (part "tuning"; with 4,096 features on all of CIFAR-10).

Seconds are wall time on all cores, without compilation: every program runs once before the first
trial. They include projections of rows and hashes of texts. Each method starts without cached ones.

Each trial of each method is a row. An interrupted method resumes from the solves in its journal.

    # CIFAR-10, a quarter of an hour, two cores
    python benchmarks/feature_maps/feature_maps.py
    python benchmarks/feature_maps/feature_maps.py --data imdb     # IMDb
    python benchmarks/feature_maps/feature_maps.py --data digits   # what --quick runs, in a minute
    # 24,000 + 6,000 images, 16,384 features
    python benchmarks/feature_maps/feature_maps.py --full
    # ... in the time that there is
    python benchmarks/feature_maps/feature_maps.py --full --features 2048
    python benchmarks/feature_maps/feature_maps.py --full --data imdb # all 50,000 reviews
"""

import dataclasses
import functools
import itertools
import sys

import jax
import numpy as np
import scipy.stats

import bilevel.data
from benchmarks import harness
from benchmarks.feature_maps import feature_maps_tables as tables
from bilevel import baselines
from bilevel.contracts import Shared
from bilevel.spaces import features

MEASURES = ("bilevel/spaces/features", "bilevel/baselines", "bilevel/linear")


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
    draws: int = 3  # of configurations, to tune exponentiated gradient


SIZES = {
    "smoke": Sizes(40, 20, 20, 16, (16,), configs=4, trials=2, evaluations=2, draws=1),
    "digits": Sizes(800, 500, 497, 256, (64, 256), configs=32, trials=3, evaluations=16),
    "cifar10": Sizes(6000, 2000, 2000, 2048, (256, 1024, 2048)),
    "imdb": Sizes(3000, 1500, 1500, 2**16, (2**12, 2**16), configs=64, trials=3),
}
FULL = {  # the paper has 40,000 + 10,000 images and 100,000 features; IMDb is the same
    "cifar10": Sizes(24_000, 6000, 10_000, 2**14, (2**10, 2**12, 2**14), draws=1),
    "imdb": Sizes(25_000, 12_500, 12_500, 2**18, (2**12, 2**15, 2**18), draws=1),
}
TUNED = {"cifar10": 2**12}  # features for tuning, if tuning with all of them takes hours
ROUNDS = 8  # of exponentiated gradient: as many solves as weight sharing needs for 256
CLOCK = "each method's own projections and hashes"

RATES = 0.25, 1.0, 4.0, 16.0, 64.0  # learning rates of exponentiated gradient
METHODS = {
    "weight sharing": baselines.weight_sharing,
    "fast weight sharing": baselines.fast_weight_sharing,
    "random search": baselines.random_search,
    "successive halving": functools.partial(baselines.successive_halving, eta=4),
    "Hyperband": functools.partial(baselines.hyperband, eta=4),
    "exponentiated gradient": baselines.exponentiated_gradient,
}


def parts_of(data, sizes, key):
    wanted = sizes.train + sizes.valid
    if data == "digits":
        counts = {"train": sizes.train, "valid": sizes.valid, "test": sizes.test}
        return bilevel.data.draw_splits("digits", [key], **counts)[0]
    # IMDb's files have their rows in random order already. For CIFAR-10 the first batches are
    # enough.
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
    # The smaller limit holds projections of all rows, the larger one the dual matrix [n, n].
    memory = 2**32 if sizes.train > 10_000 else 2**31
    return features.fourier_selection(feature_key, *parts, dimension=sizes.dimension, memory=memory)


def configs_of(data, key, count):
    sample = features.sample_text if data == "imdb" else features.sample_fourier
    return sample(key, count)


# ------------------------------------------------------------------------------ 1. correlation


def correlation(data, sizes, key, dimension, once) -> dict:
    """Return a row for a dimension: shared-weight and standalone validation accuracy.

    ``once(identity, of)`` takes the row from the results, or computes and stores ``of()``.
    """
    problem, configs = problem_of(data, sizes, key), configs_of(data, key, tables.COMPARED)
    uniform = np.full(tables.COMPARED, 1 / tables.COMPARED)
    shared = problem.share(key, configs, uniform, dimension, whole=True).errors

    def error(i, config):
        identity = {"part": "standalone", "dimension": dimension, "index": i}
        row = once(identity, lambda: {"valid": problem.evaluate(key, config, dimension).valid})
        return row["valid"]

    alone = [error(i, config) for i, config in enumerate(configs)]
    return {
        "shared": (1 - shared).tolist(),
        "standalone": (1 - np.array(alone)).tolist(),
        "pearson": scipy.stats.pearsonr(shared, alone).statistic,
        "spearman": scipy.stats.spearmanr(shared, alone).statistic,
    }


# ------------------------------------------------------------------------------ 2. search


def searched(data, sizes, problem, key, name, trial, rate, **recording):
    """Return the trace of a method. All methods share a trial's configurations."""
    trial_key = jax.random.fold_in(key, trial + 1)
    configs, own = configs_of(data, trial_key, sizes.configs), jax.random.fold_in(trial_key, 0)
    halving = {"minimum": max(1, sizes.dimension // 64)}
    options = {
        "random search": {"evaluations": sizes.evaluations},
        "successive halving": halving,
        "Hyperband": halving,
        "exponentiated gradient": {"rounds": ROUNDS, "rate": rate},
    }
    options = options.get(name, {}) | recording
    return METHODS[name](own, configs, problem, sizes.dimension, progress=False, **options)


def search(data, sizes, key, name, trial, rate, journal, retrained) -> dict:
    """Return a row; ``retrained(trial, index, config)`` is the test error of a configuration."""
    problem = problem_of(data, sizes, key)  # each method pays for its hashes
    recording = {"journal": journal, "resume": True} if journal else {}
    trace = searched(data, sizes, problem, key, name, trial, rate, retrain_test=False, **recording)
    columns = "calls", "seconds", "resource", "valid"
    row = {column: np.asarray(getattr(trace, column)).tolist() for column in columns}
    # The method trained these configurations with all features, so their test errors are known.
    row["test"] = [
        retrained(trial, i, trace.configs[i]) if i >= 0 and np.isnan(known) else known
        for i, known in zip(trace.incumbent.tolist(), trace.test.tolist(), strict=True)
    ]
    print(f"  trial {trial}: {name:22s} {row['calls'][-1]:4d} solves {row['seconds'][-1]:7.2f} s "
          f"test error {100 * row['test'][-1]:.1f} %", flush=True)  # fmt: skip
    return row


def tuning(data, sizes, key, rate, draw) -> dict:
    """Tune exponentiated gradient: return the validation error of its choice at this rate."""
    fewer = min(sizes.dimension, TUNED.get(data, sizes.dimension))
    sizes = dataclasses.replace(sizes, dimension=fewer)
    problem, name = problem_of(data, sizes, key), "exponentiated gradient"
    trace = searched(data, sizes, problem, key, name, 1000 + draw, rate, retrain_test=False)
    best = trace.configs[trace.best]
    return {"valid": problem.evaluate(key, best, sizes.dimension).valid}


def warm_up(data, sizes, key) -> None:
    """Compile the searches' programs. A dummy problem records the sizes that methods use."""
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


def parsed():
    """Return the flags, with the data of a run."""
    flags = harness.command_line(
        __file__,
        __doc__,
        tables.report,
        full=True,
        data={"choices": [name for name in SIZES if name != "smoke"], "help": "default: cifar10"},
        features={"type": int, "help": "of a full evaluation, if not as usual; own results file"},
    )
    data = flags.data or ("digits" if flags.small else "cifar10")
    if flags.small and data != "digits":
        flags.error(f"--data: expected digits with --{flags.size}, got {data}")
    if flags.size == "full" and data not in FULL:
        flags.error(f"--data: expected {' or '.join(FULL)} with --full, got {data}")
    flags.data = data
    return flags


def main() -> None:
    flags = parsed()
    data, full = flags.data, flags.size == "full"
    sizes = SIZES["smoke"] if flags.smoke else (FULL if full else SIZES)[data]
    key, path = jax.random.key(0), harness.named(flags.results, data)
    if flags.features:
        fewer = tuple(d for d in sizes.dimensions if d <= flags.features)
        sizes = dataclasses.replace(sizes, dimension=flags.features, dimensions=fewer)
        path = harness.named(path, str(flags.features))
    rows = measured(data, sizes, key, path, harness.read(path) if path else [])
    harness.finish(rows, path, tables.report, tables.picture)


def measured(data, sizes, key, path, rows) -> list[dict]:
    """Return the rows of parts 1 and 2. Measure those that are missing."""
    about = {"data": data, "sizes": dataclasses.asdict(sizes), "clock": CLOCK}
    if not rows:
        harness.keep(path, rows, harness.environment("scipy", "scikit-learn", **about))
    same = harness.same_sizes(rows, about["sizes"], but=("trials",))
    if not same or rows[0].get("clock") != CLOCK:
        sys.exit(f"{path}: expected rows of these sizes and this clock; move the file away.")

    def once(identity, of):
        return harness.measure_missing(path, rows, [(identity, of)])[0]

    judge = problem_of(data, sizes, key)  # separate: no method can use the rows that it hashes

    def retrained(trial, index, config):
        """Return the test error of a trial's configuration, shared by all methods."""
        identity = {"part": "oracle", "trial": trial, "index": index}
        row = once(identity, lambda: {"test": judge.evaluate(key, config, sizes.dimension).test})
        return row["test"]

    def one(name, trial):
        journal = path and path.with_name(f"{path.stem}_{name}_{trial}.journal")
        return search(data, sizes, key, name, trial, tables.best_rate(rows), journal, retrained)

    tasks = []
    for rate, draw in itertools.product(RATES, range(sizes.draws)):
        measure = functools.partial(tuning, data, sizes, key, rate, draw)
        tasks.append(({"part": "tuning", "rate": rate, "draw": draw}, measure))
    for trial, name in itertools.product(range(sizes.trials), METHODS):
        identity = {"part": "search", "method": name, "trial": trial}
        tasks.append((identity, functools.partial(one, name, trial)))
    for d in sizes.dimensions:
        measure = functools.partial(correlation, data, sizes, key, d, once)
        tasks.append(({"part": "correlation", "dimension": d}, measure))
    left = [(identity, of) for identity, of in tasks if not harness.where(rows, **identity)]
    if any(identity["part"] == "search" for identity, _ in left):
        warm_up(data, sizes, key)
    harness.measure_missing(path, rows, left)
    return rows


if __name__ == "__main__":
    main()
