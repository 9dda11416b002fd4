"""Lower solvers: identities between them, ridge's closed form, and the forward solvers."""

import helpers
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import problems
import pytest
from helpers import assert_close, cast, flatten, lower_hessian, tolerance
from hypothesis import given
from problems import case, decay, follower, least_squares, logistic, mixed, mixed_ridge_in_numpy

import bilevel
from bilevel.problem.structure import is_quadratic
from bilevel.solvers.minimizers import newton

STEP_SIZE = 0.1


def cosh_loss(w, alpha, batch):
    return jnp.sum(jnp.cosh(w - alpha))


def hypergradient(solver, small, **options):
    return helpers.hypergradient(small.problem, solver, *small.args, **options)


@pytest.mark.long
@pytest.mark.parametrize(
    ("inverse", "terms"),
    [
        (bilevel.scale(STEP_SIZE), 1),  # Liu, Simonyan & Yang 2019, Eq. 7
        (bilevel.neumann(4, STEP_SIZE), 4),  # Lorraine, Vicol & Duvenaud 2020
    ],
    ids=["scale", "neumann"],
)
def test_a_series_at_a_solution_is_backpropagation_through_the_last_steps(inverse, terms):
    small = logistic()
    w = hypergradient(bilevel.implicit(bilevel.newton(tol=0.0)), small).w
    slope = jax.jit(jax.grad(small.problem.lower))(w, small.alpha, small.train)
    assert np.linalg.norm(flatten(slope)) < tolerance(1e-13, 1e-5)
    small = small._replace(w0=w)
    implicit = hypergradient(bilevel.implicit(bilevel.solved(), inverse), small)
    unrolled = hypergradient(bilevel.unrolled(STEP_SIZE, 6, backprop=terms), small)
    assert_close(implicit.grad, unrolled.grad, f64=1e-12, f32=1e-5)


