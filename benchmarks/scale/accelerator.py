"""Benchmarks that need an accelerator, run by one command with a time limit.

Parts run in order of value, each in a separate process of at most 90 seconds. Measurements in the
results file for this device and this JAX are not repeated, except for failed ones, so the same
command resumes.

    matmul           the rate of a matrix product, the reference for the others
    precision        the error of hypergradients next to their time, for three precisions of matrix
                     products, and of JAXopt, Optimistix and PyTorch
    mixed_mode       hypergradients through the training of a transformer, by order of derivatives
    curvature        Hessian products over gradients, of a ResNet-18 and of a small GPT
    infinite         kernels of infinite width, as large as the memory takes; a plain recursion
    empirical        kernels of finite networks, up to 20,000 images; share of the matmul rate
    hypergradient    unrolled and implicit hypergradients of a network, float32 and bfloat16
    operator         products with kernels larger than memory, over all devices, and their uses:
                     regression, leave-one-out errors, the smallest eigenvalue
    genotypes        naswot, synflow and eigen_nas of all 15,625 networks of NAS-Bench-201
    darts_step       a step of the published DARTS supernet, compared with PyTorch
    eigenvalue       smallest eigenvalue and certificate of a kernel of 20,000 rows
    sharded          an outer step with its rows over 1, 2, 4, ... of the available devices
    skips            activation and skip search at the paper's width
    darts            the published DARTS search, for as long as the minutes allow

    python benchmarks/scale/accelerator.py            # 9 minutes; results/accelerator.jsonl
    python benchmarks/scale/accelerator.py --only darts --part-seconds 3000 --minutes 60

A part that fails prints one line, and the next part begins. The exit status is then 1.
"""

import argparse
import dataclasses
import functools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilevel
import ntk
from benchmarks import harness
from benchmarks.hypergradients import hypergradients as ridge
from benchmarks.hypergradients import mixed_mode as transformer
from benchmarks.scale.large_kernel import kernel as lean
from benchmarks.scale.scaling import placed

HERE = Path(__file__).parents[1]
SEED, ROUNDS = 0, 5
MEASURES = (
    "bilevel/hypergradients",
    "bilevel/solvers",
    "bilevel/spaces/darts",
    "ntk/empirical",
    "ntk/infinite",
    "ntk/large",
)
PRECISIONS = {"TF32": "default", "highest": "highest", "bfloat16": "BF16_BF16_F32"}

Measurement = tuple[str, Callable[[], dict[str, Any]]]  # a name, and a function that measures it


@dataclasses.dataclass(frozen=True)
class Run:
    """The arguments of a part."""

    small: str  # "--smoke", "--quick", or empty for the sizes of an accelerator
    end: float  # time.time() when the minutes are over
    peers: list[str]  # of precision and darts_step


def timed(function: Callable, *args: Any, rounds: int = ROUNDS) -> dict[str, Any]:
    """Return seconds of compilation and of the median call after a warm-up, and peak memory."""
    compiled, seconds = harness.compiled(function, *args)
    return {"compile_s": seconds} | called(lambda: compiled(*args), rounds)


def unit_rows(n: int, inputs: int = 784) -> Any:
    """Return random inputs of unit norm, [n, inputs]."""
    x = jax.random.normal(jax.random.key(SEED), (n, inputs))
    return x / jnp.linalg.norm(x, axis=1, keepdims=True)


def called(call: Callable[[], Any], rounds: int) -> dict[str, Any]:
    """Return the seconds of the median call after a warm-up, and the device's peak memory."""
    row: dict[str, Any] = {"seconds": statistics.median(harness.seconds(call, rounds))}
    if peak := harness.device_peak():
        row["peak_gb"] = peak / 1e9
    return row


# ------------------------------------------------------------------------------------- the parts


