"""What does the tangent kernel of a network cost, by the library that defines the network?

There are four networks. A multilayer perceptron (256 -> 4 x 512 -> 1) is a linen module, an nnx
module, a function in `jit`, or a scan over matrices. Two blocks of attention read 16 tokens. An
embedding of 20,000 rows of 64 is read by 32 tokens of every sample. Three convolutions of 3 x 3
with 16, 32 and 32 channels, the last two with stride 2, read images of 32 x 32 x 3. The kernel is
of the summed outputs of N samples, in float32. We compare our gradients in factors ("ntk"), our
per-sample Jacobians, and neural-tangents' implementations 1 and 2.

Methods take turns in one process for every network, on one core. Memory is XLA's temporaries. An
error is relative to the largest entry of the kernel by Jacobians. FLOP are XLA's count of the
compiled program, with the body of a loop once. For images a formula counts them too: a forward
pass, a backward pass, the gradients of all samples, and their products.

    python benchmarks/kernels/finite_kernels.py             # four minutes
    python benchmarks/kernels/finite_kernels.py --images    # half a minute
"""

import itertools
import statistics
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

import ntk
from benchmarks import harness

MEASURES = ("ntk/empirical", "ntk/regression/kernel_regression.py", "ntk/scores/kernel_based.py")

PEER, ROUNDS, SEED = "neural-tangents", 7, 0
WIDTH, DEPTH, INPUTS = 512, 4, 256
LAYERS = list(itertools.pairwise((INPUTS, *[WIDTH] * DEPTH, 1)))
ROWS, TOKENS = 20000, 32
SIDE, CHANNELS = 32, ((16, 1), (32, 2), (32, 2))  # of images; channels and strides
IMAGES = f"three convolutions, {SIDE} x {SIDE} x 3"
PRODUCT = 1024  # rows of the matrices for the rate of products


class Perceptron(nn.Module):
    widths: tuple[int, ...] = (WIDTH,) * DEPTH
    outputs: int = 1

    @nn.compact
    def __call__(self, x):
        for width in self.widths:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(self.outputs)(x)


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x))
            x = x + nn.Dense(64)(nn.gelu(nn.Dense(256)(nn.LayerNorm()(x))))
        return nn.Dense(1)(x.mean(1))


