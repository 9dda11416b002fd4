"""How the tests run: in float64 (BILEVEL_X64=0: in float32), compiled quickly rather than well."""

import os

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

import hypothesis
import jax
import pytest

jax.config.update("jax_enable_x64", os.environ.get("BILEVEL_X64", "1") != "0")

# Compilation makes the first example of a test slow; the same examples every time, everywhere.
hypothesis.settings.register_profile(
    "bilevel", deadline=None, derandomize=True, database=None, max_examples=20
)
hypothesis.settings.load_profile("bilevel")


@pytest.fixture(autouse=True, scope="module")
def _forget_programs():
    """Compiled programs of one file are of no use to the next, and there are thousands."""
    yield
    jax.clear_caches()
