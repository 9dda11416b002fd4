"""One program for all searches with shared weights, such as ``bilevel search-skips``.

For every seed: the search by a strategy; the architecture that it ends at; and, where a space has
no table to look it up in, that architecture's network trained from scratch beside others. The
commands put their runs together from what is here. An interrupted run goes on where it was, in a
search or in a network's training.
"""

import contextlib
import functools
import pathlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bilevel import strategies
from bilevel.cli.flags import from_config_file
from bilevel.cli.flags.deep_searches import DeepSearch
from bilevel.cli.runtime import report
from bilevel.cli.runtime.run_directory import run_directory
from bilevel.contracts import Pytree
from bilevel.data import datasets
from bilevel.discretize import diagnostics
from bilevel.nets import training
from bilevel.nets.evaluation import Part
from bilevel.runs import journal
from bilevel.runs.fingerprint import fingerprint
from bilevel.runs.progress import RunBar, progress_bar
from bilevel.spaces import Space
from bilevel.strategies import Strategy

ERRORS = {"train_error": "train", "valid_error": "valid", "test_error": "test"}
"""Keys of results, and headings of tables."""

_UNROLLED = 5  # steps of the strategy of that name
_RATE = 3.0  # of weights, over the tangent kernel's mean diagonal entry
_SCALE_ROWS = 32  # for that entry: a mean over more would not change the rate's first digit


# ----------------------------------------------------------------------------- strategies


class _Named(NamedTuple):
    """A strategy of the command line."""

    make: Callable[..., Strategy]
    travel: float = 6.0  # alpha's rate times the steps; by default that of DARTS on CIFAR-10 (Adam)
    inner: int = 1  # steps of the weights in each step of alpha


def _weight_sharing_without_rate(space: Space, *, alpha_optimizer: Any, **options: Any) -> Strategy:
    return strategies.weight_sharing(space, **options)


_STRATEGIES = {
    "darts-first": _Named(strategies.darts),
    "darts-second": _Named(functools.partial(strategies.darts, order=2)),
    "darts-second-difference": _Named(functools.partial(strategies.darts, order=2, radius=0.01)),
    "gaea": _Named(strategies.gaea, travel=100.0),
    "gaea-single-level": _Named(
        functools.partial(strategies.gaea, on_training_rows=True), travel=100.0
    ),
    "random": _Named(_weight_sharing_without_rate),
    "joint": _Named(strategies.joint),
    "unrolled": _Named(functools.partial(strategies.unrolled, steps=_UNROLLED), inner=_UNROLLED),
}


class DeepSearchPlan(NamedTuple):
    """How long to search, and with what; ``samples`` architectures are drawn by random search."""

    strategy: Strategy
    steps: int
    batch_size: int
    samples: int

    @property
    def gradients(self) -> int:
        """How many gradients of minibatches it takes."""
        return self.steps * self.strategy.gradients


SGD = Callable[[optax.Schedule], optax.GradientTransformation]


def search_of(config: DeepSearch, space: Space, sgd: SGD, rate: float) -> DeepSearchPlan:
    """The search that the flags ask for; the weights' ``sgd`` has a cosine from ``rate`` to 0."""
    named = _STRATEGIES[config.strategy]
    schedule = optax.cosine_decay_schedule(rate, named.inner * config.steps)
    alpha_rate = config.alpha_rate or named.travel / config.steps
    plan = named.make(
        space,
        weight_optimizer=sgd(schedule),
        alpha_optimizer=alpha_rate,
        batch_size=config.batch_size,
    )
    return DeepSearchPlan(plan, config.steps, config.batch_size, config.samples)


# ----------------------------------------------------------------------------- the search


class RunContext(NamedTuple):
    """Where a run is kept, what it shows, and its flags as JSON knows them."""

    folder: pathlib.Path
    bar: RunBar
    progress: bool | None
    resume: bool
    flags: dict[str, Any]


