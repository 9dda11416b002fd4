"""Claims of hypergradients at soft directions, saddles and kinks, and what their checks cost."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import DTYPES, flatten, hypergradient, lower_hessian, tolerance
from problems import case, lasso_loss, mean_squares, soft, soft_problem
from sklearn.linear_model import Lasso

import bilevel
from bilevel.hypergradients import curvature as curvatures
from bilevel.hypergradients.curvature import curvature
from bilevel.internal.conjugate_gradients import solve_conjugate_gradients

PROBLEM = soft_problem()
SOLVERS = {
    "implicit": bilevel.implicit(),
    "after descent": bilevel.implicit(bilevel.unrolled(0.1, 30)),
    "unrolled": bilevel.unrolled(0.1, 30),
}
PRODUCTS = 1000  # more than the few of an unrolled solver's own cost


@pytest.fixture(params=[True, False], ids=["decomposed", "iterated"])
def dense(request, monkeypatch):
    """Whether Hessians are decomposed; otherwise, their products are iterated."""
    if not request.param:
        monkeypatch.setattr(curvatures, "DENSE_SIZE", 0)
    return request.param


@pytest.mark.long
@pytest.mark.parametrize("name", SOLVERS)
def test_no_claim_is_false_where_soft_directions_hide_under_a_small_residual(name, dense):
    fn = jax.jit(bilevel.hypergradient(PROBLEM, SOLVERS[name], products=PRODUCTS))
    rows = []
    for seed in range(12):
        args, truth = soft(seed)
        result = fn(*jax.tree.map(jnp.asarray, args))
        rows.append((float(result.grad), truth, result.info.error_estimate, result.info.converged))
    grad, truth, estimate, converged = map(np.array, zip(*rows, strict=True))
    error = np.abs(grad - truth)
    # What the dual closed form itself is good to.
    floor = 20 * jnp.finfo(result.grad.dtype).eps * np.abs(truth)
    known = np.isfinite(estimate)
    assert not np.any(converged & (error > 0.01 * np.abs(grad) + floor))
    assert np.all(estimate[known] >= error[known] / 3 - floor[known])
    # Of one number, an error can be near zero by chance where rounding makes it.
    assert np.median(estimate[known] / (error[known] + floor[known])) < 10
    assert known.mean() > tolerance(0.99, 0.3 if not dense else 0.99)
    if name == "implicit":
        assert np.mean(error < 0.01 * np.abs(truth)) >= tolerance(0.5, 0.2)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_default_solver_is_right_to_rounding_whatever_the_penalty(dtype):
    fn = jax.jit(bilevel.hypergradient(soft_problem(), bilevel.implicit(), diagnostics=False))
    for seed, log10 in itertools.product(range(4), (-2, -4, -5, -6, -7, -8)):
        arguments, truth = soft(seed, log10)
        arguments = jax.tree.map(lambda a: jnp.asarray(a, dtype), arguments)
        actual = float(fn(*arguments).grad)
        # The weights' rounding, in directions of an outer gradient of size 1.
        np.testing.assert_allclose(actual, truth, rtol=1e-3, atol=100 * float(np.finfo(dtype).eps))


@pytest.mark.parametrize("roundings", [300, 3000])  # above 1000, no direction is soft
@pytest.mark.parametrize("accurate", [0.1, 0.0], ids=["inverted", "decomposed"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_solves_with_an_ill_conditioned_hessian_are_accurate(
    dtype, accurate, roundings, monkeypatch
):
    """Otherwise Newton's steps do not shrink, and there is no estimate. Elimination alone fails."""
    monkeypatch.setattr(curvatures, "_ACCURATE", accurate)
    for seed in range(6):
        x = np.random.default_rng(seed).normal(size=(15, 40)).astype(dtype)
        matrix = jnp.asarray(x.T @ x)
        least = roundings * jnp.finfo(dtype).eps * jnp.linalg.norm(matrix, 2)
        matrix = matrix + least * jnp.eye(40, dtype=dtype)
        system = curvature(lambda v, matrix=matrix: matrix @ v, matrix[0], 0, dense=True)
        assert system.definite and 0.8 < system.lowest / least < 1.25
        assert jnp.linalg.norm(jax.vmap(system.solve)(matrix) - jnp.eye(40), 2) < 0.2


