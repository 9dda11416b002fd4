"""What does a train-free score of a network of NAS-Bench-201 cost?  (Dong & Yang 2020)

Networks are drawn uniformly from all 15,625, at initialization. Each is scored on the same batch:

- by `ntk.scores` on `bilevel.spaces.nasbench201`. The genotype is an argument, so each score has
  one compiled function for all networks;
- by plain PyTorch without compilation: a module for each genotype and the same definitions, written
  here. Operations that `none` cuts off from the output are left out, as in ours. Building the
  modules is not counted.

`logits` is the forward pass alone. Images and labels are random numbers. In both libraries all
networks take their weights from one set, ours, so the values must agree, network by network. In
float32 they agree up to roundoff, which sometimes moves a gradient across the kink of a ReLU.
Therefore the rows also have the median over networks.

Each library and score has a process, and one runs at a time. PyTorch's scores every other network
before ours, and the remaining ones after. The ratio is of mean times over the networks that both
have scored, with the standard error of paired differences. The ratio of CPU times is shown too,
because other work disturbs it less. A process stops at its limit of seconds, so expensive scores
have fewer networks. The first call compiles and is not counted. Memory is the largest resident set
during scoring. In brackets is its growth over the memory before.

    python benchmarks/train_free/nasbench201.py            # batch 32: up to an hour on two cores
    python benchmarks/train_free/nasbench201.py --scores snip  # replaces its rows in the results
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

MEASURES = ("ntk/scores", "bilevel/spaces/nasbench201", "bilevel/nets/convolution.py")

# Each library is imported only in the process that runs it, so their memory is separate.

LIBRARIES = {"torch": "PyTorch", "bilevel": "bilevel"}
SCORES = ["logits", "naswot", "eigen_nas", "grad_norm", "snip"]
TIMES = "seconds", "processor_seconds"
CLASSES, SEED = 10, 0
OPERATIONS = "none", "skip_connect", "nor_conv_1x1", "nor_conv_3x3", "avg_pool_3x3"
EDGES = (0, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 3)
SPACE = (len(OPERATIONS),) * len(EDGES)


@dataclasses.dataclass(frozen=True)
class Sizes:
    cells: int  # of each stage
    channels: int
    side: int
    batch: int
    networks: int
    peers: int  # of these networks, by PyTorch
    limit: float  # seconds, of a process


SIZES = {
    "smoke": Sizes(1, 2, side=8, batch=4, networks=4, peers=2, limit=5),
    "quick": Sizes(1, 4, side=16, batch=8, networks=16, peers=8, limit=20),
    "default": Sizes(5, 16, side=32, batch=32, networks=500, peers=60, limit=240),
}
SMALL = {"smoke": SCORES[1:2], "quick": SCORES[:4]}


def draw_genotypes(sizes):
    """Return indices of operations, [networks, 6]."""
    places = np.random.default_rng(SEED).permutation(math.prod(SPACE))[: sizes.networks]
    return np.stack(np.unravel_index(places, SPACE), axis=1).astype(np.int32)


def draw_batch(sizes):
    """Return images [n, h, w, c] and labels [n]."""
    rng, shape = np.random.default_rng(SEED), (sizes.batch, sizes.side, sizes.side, 3)
    return rng.normal(size=shape).astype(np.float32), rng.integers(CLASSES, size=sizes.batch)


# ------------------------------------------------------------------------------------- ours


def our_networks(sizes):
    from bilevel.spaces.nasbench201 import all_networks
    from bilevel.spaces.nasbench201.genotype import EDGES as OURS
    from bilevel.spaces.nasbench201.genotype import PRIMITIVES

    assert (EDGES, OPERATIONS) == (OURS, PRIMITIVES)
    return all_networks(classes=CLASSES, cells=sizes.cells, channels=sizes.channels)


def draw_weights(sizes, path) -> None:
    """Draw weights of all operations on all edges, by our names."""
    import jax
    from flax.traverse_util import flatten_dict

    w = our_networks(sizes).init(jax.random.key(SEED), (sizes.side, sizes.side, 3))
    np.savez(path, **flatten_dict(jax.device_get(w), sep="/"))


def bilevel_score(name, sizes, path):
    """Return ``prepare(genotype) -> call``, and fields to report."""
    import jax
    from flax.traverse_util import unflatten_dict

    import ntk

    jax.config.update("jax_enable_compilation_cache", False)
    networks = our_networks(sizes)
    w = jax.device_put(unflatten_dict(dict(np.load(path)), sep="/"))
    batch = jax.device_put(draw_batch(sizes))

    @jax.jit
    def value(w, genotype, batch):
        w = networks.select(w, genotype)
        if name == "logits":
            return networks.apply(w, genotype, batch[0])
        score = getattr(ntk.scores, name)
        return score(None, lambda w, x: networks.apply(w, genotype, x), w, batch)

    known = {"device": jax.devices()[0].device_kind, "compilations": 0}

    def listen(event, seconds, **_):
        known["compilations"] += event == "/jax/core/compile/backend_compile_duration"

    def prepare(genotype):
        return lambda: jax.device_get(value(w, genotype, batch))

    jax.monitoring.register_event_duration_secs_listener(listen)
    return prepare, known


# ---------------------------------------------------------------------------------- PyTorch


def torch_network(genotype, sizes):
    """Return the network of a genotype as PyTorch modules with our names."""
    import torch
    from torch import nn

    def conv(inputs, outputs, size=1, stride=1):
        return nn.Conv2d(inputs, outputs, size, stride, (size - 1) // 2, bias=False)

    def norm(c):
        return nn.BatchNorm2d(c, track_running_stats=False)

    class ReluConvNorm(nn.Module):
        def __init__(self, inputs, outputs, size, stride=1):
            super().__init__()
            self.relu = nn.ReLU()
            self.conv = conv(inputs, outputs, size, stride)
            self.norm = norm(outputs)

        def forward(self, x):
            return self.norm(self.conv(self.relu(x)))

    operations = {
        "skip_connect": lambda c: nn.Identity(),
        "nor_conv_1x1": lambda c: ReluConvNorm(c, c, 1),
        "nor_conv_3x3": lambda c: ReluConvNorm(c, c, 3),
        "avg_pool_3x3": lambda c: nn.AvgPool2d(3, 1, 1, count_include_pad=False),
    }
    names = [OPERATIONS[k] for k in genotype]
    reaches = {3}  # nodes that lead to the output
    for (source, node), name in reversed(list(zip(EDGES, names, strict=True))):
        if name != "none" and node in reaches:
            reaches.add(source)

    class Cell(nn.Module):
        def __init__(self, c):
            super().__init__()
            self.ends = []
            for k, ((source, node), name) in enumerate(zip(EDGES, names, strict=True)):
                if name != "none" and node in reaches:
                    edge = nn.Sequential()
                    edge.add_module(name, operations[name](c))
                    self.add_module(f"edge_{k}", edge)
                    self.ends.append((edge, source, node))

        def forward(self, x):
            nodes = {0: x}
            for edge, source, node in self.ends:
                if source not in nodes:  # its input is zero
                    nodes[source] = torch.zeros_like(x)
                y = edge(nodes[source])
                nodes[node] = nodes[node] + y if node in nodes else y
            return nodes[3] if 3 in nodes else torch.zeros_like(x)

    class Reduction(nn.Module):
        def __init__(self, c):
            super().__init__()
            self.first = ReluConvNorm(c, 2 * c, 3, stride=2)
            self.second = ReluConvNorm(2 * c, 2 * c, 3)
            self.pool = nn.AvgPool2d(2, 2)
            self.shortcut = conv(c, 2 * c)

        def forward(self, x):
            return self.second(self.first(x)) + self.shortcut(self.pool(x))

    class Stem(nn.Sequential):
        def __init__(self, c):
            super().__init__()
            self.conv, self.norm = conv(3, c, 3), norm(c)

    class Head(nn.Module):
        def __init__(self, c):
            super().__init__()
            self.norm, self.relu = norm(c), nn.ReLU()
            self.classifier = nn.Linear(c, CLASSES)

        def forward(self, x):
            return self.classifier(self.relu(self.norm(x)).mean((2, 3)))

    c, network = sizes.channels, nn.Sequential()
    network.add_module("stem", Stem(c))
    for stage in range(3):
        if stage:
            network.add_module(f"reduction_{stage}", Reduction(c))
            c *= 2
        for cell in range(stage * sizes.cells, (stage + 1) * sizes.cells):
            network.add_module(f"cell_{cell}", Cell(c))
    network.add_module("head", Head(c))
    return network


def copy_weights(network, arrays) -> None:
    """Copy our weights into PyTorch's: kernels [k, k, in, out] and [in, out]."""
    import torch

    for name, p in network.named_parameters():
        *place, last = name.split(".")
        if last == "weight":
            last = "scale" if p.ndim == 1 else "kernel"
        array = torch.from_numpy(arrays["/".join([*place, last])])
        if array.ndim > 1:
            array = array.movedim((-1, -2), (0, 1))
        with torch.no_grad():
            p.copy_(array)


