"""Which activations and skips does DARTS pick, and is it right?  (Zhu et al. 2022, Figure 1)

The network of Eq. (1) has L = 10 layers and learns Fashion-MNIST. Each run draws rows and weights:

1. the search: first-order DARTS on minibatches (`--second-order`: and second order, exact). The
   paper reports the probability of each activation and the weight of each skip, layer by layer;
2. the truth: networks trained from scratch on the search's training half. They have one activation
   with all skips or none, or the architecture of a search, or a random one;
3. the paper's explanation: the smallest eigenvalue of the NTK of the single-activation networks.

The paper gives depth, width (1024), number of runs (5), the weights' variance 1/m and |x| = 1. It
says that activations and skips are searched "independently", and refers to DARTS for other
settings. So searches have DARTS's batches, SGD, clipping and weight decay. Alpha moves by its Adam:
the rate times the number of steps is 6, as in DARTS's 50 epochs of CIFAR-10.

The searches (`READINGS`) are:

- the first one moves activations and skips at every step. Its 2,000 steps are a tenth of DARTS's
  length at ten times its rate for alpha;
- "longer" has DARTS's length and rate. The paper does not state the length, which decides the
  outcome;
- "in turn" alternates steps of activations and of skips, with twice the rate. "In turn, longer" has
  DARTS's length;
- "apart" runs two searches. In each, one of the two parts is fixed at its start;
- others change the inputs, or use Lemma 1's weights (see `bilevel.spaces.skips`);
- two variants of "longer": one has ten times the decay, chosen after pilots. In the other, the
  mixtures are fitted to the training half too, so that fitting less brings no advantage.

The truth uses the "he" initialization, with which all but one of these networks train (sigmoids
without skips do not). Training is by the same SGD for one epoch, as in Algorithm 1, at the step
size with the best result on the run's validation half. An interrupted search resumes from its
checkpoint.

    # width 128; 45 minutes of one core
    python benchmarks/deep_search/activation_skip_search.py
    # the paper's width: hours of one core
    python benchmarks/deep_search/activation_skip_search.py --full
    # one search of the paper's width
    python benchmarks/deep_search/activation_skip_search.py --full --only "in turn"
"""

import dataclasses
import functools
import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilevel
import bilevel.data
from benchmarks import harness
from benchmarks.deep_search import activation_skip_tables as tables
from benchmarks.deep_search.eigenvalue_depth import infinite_kernel
from bilevel import strategies
from bilevel.nets import train
from bilevel.runs import checkpoint
from bilevel.spaces import skip_space, unit_inputs
from bilevel.spaces.skips import CANDIDATES, SkipArchitecture
from bilevel.strategies.optimizers import logits
from ntk.empirical.kernels import gradient_norms

MEASURES = (
    "bilevel/spaces/skips.py",
    "bilevel/spaces/activations.py",
    "bilevel/strategies/methods.py",
    "bilevel/strategies/strategy.py",
    "bilevel/strategies/optimizers.py",
    "bilevel/outer_loop/descent.py",
    "bilevel/solvers/_unrolled.py",
    "bilevel/nets/training.py",
)

BATCH, TRAVEL = 64, tables.TRAVEL
TRIED = (0.025, 0.125, 0.625, 3.125)  # step sizes of plain networks


@dataclasses.dataclass(frozen=True)
class Reading:
    """Settings of a search that the paper leaves open."""

    parametrization: str = "as_printed"
    step_size: float = 0.025
    relative: bool = False  # step_size in units of 1/K, K the mean diagonal of the initial NTK
    clip: float = 5.0  # if relative: in units of sqrt(K), a single row's gradient
    decay: float = 3e-4
    long: bool = False
    unit: bool = True  # rows centered, of unit norm; else pixels of mean 0 and variance 1
    held_out: bool = True  # if False, the mixtures are fitted to the training half too
    moves: str = "jointly"  # or "in turn" (alternating), or "apart" (two searches)