def test_a_tiny_curvature_is_trusted_unless_it_is_rounding():
    x = np.random.default_rng(1).normal(size=(5, 12)).astype(np.float32)
    free = np.linalg.svd(x)[2][-1].astype(np.float32)
    b = jnp.asarray(x[0] / 4 + free)

    def solve(penalty):
        def hvp(v):
            return x.T @ (x @ v) + penalty * v

        return solve_conjugate_gradients(hvp, b, None, steps=100, threshold=jnp.float32(1e-6)).x

    exact = np.linalg.solve(x.T.astype(float) @ x + 1e-8 * np.eye(12), np.asarray(b, float))
    off = np.linalg.norm(np.asarray(solve(np.float32(1e-8)), float) - exact)
    assert off < 0.01 * np.linalg.norm(exact)
    assert float(jnp.linalg.norm(solve(np.float32(0)))) < 10  # 1e7 and more along rounding


def test_a_singular_system_out_of_its_range_has_a_bounded_answer():
    @jax.jit
    def solve(x, b):
        options = {"steps": 100, "threshold": jnp.float32(1e-6)}
        return solve_conjugate_gradients(lambda v: x.T @ (x @ v), b, None, **options)

    for seed in range(20):
        rng = np.random.default_rng(seed)
        x, b = rng.normal(size=(5, 12)), rng.normal(size=12)
        solution = solve(x.astype(np.float32), b.astype(np.float32))
        left = b - x.T @ (x @ np.asarray(solution.x, float))
        assert np.linalg.norm(left) <= 1.001 * np.linalg.norm(b)
        np.testing.assert_allclose(float(solution.residual), np.linalg.norm(left), rtol=0.01)


def network_loss(w, a, b):
    return jnp.mean((jnp.tanh(b[0] @ w["in"]) @ w["out"] - b[1]) ** 2)


def decayed_loss(w, a, b):
    return network_loss(w, a, b) + 0.5 * jnp.exp(a) * optax.tree.norm(w, squared=True)


@pytest.mark.long
def test_a_saddle_is_never_called_converged(dense):
    x = np.random.default_rng(0).normal(size=(30, 3))
    data = x, np.tanh(x[:, 0])
    problem = bilevel.Problem(decayed_loss, network_loss)
    fn = jax.jit(bilevel.hypergradient(problem, bilevel.implicit(bilevel.lbfgs())))
    for size in (0.0, 0.3):
        # All units alike: the gradient keeps them alike, and cannot leave the saddle.
        w = {"in": np.full((3, 4), size), "out": np.full(4, size)}
        small = case(decayed_loss, network_loss, -6.0, w, data, data)
        result = fn(*small.args)
        hessian = lower_hessian(decayed_loss, result.w, small.alpha, small.train)
        assert np.linalg.eigvalsh(hessian)[0] < -1e-3  # a saddle
        assert result.info.stationarity < 1e-2  # and nearly stationary
        assert not result.info.converged
        assert np.isinf(result.info.error_estimate)
        assert "not found positive definite" in bilevel.explain(result.info)


@functools.cache
def lasso_hypergradients():
    problem = bilevel.Problem(lasso_loss, mean_squares)
    solvers = bilevel.implicit(), bilevel.unrolled(0.1, 50)
    return [jax.jit(bilevel.hypergradient(problem, solver)) for solver in solvers]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_lasso_gets_no_bound_and_no_false_claim(seed):
    rng = np.random.default_rng(seed)
    x, xv = rng.normal(size=(2, 40, 8))
    w = rng.normal(size=8) * (rng.random(8) < 0.5)
    drawn = rng.normal(size=8), (x, x @ w + 0.1 * rng.normal(size=40)), (xv, xv @ w)
    small = case(lasso_loss, mean_squares, -2.0, *drawn)
    lasso = Lasso(np.exp(-2.0), fit_intercept=False, tol=1e-13, max_iter=10**5)
    solution = lasso.fit(*map(np.asarray, small.train)).coef_
    active = solution != 0
    assert 0 < active.sum() < 8  # kinks matter
    # Truth: on the active set, where signs do not change, the lower problem is quadratic.
    hessian = x[:, active].T @ x[:, active] / 40
    force = (xv.T @ (xv @ solution - small.valid[1]) / 40)[active]
    truth = -np.exp(small.alpha) * np.sign(solution[active]) @ np.linalg.solve(hessian, force)
    for fn in lasso_hypergradients():
        result = fn(*small.args)
        error = abs(float(result.grad) - truth)
        assert np.isinf(result.info.error_bound)
        assert not result.info.converged or error < 0.01 * abs(truth)
        assert result.info.error_estimate > error / 3


