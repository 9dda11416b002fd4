"""Bounds of Oymak et al. 2021: proved bounds hold in simulation, printed bounds fail.

"MATH" values were computed independently, in float64, from the formulas.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_gradient, tolerance

from bilevel import bounds
from ntk import activation, relu, swish, tanh

BALL = bounds.ball_covering(9, 1.0)
DISK = bounds.ball_covering(2, 1.0)


@functools.partial(jax.jit, static_argnames="covering")
def select(n, L, Gamma, b, delta, covering):
    return bounds.selection_risk(n, covering=covering, L=L, Gamma=Gamma, b=b, delta=delta)


def gap(n, L, Gamma=1.0, b=1.0):
    return select(n, L, Gamma, b, 0.0, covering=BALL).terms["gap"]


def test_the_explicit_bound_of_theorem_1():
    """MATH, section 10; to all digits by scipy.optimize.minimize_scalar."""
    bound = select(1000.0, 100.0, 1.0, 1.0, 0.0, covering=BALL)
    assert_close(bound.terms["gap"], 0.231775746784816, f64=1e-12, f32=1e-5)
    assert_close(bound.value, 0.231775746784816 + math.sqrt(3 / 2000), f64=1e-12, f32=1e-5)
    assert bound.probability == pytest.approx(1 - 2 * math.exp(-3))
    assert not bound.vacuous
    # Scales: loss and its slope together; slope against Lipschitz constant.
    assert_close(gap(1000.0, 25.0, 8.0, 2.0), 2 * bound.terms["gap"], f32=1e-5)
    assert select(50.0, 100.0, 1.0, 1.0, 0.0, covering=BALL).vacuous


def test_the_best_radius_is_differentiated_through():
    value = lambda x: gap(1000 * x[0], 100 * x[1], 1.0, x[2])  # noqa: E731
    assert_gradient(value, jnp.ones(3), f64=1e-8, f32=3e-2)
    many = jax.vmap(lambda n: gap(n, 100.0))(jnp.array([500.0, 1000.0]))
    assert_close(many[1], 0.231775746784816, f64=1e-12, f32=1e-5)


def linear_family(rows):
    """Predictors alpha.x, alpha in the unit disk, for x and y in [-1, 1] of 40 equally likely rows.

    x [40, 2], y [40], alphas [m, 2] in the disk, and the share of each row in V [1000, 40].
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 2))
    x /= np.maximum(1, np.linalg.norm(x, axis=1, keepdims=True))
    grid = np.linspace(-1, 1, 41)
    alphas = np.stack(np.meshgrid(grid, grid), -1).reshape(-1, 2)
    alphas = alphas[np.linalg.norm(alphas, axis=1) <= 1]
    shares = rng.multinomial(rows, np.full(40, 1 / 40), 1000) / rows
    return x, rng.choice([-1.0, 1.0], 40), alphas, shares


def test_risk_and_selection_are_within_the_bounds_in_all_draws():
    """Truth: exact risks of |y - alpha.x| in [0, 2]; the ratio does not depend on the rows."""
    ratios = []
    for rows in (100, 1600):
        x, y, alphas, shares = linear_family(rows)
        losses = np.abs(y - alphas @ x.T)
        risk, validation = losses.mean(1), shares @ losses.T
        gaps = np.abs(validation - risk).max(1)
        excess = risk[validation.argmin(1)] - risk.min()
        bound = select(float(rows), 1.0, 1.0, 2.0, 0.1, covering=DISK)
        assert np.all(gaps < bound.terms["gap"])
        assert np.all(excess + 0.1 < bound.value)
        assert bound.value < bound.terms["2 gap + delta"]
        assert not bound.vacuous
        ratios.append(gaps.max() / float(bound.terms["gap"]))
    assert 0.15 < ratios[1] < ratios[0] < 0.6, ratios


def test_the_variance_of_the_loss_makes_the_bound_tighter_and_keeps_it_true():
    x, y, alphas, shares = linear_family(1600)
    losses = np.abs(y - alphas @ x.T)
    gaps = np.abs((shares - 1 / 40) @ losses.T).max(1)
    variance, family = losses.var(axis=1).max(), {"covering": DISK, "L": 1.0, "b": 2.0}
    bound = jax.jit(lambda v: bounds.uniform_convergence(1600, **family, variance=v).value)
    assert gaps.max() < bound(variance) < 0.8 * bound(1.0)
    hoeffding = select(1600.0, 1.0, 1.0, 2.0, 0.0, covering=DISK).terms["gap"]
    assert_close(bound(1.0), hoeffding, f32=1e-5)  # b^2 / 4, the most there can be


