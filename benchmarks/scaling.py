"""How far does a search scale over devices, and what goes between them?

Hyper-cleaning: a softmax classifier of 784 inputs and 10 classes below, a weight for every training
row above, `unrolled` with ten steps of gradient descent; rows are spread over the devices.

1. counted: collective operations and their bytes per outer step, read off the compiled program for
   1 to 8 virtual devices, loops by their trip counts. They are sums of the size of the weights and
   scalars; the rows stay where they are, and so do the weights of rows (`alpha`).
2. measured: seconds per outer step of one process and of two, with one core each, in turns.
   Strong: the same rows in all; weak: the same rows in each.
3. modelled, on paper: a step takes `operations / (devices * rate)` and, for every sum of b bytes
   over d devices, the less of `2 b (d - 1) / (d bandwidth) + 2 (d - 1) latency` (a ring) and
   `2 b / bandwidth + 2 log2(d) latency` (trees), with the counted numbers and published rates and
   link speeds. Nothing of it was run.

    python benchmarks/scaling.py           # 20,000 rows; ten minutes on two idle cores
    python benchmarks/scaling.py --quick   # 2,000 rows, no results file
    python benchmarks/scaling.py --table
"""

import json
import math
import os
import re
import socket
import subprocess
import sys
import time

import harness
import numpy as np

INPUTS, CLASSES, STEPS = 784, 10, 10
ROWS = {"quick": 2_000, "default": 20_000}
VIRTUAL = (1, 2, 4, 8)
REPEATS = 5
# An H100 (float32 matrix products on tensor cores, TF32, dense) in nodes of eight; NVLink 4 within
# a node, one 400 Gb/s InfiniBand port for each device between nodes: vendors' sheets.
RATE, NODE = 4.95e14, 8
LINKS = {"NVLink": (450e9, 2e-6), "InfiniBand": (50e9, 5e-6)}  # bytes/s one way, seconds
MODELLED = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def problem():
    import jax
    import jax.numpy as jnp
    import optax

    import bilevel

    def losses(w, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(x @ w, y)

    def lower(w, alpha, batch):
        # Each row comes with its weight, so that both lie on one device.
        x, y, row = batch
        weights = jax.nn.sigmoid(alpha) * row
        return jnp.mean(weights * losses(w, x, y)) + 1e-3 * jnp.sum(w**2)

    def outer(w, alpha, batch):
        return jnp.mean(losses(w, *batch[:2]))

    return bilevel.Problem(lower, outer), bilevel.unrolled(0.5, STEPS)


def rows_of(n):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, INPUTS)).astype(np.float32)
    return x, rng.integers(CLASSES, size=n), np.ones(n, np.float32)


