"""How fast are single-loop stochastic methods, and how far do they come in CPU seconds?

The four problems of the field's public benchmark, benchopt/benchmark_bilevel, at its sizes
(``stochastic_problems.py``), batches of 64. With ``--checkout PATH``, a copy of its repository, its
own solver classes run beside ours on the same losses, rows and core (``stochastic_rivals.py``).

Part ``time``: CPU time of a step, ours and theirs in turns, the best of a few. Part ``course``:
the score over CPU seconds, without compilation. Steps are tuned for every method alike, on the
published grids with one seed; the others run at the best. Ours without a step size are not tuned.

Every measurement is a process of its own on one core, and a line in the results: a second run goes
on where the first was stopped.
"""

import functools
import itertools
import math
import sys
import time
from pathlib import Path
from typing import Any

import harness
import numpy as np

MARKS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)  # CPU seconds at which a point is scored
CHUNK = {"simulated": 16, "ijcnn1": 1024, "covtype": 512, "small": 256}  # steps; else 32
RIVAL = {"soba": "soba", "saba": "saba", "spaba": "srba", "amigo": "amigo", "f2sa": "f2sa"}
UNTUNED = "saba untuned", "spaba untuned"
RACES = "simulated", "ijcnn1", "covtype", "cleaning50", "cleaning70", "cleaning90"


@functools.cache
def race_of(name: str):
    """A race by its name; ``small`` is ijcnn1's with few rows."""
    import stochastic_problems as problems

    return problems.ijcnn1(0, (3_210, 2_105)) if name == "small" else problems.RACES[name](0)


def method_of(name: str, step: float, ratio: float):
    """Ours, and its optimizer of alpha, with the schedules of the public benchmark."""
    import optax

    import bilevel

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
    """The compiled chunk that ``bilevel.search`` runs."""

    def __init__(self, name: str, race: Any, count: int, step: float, ratio: float, seed: int):
        import jax

        import bilevel
        from bilevel import _search

        method, optimizer = method_of(name, step, ratio)
        batches, most = bilevel.partition(64), 2**20
        setup = _search._Setup(race.problem, method, optimizer, batches, False, 1)
        data = setup.prepared((race.train, race.valid, jax.random.key(seed)), most)
        self.begin = lambda: setup.start(race.alpha, race.w, data, most, ())
        carry = self.begin()
        advance = _search.program(setup.advance, carry, data, 1, donate=(0,))
        self.advance = lambda carry: jax.block_until_ready(advance(carry, data, count))
        self.carry = carry

    def chunk(self):
        self.carry = self.advance(self.carry)
        return self.carry.state.alpha, self.carry.state.w

    def restart(self) -> None:
        self.carry = self.begin()


def theirs(folder: str, name: str, race: Any, count: int, step: float, ratio: float, seed: int):
    """One of the public benchmark's solvers."""
    import stochastic_rivals as rivals

    given = {"step_size": step, "outer_ratio": ratio, "random_state": seed}
    return rivals.Rival(rivals.checkout(folder), name, race, count, **given)


def runner(side: str, folder: str, *request: Any):
    """Of ours, or of theirs; a first chunk compiles, and is taken back."""
    made = Ours(*request) if side == "ours" else theirs(folder, *request)
    made.chunk()
    made.restart()
    return made


def work(part: str, folder: str, name: str, method: str, *more: Any):
    """The rows of one measurement."""
    race = race_of(name)
    if part == "time":
        yield {"part": part, "race": name, "method": method} | steps_in_turns(
            folder, race, name, method
        )
    else:
        side, step, ratio, seed, most = more
        key = {"side": side, "step": step, "ratio": ratio, "seed": seed}
        made = runner(side, folder, method, race, chunk_of(name), step, ratio, seed)
        yield {"part": part, "race": name, "method": method} | key | course(made, race, most)


def chunk_of(name: str) -> int:
    return CHUNK.get(name, 32)


def steps_in_turns(folder: str, race: Any, name: str, method: str) -> harness.Row:
    """Microseconds of a step, ours and, where there is a checkout, theirs."""
    count, begun = chunk_of(name), time.process_time()
    sides = {"ours": runner("ours", folder, method, race, count, 1e-3, 10.0, 0)}
    found = {"ours_first": time.process_time() - begun}
    if folder and method in RIVAL:
        begun = time.process_time()
        sides["theirs"] = runner("theirs", folder, RIVAL[method], race, count, 1e-3, 10.0, 0)
        found["theirs_first"] = time.process_time() - begun
    best = dict.fromkeys(sides, math.inf)
    for side, made in [*sides.items()] * 7:
        begun = time.process_time()
        made.chunk()
        best[side] = min(best[side], time.process_time() - begun)
    return found | {side: 1e6 * seconds / count for side, seconds in best.items()}


