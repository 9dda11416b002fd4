"""Lower problems with constraints or a non-smooth term: known values, identities, the estimate.

``VALUES`` comes from an enumeration of active sets with 40 digits and differences of the solution
map with step 1e-12. ``benchmarks/hypergradients/constraints_truth.py`` is a second source:
active-set formulas in 80-bit floats, which a test here compares with differences.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, float64_only, hypergradient, long_except, normal, tolerance

import bilevel
from benchmarks.hypergradients import constraints as families
from benchmarks.hypergradients import constraints_truth as exact
from bilevel import projected, proximal

H3 = np.array([[4.0, 1, 0], [1, 3, 1], [0, 1, 2]])
H4 = np.array([[3, 1, 0.5, 0], [1, 2, 0, 0], [0.5, 0, 2, 1], [0, 0, 1, 2]])
H2 = np.array([[2.0, 1], [1, 2]])
X4 = np.array([[1.0, 2, 0], [0, 1, 1], [1, 0, 1], [2, 1, 0]])
Y4 = np.array([1.0, -1, 2, 1])
SVM_X, SVM_Y = np.array([-1, -0.2, 0.3, 1.2]), np.array([-1.0, 1, -1, 1])
VALID_X, VALID_Y = np.array([-0.5, 0.8]), np.array([-1.0, 1])


def quadratic(H, c):
    """Return ``w'Hw/2 - c(alpha)'w``."""
    return lambda w, alpha, _: 0.5 * w @ (H @ w) - jnp.stack([*map(jnp.asarray, c(alpha))]) @ w


def distance(target):
    return lambda w, alpha, _: 0.5 * jnp.sum((w - jnp.asarray(target, w.dtype)) ** 2)


def nonnegative_least_squares(w, alpha, _):
    error = X4 @ w - Y4
    return 0.5 * error @ error + 0.5 * jnp.exp(alpha[0]) * w @ w - alpha[1] * jnp.sum(w)


def kernel(alpha, x1, x2, constant):
    return jnp.exp(-jnp.exp(alpha[1]) * (x1[:, None] - x2[None]) ** 2) + constant


def svm(constant):
    def lower(w, alpha, _):
        yw = SVM_Y * w
        return 0.5 * yw @ (kernel(alpha, SVM_X, SVM_X, constant) @ yw) - jnp.sum(w)

    def outer(w, alpha, _):
        yw = SVM_Y * w
        decision = kernel(alpha, VALID_X, SVM_X, constant) @ yw
        if not constant:
            free = ((w > 0) & (w < jnp.exp(alpha[0]))).astype(w.dtype)
            rest = SVM_Y - kernel(alpha, SVM_X, SVM_X, 0.0) @ yw
            decision = decision + jnp.sum(free * rest) / jnp.sum(free)
        return jnp.mean(jax.nn.softplus(-VALID_Y * decision))

    return lower, outer


def first(c):
    return jnp.exp(c[0])


FIXED, SPARSE = (quadratic(H3, lambda a, c=c: c) for c in ((4.0, -3.0, 2.0), (4.0, -1.5, -1.2)))
ROUND = quadratic(np.diag([1.0, 2, 4]), lambda a: (3.0, -2.0, 1.0))
TILTED = quadratic(H3, lambda a: (1 + a[0], 1 - a[0], 0.5)), projected("simplex")
LOWER_OF_SVM, OUTER_OF_SVM = zip(svm(1.0), svm(0.0), strict=True)
SQUARES, OF_FOUR, OF_TWO = (distance(target) for target in ([1, -1, 1], [1, -1, 1, 2], [0, 1]))
GROUPS, EQUALITY = [[0, 1], [2, 3]], projected("box_equality", 0.0, first, SVM_Y, 0.0)
# The lower loss, the constraint or term, and the outer loss (default: SQUARES).
PROBLEMS = {
    "box": (
        quadratic(H3, lambda a: (4 + a[2], -3 + a[2], 1.2 + a[2])),
        projected("box", lambda a: a[0], lambda a: a[1]),
    ),
    "non-negative": (nonnegative_least_squares, projected("nonnegative")),
    "simplex": TILTED,
    "simplex, interior": TILTED,
    "l2 ball": (ROUND, projected("l2_ball", first)),
    "l1 ball": (FIXED, projected("l1_ball", first)),
    "affine": (FIXED, projected("affine", np.ones((1, 3)), lambda a: a)),
    "Lasso": (SPARSE, proximal("l1", jnp.exp)),
    "elastic net": (SPARSE, proximal("elastic_net", first, lambda a: jnp.exp(a[1]))),
    "group l1": (
        quadratic(H4, lambda a: (4.0, 2.0, 0.5, 0.2)),
        proximal("group_l1", jnp.exp, groups=GROUPS),
        OF_FOUR,
    ),
    "total variation": (distance([1, 2, 4, 3.5]), proximal("total_variation", first), OF_FOUR),
    "SVM, regularized bias": (LOWER_OF_SVM[0], projected("box", 0.0, first), OUTER_OF_SVM[0]),
    "SVM, equality": (LOWER_OF_SVM[1], EQUALITY, OUTER_OF_SVM[1]),
    "degenerate box": (
        quadratic(H2, lambda a: (1 + a[0], 0.5)),
        projected("box", np.array([-np.inf, 0.0]), np.inf),
        OF_TWO,
    ),
    "degenerate Lasso": (
        quadratic(H2, lambda _: (3.0, 2.0)),
        proximal("l1", lambda c: jnp.stack([jnp.ones_like(c[0]), jnp.exp(c[0])])),
        OF_TWO,
    ),
}
# alpha, the minimizer and the hypergradient.
VALUES = {
    "box": ([-0.5, 1, 0], [1, -0.5, 0.85], [0.575, 0, -0.075]),
    "non-negative": ([0, 0], [0.7, 0, 0.1], [0.03, -0.3]),
    "simplex": ([1], [7 / 12, 0, 5 / 12], [1 / 36]),
    "simplex, interior": ([0], [9 / 28, 8 / 28, 11 / 28], [-31 / 28]),
    "l2 ball": ([0], [0.877903329849, -0.452772158136, 0.155830408643], [-0.391532790967]),
    "l1 ball": ([0], [10 / 19, -8 / 19, 1 / 19], [-257 / 361]),
    "affine": ([0.5], [9 / 7, -16.5 / 7, 11 / 7], [3 / 14]),
    "Lasso": (
        [0, -0.5, 0.3],
        [0.899406303662, -0.597625214650, 0],
        [0.0640141703966, 0.0942930670039, 0],
    ),
    "elastic net": ([0, -1], [0.773395937188, -0.378100213927, 0], [0.315675214412, 0.05859981983]),
    "group l1": ([0, 0], [0.903202068791, 0.362266934096, 0, 0], [-0.0626744052401, 0]),
    "total variation": ([np.log(0.5)], [1.5, 2, 3.5, 3.5], [-0.75]),
    "SVM, regularized bias": (
        [np.log(2.0), 0],
        [1.67278788727, 2, 2, 1.64700700106],
        [0.113706328229, 0.229881157622],
    ),
    "SVM, equality": (
        [np.log(2.0), 0],
        [1.65989744416, 2, 2, 1.65989744416],
        [0.113548759115, 0.229351085905],
    ),
    "degenerate box": ([0], [0.5, 0], [0.25]),
    "degenerate Lasso": ([0], [1, 0], [0]),
}
OUTER_LOSSES = {
    "box": 0.13625,
    "non-negative": 0.95,
    "simplex": 109 / 144,
    "l2 ball": 0.513494103372,
    "affine": 1.125,
    "Lasso": 0.586012279814,
    "elastic net": 0.7190543726,
    "group l1": 3.43257051961,
    "total variation": 8.875,
    "SVM, regularized bias": 0.482826802228,
    "SVM, equality": 0.482680833982,
}
DEGENERATE = "degenerate box", "degenerate Lasso"
NAMES = [name for name in PROBLEMS if name not in DEGENERATE]


@functools.cache
def compiled(name, diagnostics=False):
    lower, minimizer, outer = (*PROBLEMS[name], SQUARES)[:3]
    solver, problem = bilevel.implicit(minimizer), bilevel.Problem(lower, outer)
    return jax.jit(bilevel.hypergradient(problem, solver, diagnostics=diagnostics))


@functools.cache
def solved(name, dtype=float, diagnostics=False):
    alpha, w, _ = VALUES[name]
    start = jnp.asarray(alpha, dtype), jnp.zeros(len(w), dtype)
    return compiled(name, diagnostics)(*start, None, None)


USUAL = "box", "simplex", "l1 ball", "affine", "Lasso", "elastic net", "SVM, equality"


@pytest.mark.parametrize("name", long_except(USUAL, NAMES))
def test_known_values(name):
    (_, w, grad), result = VALUES[name], solved(name)
    assert_close(result.w, np.array(w), f64=1e-10, f32=1e-5)
    assert_close(result.grad, np.array(grad), f64=1e-10, f32=1e-4)
    if name in OUTER_LOSSES:
        assert_close(result.value, OUTER_LOSSES[name], f64=1e-10, f32=1e-5)


@pytest.mark.parametrize("name", long_except(("l2 ball",), NAMES))
def test_known_values_have_a_small_error(name):
    info = solved(name, diagnostics=True).info
    assert info.converged, bilevel.explain(info)
    assert info.error_estimate < tolerance(1e-12, 1e-4)
    linear = name not in ("l2 ball", "group l1")  # and quadratic
    assert (info.error_bound < tolerance(1e-11, 1e-3)) == linear
    error = np.linalg.norm(np.asarray(solved(name).grad) - VALUES[name][2])
    assert error <= info.error_bound + tolerance(2e-10, 1e-4)  # the table has ten digits


@float64_only
@pytest.mark.parametrize("name", long_except(("box",), ["box", "l2 ball", "group l1"]))
def test_known_values_in_float32_with_x64_enabled(name):
    result = solved(name, "float32")
    assert result.grad.dtype == result.w.dtype == jnp.float32
    np.testing.assert_allclose(result.grad, VALUES[name][2], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", long_except(DEGENERATE[1:], DEGENERATE))
def test_a_tie_counts_as_active_from_every_start_and_has_no_estimate(name):
    (alpha, w, grad), result = VALUES[name], solved(name, diagnostics=True)
    assert_close(result.w, np.array(w), f64=1e-10, f32=1e-5)
    assert np.isinf(result.info.error_estimate) and not result.info.converged
    assert "nearly degenerate" in bilevel.explain(result.info)
    for start in (np.zeros(2), *3 * np.random.default_rng(0).normal(size=(20, 2))):
        result = compiled(name, True)(jnp.asarray(alpha, float), jnp.asarray(start), None, None)
        np.testing.assert_allclose(result.grad, grad, rtol=0, atol=tolerance(1e-9, 1e-5))


@pytest.mark.long
def test_an_estimate_is_the_error_of_weights_with_another_active_set():
    alpha, _, grad = VALUES["Lasso"]
    rough = bilevel.implicit(proximal("l1", jnp.exp, steps=1, tol=1e3))
    start = jnp.array([0.5, -0.2, 0.1])  # one step does not make the last weight 0
    given = jnp.asarray(alpha, float), start, None, None
    result = hypergradient(bilevel.Problem(SPARSE, SQUARES), rough, *given, diagnostics=True)
    error = np.linalg.norm(result.grad - np.array(grad))
    assert error > 0.01 and not result.info.converged
    assert_close(result.info.error_estimate, error, f64=1e-9, f32=1e-4)


LARGE = {
    "box": lambda **tol: projected("box", lambda a: -jnp.exp(a), jnp.exp, **tol),
    "l1": lambda **tol: proximal("l1", lambda a: jnp.exp(a - 4), **tol),
}


@pytest.mark.long
@pytest.mark.parametrize("name", LARGE)
def test_the_estimate_is_the_error_with_more_weights_than_a_formed_hessian(name):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(900, 600))
    x, y = map(jnp.asarray, (x, np.sign(x[:, :20].sum(1) + rng.normal(size=900))))

    def logistic(w, alpha, rows):
        return jnp.mean(jax.nn.softplus(-y[rows] * (x[rows] @ w)))

    problem = bilevel.Problem(lambda w, *args: logistic(w, *args) + 0.05 * jnp.sum(w**2), logistic)

    def run(diagnostics, **tol):
        solver = bilevel.implicit(LARGE[name](**tol))
        given = jnp.asarray(-2.0), jnp.zeros(600), np.arange(600), np.arange(600, 900)
        return hypergradient(problem, solver, *given, diagnostics=diagnostics)

    rough = run(True, tol=3e-2)
    error = abs(rough.grad - run(False).grad)
    assert error > 1e-4 * abs(rough.grad), "the error is above rounding"
    assert error / 3 <= rough.info.error_estimate <= 3 * error, bilevel.explain(rough.info)


@pytest.mark.long
@pytest.mark.parametrize(
    ("lower", "minimizer", "alpha", "start", "reason"),
    [
        (  # only the sum of the two free weights is determined
            lambda w, alpha, _: 0.5 * (w[0] + w[1] - alpha[0]) ** 2,
            projected("nonnegative"),
            *([1.0], [0.2, 0.3], "no curvature in a free direction"),
        ),
        (
            *PROBLEMS["SVM, equality"][:2],
            *([-3.0, 0.0], [0.0] * 4, "an equality constraint has no free weight"),
        ),
    ],
)
def test_a_missing_derivative_has_its_reason(lower, minimizer, alpha, start, reason):
    problem = bilevel.Problem(lower, lambda w, alpha, _: jnp.sum(w**2))
    given = jnp.array(alpha), jnp.array(start), None, None
    result = hypergradient(problem, bilevel.implicit(minimizer), *given, diagnostics=True)
    assert np.isinf(result.info.error_estimate) and not result.info.converged
    assert reason in bilevel.explain(result.info)


@pytest.mark.long
@pytest.mark.parametrize("rank", [1, 4])
def test_the_dual_margins_of_total_variation(rank):
    """Against the sum of slopes: the dual variable of a pair in a segment is at most the weight."""
    term = proximal("total_variation", lambda a: a).constraint
    y = jnp.asarray([1.0, 1.2, 4.0, 3.5, 3.6, -1.0][: rank + 2])
    code = term.identify(jnp.zeros_like(y), -y, 0.3, 1.0)
    w = term.prox(code, y, 0.3, 1.0)
    margins = term.margins(code, w, w - y, 0.3)
    dual = np.cumsum(np.asarray(w - y))[:-1]
    expected = np.where(code != 0, code * np.diff(w), 0.3 - np.abs(dual))
    assert_close(margins, expected, f64=1e-12, f32=1e-5)
    assert np.all(np.asarray(margins) > 0)


def regression(loss_scale=1.0, rows=12, p=5, seed=0):
    x, y = normal(seed, 2, rows, p), normal(seed + 1, 2, rows)

    def lower(w, alpha, _):
        return loss_scale * 0.5 * jnp.sum((x[0] @ w - y[0]) ** 2) + 0.05 * loss_scale * w @ w

    return bilevel.Problem(lower, lambda w, alpha, _: 0.5 * jnp.sum((x[1] @ w - y[1]) ** 2))


def regressed(minimizer, alpha, problem=None):
    problem = regression() if problem is None else problem
    start = jnp.asarray(alpha), jnp.zeros(5), None, None
    return hypergradient(problem, bilevel.implicit(minimizer), *start)


@pytest.mark.long
def test_a_larger_loss_changes_no_decision():
    """The l1 weight grows by the same power of 2, so all roundings are equal."""
    results = []
    for scale in (1.0, 2.0**20):
        minimizer = proximal("l1", lambda a, scale=scale: scale * jnp.exp(a))
        results.append(regressed(minimizer, [0.3], regression(scale)))
    assert_close(results[1].grad, results[0].grad, f64=1e-12, f32=1e-5)
    assert np.array_equal(results[0].w == 0, results[1].w == 0) and np.any(results[0].w == 0)


@pytest.mark.long
@pytest.mark.parametrize(
    "minimizer",
    [
        projected("box", -jnp.inf, jnp.inf),
        projected("l2_ball", 100.0),
        projected("l1_ball", 100.0),
        proximal("l1", 0.0),
    ],
    ids=["infinite box", "large l2 ball", "large l1 ball", "no l1 weight"],
)
def test_a_constraint_that_is_not_active_is_none(minimizer):
    plain = regression()

    def decayed(w, a, batch):
        return plain.lower(w, a, batch) + 0.5 * jnp.exp(a[0]) * w @ w

    problem = bilevel.Problem(decayed, plain.outer)
    result, expected = (regressed(m, [0.5], problem) for m in (minimizer, bilevel.newton()))
    assert_close(result.grad, expected.grad, f64=1e-9, f32=1e-4)


@pytest.mark.long
def test_groups_of_one_weight_are_the_lasso():
    alpha, groups = 0.3 * np.arange(5) + 0.2, [[i] for i in range(5)]
    lasso = regressed(proximal("l1", jnp.exp), alpha)
    result = regressed(proximal("group_l1", jnp.exp, groups=groups), alpha)
    assert_close(result.w, lasso.w, f64=1e-10, f32=1e-5)
    assert_close(result.grad, lasso.grad, f64=1e-9, f32=1e-4)


@pytest.mark.long
def test_total_variation_is_the_lasso_of_its_jumps():
    problem = regression()
    change = jnp.tril(jnp.ones((5, 5)))
    given = problem.lower, problem.outer
    losses = [lambda d, a, b, loss=loss: loss(change @ d, a, b) for loss in given]

    def weights(a):
        return jnp.exp(a[0]) * jnp.array([0.0, 1, 1, 1, 1])

    jumps = regressed(proximal("l1", weights), [-0.5], bilevel.Problem(*losses))
    result = regressed(proximal("total_variation", first), [-0.5])
    assert_close(result.w, change @ jumps.w, f64=1e-9, f32=1e-4)
    assert_close(result.grad, jumps.grad, f64=1e-9, f32=1e-4)
    assert 0 < np.sum(np.abs(np.diff(result.w)) < 1e-8) < 4


def test_a_weight_between_equal_bounds_moves_with_them():
    """Equal bounds fix the second weight at ``alpha``: its hypergradient is that of a shift."""
    problem = regression()
    bounds = [lambda a, i=i: jnp.array([i, 0, i, i, i]) * 9 + a[0] * jnp.eye(5)[1] for i in (-1, 1)]
    result = regressed(projected("box", *bounds), [0.4])

    def value(alpha):
        free = jnp.array([0, 2, 3, 4])

        def at(u):
            return jnp.zeros(5).at[free].set(u).at[1].set(alpha[0])

        def lower(u):
            return problem.lower(at(u), None, None)

        slope, hessian = jax.grad(lower)(jnp.zeros(4)), jax.hessian(lower)(jnp.zeros(4))
        return problem.outer(at(-jnp.linalg.solve(hessian, slope)), None, None)

    assert_close(result.grad, jax.jit(jax.grad(value))(jnp.array([0.4])), f64=1e-9, f32=1e-4)
    assert result.w[1] == jnp.asarray(0.4)


@pytest.mark.long
def test_a_batch_of_problems_is_each_of_them():
    fn = bilevel.hypergradient(regression(), bilevel.implicit(proximal("l1", jnp.exp)))
    alphas = jnp.stack([0.3 * jnp.arange(5.0) + shift for shift in (-1.0, 0.2, 1.5)])
    batch = jax.jit(jax.vmap(fn, in_axes=(0, None, None, None)))(alphas, jnp.zeros(5), None, None)
    single = jax.jit(fn)
    for i, alpha in enumerate(alphas):
        result = single(alpha, jnp.zeros(5), None, None)
        assert_close(batch.grad[i], result.grad, f64=1e-9, f32=1e-4)
        assert bool(batch.info.converged[i]) == bool(result.info.converged)


# ----------------------------------------------------------------------------- the second source


@pytest.mark.parametrize("family", families.FAMILIES, ids=lambda family: family.name)
def test_the_active_set_formula_is_a_difference_of_solutions(family):
    """The independent truth of the calibration; it needs no library function."""
    rng = np.random.default_rng(3)
    drawn = family.draw(rng, 8)
    convex, alpha = family.convex(drawn), drawn.alpha.astype(np.longdouble)
    known = exact.truth(convex, alpha, families.start_of(family, drawn))
    direction = np.where(alpha == families.NO_RIDGE, 0, rng.normal(size=len(alpha)))
    values = []
    for sign in (1, -1):
        at = alpha + sign * 1e-7 * direction
        w, code = exact.solution(convex, at, known.w.astype(float))
        assert np.array_equal(code, known.code)
        values.append(convex.outer(w, at, code)[0])
    slope = (values[0] - values[1]) / 2e-7
    size = np.linalg.norm((known.grad * direction).astype(float))
    assert abs(slope - known.grad @ direction) <= 1e-7 * size


@pytest.mark.long
@float64_only
@pytest.mark.parametrize(
    ("name", "dtype", "seed", "number"),
    [
        ("SVM, regularized bias", "float64", 6596173, 0),
        ("SVM, regularized bias", "float64", 6596173, 24),
        ("l1 ball", "float32", 101, 29),
        ("SVM, regularized bias", "float32", 9259319, 32),  # two weights' terms cancel
        ("SVM, regularized bias", "float32", 714379, 7),  # all samples share the kernel's rounding
    ],
)
def test_a_bound_contains_the_rounding_of_the_refined_hypergradient(name, dtype, seed, number):
    """The errors of these cases were above a bound without the spread or the size of all terms."""
    index = [family.name for family in families.FAMILIES].index(name)
    row = families.run_case(index, 4, dtype, seed, number)
    assert row["error"] <= row["bound"] < 0.01 * row["norm"] + 2 * row["estimate"]


def bound(index):
    def of_alpha(alpha):
        jacobian = np.zeros((3, 3), alpha.dtype)
        jacobian[:, index] = 1
        return np.full(3, alpha[index]), jacobian

    return of_alpha


def right(alpha):
    return alpha, np.eye(1, dtype=alpha.dtype)


def convex(term, H, c, slopes=None, target=(1, -1, 1), ridge=None):
    """Return ``w'Hw/2 - (c + slopes alpha)'w``, and half the squared distance from ``target``."""
    H, c, target = (np.asarray(x, exact.LONG) for x in (H, c, target))

    def smooth(w, alpha, order=2):
        linear = np.zeros((len(w), len(alpha))) if slopes is None else slopes
        linear = np.asarray(linear, exact.LONG)
        mixed, extra = -linear, 0
        if ridge is not None:
            extra = np.exp(alpha[ridge])
            mixed[:, ridge] = extra * w
        hessian = (H + extra * np.eye(len(w), dtype=exact.LONG)).astype(w.dtype)
        return hessian @ w - (c + linear @ alpha), hessian, mixed.astype(w.dtype)

    def outer(w, alpha, code):
        return np.sum((w - target) ** 2) / 2, w - target, np.zeros(len(alpha), exact.LONG)

    return exact.Convex(smooth, outer, term)


ON_SIMPLEX = convex(exact.simplex(), H3, [1, 1, 0.5], [[1], [-1], [0]])
RADIUS = families.exponential(0)
GROUPED = exact.group_l1(families.exponential(0, 1), GROUPS)
CONVEX = {
    "box": convex(exact.box(bound(0), bound(1)), H3, [4, -3, 1.2], [[0, 0, 1]] * 3),
    "simplex": ON_SIMPLEX,
    "simplex, interior": ON_SIMPLEX,
    "l2 ball": convex(exact.l2_ball(RADIUS), np.diag([1, 2, 4]), [3, -2, 1]),
    "l1 ball": convex(exact.l1_ball(RADIUS), H3, [4, -3, 2]),
    "affine": convex(exact.affine(np.ones((1, 3), exact.LONG), right), H3, [4, -3, 2]),
    "Lasso": convex(exact.l1(families.exponential(0, 1, 2)), H3, [4, -1.5, -1.2]),
    "elastic net": convex(exact.l1(families.shared(3, 0)), H3, [4, -1.5, -1.2], ridge=1),
    "group l1": convex(GROUPED, H4, [4, 2, 0.5, 0.2], target=[1, -1, 1, 2]),
}


@pytest.mark.parametrize("name", CONVEX)
def test_the_truth_has_the_values_of_an_enumeration(name):
    alpha, w, grad = VALUES[name]
    truth = exact.truth(CONVEX[name], alpha, np.full(len(w), 1 / len(w)))
    np.testing.assert_allclose(truth.w.astype(float), w, rtol=0, atol=2e-12)
    np.testing.assert_allclose(truth.grad.astype(float), grad, rtol=0, atol=2e-12)
    assert truth.margin > 0


def test_the_truth_decides_a_tie_in_80_bits():
    """The free minimum is nearer to the sphere than float64 resolves."""
    norm = np.sqrt(np.sum(np.array([3, -1, 0.25], exact.LONG) ** 2))
    for sign in (1, -1):  # inside, the radius changes nothing
        alpha = np.array([np.log(norm) + sign * exact.LONG(1e-14)])
        truth = exact.truth(CONVEX["l2 ball"], alpha, np.full(3, 1 / 3))
        assert truth.margin > 0 and (truth.grad[0] == 0) == (sign == 1)
