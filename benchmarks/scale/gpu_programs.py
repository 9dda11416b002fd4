"""What do our programs become on a GPU: operations in each loop, and memory?

XLA compiles for a card that is absent, if it gets the card's description. The programs are those of
an H100 of 80 GB, without autotuning. Each kernel, product and copy of a loop's body counts as one
launch. "Beyond the user's loss" subtracts the loop that only multiplies by the Hessian. Peak memory
is XLA's count of arguments, results and temporaries. Nothing is executed.

    pip install --no-deps --target PLUGIN jax-cuda12-pjrt==0.10.2 nvidia-cuda-nvcc-cu12
    python benchmarks/scale/gpu_programs.py --plugin PLUGIN     # three minutes

The release of the plugin is that of JAX. `--smoke` compiles small programs for the CPU instead.
"""

import itertools
import os
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import bilevel
import ntk
from benchmarks import harness
from benchmarks.kernels import finite_kernels
from benchmarks.scale.scaling import computations
from ntk import networks as nets

MEASURES = (
    "bilevel/solvers",
    "bilevel/internal",
    "ntk/empirical",
    "ntk/infinite",
    "ntk/internal",
    "ntk/networks",
)

MEMORY = 80 * 10**9 * 3 // 4  # bytes that JAX reserves on the card
# Public figures of an H100 SXM, in the form of XLA's GpuTargetConfigProto.
CARD = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "H100"
"""
# Operations that start nothing, or whose parts are counted.
FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota"),
    *("while", "call", "conditional"),
}

Compile = Callable[..., Any]


def shape(*sizes: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


# --------------------------------------------------------------------------- compiling, counting


def for_the_host(function, *args: Any):
    return harness.compiled(function, *args)[0]


def for_the_card(plugin: Path) -> Compile:
    """Return a compiler for the card, with the wheels unpacked in ``plugin``."""
    from jax._src.lib import xla_client

    compiler = plugin / "nvidia" / "cuda_nvcc"
    os.environ["XLA_FLAGS"] = harness.xla_flags(
        f"--xla_gpu_autotune_level=0 --xla_gpu_cuda_data_dir={compiler}"
    )
    os.environ["PATH"] = f"{compiler / 'bin'}:{os.environ['PATH']}"
    (library,) = plugin.glob("jax_plugins/*/xla_cuda_plugin.so")
    api = xla_client.load_pjrt_plugin_dynamically("cuda", str(library))
    card = xla_client.make_c_api_device_topology(api, "h100", target_config=CARD, topology="1x1x1")
    sharding = jax.sharding.SingleDeviceSharding(card._make_compile_only_devices()[0])

    def placed(x):
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    def run(function, *args):
        program = function if hasattr(function, "trace") else jax.jit(function)
        traced = program.trace(*jax.tree.map(placed, args))
        return traced.lower(lowering_platforms=("cuda",)).compile()

    # Tiles depend on the device, which is the host while programs are traced.
    device = types.SimpleNamespace(memory_stats=lambda: {"bytes_limit": MEMORY})
    jax.default_backend, jax.devices = lambda: "gpu", lambda *_: [device]
    return run


def operation(line: str) -> str:
    """Return the name of the operation in a line of a program's text."""
    found = re.search(r"[\s)\]}]([a-z][\w\-]*)\(", line.partition(" = ")[2])
    return found[1] if found else "parameter"


def loops(text: str) -> list[dict[str, Any]]:
    """Return each loop's launches, and the loops inside it."""
    entry, parts = computations(text)

    def inside(name: str) -> dict[str, Any]:
        launches, nested = 0, []
        for line in parts[name]:
            kind = operation(line)
            if kind == "while":
                body = inside(re.search(r"body=%?([\w.\-]+)", line)[1])
                trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
                nested.append(body | {"trips": int(trips[1]) if trips else None})
            elif kind == "call":
                called = inside(re.search(r"to_apply=%?([\w.\-]+)", line)[1])
                launches, nested = launches + called["launches"], nested + called["loops"]
            launches += kind not in FREE
        return {"launches": launches, "loops": nested}

    return inside(entry)["loops"]