def matmul(run: Run) -> Iterator[Measurement]:
    n = 256 if run.small else 8192

    def rate(dtype, precision):
        a = jax.random.normal(jax.random.key(SEED), (n, n)).astype(dtype)
        row = timed(lambda a: jnp.matmul(a, a, precision=precision), a)
        return row | {"tflops": 2 * n**3 / row["seconds"] / 1e12}

    for pair in ("float32", "highest"), ("float32", "default"), ("bfloat16", "default"):
        yield ", precision ".join(pair), functools.partial(rate, *pair)


def precision(run: Run) -> Iterator[Measurement]:
    """Measure ridge regression with a penalty for each weight; the truth is in float64."""
    if run.small:
        ridge.N, ridge.P = ridge.SMOKE
    peers = {name: ridge.PEERS[name] for name in run.peers if name in ridge.PEERS}
    # CPUs do not multiply bfloat16 with float32 sums.
    ours = {name: PRECISIONS[name] for name in PRECISIONS if name != "bfloat16" or not run.small}
    names = {"iid": "condition 6", "hard": "condition 560"}

    def measure(fn, case, level, is_jax):
        with jax.default_matmul_precision(level):
            row = ridge.compile_and_check(fn, case, jax.device_put(case.args), is_jax)
            row |= called(row.pop("call"), ROUNDS)
        return {name: value for name, value in row.items() if name != "ms"}

    for problem in ("iid",) if run.small else ("iid", "hard"):
        case = ridge.setup(problem, "float32")
        for kind in ("implicit", "closed form"):
            libraries = {"ours": ridge.ours, "by hand": ridge.jax_by_hand} | peers
            for library, methods in libraries.items():
                levels = ours if library == "ours" else {"highest": "highest"}
                for name, fn in methods(kind, case).items():
                    for level, value in levels.items():
                        title = f"{names[problem]}, {kind}: {name}, {level}"
                        yield title, functools.partial(measure, fn, case, value, library != "torch")


def mixed_mode(run: Run) -> Iterator[Measurement]:
    sizes = transformer.Sizes(width=512, heads=8, length=128, texts=64)
    if run.small:
        sizes = transformer.SIZES["smoke"]

    def measure(fn, layers):
        shape = 2, 2, sizes.texts, sizes.length
        batches = jax.random.randint(jax.random.key(SEED), shape, 0, sizes.bytes)
        w = transformer.weights(sizes, layers, scan=True)
        return timed(fn, jnp.zeros(sizes.texts), w, tuple(batches[0]), tuple(batches[1]), rounds=3)

    for layers, steps in ((1, 2),) if run.small else ((2, 16), (8, 4)):
        methods = transformer.methods(*transformer.losses(sizes, scan=True), steps)
        for name, fn in methods.items():
            title = f"{layers} layers in a scan, {steps} steps: {name}"
            yield title, functools.partial(measure, fn, layers)