@pytest.mark.long
def test_one_step_is_one_unrolled_step_and_darts_difference_tends_to_it():
    small = logistic()
    sgd = optax.sgd(STEP_SIZE, momentum=0.9)
    truth = hypergradient(bilevel.unrolled(sgd, 1), small)
    assert_close(hypergradient(bilevel.one_step(sgd), small), truth, f64=1e-13, f32=1e-5)
    differences = [hypergradient(bilevel.one_step(sgd, radius=r), small) for r in (0.4, 0.2)]
    errors = [np.linalg.norm(flatten(f.grad) - flatten(truth.grad)) for f in differences]
    assert errors[0] < 1e-2 * np.linalg.norm(flatten(truth.grad))
    # Truth: central differences are wrong by O(radius^2).
    assert 3.8 < errors[0] / errors[1] < 4.2
    # Diagnostics use the adjoint of the same differences, which are exact for it.
    residuals = [
        hypergradient(solver, small, diagnostics=True).info.linear_residual
        for solver in (bilevel.unrolled(sgd, 1), bilevel.one_step(sgd, radius=0.01))
    ]
    assert_close(residuals[1], residuals[0], f64=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("radius", [None, 1e-3])
def test_one_step_of_an_optimizer_that_asks_for_the_loss_is_an_unrolled_one(radius):
    """Polyak's step depends on alpha through the loss's value too."""

    def of(solver):
        w = jnp.zeros(3)
        run = lambda alpha: solver.run(cosh_loss, alpha, w, solver.init(w), None)[0]  # noqa: E731
        return jax.jacrev(run)(jnp.arange(1.0, 4.0))

    rule = optax.polyak_sgd(max_learning_rate=10.0)
    exact = of(bilevel.unrolled(rule, 1))  # truth
    assert_close(of(bilevel.one_step(rule, radius=radius)), exact, f64=1e-5, f32=1e-2)


def test_without_backpropagation_the_direct_term_alone_is_left():
    small = logistic()
    result = hypergradient(bilevel.unrolled(STEP_SIZE, 5, backprop=0), small)
    direct = jax.jit(jax.grad(small.problem.outer, 1))(result.w, small.alpha, small.valid)
    assert_close(result.grad, direct, f64=1e-14, f32=1e-6)
    # The weights are those of the steps, differentiated or not.
    assert_close(result.w, hypergradient(bilevel.unrolled(STEP_SIZE, 5), small).w, f64=1e-14)


def test_plain_training_at_a_fixed_alpha_is_accepted():
    problem = bilevel.Problem(lambda w, a, b: (w - a) ** 2, lambda w, a, b: w**2)
    solver = bilevel.unrolled(0.25, 1, backprop=0)
    start = jnp.ones(()), jnp.zeros(()), None, None
    result = bilevel.search(problem, solver, optax.set_to_zero(), *start, steps=3)
    assert float(result.w) == 0.875  # each step halves the distance to alpha = 1


@jax.custom_jvp
def rounded(x):
    """Round to eighths, with slope 1: a straight-through estimator."""
    return jnp.round(8 * x) / 8


@rounded.defjvp
def _(primals, tangents):
    return rounded(*primals), tangents[0]


LOOPS = {
    "scan": lambda w: jax.lax.scan(lambda total, x: (total + rounded(x), None), 0.0 * w[0], w)[0],
    "scan in a map": lambda w: jnp.sum(
        jax.lax.map(jax.checkpoint(lambda x: jax.lax.map(rounded, x[None])[0]), w)
    ),
}
QUANTISED = {"implicit": bilevel.implicit(bilevel.unrolled(0.1, 50)), "soba": bilevel.soba(0.1)}


@pytest.mark.parametrize(("name", "loop"), [("implicit", "scan in a map"), ("soba", "scan")])
def test_a_lower_loss_in_a_loop_keeps_the_derivatives_that_functions_have(name, loop):
    """Truth: the same loss without a loop."""

    def norms(total):
        problem = bilevel.Problem(
            lambda w, a, b: 0.5 * (total(w) - a) ** 2 + 0.05 * jnp.sum(w**2),
            lambda w, a, b: jnp.sum((w - b[0]) ** 2),
        )
        rows = jnp.ones((1, 3))
        start = jnp.array(1.7), jnp.array([0.1, 0.2, 0.3]), rows, rows
        run = bilevel.search(problem, QUANTISED[name], optax.sgd(0.01), *start, steps=3)
        return run.history["grad_norm"]

    assert_close(norms(LOOPS[loop]), norms(lambda w: jnp.sum(rounded(w))), f64=1e-12, f32=1e-4)


def test_step_size_can_be_learned():
    small = logistic()

    def value(log_step_size):
        solver = bilevel.unrolled(jnp.exp(log_step_size), 20)
        return bilevel.hypergradient(small.problem, solver, diagnostics=False)(*small.args).value

    helpers.assert_gradient(value, np.log(0.05), f64=1e-9, f32=1e-2)


@pytest.mark.parametrize("steps", [1, 64, 65, 150])
def test_blocks_of_steps_make_the_number_of_steps_asked_for(steps):
    counter = case(
        lambda w, alpha, batch: -jnp.sum(alpha * w),  # w <- w + alpha at every step
        lambda w, alpha, batch: jnp.sum(w),
        *(np.ones(1), np.zeros(1), (), ()),
    )
    result = hypergradient(bilevel.unrolled(1.0, steps), counter)
    assert result.value == result.grad == steps


@pytest.mark.parametrize(("n", "p"), [(12, 4), (6, 6), (5, 9)])
def test_ridge_hypergradient_is_the_closed_form(n, p):
    small = least_squares(n, p)
    result = hypergradient(bilevel.ridge(mixed, decay), small)
    value, grad = mixed_ridge_in_numpy(small)  # truth: numpy, primal whatever the size
    assert_close(result.value, value, f64=1e-12, f32=1e-4)
    assert_close(result.grad, grad, f64=1e-12, f32=1e-4)


@jax.jit
def fit(phi, y, penalty):
    solver = bilevel.ridge(lambda alpha, x: x, lambda alpha: alpha)
    return solver.run(None, penalty, None, (), (phi, y))[0]


@pytest.mark.parametrize("vector", [False, True], ids=["one penalty", "a penalty per weight"])
@pytest.mark.parametrize("columns", [None, 2])
@pytest.mark.parametrize(("n", "p"), [(9, 4), (4, 9)])
@given(seed=st.integers(0, 2**32 - 1))
def test_ridge_primal_and_dual_solve_the_normal_equations(n, p, columns, vector, seed):
    rng = np.random.default_rng(seed)
    phi, y = rng.normal(size=(n, p)), rng.normal(size=(n,) if columns is None else (n, columns))
    penalty = rng.uniform(0.5, 2, p) if vector else rng.uniform(0.5, 2)
    w = fit(phi, y, penalty)
    expected = np.linalg.solve(phi.T @ phi + np.diag(np.broadcast_to(penalty, p)), phi.T @ y)
    assert w.shape == expected.shape
    assert_close(w, expected, f64=1e-11, f32=1e-4)


@pytest.mark.parametrize("columns", [None, 2])
@pytest.mark.parametrize(("n", "p"), [(9, 4), (4, 9)])
def test_ridge_with_a_penalty_per_weight_is_differentiated_rightly(n, p, columns):
    rng = np.random.default_rng(0)
    phi, y = rng.normal(size=(n, p)), rng.normal(size=(n, columns or 1))
    y = y if columns else y[:, 0]
    penalty, weight = rng.uniform(0.5, 2, p), rng.normal(size=(p, *y.shape[1:]))
    grad = jax.jit(jax.grad(lambda penalty: jnp.sum(weight * fit(phi, y, penalty))))(penalty)
    # Truth: dw / dpenalty_j = -M^-1 e_j w_j, in numpy.
    inverse = np.linalg.inv(phi.T @ phi + np.diag(penalty))
    expected = -(inverse @ weight) * (inverse @ phi.T @ y)
    assert_close(grad, expected.sum(1) if columns else expected, f64=1e-11, f32=1e-4)


@pytest.mark.filterwarnings("ignore:alpha.'log_decay'.")  # the ridgeless solver ignores decay
@pytest.mark.parametrize(("n", "p"), [(12, 4), (5, 9)])
def test_ridgeless_hypergradient_is_that_of_the_pseudo_inverse(n, p):
    small = least_squares(n, p)
    (x, y), (xv, yv) = jax.tree.map(lambda a: np.asarray(a, float), (small.train, small.valid))

    def value(mix):
        phi, psi = (np.einsum("i,nip->np", mix, a) for a in (x, xv))
        return np.mean((psi @ np.linalg.pinv(phi) @ y - yv) ** 2)

    # Truth: finite differences of numpy's pseudo-inverse, in float64.
    expected = helpers.finite_differences(value, np.asarray(small.alpha["mix"], float), h=3e-4)
    grad = hypergradient(bilevel.ridge(mixed, lambda alpha: 0.0), small).grad["mix"]
    assert_close(grad, expected, f64=1e-6, f32=1e-4)


@pytest.mark.parametrize("rows", [3, 20])
@pytest.mark.parametrize("whole", ["labels", "features"])
def test_ridge_of_integers_is_that_of_the_same_real_numbers(rows, whole):
    """A linear solve in integers would lose the derivative and round the penalty."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(rows, 5)), rng.integers(0, 2, rows) * 2 - 1
    if whole == "features":
        x, y = rng.integers(0, 4, (rows, 5)), rng.normal(size=rows)
    valid = rng.normal(size=(7, 5)), rng.normal(size=7)
    solver = bilevel.ridge(lambda alpha, x: x, lambda alpha: rows * jnp.exp(alpha))
    train, valid = (jnp.asarray(x), jnp.asarray(y)), jax.tree.map(jnp.asarray, valid)
    start = problems.soft_problem(), solver, jnp.asarray(0.5), jnp.zeros(5)
    hyper, expected = (
        helpers.hypergradient(*start, side, valid) for side in (train, cast(train, float))
    )
    assert abs(float(expected.grad)) > 1e-4
    assert_close((hyper.grad, hyper.w), (expected.grad, expected.w), f32=1e-4)


def minimum_in_numpy(small):
    """Return the minimum by Newton's method with numpy's solves."""

    @jax.jit
    def parts(w):
        slope = jax.grad(small.problem.lower)(w, small.alpha, small.train)
        return slope, lower_hessian(small.problem.lower, w, small.alpha, small.train)

    w = np.asarray(small.w0)
    for _ in range(30):
        slope, hessian = map(np.asarray, parts(jnp.asarray(w)))
        w = w - np.linalg.solve(hessian, slope)
    return w


def minimum(solver, small):
    run = jax.jit(lambda *args: solver.run(small.problem.lower, *args)[0])
    return run(small.alpha, small.w0, (), small.train)


def test_newton_finds_the_minimum_from_far_away():
    """Full steps overshoot where the loss is nearly linear."""
    w = minimum(bilevel.newton(), logistic()._replace(w0=100 * logistic().w0))
    assert_close(w, minimum_in_numpy(logistic()), f64=1e-7, f32=1e-4)  # truth: numpy


def test_newton_takes_one_step_on_a_quadratic():
    small = least_squares()
    assert is_quadratic(small.problem.lower, small.w0, small.alpha, small.train)
    w = minimum(bilevel.newton(1), small)
    assert_close(w, minimum_in_numpy(small), f64=1e-7, f32=1e-4)  # truth: numpy


@pytest.mark.long
def test_newton_takes_the_steps_it_is_allowed():
    """Truth: Newton's own steps in one dimension, where CG and the line search change nothing."""
    w = 0.9
    for steps in (1, 2, 3):
        w = w - np.tanh(w - 0.1)
        weights = newton(steps, tol=0.0).run(cosh_loss, 0.1, jnp.array([0.9]), (), None)[0]
        np.testing.assert_allclose(weights, [w], rtol=1e-5 if steps < 3 else 1e-3)


@pytest.mark.long
def test_one_step_learns_rates_as_unrolled_does():
    def make(alpha):
        adamw = optax.adamw(alpha["rate"], weight_decay=alpha["mean"])
        return optax.chain(optax.clip_by_global_norm(1.0), adamw)

    problem = bilevel.Problem(
        lambda w, alpha, batch: 0.5 * jnp.sum((w - alpha["mean"]) ** 2),
        lambda w, alpha, batch: jnp.sum(w**2),
    )
    args = {"mean": jnp.array(0.5), "rate": jnp.array(0.2)}, jnp.arange(1.0, 4), None, None
    solvers = bilevel.one_step(make), bilevel.one_step(make, radius=1e-2), bilevel.unrolled(make, 1)
    *gradients, expected = (helpers.hypergradient(problem, s, *args).grad for s in solvers)
    for grad in gradients:
        assert_close(grad, expected, f64=1e-9, f32=1e-4)


@pytest.mark.long
def test_a_restarted_solver_draws_a_start_at_every_outer_step_and_resumes_bit_for_bit(tmp_path):
    def drawn(key, alpha, w):
        return jax.random.normal(key, w.shape)

    key = jax.random.key(3)
    problem = follower(lambda w, alpha, batch: jnp.sum((w - 1) ** 2))
    solver = bilevel.restarted(bilevel.unrolled(0.1, 2), drawn, key=key)
    args = problem, solver, optax.sgd(0.1), jnp.array(0.5), jnp.zeros(2), None, None
    whole = helpers.assert_resumes(args, tmp_path)
    alpha = 0.5
    for step in range(4):  # truth: two steps by hand from the start of each number
        w = 0.81 * drawn(jax.random.fold_in(key, step), None, jnp.zeros(2)) + 0.19 * alpha
        assert_close(whole.history["value"][step], jnp.sum((w - 1) ** 2), f64=1e-6, f32=1e-5)
        alpha = alpha - 0.1 * jnp.sum(2 * (w - 1) * 0.19)
