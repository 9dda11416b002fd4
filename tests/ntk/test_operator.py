"""Test products, diagonals and columns of operators against the matrix."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_gradient, laplace, tanh_network, tolerance

import ntk

rng = np.random.default_rng(0)


def inputs(*shape, dtype=float):
    return jnp.asarray(rng.normal(size=shape), dtype)


WEIGHTS = {"a": rng.normal(size=(3, 5)), "b": rng.normal(size=(5, 2))}


def assert_operates_as(K, matrix, other, cross, v, **tolerance):
    close, last = functools.partial(np.testing.assert_allclose, **tolerance), len(v) - 1
    close(K @ v, matrix @ v)
    close(K @ v[:, 0], matrix @ v[:, 0])
    close(jax.jit(lambda K, v: K @ v)(K, v), matrix @ v)
    close(K.diagonal(), jnp.diagonal(matrix))
    close(K.columns(jnp.array([last, 0])), matrix[:, jnp.array([last, 0])])
    close(K.at(other) @ v, cross @ v)
    close(K.at(other).columns(jnp.array([last])), cross[:, last:])
    assert K.shape == matrix.shape and K.at(other).shape == cross.shape
    assert K.dtype == v.dtype


@pytest.mark.parametrize(
    ("n", "tile", "dtype"), [(1, 4, float), (7, 3, np.float32), (9, 3, float), (20, 64, np.float32)]
)
def test_products_are_those_of_the_matrix(n, tile, dtype):
    x, other, v = (inputs(*shape, dtype=dtype) for shape in ((n, 3), (5, 3), (n, 2)))
    K, cross = ntk.KernelOperator(laplace, x, tile=tile), laplace(other, x)
    assert_operates_as(K, laplace(x, x), other, cross, v, atol=30 * jnp.finfo(x.dtype).eps)


def test_each_pair_of_tiles_is_computed_once():
    called = []

    def counted(a, b=None):
        jax.debug.callback(lambda: called.append(1))
        return laplace(a, a if b is None else b)

    jax.block_until_ready(ntk.KernelOperator(counted, inputs(12, 2), tile=3) @ jnp.ones(12))
    jax.effects_barrier()
    assert len(called) == 4 * 5 // 2


def test_a_product_never_has_the_matrix():
    x = inputs(4096, 2, dtype=np.float32)
    K = ntk.KernelOperator(lambda a, b: a @ b.T, x, tile=256)
    compiled = jax.jit(lambda K, v: K @ v).lower(K, x[:, 0]).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 4096**2 / 20


@pytest.mark.long
def test_infinite_networks():
    kernel = functools.partial(ntk.network_kernel, activations=[ntk.relu, ntk.relu])
    x, v = inputs(9, 3), inputs(9)
    product = ntk.KernelOperator(kernel, x, tile=4, get="nngp") @ v
    np.testing.assert_allclose(product, kernel(x).nngp @ v, rtol=1e-12)


@pytest.mark.long
def test_columns_have_the_exact_diagonal():
    # As a pair of inputs, an input and itself would have a rounded angle, and so NaN entries.
    layers = [ntk.tanh, {ntk.relu: 0.4, ntk.erf: 0.5}]
    x = 2 * np.random.default_rng(0).normal(size=(40, 5))
    K = ntk.KernelOperator(functools.partial(ntk.network_kernel, activations=layers), x)
    columns = K.columns(jnp.arange(40))
    np.testing.assert_allclose(jnp.diagonal(columns), K.diagonal(), rtol=1e-14)
    np.testing.assert_allclose(columns, K @ jnp.eye(40), atol=1e-6 * K.diagonal().max())
    assert jnp.isfinite(ntk.partial_cholesky(K, 20, key=jax.random.key(0)).factor).all()


def test_products_under_vmap():
    x, v = inputs(7, 3), inputs(4, 7)
    K = ntk.KernelOperator(laplace, x, tile=3)
    product = jax.vmap(lambda v: K @ v)(v)
    np.testing.assert_allclose(product, v @ laplace(x, x), rtol=tolerance(1e-13, 1e-5))


@pytest.mark.long
def test_derivatives_in_vectors_inputs_and_closed_over_values():
    x, v, u = inputs(7, 2), inputs(7), inputs(7)

    def value(at):
        kernel = functools.partial(laplace, scale=at["scale"])
        return u @ (ntk.KernelOperator(kernel, at["x"], tile=3) @ at["v"])

    assert_gradient(value, {"scale": jnp.array(0.7), "x": x, "v": v}, f64=1e-9, f32=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("batch_size", [None, 4])
def test_finite_networks(batch_size):
    x, other, v = inputs(9, 3), inputs(4, 3), inputs(9, 2)
    K = ntk.EmpiricalOperator(tanh_network, WEIGHTS, x, batch_size=batch_size)
    matrix, cross = (ntk.empirical_kernel(tanh_network, WEIGHTS, a, x) for a in (x, other))
    assert_operates_as(K, matrix, other, cross, v, rtol=1e-11)


def test_samples_may_be_pytrees():
    x, w, v = {"one": inputs(5, 2), "two": inputs(5)}, inputs(2), inputs(5)
    apply = jax.jit(lambda w, x: x["one"] @ w + x["two"] ** 2 * w[0])
    K = ntk.EmpiricalOperator(apply, w, x)
    expected = ntk.empirical_kernel(apply, w, x) @ v
    np.testing.assert_allclose(K @ v, expected, rtol=tolerance(1e-12, 1e-4))


def test_an_operator_uses_the_present_kernel():
    scale, x = [1.0], inputs(5, 2)
    for scale[0] in (1.0, 2.0):
        product = ntk.KernelOperator(lambda a, b: laplace(a, b, scale[0]), x) @ jnp.ones(5)
        expected = laplace(x, x, scale[0]).sum(1)
        np.testing.assert_allclose(product, expected, rtol=tolerance(1e-13, 1e-5))
