"""Is the hypergradient error that `bilevel search` reports true?

    python benchmarks/hypergradients/search_error.py          # ten seeds, ten minutes of one core

At the last alpha of the search, the command compares its hypergradient with that through four times
as many training steps. Here the truth is the hypergradient of fully trained networks: the same
training in float64, for 2,000 steps. The ratio of estimated to true error should be in [1/3, 10].
We also record the error compared with 500 steps, because the truth itself still changes a little.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import bilevel
from benchmarks import activation_searches, harness
from bilevel.strategies.activation_search import (
    ActivationTask,
    hypergradient_error,
    seed_hypergradients,
    solver,
)

MEASURES = (
    "bilevel/strategies/activation_search.py",
    "bilevel/spaces/activations.py",
    "bilevel/solvers/_unrolled.py",
    "bilevel/outer_loop",
)

STEPS, SEEDS = (500, 2000), 10  # steps of the reference
LONGER = 4  # the command's reference has this many times the inner steps


def measured(
    seed: int,
    *,
    steps: int = activation_searches.STEPS,
    inner_steps: int = activation_searches.INNER_STEPS,
    references: tuple[int, int] = STEPS,
    **smaller,
) -> dict:
    """Run one search; return its error estimate and the true error."""
    with jax.enable_x64(False):
        task = activation_searches.task_of(seed=seed, **smaller)
        way, longer = solver(task, inner_steps), solver(task, LONGER * inner_steps)
        alpha = activation_searches.search(task, way, steps)
        grad = seed_hypergradients(task, way, alpha).grad
        estimate = float(hypergradient_error(task, way, longer, alpha).error[0])
    with jax.enable_x64(True):
        widen = lambda x: jnp.asarray(np.asarray(x), float)  # noqa: E731
        wide, *others = jax.tree.map(widen, (alpha, *task[1:]))
        truths = [_truth(ActivationTask(task.space, *others), wide, n) for n in references]
        errors = [float(jnp.linalg.norm(grad - truth)) for truth, _ in truths]
    print(np.asarray(grad)[0], *truths, sep="\n", flush=True)
    return {
        "seed": seed,
        "solver": "unrolled",
        "alpha": np.asarray(alpha)[0].tolist(),
        "estimate": estimate,
        "error": errors[-1],
        "error, earlier reference": errors[0],
        "norm": float(jnp.linalg.norm(truths[-1][0])),
        "train loss of the reference": truths[-1][1],
        "ratio": estimate / errors[-1],
    }


def _truth(task, alpha, steps):
    """Return the hypergradient after ``steps`` steps, and the training loss there."""
    hyper = seed_hypergradients(task, solver(task, steps), alpha)
    lower = bilevel.stack_problems(task.space.problem).lower
    return np.asarray(hyper.grad), float(lower(hyper.w, alpha, task.train))


def report(rows: list[dict]) -> str:
    numbers = {"error": ".4f", "estimate": ".4f", "norm": ".4f", "ratio": ".2f"}
    lines = [
        [r["solver"], r["seed"], *(format(r[name], form) for name, form in numbers.items())]
        for r in sorted(rows, key=lambda r: (r["solver"], r["seed"]))
    ]
    inside = sum(1 / 3 <= r["ratio"] <= 10 for r in rows)
    table = harness.table(["solver", "seed", "error", "estimate", "gradient norm", "ratio"], lines)
    return f"{table}\n\n{inside} of {len(rows)} ratios are in [1/3, 10]."


def main() -> None:
    flags = harness.command_line(__file__, __doc__, report)
    if flags.small:
        smaller = {"width": 32, "train": 40, "valid": 40, "steps": 3, "inner_steps": 10}
        smaller |= {"references": (20,)} if flags.smoke else {}
        harness.finish([measured(0, **smaller)], flags.results, report)
        return
    rows = harness.read(flags.results)
    tasks = [({"seed": seed}, functools.partial(measured, seed)) for seed in range(SEEDS)]
    harness.measure_missing(flags.results, rows, tasks, str)
    harness.finish(rows, flags.results, report, write_rows=False)


if __name__ == "__main__":
    main()
