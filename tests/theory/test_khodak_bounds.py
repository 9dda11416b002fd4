"""Bounds of Khodak et al. 2020: proved bounds hold in simulation, printed bounds fail."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_gradient, tolerance

from bilevel import bounds


def validation_losses(risks, rows, trials):
    """Mean 0-1 losses on V [trials, |C|] of configurations that err independently."""
    return np.random.default_rng(0).binomial(rows, risks, (trials, len(risks))) / rows


def test_the_entropy_term_covers_all_configurations_and_is_not_much_too_large():
    """Truth: 256 fair coins. A third less would fail more often than the claimed delta."""
    rows, delta = 100, 0.3
    gaps = 0.5 - validation_losses(np.full(256, 0.5), rows, trials=4000).min(axis=1)
    term = bounds.khodak_theorem_a2(math.log(256), rows, delta=delta).terms["entropy"]
    assert 0 < np.mean(gaps > term) < delta
    assert np.mean(gaps > 2 / 3 * term) > delta


@pytest.mark.parametrize("rows", [4, 20])
@pytest.mark.parametrize("spread", [0.3, 0.8])
def test_the_excess_risk_of_the_selected_configuration_is_below_the_bound(rows, spread):
    risks = 0.5 + spread * np.linspace(-0.5, 0.5, 64)
    losses = validation_losses(risks, rows, trials=1000)
    excess = risks[losses.argmin(axis=1)] - risks.min()
    bound = bounds.khodak_theorem_a2(math.log(64), rows, delta=0.1)
    assert np.mean(excess > bound.value) <= 1 - bound.probability
    assert excess.mean() > 0


def test_the_printed_theorems_fail_for_a_large_slope_and_are_safe_for_finitely_many_functions():
    """E22: all functions into [-e, e], one ball of radius e; loss (e - y f) / (2 e) of slope 50."""
    e, rows = 0.01, 1000
    labels = np.random.default_rng(0).choice([-1, 1], size=(2, rows))  # of V, and of new rows

    def loss(f, y):
        return np.mean((e - y * f) / (2 * e))

    best, selected = e * labels[1], -e * labels[1]  # on new rows; on V both are right
    assert loss(e * labels[0], labels[0]) == 0
    excess = loss(selected, labels[1]) - loss(best, labels[1])
    assert excess == 1
    safe = "epsilon = 0, or the loss is 3/2-Lipschitz"
    for printed in (bounds.khodak_theorem_a2_as_printed, bounds.khodak_theorem_3_1_as_printed):
        bound = printed(0.0, rows, epsilon=e)
        assert bound.value < 0.2 < excess
        assert dict(bound.assumptions)[safe] is None
        assert dict(printed(math.log(8), 100).assumptions)[safe]  # finitely many functions
    bound = bounds.khodak_theorem_a2(0.0, rows, epsilon=e, lipschitz=1 / (2 * e))
    assert excess <= bound.value
    assert bound.vacuous


def test_version_entropy_counts_the_covers_of_a_union():
    """Truth: constants in [0, 1] and [3, 5] have 2 and 4 balls of radius 1/4 (1 and 2 of 1/2)."""
    logs = jnp.log(jnp.array([[2.0, 4.0], [1.0, 2.0]]))
    assert_close(bounds.version_entropy(logs), np.log([6, 3]), f32=1e-6)


def test_sample_size_solves_theorem_a2_for_the_rows():
    """Truth: the closed form, the least of three radii; the last is beyond the gap."""
    entropy, epsilon = np.array([9.0, 6.0, 5.0]), np.array([0.01, 0.02, 0.1])
    options = {"delta": 0.01, "B": 2.0, "epsilon": epsilon, "lipschitz": 0.4}
    bound = jax.jit(lambda n: bounds.khodak_theorem_a2(entropy, n, **options))
    rows = bounds.sample_size(0.07, bound)
    roots = math.sqrt(math.log(100)) + np.sqrt(entropy + math.log(100))
    exact = (2 * roots / np.maximum(0.07 - 0.8 * epsilon, 1e-9)) ** 2 / 2
    assert abs(rows - math.ceil(exact.min())) <= tolerance(0, 1e-5) * rows


def test_a_bound_is_differentiable_and_compiles():
    value = lambda x: bounds.khodak_theorem_a2(x[0], 100, excess=x[1], B=x[2]).value  # noqa: E731
    assert_gradient(value, jnp.array([3.0, 0.1, 1.5]), f64=1e-8, f32=1e-2)


def hinge_solution(penalty, norm):
    """Minimiser of ``penalty w^2 + max(0, 1 - w / norm)`` by a search of 10^5 points."""
    w = np.linspace(0, 1.1 * norm, 100_001)
    return w[np.argmin(penalty * w**2 + np.maximum(0, 1 - w / norm))]


def test_corollary_a1_needs_another_lambda_than_the_printed_one():
    """Truth: the hinge loss of one point x = 1/W, y = 1, with W^2 = 1 / lambda; best risk 0."""
    ratios = []
    for n in (10**4, 10**6, 10**8):
        printed = math.sqrt(math.log(20) / n)
        norm = printed**-0.5
        bound = bounds.khodak_corollary_a1(norm, n, delta=0.05, C=1.0)
        excess = 1 - hinge_solution(printed, norm) / norm
        assert abs(excess - 0.5) < 1e-4
        assert excess <= bound.terms["rate at the printed lambda"]
        ratios.append(excess / float(bound.value))
        right = float(bound.terms["lambda, for sums"]) / n
        assert 1 - hinge_solution(right, norm) / norm <= bound.value
    # No constant helps: the rate falls by sqrt(10) for 100 times the rows, the excess stays.
    assert_close(np.divide(ratios[1:], ratios[:-1]), [10**0.5] * 2, f64=2e-2, f32=2e-2)


def test_corollaries_a2_and_a3_are_rates():
    """Truth: sums of inverse roots; log(1 / delta) = 4, log(257 / delta) = 9.549076 (|C| = 256)."""
    delta = math.exp(-4)
    bound = bounds.khodak_corollary_a2(math.sqrt(8), 900, 400, 256, delta=delta, C=2.0)
    assert_close(bound.value, 2 * (0.2 + math.sqrt(9.549076) / 20), f64=1e-7, f32=1e-6)
    training = bounds.khodak_corollary_a1(8**0.5, 900, delta=delta, C=1).value
    assert_close(bound.terms["training"], training)
    assert bound.unspecified
    bound = bounds.khodak_corollary_a3(900, 400, 256, delta=delta, C=2.0)
    assert_close(bound.value, 2 * (16 / 30 + math.sqrt(9.549076) / 20), f64=1e-7, f32=1e-6)
    assert_close(bound.terms["lambda, for sums"], 30.0)
    assert bound.vacuous


def test_a_bound_of_a_vmap_is_printed():
    both = jax.vmap(lambda n: bounds.khodak_theorem_a2(math.log(256), n))(jnp.array([100, 1000]))
    assert "value = [0.329" in str(both)
    assert "assumes loss in [0, B]: not checked" in str(both)
