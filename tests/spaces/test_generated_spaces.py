"""Discretization, genotypes, data and baselines on generated inputs, compared with numpy."""

import itertools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from generated import assert_near, dtypes, eps, examples, normal, seeds, simplex_point, wide
from hypothesis import given
from hypothesis.strategies import integers, sampled_from

import bilevel
import ntk
from bilevel import baselines, data, spaces
from bilevel.contracts import Shared
from bilevel.discretize.conditions import factor_simplex
from bilevel.spaces import darts, nasbench201
from bilevel.spaces.darts import genotype as darts_genotypes
from bilevel.spaces.nasbench201 import judging
from ntk import networks


@examples(5)
@given(seed=seeds, dtype=dtypes, k=integers(1, 4), i=integers(0, 3))
def test_choices_and_factors_of_a_point_of_the_simplex(seed, dtype, k, i):
    alpha = simplex_point(np.random.default_rng(seed), dtype, 3, 4)
    order = np.argsort(-wide(alpha), axis=-1, kind="stable")
    np.testing.assert_array_equal(bilevel.argmax(alpha), order[..., 0])
    np.testing.assert_array_equal(bilevel.top_k(alpha, k), order[..., :k])
    np.testing.assert_array_equal(bilevel.rank_by_alpha(alpha), order)
    gamma = wide(factor_simplex(alpha, i))
    share = wide(alpha)[..., i, None]
    assert_near(share * np.eye(4)[i] + (1 - share) * gamma, wide(alpha), 20 * eps(dtype))
    assert (gamma[..., i] == 0).all()


@pytest.mark.slow
@examples(3)
@given(seed=seeds, dtype=dtypes)
def test_condition_six_is_its_formula(seed, dtype):
    rng, n, h = np.random.default_rng(seed), 40, 4
    outputs = normal(rng, dtype, n, h, scale=10 ** rng.uniform(-3, 3))
    alpha = simplex_point(rng, dtype, h)
    targets = outputs @ alpha + normal(rng, dtype, n)
    f, a, y = wide((outputs, alpha, targets))
    L = 0.5 * ((f - y[:, None]) ** 2).mean(0)
    gammas = (1 - np.eye(h)) * a / (1 - a)[:, None]
    D = 0.5 * ((f - f @ gammas.T) ** 2).mean(0)
    verdict = bilevel.condition_six(outputs, alpha, targets)
    rounding = 200 * eps(dtype) * (1 + 1 / (1 - a).min())
    assert_near(verdict.L, L, rounding)
    assert_near(verdict.D, D, rounding)
    assert int(verdict.argmax) == a.argmax()
    assert verdict.trust < 1 or L[a.argmax()] <= L.min() * (1 + 1e-6)


@examples(5)
@given(
    seed=seeds, edits=st.lists(st.tuples(integers(0), sampled_from("()[]',019ax_ ")), max_size=3)
)
def test_a_genotype_of_darts_survives_its_text_and_broken_texts_are_refused(seed, edits):
    corner = darts_genotypes.draw_corner(jax.random.key(seed))
    cell = darts_genotypes.genotype(corner)
    assert darts.parse_genotype(str(cell)) == cell
    np.testing.assert_array_equal(darts_genotypes.one_hot(cell)["normal"], corner["normal"])
    text = list(str(cell))
    for place, letter in edits:
        text[place % len(text)] = letter
    try:
        other = darts_genotypes.one_hot(darts.parse_genotype("".join(text)))
    except ValueError:
        return
    assert other["normal"].sum() == 8


@examples(3)
@given(seed=seeds, sizes=st.lists(integers(1, 300), min_size=3, max_size=3))
def test_drawn_parts_of_digits_have_their_sizes_and_no_row_twice(seed, sizes):
    names = dict(zip(("train", "valid", "test"), sizes, strict=True))
    (parts,) = data.draw_splits("digits", [jax.random.key(seed)], **names)
    assert [len(labels) for _, labels in parts] == sizes
    rows = np.concatenate([np.asarray(x).reshape(len(x), -1) for x, _ in parts])
    assert len(np.unique(rows, axis=0)) == len(rows)
    train = jnp.arange(sizes[0])
    batch = bilevel.minibatches(1 + seed % sizes[0])(jax.random.key(seed), (train, 2 * train))
    np.testing.assert_array_equal(2 * batch[0], batch[1])


METHODS = ["random_search", "successive_halving", "hyperband"]
METHODS += ["weight_sharing", "fast_weight_sharing"]


