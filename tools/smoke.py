"""Do the benchmarks run? Each script runs with ``--smoke`` in a separate process.

    python tools/smoke.py                        # by the commit: see below
    python tools/smoke.py --all                  # all scripts
    python tools/smoke.py kernels.py memory.py   # these

A script fails if it has no ``--smoke`` or if its exit status is not 0. It also fails after 120
seconds of wall time, or if it takes more than 40 seconds of CPU time. The exit status is 1 if one
script failed.

A commit selects the scripts of ``benchmarks/`` and ``tools/`` that it changed, and the scripts that
import a changed module of these folders. If it changed ``harness.py`` or this file, it selects all
scripts. In addition, the commit's hash selects a sixth of the other scripts, so six commits on
average run each script once. Without a repository, or in a clone without the previous commit, all
scripts are selected.
"""

import argparse
import ast
import concurrent.futures
import functools
import hashlib
import itertools
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDERS = "benchmarks", "tools"
# Seconds: limits of a script, and the mark "long". Machines differ by a factor of three: 9 CPU
# seconds on one are 27 on another.
WALL, CPU, LONG = 120.0, 40.0, 10.0
LAST = 15  # number of output lines shown of a failed script
PARTS = 6
EVERYTHING = "benchmarks/harness.py", "tools/smoke.py"  # changes of these select all scripts


class Ran(NamedTuple):
    """The outcome of a script."""

    script: str
    wall: float
    cpu: float
    failure: str  # "" if it passed
    lines: list[str]


# ----------------------------------------------------------------------------- which scripts


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def scripts() -> dict[str, Path]:
    """Return the scripts of ``benchmarks/`` and ``tools/`` by name, without this one."""
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return {path.name: path for path in paths if path != Path(__file__) and is_script(path)}


def is_script(path: Path) -> bool:
    """Return whether a file has statements under ``if __name__ == "__main__":``."""
    tests = [ast.unparse(node.test) for node in tree(path).body if isinstance(node, ast.If)]
    return "__name__ == '__main__'" in tests


def modules(path: Path) -> set[str]:
    """Return the files of ``benchmarks/`` and ``tools/`` that a file imports, itself included."""
    seen: set[str] = set()
    queue = [path]
    while queue:
        file = queue.pop()
        name = str(file.relative_to(ROOT))
        if name not in seen:
            seen.add(name)
            files = (ROOT / f"{module.replace('.', '/')}.py" for module in imported(file))
            queue += [file for file in files if file.is_file()]
    return seen


def imported(file: Path) -> set[str]:
    """Return the modules that a file can import, including imports inside functions."""
    names = set()
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def selected() -> tuple[list[str], str]:
    """Return the scripts that the commit selects, and the reason."""
    every = list(scripts())
    commit, changes = git("rev-parse", "HEAD"), git("diff", "--name-only", "HEAD~1", "--", *FOLDERS)
    if commit is None or changes is None:
        return every, "all scripts, as the commit before this one is not here"
    changed = set(changes.splitlines())
    if changed & {*EVERYTHING}:
        return every, f"all scripts, as {', '.join(sorted(changed & {*EVERYTHING}))} changed"
    touched = [name for name in every if modules(scripts()[name]) & changed]
    turn = int(commit.strip(), 16) % PARTS
    chosen = [name for name in every if name in touched or part(name) == turn]
    reason = f"{len(touched)} that the commit changed, and part {turn} of {PARTS} of the others"
    return chosen, reason


def part(name: str) -> int:
    """Return the part that a script belongs to."""
    return hashlib.sha256(name.encode()).digest()[0] % PARTS


def git(*arguments: str) -> str | None:
    """Return the output of a git command, or None if it fails or git is missing."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


# ----------------------------------------------------------------------------- running them


def run(name: str) -> Ran:
    """Run one script. Its process and all child processes end with it."""
    began = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(scripts()[name]), "--smoke"],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        usage, status = waited(process.pid, began + WALL)
        process.returncode = status  # `waited` has reaped it already
        output.seek(0)
        lines = output.read().decode(errors="replace").splitlines()
    wall, cpu = time.monotonic() - began, usage.ru_utime + usage.ru_stime
    failure = ""
    if status is None:
        failure = f"stopped after {WALL:.0f} s"
    elif status:
        failure = f"status {status}"
    elif cpu > CPU:
        failure = f"{cpu:.0f} s of CPU time, at most {CPU:.0f}"
    elif not lines:
        failure = "no output"
    return Ran(name, wall, cpu, failure, lines)


def waited(pid: int, end: float) -> tuple[resource.struct_rusage, int | None]:
    """Return the resources of a process and its children, and its status: None if it was killed."""
    while True:
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if ended:
            return usage, os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.killpg(pid, signal.SIGKILL)
            return os.wait4(pid, 0)[2], None
        time.sleep(0.05)


def report(all_ran: list[Ran]) -> str:
    """Return a line for each script, then the last lines of the failed scripts."""
    width = max(len(ran.script) for ran in all_ran)
    lines = [f"{'script':{width}}  wall, s  CPU, s"]
    for ran in all_ran:
        mark = f"FAILED: {ran.failure}" if ran.failure else "long" if ran.cpu > LONG else ""
        lines.append(f"{ran.script:{width}}  {ran.wall:7.1f}  {ran.cpu:6.1f}  {mark}".rstrip())
    for ran in all_ran:
        if ran.failure:
            lines += ["", f"{ran.script} --smoke: {ran.failure}"]
            lines += [f"    {line}" for line in ran.lines[-LAST:]]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="all scripts, whatever changed")
    parser.add_argument("--list", action="store_true", help="print what would run")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (2)")
    parser.add_argument("scripts", nargs="*", help="names of files; default: by the commit")
    flags = parser.parse_args()
    if flags.jobs < 1:
        parser.error(f"--jobs: expected at least 1, got {flags.jobs}.")
    if flags.all and flags.scripts:
        parser.error(f"--all: expected no names, got {len(flags.scripts)}.")
    unknown = sorted({*flags.scripts} - {*scripts()})
    if unknown:
        parser.error(f"scripts: expected scripts of benchmarks/ or tools/, got {unknown[0]}.")
    names, reason = (list(scripts()), "all scripts") if flags.all else selected()
    if flags.scripts:
        names, reason = flags.scripts, "as named"
    print(f"{len(names)} of {len(scripts())} scripts: {reason}.", flush=True)
    if flags.list:
        print("\n".join(names))
        return 0
    began = time.monotonic()
    # A thread's processes stay on its core. On shared cores their threads wait for each other.
    cores = itertools.cycle(sorted(os.sched_getaffinity(0)))
    with concurrent.futures.ThreadPoolExecutor(
        flags.jobs, initializer=lambda: os.sched_setaffinity(0, {next(cores)})
    ) as pool:
        all_ran = list(pool.map(run, names))
    print(report(all_ran))
    failed = sum(bool(ran.failure) for ran in all_ran)
    cpu = sum(ran.cpu for ran in all_ran)
    print(f"\n{failed} failed; {time.monotonic() - began:.0f} s, {cpu:.0f} s of CPU time.")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