@contextlib.contextmanager
def running(config: DeepSearch, work: Mapping[str, float]) -> Iterator[RunContext]:
    """A run in its directory, with a bar whose phases take ``work``; the first is "data"."""
    keeps = "searches and networks are kept as far as they came"
    with (
        run_directory(config, keeps=keeps) as folder,
        report.phases(config.progress, work) as bar,
    ):
        bar.enter("data")
        shown = report.progress_within_phase(config.progress)
        yield RunContext(folder, bar, shown, config.resume, from_config_file.flags_of(config))


def draw_splits(config: DeepSearch, unit: Callable[..., Any]) -> list[list[Part]]:
    """Return each seed's training, validation and test rows, normalised by ``unit(x, *others)``."""
    draws = jax.random.split(jax.random.key(config.seed), config.seeds)
    sizes = {"train": config.train, "valid": config.valid, "test": config.test}
    return [normalised(rows, unit) for rows in datasets.draw_splits(config.data, draws, **sizes)]


def normalised(rows: list[Part], unit: Callable[..., Any]) -> list[Part]:
    """The parts with their inputs as ``unit`` has them, by the first part's."""
    xs = unit(*(x for x, _ in rows))
    return [(x, jnp.asarray(y)) for x, (_, y) in zip(xs, rows, strict=True)]


class SeedResult(NamedTuple):
    """The search of one seed."""

    alpha: Pytree  # after the choice among architectures drawn, if they were drawn
    w: Pytree
    history: dict[str, Any]  # name -> [steps, ...]


def keys(seed: int, number: int) -> jax.Array:
    """The four keys of seed ``number``: of search, initial weights, choice and training."""
    return jax.random.split(jax.random.fold_in(jax.random.key(seed), number), 4)


def search_label(number: int, seeds: int) -> str:
    """What the progress bar calls the search of a seed."""
    return "search" if seeds == 1 else f"search {number + 1} of {seeds}"


def search_seeds_in_turn(
    run: RunContext, space: Space, search: DeepSearchPlan, parts: list[list[Part]], seed: int
) -> list[SeedResult]:
    """The searches of all seeds, one after the other; every program is compiled once."""
    init, seed_results = jax.jit(space.init), []
    choose = jax.jit(functools.partial(_choose_drawn_alpha, space, search))
    for number, (train, valid, _) in enumerate(parts):
        search_key, init_key, choice_key, _ = keys(seed, number)
        name = search_label(number, len(parts))
        run.bar.enter(name)
        place = run.folder / "search" / str(number)
        start = space.start(), init(init_key, train)
        result = search_with_progress(
            run, space, search, *start, train, valid, search_key, place, name
        )
        if result.stopped:
            raise KeyboardInterrupt(f"{result.stopped} of seed {number}")
        drawn = search.strategy.draws
        alpha = choose(choice_key, result.w, valid) if drawn else result.alpha
        seed_results.append(SeedResult(alpha, result.w, jax.tree.map(np.asarray, result.history)))
    return seed_results


def search_seeds_at_once(
    run: RunContext,
    space: Space,
    search: DeepSearchPlan,
    w0: Pytree,
    parts: list[Part],
    key: jax.Array,
    choice_key: jax.Array,
) -> list[SeedResult]:
    """The searches of all seeds at once; arrays lead with an axis of seeds.

    The losses in a seed's history are the means over all seeds.
    """
    train, valid, _ = parts
    seeds = len(train[1])
    alpha = jax.tree.map(lambda a: jnp.stack([a] * seeds), space.start())
    copies = search._replace(strategy=strategies.stack_strategies(search.strategy, seeds))
    place = run.folder / "checkpoint"
    run.bar.enter("search")
    result = search_with_progress(
        run, space, copies, alpha, w0, train, valid, key, place, "search", seeds
    )
    if result.stopped:
        raise KeyboardInterrupt(result.stopped)
    alpha = result.alpha
    if search.strategy.draws:
        best = jax.jit(jax.vmap(functools.partial(_choose_drawn_alpha, space, search)))
        alpha = best(jax.random.split(choice_key, seeds), result.w, valid)
    history = {k: np.asarray(v) for k, v in result.history.items() if k != "alpha"}
    history = {k: v / seeds if k in ("lower", "value") else v for k, v in history.items()}

    def of_seed(i):
        path = jax.tree.map(lambda a: np.asarray(a[:, i]), result.history["alpha"])
        ours, w = jax.tree.map(lambda a: a[i], (alpha, result.w))
        return SeedResult(ours, w, history | {"alpha": path})

    return [of_seed(i) for i in range(seeds)]


