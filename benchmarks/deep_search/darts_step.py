"""What does a step of the DARTS search cost?  (Liu, Simonyan & Yang 2019, Algorithm 1)

A step moves w by SGD with momentum on a training batch. Then it computes the hypergradient of the
224 weights alpha on a validation batch, and applies Adam to their logits. There are two
hypergradients:

- first order, at the new w, which is held fixed: `bilevel.unrolled(..., backprop=0)`;
- second order, through the step in w, exactly: `bilevel.one_step(...)`. It applies reverse mode to
  one forward derivative. PyTorch differentiates its gradient once more.

We compare `bilevel.spaces.darts`, compiled once, with a plain PyTorch supernet of the same
operations, without compilation. Both compute only the gradients that a step needs. (The reference
implementation computes all gradients twice. Its second order, a difference of gradients, is not
measured.) Neither has weight decay or clipping. `none` costs nothing in either. Images and
labels are random numbers. `bilevel.search` also computes the training loss at the new w for its
history, which is not counted here.

One process runs at a time: PyTorch's takes half of its steps before ours and half after. The ratio
of CPU times is shown too, because other work disturbs it less. Memory is the largest resident set
during the steps; in brackets is its growth since the first step. (On a device with a memory
counter, both are the largest allocation.) The two networks start from PyTorch's weights, and their
losses at the start and after a step agree.

    python benchmarks/deep_search/darts_step.py    # 3 cells of 16 channels: 10 minutes on two cores
    # the published 8 cells of 16: half an hour, and 30 GB for PyTorch's second order
    python benchmarks/deep_search/darts_step.py --full

`--dtype bfloat16`: activations in 16 bits, in PyTorch by autocast; for an accelerator.
"""

import dataclasses
import functools
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks import harness
from benchmarks.harness import plus_minus

MEASURES = (
    "bilevel/spaces/darts",
    "bilevel/nets/convolution.py",
    "bilevel/strategies/methods.py",
    "bilevel/outer_loop/descent.py",
    "bilevel/solvers/_unrolled.py",
    "bilevel/solvers/_mixed_mode.py",
)

# Each library is imported only in the process that runs it, so their memory is separate.

ORDERS = {1: "first order", 2: "second order"}
LIBRARIES = {"torch": "PyTorch", "bilevel": "bilevel"}
RATE, MOMENTUM, ALPHA_RATE, BETAS = 0.025, 0.9, 3e-4, (0.5, 0.999)  # as published
TIMES = "seconds", "processor_seconds"
CLASSES, SEED = 10, 0
OPERATIONS = (  # the order of alpha; repeated, as our library is not imported here
    *("none", "max_pool_3x3", "avg_pool_3x3", "skip_connect"),
    *("sep_conv_3x3", "sep_conv_5x5", "dil_conv_3x3", "dil_conv_5x5"),
)
EDGES = [(source, node) for node in range(2, 6) for source in range(node)]


@dataclasses.dataclass(frozen=True)
class Sizes:
    cells: int
    channels: int
    side: int
    batch: int
    rounds: int
    dtype: str = "float32"
    operations: tuple[str, ...] = OPERATIONS
    orders: tuple[int, ...] = tuple(ORDERS)


SIZES = {
    # Compilation takes longest: one order and two operations show that the script runs.
    "smoke": Sizes(1, 2, 8, batch=2, rounds=2, operations=("none", "skip_connect"), orders=(1,)),
    "quick": Sizes(2, 8, side=16, batch=16, rounds=3),
    "default": Sizes(3, 16, side=32, batch=64, rounds=6),
    "full": Sizes(8, 16, side=32, batch=64, rounds=20),
}


def batches(sizes):
    """Return training and validation batch, images [n, h, w, c] and labels [n]."""
    rng, shape = np.random.default_rng(SEED), (sizes.batch, sizes.side, sizes.side, 3)
    return [
        (rng.normal(size=shape).astype(np.float32), rng.integers(CLASSES, size=sizes.batch))
        for _ in range(2)
    ]


# ------------------------------------------------------------------------------------- ours