def torch_scores():
    """Return the scores of `ntk.scores` for a network, images [n, c, h, w] and labels."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    # A dead network's output does not depend on its cells.
    grad = functools.partial(torch.autograd.grad, allow_unused=True, materialize_grads=True)

    def kernels(network):
        return [p for p in network.parameters() if p.ndim > 1]

    def loss_gradient(network, x, y):
        weights = kernels(network)
        return zip(weights, grad(F.cross_entropy(network(x), y), weights), strict=True)

    @torch.no_grad()
    def logits(network, x, y):
        return network(x)

    @torch.no_grad()
    def naswot(network, x, y):
        agreements = torch.zeros(len(x), len(x), device=x.device)

        def count(module, inputs, output):
            signs = torch.where(inputs[0].flatten(1) > 0, 1.0, -1.0)
            agreements.add_((signs.shape[1] + signs @ signs.T) / 2)

        relus = [module for module in network.modules() if isinstance(module, nn.ReLU)]
        handles = [relu.register_forward_hook(count) for relu in relus]
        network(x)
        for handle in handles:
            handle.remove()
        if (torch.tril(agreements, -1) == agreements[0, 0]).any():
            return torch.tensor(-torch.inf)
        return torch.linalg.slogdet(agreements.double())[1]

    def eigen_nas(network, x, y):
        weights = list(network.parameters())
        squares = [
            sum((g**2).sum() for g in grad(network(x[i : i + 1]).sum(), weights))
            for i in range(len(x))
        ]
        return sum(squares) / len(x)

    def grad_norm(network, x, y):
        return sum(g.norm() for _, g in loss_gradient(network, x, y))

    def snip(network, x, y):
        return sum((p * g).abs().sum() for p, g in loss_gradient(network, x, y))

    scores = logits, naswot, eigen_nas, grad_norm, snip
    return {score.__name__: score for score in scores}


def torch_score(name, sizes, path):
    """Return the same values as :func:`bilevel_score`, for PyTorch."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    arrays, (x, y) = dict(np.load(path)), draw_batch(sizes)
    x, y = torch.from_numpy(x).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(y)
    score, known = torch_scores()[name], {"building_seconds": []}

    def prepare(genotype):
        start = time.perf_counter()
        network = torch_network(genotype, sizes)
        known["building_seconds"].append(time.perf_counter() - start)
        copy_weights(network, arrays)
        return lambda: score(network, x, y).detach().numpy()

    return prepare, known


