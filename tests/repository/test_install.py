"""The wheel, installed by plain pip in a fresh environment."""

import json
import os
import pathlib

import pytest
from helpers import run

ROOT = pathlib.Path(__file__).parents[2]

# A user's script, for the type checker: everything here has a type that it knows.
SCRIPT = """
import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import assert_type

import bilevel
import ntk

problem = bilevel.Problem(
    lower=lambda w, alpha, batch: jnp.sum((w - alpha) ** 2),
    outer=lambda w, alpha, batch: jnp.sum(w**2),
)
solver = bilevel.implicit(bilevel.newton(), bilevel.cg())
result = bilevel.hypergradient(problem, solver)(jnp.ones(2), jnp.zeros(2), None, None)
assert_type(result, bilevel.HyperGradient)
assert_type(result.value, jax.Array)
assert_type(result.info.error_estimate, jax.Array)
assert_type(result.info.converged, jax.Array)
assert_type(ntk.kernel_regression(np.eye(2), np.ones(2)).weights, jax.Array)
agreement = bilevel.rank_agreement(jax.random.key(0), np.arange(3.0), np.arange(3.0))
assert_type(agreement.kendall, jax.Array)
"""

FACTS = """
import json, pathlib, sys, time
start = time.process_time()
import bilevel
bilevel.hypergradient, bilevel.search, bilevel.implicit
seconds = time.process_time() - start
import importlib.metadata as metadata
names = sorted(d.metadata["Name"].lower() for d in metadata.distributions())
size = sum(f.stat().st_size for f in pathlib.Path(sys.prefix).rglob("*") if f.is_file())
typed = pathlib.Path(bilevel.__file__).with_name("py.typed").exists()
print(json.dumps([bilevel.__file__, names, size, seconds, typed]))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The interpreter of a fresh environment with the wheel and what pip brings along."""
    place = tmp_path_factory.mktemp("install")
    run("python", "-m", "venv", place / "venv")
    python = place / "venv/bin/python"
    run(python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", place, ROOT)
    (wheel,) = place.glob("bilevel-*.whl")
    run(python, "-m", "pip", "install", "--quiet", "--no-compile", wheel, cwd=place)
    return python


@pytest.mark.long
def test_plain_pip_brings_no_tensorflow_and_what_it_brings_is_small_and_quick(python, capsys):
    writing = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    run(python, "-c", FACTS, cwd=python.parent, env=writing)  # of the bytecode that it imports
    place, names, size, seconds, typed = json.loads(run(python, "-c", FACTS, cwd=python.parent))
    with capsys.disabled():
        print(f"\nwheel: {size / 2**20:.0f} MiB with all it needs, imported in {seconds:.1f} CPU s")
    assert "site-packages" in place and typed
    assert not {"tensorflow", "tf2jax", "neural-tangents", "torch"} & set(names)
    assert size < 900 * 2**20  # jaxlib, scipy and scikit-learn are two thirds of it
    assert seconds < 3  # 1.2 on an idle machine, mostly JAX


@pytest.mark.slow
def test_the_wheel_says_its_licences_and_has_the_readme(python):
    program = """
import json
from importlib.metadata import metadata
found = metadata("bilevel")
print(json.dumps([found[k] for k in ("License-Expression", "Description-Content-Type")]
    + [found.get_all("License-File"), found.get_payload()]))
"""
    expression, kind, files, text = json.loads(run(python, "-c", program, cwd=python.parent))
    assert (expression, kind) == ("Apache-2.0 AND MIT", "text/markdown")
    assert files == ["LICENSE", "bilevel/spaces/nasbench201/judging/tables/LICENSE"]
    assert text.strip() == (ROOT / "README.md").read_text().strip()  # without an address


@pytest.mark.long
def test_the_command_runs_in_it(python, tmp_path):
    command = python.with_name("bilevel")
    run(command, "certify", "--rows", "4", "--out", tmp_path / "run", cwd=tmp_path)
    assert (tmp_path / "run/result.json").exists()


@pytest.mark.long
def test_a_users_script_passes_the_type_checker(python, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    options = ["--python-executable", python, "--strict", "--cache-dir", tmp_path / "cache"]
    run("python", "-m", "mypy", *options, "script.py", cwd=tmp_path)
