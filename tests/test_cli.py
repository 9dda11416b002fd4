"""The command line runs the main job, leaves its results, and reports mistakes in one sentence."""

import json
import subprocess
import sys

import numpy as np
import pytest

from bilevel.cli import main

SMALL = (
    *("--activations", "relu", "tanh", "--steps", "3", "--inner-steps", "5", "--width", "16"),
    *("--train", "40", "--valid", "40"),
)


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
    arrays = np.load(tmp_path / "run" / "arrays.npz", allow_pickle=False)
    assert arrays["history_alpha"].shape == (3, 2, 2)
    assert arrays["w"].shape == (2, 16, 64)
    assert (tmp_path / "run" / "search.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("geometry", "solver"),
    [("project", "truncated"), ("softmax", "first-order"), ("exponentiate", "implicit")],
)
def test_every_geometry_and_solver_runs(tmp_path, geometry, solver):
    assert search(tmp_path / "run", "--geometry", geometry, "--solver", solver) == 0


def test_a_run_resumed_with_more_steps_is_one_long_run_in_its_own_directory(tmp_path):
    search(tmp_path / "run")
    search(tmp_path / "run", "--steps", "5")
    assert search(tmp_path / "run", "--resume", "--steps", "5") == 0
    resumed, long = (
        json.loads((tmp_path / name / "result.json").read_text()) for name in ("run", "run-2")
    )
    assert resumed["alpha"] == long["alpha"]


def test_mistakes_are_one_sentence_on_standard_error(tmp_path, capsys):
    assert search(tmp_path / "run", "--resume") == 2
    assert capsys.readouterr().err.startswith("bilevel: out: expected the directory of a run")
    assert search(tmp_path / "run", "--activations", "relo") == 2
    assert "activations: expected functions or names among" in capsys.readouterr().err
    search(tmp_path / "done")
    assert search(tmp_path / "done", "--resume", "--seed", "5") == 2
    assert "seed: expected 0 as in the run to resume, got 5" in capsys.readouterr().err


def test_the_module_runs_as_a_command():
    output = subprocess.run(
        [sys.executable, "-m", "bilevel", "version"], capture_output=True, text=True, check=True
    ).stdout
    assert output.startswith("bilevel 0.1.0, jax ")