def curvature(run: Run) -> Iterator[Measurement]:
    """Measure a Hessian-vector product next to a gradient. Implicit solvers take such products."""
    import flax.linen as nn

    width, images, side = (4, 2, 8) if run.small else (64, 128, 32)

    conv = functools.partial(nn.Conv, use_bias=False)
    norm = functools.partial(nn.BatchNorm, use_running_average=False)

    class Block(nn.Module):
        channels: int
        stride: int

        @nn.compact
        def __call__(self, x):
            y = nn.relu(norm()(conv(self.channels, (3, 3), self.stride)(x)))
            y = norm()(conv(self.channels, (3, 3))(y))
            if x.shape != y.shape:
                x = norm()(conv(self.channels, (1, 1), self.stride)(x))
            return nn.relu(x + y)

    class ResNet18(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(norm()(conv(width, (3, 3))(x)))
            for stage in range(4):
                for block in range(2):
                    stride = 2 if stage and not block else 1
                    x = Block(width * 2**stage, stride)(x)
            return nn.Dense(10)(x.mean((1, 2)))

    def resnet():
        net, key = ResNet18(), jax.random.key(SEED)
        x = jax.random.normal(key, (images, side, side, 3))
        y = jax.random.randint(key, (images,), 0, 10)
        variables = net.init(key, x)

        def loss(w):
            logits = net.apply(variables | {"params": w}, x, mutable=["batch_stats"])[0]
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        return loss, variables["params"]

    def gpt():
        sizes, layers = transformer.Sizes(width=384, heads=6, length=256, texts=16), 6
        if run.small:
            sizes, layers = transformer.SIZES["smoke"], 1
        lower, _ = transformer.losses(sizes, scan=True)
        shape = 2, sizes.texts, sizes.length
        batch = tuple(jax.random.randint(jax.random.key(SEED), shape, 0, sizes.bytes))
        alpha = jnp.zeros(sizes.texts)
        return lambda w: lower(w, alpha, batch), transformer.weights(sizes, layers, scan=True)

    def measure(made):
        loss, w = made()
        gradient = timed(jax.grad(loss), w)
        product = timed(lambda w, v: jax.jvp(jax.grad(loss), (w,), (v,))[1], w, w)
        row = {"weights": sum(leaf.size for leaf in jax.tree.leaves(w))}
        row |= product | {"gradient_s": gradient["seconds"]}
        return row | {"over_gradient": row["seconds"] / row["gradient_s"]}

    yield "ResNet-18, 128 images of 32 x 32", functools.partial(measure, resnet)
    yield "GPT of 6 layers of 384, 16 texts of 256 bytes", functools.partial(measure, gpt)


def hypergradient(run: Run) -> Iterator[Measurement]:
    """Measure a network with one hidden layer; alpha has the weights of its training rows."""
    rows, inputs, steps = (64, 16, 4) if run.small else (10_000, 784, 100)
    keys = jax.random.split(jax.random.key(SEED), 4)

    def losses(dtype):
        def each(w, x, y):
            hidden = jnp.tanh(x.astype(dtype) @ w["a"])
            return optax.losses.softmax_cross_entropy_with_integer_labels(
                (hidden @ w["b"]).astype(jnp.float32), y
            )

        def lower(w, alpha, batch):
            decay = sum(jnp.sum(leaf.astype(jnp.float32) ** 2) for leaf in jax.tree.leaves(w))
            return jnp.mean(jax.nn.sigmoid(alpha) * each(w, *batch)) + 1e-3 * decay

        return bilevel.Problem(lower, lambda w, alpha, batch: jnp.mean(each(w, *batch)))

    def measure(dtype, width, solver):
        w = {
            "a": jax.random.normal(keys[0], (inputs, width), dtype) / inputs**0.5,
            "b": jax.random.normal(keys[1], (width, 10), dtype) / width**0.5,
        }
        x = jax.random.normal(keys[2], (rows, inputs))
        batch = x, jax.random.randint(keys[3], (rows,), 0, 10)
        problem, alpha = losses(dtype), jnp.zeros(rows)
        fn = bilevel.hypergradient(problem, solver, diagnostics=False)
        both = jax.jit(lambda *args: fn(*args)[:2])  # value and gradient
        row = timed(both, alpha, w, batch, batch)
        gradient = timed(jax.grad(problem.lower), w, alpha, batch)
        value, grad = both(alpha, w, batch, batch)
        size = {"weights": inputs * width + 10 * width, "lower_gradients": steps}
        row["of_lower_gradients"] = row["seconds"] / gradient["seconds"] / steps
        return row | size | {"value": float(value), "norm": float(jnp.linalg.norm(grad))}

    sgd = optax.sgd(0.1, momentum=0.9)
    solvers = {
        f"unrolled, {steps} steps": bilevel.unrolled(sgd, steps),
        f"truncated, last {steps // 4}": bilevel.unrolled(sgd, steps, backprop=steps // 4),
        # Use a fixed number of products, because conjugate gradients stop at negative curvature.
        f"implicit, {steps} products": bilevel.implicit(
            bilevel.unrolled(sgd, steps), bilevel.neumann(steps, 0.1)
        ),
    }
    for width in (8,) if run.small else (256, 4096):
        for dtype in ("float32", "bfloat16"):
            for name, solver in solvers.items():
                call = functools.partial(measure, jnp.dtype(dtype), width, solver)
                yield f"{name}, width {width}, {dtype}", call


def empirical(run: Run) -> Iterator[Measurement]:
    from benchmarks.kernels.finite_kernels import Perceptron

    width, pixels = (16, 64) if run.small else (1024, 784)

    def measure(n):
        net = Perceptron((width, width), 10)
        x = jax.random.normal(jax.random.key(SEED), (n, pixels))
        params = net.init(jax.random.key(1), x[:1])
        row = called(lambda: ntk.empirical_kernel(net.apply, params, x), 3)
        layers = pixels + width, 2 * width, width + 10  # inputs and outputs
        return row | {"n": n, "tflops": 2 * n**2 * sum(layers) / row["seconds"] / 1e12}

    for n in (20,) if run.small else (1000, 5000, 10_000, 20_000):
        yield f"two hidden layers of {width}, N = {n}", functools.partial(measure, n)


def infinite(run: Run) -> Iterator[Measurement]:
    @jax.jit
    def recursion(x):
        """Return NNGP and NTK of three ReLU layers by a plain recursion (Cho & Saul 2009)."""
        nngp = ntk_ = jnp.matmul(x, x.T, precision="highest")
        for _ in range(3):
            angle = jnp.arccos(jnp.clip(nngp, -1, 1))  # the diagonal stays 1
            slope = (jnp.pi - angle) / jnp.pi
            nngp = (jnp.sin(angle) + (jnp.pi - angle) * nngp) / jnp.pi
            ntk_ = nngp + ntk_ * slope
        return nngp, ntk_

    def measure(n, kernels):
        x = unit_rows(n, 100)
        row = called(lambda: tuple(kernels(x)), 2)
        return row | {"n": n, "pairs_per_s": n**2 / 2 / row["seconds"]}

    def ours(n, kernels):
        row = measure(n, kernels)
        return row | {"error": float(kernels(unit_rows(n, 100)[:200]).error.max())}

    for n in (20,) if run.small else (1000, 5000, 20_000, 50_000):
        for activation in (ntk.relu, ntk.tanh):
            kernels = functools.partial(ntk.network_kernel, activations=[activation] * 3)
            yield f"{activation.name}, N = {n}", functools.partial(ours, n, kernels)
        yield f"relu by a plain recursion, N = {n}", functools.partial(measure, n, recursion)


def sharded(run: Run) -> Iterator[Measurement]:
    """Measure hyper-cleaning with a hyperparameter for each row, the step of scaling.py."""
    rows, devices = 64 if run.small else 1_000_000, 1

    def measure(devices):
        state, data, step = placed(rows, devices)
        return timed(step, state, data) | {"rows": rows}

    while devices <= jax.device_count():
        yield f"rows over {devices} devices", functools.partial(measure, devices)
        devices *= 2


def operator(run: Run) -> Iterator[Measurement]:
    count = 1 << (jax.device_count().bit_length() - 1)  # a power of two, which divides the rows
    mesh = jax.make_mesh((count,), ("rows",), devices=jax.devices()[:count])
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))

    def made(kernel, n):
        return ntk.KernelOperator(kernel, jax.device_put(unit_rows(n), rows))

    def product(kernel, n):
        K, v = made(kernel, n), jnp.ones((n, 10))
        row = called(lambda: K @ v, 2)
        return row | {"n": n, "entries_per_s": n**2 / 2 / row["seconds"]}

    def regression(n, rank):
        K, y = made(lean, n), jax.random.normal(jax.random.key(1), (n, 10))
        start = time.perf_counter()
        partial = jax.block_until_ready(ntk.partial_cholesky(K, rank, key=jax.random.key(2)))
        factor = time.perf_counter() - start
        fit = ntk.iterative_regression(K, y, penalty=0.1, preconditioner=partial)
        row = {"residual": float(fit.relative.max()), "passes": int(fit.steps)}
        row |= {"factor_s": factor, "seconds": time.perf_counter() - start, "n": n, "rank": rank}
        start, key = time.perf_counter(), jax.random.key(3)
        left_out = ntk.leave_one_out_estimate(K, fit, key=key, preconditioner=partial)
        row["largest_standard_error"] = float(left_out.standard_error.max())
        row["leave_one_out_s"], start = time.perf_counter() - start, time.perf_counter()
        interval = ntk.eigenvalue_interval(
            K, key=key, preconditioner=partial, steps=passes, block=4
        )
        row |= {"lower": float(interval.lower), "upper": float(interval.upper)}
        row["eigenvalue_s"] = time.perf_counter() - start
        return row | {"peak_gb": (harness.device_peak() or 0) / 1e9}

    exact = functools.partial(ntk.network_kernel, activations=[ntk.relu, ntk.relu])
    for n in (40,) if run.small else (60_000, 500_000):
        for name, kernel in (("network_kernel", exact), ("two ReLU layers, lean", lean)):
            yield f"{name}, N = {n}", functools.partial(product, kernel, n)
    n, rank, passes = (40, 8, 5) if run.small else (200_000, 4000, 20)
    yield f"regression, N = {n}", functools.partial(regression, n, rank)


