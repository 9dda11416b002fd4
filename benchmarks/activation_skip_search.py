"""Which activations and skips does DARTS pick, and is it right?  (Zhu et al. 2022, Figure 1)

The network of Eq. (1), L = 10 layers, on Fashion-MNIST. Each run draws its own rows and weights:

1. the search: first-order DARTS on minibatches (`--second-order`: and second order, exact); the
   paper reports the probability of each activation, and the weight of each skip, layer by layer;
2. the truth: plain networks of one activation, with all skips and with none, those that the
   searches find, and random ones, trained from scratch on the search's training half;
3. the paper's explanation: the smallest eigenvalue of the NTK of the single-activation networks.

The search runs in two of the paper's initialisations, which do not agree (see
`bilevel.spaces.skips`): "ntk" is that of its theory, "as_printed" that of its algorithm.

The paper gives width (1024), number of runs (5) and no more of this. Here weights take SGD in
batches of 64, momentum 0.9, cosine decay from a multiple of 1/K, K the mean diagonal of the initial
NTK, gradients clipped at sqrt(K), a single row's. Plain networks take the multiple that is best on
the validation half, in every run; what wins a search depends on it, so that more than one is shown.
Mixtures and skips take DARTS's Adam (beta 0.5 and 0.999, weight decay 0.001 on the logits), whose
rate times the number of steps is what it is in DARTS's 50 epochs of CIFAR-10: 6.

    python benchmarks/activation_skip_search.py           # width 128, fewer rows: two cores
    python benchmarks/activation_skip_search.py --quick   # digits, a minute, no results file
    python benchmarks/activation_skip_search.py --full    # the paper's sizes; for an accelerator
    python benchmarks/activation_skip_search.py --table   # the results files as markdown
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import itertools
import json
import os
import platform
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilevel
import ntk
from bilevel.spaces.activations import unit_inputs
from bilevel.spaces.skips import CANDIDATES, SkipArchitecture, geometry, skip_space
from bilevel.spaces.training import minibatches, train

RESULTS = Path(__file__).parent / "results"
BATCH, TRAVEL = 64, 6.0
MULTIPLES = {"ntk": (1.0, 10.0), "as_printed": (0.1,)}  # of 1/K, in searches
TRIED = (0.2, 1.0, 5.0, 25.0)  # of plain networks
SKIPS = {"no skips": False, "all skips": True}


@dataclasses.dataclass(frozen=True)
class Sizes:
    train: int  # rows of each half
    test: int
    width: int
    steps: int  # of the search
    epochs: int  # of a plain network
    runs: int
    depth: int = 10
    kernel_rows: int = 100
    data: str = "fashion-mnist"


SIZES = {
    "quick": Sizes(600, 360, 64, steps=150, epochs=15, runs=2, depth=4, data="digits"),
    "default": Sizes(6000, 3000, 128, steps=2000, epochs=4, runs=3),
    "full": Sizes(30_000, 10_000, 1024, steps=23_000, epochs=30, runs=5),
}
load = functools.cache(bilevel.data.load)


def parts_of(sizes, run):
    """Training, validation and test rows (x, labels); inputs centred, of unit norm."""
    data, key = load(sizes.data), jax.random.fold_in(jax.random.key(0), run)
    train, valid = bilevel.data.split(key, data.y_train, (sizes.train, sizes.train))
    (test,) = bilevel.data.split(key, data.y_test, (sizes.test,))
    x = unit_inputs(data.x_train[train], data.x_train[valid], data.x_test[test])
    return list(zip(x, (data.y_train[train], data.y_train[valid], data.y_test[test]), strict=True))


@functools.cache
def space_of(sizes, parametrization="ntk"):
    return skip_space(depth=sizes.depth, width=sizes.width, parametrization=parametrization)


def sgd(space, w, alpha, x, multiple, steps):
    norms = ntk.gradient_norms(
        lambda w, x: space.apply(w, alpha, x), w, x[:20], outputs="trace", batch_size=5
    )
    diagonal = norms.mean() / 10  # of each of the outputs
    schedule = optax.cosine_decay_schedule(multiple / diagonal, steps)
    clip = optax.clip_by_global_norm(jnp.sqrt(diagonal))
    return optax.chain(clip, optax.sgd(schedule, momentum=0.9))


def error(space, w, alpha, part):
    x, labels = part
    return jnp.mean(space.predict(space.apply(w, alpha, x)) != labels)


def searches(sizes, parametrization, order):
    """An architecture and a row for each step size and run."""
    space, alpha = space_of(sizes, parametrization), space_of(sizes).start()
    adam = optax.adam(TRAVEL / sizes.steps, b1=0.5)
    logits = bilevel.softmax(optax.chain(optax.add_decayed_weights(1e-3), adam))
    outer, compiled = geometry(logits, adam), None

    def search(multiple, w, train, valid, key):
        lower = sgd(space, w, alpha, train[0], multiple, sizes.steps)
        solver = bilevel.unrolled(lower, 1, backprop=order - 1)
        options = {"steps": sizes.steps, "batches": minibatches(BATCH), "key": key}
        return bilevel.search(space.problem, solver, outer, alpha, w, train, valid, **options)

    for multiple, run in itertools.product(MULTIPLES[parametrization], range(sizes.runs)):
        init_key, key = jax.random.split(jax.random.fold_in(jax.random.key(1), run))
        train, valid, test = parts_of(sizes, run)
        w = space.init(init_key, train[0].shape[1])
        arguments = jnp.array(multiple), w, train, valid, key
        start = time.perf_counter()
        compiled = compiled or jax.jit(search).lower(*arguments).compile()
        middle = time.perf_counter()
        found = jax.block_until_ready(compiled(*arguments))
        seconds = {"seconds": time.perf_counter() - middle, "compile_seconds": middle - start}
        name = f"{parametrization}, order {order}, {multiple:g}/K"
        if int(found.state.step) != sizes.steps:
            raise FloatingPointError(f"{name}, run {run}: the search diverged.")
        row = {"search": name, "run": run, **seconds}
        row |= {part: np.asarray(a).tolist() for part, a in found.alpha.items()}
        supernet = float(error(space, found.w, found.alpha, test))
        print(f"{name:32s} {run} {100 * supernet:.1f} %", flush=True)
        yield space.discretize(found.alpha), row | {"supernet": supernet}


@functools.partial(jax.jit, static_argnums=0)
def trained_errors(sizes, corner, key, data, valid, test):
    """[tried, 2]: validation and test errors from each step size."""
    space, steps = space_of(sizes), sizes.epochs * (sizes.train // BATCH)
    init_key, key = jax.random.split(key)
    start = space.init(init_key, data[0].shape[1])

    def errors(multiple):
        optimizer = sgd(space, start, corner, data[0], multiple, steps)
        options = {"optimizer": optimizer, "epochs": sizes.epochs, "batch_size": BATCH}
        w = train(key, space.problem.lower, corner, start, data, **options).last
        return jnp.stack([error(space, w, corner, part) for part in (valid, test)])

    return jax.lax.map(errors, jnp.array(TRIED))


def network(sizes, name, architecture, run) -> dict:
    """A row: the network trained from each step size; its test error at the best one."""
    key, parts = jax.random.fold_in(jax.random.key(2), run), parts_of(sizes, run)
    # As a corner of the supernet: one compilation for all architectures.
    corner = space_of(sizes).one_hot(architecture)
    errors = np.asarray(trained_errors(sizes, corner, key, *parts), float)
    best = errors[:, 0].argmin()
    row = {"network": name, "architecture": str(architecture), "run": run}
    row |= {"multiple": TRIED[best], "test": errors[best, 1], "tried": errors.tolist()}
    print(f"{name:32s} {run} {100 * row['test']:.1f} % at {TRIED[best]:g}/K", flush=True)
    return row


def kernel(sizes, name, architecture) -> dict:
    """A row: the infinitely wide network's NTK on the first rows of the first run, in float64."""
    x = np.asarray(parts_of(sizes, 0)[0][0][: sizes.kernel_rows], float)
    with jax.enable_x64(True):
        theta = np.asarray(space_of(sizes).kernel(architecture, x).ntk)
    smallest, diagonal = np.linalg.eigvalsh(theta)[0], np.trace(theta) / len(x)
    return {"network": name, "λ_min": float(smallest), "mean diagonal": float(diagonal)}


