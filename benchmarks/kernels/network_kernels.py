"""What do exact kernels of convolutional and biased networks cost, and how accurate are they?

We compare with neural-tangents' stax. Its tanh uses quadrature of degree 25, the only tanh it has.
Both are compiled and take turns. There are five networks: dense layers with biases (inputs of
dimension 100), convolutions and flatten, convolutions and global average pooling (16 x 16 x 3), a
residual network, and Myrtle-5 on CIFAR-10. Myrtle-5 is in float32, the others are in float64. Times
are CPU seconds of one core and one thread. Errors are relative to the largest entry.

If the process crashes, ours runs again without theirs, to show that theirs crashed. This happens
for tanh with pooling: a segmentation fault on jaxlib 0.10.2. The truth is our kernel in float64.
The tests check it against neural-tangents' closed forms to 1e-10, and against quadrature. For
float64 the difference of the two is shown, with our own bound.

    python benchmarks/kernels/network_kernels.py               # some ten minutes
    python benchmarks/kernels/network_kernels.py --quick --peers neural-tangents   # with stax
"""

import math
import time

import jax
import jax.numpy as jnp
import numpy as np

import ntk
from benchmarks import harness
from ntk import networks as nets

MEASURES = ("ntk/networks", "ntk/expectations")

WEIGHTS = (2.0, 0.01)  # variances of weights and biases
STD = {"W_std": math.sqrt(WEIGHTS[0]), "b_std": math.sqrt(WEIGHTS[1])}
ACTIVATIONS = ("relu", "erf", "gelu", "tanh")
PEER = "neural-tangents"
ENDS = "conv, pooling", "tanh"  # theirs crashes the process here, a known limit


def activation(name):
    stax = ntk.neural_tangents().stax
    peers = {"relu": stax.Relu(), "erf": stax.Erf(), "gelu": stax.Gelu()}
    if name not in peers:
        peers[name] = stax.ElementwiseNumerical(getattr(ntk, name).smooth, deg=25)
    return nets.act(getattr(ntk, name)), peers[name]


def layers(name):
    """Return pairs of our layer and theirs."""
    stax = ntk.neural_tangents().stax
    return {
        "act": activation(name),
        "dense": (nets.dense(*WEIGHTS), stax.Dense(1, **STD)),
        "conv": (nets.conv(3, *WEIGHTS), stax.Conv(1, (3, 3), padding="SAME", **STD)),
        "flatten": (nets.flatten(), stax.Flatten()),
        "gap": (nets.global_average_pool(), stax.GlobalAvgPool()),
        "pool": (nets.average_pool(2), stax.AvgPool((2, 2), strides=(2, 2))),
    }


def serial(name, words):
    ours, theirs = zip(*(layers(name)[word] for word in words.split()), strict=True)
    return nets.serial(*ours), ntk.neural_tangents().stax.serial(*theirs)


def residual(name):
    stax = ntk.neural_tangents().stax
    start, branch, end = (serial(name, w) for w in ("conv", "act conv act conv", "act gap dense"))
    block = stax.serial(stax.FanOut(2), stax.parallel(branch[1], stax.Identity()), stax.FanInSum())
    ours = nets.serial(start[0], nets.residual(branch[0]), end[0])
    return ours, stax.serial(start[1], block, end[1])


FLAT, POOLED = "flatten dense", "gap dense"
NETWORKS = {
    "dense, biases": (lambda name: serial(name, "dense act " * 4 + "dense"), (1000, 100), 100),
    "conv, flatten": (lambda name: serial(name, "conv act " * 3 + FLAT), (128, 16, 16, 3), 16),
    "conv, pooling": (lambda name: serial(name, "conv act " * 2 + POOLED), (8, 16, 16, 3), 3),
    "residual": (residual, (6, 12, 12, 3), 3),
}


def myrtle():
    layer = nets.serial(nets.conv(3, 2.0), nets.act(ntk.relu))
    small = nets.serial(layer, nets.average_pool(2))
    return nets.serial(layer, small, small, small, nets.global_average_pool(), nets.dense())


def myrtle_of_stax():
    stax = ntk.neural_tangents().stax
    layer = stax.Conv(1, (3, 3), padding="SAME", W_std=math.sqrt(2)), stax.Relu()
    pool = (stax.AvgPool((2, 2), strides=(2, 2)),)
    parts = (*layer, *(layer + pool) * 3, stax.GlobalAvgPool(), stax.Dense(1))
    return stax.serial(*parts)


def images(n):
    import bilevel.data

    x = np.asarray(bilevel.data.load("cifar10", train_size=10_000).x_train[:n], float)
    return ((x - x.mean((0, 1, 2))) / x.std((0, 1, 2))).reshape(n, 32, 32, 3)


