"""What do neural tangent kernels and their smallest eigenvalues cost, and how accurate are they?

- *Empirical*: `J J'` of a ReLU network 256 -> 4 x 1024 -> 1, and of five convolutions on
  3 x 32 x 32 images, float32.
- *Infinite*: NNGP and NTK of ten layers (nine activations) on inputs of dimension 64, float64.
- *Eigenvalue*: the smallest eigenvalue of an infinite kernel, float64.

The truth is per-sample gradients in float64; the network's recursion over `ntk.dual`, with another
quadrature than `ntk.network_kernel`; and numpy's full spectrum. Kernels are compared at ten rows
and columns, spread over the whole. An error is relative to `sqrt(K_ii K_jj)`.

Runs use one core and one thread (Linux only). Every method has a process, because peak memory is
measured per process; sizes ascend in it. The methods for eigenvalues share one process. A
measurement that would take over LIMIT seconds, or over half the memory, is skipped, and *that*
figure is extrapolated.

    python benchmarks/kernels/kernels.py            # some eight minutes
    python benchmarks/kernels/kernels.py --only eigenvalue
"""

import functools
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
import scipy.sparse.linalg

import ntk
from benchmarks import harness
from benchmarks.kernels.finite_kernels import Convolutions, Perceptron
from ntk.empirical.kernels import empirical_kernel
from ntk.infinite.dual_activation import dual
from ntk.spectrum.certificate import certified_min_eigenvalue
from ntk.spectrum.eigenvalues import min_eigenvalue

MEASURES = ("ntk/infinite", "ntk/expectations", "ntk/empirical", "ntk/spectrum")

LIMIT, ENOUGH, ROUNDS, SEED = 75, 10, 7, 0  # seconds, seconds, calls
DEPTH, DIMENSION, SAMPLE = 10, 64, 10
PEER = "neural-tangents"


class Problem(NamedTuple):
    dtype: str
    data: Callable[[int], Any]  # size -> input of the methods
    methods: dict[str, Callable]  # data -> a compiled function without arguments; ours is first
    sizes: tuple[int, ...]
    small: dict[str, tuple[int, ...]]  # sizes for --quick, and for --smoke if it runs the problem
    describe: Callable[[Any, Any], dict]  # (result, truth) -> fields of the row
    truth: Callable = lambda data, rows: None  # the kernel at these rows and columns


def compiled(fn, *args):
    return functools.partial(harness.compiled(fn, *args)[0], *args)


def warm(call):
    """Run a self-compiling function once, and return it."""
    jax.block_until_ready(call())
    return call


def relative_error(approximate, exact):
    exact = np.asarray(exact, float)
    scale = np.sqrt(np.outer(exact.diagonal(), exact.diagonal()))
    return {"error": float(np.max(np.abs(approximate - exact) / scale))}


# ------------------------------------------------------------------------- empirical kernels


CONVOLUTIONS = (16, 1), (32, 2), (32, 1), (64, 2), (64, 1)  # channels and strides


def network(model, *shape):
    def data(size):
        keys = jax.random.split(jax.random.key(SEED))
        x = jax.random.normal(keys[0], (size, *shape))
        return model.apply, model.init(keys[1], x[:1]), x

    return data


def ours_empirical(method):
    def build(data):
        return warm(functools.partial(empirical_kernel, *data, method=method))

    return build


def gradients(apply, params, x):
    """Return per-sample gradients [n, number of parameters]."""
    one = jax.grad(lambda params, x: apply(params, x[None]).sum())
    per_sample = jax.vmap(one, in_axes=(None, 0))(params, x)
    return jnp.concatenate([g.reshape(len(x), -1) for g in jax.tree.leaves(per_sample)], axis=1)


def product_of_jacobians(data):
    apply, params, x = data

    def kernel(params, x):
        jacobian = gradients(apply, params, x)
        return jacobian @ jacobian.T

    return compiled(kernel, params, x)


def peer_empirical(implementation):
    def build(data):
        apply, params, x = data
        # Without vmap_axes both implementations take about twice as long.
        kernel = ntk.neural_tangents().empirical_ntk_fn(
            apply, vmap_axes=0, implementation=implementation
        )
        return compiled(lambda params, x: kernel(x, None, params), params, x)

    return build


def true_empirical(data, rows):
    apply, params, x = data
    with jax.enable_x64(True):
        params, x = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), float), (params, x[rows]))
        jacobian = jax.jit(gradients, static_argnums=0)(apply, params, x)
        return jacobian @ jacobian.T