def test_hypergradients_are_within_the_bound_in_all_draws():
    """Truth: exact gradients (alpha.x - y) x of the squared loss, at most 2, 1-Lipschitz."""
    rows = 400
    x, y, alphas, shares = linear_family(rows)
    gaps = np.einsum("dr,arc->dac", shares - 1 / 40, (alphas @ x.T - y)[..., None] * x)
    family = {"covering": DISK, "G": 2.0, "L": 1.0}
    bound = jax.jit(lambda n: bounds.hypergradient_convergence(n, **family))(rows)
    worst = np.linalg.norm(gaps, axis=-1).max()
    assert worst < bound.value
    assert worst / bound.value > 0.1
    assert not bound.vacuous


@pytest.mark.parametrize(("h", "eps"), [(2, 0.08), (3, 0.4), (4, 0.3)])
def test_the_simplex_is_covered_by_as_many_points_as_claimed(h, eps):
    logs = bounds.simplex_covering(h)(jnp.array([eps]))
    k = math.ceil(min(math.sqrt(h) / 2 / eps, (1 - 1 / h) / eps**2))
    grid = [c for c in itertools.product(range(k + 1), repeat=h) if sum(c) == k]
    assert_close(logs, [math.log(len(grid))], f32=1e-5)
    alphas = np.random.default_rng(0).dirichlet(np.full(h, 0.7), 300)
    distances = np.linalg.norm(alphas[:, None] - np.array(grid) / k, axis=-1)
    assert distances.min(axis=1).max() <= eps
    assert_close(bounds.simplex_covering(h, copies=4)(jnp.array([2 * eps])), 4 * logs, f32=1e-5)


def test_points_of_a_ball_never_need_more_centres_than_claimed():
    """Truth: a lower bound of N, the number of points farther apart than eps among 1500 draws."""
    points = np.random.default_rng(0).uniform(-1, 1, (1500, 3))
    points = points[np.linalg.norm(points, axis=1) <= 1]
    radii = jnp.array([0.3, 0.5, 0.8, 1.0])
    claimed = bounds.ball_covering(3, 1.0)(radii)
    assert (bounds.finite_covering(points)(radii)[:3] <= claimed[:3]).all()
    assert claimed[3] == 0
    assert np.linalg.norm(points, axis=1).max() <= radii[3]  # the centre is enough
    sparse = bounds.sparse_covering(6, 3, 1.0)(radii)
    assert_close(sparse[:3] - claimed[:3], [math.log(20)] * 3, f32=1e-5)
    assert sparse[3] == 0


def test_finitely_many_points_are_covered_with_a_number_near_the_least():
    """Truth: the smallest of all subsets that cover 9 points; N(eps) is up to that for eps / 2."""
    points = np.random.default_rng(1).normal(size=(9, 2))
    distances = np.linalg.norm(points[:, None] - points, axis=-1)

    def least(eps):
        subsets = (s for size in range(1, 10) for s in itertools.combinations(range(9), size))
        return next(len(s) for s in subsets if (distances[list(s)].min(0) <= eps).all())

    radii = np.array([0.05, 0.5, 0.9, 1.3, 5.0])
    numbers = np.exp(bounds.finite_covering(points)(radii))
    for eps, number in zip(radii, numbers, strict=True):
        assert least(eps) - 1e-3 <= number <= least(eps / 2) + 1e-3
    assert_close(numbers[[0, -1]], [9.0, 1.0], f32=1e-5)


def test_the_effective_dimension_of_a_ball_is_its_dimension():
    radii = np.geomspace(1e-5, 2.9, 30)
    dimension = bounds.effective_dimension(bounds.ball_covering(5, 1.0)(radii), radii, C_bar=3.0)
    assert 4.8 < dimension <= 5
    radii = radii[radii < 1]
    exact = (5 * np.log1p(2 / radii) / np.log(3 / radii)).max()  # N = (1 + 2 R / eps)^dim
    assert_close(dimension, exact, f64=1e-9, f32=1e-4)
    # E18: with one ball too few at C_bar itself no exponent is enough.
    assert bounds.effective_dimension([1.0], [3.0], C_bar=3.0) == jnp.inf
    assert bounds.effective_dimension([1.0, 0.0], [1.0, 3.0], C_bar=3.0) < 1