def eigenvalue(run: Run) -> Iterator[Measurement]:
    n = 50 if run.small else 20_000

    def kernel():
        return ntk.network_kernel(unit_rows(n), activations=[ntk.relu, ntk.relu])

    def smallest():
        K = kernel().ntk
        return called(lambda: ntk.min_eigenvalue(K), 1) | {"n": n}

    def certificate():
        matrix = kernel()
        start = time.perf_counter()
        bound = ntk.certified_min_eigenvalue(matrix)
        row = {"n": n, "seconds": time.perf_counter() - start, "certified": float(bound)}
        return row | {"largest_error": float(np.max(matrix.error))}

    yield f"min_eigenvalue, N = {n}", smallest
    yield f"certified_min_eigenvalue, N = {n}", certificate


def genotypes(run: Run) -> Iterator[Measurement]:
    """Measure the cost of scores on random images; their values mean nothing."""
    from bilevel.spaces.nasbench201 import all_networks, genotypes, score_networks

    count, at_once = (3, 1) if run.small else (15_625, 64)
    side, batch_size = (8, 4) if run.small else (32, 32)
    networks = all_networks(**({"cells": 1, "channels": 4} if run.small else {}))
    x = jax.random.normal(jax.random.key(SEED), (batch_size, side, side, 3))
    batch = x, jax.random.randint(jax.random.key(1), (batch_size,), 0, 10)

    def measure(name):
        w = networks.init(jax.random.key(2), x.shape[1:])
        start = time.perf_counter()
        score_networks([name], networks, w, genotypes()[:count], batch, at_once=at_once)
        return {"networks": count, "seconds": time.perf_counter() - start}

    for name in ("naswot", "synflow", "eigen_nas"):
        yield name, functools.partial(measure, name)


