"""How fast are single-loop stochastic methods, and how far do they come in CPU seconds?

The four problems of the field's public benchmark, benchopt/benchmark_bilevel, at its sizes
(``stochastic_problems.py``), batches of 64. With ``--checkout PATH``, a copy of its repository, its
own solver classes run beside ours on the same losses, rows and core (``stochastic_rivals.py``).

Part ``time``: CPU time of a step, ours and theirs in turns. Of each side there are two copies, for
one program takes up to a tenth longer than its own copy, by where in memory its data came to lie:
the faster copy's median counts.

Part ``course``: the score over CPU seconds. What a start costs is counted (tables, a metric, the
order of the batches), compilation is not. Every method compiles once for a problem: step sizes and
seed are arguments of its program. Steps are tuned for every method alike: 0.3 seconds for each
point of the published grid, five seconds for the best three, all with the first seed; the other
seeds run at the best. Cleaning at 70 and 90 % takes the steps of 50 %. Ours without a step size are
not tuned.

Every problem is a process of its own on one core, and every measurement a line in the results: a
second run goes on where the first was stopped.
"""

import functools
import itertools
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import numpy as np
import stochastic_tables
from stochastic_tables import CLEANING, RIVAL, SIDES, UNTUNED

MARKS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 3.5, 5.0)  # CPU seconds at which a point is scored
SCREENED, FINALISTS = 0.3, 3  # CPU seconds for each point of a grid, and who gets all of them
CHUNK = {"simulated": 16, "ijcnn1": 4096, "covtype": 512, "small": 256}  # steps; else 64
CHUNKS = 1000  # at most, of one course
TURNS = 16
METHODS = tuple(f"{side}/{m}" for side, methods in SIDES.items() for m in methods)
RACES = "ijcnn1", "cleaning", "covtype", "simulated"  # cleaning: all three


@functools.cache
def race_of(name: str):
    """A race by its name; ``small`` is ijcnn1's with few rows."""
    import stochastic_problems as problems

    return problems.ijcnn1(0, (3_210, 2_105)) if name == "small" else problems.RACES[name](0)