def random_architecture(sizes, run):
    draw = np.random.default_rng(run)
    names, skips = draw.choice(CANDIDATES, sizes.depth - 1), draw.random(sizes.depth - 2) > 0.5
    return SkipArchitecture(tuple(names.tolist()), tuple(skips.tolist()))


def experiments(sizes, orders):
    to_train = []
    for parametrization, order in itertools.product(MULTIPLES, orders):
        for architecture, row in searches(sizes, parametrization, order):
            to_train.append((f"found, {row['search']}", architecture, row["run"]))
            yield {"part": "search", "architecture": str(architecture)} | row
    runs = range(sizes.runs)
    to_train += [("random", random_architecture(sizes, run), run) for run in runs]
    for activation, label in itertools.product(CANDIDATES, SKIPS):
        skips = (SKIPS[label],) * (sizes.depth - 2)
        single = SkipArchitecture((activation,) * (sizes.depth - 1), skips)
        yield {"part": "kernel"} | kernel(sizes, f"{activation}, {label}", single)
        to_train += [(f"{activation}, {label}", single, run) for run in runs]
    for named in to_train:
        yield {"part": "network"} | network(sizes, *named)


def spread(x, digits=2) -> str:
    error = np.std(x, ddof=1) / np.sqrt(len(x))
    return f"{np.mean(x):.{digits}f} ± {error:.{digits}f}"


