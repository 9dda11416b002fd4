"""Constrained problems from public bug reports and from papers give the right value or message.

BOLIB (Zhou, Zemkoho & Tin 2020) collects the problems of the papers with their best known values.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, finite_differences, float64_only, hypergradient, normal, tolerance
from scipy.special import softmax

import bilevel

pytestmark = pytest.mark.slow

# ----------------------------------------------------------------------------- bug reports


def test_cvxpylayers_67_and_70_an_l1_ball_passes_the_gradient_check_and_sums_add_up():
    factor, x, y = normal(0, 20, 20), normal(1, 20, 2), normal(2, 20)

    def lower(v, weight, _):
        return (jnp.sum((factor.T @ v) ** 2) + jnp.sum(v**2)) / 2 - v @ x @ weight

    solver = bilevel.implicit(bilevel.projected("l1_ball", 0.1))
    zero = jnp.zeros(20)

    @jax.jit
    def losses(weight):
        v = solver.run(lower, weight, zero, solver.init(zero), None)[0]
        return jnp.stack([y @ v, jnp.sum(v**2), y @ v + jnp.sum(v**2)])

    weight = jnp.array([0.5, 0.5])
    gradients = jax.jit(jax.jacrev(losses))(weight)
    assert_close(gradients, finite_differences(losses, weight), f64=1e-7, f32=3e-2)
    assert_close(gradients[0] + gradients[1], gradients[2], f64=1e-9, f32=1e-5)


@float64_only
def test_cvxpylayers_85_sparse_logistic_regression_passes_the_gradient_check():
    x, truth = jnp.asarray(normal(3, 40, 12)), jnp.arange(12) < 3
    y = jnp.sign(x @ truth + normal(4, 40))

    def loss(w, alpha, rows):
        return jnp.mean(jnp.logaddexp(0, -y[rows] * (x[rows] @ w)))

    solver = bilevel.implicit(bilevel.proximal("l1", jnp.exp))
    alpha, halves = jnp.array(-3.0), (jnp.arange(20), jnp.arange(20, 40))
    fn = bilevel.hypergradient(bilevel.Problem(loss, loss), solver, diagnostics=False)
    run = jax.jit(lambda alpha: fn(alpha, jnp.zeros(12), *halves))
    assert 0 < np.sum(np.asarray(run(alpha).w) != 0) < 12
    assert_close(run(alpha).grad, finite_differences(lambda a: run(a).value, alpha), f64=1e-7)


def test_cvxpylayers_119_the_divergence_of_a_lasso_is_the_number_of_its_features():
    x, y = normal(5, 10, 5), normal(6, 10)
    solver, zero = bilevel.implicit(bilevel.proximal("l1", 1.0)), jnp.zeros(5)

    def lower(w, y, _):
        return jnp.sum((y - x @ w) ** 2) / 2

    def solve(y):
        return solver.run(lower, y, zero, solver.init(zero), None)[0]

    w, change = jax.jit(lambda y: (solve(y), jax.jacrev(solve)(y)))(y)
    assert 0 < np.sum(np.asarray(w) != 0) < 5
    assert_close(jnp.trace(x @ change), np.sum(np.asarray(w) != 0), f64=1e-9, f32=1e-4)


RETURNS, TRUE_RETURNS = np.array([0.1, 0.2, -0.1]), np.array([-0.1, -0.1, 0.5])
ENTROPY = np.array([0.4, -0.3])
SHARES = softmax(ENTROPY / 0.5)
# The losses, the set, alpha, the start, the weights, the hypergradient and the tolerances.
SMALL = {
    # The lower loss is linear, so the derivative is 0: the report expected another one.
    "cvxpylayers 127: a vertex of the simplex does not move": (
        lambda w, alpha, _: -alpha @ w,
        lambda w, alpha, _: -TRUE_RETURNS @ w,
        *("simplex", RETURNS, np.full(3, 1 / 3), [0, 1, 0], np.zeros(3), 1e-9, 1e-6),
    ),
    "cvxpylayers 145: an entropy on the simplex gives the softmax": (
        lambda w, alpha, _: jnp.sum(0.5 * w * jnp.log(w)) - alpha @ w,
        lambda w, alpha, _: w[0],
        *("simplex", ENTROPY, np.full(2, 0.5), SHARES),
        *(SHARES[0] * ([1, 0] - SHARES) / 0.5, 1e-8, 1e-4),
    ),
    **{
        f"cvxpy 1110: a bound stops the derivative, alpha = {alpha}": (
            lambda w, p, _: (w - 2 * p) ** 2,
            lambda w, p, _: w,
            *("nonnegative", alpha, np.zeros(()), max(2 * alpha, 0.0), slope, 1e-9, 1e-5),
        )
        for alpha, slope in ((3.0, 2.0), (-1.0, 0.0))
    },
}


@pytest.mark.parametrize("name", SMALL)
def test_a_small_problem_has_its_solution_and_hypergradient(name):
    lower, outer, constraint, alpha, start, w, grad, f64, f32 = SMALL[name]
    solver = bilevel.implicit(bilevel.projected(constraint))
    result = hypergradient(bilevel.Problem(lower, outer), solver, alpha, start, None, None)
    assert_close(result.w, w, f64=f64, f32=f32)
    assert_close(result.grad, grad, f64=f64, f32=f32)


def test_jaxopt_338_and_419_the_jacobian_of_a_projected_solution_in_both_modes():
    """Equations that depend on alpha; JAXopt raises an assertion or a transposition error."""
    matrix, c = normal(7, 2, 4), normal(8, 4)
    forward = bilevel.projected("affine", matrix, lambda alpha: alpha)
    solver, zero, alpha = bilevel.implicit(forward), jnp.zeros(4), jnp.array([0.3, -0.2])

    def solve(alpha):
        def lower(w, alpha, _):
            return jnp.sum((w - c) ** 2) / 2

        return solver.run(lower, alpha, zero, solver.init(zero), None)[0]

    expected = np.linalg.pinv(np.asarray(matrix, float))
    for mode in (jax.jacfwd, jax.jacrev):
        assert_close(jax.jit(mode(solve))(alpha), expected, f64=1e-9, f32=1e-4)


def test_frank_wolfe_298_a_quadratic_on_the_simplex_has_the_value_of_three_other_sets():
    """The derivative in the linear term is the solution. The reported value is off by 8e-6."""
    linear = jnp.array([-6.0, -6.15703, -5.55986])
    a, b = 2.8464949, 2.4178848
    square = jnp.array([[3.0, a, b], [a, 3.0, 2.84649498], [b, 2.84649498, 3.0]])

    def loss(w, linear, _):
        return linear @ w + w @ square @ w

    solver = bilevel.implicit(bilevel.projected("simplex"))
    start = linear, jnp.full(3, 1 / 3), None, None
    result = hypergradient(bilevel.Problem(loss, loss), solver, *start)
    assert -1e-5 < result.value + 3.1753396592447753 < 1e-6
    slope = linear + 2 * square @ result.w
    assert slope @ result.w - slope.min() < tolerance(1e-12, 1e-5)  # the duality gap
    assert_close(result.grad, result.w, f64=1e-9, f32=1e-4)


# ----------------------------------------------------------------------------- papers

PAPERS = {
    "Bard 1988, example 1": (
        lambda y, x, _: (y - 1) ** 2 - 1.5 * x * y,
        lambda y, x, _: (x - 5) ** 2 + (2 * y + 1) ** 2,
        lambda x: (jnp.maximum(0, 2 * x - 8), jnp.minimum(3 * x - 3, 7 - x)),
        [(1.2, 0.6, 18.8), (2.0, 2.5, 12.0), (5.0, 2.0, -20.0)],
    ),
    "Clark & Westerberg 1990, example 1": (
        lambda y, x, _: (y - 5) ** 2,
        lambda y, x, _: (x - 3) ** 2 + (y - 2) ** 2,
        lambda x: ((x + 2) / 2, jnp.minimum(2 * x + 1, (14 - x) / 2)),
        [(0.5, 2.0, -5.0), (3.0, 5.0, 0.0), (6.0, 4.0, 4.0)],
    ),
    "Aiyoshi & Shimizu 1984, example 1": (
        lambda y, x, _: jnp.sum((y - x + 20) ** 2),
        lambda y, x, _: 2 * jnp.sum(x) - 3 * jnp.sum(y) - 60,
        lambda x: (jnp.full(2, -10.0), jnp.minimum(20.0, (x - 10) / 2)),
        [([25.0, 40.0], [5.0, 15.0], [-1.0, 0.5]), ([5.0, 28.0], [-10.0, 8.0], [2.0, -1.0])],
    ),
}


def of_paper(name):
    lower, outer, bounds, _ = PAPERS[name]
    forward = bilevel.projected("box", lambda x: bounds(x)[0], lambda x: bounds(x)[1])
    return bilevel.Problem(lower, outer), bilevel.implicit(forward)


@pytest.mark.parametrize("name", PAPERS)
def test_problems_of_papers_have_their_solutions_and_slopes(name):
    fn = bilevel.hypergradient(*of_paper(name), diagnostics=False)
    run = jax.jit(lambda x: fn(x, jnp.zeros_like(x), None, None))
    for x, w, slope in PAPERS[name][3]:
        result = run(jnp.asarray(x))
        assert_close(result.w, w, f64=1e-9, f32=1e-5)
        assert np.abs(np.asarray(result.grad) - np.asarray(slope)).max() < 1e-3


OVER_ONE = optax.chain(optax.sgd(0.02), bilevel.project(lambda x: jnp.clip(x, min=1.0)))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "start", "rule", "steps", "best", "value"),
    [
        ("Bard 1988, example 1", 1.4, OVER_ONE, 60, 1.0, 17.0),
        ("Clark & Westerberg 1990, example 1", 0.2, optax.sgd(0.05), 20, 1.0, 5.0),
    ],
)
def test_a_search_finds_the_best_known_value_of_bolib(name, start, rule, steps, best, value):
    args = jnp.asarray(start), jnp.zeros(()), None, None
    result = bilevel.search(*of_paper(name), rule, *args, steps=steps, diagnostics=False)
    assert abs(result.alpha - best) < 1e-3
    assert abs(result.history["value"][-1] - value) < 2e-2