def bilevel_steps(sizes, order, path):
    """Yield facts that are known before our first step, then a value and a norm for each step."""
    import jax
    import jax.numpy as jnp
    import optax

    import bilevel
    from bilevel import strategies
    from bilevel.spaces.darts import darts_space
    from bilevel.spaces.darts.supernet import weight_count

    jax.config.update("jax_enable_compilation_cache", False)
    network = {"classes": CLASSES, "cells": sizes.cells, "channels": sizes.channels}
    network["operations"] = sizes.operations
    space = darts_space(**network, dtype=jnp.dtype(sizes.dtype))
    data = jax.device_put(batches(sizes))
    w = jax.jit(space.init)(jax.random.key(SEED), data[0])
    known = {"parameters": weight_count(w)}
    if path.exists():
        w = from_torch(np.load(path), w)
    if order == 1:
        plain = darts_space(**network)
        with jax.default_matmul_precision("float32"):
            known["loss"] = float(jax.jit(plain.problem.lower)(w, space.start(), data[0]))

    plan = strategies.darts(
        space,
        weight_optimizer=optax.sgd(RATE, momentum=MOMENTUM),
        alpha_optimizer=bilevel.softmax(optax.adam(ALPHA_RATE, *BETAS)),
        batch_size=sizes.batch,
        order=order,
    )
    init, descend = bilevel.descent(plan.problem, plan.solver, plan.optimizer)

    def step(state, data):
        state, metrics = descend(state, data)
        return state, (metrics["value"], metrics["grad_norm"])

    state = init(space.start(), w)
    step, known["compile_s"] = harness.compiled(jax.jit(step, donate_argnums=0), state, data)
    known["compile_peak_mb"] = harness.resident_peak()
    known["temporaries_mb"] = step.memory_analysis().temp_size_in_bytes / 1e6
    known["device"] = jax.devices()[0].device_kind
    yield known | {"platform": jax.default_backend()}
    while True:
        state, numbers = jax.block_until_ready(step(state, data))
        yield *map(float, numbers), harness.device_peak()


# PyTorch's names, in the order of our numbers.
CONVOLUTIONS = {
    "FactorizedReduce_0": ["skip_connect.even", "skip_connect.odd"],
    "SeparableConv_0": [f"sep_conv_3x3.{k}" for k in (1, 2, 5, 6)],
    "SeparableConv_1": [f"sep_conv_5x5.{k}" for k in (1, 2, 5, 6)],
    "DilatedConv_0": [f"dil_conv_3x3.{k}" for k in (1, 2)],
    "DilatedConv_1": [f"dil_conv_5x5.{k}" for k in (1, 2)],
}
OUTSIDE = {
    "Conv_0/kernel": "stem.0.weight",
    "Standardize_0/scale": "stem.1.weight",
    "Standardize_0/bias": "stem.1.bias",
    "Dense_0/kernel": "classifier.weight",
    "Dense_0/bias": "classifier.bias",
}


def from_torch(arrays, like):
    """Convert PyTorch's weights, by module name, to ours: kernels [k, k, in, out], stacked.

    Edges of a cell are stacked in groups. The size of a stack identifies its group.
    """
    import chex
    import jax

    stacks = [{0, 1}, {2}, {3}, {4}, {2, 3, 4}, {0, 1, 2, 3, 4}]  # the edges' sources
    stacks = [[k for k, edge in enumerate(EDGES) if edge[0] in sources] for sources in stacks]
    stacks = {len(rows): rows for rows in stacks}

    def kernel(*names):
        return arrays[".".join([*names, "weight"])].transpose(2, 3, 1, 0)

    def convert(path, leaf):
        names = [key.key for key in path]
        if "/".join(names) in OUTSIDE:
            array = arrays[OUTSIDE["/".join(names)]]
            return array.transpose(2, 3, 1, 0) if array.ndim == 4 else array.T
        cell, *_, operation, convolution, _ = names
        cell, number = cell.replace("_", "s."), int(convolution.split("_")[1])
        if leaf.ndim == 5:
            place, rows = CONVOLUTIONS[operation][number], stacks[len(leaf)]
            return np.stack([kernel(cell, f"edges.{k}", place) for k in rows])
        if operation == "FactorizedReduce_0":
            return kernel(cell, "before_last", ("even", "odd")[number])
        first = "ReluConvNorm_1" in like[names[0]] and operation.endswith("0")
        return kernel(cell, "before_last" if first else "last", "1")

    converted = jax.tree_util.tree_map_with_path(convert, like)
    chex.assert_trees_all_equal_shapes(converted, like)
    return converted


