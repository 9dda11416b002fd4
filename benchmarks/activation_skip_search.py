"""Which activations and skips does DARTS pick, and is it right?  (Zhu et al. 2022, Figure 1)

The network of Eq. (1), L = 10 layers, on Fashion-MNIST. Each run draws its own rows and weights:

1. the search: first-order DARTS on minibatches (`--second-order`: and second order, exact); the
   paper reports the probability of each activation, and the weight of each skip, layer by layer;
2. the truth: plain networks of one activation, with all skips and with none, those that the
   searches find, and random ones, trained from scratch on the search's training half;
3. the paper's explanation: the smallest eigenvalue of the NTK of the single-activation networks.

The paper gives depth, width (1024), number of runs (5), the weights' variance 1/m and |x| = 1, and
refers to DARTS for the rest. So the first search has DARTS's own settings: batches of 64, SGD at
0.025 with momentum 0.9, cosine decay to 0.001, gradients clipped at 5, weight decay 3e-4; Adam
(beta 0.5 and 0.999, weight decay 0.001 on the logits) above, whose rate times the number of steps
is what it is in DARTS's 50 epochs of CIFAR-10: 6. How long to search is not in the paper, and
decides the outcome. The other searches (`READINGS`) change the inputs, or the weights to Lemma 1's
(see `bilevel.spaces.skips`), with steps of their own scale and no decay, or the length; "longer"
once more with ten times the decay, chosen after pilots, and once with the mixtures fitted to the
training half too, so that nothing is gained by fitting less.

The truth is in the "he" initialisation, where all but one of these networks train (sigmoids without
skips do not), by the same SGD, for one epoch, as in Algorithm 1; each takes the step size that is
best on its run's validation half.

    python benchmarks/activation_skip_search.py           # width 128; 9.5 minutes of processor time
    python benchmarks/activation_skip_search.py --quick   # digits, a minute, no results file
    python benchmarks/activation_skip_search.py --full    # the paper's sizes; for an accelerator
    python benchmarks/activation_skip_search.py --table   # the results files as Markdown
"""

import dataclasses
import functools
import itertools
import time

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.stats
from harness import spread, standard_error

import bilevel
import bilevel.data
import ntk
from bilevel import strategies
from bilevel.nets.training import train
from bilevel.spaces.activations import unit_inputs
from bilevel.spaces.skips import CANDIDATES, SkipArchitecture, skip_space

BATCH, TRAVEL = 64, 6.0
TRIED = (0.025, 0.125, 0.625, 3.125)  # step sizes of plain networks
SKIPS = {"no skips": False, "all skips": True}
FAMILY = [CANDIDATES.index(name) for name in ("relu", "leaky_relu")]


@dataclasses.dataclass(frozen=True)
class Reading:
    """One way to do what the paper leaves open."""

    parametrization: str = "as_printed"
    step_size: float = 0.025
    relative: bool = False  # step_size in 1/K, K the mean diagonal of the initial NTK
    clip: float = 5.0  # relative: in sqrt(K), a single row's gradient
    decay: float = 3e-4
    long: bool = False
    unit: bool = True  # rows centred, of unit norm; else pixels of mean 0 and variance 1
    held_out: bool = True  # else the mixtures are fitted to the training half too