# -------------------------------------------------------------------------- infinite kernels


def inputs(norms):
    def data(size):
        x = np.random.default_rng(SEED).normal(size=(size, DIMENSION))
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        return jnp.asarray(x * np.linspace(0.5, 1.5, size)[:, None] if norms == "any" else x)

    return data


def ours_infinite(activation):
    def build(x):
        layers = [activation] * (DEPTH - 1)
        return warm(lambda: ntk.network_kernel(x, activations=layers).ntk)

    return build


def peer_infinite(activation):
    def build(x):
        stax = ntk.neural_tangents().stax
        layers = [stax.Dense(1, W_std=math.sqrt(DIMENSION))]  # cancels 1 / d, which ours omits
        for _ in range(DEPTH - 1):
            if activation is ntk.relu:
                layers += [stax.Relu()]
            else:
                layers += [stax.ElementwiseNumerical(activation.smooth, deg=25)]
            layers += [stax.Dense(1, W_std=math.sqrt(2))]
        kernel = stax.serial(*layers)[-1]
        call = compiled(lambda x: kernel(x, None, ("nngp", "ntk")), x)
        return lambda: call().ntk

    return build


def true_infinite(activation):
    def truth(x, rows):
        s = x[rows] @ x[rows].T
        t, c = jnp.zeros_like(s), 1.0
        for _ in range(DEPTH - 1):
            v = c * s.diagonal()
            # The diagonal, computed in two ways, can exceed itself by a rounding error.
            bound = jnp.sqrt(v[:, None] * v)
            moments = v[:, None], v, jnp.clip(c * s, -bound, bound)
            slopes = dual(activation.derivative, activation.derivative, *moments)
            t = slopes * c * (s + t)
            s, c = dual(activation, activation, *moments), 2.0
        return c * (s + t)

    return truth


def infinite(activation, norms, sizes) -> Problem:
    peer = PEER if activation is ntk.relu else f"{PEER}, numerical"
    return Problem(
        dtype="float64",
        data=inputs(norms),
        methods={"ntk": ours_infinite(activation), peer: peer_infinite(activation)},
        sizes=sizes,
        small={"quick": (500,)},
        describe=relative_error,
        truth=true_infinite(activation),
    )


# ------------------------------------------------------------------------------- eigenvalues


def spectral_kernel(size):
    x = np.random.default_rng(SEED).normal(size=(size, DIMENSION)) / math.sqrt(DIMENSION)
    return ntk.network_kernel(jnp.asarray(x), activations=[ntk.relu, ntk.relu]).ntk


def on_host(fn):
    return lambda kernel: functools.partial(fn, np.asarray(kernel))


EIGENVALUES = {
    "ntk": lambda kernel: warm(functools.partial(min_eigenvalue, kernel)),
    "ntk, certified bound": on_host(certified_min_eigenvalue),
    "numpy eigvalsh": on_host(lambda kernel: np.linalg.eigvalsh(kernel)[0]),
    "jnp eigvalsh": lambda kernel: compiled(lambda k: jnp.linalg.eigvalsh(k)[0], kernel),
    "scipy eigh, subset": on_host(
        lambda kernel: scipy.linalg.eigh(kernel, subset_by_index=[0, 0], eigvals_only=True)[0]
    ),
    "scipy eigsh, sigma=0": on_host(
        lambda kernel: scipy.sparse.linalg.eigsh(kernel, 1, sigma=0, return_eigenvectors=False)[0]
    ),
}


# ------------------------------------------------------------------------------ the problems