@pytest.mark.long
def test_predictors_move_no_more_than_the_constants_of_their_feature_map():
    h, n = 3, 6
    keys = jax.random.split(jax.random.key(0), 800)
    few = jnp.arange(800) % 2 == 0

    def predictions(alpha, penalty, maps, y):
        phi = jnp.einsum("i,inp->np", alpha, maps)
        train = phi[:n]
        return phi @ train.T @ jnp.linalg.solve(train @ train.T + penalty * jnp.eye(n), y)

    def ratio(arguments):
        key, few = arguments
        k1, k2, k3, k4, k5 = jax.random.split(key, 5)
        maps = jax.random.normal(k1, (h, n + 3, 9)) * jnp.exp(jax.random.normal(k5))
        maps = maps * ~(few & (jnp.arange(9) >= 4))
        alpha, y = jax.random.normal(k2, (h,)), jax.random.normal(k3, (n,))
        penalty = 10 ** jax.random.uniform(k4, minval=-3.0, maxval=1.0)
        moved = jax.jacobian(predictions, (0, 1))(alpha, penalty, maps, y)
        phi = jnp.einsum("i,inp->np", alpha, maps)[:n]
        B, R = jnp.sum(maps**2, -1).max(), jnp.abs(alpha).sum()
        lambda0 = jnp.linalg.eigvalsh(phi @ phi.T)[0] * ~few + penalty
        norm = jnp.linalg.norm(y)
        bound = bounds.feature_map_lipschitz(n, h=h, B=B, y_norm=norm, lambda0=lambda0, R=R)
        first = R * B * n**0.5 * norm / lambda0
        product_rule = 2 * math.sqrt(h) * first * (1 + R**2 * B * n / lambda0)
        of_alpha, of_penalty = jnp.linalg.norm(moved[0], axis=1).max(), jnp.abs(moved[1]).max()
        against_rule = bound.alpha / product_rule
        return jnp.stack([of_alpha / bound.alpha, of_penalty / bound.penalty, against_rule])

    # One by one, because large batches of small decompositions have hung on two cores.
    largest = jax.jit(lambda *each: jax.lax.map(ratio, each))(keys, few).max(axis=0)
    assert (largest[:2] <= 1 + tolerance(1e-9, 1e-3)).all()
    assert largest[0] > 0.08
    assert largest[2] < 1.21


def test_theorem_1_reports_whether_there_are_enough_rows():
    h_bar = bounds.oymak_h_bar(1000, h_eff=10, C_bar=3.0, L=100.0)
    # E19: between h_bar + tau = 106.1 rows and 12 more, (2) is claimed and (4) is not.
    few = bounds.oymak_theorem1(110, h_bar, h=12, C=1.0)
    assert dict(few.risk.assumptions)["n_V >= h_bar + tau"]
    assert dict(few.hypergradient.assumptions)["n_V >= h + h_bar + tau"] is False
    assert few.hypergradient.vacuous
    assert bounds.oymak_h_bar(1, h_eff=10, C_bar=1.0, L=1.0) == 0  # one ball at least


def test_proposition_1_takes_the_best_alpha():
    """Truth: 0.1 + 2 / 10 against 0.05 + 3 / 10; 0.5 sqrt((6 + 10) / 100)."""
    options = {"risk": [0.1, 0.05], "complexity": [2.0, 3.0], "h_eff": 6, "t": 10.0}
    bound = bounds.oymak_proposition1(100, 100, **options, delta=0.01, C=0.25)
    assert_close(bound.value, 0.3 + 0.2 + 0.01, f32=1e-6)
    few = bounds.oymak_proposition1(99, 100, **options, C=1.0)
    assert dict(few.assumptions)["n_V <= n_T"] is False


