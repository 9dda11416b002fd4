"""Does training move in proportion to the activation's parameter?  (Oymak et al. 2021, Figure 2)

Networks with s_a = (1 - a) ReLU + a Sigmoid are trained at a and at a + da. Both start from the
same initial weights and use the same batches. We measure |theta_a - theta_{a+da}| / da against the
width k.

(a) shallow: f(x) = v' s_a(W x), W [k, 784] trained, v ~ N(0, 2/k) fixed;
(b) deep: four layers of k, k/2, k/4, 1 units, all trained.

The data are MNIST's digits 0 and 1, with pixels in [0, 1] and labels -1 and 1. The loss is the mean
of (f - y)^2 over batches of 128 (the remainder of an epoch is left out). Weights are drawn from
N(0, 2/fan_in) (He), without biases. SGD runs at 0.003 for 60 epochs. The paper does not state the
labels, the pixel range, the factor of the loss, the biases, or v. It does not say how it treats
a + da > 1 (here without change). Every a is uniform in [0, 1] and has separate initial weights.

We also measure the same quotient for the predictions on test images, as the maximum over images
(Assumption 1). At the smallest width everything is repeated in float64, with a da so small that
roundoff in float32, or jumps of the algorithm, become visible. With all images we also use labels 0
and 1.

Pixels that are 0 in all images are dropped. Their weights do not move, so this changes nothing.

The default has all of the paper's widths and 20 a, on 1,536 of the 12,665 images. Every a is a row.
The a come in blocks of five, each through all widths. So an interrupted run, which a second one
resumes, has fewer a, but all widths.

    python benchmarks/theory/lipschitz.py            # hours, most of them for the last width
    python benchmarks/theory/lipschitz.py --full     # with all images: eight times as long
"""

import dataclasses
import functools
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilevel.data
from benchmarks import harness
from benchmarks.harness import standard_error
from benchmarks.verdicts import grade
from bilevel.theory.stability import lipschitz

MEASURES = ("bilevel/theory/stability.py",)

DELTAS = (0.005, 0.01, 0.03, 0.05, 0.07)
TINY = 64 * float(np.finfo(np.float32).eps)  # shows roundoff, if the algorithm is smooth
BATCH, STEP_SIZE, PIXELS = 128, 0.003, 784
BLOCK = 5  # number of a in a block
VALUES = "a", "weights", "predictions"  # a row has one of each, a row of joined() one for each a
NETWORKS = {"shallow": "(a) shallow, input layer trained", "deep": "(b) four layers"}
WIDTHS = (64, 128, 256, 512, 1024, 2048, 4096)
AXES = {"shallow": 1.4, "deep": 3.0}  # ends of the paper's axes


@dataclasses.dataclass(frozen=True)
class Sizes:
    widths: tuple[int, ...]
    alphas: int
    images: int | None = None  # None: all
    epochs: int = 60
    data: str = "mnist"


SIZES = {
    "smoke": Sizes((16, 32), alphas=2, images=256, epochs=2, data="digits"),
    "quick": Sizes((64, 128), alphas=3, images=512),
    "default": Sizes(WIDTHS, alphas=20, images=1536),
    "full": Sizes(WIDTHS, alphas=20),
}
SMALL = SIZES["smoke"], SIZES["quick"]


def digits(name, images, labels):
    """Return training rows [n, d], their labels, test rows, and the indices of the d pixels."""
    data = bilevel.data.load(name)

    def rows(x, y, most):
        binary = np.flatnonzero(y < 2)[:most]
        return x[binary].reshape(len(binary), -1), np.array(labels, np.float32)[y[binary]]

    x, y = rows(data.x_train, data.y_train, images)
    x_test, _ = rows(data.x_test, data.y_test, 1000)
    used = np.flatnonzero((x != 0).any(axis=0) | (x_test != 0).any(axis=0))
    return x[:, used], y, x_test[:, used], used


def draws(sizes, images):
    """Return the a's, a key for each, and the rows of every batch, [steps, BATCH]."""
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
    first, *others = [math.sqrt(2 / w.shape[1]) * w for w in normal]
    return [first[:, used], *others]


def predict(weights, alpha, x):
    *hidden, last = weights
    h = x.T  # units first: then the first layers of all runs are one matrix product
    for w in hidden:
        z = w @ h
        h = (1 - alpha) * jax.nn.relu(z) + alpha * jax.nn.sigmoid(z)
    return (last @ h)[0]


def train(weights, alpha, trained, data, order):
    """Train the first ``trained`` layers by SGD; return weights and predictions on test rows."""
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