# ---------------------------------------------------------------------------------- PyTorch


def torch_supernet(cells, channels, chosen):
    """Return the supernet as a module of {"normal", "reduce"} [14, operations] and images."""
    import torch
    from torch import nn

    def conv(inputs, outputs, size=1, stride=1, dilation=1, groups=1):
        padding = dilation * (size - 1) // 2
        return nn.Conv2d(inputs, outputs, size, stride, padding, dilation, groups, bias=False)

    def norm(c, affine=False):
        return nn.BatchNorm2d(c, affine=affine, track_running_stats=False)

    def depthwise(c, size, stride, dilation=1):
        return [nn.ReLU(), conv(c, c, size, stride, dilation, c), conv(c, c), norm(c)]

    def separable(size):
        return lambda c, s: nn.Sequential(*depthwise(c, size, s), *depthwise(c, size, 1))

    def dilated(size):
        return lambda c, s: nn.Sequential(*depthwise(c, size, s, dilation=2))

    class FactorizedReduce(nn.Module):
        def __init__(self, inputs, outputs):
            super().__init__()
            self.even = conv(inputs, outputs // 2, stride=2)
            self.odd = conv(inputs, outputs - outputs // 2, stride=2)
            self.norm = norm(outputs)

        def forward(self, x):
            x = torch.relu(x)
            return self.norm(torch.cat([self.even(x), self.odd(x[:, :, 1:, 1:])], 1))

    operations = {
        "max_pool_3x3": lambda c, s: nn.Sequential(nn.MaxPool2d(3, s, 1), norm(c)),
        "avg_pool_3x3": lambda c, s: nn.Sequential(
            nn.AvgPool2d(3, s, 1, count_include_pad=False), norm(c)
        ),
        "skip_connect": lambda c, s: nn.Identity() if s == 1 else FactorizedReduce(c, c),
        "sep_conv_3x3": separable(3),
        "sep_conv_5x5": separable(5),
        "dil_conv_3x3": dilated(3),
        "dil_conv_5x5": dilated(5),
    }
    operations = {name: operations[name] for name in chosen[1:]}

    def mixed(edge, alpha, x):
        pairs = zip(operations, alpha[1:], strict=True)
        return sum(weight * edge[name](x) for name, weight in pairs)

    class Cell(nn.Module):
        def __init__(self, before_last, last, c, stride, reduced):
            super().__init__()
            self.before_last = (
                FactorizedReduce(before_last, c)
                if reduced
                else nn.Sequential(nn.ReLU(), conv(before_last, c), norm(c))
            )
            self.last = nn.Sequential(nn.ReLU(), conv(last, c), norm(c))
            strides = [stride if source < 2 else 1 for source, _ in EDGES]
            self.edges = nn.ModuleList(
                nn.ModuleDict({name: make(c, s) for name, make in operations.items()})
                for s in strides
            )

        def forward(self, before_last, last, alpha):
            states = [self.before_last(before_last), self.last(last)]
            edges = list(zip(EDGES, self.edges, alpha, strict=True))
            for node in range(2, 6):
                arriving = [mixed(e, a, states[i]) for (i, j), e, a in edges if j == node]
                states.append(sum(arriving))
            return torch.cat(states[2:], 1)

    class Supernet(nn.Module):
        def __init__(self):
            super().__init__()
            before_last = last = 3 * channels
            self.stem = nn.Sequential(conv(3, last, 3), norm(last, affine=True))
            self.cells, self.kinds, c, reduced = nn.ModuleList(), [], channels, False
            for cell in range(cells):
                reduce = cell in (cells // 3, 2 * cells // 3)
                c *= 1 + reduce
                self.cells.append(Cell(before_last, last, c, 1 + reduce, reduced))
                self.kinds.append("reduce" if reduce else "normal")
                before_last, last, reduced = last, 4 * c, reduce
            self.classifier = nn.Linear(last, CLASSES)

        def forward(self, alpha, x):
            before_last = last = self.stem(x)
            for cell, kind in zip(self.cells, self.kinds, strict=True):
                before_last, last = last, cell(before_last, last, alpha[kind])
            return self.classifier(last.mean((2, 3)))

    return Supernet()


def torch_steps(sizes, order, path):
    """Do the steps of :func:`bilevel_steps` in PyTorch, and write the first weights to ``path``."""
    import torch
    from torch.nn import functional as F

    torch.manual_seed(SEED)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.backends.cudnn.benchmark = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = torch_supernet(sizes.cells, sizes.channels, sizes.operations).to(device)
    w = dict(net.named_parameters())
    np.savez(path, **{name: p.detach().cpu().numpy() for name, p in w.items()})

    def put(x, y):
        images = torch.from_numpy(x).permute(0, 3, 1, 2).contiguous()
        return images.to(device), torch.from_numpy(y).to(device)

    train, valid = (put(*batch) for batch in batches(sizes))
    zeros = torch.zeros(len(EDGES), len(sizes.operations), device=device)
    logits = {kind: zeros.clone().requires_grad_() for kind in ("normal", "reduce")}
    in_w = torch.optim.SGD(w.values(), RATE, momentum=MOMENTUM)
    in_alpha = torch.optim.Adam(logits.values(), ALPHA_RATE, betas=BETAS)
    # A network of two cells has only reduction cells.
    grad = functools.partial(torch.autograd.grad, allow_unused=True, materialize_grads=True)

    def loss(w, alpha, batch, dtype=sizes.dtype):
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
            outputs = torch.func.functional_call(net, w, (alpha, batch[0]))
        return F.cross_entropy(outputs.float(), batch[1])

    def descend(slopes, leaves, optimizer):
        for leaf, slope in zip(leaves.values(), slopes, strict=True):
            leaf.grad = slope.detach()
        optimizer.step()

    def step():
        alpha = {kind: torch.softmax(z, -1) for kind, z in logits.items()}
        if order == 1:
            fixed = {kind: a.detach() for kind, a in alpha.items()}
            descend(grad(loss(w, fixed, train), w.values()), w, in_w)
            moved = {name: p.detach() for name, p in w.items()}
        else:
            slopes = grad(loss(w, alpha, train), w.values(), create_graph=True)
            momenta = (in_w.state[p].get("momentum_buffer", 0) for p in w.values())
            moved = {
                name: p - RATE * (MOMENTUM * m + slope)
                for (name, p), m, slope in zip(w.items(), momenta, slopes, strict=True)
            }
        value = loss(moved, alpha, valid)
        in_mixture = grad(value, alpha.values())
        descend(grad(alpha.values(), logits.values(), in_mixture), logits, in_alpha)
        if order == 2:
            descend(slopes, w, in_w)
        norm = torch.stack([slope.norm() for slope in in_mixture]).norm()
        return value.item(), norm.item()  # waits for the device

    known = {"parameters": sum(p.numel() for p in w.values())}
    if order == 1:
        torch.backends.cudnn.allow_tf32 = False
        with torch.no_grad():
            alpha = {kind: torch.softmax(z, -1) for kind, z in logits.items()}
            known["loss"] = float(loss(w, alpha, train, "float32"))
        torch.backends.cudnn.allow_tf32 = True
    yield known | {"platform": {"cuda": "gpu"}.get(device, device)}
    while True:
        value, norm = step()
        yield value, norm, torch.cuda.max_memory_allocated() if device == "cuda" else None


# --------------------------------------------------------------------------- the measurement


def work(library, order, sizes, rounds, path):
    """Run one warm-up step and ``rounds`` more steps in this process; return a row."""
    measured = {"bilevel": bilevel_steps, "torch": torch_steps}[library]
    steps = measured(Sizes(**sizes), order, Path(path))
    row = {"library": library, "order": order} | next(steps)
    before, seconds, processor = harness.forget_peak(), [], []
    row["value"], row["norm"], _ = next(steps)
    for _ in range(rounds):
        start, used = time.perf_counter(), time.process_time()
        *_, allocated = next(steps)
        seconds.append(time.perf_counter() - start)
        processor.append(time.process_time() - used)
    row["peak_mb"] = row["added_mb"] = (allocated or 0) / 1e6
    if allocated is None:
        row["peak_mb"] = harness.resident_peak()
        row["added_mb"] = row["peak_mb"] - before
    return [row | {"seconds": seconds, "processor_seconds": processor}]


def measure(sizes, libraries) -> list[dict]:
    half, rows = sizes.rounds // 2, []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.npz"
        for order in sizes.orders:
            by_library = {}
            for library in ("torch", "bilevel", "torch"):
                if library not in libraries or "failed" in by_library.get(library, {}):
                    continue
                rounds = half if library == "torch" else 2 * half
                request = library, order, dataclasses.asdict(sizes), rounds, str(path)
                row = harness.in_own_process(__file__, *request)[-1]
                row = {"library": library, "order": order} | row
                seen = f"failed: {row['failed']}" if "failed" in row else row["seconds"]
                print(f"{LIBRARIES[library]}, {ORDERS[order]}:", seen, flush=True)
                for key in TIMES if library in by_library and "seconds" in row else ():
                    row[key] = by_library[library][key] + row[key]
                by_library[library] = row
            rows += by_library.values()
    if len({row["platform"] for row in rows if "platform" in row}) > 1:
        sys.exit("PyTorch and JAX run on different devices; install both for the same one.")
    return rows


# -------------------------------------------------------------------------------- the report


def time_of(row, key="seconds") -> tuple[float, float]:
    """Return the time of a step, and its standard error over steps."""
    seconds = row[key]
    return statistics.mean(seconds), statistics.stdev(seconds) / len(seconds) ** 0.5


def ratio(row, other, key="seconds") -> tuple[float, float]:
    (x, dx), (y, dy) = time_of(row, key), time_of(other, key)
    return x / y, x / y * math.hypot(dx / x, dy / y)


HEAD = ["step", "bilevel, s", "PyTorch, s", "ratio", "ratio of CPU time"]
HEAD += ["bilevel, MB (added)", "PyTorch, MB (added)", "compilation, s", "compilation, MB"]


def step_table(rows) -> str:
    lines = []
    for order in rows[0]["sizes"].get("orders", ORDERS):
        of_order = harness.where(rows, order=order)
        ours, torch = (harness.measured(of_order, library=x) for x in ("bilevel", "torch"))
        cells = [plus_minus(*time_of(row)) if row else "-" for row in (ours, torch)]
        measured = ours and torch
        cells += [plus_minus(*ratio(ours, torch, key)) if measured else "-" for key in TIMES]
        for row in (ours, torch):
            cells.append(f"{row['peak_mb']:.0f} ({row['added_mb']:.0f})" if row else "-")
        cells += [f"{ours[key]:.0f}" if ours else "-" for key in ("compile_s", "compile_peak_mb")]
        lines.append([ORDERS[order], *cells])
    return harness.table(HEAD, lines)


def title(rows) -> str:
    sizes = Sizes(**rows[0]["sizes"])
    return (
        f"{sizes.cells} cells, {sizes.channels} channels, images of {sizes.side} x {sizes.side}, "
        f"batch {sizes.batch}, {sizes.dtype}; {rows[0]['device']}; {sizes.rounds} steps of each "
        "(mean ± s.e.)"
    )


def report(rows) -> str:
    return f"{title(rows)}\n\n{step_table(rows)}"


def main() -> None:
    own = {"dtype": {"choices": ("float32", "bfloat16"), "default": "float32"}}
    given = __file__, __doc__, report
    flags = harness.command_line(*given, full=True, work=work, peers=("torch",), **own)
    sizes = dataclasses.replace(SIZES[flags.size], dtype=flags.dtype)
    rows = measure(sizes, ["bilevel", *flags.peers])
    kind = next((row["device"] for row in rows if "device" in row), "unknown")
    about = {"device": harness.device(kind), "seed": SEED, "sizes": dataclasses.asdict(sizes)}
    rows = [harness.environment("flax", "optax", "torch", **about), *rows]
    accelerated = any(row.get("platform") not in (None, "cpu") for row in rows)
    parts = ["gpu"] * accelerated + [flags.dtype] * (flags.dtype != "float32")
    path = harness.named(flags.results, *parts)
    harness.finish(rows, path, report)


if __name__ == "__main__":
    main()