def flat(nested: list[dict[str, Any]]) -> list[int]:
    """Return the launches of all loops, outer loops first."""
    return [n for loop in nested for n in (loop["launches"], *flat(loop["loops"]))]


def once(loop: dict[str, Any]) -> int | None:
    """Return the launches of one iteration, with those of inner loops; None if it is unknown."""
    inner = [(part["trips"], once(part)) for part in loop["loops"]]
    if any(trips is None or count is None for trips, count in inner):
        return None
    return loop["launches"] + sum(trips * count for trips, count in inner)


def row_of(name: str, compiled, *, tiled: bool = False, **more: Any) -> dict[str, Any]:
    """Return the counts of a program. The tiles' loop is the one with most launches."""
    memory, nested = compiled.memory_analysis(), loops(compiled.as_text())
    needed = memory.argument_size_in_bytes + memory.output_size_in_bytes
    row = {"program": name, "launches": flat(nested), "input_and_result": needed}
    row |= {"peak": needed + memory.temp_size_in_bytes} | more
    if tiled and nested:
        tiles = max(nested, key=lambda loop: loop["launches"] * (loop["trips"] or 0))
        row |= {"tiles": tiles["trips"], "tile": once(tiles), "launches": flat([tiles])}
    elif tiled:
        row |= {"tiles": 1, "tile": None}
    return row


# ------------------------------------------------------------------------------------ programs


def ridge(w, alpha, batch):
    x, y = batch
    return jnp.mean((x @ w - y) ** 2) / 2 + jnp.exp(alpha) * w @ w / 2


def network(w, alpha, batch):
    x, y = batch
    for matrix, bias in w[:-1]:
        x = jnp.tanh(x @ matrix + bias)
    matrix, bias = w[-1]
    squares = sum(jnp.sum(a**2) for a in jax.tree.leaves(w))
    return jnp.mean((x @ matrix + bias - y) ** 2) + jnp.exp(alpha) * squares


def dense(sizes: tuple[int, ...]):
    return [(shape(i, j), shape(j)) for i, j in itertools.pairwise(sizes)]


def conjugate_gradients(run: Compile, small: bool) -> Iterator[dict[str, Any]]:
    """Count an iteration next to the loop that multiplies by the Hessian alone."""
    n, p = (20, 5) if small else (2000, 500)
    problems = {
        f"ridge, {n} x {p}": (ridge, shape(p), (shape(n, p), shape(n))),
        "network, 6 leaves": (network, dense((64, 32, 32, 10)), (shape(512, 64), shape(512, 10))),
    }
    for name, (lower, w, batch) in problems.items():

        def hessian(w, alpha, batch, lower=lower):
            return jax.linearize(lambda w: jax.grad(lower)(w, alpha, batch), w)[1]

        def products(w, alpha, batch, v, hessian=hessian):
            hvp = hessian(w, alpha, batch)
            return jax.lax.while_loop(lambda v: jax.tree.leaves(v)[0].sum() < 1, hvp, v)

        def solve(w, alpha, batch, v, hessian=hessian):
            return bilevel.cg(99)(hessian(w, alpha, batch), v, None, None)

        given = w, shape(), batch, w
        users = flat(loops(run(products, *given).as_text()))[0]
        yield row_of(f"conjugate gradients: {name}", run(solve, *given), users=users)
        solver = bilevel.implicit()

        def hypergradient(alpha, w, batch, lower=lower, solver=solver):
            def outer(alpha):
                solution, _ = solver.run(lower, alpha, w, solver.init(w), batch)
                return lower(solution, 0.0, batch)

            return jax.grad(outer)(alpha)

        yield row_of(f"implicit(): {name}", run(hypergradient, shape(), w, batch))


def infinite(run: Compile, small: bool) -> Iterator[dict[str, Any]]:
    """Count a tile of kernels of three layers, under a jit."""
    n, depth = (40, 1) if small else (20_000, 3)
    for name in ("relu", "tanh")[: 1 if small else 2]:

        def kernel(x, name=name):
            return ntk.network_kernel(x, activations=[getattr(ntk, name)] * depth)

        compiled = run(kernel, shape(n, 100))
        yield row_of(f"kernels of infinite width: {name}, N = {n}", compiled, tiled=True)


