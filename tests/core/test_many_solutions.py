"""Least squares with more weights than rows: the three hypergradients of docs/constraints.md."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, hypergradient, normal, tolerance

import bilevel

pytestmark = pytest.mark.slow

ROWS, WEIGHTS, DAMPING = 4, 9, 0.3
X, Y = normal(0, ROWS, WEIGHTS), normal(1, ROWS)
TARGET, START = normal(2, WEIGHTS), normal(3, WEIGHTS)
ALPHA = np.array([0.2, -0.4])


def features(alpha):
    return X * jnp.where(jnp.arange(WEIGHTS) < WEIGHTS // 2, jnp.exp(alpha[0]), 1)


def residual(w, alpha, batch):
    return features(alpha) @ w - batch * (1 + alpha[1])


PROBLEM = bilevel.Problem(
    lambda w, alpha, batch: jnp.sum(residual(w, alpha, batch) ** 2) / 2,
    lambda w, alpha, batch: jnp.sum((w - TARGET) ** 2) / 2,
)
STEPS = 1000


def forces(w, y):
    """Return the features, their derivative in alpha_0, and the forces, in float64."""
    x = np.asarray(features(ALPHA), float)
    turned = x * (np.arange(WEIGHTS) < WEIGHTS // 2)
    return x, turned, np.stack([-turned @ w, np.asarray(y, float)], 1)


def damped_change(x, forced):
    return np.linalg.solve(x.T @ x + DAMPING * np.eye(x.shape[1]), x.T @ forced)


def solution():
    """Return the solution that is nearest to START, and its three hypergradients, in float64."""
    x, start = np.asarray(features(ALPHA), float), np.asarray(START, float)
    inverse = np.linalg.pinv(x)
    w = start + inverse @ (np.asarray(Y, float) * (1 + float(ALPHA[1])) - x @ start)
    _, turned, forced = forces(w, Y)
    shortest, damped = inverse @ forced, damped_change(x, forced)
    along = (np.eye(WEIGHTS) - inverse @ x) @ turned.T @ inverse.T @ (w - start)
    path = shortest + np.stack([along, 0 * along], 1)
    changes = {"shortest": shortest, "damped": damped, "path": path}
    return w, {name: change.T @ (w - np.asarray(TARGET, float)) for name, change in changes.items()}


SOLVERS = {
    "shortest": bilevel.implicit(inverse=bilevel.gram(residual, lambda r, _: jnp.sum(r**2) / 2)),
    "damped": bilevel.implicit(inverse=bilevel.cg(damping=DAMPING)),
    "path": bilevel.unrolled(0.05, STEPS),
}


@pytest.mark.parametrize("name", SOLVERS)
def test_three_hypergradients_of_least_squares_with_many_solutions(name):
    w, expected = solution()
    result = hypergradient(PROBLEM, SOLVERS[name], ALPHA, START, Y, None, diagnostics=True)
    assert_close(result.w, w, f64=1e-6, f32=1e-3)
    assert_close(result.grad, expected[name], f64=1e-6, f32=1e-3)
    assert np.isinf(result.info.error_estimate)
    others = [np.abs(expected[name] - expected[k]).max() for k in expected if k != name]
    assert min(others) > 0.01


def test_the_damped_hypergradient_tends_to_that_of_the_shortest_change():
    solver = bilevel.implicit(bilevel.newton(), bilevel.cg(damping=tolerance(1e-9, 1e-4)))
    gradient = hypergradient(PROBLEM, solver, ALPHA, START, Y, None).grad
    assert_close(gradient, solution()[1]["shortest"], f64=1e-6, f32=1e-2)


@pytest.mark.long
def test_with_bounds_the_damped_hypergradient_is_that_of_the_free_weights():
    forward = bilevel.unrolled(bilevel.projected("nonnegative"), STEPS)
    start = jnp.abs(START)
    y = X @ jnp.where(start < 0.8, 0, start)
    solver = bilevel.implicit(forward, bilevel.cg(damping=DAMPING))
    result = hypergradient(PROBLEM, solver, ALPHA, start, y, None, diagnostics=True)
    w = np.asarray(result.w, float)
    free = w > 0
    assert ROWS < free.sum() < WEIGHTS
    x, _, forced = forces(w, y)
    expected = damped_change(x[:, free], forced).T @ (w - np.asarray(TARGET, float))[free]
    assert_close(result.grad, expected, f64=1e-5, f32=1e-2)
    assert np.isinf(result.info.error_estimate)