@functools.cache
def compiled(network, width, sizes, labels, deltas, dtype):
    """Compile ``(key, a) -> results`` of training at a and at a + da; return its time too."""
    x, y, x_test, used = digits(sizes.data, sizes.images, labels)
    _, _, order = draws(sizes, len(y))
    data, deltas = [jnp.asarray(part, dtype) for part in (x, y, x_test)], jnp.asarray(deltas, dtype)

    def around(key, alpha):
        weights = [w.astype(dtype) for w in initial(key, network, width, used)]
        trained = 1 if network == "shallow" else len(weights)

        def algorithm(alpha):
            return train(weights, alpha, trained, data, order)

        return lipschitz(algorithm, alpha[None], deltas, norm=norms)[0]

    return harness.compiled(around, jax.random.key(0), jnp.zeros((), dtype))


def measure(
    network, width, sizes, index, *, labels=(-1, 1), deltas=DELTAS, dtype="float32"
) -> dict:
    """Return a row: quotients [deltas] of weights and predictions for the a of this index."""
    images = len(digits(sizes.data, sizes.images, labels)[1])
    alphas, keys, _ = draws(sizes, images)
    # Full precision on every device, because the differences cancel.
    with jax.enable_x64(dtype == "float64"), jax.default_matmul_precision("float32"):
        run, compilation = compiled(network, width, sizes, labels, deltas, dtype)
        start = time.perf_counter()
        quotients = np.asarray(run(keys[index], alphas[index].astype(dtype)), float)
        seconds = time.perf_counter() - start
    row = {"images": images, "deltas": deltas, "a": float(alphas[index])}
    row |= {"weights": quotients[:, 0].tolist(), "predictions": quotients[:, 1].tolist()}
    return row | {"seconds": seconds, "compile_seconds": compilation}


def tasks(sizes):
    """Return the keys of every row and the options of its measurement, by part and by width."""
    smallest, whole = sizes.widths[0], dataclasses.replace(sizes, images=None)
    others = []
    for network in NETWORKS:
        wide = {"deltas": (*DELTAS, TINY), "dtype": "float64"}
        others.append(("float64", network, smallest, sizes, wide))
        others.append(("rounding", network, smallest, sizes, {"deltas": (TINY,)}))
        for labels in ((-1, 1), (0, 1)) if sizes not in SMALL else ():
            options = {"labels": labels, "deltas": (0.03,)}
            others.append(("all images", network, smallest, whole, options))
    every = [("figure", k, width, sizes, {}) for width in sizes.widths for k in NETWORKS]
    for first in range(0, sizes.alphas, BLOCK):
        for part, network, width, of, options in (*others, *every):
            for index in range(first, min(first + BLOCK, sizes.alphas)):
                row = {"part": part, "network": network, "width": width, "index": index}
                row |= {"dtype": options.get("dtype", "float32")}
                row |= {"labels": list(options.get("labels", (-1, 1)))}
                yield row, functools.partial(measure, network, width, of, index, **options)


def show(row) -> str:
    names = "part", "network", "width", "index", "dtype", "weights"
    return " ".join(str(row[name]) for name in names)


def joined(rows):
    """Return a row for each network of each part, with the values of all its a (at least two)."""
    by_network = {}
    names = "part", "network", "width", "dtype", "labels", "images"
    measured = [row for row in rows if row["part"] != "environment"]
    for row in sorted(measured, key=lambda row: row["index"]):
        by_network.setdefault(str([row[name] for name in names]), []).append(row)
    return [
        of_it[0] | {name: [row[name] for row in of_it] for name in VALUES}
        for of_it in by_network.values()
        if len(of_it) > 1
    ]


def common(figure):
    """Return the rows of widths with a complete block, restricted to their common a."""
    figure = [row for row in figure if len(row["a"]) >= min(BLOCK, len(figure[0]["a"]))]
    shared = set.intersection(*(set(row["a"]) for row in figure))
    return [only(shared, row) for row in figure]


def only(shared, row):
    """Restrict a row to those of its a that are among the ``shared``."""
    places = [i for i, a in enumerate(row["a"]) if a in shared]
    return row | {name: [row[name][i] for i in places] for name in VALUES}


spread = functools.partial(harness.spread, form=".3f")


