"""Do validation errors predict test errors in DARTS?  (Oymak et al. 2021, Figures 1c and 3)

The search is first-order DARTS on CIFAR-10. With `--deep` it is on Fashion-MNIST, where few images
suffice to learn. w moves by SGD on training batches, alpha by Adam on batches of n_V validation
images. After each epoch we record the supernet's errors on training, validation and test images.

Every seed has separate images and initial weights, the same for each n_V. The validation sets are
nested. One more search per seed, the control, moves alpha on 1000 other images. Its gap on the same
n_V images is due to chance in these images. A search overfits by the part of its gap that exceeds
the control's.

The supernet normalizes by batch, here and in the search, so errors are of networks that see 100
images at a time. A smaller validation set is filled up with images that no search uses, so that all
images are treated alike. Batches are drawn with replacement. An epoch has as many batches as are
needed to cover the training images. There is no augmentation. Rates, clipping and weight decay are
DARTS's (Liu et al. 2019). The paper gives only 10k training images, 50 epochs, SGD, 5 runs and n_V
from 20 to 1000.

    # one cell, three operations, 8 x 8 pixels, 256 images: 50 minutes of one core
    python benchmarks/deep_search/darts_gap.py
    # three cells, eight operations, 14 x 14 pixels, 1000 images: seven hours of one core
    python benchmarks/deep_search/darts_gap.py --deep
    python benchmarks/deep_search/darts_gap.py --full     # the paper's sizes, on an accelerator
"""

import dataclasses
import functools
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilevel
import bilevel.data
from benchmarks import harness
from benchmarks.harness import standard_error
from benchmarks.verdicts import clearly, grade
from bilevel import strategies
from bilevel.spaces.darts import darts_space
from bilevel.spaces.darts.genotype import PRIMITIVES

MEASURES = (
    "bilevel/spaces/darts",
    "bilevel/strategies/methods.py",
    "bilevel/strategies/strategy.py",
    "bilevel/strategies/optimizers.py",
    "bilevel/outer_loop/descent.py",
    "bilevel/solvers/_unrolled.py",
    "bilevel/nets/training.py",
)

POOL = 1000  # validation images, and the same number for the control
FEW, TRACKED = 100, 250  # n_V: overfitted up to the first, validation tracks test from the second
CHUNK = 100  # images that are normalized together when errors are counted
COLOURS = {  # mean and standard deviation of each
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "fashion-mnist": ((0.2860,), (0.3530,)),
    "random": ((0.5,), (0.2887,)),  # uniform, for --smoke
}
SMALL = ("none", "skip_connect", "sep_conv_3x3")


