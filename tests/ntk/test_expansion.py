"""Test linearised networks and Taylor polynomials against closed forms and neural-tangents."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, normal
from helpers import tanh_network as network

from ntk import empirical_kernel, taylor_expand
from ntk.compat.load import neural_tangents

PARAMS = {"a": normal(1, 2, 3), "b": normal(2, 3, 2)}
MOVED = {"a": normal(3, 2, 3), "b": normal(4, 3, 2)}
X = normal(5, 4, 2)


@pytest.mark.parametrize("order", [0, 1, 5])
def test_coefficients_are_those_of_the_exponential_function(order):
    # exp(a + d) = exp(a) Σ d^i / i!
    got = taylor_expand(lambda w, x: jnp.exp(w) * x, 0.3, order)(1.0, X)
    expected = math.exp(0.3) * sum(0.7**i / math.factorial(i) for i in range(order + 1)) * X
    assert_close(got, expected, f64=1e-14, f32=1e-5)


def test_polynomials_are_their_own_expansion():
    cubic = jax.jit(lambda params, x: (x @ params["a"] @ params["b"]) * params["a"][0, 0])
    expected = cubic(MOVED, X)
    assert_close(taylor_expand(cubic, PARAMS, 3)(MOVED, X), expected, f64=1e-13, f32=1e-4)
    assert np.abs(taylor_expand(cubic, PARAMS, 2)(MOVED, X) - expected).max() > 0.1


def test_expansions_are_those_of_neural_tangents():
    expected = neural_tangents().taylor_expand(network, PARAMS, 3)(MOVED, X)
    assert_close(taylor_expand(network, PARAMS, 3)(MOVED, X), expected, f64=1e-13, f32=1e-5)


def test_the_linear_networks_kernel_stays_that_of_the_start():
    linear = taylor_expand(network, PARAMS, 1)
    start = empirical_kernel(network, PARAMS, X, outputs="full")
    for params in (PARAMS, MOVED):
        got = empirical_kernel(linear, params, X, outputs="full")
        assert_close(got, start, f64=1e-12, f32=1e-5)
    assert np.abs(empirical_kernel(network, MOVED, X, outputs="full") - start).max() > 0.1


def test_flax_modules_pytrees_of_outputs_and_integers():
    model = nn.Dense(2)
    params = {"net": model.init(jax.random.key(0), X), "n": 3}

    def apply(params, x):
        return {"y": params["n"] * model.apply(params["net"], x), "x": (x,)}

    other = jax.tree.map(lambda leaf: leaf + 1, params)
    got = taylor_expand(apply, params, 1)(other, X)
    assert_close(got, apply(other | {"n": 3}, X), f64=1e-6, f32=1e-5)


def test_expansions_are_pure_functions_under_jit_grad_and_vmap():
    expanded = taylor_expand(network, PARAMS, 2)
    assert_close(jax.jit(expanded)(MOVED, X), expanded(MOVED, X), f64=1e-14, f32=1e-6)
    one = jax.vmap(lambda x: expanded(MOVED, x[None])[0])(X)
    assert_close(one, expanded(MOVED, X), f64=1e-14, f32=1e-6)
    got = jax.grad(lambda p: taylor_expand(network, PARAMS, 1)(p, X).sum())(MOVED)
    assert_close(got, jax.grad(lambda p: network(p, X).sum())(PARAMS), f64=1e-14, f32=1e-6)


def test_types_are_those_of_the_network():
    params, moved, x = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (PARAMS, MOVED, X))
    assert taylor_expand(network, params, 2)(moved, x).dtype == jnp.float32


def test_boolean_outputs_are_unchanged():
    expanded = taylor_expand(lambda w, x: {"cube": w**3 * x, "sign": w * x > 0}, 1.0, 2)
    outputs = jax.jit(expanded)(2.0, 1.0)
    assert outputs["cube"] == 7 and bool(outputs["sign"])