def verdicts(rows, network):
    """Return pairs of a verdict on a claim of the paper or its axes, and the measurement."""
    of_network = functools.partial(harness.where, joined(rows), network=network)
    figure, end = common(of_network(part="figure")), AXES[network]
    quotients = np.array([r["weights"] for r in figure])  # [widths, alphas, deltas]
    means = quotients.mean(axis=1)
    yield means.max() <= end, f"inside the paper's axis (0 to {end}): means up to {means.max():.2f}"
    widths = means.mean(axis=1)
    ratio = widths.max() / widths.min()
    ends = f"{widths[0]:.2f} at the first, {widths[-1]:.2f} last"
    yield ratio <= 1.5, f"flat in the width: within a factor {ratio:.2f} (criterion: 1.5), {ends}"
    ratio = (means.max(axis=1) / means.min(axis=1)).max()
    yield ratio <= 1.25, f"flat in da: within a factor {ratio:.2f} at every width (criterion: 1.25)"
    short, long = quotients[:, :, :2].mean(axis=2), quotients[:, :, 2:].mean(axis=2)
    excess = 100 * np.mean(short / long - 1, axis=0)
    size = "over" if np.mean(excess) > 2 * standard_error(excess) else "under"
    text = f"slightly larger at da <= 0.01 than above: by {spread(excess)} %, {size} two s.e."
    yield np.mean(excess) > 0, text
    (wide,), (tiny,) = of_network(part="float64"), of_network(part="rounding")
    exact, narrow = np.array(wide["weights"]), np.mean(tiny["weights"])
    common_a = set(wide["a"]) & set(figure[0]["a"])  # those measured in float32 and in float64
    pair = (np.array(only(common_a, row)["weights"]) for row in (figure[0], wide))
    means = [np.mean(of_it[:, : len(DELTAS)], axis=0) for of_it in pair]
    off = np.max(np.abs(means[0] / means[1] - 1))
    text = f"float64 moves the means at width {wide['width']} by {100 * off:.1g} %"
    yield (
        "no effect of rounding" if off < 0.01 else "an effect of rounding",
        f"{text}; at da = {TINY:.2g}: {exact[:, -1].mean():.2f}, in float32 {narrow:.2f}",
    )
    for row in of_network(part="all images"):
        fits = np.mean(row["weights"]) <= end
        text = f"the axis with all {row['images']} images, labels {tuple(row['labels'])}, "
        text += f"at width {row['width']}, da = {DELTAS[2]}: {spread(np.ravel(row['weights']))}"
        yield fits, f"{'inside' if fits else 'beyond'} {text}"


def figure_table(rows) -> str:
    head = ["network", "k", "a", *(f"da = {d}" for d in DELTAS), f"predictions, da = {DELTAS[2]}"]
    lines = []
    for network, name in NETWORKS.items():
        for row in common(harness.where(joined(rows), part="figure", network=network)):
            cells = [spread(column) for column in np.transpose(row["weights"])]
            cells.append(spread(np.array(row["predictions"])[:, 2]))
            lines.append([name, row["width"], len(row["a"]), *cells])
    return harness.table(head, lines)


def report(rows) -> str:
    sizes = rows[0]["sizes"]
    heads, others = harness.where(rows, part="environment"), [r for r in rows if "index" in r]
    images = harness.where(rows, part="figure")[0]["images"]
    seconds = sum(row["seconds"] for row in others)
    title = (
        f"{images} images of MNIST's 0 and 1, random a (mean ± s.e.), "
        f"{sizes['epochs']} epochs, float32; {'; '.join(head['device'] for head in heads)}: "
        f"{seconds:.0f} s of running."
    )
    return "\n\n".join([title, figure_table(rows), verdict_lines(rows)])


def verdict_lines(rows) -> str:
    """Return the verdicts. We have fewer images than the paper."""
    blocks = []
    for network, name in NETWORKS.items():
        lines = [f"{name}:", ""]
        for holds, text in verdicts(rows, network):
            word = holds if isinstance(holds, str) else grade(False, holds, papers_setting=False)
            lines.append(f"- {word}: {text}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


@harness.figure(1, 2, figsize=(11, 4.2))
def picture(rows, axes):
    for ax, (network, name) in zip(axes, NETWORKS.items(), strict=True):
        of_network = common(harness.where(joined(rows), part="figure", network=network))
        widths = [r["width"] for r in of_network]
        quotients = np.array([r["weights"] for r in of_network])  # [widths, alphas, deltas]
        for j, delta in enumerate(DELTAS):
            mean = quotients[:, :, j].mean(axis=1)
            error = standard_error(quotients[:, :, j].T)
            beside = np.array(widths) * 2 ** (0.05 * (j - 2))  # error bars must not overlap
            ax.errorbar(beside, mean, error, fmt="os^Dv"[j] + "-", label=f"Δα = {delta}")
        ax.axhline(AXES[network], color="grey", linewidth=0.8, linestyle="--")
        ax.set_xscale("log", base=2)
        ax.set_xticks(widths, widths)
        ax.minorticks_off()
        top = 1.02 * max(AXES[network], ax.get_ylim()[1])
        ax.set(title=name, xlabel="width k", ylim=(0, top))
    axes[0].set_ylabel("|θ(α) - θ(α + Δα)| / Δα, mean ± s.e.")
    axes[1].legend(ncols=2, loc="lower right", title="dashed: where the paper's axis ends")


def main() -> None:
    flags = harness.command_line(__file__, __doc__, report, full=True)
    sizes = SIZES[flags.size]
    about = {"seed": 0, "sizes": dataclasses.asdict(sizes)}
    rows = harness.begun(flags.results, each_device=True, **about)
    harness.measure_missing(flags.results, rows, tasks(sizes), show)
    harness.finish(rows, flags.results, report, picture, write_rows=False)


if __name__ == "__main__":
    main()
