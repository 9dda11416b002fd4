"""Programs outside the packages use public names that exist; exit rules, short runs and fits.

mypy and ruff do not read imports inside functions. Here every name is looked up in its module.
"""

import ast
import contextlib
import dataclasses
import importlib
import json
import pathlib
import re
import subprocess
import sys
import types

import numpy as np
import pytest
from helpers import ROOT
from scipy.stats import kendalltau

from benchmarks.reliability import crashes, victims
from benchmarks.train_free import all_networks, zhu_table2
from bilevel.spaces.nasbench201.genotype import PRIMITIVES, encode, genotypes

PROGRAMS = "benchmarks/**/*.py", "tools/*.py", "examples/*.py"
PROGRAMS += "docs/*.py", "docs/_ext/*.py", "notebooks/*.py"
PAGES = "README.md", "CONTRIBUTING.md", "docs/**/*.md"

# ----------------------------------------------------------------------------- names and imports


def private(name):
    if name == "internal":  # packages of helpers for the library itself
        return True
    of_named_tuples = "_asdict", "_fields", "_make", "_replace"  # public, for all their underscore
    return name.startswith("_") and not name.endswith("__") and name not in of_named_tuples


def lookup(owner, name):
    """Return an attribute, or a submodule that was not imported yet, or None."""
    if not hasattr(owner, name) and isinstance(owner, types.ModuleType):
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(f"{owner.__name__}.{name}")
    return getattr(owner, name, None)


def fault(path):
    """Return why a program may not use a dotted path, or None. Other packages have no faults."""
    first, *names = path.split(".")
    if first not in ("bilevel", "ntk"):
        return None
    value, path = importlib.import_module(first), first
    for name in names:
        owner, path = value, f"{path}.{name}"
        if private(name):
            return f"{path} is private"
        value = lookup(owner, name)
        if value is None and not hasattr(owner, name):
            return f"{path} does not exist"
        public = getattr(owner, "__all__", None) if isinstance(owner, types.ModuleType) else None
        listed = public is None or name in public or name.endswith("__")
        if not listed and getattr(value, "__name__", None) != f"{owner.__name__}.{name}":
            return f"{path} is not in __all__ of {owner.__name__}"
    return None


def uses(tree):
    """Yield the line and the dotted path of imports, and of attributes of imported names."""
    scope = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and not getattr(node, "level", 0):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                path = f"{module}{alias.name}".removesuffix(".*")
                bound = alias.asname or alias.name.split(".")[0]
                scope[bound] = path if alias.asname or module else bound
                yield node.lineno, path
    for node in ast.walk(tree):
        root, names = node, []
        while isinstance(root, ast.Attribute):
            root, names = root.value, [root.attr, *names]
        if names and isinstance(root, ast.Name) and root.id in scope:
            yield node.lineno, ".".join([scope[root.id], *names])


def faults(source):
    """Sorted ``(line, fault)`` of the names of `bilevel` and `ntk` in a program's text."""
    found = {(line, fault(path)) for line, path in uses(ast.parse(source))}
    return sorted((line, wrong) for line, wrong in found if wrong)