def _choose_drawn_alpha(
    space: Space, search: DeepSearchPlan, key: jax.Array, w: Pytree, rows: Part
) -> Pytree:
    sizes = {"samples": search.samples, "batch_size": search.batch_size}
    return strategies.best_drawn(key, space, w, rows, **sizes)


def search_with_progress(
    run: RunContext,
    space: Space,
    search: DeepSearchPlan,
    alpha: Pytree,
    w: Pytree,
    train: Part,
    valid: Part,
    key: jax.Array,
    checkpoint: pathlib.Path,
    name: str,
    copies: int = 1,
) -> Any:
    """One search, with epochs and the entropy of alpha on the screen."""
    epoch = np.shape(train[1])[-1] / search.batch_size
    fields = ("epoch", "lower", "value", "entropy")
    text = "epoch {task.fields[epoch]:.1f}  train {task.fields[lower]:.3f}  "
    text += "valid {task.fields[value]:.3f}  entropy {task.fields[entropy]:.2f}"

    def shown(result):
        last = {k: float(result.history[k][-1]) / copies for k in ("lower", "value")}
        done = len(result.history["value"]) / epoch
        return last | {"epoch": done, "entropy": mean_entropy(space, result.alpha)}

    with progress_bar(run.progress, name, search.steps, text, fields) as show:

        def callback(result):
            show(len(result.history["value"]), lambda: shown(result))

        return strategies.run(
            search.strategy,
            alpha,
            w,
            train,
            valid,
            steps=search.steps,
            key=key,
            progress=False,
            checkpoint=checkpoint,
            resume=run.resume,
            callback=callback,
            history=("alpha", "grad_norm", "lower", "value"),  # alpha's too, however large
        )


def mean_entropy(space: Space, alpha: Pytree) -> float:
    """The mean entropy of the simplices in ``alpha``; 0 where there are none."""
    entropies = [diagnostics.entropy(p) for p in diagnostics.simplices(space.sets, alpha)]
    return float(np.mean(np.concatenate([np.ravel(e) for e in entropies]))) if entropies else 0.0


# ----------------------------------------------------------------------------- the networks


class NetworkToTrain(NamedTuple):
    """A network to be trained from scratch, for one seed."""

    name: str
    seed: int
    architecture: Any


def networks_to_train(
    space: Space,
    seed_results: list[SeedResult],
    singles: Mapping[str, Any],
    drawn: list[list[Pytree]],
) -> list[NetworkToTrain]:
    """For each seed: the search's architecture, those of ``singles``, and those ``drawn``."""
    rows = []
    for seed, (result, corners) in enumerate(zip(seed_results, drawn, strict=True)):
        named = {"search": space.discretize(result.alpha), **singles}
        named |= {f"random {i}": space.discretize(alpha) for i, alpha in enumerate(corners, 1)}
        rows += [NetworkToTrain(name, seed, architecture) for name, architecture in named.items()]
    return rows


Train = Callable[[NetworkToTrain, pathlib.Path, Callable[[int, float], None]], dict[str, Any]]
"""``train(row, checkpoint, show)`` -> the row's scores; ``show(epochs done, loss)`` as it goes."""