PROBLEMS = {
    "empirical, dense": Problem(
        dtype="float32",
        data=network(Perceptron((1024,) * 4), 256),
        methods={
            "ntk": ours_empirical("auto"),
            f"{PEER} 1": peer_empirical(1),
            f"{PEER} 2": peer_empirical(2),
            "JAX by hand, J J'": product_of_jacobians,
        },
        sizes=(100, 200, 500),
        small={"quick": (20,)},
        describe=relative_error,
        truth=true_empirical,
    ),
    "empirical, conv": Problem(
        dtype="float32",
        data=network(Convolutions(CONVOLUTIONS), 32, 32, 3),
        methods={
            "ntk": ours_empirical("auto"),
            "ntk, jacobian": ours_empirical("jacobian"),
            f"{PEER} 2": peer_empirical(2),
        },
        sizes=(50, 100),
        small={"quick": (10,)},
        describe=relative_error,
        truth=true_empirical,
    ),
    "infinite, relu, unit norms": infinite(ntk.relu, "unit", (1000, 4000)),
    "infinite, relu, any norms": infinite(ntk.relu, "any", (1000, 4000)),
    "infinite, tanh, unit norms": infinite(ntk.tanh, "unit", (250, 500, 1000, 4000)),
    "infinite, swish, unit norms": infinite(ntk.swish, "unit", (250, 500, 1000, 4000)),
    "infinite, tanh, any norms": infinite(ntk.tanh, "any", (250, 4000)),
    "infinite, swish, any norms": infinite(ntk.swish, "any", (250, 4000)),
    "eigenvalue": Problem(
        dtype="float64",
        data=spectral_kernel,
        methods=EIGENVALUES,
        sizes=(1000, 2000, 4000),
        small={"quick": (500,), "smoke": (100,)},
        describe=lambda value, exact: {"value": float(value)},
    ),
}
SMALL = {
    "quick": ["empirical, dense", "infinite, tanh, unit norms", "eigenvalue"],
    "smoke": ["eigenvalue"],
}


# --------------------------------------------------------------------------- the measurement


def measure(name, methods, run_size) -> list[dict]:
    """Measure methods at all sizes of the problem, ascending, in this process."""
    problem = PROBLEMS[name]
    jax.config.update("jax_enable_x64", problem.dtype == "float64")
    sizes = problem.small.get(run_size) or problem.sizes
    enough = 1 if run_size in SMALL else ENOUGH
    rows, pending = [], []
    for size in sizes:
        data = problem.data(size)
        for method in methods:
            row = {"problem": name, "method": method, "size": size, "dtype": problem.dtype}
            rows.append(row)
            earlier = [r for r in rows if r["method"] == method and "s" in r]
            if reason := too_much(earlier, size, len(methods) == 1):
                row["skipped"] = reason
                continue
            try:
                result = time_calls(problem.methods[method], data, row, enough)
            except Exception as error:  # the other methods are still measured
                row["failed"] = f"{error} ".splitlines()[0]
                continue
            if len(methods) == 1:
                row["peak_gb"] = harness.resident_peak() / 1e3
            if getattr(result, "ndim", 0) == 2:
                result = np.asarray(result)[np.ix_(sample(size), sample(size))]
            pending.append((row, result))
        del data
    # The truth takes memory, so it comes last.
    for size, group in itertools.groupby(pending, lambda pair: pair[0]["size"]):
        exact = problem.truth(problem.data(size), sample(size))
        for row, result in group:
            row |= problem.describe(result, exact)
    return rows


def sample(size) -> np.ndarray:
    """Return the rows and columns that are compared."""
    return np.linspace(0, size - 1, SAMPLE).astype(int)


def time_calls(build, data, row, enough):
    start = time.perf_counter()
    call = build(data)
    row["compile_s"] = round(time.perf_counter() - start, 2)
    row["s"], row["cpu_s"] = [], []
    while not row["s"] or (sum(row["s"]) < enough and len(row["s"]) <= ROUNDS):
        result = None  # otherwise two results exist at once
        wall, cpu = time.perf_counter(), time.process_time()
        result = jax.block_until_ready(call())
        row["s"].append(round(time.perf_counter() - wall, 5))
        row["cpu_s"].append(round(time.process_time() - cpu, 5))
    if len(row["s"]) > 2:  # the first call is a warm-up
        row["s"], row["cpu_s"] = row["s"][1:], row["cpu_s"][1:]
    return result


def too_much(earlier, size, with_memory) -> str | None:
    """Return the reason not to run a method at this size, predicted from the last two sizes."""

    def expected(of, power):
        last = earlier[-1]
        if len(earlier) > 1:
            before = earlier[-2]
            power = math.log(of(last) / of(before)) / math.log(last["size"] / before["size"])
        return of(last) * (size / last["size"]) ** power

    if not earlier:
        return None
    if (seconds := expected(lambda r: statistics.median(r["s"]), 2)) > LIMIT:
        return f"about {seconds:.0f} s, extrapolated; the limit is {LIMIT} s"
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2e9
    if with_memory and (size_gb := expected(lambda r: r["peak_gb"], 1)) > most:
        return f"about {size_gb:.0f} GB, extrapolated; the limit is {most:.0f} GB"
    return None


