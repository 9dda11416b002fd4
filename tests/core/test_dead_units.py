"""Reverse mode handles weights without a gradient: no overflow, and no inf times 0."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, hypergradient

import bilevel
from bilevel.solvers._mixed_mode import guarded
from bilevel.solvers._optimizer import with_limits

X = np.array([[1.0, 0.0, 2.0], [0.5, 0.0, -1.0], [2.0, 0.0, 1.0], [1.0, 0.0, -1.5]], np.float32)
Y = np.array([1.0, -1.0, 2.0, 0.5], np.float32)
W0 = {  # the second unit is dead, and so are the weights of the second input
    "in": np.array([[0.5, -3.0, -0.4], [0.0, 0.0, 0.0], [0.3, -0.2, 1.0]], np.float32),
    "bias": np.zeros(3, np.float32),
    "out": np.array([0.5, 0.4, -0.3], np.float32),
}


def predict(w):
    return jax.nn.relu(X @ w["in"] + w["bias"]) @ w["out"]


def lower(w, alpha, batch):
    squares = sum(jnp.sum(x**2) for x in jax.tree.leaves(w))
    return jnp.mean((predict(w) - Y) ** 2) + 0.01 * jnp.exp(alpha) * squares


def outer(w, alpha, batch):
    return jnp.sum((predict(w) + 1) ** 2) + sum(jnp.sum((x + 1) ** 2) for x in jax.tree.leaves(w))


def grad(optimizer, steps, mode):
    start = jnp.float32(0.0), jax.tree.map(jnp.asarray, W0), None, None
    problem = bilevel.Problem(lower, outer)
    return hypergradient(problem, bilevel.unrolled(optimizer, steps), *start, mode=mode).grad


NAMES = "adabelief adadelta adafactor adagrad adam adamax adamw amsgrad fromage lamb lars nadam"
NAMES += " novograd radam rmsprop sm3 yogi"
OPTIMIZERS = {name: getattr(optax, name)(0.01) for name in NAMES.split()} | {
    "clipped adam": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.01)),
    "learned rate": lambda alpha: optax.adam(0.01 * jnp.exp(alpha)),
    "momentum": optax.sgd(0.01, momentum=0.9),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "steps", "tolerance"),
    [("adam", 12, 1e-4), ("learned rate", 12, 1e-4)]
    + [(name, steps, 1e-3) for name in OPTIMIZERS for steps in (5, 100)],
)
def test_dead_units_leave_the_hypergradient_right(name, steps, tolerance):
    """Truth: forward mode, which multiplies slopes by 0 first. Late steps are chaotic."""
    reverse, forward = (grad(OPTIMIZERS[name], steps, mode) for mode in ("reverse", "forward"))
    assert_close(reverse, forward, f64=tolerance, f32=tolerance)


def smallest(lower):
    problem = bilevel.Problem(lower, lambda w, alpha, batch: jnp.sum(w + 1) ** 2)
    return bilevel.hypergradient(problem, bilevel.unrolled(optax.adam(0.01), 10), diagnostics=False)


def test_weights_at_zero_next_to_a_copy_that_moves():
    fn = smallest(lambda w, alpha, batch: jnp.exp(alpha) * jnp.sum(w**2))
    starts = jnp.stack([jnp.zeros(2), jnp.array([0.3, -0.2])])
    hyper = jax.jit(jax.vmap(fn, (None, 0, None, None)))(jnp.float32(0), starts, None, None)
    assert hyper.grad[0] == 0 and np.isfinite(hyper.grad[1]) and hyper.grad[1] != 0


def test_an_overflow_that_matters_is_not_hidden():
    """Alpha moves the gradient of 0, so the derivative is out of float32's range."""
    fn = smallest(lambda w, alpha, batch: jnp.sum(w**2) + alpha * jnp.sum(w))
    assert not np.isfinite(fn(jnp.float32(0), jnp.zeros(2, jnp.float32), None, None).grad)


def test_a_guarded_map_is_the_map_where_nothing_overflows_twice():
    rng = np.random.default_rng(0)
    matrix = jnp.asarray(rng.normal(size=(4, 5)), jnp.float32).at[:3, 1:3].set(0)
    v = jnp.asarray(rng.normal(size=5), jnp.float32)
    apply = jax.jit(lambda v: guarded(lambda v: matrix @ v, v))
    np.testing.assert_array_equal(apply(v), matrix @ v)
    huge = v.at[0].set(1e30)  # finite: the sum is right
    np.testing.assert_allclose(apply(huge), matrix @ huge, rtol=1e-6)
    for bad in (jnp.inf, jnp.nan, -jnp.inf):
        mapped = apply(v.at[1].set(bad).at[2].set(bad))
        np.testing.assert_allclose(mapped[:3], matrix[:3] @ v, rtol=1e-6)
        assert np.isnan(mapped[3])
    half = guarded(lambda v: 2 * v, jnp.array([3.0, 3e4], jnp.float16))
    np.testing.assert_array_equal(half, [6, 6e4])


FEATURES = {  # of a learned optimizer; their slopes at a gradient of 0
    "where": (lambda g: jnp.where(g != 0, jnp.log(jnp.abs(g)), 0.0) + 2 * g, 2.0),
    "clip": (lambda g: jnp.clip(jnp.log(jnp.abs(g)) / 10, -1, None) + 3 * g, 3.0),
    "maximum": (lambda g: jnp.maximum(jnp.log(jnp.abs(g)), -9.0) * g, -9.0),
    "used": (lambda g: jnp.exp(jnp.log(g)), np.nan),
}


@pytest.mark.parametrize("name", FEATURES)
def test_a_logarithm_of_the_gradient_counts_only_where_it_is_used(name):
    feature, expected = FEATURES[name]
    step = lambda g: with_limits(feature, g)  # noqa: E731
    assert step(0.0) == feature(0.0)
    np.testing.assert_allclose(jax.grad(step)(0.0), expected, rtol=1e-6)
    np.testing.assert_allclose(jax.jvp(step, (0.0,), (1.0,))[1], expected, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(step)(0.5), jax.grad(feature)(0.5), rtol=1e-6)