def test_lemma_2_holds_as_corrected_and_not_as_printed():
    """Truth: minimisers of quadratics, |theta'| = |A^-1 S| for [[A, S], [S', Q]]; E14."""
    mu, M = 0.25, 1.0  # mu theta^2 / 2 - M alpha theta
    assert bounds.oymak_lemma2_as_printed(mu, M) < M / mu == bounds.oymak_lemma2(mu, cross=M)
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(100):
        root = rng.normal(size=(5, 7)) * np.exp(2 * rng.normal(size=7))
        hessian = root @ root.T  # jointly convex: theta the first 3
        A, S, Q = hessian[:3, :3], hessian[:3, 3:], hessian[3:, 3:]
        mu, moved = np.linalg.eigvalsh(A)[0], np.linalg.norm(np.linalg.solve(A, S), 2)
        smooth = bounds.oymak_lemma2(mu, smoothness=np.linalg.norm(Q, 2))
        ratios += [moved / bounds.oymak_lemma2(mu, cross=np.linalg.norm(S, 2)), moved / smooth]
    assert 0.5 < max(ratios) <= 1 + tolerance(1e-9, 1e-4)


@pytest.mark.long
def test_theorem_2_as_printed_is_false_for_random_labels_and_large_alpha():
    """E13, Delta = {s}: nothing predicts them; the printed bound says 0.02 for s = 100."""
    n, values = 40, {}
    for s in (1.0, 100.0):
        # Minimum-norm regression of random labels, of the risk min(|y - f|, 1).
        rng = np.random.default_rng(0)
        phi = rng.normal(size=(n + 2000, 400))
        phi *= s / np.linalg.norm(phi, axis=1, keepdims=True)
        y = rng.choice([-1.0, 1.0], n + 2000)
        f = phi[n:] @ np.linalg.lstsq(phi[:n], y[:n], rcond=None)[0]
        risk = np.minimum(np.abs(y[n:] - f), 1).mean()
        K, y = phi[:n] @ phi[:n].T, y[:n]
        options = {"h": 1, "B": 1.0, "R": s, "lambda0": 0.4 * s**2, "C": 0.01}
        printed = bounds.oymak_theorem2_as_printed(K, y, 40, **options)
        corrected = bounds.oymak_theorem2(K, y, 40, **options)
        assert 0.8 < risk < corrected.value
        assert corrected.vacuous
        values[s] = printed.terms["training"], corrected.terms["training"], risk
        assert dict(printed.assumptions)["R <= 1"] is (s == 1)
    assert_close(values[1.0][0], 100 * values[100.0][0])
    assert_close(values[1.0][1:], values[100.0][1:])
    assert printed.value < 0.05


@pytest.mark.long
def test_theorem_2_says_something_where_rows_are_alike():
    """Truth: labels that depend on which of two directions x is near; the true risk is small."""
    rng = np.random.default_rng(0)
    n = 40
    y = rng.choice([-1.0, 1.0], 2 * n)
    x = y[:, None] * np.eye(1, 400) + 0.02 * rng.normal(size=(2 * n, 400))
    K = x[:n] @ x[:n].T
    f = x[n:] @ x[:n].T @ np.linalg.solve(K, y[:n])
    risk = np.minimum(np.abs(y[n:] - f), 1).mean()
    B, lambda0 = (x**2).sum(1).max(), np.linalg.eigvalsh(K)[0]
    family = jnp.stack([K, jnp.eye(n), -jnp.eye(n)])
    options = {"h": 1, "B": B, "lambda0": lambda0, "C": 0.1}
    one, several = (bounds.oymak_theorem2(k, y[:n], n, **options) for k in (K, family))
    assert risk < one.terms["training"] < 1
    # The first term by dense algebra; h log M by hand. The worse kernels do not matter.
    energy = y[:n] @ np.linalg.solve(K, y[:n])
    assert_close(one.terms["training"], 2 * math.sqrt(B * energy / n), f64=1e-8, f32=1e-2)
    assert_close(several.value, one.value, f32=1e-5)
    assert one.assumptions[0][1] and not several.assumptions[0][1]
    M = 30 * B**2 / lambda0**2 * 2 * n * n
    validation = 0.1 * math.sqrt((math.log(M) + 3) / n)
    assert_close(one.terms["validation"], validation, f64=1e-8, f32=1e-3)
    assert not one.vacuous


