"""Claims of hypergradients at soft directions, saddles and kinks, and what their checks cost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import flatten, tolerance
from problems import case, soft, soft_problem
from sklearn.linear_model import Lasso

import bilevel
from bilevel.hypergradients import curvature as curvatures
from bilevel.hypergradients.curvature import curvature

# ------------------------------------------------------- more weights than rows, little decay

PROBLEM = soft_problem()


def descended(alpha, w, batch):
    """Few steps: the soft directions keep what the start had there."""
    step_size, *batch = batch
    return jax.lax.fori_loop(
        0, 30, lambda _, w: w - step_size * jax.grad(PROBLEM.lower)(w, alpha, batch), w
    )


SOLVERS = {
    "implicit": bilevel.implicit(),
    "after descent": bilevel.implicit(
        bilevel.solved(lambda alpha, w, batch: descended(alpha, w, (0.1, *batch)))
    ),
    "unrolled": bilevel.unrolled(0.1, 30),
}
PRODUCTS = 1000  # more than the few of an unrolled solver's own cost


@functools.cache
def compiled(name, dense):
    assert (curvatures.DENSE_SIZE > 0) == dense
    return jax.jit(bilevel.hypergradient(PROBLEM, SOLVERS[name], products=PRODUCTS))


@pytest.mark.long
@pytest.mark.parametrize("dense", [True, False], ids=["decomposed", "iterated"])
@pytest.mark.parametrize("name", SOLVERS)
def test_no_claim_is_false_where_soft_directions_hide_under_a_small_residual(
    name, dense, monkeypatch
):
    if not dense:
        monkeypatch.setattr(curvatures, "DENSE_SIZE", 0)
    rows = []
    for seed in range(12):
        args, truth = soft(seed)
        result = compiled(name, dense)(*jax.tree.map(jnp.asarray, args))
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


# --------------------------------------------------------------------------- saddles and kinks


def network_loss(w, a, b):
    return jnp.mean((jnp.tanh(b[0] @ w["in"]) @ w["out"] - b[1]) ** 2)


def decayed_loss(w, a, b):
    return network_loss(w, a, b) + 0.5 * jnp.exp(a) * optax.tree.norm(w, squared=True)


def network(kind):
    x = np.random.default_rng(0).normal(size=(30, 3))
    y = np.tanh(x[:, 0])
    size = {"zero": 0.0, "symmetric": 0.3}[kind]
    # All units alike: the gradient keeps them alike, and cannot leave the saddle.
    w = {"in": np.full((3, 4), size), "out": np.full(4, size)}
    return case(decayed_loss, network_loss, -6.0, w, (x, y), (x, y))


@functools.cache
def at_saddle(dense):
    assert (curvatures.DENSE_SIZE > 0) == dense
    problem = bilevel.Problem(decayed_loss, network_loss)
    return jax.jit(bilevel.hypergradient(problem, bilevel.implicit(bilevel.lbfgs())))


@pytest.mark.long
@pytest.mark.parametrize("dense", [True, False], ids=["decomposed", "iterated"])
@pytest.mark.parametrize("kind", ["zero", "symmetric"])
def test_a_saddle_is_never_called_converged(kind, dense, monkeypatch):
    if not dense:
        monkeypatch.setattr(curvatures, "DENSE_SIZE", 0)
    small = network(kind)
    result = at_saddle(dense)(*small.args)
    flat, unravel = jax.flatten_util.ravel_pytree(result.w)
    hessian = jax.hessian(lambda w: small.problem.lower(unravel(w), small.alpha, small.train))(flat)
    assert np.linalg.eigvalsh(hessian)[0] < -1e-3  # a saddle
    assert result.info.stationarity < 1e-2  # and nearly stationary
    assert not result.info.converged
    assert np.isinf(result.info.error_estimate)
    assert "not found positive definite" in bilevel.explain(result.info)


def lasso_loss(w, a, b):
    return squared_error(w, a, b) + jnp.exp(a) * jnp.sum(jnp.abs(w))


def squared_error(w, a, b):
    return 0.5 * jnp.mean((b[0] @ w - b[1]) ** 2)


@functools.cache
def lasso_hypergradients():
    problem = bilevel.Problem(lasso_loss, squared_error)
    solvers = bilevel.implicit(), bilevel.unrolled(0.1, 50)
    return [jax.jit(bilevel.hypergradient(problem, solver)) for solver in solvers]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_lasso_gets_no_bound_and_no_false_claim(seed):
    rng = np.random.default_rng(seed)
    x, xv = rng.normal(size=(2, 40, 8))
    w = rng.normal(size=8) * (rng.random(8) < 0.5)
    small = case(
        lasso_loss,
        squared_error,
        -2.0,
        rng.normal(size=8),
        (x, x @ w + 0.1 * rng.normal(size=40)),
        (xv, xv @ w),
    )
    lasso = Lasso(np.exp(-2.0), fit_intercept=False, tol=1e-13, max_iter=10**5)
    solution = lasso.fit(*map(np.asarray, small.train)).coef_
    active = solution != 0
    assert 0 < active.sum() < 8  # kinks matter
    # Truth: on the active set, where signs do not change, the lower problem is quadratic.
    hessian = x[:, active].T @ x[:, active] / 40
    force = (xv.T @ (xv @ solution - small.valid[1]) / 40)[active]
    truth = -np.exp(small.alpha) * np.sign(solution[active]) @ np.linalg.solve(hessian, force)
    for hypergradient in lasso_hypergradients():
        result = hypergradient(*small.args)
        error = abs(float(result.grad) - truth)
        assert np.isinf(result.info.error_bound)
        assert not result.info.converged or error < 0.01 * abs(truth)
        assert result.info.error_estimate > error / 3


# ---------------------------------------------------------------------- damping, and what it costs


@pytest.mark.long
def test_damped_info_speaks_of_the_solution_nearest_to_the_start():
    rng = np.random.default_rng(0)
    x, xv = rng.normal(size=(2, 6, 20))
    small = case(
        lambda w, a, b: 0.5 * jnp.sum((b[0] @ (jnp.exp(a) * w) - b[1]) ** 2),
        lambda w, a, b: 0.5 * jnp.sum((b[0] @ (jnp.exp(a) * w) - b[1]) ** 2),
        0.1 * rng.normal(size=20),
        rng.normal(size=20),
        (x, rng.normal(size=6)),
        (xv, rng.normal(size=6)),
    )
    solver = bilevel.unrolled(0.01, 20)
    fn = jax.jit(bilevel.hypergradient(small.problem, solver))
    assert np.isinf(fn(*small.args).info.error_estimate)  # the solutions are many
    fn = jax.jit(bilevel.hypergradient(small.problem, solver, damping=0.01))
    result = fn(*small.args)

    def damped(w, a, b):
        return small.problem.lower(w, a, b) + 0.005 * jnp.sum((w - small.w0) ** 2)

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
        definite = jax.jit(lambda b, n=allowed: curvature(hvp, b, n, False).definite)(
            jnp.ones(2000)
        )
        jax.effects_barrier()
        assert not definite
        assert len(calls) <= 3 * (allowed + 3)  # three probes


@pytest.mark.long
@pytest.mark.parametrize("size", [40, 600])
def test_the_smallest_curvature_is_found_to_a_factor(size):
    # Beyond, the products allowed do not suffice for so many different eigenvalues.
    for condition in (1.0, 1e2, tolerance(1e6, 1e4) if size == 40 else 1e4):
        spectrum = jnp.asarray(np.geomspace(1 / condition, 1, size))
        estimate = jax.jit(
            lambda b, s=spectrum: curvature(lambda v: s * v, b, 1000, size == 40)[1:4]
        )(jnp.ones(size))
        lowest, ratio, definite = estimate
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