def blocks(path):
    """The Python of a page or a notebook, one session, without the notebook's own commands."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        parts = ["".join(cell["source"]) for cell in cells]
        return re.sub(r"^(\s*)[%!].*", r"\1pass", "\n".join(parts), flags=re.MULTILINE)
    return "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))


def users(*patterns):
    return sorted(path for pattern in patterns for path in ROOT.glob(pattern))


def all_faults(paths, read):
    places = [(path.relative_to(ROOT), *fault) for path in paths for fault in faults(read(path))]
    return [f"{path}:{line}: {wrong}" for path, line, wrong in places]


@pytest.mark.parametrize(
    "source, wrong",
    [
        ("from bilevel import no_such_name", "bilevel.no_such_name does not exist"),
        ("import bilevel.no_such_module", "bilevel.no_such_module does not exist"),
        ("import bilevel as b\nb.spaces.nothing", "bilevel.spaces.nothing does not exist"),
        ("def f():\n    search.x\n\nfrom bilevel import search", "bilevel.search.x does not exist"),
        ("class A:\n    def f(self):\n        import ntk\n        ntk.x", "ntk.x does not exist"),
        ("from ntk.internal.checks import integer", "ntk.internal is private"),
        ("import bilevel\nbilevel.search._run = 1", "bilevel.search._run is private"),
        ("import numpy as np\nnp.nothing\nfrom . import x\nfrom .ntk import _y", None),
    ],
)
def test_a_name_that_is_missing_or_private_is_found(source, wrong):
    assert [text for _, text in faults(source)] == ([wrong] if wrong else [])


def test_names_in_pages_and_notebooks_are_found(tmp_path):
    page, notebook = tmp_path / "page.md", tmp_path / "notebook.ipynb"
    page.write_text("text\n\n```python\nimport ntk\n```\n\n```python\nntk.nothing\n```\n")
    cell = {"cell_type": "code", "source": ["%matplotlib inline\n", "import ntk\n", "ntk.nothing"]}
    notebook.write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": "ntk"}, cell]}))
    assert [w for _, w in faults(blocks(page))] == ["ntk.nothing does not exist"]
    assert [w for _, w in faults(blocks(notebook))] == ["ntk.nothing does not exist"]


def test_programs_use_names_that_exist_and_are_public():
    programs = users(*PROGRAMS)
    assert len(programs) > 60
    assert all_faults(programs, pathlib.Path.read_text) == []


def test_pages_and_notebooks_use_names_that_exist_and_are_public():
    pages = users(*PAGES, "notebooks/*.ipynb")
    assert sum("bilevel" in blocks(path) for path in pages) > 15
    assert all_faults(pages, blocks) == []


# ----------------------------------------------------------------------------- exit rules

HEAD = {"part": "environment", "device": "none"}
ROW = {"part": "time", "seconds": 1.0}
FAILED = {"part": "time", "case": "large", "failed": "out of memory"}


@pytest.fixture
def harness(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")  # --smoke keeps flags that are set
    return importlib.import_module("benchmarks.harness")


def ended(call, *args, **options):
    """The exit status and the message of a call that ends the process."""
    with pytest.raises(SystemExit) as error:
        call(*args, **options)
    code = error.value.code
    return (1, code) if isinstance(code, str) else (code or 0, "")


def flags(harness, monkeypatch, *words, **options):
    monkeypatch.setattr(sys, "argv", ["script.py", *words])
    return harness.command_line("nowhere/script.py", "A script.", str, **options)


def test_a_run_ends_as_usual_or_with_its_first_failed_row(harness, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    own = {"commit": harness.commit()}
    harness.finish([HEAD, ROW], path, lambda rows: f"{len(rows)} rows")
    assert capsys.readouterr().out == "2 rows\n" and harness.read(path) == [HEAD | own, ROW]
    message = "failed: 1 of the rows; the first, time, large: out of memory"
    assert ended(harness.finish, [HEAD, ROW, FAILED], path, lambda _: "a report") == (1, message)
    assert capsys.readouterr().out == "a report\n" and len(harness.read(path)) == 3
    message = "rows: expected at least one measurement, got none."
    assert ended(harness.finish, [HEAD], None, str) == (1, message)


def test_a_process_that_fails_makes_a_failed_row(harness, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("raise ImportError('no parameter_count')")
    rows = harness.in_own_process(str(script), "request")
    assert rows == [{"failed": "ImportError: no parameter_count"}]
    assert ended(harness.check_failed, rows)[0] == 1


def test_a_requested_peer_that_is_missing_ends_with_status_1(harness, monkeypatch):
    options = {"peers": ("numpy", "no-such-peer")}
    for words in ([], ["--quick", "--peers", "no-such-peer"]):
        status, message = ended(flags, harness, monkeypatch, *words, **options)
        assert status == 1 and message.startswith("peers: expected no-such-peer to be installed")
    for word in ("--quick", "--smoke", "--peers"):
        assert flags(harness, monkeypatch, word, **options).peers == []
    assert flags(harness, monkeypatch, "--peers", "numpy", **options).peers == ["numpy"]


def test_the_committed_results_are_those_with_all_peers(harness, monkeypatch):
    options = {"peers": ("numpy", "jax")}
    assert flags(harness, monkeypatch, **options).results == harness.RESULTS / "script.jsonl"
    assert flags(harness, monkeypatch, "--peers", "numpy", **options).results is None
    words = "--peers", "--results", "named.jsonl"
    assert flags(harness, monkeypatch, *words, **options).results.name == "named.jsonl"


def test_a_table_has_the_files_of_its_script_only(harness, monkeypatch):
    tables = []
    monkeypatch.setattr(sys, "argv", ["constraints.py", "--table"])
    script = "benchmarks/hypergradients/constraints.py"  # next to it: constraints_peers.py
    assert ended(harness.command_line, script, "Doc.", lambda rows: tables.append(rows[1]))[0] == 0
    assert tables and all("family" in row for row in tables)


def test_sizes_by_their_flags(harness, monkeypatch):
    for size, small in ("smoke", True), ("quick", True), ("default", False), ("full", False):
        words = [] if size == "default" else [f"--{size}"]
        parsed = flags(harness, monkeypatch, *words, full=True)
        assert (parsed.size, parsed.small, parsed.results is None) == (size, small, small)


# ----------------------------------------------------------------------------- the age of results

RESULTS = sorted(ROOT.glob("benchmarks/results/*.jsonl"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_hold_their_commit_and_their_benchmark_lists_what_it_measures(harness, path):
    from tools import results_age

    assert re.fullmatch("[0-9a-f]{7,}", json.loads(path.read_text().partition("\n")[0])["commit"])
    assert results_age.measured_modules(harness.script_of(path.stem))


def test_only_code_makes_results_old():
    from tools.results_age import _code

    code = '"""Doc."""\nimport jax\n\n\ndef f(x):\n    """Return."""\n    return x + 1  # why\n'
    prose = '"""Other."""\nfrom jax import numpy\n\n\ndef f(x):\n    return x + 1\n'
    assert _code(code) == _code(prose) != _code(prose.replace("1", "2"))


# ----------------------------------------------------------------------------- short runs


def accelerator(*flags):
    command = [sys.executable, ROOT / "benchmarks/scale/accelerator.py", *flags]
    return subprocess.run(command, capture_output=True, text=True)


def test_parts_for_which_there_is_no_time_are_said_to_be_stopped():
    done = accelerator("--quick", "--only", "matmul", "--minutes", "0")
    assert "matmul: stopped" in done.stdout and done.returncode == 1
    assert done.stderr == "rows: expected at least one measurement, got none.\n"


@pytest.mark.long
def test_the_parts_run_to_their_end():
    # `darts_step` and `skips` compile for two minutes; `make accelerator ARGS=--quick` runs them.
    parts = "hypergradient", "empirical", "infinite", "sharded", "operator", "eigenvalue"
    parts += "genotypes", "darts"
    done = accelerator("--quick", "--only", *parts)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"\n| {part} |" in done.stdout for part in parts)


@pytest.mark.filterwarnings("ignore:journal")  # of lines that are computed again
def test_a_journal_with_a_flipped_bit_gives_the_exact_trace_or_is_refused(tmp_path):
    rng = np.random.default_rng(1)
    truth = victims.sharing(tmp_path / "whole")
    lines = (tmp_path / "whole" / "journal.jsonl").read_bytes().splitlines(keepends=True)
    for i in range(8):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "journal.jsonl").write_bytes(b"".join(lines[:3]))
        flip = crashes.flipped(folder, rng)
        try:
            arrays = victims.sharing(folder)
        except ValueError as error:
            assert not victims.not_a_message(error), flip
        else:
            for name, expected in truth.items():
                assert arrays[name].tobytes() == expected.tobytes(), flip


# ----------------------------------------------------------------------------- train-free scores


def scores(count=400, names=4):
    rng = np.random.default_rng(0)
    return {f"score {i}": rng.standard_normal(count) for i in range(names)}


def test_fitted_weights_rank_like_the_sum_that_made_the_accuracies():
    features = all_networks.rank_features(scores())["ranks and log ranks"]
    accuracies = [np.exp(features @ np.arange(-3.0, 5.0))]
    w = all_networks.fitted_weights(features, accuracies, 0, 20_000)
    assert kendalltau(features @ w, accuracies[0]).statistic > 0.98
    assert abs(np.abs(w).sum() - 1) < 1e-15  # rounding depends on the machine


def test_features_are_ranks_and_a_nan_ranks_last():
    own = scores(5)
    own["score 0"][:] = 0.1, np.nan, 0.3, 0.2, -0.4
    assert all_networks.rank_features(own)["trees"][:, 0].argsort().tolist() == [1, 4, 0, 3, 2]


def test_labels_of_the_judged_networks_have_no_effect():
    rng = np.random.default_rng(1)
    labeled = rng.permutation(400) < 100
    accuracies = rng.random((3, 400))
    others = np.where(labeled, accuracies, rng.random((3, 400)))
    for kind, features in all_networks.rank_features(scores()).items():
        values, other_values = (
            all_networks.predicted(kind, features, list(a), labeled, 0, 2000)[0]
            for a in (accuracies, others)
        )
        np.testing.assert_array_equal(values, other_values)


def test_reinforce_finds_the_rewarded_cells_and_keeps_to_its_budget(monkeypatch):
    codes = encode(genotypes())
    rewards = (codes == PRIMITIVES.index("nor_conv_3x3")).sum(axis=1).astype(float)
    costs = np.full(len(codes), 10.0)  # seconds of 12 of 200 epochs
    seconds = {"cifar10": costs * 200 / 12}
    table = types.SimpleNamespace(early={"cifar10-valid": rewards}, train_seconds=seconds)
    monkeypatch.setattr(zhu_table2, "load_once", lambda: table)
    sizes = dataclasses.replace(zhu_table2.SIZES["smoke"], runs=20, budget=3000.0)
    rows = {name: zhu_table2.reinforced(sizes, name) for name in zhu_table2.REINFORCE}
    assert {row["look-ups"] for row in rows.values()} == {300}
    found = {name: rewards[row["networks"]] for name, row in rows.items()}
    # Of 300 uniform draws, the best has 4 or 5 of 6 edges right: 0.2 ** 6 is 1 in 15,625.
    assert found["NAS-RL"].mean() > 5.5 > 5.1 > found["random search"].mean() > 3
