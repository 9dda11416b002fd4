"""How fast are single-loop stochastic methods, and how far do they come in CPU seconds?

The four problems are those of the field's public benchmark, benchopt/benchmark_bilevel, at its
sizes (``stochastic_problems.py``), with batches of 64. With ``--checkout PATH``, a copy of its
repository, its solver classes run on the same losses, rows and core (``stochastic_rivals.py``).

Part ``time``: CPU time of a step, ours and theirs in turns. The time of our step is the difference
between two searches of different lengths, divided by the number of steps between them. Each side
has two copies, because a program can take up to a tenth longer than its own copy, depending on
where its data are in memory. The faster copy's mean counts: a median over turns would leave out
rare full passes. Every turn of ours draws other steps for its passes.

Part ``course``: the score over CPU seconds. Our side is ``bilevel.search`` under ``jax.jit``, run
from the start for each point of time. The cost of a start counts (tables, a metric, the order of
the batches), compilation does not. Step sizes and seed are arguments of the programs, so a method
compiles once for each length. Steps are tuned for every method in the same way, with the first
seed: 0.3 seconds for each point of the published grid, then five seconds for the best three. The
other seeds run at the best steps. Cleaning at 70 and 90 % takes the steps of 50 %. Our methods
without a step size are not tuned.

Every problem is a separate process on one core, and every measurement is a line in the results,
except for failed ones. A second run resumes an interrupted one. ``--quick`` runs on ijcnn1 with few
rows, ``--smoke`` on a few quadratics with one method.

    python benchmarks/stochastic/stochastic.py --checkout PATH    # hours of one core
"""

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.optimize

import bilevel
from benchmarks import harness
from benchmarks.stochastic import stochastic_problems as problems
from benchmarks.stochastic import stochastic_rivals as rivals
from benchmarks.stochastic import stochastic_tables
from benchmarks.stochastic.stochastic_tables import CLEANING, RIVAL, SIDES, UNTUNED

MEASURES = ("bilevel/stochastic", "bilevel/outer_loop/single_loop.py")

MARKS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 3.5, 5.0)  # CPU seconds at which a point is scored
SCREENED, FINALISTS = 0.3, 3  # CPU seconds for each point of a grid, and number of finalists
# Steps of a chunk; 64 for other problems.
CHUNK = {"simulated": 16, "ijcnn1": 4096, "covtype": 512, "small": 256, "tiny": 4096}
TURNS, SEEDS = 16, 10
METHODS = tuple(f"{side}/{m}" for side, methods in SIDES.items() for m in methods)
RACES = "ijcnn1", "cleaning", "covtype", "simulated"  # cleaning: all three


@functools.cache
def race_of(name: str):
    """Return a race by name; ``small`` is ijcnn1 with few rows, ``tiny`` a few quadratics."""
    if name == "tiny":
        return problems.simulated(0, n=128, p=5)
    return problems.ijcnn1(0, (3_210, 2_105)) if name == "small" else problems.RACES[name](0)