def convolutional(run: Compile, small: bool) -> Iterator[dict[str, Any]]:
    """Count a tile of the kernel of 20 convolutions with ReLU and a dense layer, under a jit."""
    n, side, depth = (4, 4, 1) if small else (1000, 32, 20)
    layers = [nets.conv(3, 2.0), nets.act(ntk.relu)] * depth
    net = nets.serial(*layers, nets.flatten(), nets.dense())
    name = f"kernels of a convolutional network: {depth + 1} layers, {side} x {side} x 3, N = {n}"
    yield row_of(name, run(net.kernel, shape(n, side, side, 3)), tiled=True)


def empirical(run: Compile, small: bool) -> Iterator[dict[str, Any]]:
    """Count a tile of the kernel of a finite network with two hidden layers."""
    n, width = (40, 8) if small else (20_000, 1024)

    def apply(params, x):
        for matrix, bias in params[:-1]:
            x = jax.nn.relu(x @ matrix + bias)
        return x @ params[-1][0] + params[-1][1]

    def kernel(params, x):
        return ntk.empirical_kernel(apply, params, x)

    compiled = run(kernel, dense((784, width, width, 10)), shape(n, 784))
    name = f"empirical kernel: two hidden layers of {width}, N = {n}"
    yield row_of(name, compiled, tiled=True)


def images(run: Compile, small: bool) -> Iterator[dict[str, Any]]:
    """Count a row of blocks of the kernel of a convolutional network, in blocks of images."""
    net = finite_kernels.Convolutions()
    n, block, side = (6, 2, 4) if small else (20_000, 1000, finite_kernels.SIDE)
    params = jax.eval_shape(net.init, jax.random.key(0), jnp.zeros((1, side, side, 3)))

    def kernel(params, x):
        return ntk.empirical_kernel(net.apply, params, x, batch_size=block)

    compiled = run(kernel, jax.tree.map(lambda x: shape(*x.shape), params), shape(n, side, side, 3))
    name = f"empirical kernel, blocks of {block}: three convolutions, {side} x {side} x 3, N = {n}"
    yield row_of(name, compiled, tiled=True)


# ------------------------------------------------------------------------------------ reporting


def counts(rows: list[dict[str, Any]]) -> str:
    """Report each program in the newest commit, with the oldest one in brackets."""
    rows = [row for row in rows if "program" in row]
    lines = []
    for name in dict.fromkeys(row["program"] for row in rows):
        mine = harness.where(rows, program=name)
        now, before = mine[0], mine[-1]

        def both(show, now=now, before=before):
            new, old = show(now), show(before)
            return new if new == old else f"{new} ({old})"

        def launches(row):
            if "users" in row:
                return f"{row['users']} + {row['launches'][0] - row['users']}"
            if row.get("tile"):
                return f"{row['tile']:,} for a tile"
            return ", ".join(map(str, row["launches"])) or "-"

        def peak(row):
            return f"{row['peak'] / row['input_and_result']:.2f}" if "tiles" in row else "-"

        def tiles(row):
            return str(row.get("tiles", "-"))

        lines.append([name, *map(both, (tiles, launches, peak))])
    head = "program", "tiles", "launches in its loops", "peak over inputs and results"
    return harness.table(head, lines)


def main() -> None:
    plugin = {"type": Path, "help": "folder of the wheels; required without --smoke"}
    flags = harness.command_line(__file__, __doc__, counts, plugin=plugin)
    if not flags.small and flags.plugin is None:
        flags.error("--plugin: expected the folder of the wheels, got none.")
    target = {"compiled_for": "this CPU" if flags.plugin is None else "NVIDIA H100 80GB"}
    rows = [harness.environment(**target)]  # before the card replaces JAX's devices
    run = for_the_host if flags.plugin is None else for_the_card(flags.plugin.resolve())
    for part in (conjugate_gradients, infinite, convolutional, empirical, images):
        rows += part(run, flags.small)
    harness.finish(rows, flags.results, counts)


if __name__ == "__main__":
    main()
