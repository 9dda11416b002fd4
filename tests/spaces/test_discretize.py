"""Roberts et al. as tests on rows, by theorems and simulation; diagnostics of searches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
import scipy.special
import scipy.stats
from helpers import assert_close, tolerance

import bilevel
from bilevel.discretize import condition_six, diagnostics, rank_agreement, rank_by_shared_weights
from bilevel.discretize.conditions import factor_simplex
from bilevel.discretize.judgement import judge_choice

every = jax.jit(jax.vmap(condition_six))

ALPHA = (0.2, 0.45, 0.35)


def test_condition_6_is_sufficient_and_not_necessary():
    """F = diag(1, 3, 1): the condition fails for every use, and the argmax is best."""
    outputs, alpha = np.zeros((160, 3)), np.array([0.55, 0.35, 0.1])
    outputs[:3] = np.sqrt(160) * np.diag([1, np.sqrt(3), 1])
    verdict = condition_six(outputs, alpha, outputs @ alpha)
    assert verdict.argmax == verdict.L.argmin() == 0
    assert verdict.D[2] < verdict.D[0] < verdict.D[1]
    assert_close(verdict.L, (0.29, 0.79, 0.74), f32=1e-5)


def instances(seed):
    """1000 times outputs of random second moments, alpha uniform on the simplex, any labels."""
    generator = np.random.default_rng(seed)
    outputs, targets = generator.normal(size=(1000, 6, 4)), generator.normal(size=(1000, 6))
    return outputs, generator.dirichlet(np.ones(4), 1000), targets


def violations(verdict, alpha, allowed=True):
    """Ordered pairs that contradict Theorem 7, up to rounding."""
    small = tolerance(1e-12, 1e-5)
    better = verdict.L[:, :, None] < verdict.L[:, None] - small
    holds = verdict.D[:, :, None] >= verdict.D[:, None]
    return (better & holds & allowed & (alpha[:, None] >= alpha[:, :, None] + small)).sum()


def guaranteed(verdict):
    D_a = np.take_along_axis(np.array(verdict.D), np.array(verdict.argmax)[:, None], 1)
    return (D_a <= verdict.D).all(axis=1)


def test_theorem_7_on_random_realizable_instances():
    """0 violations; without the condition argmax is often wrong: in 27 % of these instances."""
    outputs, alpha, _ = instances(0)
    verdict = every(outputs, alpha, np.einsum("mnk,mk->mn", outputs, alpha))
    assert violations(verdict, alpha) == 0
    wrong = np.array(verdict.argmax != verdict.L.argmin(axis=1))
    sure = guaranteed(verdict)
    assert 0.2 < wrong.mean() < 0.35
    assert 0.1 < sure.mean() < 0.9
    assert not wrong[sure].any()
    assert_close((1 - alpha) ** 2 * verdict.D, verdict.L, f64=1e-12, f32=1e-5)
    assert np.max(verdict.stationarity) < tolerance(1e-13, 1e-5)


def test_a_minimiser_suffices_without_realizability():
    """Also on the boundary; minimisers by NNLS, the sum 1 as a row of large weight."""
    outputs, _, targets = instances(1)
    heavy = np.full((1000, 1, 4), 1e6)
    rows = zip(np.concatenate([outputs, heavy], 1), np.c_[targets, heavy[:, 0, 0]], strict=True)
    minimisers = np.stack([scipy.optimize.nnls(f, y)[0] for f, y in rows])
    alpha = minimisers / minimisers.sum(1, keepdims=True)
    on_boundary = (alpha == 0).any(axis=1)
    assert 0.1 < on_boundary.mean() < 0.95
    verdict = every(outputs, alpha, targets)
    assert np.max(verdict.stationarity) < tolerance(1e-9, 1e-4)
    assert np.min(verdict.L_alpha) >= 0 and np.max(verdict.L_alpha) > 0.1
    assert violations(verdict, alpha, allowed=alpha[:, None] > 0) == 0
    best = verdict.L.argmin(axis=1) == verdict.argmax
    assert best[guaranteed(verdict) & ~np.isnan(verdict.D).any(axis=1)].all()
    # The choice nearest to the mixture is the best one.
    mixture = np.einsum("mnk,mk->mn", outputs, alpha)
    distance = np.square(outputs - mixture[..., None]).mean(axis=1)
    assert (distance.argmin(1) == verdict.L.argmin(axis=1))[~on_boundary].all()


def test_decomposition_and_bound_hold_for_every_alpha():
    """On labels that no mixture generates."""
    outputs, alpha, targets = instances(2)
    verdict = every(outputs, alpha, targets)
    parts = verdict.L_alpha[:, None] + (1 - alpha) ** 2 * verdict.D + verdict.slack
    assert_close(parts, verdict.L, f64=1e-12, f32=1e-5)
    np.testing.assert_allclose((alpha * verdict.slack).sum(1), 0, atol=tolerance(1e-13, 1e-5))
    L = np.array(verdict.L)
    regret = L[np.arange(1000), verdict.argmax] - L.min(axis=1)
    sure = guaranteed(verdict)
    assert (regret[sure] > 0).any()
    assert (regret <= verdict.stationarity / alpha.max(1) + tolerance(1e-12, 1e-5))[sure].all()


MIXING = np.array([[0.5, 1.2, -0.6], [0.6, 0.3, 0.4], [0.2, -0.8, 0.6], [0.2, 0.4, 0.7]])
NOISE = 0.5


def samples(seed, many, rows):
    """Gaussian outputs ``z MIXING``, targets from the mixture plus noise."""
    generator = np.random.default_rng(seed)
    outputs = generator.normal(size=(many, rows, 4)) @ MIXING
    return outputs, outputs @ ALPHA + NOISE * generator.normal(size=(many, rows))


def truth():
    """D and L of the population, with ``F = MIXING' MIXING``."""
    F, away = MIXING.T @ MIXING, np.eye(3) - ALPHA
    Q = 0.5 * np.einsum("ij,jk,ik->i", away, F, away)
    return Q / (1 - np.array(ALPHA)) ** 2, Q + 0.5 * NOISE**2


