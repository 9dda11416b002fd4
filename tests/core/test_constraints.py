"""Lower problems with constraints or a non-smooth term: known values, identities, the estimate.

The values of ``TABLE`` come from an enumeration of active sets with 40 digits and differences of
the solution map with step 1e-12. ``benchmarks/hypergradients/constraints_truth.py`` is a second
source: active-set formulas in 80-bit floats, which a test here compares with differences.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, finite_differences, flatten, float64_only, normal, tolerance

import bilevel
from benchmarks.hypergradients import constraints as families
from benchmarks.hypergradients import constraints_truth as exact

H3 = np.array([[4.0, 1, 0], [1, 3, 1], [0, 1, 2]])
H4 = np.array([[3, 1, 0.5, 0], [1, 2, 0, 0], [0.5, 0, 2, 1], [0, 0, 1, 2]])
H2 = np.array([[2.0, 1], [1, 2]])
X4 = np.array([[1.0, 2, 0], [0, 1, 1], [1, 0, 1], [2, 1, 0]])
Y4 = np.array([1.0, -1, 2, 1])
SVM_X, SVM_Y = np.array([-1, -0.2, 0.3, 1.2]), np.array([-1.0, 1, -1, 1])
VALID_X, VALID_Y = np.array([-0.5, 0.8]), np.array([-1.0, 1])


class Case(NamedTuple):
    """A small problem and its known answer."""

    lower: Any
    minimizer: Any
    alpha: list
    w: list
    grad: list
    value: float | None = None
    outer: Any = None


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


def table():
    projected, proximal = bilevel.projected, bilevel.proximal
    fixed = quadratic(H3, lambda a: (4.0, -3.0, 2.0))
    sparse = quadratic(H3, lambda a: (4.0, -1.5, -1.2))
    exp = jnp.exp
    low, high = (lambda a: a[0]), (lambda a: a[1])
    svm_low, svm_high = 0.0, first
    root = np.log(2.0), 0.0
    return {
        "box": Case(
            quadratic(H3, lambda a: (4 + a[2], -3 + a[2], 1.2 + a[2])),
            projected("box", low, high),
            [-0.5, 1, 0],
            [1, -0.5, 0.85],
            [0.575, 0, -0.075],
            0.13625,
        ),
        "non-negative": Case(
            nonnegative_least_squares,
            projected("nonnegative"),
            [0, 0],
            [0.7, 0, 0.1],
            [0.03, -0.3],
            0.95,
        ),
        "simplex": Case(
            quadratic(H3, lambda a: (1 + a[0], 1 - a[0], 0.5)),
            projected("simplex"),
            [1],
            [7 / 12, 0, 5 / 12],
            [1 / 36],
            109 / 144,
        ),
        "simplex, interior": Case(
            quadratic(H3, lambda a: (1 + a[0], 1 - a[0], 0.5)),
            projected("simplex"),
            [0],
            [9 / 28, 8 / 28, 11 / 28],
            [-31 / 28],
        ),
        "l2 ball": Case(
            quadratic(np.diag([1.0, 2, 4]), lambda a: (3.0, -2.0, 1.0)),
            projected("l2_ball", first),
            [0],
            [0.877903329849, -0.452772158136, 0.155830408643],
            [-0.391532790967],
            0.513494103372,
        ),
        "l1 ball": Case(
            fixed, projected("l1_ball", first), [0], [10 / 19, -8 / 19, 1 / 19], [-257 / 361]
        ),
        "affine": Case(
            fixed,
            projected("affine", np.ones((1, 3)), lambda a: a),
            [0.5],
            [9 / 7, -16.5 / 7, 11 / 7],
            [3 / 14],
            1.125,
        ),
        "Lasso": Case(
            sparse,
            proximal("l1", exp),
            [0, -0.5, 0.3],
            [0.899406303662, -0.597625214650, 0],
            [0.0640141703966, 0.0942930670039, 0],
            0.586012279814,
        ),
        "elastic net": Case(
            sparse,
            proximal("elastic_net", first, lambda a: exp(a[1])),
            [0, -1],
            [0.773395937188, -0.378100213927, 0],
            [0.315675214412, 0.0585998198300],
            0.7190543726,
        ),
        "group l1": Case(
            quadratic(H4, lambda a: (4.0, 2.0, 0.5, 0.2)),
            proximal("group_l1", exp, groups=[[0, 1], [2, 3]]),
            [0, 0],
            [0.903202068791, 0.362266934096, 0, 0],
            [-0.0626744052401, 0],
            3.43257051961,
            distance([1, -1, 1, 2]),
        ),
        "total variation": Case(
            distance([1, 2, 4, 3.5]),
            proximal("total_variation", first),
            [np.log(0.5)],
            [1.5, 2, 3.5, 3.5],
            [-0.75],
            8.875,
            distance([1, -1, 1, 2]),
        ),
        "SVM, regularized bias": Case(
            svm(1.0)[0],
            projected("box", svm_low, svm_high),
            root,
            [1.67278788727, 2, 2, 1.64700700106],
            [0.113706328229, 0.229881157622],
            0.482826802228,
            svm(1.0)[1],
        ),
        "SVM, equality": Case(
            svm(0.0)[0],
            projected("box_equality", svm_low, svm_high, SVM_Y, 0.0),
            root,
            [1.65989744416, 2, 2, 1.65989744416],
            [0.113548759115, 0.229351085905],
            0.482680833982,
            svm(0.0)[1],
        ),
        "degenerate box": Case(
            quadratic(H2, lambda a: (1 + a[0], 0.5)),
            projected("box", np.array([-np.inf, 0.0]), np.inf),
            [0],
            [0.5, 0],
            [0.25],
            None,
            distance([0, 1]),
        ),
        "degenerate Lasso": Case(
            quadratic(H2, lambda a: (3.0, 2.0)),
            proximal("l1", lambda a: jnp.stack([jnp.ones_like(a[0]), exp(a[0])])),
            [0],
            [1, 0],
            [0],
            None,
            distance([0, 1]),
        ),
    }


NAMES = [
    "box",
    "non-negative",
    "simplex",
    "simplex, interior",
    "l2 ball",
    "l1 ball",
    "affine",
    "Lasso",
    "elastic net",
    "group l1",
    "total variation",
    "SVM, regularized bias",
    "SVM, equality",
]
DEGENERATE = ["degenerate box", "degenerate Lasso"]


def problem_of(case):
    return bilevel.Problem(case.lower, case.outer or distance([1, -1, 1]))


def hypergradient(problem, minimizer, alpha, w0, dtype=float, inverse=None, **options):
    solver = bilevel.implicit(minimizer, inverse or bilevel.cg())
    fn = jax.jit(bilevel.hypergradient(problem, solver, **options))
    return fn(jnp.asarray(alpha, dtype), jnp.asarray(w0, dtype), None, None)


@functools.cache
def solved(name, dtype="float64", diagnostics=False):
    """Return the library's answer to a case of the table."""
    case = table()[name]
    given = problem_of(case), case.minimizer, case.alpha, np.zeros(len(case.w)), dtype
    return hypergradient(*given, diagnostics=diagnostics)


