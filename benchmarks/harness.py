"""Shared code of the benchmarks: command line, JSON results, times, memory, tables, figures.

A benchmark is a script with a question (its docstring), a measurement that returns rows (dicts) and
``report(rows)``, which formats them as Markdown. The results are lines of JSON in
``results/NAME.jsonl``. The first line is usually the :func:`environment`. Every script takes
``--smoke`` (only shows that the script runs), ``--quick`` (small, without a results file) and
``--table`` (prints the results files as Markdown).

JAX is imported only when needed, because some scripts measure the memory of a process.
"""

import argparse
import contextlib
import ctypes
import datetime
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

Row = dict[str, Any]

# ----------------------------------------------------------------------------- the command line


def command_line(
    file: str,
    doc: str,
    report: Callable[[list[Row]], str],
    *,
    full: bool = False,
    work: Callable[..., Iterable[Row]] | None = None,
    peers: Sequence[str] = (),
    **flags: dict[str, Any],
) -> argparse.Namespace:
    """Parse the flags of a run. ``--table`` and ``--worker`` are answered here and end the process.

    ``file``, ``doc`` and ``report`` are those of the script; ``full``: whether it has a ``--full``;
    ``work``: the work of its processes (:func:`in_own_process`); ``flags``: its own flags, as
    options of ``add_argument``. ``peers`` are the distributions that it compares with: all by
    default and in the full size, none if small; ``--peers`` names others.

    In the result, ``size`` is "smoke", "quick", "default" or "full"; ``small`` is true for the
    first two. ``results`` is the file for the rows; without ``--results`` it is None for small
    sizes and if a peer is missing. ``peers`` lists the requested peers, which are all installed. A
    missing one ends the process with status 1, flags that contradict with status 2.
    """
    name, parser = Path(file).stem, argparse.ArgumentParser(description=doc.splitlines()[0])
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--smoke", action="store_true", help="only shows that the script runs: 10 s")
    sizes.add_argument("--quick", action="store_true", help="small; without a results file")
    if full:
        sizes.add_argument("--full", action="store_true", help="published sizes; own results file")
    sizes.add_argument("--table", action="store_true", help="print the results files as Markdown")
    parser.add_argument("--results", "--out", type=Path, help="the results file, if another one")
    if peers:
        text = "the peers to compare with, none if no name follows; by default all, none if small"
        parser.add_argument("--peers", nargs="*", choices=peers, help=text)
    for flag, options in flags.items():
        parser.add_argument(f"--{flag.replace('_', '-')}", **options)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    parsed.error = parser.error  # for flags that contradict each other
    parsed.defaults = {flag: parser.get_default(flag) for flag in flags}
    if parsed.worker:
        for row in work(*json.loads(parsed.worker)):
            print(json.dumps(row), flush=True)
        sys.exit()
    if parsed.table:
        paths = [parsed.results] if parsed.results else _results_of(name)
        if not any(path.is_file() for path in paths):
            sys.exit(f"--table: expected results of {name}.py, got none.")
        for path in paths:
            print(report(read(path)), end="\n\n")
        sys.exit()
    if parsed.smoke:
        compile_quickly()
    parsed.small = parsed.smoke or parsed.quick
    parsed.size = "full" if full and parsed.full else "default"
    parsed.size = "smoke" if parsed.smoke else "quick" if parsed.quick else parsed.size
    own = not (parsed.results or parsed.small)
    if own:
        parsed.results = RESULTS / f"{name}{'_full' * (parsed.size == 'full')}.jsonl"
    if peers:
        if parsed.peers is None:
            parsed.peers = [] if parsed.small else list(peers)
        require(*parsed.peers)
        if own and {*parsed.peers} != {*peers}:
            parsed.results = None
    return parsed


def _results_of(name: str) -> list[Path]:
    """Return the results files of a script, without those of scripts with longer names."""
    paths = sorted(RESULTS.glob(f"{name}*.jsonl"))
    return [path for path in paths if script_of(path.stem).stem == name]


def script_of(results: str) -> Path:
    """Return the benchmark that wrote the results file with this stem."""
    scripts = Path(__file__).parent.glob("*/*.py")
    starts = [path for path in scripts if f"{results}_".startswith(f"{path.stem}_")]
    return max(starts, key=lambda path: len(path.stem))


