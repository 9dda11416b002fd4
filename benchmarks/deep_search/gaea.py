"""Is exponentiated gradient sparser and faster than softmax with Adam?  (Li et al. 2021, GAEA)

The claim is about stochastic supernets: plain exponentiated gradient on the simplices against
DARTS, which is softmax with Adam and weight decay on logits. Both are of first order. Here the
supernet is NAS-Bench-201's, on real images of CIFAR-10, and both train weights by the same SGD.

Each rate of alpha is tuned on separate seeds: the best rate has the smallest mean validation loss
of the supernet over the last tenth of the steps. The grid grows by a factor until the best rate is
inside it. Then both methods are evaluated on ten more seeds. Each seed has separate rows and
initial weights, which both methods share.

Sparser means a smaller entropy of alpha (mean over the edges) during the search. Faster means a
smaller validation loss during the search. The final architecture is looked up in the benchmark's
table.

The sizes differ from the paper's: one cell a stage, 8 channels, images of 16 x 16 pixels, 5,000 +
5,000 images and 8 epochs. The paper has 5 cells, 16 channels, 32 x 32 pixels and 25,000 + 25,000
images.

    python benchmarks/deep_search/gaea.py           # an hour and a half of one core; resumable
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilevel.data
from benchmarks import harness
from benchmarks.harness import plus_minus, standard_error
from bilevel import strategies
from bilevel.discretize import diagnostics
from bilevel.nets import unit_images
from bilevel.spaces.nasbench201 import nasbench201_space
from bilevel.spaces.nasbench201.genotype import PRIMITIVES, parse_genotype
from bilevel.spaces.nasbench201.judging import load_table
from bilevel.spaces.nasbench201.judging.verdicts import standing

MEASURES = (
    "bilevel/spaces/nasbench201/supernet.py",
    "bilevel/spaces/nasbench201/network.py",
    "bilevel/nets/convolution.py",
    "bilevel/strategies/methods.py",
    "bilevel/strategies/strategy.py",
    "bilevel/strategies/optimizers.py",
    "bilevel/outer_loop/geometry.py",
)

METHODS = {"exponentiated gradient": strategies.gaea, "softmax, Adam": strategies.darts}
START = {"exponentiated gradient": (0.1, 0.3, 1.0), "softmax, Adam": (1e-3, 3e-3, 1e-2)}
# These values are in the authors' configurations for NAS-Bench-201.
DEFAULT = {"exponentiated gradient": 0.1, "softmax, Adam": 3e-4}
LOOKS = 20  # number of evaluations during a search


@dataclasses.dataclass(frozen=True)
class Sizes:
    data: str = "cifar10"
    rows: int = 5000  # for the weights, and the same number for alpha
    pixels: int = 16
    channels: int = 8
    batch: int = 64
    steps: int = 640
    operations: tuple[str, ...] = PRIMITIVES
    tuning: int = 3  # seeds
    judged: int = 10  # other seeds
    methods: tuple[str, ...] = tuple(METHODS)
    cells: int = 1  # of a stage


SIZES = {
    # Compilation takes longest: one of the methods shows that the script runs.
    "smoke": Sizes("digits", 20, 4, 2, 10, 20, ("none", "skip_connect"), 1, 2, tuple(METHODS)[:1]),
    "quick": Sizes("digits", 100, 4, 2, 20, 40, ("none", "skip_connect", "avg_pool_3x3"), 1, 2),
    "default": Sizes(),
}


def searcher(sizes, method):
    """Return ``run(rate, key, train, valid)``: validation losses, entropies, and the last alpha."""
    space = nasbench201_space(sizes.operations, cells=sizes.cells, channels=sizes.channels)
    sgd = strategies.darts_sgd(optax.cosine_decay_schedule(0.025, sizes.steps))

    def windows(x):
        return x.reshape(LOOKS, -1).mean(axis=1)

    @jax.jit
    def run(rate, key, train, valid):
        optimizers = {"weight_optimizer": sgd, "alpha_optimizer": rate}
        plan = METHODS[method](space, **optimizers, batch_size=sizes.batch)
        init_key, search_key = jax.random.split(key)
        start = space.start(), space.init(init_key, train)
        options = {"steps": sizes.steps, "key": search_key, "progress": False}
        result = strategies.run(plan, *start, train, valid, **options)
        entropy = diagnostics.entropy(result.history["alpha"]).mean(axis=-1)
        return windows(result.history["value"]), windows(entropy), result.alpha

    return run


@functools.lru_cache(maxsize=3)
def parts(sizes, seed):
    """Return the rows of a seed, for the weights and for alpha."""
    draw = jax.random.fold_in(jax.random.key(0), seed)
    count = {"train": sizes.rows, "valid": sizes.rows, "test": 1}
    ((train, valid, _),) = bilevel.data.draw_splits(sizes.data, [draw], **count)
    xs = unit_images(train[0], valid[0], pixels=sizes.pixels)
    return [(x, jnp.asarray(y)) for x, (_, y) in zip(xs, (train, valid), strict=True)]


def searched(sizes, method, run, rate, seed) -> dict:
    losses, entropies, alpha = run(rate, jax.random.key(seed), *parts(sizes, seed))
    full = np.zeros((6, len(PRIMITIVES)))
    full[:, [PRIMITIVES.index(name) for name in sizes.operations]] = alpha
    genotype = nasbench201_space().discretize(full)
    row = {"method": method, "rate": rate, "seed": seed, "genotype": str(genotype)}
    row |= {"valid_loss": np.asarray(losses, float).round(5).tolist()}
    return row | {"entropy": np.asarray(entropies, float).round(5).tolist()}


def final(row) -> float:
    """Return the validation loss for choosing rates. A loss that is not finite is the worst."""
    loss = np.mean(row["valid_loss"][-max(1, LOOKS // 10) :])
    return float(loss) if np.isfinite(loss) else np.inf


def best_rate(rows, method) -> tuple[float, bool]:
    """Return the tuned rate, and whether rates on both sides of it were tried."""
    own = [row for row in rows if row.get("method") == method and row["seed"] >= 1000]
    rates = sorted({row["rate"] for row in own})
    means = [np.mean([final(row) for row in own if row["rate"] == rate]) for rate in rates]
    place = int(np.argmin(means))
    return rates[place], 0 < place < len(rates) - 1


def experiment(sizes, rows, keep):
    """Run all searches that are not among the rows: tuning and evaluation, then the usual rates."""
    programs = {}

    def done(method, rate, seeds):
        for seed in seeds:
            if not harness.where(rows, method=method, rate=rate, seed=seed):
                run = programs.setdefault(method, searcher(sizes, method))
                keep(searched(sizes, method, run, rate, seed))

    tuning, judging = range(1000, 1000 + sizes.tuning), range(sizes.judged)
    for method in sizes.methods:
        for rate in START[method]:
            done(method, rate, tuning)
        while not (tuned := best_rate(rows, method))[1]:
            rates = {row["rate"] for row in harness.where(rows, method=method)}
            factor = 1 / 3 if tuned[0] == min(rates) else 3
            done(method, float(f"{tuned[0] * factor:.1g}"), tuning)
        done(method, tuned[0], judging)
    for method in sizes.methods:
        done(method, DEFAULT[method], judging)


def of(rows, method, rate):
    """Return the evaluation rows by seed."""
    own = [row for row in harness.where(rows, method=method, rate=rate) if row["seed"] < 1000]
    return sorted(own, key=lambda row: row["seed"])


def report(rows) -> str:
    """Report both methods at their tuned and at usual rates, and paired differences."""
    table, lines, tuned, judged = load_table(), [], {}, {}
    for method in METHODS:
        if not any(row.get("method") == method for row in rows):
            continue
        best = tuned[method] = best_rate(rows, method)[0]
        for rate in dict.fromkeys((best, DEFAULT[method])):
            own = of(rows, method, rate)
            if len(own) < 2:
                continue
            at = standing(table, [parse_genotype(row["genotype"]) for row in own])["cifar10"]
            columns = judged[method, rate] = [*_columns(own), np.array(at["accuracy"])]
            name = f"{rate:g}" + (" (tuned)" if rate == best else " (usual)")
            lines.append((method, name, len(own), *map(_shown, columns)))
    head = ("method", "rate", "seeds", "entropy at 1/4", "at the end", "valid. loss at 1/4")
    text = harness.table((*head, "at the end", "test accuracy of the cell, %"), lines)
    gains = []
    for which, rates in {"both tuned": tuned, "both as usual": DEFAULT}.items():
        pair = [judged[it] for it in rates.items() if it in judged]
        if len(pair) == 2:  # paired by seed; positive if ours is better: less, but of accuracy more
            ours, theirs = pair
            losses = [b - a for a, b in zip(ours[:-1], theirs[:-1], strict=True)]
            gains.append([which, *map(_shown, (*losses, ours[-1] - theirs[-1]))])
    head = "gain of exponentiated gradient", "entropy at 1/4", "at the end", "loss at 1/4"
    gains_table = harness.table((*head, "at the end", "accuracy"), gains) if gains else ""
    return f"{text}\n\n{gains_table}".rstrip()


def _columns(rows):
    """Return entropy and validation loss, each after a quarter of the steps and at the end."""
    entropy, loss = (np.array([row[k] for row in rows]) for k in ("entropy", "valid_loss"))
    quarter = LOOKS // 4 - 1
    return entropy[:, quarter], entropy[:, -1], loss[:, quarter], loss[:, -1]


def _shown(x) -> str:
    return plus_minus(x.mean(), float(standard_error(x)))


def main() -> None:
    arguments = harness.command_line(__file__, __doc__, report)
    sizes = SIZES[arguments.size]
    rows = harness.begun(arguments.results, "optax", **dataclasses.asdict(sizes))

    def keep(row):
        harness.keep(arguments.results, rows, row)
        text = f"{row['method']}  rate {row['rate']:g}  seed {row['seed']}  loss {final(row):.3f}  "
        print(f"{text}entropy {row['entropy'][-1]:.2f}  {row['genotype']}", flush=True)

    experiment(sizes, rows, keep)
    harness.finish(rows, arguments.results, report, write_rows=False)


if __name__ == "__main__":
    main()