@pytest.mark.parametrize("name", METHODS)
@examples(8)
@given(seed=seeds, count=sampled_from([1, 2, 7]), budget=sampled_from([4, 100]))
def test_without_noise_a_baseline_finds_the_best_configuration(name, seed, count, budget):
    """Hyperband finds the best one of those that it draws."""
    errors = np.random.default_rng(seed).permutation(count) / 10 + 0.05

    def share(key, configs, probabilities, resource, *, whole=False):
        return Shared(np.array([errors[c] for c in configs]), np.full(len(configs), 10))

    problem = baselines.Selection(lambda key, config, resource: errors[config], share)
    method, options = getattr(baselines, name), {"progress": False, "retrain_test": False}
    trace = method(jax.random.key(seed), list(range(count)), problem, budget, **options)
    drawn = np.unique(np.concatenate(trace.candidates)) if name == "hyperband" else range(count)
    assert trace.best == min(drawn, key=lambda i: errors[i])
    assert len(trace.calls) == len(trace.valid)
    if len(trace.valid):
        assert_near(trace.valid[-1], errors[trace.best], 1e-6)


# ----------------------------------------------------------------------------- spaces

SPACES = {
    "on_simplices": lambda: spaces.on_simplices("abc", (3,)),
    "activation_space": lambda: spaces.activation_space(["relu", "tanh"], width=4),
    "kernel_mixture_space": lambda: spaces.kernel_mixture_space({"a": jnp.dot, "b": jnp.dot}),
    "skip_space": lambda: spaces.skip_space(["relu", "tanh"], depth=4, width=4),
    "darts_space": lambda: darts.darts_space(("skip_connect", "avg_pool_3x3"), cells=1, channels=2),
    "nasbench201_space": lambda: nasbench201.nasbench201_space(cells=1, channels=2),
    "network_space": lambda: spaces.network_space(
        networks.serial(networks.dense("variance"), networks.act([ntk.relu, ntk.erf], "activation"))
    ),
}


@pytest.mark.parametrize("name", SPACES)
@examples(3)
@given(seed=seeds)
def test_a_drawn_architecture_is_a_vertex_that_stands_for_it(name, seed):
    space = SPACES[name]()
    architecture = space.discretize(space.draw(jax.random.key(seed)))
    vertex = space.one_hot(architecture)
    # Only this space has numbers in its architectures.
    expected = pytest.approx(architecture) if name == "network_space" else architecture
    assert space.discretize(vertex) == expected
    assert jax.tree.structure(vertex) == jax.tree.structure(space.start())
    for a, b in zip(jax.tree.leaves(vertex), jax.tree.leaves(space.start()), strict=True):
        assert a.shape == b.shape


# ----------------------------------------------------------------------------- judging


@examples(5)
@given(seed=seeds, m=integers(5, 30), ties=st.booleans())
def test_rank_agreement_is_that_of_scipy(seed, m, ties):
    a, b = np.random.default_rng(seed).normal(size=(2, m))
    if ties:
        a, b = np.round(a), np.round(b)
    agreement = bilevel.rank_agreement(jax.random.key(seed), a, b, resamples=20)
    assert_near(agreement.kendall, scipy.stats.kendalltau(a, b).statistic, 1e-6)
    assert_near(agreement.spearman, scipy.stats.spearmanr(a, b).statistic, 1e-6)


@examples(20)
@given(seed=seeds, m=integers(1, 8), ties=st.booleans(), draw=st.data())
def test_the_best_of_k_at_random_is_the_mean_over_all_subsets(seed, m, ties, draw):
    k = draw.draw(integers(1, m))
    rng = np.random.default_rng(seed)
    valid, test = rng.integers(0, 5, m) if ties else rng.permutation(m) / 10, rng.normal(size=m)
    means = []
    for subset in map(list, itertools.combinations(range(m), k)):
        means.append(test[subset][valid[subset] == valid[subset].max()].mean())
    assert_near(judging.best_of_k_random(valid, test, k), np.mean(means), 1e-12)
    if ties:  # of the validation accuracy, which `best_of_k` breaks at random
        return
    score = rng.permutation(m)
    best = max(np.argsort(score)[-k:], key=lambda i: valid[i])
    (selected,) = judging.best_of_k(score, valid, test, k, pool=m, draws=1)
    assert selected == test[best]


@examples(5)
@given(seed=seeds, m=integers(1, 20))
def test_the_sum_of_log_ranks_is_its_formula(seed, m):
    scores = np.round(np.random.default_rng(seed).normal(size=(3, m)), 1)
    expected = sum(np.log(scipy.stats.rankdata(score) / m) for score in scores)
    assert_near(judging.sum_of_log_ranks(*scores), expected, 1e-12)


@examples(2)
@given(seed=seeds, size=integers(2, 6))
def test_the_curvature_of_a_quadratic_is_its_largest_eigenvalue_along_the_simplex(seed, size):
    rng = np.random.default_rng(seed)
    half, tangent = rng.normal(size=(size, size)), np.eye(size) - 1 / size
    H, alpha = half @ half.T, jnp.asarray(rng.dirichlet(np.ones(size)))
    for sets, matrix in ("free", H), ("simplex", tangent @ H @ tangent):
        curvature = bilevel.discretize.alpha_curvature(lambda w, a, _: 0.5 * a @ H @ a, sets)
        assert_near(curvature(None, alpha, None), np.linalg.eigvalsh(matrix)[-1], 2e-4)
