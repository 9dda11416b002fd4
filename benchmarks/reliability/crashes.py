"""Kills at random moments, bit flips, a full disk, two writers: what a resumed run gives then.

Every job (:mod:`reliability.victims`) runs in a process of its own, forked from one that has
imported everything and started nothing. The truth is the same job, left alone.

=========  =================================================================================
attack     right
=========  =================================================================================
kills      after up to three SIGKILLs, the last run gives every number bit for bit
flips      the same, though a bit of the record was flipped; or a sentence that refuses it
disks      the disk is full: the same result; or a sentence, with the result so far in the
           exception. With room again, resuming gives the same numbers
writers    a second process on the same folder is refused in a sentence; the first ends right
=========  =================================================================================
"""

import functools
import multiprocessing
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.reliability import victims
from benchmarks.reliability.case import Outcome

_PATIENCE = 900  # seconds for one run of a job, on a machine that does other things too
_JOBS = ("search", "baseline", "halving", "sharing", "rank", "bilevel search", "bilevel baseline")
_OFTEN = (0.35, 0.15, 0.1, 0.1, 0.14, 0.1, 0.06)  # commands take longest


@functools.cache
def _forks():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["reliability.victims", "bilevel", "bilevel.cli", "optax"])
    return context


def _start(job: str, folder: Path, output: Path, **options: Any):
    arguments = (job, folder, output)
    process = _forks().Process(target=victims.run, args=arguments, kwargs=options, daemon=True)
    process.start()
    return process


def _report(process, output: Path) -> dict[str, Any]:
    """What a job came to; a process that died without a word says so."""
    process.join(_PATIENCE)
    if process.exitcode is None:
        process.kill()
        process.join()
        return {"error": f"not done after {_PATIENCE} s", "raw": "a hang"}
    if not output.exists():
        return {"error": f"died with status {process.exitcode}", "raw": "died without a word"}
    report = np.load(output, allow_pickle=True)[0]  # of our own writing
    output.unlink()
    return report


@functools.cache
def _truth(job: str) -> tuple[dict[str, np.ndarray], float]:
    """The job left alone, and how long its process took."""
    with tempfile.TemporaryDirectory() as place:
        began = time.monotonic()
        output = Path(place) / "truth.npy"
        report = _report(_start(job, Path(place) / "run", output), output)
        if "arrays" not in report:
            raise RuntimeError(f"{job} left alone: {report['error']}")
        return report["arrays"], time.monotonic() - began


def _differs(arrays: dict[str, np.ndarray], truth: dict[str, np.ndarray]) -> str:
    if arrays.keys() != truth.keys():
        return f"other arrays: {sorted(arrays.keys() ^ truth.keys())}"
    for name, expected in truth.items():
        array = arrays[name]
        if array.shape != expected.shape or array.tobytes() != expected.tobytes():
            return f"{name}: another result than left alone"
    return ""


def _judged(report: dict[str, Any], job: str, attack: str, *, refusal: bool) -> Outcome:
    if "arrays" in report:
        reason = _differs(report["arrays"], _truth(job)[0])
        return Outcome("wrong" if reason else "right", attack, reason)
    if report["raw"]:
        return Outcome("raw", attack, report["raw"])
    return Outcome("refused" if refusal else "wrong", attack, report["error"])


def kills(seed: int, number: int, job: str | None = None) -> Outcome:
    """SIGKILL at random moments, then to the end."""
    rng = np.random.default_rng([seed, 4, number])
    job = job or str(rng.choice(_JOBS, p=_OFTEN))
    _, seconds = _truth(job)
    moments = rng.uniform(0.1, 1.05, int(rng.integers(1, 4))) * seconds
    with tempfile.TemporaryDirectory() as place:
        folder, output = Path(place) / "run", Path(place) / "output.npy"
        for moment in moments:
            process = _start(job, folder, output)
            process.join(moment)
            process.kill()
            process.join()
            output.unlink(missing_ok=True)
        report = _report(_start(job, folder, output), output)
    attack = f"{job}, killed after {', '.join(f'{m:.2f}' for m in moments)} s"
    return _judged(report, job, attack, refusal=False)


