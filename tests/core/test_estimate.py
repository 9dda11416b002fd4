"""A hypergradient's error estimate, compared with known errors."""

import functools
import itertools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import problems
import pytest
from helpers import assert_close, flatten, lower_hessian, run, tolerance
from problems import case, decay, digits, least_squares, logistic, mixed, quadratic, soft_problem

import bilevel
from bilevel.hypergradients.error_estimate import frobenius_bound

EPS = float(jnp.finfo(jax.dtypes.canonicalize_dtype(float)).eps)
STEPS = (3, 10, 30, 100, 300, 1000)


def hypergradient(solver, small, diagnostics=True, **options):
    options |= {"diagnostics": diagnostics}
    return helpers.hypergradient(small.problem, solver, *small.args, **options)


def error(actual, expected):
    return np.linalg.norm(flatten(actual) - flatten(expected))


def implicit_after_descent(problem, step_size, steps):
    """Return ``implicit(unrolled(step_size, steps))``, compiled once for all numbers of steps."""

    def descend(alpha, w, batch):
        def step(_, w):
            return optax.tree.add_scale(w, -step_size, jax.grad(problem.lower)(w, alpha, batch))

        return jax.lax.fori_loop(0, steps, step, w)

    return bilevel.implicit(bilevel.solved(descend), bilevel.cg())


def unrolled_descent(problem, step_size, steps):
    """Return ``unrolled(step_size, steps)`` for a traced number of steps; others have length 0."""
    rates = optax.sgd(lambda count: jnp.where(count < steps, step_size, 0.0))
    return bilevel.unrolled(rates, STEPS[-1])


SOLVERS = {"implicit": implicit_after_descent, "unrolled": unrolled_descent}


@functools.cache
def compiled(kind, family):
    """Return the hypergradient after a traced number of steps; both quadratics share one."""
    problem = (digits() if family is digits else quadratic("iid")).case.problem

    @jax.jit
    def run(step_size, steps, *args):
        return bilevel.hypergradient(problem, SOLVERS[kind](problem, step_size, steps))(*args)

    return run


PROBLEMS = {
    "iid": (quadratic, lambda: quadratic("iid")),
    "hard": (quadratic, lambda: quadratic("hard")),
    "digits": (digits, digits),
}


@functools.cache
def calibrate(kind, name, steps):
    """Return the result, its error (truth: numpy, float64), and the error that counts as zero."""
    family, load = PROBLEMS[name]
    small, step_size, truth = load()
    result = compiled(kind, family)(step_size, steps, *small.args)
    return result, error(result.grad, truth), 20 * EPS * np.linalg.norm(truth)


over_all_calibrations = pytest.mark.parametrize(
    ("kind", "name", "steps"), list(itertools.product(SOLVERS, PROBLEMS, STEPS))
)


@pytest.mark.long
@over_all_calibrations
def test_error_estimate_is_within_a_third_and_ten_times_the_error(kind, name, steps):
    result, true_error, floor = calibrate(kind, name, steps)
    estimate = float(result.info.error_estimate)
    # Below the floor both numbers are rounding errors and count as zero.
    if max(true_error, estimate) > floor:
        assert true_error / 3 <= estimate <= 10 * true_error


@pytest.mark.slow
@over_all_calibrations
def test_converged_says_whether_the_error_is_under_one_percent(kind, name, steps):
    result, true_error, _ = calibrate(kind, name, steps)
    assert result.info.converged == (true_error < 0.01 * np.linalg.norm(flatten(result.grad)))


@over_all_calibrations
def test_error_bound_holds_for_quadratics_and_is_infinite_for_others(kind, name, steps):
    result, true_error, floor = calibrate(kind, name, steps)
    if name == "digits":
        assert np.isinf(result.info.error_bound)
    else:
        assert true_error - floor <= result.info.error_bound < np.inf


DESCENT = bilevel.unrolled(0.1, 20)
SHORT = {
    "unrolled": DESCENT,
    "truncated": bilevel.unrolled(0.1, 20, backprop=3),
    "implicit": bilevel.implicit(DESCENT),
    "neumann": bilevel.implicit(DESCENT, bilevel.neumann(3, 0.1)),
}


@functools.cache
def assessed(name, mode="reverse"):
    return hypergradient(SHORT[name], logistic(), mode=mode)


@functools.cache
def exact_gradient():
    """Return the implicit hypergradient at the solution, which other tests check."""
    return hypergradient(bilevel.implicit(), logistic(), diagnostics=False).grad


