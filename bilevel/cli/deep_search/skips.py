"""``bilevel search-skips``: activations and skip connections of every layer (Zhu et al. 2022).

All seeds are searched side by side. Then, for every seed: the network of the architecture found;
networks of one activation without skips; and as many random architectures as could be trained in
the search's gradients. All of them are corners of the space, so that one compiled program trains
them all.

``--strategy eigen-nas`` searches nothing: see :mod:`bilevel.cli.deep_search.eigen_nas`.
"""

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bilevel.cli.deep_search import pipeline, report
from bilevel.cli.deep_search.command import DeepSearchCommand, run_deep_search
from bilevel.cli.deep_search.eigen_nas import run_eigen_nas
from bilevel.cli.deep_search.skip_networks import (
    COLUMNS,
    best_single,
    draw_corners,
    initial_weights,
    kernel_rows,
    single_activation_networks,
    skip_gradient_seconds,
    skip_task,
    space_from_flags,
    train_skip_networks,
    training_batches,
    training_seconds,
    used_space,
)
from bilevel.cli.flags.deep_searches import SkipSearch
from bilevel.contracts import Pytree
from bilevel.nets.evaluation import Part
from bilevel.spaces import Space
from bilevel.spaces.activations import unit_inputs


def run_skip_search(config: SkipSearch) -> dict[str, Any]:
    """Run the job; print its table, write its run directory, return what `result.json` holds."""
    config.check()
    if config.strategy == "eigen-nas":
        return run_eigen_nas(config)
    began = time.perf_counter()
    space = space_from_flags(config)
    sgd = functools.partial(optax.sgd, momentum=0.9)
    gradients = pipeline.search_of(config, space, sgd, 1.0).gradients  # whatever the rate is
    # As many networks as can be trained in the gradients of the search.
    budget = 1 + round(gradients / training_batches(config))
    seconds = skip_gradient_seconds(config)
    work = {
        "data": 2,
        "search": 10 + seconds * config.seeds * gradients,
        "training": training_seconds(config, 1 + len(space.names) + budget),
        "errors and curvature": 3 + 0.5 * config.seeds,
    }

    def searched(run, parts):
        task = skip_task(config, space, parts)
        stacked = jax.tree.map(lambda *a: jnp.stack(a), *parts)
        key, weight_key, choice_key = jax.random.split(jax.random.key(config.seed), 3)
        w0 = initial_weights(task.space, weight_key, stacked[0])
        rate = config.weight_rate or _mean_initial_rate(task.space, w0, stacked[0])
        search = pipeline.search_of(config, task.space, sgd, rate)
        return search, pipeline.search_seeds_at_once(
            run, task.space, search, w0, stacked, key, choice_key
        )

    def networks(run, seed_results, parts):
        task = skip_task(config, space, parts)
        rows = pipeline.networks_to_train(
            space, seed_results, single_activation_networks(space), draw_corners(task, budget)
        )
        return train_skip_networks(run, task, rows)

    def more(result, seed_results):
        result["scores"]["supernet"]["skips"] = [
            float(f.alpha["skips"].sum()) for f in seed_results
        ]
        best = best_single(space, result["scores"])
        return {"best_single": best, "kernel_rows": kernel_rows(config)}

    ends = {"search", space.names[-1], "random"}
    return run_deep_search(
        config,
        DeepSearchCommand(
            name="skips",
            space=used_space(config, space),
            work=work,
            unit=unit_inputs,
            search=searched,
            train=networks,
            more=more,
            heats=functools.partial(_skip_heatmaps, space.names),
            table=lambda result: report.network_table(result, COLUMNS, ends),
            notes=lambda result: [note.format(**result) for note in _NOTES],
        ),
        began,
    )


def _mean_initial_rate(space: Space, w: Pytree, train: Part) -> float:
    """The weights' first step size: by the tangent kernel at the start, mean over the seeds."""
    alpha = space.start()

    def of_seed(w, x):
        return 1 / pipeline.default_rate(space, w, alpha, x)

    return 1 / float(jax.jit(jax.vmap(of_seed))(w, train[0]).mean())


# ----------------------------------------------------------------------------- the report


def _skip_heatmaps(names: tuple[str, ...], alpha: Pytree) -> list[report.Heatmap]:
    """Probability of each activation, and weight of the skip connection, layer by layer."""
    mixtures, skips = (np.asarray(alpha[k]) for k in ("activations", "skips"))
    values = np.column_stack([mixtures, [np.nan, *skips]])
    layers, columns = [str(layer) for layer in range(1, len(values) + 1)], [*names, "skip"]
    return [report.Heatmap("α and weight of the skip", values, columns, layers, ylabel="layer")]


_NOTES = [
    "networks are trained from scratch, those of one activation without skips; * best of them by "
    "validation; best of random: by validation, as many as take the search's gradients",
    "λ_min: of the infinite-width NTK of {kernel_rows} training rows, in NTK parametrization",
]