def grouped(rows, part, by, *columns):
    """``name -> (array [runs, ...] of each column)``"""
    rows = [r for r in rows if r["part"] == part]
    names = dict.fromkeys(r[by] for r in rows)
    return {n: [np.array([r[c] for r in rows if r[by] == n]) for c in columns] for n in names}


def findings(p, skips):
    """Pairs of whether what the paper says is seen, and what is; from means over runs."""
    order = np.argsort(-p.mean(axis=0), axis=-1, stable=True)  # [layers, h]
    both = [{CANDIDATES[i] for i in layer[:2]} == {"relu", "leaky_relu"} for layer in order]
    winners = ", ".join(CANDIDATES[layer[0]] for layer in order)
    text = f"ReLU and LeakyReLU likeliest in every layer: in {sum(both)} of {len(both)}"
    yield all(both), f"{text}; the likeliest are {winners}"
    gaps = np.ptp(p, axis=-1)  # [runs, layers]
    most = gaps.mean(axis=0).argmax()
    text = f"the first layer differs most: largest less smallest probability {spread(gaps[:, 0])}"
    yield most == 0, f"{text}, at most {spread(gaps[:, most])} (layer {most + 1})"
    last = gaps[:, -1].mean() / gaps[:, 0].mean()
    yield last < 0.1, f"the last not at all: {last:.0%} of the first's difference (asked: 10 %)"
    wanted, low = skips.mean(axis=0) > 0.5, skips.mean(axis=0).argmin()
    text = f"skips wanted everywhere: {wanted.sum()} of {wanted.size} over 1/2, the smallest"
    yield wanted.all(), f"{text} {spread(skips[:, low])} (layer {low + 2})"


def kendall(a, b) -> str:
    tau = bilevel.rank_agreement(jax.random.key(0), jnp.asarray(a), jnp.asarray(b)).kendall
    return f"{float(tau):+.1f}"