def train_networks(
    run: RunContext, rows: list[NetworkToTrain], epochs: int, train: Train
) -> list[dict[str, Any]]:
    """The scores of all networks; those of a run that goes on are read, not computed again."""
    words = [re.sub(" at 0x[0-9a-f]+", "", str(row)) for row in rows]  # addresses change
    header = {"version": 1, "networks": fingerprint(words)}
    text = "{task.fields[network]}, seed {task.fields[seed]}  loss {task.fields[loss]:.3f}"
    fields, scores = ("network", "seed", "loss"), []
    run.bar.enter("training")
    with (
        journal.opened(run.folder / "networks.jsonl", True, header) as known,
        progress_bar(run.progress, "training", len(rows) * epochs, text, fields) as show,
    ):
        for i, row in enumerate(rows):

            def shown(epoch, loss, done=i * epochs, row=row):
                values = {"network": row.name, "seed": row.seed, "loss": loss}
                show(done + epoch, lambda: values)

            place = run.folder / "networks" / str(i)
            scores.append(known.cached(f"network {i}", lambda: _timed(train, row, place, shown)))  # noqa: B023
    return scores


def _timed(
    train: Train, row: NetworkToTrain, place: pathlib.Path, show: Callable
) -> dict[str, Any]:
    began = time.perf_counter()
    scores = train(row, place, show)
    return {
        "network": row.name,
        "seed": row.seed,
        "architecture": str(row.architecture),
        **scores,
        "seconds": time.perf_counter() - began,
    }


Scores = dict[str, dict[str, list[float]]]
"""By network and column, a number for each seed."""


def by_network(rows: list[dict[str, Any]]) -> Scores:
    """Columns of every network; of numbered ones those of the best by validation, and means.

    "random 1", "random 2" and so on of a seed become "best of 2 random" and "random".
    """
    scores, seeds = {}, 1 + max(row["seed"] for row in rows)
    for name in dict.fromkeys(_group(row["network"]) for row in rows):
        own = [row for row in rows if _group(row["network"]) == name]
        if own[0]["network"] == name:
            scores[name] = _score_columns(own)
            continue
        drawn = [[row for row in own if row["seed"] == s] for s in range(seeds)]
        if (budget := len(drawn[0])) > 1:
            best = [min(networks, key=lambda r: r["valid_error"]) for networks in drawn]
            scores[f"best of {budget} {name}"] = _score_columns(best)
        means = [_score_columns(networks) for networks in drawn]
        scores[name] = {k: [float(np.mean(m[k])) for m in means] for k in means[0]}
    return scores


def _group(name: str) -> str:
    """A network's name without its number."""
    group, _, number = name.rpartition(" ")
    return group if group and number.isdigit() else name


def _score_columns(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    known = {k for row in rows for k, v in row.items() if isinstance(v, int | float)} - {"seed"}
    return {k: [row[k] for row in rows] for k in rows[0] if k in known}


def corner_trainer(
    space: Space, epochs: int, batch_size: int, rate: float | None
) -> Callable[[jax.Array, Pytree, Pytree, Part], Pytree]:
    """``(key, w0, corner, rows) -> w`` after SGD, one program for all architectures.

    Without a ``rate`` it is 3 / K, K the tangent kernel's mean diagonal entry at the corner.
    """

    @jax.jit
    def fit(key, w, corner, rows):
        steps = epochs * (len(rows[1]) // batch_size)
        first: Any = rate or default_rate(space, w, corner, rows[0])
        cosine = optax.cosine_decay_schedule(1.0, steps)
        sgd = optax.sgd(lambda step: first * cosine(step), momentum=0.9)
        sizes = {"epochs": epochs, "batch_size": batch_size}
        lower = space.problem.lower
        return training.train(key, lower, corner, w, rows, optimizer=sgd, **sizes).last

    return fit


def default_rate(space: Space, w: Pytree, alpha: Pytree, x: jax.Array) -> jax.Array:
    """The weights' first step size where the user gives none."""
    return _RATE / diagnostics.kernel_diagonal(space.apply, w, alpha, x[:_SCALE_ROWS])