def course(made: Any, race: Any, most: float) -> harness.Row:
    """The score at each mark, and the steps until then."""
    spent, steps, found = 0.0, 0, []
    for mark in (m for m in MARKS if m <= most):
        while spent < mark:
            begun = time.process_time()
            alpha, w = made.chunk()
            spent += time.process_time() - begun
            steps += 1
        alpha, w = (np.array(x) for x in (alpha, w))
        finite = np.isfinite(alpha).all() and np.isfinite(w).all()
        found.append({"seconds": spent, "chunks": steps} | (race.score(alpha, w) if finite else {}))
        if not finite:
            break
    return {"marks": found}


# ----------------------------------------------------------------------------- the campaign


def score(row: harness.Row, mark: int = -1) -> float:
    """The first score at a mark; infinity where it diverged before."""
    marks = row.get("marks", [])
    if len(marks) <= (mark if mark >= 0 else 0):
        return math.inf
    values = [v for k, v in marks[mark].items() if k not in ("seconds", "chunks")]
    return values[0] if values and math.isfinite(values[0]) else math.inf


class Campaign:
    """Measurements that are made once: what the results have is not measured again."""

    def __init__(self, path: Path | None, folder: str):
        self.path, self.folder, self.rows = path, folder, harness.read(path) if path else []

    def row(self, part: str, name: str, method: str, *more: Any) -> harness.Row:
        keys = dict(zip(("side", "step", "ratio", "seed"), more, strict=False))
        wanted = {"part": part, "race": name, "method": method} | keys
        known = harness.where(self.rows, **wanted)
        if known:
            return known[0]
        print(*wanted.values(), file=sys.stderr, flush=True)
        request = part, self.folder, name, method, *more
        (found,) = harness.in_own_process(__file__, *request, one_core=True)
        row = wanted | found
        harness.append(self.path, row)
        self.rows.append(row)
        return row

    def tuned(self, name: str, side: str, method: str, most: float) -> tuple[float, float]:
        """The best of the published grid, by the score at the end, with one seed."""
        if method in UNTUNED:
            return 0.0, 0.0
        race = race_of(name)
        grid = [*itertools.product(map(float, race.steps), map(float, race.ratios))]
        return min(grid, key=lambda g: score(self.row("course", name, method, side, *g, 0, most)))


def times(rows: list[harness.Row]) -> str:
    """Time of a step."""
    lines = []
    for row in harness.where(rows, part="time"):
        other = row.get("theirs")
        beside = (f"{other:.1f}", f"{other / row['ours']:.2f}") if other else ("", "")
        lines.append((row["race"], row["method"], f"{row['ours']:.1f}", *beside))
    return harness.table(("problem", "method", "ours, us", "theirs, us", "times"), lines)


def courses(rows: list[harness.Row]) -> str:
    """The median score over the seeds after half a second and at the end, at the best steps."""
    lines = []
    chosen = harness.where(rows, part="course")
    for race, side, method in dict.fromkeys((r["race"], r["side"], r["method"]) for r in chosen):
        of = harness.where(chosen, race=race, side=side, method=method)
        best = min(harness.where(of, seed=0), key=score)
        seeds = harness.where(of, step=best["step"], ratio=best["ratio"])
        at = [f"{np.median([score(r, mark) for r in seeds]):.3g}" for mark in (2, -1)]
        lines.append((race, method, side, best["step"], best["ratio"], len(seeds), *at))
    head = "problem", "method", "whose", "step", "ratio", "seeds", "after 0.5 s", "at the end"
    return harness.table(head, lines)


def report(rows: list[harness.Row]) -> str:
    return "\n\n".join((times(rows), courses(rows)))


def main() -> None:
    flags = harness.command_line(
        __file__,
        __doc__,
        report,
        work=work,
        checkout={"default": "", "help": "a copy of benchopt/benchmark_bilevel"},
        races={"nargs": "+", "default": RACES, "help": "which problems"},
        seeds={"type": int, "default": 10},
        seconds={"type": float, "default": 5.0, "help": "CPU seconds of a course"},
        part={"choices": ("time", "course", "both"), "default": "both"},
    )
    quick = flags.size == "quick"
    races, seeds = (["small"], 1) if quick else (flags.races, flags.seeds)
    most = 0.2 if quick else flags.seconds
    campaign = Campaign(flags.results, flags.checkout)
    if flags.results and not campaign.rows:
        harness.append(flags.results, harness.environment("optax"))
    for name in races:
        if flags.part != "course":
            for method in (*RIVAL, "ma_soba", *UNTUNED):
                campaign.row("time", name, method)
        if flags.part == "time":
            continue
        sides = [("ours", m) for m in (*UNTUNED, *([] if quick else (*RIVAL, "ma_soba")))]
        sides += [("theirs", m) for m in RIVAL.values() if flags.checkout and not quick]
        for side, method in sides:
            best = campaign.tuned(name, side, method, most)
            for seed in range(seeds):
                campaign.row("course", name, method, side, *best, seed, most)
    print(report(campaign.rows))


if __name__ == "__main__":
    main()