def chunk_of(name: str, method: str) -> int:
    """Return the steps of a chunk, which takes some ten milliseconds."""
    return max(1, CHUNK.get(name, 64) // (8 if method in ("amigo", "f2sa") else 1))


def method_of(name: str, step: Any, ratio: Any):
    """Return our method and its optimizer of alpha, with the public benchmark's schedules."""
    if name == "implicit":  # full passes
        return bilevel.implicit(), optax.adam(step)
    if name in UNTUNED:
        return getattr(bilevel, name.split()[0])(), bilevel.paced()

    def falling(constant, exponent):
        return lambda number: constant / (1.0 + number) ** exponent

    fall = {"soba": 0.5, "ma_soba": 0.5, "f2sa": 4 / 7}.get(name, 0.0)
    rate = falling(step, fall) if fall else step
    options = {"amigo": {"inner": 10}, "f2sa": {"inner": 10, "penalty": 1.0}}.get(name, {})
    outer = falling(step / ratio, fall) if fall else step / ratio
    return getattr(bilevel, name)(rate, **options), optax.sgd(outer)


class Ours:
    """``bilevel.search``, compiled for each number of steps; step sizes and seed are arguments."""

    def __init__(self, name: str, race: Any, count: int):
        self.name, self.race, self.programs, self.seeds = name, race, {}, itertools.count()
        self.count = self._long_enough(count)

    def _long_enough(self, count: int) -> int:
        """Return how many steps take as long as four starts. Shorter differences are noise."""
        self.starting = self._least(1)
        while (longer := self._least(1 + count)) < 2 * self.starting:
            count *= 4
        self.step_seconds = (longer - self.starting) / count
        return max(count, math.ceil(4 * self.starting / self.step_seconds))

    def _least(self, steps: int) -> float:
        return min(self.run(steps, -1)[0] for _ in range(3))

    def program(self, steps: int, names: tuple[str, ...] = (), every: int = 1):
        """Return the compiled search of ``steps`` steps, with a history of ``names``."""

        def search(alpha, w, train, valid, key, rates):
            method, optimizer = method_of(self.name, *rates)
            batches = None if self.name == "implicit" else bilevel.partition(64)
            return bilevel.search(
                self.race.problem, method, optimizer, alpha, w, train, valid, steps=steps,
                batches=batches, key=key, history=bilevel.History(names, every),
            )  # fmt: skip

        if (steps, names, every) not in self.programs:
            given = self._given(-1, (1e-3, 10.0))
            made = self.programs[steps, names, every] = harness.compiled(search, *given)[0]
            jax.block_until_ready(made(*given))
        return self.programs[steps, names, every]

    def _given(self, seed: int, rates: tuple[float, float]) -> tuple:
        race = self.race
        arrays = jax.tree.map(jnp.asarray, (race.alpha, race.w, race.train, race.valid))
        return *arrays, jax.random.key(seed), tuple(map(jnp.float32, rates))

    def run(self, steps: int, seed: int, rates=(1e-3, 10.0), names=(), every=1):
        """Return the CPU seconds of a search, and its result."""
        program, given = self.program(steps, names, every), self._given(seed, rates)
        jax.block_until_ready(given)
        begun = time.process_time()
        result = jax.block_until_ready(program(*given))
        return time.process_time() - begun, result

    def at(self, race: Any) -> "Ours":
        """Return a copy for another race with the same losses and shapes."""
        self.race = race
        return self

    def within(self, seconds: float) -> int:
        """Return the number of steps of a search in these CPU seconds, its start included."""
        return max(1, round((seconds - self.starting) / self.step_seconds))

    def chunk(self) -> float:
        """Return the CPU seconds of ``count`` steps, without a start; each call has a new seed."""
        seed = next(self.seeds)
        return self.run(1 + self.count, seed)[0] - self.run(1, seed)[0]

    def course(self, seed: int, step: float, ratio: float, marks: Sequence[float]) -> Iterator:
        """Return CPU seconds, steps and point at each mark."""
        for mark in marks:
            steps = self.within(mark)
            seconds, result = self.run(steps, seed, (step, ratio))
            yield seconds, steps, self.point(result, steps)

    @staticmethod
    def point(result: Any, steps: int):
        """Return ``(alpha, w)``, or None if a search stopped at a value that is not finite."""
        whole = int(result.state.step) == steps
        return (np.array(result.alpha), np.array(result.w)) if whole else None


def runner(side: str, folder: str, method: str, race: Any, count: int):
    """Return a compiled and warm runner of ours or of theirs."""
    if side == "ours":
        return Ours(method, race, count)
    return rivals.Rival(rivals.checkout(folder), method, race, count)


# ----------------------------------------------------------------------------- measurements


def work(part: str, *request: Any) -> Iterator[harness.Row]:
    """Run a part in a separate process."""
    if part == "time":
        yield steps_in_turns(*request)
    else:
        folder, path, names, methods, *numbers = request
        campaign = Campaign(Path(path) if path else None)
        for side, method in (name.split("/") for name in methods):
            if side == "ours" or folder:
                campaign.method(folder, names, side, method, *numbers)
        if not path:  # nothing else would store them
            yield from campaign.rows


def steps_in_turns(
    folder: str, name: str, method: str, copies_of_each: int, turns: int
) -> harness.Row:
    """Measure microseconds of a step: ours and, with a checkout, theirs."""
    race, count = race_of(name), chunk_of(name, method)
    compared = folder and method in RIVAL
    order = ("ours", "theirs", "theirs", "ours") if compared else ("ours",) * copies_of_each
    names = {"ours": method, "theirs": RIVAL.get(method)}
    copies = [(side, runner(side, folder, names[side], race, count), []) for side in order]
    for _ in range(turns):
        for _, made, spent in copies:
            spent.append(made.chunk() / made.count)
        copies.append(copies.pop(0))  # another copy begins
    best: dict[str, float] = {}
    for side, _, spent in copies:
        best[side] = min(best.get(side, math.inf), float(np.mean(spent)))
    return {side: round(1e6 * seconds, 2) for side, seconds in best.items()}


class Campaign:
    """A set of measurements. Those in the results file are not measured again."""

    def __init__(self, path: Path | None):
        self.path, self.rows = path, harness.read(path) if path else []

    def once(self, key: harness.Row, measure: Callable[[], Any]) -> harness.Row:
        """Return the row of this key. Measure it if it is missing."""
        return harness.measure_missing(self.path, self.rows, [(key, measure)])[0]

    def method(
        self, folder: str, names: list[str], side: str, method: str, seeds: int, seconds: float
    ) -> None:
        """Run all courses of one method. The first problem tunes its steps."""

        @functools.cache
        def made(name):
            if side == "ours" and name != names[0]:
                return made(names[0]).at(race_of(name))
            return runner(side, folder, method, race_of(name), chunk_of(names[0], method))

        def course(name, step, ratio, seed):
            key = {"part": "course", "race": name, "side": side, "method": method}
            key |= {"step": step, "ratio": ratio, "seed": seed}
            given = seed, step, ratio, seconds
            return self.once(key, lambda: course_of(made(name), race_of(name), *given))

        best = 0.0, 0.0
        if method not in UNTUNED:
            screened = self.screened(made, names[0], side, method, min(SCREENED, seconds))
            best = min(screened, key=lambda g: stochastic_tables.last(course(names[0], *g, 0)))
        for name in names:
            for seed in range(seeds):
                course(name, *best, seed)

    def screened(self, made, name, side, method, seconds) -> list[tuple[float, float]]:
        """Return the best few points of the published grid."""
        race = race_of(name)
        grid = [*itertools.product(map(float, race.steps), map(float, race.ratios))]

        def screen():
            courses = (course_of(made(name), race, 0, *g, seconds, (seconds,)) for g in grid)
            scores = [stochastic_tables.last(course) for course in courses]
            return {"scores": [s if math.isfinite(s) else None for s in scores]}

        key = {"part": "screen", "race": name, "side": side, "method": method}
        scores = [math.inf if s is None else s for s in self.once(key, screen)["scores"]]
        return [grid[i] for i in np.argsort(scores, kind="stable")[:FINALISTS]]


def course_of(made, race, seed, step, ratio, seconds, marks=MARKS) -> harness.Row:
    """Return the scores at the marks, or at fewer marks if a value was not finite."""
    course: harness.Row = {"seconds": []}
    for spent, steps, point in made.course(seed, step, ratio, marks_until(seconds, marks)):
        course["steps"] = steps
        scores = {} if point is None else race.score(*point)
        if not scores or not all(map(math.isfinite, scores.values())):
            course["diverged"] = True
            break
        course["seconds"].append(float(f"{spent:.3g}"))
        for key, value in scores.items():
            digits = 10 if key == "value" else 4
            course.setdefault(key, []).append(float(f"{value:.{digits}g}"))
    return course


def marks_until(seconds: float, marks: Sequence[float] = MARKS) -> list[float]:
    """Return the marks within ``seconds``, or ``seconds`` itself if it is before the first."""
    return [mark for mark in marks if mark <= seconds] or [seconds]


def optimum() -> harness.Row:
    """Return the minimum of the outer loss of ijcnn1."""
    race = race_of("ijcnn1")
    minimum = minimize(race, race.alpha, ftol=1e-15, gtol=1e-9, maxiter=200)
    return {"value": float(minimum.fun), "slope": float(np.sum(minimum.jac**2))}


def minimize(race: Any, alpha: Any, **options: Any):
    """Minimize the outer loss of a race by L-BFGS in float64."""
    loss = functools.partial(race.score.both, w=race.w)
    search = {"jac": True, "method": "L-BFGS-B", "options": options}
    return scipy.optimize.minimize(loss, np.asarray(alpha, float), **search)


def main() -> None:
    report, draw = stochastic_tables.report, stochastic_tables.draw
    checkout = {"default": "", "help": "a copy of benchopt/benchmark_bilevel"}
    flags = harness.command_line(__file__, __doc__, report, work=work, checkout=checkout)
    if flags.checkout and not Path(flags.checkout).is_dir():
        flags.error(f"--checkout: expected a copy of benchmark_bilevel, got {flags.checkout}.")
    campaign = Campaign(flags.results)
    if flags.results and not campaign.rows:
        harness.keep(flags.results, campaign.rows, harness.environment("optax"))
    own = functools.partial(harness.in_own_process, __file__, one_core=True)
    races, methods, copies, turns, seeds, seconds = RACES, METHODS, 2, TURNS, SEEDS, MARKS[-1]
    if flags.small:
        races, seeds, seconds = ["small"], 1, 0.1
    if flags.smoke:  # in this process, which has compiled some of it already
        races, methods, copies, turns, seconds = ["tiny"], ["ours/soba"], 1, 2, 0.01
        own = lambda *request: list(work(*request))  # noqa: E731
    for race in races:
        names = CLEANING if race == "cleaning" else (race,)
        for method in (m for m in SIDES["ours"] if f"ours/{m}" in methods):
            key = {"part": "time", "race": names[0], "method": method}
            request = "time", flags.checkout, names[0], method, copies, turns
            campaign.once(key, functools.partial(own, *request))
        if race == "ijcnn1":
            campaign.once({"part": "optimum", "race": race}, optimum)
        path = str(flags.results.absolute()) if flags.results else ""
        rows = own("course", flags.checkout, path, names, methods, seeds, seconds)
        campaign.rows += [{"part": "course", "race": race} | row for row in rows]
    if flags.results:  # the processes have added courses
        failed = [row for row in campaign.rows if "failed" in row]
        campaign.rows = [*harness.read(flags.results), *failed]
    harness.finish(campaign.rows, flags.results, report, draw, write_rows=False)


if __name__ == "__main__":
    main()
