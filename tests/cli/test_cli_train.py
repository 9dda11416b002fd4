"""``bilevel train RUN`` trains the network that a search found, resumes, and saves it."""

import dataclasses
import json
import os
import signal

import jax
import numpy as np
import pytest
from helpers import ROOT, arrays_in, long_except, result_of

import bilevel
from bilevel.cli import main, train
from bilevel.cli.flags import deep_searches, from_config_file
from bilevel.cli.flags.commands import Search
from bilevel.nets import fitting

SMALL = "--seeds", "2", "--epochs", "3", "--batch-size", "20", "--test", "100", "--random", "2"
TINY = {"train": 40, "valid": 40, "test": 50, "steps": 3}
SKIPS = deep_searches.SkipSearch(activations=("relu", "tanh"), depth=3, width=8, **TINY)
FOUND = {"space": "skips", "architectures": ["relu, relu", "tanh, relu+skip"]}


def write_run(folder, config, result):
    """Write the result of a search that was not run."""
    folder.mkdir()
    result = {"config": from_config_file.flags_of(config), "names": ["x"]} | result
    result["scores"] = {"search": {"valid_error": [0.5, 0.1]}}
    (folder / "result.json").write_text(json.dumps(result))
    return folder


@pytest.fixture
def searched(tmp_path, monkeypatch):
    """The directory of a search in a user-defined space; only its result is written."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    config = deep_searches.OwnSearch(space="own_space:looks", seeds=2, **TINY)
    result = {"space": "own_space:looks", "architectures": [str(("tanh", "relu"))] * 2}
    folder = write_run(tmp_path / "searched", config, result)
    alpha = np.array([[0.2, 0.5, 0.3], [0.4, 0.3, 0.3]], np.float32)
    np.savez(folder / "arrays.npz", alpha_1=alpha)
    return folder


@pytest.mark.long
def test_an_interrupted_training_ends_in_the_same_bits(searched, tmp_path, capsys, monkeypatch):
    whole, run = tmp_path / "whole", tmp_path / "run"
    line = ["train", str(searched), *SMALL, "--out"]
    assert main([*line, str(whole)]) == 0
    printed = capsys.readouterr().out
    seen, error = [], fitting._error_at

    def interrupting(*args):
        seen.append(args[0])
        if len(seen) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return error(*args)

    with monkeypatch.context() as patch:
        patch.setattr(fitting, "_error_at", interrupting)
        assert main([*line, str(run)]) == 130
    assert capsys.readouterr().err.endswith(f"resume with --resume --out {run}\n")
    assert seen == [0, 1]
    assert main([*line, str(run), "--resume", "--seed", "1"]) == 2
    assert "seed: expected 0 as in the run to resume, got 1" in capsys.readouterr().err
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"data": "fashion-mnist"}))
    assert main([*line, str(run), "--resume", "--data", "fashion-mnist"]) == 2
    assert "journal: expected that of a run with data " in capsys.readouterr().err
    (run / "config.json").write_text(json.dumps(config))
    assert main([*line, str(run), "--resume"]) == 0
    resumed = arrays_in(run / "network-1.npz")
    for name, value in arrays_in(whole / "network-1.npz").items():
        np.testing.assert_array_equal(resumed[name], value)
    results = [result_of(folder) for folder in (whole, run)]
    assert results[0]["curves"] == results[1]["curves"]
    assert results[0]["rows"] == {"train": 80, "test": 50}  # those of the search
    assert (run / "learning.png").stat().st_size > 10_000

    # The printed lines load the network.
    lines, names = train.loading_lines(results[0]), {}
    assert "\n    ".join(["to predict in Python:", *lines]) in printed
    exec("\n".join(lines), names)
    network, digits = names["network"], bilevel.data.load("digits")
    assert names["images"].shape == digits.x_test.shape and network.classes == digits.classes
    with pytest.raises(ValueError, match="space: expected the value of own_space:looks"):
        bilevel.spaces.load_network(run / "network-1.npz")


@pytest.mark.parametrize(
    "kind", long_except(("activations",), ["activations", "skips", "nasbench201"])
)
def test_the_saved_network_has_the_test_error_of_the_table(kind, tmp_path, capsys):
    """Truth: the error of the predictions for the run's test rows, here the official ones."""
    if kind == "activations":
        result = {"alpha": [[0.7, 0.3], [0.4, 0.6]], "names": ["relu", "tanh"]}
        config = Search(activations=("relu", "tanh"), width=16, seeds=2, **TINY)
    elif kind == "skips":
        config, result = SKIPS, FOUND
    else:
        config = deep_searches.NasBench201Search(cells=1, channels=2, pixels=14, **TINY)
        edges = "|avg_pool_3x3~0|+|none~0|skip_connect~1|+|none~0|none~1|skip_connect~2|"
        result = {"space": "nasbench201", "architectures": [edges, edges]}
        result["names"] = ["none", "skip_connect", "avg_pool_3x3"]
    run = write_run(tmp_path / "run", config, result)
    out = tmp_path / "out"
    flags = ["--data", "fashion-mnist", "--train", "100", "--out", str(out)]
    assert main(["train", str(run), *SMALL, *flags, "--seeds", "1"]) == 0
    trained = result_of(out)
    assert trained["search"] == 1  # the smaller validation error
    rows = {"search", "random"} | {"activations": {"mixture"}}.get(kind, set())
    rows |= {name for name in trained["scores"] if name.startswith("only ")}
    assert set(trained["scores"]) == rows and (len(rows) == 3) == (kind != "skips")
    network = bilevel.spaces.load_network(out / "network-1.npz")
    data = bilevel.data.load("fashion-mnist", test_size=100)
    error = np.mean(network.predict(data.x_test) != data.y_test)
    assert error == pytest.approx(trained["scores"]["search"]["test_error"][0])
    assert error < 0.8 or kind == "nasbench201"
    assert network.architecture == trained["architectures"][0]
    with pytest.raises(ValueError, match=r"x: expected rows \[n, 28, 28\], got shape \(3, 8, 8\)"):
        network.predict(np.zeros((3, 8, 8)))


