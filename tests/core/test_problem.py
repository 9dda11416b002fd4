"""The problem record, stacked copies, and the recognition of quadratics."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, hypergradient, tolerance
from problems import least_squares

import bilevel
from bilevel.problem.structure import is_quadratic

W = {"a": np.arange(1.0, 4.0), "b": (np.ones((2, 3)),)}
ALPHA = {"log_decay": np.array(0.3), "scale": np.ones(3)}
X, Y = np.linspace(-1.0, 1.0, 15).reshape(5, 3), np.linspace(0.0, 1.0, 5)


def residual(w, alpha):
    return X @ (alpha["scale"] * w["a"]) - Y


def squares(tree):
    return optax.tree.vdot(tree, tree)


QUADRATIC = {
    "a constant": lambda w, alpha: jnp.sum(alpha["scale"]),
    "ridge over a pytree": lambda w, alpha: (
        jnp.sum(residual(w, alpha) ** 2) + jnp.exp(alpha["log_decay"]) * squares(w)
    ),
    "a product": lambda w, alpha: jnp.sum(w["a"] * (alpha["scale"] - w["a"])),
    "einsum": lambda w, alpha: jnp.einsum("i,ij,j->", w["a"], X.T @ X, w["a"]),
    "a fixed matrix's inverse": lambda w, alpha: (
        w["a"] @ jnp.linalg.solve(X.T @ X + jnp.eye(3) * jnp.exp(alpha["log_decay"]), w["a"])
    ),
    "under jit": lambda w, alpha: jax.jit(lambda v: jnp.sum(v**2))(residual(w, alpha)),
    "under vmap": lambda w, alpha: jax.vmap(lambda x, y: (x @ w["a"] - y) ** 2)(X, Y).mean(),
    "indexing and reshaping": lambda w, alpha: jnp.sum(w["b"][0].reshape(3, 2)[1:] ** 2),
    "a condition on alpha": lambda w, alpha: jnp.sum(
        jnp.where(alpha["scale"] > 0, w["a"] ** 2, 2 * w["a"] ** 2)
    ),
}

NOT_QUADRATIC = {
    "logistic": lambda w, alpha: jnp.sum(jax.nn.softplus(residual(w, alpha))),
    "relu squared": lambda w, alpha: jnp.sum(jax.nn.relu(residual(w, alpha)) ** 2),
    "lax.cond on w": lambda w, alpha: jax.lax.cond(
        w["a"][0] > 0, lambda v: jnp.sum(v**2), lambda v: 2 * jnp.sum(v**2), w["a"]
    ),
    "two layers": lambda w, alpha: jnp.sum((w["b"][0] @ w["a"]) ** 2),
    "a norm": lambda w, alpha: jnp.linalg.norm(residual(w, alpha)),
    "one leaf only": lambda w, alpha: squares(w) + jnp.sum(jnp.exp(w["b"][0])),
    "under jit": lambda w, alpha: jax.jit(lambda v: jnp.sum(v**4))(w["a"]),
    "hinges": lambda w, alpha: jnp.sum(jnp.maximum(0, 1 - residual(w, alpha))),
    "a maximum": lambda w, alpha: squares(w) + jnp.max(w["a"]),
    "sorted": lambda w, alpha: jnp.sum(jnp.sort(w["a"]) * jnp.arange(3)),
    "a choice by the weights": lambda w, alpha: jnp.sum(jnp.where(w["a"] > 0, w["a"], 2 * w["a"])),
    "rounded straight through": lambda w, alpha: jnp.sum(
        (w["a"] + jax.lax.stop_gradient(jnp.round(w["a"]) - w["a"])) ** 2
    ),
    "a stopped gradient": lambda w, alpha: jnp.sum(w["a"] * jax.lax.stop_gradient(w["a"])),
    "a product over a loop": lambda w, a: jax.lax.scan(lambda c, x: (c * x, None), 1.0, w["a"])[0],
}


@pytest.mark.parametrize("loss", QUADRATIC.values(), ids=QUADRATIC.keys())
def test_quadratic_is_recognised(loss):
    assert is_quadratic(lambda w, alpha, batch: loss(w, alpha), W, ALPHA, None)


@pytest.mark.parametrize("loss", NOT_QUADRATIC.values(), ids=NOT_QUADRATIC.keys())
def test_a_loss_that_is_not_quadratic_is_never_called_one(loss):
    assert not is_quadratic(lambda w, alpha, batch: loss(w, alpha), W, ALPHA, None)


@pytest.mark.parametrize("narrow", [jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn])
def test_a_cast_to_fewer_digits_than_the_weights_is_rounding(narrow):
    # A linear cast would give the error bound of an unrounded quadratic, which does not hold.
    def lower(w, alpha, batch):
        return 0.5 * jnp.sum((w.astype(narrow).astype(w.dtype) - batch) ** 2)

    assert not is_quadratic(lower, jnp.ones(2), 1.0, 1.0)
    assert is_quadratic(lower, jnp.ones(2, narrow), 1.0, jnp.ones(2, narrow))
    cast = lambda w, a, b: jnp.sum((b.astype(narrow).astype(w.dtype) - w) ** 2)  # noqa: E731
    assert is_quadratic(cast, jnp.ones(2), 1.0, jnp.ones(2))


def test_quadratic_is_recognised_under_a_transformation():
    small, verdicts = least_squares(), []

    @jax.jit
    @jax.vmap
    def note(w):
        verdicts.append(is_quadratic(small.problem.lower, w, small.alpha, small.train))
        return w

    note(jnp.ones((2, small.w0.size)))
    assert verdicts == [True]


@pytest.mark.long
@pytest.mark.parametrize(
    "solver",
    [bilevel.unrolled(0.05, 10), bilevel.implicit(bilevel.newton(tol=tolerance(1e-12, 1e-7)))],
    ids=["unrolled", "implicit"],
)
def test_stacked_problems_equal_separate_ones(solver):
    small = least_squares()
    copies = [jax.tree.map(lambda x, s=s: x * (1 + 0.3 * s), small.args) for s in range(3)]
    alone = jax.jit(bilevel.hypergradient(small.problem, solver, diagnostics=False))
    separate = [alone(*args) for args in copies]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *copies)
    result = hypergradient(bilevel.stack_problems(small.problem), solver, *stacked)
    assert_close(result.value, sum(r.value for r in separate), f32=1e-5)
    expected = jax.tree.map(lambda *xs: jnp.stack(xs), *((r.grad, r.w) for r in separate))
    assert_close((result.grad, result.w), expected, f32=1e-4)
