"""The command line runs the main job, leaves its results, and reports mistakes in one sentence."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest

import bilevel
from bilevel.cli import main, report
from bilevel.cli.kernels import min_eigenvalue
from bilevel.cli.search import _argmax_sentence

SMALL = (
    *("--activations", "relu", "tanh", "--steps", "3", "--inner-steps", "5", "--width", "16"),
    *("--train", "40", "--valid", "40"),
)


def loaded(path):
    with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)


def search(folder, *flags):
    return main(["search", "--out", str(folder), *SMALL, *flags])


def test_search_ends_in_a_table_and_a_run_directory(tmp_path, capsys):
    assert search(tmp_path / "run", "--seeds", "2") == 0
    printed = capsys.readouterr().out
    for row in ("search", "relu", "tanh", "joint training", "α found:", "mean ± s.e. of 2 seeds"):
        assert row in printed
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    alpha = np.array(result["alpha"])
    assert alpha.shape == (2, 2)
    np.testing.assert_allclose(alpha.sum(1), 1, rtol=1e-5)
    # The table's search row is the network retrained at this alpha, better than chance on digits.
    assert np.mean(result["scores"]["search"]["test error"]) < 0.8
    assert "λ_min ≥" in printed
    argmax = result["argmax"]
    assert argmax["choice"] == [result["names"][i] for i in alpha.argmax(1)]
    assert argmax["condition 6"] == [1, 1]  # of two activations, always
    assert "argmax: the best activation at the shared weights in" in printed
    for scores in result["scores"].values():
        value, bound = scores["min eigenvalue"], scores["certified min eigenvalue"]
        assert len(value) == 2
        np.testing.assert_array_less(bound, value)
        np.testing.assert_allclose(bound, value, rtol=1e-6)
    arrays = loaded(tmp_path / "run" / "arrays.npz")
    assert arrays["history_alpha"].shape == (3, 2, 2)
    assert arrays["w"].shape == (2, 16, 64)
    assert (tmp_path / "run" / "search.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("trust", "verdict"),
    [
        (1, "argmax tanh: to be trusted, it is best at the shared weights (squared"),
        (0, "argmax tanh: undecided whether it is best at the shared weights (squared"),
        (-1, "argmax tanh: not to be trusted, relu is best at the shared weights (squared"),
    ],
)
def test_the_verdict_on_the_argmax_is_one_sentence(trust, verdict):
    found = {
        "choice": ["tanh"],
        "lowest loss": ["tanh" if trust == 1 else "relu"],
        "trust": [trust],
        "condition 6": [-1],
        "stationarity, of the loss": [0.028],
        "test rows": 1197,
    }
    assert _argmax_sentence(found).startswith(verdict)
    end = " loss, 95 %, 1197 test rows); Condition 6 fails, α stationary to 2.8 % of its loss"
    assert _argmax_sentence(found).endswith(end)


@pytest.mark.parametrize(
    ("geometry", "solver"),
    [("project", "truncated"), ("softmax", "first-order"), ("exponentiate", "implicit")],
)
def test_every_geometry_and_solver_runs(tmp_path, geometry, solver):
    assert search(tmp_path / "run", "--geometry", geometry, "--solver", solver) == 0


def test_a_run_resumed_with_more_steps_is_one_long_run_in_its_own_directory(tmp_path, capsys):
    search(tmp_path / "run")
    assert search(tmp_path / "run", "--resume", "--seed", "5") == 2
    assert "seed: expected 0 as in the run to resume, got 5" in capsys.readouterr().err
    search(tmp_path / "run", "--steps", "5")
    assert search(tmp_path / "run", "--resume", "--steps", "5") == 0
    resumed, long = (
        json.loads((tmp_path / name / "result.json").read_text()) for name in ("run", "run-2")
    )
    assert resumed["alpha"] == long["alpha"]


def certify(folder, *flags):
    small = ("--rows", "40", "--activations", "relu", "leaky_relu", "tanh")
    return main(["certify", "--out", str(folder), *small, *flags])


def test_certify_prints_a_bracket_and_leaves_it_with_the_spectra(tmp_path, capsys):
    precision = jax.config.jax_enable_x64
    assert certify(tmp_path / "run") == 0
    assert jax.config.jax_enable_x64 == precision
    printed = capsys.readouterr().out
    for text in ("over the simplex", "worst mixture", "certified ≥", "exact to ", "cells"):
        assert text in printed
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    simplex, kernels = result["simplex"], result["kernels"]
    assert simplex["converged"]
    assert 0 < simplex["lower"] <= simplex["upper"] <= 1.001 * simplex["lower"]
    for kernel in kernels.values():
        assert simplex["lower"] <= kernel["min eigenvalue"]
        assert kernel["certified min eigenvalue"] <= kernel["min eigenvalue"]
    arrays = loaded(tmp_path / "run" / "arrays.npz")
    for name, kernel in kernels.items():
        spectrum = arrays[f"spectrum {name}"]
        assert spectrum.shape == (40,)
        np.testing.assert_allclose(
            spectrum[[0, -1]], [kernel[f"{m} eigenvalue"] for m in ("min", "max")]
        )
    # Truth: the kernel of the mixture, computed by the recursion for networks instead of by pairs.
    for name in ("relu", "worst mixture"):
        value, *_ = min_eigenvalue(arrays["x"], tuple(result["names"]), kernels[name]["alpha"])
        np.testing.assert_allclose(value, kernels[name]["min eigenvalue"], rtol=1e-9)
    assert (tmp_path / "run" / "spectrum.png").stat().st_size > 10_000


def test_certify_refuses_what_it_cannot_certify(tmp_path, capsys, monkeypatch):
    assert certify(tmp_path / "run", "--rows", "5000") == 2
    assert "rows: expected 1 to 1437, got 5000" in capsys.readouterr().err
    assert certify(tmp_path / "run", "--activations", "relo") == 2
    assert "activations: expected functions or names among" in capsys.readouterr().err
    digits = bilevel.data.load("digits", train_size=40)
    digits.x_train[3] = digits.x_train[7]
    monkeypatch.setattr("bilevel.data.load", lambda name: digits)
    assert certify(tmp_path / "run") == 2
    assert "data: expected distinct rows, got 39 different ones" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_printed_bounds_are_bounds():
    assert report.at_least(0.0022352039, 7) == "0.002235203"
    assert report.at_least(-1.234e-12, 3) == "-1.24e-12"
    assert report.at_most(0.0022352031, 7) == "0.002235204"
    assert report.at_most(0.5, 3) == "0.5"


def test_mistakes_are_one_sentence_on_standard_error(tmp_path, capsys):
    assert search(tmp_path / "run", "--resume") == 2
    assert capsys.readouterr().err.startswith("bilevel: out: expected the directory of a run")
    assert search(tmp_path / "run", "--activations", "relo") == 2
    assert "activations: expected functions or names among" in capsys.readouterr().err


def test_the_module_runs_as_a_command():
    output = subprocess.run(
        [sys.executable, "-m", "bilevel", "version"], capture_output=True, text=True, check=True
    ).stdout
    assert output.startswith("bilevel 0.1.0, jax ")


def baseline(folder, *flags):
    small = ("--configs", "6", "--dimension", "64", "--train", "120", "--valid", "80")
    return main(["baseline", "--out", str(folder), *small, *flags])


def test_baseline_compares_all_methods_in_one_table(tmp_path, capsys):
    assert baseline(tmp_path / "run") == 0
    printed = capsys.readouterr().out
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["rows"] == [120, 80, 1597]
    assert len(result["methods"]) == 6
    for name, row in result["methods"].items():
        assert f"{name} " in printed
        assert 0 <= row["test"] <= 0.9
    # Random search has tried every configuration; the others' oracle is the same evaluation.
    tests = {row["best"]: row["test"] for row in result["methods"].values()}
    assert all(row["test"] == tests[row["best"]] for row in result["methods"].values())
    assert result["methods"]["random-search"]["calls"] == 6
    assert result["methods"]["weight-sharing"]["calls"] == 3
    arrays = loaded(tmp_path / "run" / "arrays.npz")
    assert arrays["weight-sharing calls"].tolist() == [1, 2, 3]
    assert (tmp_path / "run" / "baseline.png").stat().st_size > 10_000


def test_baseline_resumes_from_its_journal_to_the_same_result(tmp_path, capsys):
    flags = ("--method", "fast-weight-sharing")
    assert baseline(tmp_path / "run", *flags) == 0
    before = json.loads((tmp_path / "run" / "result.json").read_text())["methods"]
    journal = tmp_path / "run" / "fast-weight-sharing.jsonl"
    journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:2]))
    assert baseline(tmp_path / "run", *flags, "--resume", "--penalty", "2") == 2
    assert "penalty: expected 0.5 as in the run to resume, got 2.0" in capsys.readouterr().err
    assert baseline(tmp_path / "run", *flags, "--resume") == 0
    after = json.loads((tmp_path / "run" / "result.json").read_text())["methods"]
    for name, row in before.items():
        assert {**row, "seconds": 0} == {**after[name], "seconds": 0}


def test_baseline_handles_one_configuration_and_refuses_none(tmp_path, capsys):
    assert baseline(tmp_path / "run", "--configs", "1", "--method", "weight-sharing") == 0
    assert "weight-sharing" in capsys.readouterr().out
    assert baseline(tmp_path / "none", "--configs", "0") == 2
    assert "configs: expected at least 1, got 0" in capsys.readouterr().err
    assert baseline(tmp_path / "none", "--valid", "3000") == 2
    assert "valid" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