@pytest.mark.long
@pytest.mark.parametrize("name", ["unrolled", "neumann"])
def test_stationarity_is_the_norm_of_the_lower_gradient(name):
    small = logistic()
    result = assessed(name)
    slope = jax.jit(jax.grad(small.problem.lower))(result.w, small.alpha, small.train)
    size = np.linalg.norm(flatten(slope))
    assert size > tolerance(1e-6, 1e-4)  # something to see
    assert_close(result.info.stationarity, size, f64=1e-10, f32=1e-3)


@pytest.mark.slow
def test_linear_residual_is_that_of_the_solvers_adjoint():
    small, result = logistic(), assessed("neumann")
    hessian = lower_hessian(small.problem.lower, result.w, small.alpha, small.train)
    hessian = np.asarray(hessian, float)
    force = flatten(jax.jit(jax.grad(small.problem.outer))(result.w, small.alpha, small.valid))
    factor = np.eye(force.size) - 0.1 * hessian
    # Truth: the truncated Neumann sum in numpy.
    adjoint = 0.1 * (force + factor @ force + factor @ factor @ force)
    expected = np.linalg.norm(hessian @ adjoint - force) / np.linalg.norm(force)
    assert_close(result.info.linear_residual, expected, f64=1e-12, f32=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("name", SHORT)
def test_the_estimate_contains_the_bias_of_approximations(name):
    result = assessed(name)
    true_error = error(result.grad, exact_gradient())
    assert true_error / 3 <= result.info.error_estimate <= 10 * true_error


@pytest.mark.long
def test_forward_mode_fills_info_too():
    reverse, forward = assessed("unrolled").info, assessed("unrolled", "forward").info
    assert_close(forward.stationarity, reverse.stationarity, f64=1e-9, f32=1e-3)
    assert_close(forward.error_estimate, reverse.error_estimate, f64=1e-2, f32=1e-2)
    assert forward.converged == reverse.converged
    # Forward mode has no adjoint: this is the independent solve's residual.
    assert forward.linear_residual < tolerance(1e-9, 1e-4)


@pytest.mark.long
def test_info_is_the_same_under_vmap():
    small = logistic()
    fn = jax.vmap(bilevel.hypergradient(small.problem, SHORT["implicit"]), (0, None, None, None))
    alphas = jax.tree.map(lambda x: jnp.stack([0.7 * x, x]), small.alpha)
    info = jax.jit(fn)(alphas, *small.args[1:]).info
    expected = assessed("implicit").info
    # Both are refined until the slower one is done.
    assert_close(info.stationarity[1], expected.stationarity, f64=1e-10, f32=1e-3)
    assert_close(info.error_estimate[1], expected.error_estimate, f64=1e-2, f32=1e-2)


def many_ridges(rng, count, n, p, noise, low, high):
    """Return ``count`` problems with numbers exact in float32, and their exact hypergradients."""

    def held(x):
        return np.asarray(x, np.float32).astype(np.float64)

    x, w = held(rng.normal(size=(2, count, n, p))), rng.normal(size=(count, p))
    y = held(np.einsum("scnp,cp->scn", x, w) + noise * rng.normal(size=(2, count, n)))
    alpha = held(np.log(10.0) * rng.uniform(low, high, size=count))
    decay, transposed = np.exp(alpha), x.swapaxes(-1, -2)
    hessian = transposed[0] @ x[0] / n + decay[:, None, None] * np.eye(p)

    def solve(b):
        return np.linalg.solve(hessian, b[..., None])[..., 0]

    def product(matrix, v):
        return np.einsum("cij,cj->ci", matrix, v)

    w = solve(product(transposed[0], y[0]) / n)
    w -= solve(product(transposed[0], product(x[0], w) - y[0]) / n + decay[:, None] * w)
    adjoint = solve(product(transposed[1], product(x[1], w) - y[1]) / n)
    start = held(rng.normal(size=(count, p)))
    return (alpha, start, (x[0], y[0]), (x[1], y[1])), -decay * np.sum(w * adjoint, -1)


@pytest.mark.long
@pytest.mark.parametrize("noise", [0.0, 1e-6])
def test_the_estimate_holds_if_the_outer_gradient_cancels_to_rounding(noise):
    # In float32 the validation residuals keep two digits or less.
    fn = jax.jit(jax.vmap(bilevel.hypergradient(soft_problem(), bilevel.implicit())))
    for seed, p in (1, 4), (2, 10):
        args, truth = many_ridges(np.random.default_rng(seed), 200, 4 * p, p, noise, -8, -4)
        args = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), args)
        result = fn(*args)
        wrong = np.abs(result.grad - truth)
        low = 3 * np.asarray(result.info.error_estimate) < wrong
        assert np.mean(low & (wrong > 20 * 1.2e-7 * np.abs(truth))) < 0.02
        false = np.asarray(result.info.converged) & (wrong > 0.01 * np.abs(truth))
        assert not false.any()
        assert np.mean(result.info.converged) > 0.1


