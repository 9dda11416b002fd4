"""Kernels that are nearly singular in float32: stated errors hold, and noise raises."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ntk

TRAIN, TEST = [0, 1, 3, 4, 6, 7, 9, 11], [2, 5, 8, 10]


def inputs(seed):
    x = np.linspace(-3, 3, 12) if seed == 0 else np.random.default_rng(seed).uniform(-3, 3, 12)
    return np.stack([x, np.full_like(x, seed % 2)], axis=1)


def predict(function, x, penalty, double):
    with jax.enable_x64(double):
        x = jnp.asarray(x, float)
        kernel = functools.partial(ntk.network_kernel, activations=[ntk.erf] * 4)
        at = {"x": x[jnp.array(TRAIN)], "at": x[jnp.array(TEST)]}
        prediction = function(kernel, jnp.sin(x[jnp.array(TRAIN), 0]), **at, penalty=penalty)
        errors = prediction.mean_error, prediction.std_error
        return [np.asarray(v) for v in (*prediction, prediction.std(), *errors)]


@pytest.mark.long
@pytest.mark.parametrize("penalty", [0.0, 1e-3])
@pytest.mark.parametrize("seed", range(3))
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
        assert mean_error.max() < 5e-3


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
    fit = ntk.kernel_regression(K, jnp.ones(3, jnp.float32))
    np.testing.assert_allclose(fit.weights, [1, 1e12, 1e-9], rtol=1e-5)


TIMES = (1.0, 1e2, 1e4, 1e6, 1e8, np.inf)
REFUSED = r"t: expected at most .* for this kernel in float32, got .*Add a penalty"


def flow(x, y, t, *, double, penalty=0.0, get="nngp", cross=True, activation=ntk.erf):
    with jax.enable_x64(double):
        x, y = jnp.asarray(x, float), jnp.asarray(y, float)
        kernel = getattr(ntk.network_kernel(x, activations=[activation] * 4), get)
        train, test = jnp.array(TRAIN), jnp.array(TEST)
        K = kernel[train][:, train]
        between = kernel[test][:, train] if cross else None
        return np.asarray(ntk.gradient_flow(K, y, t, cross=between, penalty=penalty))


@pytest.mark.long
@pytest.mark.parametrize(("seed", "get"), [(1, "ntk"), (2, "nngp"), (3, "ntk"), (5, "nngp")])
def test_a_flow_in_float32_is_right_to_a_tenth_or_refused(seed, get):
    x, refused = inputs(seed), 0
    smooth = np.sin(x[TRAIN, 0])
    for y in (smooth, np.random.default_rng(seed).choice([-1.0, 1.0], len(TRAIN))):
        for cross in (True, False):
            truth = flow(x, y, np.array(TIMES), double=True, get=get, cross=cross)
            for t, true in zip(TIMES, truth, strict=True):
                try:
                    outputs = flow(x, y, t, double=False, get=get, cross=cross)
                except ValueError as error:
                    assert t > 1e2 and "t: expected at most" in str(error)
                    refused += 1
                else:
                    assert np.abs(outputs - true).max() <= 0.1 * np.abs(y).max()
    assert refused


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1])
def test_a_flow_of_a_healthy_kernel_is_never_refused(seed):
    times, x = np.array(TIMES), inputs(seed)
    y = np.random.default_rng(seed).choice([-1.0, 1.0], len(TRAIN))
    apart = np.random.default_rng(seed).normal(size=(12, 20))
    for rows, options in ((x, {"penalty": 0.1}), (apart, {"activation": ntk.relu})):
        single, truth = (flow(rows, y, times, double=double, **options) for double in (False, True))
        np.testing.assert_allclose(single, truth, atol=0.01)


def test_a_flow_of_a_kernel_of_lower_rank_is_never_refused():
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=shape).astype(np.float32) for shape in ((9, 3), (9,)))
    x[1] = x[0]  # two different targets of one input
    outputs = ntk.gradient_flow(x @ x.T, y, np.array(TIMES))
    assert np.isfinite(outputs).all()
    np.testing.assert_allclose(outputs[-1], x @ np.linalg.lstsq(x, y)[0], atol=1e-3)


@pytest.mark.long
def test_a_late_time_names_the_latest_one_and_is_nan_if_traced():
    x = jnp.linspace(-3, 3, 8, dtype=jnp.float32)[:, None]
    K = ntk.network_kernel(x, activations=[ntk.erf] * 4).nngp.astype(jnp.float32)
    y = jnp.array([1, 1, -1, 1, -1, -1, 1, 1], jnp.float32)
    with pytest.raises(ValueError, match=REFUSED) as refused:
        ntk.gradient_flow(K, y, jnp.array([1.0, jnp.inf]))
    latest = float(str(refused.value).split("at most ")[1].split()[0])
    assert jnp.isfinite(ntk.gradient_flow(K, y, latest)).all()
    outputs = jax.jit(ntk.gradient_flow)(K, y, jnp.array([1.0, latest, 3 * latest, jnp.inf]))
    assert jnp.isfinite(outputs[:2]).all() and jnp.isnan(outputs[2:]).all()
