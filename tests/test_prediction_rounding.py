"""Kernels that are nearly singular in float32: stated errors hold, and noise is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ntk

TRAIN, TEST = [0, 1, 3, 4, 6, 7, 9, 11], [2, 5, 8, 10]


def inputs(seed):
    rng = np.random.default_rng(seed)
    x = np.linspace(-3, 3, 12) if seed == 0 else rng.uniform(-3, 3, 12)
    return np.stack([x, np.full_like(x, seed % 2)], axis=1)


def predict(function, x, penalty, double):
    with jax.enable_x64(double):
        x = jnp.asarray(x, float)
        kernel = functools.partial(ntk.network_kernel, activations=[ntk.erf] * 4)
        y = jnp.sin(x[jnp.array(TRAIN), 0])
        at = {"x": x[jnp.array(TRAIN)], "at": x[jnp.array(TEST)]}
        found = function(kernel, y, **at, penalty=penalty)
        return [np.asarray(v) for v in (*found, found.std(), found.mean_error, found.std_error)]


@pytest.mark.parametrize("penalty", [0.0, 1e-3])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("function", [ntk.posterior, ntk.ensemble])
def test_stated_errors_hold_in_float32(function, seed, penalty):
    x = inputs(seed)
    try:
        mean, _, std, mean_error, std_error = predict(function, x, penalty, double=False)
    except ValueError as error:
        assert penalty == 0 and "penalty: expected at least" in str(error)
        return
    truth = predict(function, x, penalty, double=True)
    assert (np.abs(mean - truth[0]) <= mean_error).all()
    assert (np.abs(std - truth[2]) <= std_error).all()
    if penalty and function is ntk.posterior:
        assert mean_error.max() < 5e-3  # and they say something


def test_a_kernel_singular_to_rounding_is_refused_with_the_penalty_it_needs():
    x = jnp.linspace(-3, 3, 8, dtype=jnp.float32)[:, None]
    K = ntk.network_kernel(x, activations=[ntk.erf] * 4).nngp.astype(jnp.float32)
    y = jnp.sin(x[:, 0])
    for function in (ntk.kernel_regression, ntk.excess_risk_term):
        with pytest.raises(ValueError, match=r"penalty: expected at least .* in float32, got 0"):
            function(K, y)
    assert jnp.isnan(jax.jit(ntk.kernel_regression)(K, y).weights).all()
    needed = 128 * jnp.finfo(jnp.float32).eps * K.max()
    assert jnp.isfinite(ntk.kernel_regression(K, y, penalty=needed).weights).all()


def test_a_diagonal_of_any_scales_is_not_singular():
    K = jnp.diag(jnp.array([1.0, 1e-12, 1e9], jnp.float32))
    np.testing.assert_allclose(
        ntk.kernel_regression(K, jnp.ones(3, jnp.float32)).weights, [1, 1e12, 1e-9], rtol=1e-5
    )
