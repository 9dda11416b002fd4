"""``bilevel search-skips`` searches, trains the architecture found, and compares it."""

import json
import os
import signal

import numpy as np
import pytest
from helpers import arrays_in, result_of

from bilevel.cli import main
from bilevel.spaces.skips import skip_space
from bilevel.strategies import strategy

SMALL = "--activations relu leaky_relu --depth 3 --width 8 --steps 4 --epochs 2 --batch-size 10"
SMALL += " --train 40 --valid 40 --samples 3"
pytestmark = pytest.mark.long


def search(folder, *flags):
    return main(["search-skips", "--out", str(folder), *SMALL.split(), *flags])


def in_chunks(monkeypatch, size, callback):
    original = strategy.search

    def chunked(*args, **options):
        return original(*args, **options | {"chunk": size, "callback": callback})

    monkeypatch.setattr("bilevel.strategies.strategy.search", chunked)


def test_a_search_that_is_resumed_ends_in_a_table_and_its_files(tmp_path, capsys, monkeypatch):
    run, flags, seen = tmp_path / "run", ("--seeds", "2", "--strategy", "random"), []

    def callback(result):
        seen.append(len(result.history["value"]))
        return seen == [2]

    in_chunks(monkeypatch, 2, callback)
    assert search(run, *flags) == 130
    kept = "after step 2; searches and networks so far are saved; resume with --resume"
    assert kept in capsys.readouterr().err
    assert search(run, *flags, "--resume") == 0
    assert seen == [2, 4]
    printed = capsys.readouterr().out
    for text in ("search", "relu", "random", "supernet", "seed 1: ", "entropy"):
        assert text in printed
    result = result_of(run)
    # 4 steps of 1 gradient, 2 epochs of 4: no second network in the time of the search.
    assert set(result["scores"]) == {"search", "relu", "leaky_relu", "random", "supernet"}
    for name, scores in result["scores"].items():
        assert len(scores["test_error"]) == 2
        assert 0 < np.mean(scores["test_error"]) < 1
        assert ("min_eigenvalue" in scores) == (name in ("search", "relu", "leaky_relu"))
    # Truth: the discretization of the alpha in the files.
    space = skip_space(["relu", "leaky_relu"], depth=3, width=8)
    for s, architecture in enumerate(result["architectures"]):
        alpha = {k: np.array(v) for k, v in result["alpha"][s].items()}
        assert str(space.discretize(alpha)) == architecture
        assert result["scores"]["search"]["skips"][s] == architecture.count("skip")
    arrays = arrays_in(run / "arrays.npz")
    # Weight sharing leaves alpha at the start, and then chooses a corner.
    np.testing.assert_array_equal(arrays["history_alpha_activations_1"], np.full((4, 2, 2), 0.5))
    assert np.isin(arrays["alpha_activations_0"], (0, 1)).all()
    assert (run / "search.png").stat().st_size > 10_000


def test_sigterm_saves_the_search_and_then_ends_the_process(tmp_path, capsys, monkeypatch):
    """The test's own handler stands for the end of the process."""
    run, received, seen = tmp_path / "run", [], []

    def callback(result):
        seen.append(len(result.history["value"]))
        if seen == [1]:
            os.kill(os.getpid(), signal.SIGTERM)

    in_chunks(monkeypatch, 1, callback)
    before = signal.signal(signal.SIGTERM, lambda *_: received.append(capsys.readouterr().err))
    try:
        assert search(run) == 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)
    (said,) = received
    assert said.startswith("bilevel: terminated after step 2; ")
    assert f"resume with --resume --out {run}" in said
    assert seen == [1]


def test_eigen_nas_trains_the_best_of_its_pool_beside_random_ones(tmp_path, capsys):
    run, flags = tmp_path / "run", ("--strategy", "eigen-nas", "--seeds", "2", "--kept", "2")
    assert search(run, *flags) == 0
    printed = capsys.readouterr().out
    for text in ("best of 2 eigen-nas", "best of 2 random", "relu", "seed 1: ", "λ_min"):
        assert text in printed
    result = result_of(run)
    rows = ["best of 2 eigen-nas", "eigen-nas", "relu", "leaky_relu", "best of 2 random", "random"]
    assert list(result["scores"]) == rows
    networks = [json.loads(line) for line in (run / "networks.jsonl").read_text().splitlines()[1:]]
    arrays = arrays_in(run / "arrays.npz")
    for seed in range(2):
        own = [r for r in networks if r["seed"] == seed and r["network"].startswith("eigen")]
        # The ranked eigenvalues equal those of the trained networks, largest first.
        ranked = arrays[f"eigenvalues_{seed}"]
        np.testing.assert_allclose([r["min_eigenvalue"] for r in own], ranked, rtol=1e-6)
        assert (np.diff(ranked) <= 0).all()
        best = min(own, key=lambda r: r["valid_error"])
        assert best["architecture"] == result["architectures"][seed]
        assert result["scores"]["best of 2 eigen-nas"]["test_error"][seed] == best["test_error"]
