"""Imports of the packages: lazy, complete and without side effects."""

import json
from importlib import metadata

import pytest
from helpers import run

import bilevel
import ntk

CORE = "hypergradient, bilevel.search, bilevel.implicit, bilevel.unrolled, bilevel.exponentiate"

# Everything is imported inside a trace: an array made at import would be a tracer that leaks.
TRACED = """
import types, jax, bilevel, ntk

def trace(x):
    for package in (bilevel, ntk):
        for name in package.__all__:
            found = getattr(package, name)
            if isinstance(found, types.ModuleType):
                [getattr(found, inner) for inner in getattr(found, "__all__", ())]
    return x

with jax.checking_leaks():
    jax.make_jaxpr(trace)(1.0)
print("no leak")
"""


def loaded(program: str) -> set[str]:
    program += "; import sys, json; print(json.dumps(sorted(sys.modules)))"
    return set(json.loads(run("python", "-c", program)))


def test_the_packages_and_their_versions_import_nothing():
    assert bilevel.__version__ == ntk.__version__ == metadata.version("bilevel")
    program = "import bilevel, ntk; bilevel.__version__, ntk.__version__"
    assert loaded(program).isdisjoint({"jax", "numpy", "scipy", "flax"})


@pytest.mark.slow
def test_the_core_imports_no_more_than_jax_and_optax_do():
    more = loaded(f"import bilevel; bilevel.{CORE}") - loaded("import jax, optax")
    assert more.isdisjoint({"scipy.special", "scipy.linalg", "flax", "pooch", "sklearn", "rich"})
    assert {m.split(".")[0] for m in more} & {"bilevel", "ntk"} == {"bilevel", "ntk"}


def test_names_first_used_inside_a_trace_leak_no_tracer():
    assert run("python", "-c", TRACED) == "no leak\n"


def test_every_public_name_is_there_and_listed_and_another_raises_attribute_error():
    for package in (bilevel, ntk):
        assert not hasattr(package, "__nothing__") and not hasattr(package, "nothing")
        assert set(package.__all__) <= set(dir(package))
        assert all(getattr(package, name) is not None for name in package.__all__)