# ----------------------------------------------------------------------------- known values


@pytest.mark.parametrize("name", NAMES)
def test_known_values(name):
    case, result = table()[name], solved(name, float)
    assert_close(result.w, np.array(case.w), f64=1e-10, f32=1e-5)
    assert_close(result.grad, np.array(case.grad), f64=1e-10, f32=1e-4)
    if case.value is not None:
        assert_close(result.value, case.value, f64=1e-10, f32=1e-5)


def mostly_slow(fast, names):
    """Return parameters; all but the ``fast`` ones are slow tests."""
    marks = pytest.mark.slow, pytest.mark.long
    return [n if n in fast else pytest.param(n, marks=marks) for n in names]


@pytest.mark.parametrize("name", mostly_slow(["box", "l2 ball"], NAMES))
def test_known_values_have_a_small_error(name):
    case, info = table()[name], solved(name, float, diagnostics=True).info
    assert info.converged, bilevel.explain(info)
    assert info.error_estimate < tolerance(1e-12, 1e-4)
    linear = name not in ("l2 ball", "group l1")  # and quadratic
    assert (info.error_bound < tolerance(1e-11, 1e-3)) == linear
    error = np.linalg.norm(np.asarray(solved(name, float).grad) - case.grad)
    assert error <= info.error_bound + tolerance(2e-10, 1e-4)  # the table has ten digits