def darts_step(run: Run) -> Iterator[Measurement]:
    peers = [name for name in run.peers if name == "torch"]
    flags = run.small or "--full", "--peers", *peers
    name = "compared with PyTorch" if peers else "without PyTorch"
    yield name, functools.partial(command, str(HERE / "deep_search/darts_step.py"), *flags)


def skips(run: Run) -> Iterator[Measurement]:
    path = str(HERE / "deep_search/activation_skip_search.py")
    yield "the paper's width", functools.partial(command, path, run.small or "--full")


def darts(run: Run) -> Iterator[Measurement]:
    """Run the command with the published sizes. A longer session resumes its run."""
    sizes = {"cells": 8, "channels": 16, "train": 25_000, "valid": 25_000, "steps": 19_550}
    if run.small:
        sizes = {"cells": 2, "channels": 2, "train": 40, "valid": 40, "steps": 2, "pixels": 8}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
    if run.small:  # two candidates, because compilation dominates here
        flags += ["--data=digits", "--epochs=1", "--random=0", "--batch-size=16"]
        flags += ["--operations", "none", "skip_connect"]
    folder = Path(tempfile.mkdtemp()) if run.small else HERE.parent / "runs"
    out = folder / "accelerator_darts"
    if not run.small:
        flags += ["--data=cifar10", "--batch-size=64"] + ["--resume"] * out.exists()

    def measure():
        arguments = "-m", "bilevel", "search-darts", *flags, f"--out={out}"
        start = time.perf_counter()
        try:
            return command(*arguments, timeout=run.end - time.time())
        except subprocess.TimeoutExpired:  # its progress is on disk, and a later session resumes
            done = [int(p.stem) for p in out.rglob("search/*/*.npz") if p.stem.isdigit()]
            seconds = time.perf_counter() - start
            return {"unfinished": True, "seconds": seconds, "steps": max(done, default=0)}

    yield "the published search", measure


