"""``bilevel rank`` as a user runs it, small."""

import json
import re

import numpy as np
import pooch
import pytest
from helpers import documented_keys

from bilevel.cli import main, rank

SMALL = (
    *("rank", "--data", "digits", "--networks", "12", "--scores", "naswot", "l2_norm"),
    *("--k", "3", "--pool", "8", "--batch-size", "8", "--cells", "1", "--channels", "2"),
    *("--train", "32", "--test", "40", "--progress", "False"),
)


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A machine that has the package, and no data."""
    monkeypatch.delenv("BILEVEL_DATA", raising=False)
    monkeypatch.setattr(pooch, "os_cache", lambda name: tmp_path / "cache" / name)


@pytest.mark.long
def test_a_sample_is_ranked_and_judged_and_more_networks_are_added(tmp_path, capsys, bare):
    # One score that compiles quickly, and a sum with one that looks at no network.
    quick = ["--scores", "l2_norm", "--aggregate", "l2_norm", "parameters"]
    out = [*quick, "--out", str(tmp_path / "run")]
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
    assert set(before) <= documented_keys()
    names = [line["score"] for line in before["judged"]]
    assert before["published"] == {} and "published score" not in screen
    assert names[:2] == ["l2_norm", "sum of log ranks"]
    assert (tmp_path / "run" / "ranking.png").stat().st_size > 0
    more = [arg if arg != "12" else "16" for arg in SMALL]
    assert main([*more, *out, "--resume"]) == 0
    after = np.load(tmp_path / "run" / "arrays.npz")
    assert after["l2_norm"].shape == after["rows"].shape == (16,)
    first = np.load(tmp_path / "run" / "scores.npz")["l2_norm/l2_norm"][:12]
    np.testing.assert_array_equal(after["l2_norm"][:12], first.astype(float))


def test_scores_are_compared_with_published_ones_where_both_are(monkeypatch):
    published = {name: np.full(15_625, np.nan) for name in rank._PUBLISHED.values()}
    published["nwot"][[3, 5, 8]] = [1.0, 2.0, 3.0]
    published["snip"][5] = 1.0
    monkeypatch.setattr(rank, "published_scores", lambda: published)
    rows = np.array([8, 4, 3, 5])
    scores = {"naswot": np.array([1.0, 9.0, 3.0, 2.0]), "snip": np.ones(4), "zico": np.ones(4)}
    assert rank._published_agreement(scores, rows) == {
        "naswot": {"rho": -1, "tau": -1, "networks": 3}
    }


@pytest.mark.long
def test_the_chosen_network_is_trained(tmp_path, capsys):
    """Algorithm 1 of Zhu et al., end to end; without the table."""
    run = [*SMALL, "--no-judged", "--epochs", "2", "--out", str(tmp_path / "run")]
    assert main(run) == 0
    chosen = json.loads((tmp_path / "run" / "result.json").read_text())["chosen"]
    assert chosen["score"] == "naswot" and 0 <= chosen["test_error"] <= 1
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


def test_with_a_damaged_table_the_command_names_it(tmp_path, capsys, monkeypatch):
    file = tmp_path / "nasbench201" / "nasbench201_results.csv"
    file.parent.mkdir()
    file.write_text("arch_str\n")
    monkeypatch.setenv("BILEVEL_DATA", str(tmp_path))
    assert main([*SMALL, "--out", str(tmp_path / "run")]) == 2
    assert str(file) in capsys.readouterr().err