@float64_only
@pytest.mark.parametrize("name", ["box", "l2 ball", "group l1"])
def test_known_values_in_float32_with_x64_enabled(name):
    case, result = table()[name], solved(name, "float32")
    assert result.grad.dtype == result.w.dtype == jnp.float32
    np.testing.assert_allclose(result.grad, case.grad, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", DEGENERATE)
def test_a_tie_counts_as_active_and_has_no_estimate(name):
    case, result = table()[name], solved(name, float, diagnostics=True)
    assert_close(result.w, np.array(case.w), f64=1e-10, f32=1e-5)
    np.testing.assert_allclose(result.grad, case.grad, rtol=0, atol=tolerance(1e-9, 1e-5))
    assert np.isinf(result.info.error_estimate) and not result.info.converged
    assert "nearly degenerate" in bilevel.explain(result.info)


@pytest.mark.parametrize("name", DEGENERATE)
def test_a_tie_counts_as_active_from_every_start(name):
    case = table()[name]
    solver = bilevel.implicit(case.minimizer)
    fn = jax.jit(bilevel.hypergradient(problem_of(case), solver, diagnostics=False))
    alpha = jnp.asarray(case.alpha, float)
    for start in 3 * np.random.default_rng(0).normal(size=(20, 2)):
        grad = fn(alpha, jnp.asarray(start, float), None, None).grad
        np.testing.assert_allclose(grad, case.grad, rtol=0, atol=tolerance(1e-9, 1e-5))


@pytest.mark.slow
@pytest.mark.long
def test_an_estimate_is_the_error_of_weights_with_another_active_set():
    case = table()["Lasso"]
    start = [0.5, -0.2, 0.1]  # one step does not make the last weight 0
    rough = bilevel.proximal("l1", jnp.exp, steps=1, tol=1e3)
    result = hypergradient(problem_of(case), rough, case.alpha, start)
    error = np.linalg.norm(result.grad - np.array(case.grad))
    assert error > 0.01 and not result.info.converged
    assert_close(result.info.error_estimate, error, f64=1e-9, f32=1e-4)


LARGE = {
    "box": lambda **tol: bilevel.projected("box", lambda a: -jnp.exp(a), jnp.exp, **tol),
    "l1": lambda **tol: bilevel.proximal("l1", lambda a: jnp.exp(a - 4), **tol),
}


@pytest.mark.slow
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
        fn = jax.jit(bilevel.hypergradient(problem, solver, diagnostics=diagnostics))
        return fn(jnp.asarray(-2.0), jnp.zeros(600), np.arange(600), np.arange(600, 900))

    rough = run(True, tol=3e-2)
    error = abs(rough.grad - run(False).grad)
    assert error > 1e-4 * abs(rough.grad), "the error is above rounding"
    assert error / 3 <= rough.info.error_estimate <= 3 * error, bilevel.explain(rough.info)


def flat_nonnegative():
    """Return a problem whose two free weights have only their sum determined."""

    def lower(w, alpha, _):
        return 0.5 * (w[0] + w[1] - alpha[0]) ** 2

    return lower, bilevel.projected("nonnegative"), "no curvature in a free direction"


def machine_without_free_weights():
    return (
        svm(0.0)[0],
        bilevel.projected("box_equality", 0.0, first, SVM_Y, 0.0),
        "an equality constraint has no free weight",
    )


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("make", [flat_nonnegative, machine_without_free_weights])
def test_a_missing_derivative_has_its_reason(make):
    lower, minimizer, reason = make()
    alpha, start = ([1.0], [0.2, 0.3]) if make is flat_nonnegative else ([-3.0, 0.0], np.zeros(4))
    problem = bilevel.Problem(lower, lambda w, alpha, _: jnp.sum(w**2))
    result = hypergradient(problem, minimizer, alpha, start)
    assert np.isinf(result.info.error_estimate) and not result.info.converged
    assert reason in bilevel.explain(result.info)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("rank", [1, 4])
def test_the_dual_margins_of_total_variation(rank):
    """Against the sum of slopes: the dual variable of a pair in a segment is at most the weight."""
    term = bilevel.proximal("total_variation", lambda a: a).constraint
    y = jnp.asarray([1.0, 1.2, 4.0, 3.5, 3.6, -1.0][: rank + 2])
    code = term.identify(jnp.zeros_like(y), -y, 0.3, 1.0)
    w = term.prox(code, y, 0.3, 1.0)
    margins = term.margins(code, w, w - y, 0.3)
    dual = np.cumsum(np.asarray(w - y))[:-1]
    expected = np.where(code != 0, code * np.diff(w), 0.3 - np.abs(dual))
    assert_close(margins, expected, f64=1e-12, f32=1e-5)
    assert np.all(np.asarray(margins) > 0)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", ["box", "l2 ball"])
def test_every_inverse_returns_the_same_hypergradient(name):
    case = table()[name]
    for inverse in (bilevel.dense(), bilevel.neumann(400, 0.2), bilevel.nystrom(3, 1e-9)):
        start = np.zeros(len(case.w))
        options = {"inverse": inverse, "diagnostics": False}
        result = hypergradient(problem_of(case), case.minimizer, case.alpha, start, **options)
        assert_close(result.grad, np.array(case.grad), f64=1e-6, f32=1e-3)


# ----------------------------------------------------------------------------- identities


def regression(loss_scale=1.0, rows=12, p=5, seed=0):
    """Return ``lower`` of a least-squares problem and the outer loss on other rows."""
    x, y = normal(seed, 2, rows, p), normal(seed + 1, 2, rows)

    def lower(w, alpha, _):
        return loss_scale * 0.5 * jnp.sum((x[0] @ w - y[0]) ** 2) + 0.05 * loss_scale * w @ w

    def outer(w, alpha, _):
        return 0.5 * jnp.sum((x[1] @ w - y[1]) ** 2)

    return bilevel.Problem(lower, outer)


@pytest.mark.slow
@pytest.mark.long
def test_a_larger_loss_changes_no_decision():
    """The l1 weight grows by the same power of 2, so all roundings are equal."""
    results = []
    for scale in (1.0, 2.0**20):
        minimizer = bilevel.proximal("l1", lambda a, scale=scale: scale * jnp.exp(a))
        alpha, w0 = np.array([0.3]), np.zeros(5)
        results.append(hypergradient(regression(scale), minimizer, alpha, w0))
    assert_close(results[1].grad, results[0].grad, f64=1e-12, f32=1e-5)
    assert np.array_equal(results[0].w == 0, results[1].w == 0) and np.any(results[0].w == 0)


def smooth_problem():
    problem = regression()

    def decayed(w, a, batch):
        return problem.lower(w, a, batch) + 0.5 * jnp.exp(a[0]) * w @ w

    return bilevel.Problem(decayed, problem.outer)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    "make",
    [
        lambda: bilevel.projected("box", -jnp.inf, jnp.inf),
        lambda: bilevel.projected("l2_ball", 100.0),
        lambda: bilevel.projected("l1_ball", 100.0),
        lambda: bilevel.proximal("l1", 0.0),
    ],
    ids=["infinite box", "large l2 ball", "large l1 ball", "no l1 weight"],
)
def test_a_constraint_that_is_not_active_is_none(make):
    problem, alpha = smooth_problem(), np.array([0.5])
    result = hypergradient(problem, make(), alpha, np.zeros(5))
    expected = hypergradient(problem, bilevel.newton(), alpha, np.zeros(5))
    assert_close(result.grad, expected.grad, f64=1e-9, f32=1e-4)