def markdown(rows) -> str:
    head, sizes = rows[0], rows[0]["sizes"]
    found = grouped(rows, "search", "search", "activations", "skips", "supernet", "seconds")
    kernels = grouped(rows, "kernel", "network", "λ_min", "mean diagonal")
    errors = {k: 100 * v for k, (v,) in grouped(rows, "network", "network", "test").items()}
    lines = [
        f"{sizes['data']}: {sizes['train']} + {sizes['train']} rows, {sizes['test']} test rows, "
        f"L = {sizes['depth']}, m = {sizes['width']}, {sizes['steps']} steps of search, "
        f"{sizes['runs']} runs (mean ± s.e.); {head['device']}, {head['seconds']:.0f} s in all."
    ]
    scores = {}
    for name, (p, skips, supernet, seconds) in found.items():
        own = f"supernet's test error {spread(100 * supernet, 1)} %, {np.median(seconds):.0f} s"
        lines += ["", f"Search, {name} ({own}):", ""]
        lines += [f"- {'yes' if ok else '**no**'}: {text}" for ok, text in findings(p, skips)]
        scores[f"mean probability, {name}"] = p.mean(axis=(0, 1))
        scores[f"in the first layer, {name}"] = p[:, 0].mean(axis=0)
    for label in SKIPS:
        smallest, diagonal = np.squeeze([kernels[f"{a}, {label}"] for a in CANDIDATES], -1).T
        scores[f"λ_min, {label}"] = smallest
        scores[f"λ_min / mean diagonal, {label}"] = smallest / diagonal
    truth = {label: [errors[f"{a}, {label}"] for a in CANDIDATES] for label in SKIPS}
    table = [["one activation", *CANDIDATES, *(f"τ, {label}" for label in SKIPS)]]
    table += [["---"] * len(table[0])]
    for label, of_each in truth.items():
        table += [[f"test error, %, {label}", *(spread(e, 1) for e in of_each), "", ""]]
    for name, score in scores.items():
        agreement = [kendall(score, -np.mean(of_each, axis=1)) for of_each in truth.values()]
        table += [[name, *(f"{s:.2g}" for s in score), *agreement]]
    lines += ["", *(f"| {' | '.join(row)} |" for row in table)]
    others = [f"{k} {spread(v, 1)} %" for k, v in errors.items() if "skips" not in k]
    lines += ["", "τ: Kendall's, with the accuracies in the first two rows.", ""]
    return "\n".join([*lines, f"Test errors of other networks: {'; '.join(others)}."])


def picture(rows, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = grouped(rows, "search", "search", "activations", "skips")
    figure, axes = plt.subplots(
        len(found), 2, figsize=(9, 4 * len(found)), width_ratios=(5, 1), layout="constrained"
    )
    for pair, (name, (p, skips)) in zip(axes, found.items(), strict=True):
        for ax, values, columns, first in (
            (pair[0], p, CANDIDATES, 1),
            (pair[1], skips[..., None], ("skip",), 2),
        ):
            mean = values.mean(axis=0)
            ax.imshow(mean, vmin=0, vmax=1, cmap="Blues", aspect="auto")
            for i, j in np.ndindex(mean.shape):
                ink = "white" if mean[i, j] > 0.6 else "black"
                ax.text(j, i, spread(values[:, i, j]), ha="center", va="center", color=ink)
            ax.set_xticks(range(len(columns)), columns)
            ax.set_yticks(range(len(mean)), range(first, first + len(mean)))
        pair[0].set(ylabel="layer", title=f"probability of each activation: {name}")
        pair[1].set_title("weight")
    figure.savefig(path, dpi=110)


def environment(sizes) -> dict:
    names = "bilevel", "jax", "jaxlib", "numpy", "optax"
    versions = {name: importlib.metadata.version(name) for name in names}
    device = jax.devices()[0].device_kind
    if device == "cpu":
        cpu = Path("/proc/cpuinfo").read_text().split("model name\t: ")[1].splitlines()[0]
        device = f"{cpu}, {len(os.sched_getaffinity(0))} cores"
    head = {"part": "environment", "device": device, "seed": 0, "sizes": dataclasses.asdict(sizes)}
    return head | {"versions": {"python": platform.python_version()} | versions}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a minute; no results file")
    parser.add_argument("--full", action="store_true", help="the paper's sizes")
    parser.add_argument("--second-order", action="store_true", help="second-order DARTS too")
    parser.add_argument("--table", action="store_true", help="the results files as markdown")
    args = parser.parse_args()
    if args.table:
        for path in sorted(RESULTS.glob("activation_skip_search*.jsonl")):
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            print(markdown(rows), end="\n\n")
        return
    sizes = SIZES["quick" if args.quick else "full" if args.full else "default"]
    start = time.perf_counter()
    rows = list(experiments(sizes, (1, 2) if args.second_order else (1,)))
    rows.insert(0, environment(sizes) | {"seconds": time.perf_counter() - start})
    print(markdown(rows))
    if not args.quick:
        path = RESULTS / f"activation_skip_search{'_full' * args.full}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        picture(rows, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