def placed(n):
    """State and data of a step, rows over all devices of all processes."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    import bilevel

    mesh = jax.make_mesh((jax.device_count(),), ("rows",), axis_types=(AxisType.Auto,))

    def put(a, *spec):
        sharding = NamedSharding(mesh, P(*spec))
        return jax.make_array_from_callback(a.shape, sharding, lambda part: a[part])

    data = tuple(put(a, "rows") for a in rows_of(n))
    init, step = bilevel.descent(*problem(), optax.adam(0.1))
    state = init(jnp.zeros(n), jnp.zeros((INPUTS, CLASSES)))

    def place(a):
        return put(np.asarray(a), *(("rows",) if a.shape[:1] == (n,) else ()))

    return jax.tree.map(place, state), (data, data), step


# ----------------------------------------------------------------------------- counted

_SUMS = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
_BYTES = {"f32": 4, "f64": 8, "s32": 4, "u32": 4, "pred": 1, "s64": 8, "bf16": 2}


def collectives(text):
    """``[(kind, bytes, times)]`` of a compiled program, loops unrolled by their trip counts."""
    bodies, name = {}, ""
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            name = "ENTRY" if head[1] else head[2]
            bodies[name] = []
        elif name:
            bodies[name].append(line)

    def visit(name, times):
        for line in bodies.get(name, []):
            if found := re.search(rf"= (.*?) ({_SUMS})(?:-start)?\(", line):
                sizes = re.findall(r"(\w+)\[([\d,]*)\]", found[1])
                count = sum(
                    _BYTES[kind] * int(np.prod([int(k) for k in dims.split(",") if k] or [1]))
                    for kind, dims in sizes
                )
                yield found[2], count, times
            trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
            inner = int(trips[1]) if trips else 1
            for called in re.findall(r"(?:body|to_apply|calls)=%?([\w.\-]+)", line):
                if "all-reduce" not in line:
                    yield from visit(called, times * (inner if "while(" in line else 1))

    return list(visit("ENTRY", 1))


def counted(n, devices):
    """What one outer step sends; in a process of its own, which has so many devices."""
    import jax

    state, data, step = placed(n)
    program = jax.jit(step).lower(state, data).compile()
    found = collectives(program.as_text())
    weights = 4 * INPUTS * CLASSES
    yield {
        "what": "counted",
        "devices": devices,
        "rows": n,
        "sums": sum(times for _, _, times in found),
        "bytes": sum(size * times for _, size, times in found),
        "largest": max((size for _, size, _ in found), default=0),
        "of_weights": sum(times for _, size, times in found if size >= weights),
        "others": sorted({kind for kind, _, _ in found} - {"all-reduce"}),
        # Of three products a gradient, T gradients forwards, T again, and twice as much backwards.
        "operations": 2 * n * INPUTS * CLASSES * STEPS * (2 + 2 + 4),
    }


# ----------------------------------------------------------------------------- measured


def process(rank, processes, port, n):
    """Seconds of an outer step, of this process among several."""
    os.sched_setaffinity(0, {rank})
    import jax

    if processes > 1:
        jax.distributed.initialize(f"localhost:{port}", processes, rank)
    state, data, step = placed(n)
    run, seconds = jax.jit(step), []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        state, _ = jax.block_until_ready(run(state, data))
        seconds.append(time.perf_counter() - began)
    print(json.dumps(min(seconds[1:])), flush=True)


def measured(processes, n):
    """The slowest process's seconds; each has one core."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(processes):
        flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        command = [sys.executable, __file__, "--rank", f"{rank},{processes},{port},{n}"]
        started.append(
            subprocess.Popen(
                command,
                env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    return max(json.loads(p.communicate()[0].splitlines()[-1]) for p in started)


# ----------------------------------------------------------------------------- modelled


def modelled(row, devices, rows):
    """Seconds of a step of ``rows`` rows on paper: computing, and sums."""
    operations = row["operations"] / row["rows"] * rows
    bandwidth, latency = LINKS["NVLink" if devices <= NODE else "InfiniBand"]
    sent, hops = row["bytes"] / bandwidth, row["sums"] * latency
    ring = 2 * sent * (devices - 1) / devices + 2 * (devices - 1) * hops
    trees = 2 * sent + 2 * math.log2(devices) * hops
    return operations / devices / RATE, min(ring, trees)


# ----------------------------------------------------------------------------- the report


def report(rows) -> str:
    """Counted, measured and modelled, apart from each other."""
    text = []
    if found := harness.where(rows, what="counted"):
        lines = [
            (
                *(r["devices"], f"{r['rows']:,}", r["sums"], r["of_weights"]),
                *(f"{r['bytes']:,}", f"{r['largest']:,}", ", ".join(r["others"]) or "none"),
            )
            for r in found
        ]
        head = ("devices", "rows", "sums a step", "of the weights' size", "bytes a step")
        head += ("largest, bytes", "other collectives")
        text += ["Counted, from the compiled program:", harness.table(head, lines)]
    if found := harness.where(rows, what="measured"):
        lines = [
            (
                r["scaling"],
                r["processes"],
                f"{r['rows']:,}",
                f"{r['seconds']:.3f}",
                f"{r['efficiency']:.2f}",
            )
            for r in found
        ]
        head = ("scaling", "processes", "rows", "s a step", "efficiency")
        text += ["Measured, one core a process:", harness.table(head, lines)]
    if many := [r for r in harness.where(rows, what="counted") if r["devices"] > 1]:
        last, lines = many[-1], []
        for devices in MODELLED:
            strong = modelled(last, devices, 1_000_000)
            weak = modelled(last, devices, 125_000 * devices)
            one = sum(modelled(last, 1, 1_000_000)), sum(modelled(last, 1, 125_000))
            cells = [f"{1e6 * part:,.0f}" for part in strong]
            cells += [f"{one[0] / sum(strong) / devices:.2f}", f"{one[1] / sum(weak):.2f}"]
            lines.append((devices, *cells))
        head = ("devices", "computing, us", "sums, us")
        head += ("efficiency, 1,000,000 rows in all", "efficiency, 125,000 rows each")
        text += ["Modelled on paper, H100s (nothing of it was run):", harness.table(head, lines)]
    return "\n\n".join(text)


def main() -> None:
    rank = {"help": "a process of a measurement"}
    arguments = harness.command_line(__file__, __doc__, report, work=counted, rank=rank)
    if arguments.rank:
        process(*map(int, arguments.rank.split(",")))
        return
    n, rows = ROWS[arguments.size], [harness.environment("optax")]
    for devices in VIRTUAL:
        flags = f"--xla_force_host_platform_device_count={devices}"
        rows += harness.in_own_process(__file__, n, devices, XLA_FLAGS=flags)
    alone = measured(1, n)
    for scaling, processes, size in (("", 1, n), ("strong", 2, n), ("weak", 2, 2 * n)):
        seconds = measured(processes, size) if processes > 1 else alone
        ideal = alone / processes if scaling == "strong" else alone
        row = {"what": "measured", "scaling": scaling, "processes": processes, "rows": size}
        rows.append(row | {"seconds": seconds, "efficiency": ideal / seconds})
    if arguments.results:
        arguments.results.unlink(missing_ok=True)
        harness.append(arguments.results, *rows)
    print(report(rows))


if __name__ == "__main__":
    main()
