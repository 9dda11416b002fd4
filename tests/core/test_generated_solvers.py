"""Inverses, solvers and hypergradients of random problems against closed forms in float64."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from generated import assert_at_most, assert_near, dtypes, eps, examples, normal, seeds, wide
from hypothesis import given
from problems import follower

import bilevel
from bilevel.contracts import Point

N = 6
INVERSES = {
    "cg": (lambda: bilevel.cg(200, damping=0.1), 200),
    "dense": (lambda: bilevel.dense(0.1), 200),
    # The sketch is as well conditioned as a random square matrix: sometimes 1e4 or 1e5.
    "nystrom": (lambda: bilevel.nystrom(N, 0.1), 3e5),
}


@functools.partial(jax.jit, static_argnums=0)
def solve(name, H, b):
    return INVERSES[name][0]()(lambda v: H @ v, b, None, Point(b, None, None))


@pytest.mark.parametrize("name", INVERSES)
@examples(5)
@given(seed=seeds, dtype=dtypes)
def test_an_inverse_has_a_small_residual_at_any_condition(name, seed, dtype):
    rng = np.random.default_rng(seed)
    q, _ = np.linalg.qr(rng.normal(size=(N, N)))
    values = 10 ** rng.uniform(-2, rng.uniform(-2, 1 if dtype == np.float32 else 4), N)
    H, b = jnp.asarray((q * values) @ q.T, dtype), normal(rng, dtype, N)
    x = wide(solve(name, H, b))
    A = wide(H) + 0.1 * np.eye(N)
    size = np.linalg.norm(A, 2) * np.linalg.norm(x) + np.linalg.norm(b)
    rounding = INVERSES[name][1] * max(eps(dtype), 1e-11 if name == "cg" else 0)
    assert_at_most(np.linalg.norm(wide(b) - A @ x), rounding * size)


def flat(w):
    return jnp.concatenate([w["a"], w["b"]])


def outer(w, alpha, batch):
    x, y = batch
    return 0.5 * jnp.sum((x @ flat(w) - y) ** 2)


def lower(w, alpha, batch):
    return outer(w, alpha, batch) + 0.5 * jnp.sum(jnp.exp(alpha) * flat(w) ** 2)


def closed(alpha, w, batch):
    x, y = batch
    w = jnp.linalg.solve(x.T @ x + jnp.diag(jnp.exp(alpha)), x.T @ y)
    return {"a": w[:1], "b": w[1:]}


PROBLEM = bilevel.Problem(lower, outer)


def ridge(seed, dtype, shape):
    """Return arguments of a hypergradient: one penalty per weight, weights in a dict."""
    rng, (n, p) = np.random.default_rng(seed), shape
    # If weights outnumber rows, residuals do not show directions of low curvature.
    alpha = rng.uniform(-14 if dtype == np.float64 else -7, 2) + rng.uniform(-1, 1, p)
    scale, start = 10 ** rng.uniform(-1, 1), rng.choice([0.0, 1.0])
    w = normal(rng, dtype, p, scale=start)
    data = [(normal(rng, dtype, n, p, scale=scale), normal(rng, dtype, n)) for _ in range(2)]
    return jnp.asarray(alpha, dtype), {"a": w[:1], "b": w[1:]}, *data


def truth(alpha, w0, train, valid, steps=None, rate=0.0):
    """Return outer loss and hypergradient at the solution, or after steps of gradient descent."""
    w0 = wide(flat(w0))
    alpha, (x, y), (u, v) = wide((alpha, train, valid))
    H = x.T @ x + np.diag(np.exp(alpha))
    if steps is None:
        w = np.linalg.solve(H, x.T @ y)
        adjoint = np.linalg.solve(H, u.T @ (u @ w - v))
        return 0.5 * np.sum((u @ w - v) ** 2), -np.exp(alpha) * w * adjoint
    path = [w0]
    for _ in range(steps):
        path.append(path[-1] - rate * (H @ path[-1] - x.T @ y))
    residual, grad = u @ path[-1] - v, np.zeros_like(alpha)
    slope = u.T @ residual
    for w in path[-2::-1]:
        grad -= rate * np.exp(alpha) * w * slope
        slope = slope - rate * H @ slope
    return 0.5 * np.sum(residual**2), grad


shapes = st.sampled_from([(8, 3), (4, 9)])  # fewer weights than rows, and more
SOLVERS = {
    "newton": bilevel.implicit,
    "lbfgs": lambda: bilevel.implicit(bilevel.lbfgs()),
    "dense": lambda: bilevel.implicit(bilevel.newton(), bilevel.dense()),
    "descent": lambda: bilevel.implicit(bilevel.unrolled(0.02, 30)),
    "solved": lambda: bilevel.implicit(bilevel.solved(closed)),
}


@functools.cache
def compiled(name, mode):
    return jax.jit(bilevel.hypergradient(PROBLEM, SOLVERS[name](), mode=mode))


@pytest.mark.long
@pytest.mark.parametrize("name", SOLVERS)
@examples(4)
@given(seed=seeds, dtype=dtypes, shape=shapes, mode=st.sampled_from(["reverse", "forward"]))
def test_claims_of_a_hypergradient_are_true(name, seed, dtype, shape, mode):
    """A gradient without a claim may be wrong. Descent at its fixed rate may diverge."""
    arguments = ridge(seed, dtype, shape)
    result = compiled(name, mode)(*arguments)
    _, expected = truth(*arguments)
    error, size = np.linalg.norm(wide(result.grad) - expected), np.linalg.norm(expected)
    info, rounding = result.info, 1e3 * eps(dtype) * size
    if not np.isfinite(error):
        assert name == "descent" and not info.converged and np.isinf(info.error_estimate)
        return
    assert not info.converged or error <= 0.05 * size + rounding
    assert np.isnan(info.error_bound) or error <= 1.01 * info.error_bound + rounding


@functools.partial(jax.jit, static_argnames=("make", "mode"))
def trained(make, mode, rate, *arguments):
    solver = make(optax.sgd(rate))
    return bilevel.hypergradient(PROBLEM, solver, mode=mode, diagnostics=False)(*arguments)


TRAININGS = [
    (functools.partial(bilevel.unrolled, steps=4), 4, 2e3),
    (lambda optimizer: bilevel.restarted(bilevel.unrolled(optimizer, 4)), 4, 2e3),
    (bilevel.one_step, 1, 2e3),
    (functools.partial(bilevel.one_step, radius=0.01), 1, 2e7),
]


# Differences of lower gradients are exact for a quadratic, except for cancellation.
@pytest.mark.slow
@pytest.mark.parametrize(("make", "steps", "rounding"), TRAININGS)
@examples(3)
@given(seed=seeds, dtype=dtypes, shape=shapes, mode=st.sampled_from(["reverse", "forward"]))
def test_derivatives_of_training_are_exact(make, steps, rounding, seed, dtype, shape, mode):
    arguments = ridge(seed, dtype, shape)
    alpha, _, train, _ = wide(arguments)
    smoothness = np.linalg.norm(train[0], 2) ** 2 + np.exp(alpha.max())
    rate = jnp.asarray(0.9 / smoothness, dtype)
    result = trained(make, "reverse" if steps == 1 else mode, rate, *arguments)
    value, grad = truth(*arguments, steps, float(rate))
    assert_near(result.grad, grad, rounding * eps(dtype))
    if steps > 1:
        assert_near(result.value, value, rounding * eps(dtype))


# A step at rate r takes w to w + r (alpha - w). The outer loss <mean of the batch, w> therefore
# has the slope mean * (1 - (1 - r)^K) by the last K steps.
TOY = follower(lambda w, alpha, batch: jnp.vdot(w, batch.mean(0)))


@pytest.mark.long
@examples(3)
@given(seed=seeds, dtype=dtypes, rate=st.floats(0.05, 0.9), steps=st.integers(1, 4))
def test_truncations_and_standard_errors_are_geometric_series(seed, dtype, rate, steps):
    rng = np.random.default_rng(seed)
    scale = 10 ** rng.uniform(-2, 2)
    alpha, w0 = normal(rng, dtype, 3, scale=scale), normal(rng, dtype, 3, scale=scale)
    valid = normal(rng, dtype, 8, 3, scale=scale)
    grads = bilevel.truncation(TOY, rate, steps)(alpha, w0, None, valid).grads
    shares = 1 - (1 - rate) ** np.arange(steps + 1)
    assert_near(grads, shares[:, None] * wide(valid).mean(0), 1e3 * eps(dtype))

    first = bilevel.hypergradient(TOY, bilevel.distilled(rate, decay=0.5), diagnostics=False)
    assert_near(first(alpha, w0, None, valid).grad, rate * wide(valid).mean(0), 1e3 * eps(dtype))

    fn = bilevel.hypergradient(TOY, bilevel.unrolled(0.5, 1), diagnostics=False)
    error = bilevel.standard_error(fn, 4)(alpha, w0, None, valid).error
    parts = 0.5 * wide(valid).reshape(4, -1, 3).mean(1)
    assert_near(error, parts.std(0, ddof=1) / 2, 1e4 * eps(dtype))
