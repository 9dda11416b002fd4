"""``bilevel search-skips --strategy eigen-nas``: Algorithm 1 of Zhu et al. 2022.

For every seed: of ``--samples`` random architectures those whose infinite kernel has the largest
smallest eigenvalue are trained from scratch, ``--kept`` of them, and the best by validation is what
was found. Beside it as many random ones, chosen alike: what they differ in is the eigenvalue.
"""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bilevel.cli.deep_search import pipeline, skip_networks
from bilevel.cli.deep_search import report as deep_report
from bilevel.cli.flags.deep_searches import SkipSearch
from bilevel.cli.runtime import report
from bilevel.spaces.activations import unit_inputs
from bilevel.spaces.skips import SkipArchitecture
from bilevel.strategies.train_free import EigenNAS, eigen_nas


def run_eigen_nas(config: SkipSearch) -> dict[str, Any]:
    """Run the job; print its table, write its run directory, return what `result.json` holds."""
    began, space = time.perf_counter(), skip_networks.space_from_flags(config)
    singles = skip_networks.single_activation_networks(space)
    work = {
        "data": 2,
        "eigenvalues": 10 + 0.1 * config.seeds * config.samples,
        "training": skip_networks.training_seconds(config, 2 * config.kept + len(singles)),
    }
    with pipeline.running(config, work) as run:
        task = skip_networks.skip_task(config, space, pipeline.draw_splits(config, unit_inputs))
        run.bar.enter("eigenvalues")
        rankings = [_of_seed(config, task, seed) for seed in range(config.seeds)]
        ranked = time.perf_counter() - began
        rows = _ranked_and_random_networks(task, rankings, singles, config.kept)
        networks = skip_networks.train_skip_networks(run, task, rows)
        scores = pipeline.by_network(networks)
        result = {
            "space": "skips",
            "config": run.flags,
            "names": list(space.names),
            "architectures": [_best_by_validation(networks, seed) for seed in range(config.seeds)],
            "scores": scores,
            "best_single": skip_networks.best_single(space, scores),
            "kernel_rows": skip_networks.kernel_rows(config),
            "seconds": {"search": ranked, "all": time.perf_counter() - began},
            **report.origin(),
        }
        eigenvalues = {f"eigenvalues_{seed}": f.eigenvalues for seed, f in enumerate(rankings)}
        report.write_results(run.folder, result, eigenvalues)
    ends = {"eigen-nas", space.names[-1], "random"}
    notes = [note.format(**result, **run.flags) for note in _NOTES]
    table = deep_report.network_table(result, skip_networks.COLUMNS, ends)
    deep_report.show_architectures(result, run.folder, table, notes)
    return result


def _of_seed(config: SkipSearch, task: skip_networks.SkipTask, seed: int) -> EigenNAS:
    """The pool's best by the kernel of the seed's first training rows, in float64."""
    draw = pipeline.keys(config.seed, seed)[0]
    with jax.enable_x64(True):
        x = jnp.asarray(
            np.asarray(task.parts[seed][0][0][: skip_networks.kernel_rows(config)]), float
        )
        return eigen_nas(draw, task.space, x, pool=config.samples, keep=config.kept)


def _ranked_and_random_networks(
    task: skip_networks.SkipTask,
    rankings: list[EigenNAS],
    singles: dict[str, SkipArchitecture],
    count: int,
) -> list[pipeline.NetworkToTrain]:
    """What is trained for each seed: the best of the pool, single activations, random networks."""
    rows = []
    for seed, (best, corners) in enumerate(
        zip(rankings, skip_networks.draw_corners(task, count), strict=True)
    ):
        drawn = [task.space.discretize(alpha) for alpha in corners]
        named = {f"{_NAME} {i}": a for i, a in enumerate(best.architectures, 1)} | singles
        named |= {f"random {i}": a for i, a in enumerate(drawn, 1)}
        rows += [
            pipeline.NetworkToTrain(name, seed, architecture)
            for name, architecture in named.items()
        ]
    return rows


def _best_by_validation(networks: list[dict[str, Any]], seed: int) -> str:
    """The architecture of a seed that was found: of those ranked first, the best by validation."""
    own = [row for row in networks if row["seed"] == seed and row["network"].startswith(_NAME)]
    return min(own, key=lambda row: row["valid_error"])["architecture"]


_NAME = "eigen-nas"
_NOTES = [
    "eigen-nas: the {kept} of {samples} random architectures with the largest λ_min, trained from "
    "scratch; random: {kept} of any λ_min; best of them by validation",
    "λ_min: of the infinite-width NTK of {kernel_rows} training rows, in NTK parametrization",
]