def test_intervals_cover_and_wrong_verdicts_are_rare():
    D, L = truth()
    outputs, targets = samples(0, 1000, 60)
    verdict = every(outputs, np.tile(ALPHA, (1000, 1)), targets)
    covered = np.abs(verdict.difference - (D[:, None] - D)) <= verdict.half_width + 1e-6
    assert 0.92 < covered[:, ~np.eye(3, dtype=bool)].mean() < 0.97
    for verdicts, values in ((verdict.verdict, D), (verdict.loss_order, -L)):
        undecided = np.array(verdicts) == 0
        assert 0.05 < undecided.mean() < 0.6
        wrong = verdicts != np.where(values[:, None] >= values, 1, -1)
        assert (wrong & ~undecided).mean() < 0.02
    # All slacks are 0. The argmax is farther from the mixture than choice 0, which is best.
    slack_covered = (np.abs(verdict.slack) <= verdict.slack_half_width).all(axis=1)
    assert 0.93 < slack_covered.mean() < 0.995
    assert L.argmin() == 0
    for verdicts in (verdict.trust, verdict.nearest, verdict.condition):
        assert (np.array(verdicts) == 1).mean() < 0.03


def test_without_targets_the_verdicts_are_the_same():
    outputs, targets = (x[0] for x in samples(2, 1, 160))
    verdict, blind = (condition_six(outputs, np.array(ALPHA), y) for y in (targets, None))
    np.testing.assert_array_equal(blind.verdict, verdict.verdict)
    assert blind.trust == blind.nearest == verdict.nearest
    assert blind.L is None


def test_with_two_activations_the_condition_holds_exactly():
    """Theorem 1: D_1 = D_2, to the last bit."""
    generator = np.random.default_rng(3)
    alpha, outputs = generator.dirichlet(np.ones(2), 50), generator.normal(size=(50, 30, 2, 3)) ** 3
    verdict = every(outputs, alpha)
    np.testing.assert_array_equal(verdict.verdict, 1)
    np.testing.assert_array_equal(verdict.condition, 1)
    np.testing.assert_array_equal(verdict.half_width, 0)


def test_a_vertex_needs_no_condition():
    outputs, vertex = samples(4, 1, 160)[0][0], np.array([0.0, 1.0, 0.0])
    verdict = condition_six(outputs, vertex, outputs @ vertex)
    np.testing.assert_array_equal(np.isnan(verdict.D), [False, True, False])
    np.testing.assert_array_equal(verdict.verdict[1], 0)
    assert verdict.condition == verdict.nearest == verdict.trust == 1
    assert verdict.L[1] == verdict.stationarity == 0
    assert condition_six(outputs, vertex, outputs[:, 0]).trust == -1