def run(name, run_size, peers) -> list[dict]:
    problem = PROBLEMS[name]
    methods = [m for m in problem.methods if PEER in peers or not m.startswith(PEER)]
    together = run_size in SMALL or name == "eigenvalue"
    groups = [methods] if together else [[method] for method in methods]
    rows = []
    for group in groups:
        measurements = harness.in_own_process(__file__, name, group, run_size, one_core=True)
        if "failed" in measurements[0] and "problem" not in measurements[0]:  # the process ended
            measurements = [{"problem": name, "method": m} | measurements[0] for m in group]
        rows += measurements
    exact = harness.where(rows, method="numpy eigvalsh")
    truths = {row["size"]: row["value"] for row in exact if "value" in row}
    for row in rows:
        if "value" in row and row["size"] in truths:
            row["error"] = abs(row["value"] / truths[row["size"]] - 1)
    return rows


# -------------------------------------------------------------------------------- the report


def seconds(row) -> float:
    """Return the time to compare. For eigenvalues it is the CPU time."""
    return statistics.median(row["cpu_s" if row["problem"] == "eigenvalue" else "s"])


def find(rows, name, method, size) -> dict | None:
    return harness.measured(rows, problem=name, method=method, size=size)


def ratio(rows, row) -> float | None:
    """Return the ratio of a method's time to ours."""
    ours = find(rows, row["problem"], "ntk", row["size"])
    return seconds(row) / seconds(ours) if ours else None


def report(rows) -> str:
    rows, tables = rows[1:], []
    for kind in dict.fromkeys(r["problem"].split(",")[0] for r in rows):
        chosen = [r for r in rows if r["problem"].split(",")[0] == kind]
        sizes, lines = sorted({r["size"] for r in chosen if "size" in r}), []
        for name, method in dict.fromkeys((r["problem"], r["method"]) for r in chosen):
            label = ": ".join([*name.split(", ", 1)[1:], method])
            of_sizes = [find(rows, name, method, size) for size in sizes]
            errors = [r["error"] for r in of_sizes if r and "error" in r]
            cells = [cell(rows, r) if r else "-" for r in of_sizes]
            label = f"**{label}**" if method.startswith("ntk") else label
            lines.append([label, *cells, f"{max(errors):.1e}" if errors else "-"])
        tables.append(harness.table([kind, *(f"N = {size}" for size in sizes), "error"], lines))
    return "\n\n".join(tables)


def summary(rows) -> str:
    """Return a line for each problem and each other method, at the largest N that both ran."""
    lines, methods = [], dict.fromkeys((r["problem"], r["method"]) for r in rows[1:])
    for name, method in methods:
        runs = harness.where(rows[1:], problem=name, method=method)
        sizes = {r["size"] for r in runs if "s" in r}
        pairs = [(find(rows, name, "ntk", n), find(rows, name, method, n)) for n in sorted(sizes)]
        if method.startswith("ntk") or not (pairs := [p for p in pairs if all(p)]):
            continue
        ours, theirs = pairs[-1]
        cells = [f"{float(f'{seconds(row):.2g}'):g} s" for row in (ours, theirs)]
        times = f"{float(f'{ratio(rows, theirs):.2g}'):g}"
        lines.append([name, method, ours["size"], *cells, times, f"{theirs['error']:.0e}"])
    head = "problem", "compared with", "N", "ours", "theirs", "times as fast", "their error"
    return harness.table(head, lines)


def cell(rows, row) -> str:
    text = f"{float(f'{seconds(row):.2g}'):g} s"
    if row["method"] != "ntk" and (times := ratio(rows, row)):
        text += f" ({float(f'{times:.2g}'):g}×)"
    return text + (f", {row['peak_gb']:.2f} GB" if "peak_gb" in row else "")


def main() -> None:
    only = {"choices": PROBLEMS, "help": "measure this problem alone, into its own results file"}
    flags = harness.command_line(__file__, __doc__, report, work=measure, peers=(PEER,), only=only)
    results = harness.named(flags.results, flags.only) if flags.only else flags.results
    about = {"device": f"{harness.processor()}, one core, one thread"}
    rows = [harness.environment("flax", "scipy", PEER, **about, seed=SEED, rounds=ROUNDS)]
    for name in [flags.only] if flags.only else SMALL.get(flags.size, PROBLEMS):
        rows += (new := run(name, flags.size, flags.peers))
        print(*new, sep="\n", flush=True)
    harness.finish(rows, results, report)


if __name__ == "__main__":
    main()
