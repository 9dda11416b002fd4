"""Kills at random moments, bit flips, full disks, two writers: are results lost or changed?

Every job (``victims.py``) runs in its own process, forked from one that has imported everything
and computed nothing. The reference is the same job without an attack.

=========  =================================================================================
attack     expected
=========  =================================================================================
kills      after up to three SIGKILLs, the last run returns the reference bit for bit
flips      the same, with one bit of a record flipped; or one message that refuses the record
disks      the disk is full: the reference; or one message, with the result so far in the
           exception. With room again, resuming returns the reference
writers    a second process on the same folder gets one message; the first returns the reference
=========  =================================================================================

    python benchmarks/reliability/crashes.py          # all attacks: hours; the same line resumes
    python benchmarks/reliability/crashes.py --only kills
    python benchmarks/reliability/crashes.py --only kills --case 17  # one attack again

The seed, the attack's name and its number determine an attack. The exit status is 1 if any attack
failed.
"""

import atexit
import contextlib
import functools
import multiprocessing
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.reliability import victims
from benchmarks.reliability.victims import Outcome

MEASURES = ("bilevel/runs", "bilevel/outer_loop/search.py")

_PATIENCE = 900  # seconds for one run of a job, on a machine that also does other work
_JOBS = ("search", "baseline", "halving", "sharing", "rank", "bilevel search", "bilevel baseline")
_OFTEN = (0.5, 0.2, 0.1, 0.1, 0.06, 0.02, 0.02)  # the last ones take longest


@functools.cache
def _forks():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["benchmarks.reliability.victims", "bilevel", "bilevel.cli", "optax"]
    )
    return context


@functools.cache
def _temporary(name: str) -> Path:
    """Return a folder that exists until this process ends."""
    folder = tempfile.TemporaryDirectory(prefix=name)
    atexit.register(folder.cleanup)
    return Path(folder.name)


def _start(job: str, folder: Path, output: Path, **options: Any):
    arguments = job, folder, output, _temporary("programs") / job
    process = _forks().Process(target=victims.run, args=arguments, kwargs=options, daemon=True)
    process.start()
    return process


@contextlib.contextmanager
def _place():
    """Yield the folder of a run and the file of its output, in a temporary folder."""
    with tempfile.TemporaryDirectory() as place:
        yield Path(place) / "run", Path(place) / "output.npy"


def _report(process, output: Path) -> dict[str, Any]:
    """Wait for a job's process and return its report."""
    process.join(_PATIENCE)
    if process.exitcode is None:
        process.kill()
        process.join()
        return {"error": f"not done after {_PATIENCE} s", "raw": "a hang"}
    if not output.exists():
        return {"error": f"died with status {process.exitcode}", "raw": "died without a message"}
    report = np.load(output, allow_pickle=True)[0]  # written by `victims.run`
    output.unlink()
    return report


@functools.cache
def _truth(job: str) -> tuple[dict[str, np.ndarray], float]:
    """Return the job's results without an attack, and its seconds. It compiles for all runs."""
    for _ in range(2):
        with _place() as (folder, output):
            began = time.monotonic()
            report = _report(_start(job, folder, output), output)
            seconds = time.monotonic() - began
        if "arrays" not in report:
            raise RuntimeError(f"{job} without an attack: {report['error']}")
    return report["arrays"], seconds


def _differs(arrays: dict[str, np.ndarray], truth: dict[str, np.ndarray]) -> str:
    if arrays.keys() != truth.keys():
        return f"other arrays: {sorted(arrays.keys() ^ truth.keys())}"
    for name, expected in truth.items():
        array = arrays[name]
        if array.shape != expected.shape or array.tobytes() != expected.tobytes():
            return f"{name}: another result than without an attack"
    return ""


def _judged(report: dict[str, Any], job: str, attack: str, *, refusal: bool) -> Outcome:
    if "arrays" in report:
        reason = _differs(report["arrays"], _truth(job)[0])
        return Outcome("wrong" if reason else "right", attack, reason)
    if report["raw"]:
        return Outcome("raw", attack, report["raw"])
    return Outcome("refused" if refusal else "wrong", attack, report["error"])


