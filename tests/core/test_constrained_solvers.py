"""Solvers of constrained lower problems: the operators, the derivative in all modes, products."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sklearn.datasets
from helpers import assert_close, finite_differences, float64_only, hypergradient, normal, tolerance
from test_constraints import H3, VALUES

import bilevel
from bilevel import constraints

TARGET = np.array([1.0, -1.0, 1.0])
START = np.zeros(3)
LONG = pytest.mark.long


def lower(w, alpha, c):
    return w @ H3 @ w / 2 - c @ w


def outer(w, alpha, batch):
    return jnp.sum((w - TARGET) ** 2) / 2


PROBLEM = bilevel.Problem(lower, outer)
LASSO = bilevel.proximal("l1", jnp.exp)
C = np.array([4.0, -1.5, -1.2])
ALPHA = np.array([0.0, -0.5, 0.3])
LASSO_GRADIENT = np.array(VALUES["Lasso"][2])
BALL = bilevel.projected("l2_ball", jnp.exp)
OTHERS = bilevel.neumann(300, 0.2), bilevel.nystrom(2, tolerance(1e-6, 3e-4))
INVERSES = [bilevel.cg(), bilevel.dense(), *(pytest.param(x, marks=LONG) for x in OTHERS)]


def value(solver, alpha, c=C, w0=START):
    return outer(solver.run(lower, alpha, w0, solver.start(alpha, w0), c)[0], alpha, None)


@pytest.mark.parametrize("inverse", INVERSES, ids=["cg", "dense", "neumann", "nystrom"])
def test_every_inverse_gives_the_lasso_s_hypergradient(inverse):
    gradient = jax.jit(jax.grad(functools.partial(value, bilevel.implicit(LASSO, inverse))))(ALPHA)
    assert_close(gradient, LASSO_GRADIENT, f64=1e-5, f32=1e-3)


@pytest.mark.parametrize("forward", [LASSO, pytest.param(BALL, marks=LONG)], ids=["lasso", "ball"])
def test_jvp_vmap_and_second_derivatives_agree_with_finite_differences(forward):
    alpha = ALPHA if forward is LASSO else jnp.array(-0.5)
    run = functools.partial(value, bilevel.implicit(forward))
    first = jax.jit(jax.grad(run))
    expected = finite_differences(jax.jit(run), alpha)
    assert_close(first(alpha), expected, f64=1e-8, f32=3e-2)
    direction = jnp.ones_like(alpha)
    _, pushed = jax.jit(lambda a: jax.jvp(run, (a,), (direction,)))(alpha)
    assert_close(pushed, np.sum(expected), f64=1e-8, f32=3e-2)
    stacked = jax.jit(jax.vmap(first))(jnp.stack([alpha, alpha - 0.1]))
    assert_close(stacked[1], first(alpha - 0.1), f64=1e-10, f32=1e-4)
    second = jax.jit(jax.hessian(run))(alpha)
    assert_close(second.ravel(), finite_differences(first, alpha).ravel(), f64=1e-7, f32=5e-2)


@pytest.mark.long
@pytest.mark.parametrize("quadratic", [True, False])
def test_unrolled_proximal_steps_converge_to_the_implicit_derivative(quadratic):
    """The quartic loss is steeper away from the start, so the first step size is too long."""

    def bent(w, alpha, c):
        return lower(w, alpha, c) + (0 if quadratic else jnp.sum(w**4))

    problem = bilevel.Problem(bent, outer)
    exact = hypergradient(problem, bilevel.implicit(LASSO), ALPHA, START, C, None).grad

    def loss(steps, alpha):
        solver = bilevel.unrolled(LASSO, steps)
        return outer(solver.run(bent, alpha, START, solver.start(alpha, START), C)[0], alpha, None)

    few = jax.jit(functools.partial(loss, 3))
    gradient = jax.jit(jax.grad(few))(ALPHA)
    assert_close(gradient, finite_differences(few, ALPHA), f64=1e-7, f32=3e-2)
    assert np.abs(gradient - exact).max() > 1e-3
    many = functools.partial(loss, 60)
    assert_close(jax.jit(jax.grad(many))(ALPHA), exact, f64=1e-9, f32=1e-4)
    pushed = jax.jit(lambda a: jax.jvp(many, (a,), (jnp.ones(3),))[1])(ALPHA)
    assert_close(pushed, exact.sum(), f64=1e-9, f32=1e-4)


def test_unrolled_steps_stay_in_the_set_and_serve_as_a_forward_solver():
    box = bilevel.projected("box", -0.3, lambda a: a)
    forward = bilevel.unrolled(box, 60)
    w, state = jax.jit(lambda a: forward.run(lower, a, START, forward.start(a, START), C))(0.5)
    assert np.array_equal(state.code, [1, -1, -1])
    assert_close(w, [0.5, -0.3, -0.3], f64=1e-15, f32=1e-6)
    runs = (functools.partial(value, bilevel.implicit(solver)) for solver in (box, forward))
    direct, through = (jax.jit(jax.value_and_grad(run))(0.5) for run in runs)
    assert_close(through, direct, f64=1e-9, f32=1e-5)
    crossing = jax.jit(lambda a: forward.run(lower, a, START, forward.start(a, START), C)[0])(-1.0)
    assert np.isnan(crossing).all()


@pytest.mark.long
def test_unrolled_steps_in_a_set_work_in_a_batch_in_a_search_and_with_variables():
    box = bilevel.projected("box", -0.3, lambda a: a["high"])
    solver, exact = bilevel.unrolled(box, 30), bilevel.implicit(box)
    alphas = {"high": jnp.array([0.5, 0.2])}
    batch = jax.vmap(jax.value_and_grad(functools.partial(value, solver)))
    values, gradients = jax.jit(batch)(alphas)
    single = jax.jit(jax.value_and_grad(functools.partial(value, exact)))
    for i, high in enumerate(alphas["high"]):
        expected, gradient = single({"high": high})
        assert_close(values[i], expected, f64=1e-9, f32=1e-5)
        assert_close(gradients["high"][i], gradient["high"], f64=1e-9, f32=1e-5)
    start = {"high": alphas["high"][0]}
    args = PROBLEM, solver, optax.sgd(0.3), start, START, C, C
    history = bilevel.search(*args, steps=5, diagnostics=True).history
    assert history["value"][-1] < history["value"][0]
    assert (history["error_estimate"] < tolerance(1e-9, 1e-4)).all()

    def counting(w, alpha, c):
        return lower(w.params, alpha, c), w.variables + 1

    stateful = bilevel.Problem(counting, lambda w, *args: outer(w.params, *args), stateful=True)
    w0 = bilevel.Stateful(START, jnp.zeros(()))
    result = hypergradient(stateful, solver, start, w0, C, None, diagnostics=True)
    assert_close(result.grad["high"], gradients["high"][0], f64=1e-9, f32=1e-5)
    assert result.w.variables >= 30
    assert result.info.error_estimate < tolerance(1e-9, 1e-4)
    short = bilevel.distilled(box, decay=0.5)
    result = hypergradient(PROBLEM, short, start, START, C, None, diagnostics=True)
    error = abs(result.grad["high"] - gradients["high"][0])
    assert abs(result.info.error_estimate - error) < tolerance(1e-9, 1e-4)


@pytest.mark.long
def test_a_product_mixes_sets_terms_and_free_parts():
    parts = {"bias": None, "mix": "simplex", "sparse": ("l1", lambda a: a)}
    solver = bilevel.implicit(bilevel.proximal(parts))
    w0 = {"bias": jnp.zeros(()), "mix": jnp.zeros(2), "sparse": jnp.zeros(2)}
    y = jnp.array([2.0, 0.5])

    def separable(w, alpha, batch):
        squares = (w["bias"] - alpha) ** 2, (w["mix"] - y) ** 2, (w["sparse"] - y) ** 2
        return sum(map(jnp.sum, squares)) / 2

    problem = bilevel.Problem(separable, lambda w, a, b: w["bias"] * w["sparse"].sum())
    result = hypergradient(problem, solver, 1.0, w0, None, None, diagnostics=True)
    assert_close(result.w, {"bias": 1.0, "mix": [1.0, 0.0], "sparse": [1.0, 0.0]}, f32=1e-5)
    assert_close(result.grad, 0.0, f32=1e-5)  # alpha (2 - alpha) at alpha = 1
    assert result.info.error_estimate < tolerance(1e-13, 1e-5)


def test_own_operators_agree_with_the_named_ones():
    own = bilevel.proximal(
        lambda w, step, alpha: jnp.sign(w) * jnp.maximum(jnp.abs(w) - step * jnp.exp(alpha), 0)
    )
    result = hypergradient(PROBLEM, bilevel.implicit(own), ALPHA, START, C, None, diagnostics=True)
    assert_close(result.grad, LASSO_GRADIENT, f64=1e-8, f32=1e-4)
    assert np.isinf(result.info.error_estimate)
    assert "your own projection" in bilevel.explain(result.info)
    solver = bilevel.implicit(bilevel.projected(lambda w: jnp.clip(w, -0.5, 0.5)))
    named, w0 = bilevel.projected("box", -0.5, 0.5), jnp.asarray(START)
    w, expected = (s.run(lower, None, w0, s.init(w0), C)[0] for s in (solver, named))
    assert_close(w, expected, f64=1e-8, f32=1e-5)


def test_parameters_may_be_traced_values_that_the_solver_closes_over():
    def run(radius):
        return value(bilevel.implicit(bilevel.projected("l2_ball", radius)), 0.0)

    helpers.assert_gradient(run, 0.6, f64=1e-9, f32=3e-2)


def test_a_search_carries_the_active_set_and_lowers_the_outer_loss():
    args = PROBLEM, bilevel.implicit(LASSO), optax.sgd(0.3), ALPHA, START, C, C
    result = bilevel.search(*args, steps=20)
    assert result.history["value"][-1] < result.history["value"][0]
    assert np.array_equal(result.state.solver_state.forward.code, np.sign(result.w))


def test_bounds_that_cross_give_nan_under_jit():
    solver = bilevel.implicit(bilevel.projected("box", lambda a: a, 0.0))
    fn = jax.jit(bilevel.hypergradient(PROBLEM, solver, diagnostics=False))
    result = fn(1.0, START, C, None)
    assert np.isnan(result.value) and np.isnan(result.grad)
    assert np.isfinite(fn(-1.0, START, C, None).grad)


def test_the_box_with_an_equation_is_projected_as_by_bisection():
    rng = np.random.default_rng(0)

    @jax.jit
    def project(z, low, high, y, total):
        part = constraints.box_equality(low, high, y, total)
        return part.prox(part.identify(z, 0 * z, None, 1.0), z, None, 1.0)

    for kind in range(60):
        z, low = rng.normal(size=6), -rng.exponential(size=6)
        high = low + rng.exponential(size=6)
        y = rng.choice([-1.0, 1.0, 2.0, 0.0], size=6)
        y[0] = 1.0
        inside = rng.uniform(low, high)
        if kind % 3 == 0:
            high[1] = np.inf
        if kind % 3 == 1:
            low[2] = -np.inf
        below, above = -1e3, 1e3
        for _ in range(100):
            middle = (below + above) / 2
            surplus = y @ np.clip(z - middle * y, low, high) - y @ inside
            below, above = (middle, above) if surplus > 0 else (below, middle)
        w = project(*map(jnp.asarray, (z, low, high, y, y @ inside)))
        assert_close(w, np.clip(z - below * y, low, high), f64=1e-10, f32=1e-4)


@float64_only
def test_total_variation_solves_its_dual_problem():
    term = constraints.total_variation(lambda alpha: alpha)

    @jax.jit
    def denoised(y, weight):
        return term.prox(term.identify(y, 0 * y, weight, 1.0), y, weight, 1.0)

    for seed in range(10):
        y, weight = normal(seed, 12), 0.1 * (seed + 1)
        w = denoised(y, weight)
        dual, jumps = np.cumsum(y - w)[:-1], np.diff(w)
        assert np.abs(dual).max() <= weight + 1e-12
        np.testing.assert_allclose(dual[jumps != 0], -weight * np.sign(jumps[jumps != 0]))
        assert abs(np.sum(y - w)) < 1e-12


def test_an_ill_conditioned_machine_takes_few_gradient_steps():
    x = normal(0, 200, 5)
    y = jnp.where(x[:, 0] * x[:, 1] > 0, 1.0, -1.0)
    squares = jnp.sum((x[:, None] - x) ** 2, -1)
    Q = (jnp.exp(-0.05 * squares) + 1) * y[:, None] * y + 1e-3 * jnp.eye(200)
    values = jnp.linalg.eigvalsh(Q)
    assert values[-1] > 1e4 * values[0]
    # Accelerated steps with restart need more than 600 here.
    minimizer = bilevel.projected("box", 0.0, 1.0, steps=300)

    def lower(w, alpha, batch):
        return 0.5 * w @ Q @ w - alpha * jnp.sum(w)

    w, _ = minimizer.run(lower, 1.0, jnp.zeros(200), minimizer.init(jnp.zeros(200)), None)
    slope = Q @ w - 1
    residual = w - jnp.clip(w - slope / values[-1], 0, 1)
    assert jnp.linalg.norm(residual) < tolerance(1e-12, 1e-4) * jnp.linalg.norm(w)


def test_a_warm_start_takes_few_steps():
    forward = bilevel.projected("nonnegative", steps=1)
    x, y = normal(3, 40, 20), normal(4, 40)

    def squares(w, alpha, batch):
        return jnp.sum((x @ w - y) ** 2) / 2 + alpha * jnp.sum(w)

    w0 = jnp.zeros(20)
    exact = bilevel.projected("nonnegative")
    w, state = jax.jit(lambda: exact.run(squares, 1.0, w0, exact.init(w0), None))()
    near, _ = jax.jit(lambda: forward.run(squares, 1.001, w, state, None))()
    full, _ = jax.jit(lambda: exact.run(squares, 1.001, w0, exact.init(w0), None))()
    assert_close(near, full, f64=1e-9, f32=1e-5)


def test_equal_features_leave_the_weights_of_a_lasso_bounded():
    """Products of features contain sex squared, a multiple of sex: Newton's steps are singular."""
    data, target = sklearn.datasets.load_diabetes(return_X_y=True)
    i, j = np.triu_indices(10)
    x = np.concatenate([data, data[:, i] * data[:, j]], 1)
    order = np.random.default_rng(1).permutation(442)
    rows, others = order[:221], order[221:331]
    x = jnp.asarray((x - x[rows].mean(0)) / x[rows].std(0))
    y = jnp.asarray((target - target.mean()) / target.std())

    def squares(w, alpha, batch):
        return jnp.mean((x[batch] @ w - y[batch]) ** 2) / 2

    start = jnp.full(65, np.log(0.02)), jnp.zeros(65), rows, others
    problem, solver = bilevel.Problem(squares, squares), bilevel.implicit(LASSO)
    result = bilevel.search(problem, solver, optax.adam(0.05), *start, steps=40, diagnostics=False)
    assert float(abs(result.w).max()) < 1
    assert result.history["value"][-1] < result.history["value"][0]