def compile_quickly() -> None:
    """Let XLA compile quickly instead of well, as in conftest.py, here and in child processes.

    It has an effect only before JAX's first computation. XLA aborts on a flag that it does not
    know, so other versions than the tested ones compile as usual.
    """
    version = importlib.metadata.version("jaxlib")
    if "XLA_FLAGS" not in os.environ and version.startswith(("0.10.", "0.11.", "0.12.")):
        flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
        flags += " --xla_cpu_use_fusion_emitters=false" * version.startswith("0.10.")
        os.environ["XLA_FLAGS"] = flags


def xla_flags(more: str) -> str:
    """Return XLA's flags of this process and ``more``; ``--smoke`` sets some of them."""
    return f"{os.environ.get('XLA_FLAGS', '')} {more}".strip()


def unused(flags: argparse.Namespace, *names: str) -> None:
    """Exit with status 2 if one of these flags was given, which the size of this run ignores."""
    for name in names:
        if getattr(flags, name) != flags.defaults[name]:
            flag = f"--{name.replace('_', '-')}"
            flags.error(f"{flag}: expected the default size, got --{flags.size}.")


def require(*peers: str) -> None:
    """Exit with status 1 if one of these distributions is not installed."""
    missing = [name for name in peers if name.lower() not in installed()]
    if missing:
        sys.exit(
            f"peers: expected {', '.join(missing)} to be installed (dependency group `peers`); "
            "`--peers` with other names, or with none, compares with fewer."
        )


def installed() -> dict[str, str]:
    """Return versions by the lower-case names of distributions."""
    return {d.name.lower(): d.version for d in importlib.metadata.distributions()}


def finish(
    rows: list[Row],
    path: Path | None,
    report: Callable[[list[Row]], str],
    picture: Callable[[list[Row], Path], None] | None = None,
    *,
    write_rows: bool = True,
) -> None:
    """Write the rows, print the report, draw the figure; then exit with status 1 if a row failed.

    Nothing is written without ``path``. ``write_rows=False``: the script has appended its rows.
    """
    if path and write_rows:
        write(path, rows)
    check_rows(rows)
    try:
        print(report(rows))
    except Exception:
        check_failed(rows)  # the cause, if a row failed
        raise
    if path and picture and importlib.util.find_spec("matplotlib"):
        picture(rows, path.with_suffix(".png"))
    check_failed(rows)


def check_rows(rows: list[Row]) -> None:
    """Exit with status 1 if nothing was measured."""
    if all(row.get("part") == "environment" for row in rows):
        sys.exit("rows: expected at least one measurement, got none.")


def check_failed(rows: Iterable[Row]) -> None:
    """Exit with status 1 and one message if a row failed; its reason is under "failed"."""
    failed = [row for row in rows if row.get("failed")]
    if failed:
        reason = failed[0]["failed"]
        words = [v for v in failed[0].values() if isinstance(v, str | int) and v != reason]
        label = ", ".join(map(str, words)) or "unnamed"
        sys.exit(f"failed: {len(failed)} of the rows; the first, {label}: {reason}")


# ----------------------------------------------------------------------------- results


def environment(*packages: str, **more: Any) -> Row:
    """Return the first row: device, versions and date. A ``device`` in ``more`` has priority."""
    names = "bilevel", "jax", "jaxlib", "numpy", *packages
    present = installed()
    versions = {name: present[name] for name in names if name in present}
    row = {"part": "environment", "date": datetime.date.today().isoformat()}
    row |= {"device": more["device"] if "device" in more else device()}
    return row | more | {"versions": {"python": platform.python_version()} | versions}


def device(kind: str | None = None) -> str:
    """Return the name of JAX's device; for a CPU its model and the number of cores."""
    if kind is None:
        import jax

        kind = jax.devices()[0].device_kind
    cores = len(os.sched_getaffinity(0))
    return f"{processor()}, {cores} core{'s' * (cores > 1)}" if kind == "cpu" else kind


def processor() -> str:
    return Path("/proc/cpuinfo").read_text().split("model name\t: ")[1].splitlines()[0]


def named(path: Path | None, *parts: str) -> Path | None:
    """Add ``parts`` to the name of the script's own results file. Other paths stay unchanged."""
    own = path is not None and path.parent == RESULTS
    return path.with_stem("_".join([path.stem, *parts])) if own else path


