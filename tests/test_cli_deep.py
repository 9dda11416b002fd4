"""``bilevel search --space skips`` searches, trains what it finds, and says what else would do."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, documented_keys

import bilevel
from bilevel.cli import deep, main
from bilevel.cli.skips import SkipSearch, _draw
from bilevel.spaces.skips import geometry, skip_space

SMALL = (
    *("--activations", "relu", "leaky_relu", "--depth", "3", "--width", "8", "--steps", "4"),
    *("--epochs", "2", "--batch-size", "10", "--train", "40", "--valid", "40", "--samples", "3"),
)


def search(folder, *flags):
    return main(["search", "--space", "skips", "--out", str(folder), *SMALL, *flags])


def loaded(path):
    with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)


def test_a_search_interrupted_and_resumed_ends_in_a_table_and_its_files(
    tmp_path, capsys, monkeypatch
):
    run, flags, seen = tmp_path / "run", ("--seeds", "2", "--strategy", "random"), []

    def callback(result):
        seen.append(len(result.history["value"]))
        return seen == [2]

    original = bilevel.search

    def two_steps_at_a_time(*args, **options):
        return original(*args, **options | {"chunk": 2, "callback": callback})

    monkeypatch.setattr("bilevel.search", two_steps_at_a_time)
    assert search(run, *flags) == 130
    assert (
        "after step 2; the search is kept as far as it came; go on with --resume --out"
        in capsys.readouterr().err
    )
    assert search(run, *flags, "--resume", "--seed", "5") == 2
    assert "seed: expected 0 as in the run to resume, got 5" in capsys.readouterr().err
    assert search(run, *flags, "--resume") == 0
    assert seen == [2, 4]
    printed = capsys.readouterr().out
    for text in ("search", "relu, no skips", "best of 1 random", "supernet", "seed 1: ", "entropy"):
        assert text in printed
    result = json.loads((run / "result.json").read_text())
    assert set(result) <= documented_keys()
    # 4 steps of 1 gradient, 2 epochs of 4: no second network in the time of the search.
    rows = {"search", "relu", "leaky_relu", "best of 1 random", "random", "supernet"}
    assert set(result["scores"]) == rows
    for name, scores in result["scores"].items():
        assert len(scores["test error"]) == 2
        assert 0 < np.mean(scores["test error"]) < 1
        assert ("min eigenvalue" in scores) == (name in ("search", "relu", "leaky_relu"))
    # Truth: the discretization of the alpha in the files.
    space = skip_space(["relu", "leaky_relu"], depth=3, width=8)
    for s, architecture in enumerate(result["architectures"]):
        alpha = {k: np.array(v[s]) for k, v in result["alpha"].items()}
        assert str(space.discretize(alpha)) == architecture
        assert result["scores"]["search"]["skips"][s] == architecture.count("skip")
    arrays = loaded(run / "arrays.npz")
    # Weight sharing leaves alpha at the start, and then chooses a corner.
    np.testing.assert_array_equal(arrays["history_alpha_activations"], np.full((4, 2, 2, 2), 0.5))
    assert np.isin(arrays["alpha_activations"], (0, 1)).all()
    assert arrays["w_hidden"].shape == (2, 1, 8, 8)
    assert (run / "search.png").stat().st_size > 10_000


def tiny_problem():
    space = skip_space(["relu", "tanh"], depth=3, width=4)
    x = jax.random.normal(jax.random.key(0), (2, 12, 3))
    rows = [(part, jnp.arange(12) % 10) for part in x]
    return space, space.init(jax.random.key(1), 3), rows


def test_exponentiated_gradient_moves_alpha_on_its_sets():
    space, w, rows = tiny_problem()
    config = SkipSearch(strategy="gaea-single-level", steps=3, batch_size=6)
    parts = space.problem, optax.sgd, 0.1, geometry, functools.partial(_draw, space)
    plan = deep.plan(config, *parts)
    assert plan.single_level
    parts = (lambda alpha: [alpha["activations"]]), space.start(), w, *rows, jax.random.key(2)
    found = deep.run(config, plan, *parts, None)
    mixtures, skips = found.alpha["activations"], found.alpha["skips"]
    assert_close(mixtures.sum(-1), np.ones(2))
    assert bool((mixtures >= 0).all() and (skips >= 0).all() and (skips <= 1).all())
    assert bool((mixtures != 0.5).any())


def test_the_best_drawn_architecture_is_brute_forces():
    space, w, (_, valid) = tiny_problem()
    draw = functools.partial(_draw, space)
    key = jax.random.key(3)
    best = jax.jit(lambda w, rows: deep.best_drawn(key, 5, space.problem.outer, draw, w, rows))
    drawn = [draw(k) for k in jax.random.split(key, 5)]
    loss = jax.jit(space.problem.outer)
    losses = [float(loss(w, alpha, valid)) for alpha in drawn]
    jax.tree.map(np.testing.assert_array_equal, best(w, valid), drawn[int(np.argmin(losses))])
    for alpha in drawn:  # corners, all of them
        jax.tree.map(np.testing.assert_array_equal, alpha, space.one_hot(space.discretize(alpha)))


def test_top_curvature_is_the_largest_eigenvalue_on_the_tangent_space():
    # Truth: a quadratic in alpha, its Hessian projected by a matrix and diagonalised by numpy.
    draw = np.random.default_rng(0)
    root = draw.normal(size=(5, 5))
    H = root + root.T
    P = np.eye(5)
    P[:3, :3] -= 1 / 3
    expected = np.linalg.eigvalsh(P @ H @ P)[-1]

    def loss(w, alpha, batch):
        a = jnp.concatenate([alpha["p"], alpha["s"]])
        return 0.5 * a @ jnp.asarray(H) @ a

    alpha = {"p": jnp.ones(3) / 3, "s": jnp.zeros(2)}
    curvature = deep.top_curvature(loss, lambda v: v | {"p": v["p"] - v["p"].mean()})
    found = curvature(None, alpha, None)
    assert_close(found, expected, f64=1e-6)  # Lanczos's tolerance, squared


def test_mistakes_are_one_sentence_and_leave_no_run_directory(tmp_path, capsys):
    run = tmp_path / "run"
    for flags, sentence in {
        ("--batch-size", "41"): "batch_size: expected at most the 40 rows of a split, got 41.",
        ("--activations", "relo"): "activations: expected names among",
        ("--depth", "2"): "depth: expected at least 3, got 2.",
        ("--seeds", "0"): "seeds: expected at least 1, got 0.",
        ("--learning-rate", "-1"): "learning_rate: expected a positive number, got -1.0.",
        ("--train", "3000"): "train: expected at most 1795 of the rows of digits, got 3000.",
        ("--resume",): "out: expected the directory of a run",
    }.items():
        assert search(run, *flags) == 2
        assert capsys.readouterr().err.startswith(f"bilevel: {sentence}")
    assert not run.exists()
    assert main(["search", "--space", "cells"]) == 2
    names = "activations, skips, darts, nasbench201"
    expected = f"bilevel: space: expected one of {names}, got 'cells'.\n"
    assert capsys.readouterr().err == expected


def test_the_space_decides_the_flags(tmp_path, capsys):
    for flags, shown, hidden in (
        (("--space=skips",), "--strategy", "--inner-steps"),
        (("--space", "activations"), "--inner-steps", "--strategy"),
        ((), "--space skips", "--strategy"),
    ):
        with pytest.raises(SystemExit):
            main(["search", *flags, "--help"])
        printed = capsys.readouterr().out
        assert shown in printed
        assert hidden not in printed


def test_a_run_of_another_space_is_not_resumed(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"inner_steps": 50, "seed": 0}')
    assert search(tmp_path, "--resume") == 2
    assert capsys.readouterr().err == (
        "bilevel: out: expected a run of this command and space, got one with inner_steps in its "
        "flags.\n"
    )
