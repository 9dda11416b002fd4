"""Does neural-tangents pass its own tests as `ntk.neural_tangents()` imports it?

Each test file of a checkout of its repository (the tag v0.6.5 is the release) runs in a separate
process, against the installed package on today's JAX. The tests were written for the JAX of 2024.
Names that they import from JAX, and that JAX has removed, are put back. The tests are many and
slow. Each file's tests run in a fixed random order, for as long as `--seconds` allows. A test that
takes longer than two minutes does not count as run.

    python benchmarks/peers/neural_tangents_tests.py --checkout PATH    # half an hour of one core
    # one case each, a quarter
    python benchmarks/peers/neural_tangents_tests.py --checkout PATH --quick

`--cases` sets `NT_NUM_GENERATED_CASES` of the tests: how many cases are drawn from every grid of
parameters. Tests in `tests/experimental` need TensorFlow and are left out. An interrupted run goes
on with the first file that has no row.
"""

import collections
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import harness

MEASURES = ("ntk/compat",)

EACH = 120  # seconds for one test
VARIABLES = {
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    # Use the random numbers of 2024. Today a small array is a prefix of a larger one, so inputs
    # that the tests assume to be different are equal.
    "JAX_THREEFRY_PARTITIONABLE": "0",
}
OUTCOMES = "skipped", "passed", "too long", "failed"  # the last one counts for a test's parts


class Recorder:
    """A plugin of pytest: a sample of the tests, and the outcome of each."""

    def __init__(self, seconds: float):
        self.end = time.monotonic() + seconds
        self.tests, self.found, self.failures = 0, {}, []
        self.needs_tensorflow = False

    def pytest_collection_modifyitems(self, items):
        self.tests = len(items)
        random.Random(0).shuffle(items)

    def pytest_collectreport(self, report):
        if report.failed and "'tensorflow" in report.longreprtext:  # or one of its data sets
            self.needs_tensorflow = True
        elif report.failed:
            self.found["import"] = "failed"
            self.failures.append(["import", short(report.longreprtext)])

    def pytest_runtest_protocol(self, item):
        if time.monotonic() > self.end:
            item.session.shouldstop = "time is up"
            return True
        signal.alarm(EACH)

    def pytest_runtest_logreport(self, report):
        signal.alarm(0)
        if report.when != "call" and report.passed:
            return
        text = report.longreprtext
        outcome = "too long" if TooLong.__name__ in text else report.outcome
        worst = max(outcome, self.found.get(report.nodeid, outcome), key=OUTCOMES.index)
        self.found[report.nodeid] = worst
        if outcome == "failed":
            self.failures.append([report.nodeid.split("::")[-1], short(text)])


class TooLong(Exception):
    pass


def short(text: str) -> str:
    """Return the exception's line of pytest's report."""
    lines = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return (lines or text.splitlines() or [""])[0][:200]


def too_long(number, frame):
    raise TooLong


def work(checkout: str, name: str, seconds: float):
    """Run one file of tests; return the number of each outcome."""
    import pytest

    sys.path.insert(0, checkout)
    lend()
    signal.signal(signal.SIGALRM, too_long)
    start, recorder = time.monotonic(), Recorder(seconds)
    options = ["-p", "no:terminal", "-p", "no:cacheprovider", "-p", "no:randomly", "-W", "ignore"]
    place = ["--rootdir", checkout, "-c", "/dev/null", "--import-mode", "importlib"]
    pytest.main([*options, *place, str(Path(checkout, name))], plugins=[recorder])
    counts = collections.Counter(recorder.found.values())
    row = {"file": name, "tests": recorder.tests}
    row |= {outcome: counts[outcome] for outcome in OUTCOMES}
    row |= {"needs": "TensorFlow"} if recorder.needs_tensorflow else {}
    yield row | {"seconds": round(time.monotonic() - start), "failures": recorder.failures}


