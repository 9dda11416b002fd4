"""How far does a search scale over devices, and how much data do they exchange?

The problem is hyper-cleaning: below, a softmax classifier with 784 inputs and 10 classes; above, a
weight for every training row. The solver is `unrolled` with ten steps of gradient descent. Rows are
sharded over the devices.

1. counted: collective operations, their bytes, and products with the rows, per outer step. They are
   read from the compiled program for 1 to 8 virtual devices, with loops multiplied by their trip
   counts. Devices exchange sums of the size of the weights, and scalars. The rows and their weights
   (`alpha`) are not sent.
2. measured: seconds per outer step of one process and of two, with one core each, in turns.
   Strong: the same rows in all; weak: the same rows in each.

    python benchmarks/scale/scaling.py          # 20,000 rows; results/scaling.jsonl and scaling.png
"""

import json
import os
import re
import socket
import subprocess
import sys
import time

import numpy as np

from benchmarks import harness

MEASURES = (
    "bilevel/outer_loop",
    "bilevel/solvers",
    "bilevel/hypergradients",
    "bilevel/internal/processes.py",
    "ntk/internal/sharding.py",
)

INPUTS, CLASSES, STEPS = 784, 10, 10
ROWS = {"smoke": 160, "quick": 2_000, "default": 20_000}
VIRTUAL = (1, 2, 4, 8)
REPEATS, ROUNDS = 5, 3


def problem():
    import jax
    import jax.numpy as jnp
    import optax

    import bilevel

    def losses(w, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(x @ w, y)

    def lower(w, alpha, batch):
        # Each row and its weight are on the same device.
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


def placed(n, devices=None):
    """Return state and data of a step, with rows sharded over ``devices`` (default: all)."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    import bilevel

    over = jax.devices()[:devices]
    mesh = jax.make_mesh((len(over),), ("rows",), axis_types=(AxisType.Auto,), devices=over)

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
_PRODUCTS = "dot"
_BYTES = {"f32": 4, "f64": 8, "s32": 4, "u32": 4, "pred": 1, "s64": 8, "bf16": 2}


def computations(text):
    """Return the name of a compiled program's entry, and the lines of each computation by name."""
    parts, entry, name = {}, "", ""
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line):
            name = head[2]
            parts[name] = []
            entry = name if head[1] else entry
        elif line.startswith("}"):
            name = ""
        elif name and " = " in line:
            parts[name].append(line)
    return entry, parts


def collectives(text):
    """Return ``[(kind, bytes, times)]`` of a program's collective operations and products."""
    entry, bodies = computations(text)

    def visit(name, times):
        for line in bodies.get(name, []):
            if match := re.search(rf"= (.*?) ({_SUMS}|{_PRODUCTS})(?:-start)?\(", line):
                sizes = re.findall(r"(\w+)\[([\d,]*)\]", match[1])
                count = sum(
                    _BYTES[kind] * int(np.prod([int(k) for k in dims.split(",") if k] or [1]))
                    for kind, dims in sizes
                )
                yield match[2], count, times
            trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
            inner = int(trips[1]) if trips else 1
            for called in re.findall(r"(?:body|to_apply|calls)=%?([\w.\-]+)", line):
                if "all-reduce" not in line:
                    yield from visit(called, times * (inner if "while(" in line else 1))

    return list(visit(entry, 1))


def counted(scaling, n, devices):
    """Return the traffic of one outer step, counted in a process with this number of devices."""
    import jax

    state, data, step = placed(n)
    program = jax.jit(step).lower(state, data).compile()
    lines = collectives(program.as_text())
    products = sum(times for kind, _, times in lines if kind == _PRODUCTS)
    sums = [line for line in lines if line[0] != _PRODUCTS]
    weights = 4 * INPUTS * CLASSES
    yield {
        "what": "counted",
        "scaling": scaling,
        "devices": devices,
        "rows": n,
        "sums": sum(times for _, _, times in sums),
        "bytes": sum(size * times for _, size, times in sums),
        "largest": max((size for _, size, _ in sums), default=0),
        "of_weights": sum(times for _, size, times in sums if size >= weights),
        "others": sorted({kind for kind, _, _ in sums} - {"all-reduce"}),
        # Two per gradient: T gradients forward, T again, two per Hessian product; and those of the
        # losses.
        "products": products,
        "operations": 2 * n * INPUTS * CLASSES * products,
        "read": 4 * n * INPUTS * products,
    }


# ----------------------------------------------------------------------------- measured


