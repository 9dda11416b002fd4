"""Jobs for processes that are killed, starved of disk, or run into each other.

Each job is ``job(folder) -> arrays``: it records in ``folder``, resumes from what is there, and
returns all its numbers, to be compared bit for bit. A library that records every few seconds would
record a short job once. So ``search`` and ``rank`` are done in several sittings, each of which
records its end and resumes from the one before.
"""

import contextlib
import io
import os
import resource
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bilevel.contracts import Evaluation, Shared

Arrays = dict[str, np.ndarray]


def search(folder: Path, steps: int = 25) -> Arrays:
    """A search with momentum, random batches and a checkpoint after every step.

    A sitting has two steps. The search records after its first chunk and at its end. If a sitting
    gets no further than the one before, as on a full disk, the next one goes to the end.
    """
    import jax
    import jax.numpy as jnp
    import optax

    import bilevel

    problem = bilevel.Problem(
        lambda w, alpha, batch: 0.5 * jnp.sum((batch @ w - alpha[0]) ** 2) + jnp.sum(alpha * w**2),
        lambda w, alpha, batch: 0.5 * jnp.sum((batch @ w - 1) ** 2),
    )
    data = jnp.asarray(np.random.default_rng(0).normal(size=(20, 3)), jnp.float32)
    reached, whole = 0, False
    while reached < steps:
        search_result = bilevel.search(
            problem,
            bilevel.unrolled(optax.sgd(0.01, momentum=0.9), 3),
            optax.chain(optax.adam(0.05), bilevel.project()),
            jnp.full(3, 1 / 3),
            jnp.ones(3),
            data,
            data,
            steps=steps,
            batches=lambda key, rows: rows[jax.random.randint(key, (8,), 0, 20)],
            key=jax.random.key(1),
            checkpoint=folder,
            resume=True,
            callback=None if whole else lambda result: True,
            every=None if whole else 2,
            chunk=1,
            progress=False,
        )
        step = int(search_result.state.step)
        reached, whole = max(step, reached), step <= reached
    leaves = jax.tree.leaves(
        (search_result.alpha, search_result.w, search_result.history, search_result.state)
    )
    return {str(i): np.asarray(x) for i, x in enumerate(leaves)}


def baseline(folder: Path, method: str = "hyperband") -> Arrays:
    """A baseline with a journal; errors depend on the solve's key."""
    import jax

    from bilevel import baselines

    def evaluate(key, config, resource):
        noise = float(jax.random.uniform(key))
        return Evaluation(config + noise / resource, config + noise)

    def share(key, configs, probabilities, resource, *, whole=False):
        errors = np.array(configs) + np.asarray(jax.random.uniform(key, (len(configs),))) / resource
        return Shared(errors, np.full(len(configs), 9))

    trace = getattr(baselines, method)(
        jax.random.key(3),
        [i / 16 for i in range(16)],
        baselines.Selection(evaluate, share),
        27,
        journal=folder / "journal.jsonl",
        resume=True,
        progress=False,
    )
    ragged = {"candidates": trace.candidates, "errors": trace.errors}
    arrays = {name: np.concatenate(parts) for name, parts in ragged.items()}
    plain = ("round", "resource", "calls", "incumbent", "valid", "test")
    return arrays | {name: getattr(trace, name) for name in plain} | {"best": np.array(trace.best)}


def halving(folder: Path) -> Arrays:
    """As ``baseline``."""
    return baseline(folder, "successive_halving")


def sharing(folder: Path) -> Arrays:
    """As ``baseline``."""
    return baseline(folder, "weight_sharing")


def rank(folder: Path) -> Arrays:
    """Train-free scores with a record of them, of ten more networks in each sitting."""
    import jax
    import jax.numpy as jnp

    from bilevel.spaces import nasbench201
    from bilevel.spaces.nasbench201 import scoring

    networks = nasbench201.all_networks(cells=1, channels=2)
    w = networks.init(jax.random.key(0), (4, 4, 1))
    x = jax.random.normal(jax.random.key(1), (4, 4, 4, 1))
    cells = nasbench201.genotypes()[-30:]
    batch = (x, jnp.arange(4))
    folder.mkdir(parents=True, exist_ok=True)
    for count in (10, 20, 30):
        scored = scoring.score_networks(
            ["l2_norm"],
            networks,
            w,
            cells[:count],
            batch,
            progress=False,
            file=folder / "scores.npz",
        )
    return scored.values


def command_search(folder: Path, steps: int = 4) -> Arrays:
    """``bilevel search``, small. It records after its first chunk and at its end."""
    small = (
        "--activations",
        "relu",
        "tanh",
        "--steps",
        str(steps),
        "--inner-steps",
        "3",
        "--width",
        "16",
        "--train",
        "20",
        "--valid",
        "20",
        "--test",
        "40",
        "--progress",
        "False",
    )
    return _command("search", small, folder)


def command_baseline(folder: Path) -> Arrays:
    """``bilevel baseline``, small."""
    small = (
        "--method",
        "fast-weight-sharing",
        "--configs",
        "6",
        "--dimension",
        "32",
        "--train",
        "60",
        "--valid",
        "40",
        "--progress",
        "False",
    )
    return _command("baseline", small, folder)


class CommandRefused(Exception):
    """A command's own words, on its standard error."""


def _command(name: str, small: tuple[str, ...], folder: Path) -> Arrays:
    from bilevel.cli import main

    resume = ("--resume",) if folder.exists() else ()
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        status = main([name, *small, "--out", str(folder), *resume])
    if status:
        raise CommandRefused(errors.getvalue().strip())
    with np.load(folder / "arrays.npz", allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files if "seconds" not in name}


JOBS: dict[str, Callable[..., Arrays]] = {
    "search": search,
    "baseline": baseline,
    "halving": halving,
    "sharing": sharing,
    "rank": rank,
    "bilevel search": command_search,
    "bilevel baseline": command_baseline,
}


def run(job: str, folder: Path, output: Path, limit: int | None = None, **options: Any) -> None:
    """In a process of its own: the job's arrays, or what it raised, into ``output``.

    ``limit``: bytes that a file may have, as on a disk that is full.
    """
    report: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if limit is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            report["arrays"] = JOBS[job](folder, **options)
        except Exception as error:
            from benchmarks.reliability.case import not_a_sentence, said

            names = dict.fromkeys(("checkpoint", "journal", "file", "out", "resume", "folder"))
            report["error"], report["raw"] = said(error), not_a_sentence(error, names)
            if isinstance(error, CommandRefused):
                lines = str(error).splitlines()
                is_sentence = len(lines) == 1 and lines[0].startswith("bilevel: ")
                report["raw"] = "" if is_sentence else f"not one sentence: {said(error)}"
            report["kept"] = hasattr(error, "result")
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    report["warnings"] = [str(w.message)[:200] for w in told]
    beside = output.with_suffix(".part")
    np.save(beside.with_suffix(".part.npy"), np.array([report], dtype=object), allow_pickle=True)
    os.replace(beside.with_suffix(".part.npy"), output)
