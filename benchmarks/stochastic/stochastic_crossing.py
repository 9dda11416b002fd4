"""At which size do untuned stochastic methods start to beat full-batch ``implicit()``?

The problem is logistic regression with a penalty for each weight, with a growing number of rows or
of weights. We measure the seconds until the outer loss at the exact lower solution is within 1e-3,
and within 1e-5, of its minimum. This is CPU time on one core, including the start but not
compilation. ``saba()`` and ``spaba()`` take batches of 64 and ``paced()``. ``implicit()`` starts
each solve from the last weights, with Adam at the best of three rates for each size. It is tuned,
the others are not.

A long search records the history of alpha. Bisection finds the first row after which the loss stays
under a bar. The time is that of a search which ends there.

    python benchmarks/stochastic/stochastic_crossing.py            # half an hour of one core
"""

import bisect
import functools
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from benchmarks.stochastic import stochastic
from benchmarks.stochastic import stochastic_problems as problems

MEASURES = ("bilevel/stochastic", "bilevel/outer_loop/single_loop.py")

SIZES = ((2_000, 20), (20_000, 20), (200_000, 20), (1_000_000, 20), (20_000, 100))
SMALL = ((500, 5),)
RATES = (0.1, 0.3, 1.0)
TARGETS = (1e-3, 1e-5)
SECONDS = 5.0
ROWS = 1000  # of a history, at most


def problem_of(n: int, p: int):
    """Return a race with ``n`` training rows and half as many validation rows."""
    rng = np.random.default_rng(0)
    truth = rng.normal(size=p) * (rng.random(p) < 0.5) * np.sqrt(20 / p)

    def side(n, shrink):
        x = rng.normal(size=(n, p), scale=0.7).astype(np.float32)
        y = np.where(rng.random(n) < 1 / (1 + np.exp(-shrink * x @ truth)), 1.0, -1.0)
        return x, y.astype(np.float32)

    problem = problems.logistic_problem()
    train, valid = side(n, 1.0), side(n // 2, 0.5)
    score = problems.ValueAndSlope(problem, train, valid)
    start = jnp.full(p, -2.0), jnp.zeros(p)
    return problems.Race("crossing", problem, *start, train, valid, score, (), ())


def work(
    n: int, p: int, seconds: float, methods: list[str], rates: list[float]
) -> Iterator[harness.Row]:
    race = problem_of(n, p)
    made = {name: stochastic.Ours(name, race, max(16, 40_000 // (p + 20))) for name in methods}
    full = stochastic.Ours("implicit", race, 16)
    ran = [(name, 0.0, ours) for name, ours in made.items()]
    ran += [(f"implicit {rate}", rate, full) for rate in rates]
    paths = [Path(ours, seconds, rate) for _, rate, ours in ran]
    least = minimum(race, [path.alphas[-1] for path in paths if len(path.alphas)])
    for (name, _, _), path in zip(ran, paths, strict=True):
        row = {"n": n, "p": p, "method": name, "steps": path.steps}
        yield row | {f"{t:.0e}": path.seconds_to(least + t) for t in TARGETS}


class Path:
    """The alphas of a search that takes a given number of CPU seconds."""

    def __init__(self, made: stochastic.Ours, seconds: float, rate: float):
        self.made, self.rate = made, rate
        steps = made.within(seconds)
        self.every = -(-steps // ROWS)
        self.steps = steps // self.every * self.every
        names = ("alpha",)
        _, result = made.run(self.steps, 0, (rate, 1.0), names, self.every)
        # Rows after a value that was not finite are empty.
        self.alphas = np.array(result.history["alpha"])[: int(result.state.step) // self.every]

    def seconds_to(self, bar: float) -> float | None:
        """Return the CPU seconds of a search that ends when the loss stays under the bar.

        None if the last alpha is not under it.
        """
        race, last = self.made.race, len(self.alphas) - 1
        below = functools.cache(lambda i: race.score(self.alphas[i], race.w)["value"] <= bar)
        if last < 0 or not below(last):
            return None
        rows = 1 + bisect.bisect_left(range(last), True, key=below)
        times = [self.made.run(rows * self.every, 0, (self.rate, 1.0))[0] for _ in range(3)]
        return round(float(np.median(times)), 4)


def minimum(race, alphas) -> float:
    """Minimize the outer loss, by L-BFGS from the best of these alphas; return the minimum."""
    start = min(alphas, key=lambda alpha: race.score(alpha, race.w)["value"])
    return float(stochastic.minimize(race, start, maxfun=40, ftol=1e-13).fun)


def report(rows: list[harness.Row]) -> str:
    lines = []
    for n, p in dict.fromkeys((row["n"], row["p"]) for row in rows if "n" in row):
        cells = []
        for method in ("implicit", *stochastic.UNTUNED):
            of_size = harness.where(rows, n=n, p=p)
            of = [row for row in of_size if row.get("method", "").startswith(method)]
            for target in TARGETS:
                times = [r[f"{target:.0e}"] for r in of if r[f"{target:.0e}"] is not None]
                late = f"over {SECONDS:g}" if of else ""
                cells.append(f"{min(times):.2g}" if times else late)
        lines.append((f"{n:,}", p, f"{n * p:.0e}".replace("e+0", "e"), *cells))
    names = "`implicit()`", "`saba()`", "`spaba()`"
    head = (f"{name} to {target:.0e}" for name in names for target in TARGETS)
    return harness.table(("rows n", "weights p", "n p", *head), lines)


def main() -> None:
    flags = harness.command_line(__file__, __doc__, report, work=work)
    rows = harness.begun(flags.results, "optax")
    own = functools.partial(harness.in_own_process, __file__, one_core=True)
    methods, rates, seconds = stochastic.UNTUNED, RATES, SECONDS
    if flags.small:
        seconds = 0.5
    if flags.smoke:
        methods, rates, seconds = (), RATES[-1:], 0.05
    sizes = SMALL if flags.small else SIZES
    request = seconds, methods, rates
    tasks = [({"n": n, "p": p}, functools.partial(own, n, p, *request)) for n, p in sizes]
    harness.measure_missing(flags.results, rows, tasks)
    harness.finish(rows, flags.results, report, write_rows=False)


if __name__ == "__main__":
    main()