# --------------------------------------------------------------------------- the measurement


def work(library, score, sizes, places, path) -> list[dict]:
    """Call each network after a warm-up; return a row. ``places``: a slice of the genotypes."""
    sizes = Sizes(**sizes)
    if library == "weights":
        draw_weights(sizes, path)
        return [{}]
    measured = {"bilevel": bilevel_score, "torch": torch_score}[library]
    prepare, known = measured(score, sizes, path)
    genotypes, places = draw_genotypes(sizes), list(range(sizes.networks)[slice(*places)])
    start = time.perf_counter()
    prepare(genotypes[places[0]])()
    row = {"library": library, "score": score, "first_s": time.perf_counter() - start}
    row["first_peak_mb"] = harness.resident_peak()
    before, values, seconds, processor = harness.forget_peak(), [], [], []
    start = time.perf_counter()
    for place in places:
        call = prepare(genotypes[place])
        begun, used = time.perf_counter(), time.process_time()
        result = call()
        seconds.append(time.perf_counter() - begun)
        processor.append(time.process_time() - used)
        values.append(np.ravel(result).astype(float).tolist())
        if time.perf_counter() - start > sizes.limit and len(seconds) > 2:
            break
    row["peak_mb"] = harness.resident_peak()
    row["added_mb"] = row["peak_mb"] - before
    row |= known | {"places": places[: len(values)], "values": values}
    return [row | {"seconds": seconds, "processor_seconds": processor}]