_HALFWAY = {"search": {"steps": 12}, "bilevel search": {"steps": 2}}


@functools.cache
def _interrupted(job: str) -> Path:
    """A folder with the record of a job not quite done; the last lines of a journal are cut."""
    place = Path(tempfile.mkdtemp())
    output = place / "output.npy"
    report = _report(_start(job, place / "run", output, **_HALFWAY.get(job, {})), output)
    if "arrays" not in report:
        raise RuntimeError(f"{job} left alone: {report['error']}")
    for journal in (place / "run").glob("*.jsonl"):
        lines = journal.read_bytes().splitlines(keepends=True)
        journal.write_bytes(b"".join(lines[: len(lines) // 2 + 1]))
    for finished in ("arrays.npz", "result.json", "search.png", "baseline.png"):
        (place / "run" / finished).unlink(missing_ok=True)
    return place / "run"


def flipped(folder: Path, rng: np.random.Generator) -> str:
    """Flip one bit of one file; which it was."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.stat().st_size)
    file = files[rng.integers(len(files))]
    content = bytearray(file.read_bytes())
    bit = int(rng.integers(8 * len(content)))
    content[bit // 8] ^= 1 << (bit % 8)
    file.write_bytes(content)
    return f"bit {bit} of {file.relative_to(folder)}"


def flips(seed: int, number: int, job: str | None = None) -> Outcome:
    """One bit of one file of a record, then on from there."""
    rng = np.random.default_rng([seed, 5, number])
    job = job or str(
        rng.choice(
            ["search", "baseline", "sharing", "rank", "bilevel search"], p=[0.4, 0.2, 0.1, 0.2, 0.1]
        )
    )
    with tempfile.TemporaryDirectory() as place:
        folder, output = Path(place) / "run", Path(place) / "output.npy"
        shutil.copytree(_interrupted(job), folder)
        attack = f"{job}, {flipped(folder, rng)}"
        return _judged(_report(_start(job, folder, output), output), job, attack, refusal=True)


def disks(seed: int, number: int) -> Outcome:
    """No file may pass a random size, then all may."""
    rng = np.random.default_rng([seed, 6, number])
    job = str(rng.choice(["search", "baseline", "sharing", "rank"], p=[0.5, 0.2, 0.1, 0.2]))
    limit = int(10 ** rng.uniform(0, 4.3))
    attack = f"{job}, no file above {limit} bytes"
    with tempfile.TemporaryDirectory() as place:
        folder, output = Path(place) / "run", Path(place) / "output.npy"
        report = _report(_start(job, folder, output, limit=limit), output)
        if "arrays" not in report:
            if report["raw"] and not report["error"].startswith("OSError"):
                return Outcome("raw", attack, report["raw"])
            if not report["kept"]:
                return Outcome("wrong", attack, f"what was in memory is lost: {report['error']}")
        elif reason := _differs(report["arrays"], _truth(job)[0]):
            return Outcome("wrong", attack, reason)
        report = _report(_start(job, folder, output), output)
        return _judged(report, job, f"{attack}, then room again", refusal=False)


def writers(seed: int, number: int) -> Outcome:
    """Two processes on one folder, the second a random moment after the first."""
    rng = np.random.default_rng([seed, 7, number])
    job = str(rng.choice(["search", "baseline", "rank"], p=[0.6, 0.2, 0.2]))
    _, seconds = _truth(job)
    moment = float(rng.uniform(0, 0.6) * seconds)
    attack = f"{job}, a second one after {moment:.2f} s"
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        outputs = [Path(place) / f"{i}.npy" for i in range(2)]
        processes = [_start(job, folder, outputs[0])]
        time.sleep(moment)
        processes.append(_start(job, folder, outputs[1]))
        reports = [_report(*pair) for pair in zip(processes, outputs, strict=True)]
    verdicts = [_judged(r, job, attack, refusal=True) for r in reports]
    worst = [v for v in verdicts if v.verdict in ("wrong", "raw")]
    if worst:
        return worst[0]
    if all(v.verdict == "refused" for v in verdicts):
        return Outcome("wrong", attack, "both were refused")
    return next((v for v in verdicts if v.verdict == "refused"), verdicts[0])
