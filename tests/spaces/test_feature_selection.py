"""Problems of choosing a feature map, compared with scikit-learn and features made row by row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tolerance
from sklearn.linear_model import Ridge
from sklearn.svm import LinearSVC

import bilevel
from bilevel import baselines
from bilevel.linear import models
from bilevel.spaces import features
from bilevel.spaces.features import selection
from bilevel.spaces.features.text import fold, hashed_counts, statistics, weigh

key = functools.partial(jax.random.key, 3)
DIMENSION = 96


@pytest.fixture(scope="module")
def parts():
    data = bilevel.data.load("digits", train_size=240)
    return [(data.x_train[i : i + 80], data.y_train[i : i + 80]) for i in (0, 80, 160)]


@pytest.fixture(scope="module")
def configs():
    drawn = features.sample_fourier(jax.random.key(1), 5, gammas=(1e-3, 1.0))
    return [config._replace(kernel=np.asarray(i % 2)) for i, config in enumerate(drawn)]


def flat(parts):
    return [jnp.asarray(x.reshape(len(x), -1)) for x, _ in parts]


def errors_of(model, phi, labels):
    return np.mean(np.argmax(model.predict(phi), 1) != labels)


def fitted(phi, labels):
    targets = 2.0 * (labels[:, None] == np.arange(10)) - 1
    return Ridge(0.5, fit_intercept=False).fit(phi.astype(float), targets)


@pytest.mark.long
@pytest.mark.parametrize("resource", [32, DIMENSION])
def test_a_configuration_is_judged_as_scikit_learn_would(parts, configs, resource):
    problem = features.fourier_selection(key(), *parts, dimension=DIMENSION)
    xs, labels = flat(parts), [y for _, y in parts]
    apply = jax.jit(features.fourier_features(key(), xs[0]).apply, static_argnums=2)
    for config in configs:
        phis = [np.asarray(apply(config, x, resource)) / np.sqrt(resource) for x in xs]
        model = fitted(phis[0], labels[0])
        truth = [errors_of(model, phi, y) for phi, y in zip(phis[1:], labels[1:], strict=True)]
        actual = problem.evaluate(None, config, resource)
        # One row of 80 may be within rounding of another class.
        np.testing.assert_allclose(actual, truth, atol=tolerance(1e-12, 0.0126))


@pytest.mark.long
def test_shared_weights_are_fitted_to_rows_under_configurations_of_their_own(parts, configs):
    problem = features.fourier_selection(key(), *parts, dimension=DIMENSION)
    (train, valid, _), labels = flat(parts), [y for _, y in parts]
    probabilities = np.array([0.4, 0.1, 0.1, 0.4, 0.0])
    shared = problem.share(key(), configs, probabilities, DIMENSION)
    # The truth: the same draw of cells, features row by row.
    seed = np.asarray(jax.random.key_data(key())).ravel()
    cells = np.random.RandomState(seed).choice(5, 160, p=probabilities)
    apply = jax.jit(features.fourier_features(key(), train).apply, static_argnums=2)

    def phi(x, cells):
        rows = [apply(configs[c], row[None], DIMENSION) for c, row in zip(cells, x, strict=True)]
        return np.concatenate(rows) / np.sqrt(DIMENSION)

    model = fitted(phi(train, cells[:80]), labels[0])
    wrong = np.argmax(model.predict(phi(valid, cells[80:])), 1) != labels[1]
    counts = np.bincount(cells[80:], minlength=5)
    np.testing.assert_array_equal(shared.counts, counts)
    assert shared.counts[4] == 0 and np.isnan(shared.errors[4])
    errors = np.bincount(cells[80:], wrong, minlength=5)[:4]
    np.testing.assert_allclose((shared.errors * counts)[:4], errors, atol=tolerance(1e-9, 1.1))
    whole = problem.share(key(), configs, probabilities, DIMENSION, whole=True)
    truth = [errors_of(model, phi(valid, np.full(80, c)), labels[1]) for c in range(5)]
    np.testing.assert_allclose(whole.errors, truth, atol=tolerance(1e-12, 0.0126))


@pytest.mark.long
@pytest.mark.parametrize("large", [32, 10**6], ids=["cg", "direct"])
@pytest.mark.parametrize("memory", [400_000, 150_000, 40_000])  # all rows fit, fewer, a few
def test_features_made_in_blocks_are_those_that_are_kept(
    parts, configs, memory, large, monkeypatch
):
    monkeypatch.setattr(selection, "_LARGE", large)
    problems = [
        features.fourier_selection(key(), *parts, dimension=DIMENSION, memory=memory)
        for memory in (2**31, memory)
    ]
    # More features than rows, so in columns; then fewer, in rows.
    shared = [p.share(key(), configs, np.full(5, 0.2), DIMENSION).errors for p in problems]
    np.testing.assert_allclose(*shared, atol=tolerance(1e-12, 0.1))
    alone = [p.evaluate(None, configs[0], 32) for p in problems]
    np.testing.assert_allclose(*alone, atol=tolerance(1e-12, 0.0126))


def test_weights_of_an_inaccurate_solve_are_not_used(parts, configs, monkeypatch):
    def errors(steps, large, memory=50_000):
        monkeypatch.setattr(models, "_CG_STEPS", steps)
        monkeypatch.setattr(selection, "_LARGE", large)
        monkeypatch.setattr(selection, "_ridge_in_blocks", jax.jit(ridge, static_argnums=(5, 6, 7)))
        models._solve_ridge.clear_cache()
        problem = features.fourier_selection(key(), *parts, dimension=32, memory=memory)
        return problem.evaluate(None, configs[0], 32)

    ridge, most = selection._ridge_in_blocks.__wrapped__, models._CG_STEPS
    assert errors(2, large=1) == errors(2, large=10**6)
    # No matrix of a direct method fits: 3 * 32^2 numbers. Another limit makes another program.
    assert np.isnan(errors(2, large=1, memory=2000)).all()
    assert np.isnan(errors(2, large=10**6, memory=2000)).all()
    assert errors(most, large=10**6, memory=2001) == errors(2, large=10**6)
    monkeypatch.setattr(selection, "_ACCURATE", np.inf)
    assert errors(2, large=1) != errors(2, large=10**6)
    models._solve_ridge.clear_cache()


TEXTS = [f"{mood} {thing} , truly {mood} !" for mood in ("fine", "dull") for thing in "abcdefgh"]
LABELS = np.repeat([1, 0], 8)


@pytest.fixture(scope="module")
def text_parts():
    order = np.random.RandomState(0).permutation(16)
    texts, labels = np.array(TEXTS, object)[order], LABELS[order]
    return [(texts[i], labels[i]) for i in (slice(0, 8), slice(8, 12), slice(12, 16))]


@pytest.mark.parametrize("weights", ["nb", "sif"])
def test_texts_are_judged_by_scikit_learns_svm(text_parts, weights):
    problem = features.text_selection(*text_parts, cost=0.3)
    config = features.text_config(order=2, weights=weights, binary=True, preprocess="normalize")
    dimension = 2**16  # hardly a collision, wherever an n-gram's bin is
    bags = [fold(hashed_counts(x, config), dimension, True) for x, _ in text_parts]
    totals = statistics(bags[0], text_parts[0][1])
    phis = [weigh(bag, config, totals) for bag in bags]
    svm = LinearSVC(C=0.3, fit_intercept=False, tol=1e-8, max_iter=10**5)
    svm.fit(phis[0], text_parts[0][1])
    truth = [float(np.mean(svm.predict(phis[i]) != text_parts[i][1])) for i in (1, 2)]
    assert problem.evaluate(None, config, dimension) == pytest.approx(truth)


def test_naive_bayes_and_other_weights_learn_side_by_side(text_parts):
    # The two kinds have separate bins, so that shared weights can serve both.
    problem = features.text_selection(*text_parts)
    configs = [features.text_config(weights=weights) for weights in ("nb", "none")]
    shared = problem.share(key(), configs, np.full(2, 0.5), 2**16, whole=True)
    np.testing.assert_array_equal(shared.errors, [0, 0])


def test_texts_under_several_configurations_share_weights(text_parts):
    problem = features.text_selection(*text_parts)
    candidates = features.sample_text(jax.random.key(0), 6)
    # More configurations than validation rows: some cells are empty.
    shared = problem.share(key(), candidates, np.full(6, 1 / 6), 256)
    assert shared.counts.sum() == 4
    np.testing.assert_array_equal(np.isnan(shared.errors), shared.counts == 0)
    trace = baselines.fast_weight_sharing(key(), candidates, problem, 256)
    assert trace.resource.tolist() == [128, 182, 256]


@pytest.mark.long
def test_a_class_missing_from_training_is_never_predicted_and_the_rest_works(parts, configs):
    (x, y), (x_valid, y_valid), test = parts
    kept = (x[y != 3], y[y != 3])
    whole = features.fourier_selection(key(), *parts, dimension=64)
    problem = features.fourier_selection(key(), kept, parts[1], test, dimension=64)
    error, missing = problem.evaluate(None, configs[0], 64).valid, np.mean(y_valid == 3)
    assert missing <= error < whole.evaluate(None, configs[0], 64).valid + missing + 0.1
    # With a tiny bandwidth outputs are noise, and every class may be the largest.
    others = ((x_valid, np.full(80, label)) for label in (3, 4))
    problem = features.fourier_selection(key(), kept, *others, dimension=64)
    error = problem.evaluate(None, features.fourier_config(gamma=100.0), 64)
    assert error.valid == 1 and error.test < 1


@pytest.mark.long
def test_labels_may_be_strings(parts, configs):
    others = [(x, np.array(list("qwertyuiop"))[y]) for x, y in parts]
    problems = (features.fourier_selection(key(), *p, dimension=32) for p in (parts, others))
    one, other = (problem.evaluate(None, configs[0], 32) for problem in problems)
    assert one == pytest.approx(other, abs=tolerance(1e-12, 0.0126))
    single = [(x[y == 3], y[y == 3]) for x, y in parts]
    problem = features.fourier_selection(key(), *single, dimension=32)
    assert problem.evaluate(None, configs[0], 32) == (0, 0)


def test_a_map_that_is_not_finite_has_nan_errors(parts, configs):
    """Rather than that of the class which NaN is taken for."""
    problem = features.fourier_selection(key(), *parts, dimension=32)
    bad = configs[0]._replace(gamma=np.nan)
    assert np.isnan(problem.evaluate(None, bad, 32)).all()
    assert baselines.random_search(key(), [bad, configs[1]], problem, 32).best == 1


def test_training_texts_may_all_be_empty(text_parts):
    """Truth: no weights, hence class 0 for everyone."""
    problem = features.text_selection(([""] * 2, [0, 1]), *text_parts[1:])
    for config in features.sample_text(jax.random.key(0), 6):
        expected = [np.mean(labels) for _, labels in text_parts[1:]]
        assert problem.evaluate(None, config, 64) == pytest.approx(expected)