@dataclasses.dataclass(frozen=True)
class Sizes:
    data: str = "cifar10"
    operations: tuple[str, ...] = SMALL
    cells: int = 1
    channels: int = 16
    side: int = 8  # pixels
    train: int = 256
    test: int = 2000
    counts: tuple[int, ...] = (20, 50, 100, 250, 500, 1000)  # n_V
    epochs: int = 50
    look: int = 10  # epochs between two error counts
    batch: int = 32
    seeds: int = 16
    weight_rate: float = 0.1

    @property
    def steps(self) -> int:
        return self.epochs * (self.train // self.batch)

    @property
    def alpha_rate(self) -> float:
        return 3e-4 * 7800 / self.steps  # logits move as far as in the 7800 steps of --full

    @property
    def hyperparameters(self) -> int:
        return 14 * len(self.operations) * min(self.cells, 2)


DEEP = {"data": "fashion-mnist", "cells": 3, "channels": 4, "side": 14, "train": 1000}
PAPER = {"cells": 8, "side": 32, "train": 10_000, "test": 10_000, "batch": 64, "seeds": 5}
TINY = {"data": "random", "operations": ("none", "skip_connect"), "channels": 2, "side": 4}
SIZES = {
    "smoke": Sizes(**TINY, train=100, test=100, counts=(20, 1000), epochs=2, look=1, seeds=2),
    "quick": Sizes(channels=8, counts=(20, 1000), seeds=2, epochs=20),
    "default": Sizes(),
    "deep": Sizes(operations=PRIMITIVES, **DEEP, batch=64, seeds=10),
    "full": Sizes(operations=PRIMITIVES, look=1, weight_rate=0.025, **PAPER),
}


def images(sizes, seed):
    """Return training images, 2 POOL validation images and test images, as pairs (x, labels)."""
    if sizes.data == "random":
        rng, shape = np.random.default_rng(seed), (sizes.side, sizes.side, 1)
        counts = sizes.train, 2 * POOL, sizes.test
        drawn = [(rng.random((n, *shape)), rng.integers(10, size=n)) for n in counts]
        return [(jnp.asarray(x, jnp.float32), jnp.asarray(y)) for x, y in drawn]
    wanted = 10_000 if sizes.train + 2 * POOL <= 10_000 else 30_000
    data = bilevel.data.load(sizes.data, train_size=wanted)
    mean, deviation = map(np.array, COLOURS[sizes.data])
    keys = jax.random.split(jax.random.fold_in(jax.random.key(0), seed))
    train, pool = bilevel.data.stratified_split(keys[0], data.y_train, (sizes.train, 2 * POOL))
    (test,) = bilevel.data.stratified_split(keys[1], data.y_test, (sizes.test,))

    def prepared(x, y):
        each = x.shape[1] // sizes.side  # side of a square that becomes one pixel
        x = x.reshape(len(x), sizes.side, each, sizes.side, each, len(mean)).mean((2, 4))
        return jnp.asarray((x - mean) / deviation, jnp.float32), jnp.asarray(y)

    x, y = data.x_train, data.y_train
    held_out = data.x_test[test], data.y_test[test]
    return [prepared(x[train], y[train]), prepared(x[pool], y[pool]), prepared(*held_out)]


@functools.cache
def programs(sizes):
    """Return the functions ``start``, ``advance`` and ``errors``.

    Their signatures are ``start(key)``, ``advance(state, key, first, count, train, pool)`` and
    ``errors(state, x, y)``. They are compiled once for all seeds and n_V: the ``count`` validation
    images from ``first`` on in ``pool`` are used, and both numbers are traced.
    """
    space = darts_space(sizes.operations, cells=sizes.cells, channels=sizes.channels)
    schedule = optax.cosine_decay_schedule(sizes.weight_rate, sizes.steps, alpha=0.04)
    weights, rates = strategies.darts_sgd(schedule), {"alpha_optimizer": sizes.alpha_rate}
    plan = strategies.darts(space, weight_optimizer=weights, **rates, batch_size=sizes.batch)
    init, step = bilevel.descent(plan.problem, plan.solver, plan.optimizer)
    colours = len(COLOURS[sizes.data][0])
    images = jax.ShapeDtypeStruct((1, sizes.side, sizes.side, colours), jnp.float32)

    @jax.jit
    def start(key):
        return init(space.start(), space.init(key, (images,)))

    @functools.partial(jax.jit, donate_argnums=0)
    def advance(state, key, first, count, train, pool):
        def one(state, key):
            keys = jax.random.split(key)
            rows = first + jax.random.randint(keys[1], (sizes.batch,), 0, count)
            valid = jax.tree.map(lambda a: a[rows], pool)
            return step(state, (plan.batches(keys[0], train), valid))[0], None

        steps = sizes.look * (sizes.train // sizes.batch)
        return jax.lax.scan(one, state, jax.random.split(key, steps))[0]

    @jax.jit
    def errors(state, x, y):
        """Return [rows, 2]: 1 if misclassified, and the cross-entropy."""

        def chunk(batch):
            logits = space.apply(state.w, state.alpha, batch[0])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])
            return jnp.stack([space.predict(logits) != batch[1], losses], axis=1)

        pieces = [a.reshape(-1, CHUNK, *a.shape[1:]) for a in (x, y)]
        return jax.lax.map(chunk, tuple(pieces)).reshape(len(y), 2)

    return start, advance, errors


