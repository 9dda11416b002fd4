"""``--data`` with own rows: sizes that fit, the line about them, their digest, refusals."""

import json
import pathlib
import re

import jax
import numpy as np
import pytest
from helpers import ROOT, result_of

from bilevel.cli import main, parse_flags
from bilevel.cli.runtime import data as cli_data
from bilevel.cli.runtime.data import opened

GENERATOR = np.random.default_rng(0)
LABELS = np.array(["ant", "bee", "cow"] * 20)
VECTORS = GENERATOR.normal(size=(60, 5)) * 10.0 ** np.arange(5)
PIXELS = GENERATOR.integers(0, 256, (60, 6, 9, 3), dtype=np.uint8)
# An odd number of classes, images that are not squares, own validation rows.
TWO = {"x": PIXELS, "y": np.arange(60) % 2 + 7}
SPLIT = {f"{a}_{part}": v for part in ("train", "valid", "test") for a, v in TWO.items()}


@pytest.fixture(autouse=True)
def in_a_folder_of_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("vectors.npz", x=VECTORS, y=LABELS)
    np.savez("images.npz", **TWO)
    np.savez("split.npz", **SPLIT)
    np.savez("gray.npz", x=PIXELS[..., 0], y=LABELS)
    np.savez("reals.npz", x=VECTORS, y=VECTORS[:, 0])


def flags(line):
    config, _ = parse_flags(line.split())
    config.check()
    return config


@pytest.mark.parametrize(
    ("line", "sizes"),
    [
        ("search --data vectors.npz", {"train": 24, "valid": 24}),
        ("search --data vectors.npz --quick", {"train": 24, "valid": 24}),
        ("search --data vectors.npz --train 40", {"train": 40, "valid": 8}),
        ("search --data split.npz", {"train": 60, "valid": 60}),
        ("search-darts --data images.npz", {"train": 24, "valid": 24, "batch_size": 24}),
        ("certify --data vectors.npz", {"rows": 48}),
        ("baseline --data vectors.npz", {"train": 32, "valid": 16}),
        ("rank --data images.npz", {"train": 47, "batch_size": 32}),
    ],
)
def test_default_sizes_shrink_to_the_rows(line, sizes):
    config, data = opened(flags(line), images=False)
    assert {name: getattr(config, name) for name in sizes} == sizes
    keys = [jax.random.key(0)]
    if "valid" in sizes:
        ((train, valid, test),) = data.draw(keys, train=config.train, valid=config.valid, test=50)
        assert [len(train[1]), len(valid[1])] == [sizes["train"], sizes["valid"]]
        assert len(test[1]) == (50 if "split" in line else 12)