def test_a_nearer_choice_of_weight_zero_leaves_it_undecided():
    z = np.tile([1.0, -1.0], 80)
    outputs = np.stack([3 * z, -z, 1.4 * z], axis=1)  # f_alpha = 1.4 z
    assert condition_six(outputs, np.array([0.6, 0.4, 0.0])).nearest == 0
    assert condition_six(outputs, np.array([0.59, 0.4, 0.01])).nearest == -1


def test_choices_of_a_pytree_with_ties_and_layers():
    alpha = {"cell": jnp.array([[0.3, 0.4, 0.3], [0.5, 0.0, 0.5]]), "skip": jnp.array([1.0])}
    jax.tree.map(np.testing.assert_array_equal, bilevel.argmax(alpha), {"cell": [1, 0], "skip": 0})
    np.testing.assert_array_equal(bilevel.rank_by_alpha(alpha)["cell"], [[1, 0, 2], [0, 2, 1]])
    np.testing.assert_array_equal(bilevel.top_k(alpha["cell"], 2), [[1, 0], [0, 2]])


def test_in_traced_alpha_nan_counts_as_the_largest_entry():
    alpha = jnp.array([0.2, jnp.nan, jnp.inf])
    assert jax.jit(bilevel.argmax)(alpha) == 1
    assert jax.jit(lambda alpha: bilevel.top_k(alpha, 2))(alpha).tolist() == [1, 2]
    assert jax.jit(bilevel.rank_by_alpha)(alpha).tolist() == [1, 2, 0]


def test_a_ranking_by_rows_has_the_paired_t_interval():
    y, centres = np.random.default_rng(6).normal(size=25), np.array([0.0, 0.8, 0.3])
    ranking = rank_by_shared_weights(lambda c: (y - c) ** 2, centres, confidence=0.9)
    losses = (y[:, None] - centres) ** 2
    assert_close(ranking.losses, losses.mean(0), f32=1e-5)
    assert_close(ranking.standard_error, scipy.stats.sem(losses), f32=1e-5)
    np.testing.assert_array_equal(ranking.order, losses.mean(0).argsort())
    interval = scipy.stats.ttest_rel(losses[:, 0], losses[:, 1]).confidence_interval(0.9)
    ends = ranking.difference[0, 1] + np.array([-1, 1]) * ranking.half_width[0, 1]
    assert_close(ends, interval, f32=1e-4)
    scalar = rank_by_shared_weights(lambda c: jnp.where(c > 0.5, jnp.nan, c), centres)
    np.testing.assert_array_equal(scalar.order, [0, 2, 1])
    assert scalar.half_width is None


def test_rank_correlations_are_those_of_scipy():
    a = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5])
    b = np.array([2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4]) - a
    agreement = rank_agreement(jax.random.key(0), a, b)
    assert_close(agreement.kendall, scipy.stats.kendalltau(a, b).statistic, f32=1e-6)
    assert_close(agreement.spearman, scipy.stats.spearmanr(a, b).statistic, f32=1e-6)
    for r, (low, high) in ((agreement[0], agreement[1]), (agreement[2], agreement[3])):
        assert -1 <= low < r < high <= 1
    assert np.isnan(rank_agreement(jax.random.key(0), a, 0 * a).kendall)
    pair = rank_agreement(jax.random.key(0), a[:2], -a[:2])
    assert pair.kendall == pair.spearman == -1
    np.testing.assert_array_equal(pair.kendall_interval, [-1, 1])


@pytest.mark.parametrize("dtype", ["uint8", "int8", "float32"])
def test_agreement_and_ranking_take_scores_of_any_type(dtype):
    # Differences of integers would wrap.
    key, a, b = jax.random.key(0), np.array([3, 100, 2, 5, 4]), np.array([3, 100, 2, 4, 5])
    agreement = rank_agreement(key, a.astype(dtype), b.astype(dtype))
    assert_close(agreement.kendall, scipy.stats.kendalltau(a, b).statistic, f32=1e-6)
    labels, choices = jnp.array([0, 1, 1, 0]), jnp.array([[0, 1, 1, 1], [1, 0, 0, 0]])
    ranked = rank_by_shared_weights(lambda c: (c != labels).astype(dtype), choices)
    assert_close(ranked.losses, [0.25, 0.75], f32=1e-7)
    assert_close(ranked.difference[0], [0.0, -0.5], f32=1e-7)
    wrong = rank_by_shared_weights(lambda c: c != labels, choices)
    np.testing.assert_allclose(wrong.half_width, ranked.half_width, rtol=1e-6)  # float32 rows