def run(sizes, seed, count, parts) -> dict:
    """Search on ``count`` validation images (0: control); return errors by epoch, [looks, ...]."""
    train, pool, _ = parts
    start, advance, errors = programs(sizes)
    keys = jax.random.split(jax.random.key(seed), 1 + sizes.epochs // sizes.look)
    known = min(sizes.train, POOL) // CHUNK * CHUNK  # training images that are counted
    counted = [jnp.concatenate([a[:known], b[:POOL], c]) for a, b, c in zip(*parts, strict=True)]
    first, many = (0, count) if count else (POOL, POOL)
    began, state, looks = time.perf_counter(), start(keys[0]), []
    for i, key in enumerate(keys):
        if i > 0:
            state = advance(state, key, first, many, train, pool)
        all_errors = np.asarray(errors(state, *counted), float)
        parted = all_errors[:known], all_errors[known + POOL :]
        of_counts = [all_errors[known:][:n] for n in sizes.counts]
        looks.append([rows.mean(axis=0) for rows in (*parted, *of_counts)])
    row = {"part": "run", "seed": seed, "count": count, "seconds": time.perf_counter() - began}
    for name, values in zip(("error", "loss"), np.moveaxis(looks, 2, 0), strict=True):
        row |= {f"train {name}": values[:, 0].tolist(), f"test {name}": values[:, 1].tolist()}
        row[f"valid {name}"] = values[:, 2:].tolist()  # of the first n images, for each n
    kinds = sorted(state.alpha) if sizes.cells > 1 else ["reduce"]  # one is a reduction cell

    def means(kind):
        values = np.asarray(state.alpha[kind]).mean(axis=0)
        return dict(zip(sizes.operations, values.tolist(), strict=True))

    print(seed, count, *(f"{100 * v:.1f}" for v in row["test error"]), flush=True)
    return row | {"alpha": {kind: means(kind) for kind in kinds}}


def experiment(sizes, done=()):
    """Yield the rows of the runs (seed, count) that are not in ``done``."""
    workers = len(os.sched_getaffinity(0)) if jax.default_backend() == "cpu" else 1
    for seed in range(sizes.seeds):
        counts = [n for n in (0, *sizes.counts) if (seed, n) not in done]
        if counts:
            parts = images(sizes, seed)
            yield run(sizes, seed, counts[0], parts)  # separate, because it compiles
            with ThreadPoolExecutor(workers) as threads:
                yield from threads.map(lambda n: run(sizes, seed, n, parts), counts[1:])  # noqa: B023


# ----------------------------------------------------------------------------------- results


def whole_seeds(rows) -> list[int]:
    """Return the rows of seeds with complete searches."""
    ended = {(r["seed"], r["count"]) for r in harness.where(rows, part="run")}
    counts = 0, *rows[0]["sizes"]["counts"]
    return sorted(s for s, n in ended if n == 0 and all((s, m) in ended for m in counts))


def collect(rows):
    """Return ``curve(name)`` [seeds, runs, looks], control first, and the gaps by ``gap(name)``.

    ``gap`` is test minus validation, [seeds, looks, counts], of each search and of the control on
    the same validation images. Incomplete seeds are left out.
    """
    counts, seeds = rows[0]["sizes"]["counts"], whole_seeds(rows)
    by = {(r["seed"], r["count"]): r for r in harness.where(rows, part="run")}

    def curve(name):
        return np.array([[by[s, n][name] for n in (0, *counts)] for s in seeds])

    def gap(name):
        test, valid = curve(f"test {name}"), curve(f"valid {name}")
        gaps = test[..., None] - valid  # [seeds, runs, looks, counts]
        return np.stack([gaps[:, k + 1, :, k] for k in range(len(counts))], axis=-1), gaps[:, 0]

    return curve, gap


def spread(x, unit=1, digits=1) -> str:
    return harness.spread(x, f".{digits}f", unit)


def exponent(gaps, counts) -> tuple[float, float]:
    """Return p of c n^p and its standard error, by leaving out one seed at a time."""
    parts = [fitted_power(np.delete(gaps, s, axis=0), counts) for s in range(len(gaps))]
    return fitted_power(gaps, counts), np.sqrt((len(parts) - 1) * np.var(parts))


def fitted_power(gaps, counts) -> float:
    """Return p of c n^p, by least squares on the means weighted by their standard errors."""
    error = standard_error(gaps) + 1e-12 if len(gaps) > 1 else 1.0
    powers = np.linspace(-2, 1, 601)
    curves = np.asarray(counts, float) ** powers[:, None] / error
    target = gaps.mean(axis=0) / error
    # The best c for each p. The residual is smallest if the explained part is largest.
    return powers[np.argmax((curves @ target) ** 2 / np.sum(curves**2, axis=1))]


def on_tracking(rows):
    """Yield Figure 1(c): training errors predict nothing, validation errors predict test errors."""
    sizes, (curve, gap) = rows[0]["sizes"], collect(rows)
    start = int(0.6 * sizes["epochs"])
    late = 100 * curve("train error")[:, :, start // sizes["look"] :]
    text = f"from epoch {start} on {late.mean():.2f} % on average, {late.max():.1f} % at most"
    yield "training error says nothing: under 1 % (Figure 1c)", late.mean() < 1, text
    gaps = dict(zip(sizes["counts"], 100 * gap("error")[0][:, -1].T, strict=True))
    gaps = {n: points for n, points in gaps.items() if n >= TRACKED}
    holds = any(abs(points.mean()) < 2 for points in gaps.values())
    text = ", ".join(f"{spread(points)} (n_V = {n})" for n, points in gaps.items())
    yield "validation tracks test, within 2 points (Figure 3)", holds, f"gap {text}"


def on_overfitting(rows):
    """Yield Figure 3: the supernet overfits n_V <= 100 images, increasingly. Order h suffices."""
    sizes, (curve, gap) = rows[0]["sizes"], collect(rows)
    counts, h = np.array(sizes["counts"]), rows[0]["hyperparameters"]
    over, small = 100 * np.subtract(*gap("error"))[:, -1], counts <= FEW  # percentage points
    text = ", ".join(f"{spread(over[:, k])} (n_V = {n})" for k, n in enumerate(counts[small]))
    holds = clearly(over[:, small]).any()
    yield f"up to {FEW} images are overfitted", holds, f"by {text} points"
    k = np.argmax(counts >= h)
    text = f"overfitted by {spread(over[:, k])} points at n_V = {counts[k]}, h = {h}"
    claim = "as many images as hyperparameters are enough: overfitted by under 2 points"
    yield claim, over[:, k].mean() < 2, text
    test = 100 * curve("test error")[:, :, -1]
    # The control and the last search both have 1000 images. Their mean is a less noisy reference.
    worse = test[:, 1:][:, small].mean(axis=1) - test[:, [0, -1]].mean(axis=1)
    text = f"{spread(worse, digits=2)} points more than with {POOL:,} images"
    yield f"up to {FEW} images cost test error", worse.mean() > 0, text
    growth = {}
    for name, unit in (("error", 100), ("loss", 1)):
        excess = unit * np.subtract(*gap(name))[:, :, small].mean(axis=2)
        growth[name] = excess[:, -1] - excess[:, 1]
    text = f"error by {spread(growth['error'])} points, loss by {spread(growth['loss'], digits=3)}"
    holds = any(gain.mean() > 0 for gain in growth.values())
    yield f"the gap widens from epoch {sizes['look']} to {sizes['epochs']}", holds, text


def on_rate(rows):
    """Return Theorem 1's bound n_V^-1/2. A standard error of 1/4 or more is too noisy."""
    counts, texts, seen = rows[0]["sizes"]["counts"], [], []
    for name in ("error", "loss"):
        searched, control = collect(rows)[1](name)
        p, error = exponent((searched - control)[:, -1], counts)
        noisy = bool(error >= 0.25)
        texts.append(f"{name} {p:.2f} ± {error:.2f}" + " (too noisy)" * noisy)
        seen.append(not noisy and p + 0.5 < 2 * error)
    claim = "overfitting falls at least like n_V^-1/2 (Theorem 1)"
    return claim, any(seen), f"exponents {', '.join(texts)}"


SUPERNETS = {
    "darts_gap": "reduced supernet, h = 42",
    "darts_gap_deep": "supernet that learns, h = 224 (`--deep`)",
}


def claim_table(_) -> str:
    """Return a row for each claim, a column for each supernet."""
    files = {title: harness.RESULTS / f"{name}.jsonl" for name, title in SUPERNETS.items()}
    return table_of_verdicts({title: harness.read(path) for title, path in files.items()})


def table_of_verdicts(columns) -> str:
    """Return a row for each claim, a column for each item of rows. No setting is the paper's."""
    by_claim = {}
    for rows in columns.values():
        for claim, holds, text in (*on_tracking(rows), *on_overfitting(rows), on_rate(rows)):
            verdict = grade(False, holds, papers_setting=False)
            by_claim.setdefault(claim, []).append(f"{verdict}: {text}")
    return harness.table(["claim", *columns], [[name, *cells] for name, cells in by_claim.items()])


NAMES = {"normal": "normal", "reduce": "reduction"}
COLUMNS = ("train", "valid", "test", "gap", "overfitted", "overfitted loss", "test loss")


def count_table(rows) -> str:
    """Return a line for each n_V."""
    curve, gap = collect(rows)
    train, test, loss, valid = (
        curve(name)[:, :, -1] for name in ("train error", "test error", "test loss", "valid error")
    )
    (seen, control), (seen_loss, control_loss) = gap("error"), gap("loss")
    lines, seeds, kinds = [], whole_seeds(rows), harness.where(rows, part="run")[0]["alpha"]
    for k, n in enumerate((0, *rows[0]["sizes"]["counts"])):
        runs = [r for r in harness.where(rows, part="run", count=n) if r["seed"] in seeds]
        none = [spread([r["alpha"][kind]["none"] for r in runs], digits=2) for kind in kinds]
        cells = [spread(train[:, k], 100), "-", spread(test[:, k], 100), "-", "-", "-"]
        if n:
            last = seen[:, -1, k - 1]
            cells[1], cells[3] = spread(valid[:, k, k - 1], 100), spread(last, 100)
            cells[4] = spread(last - control[:, -1, k - 1], 100)
            cells[5] = spread(seen_loss[:, -1, k - 1] - control_loss[:, -1, k - 1], digits=3)
        lines.append([n or "control", *cells, spread(loss[:, k], digits=2), *none])
    names = (f"`none`, {NAMES[kind]} cells" for kind in kinds)
    return harness.table(["n_V", *COLUMNS, *names], lines)


def report(rows) -> str:
    if len(whole_seeds(rows)) < 2:
        ended = len(harness.where(rows, part="run"))
        return f"{ended} searches have ended: a table needs all those of two seeds."
    sizes, (curve, _) = rows[0]["sizes"], collect(rows)
    seconds = np.median([r["seconds"] for r in harness.where(rows, part="run")])
    title = (
        f"{len(curve('test error'))} seeds (mean ± s.e., errors in %), {sizes['train']} training "
        f"images of {sizes['side']} x {sizes['side']}, {sizes['epochs']} epochs, cells: "
        f"{sizes['cells']}, channels: {sizes['channels']}, h = {rows[0]['hyperparameters']}; "
        f"{rows[0]['device']}: {seconds:.0f} s a search."
    )
    return "\n\n".join([title, count_table(rows), table_of_verdicts({"here": rows})])


@harness.figure(1, 3, figsize=(15, 4.4))
def picture(rows, axes):
    sizes, (curve, gap) = rows[0]["sizes"], collect(rows)
    counts, look, epochs = np.array(sizes["counts"]), sizes["look"], sizes["epochs"]
    seen, control = gap("error")
    test = curve("test error")[:, 1:, -1].mean()
    for share, colour in ((0.2, "C1"), (0.6, "C0"), (1.0, "C5")):
        at = 100 * seen[:, round(share * epochs / look)]
        label = f"epoch {round(share * epochs)}"
        style = {"fmt": "o-", "color": colour, "label": label}
        axes[0].errorbar(counts, at.mean(0), standard_error(at), **style)
    over = 100 * (seen - control)[:, -1]
    label = "beyond the control's, last epoch"
    axes[0].errorbar(counts, over.mean(0), standard_error(over), fmt="k.--", label=label)
    noise = 100 * np.sqrt(test * (1 - test) / counts / len(seen))
    label = "a fixed network, one s.e."
    axes[0].fill_between(counts, -noise, noise, color="grey", alpha=0.2, label=label)
    axes[0].set(title="Figure 3: test - validation error", ylabel="percentage points, mean ± s.e.")
    places = 0, len(counts) // 2, len(counts) - 1
    for k, colour in zip(places, ("C5", "C1", "C0"), strict=True):
        by_set = {"valid": curve("valid error")[:, 1 + k, :, k]}
        by_set |= {name: curve(f"{name} error")[:, 1 + k] for name in ("train", "test")}
        for name, style in (("train", ":"), ("valid", "--"), ("test", "-")):
            line, error = 100 * by_set[name].mean(0), 100 * standard_error(by_set[name])
            x = np.arange(len(line)) * look
            axes[1].plot(x, line, style, color=colour, label=f"{name}, n_V = {counts[k]}")
            axes[1].fill_between(x, line - error, line + error, color=colour, alpha=0.1)
    axes[1].set(title="Figure 1(c): errors by epoch", xlabel="epoch")
    axes[1].set_ylabel("error (%), mean ± s.e.")
    losses = np.subtract(*gap("loss"))[:, -1]
    axes[2].errorbar(counts, losses.mean(0), standard_error(losses), fmt="ko", label="mean ± s.e.")
    p, error = exponent(losses, counts)
    for power, style, name in ((p, "k-", f"fitted: {p:.2f} ± {error:.2f}"), (-0.5, "C5--", "-1/2")):
        shape, weight = counts**power, 1 / standard_error(losses) ** 2
        scale = np.sum(weight * shape * losses.mean(0)) / np.sum(weight * shape**2)
        axes[2].plot(counts, scale * shape, style, label=name)
    axes[2].axhline(0, color="grey", linewidth=0.8)
    axes[2].set(title="overfitted loss, beyond the control's", ylabel="nats")
    for ax in axes[[0, 2]]:
        ax.set(xscale="log", xlabel="validation rows n_V")
        ax.set_xticks(counts, counts)
        ax.minorticks_off()
    for ax, place in zip(axes, ("upper right", "best", "upper right"), strict=True):
        ax.legend(fontsize=8, loc=place)


def main() -> None:
    deep = {"action": "store_true", "help": "a supernet that learns; own results file"}
    flags = harness.command_line(__file__, __doc__, report, full=True, deep=deep)
    sizes, path = SIZES[flags.size], flags.results
    if flags.deep and flags.size != "default":
        flags.error(f"--deep: expected no other size, got --{flags.size}")
    if flags.deep:
        sizes, path = SIZES["deep"], harness.named(path, "deep")
    about = {"sizes": dataclasses.asdict(sizes), "hyperparameters": sizes.hyperparameters}
    rows = harness.begun(path, "optax", **about)
    if not harness.same_sizes(rows, about["sizes"]):
        sys.exit(f"{path}: expected rows of these sizes; move the file away.")
    done = {(r["seed"], r["count"]) for r in rows[1:]}
    for row in experiment(sizes, done):
        harness.keep(path, rows, row)
    harness.finish(rows, path, report, picture, write_rows=False)


if __name__ == "__main__":
    main()
