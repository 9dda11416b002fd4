"""Scores of deep networks with values or gradients beyond the range of float32 and float16."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import long_except

from ntk import scores

X = np.random.default_rng(1).normal(size=(6, 5))
Y = np.array([0, 1, 2, 0, 1, 2])


def chain(activation, params, x):
    *hidden, last = params
    return functools.reduce(lambda h, w: activation(h @ w), hidden, x) @ last


def weights(depth, width=6, size=1.0, seed=0):
    rng = np.random.default_rng(seed)
    pairs = itertools.pairwise([5] + [width] * depth + [3])
    return [size * rng.normal(size=pair) / np.sqrt(pair[0]) for pair in pairs]


def score(name, params, dtype, activation=jax.nn.relu, x=X):
    params = [jnp.asarray(w).astype(dtype) for w in params]
    batch = jnp.asarray(x).astype(dtype), jnp.asarray(Y)
    return getattr(scores, name)(None, functools.partial(chain, activation), params, batch)


def in_float64(name, params, dtype, activation=jax.nn.relu, x=X):
    rounded = [np.asarray(jnp.asarray(w).astype(dtype), np.float64) for w in params]
    x = np.asarray(jnp.asarray(x).astype(dtype), np.float64)
    with jax.enable_x64(True):
        return float(score(name, rounded, jnp.float64, activation, x))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("activation", [jax.nn.relu, jax.nn.softplus])
def test_synflow_does_not_depend_on_the_type(activation, dtype):
    params = weights(40, size=8.0)
    expected = in_float64("synflow", params, dtype, activation)
    assert expected > 100  # far beyond the root of float32's largest number
    np.testing.assert_allclose(score("synflow", params, dtype, activation), expected, rtol=1e-6)


def test_synflow_is_right_under_jit_and_vmap_beyond_float32():
    params = [jnp.asarray(w, jnp.float32) for w in weights(25, size=30.0)]
    batch = jnp.zeros((1, 5), jnp.float32), jnp.array([0])
    apply = functools.partial(chain, jax.nn.gelu)
    of = functools.partial(scores.synflow, None, apply, batch=batch)
    expected = in_float64("synflow", params, jnp.float32, jax.nn.gelu)
    stacked = jax.tree.map(lambda w: jnp.stack([w, w]), params)
    for actual in (of(params), jax.jit(of)(params), *jax.jit(jax.vmap(of))(stacked)):
        np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_traced_synflow_beyond_float64_is_nan():
    params = [jnp.full((1, 1), 1e30, jnp.float32) for _ in range(12)]
    batch = jnp.ones((1, 1), jnp.float32), jnp.array([0])
    apply = functools.partial(chain, jax.nn.relu)
    assert jnp.isnan(jax.jit(lambda p: scores.synflow(None, apply, p, batch))(params))


def scaled(*sizes):
    return [size * w for size, w in zip(sizes, weights(len(sizes) - 1), strict=True)]


# Squares of these gradients, of size 1e-26 or 1e22, leave the range of float32. In the second row
# two layers are small, so that all three gradients are. The others leave the range of float16.
RANGES = {
    **{(name, 1e-26): scaled(1, 1, 1e-26) for name in ("condition_number", "log_traces", "jacov")},
    **{(name, 1e22): scaled(1, 1, 1e22) for name in ("cosine_min_eigenvalue", "te_nas", "jacov")},
    **{(name, 1e-13): scaled(1e-13, 1e-13, 1) for name in ("grad_norm", "zico", "snip")},
}
USUAL = [(name, size) for name, size in RANGES if name not in ("condition_number", "zico")]


@pytest.mark.parametrize(("name", "size"), long_except(USUAL, RANGES))
def test_scores_see_gradients_of_any_size(name, size):
    params = RANGES[name, size]
    expected = in_float64(name, params, jnp.float32)
    np.testing.assert_allclose(score(name, params, jnp.float32), expected, rtol=2e-3)


@pytest.mark.parametrize("name", ["eigen_nas", "knas", "nasi", "grasp", "fisher", "l2_norm"])
def test_numbers_of_16_bits_are_squared_in_32(name):
    params = scaled(0.05, 30)
    expected = in_float64(name, params, jnp.float16)
    np.testing.assert_allclose(score(name, params, jnp.float16), expected, rtol=1e-3)


def test_a_kernel_of_any_size_has_the_scores_of_its_multiple():
    K = np.array([[2.0, 1.0], [1.0, 3.0]], np.float32)
    one = scores.of_kernel(K, np.array([0, 1]))
    for size in (2.0**-100, 2.0**100):
        by_score = scores.of_kernel(np.float32(size) * K, np.array([0, 1]))
        units = {"eigen_nas": size, "min_eigenvalue": size, "label_energy": 1 / size}
        for name, value in by_score.items():
            np.testing.assert_allclose(value, one[name] * units.get(name, 1), rtol=1e-5)