def chunk_of(name: str, method: str) -> int:
    """Steps of a chunk: some ten milliseconds."""
    return max(1, CHUNK.get(name, 64) // (8 if method in ("amigo", "f2sa") else 1))


def method_of(name: str, step: Any, ratio: Any):
    """Ours, and its optimizer of alpha, with the schedules of the public benchmark."""
    import optax

    import bilevel

    if name == "implicit":  # full passes
        return bilevel.implicit(), optax.adam(step)
    if name in UNTUNED:
        return getattr(bilevel, name.split()[0])(), bilevel.paced()

    def falling(constant, exponent):
        return lambda number: constant / (1.0 + number) ** exponent

    fall = {"soba": 0.5, "ma_soba": 0.5, "f2sa": 4 / 7}.get(name, 0.0)
    rate = falling(step, fall) if fall else step
    options = {"inner": 10} if name in ("amigo", "f2sa") else {}
    if name == "f2sa":
        options["penalty"] = 1.0
    outer = falling(step / ratio, fall) if fall else step / ratio
    return getattr(bilevel, name)(rate, **options), optax.sgd(outer)


class Ours:
    """The compiled chunk that ``bilevel.search`` runs, of step sizes and seed."""

    def __init__(self, name: str, race: Any, count: int, chunks: int = CHUNKS):
        import jax

        import bilevel
        from bilevel import _search

        self.count, self.race, most = count, race, chunks * count

        def setup(rates):
            method, optimizer = method_of(name, *rates)
            batches = None if name == "implicit" else bilevel.partition(64)
            return _search._Setup(race.problem, method, optimizer, batches, False, 1)

        @functools.lru_cache(2)
        def prepared(seed):
            race = self.race
            begun = time.process_time()
            data = setup((1.0, 1.0)).prepared((race.train, race.valid, jax.random.key(seed)), most)
            jax.block_until_ready(data)
            return data, (time.process_time() - begun) / chunks

        def begin(alpha, w, data, rates):
            return setup(rates).start(alpha, w, data, most, ())

        def advance(carry, data, rates):
            return setup(rates).advance(carry, data, count)

        self.prepared, self.begin = prepared, jax.jit(begin)
        self.advance = jax.jit(advance, donate_argnums=0)

    def at(self, race: Any) -> "Ours":
        """On another race, of the same losses and shapes."""
        self.race = race
        self.prepared.cache_clear()
        return self

    def start(self, seed: int, step: float, ratio: float) -> float:
        """Back to the start; the seconds that this took."""
        import jax

        self.data, self.order = self.prepared(seed)
        self.rates, begun = (step, ratio), time.process_time()
        self.carry = self.begin(self.race.alpha, self.race.w, self.data, self.rates)
        jax.block_until_ready(self.carry)
        return time.process_time() - begun

    def chunk(self) -> float:
        """So many more steps; the seconds, with their share of the order's."""
        import jax

        begun = time.process_time()
        self.carry = jax.block_until_ready(self.advance(self.carry, self.data, self.rates))
        return time.process_time() - begun + self.order

    def point(self):
        """``(alpha, w)``; None once something was not finite."""
        state = self.carry.state
        return None if int(self.carry.trouble) else (np.array(state.alpha), np.array(state.w))


def runner(side: str, folder: str, method: str, race: Any, count: int):
    """Of ours, or of theirs, compiled and warm."""
    if side == "ours":
        made = Ours(method, race, count)
    else:
        import stochastic_rivals as rivals

        made = rivals.Rival(rivals.checkout(folder), method, race, count)
    warm(made)
    return made


def warm(made: Any) -> None:
    """The first chunks compile, some of theirs late; the order of batches is drawn for nothing."""
    for _ in range(2):
        made.start(-1, 1e-3, 10.0)
        for _ in range(4):
            made.chunk()


# ----------------------------------------------------------------------------- measurements


def work(part: str, *request: Any) -> Iterator[harness.Row]:
    """In a process of its own."""
    if part == "time":
        folder, name, method = request
        yield steps_in_turns(folder, name, method)
    else:
        folder, path, names, methods, *numbers = request
        campaign = Campaign(Path(path) if path else None)
        for side, method in (name.split("/") for name in methods):
            if side == "ours" or folder:
                campaign.method(folder, names, side, method, *numbers)
        if not path:  # nothing else would keep them
            yield from campaign.rows


def steps_in_turns(folder: str, name: str, method: str) -> harness.Row:
    """Microseconds of a step, ours and, where there is a checkout, theirs."""
    race, count = race_of(name), chunk_of(name, method)
    compared = folder and method in RIVAL
    order = ("ours", "theirs", "theirs", "ours") if compared else ("ours", "ours")
    copies = [
        (side, runner(side, folder, method if side == "ours" else RIVAL[method], race, count), [])
        for side in order
    ]
    for _ in range(TURNS):
        for _, made, spent in copies:
            spent.append(made.chunk())
        copies.append(copies.pop(0))  # another begins
    best: dict[str, float] = {}
    for side, _, spent in copies:
        best[side] = min(best.get(side, math.inf), float(np.median(spent)))
    return {side: round(1e6 * seconds / count, 2) for side, seconds in best.items()}


class Campaign:
    """Measurements that are made once: what the results have is not measured again."""

    def __init__(self, path: Path | None):
        self.path, self.rows = path, harness.read(path) if path else []

    def known(self, **wanted: Any) -> harness.Row | None:
        return next(iter(harness.where(self.rows, **wanted)), None)

    def add(self, row: harness.Row) -> harness.Row:
        harness.append(self.path, row)
        self.rows.append(row)
        return row

    def method(
        self, folder: str, names: list[str], side: str, method: str, seeds: int, seconds: float
    ) -> None:
        """All courses of one method, on problems of which the first tunes its steps."""

        @functools.cache
        def made(name):
            if side == "ours" and name != names[0]:
                return made(names[0]).at(race_of(name))
            return runner(side, folder, method, race_of(name), chunk_of(names[0], method))

        def course(name, step, ratio, seed):
            key = {"race": name, "side": side, "method": method}
            key |= {"step": step, "ratio": ratio, "seed": seed}
            found = self.known(part="course", **key)
            if not found:
                ran = course_of(made(name), race_of(name), seed, step, ratio, seconds)
                found = self.add({"part": "course"} | key | ran)
            return found

        best = 0.0, 0.0
        if method not in UNTUNED:
            screened = self.screened(made, names[0], side, method, min(SCREENED, seconds))
            best = min(screened, key=lambda g: stochastic_tables.last(course(names[0], *g, 0)))
        for name in names:
            for seed in range(seeds):
                course(name, *best, seed)

    def screened(self, made, name, side, method, seconds) -> list[tuple[float, float]]:
        """The best few points of the published grid."""
        race = race_of(name)
        grid = [*itertools.product(map(float, race.steps), map(float, race.ratios))]
        key = {"part": "screen", "race": name, "side": side, "method": method}
        found = self.known(**key)
        if not found:
            scores = [
                stochastic_tables.last(course_of(made(name), race, 0, *g, seconds, (seconds,)))
                for g in grid
            ]
            found = self.add(key | {"scores": [s if math.isfinite(s) else None for s in scores]})
        scores = [math.inf if s is None else s for s in found["scores"]]
        return [grid[i] for i in np.argsort(scores, kind="stable")[:FINALISTS]]


def course_of(made, race, seed, step, ratio, seconds, marks=MARKS) -> harness.Row:
    """The scores at the marks; fewer than there are marks, if something was not finite."""
    spent, steps = made.start(seed, step, ratio), 0
    found: harness.Row = {"seconds": []}
    for mark in (m for m in marks if m <= seconds):
        while spent < mark:
            if steps == CHUNKS * made.count:
                raise RuntimeError("The order of the batches is used up: more CHUNKS are wanted.")
            spent += made.chunk()
            steps += made.count
        point = made.point()
        scores = {} if point is None else race.score(*point)
        if not scores or not all(map(math.isfinite, scores.values())):
            found["diverged"] = True
            break
        found["seconds"].append(float(f"{spent:.3g}"))
        for key, value in scores.items():
            digits = 10 if key == "value" else 4
            found.setdefault(key, []).append(float(f"{value:.{digits}g}"))
    return found | {"steps": steps}


def optimum() -> harness.Row:
    """The least outer loss of ijcnn1, by L-BFGS in float64."""
    import scipy.optimize

    race = race_of("ijcnn1")
    found = scipy.optimize.minimize(
        lambda alpha: race.score.both(alpha, race.w), np.array(race.alpha, float), jac=True,
        method="L-BFGS-B", options={"ftol": 1e-15, "gtol": 1e-9, "maxiter": 200},
    )  # fmt: skip
    return {"value": float(found.fun), "slope": float(np.sum(found.jac**2))}


def main() -> None:
    flags = harness.command_line(
        __file__,
        __doc__,
        stochastic_tables.report,
        work=work,
        checkout={"default": "", "help": "a copy of benchopt/benchmark_bilevel"},
        races={"nargs": "+", "default": RACES, "choices": RACES, "help": "which problems"},
        methods={"nargs": "+", "default": METHODS, "choices": METHODS, "help": "which"},
        seeds={"type": int, "default": 10},
        seconds={"type": float, "default": MARKS[-1], "help": "CPU seconds of a course"},
        part={"choices": ("time", "course", "both"), "default": "both"},
    )
    quick = flags.size == "quick"
    campaign = Campaign(flags.results)
    if flags.results and not campaign.rows:
        campaign.add(harness.environment("optax"))
    own = functools.partial(harness.in_own_process, __file__, one_core=True)
    for race in ["small"] if quick else flags.races:
        names = CLEANING if race == "cleaning" else (race,)
        timed = () if flags.part == "course" else SIDES["ours"]
        for method in (m for m in timed if f"ours/{m}" in flags.methods):
            key = {"part": "time", "race": names[0], "method": method}
            if not campaign.known(**key):
                campaign.add(key | own("time", flags.checkout, names[0], method)[0])
        if flags.part == "time":
            continue
        if race == "ijcnn1" and not campaign.known(part="optimum"):
            campaign.add({"part": "optimum", "race": race} | optimum())
        seeds, seconds = (1, 0.1) if quick else (flags.seeds, flags.seconds)
        path = str(flags.results.absolute()) if flags.results else ""
        campaign.rows += own("course", flags.checkout, path, names, flags.methods, seeds, seconds)
    rows = harness.read(flags.results) if flags.results else campaign.rows
    print(stochastic_tables.report(rows))
    if flags.results:
        stochastic_tables.draw(rows, flags.results.with_suffix(".png"))


if __name__ == "__main__":
    main()
