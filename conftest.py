"""Set up the tests: float64 (BILEVEL_X64=0: float32), and programs that compile fast."""

import ctypes
import gc
import hashlib
import os
import pathlib
import sys

# The tests compile hundreds of small programs and run each for milliseconds. These flags must be
# set before JAX starts. `XLA_FLAGS= make test` tests what users compile. XLA aborts on an unknown
# flag, so the flags are set only for versions that we tested.
from importlib.metadata import version

if version("jaxlib").startswith(("0.10.", "0.11.", "0.12.")):
    os.environ.setdefault(
        "XLA_FLAGS",
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
        + " --xla_cpu_use_fusion_emitters=false" * version("jaxlib").startswith("0.10."),
    )

# Two workers with two LAPACK threads each wait for each other: one small test took 194 s, not 28.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import hypothesis
import jax
import pytest
from jax._src.xla_bridge import backends_are_initialized

jax.config.update("jax_enable_x64", os.environ.get("BILEVEL_X64", "1") != "0")

# Tracing creates many objects and little garbage: one collection in a hundred is enough.
gc.set_threshold(70_000)

# A second run reuses the programs that the first run compiled, and so do commands that tests start.
# Each worker has a folder, because JAX's cache can read files that another process is writing.
_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "main")
_PROGRAMS = pathlib.Path(__file__).parent / ".pytest_cache/programs" / _WORKER
for _name, _value in {
    "jax_compilation_cache_dir": str(_PROGRAMS),
    "jax_persistent_cache_min_compile_time_secs": 0.05,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}.items():
    jax.config.update(_name, _value)
    os.environ[_name.upper()] = str(_value)

# The first example of a test is slow because of compilation. Examples are the same on every run.
hypothesis.settings.register_profile(
    "bilevel", deadline=None, derandomize=True, database=None, max_examples=20
)
hypothesis.settings.register_profile(  # make fuzz: new examples every time
    "fuzz", deadline=None, database=None, max_examples=55, print_blob=True
)
hypothesis.settings.load_profile("bilevel")


_PARTS = 30  # of the long tests


def pytest_addoption(parser):
    """Add ``--long-part``."""
    parser.addoption(
        "--long-part",
        metavar="HASH",
        help=f'mark one of {_PARTS} parts of the long tests as "drawn": -m "not long or drawn"',
    )


def part_of(name):
    """Return the number of the part that ``name``, a test or a commit, selects."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % _PARTS


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Report a test module that starts a device when it is imported, for example by an array."""
    started = backends_are_initialized()
    report = yield
    if isinstance(collector, pytest.Module) and not started and backends_are_initialized():
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid}: expected no computation at import, got one."
    return report


@pytest.hookimpl(tryfirst=True)  # before pytest deselects tests by their marks
def pytest_collection_modifyitems(config, items):
    """Mark the tests that are long as slow too, and those of the chosen part as drawn."""
    chosen = config.getoption("--long-part")
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker("slow")
            if chosen and part_of(item.nodeid) == part_of(chosen):
                item.add_marker("drawn")


def pytest_terminal_summary(terminalreporter, config):
    """Print the names of the drawn tests."""
    if config.getoption("--long-part"):
        reports = [
            r for rs in terminalreporter.stats.values() for r in rs if hasattr(r, "keywords")
        ]
        drawn = {
            r.nodeid: r.duration for r in reports if "drawn" in r.keywords and r.when == "call"
        }
        terminalreporter.section(f"long tests of this commit: {len(drawn)}")
        for name, seconds in sorted(drawn.items()):
            terminalreporter.line(f"{seconds:6.1f} s  {name}")


# A worker that uses more bytes than this clears JAX's caches. Clearing after every file would take
# a quarter of the tests' time.
_LARGE = 1.2e9


@pytest.fixture(autouse=True, scope="module")
def _forget_programs():
    """Give memory back to the system between files.

    Memory freed by compiled programs is scattered between live objects, so we ask the C library to
    return it.
    """
    yield
    if compile_cache := sys.modules.get("ntk.internal.compile_cache"):
        compile_cache._programs.clear()
    if _resident_bytes() < _LARGE:
        return
    jax.clear_caches()
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def _resident_bytes():
    if sys.platform != "linux":
        return _LARGE
    pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