def test_theorem_3_names_what_its_setting_excludes():
    """Truth: y'K^-1 y = 4 / 5 for y = (1, 1), K = [[2, 1/2], [1/2, 2]]; C sqrt(7 / 28) = C / 2."""
    K, y = jnp.array([[2.0, 0.5], [0.5, 2.0]]), jnp.ones(2)

    def bound(labels, activations, t):
        more = {"h": 2, "B": 0.5, "activations": activations, "epsilon": 0.1, "C": 0.2}
        return bounds.oymak_theorem3(K, labels, 28, t=t, **more)

    good = bound(jnp.ones(2), [tanh, swish], 5.0)
    assert_close(good.value, math.sqrt(0.4) + 0.1 + 0.1, f32=1e-6)
    assert good.probability == pytest.approx(1 - 4 * (math.exp(-5) + 1 / 8 + math.exp(-20)))
    assert False not in dict(good.assumptions).values()
    bad = dict(bound(0.5 * y, [tanh, relu], 5.0).assumptions)
    assert bad["labels are +-1"] is False
    smooth = "|sigma'| and |sigma''| are bounded"
    assert bad[smooth] is False
    for fn, known in ((jax.nn.hard_tanh, False), (jnp.square, None), (jnp.sin, None)):
        assert dict(bound(y, [tanh, activation(fn)], 5.0).assumptions)[smooth] is known


def test_theorem_4_as_printed_is_true_and_loose():
    """Truth: the exact limits (MATH 5)."""
    p, h = np.meshgrid([1.01, 1.5, 2.0, 4.0, 30.0], [1e-4, 1e-3, 0.01, 0.05, 0.3])
    p, h = p[p * h < 1], h[p * h < 1]
    printed = jax.jit(jax.vmap(lambda p, h: bounds.oymak_theorem4_as_printed(p, h, c=1.0)))(p, h)
    overlap = (1 - p * h) / (1 + h)
    risk = overlap * (1 - 1 / p) + (1 - overlap) / (1 - 1 / p)
    assert (printed.correlation.value <= overlap).all()
    assert (printed.risk.value >= risk).all()
    assert ((printed.correlation.value > 0) == (p * h < 1 / 64)).all()
    one = bounds.oymak_theorem4_as_printed(2.0, 0.1, c=0.1)
    assert dict(one.correlation.assumptions)["ph / n^2 <= 1/6"] is False
    assert dict(one.risk.assumptions)["ph / n^2 <= c"] is False
    assert_close(bounds.oymak_theorem4_as_printed(2, 0.01, c=1).risk.value, 0.5 + 4, f32=1e-6)


def test_whole_numbers_do_not_wrap():
    options, n = {"h": 3, "y_norm": 10.0, "lambda0": 0.1}, jnp.asarray(100_000, jnp.int32)
    whole = bounds.feature_map_lipschitz(n, B=50_000, **options)
    assert_close(whole.alpha, bounds.feature_map_lipschitz(1e5, B=5e4, **options).alpha, f32=1e-6)
    whole = bounds.oymak_lemma1(jnp.asarray(10**7, jnp.int32), h=5, B=1000, lambda0=0.1)
    assert_close(whole, bounds.oymak_lemma1(1e7, h=5, B=1000.0, lambda0=0.1), f32=1e-6)
    assert bounds.uniform_convergence(10**10, covering=BALL, L=1.0).value < 1e-3


def test_entropies_are_not_negative_and_do_not_overflow():
    for size in (0.0, 0.003, 0.01):  # log M is negative
        y = size * jnp.ones(8)
        bound = bounds.oymak_theorem2(jnp.eye(8), y, 8, h=1, B=1.0, lambda0=1.0, C=1.0)
        assert_close(bound.terms["validation"], math.sqrt(3 / 8), f32=1e-6)
    assert bounds.oymak_lemma1(10, h=5, B=1e-6, lambda0=1.0) == 0
    truth = 6 * math.log(20 * 1e5**2 * 1e24 * (1e5 + 1))
    assert_close(bounds.oymak_lemma1(1e5, h=5, B=1.0, lambda0=1e-12), truth, f32=1e-6)


def test_traced_invalid_arguments_become_nan():
    radii = jnp.array([-3.0, 0.0])
    for covering in (BALL, bounds.simplex_covering(3), bounds.sparse_covering(4, 2, 1.0)):
        assert jnp.isnan(jax.jit(covering)(radii)).all()
    too_large = jax.jit(lambda r: bounds.effective_dimension(jnp.array([5.0, 3.0]), r, C_bar=1.0))
    assert jnp.isnan(too_large(jnp.array([0.5, 2.0])))
    tiny = bounds.uniform_convergence(1e3, covering=BALL, L=1e30)  # radii of 1e-43 in float32
    assert tiny.value < 1