@pytest.mark.long
def test_own_rows_replace_those_of_the_search_and_are_recognized(tmp_path, capsys):
    run, out = write_run(tmp_path / "run", SKIPS, FOUND), tmp_path / "out"
    rng, file = np.random.default_rng(0), tmp_path / "rows.npz"
    y = np.array(["no", "yes"])[rng.integers(0, 2, 100)]
    x = rng.normal(size=(100, 5)) * [1, 10, 100, 1, 0] + 3 * (y == "yes")[:, None]
    np.savez(file, x=x, y=y)
    line = ["train", str(run), "--data", str(file), "--out", str(out), *SMALL, "--random", "0"]
    line += ["--seed", "1"]
    assert main(line) == 0
    trained = result_of(out)
    assert trained["rows"] == {"train": 80, "test": 20} and trained["classes"] == ["no", "yes"]
    assert np.mean(trained["scores"]["search"]["test_error"]) < 0.2
    assert "hardly better than a constant" not in capsys.readouterr().out
    network = bilevel.spaces.load_network(out / "network-1.npz")
    assert np.mean(np.array(network.classes)[network.predict(x)] == y) > 0.9
    # The printed lines take the test rows of the run.
    names = {}
    exec("\n".join(train.loading_lines(trained)), names)
    error = np.mean(names["labels"] != bilevel.data.load(file, jax.random.key(1)).y_test)
    assert error == pytest.approx(trained["scores"]["search"]["test_error"][0])
    x[0] += 1
    np.savez(file, x=x, y=y)
    assert main([*line, "--resume"]) == 2
    assert "data: expected the rows of the run to resume, sha256:" in capsys.readouterr().err
    # The rows of a search must be those that it had.
    config = dataclasses.replace(SKIPS, data=str(file))
    changed = write_run(tmp_path / "changed", config, FOUND | {"data": {"digest": "sha256:0"}})
    assert main(["train", str(changed), "--out", str(out)]) == 2
    assert "data: expected the rows of the search, sha256:0, got" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize(("batch_size", "epochs"), [(20, 250), (2, 30)])
def test_the_default_is_30_epochs_or_1000_steps_and_random_labels_give_a_warning(
    batch_size, epochs, tmp_path, capsys
):
    run = write_run(tmp_path / "run", SKIPS, FOUND)
    rng, file = np.random.default_rng(0), tmp_path / "rows.npz"
    np.savez(file, x=rng.normal(size=(100, 5)), y=rng.integers(0, 2, 100))
    line = f"train {run} --data {file} --search 0 --batch-size {batch_size} --seeds 1 --random 0"
    assert main([*line.split(), "--out", str(tmp_path / "out")]) == 0
    trained = result_of(tmp_path / "out")
    assert len(trained["curves"]["search"]["losses"][0]) == epochs  # 80 rows: 4 and 40 steps each
    (error,) = trained["scores"]["search"]["test_error"]
    assert error > 0.8 * trained["constant_error"]
    assert "The network is hardly better than a constant." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("train", "run: expected a finished search, as in bilevel train RUN, got none."),
        ("train none", "run: expected the directory of a finished search, got 'none' (no result"),
        ("train other", "run: expected the directory of a finished search, got 'other' (a run of"),
        ("train run --search 2", "search: expected at most 1, got 2."),
        ("train run --cells 2", "cells: expected a search of cells in run, got 2."),
        ("train run --train 20", "batch_size: expected at most the 20 training rows, got 64."),
        ("train run --train 70", "train: expected the 80 rows of the search, since digits has no"),
        ("train run --data mnist --train 60001", "train: expected at most the 60000 of mnist, got"),
    ],
)
def test_a_wrong_run_or_flag_is_one_message(line, sentence, tmp_path, mistake):
    write_run(tmp_path / "run", SKIPS, FOUND)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "result.json").write_text('{"kernels": {}}')
    assert mistake(line).startswith(sentence)


@pytest.mark.long
@pytest.mark.parametrize("command", ["search", "search-own", "search-skips", "search-darts"])
def test_the_run_of_every_search_is_trained(command, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    run, out = tmp_path / "run", tmp_path / "out"
    flags = {
        "search": "--steps 1 --width 32 --activations relu tanh",
        "search-own": "--space own_space:looks --steps 2 --epochs 1 --random 0",
        "search-skips": "--strategy eigen-nas --samples 3 --kept 1 --epochs 1 --depth 3 --width 8",
        "search-darts": "--steps 2 --epochs 1 --random 0 --cells 1 --channels 2 --operations none "
        "skip_connect max_pool_3x3",
    }[command]
    rows = "--train 64 --valid 64 --test 100"
    assert main([command, "--out", str(run), *flags.split(), *rows.split(), "--quiet"]) == 0
    assert main(["train", str(run), *SMALL, "--out", str(out)]) == 0
    result = result_of(out)
    before = result_of(run)
    if "architectures" in before:
        assert result["architectures"] == [before["architectures"][result["search"]]]
    assert result["rows"] == {"train": 128, "test": 100}
    names = {}
    exec("\n".join(train.loading_lines(result)), names)
    assert len(names["labels"]) == 360
