"""Weights of several dtypes: every solver and inverse computes, and each leaf keeps its own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, cast, flatten, float64_only, hypergradient
from problems import decay, half_squares

import bilevel

ROUNDING = float(jnp.finfo(jnp.bfloat16).eps)


def outputs(w, alpha, batch):
    return batch[0] @ (alpha["scales"] * jnp.concatenate([w["coarse"], w["fine"]]))


def lower(w, alpha, batch):
    squares = sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in jax.tree.leaves(w))
    return half_squares(outputs(w, alpha, batch), batch) + 0.5 * decay(alpha) * squares


PROBLEM = bilevel.Problem(lower, lambda w, a, b: jnp.mean((outputs(w, a, b) - b[1]) ** 2))
EXACT = ("lbfgs cg", "newton dense", "newton gram")
GRAM = bilevel.gram(outputs, half_squares, damping=decay)
SOLVERS = {
    "unrolled": bilevel.unrolled(0.05, 40),
    "one step, difference": bilevel.one_step(0.05, radius=0.5),
    "newton cg": bilevel.implicit(),
    "lbfgs cg": bilevel.implicit(bilevel.lbfgs(), bilevel.cg()),
    "newton dense": bilevel.implicit(bilevel.newton(), bilevel.dense()),
    "newton neumann": bilevel.implicit(bilevel.newton(), bilevel.neumann(30, 0.05)),
    "newton nystrom": bilevel.implicit(bilevel.newton(), bilevel.nystrom(4, 1.0)),
    "newton gram": bilevel.implicit(bilevel.newton(), GRAM),
}


def data(seed):
    rng = np.random.default_rng(seed)

    def sample():
        x = np.linalg.qr(rng.normal(size=(8, 4)))[0] * [2.0, 2.5, 3.0, 3.5]
        return jnp.asarray(x, jnp.float32), jnp.asarray(rng.normal(size=8), jnp.float32)

    alpha = {"scales": jnp.ones(4, jnp.float32), "log_decay": jnp.zeros((), jnp.float32)}
    w0 = {"coarse": jnp.full(2, 0.5, jnp.bfloat16), "fine": jnp.full(2, -0.5, jnp.float32)}
    return alpha, w0, sample(), sample()


@functools.cache
def compiled(name):
    return jax.jit(bilevel.hypergradient(PROBLEM, SOLVERS[name], diagnostics=False))


@pytest.mark.long
@pytest.mark.parametrize("name", SOLVERS)
def test_mixed_weights_have_the_float32_answer_within_bfloat16s_rounding(name):
    in_float32 = "newton cg" if name in EXACT else name
    for seed in range(3):
        alpha, w0, *batches = data(seed)
        mixed = compiled(name)(alpha, w0, *batches)
        assert jax.tree.map(lambda x: x.dtype, mixed.w) == jax.tree.map(lambda x: x.dtype, w0)
        truth = compiled(in_float32)(alpha, cast(w0, jnp.float32), *batches)
        for of_mixed, expected in zip(mixed[:3], truth[:3], strict=True):
            of_mixed, expected = flatten(of_mixed), flatten(expected)
            assert np.linalg.norm(of_mixed - expected) < 8 * ROUNDING * np.linalg.norm(expected)


@float64_only
def test_float32_weights_meet_data_and_losses_of_float64():
    # A quadratic loss never backtracks; log cosh from far away does.
    x, y = jnp.asarray(np.linalg.qr(np.random.default_rng(0).normal(size=(8, 3)))[0]), jnp.ones(8)

    def robust(w, alpha, batch):
        return jnp.sum(jnp.log(jnp.cosh(x @ w - 5 * y))) + jnp.exp(alpha) * jnp.sum(w**2)

    problem = bilevel.Problem(robust, lambda w, alpha, batch: jnp.sum((x @ w) ** 2))
    of = jax.jit(bilevel.hypergradient(problem, bilevel.implicit(), diagnostics=False))
    alpha = jnp.zeros(())
    wide, narrow = (of(alpha, jnp.full(3, 9, dtype), (), ()) for dtype in ("float64", "float32"))
    assert narrow.w.dtype == jnp.float32
    assert_close(narrow.grad, wide.grad, f64=1e-5)


def of_scaled(alpha, x):
    return x * alpha


def normal_equations(alpha, w, batch):
    phi = of_scaled(alpha, batch[0])
    return jnp.linalg.solve(phi.T @ phi + 0.1 * jnp.eye(4), phi.T @ batch[1])


OF_DATA = {  # solvers with weights in the dtype of the data or of alpha
    "ridge": bilevel.ridge(of_scaled, lambda alpha: 0.1),
    "solved": bilevel.implicit(bilevel.solved(normal_equations)),
    "restarted": bilevel.restarted(bilevel.unrolled(0.01, 3), start=lambda alpha, w: alpha),
}


@pytest.mark.long
@float64_only
@pytest.mark.parametrize("name", OF_DATA)
def test_weights_solved_in_a_wider_dtype_keep_the_dtype_of_w0(name):
    def lower(w, alpha, batch):
        residual = of_scaled(alpha, batch[0]) @ w - batch[1]
        return 0.5 * jnp.sum(residual**2) + 0.05 * jnp.sum(w**2)

    problem = bilevel.Problem(lower, lambda w, alpha, batch: jnp.mean((batch[0] @ w - 1) ** 2))
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)))
    args, data = (problem, OF_DATA[name], optax.sgd(0.01), jnp.ones(4)), (rows, rows.sum(1))
    starts = (jnp.zeros(4, dtype) for dtype in ("float64", "float32"))
    wide, narrow = (bilevel.search(*args, w0, data, data, steps=2) for w0 in starts)
    assert narrow.w.dtype == jnp.float32
    assert_close(narrow.alpha, wide.alpha, f64=1e-5)  # truth: all in float64


@pytest.mark.long
def test_diagnostics_of_mixed_weights_make_no_false_claim():
    alpha, w0, *batches = data(0)
    result = hypergradient(PROBLEM, bilevel.implicit(), alpha, w0, *batches, diagnostics=True)
    truth = flatten(compiled("newton cg")(alpha, cast(w0, jnp.float32), *batches).grad)
    error = np.linalg.norm(flatten(result.grad) - truth)
    assert error < 8 * ROUNDING * np.linalg.norm(truth)
    assert error < 3 * result.info.error_estimate


@pytest.mark.long
@pytest.mark.parametrize(
    "way",
    [
        bilevel.unrolled(optax.adam(0.05), 20),
        bilevel.one_step(0.1),
        bilevel.implicit(bilevel.unrolled(0.2, 60), bilevel.cg(steps=6)),
    ],
    ids=["unrolled", "one_step", "implicit"],
)
def test_bfloat16_below_and_float32_masters(way):
    """Weights, alpha and hypergradient stay float32, and are right up to bfloat16's rounding."""
    rng = np.random.default_rng(0)
    rows = zip(rng.normal(size=(2, 10, 3)), rng.normal(size=(2, 10)), strict=True)
    w0 = {"slope": np.array([0.3, -0.2, 0.1]), "shift": np.array(0.2)}
    alpha = {"penalty": np.array([-1.0, 0.0, 0.5]), "scale": np.array(0.3)}

    def loss(w, batch):
        return 0.5 * jnp.mean((batch[0] @ w["slope"] + w["shift"] - batch[1]) ** 2)

    def lower(w, alpha, batch):
        penalty = jnp.sum(jnp.exp(alpha["penalty"]) * w["slope"] ** 2)
        return jnp.exp(alpha["scale"]) * loss(w, batch) + 0.5 * penalty

    half = functools.partial(cast, dtype=jnp.bfloat16)
    mixed = bilevel.Problem(
        lambda w, alpha, batch: lower(half(w), half(alpha), half(batch)).astype(jnp.float32),
        lambda w, alpha, batch: loss(half(w), half(batch)).astype(jnp.float32),
    )
    single = cast((alpha, w0, *rows), jnp.float32)
    whole = bilevel.Problem(lower, lambda w, alpha, batch: loss(w, batch))
    hyper, exact = (hypergradient(problem, way, *single) for problem in (mixed, whole))
    for x in jax.tree.leaves((hyper.grad, hyper.w, hyper.value)):
        assert x.dtype == jnp.float32
    away = optax.tree.norm(optax.tree.sub(hyper.grad, exact.grad)) / optax.tree.norm(exact.grad)
    assert 0 < away < 0.05
