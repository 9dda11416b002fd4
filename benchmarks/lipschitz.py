"""Does training move in proportion to the activation's parameter?  (Oymak et al. 2021, Figure 2)

Networks with s_a = (1 - a) ReLU + a Sigmoid, trained at a and at a + da from the same initial
weights with the same batches: |theta_a - theta_{a+da}| / da against the width k.

(a) shallow: f(x) = v' s_a(W x), W [k, 784] trained, v ~ N(0, 2/k) fixed;
(b) deep: four layers of k, k/2, k/4, 1 units, all trained.

MNIST's digits 0 and 1, pixels in [0, 1], labels -1 and 1, mean of (f - y)^2 over batches of 128
(the rest of an epoch is left out), weights ~ N(0, 2/fan_in) (He), no biases, SGD at 0.003 for 60
epochs. Labels, pixels, the loss's factor, biases, v and what to do where a + da > 1 (here nothing)
are not in the paper. Every a, uniform in [0, 1], has initial weights of its own.

Beside it: the same quotient for the predictions on test images, largest over images (Assumption 1);
at the smallest width all of it in float64, with a da so small that float32 would show its rounding
and any algorithm its jumps; and with all images, also for labels 0 and 1.

Pixels that are 0 in all images are dropped: their weights do not move, so this changes nothing.

    python benchmarks/lipschitz.py            # to width 512, fewer images and a: two cores
    python benchmarks/lipschitz.py --quick    # a minute, no results file
    python benchmarks/lipschitz.py --full     # the paper's sizes; for an accelerator
    python benchmarks/lipschitz.py --table    # the results file as Markdown
"""

import dataclasses
import functools
import math
import time

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
from harness import standard_error

import bilevel.data
from bilevel.stability import lipschitz

DELTAS = (0.005, 0.01, 0.03, 0.05, 0.07)
TINY = 64 * float(np.finfo(np.float32).eps)  # shows rounding, where the algorithm has no jumps
BATCH, STEP_SIZE, PIXELS = 128, 0.003, 784
NETWORKS = {"shallow": "(a) shallow, input layer trained", "deep": "(b) four layers"}
AXES = {"shallow": 1.4, "deep": 3.0}  # where the paper's axes end


@dataclasses.dataclass(frozen=True)
class Sizes:
    widths: tuple[int, ...]
    alphas: int
    batch: int  # of them at a time
    images: int | None = None  # None: all
    epochs: int = 60


SIZES = {
    "quick": Sizes((64, 128), alphas=3, batch=3, images=512),
    "default": Sizes((64, 128, 256, 512), alphas=6, batch=6, images=1536),
    "full": Sizes((64, 128, 256, 512, 1024, 2048, 4096), alphas=20, batch=10),
}


def digits(images, labels):
    """Training rows [n, d], their labels, test rows, and which pixels the d are."""
    data = bilevel.data.load("mnist")

    def rows(x, y, most):
        binary = np.flatnonzero(y < 2)[:most]
        return x[binary].reshape(-1, PIXELS), np.array(labels, np.float32)[y[binary]]

    x, y = rows(data.x_train, data.y_train, images)
    x_test, _ = rows(data.x_test, data.y_test, 1000)
    used = np.flatnonzero((x != 0).any(axis=0) | (x_test != 0).any(axis=0))
    return x[:, used], y, x_test[:, used], used


