"""Is what `bilevel search` says of its hypergradient's error true?

    python benchmarks/search_error.py                    # ten seeds, an hour on two cores
    python benchmarks/search_error.py --table            # of the results file

At the alpha that the search finds, the command holds its hypergradient against that through four
times as many training steps. The truth here is that of networks trained to the end: the same
training in float64, for 2,000 steps. The ratio of the two errors, estimated over true, should be in
[1/3, 10]. The error against 500 steps is recorded too: the truth itself still moves a little.
"""

import argparse
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import bilevel
from bilevel.cli import search as command
from bilevel.problem import side_by_side

RESULTS = pathlib.Path(__file__).parent / "results" / "search_error.jsonl"
STEPS = (500, 2000)  # of the reference


def measured(seed: int, solver: str) -> dict:
    """One search, its own estimate, and the truth."""
    config = command.Search(seed=seed, solver=solver, progress=False)
    with jax.enable_x64(False):
        task = command.setup(config)
        uniform = jnp.full((1, len(task.space.names)), 1 / len(task.space.names))
        data = task.w0, task.train, task.valid
        problem = side_by_side(task.space.problem)
        geometry = command.geometry(config)
        found = bilevel.search(
            problem, task.solver, geometry, uniform, *data, steps=config.steps, progress=False
        )
        claimed = command.hypergradient_error(task, config, found.alpha)
        grad = command.hypergradient(task, task.solver, found.alpha).grad
    with jax.enable_x64(True):
        alpha, *parts = _wide((found.alpha, task.w0, task.curvatures, task.train, task.valid))
        fields = dict(zip(("w0", "curvatures", "train", "valid"), parts, strict=True))
        truths = [_truth(task._replace(**fields), steps, alpha) for steps in STEPS]
        errors = [float(jnp.linalg.norm(grad - truth)) for truth, _ in truths]
    norm = float(jnp.linalg.norm(truths[-1][0]))
    print(np.asarray(grad)[0], *truths, sep="\n", flush=True)
    return {
        "seed": seed,
        "solver": solver,
        "alpha": np.asarray(found.alpha)[0].tolist(),
        "estimate": claimed["error"][0],
        "error": errors[-1],
        "error, earlier reference": errors[0],
        "norm": norm,
        "train loss of the reference": truths[-1][1],
        "ratio": claimed["error"][0] / errors[-1],
    }


def _wide(tree):
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x), float), tree)


def _truth(task, steps, alpha):
    """The hypergradient of so many steps, and the training loss that is left."""
    solver = task.space.solver(task.curvatures, steps)
    found = command.hypergradient(task, solver, alpha)
    lower = side_by_side(task.space.problem).lower
    return np.asarray(found.grad), float(lower(found.w, alpha, task.train))


def table(rows: list[dict]) -> str:
    lines = [
        "| solver | seed | error | estimate | of a norm of | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for r in sorted(rows, key=lambda r: (r["solver"], r["seed"])):
        lines.append(
            f"| {r['solver']} | {r['seed']} | {r['error']:.4f} | {r['estimate']:.4f} "
            f"| {r['norm']:.4f} | {r['ratio']:.2f} |"
        )
    ratios = np.array([r["ratio"] for r in rows])
    inside = int(np.sum((ratios >= 1 / 3) & (ratios <= 10)))
    lines.append(f"\n{inside} of {len(rows)} ratios are in [1/3, 10].")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--solvers", nargs="+", default=["unrolled"])
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    args = parser.parse_args()
    rows = []
    if args.results.exists():
        rows = [json.loads(line) for line in args.results.read_text().splitlines()]
    done = {(r["solver"], r["seed"]) for r in rows}
    for solver in args.solvers:
        for seed in range(args.seeds):
            if args.table or (solver, seed) in done:
                continue
            rows.append(measured(seed, solver))
            with args.results.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            print(rows[-1], flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
