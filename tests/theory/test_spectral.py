"""The spectral estimator of Oymak et al. 2021, section 5: against numpy, scipy and simulation.

"MATH" values were computed independently, in float64, from the formulas.
"""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
import scipy.optimize
import scipy.stats
from helpers import assert_close, finite_differences, tolerance

from bilevel import spectral
from bilevel.theory.spectral.columns import Columns

N, H, P = 7, 4, 10
RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((N, H, P)), RNG.standard_normal((N, 2))
KERNELS = np.einsum("nip,mjp->ijnm", X, X)


def streamed(x, size=4):
    """The same features in blocks of columns, the last one filled up with zeros."""
    count = -(-x.shape[2] // size)
    x = np.pad(x, ((0, 0), (0, 0), (0, count * size - x.shape[2])))
    return Columns(lambda j: jax.lax.dynamic_slice_in_dim(x, j * size, size, axis=2), count)


WHITENED = jax.jit(partial(spectral.spectral_alpha, whiten=True))
FEATURES = {"dense": X, "streamed": streamed(X), "kernels": KERNELS}


def positive(alpha):
    return alpha * np.sign(alpha.sum())


@pytest.mark.parametrize(("form", "labels"), [("dense", Y[:, 0]), ("streamed", Y), ("kernels", Y)])
def test_alpha_is_the_top_left_singular_vector_whatever_the_form_of_the_features(form, labels):
    m = np.einsum("nhp,nc->hcp", X, labels.reshape(N, -1)).reshape(H, -1)
    alpha = jax.jit(spectral.spectral_alpha)(FEATURES[form], labels)
    assert_close(alpha, positive(np.linalg.svd(m)[0][:, 0]), f64=1e-12, f32=1e-4)


@pytest.mark.parametrize("form", FEATURES)
def test_whitened_alpha_solves_the_generalized_eigenproblem(form):
    """Truth: scipy's solution of G v = lambda N v, and N by its definition: all 2^n signs."""

    def gram(labels):
        m = np.einsum("nhp,nc->hcp", X, labels).reshape(H, -1)
        return m @ m.T

    signs = np.array(list(itertools.product([1, -1], repeat=N)))
    noise = np.mean([gram(s[:, None] * Y) for s in signs], axis=0)
    assert_close(spectral.noise_gram(FEATURES[form], Y), noise, f64=1e-12, f32=1e-5)
    top = scipy.linalg.eigh(gram(Y), noise)[1][:, -1]
    alpha = WHITENED(FEATURES[form], Y)
    assert_close(alpha, positive(top / np.linalg.norm(top)), f64=1e-6, f32=1e-2)


def test_whitening_undoes_sizes_and_correlations_of_the_feature_maps():
    """Truth: for features B X, the estimate a becomes B'^-1 a, with the same prediction."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((100, 3, 40))
    y = x[:, 2, 0] + 0.3 * rng.standard_normal(100)
    mix = np.array([[20.0, 0, 0], [0, 1, 0.9], [0, 0, 0.5]])
    mixed = np.einsum("gh,nhp->ngp", mix, x)
    plain, whitened = (np.array(f(mixed, y)) for f in (jax.jit(spectral.spectral_alpha), WHITENED))
    assert plain[0] > 0.95  # the largest map
    back = mix.T @ whitened
    expected = np.array(WHITENED(x, y))
    assert_close(positive(back / np.linalg.norm(back)), expected, f64=1e-6, f32=1e-2)
    assert expected[2] > 0.95


def test_copies_of_a_map_and_maps_that_are_zero_do_no_harm():
    alpha = WHITENED(np.concatenate([X, X[:, :1], np.zeros((N, 1, P))], axis=1), Y)
    merged = np.array(alpha[:H]) + np.eye(H)[0] * float(alpha[H])
    merged = positive(merged / np.linalg.norm(merged))
    assert_close(merged, WHITENED(X, Y), f64=1e-6, f32=1e-2)
    assert alpha[-1] == 0


def test_alpha_is_differentiable_though_other_eigenvalues_are_equal():
    """With 2 columns for 4 maps, two are 0."""
    x, y = jnp.asarray(X[:, :, :2], float), jnp.asarray(Y[:, 0], float)
    alpha = partial(WHITENED, x)
    assert_close(jax.jit(jax.jacrev(alpha))(y), finite_differences(alpha, y), f64=1e-7, f32=2e-2)


def test_memory_is_that_of_one_block():
    keys = partial(jax.random.fold_in, jax.random.key(0))
    features = Columns(lambda j: jax.random.normal(keys(j), (N, H, 2000), jnp.float32), 1000)
    lowered = WHITENED.lower(features, Y.astype(np.float32))
    block = 4 * N * H * 2000
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 10 * block


def test_the_start_without_noise_is_the_positive_part():
    alpha = jnp.array([-0.6, 0.1, -0.2])
    assert_close(spectral.simplex_start(alpha, uniform=0.0), [0.75, 0, 0.25], f32=1e-6)
    expected = [0.45 + 2 / 15, 2 / 15, 0.15 + 2 / 15]
    assert_close(spectral.simplex_start(-alpha, uniform=0.4), expected)


@pytest.mark.parametrize(("p", "form"), [(5, np.asarray), (40, streamed)])
def test_the_weights_are_least_squares_or_of_least_norm(p, form):
    rng = np.random.default_rng(3)
    train, valid, new = (rng.standard_normal((n, 3, p)) for n in (12, 20, 6))
    y, y_valid = rng.standard_normal((12, 2)), rng.standard_normal((20, 2))

    @jax.jit
    def run(train, valid, new):
        estimate = spectral.spectral_estimator((train, y), (valid, y_valid))
        return estimate.alpha, estimate.predict(train, new)

    alpha, predictions = run(form(train), form(valid), form(new))
    phi, phi_new = (np.einsum("h,nhp->np", np.array(alpha), x) for x in (train, new))
    assert_close(predictions, phi_new @ np.linalg.lstsq(phi, y, rcond=None)[0], f64=1e-8, f32=1e-2)


def test_limits_at_the_reference_values():
    """MATH, section 5, and its formula of the excess risk."""
    P, H = np.array([1.5, 2, 4, 8]), np.array([0.01, 0.05, 0.1, 0.02])
    limits = jax.jit(spectral.spectral_limits)(P, H)
    rho2 = [0.975247524752, 0.857142857143, 0.545454545455, 0.823529411765]
    risks = [0.399339933993, 0.714285714286, 1.015151515152, 0.922268907563]
    assert_close(limits.correlation_squared, rho2, f64=1e-11, f32=1e-6)
    assert_close(limits.risk, risks, f64=1e-11, f32=1e-6)
    excess = H * (1 + P) * (2 * P - 1) / ((1 + H) * P * (P - 1))
    assert_close(limits.excess, excess, f64=1e-13, f32=1e-6)
    risk, at = jax.jit(lambda at: spectral.spectral_limits(*at).risk), jnp.array([2.0, 0.2])
    assert_close(jax.grad(risk)(at), finite_differences(risk, at), f64=1e-8, f32=1e-2)


def test_limits_at_their_edges():
    """Below the threshold p h = n^2 the overlap is positive; p = n is infinite, unless h = 0."""
    assert all(jnp.isnan(x) for x in jax.jit(spectral.spectral_limits)(-2.0, 0.1)[:4])
    P, H = np.array([2, 2, 1, 1, 0.5]), np.array([0.499, 0.501, 0.1, 0, 0.2])
    at = spectral.spectral_limits(P, H)
    assert at.recovers.tolist() == [True, False, True, True, True]
    assert at.correlation_squared[0] > 0 == at.correlation_squared[1]
    assert at.risk[2] == np.inf and at.risk[3] == 0
    assert_close(at.risk[4], 2 * 0.2 * 1.5 / 1.2, f32=1e-6)  # (1 - rho^2) / (1 - P)


def test_the_papers_constants_64_and_200_are_2_and_2_25():
    """(11) and (12) hold on a grid with room to spare: truth is 2 P H and 2.25 H / (1 - 1/P)."""
    P, H = np.meshgrid(1 + np.logspace(-3, 3, 200), np.logspace(-6, -0.01, 200))
    limits = spectral.spectral_limits(P, H)
    lost = np.array(1 - limits.correlation_squared) / np.minimum(P * H, 0.5)
    assert lost.max() <= 2 + tolerance(1e-9, 1e-1)  # cancellation where P H is 1e-6
    learned = np.array(limits.recovers)
    excess = (np.array(limits.excess) * (1 - 1 / P) / H)[learned]
    assert 2.24 < excess.max() <= 2.25 * (1 + tolerance(1e-12, 1e-4))


@pytest.mark.long
@pytest.mark.parametrize(("p", "h"), [(200, 10), (50, 30)])
def test_simulated_overlap_and_risk_approach_the_limits(p, h):
    n, keys = 100, jax.random.split(jax.random.key(0), 50)
    draws = jax.jit(jax.vmap(lambda key: spectral.spectral_sample(key, n, p, h)))(keys)
    limits = spectral.spectral_limits(p / n, h / n)
    for name in ("correlation_squared", "risk"):
        simulated = np.array(getattr(draws, name))
        error = simulated.std(ddof=1) / len(keys) ** 0.5
        assert abs(simulated.mean() - getattr(limits, name)) < 4 * error + 2 / n


@pytest.mark.long
def test_the_estimator_on_whole_tensors_is_distributed_as_the_fast_sample():
    """Truth: Theorem 4's experiment, literally; Kolmogorov-Smirnov, 300 runs each."""
    n, h, p, runs = 12, 3, 18, 300
    alpha, theta = (v / np.linalg.norm(v) for v in (np.arange(1.0, h + 1), np.ones(p)))
    train, valid = np.random.default_rng(4).standard_normal((2, runs, n, h, p))
    labels = [np.einsum("h,knhp,p->kn", alpha, x, theta) for x in (train, valid)]
    sides = (train, labels[0]), (valid, labels[1])
    estimator = jax.jit(jax.vmap(spectral.spectral_estimator))(*sides)
    rho = np.array(estimator.alpha) @ alpha
    weights = np.einsum("kh,knhp,kn->kp", estimator.alpha, train, estimator.dual)
    risk = 1 - 2 * rho * (weights @ theta) + (weights**2).sum(1)  # |alpha theta' - its estimate|^2
    keys = jax.random.split(jax.random.key(0), runs)
    draws = jax.jit(jax.vmap(lambda key: spectral.spectral_sample(key, n, p, h)))(keys)
    assert scipy.stats.ks_2samp(rho**2, draws.correlation_squared).pvalue > 0.01
    assert scipy.stats.ks_2samp(risk, draws.risk).pvalue > 0.01


def test_the_direction_has_no_unit():
    x, y = X.astype(np.float32), np.asarray(X[:, 1, 0], np.float32)
    alpha = spectral.spectral_alpha(1e-12 * x, np.float32(1e-12) * y)
    np.testing.assert_allclose(alpha, spectral.spectral_alpha(x, y), atol=1e-4)
    assert jnp.isnan(jax.jit(spectral.spectral_alpha)(x, 0 * y)).all()
    start = spectral.simplex_start(jnp.array([-1e-25, -3e-25], jnp.float32), uniform=0.0)
    np.testing.assert_allclose(start, [0.25, 0.75], rtol=1e-5)
    assert jnp.isfinite(spectral.simplex_start(jnp.array([-0.6, -0.8]), jnp.zeros((2, 2)))).all()
