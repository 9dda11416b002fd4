"""``bilevel search-darts``: search, discretize, train from scratch, resume after a crash."""

import shutil

import numpy as np
import pytest
from helpers import arrays_in, result_of

from bilevel.cli import main
from bilevel.nets import training
from bilevel.runs import checkpoint
from bilevel.spaces.darts import parse_genotype

# Without a convolution on the edges: they are what takes long to compile.
SMALL = "--operations none skip_connect max_pool_3x3 --cells 1 --channels 2 --steps 3 --epochs 3"
SMALL += " --batch-size 20 --train 50 --valid 40 --test 50 --random 1 --samples 2"


def search(folder, *flags):
    return main(["search-darts", "--out", str(folder), *SMALL.split(), *flags])


@pytest.mark.long
def test_a_run_that_crashed_in_training_ends_as_one_that_did_not(tmp_path, capsys, monkeypatch):
    run, flags = tmp_path / "run", ("--crop-and-flip", "--cutout", "2")

    class PowerCutError(Exception):
        pass

    save = checkpoint.save

    def save_and_fail(directory, step, tree, label=0):
        save(directory, step, tree, label)
        if step == 1 and directory.parts[-2:] == ("networks", "1"):
            raise PowerCutError

    with monkeypatch.context() as patch:
        patch.setattr(training, "_SAVE_SECONDS", 0.0)
        patch.setattr(checkpoint, "save", save_and_fail)
        with pytest.raises(PowerCutError):
            search(run, *flags)
    done = (run / "networks.jsonl").read_text()
    assert done.count("\n") == 2  # a header, and the first network
    assert search(run, *flags, "--resume") == 0
    resumed = result_of(run)
    # Again without the second network's checkpoint, so that it is trained in one go.
    (run / "networks.jsonl").write_text(done)
    shutil.rmtree(run / "networks" / "1")
    capsys.readouterr()
    assert search(run, *flags, "--resume") == 0
    result = result_of(run)
    for name in ("alpha", "architectures"):
        assert result[name] == resumed[name]
    for name, row in result["scores"].items():
        for column in set(row) - {"seconds"}:
            assert row[column] == resumed["scores"][name][column]

    printed = capsys.readouterr().out
    for text in ("search", "random", "supernet", "found: Genotype(normal=[(", "Hessian"):
        assert text in printed
    genotype = parse_genotype(result["architectures"][0])
    scores = result["scores"]
    assert list(scores) == ["search", "random", "supernet"]
    # Truth: counted in the genotype.
    skips = [name for name, _ in genotype.normal].count("skip_connect")
    assert scores["search"]["skips"] == [skips]
    assert 0 < scores["search"]["test_error"][0] < 1
    arrays = arrays_in(run / "arrays.npz")
    assert arrays["history_alpha_normal_0"].shape == (3, 14, 3)
    np.testing.assert_allclose(arrays["alpha_reduce_0"].sum(-1), 1, atol=1e-5)
    for picture in ("search.png", "genotype.png"):
        assert (run / picture).stat().st_size > 10_000