def measure(sizes, scores, libraries) -> list[dict]:
    ours, evens, odds = (0, sizes.networks, 1), (0, sizes.peers, 2), (1, sizes.peers, 2)
    processes = [("torch", evens), ("bilevel", ours), ("torch", odds)]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.npz"
        about = dataclasses.asdict(sizes)
        (made,) = harness.in_own_process(__file__, "weights", None, about, (), str(path))
        if failed := made.get("failed"):
            sys.exit(f"No weights: {failed}")
        for score in scores:
            by_library = {}
            for library, places in processes:
                if library not in libraries or "failed" in by_library.get(library, {}):
                    continue
                request = library, score, about, places, str(path)
                row = harness.in_own_process(__file__, *request)[-1]
                row = {"library": library, "score": score} | row
                done = row.get("failed", f"{len(row.get('places', ()))} networks")
                print(f"{LIBRARIES[library]}, {score}: {done}", flush=True)
                if library in by_library and "seconds" in row:
                    for key in ("places", "values", "building_seconds", *TIMES):
                        row[key] = by_library[library][key] + row[key]
                    for key in ("peak_mb", "added_mb"):
                        row[key] = max(by_library[library][key], row[key])
                by_library[library] = row
            rows += summaries(by_library)
    return rows


def summaries(by_library) -> list[dict]:
    """Replace lists in the rows of a score by statistics. PyTorch's row also has the comparison."""
    rows = [{key: row[key] for key in row if key not in RAW} for row in by_library.values()]
    for row, short in zip(by_library.values(), rows, strict=True):
        if "seconds" in row:
            short["networks"] = len(row["places"])
            short |= {key: statistics_of(row[key]) for key in TIMES}
        if "building_seconds" in row:
            short["building_s"] = median(row["building_seconds"])
    ours, peer = (by_library.get(library, {}) for library in ("bilevel", "torch"))
    if "seconds" in ours and "seconds" in peer:
        shared = sorted(set(ours["places"]) & set(peer["places"]))
        errors = [off(*(value_at(row, k) for row in (ours, peer)), ours["score"]) for k in shared]
        compared = {"pairs": len(shared), "error": max(errors), "error_median": median(errors)}
        for key in TIMES:
            compared[f"ratio_of_{key}"] = ratio(ours, peer, shared, key)
        rows[[row["library"] for row in rows].index("torch")] |= compared
    return rows


RAW = "places", "values", "building_seconds", *TIMES
median = statistics.median


def value_at(row, place):
    return np.array(row["values"][row["places"].index(place)])


def off(value, other, score) -> float:
    """Return the relative difference; for logits, which cross 0, the largest absolute one."""
    if np.array_equal(value, other):  # infinities too
        return 0.0
    error = np.abs(value - other) / (1 if score == "logits" else np.abs(other))
    return float(np.max(error)) if np.isfinite(error).all() else math.inf


