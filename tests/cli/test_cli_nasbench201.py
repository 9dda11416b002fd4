"""``bilevel search-nasbench201``: search, look up, resume after an interruption."""

import types

import numpy as np
import pytest
from helpers import arrays_in, result_of

from bilevel.cli import main
from bilevel.cli.deep_search.run import DeepSearchRun
from bilevel.discretize.diagnostics import simplex_tangent
from bilevel.spaces.nasbench201 import encode, genotypes
from bilevel.spaces.nasbench201.genotype import parse_genotype, supernet_cost
from bilevel.spaces.nasbench201.judging import table
from bilevel.spaces.nasbench201.judging.verdicts import standing

# Without a convolution on the edges: they are what takes long to compile.
SMALL = "search-nasbench201 --operations none skip_connect avg_pool_3x3 --cells 1 --channels 2"
SMALL += " --steps 4 --epochs 1 --batch-size 40 --train 50 --valid 40 --test 50 --samples 2"


def search(folder, *flags):
    return main([*SMALL.split(), "--out", str(folder), *flags])


@pytest.fixture
def known(monkeypatch):
    """A table of made-up accuracies, some of them equal."""
    rng = np.random.default_rng(0)
    accuracy = {name: rng.integers(100, 900, 15_625) / 10 for name in table.SETS}
    made = table.BenchmarkTable(genotypes(), accuracy, {}, {}, {}, np.arange(15_625))
    monkeypatch.setattr(table, "load_table", lambda: made)
    return made


@pytest.mark.long
def test_a_search_ends_in_a_table_and_its_files(tmp_path, capsys, monkeypatch, known):
    run = tmp_path / "run"

    def curvature(loss, sets):  # the real one is tested on its own, and takes long to compile
        return lambda w, alpha, batch: float(abs(simplex_tangent(sets, alpha).sum(-1)).max())

    monkeypatch.setattr("bilevel.discretize.diagnostics.alpha_curvature", curvature)
    assert search(run, "--seeds", "2", "--strategy", "random") == 0
    result = result_of(run)
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    best = "best of 3 random"  # 4 x 40 / 50; without convolutions all networks cost the same
    for text in ("CIFAR-100", best, "seed 1: |", "entropy", "Hessian", "networks found on digits"):
        assert text in printed
    pairs = zip(result["alpha"], result["architectures"], strict=True)
    for seed, (alpha, text) in enumerate(pairs):
        genotype = parse_genotype(text)
        names = np.array(result["names"])
        assert genotype.operations == tuple(names[np.argmax(alpha, axis=1)])
        assert result["skips"][seed] == text.count("skip_connect")
        # Truth: the table's row, its number by the order of all genotypes.
        row = int(encode(genotype) @ 5 ** np.arange(6)[::-1])
        for name, scores in result["benchmark"].items():
            test = known.accuracy[f"{name}-test"]
            assert scores["accuracy"][seed] == test[row]
            assert scores["rank"][seed] == 1 + (test > test[row]).sum()
    supernet = result["scores"]["supernet"]
    assert all(0 < np.mean(errors) < 1 for errors in supernet.values()) and len(supernet) == 3
    arrays = arrays_in(run / "arrays.npz")
    # Weight sharing leaves alpha at the start, and then chooses a corner.
    np.testing.assert_allclose(arrays["history_alpha_1"], np.full((4, 6, 3), 1 / 3), rtol=1e-6)
    np.testing.assert_array_equal(np.sort(arrays["alpha_0"]), [[0, 0, 1]] * 6)
    assert max(result["curvature"]) < 1e-6
    assert (run / "search.png").stat().st_size > 10_000


@pytest.mark.usefixtures("known")
def test_an_interrupted_search_says_how_to_resume_and_resumes_there(tmp_path, capsys, monkeypatch):
    """With a search that stops where it starts; the real one's resumption is bilevel.search's."""
    run, seen = tmp_path / "run", []

    def stopping_in_the_second_seed(self, strategy, alpha, w, data, key, place):
        seen.append((self.config.resume, place.relative_to(run).as_posix(), self.bars.phase))
        place.mkdir(parents=True, exist_ok=True)
        (place / "step").write_text("something to go on from")
        stopped = len(seen) % 2 == 0 and "interrupted after step 2"
        return types.SimpleNamespace(stopped=stopped, alpha=None, w=None, history={})

    monkeypatch.setattr(DeepSearchRun, "search_from", stopping_in_the_second_seed)
    for flags in ((), ("--resume",)):
        assert search(run, "--seeds", "2", *flags) == 130
        kept = "searches and networks so far are saved; resume with --resume --out"
        assert f"interrupted after step 2 of seed 1; {kept} {run}" in capsys.readouterr().err
    seeds = [("search/0", "search 1 of 2"), ("search/1", "search 2 of 2")]
    assert seen == [(resume, *seed) for resume in (False, True) for seed in seeds]
    assert not (run / "result.json").exists()


def test_random_networks_and_the_optimum_have_the_operations_searched(known):
    """By enumeration, of the 64 networks of two operations."""
    names = ("none", "avg_pool_3x3")
    some = [i for i, g in enumerate(genotypes()) if set(g.operations) <= set(names)]
    assert len(some) == 64
    standings = standing(known, [genotypes()[some[5]]], operations=names, budget=64)
    by = known.accuracy["cifar10-valid"][some]
    for name, scores in standings.items():
        test = known.accuracy[f"{name}-test"][some]
        np.testing.assert_allclose(scores["random"], test.mean())
        assert scores["optimum"] == test.max()
        # All of them drawn: the best by CIFAR-10 validation, the mean of those if several are.
        np.testing.assert_allclose(scores["best_of_random"], test[by == by.max()].mean())
    assert not any("best" in key for key in standing(known, [])["cifar10"])


def test_the_cost_of_a_search_is_counted_in_networks():
    """By hand: multiply-adds are 7,783,040 + 35,389,440 n_3 + 3,932,160 n_1 an image."""
    supernet = 7_783_040 + 6 * (35_389_440 + 3_932_160)
    network = 7_783_040 + 6 / 5 * (35_389_440 + 3_932_160)  # each operation on a fifth of the edges
    np.testing.assert_allclose(supernet_cost(), supernet / network)


def test_with_a_damaged_table_nothing_is_searched(tmp_path, mistake, monkeypatch):
    file = tmp_path / "data" / "nasbench201" / table.RESULTS
    file.parent.mkdir(parents=True)
    file.write_text("arch_str\n")
    monkeypatch.setenv("BILEVEL_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(DeepSearchRun, "search_from", None)
    assert mistake(SMALL).startswith(f"{file}: expected a column index, got none")
