"""Bounds at generated arguments of many orders of magnitude against their formulas in float64."""

import math

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from generated import assert_at_most, assert_near, dtypes, eps, examples, normal, seeds, wide
from hypothesis import given
from hypothesis.strategies import integers

from bilevel import bounds, spectral


def size(low=-3.0, high=6.0):
    return st.floats(low, high).map(lambda exponent: 10.0**exponent)


rows = integers(1, 10**7).map(float)
delta = st.floats(0.001, 0.24)


def vector(low, high, count=3):
    return st.lists(st.floats(low, high), min_size=count, max_size=count).map(np.array)


@examples(5)
@given(dtype=dtypes, dim=integers(1, 30), R=size(-3, 3), shares=vector(-4, -0.01))
def test_the_covering_of_a_ball(dtype, dim, R, shares):
    radii = wide(jnp.asarray(R * 10**shares, dtype))
    logs = bounds.ball_covering(dim, R)(jnp.asarray(radii, dtype))
    assert_near(logs, dim * np.log1p(2 * R / radii), 1e3 * eps(dtype))
    assert_near(bounds.ball_covering(dim, R)(jnp.asarray(1.01 * R, dtype)), 0.0, 0.0)


def simplex_grid(h, radius):
    spread = 1 - 1 / h
    if radius**2 >= spread:
        return 0.0
    k = math.ceil(min(math.sqrt(h) / 2 / radius, spread / radius**2) * (1 - 1e-12))
    return sum(math.log1p(k / j) for j in range(1, h))


@examples(5)
@given(h=integers(1, 12), copies=integers(1, 3), shares=vector(-2, 0.5))
def test_the_covering_of_simplices(h, copies, shares):
    radii = 10**shares
    logs = bounds.simplex_covering(h, copies=copies)(jnp.asarray(radii))
    each = radii / math.sqrt(copies)
    # a ceiling may be off by one
    lower, upper = ([copies * simplex_grid(h, r) for r in rs] for rs in (each * (1 + 1e-5), each))
    assert_at_most(np.asarray(lower) * (1 - 1e-3) - 1e-3, logs)
    assert_at_most(logs, np.asarray(upper) * 1.05 + 1e-3 + copies)


def best(value):
    return min(value(math.exp(t)) for t in np.linspace(-30, 8, 4000))


def assert_best(bound, expected):
    """The minimum over all radii; a grid misses it by a little."""
    assert_near(bound.value, expected, 2e-2)


@pytest.mark.slow
@examples(5)
@given(
    n=rows,
    h=integers(2, 9),
    L=size(-1, 3),
    Gamma=size(-1, 1),
    b=size(-1, 1),
    variance=st.none() | size(-3, 0),
    tau=st.floats(1, 9),
    G=size(-1, 2),
)
def test_uniform_convergence_and_what_follows_from_it(n, h, L, Gamma, b, variance, tau, G):
    covering = bounds.ball_covering(h, 1.0)

    def log_number(radius):
        return h * math.log1p(2 / radius) if radius < 1 else 0.0

    def gap(radius):
        share = (log_number(radius) + tau) / n
        spread = b * math.sqrt(share / 2)
        if variance is not None:
            spread = min(spread, math.sqrt(2 * variance * share) + b * share / 3)
        return 2 * Gamma * L * radius + spread

    def slope_gap(radius):
        return 2 * L * radius + G * (1 + math.sqrt(2 * (log_number(radius) + tau))) / math.sqrt(n)

    family = {"covering": covering, "L": L, "Gamma": Gamma, "b": b, "variance": variance}
    assert_best(bounds.uniform_convergence(n, **family, tau=tau), best(gap))
    risk = best(gap) + b * math.sqrt(tau / 2 / n) + 0.1
    assert_best(bounds.selection_risk(n, **family, tau=tau, delta=0.1), risk)
    slope = bounds.hypergradient_convergence(n, covering=covering, L=L, G=G, tau=tau)
    assert_best(slope, best(slope_gap))


@examples(5)
@given(n=rows, h=integers(1, 19), B=size(), y=size(), lambda0=size(), R=size(0, 2))
def test_the_constants_of_feature_maps(n, h, B, y, lambda0, R):
    root = math.sqrt(n * B)
    t = y * min(1 / math.sqrt(lambda0), R * root / lambda0)
    alpha = math.sqrt(h * B) * (t + R * y * math.sqrt(2) * root / lambda0)
    constants = bounds.feature_map_lipschitz(n, h=h, B=B, y_norm=y, lambda0=lambda0, R=R)
    assert_near(constants.alpha, alpha, 1e-5)
    assert_near(constants.penalty, R * math.sqrt(B) * t / lambda0, 1e-5)