def read(path: Path | None) -> list[Row]:
    """Return the rows of a file, or no rows if it does not exist. Skip a truncated line."""
    rows = []
    for line in path.read_text().splitlines() if path and path.is_file() else ():
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def write(path: Path, rows: Iterable[Row]) -> None:
    """Replace the rows of a file. The first one gets the commit, unless it has one."""
    path.unlink(missing_ok=True)
    append(path, *rows)


def append(path: Path | None, *rows: Row) -> None:
    """Append each row when it is measured. The first row of a file gets the commit of its code."""
    if path and rows:
        path.parent.mkdir(exist_ok=True)
        first = {} if path.is_file() else {"commit": commit()}
        with path.open("a") as file:  # rows that are written again keep their commit
            file.writelines(json.dumps(row) + "\n" for row in (first | rows[0], *rows[1:]))


def commit() -> str | None:
    """Return the commit of the code, or None outside a clone of the repository."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    run = subprocess.run(command, cwd=RESULTS.parent, capture_output=True, text=True)
    return run.stdout.strip() or None


def keep(path: Path | None, rows: list[Row], *new: Row) -> None:
    """Add new rows to the rows of a run and to its file."""
    rows += new
    append(path, *new)


def begun(path: Path | None, *packages: str, each_device: bool = False, **more: Any) -> list[Row]:
    """Return the rows of a file to be continued.

    A new file starts with the :func:`environment`. With ``each_device`` a new device adds its own.
    """
    rows = read(path)
    if not rows or each_device:
        here = environment(*packages, **more)
        if not where(rows, part="environment", device=here["device"]):
            keep(path, rows, here)
    return rows


def measure_missing(
    path: Path | None,
    rows: list[Row],
    tasks: Iterable[tuple[Row, Callable[[], Row | list[Row]]]],
    show: Callable[[Row], Any] | None = None,
) -> list[Row]:
    """Measure the tasks without a row, and return the rows of all tasks.

    A task is the keys of its row, or of its rows, and a measurement. A failed one is not added to
    the file, so a later run repeats it.
    """
    of_tasks = []
    for identity, measure in tasks:
        if not (of_task := where(rows, **identity)):
            new = measure()
            of_task = [identity | row for row in ([new] if isinstance(new, dict) else new)]
            keep(None if "failed" in of_task[0] else path, rows, *of_task)
            if show:
                print(*map(show, of_task), sep="\n", flush=True)
        of_tasks += of_task
    return of_tasks


def cases(
    path: Path | None, names: Sequence[str], tasks: Iterable[tuple[tuple, Callable[[], Row]]]
) -> list[Row]:
    """Return rounded rows of tasks: values of ``names`` and a measurement, or the file's rows."""
    named = ((dict(zip(names, key, strict=True)), measure) for key, measure in tasks)
    of_tasks = ((key, lambda of=measure: rounded(of())) for key, measure in named)
    return measure_missing(path, read(path), of_tasks)


def rounded(row: Row) -> Row:
    """Round to five digits, because the repository contains thousands of rows."""
    return {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in row.items()}


def same_sizes(rows: list[Row], sizes: Row, *, but: Iterable[str] = ()) -> bool:
    """Return whether the first row is of a run of these sizes, except for those in ``but``."""
    then, now = (json.loads(json.dumps(s)) for s in (rows[0]["sizes"], sizes))
    return all(then.get(name) == now.get(name) for name in {*then, *now} - {*but})


