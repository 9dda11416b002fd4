"""``bilevel rank`` as a user runs it, small."""

import json
import os
import pathlib
import re

import numpy as np
import pytest

from bilevel.cli import main

SMALL = (
    *("rank", "--data", "digits", "--networks", "12", "--scores", "naswot", "l2_norm"),
    *("--k", "3", "--pool", "8", "--batch-size", "8", "--cells", "1", "--channels", "2"),
    *("--train-size", "32", "--test-size", "40", "--progress", "False"),
)
HAS_TABLE = (pathlib.Path(os.environ.get("BILEVEL_DATA", "")) / "nasbench201").is_dir()
needs_table = pytest.mark.skipif(not HAS_TABLE, reason="the benchmark's table is not here")


@needs_table
def test_a_sample_is_ranked_and_judged_and_more_networks_are_added(tmp_path, capsys):
    out = ["--out", str(tmp_path / "run")]
    assert main([*SMALL, *out]) == 0
    screen = capsys.readouterr().out
    for text in (
        "CIFAR-10",
        "CIFAR-100",
        "ImageNet16-120",
        "conv edges",
        "Eigen-NAS (k=20)",
        "two runs",
    ):
        assert text in screen
    before = json.loads((tmp_path / "run" / "result.json").read_text())
    names = [line["score"] for line in before["judged"]]
    assert names[:3] == ["naswot", "l2_norm", "sum of log ranks"]
    assert (tmp_path / "run" / "ranking.png").stat().st_size > 0
    more = [arg if arg != "12" else "16" for arg in SMALL]
    assert main([*more, *out, "--resume"]) == 0
    after = np.load(tmp_path / "run" / "arrays.npz")
    assert after["naswot"].shape == after["rows"].shape == (16,)
    first = np.load(tmp_path / "run" / "scores.npz")["naswot/naswot"][:12]
    np.testing.assert_array_equal(after["naswot"][:12], first.astype(float))


@pytest.mark.slow
def test_the_chosen_network_is_trained(tmp_path, capsys):
    """Algorithm 1 of Zhu et al., end to end; without the table."""
    run = [*SMALL, "--no-judged", "--epochs", "2", "--out", str(tmp_path / "run")]
    assert main(run) == 0
    chosen = json.loads((tmp_path / "run" / "result.json").read_text())["chosen"]
    assert chosen["score"] == "naswot" and 0 <= chosen["test error"] <= 100
    assert chosen["genotype"] in capsys.readouterr().out.replace("\n", "")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--scores", "nas"], "scores: expected names among"),
        (["--networks", "2"], r"networks: expected 3 \(--k\) to 15625"),
        (["--batch-size", "1"], "batch_size: expected at least 2, got 1"),
        (["--batch-size", "33"], "batch_size: expected at most the 32 training rows, got 33"),
        (["--pool", "2"], "k: expected at most the 2 of --pool"),
        (["--channels", "0", "--no-judged"], "channels: expected at least 1"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, capsys, flags, message):
    assert main([*SMALL, *flags, "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and not (tmp_path / "run").exists()

    assert re.search(message, error), error


def test_without_the_table_the_command_says_where_it_looked(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("BILEVEL_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main([*SMALL, "--out", str(tmp_path / "run")]) == 2
    assert "nasbench201_results.csv" in capsys.readouterr().err