@pytest.mark.long
def test_many_hypergradients_at_once_do_not_deadlock():
    # On two threads, two unordered decompositions of XLA wait for each other.
    code = """
import jax, jax.numpy as jnp, bilevel
keys = jax.random.split(jax.random.key(0), 4)
x, xv = jax.random.normal(keys[0], (2, 400, 15, 40))
y, yv = jax.random.normal(keys[1], (2, 400, 15))
def loss(w, alpha, batch):
    return jnp.mean((batch[0] @ w - batch[1]) ** 2) + jnp.exp(alpha) * jnp.sum(w**2)
problem = bilevel.Problem(loss, lambda w, alpha, batch: loss(w, -jnp.inf, batch))
for solver in bilevel.implicit(), bilevel.implicit(bilevel.newton(), bilevel.dense()):
    fn = jax.jit(jax.vmap(bilevel.hypergradient(problem, solver), in_axes=(None, 0, 0, 0)))
    for _ in range(3):
        print(fn(-3.0, jnp.zeros((400, 40)), (x, y), (xv, yv)).info.converged.mean())
"""
    run("python", "-c", code, timeout=200)


@pytest.mark.long
def test_hypergradients_with_diagnostics_can_be_differentiated():
    small = logistic()
    fn = bilevel.hypergradient(small.problem, bilevel.implicit())

    def value(alpha):
        result = fn(alpha, *small.args[1:])
        return result.value, result.info

    grad, info = jax.jit(jax.grad(value, has_aux=True))(small.alpha)
    assert_close(grad, exact_gradient(), f64=1e-12, f32=1e-5)
    assert info.converged


# A double well with a negative Hessian near w = 0, and a weight that is free.
UNKNOWN = {
    "indefinite": (
        bilevel.implicit(bilevel.unrolled(0.01, 3)),
        lambda w, alpha, batch: jnp.sum(w**4 / 4 - w**2 / 2 - alpha * w),
        lambda w, alpha, batch: jnp.sum((w - 2) ** 2),
        *(np.array([0.01, 0.02]), np.array([0.05, 1.0])),
    ),
    "free": (
        *(bilevel.implicit(), lambda w, alpha, batch: 0.5 * (w[0] - alpha) ** 2),
        *(lambda w, alpha, batch: w[0] + w[1], 1.0, np.zeros(2)),
    ),
}


@pytest.mark.parametrize("name", [pytest.param("indefinite", marks=pytest.mark.slow), "free"])
def test_estimate_is_infinite_if_nothing_is_known(name):
    implicit, *parts = UNKNOWN[name]
    for solver in (implicit, bilevel.unrolled(0.01, 3)):
        info = hypergradient(solver, case(*parts, (), ())).info
        assert np.isinf(info.error_estimate) and np.isinf(info.error_bound)
        assert not info.converged


@pytest.mark.parametrize("p", [5, 33, 400])
def test_norm_by_random_products_is_a_bound(p):
    for seed in range(30):
        u, v = np.random.default_rng(seed).normal(size=(2, p))
        for matrix in map(jnp.asarray, (np.outer(u, v), np.diag(u), np.eye(p)[:1])):
            bound, norm = frobenius_bound(matrix.__matmul__, jnp.zeros(p)), jnp.linalg.norm(matrix)
            assert norm * (1 - 1e-5) <= bound <= 6 * norm


@pytest.mark.slow
@pytest.mark.parametrize(("quartic", "w"), [(0, 0.5), (1, 0.42385379906978)])
def test_error_bound_is_infinite_beyond_1024_weights_where_the_estimate_is_not(quartic, w):
    small = case(
        lambda w, alpha, _: jnp.sum((1 + jnp.exp(alpha)) * (w**2 / 2 + quartic * w**4 / 4) - w),
        lambda w, alpha, batch: jnp.sum(w**2),
        *(0.0, np.full(1025, 3.0), (), ()),
    )
    result = hypergradient(bilevel.unrolled(0.02, 5), small)
    # Truth: w + quartic w^3 = 1/2 and dw/dalpha = -1 / (4 + 12 quartic w^2).
    true_error = abs(float(result.grad) + 2 * 1025 * w / (4 + 12 * quartic * w**2))
    assert true_error / 3 <= result.info.error_estimate <= 10 * true_error
    assert np.isinf(result.info.error_bound)