@pytest.mark.long
def test_damped_info_speaks_of_the_solution_nearest_to_the_start():
    rng = np.random.default_rng(0)
    x, xv = rng.normal(size=(2, 6, 20))
    draws = 0.1 * rng.normal(size=20), rng.normal(size=20), rng.normal(size=6), rng.normal(size=6)

    def squares(w, a, b):
        return 0.5 * jnp.sum((b[0] @ (jnp.exp(a) * w) - b[1]) ** 2)

    small = case(squares, squares, *draws[:2], (x, draws[2]), (xv, draws[3]))
    given = small.problem, bilevel.unrolled(0.01, 20), *small.args
    result = hypergradient(*given, diagnostics=True)
    assert np.isinf(result.info.error_estimate)  # the solutions are many
    result = hypergradient(*given, diagnostics=True, damping=0.01)

    def value(alpha):
        # Truth: the minimiser in closed form, differentiated by JAX.
        features = x * jnp.exp(alpha)
        hessian = features.T @ features + 0.01 * jnp.eye(20)
        w = jnp.linalg.solve(hessian, features.T @ small.train[1] + 0.01 * small.w0)
        return small.problem.outer(w, alpha, small.valid)

    error = np.linalg.norm(flatten(result.grad) - flatten(jax.grad(value)(small.alpha)))
    assert error > 0.1 * np.linalg.norm(flatten(result.grad))
    assert error / 3 < result.info.error_estimate < 10 * error


def test_an_indefinite_hessian_is_given_up_after_the_products_allowed():
    spectrum = jnp.concatenate([jnp.linspace(1, 2, 1999), jnp.array([-1.0])])
    calls = []

    def hvp(v):
        jax.debug.callback(lambda: calls.append(1))
        return spectrum * v

    for allowed in (5, 12):
        calls.clear()
        run = jax.jit(lambda b, n=allowed: curvature(hvp, b, n, False).definite)
        definite = run(jnp.ones(2000))
        jax.effects_barrier()
        assert not definite
        assert len(calls) <= 3 * (allowed + 3)  # three probes


@pytest.mark.long
@pytest.mark.parametrize("size", [40, 600])
def test_the_smallest_curvature_is_found_to_a_factor(size):
    # Beyond, the products allowed do not suffice for so many different eigenvalues.
    for condition in (1.0, 1e2, tolerance(1e6, 1e4) if size == 40 else 1e4):
        spectrum = jnp.asarray(np.geomspace(1 / condition, 1, size))
        run = jax.jit(lambda b, s=spectrum: curvature(lambda v: s * v, b, 1000, size == 40)[1:4])
        lowest, ratio, definite = run(jnp.ones(size))
        assert definite
        assert 0.9 < lowest * condition < 12
        assert condition / 20 < ratio < 2 * condition


def test_a_curvature_under_the_rounding_of_the_largest_is_found_where_products_have_it():
    """A penalty of 1e-17 beside data of 1: lost in the matrix, not in its products."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(10, 30)) / 5)
    penalty = 1e-17 if jax.config.jax_enable_x64 else 1e-9

    def hvp(v):
        return x.T @ (x @ v) + penalty * v

    lowest, _, definite = jax.jit(lambda b: curvature(hvp, b, 1000, True)[1:4])(jnp.ones(30))
    assert definite
    np.testing.assert_allclose(lowest, penalty, rtol=1e-3)


@pytest.mark.parametrize("lowest", [0.0, -0.5])
def test_a_direction_that_one_probe_hardly_has_is_met_by_another(lowest):
    """One probe called 32 (lowest 0) and 17 (-0.5) of 200 such Hessians positive definite."""

    def definite(key):
        u = jax.random.normal(key, (600,))
        u = u / jnp.linalg.norm(u)
        hvp = lambda v: v + (lowest - 1) * u * (u @ v)  # noqa: E731
        return curvature(hvp, jnp.zeros(600), 1000, False).definite

    keys = jax.random.split(jax.random.key(5), 200)
    assert jax.jit(jax.vmap(definite))(keys).sum() <= 2  # 1.2 are expected


def test_a_hessian_that_one_look_solves_exactly_is_definite():
    assert curvature(lambda v: 2 * v, jnp.zeros(600), 1000, False).definite
