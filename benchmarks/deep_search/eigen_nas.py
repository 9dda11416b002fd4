"""Does the NTK's smallest eigenvalue find good networks?  (Zhu et al. 2022, Algorithm 1, Eigen-NAS)

The space is the paper's own: activations and skips of 10 layers, on Fashion-MNIST. The paper's
Table 2 evaluates Eigen-NAS on NAS-Bench-201 only. Every run draws rows, weights, and a pool of
architectures. Each method takes the first k of the pool by its score. It trains them as in
Algorithm 1: one epoch of SGD, with the step size that is best on validation rows. It returns the
architecture with the smallest validation error:

- "mean diagonal": (1/N) sum_i K_ii, computed in the paper as a bound of the smallest eigenvalue;
- "smallest eigenvalue": of the exact kernel at infinite width, the subject of the theory;
- "random": the first k drawn, which costs the same trainings.

The gain over random is paired: both methods use the same rows of the same run.

    python benchmarks/deep_search/eigen_nas.py    # width 128, 10 runs; 20 minutes of processor time
"""

import jax
import numpy as np

from benchmarks import harness
from benchmarks.deep_search import activation_skip_search as zhu
from benchmarks.harness import plus_minus, standard_error

MEASURES = (
    "bilevel/spaces/skips.py",
    "bilevel/spaces/activations.py",
    "bilevel/nets/training.py",
    "ntk/empirical/kernels.py",
)

RUNS, POOL, TOP_COUNT = 10, 60, 5
FIELDS = {"mean diagonal": "mean diagonal", "smallest eigenvalue": "λ_min"}  # of a kernel's row
SCORES = (*FIELDS, "random")


def trained(sizes, run, number, architecture) -> dict:
    """Return validation and test error at the step size that is best on validation rows."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(3), run), number)
    corner = zhu.space_of(sizes).one_hot(architecture)
    errors, _ = zhu.trained_errors(sizes, corner, key, *zhu.parts_of(sizes, run))
    valid, test = min(np.asarray(errors, float).tolist())
    return {"valid": valid, "test": test}


def experiment(sizes, run, pool, kept):
    """Return a row for each score: the network chosen among its first ``kept``."""
    # The seed of an architecture is one number.
    seeds = range(1_000_000 + 1000 * run, 1_000_000 + 1000 * run + pool)
    drawn = [zhu.random_architecture(sizes, seed) for seed in seeds]
    kernels = [zhu.kernel(sizes, a, run) for a in drawn]
    trainings: dict[int, dict] = {}
    for score in SCORES:
        order = list(range(pool))
        if score != "random":
            order.sort(key=lambda i, field=FIELDS[score]: -kernels[i][field])
        for i in order[:kept]:
            if i not in trainings:
                trainings[i] = trained(sizes, run, i, drawn[i])
        best = min(order[:kept], key=lambda i: trainings[i]["valid"])
        row = {"score": score, "run": run, "architecture": str(drawn[best])} | trainings[best]
        row |= {"kept": [trainings[i]["test"] for i in order[:kept]]}
        print(f"{run} {score:20s} {100 * row['test']:.2f} %  {row['architecture']}", flush=True)
        yield row


def report(rows) -> str:
    """Return test errors and paired gains, in percentage points."""
    of = {score: harness.where(rows, score=score) for score in SCORES}
    baseline, lines = np.array([row["test"] for row in of["random"]]), []
    for score, own in of.items():
        if not own:
            continue
        test = np.array([row["test"] for row in own])
        gain = 100 * (baseline[: len(test)] - test)
        errors = test, [np.mean(row["kept"]) for row in own]
        paired = "" if score == "random" else plus_minus(gain.mean(), standard_error(gain))
        lines.append((score, *(harness.spread(x, ".2f", 100) for x in errors), paired))
    head = ("first k by", "test error, %", "mean of the k, %", "gain over random, points")
    return harness.table(head, lines)


def main() -> None:
    arguments = harness.command_line(__file__, __doc__, report)
    sizes = zhu.SIZES[arguments.size]
    counts = {"smoke": (2, 2, 1), "quick": (2, 6, 2), "default": (RUNS, POOL, TOP_COUNT)}
    runs, pool, kept = counts[arguments.size]
    rows = harness.begun(arguments.results, "optax", pool=pool, kept=kept)
    for run in range(runs):
        if len(harness.where(rows, run=run)) == len(SCORES):
            continue
        harness.keep(arguments.results, rows, *experiment(sizes, run, pool, kept))
    harness.finish(rows, arguments.results, report, write_rows=False)


if __name__ == "__main__":
    main()
