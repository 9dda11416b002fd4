"""Jobs for processes that are killed, run out of disk, or share a folder.

Each job is ``job(folder) -> arrays``. It records in ``folder``, resumes from the record there, and
returns all its results, which are compared bit for bit.
"""

import contextlib
import functools
import importlib
import io
import os
import re
import resource
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilevel
import ntk
from bilevel import baselines
from bilevel.contracts import Evaluation, Shared

Arrays = dict[str, np.ndarray]

_OURS = tuple(str(Path(package.__file__).parent) for package in (bilevel, ntk))
_REFUSALS = ValueError, TypeError, FloatingPointError, FileNotFoundError


class Outcome(NamedTuple):
    """Outcome of an attack: ``verdict`` is "right", "refused", "wrong" or "raw"."""

    verdict: str
    attack: str
    detail: str = ""


def not_a_message(error: BaseException) -> str:
    """Return the reason why an exception is not one message that names an argument, or ""."""
    if isinstance(error, CommandRefused):
        lines = str(error).splitlines()
        one = len(lines) == 1 and lines[0].startswith("bilevel: ")
        return "" if one else f"not one message: {short(error)}"
    if not isinstance(error, _REFUSALS):
        return f"not an exception that refuses: {short(error)}"
    if not traceback.extract_tb(error.__traceback__)[-1].filename.startswith(_OURS):
        return f"raised by another library: {short(error)}"
    if len(str(error)) > 400 or "\n" in str(error).strip():
        return f"not one message: {short(error)}"
    # "argument: expected", or the name of the record of a run
    names = r'^[\w\[\]"., ]{1,40}: expected|\b(checkpoint|journal|file|out|resume|folder)\b'
    return "" if re.search(names, str(error)) else f"names no argument: {short(error)}"


def short(error: BaseException) -> str:
    """Format an exception in one short line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def search(folder: Path, steps: int = 25) -> Arrays:
    """Search with momentum, random batches and a checkpoint every few steps.

    The steps take milliseconds, and a checkpoint follows the one before after 20 times the seconds
    of writing it. So every step waits.
    """
    # The interval between checkpoints is not an option of a search.
    importlib.import_module("bilevel.outer_loop.search")._SAVE_SECONDS = 0.0
    problem = bilevel.Problem(
        lambda w, alpha, batch: 0.5 * jnp.sum((batch @ w - alpha[0]) ** 2) + jnp.sum(alpha * w**2),
        lambda w, alpha, batch: 0.5 * jnp.sum((batch @ w - 1) ** 2),
    )
    data = jnp.asarray(np.random.default_rng(0).normal(size=(20, 3)), jnp.float32)
    result = bilevel.search(
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
        callback=lambda result: time.sleep(0.04),
        every=1,
        chunk=1,
        progress=False,
    )
    leaves = jax.tree.leaves((result.alpha, result.w, result.history, result.state))
    return {str(i): np.asarray(x) for i, x in enumerate(leaves)}


def baseline(folder: Path, method: str = "hyperband") -> Arrays:
    """Run a baseline with a journal. Errors depend on the solve's key."""

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


halving = functools.partial(baseline, method="successive_halving")
sharing = functools.partial(baseline, method="weight_sharing")


def rank(folder: Path) -> Arrays:
    """Compute and record train-free scores of ten more networks in each call."""
    from bilevel.spaces import nasbench201
    from bilevel.spaces.nasbench201 import scoring

    networks = nasbench201.all_networks(cells=1, channels=2)
    w = networks.init(jax.random.key(0), (4, 4, 1))
    x = jax.random.normal(jax.random.key(1), (4, 4, 4, 1))
    cells = nasbench201.genotypes()[-30:]
    batch = (x, jnp.arange(4))
    folder.mkdir(parents=True, exist_ok=True)
    for count in (10, 20, 30):
        given = ["l2_norm"], networks, w, cells[:count], batch
        scored = scoring.score_networks(*given, progress=False, file=folder / "scores.npz")
    return scored.values


def command_search(folder: Path, steps: int = 4) -> Arrays:
    """Run a small ``bilevel search``. It records after its first chunk and at its end."""
    small = f"--activations relu tanh --steps {steps} --inner-steps 3 --width 16"
    return _command(f"search {small} --train 20 --valid 20 --test 40", folder)


def command_baseline(folder: Path) -> Arrays:
    """Run a small ``bilevel baseline``."""
    small = "--method fast-weight-sharing --configs 6 --dimension 32 --train 60 --valid 40"
    return _command(f"baseline {small}", folder)


class CommandRefused(Exception):
    """The message of a command on its standard error."""


def _command(line: str, folder: Path) -> Arrays:
    from bilevel.cli import main

    resume = ("--resume",) if folder.exists() else ()
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        status = main([*line.split(), "--progress", "False", "--out", str(folder), *resume])
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


def run(job: str, folder: Path, output: Path, programs: Path, limit=None, **options: Any) -> None:
    """Write a job's arrays, or its exception, to ``output``: the whole work of a process.

    Compiled programs are read from ``programs``; the first run makes this folder. ``limit`` is the
    maximum number of bytes of a file, as on a full disk.
    """
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9 * programs.exists())
    jax.config.update("jax_compilation_cache_dir", str(programs))
    report: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if limit is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            report["arrays"] = JOBS[job](folder, **options)
        except Exception as error:
            report["error"], report["raw"] = short(error), not_a_message(error)
            report["kept"] = hasattr(error, "result")
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    beside = output.with_suffix(".part.npy")
    np.save(beside, np.array([report], dtype=object), allow_pickle=True)
    os.replace(beside, output)
