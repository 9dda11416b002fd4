"""``bilevel rank`` as a user runs it, small."""

import importlib
import re
import sys

import numpy as np
import pooch
import pytest
from helpers import arrays_in, result_of

from bilevel.cli import main, rank
from bilevel.spaces.nasbench201 import scoring
from ntk.scores.registry import builtin_score_names, score_description

SMALL = "rank --data digits --networks 12 --scores naswot l2_norm --k 3 --pool 8 --batch-size 8"
SMALL = f"{SMALL} --cells 1 --channels 2 --train 32 --test 40 --progress False".split()


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A machine that has the package, and no data."""
    monkeypatch.delenv("BILEVEL_DATA", raising=False)
    monkeypatch.setattr(pooch, "os_cache", lambda name: tmp_path / "cache" / name)


@pytest.mark.long
def test_a_sample_is_judged_its_best_is_trained_and_more_are_added(tmp_path, capsys, bare):
    # One score that compiles quickly, and a sum with one that looks at no network.
    quick = ["--scores", "l2_norm", "--aggregate", "l2_norm", "parameters", "--epochs", "2"]
    out = [*quick, "--out", str(tmp_path / "run")]
    assert main([*SMALL, *out]) == 0
    screen = capsys.readouterr().out
    for text in ("ImageNet16-120", "conv edges", "Eigen-NAS (k=20)", "for the mean of runs"):
        assert text in screen
    before = result_of(tmp_path / "run")
    chosen = before["chosen"]  # Algorithm 1 of Zhu et al.
    assert chosen["score"] == "l2_norm" and 0 <= chosen["test_error"] <= 1
    assert chosen["genotype"] in screen.replace("\n", "")
    assert before["published"] == {} and "published score" not in screen
    assert [line["score"] for line in before["judged"]][:2] == ["l2_norm", "sum of log ranks"]
    assert (tmp_path / "run" / "ranking.png").stat().st_size > 0
    more = [arg if arg != "12" else "16" for arg in SMALL]
    assert main([*more, *out, "--resume"]) == 0
    after = arrays_in(tmp_path / "run" / "arrays.npz")
    assert after["l2_norm"].shape == after["rows"].shape == (16,)
    first = arrays_in(tmp_path / "run" / "scores.npz")["l2_norm/l2_norm"][:12]
    np.testing.assert_array_equal(after["l2_norm"][:12], first.astype(float))


def test_scores_are_compared_with_published_ones_where_both_are(monkeypatch):
    columns = [score_description(name).published for name in builtin_score_names()]
    published = {name: np.full(15_625, np.nan) for name in filter(None, columns)}
    published["nwot"][[3, 5, 8]] = [1.0, 2.0, 3.0]
    published["snip"][5] = 1.0
    monkeypatch.setattr(rank.benchmark, "published_scores", lambda: published)
    scores = {"naswot": np.array([1.0, 9.0, 3.0, 2.0]), "snip": np.ones(4), "zico": np.ones(4)}
    agreement = {"naswot": {"rho": -1, "tau": -1, "networks": 3}}
    assert rank._published_agreement(scores, np.array([8, 4, 3, 5])) == agreement


OWN = """
import jax
import jax.numpy as jnp
import numpy as np


def variance(key, apply, params, batch):
    x, _ = batch
    return jnp.var(apply(params, x + 1e-3 * jax.random.normal(key, x.shape)))


def norm(key, apply, params, batch):
    return sum(jnp.sum(jnp.abs(w)) for w in jax.tree.leaves(params))


def vector(key, apply, params, batch):
    return apply(params, batch[0])[0]


def drawn(key, apply, params, batch):
    return jax.random.fold_in(key, 1)


def in_numpy(key, apply, params, batch):
    return np.var(np.asarray(apply(params, batch[0])))


def of_two(apply, params):
    return 1.0


number = 3
"""


@pytest.fixture
def own_scores(tmp_path, monkeypatch):
    """The file of a module with user-defined scores, in the working directory."""
    file = tmp_path / "own_scores.py"
    file.write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_scores", raising=False)
    yield file
    sys.modules.pop("own_scores", None)


@pytest.mark.long
def test_scores_of_ones_own_are_ranked_with_builtin_ones_and_resumed(own_scores, capsys):
    names = ["own_scores:variance", "l2_norm", "own_scores:norm"]
    line = [*SMALL, "--scores", *names, "--aggregate", names[0], "parameters", "--out", "run"]
    assert main(line) == 0
    assert "own_scores:variance" in capsys.readouterr().out
    result = result_of("run")
    judged = [line["score"] for line in result["judged"]]
    assert judged[:4] == [*names, "sum of log ranks"] and result["chosen"]["score"] == names[0]
    before = arrays_in("run/arrays.npz")
    # A function that has changed is computed again, and the others are not.
    own_scores.write_text(OWN.replace("jnp.abs(w)", "w**2"))
    sys.modules.pop("own_scores")
    importlib.invalidate_caches()
    with pytest.warns(UserWarning, match="scores: own_scores:norm has changed since .*scores.npz"):
        assert main([*line, "--resume"]) == 0
    after = arrays_in("run/arrays.npz")
    for name in names[:2]:
        np.testing.assert_array_equal(after[name], before[name])
    assert np.isfinite(after[names[2]]).all() and (after[names[2]] != before[names[2]]).any()


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (["no_module:f"], r"expected MODULE:FUNCTION, got 'no_module:f' \(no module 'no_module'"),
        (["own_scores:f"], r"expected MODULE:FUNCTION, got 'own_scores:f' \(module .*no attribute"),
        (["own_scores:of_two"], "to be a function of 4 arguments, got own_scores:of_two"),
        *(
            pytest.param(names, message, marks=pytest.mark.long)
            for names, message in (
                (["own_scores:vector"], "own_scores:vector to return a real scalar, got float32"),
                (["own_scores:drawn"], "own_scores:drawn to return a real scalar, got key<"),
                (["l2_norm", "own_scores:in_numpy"], ":in_numpy to be a function that JAX can"),
            )
        ),
    ],
)
@pytest.mark.usefixtures("own_scores")
def test_mistakes_in_scores_of_ones_own_are_one_sentence(mistake, monkeypatch, scores, message):
    """None of them is scored, nor a score before it."""
    monkeypatch.setattr(scoring, "_score_in_chunks", None)
    error = mistake([*SMALL, "--scores", *scores, "--out", "run"])
    assert re.search(f"scores: .*{message}", error), error