def command(*arguments: str, timeout: float | None = None) -> dict[str, Any]:
    """Return the seconds that a command takes, and its last output."""
    start = time.perf_counter()
    words = [sys.executable, "-W", "ignore", *arguments]
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        raise RuntimeError((done.stderr or done.stdout).strip().splitlines()[-1])
    return {"seconds": time.perf_counter() - start, "output": done.stdout[-6000:]}


PARTS: dict[str, Callable[[Run], Iterator[Measurement]]] = {
    part.__name__: part
    for part in (
        *(matmul, precision, mixed_mode, curvature, infinite, empirical, hypergradient, operator),
        *(genotypes, darts_step, eigenvalue, sharded, skips, darts),
    )
}
# Programs of many small operations: autotuning would take longer than it saves.
UNTUNED = "infinite", "hypergradient", "sharded", "skips"
SMOKE = "matmul", "darts_step"  # one measures by itself, one starts another script

# --------------------------------------------------------------------------------------- the run


def here() -> dict[str, str]:
    """Return the device and JAX's version, which identify a measurement."""
    return {"device": jax.devices()[0].device_kind, "jax": jax.__version__}


def latest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the last row of each measurement. A repetition replaces a failure."""
    keys = "part", "name", "device", "jax"
    return list({tuple(row[key] for key in keys): row for row in rows}.values())


def work(part: str, run: Run, out: Path) -> None:
    """Run the measurements of a part that ``out`` does not contain yet; one process."""
    place = here()
    rows = [row for row in latest(harness.read(out)) if place.items() <= row.items()]
    known = {(r["part"], r["name"]) for r in rows if not {"unfinished", "failed"} & r.keys()}
    for name, measure in PARTS[part](run):
        if (part, name) in known:
            continue
        try:
            numbers = measure()
        except Exception as error:  # the failure is a result, and the next may succeed
            numbers = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        row = {"part": part, "name": name, **numbers, **place}
        harness.append(out, row)
        print(shown(row), flush=True)


def shown(row: dict[str, Any]) -> str:
    """Format a measurement in a line."""
    hidden = {"part", "name", "device", "jax", "output"}
    numbers = {name: value for name, value in row.items() if name not in hidden}
    words = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in numbers.items())
    return f"{row['part']}: {row['name']}: {', '.join(words)}"


def report(rows: list[dict[str, Any]]) -> str:
    """Report a table for every device and JAX, and the output of other benchmarks there."""
    parts: list[str] = []
    for device, version in sorted({(r["device"], r["jax"]) for r in rows}):
        here = latest(harness.where(rows, device=device, jax=version))
        lines = [[row["part"], *shown(row).split(": ", 2)[1:]] for row in here]
        parts += [f"{device}, JAX {version}", harness.table(["part", "what", "measured"], lines)]
        parts += [row["output"] for row in here if "output" in row]
    return "\n\n".join(parts)


MEMORY_RATE = 3.0e12  # bytes a second of an H100, measured on 2026-11-26


def gpu_table(rows: list[dict[str, Any]]) -> str:
    """Report the H100's times next to the limit by the resource that each kernel needs most."""
    rows = [row for row in latest(rows) if "H100" in row["device"] and "seconds" in row]
    product = harness.where(rows, part="matmul", name="float32, precision highest")[0]["tflops"]
    lines = []
    for row in rows:
        part, limit, resource = row["part"], None, "-"
        if part == "infinite":  # two kernels and their errors
            limit, resource = 12 * row["n"] ** 2 / MEMORY_RATE, "writing the results to memory"
        elif part == "empirical":
            limit = row["seconds"] * row["tflops"] / product
            resource = "float32 matrix products"
        elif part == "hypergradient":
            resource = f"{row['of_lower_gradients']:.2f} lower gradients for each step"
        elif part == "matmul":
            resource = f"{row['tflops']:.0f} TFLOP/s"
        times = f"{row['seconds'] / limit:,.0f}" if limit else "-"
        peak = f"{row['peak_gb']:.2g} GB" if "peak_gb" in row else "-"
        name = f"{part}: {row['name']}"
        milliseconds = float(f"{1e3 * row['seconds']:.3g}")
        lines.append([name, f"{milliseconds:,g} ms", peak, resource, times])
    head = "measurement", "time", "peak memory", "limiting resource", "times its limit"
    return harness.table(head, lines)