@pytest.mark.slow
@pytest.mark.long
def test_groups_of_one_weight_are_the_lasso():
    problem, alpha = regression(), 0.3 * np.arange(5) + 0.2
    groups = [[i] for i in range(5)]
    lasso = hypergradient(problem, bilevel.proximal("l1", jnp.exp), alpha, np.zeros(5))
    grouped = bilevel.proximal("group_l1", jnp.exp, groups=groups)
    result = hypergradient(problem, grouped, alpha, np.zeros(5))
    assert_close(result.w, lasso.w, f64=1e-10, f32=1e-5)
    assert_close(result.grad, lasso.grad, f64=1e-9, f32=1e-4)


@pytest.mark.slow
@pytest.mark.long
def test_total_variation_is_the_lasso_of_its_jumps():
    problem, alpha = regression(), np.array([-0.5])
    change = jnp.tril(jnp.ones((5, 5)))
    losses = [
        lambda d, a, b, loss=loss: loss(change @ d, a, b) for loss in (problem.lower, problem.outer)
    ]

    def weights(a):
        return jnp.exp(a[0]) * jnp.array([0.0, 1, 1, 1, 1])

    jumps = hypergradient(
        bilevel.Problem(*losses), bilevel.proximal("l1", weights), alpha, np.zeros(5)
    )
    variation = bilevel.proximal("total_variation", lambda a: jnp.exp(a[0]))
    result = hypergradient(problem, variation, alpha, np.zeros(5))
    assert_close(result.w, change @ jumps.w, f64=1e-9, f32=1e-4)
    assert_close(result.grad, jumps.grad, f64=1e-9, f32=1e-4)
    assert 0 < np.sum(np.abs(np.diff(result.w)) < 1e-8) < 4


