"""The package: links of its README, licences; the wheel, installed by plain pip."""

import importlib.util
import json
import os
import re
import sys
import tomllib
import types

import pytest
from helpers import ROOT, run

from bilevel.plots import appearance

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ADDRESS = "https://example.org/owner/name"


@pytest.fixture
def readme(monkeypatch):
    """The text by ``hatch_build.py``, which needs of hatchling only the class that it extends."""
    module = types.ModuleType("hatchling.metadata.plugin.interface")
    module.MetadataHookInterface = type("Interface", (), {"root": str(ROOT)})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    step = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(step)

    def text(**metadata):
        step.ReadmeHook().update(metadata)
        assert metadata["readme"]["content-type"] == "text/markdown"
        return metadata["readme"]["text"]

    return text


def test_every_link_of_the_readme_is_absolute_once_there_is_an_address(readme):
    text = (ROOT / "README.md").read_text()
    built = readme(urls={"Repository": ADDRESS + "/"})
    assert readme() == text
    prose = re.sub(r"(?s)```.*?```", "", text)
    relative = re.findall(r"(!?)\[[^\]]*\]\((?!https?:)([^)\s]+)\)", prose)
    assert len(relative) > 20
    for figure, target in relative:
        assert f"]({ADDRESS}/{'raw' if figure else 'blob'}/main/{target})" in built
    assert built.count(ADDRESS) == len(relative)
    # Nothing else is changed.
    assert re.sub(rf"{ADDRESS}/(raw|blob)/main/", "", built) == text


def test_the_licence_of_every_file_that_is_shipped_is_stated():
    tables = sorted((ROOT / "bilevel").rglob("*.xz"))
    assert {path.parent for path in tables} == {ROOT / "bilevel/spaces/nasbench201/judging/tables"}
    assert PROJECT["license"] == "Apache-2.0 AND MIT"
    texts = [(ROOT / name).read_text() for name in PROJECT["license-files"]]
    assert "Apache License" in texts[0] and "MIT License" in texts[1]
    sources = (ROOT / "bilevel/spaces/nasbench201/judging/tables/README.md").read_text()
    for holder in re.findall(r"MIT, (Copyright \(c\) [^|]*?) *\|", sources):
        assert holder in texts[1]


def test_the_message_without_matplotlib_names_a_project_of_the_index(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.rcsetup", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"install it with `pip install matplotlib`\.$"):
        appearance.pyplot()


def test_no_message_asks_to_install_this_package_from_an_index():
    for folder in ("bilevel", "ntk"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not re.search(r"pip install [^`\n]*\b(bilevel|ntk)\b", path.read_text()), path


# ----------------------------------------------------------------------------- the wheel

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