def where(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """Return the rows that have all these values."""
    return [row for row in rows if wanted.items() <= row.items()]


def measured(rows: Iterable[Row], **wanted: Any) -> Row | None:
    """Return the first row with these values that neither failed nor was skipped, or None."""
    return next((r for r in where(rows, **wanted) if not {"failed", "skipped"} & r.keys()), None)


# ----------------------------------------------------------------------------- times, memory


def compiled(fn: Callable, *args: Any) -> tuple[Callable, float]:
    """Compile ``fn``, jitted or not, for these arguments; return it and the seconds this took."""
    import jax

    start = time.perf_counter()
    program = (fn if hasattr(fn, "lower") else jax.jit(fn)).lower(*args).compile()
    return program, time.perf_counter() - start


def seconds(call: Callable[[], Any], rounds: int) -> list[float]:
    """Return the seconds of each call, after a warm-up call."""
    import jax

    jax.block_until_ready(call())
    return in_turns({"call": call}, (), rounds, time.perf_counter)["call"]


def in_turns(
    calls: dict[str, Callable[..., Any]],
    args: tuple,
    rounds: int,
    clock: Callable[[], float] = time.process_time,
    *,
    warm: bool = False,
) -> dict[str, list[float]]:
    """Return the seconds of ``call(*args)`` by name. They take turns; ``warm`` calls twice."""
    import jax

    durations: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            if warm:
                jax.block_until_ready(call(*args))
            start = clock()
            jax.block_until_ready(call(*args))
            durations[name].append(clock() - start)
    return durations


def device_peak() -> int | None:
    """Return the peak bytes in use on a device that counts them. CPUs do not."""
    import jax

    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def resident_peak() -> float:
    """Return the peak memory of this process in MB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6


def forget_peak() -> float:
    """Return the compiler's memory to the system and reset the peak."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident_peak()


def in_own_process(file: str, *request: Any, one_core: bool = False, **variables: str) -> list[Row]:
    """Return the rows of a script's ``work(*request)``, run in a separate process.

    If it fails, as it may from lack of memory, return one row with the reason under "failed".
    """
    variables |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "3"}
    if one_core:
        threads = ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"]
        variables |= {"XLA_FLAGS": xla_flags(ONE_THREAD)} | dict.fromkeys(threads, "1")

    def on_one_core():
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

    done = subprocess.run(
        [sys.executable, "-W", "ignore", file, "--worker", json.dumps(request)],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        preexec_fn=on_one_core if one_core else None,
    )
    if done.returncode:
        sys.stderr.write(done.stderr)
        lines = done.stderr.strip().splitlines() or [f"ended by signal {-done.returncode}"]
        return [{"failed": lines[-1][:200]}]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


# ----------------------------------------------------------------------------- the report


def table(head: Sequence[Any], lines: Iterable[Iterable[Any]]) -> str:
    """Return a Markdown table. Without lines the process ends with status 1 and a message."""
    lines = list(lines)
    if not lines:
        sys.exit(f"table: expected rows under {' | '.join(map(str, head))}, got none.")
    first, *others = [f"| {' | '.join(map(str, cells))} |" for cells in (head, *lines)]
    return "\n".join([first, "|---" * len(head) + "|", *others])


def table_of(rows: Sequence[Row]) -> str:
    """Return a table with all values of the rows, which have the same names."""
    lines = ([f"{v:.4g}" if isinstance(v, float) else v for v in row.values()] for row in rows)
    return table(list(rows[0]), lines)


def standard_error(x) -> Any:
    """Return the standard error of the mean over the first axis."""
    return np.std(x, axis=0, ddof=1) / np.sqrt(len(x))


def spread(x, form: str = ".2f", scale: float = 1) -> str:
    """Format the mean and the standard error."""
    x = scale * np.asarray(x, float)
    return f"{np.mean(x):{form}} ± {standard_error(x):{form}}"


def plus_minus(mean: float, error: float) -> str:
    """Format a mean and its error, with two digits of the error."""
    digits = max(0, 1 - math.floor(math.log10(error))) if error else 3
    return f"{mean:.{digits}f} ± {error:.{digits}f}"


def figure(*grid: int, **options: Any) -> Callable:
    """Turn ``draw(rows, axes)`` into ``picture(rows, path)`` for a grid of axes."""

    def decorate(draw):
        def saved(rows: list[Row], path: Path) -> None:
            with picture(path, *grid, **options) as (_, axes):
                draw(rows, axes)

        return saved

    return decorate


@contextlib.contextmanager
def picture(path: Path, *grid: int, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Yield ``plt.subplots(*grid, **options)`` to draw in, and save the figure at the end."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from bilevel import plots

    with plots.style():
        figure, axes = plt.subplots(*grid, layout="constrained", **options)
        figure.get_layout_engine().set(hspace=0.08)  # an axis label is not near the next title
        yield figure, axes
        figure.savefig(path, dpi=110)
        plt.close(figure)
