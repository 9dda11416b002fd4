"""Claims about the feature maps of `bilevel.spaces.features`: Fourier features and n-grams."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_gradient, tolerance
from scipy.sparse import csr_array
from sklearn.feature_extraction import FeatureHasher
from sklearn.preprocessing import MinMaxScaler, StandardScaler, normalize

from bilevel import spaces
from bilevel.spaces.features import fourier_config, fourier_features, text_config
from bilevel.spaces.features.fourier import KERNELS, PREPROCESS, FourierConfig
from bilevel.spaces.features.text import _TOKENIZERS, BINS, fold, hashed_counts, statistics, weigh

X = np.random.default_rng(0).normal(size=(7, 4)) * [1.0, 5.0, 0.1, 2.0]
X[:, 2], X[4] = 0.1, 0  # a constant column, and a row of zeros


def features_of(x_train):
    features = fourier_features(jax.random.key(3), x_train)
    apply, project = (jax.jit(f, static_argnums=(2, 3)) for f in features[:2])
    return features._replace(apply=apply, project=project)


@functools.cache
def fitted():
    return features_of(X)


def all_configs():
    return [fourier_config(p, k, 0.3) for p, k in itertools.product(PREPROCESS, KERNELS)]


@pytest.mark.long
@pytest.mark.parametrize("kernel", KERNELS)
def test_products_of_features_are_the_kernel_up_to_their_exact_standard_deviation(kernel):
    # Truth: 2 cos u cos v = cos(u - v) + cos(u + v) has, over the draws, mean k(x - y) and variance
    # (1 + k(2 (x - y))) / 2 - k(x - y)^2 + 1/2.
    x, gamma, dimension = X[:6] / 3, 0.7, 2**16
    euclidean, manhattan = (np.linalg.norm(x[:, None] - x, p, axis=-1) for p in (2, 1))
    closed_form = {
        "gaussian": lambda t: np.exp(-gamma * (t * euclidean) ** 2),
        "laplace": lambda t: np.exp(-gamma * t * manhattan),
        "laplace_isotropic": lambda t: np.exp(-gamma * t * euclidean),
    }[kernel]
    phi = fitted().apply(fourier_config("none", kernel, gamma), x, dimension)
    error = np.asarray(phi @ phi.T / dimension) - closed_form(1)
    deviation = np.sqrt(((1 + closed_form(2)) / 2 - closed_form(1) ** 2 + 0.5) / dimension)
    assert np.all(np.abs(error) < 5 * deviation)
    # A bandwidth that is a tenth off fails.
    if kernel == "gaussian":
        off = np.exp(-gamma * (1.1 * euclidean) ** 2) - closed_form(1)
        assert np.any(np.abs(error - off) > 5 * deviation)
    assert np.sqrt(np.mean(error**2)) < 1.5 / np.sqrt(dimension)


@pytest.mark.parametrize("kernel", ["gaussian", "laplace"])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_features_of_sixteen_bits_are_those_of_thirty_two(kernel, dtype):
    """The transforms are infinite at the ends of the interval."""
    x, config = jnp.zeros((1, 4), dtype), fourier_config("none", kernel)
    features_of_sixteen = fitted().apply(config, x, 2000)
    assert features_of_sixteen.dtype == dtype and bool(jnp.isfinite(features_of_sixteen).all())
    whole = fitted().apply(config, x.astype(jnp.float32), 2000)
    # A phase up to 2 pi is rounded, and so is its cosine.
    np.testing.assert_allclose(features_of_sixteen, whole, atol=10 * float(jnp.finfo(dtype).eps))
    if dtype == jnp.bfloat16:  # Cauchy's draws exceed float16
        assert not bool(jnp.isnan(fitted().project(config, jnp.eye(4, dtype=dtype), 20_000)).any())


@pytest.mark.long
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("start", [0, 300])
def test_draws_are_the_same_in_every_dimension_and_block(kernel, start):
    # The rows of the identity project onto the draws themselves.
    def draws(dimension, start=0):
        return np.asarray(fitted().project(fourier_config("none", kernel), eye, dimension, start))

    eye, rtol = jnp.eye(4), tolerance(1e-13, 1e-5)
    whole = draws(1024)
    for dimension in (1, 300):
        part = draws(dimension, start)
        np.testing.assert_allclose(part, whole[:, start : start + dimension], rtol=rtol)
    traced_start = jax.jit(fourier_features(jax.random.key(3), X).project, static_argnums=2)
    part = traced_start(fourier_config("none", kernel), eye, 300, start)
    np.testing.assert_allclose(part, whole[:, start : start + 300], rtol=rtol)
    assert len(np.unique(whole)) > 0.99 * whole.size


@pytest.mark.long
def test_one_configuration_per_row_equals_applying_them_row_by_row():
    indices = np.array([11, 0, 4, 7, 2, 5, 9])
    configs = all_configs()
    rows = jax.tree.map(lambda *leaves: jnp.stack(leaves)[indices], *configs)
    one_by_one = [fitted().apply(configs[i], X, 40)[r] for r, i in enumerate(indices)]
    assert_close(fitted().apply(rows, X, 40), jnp.stack(one_by_one), f64=1e-11)


@pytest.mark.long
def test_all_configurations_see_the_same_directions_and_phases():
    # Truth: z and z / |z_0| point the same way, and the features of 0 are sqrt(2) cos(b).
    configs = {kernel: fourier_config("none", kernel) for kernel in KERNELS}
    pair = configs["gaussian"], configs["laplace_isotropic"]
    gaussian, isotropic = (fitted().project(config, X[:1], 300) for config in pair)
    assert np.all(gaussian / isotropic > 0)
    phases = [fitted().apply(config, jnp.zeros((1, 4)), 300) for config in configs.values()]
    assert_close(phases[1], phases[0])
    assert_close(phases[2], phases[0])


@pytest.mark.long
@pytest.mark.parametrize(
    "name, reference",
    [
        ("none", lambda train, x: x),
        ("minmax", lambda train, x: MinMaxScaler().fit(train).transform(x)),
        ("unit", lambda train, x: normalize(x)),
        ("standardize", lambda train, x: StandardScaler().fit(train).transform(x)),
    ],
)
def test_preprocessing_is_scikit_learns_with_statistics_of_the_training_rows(name, reference):
    train = X.copy()
    train[:, 2] = 0.1  # constant
    features = features_of(jnp.asarray(train))
    for x in (train, X + 1, np.zeros((1, 4))):
        # Truth: scikit-learn; the raw projection is linear in the preprocessed rows.
        expected = features.project(fourier_config("none"), jnp.asarray(reference(train, x)), 50)
        actual = features.project(fourier_config(name), jnp.asarray(x), 50)
        assert_close(actual, expected, f64=1e-11, f32=1e-4)
        assert np.all(np.isfinite(actual))


def test_columns_whose_squares_leave_float32_are_standardised_too():
    # Truth: two different numbers become -1 and 1.
    train = jnp.array([[0.0, 0.0], [1e-30, 1e30]], jnp.float32)
    features = features_of(train)
    projected = features.project(fourier_config("standardize"), train, 30)
    sums = features.project(fourier_config("none"), jnp.eye(2, dtype=jnp.float32), 30).sum(axis=0)
    assert_close(projected, jnp.stack([-sums, sums]), f64=1e-5, f32=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("size", [1e-30, 1e20, 3e38])
def test_rows_whose_squares_leave_float32_have_a_direction_too(size):
    x = jnp.asarray(X[:2] / abs(X[:2]).max(), jnp.float32)
    features, config = features_of(x), fourier_config("unit")
    projected, truth = (features.project(config, s * x, 30) for s in (np.float32(size), 1))
    assert_close(projected, truth, f64=1e-5, f32=1e-5)
    if size < 1e30:  # larger sizes have subnormal slopes
        slope = jax.grad(lambda x: jnp.sum(features.project(config, x, 30) ** 3))
        assert_close(size * slope(np.float32(size) * x), slope(x), f64=1e-3, f32=1e-3)


@pytest.mark.long
def test_derivatives_in_gamma_and_x_are_those_of_finite_differences():
    apply = fitted().apply

    @jax.jit
    def loss(log_gamma, x, kernel):
        config = FourierConfig(jnp.array(2), kernel, jnp.exp(log_gamma))  # unit rows
        return jnp.sum(apply(config, x, 5) ** 3)

    gamma, x = jnp.array(-3.0), X[:2]
    for kernel in range(len(KERNELS)):
        assert_gradient(lambda g, k=kernel: loss(g, x, k), gamma, f64=1e-6, f32=2e-2)
        assert_gradient(lambda x, k=kernel: loss(gamma, x, k), x, f64=1e-5, f32=5e-2)


def test_the_derivative_at_a_row_of_zeros_is_finite():
    config = fourier_config("unit")
    slope = jax.grad(lambda x: jnp.sum(fitted().apply(config, x, 40)))(jnp.zeros((7, 4)))
    assert np.all(np.isfinite(slope))


def test_float32_rows_have_float32_features_equal_to_those_in_float64():
    low = features_of(X.astype("float32"))
    for config in all_configs():
        phi = low.apply(config, X.astype("float32"), 40)
        assert phi.dtype == jnp.float32
        assert_close(phi, fitted().apply(config, X, 40), f64=2e-3, f32=1e-6)


def test_sampled_configurations_fill_the_search_space():
    configs = spaces.features.sample_fourier(jax.random.key(3), 100)
    pairs = {(int(c.preprocess), int(c.kernel)) for c in configs}
    assert pairs == set(itertools.product(range(4), range(2)))
    # Truth: log10 gamma ~ U[-5, 1] has mean -2 and standard deviation sqrt(3).
    exponents = np.log10([float(c.gamma) for c in configs])
    assert exponents.min() >= -5 and exponents.max() <= 1
    assert abs(exponents.mean() + 2) < 4 * np.sqrt(3 / 100)
    options = {"kernels": ["laplace_isotropic"], "gammas": (0.5, 0.5)}
    only = spaces.features.sample_fourier(jax.random.key(3), 5, **options)
    assert all(KERNELS[int(c.kernel)] == "laplace_isotropic" for c in only)
    assert spaces.features.sample_fourier(jax.random.key(3), 0) == []


DOCUMENT = "The well-made film, isn't it?"


@pytest.mark.parametrize(
    "tokenizer, text, tokens",
    [
        ("simple", DOCUMENT, "The wellmade film isnt it"),
        ("simple", " -- «Ça» 5€ café\u0301\n", "Ça 5 café"),
        ("punctuation", DOCUMENT, "The well - made film , isn ' t it ?"),
        ("punctuation", "«Ça»... 5€", "« Ça »... 5 €"),
        ("treebank", DOCUMENT, "The well-made film , is n't it ?"),
        ("treebank", "Dr. Who's U.S. fee: $3,500.50.", "Dr. Who 's U.S. fee : $ 3,500.50 ."),
        (
            "treebank",
            "He'd \"gone\"... at 5:30--o'clock",
            "He 'd \" gone \" ... at 5:30 -- o'clock",
        ),
    ],
)
def test_tokens_are_those_found_by_hand(tokenizer, text, tokens):
    assert _TOKENIZERS[tokenizer](text) == tokens.split(" ")


hasher = functools.partial(FeatureHasher, input_type="string", alternate_sign=False)


@pytest.mark.parametrize(
    "fields, ngrams",
    [
        ({}, "the film is the film"),
        ({"lowercase": False}, "The film is THE film"),
        # "The" and "is" are stop words, "THE" is not.
        ({"stop_words": True}, "film the film"),
        ({"stop_words": True, "lowercase": False, "order": 2}, "film THE film|film THE|THE film"),
        ({"order": 3, "stop_words": True}, "film the film|film the|the film|film the film"),
    ],
)
def test_counts_are_those_of_ngrams_listed_by_hand(fields, ngrams):
    unigrams, *longer = ngrams.split("|")
    counts = hashed_counts(["The film is: THE film!"], text_config(**fields))
    assert counts.shape == (1, BINS)
    expected = hasher(BINS).transform([[*unigrams.split(" "), *longer]])  # scikit-learn's own
    np.testing.assert_array_equal(counts.indices, expected.indices)
    np.testing.assert_array_equal(counts.data, expected.data)


def test_folding_to_a_power_of_two_is_hashing_to_it():
    words = [["one", "two", "three", "one", "two"], [], ["a", "b"] * 4]
    ngrams = [
        [" ".join(w[i : i + n]) for n in (1, 2, 3) for i in range(len(w) - n + 1)] for w in words
    ]
    expected = hasher(16).transform(ngrams)
    counts = hashed_counts([" ".join(w) for w in words], text_config(order=3))
    np.testing.assert_array_equal(fold(counts, 16).toarray(), expected.toarray())
    np.testing.assert_array_equal(fold(counts, 16, binary=True).toarray(), expected.toarray() > 0)


BAGS = csr_array(np.array([[2.0, 1, 0], [0, 1, 0], [1, 0, 0], [0, 0, 0]]))
LABELS = np.array([1, 0, 0, 1])


def test_naive_bayes_weights_are_those_computed_by_hand():
    # P = (2, 1, 0), Q = (1, 1, 0), a = 1: p = (3, 2, 1) / 6, q = (2, 2, 1) / 5.
    weights = np.log2(np.array([3 / 6, 2 / 6, 1 / 6]) / np.array([2 / 5, 2 / 5, 1 / 5]))
    totals = statistics(BAGS, LABELS)
    new = csr_array(np.array([[0.0, 1, 4]]))  # the last bin was never hit in training
    for bags in (BAGS, new):
        actual = weigh(bags, text_config(weights="nb"), totals).toarray()
        np.testing.assert_allclose(actual, bags.toarray() * weights, rtol=1e-14)


def test_totals_are_pooled_over_rows_of_different_configurations():
    # Truth: by hand. The first row is binary, and the second has bigrams.
    parts = [text_config(binary=True), text_config(order=2)]
    texts = ["a a", "a b"]
    rows = [fold(hashed_counts([t], c), 2**20, c.binary) for t, c in zip(texts, parts, strict=True)]
    totals = statistics(csr_array(np.vstack([row.toarray() for row in rows])), np.array([-1, 1]))
    assert totals.negative.sum() == 1 and totals.positive.sum() == 3
    shared = fold(hashed_counts(["a"], parts[0]), 2**20).indices
    assert totals.negative[shared] == 1 and totals.positive[shared] == 1


@pytest.mark.parametrize(
    "preprocess, rows",
    [
        ("none", [[2 / 4, 1 / 3, 0], [0, 1 / 3, 0], [1 / 4, 0, 0], [0, 0, 0]]),
        ("normalize", [[6 / 52**0.5, 4 / 52**0.5, 0], [0, 1, 0], [1, 0, 0], [0, 0, 0]]),
        ("average", [[2 / 12, 1 / 9, 0], [0, 1 / 3, 0], [1 / 4, 0, 0], [0, 0, 0]]),
    ],
)
def test_preprocessing_of_weighted_rows_by_hand_with_an_empty_row(preprocess, rows):
    config = text_config(weights="sif", smoothing=0.2, preprocess=preprocess)
    weighted = weigh(BAGS, config, statistics(BAGS, LABELS))
    assert isinstance(weighted, csr_array)
    np.testing.assert_allclose(weighted.toarray(), rows, rtol=1e-14)
    assert BAGS.data.tolist() == [2, 1, 1, 1]  # untouched


def test_empty_documents_are_rows_of_zeros_in_every_configuration():
    texts, labels = ["", " \n", "...", "the", "fine film"], np.array([0, 1, 0, 1, 1])
    for config in spaces.features.sample_text(jax.random.key(3), 12):
        bags = fold(hashed_counts(texts, config), 64, config.binary)
        weighted = weigh(bags, config, statistics(bags, labels)).toarray()
        assert np.all(np.isfinite(weighted))
        assert not weighted[:2].any()


def test_sampled_text_configurations_are_valid_reproducible_and_varied():
    configs = spaces.features.sample_text(jax.random.key(3), 100)
    assert configs == spaces.features.sample_text(jax.random.key(3), 100)
    assert all(text_config(**config._asdict()) == config for config in configs)
    assert len({config.hashing for config in configs}) > 25
    assert {config.weights for config in configs} == {"nb", "sif"}
    exponents = np.log10([config.smoothing for config in configs])
    assert -5 <= exponents.min() < -4 and 0 < exponents.max() <= 1