def test_agreement_ranks_infinities_and_is_nan_of_a_traced_nan():
    key, a = jax.random.key(0), jnp.array([1.0, -jnp.inf, jnp.inf, 2.0, 0.0])
    assert rank_agreement(key, a, a).kendall == 1
    assert rank_agreement(key, a > 0, a > 0).kendall == 1
    bad = jnp.array([1.0, jnp.nan, 3.0, 2.0, 0.0])
    assert np.isnan(jax.jit(rank_agreement)(key, bad, a).kendall)


def test_agreement_of_five_choices_is_not_taken_for_certain():
    """Normal correlation 0.9, tau = 2/pi asin 0.9: the bootstrap alone covers 72 %."""
    x, noise = np.random.default_rng(7).normal(size=(2, 400, 5))
    agreements = jax.jit(jax.vmap(lambda k, a, b: rank_agreement(k, a, b, resamples=200)))
    keys = jax.random.split(jax.random.key(0), 400)
    agreement = agreements(keys, x, 0.9 * x + np.sqrt(1 - 0.9**2) * noise)
    tau, rho = 2 / np.pi * np.arcsin(0.9), 6 / np.pi * np.arcsin(0.45)
    for r, interval in ((tau, agreement.kendall_interval), (rho, agreement.spearman_interval)):
        low, high = np.array(interval).T
        assert ((low <= r) & (r <= high)).mean() > 0.93


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_a_choice_is_judged_by_paired_differences_against_every_other(seed):
    """Truth: scipy's paired t statistic, which is the difference in standard errors."""
    rng = np.random.default_rng(seed)
    n, h = int(rng.integers(5, 40)), int(rng.integers(2, 7))
    losses = rng.normal(size=(n, h)) + 5 * rng.normal(size=(n, 1)) + rng.normal(size=h) / 3
    for choice in range(h):
        judgement = judge_choice(losses, choice)
        means, others = losses.mean(0), np.arange(h) != choice
        t = scipy.stats.ttest_rel(losses[:, [choice]], losses[:, others]).statistic
        assert_close(judgement.worse_by[others], means[choice] - means[others])
        assert_close((judgement.worse_by / judgement.standard_error)[others], t)
        assert bool(judgement.as_good) == (t <= 1).all()
        sure = judge_choice(losses, choice, noise=0.0)
        assert bool(sure.as_good) == (choice == means.argmin()) == (int(judgement.rank) == 1)
        assert int(judgement.best) == means.argmin()
        assert int(judgement.rank) == scipy.stats.rankdata(means)[choice]
        # A common offset does not count.
        common = judge_choice(losses + 100 * rng.normal(size=(n, 1)), choice)
        assert bool(common.as_good) == bool(judgement.as_good)


def test_alpha_of_half_precision_is_a_point_of_the_simplex_to_its_own_rounding():
    """Truth: ten times a tenth is off 1 by 1e-3 in bfloat16, with a rounding of 4e-3."""
    outputs = jnp.asarray(np.random.default_rng(0).normal(size=(20, 10)))
    tenth = jnp.full(10, 0.1, jnp.bfloat16)
    assert abs(np.asarray(tenth, float).sum() - 1) > 5e-4
    assert np.isfinite(condition_six(outputs, tenth).D).all()


@pytest.mark.parametrize("choice", [-1, 3])
def test_a_traced_choice_out_of_range_is_not_as_good(choice):
    losses = np.random.default_rng(0).normal(size=(9, 3))
    judgement = jax.jit(judge_choice)(losses, choice)
    assert not judgement.as_good and judgement.rank == 0
    assert judgement.best == losses.mean(axis=0).argmin()
    assert np.isnan(judgement.worse_by).all() and np.isnan(judgement.standard_error).all()


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_outputs_of_16_bits_are_squared_in_32(dtype):
    z = jax.random.normal(jax.random.key(0), (1000, 1))
    outputs, alpha = 5e-5 * z * jnp.array([4.0, 1.0, 0.5]), jnp.array([0.6, 0.3, 0.1])
    args = (x.astype(dtype) for x in (outputs, alpha, jnp.zeros(1000)))
    assert condition_six(*args).trust == -1  # the argmax is the worst choice