def compare(name, kind, quick, alone=False) -> dict:
    """Measure both, three times in turns, or ours alone."""
    make, shape, small = NETWORKS[name]
    if quick or kind == "tanh":
        shape = (small, *shape[1:])
    x = jnp.asarray(np.random.default_rng(0).standard_normal(shape))
    net, (_, _, kernel) = make(kind)
    calls = [net.kernel, jax.jit(lambda x: kernel(x, None, ("nngp", "ntk")))][: 2 - alone]
    return in_turns(calls, x) | {"network": name, "activation": kind, "n": len(x)}


def in_turns(calls, x) -> dict:
    row = {"dtype": str(x.dtype), "part": "comparison"}
    kernels = []
    for call in calls:
        start = time.perf_counter()
        kernels.append(jax.block_until_ready(call(x)))
        row.setdefault("first_s", []).append(round(time.perf_counter() - start, 2))
    row |= harness.in_turns(dict(zip(("ours_s", "theirs_s"), calls, strict=False)), (x,), 3)
    scale = float(jnp.max(jnp.abs(kernels[0].ntk)))
    if len(kernels) > 1:
        row["difference"] = float(jnp.max(jnp.abs(kernels[0].ntk - kernels[1].ntk))) / scale
    row["bound"] = float(jnp.max(kernels[0].error)) / scale
    return row


def work(part, *what):
    """Run in a separate process on one core. The last of ``what`` is whether ours runs alone."""
    if part == "compare":
        jax.config.update("jax_enable_x64", True)
        yield compare(*what)
        return
    n = what[0]
    x = images(n)
    if part == "myrtle":
        calls = [myrtle().kernel]
        if not what[1]:
            calls.append(jax.jit(lambda x: myrtle_of_stax()[2](x, None, ("nngp", "ntk"))))
        row = in_turns(calls, jnp.asarray(x, jnp.float32))
        yield row | {"network": "Myrtle-5, CIFAR-10", "activation": "relu", "n": n}
        return
    # Stax's own layer crashes with a segmentation fault in float64 here.
    rough = myrtle().kernel(jnp.asarray(x, jnp.float32))
    jax.config.update("jax_enable_x64", True)
    exact = myrtle().kernel(jnp.asarray(x, float)).ntk
    scale = float(jnp.max(exact))
    error = float(np.max(np.abs(np.asarray(rough.ntk, float) - exact))) / scale
    bound = float(jnp.max(rough.error)) / scale
    yield {"part": "float32", "network": "Myrtle-5, CIFAR-10", "error": error, "bound": bound}


def report(rows) -> str:
    lines = []
    for row in harness.where(rows, part="comparison"):
        ours, case = min(row["ours_s"]), f"{row['network']}: {row['activation']}"
        cells = [row.get("theirs_failed", ""), "", ""]
        if "theirs_s" in row:
            theirs = min(row["theirs_s"])
            cells = [f"{theirs:.3f}", f"{theirs / ours:.1f}", f"{row['difference']:.0e}"]
        lines.append([case, row["dtype"], row["n"], f"{ours:.3f}", *cells, f"{row['bound']:.0e}"])
    head = "network", "type", "n", "ours, s", "stax, s", "stax / ours", "difference", "our bound"
    text = harness.table(head, lines)
    for row in harness.where(rows, part="float32"):
        text += f"\n\n{row['network']}: float32 is {row['error']:.0e} off float64, "
        text += f"its bound says {row['bound']:.0e}."
    for row in rows:
        if "failed" in row:
            text += f"\n\nFailed: {row.get('case')}: {row['failed']}"
    return text


def main() -> None:
    flags = harness.command_line(__file__, __doc__, report, work=work, peers=(PEER,))
    rows, alone = [harness.environment(PEER)], not flags.peers
    cases = [("compare", name, kind, flags.small) for name in NETWORKS for kind in ACTIVATIONS]
    if flags.small:
        cases = cases[:1] if flags.smoke else cases[::4]
    else:
        cases += [("myrtle", 3), ("float32", 3)]
    for case in cases:
        measurements = harness.in_own_process(__file__, *case, alone, one_core=True)
        if case[1:3] == ENDS and not alone and "failed" in measurements[0]:
            theirs = measurements[0]["failed"]
            measurements = harness.in_own_process(__file__, *case, True, one_core=True)
            measurements = [row | {"theirs_failed": theirs} for row in measurements]
        rows += [row | {"case": case[1:3]} for row in measurements]
        print(rows[-1], flush=True)
    harness.finish(rows, flags.results, report)


if __name__ == "__main__":
    main()
