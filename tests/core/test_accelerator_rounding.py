"""Accelerators round the operands of matrix products: simulated, or read from the programs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accelerators import rounded_products
from helpers import cast, float64_only

import bilevel
import ntk
from bilevel.hypergradients.error_estimate import REASONS
from ntk.internal.products import has_coarse_products

X, Y = (np.random.default_rng(i).normal(size=s) for i, s in enumerate([(60, 12), 60]))


def linear_loss(w, alpha, batch):
    return 0.5 * jnp.sum((batch[0] @ w - batch[1]) ** 2) + 0.5 * jnp.exp(alpha) * jnp.sum(w**2)


LINEAR = bilevel.Problem(linear_loss, lambda w, a, b: jnp.mean((b[0] @ w - b[1]) ** 2))
GRAM = bilevel.gram(lambda w, a, b: b[0] @ w, damping=jnp.exp)
SOLVERS = {
    "ridge": bilevel.ridge(lambda alpha, x: x, jnp.exp),
    "dense": bilevel.implicit(bilevel.newton(), bilevel.dense()),
    "nystrom": bilevel.implicit(bilevel.newton(), bilevel.nystrom(12, 1.0)),
    "gram": bilevel.implicit(bilevel.newton(), GRAM),
}


def hypergradient(problem, solver, alpha, w, dtype, *, y=Y, **options):
    args = cast((alpha, w, (X, y), (X + 0.1, y)), dtype)
    return jax.jit(bilevel.hypergradient(problem, solver, **options))(*args)


def ridge_hypergradient(damping):
    """d outer / d alpha at alpha = 1 by numpy, with a damped Hessian in the adjoint's system."""
    hessian = X.T @ X + np.e * np.eye(12)
    w = np.linalg.solve(hessian, X.T @ Y)
    force = 2 / len(Y) * (X + 0.1).T @ ((X + 0.1) @ w - Y)
    return -np.e * w @ np.linalg.solve(hessian + damping * np.eye(12), force)


def test_linear_algebra_of_solvers_is_not_rounded():
    run = functools.partial(hypergradient, LINEAR, alpha=1.0, w=np.zeros(12), diagnostics=False)
    with rounded_products(7):
        for name, solver in SOLVERS.items():
            exact = ridge_hypergradient(1.0 if name == "nystrom" else 0.0)
            assert abs(float(run(solver, dtype=jnp.float32).grad) - exact) < 1e-5 * abs(exact), name


def network_loss(w, alpha, batch, precision=None):
    hidden = jnp.tanh(jnp.matmul(batch[0], w["a"], precision=precision))
    decay = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(w))
    return jnp.mean((hidden @ w["b"] - batch[1]) ** 2) + jnp.exp(alpha) * decay


NETWORK = bilevel.Problem(network_loss, network_loss)
WEIGHTS = {"a": np.random.default_rng(2).normal(size=(12, 2)) / 4, "b": np.array([2.0, -1.0])}
TAUGHT = np.tanh(X @ WEIGHTS["a"]) @ WEIGHTS["b"] + 0.1 * Y


@pytest.mark.long
@float64_only
def test_the_estimate_contains_the_rounding_of_the_losses():
    run = functools.partial(hypergradient, NETWORK, SOLVERS["dense"], -5.0, WEIGHTS, y=TAUGHT)
    exact = float(run(jnp.float64).grad)
    with rounded_products(7):
        hyper = run(jnp.float32)
    error, estimate = abs(float(hyper.grad) - exact), float(hyper.info.error_estimate)
    assert error > 1e-5 * abs(exact)  # the losses keep the user's precision
    assert error / 3 <= estimate <= 10 * error


@pytest.mark.long
def test_a_loss_that_asks_for_coarse_products_is_named():
    coarse = functools.partial(network_loss, precision="tensorfloat32")
    problem = bilevel.Problem(coarse, coarse)
    with rounded_products(5):
        hyper = hypergradient(problem, SOLVERS["dense"], -5.0, WEIGHTS, jnp.float32, y=TAUGHT)
    assert "TF32" in REASONS[int(hyper.info.reason)]


@pytest.mark.parametrize(
    "program",
    [
        lambda x, y: ntk.network_kernel(x, activations=[ntk.tanh, ntk.relu]).ntk,
        lambda x, y: ntk.posterior(x[:12], y[:12], x[:5], x[:5, :5]),
        lambda x, y: ntk.min_eigenvalue(x[:12]),
        lambda x, y: ntk.mixture_blocks(x, [ntk.relu, ntk.tanh]),
    ],
)
def test_programs_without_coarse_products(program):
    x, y = jnp.asarray(X, jnp.float32), jnp.asarray(Y, jnp.float32)
    assert not has_coarse_products(jax.make_jaxpr(program)(x, y))