def ridge_on(scale_of_data, scale_of_decay):
    """Return the mixed-features problem with a lower loss that may differ from ridge's."""
    small = least_squares()

    def lower(w, alpha, batch):
        x, y = batch
        data = 0.5 * jnp.sum((mixed(alpha, x) @ w - y) ** 2)
        return scale_of_data * data + scale_of_decay * 0.5 * decay(alpha) * jnp.sum(w**2)

    return small._replace(problem=bilevel.Problem(lower, small.problem.outer))


@pytest.mark.slow
def test_ridge_is_found_exact_on_its_loss_up_to_a_positive_factor():
    result = hypergradient(bilevel.ridge(mixed, decay), ridge_on(3.7, 3.7))
    size = np.linalg.norm(flatten(result.grad))
    assert result.info.error_estimate < 200 * EPS * size
    assert result.info.error_bound < 1e4 * EPS * size
    assert result.info.linear_residual < tolerance(1e-9, 1e-5)  # the independent solve's
    assert result.info.converged


@pytest.mark.slow
def test_the_estimate_detects_ridge_on_another_loss():
    small = ridge_on(1.0, 3.0)
    result = hypergradient(bilevel.ridge(mixed, decay), small)
    # Truth: the hypergradient of the loss that the problem states.
    exact = hypergradient(bilevel.implicit(), small, diagnostics=False).grad
    true_error = error(result.grad, exact)
    assert true_error > 0.1 * np.linalg.norm(flatten(exact))
    assert true_error / 3 <= result.info.error_estimate <= 10 * true_error
    assert result.info.error_bound >= true_error and not result.info.converged


@pytest.mark.slow
def test_norms_that_overflow_never_count_as_converged():
    """Gradient descent diverged: infinity is not below 1 % of infinity."""
    problem = bilevel.Problem(
        lambda w, a, b: 0.5 * jnp.sum((w - 1) ** 2 + jnp.exp(a) * w**2),
        lambda w, a, b: 0.5 * jnp.sum(w**2),
    )
    # Each step takes the error times -39: the hypergradient is of the size of w squared.
    solver = bilevel.implicit(bilevel.unrolled(20.0, 9), bilevel.dense())
    start = jnp.ones(3, jnp.float32), jnp.zeros(3, jnp.float32), None, None
    hyper = helpers.hypergradient(problem, solver, *start, diagnostics=True)
    assert jnp.isfinite(hyper.grad).all() and jnp.isinf(jnp.linalg.norm(hyper.grad))
    assert not hyper.info.converged and np.isinf(hyper.info.error_estimate)
    assert int(hyper.info.reason) == 1


def test_norms_that_underflow_are_no_estimate():
    problem = problems.follower(lambda w, alpha, scale: scale * jnp.sum((w - 3) ** 2))
    fn = jax.jit(bilevel.hypergradient(problem, bilevel.unrolled(0.1, 3)))
    start = jnp.array([1.0, 2.0], jnp.float32), jnp.zeros(2, jnp.float32), None
    # At w = alpha the gradient is 2 (alpha - 3); three steps are far from there.
    usual, tiny, none = (fn(*start, jnp.float32(s)).info for s in (1e-9, 1e-20, 0.0))
    assert float(usual.error_estimate) > 2e-9 and not usual.converged
    assert np.isinf(tiny.error_estimate) and np.isinf(tiny.error_bound) and not tiny.converged
    assert "multiply the losses" in bilevel.explain(tiny)
    assert none.converged and float(none.error_estimate) == 0


@pytest.mark.long
def test_the_reason_names_a_coarse_dtype_of_the_weights():
    """In float32 a loss of bfloat16 weights is a step function, so Newton does not settle."""

    def lower(w, alpha, batch):
        return jnp.sum(jnp.cosh(w.astype(jnp.float32) - jnp.exp(alpha)))

    problem = bilevel.Problem(lower, lambda w, alpha, batch: jnp.sum(w.astype(jnp.float32) ** 2))
    fn = jax.jit(bilevel.hypergradient(problem, bilevel.implicit()))
    starts = (jnp.full(3, 0.5, dtype) for dtype in (jnp.bfloat16, jnp.float32))
    coarse, fine = (fn(jnp.float32(0.3), w0, None, None).info for w0 in starts)
    assert fine.converged
    assert np.isinf(coarse.error_estimate) and "bfloat16" in bilevel.explain(coarse)