READINGS = {
    "DARTS's settings": Reading(),
    "in turn": Reading(moves="in turn"),
    "longer": Reading(long=True),
    "in turn, longer": Reading(moves="in turn", long=True),
    "apart": Reading(moves="apart"),
    "standardised pixels": Reading(unit=False),
    "Lemma 1's weights, 1/K": Reading("ntk", 1.0, relative=True, clip=1.0, decay=0.0),
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
    long_runs: int | None = None  # None: the same number as of short ones
    searches: tuple[str, ...] = tuple(READINGS)


PAPERS = ("DARTS's settings", "in turn", "in turn, longer", "longer", "apart")
SIZES = {
    "smoke": Sizes(
        64, 20, 16, (2, 2), 1, runs=2, depth=3, kernel_rows=8, data="digits", searches=PAPERS[:1]
    ),
    "quick": Sizes(600, 360, 64, steps=(150, 600), epochs=15, runs=2, depth=4, data="digits"),
    "default": Sizes(30_000, 10_000, 128, steps=(2000, 8000), epochs=1, runs=4),
    "full": Sizes(
        30_000, 10_000, 1024, steps=(2000, 23_000), epochs=1, runs=5, long_runs=3, searches=PAPERS
    ),
}
load = functools.cache(bilevel.data.load)


def parts_of(sizes, run, unit=True):
    """Return training, validation and test rows (x, labels)."""
    data, key = load(sizes.data), jax.random.fold_in(jax.random.key(0), run)
    train, valid = bilevel.data.stratified_split(key, data.y_train, (sizes.train, sizes.train))
    (test,) = bilevel.data.stratified_split(key, data.y_test, (sizes.test,))
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
    """Return DARTS's optimizer of the weights."""
    return optax.chain(
        optax.clip_by_global_norm(clip),
        optax.add_decayed_weights(decay),
        optax.sgd(optax.cosine_decay_schedule(step_size, steps, alpha=0.04), momentum=0.9),
    )


def lower_optimizer(reading, steps, space, w, alpha, x):
    step_size, clip = reading.step_size, reading.clip
    if reading.relative:
        apply = lambda w, x: space.apply(w, alpha, x)  # noqa: E731
        norms = gradient_norms(apply, w, x[:20], outputs="trace", batch_size=5)
        diagonal = norms.mean() / 10  # of each of the outputs
        step_size, clip = step_size / diagonal, clip * jnp.sqrt(diagonal)
    return sgd(step_size, steps, clip, reading.decay)


def error(space, w, alpha, part):
    x, labels = part
    return jnp.mean(space.predict(space.apply(w, alpha, x)) != labels)


def optimizer_of_alpha(space, rate, moving):
    """Return DARTS's Adam: for all of alpha, for its two parts in turn, or for the named part."""
    if moving == "jointly":
        return rate  # the strategy's default
    if moving == "in turn":
        rate = 2 * rate  # the same distance in half the steps
        turns = [lambda step, part=part: step % 2 == part for part in range(2)]
    else:
        turns = [lambda step, part=part: part == moving for part in space.sets]
    parts = zip((logits(rate), optax.adam(rate, b1=0.5)), turns, strict=True)
    simplex, other = (optax.conditionally_mask(inner, turn) for inner, turn in parts)
    return strategies.on_sets(space.sets, simplex=simplex, other=other)


def search(sizes, name, order, run, folder) -> dict:
    """Return a row: one run's search, or two searches for the parts of alpha."""
    reading = READINGS[name]
    space, steps = space_of(sizes, reading.parametrization), sizes.steps[reading.long]
    init_key, key = jax.random.split(jax.random.fold_in(jax.random.key(1), run))
    train, valid, test = parts_of(sizes, run, reading.unit)
    start, w = space.start(), space.init(init_key, train)
    lower = lower_optimizer(reading, steps, space, w, start, train[0])
    above = valid if reading.held_out else train
    timed = []

    def searched(moving):
        alpha = optimizer_of_alpha(space, TRAVEL / steps, moving)
        optimizers = {"weight_optimizer": lower, "alpha_optimizer": alpha}
        plan = strategies.darts(space, **optimizers, batch_size=BATCH, order=order)
        options = {"steps": steps, "key": key, "progress": False, "history": ()}
        if folder:  # an interrupted search resumes from here
            where = folder / f"{name}, {moving}, order {order}, run {run}"
            options |= {"checkpoint": where, "resume": True}
            timed.append(steps - (checkpoint.latest(where) or 0))
        return strategies.run(plan, start, w, train, above, **options)

    began, processor = time.perf_counter(), time.process_time()
    if reading.moves == "apart":
        each = {part: searched(part) for part in space.sets}
        alpha, shared = {part: result.alpha[part] for part, result in each.items()}, None
    else:
        result = searched(reading.moves)
        alpha, shared = result.alpha, result.w
    row = {"steps": steps, "architecture": str(space.discretize(alpha))}
    row |= {"reading": dataclasses.asdict(reading)}
    row |= {part: np.asarray(a).tolist() for part, a in alpha.items()}
    if shared is not None:
        row |= supernet(space, shared, alpha, train, valid, test)
    row |= {"seconds": time.perf_counter() - began, "timed_steps": sum(timed)}
    row |= {"processor_seconds": time.process_time() - processor}
    print(f"{name:32s} {run} {row['architecture']}", flush=True)
    return row


def supernet(space, w, alpha, train, valid, test):
    """Return the fields of a row that describe the weights shared by the search."""
    losses = [jax.jit(space.problem.lower)(w, alpha, part) for part in (train, valid)]
    wrong = jax.jit(error, static_argnums=0)(space, w, alpha, test)
    return {"supernet": float(wrong), "losses": [float(loss) for loss in losses]}


@functools.partial(jax.jit, static_argnums=0)
def trained_errors(sizes, corner, key, data, valid, test):
    """Return validation and test errors [tried, 2] and test losses [tried] by step size."""
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
    """Return a row: the network's test error and loss at its best step size."""
    key, parts = jax.random.fold_in(jax.random.key(2), run), parts_of(sizes, run)
    # A vertex of the supernet: one compilation serves all architectures.
    corner = space_of(sizes).one_hot(architecture)
    errors, losses = (np.asarray(a, float) for a in trained_errors(sizes, corner, key, *parts))
    best = errors[:, 0].argmin()
    row = {"architecture": str(architecture)}
    row |= {"step_size": TRIED[best], "test": errors[best, 1], "loss": losses[best]}
    row |= {"tried": errors.tolist()}
    print(f"{name:32s} {run} {100 * row['test']:.1f} % at {TRIED[best]:g}", flush=True)
    return row


def kernel(sizes, architecture, run=0) -> dict:
    """Return a row: the infinite network's NTK on the run's first training rows, in float64."""
    x = np.asarray(parts_of(sizes, run)[0][0][: sizes.kernel_rows], float)
    return infinite_kernel(space_of(sizes), architecture, x)


def random_architecture(sizes, run):
    draw = np.random.default_rng(run)
    names, skips = draw.choice(CANDIDATES, sizes.depth - 1), draw.random(sizes.depth - 2) > 0.5
    return SkipArchitecture(tuple(names.tolist()), tuple(skips.tolist()))


def all_searches(sizes, names, orders, folder):
    """Return the keys of every search's row, and a function that measures it."""
    for name, order in itertools.product(names, orders):
        runs = sizes.long_runs if READINGS[name].long and sizes.long_runs else sizes.runs
        for run in range(runs):
            label = name + ", second order" * (order == 2)
            measure = functools.partial(search, sizes, name, order, run, folder)
            yield {"part": "search", "search": label, "run": run}, measure


def all_networks(sizes, rows):
    """Return the same for the kernels and for the networks that are trained from scratch."""
    runs, to_train = range(sizes.runs), []
    for row in harness.where(rows, part="search"):
        alpha = {part: jnp.array(row[part]) for part in ("activations", "skips")}
        to_train.append((f"found, {row['search']}", space_of(sizes).discretize(alpha), row["run"]))
    to_train += [("random", random_architecture(sizes, run), run) for run in runs]
    for activation, label in itertools.product(CANDIDATES, tables.SKIPS):
        skips = (tables.SKIPS[label],) * (sizes.depth - 2)
        single = SkipArchitecture((activation,) * (sizes.depth - 1), skips)
        name = f"{activation}, {label}"
        yield {"part": "kernel", "network": name}, functools.partial(kernel, sizes, single)
        to_train += [(name, single, run) for run in runs]
    for name, architecture, run in to_train:
        measure = functools.partial(network, sizes, name, architecture, run)
        yield {"part": "network", "network": name, "run": run}, measure


def main() -> None:
    flags = harness.command_line(
        __file__,
        __doc__,
        tables.report,
        full=True,
        second_order={"action": "store_true", "help": "second-order DARTS too"},
        only={"choices": READINGS, "metavar": "SEARCH", "help": "this search, and no networks"},
    )
    sizes = SIZES[flags.size]
    folder = flags.results and flags.results.with_suffix(".checkpoints")
    about = {"seed": 0, "sizes": dataclasses.asdict(sizes)}
    rows = harness.begun(flags.results, "optax", each_device=True, **about)
    measure = functools.partial(harness.measure_missing, flags.results, rows)
    names = [flags.only] if flags.only else sizes.searches
    measure(all_searches(sizes, names, (1, 2) if flags.second_order else (1,), folder))
    if flags.smoke:
        measure(list(all_networks(sizes, rows))[-1:])  # eigen_nas.py --smoke computes kernels
    elif not flags.only:
        measure(all_networks(sizes, rows))
    harness.finish(rows, flags.results, tables.report, tables.picture, write_rows=False)


if __name__ == "__main__":
    main()
