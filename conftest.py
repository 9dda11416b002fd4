"""How the tests run: in float64 (BILEVEL_X64=0: in float32), compiled quickly rather than well."""

import ctypes
import gc
import os
import pathlib
import sys

# The tests compile hundreds of small programs and run them for milliseconds. Must come before JAX
# starts; `XLA_FLAGS= make test` tests what users compile. XLA aborts on a flag it does not know:
# these are for the versions that they were tried on.
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

jax.config.update("jax_enable_x64", os.environ.get("BILEVEL_X64", "1") != "0")

# Tracing makes many objects and little garbage: one collection in a hundred is enough.
gc.set_threshold(70_000)

# A second run finds what the first one compiled, and so do the commands that tests start. A folder
# for each worker: JAX's cache reads what another process is still writing.
_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "main")
_PROGRAMS = pathlib.Path(__file__).parent / ".pytest_cache/programs" / _WORKER
for _name, _value in {
    "jax_compilation_cache_dir": str(_PROGRAMS),
    "jax_persistent_cache_min_compile_time_secs": 0.05,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}.items():
    jax.config.update(_name, _value)
    os.environ[_name.upper()] = str(_value)

# Compilation makes the first example of a test slow; the same examples every time, everywhere.
hypothesis.settings.register_profile(
    "bilevel", deadline=None, derandomize=True, database=None, max_examples=20
)
hypothesis.settings.register_profile(  # make fuzz: other examples every time
    "fuzz", deadline=None, database=None, max_examples=55, print_blob=True
)
hypothesis.settings.load_profile("bilevel")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out those that are marked
def pytest_collection_modifyitems(items):
    """Mark the tests that are long as slow too."""
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker("slow")


# A worker that is larger than this, in bytes, forgets what JAX keeps: doing so after every file
# takes a quarter of the tests' time.
_LARGE = 1.2e9


@pytest.fixture(autouse=True, scope="module")
def _forget_programs():
    """Memory is given back between files.

    What compiled programs leave free lies between what stays; the C library is told to give it
    back.
    """
    yield
    if kept := sys.modules.get("ntk.internal.compile_cache"):
        kept._programs.clear()
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