def kills(seed: int, number: int, job: str | None = None) -> Outcome:
    """Send SIGKILL at random moments, then let the job end."""
    rng = np.random.default_rng([seed, 4, number])
    job = job or str(rng.choice(_JOBS, p=_OFTEN))
    _, seconds = _truth(job)
    moments = rng.uniform(0.1, 1.05, int(rng.integers(1, 4))) * seconds
    with _place() as (folder, output):
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
    """Return a folder with the record of an unfinished job, or half of the lines of a journal."""
    _truth(job)
    place = _temporary(job)
    output = place / "output.npy"
    report = _report(_start(job, place / "run", output, **_HALFWAY.get(job, {})), output)
    if "arrays" not in report:
        raise RuntimeError(f"{job} without an attack: {report['error']}")
    for journal in (place / "run").glob("*.jsonl"):
        lines = journal.read_bytes().splitlines(keepends=True)
        journal.write_bytes(b"".join(lines[: len(lines) // 2 + 1]))
    for finished in ("arrays.npz", "result.json", "search.png", "baseline.png"):
        (place / "run" / finished).unlink(missing_ok=True)
    return place / "run"


def flipped(folder: Path, rng: np.random.Generator) -> str:
    """Flip one bit of one file, and return its place."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.stat().st_size)
    file = files[rng.integers(len(files))]
    content = bytearray(file.read_bytes())
    bit = int(rng.integers(8 * len(content)))
    content[bit // 8] ^= 1 << (bit % 8)
    file.write_bytes(content)
    return f"bit {bit} of {file.relative_to(folder)}"


def flips(seed: int, number: int, job: str | None = None) -> Outcome:
    """Flip one bit of one file of a record, then resume."""
    rng = np.random.default_rng([seed, 5, number])
    jobs = "search", "baseline", "sharing", "rank", "bilevel search"
    job = job or str(rng.choice(jobs, p=(0.4, 0.2, 0.1, 0.2, 0.1)))
    with _place() as (folder, output):
        shutil.copytree(_interrupted(job), folder)
        attack = f"{job}, {flipped(folder, rng)}"
        return _judged(_report(_start(job, folder, output), output), job, attack, refusal=True)


def disks(seed: int, number: int) -> Outcome:
    """Limit the size of files, then resume without a limit."""
    rng = np.random.default_rng([seed, 6, number])
    job = str(rng.choice(["search", "baseline", "sharing", "rank"], p=[0.5, 0.2, 0.1, 0.2]))
    limit = int(10 ** rng.uniform(0, 4.3))
    attack = f"{job}, no file above {limit} bytes"
    _truth(job)
    with _place() as (folder, output):
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
    """Start a second process on the same folder at a random moment."""
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


ATTACKS = {  # the function, and the number of attacks at --smoke, at --quick and by default
    "kills": (kills, 0, 2, 200),
    "flips": (flips, 0, 2, 300),
    "disks": (disks, 0, 2, 60),
    "writers": (writers, 1, 2, 40),
}
FAILURES = "wrong", "raw"


def report(rows: list[harness.Row]) -> str:
    """Report the counts of each attack, and the failures, as Markdown."""
    rows = [row for row in rows if "attack" in row]  # the first one is the environment
    last = {(row["seed"], row["attack"], row["number"]): row for row in rows}.values()
    counts = {name: Counter(r["verdict"] for r in last if r["attack"] == name) for name in ATTACKS}
    heads = "attack", "runs", "same result", "refused in one message", "wrong", "other exception"
    verdicts = "right", "refused", "wrong", "raw"
    counts = {name: count for name, count in counts.items() if count}
    table = [[name, n.total(), *(n[verdict] for verdict in verdicts)] for name, n in counts.items()]
    failed = [f"- {r['attack']} {r['number']}: {r['detail']}" for r in last if _failed(r)]
    return "\n".join([harness.table(heads, table), *failed])


def _failed(row: harness.Row) -> bool:
    return row["verdict"] in FAILURES


def attacked(name: str, seed: int, number: int) -> harness.Row:
    """Run one attack and return its outcome as a row of the results."""
    began = time.monotonic()
    verdict, attack, detail = ATTACKS[name][0](seed, number)
    row = {"attack": name, "seed": seed, "number": number, "verdict": verdict}
    row["seconds"] = round(time.monotonic() - began, 1)
    return row | ({"detail": f"{attack}: {detail}"} if verdict in FAILURES else {})


def main() -> int:
    """Run the attacks that the results file lacks."""
    flags = harness.command_line(
        __file__,
        __doc__,
        report,
        seed={"type": int, "default": 0},
        only={"choices": ATTACKS, "help": "one kind of attack"},
        case={"type": int, "help": "the number of one attack of --only"},
    )
    if flags.case is not None:
        if flags.only is None:
            flags.error("--case: expected --only with the kind of the attack, got none.")
        row = attacked(flags.only, flags.seed, flags.case)
        print(row)
        return int(_failed(row))
    rows = harness.where(harness.begun(flags.results, "optax"), seed=flags.seed)
    present = {(row["attack"], row["number"]) for row in rows}
    size = 1 + ("smoke", "quick", "default").index(flags.size)
    names = [flags.only] if flags.only else list(ATTACKS)
    planned = [(name, i) for name in names for i in range(ATTACKS[name][size])]
    for name, number in (attack for attack in planned if attack not in present):
        harness.keep(flags.results, rows, attacked(name, flags.seed, number))
        if _failed(rows[-1]):
            print(rows[-1], flush=True)
    print(report(rows))
    return int(any(map(_failed, rows)))


if __name__ == "__main__":
    sys.exit(main())
