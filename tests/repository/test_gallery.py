"""The gallery's examples in a fast mode; ``benchmarks/peers/gallery.py`` runs them in full."""

import importlib
import json

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
from helpers import ROOT
from matplotlib.figure import Figure

import ntk


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")

    def run(name, *args, **flags):
        module = importlib.import_module(name)
        rows, run.drawn = module.main(*args, **flags)
        module.picture([run.drawn], Figure())
        return rows

    return run


@pytest.mark.long
def test_inducing_points_learn(example):
    sizes = {"steps": 40, "count": 300, "batch": 100, "whole": 100}
    (row,) = example("inducing_points", data="digits", **sizes)
    assert row["learned"] < 0.8 * row["random"]


# Its steps are fewer than the example takes, so the weights do not converge.
@pytest.mark.filterwarnings("ignore:search. the weights were not a stationary point")
@pytest.mark.long
def test_a_start_is_learned_on_some_classes_for_others(example):
    """On digits; the loss of each method decreases on its tasks."""
    rows = example("few_shot", data="digits", each_class=60, steps=60, judged=50)
    assert [row["start"] for row in rows][2:] == ["MAML", "MAML of first order", "iMAML"]
    for course in example.drawn.values():
        assert course[-10:].mean() < 0.8 * course[:5].mean()


@pytest.mark.long
def test_total_variation_denoises_and_weights_of_filters_learn_to(example):
    sizes = {"data": "digits", "train": 3, "test": 3}
    first, later = (example("denoising", steps=steps, **sizes) for steps in (1, 4))
    assert later[1]["test, dB"] > later[0]["test, dB"]
    for a, b in [*zip(first, later, strict=True)][2:]:
        assert b["training, dB"] > a["training, dB"]


def reviews(words, *sizes):
    """Draw counts that stand for reviews: the real ones are read in the full run."""
    rng = np.random.default_rng(0)
    truth = rng.normal(size=words) * (np.arange(words) < 5)
    x = [(rng.random((n, words)) < 0.3).astype(float) for n in sizes]
    return [(a, np.where(a @ truth + 0.5 * rng.normal(size=len(a)) > 0, 1.0, -1.0)) for a in x]


WORDS = {"words": 30, "train": 60, "valid": 60, "test": 60, "steps": 6}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "options", "learned", "error", "factor"),
    [
        ("meta_learning", {"steps": 150, "names": ["MAML"]}, 1, "5 steps", 0.9),
        ("schedules", {"steps": 60, "outer": 6, "rate": 0.2}, 1, "validation loss", 0.9),
        ("mixtures", {"steps": 20, "mixtures": 10}, -1, "training error", 0.8),
        ("sparse_regression", {"steps": 10, "rate": 0.05}, 1, "validation error", 1),
        ("word_penalties", WORDS, -1, "validation loss", 0.98),
        ("sparse_words", WORDS, -1, "validation loss", 1),
    ],
)
def test_an_example_lowers_its_error(example, monkeypatch, name, options, learned, error, factor):
    if options == WORDS:
        monkeypatch.setattr(importlib.import_module(name), "reviews", reviews)
    rows = example(name, **options)
    assert rows[learned][error] < factor * rows[0][error]
    assert rows[-1].get("words used", 0) < 30  # of those that an l1 penalty leaves


@pytest.mark.long
def test_the_penalty_and_the_widths_of_a_machine_are_learned(example):
    first, later = (example("support_vectors", steps=steps, grid=2) for steps in (1, 6))
    for i in (1, 2):
        assert later[i]["validation loss"] < first[i]["validation loss"]


@pytest.mark.long
def test_weights_of_labels_tell_wrong_ones(example):
    """A network with batch normalisation and dropout, minibatches on both levels."""
    sizes = {"train": 600, "clean": 200, "test": 500, "baselines": False}
    (row,) = example("label_cleaning", data="digits", steps=60, **sizes)
    assert row["labels told apart"] > 0.6  # 0.5 is chance


@pytest.mark.long
def test_weights_of_sources_fall_where_labels_are_noise(example, monkeypatch):
    """On numbers that stand for words: the real reviews are read in the full run."""
    import text_transformer

    def reviews(*sizes):
        rng = np.random.default_rng(0)
        words = [rng.integers(1, 20, (n, 8)) for n in sizes]
        return [(w, np.asarray((w < 7).sum(1) > (w > 12).sum(1), int)) for w in words]

    monkeypatch.setattr(text_transformer, "reviews", reviews)
    sizes = {"train": 300, "valid": 100, "test": 100}
    example("text_transformer", steps=40, baselines=False, **sizes)
    weights = example.drawn[-1]
    assert weights[0] > 0.2 > weights[-2:].max()


@pytest.mark.long
def test_a_network_is_chosen_by_the_training_rows_alone(example):
    sizes = {"data": "digits", "train": 30, "test": 60, "steps": 4}
    example("kernel_learning", "marginal likelihood", activations=(ntk.relu, ntk.identity), **sizes)
    _, values, _, _, bounds = example.drawn
    assert values[-1] < values[0] and min(bounds) > 0


def test_the_criteria_of_kernels_are_their_definitions(monkeypatch):
    """The leave-one-out error by n fits, the likelihood by SciPy's density at the best scale."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    from kernel_learning import criterion

    rng = np.random.default_rng(0)
    a, y = rng.normal(size=(6, 9)), rng.normal(size=(6, 2))
    K = a @ a.T
    rest = [np.delete(np.arange(6), i) for i in range(6)]
    fits = [y[i] - K[i, r] @ np.linalg.solve(K[np.ix_(r, r)], y[r]) for i, r in enumerate(rest)]
    score = criterion("leave-one-out", np.linalg.inv(K), y)
    np.testing.assert_allclose(score, np.mean(np.square(fits)), rtol=1e-4)

    def loss(scale):
        densities = scipy.stats.multivariate_normal(np.zeros(6), scale * K).logpdf(y.T)
        return -np.sum(densities) / y.size

    best = scipy.optimize.minimize_scalar(lambda log: loss(np.exp(log))).fun
    score = criterion("marginal likelihood", np.linalg.inv(K), y)
    np.testing.assert_allclose(score, best, rtol=1e-4)


def test_every_example_that_was_run_has_its_page_and_its_picture():
    text = (ROOT / "benchmarks/results/gallery.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    names = {row["part"] for row in rows if row["part"] != "environment"}
    page = (ROOT / "docs/gallery.md").read_text()
    for name in names:
        assert f"<!-- table: peers/gallery.{name} -->" in page, name
        assert (ROOT / f"docs/images/gallery_{name}.png").exists(), name
    assert len(names) > 2