def test_a_weight_between_equal_bounds_moves_with_them():
    """Equal bounds fix the second weight at ``alpha``: its hypergradient is that of a shift."""
    problem, alpha = regression(), np.array([0.4])
    bounds = [lambda a, i=i: jnp.array([i, 0, i, i, i]) * 9 + a[0] * jnp.eye(5)[1] for i in (-1, 1)]
    box = bilevel.projected("box", *bounds)
    result = hypergradient(problem, box, alpha, np.zeros(5), diagnostics=False)

    def value(alpha):
        free = jnp.array([0, 2, 3, 4])

        def at(u):
            return jnp.zeros(5).at[free].set(u).at[1].set(alpha[0])

        def lower(u):
            return problem.lower(at(u), None, None)

        slope, hessian = jax.grad(lower)(jnp.zeros(4)), jax.hessian(lower)(jnp.zeros(4))
        return problem.outer(at(-jnp.linalg.solve(hessian, slope)), None, None)

    assert_close(result.grad, jax.jit(jax.grad(value))(jnp.asarray(alpha)), f64=1e-9, f32=1e-4)
    assert result.w[1] == jnp.asarray(0.4)


# ----------------------------------------------------------------------------- transformations


def lasso():
    solver = bilevel.implicit(bilevel.proximal("l1", jnp.exp), bilevel.cg())
    return regression(), solver


@pytest.mark.long
def test_a_batch_of_problems_is_each_of_them():
    fn = bilevel.hypergradient(*lasso())
    alphas = jnp.stack([0.3 * jnp.arange(5.0) + shift for shift in (-1.0, 0.2, 1.5)])
    batch = jax.jit(jax.vmap(fn, in_axes=(0, None, None, None)))(alphas, jnp.zeros(5), None, None)
    single = jax.jit(fn)
    for i, alpha in enumerate(alphas):
        result = single(alpha, jnp.zeros(5), None, None)
        assert_close(batch.grad[i], result.grad, f64=1e-9, f32=1e-4)
        assert bool(batch.info.converged[i]) == bool(result.info.converged)


def test_forward_and_reverse_derivatives_are_differences_of_the_solution():
    problem, solver = lasso()
    alpha = jnp.asarray(0.3 * np.arange(5) + 0.2)

    def value(alpha):
        w, _ = solver.run(problem.lower, alpha, jnp.zeros(5), solver.init(jnp.zeros(5)), None)
        return problem.outer(w, alpha, None)

    fn = jax.jit(jax.value_and_grad(value))
    reverse = fn(alpha)[1]
    assert_close(reverse, finite_differences(lambda a: fn(a)[0], alpha), f64=1e-7, f32=1e-2)
    tangent = normal(3, 5)
    forward = jax.jit(lambda a, t: jax.jvp(value, (a,), (t,))[1])(alpha, tangent)
    assert_close(forward, reverse @ tangent, f64=1e-9, f32=1e-4)


@pytest.mark.slow
@pytest.mark.long
def test_a_search_lowers_the_validation_loss():
    import optax

    problem, solver = lasso()
    alpha = jnp.zeros(5)
    result = bilevel.search(
        *(problem, solver, optax.adam(0.1), alpha, jnp.zeros(5), None, None),
        **{"steps": 20, "progress": False},
    )
    values = result.history["value"]
    assert values[-1] < values[0] and np.all(np.isfinite(flatten(result.alpha)))


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


@pytest.mark.slow
@pytest.mark.long
@float64_only
@pytest.mark.parametrize(
    ("name", "dtype", "seed", "number"),
    [
        ("SVM, regularized bias", "float64", 6596173, 0),
        ("SVM, regularized bias", "float64", 6596173, 24),
        ("l1 ball", "float32", 101, 29),
        ("SVM, regularized bias", "float32", 9259319, 32),  # two weights' terms cancel
    ],
)
def test_a_bound_contains_the_rounding_of_the_refined_hypergradient(name, dtype, seed, number):
    """The errors of these cases were above a bound without the spread or the size of all terms."""
    index = [family.name for family in families.FAMILIES].index(name)
    row = families.run_case(index, 4, dtype, seed, number)
    assert row["error"] <= row["bound"] < 0.01 * row["norm"] + 2 * row["estimate"]