def test_factors_have_their_derivatives_on_the_edges_of_the_simplex():
    derivatives = jax.jacobian(lambda a: factor_simplex(a, 0))(jnp.array([0.3, 0.7, 0.0]))
    # gamma_1 = alpha_1 / (alpha_1 + alpha_2), gamma_2 = alpha_2 / (alpha_1 + alpha_2)
    truth = [[0, 0, 0], [0, 0, -1 / 0.7], [0, 0, 1 / 0.7]]
    np.testing.assert_allclose(derivatives, truth, atol=1e-6)
    assert (factor_simplex(jnp.array([0.3, 0.7]), 0) == jnp.array([0.0, 1.0])).all()


def test_the_curvature_is_the_largest_eigenvalue_on_the_tangent_space():
    root, P = np.random.default_rng(0).normal(size=(5, 5)), np.eye(5)
    H = root + root.T
    P[:3, :3] -= 1 / 3
    expected = np.linalg.eigvalsh(P @ H @ P)[-1]

    def loss(w, alpha, batch):
        a = jnp.concatenate([alpha["p"], alpha["s"]])
        return 0.5 * a @ jnp.asarray(H) @ a

    alpha = {"p": jnp.ones(3) / 3, "s": jnp.zeros(2)}
    curvature = diagnostics.alpha_curvature(loss, {"p": "simplex", "s": "box"})
    assert_close(curvature(None, alpha, None), expected, f64=1e-6)  # Lanczos's tolerance, squared


@pytest.mark.parametrize("size", [1, 4, 40])
def test_the_curvature_of_free_alpha_may_be_negative_or_zero(size):
    # Truth: -6 times the identity. A linear loss has curvature 0, where ARPACK would fail.
    alpha = jnp.linspace(0.5, 1.0, size)
    bent = diagnostics.alpha_curvature(lambda w, a, b: -3 * jnp.sum(a**2), "free")
    assert_close(bent(None, alpha, None), -6.0, f64=1e-6)
    flat = diagnostics.alpha_curvature(lambda w, a, b: jnp.sum(a["x"]), {"x": "free"})
    assert flat(None, {"x": alpha}, None) == 0
    in_part = diagnostics.alpha_curvature(lambda w, a, b: 3 * a["x"][0] ** 2, "free")
    assert_close(in_part(None, {"x": alpha}, None), 6.0, f64=1e-6)
    on_simplex = diagnostics.alpha_curvature(lambda w, a, b: -3 * jnp.sum(a**2))
    assert abs(on_simplex(None, alpha / alpha.sum(), None)) < 1e-6  # to rounding, by Lanczos


def test_sets_are_like_alpha_or_one_word_for_it():
    alpha = {"a": jnp.array([[0.5, 0.5]]), "b": {"c": jnp.array([3.0, 1.0])}}
    assert len(diagnostics.simplices("simplex", alpha)) == 2
    assert len(diagnostics.simplices({"a": "box", "b": "simplex"}, alpha)) == 1
    moved = diagnostics.simplex_tangent({"a": "box", "b": "simplex"}, alpha)
    assert moved["b"]["c"].tolist() == [1.0, -1.0] and moved["a"].tolist() == [[0.5, 0.5]]


def test_the_kernels_diagonal_is_the_squared_norm_of_a_rows_gradient():
    w, x = jax.random.normal(jax.random.key(0), (3, 2)), jnp.arange(12.0).reshape(4, 3)
    apply = jax.jit(lambda w, alpha, x: alpha * jnp.tanh(x @ w))
    slopes = [jax.grad(lambda w, i=i: apply(w, 2.0, x)[i, 0])(w) for i in range(4)]
    expected = np.mean([np.sum(np.asarray(s) ** 2) for s in slopes])
    assert_close(diagnostics.kernel_diagonal(apply, w, 2.0, x), expected, f32=1e-5)
