"""Test kernels of generated inputs against quadrature and Jacobians by hand."""

import functools

import generated
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generated import assert_near, dtypes, eps, examples, normal, seeds, simplex_point, wide
from helpers import float64_only as quadrature
from helpers import tanh_network as network
from hypothesis import given

import ntk

ACTIVATIONS = {
    "sigmoid": ntk.sigmoid,
    "tanh": ntk.tanh,
    "swish": ntk.swish,
    "gelu": ntk.gelu,
    "erf": ntk.erf,
    "relu": ntk.relu,
    "identity": ntk.identity,
    "leaky_relu": ntk.leaky_relu(0.1),
}
FUNCTIONS = {
    "softplus": jax.nn.softplus,
    "sin(3z)": lambda z: jnp.sin(3 * z),
    "tanh(20(z - 1/2))": lambda z: jnp.tanh(20 * (z - 0.5)),
    "elu": jax.nn.elu,
    "hard tanh": jax.nn.hard_tanh,
    "relu6": jax.nn.relu6,
    "hard swish": jax.nn.hard_swish,
    "soft sign": jax.nn.soft_sign,
    "relu squared": lambda z: jnp.maximum(z, 0) ** 2,
    "shifted relu": lambda z: jnp.maximum(z - 0.3, 0),
    "clip": lambda z: jnp.clip(z, -0.7, 0.4),
    "abs": jnp.abs,
}
names = st.sampled_from(sorted(ACTIVATIONS))
layers = st.lists(names, min_size=1, max_size=2)