@examples(5)
@given(n=rows, h_eff=size(0, 3), C_bar=size(0, 2), L=size(), Gamma=size(-1, 1), tau=st.floats(1, 9))
def test_the_theorems_of_oymak(n, h_eff, C_bar, L, Gamma, tau):
    h_bar = h_eff * max(math.log(C_bar * L * Gamma * n / h_eff), 0)
    assert_near(bounds.oymak_h_bar(n, h_eff=h_eff, C_bar=C_bar, L=L, Gamma=Gamma), h_bar, 1e-4)
    theorem = bounds.oymak_theorem1(n, h_bar=h_bar, h=7, tau=tau, delta=0.1, C=2.0)
    gap = math.sqrt(2 * (h_bar + tau) / n)
    expected = [gap, 2 * gap + 0.1, math.sqrt(2 * (7 + h_bar + tau) / n)]
    assert_near([bound.value for bound in theorem], expected, 1e-4)
    B, lambda0, R = C_bar, 1 / h_eff, 1 + Gamma
    inside = 20 * R**3 * B * (n / lambda0) ** 2 * (B * n + 1)
    assert_near(bounds.oymak_lemma1(n, h=7, B=B, lambda0=lambda0, R=R), 8 * math.log(inside), 1e-5)
    assert_near(bounds.oymak_lemma2(h_eff, cross=L), L / h_eff, 1e-5)
    assert_near(bounds.oymak_lemma2(h_eff, smoothness=L), math.sqrt(L / h_eff), 1e-5)


@examples(5)
@given(
    entropy=vector(0, 50),
    n=rows,
    m=rows,
    delta=delta,
    B=size(-1, 1),
    exponents=vector(-4, 0),
    excess=st.sampled_from([0.0, 0.1]),
    lipschitz=size(-1, 1),
)
def test_the_theorems_of_khodak(entropy, n, m, delta, B, exponents, excess, lipschitz):
    epsilon, log = 10**exponents, math.log(1 / delta)

    def theorem(slope, selected, spread):
        scale = B / math.sqrt(n)
        cover = slope * epsilon + spread * scale * np.sqrt(entropy + log)
        return excess + selected * scale * math.sqrt(log) + cover.min()

    half = 0.5**0.5
    options = {"delta": delta, "B": B, "epsilon": epsilon, "excess": excess}
    a2 = bounds.khodak_theorem_a2(entropy, n, lipschitz=lipschitz, **options)
    assert_near(a2.value, theorem(2 * lipschitz, half, half), 1e-4)
    printed = bounds.khodak_theorem_a2_as_printed(entropy, n, **options)
    assert_near(printed.value, theorem(3, half, 2**0.5), 1e-4)
    printed = bounds.khodak_theorem_3_1_as_printed(entropy, n, **options)
    assert_near(printed.value, theorem(3, 0.0, 1.5 * 2**0.5), 1e-4)
    a4 = bounds.khodak_corollary_a4(entropy, m, n, lipschitz=lipschitz, **options)
    assert_near(a4.value, B * math.sqrt(log / 2 / m) + theorem(2 * lipschitz, half, half), 1e-4)


@examples(5)
@given(seed=seeds, dtype=dtypes, columns=st.sampled_from([(), (2,)]))
def test_the_gram_matrices_of_labels_and_noise_at_any_scale(seed, dtype, columns):
    rng = np.random.default_rng(seed)
    X = normal(rng, dtype, 6, 3, 4, scale=10 ** rng.uniform(-3, 3))
    y = normal(rng, dtype, 6, *columns)
    features, labels = wide(X), wide(y).reshape(6, -1)
    noise = np.einsum("nhp,n,ngp->hg", features, (labels**2).sum(1), features)
    assert_near(spectral.noise_gram(X, y), noise, 1e3 * eps(dtype))
    M = np.einsum("nc,nhp->chp", labels, features)
    values, vectors = np.linalg.eigh(np.einsum("chp,cgp->hg", M, M))
    gap = (values[-1] - values[-2]) / values[-1]
    alpha = wide(spectral.spectral_alpha(X, y))
    assert_at_most(1 - abs(vectors[:, -1] @ alpha), 1e3 * eps(dtype) / gap)


@examples(5)
@given(seed=seeds, dtype=dtypes, uniform=st.sampled_from([0.0, 0.1, 1.0]))
def test_the_start_on_the_simplex_is_nonnegative_least_squares(seed, dtype, uniform):
    rng = np.random.default_rng(seed)
    alpha, a = normal(rng, dtype, 4, scale=10 ** rng.uniform(-3, 3)), rng.normal(size=(4, 6))
    noise = jnp.asarray(a @ a.T, dtype)
    root = np.linalg.cholesky(wide(noise)).T
    sides = [scipy.optimize.nnls(root, root @ s)[0] for s in (wide(alpha), -wide(alpha))]
    lengths = [s @ wide(noise) @ s for s in sides]
    start = wide(spectral.simplex_start(alpha, noise, uniform=uniform))
    assert_at_most(-start, 0.0)
    assert_near(start.sum(), 1.0, 100 * eps(dtype))
    if abs(lengths[0] - lengths[1]) > 1e-3 * max(lengths):
        best_side = sides[int(np.argmax(lengths))]
        expected = (1 - uniform) * best_side / best_side.sum() + uniform / 4
        assert_near(start, expected, max(1e-4, 1e3 * eps(dtype)))