def lend() -> None:
    """Import neural-tangents, and put back into JAX the names that its tests import from there."""
    import absl.flags
    import jax

    import ntk

    rules = ntk.neural_tangents()._src.utils.rules
    jax.tree_map = jax.tree.map
    jax.core.Primitive = jax.extend.core.Primitive
    named = {primitive.name: primitive for primitive in rules.STRUCTURE_RULES if primitive}
    jax.interpreters.ad.zeros_like_p = named["zeros_like"]
    absl.flags.FLAGS(["tests"])
    import tests.test_utils  # noqa: F401  it defines flags

    absl.flags.FLAGS(["tests"])


def files(checkout: Path) -> list[str]:
    paths = [path.relative_to(checkout) for path in checkout.glob("tests/**/*_test.py")]
    return sorted(str(path) for path in paths if "experimental" not in path.parts)


def report(rows: list[harness.Row]) -> str:
    head = "file", "tests", "passed", "failed", "skipped", "not run", "seconds"
    lines, sums = [], collections.Counter()
    for row in rows[1:]:
        file = row["file"].removeprefix("tests/")
        if "tests" not in row or "needs" in row:
            why = f"needs {row['needs']}" if "needs" in row else row["failed"]
            lines.append([file, why, *[""] * (len(head) - 2)])
            continue
        counts = {key: row[key] for key in head[1:] if key in row}
        counts["not run"] = row["tests"] - row["passed"] - row["failed"] - row["skipped"]
        sums.update(counts)
        lines.append([file, *(counts[key] for key in head[1:])])
    return harness.table(head, [*lines, ["all", *(sums[key] for key in head[1:])]])


def totals(rows: list[harness.Row]) -> str:
    """Return the sums over all files."""
    head, line, *_, last = report(rows).splitlines()
    return "\n".join([head, line, last])


def main() -> None:
    flags = harness.command_line(
        __file__,
        __doc__,
        report,
        work=work,
        checkout={"type": Path, "help": "of google/neural-tangents"},
        seconds={"type": float, "default": 3600.0, "help": "for each file"},
        cases={"type": int, "default": 4, "help": "drawn from every grid of parameters"},
    )
    if flags.small:
        harness.unused(flags, "seconds", "cases")
    with tempfile.TemporaryDirectory() as folder:
        if flags.smoke:
            if flags.checkout is not None:
                flags.error("--smoke: expected no --checkout, got one.")
            flags.checkout = stand_in(Path(folder))
        if flags.checkout is None or not files(flags.checkout):
            flags.error("--checkout: expected one of google/neural-tangents, with its tests.")
        rows = measured(flags)
    harness.finish(rows, flags.results, report, write_rows=False)


def stand_in(folder: Path) -> Path:
    """Make a checkout with two tests. One is skipped."""
    tests = folder / "tests"
    tests.mkdir()
    (tests / "__init__.py").write_text("")
    (tests / "test_utils.py").write_text("")
    (tests / "smoke_test.py").write_text(SMOKE)
    return folder


SMOKE = """
import pytest
from neural_tangents import stax


def test_a_layer():
    assert len(stax.Relu()) == 3


def test_nothing():
    pytest.importorskip("a_module_that_nobody_has")
"""


def measured(flags) -> list[harness.Row]:
    """Return a row for each file of tests; files with a row in the results are not run again."""
    cases, seconds = (1, 60.0) if flags.small else (flags.cases, flags.seconds)
    limit = {"cases": cases, "limit": seconds}
    rows = harness.begun(flags.results, "neural-tangents", **limit)
    if not harness.where(rows[:1], **limit):
        flags.error(f"--results: expected an earlier part of this run, {limit}, got {rows[0]}.")
    for name in files(flags.checkout):
        if not harness.where(rows, file=name):
            print(name, file=sys.stderr, flush=True)
            variables = VARIABLES | {"NT_NUM_GENERATED_CASES": str(cases)}
            request = str(flags.checkout.resolve()), name, seconds
            for row in harness.in_own_process(__file__, *request, **variables):
                path = flags.results if "tests" in row else None  # a failed process runs again
                harness.keep(path, rows, {"file": name} | row)
    return rows


if __name__ == "__main__":
    main()