def inputs(seed, dtype):
    """Draw rows of norm up to 4; in some cases two are equal, opposite or nearly equal."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(3, 3)) * 10 ** rng.uniform(-1, 0.3)
    x *= np.minimum(1, 4 / np.linalg.norm(x, axis=1, keepdims=True))
    kind = rng.integers(5)
    if kind == 1:
        x[1] = x[0]
    elif kind == 2:
        x[1] = -x[0]
    elif kind == 3:
        x[1] = x[0] + 10 ** rng.uniform(-7, -2) * rng.normal(size=3)
    elif kind == 4:
        x /= np.linalg.norm(x, axis=1, keepdims=True)
    return jnp.asarray(x, dtype)


@functools.cache
def in_numpy(name, slope=False):
    fn = (ACTIVATIONS | FUNCTIONS)[name]
    compiled = jax.jit(jax.vmap(jax.grad(fn)) if slope else fn)
    return lambda z: np.asarray(compiled(jnp.ravel(z))).reshape(z.shape) * np.ones(z.shape)


def recursion(chosen, x):
    """Return the kernel of Zhu et al., Eq. (1), one pair of rows at a time."""
    x = wide(x)
    K = np.zeros((len(x), len(x)))
    for i, j in zip(*np.triu_indices(len(x)), strict=True):
        vx, vy, c = x[i] @ x[i], x[j] @ x[j], x[i] @ x[j]
        theta = c
        for name in chosen:
            s, slope = in_numpy(name), in_numpy(name, slope=True)
            covariances = (vx, vx, vx), (vy, vy, vy), (vx, vy, c)
            values = [2 * generated.expectation(s, s, *v) for v in covariances]
            theta = 2 * generated.expectation(slope, slope, vx, vy, c) * theta + values[2]
            vx, vy, c = values
        K[i, j] = K[j, i] = theta
    return K


@quadrature
@pytest.mark.slow
@examples(2)
@given(seed=seeds, dtype=dtypes, chosen=layers)
def test_a_network_kernel_is_the_recursion_of_expectations(seed, dtype, chosen):
    x = inputs(seed, dtype)
    kernel = ntk.network_kernel(x, activations=[ACTIVATIONS[name] for name in chosen])
    # The tolerance covers the quadrature and, in float32, angles close to 0.
    assert_near(kernel.ntk, recursion(chosen, x), 3e-3 if dtype == np.float64 else 1e-2)
    np.testing.assert_array_equal(kernel.ntk, kernel.ntk.T)


@quadrature
@pytest.mark.long
@examples(4)
@given(seed=seeds, dtype=dtypes, name=st.sampled_from(sorted(FUNCTIONS)))
def test_any_activation_has_the_kernel_of_the_recursion_or_raises(seed, dtype, name):
    x = inputs(seed, dtype)
    x = x / jnp.maximum(1, jnp.linalg.norm(x, axis=1, keepdims=True))
    try:
        K = ntk.network_kernel(x, activations=[ntk.activation(FUNCTIONS[name])]).ntk
    except (ValueError, FloatingPointError):
        return
    # Inputs below a kink have a tiny kernel, and quadrature resolves a kink to one node.
    expected = recursion([name], x)
    size = max(abs(expected).max(), 0.1 * float(jnp.max(jnp.sum(x**2, axis=1))))
    np.testing.assert_allclose(wide(K) / size, expected / size, atol=1e-2)


@quadrature
@pytest.mark.long
@examples(2)
@given(seed=seeds, dtype=dtypes, pair=st.lists(names, min_size=2, max_size=2, unique=True))
def test_a_mixtures_kernel_is_the_sum_over_pairs(seed, dtype, pair):
    x, alpha = inputs(seed, dtype), simplex_point(np.random.default_rng(seed), dtype, 2)
    K = ntk.mixture_kernel(alpha, ntk.mixture_blocks(x, [ACTIVATIONS[name] for name in pair]))
    slopes, X, expected = [in_numpy(name, slope=True) for name in pair], wide(x), np.zeros((3, 3))
    for i, j in np.ndindex(3, 3):
        v = X[i] @ X[i], X[j] @ X[j], X[i] @ X[j]
        pairs = np.array([[generated.expectation(f, g, *v) for g in slopes] for f in slopes])
        expected[i, j] = v[2] * (wide(alpha) @ pairs @ wide(alpha))
    assert K.dtype == dtype
    assert_near(K, expected, 1e-2)


@pytest.mark.long
@quadrature
@examples(4)
@given(seed=seeds, dtype=dtypes, chosen=layers)
def test_lower_bounds_of_the_smallest_eigenvalue_are_below_it(seed, dtype, chosen):
    x = inputs(seed, dtype)
    x = x / jnp.linalg.norm(x, axis=1, keepdims=True)
    activations = [ACTIVATIONS[name] for name in chosen]
    spectrum = np.linalg.eigvalsh(wide(ntk.network_kernel(x, activations=activations).ntk))
    for bound in (ntk.bounds.hermite_lower_bound, ntk.bounds.schur_lower_bound):
        value = float(bound(x, activations=activations).value)
        assert value <= spectrum[0] + 200 * eps(dtype) * spectrum[-1]


def jacobian(params, x):
    a, b, x = wide((params["a"], params["b"], x))
    hidden = np.tanh(x @ a)
    outer = np.einsum("ni,nk,ko->noik", x, 1 - hidden**2, b)
    inner = np.einsum("nk,oq->nokq", hidden, np.eye(2))
    return np.concatenate([outer.reshape(len(x), 2, -1), inner.reshape(len(x), 2, -1)], -1)


@pytest.mark.slow
@examples(2)
@given(seed=seeds, dtype=dtypes)
def test_finite_kernels_are_products_of_jacobians(seed, dtype):
    rng = np.random.default_rng(seed)
    params = {"a": normal(rng, dtype, 3, 4), "b": normal(rng, dtype, 4, 2)}
    x = normal(rng, dtype, 3, 3, scale=10 ** rng.uniform(-2, 1))
    full = np.einsum("nop,mqp->nmoq", jacobian(params, x), jacobian(params, x))
    trace, total = np.einsum("nmoo->nm", full), full.sum((2, 3))
    for outputs, expected in {"full": full, "trace": trace, "sum": total}.items():
        kernel = ntk.empirical_kernel(network, params, x, outputs=outputs)
        assert_near(kernel, expected, 100 * eps(dtype))
    product = ntk.kernel_vector_product(network, params, x)(jnp.ones(3, dtype))
    assert_near(product, total.sum(1), 300 * eps(dtype))
    y = np.tanh(wide(x) @ wide(params["a"])) @ wide(params["b"])
    nngp = ntk.empirical_nngp(network, params, x, outputs="full")
    assert_near(nngp, np.einsum("ai,bj->abij", y, y), 100 * eps(dtype))