READINGS = {
    "DARTS's settings": Reading(),
    "standardised pixels": Reading(unit=False),
    "Lemma 1's weights, 1/K": Reading("ntk", 1.0, relative=True, clip=1.0, decay=0.0),
    "longer": Reading(long=True),
    "longer, decay x 10": Reading(long=True, decay=3e-3),
    "longer, same rows above": Reading(long=True, held_out=False),
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    train: int  # rows of each half
    test: int
    width: int
    steps: tuple[int, int]  # of a search, and of a longer one
    epochs: int  # of a plain network
    runs: int
    depth: int = 10
    kernel_rows: int = 100
    data: str = "fashion-mnist"


SIZES = {
    "quick": Sizes(600, 360, 64, steps=(150, 600), epochs=15, runs=2, depth=4, data="digits"),
    "default": Sizes(30_000, 10_000, 128, steps=(2000, 8000), epochs=1, runs=4),
    "full": Sizes(30_000, 10_000, 1024, steps=(2000, 23_000), epochs=30, runs=5),
}
load = functools.cache(bilevel.data.load)


def parts_of(sizes, run, unit=True):
    """Training, validation and test rows (x, labels)."""
    data, key = load(sizes.data), jax.random.fold_in(jax.random.key(0), run)
    train, valid = bilevel.data.split(key, data.y_train, (sizes.train, sizes.train))
    (test,) = bilevel.data.split(key, data.y_test, (sizes.test,))
    x = data.x_train[train], data.x_train[valid], data.x_test[test]
    x = unit_inputs(*x) if unit else standardised(*x)
    return list(zip(x, (data.y_train[train], data.y_train[valid], data.y_test[test]), strict=True))


def standardised(*parts):
    mean, deviation = parts[0].mean(), parts[0].std()
    return [jnp.asarray((x - mean) / deviation).reshape(len(x), -1) for x in parts]


@functools.cache
def space_of(sizes, parametrization="he"):
    return skip_space(depth=sizes.depth, width=sizes.width, parametrization=parametrization)


def sgd(step_size, steps, clip=5.0, decay=3e-4):
    """DARTS's, for the weights."""
    return optax.chain(
        optax.clip_by_global_norm(clip),
        optax.add_decayed_weights(decay),
        optax.sgd(optax.cosine_decay_schedule(step_size, steps, alpha=0.04), momentum=0.9),
    )


def lower_optimizer(reading, steps, space, w, alpha, x):
    step_size, clip = reading.step_size, reading.clip
    if reading.relative:
        norms = ntk.gradient_norms(
            lambda w, x: space.apply(w, alpha, x), w, x[:20], outputs="trace", batch_size=5
        )
        diagonal = norms.mean() / 10  # of each of the outputs
        step_size, clip = step_size / diagonal, clip * jnp.sqrt(diagonal)
    return sgd(step_size, steps, clip, reading.decay)


def error(space, w, alpha, part):
    x, labels = part
    return jnp.mean(space.predict(space.apply(w, alpha, x)) != labels)


def searches(sizes, name, order):
    """An architecture and a row for each run."""
    reading = READINGS[name]
    space, steps = space_of(sizes, reading.parametrization), sizes.steps[reading.long]
    alpha, program = space.start(), None
    name += ", second order" * (order == 2)

    def search(w, train, valid, test, key):
        lower = lower_optimizer(reading, steps, space, w, alpha, train[0])
        options = {"alpha": TRAVEL / steps, "batch_size": BATCH, "order": order}
        plan = strategies.darts(space, weights=lower, **options)
        above = valid if reading.held_out else train
        found = strategies.run(plan, alpha, w, train, above, steps=steps, key=key)
        losses = [space.problem.lower(found.w, found.alpha, part) for part in (train, valid)]
        return found.alpha, found.state.step, error(space, found.w, found.alpha, test), losses

    for run in range(sizes.runs):
        init_key, key = jax.random.split(jax.random.fold_in(jax.random.key(1), run))
        train, valid, test = parts_of(sizes, run, reading.unit)
        arguments = space.init(init_key, train), train, valid, test, key
        compilation = 0.0
        if program is None:
            program, compilation = harness.compiled(search, *arguments)
        start = time.perf_counter()
        found, done, supernet, losses = jax.block_until_ready(program(*arguments))
        seconds = {"seconds": time.perf_counter() - start, "compile_seconds": compilation}
        if int(done) != steps:
            raise FloatingPointError(f"{name}, run {run}: the search diverged.")
        row = {"search": name, "run": run, "steps": steps, "reading": dataclasses.asdict(reading)}
        row |= {part: np.asarray(a).tolist() for part, a in found.items()} | seconds
        row |= {"supernet": float(supernet), "losses": [float(loss) for loss in losses]}
        print(f"{name:32s} {run} {100 * row['supernet']:.1f} %", flush=True)
        yield space.discretize(found), row


@functools.partial(jax.jit, static_argnums=0)
def trained_errors(sizes, corner, key, data, valid, test):
    """[tried, 2]: validation and test errors from each step size; [tried]: test losses."""
    space, steps = space_of(sizes), sizes.epochs * (sizes.train // BATCH)
    init_key, key = jax.random.split(key)
    start = space.init(init_key, data)

    def errors(step_size):
        options = {"optimizer": sgd(step_size, steps), "epochs": sizes.epochs, "batch_size": BATCH}
        w = train(key, space.problem.lower, corner, start, data, **options).last
        both = jnp.stack([error(space, w, corner, part) for part in (valid, test)])
        return both, space.problem.lower(w, corner, test)

    return jax.lax.map(errors, jnp.array(TRIED))


def network(sizes, name, architecture, run) -> dict:
    """A row: the network trained from each step size; its test error and loss at the best one."""
    key, parts = jax.random.fold_in(jax.random.key(2), run), parts_of(sizes, run)
    # As a corner of the supernet: one compilation for all architectures.
    corner = space_of(sizes).one_hot(architecture)
    errors, losses = (np.asarray(a, float) for a in trained_errors(sizes, corner, key, *parts))
    best = errors[:, 0].argmin()
    row = {"network": name, "architecture": str(architecture), "run": run}
    row |= {"step_size": TRIED[best], "test": errors[best, 1], "loss": losses[best]}
    row |= {"tried": errors.tolist()}
    print(f"{name:32s} {run} {100 * row['test']:.1f} % at {TRIED[best]:g}", flush=True)
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
    for reading, order in itertools.product(READINGS, orders):
        for architecture, row in searches(sizes, reading, order):
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


def positive(x):
    return x.mean(axis=0) > 2 * standard_error(x)


def grouped(rows, part, by, *columns):
    """``name -> (array [runs, ...] of each column)``"""
    rows = harness.where(rows, part=part)
    names = dict.fromkeys(r[by] for r in rows)
    return {n: [np.array([r[c] for r in rows if r[by] == n]) for c in columns] for n in names}


COLUMNS = (
    "search",
    "steps",
    "losses, training and validation",
    "1.",
    "both likeliest (one of them is), layers of {layers}",
    "their probability (0.40 at first)",
    "2.",
    "gap, first layer",
    "less the largest other",
    "last layer's",
    "3.",
    "skips over 1/2 (by 2 s.e.), of {skips}",
    "mean weight (0.50 at first)",
    "supernet's test error, %",
)
CLAIMS = """Do the paper's findings reproduce (in means over runs)?

1. ReLU and LeakyReLU are the two likeliest in every layer (in part: one of them is the likeliest
   in more than half of the layers);
2. a run's gap, its largest less its smallest probability, is larger in the first layer than in
   any other, and in the last under a tenth of that (in part: larger in the first than the last);
3. the skips are over 1/2 everywhere (in part: in more than half of the layers, or not clearly).

Over and larger: by two standard errors of runs, paired."""


def graded(fully, partly) -> str:
    return "**yes**" if fully else "in part" if partly else "no"


def findings(p, skips) -> list[str]:
    """Cells of the table: for each of the paper's findings the verdict, then its figures."""
    mean, layers = p.mean(axis=0), p.shape[1]
    likeliest = np.argsort(-mean, axis=-1, stable=True)
    one = np.isin(likeliest[:, 0], FAMILY).sum()
    both = np.isin(likeliest[:, :2], FAMILY).all(axis=-1).sum()
    family = p[..., FAMILY].sum(axis=-1).mean(axis=-1)
    gaps = np.ptp(p, axis=-1)  # [runs, layers]
    other = 1 + gaps.mean(axis=0)[1:].argmax()
    more = gaps[:, :1] - gaps
    flat = gaps[:, -1].mean() < 0.1 * gaps[:, 0].mean()
    wanted, clearly = (skips.mean(axis=0) > 0.5).sum(), positive(skips - 0.5).sum()
    return [
        graded(both == layers, one > layers / 2),
        f"{both} ({one})",
        spread(family),
        graded(positive(more[:, other]) and flat, positive(more[:, -1])),
        spread(gaps[:, 0]),
        f"{spread(more[:, other])} (layer {other + 1})",
        spread(gaps[:, -1]),
        graded(clearly == layers - 1, wanted > (layers - 1) / 2),
        f"{wanted} ({clearly})",
        spread(skips.mean(axis=-1)),
    ]


def kendall(a, b) -> str:
    return f"{scipy.stats.kendalltau(a, b).statistic:+.1f}"


def search_table(rows) -> str:
    sizes = rows[0]["sizes"]
    found = grouped(rows, "search", "search", "activations", "skips", "supernet", "losses", "steps")
    lines = []
    for name, (p, skips, supernet, losses, steps) in found.items():
        own = [name, str(steps[0]), ", ".join(spread(part) for part in losses.T)]
        lines.append([*own, *findings(p, skips), spread(supernet, ".1f", 100)])
    counts = {"layers": sizes["depth"] - 1, "skips": sizes["depth"] - 2}
    return harness.table([column.format(**counts) for column in COLUMNS], lines)


def truth_table(rows) -> str:
    """Each activation's test error and loss, and scores beside it: searches', the kernel's."""
    trained = grouped(rows, "network", "network", "test", "loss")
    kernels = grouped(rows, "kernel", "network", "λ_min", "mean diagonal")
    truth = {label: [trained[f"{a}, {label}"] for a in CANDIDATES] for label in SKIPS}
    lines, scores = [], {}
    for label, of_each in truth.items():
        lines += [[f"test error, %, {label}", *(spread(e, ".1f", 100) for e, _ in of_each), "", ""]]
        lines += [[f"test loss, {label}", *(spread(loss) for _, loss in of_each), "", ""]]
    for name, (p,) in grouped(rows, "search", "search", "activations").items():
        scores[f"mean probability, {name}"] = p.mean(axis=(0, 1))
    for label in SKIPS:
        smallest, diagonal = np.squeeze([kernels[f"{a}, {label}"] for a in CANDIDATES], -1).T
        scores[f"λ_min, {label}"] = smallest
        scores[f"λ_min / mean diagonal, {label}"] = smallest / diagonal
    for name, score in scores.items():
        errors = [[e.mean() for e, _ in of_each] for of_each in truth.values()]
        agreement = [kendall(score, -np.array(e)) for e in errors]
        lines += [[name, *(f"{s:.2g}" for s in score), *agreement]]
    head = ["one activation", *CANDIDATES, *(f"τ, {label}" for label in SKIPS)]
    return harness.table(head, lines)


def others(rows) -> str:
    trained = grouped(rows, "network", "network", "test")
    found = [f"{k} {spread(e, '.1f', 100)} %" for k, (e,) in trained.items() if "skips" not in k]
    return f"Test errors of other networks: {'; '.join(found)}."


def report(rows) -> str:
    head, sizes = rows[0], rows[0]["sizes"]
    parts = [
        f"{sizes['data']}: {sizes['train']} + {sizes['train']} rows, {sizes['test']} test rows, "
        f"L = {sizes['depth']}, m = {sizes['width']}, {sizes['runs']} runs (mean ± s.e.); "
        f"{head['device']}, {head['seconds']:.0f} s in all, {head['processor_seconds']:.0f} s of "
        "processor time.",
        CLAIMS,
        search_table(rows),
        truth_table(rows),
        "τ: Kendall's, of the row with the accuracies (five items).",
        others(rows),
    ]
    if sizes["width"] < SIZES["full"].width:
        parts.append("Not run here: the paper's width of 1024 (`--full`, for an accelerator).")
    return "\n\n".join(parts)


def picture(rows, path):
    found = grouped(rows, "search", "search", "activations", "skips", "steps")
    height, widths = -(-len(found) // 2), (5, 1, 5, 1)
    size = {"figsize": (15, 4 * height), "width_ratios": widths}
    with harness.picture(path, height, 4, **size) as (_, axes):
        draw(found, axes)


def draw(found, axes):
    pairs = np.reshape(axes, (-1, 2))
    for pair in pairs[len(found) :].ravel():
        pair.axis("off")
    for pair, (name, (p, skips, steps)) in zip(pairs, found.items(), strict=False):
        for ax, values, columns, first in (
            (pair[0], p, CANDIDATES, 1),
            (pair[1], skips[..., None], ("skip",), 2),
        ):
            mean = values.mean(axis=0)
            ax.grid(False)
            ax.imshow(mean, vmin=0, vmax=1, cmap="Blues", aspect="auto")
            for i, j in np.ndindex(mean.shape):
                ink = "white" if mean[i, j] > 0.6 else "black"
                ax.text(j, i, spread(values[:, i, j]), ha="center", va="center", color=ink, size=8)
            ax.set_xticks(range(len(columns)), columns)
            ax.set_yticks(range(len(mean)), range(first, first + len(mean)))
        pair[0].set(ylabel="layer", title=f"{name} ({steps[0]} steps): probability")
        pair[1].set_title(f"weight, {len(p)} seeds")


def main() -> None:
    second = {"action": "store_true", "help": "second-order DARTS too"}
    flags = harness.command_line(__file__, __doc__, report, full=True, second_order=second)
    sizes, start = SIZES[flags.size], time.perf_counter()
    rows = list(experiments(sizes, (1, 2) if flags.second_order else (1,)))
    taken = {"seconds": time.perf_counter() - start, "processor_seconds": time.process_time()}
    head = harness.environment("optax", seed=0, sizes=dataclasses.asdict(sizes), **taken)
    harness.finish([head, *rows], flags.results, report, picture)


if __name__ == "__main__":
    main()