def statistics_of(values) -> dict:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    mean = {"mean": statistics.mean(values), "error": error, "median": median(values)}
    return mean | {"least": min(values), "most": max(values)}


def ratio(ours, peer, both, key) -> tuple[float, float]:
    """Return PyTorch's mean time over ours, and its standard error."""
    x, y = (np.array([row[key][row["places"].index(k)] for k in both]) for row in (peer, ours))
    value = x.mean() / y.mean()
    error = np.std(x - value * y, ddof=1) / len(both) ** 0.5 / y.mean()
    return float(value), float(error)


# -------------------------------------------------------------------------------- the report


def time_of(row) -> str:
    seconds = row["seconds"]
    return f"{plus_minus(seconds['mean'], seconds['error'])} ({seconds['median']:.3g})"


HEAD = ["score", "networks", "bilevel, s (median)", "PyTorch, s (median)", "PyTorch / bilevel"]
HEAD += ["ratio of CPU time", "bilevel, MB (added)", "PyTorch, MB (added)", "first call, s"]
HEAD += ["largest difference"]


def score_table(rows) -> str:
    lines = []
    for score in SCORES:
        of_score = harness.where(rows, score=score)
        ours, peer = pair = [harness.measured(of_score, library=x) for x in ("bilevel", "torch")]
        if not any(pair):
            continue
        cells = [score, " / ".join(str(row["networks"]) if row else "-" for row in pair)]
        cells += [time_of(row) if row else "-" for row in pair]
        compared = peer is not None and "error" in peer
        cells += [plus_minus(*peer[f"ratio_of_{key}"]) if compared else "-" for key in TIMES]
        cells += [f"{r['peak_mb']:.0f} ({r['added_mb']:.0f})" if r else "-" for r in pair]
        cells.append(f"{ours['first_s']:.0f}" if ours else "-")
        cells.append(f"{peer['error']:.0e}" if compared else "-")
        lines.append(cells)
    return harness.table(HEAD, lines)


def title(rows) -> str:
    sizes = rows[0]["sizes"]
    text = (
        f"3 x {sizes['cells']} cells, {sizes['channels']} channels, images of {sizes['side']} x "
        f"{sizes['side']}, batch {sizes['batch']}, float32; {rows[0]['device']}; "
        "seconds per network (mean ± s.e.)"
    )
    building = [row["building_s"] for row in rows if "building_s" in row]
    return f"{text}; building one in PyTorch: {median(building):.2g}" if building else text


def report(rows) -> str:
    return f"{title(rows)}\n\n{score_table(rows)}"


def with_others(rows, path) -> list[dict]:
    """Return the rows, and the file's rows for scores that were not measured now."""
    measured = {row["score"] for row in rows[1:]}
    old = harness.read(path) if measured != set(SCORES) else []
    about = old and harness.same_sizes(old, rows[0]["sizes"], but=("together", "dtype"))
    if old and not (about and all(old[0][k] == rows[0][k] for k in ("device", "versions"))):
        sys.exit(f"{path.name} is of another machine, versions or sizes: nothing was written.")
    others = (row for row in old[1:] if row["score"] not in measured)
    return [rows[0], *sorted([*rows[1:], *others], key=lambda row: SCORES.index(row["score"]))]


def main() -> None:
    own = {"nargs": "+", "choices": SCORES, "metavar": "SCORE", "help": "these alone"}
    options = {"work": work, "peers": ("torch",), "scores": own}
    flags = harness.command_line(__file__, __doc__, report, **options)
    sizes = SIZES[flags.size]
    scores = flags.scores or SMALL.get(flags.size, SCORES)
    rows = measure(sizes, scores, [*flags.peers, "bilevel"])
    kind = next((row["device"] for row in rows if "device" in row), "unknown")
    about = {"device": harness.device(kind), "seed": SEED, "sizes": dataclasses.asdict(sizes)}
    rows = [harness.environment("flax", "torch", **about), *rows]
    path = flags.results
    harness.finish(with_others(rows, path) if path else rows, path, report)


if __name__ == "__main__":
    main()
