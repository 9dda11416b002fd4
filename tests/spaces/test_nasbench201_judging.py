"""Judging of train-free scores: brute force, closed forms, figures of the real table."""

import itertools
import math

import numpy as np
import pytest
from helpers import needs_scores

from bilevel.spaces.nasbench201 import genotypes, parameter_count
from bilevel.spaces.nasbench201.genotype import live_edges
from bilevel.spaces.nasbench201.judging import best_of_k, best_of_k_random, correlations, verdicts
from bilevel.spaces.nasbench201.judging import table as tables
from bilevel.spaces.nasbench201.judging.table import DATASETS, RUN_SETS
from bilevel.spaces.nasbench201.judging.verdicts import BASELINES, seed_ceiling, top_one

RNG = np.random.default_rng(0)
NAN, INF = math.nan, math.inf


def made_up(seed=0):
    """A table of the real size: accuracy is the parameter count's rank and noise."""
    rng, m = np.random.default_rng(seed), len(genotypes())
    size = np.array([parameter_count(g) for g in genotypes()]) / 1.6e6
    accuracy = {name: 60 + 30 * size + rng.normal(size=m) for name in tables.SETS}
    early = {name: values - 20 + rng.normal(size=m) for name, values in accuracy.items()}
    truth = rng.normal(size=(m, 1))
    runs = {name: truth + 0.3 * rng.normal(size=(m, 3)) for name in RUN_SETS}
    for values in runs.values():
        values[: m // 2, 2] = NAN
    return tables.BenchmarkTable(genotypes(), accuracy, early, runs, {}, np.arange(m)), truth[:, 0]


def test_tau_is_its_definition_over_pairs_and_rho_is_pearsons_of_ranks():
    pair = RNG.integers(0, 6, 30), RNG.integers(0, 9, 30)
    tau, rho = correlations(*pair)
    signs = [np.sign(a[:, None] - a)[np.triu_indices(30, 1)] for a in pair]
    untied = np.prod([np.count_nonzero(s) for s in signs])
    assert tau == pytest.approx(np.dot(*signs) / untied**0.5)
    ranks = [(a[:, None] > a).sum(1) + (a[:, None] >= a).sum(1) for a in pair]
    assert rho == pytest.approx(np.corrcoef(*ranks)[0, 1])


def test_nan_ranks_below_minus_infinity_and_a_score_that_ranks_nothing_has_no_correlation():
    score = [NAN, NAN, -INF, -5.0, 2.0, INF]
    accuracy = [3.0, 1.0, 10.0, 20.0, 30.0, 15.0]
    assert correlations(score, accuracy) == correlations([0, 0, 1, 2, 3, 4], accuracy)
    for score in ([1, 1, 1], [NAN] * 3):  # they rank nothing
        assert all(map(math.isnan, correlations(score, [1.0, 2.0, 3.0])))


def test_the_ceiling_is_what_the_truth_reaches_on_simulated_runs():
    """Runs drawn by the model: truth and normal errors; two or three runs each."""
    table, truth = made_up()
    for name in RUN_SETS:
        pairs, ceiling = seed_ceiling(table, name)
        assert set(pairs) == {(0, 1), (0, 2), (1, 2)}
        expected = 2 / math.pi * math.asin(1 / 1.09)
        assert all(tau == pytest.approx(expected, abs=0.01) for tau in pairs.values())
        reached = correlations(truth, np.nanmean(table.runs[name], axis=1)).tau
        assert ceiling == pytest.approx(reached, abs=0.005)
        assert ceiling > max(pairs.values()) + 0.02


def test_top_one_is_the_mean_over_ties_and_never_nan():
    accuracy = np.array([70.0, 80.0, 90.0, 95.0])
    assert top_one([3, 3, 1, NAN], accuracy) == 75
    assert top_one([-INF, NAN, NAN, NAN], accuracy) == 70
    assert top_one([5, INF, 6, NAN], accuracy) == 80
    assert top_one([NAN] * 4, accuracy) == accuracy.mean()


def test_without_a_pool_the_top_k_are_kept_and_validated():
    score = np.array([NAN, 5, 4, 3, 2, 1, INF, -INF])
    valid = np.array([99, 10, 40, 30, 20, 90, 15, 99.0])
    test = np.arange(8.0)
    for k, chosen in ((1, 6), (2, 6), (3, 2), (5, 2), (6, 5), (7, 7)):
        assert (best_of_k(score, valid, test, k, draws=5) == chosen).all()
    # NaN is kept only when all else is; then it ties with the other network of validation 99.
    assert set(best_of_k(score, valid, test, 8, draws=100)) == {0, 7}


def test_a_constant_score_has_no_gain():
    valid = RNG.normal(size=60)
    test = valid + RNG.normal(size=60)
    expected = best_of_k_random(valid, test, 5)
    for score in (np.zeros(60), np.full(60, NAN)):
        for pool in (None, 20):
            accuracies = best_of_k(score, valid, test, 5, pool=pool, draws=4000)
            assert abs(accuracies.mean() - expected) < 4 * accuracies.std() / math.sqrt(4000)


def test_with_a_pool_the_mean_is_that_over_all_pools():
    score, valid = RNG.permutation(7), RNG.permutation(7)
    test = RNG.normal(size=7)
    means = []
    for pool in itertools.combinations(range(7), 4):
        kept = sorted(pool, key=lambda i: score[i])[-2:]
        means.append(test[max(kept, key=lambda i: valid[i])])
    accuracies = best_of_k(score, valid, test, 2, pool=4, draws=6000)
    assert abs(accuracies.mean() - np.mean(means)) < 4 * np.std(means) / math.sqrt(6000)


def test_log_ranks_add_up_with_mean_ranks_for_ties_and_nan_last():
    a, b = [1, 2, 2, 4], [NAN, -INF, INF, 0.0]
    expected = np.log([1 / 4, 2.5 / 4, 2.5 / 4, 4 / 4]) + np.log([1 / 4, 2 / 4, 4 / 4, 3 / 4])
    np.testing.assert_allclose(verdicts.sum_of_log_ranks(a, b), expected)


def test_the_protocol_is_the_best_of_k_in_pools_by_early_validation():
    table, _ = made_up()
    rows = np.arange(0, 15_625, 15)
    score = RNG.normal(size=len(rows))
    figures = verdicts.paper_protocol(score, table, rows, k=5, repeats=4, pool=50, seed=3)
    final = verdicts.paper_protocol(score, table, rows, k=5, repeats=1, pool=50, validation="final")
    for name in DATASETS:
        test = table.accuracy[f"{name}-test"][rows]
        early = table.early[f"{name}-valid"][rows]
        expected = best_of_k(score, early, test, 5, pool=50, draws=4, seed=3)
        assert figures[name] == pytest.approx((expected.mean(), expected.std(ddof=1)))
        valid = table.accuracy[f"{name}-valid"][rows]
        assert final[name].mean == best_of_k(score, valid, test, 5, pool=50, draws=1)[0]
        assert math.isnan(final[name].std)


def test_the_report_has_each_figure_of_each_score_and_the_baselines():
    table, _ = made_up()
    rows = np.arange(3, 15_625, 25)
    truth = table.accuracy["cifar10-test"][rows].copy()
    truth[:2] = NAN
    scores = {"truth": truth, "noise": RNG.normal(size=len(rows))}
    truth_line, noise_line, *baselines = verdicts.judge(scores, table, rows, pool=100, draws=50)
    assert [line["score"] for line in baselines] == list(BASELINES)
    assert truth_line["nan"] == 2
    assert truth_line["cifar10_test_tau"] > 0.95 > truth_line["cifar10_valid_tau"]
    assert abs(noise_line["cifar10_test_tau"]) < 0.1
    # Baselines are counted here, whatever the caller gives; accuracy was made from the first.
    size = [parameter_count(genotypes()[i]) for i in rows]
    for name in DATASETS:
        test, valid = (table.accuracy[f"{name}-{part}"][rows] for part in ("test", "valid"))
        accuracies = best_of_k(size, valid, test, 20, pool=100, draws=50)
        line = {key.removeprefix(f"{name}_"): value for key, value in baselines[0].items()}
        assert (line["test_tau"], line["test_rho"]) == correlations(size, test)
        assert line["top_one"] == top_one(size, test)
        gain, error = accuracies.mean() - best_of_k_random(valid, test, 20), accuracies.std(ddof=1)
        assert [line["gain"], line["gain_error"]] == pytest.approx([gain, error / 50**0.5])
    assert [line["score"] for line in verdicts.judge({}, table, rows, draws=1)] == list(BASELINES)


@pytest.fixture(scope="module")
def table():
    return tables.load_table()


def test_the_ceiling_is_as_stated_and_a_run_predicts_the_mean_of_the_others_as_its_model(table):
    stated = (0.926, 0.925), (0.925, 0.923), (0.941, 0.940)
    for name, (predicted, seen) in zip(RUN_SETS, stated, strict=True):
        runs = table.runs[name][~np.isnan(table.runs[name]).any(axis=1)]
        pairs = [correlations(runs[:, i], runs[:, j]).tau for i, j in ((0, 1), (0, 2), (1, 2))]
        r = math.sin(math.pi / 2 * np.mean(pairs))
        model = 2 / math.pi * math.asin(math.sqrt(r * 2 * r / (1 + r)))
        taus = [correlations(runs[:, i], np.delete(runs, i, 1).mean(1)).tau for i in range(3)]
        assert model == pytest.approx(predicted, abs=0.0006)
        assert np.mean(taus) == pytest.approx(seen, abs=0.0006)
    pairs, ceiling = seed_ceiling(table, "cifar10-valid")
    assert sorted(pairs.values()) == pytest.approx([0.910, 0.915, 0.915], abs=0.001)
    assert ceiling == pytest.approx(0.961, abs=0.0006)


def test_random_networks_do_nearly_as_well_as_the_best(table):
    valid, test = table.accuracy["cifar10-valid"], table.accuracy["cifar10-test"]
    assert best_of_k_random(valid, valid, 20) == pytest.approx(90.37, abs=0.01)
    assert best_of_k_random(valid, valid, 40) == pytest.approx(90.71, abs=0.01)
    assert best_of_k_random(valid, test, 20) == pytest.approx(93.33, abs=0.01)


def acting():
    """Whether all operations of each network have an effect."""
    return np.array([sum(live_edges(g)) == 6 - g.operations.count("none") for g in genotypes()])


def test_dropping_networks_moves_tau_as_stated(table):
    rows = np.flatnonzero(acting())
    assert len(rows) == 9445
    size = np.array([parameter_count(g) for g in genotypes()])
    test = table.accuracy["cifar10-test"]
    assert correlations(size, test).tau == pytest.approx(0.578, abs=0.0006)
    assert correlations(size[rows], test[rows]).tau == pytest.approx(0.623, abs=0.0006)


@needs_scores
def test_published_scores_are_of_the_networks_whose_operations_all_act():
    scores = tables.published_scores()
    for values in scores.values():
        np.testing.assert_array_equal(np.isfinite(values), acting())
    counted = np.array([parameter_count(g) for g in genotypes()])
    np.testing.assert_array_equal(np.round(1e6 * scores["params"])[acting()], counted[acting()])