def main() -> None:
    """Run the parts one after the other, each in a separate process."""
    flags = harness.command_line(
        __file__,
        __doc__,
        report,
        peers=("jaxopt", "optimistix", "torch"),
        minutes={"type": float, "default": 9.0, "help": "for all parts together"},
        part_seconds={"type": float, "default": 90.0, "help": "for each part"},
        only={"nargs": "*", "choices": list(PARTS), "help": "these parts alone"},
        part={"help": argparse.SUPPRESS},  # an argument of child processes
    )
    # PyTorch is compared with one part only, so every run writes to the script's own file.
    out = flags.results or harness.RESULTS / "accelerator.jsonl"
    small = f"--{flags.size}" if flags.small else ""
    if flags.part:
        work(flags.part, Run(small, time.time() + 60 * flags.minutes, flags.peers), out)
        return
    if small:
        out = Path(tempfile.mkdtemp()) / "accelerator.jsonl"
    end, before, failed = time.monotonic() + 60 * flags.minutes, len(harness.read(out)), []
    over = f"stopped, as the {flags.minutes:g} minutes are over."
    for part in flags.only or (SMOKE if flags.smoke else PARTS):
        left = min(end - time.monotonic(), flags.part_seconds)
        if left <= 0:
            print(f"{part}: {over}", flush=True)
            break
        # Commands that a part starts share the device's memory.
        environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        if part in UNTUNED:
            environment["XLA_FLAGS"] = harness.xla_flags("--xla_gpu_autotune_level=0")
        own = [sys.executable, __file__, "--part", part, "--out", str(out)]
        own += [*filter(None, [small]), "--peers", *flags.peers]
        own += [f"--minutes={(left - 10) / 60}"]  # the part tries to end by itself
        # Use a new session, so that child processes end with the part.
        with subprocess.Popen(own, env=environment, start_new_session=True) as process:
            try:
                if status := process.wait(max(1, left)):
                    failed.append({"part": part, "failed": f"its process ended with {status}"})
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                print(f"{part}: stopped after {left:.0f} s; a later call resumes.", flush=True)
    rows = harness.read(out)
    if not failed:
        harness.check_rows(rows)
    print(f"\n{report(rows)}")
    harness.check_failed([*rows[before:], *failed])


if __name__ == "__main__":
    main()
