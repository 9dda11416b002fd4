"""The fits behind the tables of train-free scores, on problems with a known answer."""

import dataclasses
import types

import numpy as np
from scipy.stats import kendalltau

from benchmarks.train_free import all_networks, zhu_table2
from bilevel.spaces.nasbench201.genotype import PRIMITIVES, encode, genotypes


def scores(count=400, names=4):
    rng = np.random.default_rng(0)
    return {f"score {i}": rng.standard_normal(count) for i in range(names)}


def test_fitted_weights_rank_like_the_sum_that_made_the_accuracies():
    features = all_networks.rank_features(scores())["ranks and log ranks"]
    accuracies = [np.exp(features @ np.arange(-3.0, 5.0))]
    w = all_networks.fitted_weights(features, accuracies, 0, 20_000)
    assert kendalltau(features @ w, accuracies[0]).statistic > 0.98
    assert abs(np.abs(w).sum() - 1) < 1e-15  # rounding depends on the machine


def test_features_are_ranks_and_a_nan_ranks_last():
    own = scores(5)
    own["score 0"][:] = 0.1, np.nan, 0.3, 0.2, -0.4
    column = all_networks.rank_features(own)["trees"][:, 0]
    assert column.argsort().tolist() == [1, 4, 0, 3, 2]


def test_labels_of_the_judged_networks_have_no_effect():
    rng = np.random.default_rng(1)
    labeled = rng.permutation(400) < 100
    accuracies = rng.random((3, 400))
    others = np.where(labeled, accuracies, rng.random((3, 400)))
    for kind, features in all_networks.rank_features(scores()).items():
        values, other_values = (
            all_networks.predicted(kind, features, list(a), labeled, 0, 2000)[0]
            for a in (accuracies, others)
        )
        np.testing.assert_array_equal(values, other_values)


def test_reinforce_finds_the_rewarded_cells_and_keeps_to_its_budget(monkeypatch):
    codes = encode(genotypes())
    rewards = (codes == PRIMITIVES.index("nor_conv_3x3")).sum(axis=1).astype(float)
    costs = np.full(len(codes), 10.0)  # seconds of 12 of 200 epochs
    table = types.SimpleNamespace(
        early={"cifar10-valid": rewards}, train_seconds={"cifar10": costs * 200 / 12}
    )
    monkeypatch.setattr(zhu_table2, "load_once", lambda: table)
    sizes = dataclasses.replace(zhu_table2.SIZES["smoke"], runs=20, budget=3000.0)
    rows = {name: zhu_table2.reinforced(sizes, name) for name in zhu_table2.REINFORCE}
    assert {row["look-ups"] for row in rows.values()} == {300}
    found = {name: rewards[row["networks"]] for name, row in rows.items()}
    # Of 300 uniform draws, the best has 4 or 5 of 6 edges right: 0.2 ** 6 is 1 in 15,625.
    assert found["NAS-RL"].mean() > 5.5 > 5.1 > found["random search"].mean() > 3