def test_own_vectors_are_standardized_on_the_training_rows():
    _, data = opened(flags("search --data vectors.npz"), images=False)
    ((train, valid, _),) = data.draw([jax.random.key(0)], train=30, valid=10, test=5)
    np.testing.assert_allclose(train[0].mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(train[0].std(axis=0), 1, rtol=1e-5)
    assert 0 < np.abs(valid[0].mean(axis=0)).max() < 1.5


@pytest.mark.parametrize(
    ("command", "data", "message"),
    [
        ("search", "minst", "data: expected digits, mnist, .* got 'minst'"),
        ("search", "missing.npz", "data: expected digits, .* FILE.npz, .* got 'missing.npz'"),
        ("search", "no_such:rows", "data: expected MODULE:FUNCTION, .*no module 'no_such'"),
        ("search", "json:rows", "data: expected MODULE:FUNCTION, got 'json:rows'"),
        ("search", "json:loads", "source: expected loads to be a function of 0 arguments"),
        ("search", "builtins:dict", "dict: expected the key x, got no keys"),
        ("search", "vectors.npz --train 50", "train: expected at most 48 .* vectors.npz, got 50"),
        (
            "search-darts",
            "images.npz --train 500",  # the default, but given
            "train: expected at most 48 .* images.npz, got 500",
        ),
        ("search", "split.npz --valid 61", "valid: expected at most 60 .* got 61"),
        ("certify", "vectors.npz --rows 49", "rows: expected at most 48 .* got 49"),
        ("search-darts", "images.npz --batch-size 25", "batch_size: expected at most 24 .* got 25"),
        ("search", "reals.npz", "data: expected class labels, .* got real targets in reals.npz"),
        *(
            (command, "vectors.npz", r"data: expected images .* vectors \(48, 5\)")
            for command in ("rank", "search-darts", "search-own --space own_space:looks")
        ),
    ],
)
def test_data_a_command_cannot_use_give_one_message(mistake, monkeypatch, command, data, message):
    monkeypatch.syspath_prepend(ROOT / "examples")
    assert re.match(message, mistake(f"{command} --data {data}"))


def test_a_run_on_own_rows_describes_them_and_stores_their_digest_alone(capsys):
    line = "baseline --configs 2 --dimension 8 --method random-search --out run --data vectors.npz"
    assert main(line.split()) == 0
    result = result_of("run")
    assert " ".join(capsys.readouterr().out.split()).startswith(
        "vectors.npz: 48 training, 12 test vectors of 5, 3 classes (ant, bee, cow); normalization: "
        "columns of mean 0 and variance 1 on the training rows; this run takes 32 train, 16 valid, "
        "12 test"
    )
    entry = result["data"]
    assert entry == json.loads(pathlib.Path("run", cli_data.FILE).read_text())
    assert entry["rows"] == [48, 0, 12] and entry["classes"] == ["ant", "bee", "cow"]
    assert not [path for path in pathlib.Path("run").rglob("*") if "vectors" in path.name]
    # The same rows resume, also from a part of the journal; other ones do not.
    journal = pathlib.Path("run/random-search.jsonl")
    journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:2]))
    assert main([*line.split(), "--resume"]) == 0
    resumed = result_of("run")
    for method in (*result["methods"].values(), *resumed["methods"].values()):
        del method["seconds"]
    assert resumed["methods"] == result["methods"]
    np.savez("vectors.npz", x=VECTORS + 1, y=LABELS)
    assert main([*line.split(), "--resume"]) == 2
    assert "data: expected the rows of the run to resume, sha256:" in capsys.readouterr().err


def test_certify_takes_vectors_with_real_targets():
    assert main(["certify", "--data", "reals.npz", "--rows", "8", "--activations", "relu"]) == 0


SMALL = "--steps 2 --train 20 --valid 20 --test 5 --no-progress"
RUNS = [
    "certify --rows 8",
    f"search {SMALL} --width 8 --inner-steps 2 --activations relu tanh",
    f"search-skips {SMALL} --epochs 1 --batch-size 10 --depth 3 --width 8 --activations relu tanh",
    f"search-darts {SMALL} --epochs 1 --batch-size 10 --cells 1 --channels 4 --random 0 "
    "--operations none skip_connect max_pool_3x3",
    f"search-nasbench201 {SMALL} --batch-size 10 --cells 1 --channels 4",
    f"search-own {SMALL} --space own_space:looks --epochs 1 --batch-size 10 --random 0",
    "rank --networks 2 --k 1 --pool 2 --cells 1 --channels 4 --batch-size 8 --epochs 1 --train 20",
]


@pytest.mark.long
@pytest.mark.parametrize("data", ["images.npz", "gray.npz"])
@pytest.mark.parametrize("line", RUNS)
def test_every_command_takes_two_classes_and_images_of_any_sides(monkeypatch, line, data):
    monkeypatch.syspath_prepend(ROOT / "examples")
    assert main([*line.split(), "--data", data, "--out", "run"]) == 0
    result = result_of("run")
    assert result["data"]["shape"] == [6, 9, 3 if data == "images.npz" else 1]
    assert "judged" not in result  # the benchmark's accuracies are about other images