def draws(sizes, images):
    """The a's, a key for each, and the rows of every batch, [steps, BATCH]."""
    alpha_key, weight_key, order_key = jax.random.split(jax.random.key(0), 3)
    alphas = jax.random.uniform(alpha_key, (sizes.alphas,), jnp.float32)
    epochs = [
        jax.random.permutation(key, images)[: images // BATCH * BATCH].reshape(-1, BATCH)
        for key in jax.random.split(order_key, sizes.epochs)
    ]
    return alphas, jax.random.split(weight_key, sizes.alphas), jnp.concatenate(epochs)


def initial(key, network, width, used):
    outputs = (width, 1) if network == "shallow" else (width, width // 2, width // 4, 1)
    shapes = list(zip(outputs, (PIXELS, *outputs[:-1]), strict=True))
    keys = jax.random.split(key, len(shapes))
    normal = [jax.random.normal(k, s, jnp.float32) for k, s in zip(keys, shapes, strict=True)]
    first, *rest = [math.sqrt(2 / w.shape[1]) * w for w in normal]
    return [first[:, used], *rest]


def predict(weights, alpha, x):
    *hidden, last = weights
    h = x.T  # units first: then the first layers of all runs are one matrix product
    for w in hidden:
        z = w @ h
        h = (1 - alpha) * jax.nn.relu(z) + alpha * jax.nn.sigmoid(z)
    return (last @ h)[0]


def train(weights, alpha, trained, data, order):
    """SGD on the first ``trained`` layers: their weights, and predictions on the test rows."""
    x, y, x_test = data
    fixed = weights[trained:]

    def loss(moving, rows):
        return jnp.mean((predict(moving + fixed, alpha, x[rows]) - y[rows]) ** 2)

    def step(moving, rows):
        return optax.tree.add_scale(moving, -STEP_SIZE, jax.grad(loss)(moving, rows)), None

    moving, _ = jax.lax.scan(step, weights[:trained], order)
    return moving, predict(moving + fixed, alpha, x_test)


def norms(difference):
    weights, predictions = difference
    return jnp.stack([optax.tree.norm(weights), jnp.max(jnp.abs(predictions))])


def measure(network, width, sizes, *, labels=(-1, 1), deltas=DELTAS, dtype="float32") -> dict:
    """A row: quotients [alphas, deltas] of the weights and of the predictions."""
    x, y, x_test, used = digits(sizes.images, labels)
    alphas, keys, order = draws(sizes, len(y))

    def around(pair):
        key, alpha = pair
        weights = [w.astype(dtype) for w in initial(key, network, width, used)]
        trained = 1 if network == "shallow" else len(weights)

        def algorithm(alpha):
            return train(weights, alpha, trained, data, order)

        return lipschitz(algorithm, alpha[None], deltas, norm=norms)[0]

    # Full precision, also where a device would multiply in fewer bits: the differences cancel.
    with jax.enable_x64(dtype == "float64"), jax.default_matmul_precision("float32"):
        data, deltas = [jnp.asarray(a, dtype) for a in (x, y, x_test)], jnp.asarray(deltas, dtype)
        arguments = keys, alphas.astype(dtype)
        every = lambda *pairs: jax.lax.map(around, pairs, batch_size=sizes.batch)  # noqa: E731
        run, compilation = harness.compiled(every, *arguments)
        start = time.perf_counter()
        found = np.asarray(run(*arguments), float)
        seconds = time.perf_counter() - start
    row = {"network": network, "width": width, "dtype": dtype, "images": len(y)}
    row |= {"labels": labels, "deltas": deltas.tolist(), "a": alphas.tolist()}
    row |= {"weights": found[..., 0].tolist(), "predictions": found[..., 1].tolist()}
    print(network, width, dtype, len(y), labels, *map(spread, found[..., 0].T), flush=True)
    return row | {"seconds": seconds, "compile_seconds": compilation}


def experiments(sizes):
    """Rows by part: the figure, float64, rounding, all images."""
    for network in NETWORKS:
        for width in sizes.widths:
            yield "figure", measure(network, width, sizes)
    smallest, whole = sizes.widths[0], dataclasses.replace(sizes, images=None)
    for network in NETWORKS:
        yield "float64", measure(network, smallest, sizes, deltas=(*DELTAS, TINY), dtype="float64")
        yield "rounding", measure(network, smallest, sizes, deltas=(TINY,))
        for labels in ((-1, 1), (0, 1)) if sizes != SIZES["quick"] else ():
            yield "all images", measure(network, smallest, whole, labels=labels, deltas=(0.03,))


def spread(x) -> str:
    return harness.spread(x, ".3f")


def verdicts(rows, network):
    """Pairs of whether what the paper says or its axes show is seen, and what is."""
    of_network = functools.partial(harness.where, rows, network=network)
    figure, end = of_network(part="figure"), AXES[network]
    quotients = np.array([r["weights"] for r in figure])  # [widths, alphas, deltas]
    means = quotients.mean(axis=1)
    yield means.max() <= end, f"inside the paper's axis (0 to {end}): means up to {means.max():.2f}"
    widths = means.mean(axis=1)
    ratio, ends = (
        widths.max() / widths.min(),
        f"{widths[0]:.2f} at the first, {widths[-1]:.2f} last",
    )
    yield ratio <= 1.5, f"flat in the width: within a factor {ratio:.2f} (asked: 1.5), {ends}"
    ratio = (means.max(axis=1) / means.min(axis=1)).max()
    yield ratio <= 1.25, f"flat in da: within a factor {ratio:.2f} at every width (asked: 1.25)"
    short, long = quotients[:, :, :2].mean(axis=2), quotients[:, :, 2:].mean(axis=2)
    excess = 100 * np.mean(short / long - 1, axis=0)
    text = f"slightly larger at da <= 0.01 than above: by {spread(excess)} % (asked: two s.e.)"
    yield np.mean(excess) > 2 * standard_error(excess), text
    (wide,), (tiny,) = of_network(part="float64"), of_network(part="rounding")
    exact, narrow = np.mean(wide["weights"], axis=0), np.mean(tiny["weights"])
    off = np.max(np.abs(means[0] / exact[:-1] - 1))
    text = f"not rounding: float64 moves the means at width {wide['width']} by {100 * off:.1g} %"
    yield off < 0.01, f"{text}; at da = {TINY:.2g}: {exact[-1]:.2f}, in float32 {narrow:.2f}"
    for row in of_network(part="all images"):
        text = f"inside the axis with all {row['images']} images, labels {tuple(row['labels'])}, "
        text += f"at width {row['width']}, da = {DELTAS[2]}: {spread(np.ravel(row['weights']))}"
        yield np.mean(row["weights"]) <= end, text


def figure_table(rows) -> str:
    head = ["network", "k", *(f"da = {d}" for d in DELTAS), f"predictions, da = {DELTAS[2]}"]
    lines = []
    for network, name in NETWORKS.items():
        for row in harness.where(rows, part="figure", network=network):
            cells = [spread(column) for column in np.transpose(row["weights"])]
            cells.append(spread(np.array(row["predictions"])[:, 2]))
            lines.append([name, row["width"], *cells])
    return harness.table(head, lines)


def report(rows) -> str:
    head, *others = rows
    images = harness.where(rows, part="figure")[0]["images"]
    seconds, compilation = (sum(r[k] for r in others) for k in ("seconds", "compile_seconds"))
    parts = [
        f"{images} images of MNIST's 0 and 1, {head['sizes']['alphas']} random a (mean ± s.e.), "
        f"{head['sizes']['epochs']} epochs, float32; {head['device']}: {seconds:.0f} s, and "
        f"{compilation:.0f} s of compilation.",
        figure_table(rows),
    ]
    for network, name in NETWORKS.items():
        parts += [f"{name}:", harness.judged(verdicts(rows, network))]
    return "\n\n".join(parts)


def picture(rows, path):
    with harness.picture(path, 1, 2, figsize=(11, 4.2)) as (_, axes):
        draw(rows, axes)


def draw(rows, axes):
    for ax, (network, name) in zip(axes, NETWORKS.items(), strict=True):
        found = harness.where(rows, part="figure", network=network)
        widths = [r["width"] for r in found]
        quotients = np.array([r["weights"] for r in found])  # [widths, alphas, deltas]
        for j, delta in enumerate(DELTAS):
            mean = quotients[:, :, j].mean(axis=1)
            error = standard_error(quotients[:, :, j].T)
            beside = np.array(widths) * 2 ** (0.05 * (j - 2))  # where their bars do not overlap
            ax.errorbar(beside, mean, error, fmt="os^Dv"[j] + "-", label=f"Δα = {delta}")
        ax.axhline(AXES[network], color="grey", linewidth=0.8, linestyle="--")
        ax.set_xscale("log", base=2)
        ax.set_xticks(widths, widths)
        ax.minorticks_off()
        top = 1.02 * max(AXES[network], ax.get_ylim()[1])
        ax.set(title=name, xlabel="width k", ylim=(0, top))
    axes[0].set_ylabel("|θ(α) - θ(α + Δα)| / Δα, mean ± s.e.")
    axes[1].legend(ncols=2, title="dashed: where the paper's axis ends")


def main() -> None:
    flags = harness.command_line(__file__, __doc__, report, full=True)
    sizes = SIZES[flags.size]
    rows = [harness.environment(seed=0, sizes=dataclasses.asdict(sizes))]
    for part, row in experiments(sizes):
        rows.append({"part": part} | row)
        if flags.results:  # as they come: the last rows take the longest
            harness.write(flags.results, rows)
    harness.finish(rows, flags.results, report, picture)


if __name__ == "__main__":
    main()