class Bag(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        return nn.Dense(1)(nn.relu(nn.Dense(64)(nn.Embed(ROWS, 64)(tokens).mean(1))))


class Convolutions(nn.Module):
    layers: tuple[tuple[int, int], ...] = CHANNELS

    @nn.compact
    def __call__(self, x):
        for channels, stride in self.layers:
            x = nn.relu(nn.Conv(channels, (3, 3), stride)(x))
        return nn.Dense(1)(x.mean((1, 2)))


def flop_of_images(n):
    """Return the FLOP of the kernel of ``Convolutions``, by the gradients of n images."""
    forward, weights, first, side, inputs = 0, 0, 0, SIDE, 3
    for channels, stride in CHANNELS:
        side, matrix = side // stride, 9 * inputs * channels
        forward, weights, inputs = forward + 2 * side**2 * matrix, weights + matrix, channels
        first = first or forward  # no gradient of the images is needed
    return n * (3 * forward - first) + 2 * n**2 * (weights + inputs)


def key(i):
    return jax.random.key(SEED + i)


def linen(model, x):
    return model.apply, jax.jit(model.init)(key(1), x[:1]), x


def normal(*shape):
    return jax.random.normal(key(0), shape)


def vectors(n):
    return normal(n, INPUTS)


def tokens(n):
    return jax.random.randint(key(0), (n, TOKENS), 0, ROWS)


def with_nnx(n):
    class Network(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List(nnx.Linear(i, j, rngs=rngs) for i, j in LAYERS)

        def __call__(self, x):
            for layer in self.layers[:-1]:
                x = nnx.relu(layer(x))
            return self.layers[-1](x)

    structure, params = nnx.split(Network(nnx.Rngs(SEED)))
    return lambda params, x: nnx.merge(structure, params)(x), params, vectors(n)


def scaled(*shape):
    return jax.random.normal(key(2), shape) / np.sqrt(shape[-2])


def in_jit(n):
    @jax.jit
    def apply(params, x):
        for w, b in params[:-1]:
            x = jax.nn.relu(x @ w + b)
        w, b = params[-1]
        return x @ w + b

    return apply, [(scaled(i, j), jnp.zeros(j)) for i, j in LAYERS], vectors(n)


def in_scan(n):
    def apply(params, x):
        def layer(x, w):
            return jax.nn.relu(x @ w[0] + w[1]), None

        x = jax.nn.relu(x @ params["first"])
        return lax.scan(layer, x, params["hidden"])[0] @ params["last"]

    params = {
        "first": scaled(INPUTS, WIDTH),
        "hidden": (scaled(DEPTH - 1, WIDTH, WIDTH), jnp.zeros((DEPTH - 1, WIDTH))),
        "last": scaled(WIDTH, 1),
    }
    return apply, params, vectors(n)


NETWORKS = {
    # name: network, number of samples, and the number for --quick
    "linen": (lambda n: linen(Perceptron(), vectors(n)), 100, 20),
    "nnx": (with_nnx, 100, 20),
    "function in jit": (in_jit, 100, 20),
    "layers in scan": (in_scan, 100, 20),
    "attention": (lambda n: linen(Attention(), normal(n, 16, 64)), 50, 10),
    "embedding": (lambda n: linen(Bag(), tokens(n)), 100, 10),
    IMAGES: (lambda n: linen(Convolutions(), normal(n, SIDE, SIDE, 3)), 50, 10),
}
SMOKE = ["linen", "nnx", "function in jit", "embedding"]


def peer(apply, implementation):
    options = {"vmap_axes": 0, "implementation": implementation}
    kernel = ntk.neural_tangents().empirical_ntk_fn(apply, **options)
    return lambda params, x: kernel(x, None, params)


def measure(names: list[str], size: str, peers: list[str]):
    """Return rows of all methods for each of these networks."""
    for name in names:
        build, many, few = NETWORKS[name]
        n = {"smoke": 3, "quick": few, "default": many}[size]
        yield from measured(name, build, n, peers, rounds=ROUNDS if size == "default" else 3)


def product_rate() -> float:
    """Return FLOP per second of a product of float32 matrices."""
    a = jax.random.normal(key(3), (PRODUCT, PRODUCT))
    run = harness.compiled(lambda a: a @ a, a)[0]
    times = harness.seconds(lambda: run(a), ROUNDS)
    return 2 * PRODUCT**3 / min(times)


def measured(name: str, build, n: int, peers: list[str], rounds: int):
    apply, params, x = build(n)
    rate = product_rate()
    methods = {
        "ntk": lambda p, x: ntk.empirical_kernel(apply, p, x, method="layerwise"),
        "ntk, jacobian": lambda p, x: ntk.empirical_kernel(apply, p, x, method="jacobian"),
    }
    if PEER in peers:
        methods |= {f"{PEER} {i}": peer(apply, i) for i in (1, 2)}
    compiled = {method: harness.compiled(fn, params, x)[0] for method, fn in methods.items()}
    kernels = {method: np.asarray(run(params, x)) for method, run in compiled.items()}
    # Memory is slow at first after another method.
    times = harness.in_turns(compiled, (params, x), rounds, time.perf_counter, warm=True)
    exact = kernels["ntk, jacobian"]
    for method, run in compiled.items():
        yield {
            **{"network": name, "method": method, "n": n, "s": times[method]},
            "mb": run.memory_analysis().temp_size_in_bytes / 1e6,
            "flop": run.cost_analysis()["flops"],
            "formula": flop_of_images(n) if name == IMAGES else None,
            "product_flop_per_s": rate,
            "error": float(np.abs(kernels[method] - exact).max() / np.abs(exact).max()),
        }


def digits(x: float) -> str:
    return f"{float(f'{x:.2g}'):g}"


def report(rows) -> str:
    rows = rows[1:]
    methods = list(dict.fromkeys(r["method"] for r in rows))
    lines = []
    for name in dict.fromkeys(r["network"] for r in rows):
        mine = {r["method"]: r for r in rows if r["network"] == name}
        ours, cells = statistics.median(mine["ntk"]["s"]), []
        for method in methods:
            row, median = mine[method], statistics.median(mine[method]["s"])
            times = f" ({digits(median / ours)}×)" if method != "ntk" else ""
            cells.append(f"{digits(median)} s{times}, {digits(row['mb'])} MB")
        lines.append([f"{name}, N = {mine['ntk']['n']}", *cells, f"{mine['ntk']['error']:.0e}"])
    return harness.table(["network", *methods, "error"], lines)


def shares(rows) -> str:
    """Report counted FLOP and their share of the rate of products, for our methods."""
    lines = []
    for row in rows:
        if "flop" not in row or row["method"].startswith(PEER):
            continue
        flop = row["formula"] or row["flop"]
        share = flop / statistics.median(row["s"]) / row["product_flop_per_s"]
        name = f"{row['network']}, N = {row['n']}: {row['method']}"
        formula = digits(row["formula"] / 1e9) if row["formula"] else "-"
        lines.append([name, digits(row["flop"] / 1e9), formula, f"{100 * share:.0f} %"])
    head = "kernel", "GFLOP, counted", "by the formula", "share of the rate of products"
    return harness.table(head, lines)


def main() -> None:
    own = {"images": {"action": "store_true", "help": "the images alone; own results file"}}
    flags = harness.command_line(__file__, __doc__, report, work=measure, peers=(PEER,), **own)
    results = harness.named(flags.results, "images") if flags.images else flags.results
    about = {"device": f"{harness.processor()}, one core, one thread"}
    rows = [harness.environment("flax", PEER, **about, seed=SEED, rounds=ROUNDS)]
    # Each network has a process, except with --smoke, where starting processes takes longest.
    chosen = [IMAGES] if flags.images else NETWORKS
    for names in [SMOKE] if flags.smoke else [[name] for name in chosen]:
        request = names, flags.size, flags.peers
        measurements = harness.in_own_process(__file__, *request, one_core=True)
        rows += [{"network": ", ".join(names)} | row for row in measurements]
    harness.finish(rows, results, report)


if __name__ == "__main__":
    main()