def process(rank, processes, port, n):
    """Return the seconds of an outer step of this process among multiple processes."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
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
    """Return the slowest process's seconds; each has one core."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    started, flags = [], harness.xla_flags(harness.ONE_THREAD)
    for rank in range(processes):
        variables = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, __file__, "--rank", f"{rank},{processes},{port},{n}"]
        options = {"env": variables, "stdout": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, **options))
    outputs = [p.communicate()[0] for p in started]
    if any(p.returncode for p in started):
        sys.exit(f"failed: one of {processes} processes of {n} rows; its message is above.")
    return max(json.loads(output.splitlines()[-1]) for output in outputs)


# ----------------------------------------------------------------------------- the report


def report(rows) -> str:
    counted, lines = harness.where(rows, what="counted"), []
    for r in counted:
        cells = r["scaling"], r["devices"], f"{r['rows']:,}", r["products"], r["sums"]
        sizes = r["of_weights"], f"{r['bytes']:,}", f"{r['largest']:,}"
        lines.append((*cells, *sizes, ", ".join(r["others"]) or "none"))
    head = "scaling", "devices", "rows", "products", "sums", "of the weights' size", "bytes sent"
    text = ["Counted, from the compiled program of an outer step:"]
    text.append(harness.table((*head, "largest sum, bytes", "other collectives"), lines))
    lines = []
    for r in harness.where(rows, what="measured"):
        seconds = f"{r['seconds']:.3f}", f"{r['efficiency']:.2f}"
        lines.append((r["scaling"], r["processes"], f"{r['rows']:,}", *seconds))
    text.append("Measured, one core a process, the fastest step:")
    text.append(harness.table(("scaling", "processes", "rows", "s a step", "efficiency"), lines))
    return "\n\n".join(text)


@harness.figure(1, 2, figsize=(9, 3.8))
def picture(rows, axes):
    for scaling in ("strong", "weak"):
        of_scaling = harness.where(rows, what="counted", scaling=scaling)
        size = [r["bytes"] / 1e6 for r in of_scaling]
        mark = {"marker": "o", "ms": 9, "mfc": "none"} if scaling == "weak" else {"marker": "."}
        axes[0].plot([r["devices"] for r in of_scaling], size, ls="", label=scaling, **mark)
        of_scaling = harness.where(rows, what="measured", scaling=scaling)
        points = np.array([(r["processes"], r["seconds"]) for r in of_scaling])
        axes[1].plot(*points.T, "o-", label=scaling)
    one = harness.where(rows, what="measured")[0]["seconds"]
    axes[1].plot([1, 2], [one, one / 2], "k:", lw=1, label="ideal")
    axes[1].plot([1, 2], [one, one], "k:", lw=1)
    titles = "Counted: MB sent in an outer step", "Measured: seconds of an outer step"
    for ax, title in zip(axes, titles, strict=True):
        ax.set(title=title, xscale="log", xlabel="devices")
        ax.legend()
    axes[1].set(xlabel="processes, one core each", xlim=(0.9, 2.2))
    for ax, ticks in ((axes[0], VIRTUAL), (axes[1], (1, 2))):
        ax.set_xticks(ticks, ticks)
        ax.minorticks_off()
    axes[0].set_ylim(0, 1.3)
    axes[1].set_ylim(0)


def main() -> None:
    rank = {"help": "a process of a measurement"}
    arguments = harness.command_line(__file__, __doc__, report, work=counted, rank=rank)
    if arguments.rank:
        process(*map(int, arguments.rank.split(",")))
        return
    n, rows = ROWS[arguments.size], [harness.environment("optax")]
    virtual, rounds, kinds = VIRTUAL, ROUNDS, ["strong", "weak"]
    if arguments.smoke:
        virtual, rounds, kinds = (2,), 1, ["strong"]
    for scaling in kinds:
        for devices in virtual:
            size = n if scaling == "strong" else n // VIRTUAL[-1] * devices
            flags = harness.xla_flags(f"--xla_force_host_platform_device_count={devices}")
            rows += harness.in_own_process(__file__, scaling, size, devices, XLA_FLAGS=flags)
    cases = {(1, n): []} if arguments.smoke else {(1, n): [], (2, n): [], (2, 2 * n): []}
    for _ in range(rounds):  # in turns, so that other load affects all of them
        for case, seconds in cases.items():
            seconds.append(measured(*case))
    alone = min(cases[1, n])
    shown = ("strong", 1, n), ("strong", 2, n), ("weak", 1, n), ("weak", 2, 2 * n)
    for scaling, processes, size in (case for case in shown if case[1:] in cases):
        seconds = min(cases[processes, size])
        ideal = alone / processes if scaling == "strong" else alone
        row = {"what": "measured", "scaling": scaling, "processes": processes, "rows": size}
        rows.append(row | {"seconds": seconds, "efficiency": ideal / seconds})
    harness.finish(rows, arguments.results, report, picture)


if __name__ == "__main__":
    main()
