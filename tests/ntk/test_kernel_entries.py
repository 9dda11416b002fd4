"""Test that entries of kernels are within their stated error of quadrature in panels, or NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import DTYPES, float64_only, tolerance

import ntk

SCALES, ANGLE = (1.3, 0.8), 0.7
PIECEWISE = {
    "elu": (jax.nn.elu, [0.0]),
    "selu": (jax.nn.selu, [0.0]),
    "celu": (lambda z: jax.nn.celu(z, 0.5), [0.0]),
    "soft sign": (jax.nn.soft_sign, [0.0]),
    "squared relu": (lambda z: jax.nn.relu(z) ** 2, [0.0]),
    "step": (lambda z: jnp.where(z > 0.5, 1.0, 0.0), [0.5]),
    "shifted relu": (lambda z: jax.nn.relu(z - 0.3), [0.3]),
    "leaky relu": (lambda z: jnp.where(z > -1, z, 0.2 * z - 0.8), [-1.0]),
    "hard tanh": (jax.nn.hard_tanh, [-1.0, 1.0]),
    "relu6": (jax.nn.relu6, [0.0, 6.0]),
    "hard swish": (jax.nn.hard_silu, [-3.0, 3.0]),
    "hard sigmoid": (jax.nn.hard_sigmoid, [-3.0, 3.0]),
    "clip": (lambda z: jnp.clip(z, -0.3, 0.7), [-0.3, 0.7]),
}


def panels(kinks, width=1.5):
    edges = np.arange(-9, 9 + width, width)
    edges = np.unique(np.concatenate([edges, [t for t in np.ravel(kinks) if -9 < t < 9]]))
    nodes, weights = np.polynomial.legendre.leggauss(20)
    half = np.diff(edges)[:, None] / 2
    z = (edges[:-1, None] + half * (nodes + 1)).ravel()
    return z, (half * weights).ravel() * np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)


def brute(fn, sx, sy, rho, kinks=(), width=1.5):
    """Integrate ``E fn(u) fn(u')`` of a pair, for a numpy function."""
    kinks = np.asarray(kinks)
    if rho == 1 and sx == sy:
        z, weights = panels(kinks / sx, width)
        return weights @ fn(sx * z) ** 2
    sigma = np.sqrt(1 - rho**2)
    outer, weights = panels([*kinks / sx, *kinks / sy / rho], width)
    total = 0.0
    for z, weight in zip(outer, weights, strict=True):
        inner, own = panels((kinks / sy - rho * z) / sigma, width)
        total += weight * fn(np.array(sx * z)) * (own @ fn(sy * (rho * z + sigma * inner)))
    return float(total)


def in_numpy(s):
    """Return an activation as a numpy function, float64."""
    evaluate = jax.jit(s)

    def function(z):
        with jax.enable_x64(True):
            flat = np.zeros(1024 if np.size(z) <= 1024 else 2**16)
            flat[: np.size(z)] = np.ravel(z)
            return np.asarray(evaluate(flat))[: np.size(z)].reshape(np.shape(z))

    return function


def one_layer(s, kinks, sx, sy, rho, width=1.5):
    value, slope = in_numpy(s), in_numpy(s.derivative)
    dual = brute(slope, sx, sy, rho, kinks, width)
    return brute(value, sx, sy, rho, kinks, width) + sx * sy * rho * dual


@pytest.mark.long
@pytest.mark.parametrize("name", PIECEWISE)
def test_any_kinks_are_found_and_their_kernels_are_right_to_the_stated_error(name):
    fn, kinks = PIECEWISE[name]
    s = ntk.activation(fn)
    assert [t for t, _ in s.kinks] == kinks
    a, b = np.array([1.0, 0.0]), np.array([np.cos(ANGLE), np.sin(ANGLE)])
    x = np.stack([SCALES[0] * a, SCALES[1] * b])
    # Columns: a row, a near-duplicate of it, and another row.
    columns = np.stack([x[0], x[0] + [0, 1e-9], x[1]])
    kernels = ntk.network_kernel(x, columns, activations=[s], variances=[1.0, 1.0])
    same = one_layer(s, kinks, SCALES[0], SCALES[0], 1.0)
    apart = one_layer(s, kinks, *SCALES, np.cos(ANGLE))
    kernel, error = np.asarray(kernels.ntk)[0], np.asarray(kernels.error)[0]
    # The near-duplicate moves the truth by about 1e-9.
    truth, slack = np.array([same, same, apart]), np.array([1e-14, 4e-9, 1e-14])
    assert (np.abs(kernel - truth) <= error + slack).all()
    # The m-th derivative of soft sign jumps by m!.
    assert error.max() < tolerance(1e-7 if name == "soft sign" else 1e-10, 2e-2) * same
    assert abs(kernel[2] - apart) < tolerance(1e-10 if name == "soft sign" else 1e-12, 1e-4) * same


@pytest.mark.long
def test_a_relu_and_a_function_with_kinks_have_the_kernel_of_their_sum():
    x = jnp.array([[1.3, 0.0], [0.6, 0.5]])
    whole = ntk.activation(lambda z: 0.5 * jax.nn.leaky_relu(z, 0.1) - 0.7 * jax.nn.hard_tanh(z))
    parts = {ntk.leaky_relu(0.1): 0.5, ntk.activation(jax.nn.hard_tanh): -0.7}
    kernels, expected = (ntk.network_kernel(x, activations=[s]) for s in (parts, whole))
    off = np.abs(np.asarray(kernels.ntk - expected.ntk))
    assert (off <= kernels.error + expected.error).all()
    assert off.max() < tolerance(1e-11, 1e-4)


HARD = {
    "sine of 30 z": (lambda z: jnp.sin(30 * z), 1.5),
    "sine at norm 100": (jnp.sin, 100.0),
    "a steep tanh": (lambda z: jnp.tanh(20 * (z - 0.5)), 1.0),
    "erf at 1e6": (jax.lax.erf, 1e6),
    "erf at 1e3": (jax.lax.erf, 1e3),
    "tanh at norm 30": (jnp.tanh, 30.0),
}


@pytest.mark.long
@pytest.mark.parametrize("name", HARD)
def test_fine_details_are_within_the_stated_error(name):
    fn, scale = HARD[name]
    s = ntk.activation(fn)
    x = np.array([[1.0, 0.0], [0.6, 0.8]]) * scale
    # Panels grow from the finest detail on.
    fine = {"erf at 1e6": 1e-6, "erf at 1e3": 1e-3}.get(name, 0.005)
    at = 0.5 if "steep" in name else 0.0
    edges = [at / scale + side * fine * 2.0**k for side in (-1, 1) for k in range(24)]
    truth = one_layer(s, [scale * t for t in [*edges, at / scale]], scale, scale, 1.0, 0.01)
    kernels = ntk.network_kernel(x, activations=[s], variances=[1.0, 1.0])
    size = float(kernels.ntk[0, 0])
    assert abs(size - truth) <= float(kernels.error[0, 0]) + 1e-13 * truth
    assert np.isfinite(kernels.ntk).all() and float(kernels.error[0, 1]) < 1e-6 * size
    if "sin" in name:
        # E sin u sin u' = exp(-(vx + vy) / 2) sinh(c), and cosh for the slopes: with c = .6 v.
        k = 30.0 if "30" in name else 1.0
        v = (k * scale) ** 2
        exact = (np.exp(-0.4 * v) / 2) * (1 + k**2 * 0.6 * scale**2)
        assert abs(float(kernels.ntk[0, 1]) - exact) <= float(kernels.error[0, 1])


NETWORK = dict(activations=[ntk.tanh, {ntk.relu: 0.5, ntk.swish: 0.5}], skips=[0.3])


def random_inputs(rng):
    """Draw norms from 0.1 to 30, near-duplicates, and columns among the rows."""
    x = rng.normal(size=(4, 3))
    norms = np.exp(rng.uniform(np.log(0.1), np.log(30), 4))
    x *= (norms / np.linalg.norm(x, axis=1))[:, None]
    x[3] = x[0] * (1 + 10.0 ** -rng.integers(1, 12)) + 10.0 ** -rng.integers(2, 12)
    return x, np.concatenate([x[1:3], rng.normal(size=(2, 3))])


@jax.jit
def traced(x, columns):
    return ntk.network_kernel(x, columns, **NETWORK)


@pytest.mark.long
def test_traced_entries_are_the_eager_ones_to_their_error_or_nan():
    finite = 0
    for seed in range(8):
        x, columns = random_inputs(np.random.default_rng(seed))
        kernels = traced(x, columns)
        try:
            eager = ntk.network_kernel(x, columns, **NETWORK)
        except FloatingPointError:
            continue
        known = np.isfinite(kernels.ntk)
        assert (np.isfinite(kernels.error) == known).all()
        wrong = np.abs(kernels.ntk - eager.ntk) > kernels.error + eager.error
        assert not (wrong & known).any()
        finite += known.sum()
    assert finite > 40


@pytest.mark.long
def test_unresolved_entries_are_nan_alone_and_so_are_their_derivatives():
    # 512 coefficients do not resolve the row of norm 30.
    x, columns = np.array([[30.0, 0.0], [0.5, 0.5]]), np.array([[30.0, 1e-4], [0.0, 1.0]])
    layers = [ntk.activation(lambda z: jnp.tanh(20 * z)), ntk.relu]

    def kernel(skip):
        kernels = ntk.network_kernel(x, columns, activations=layers, skips=[skip])
        return kernels.ntk, kernels

    gradient, kernels = jax.jit(jax.jacrev(kernel, has_aux=True))(0.5)
    expected = np.array([[False, True], [True, True]])
    for entries in (kernels.ntk, kernels.error, gradient):
        assert (np.isfinite(entries) == expected).all()
    alone = ntk.network_kernel(x[1:], columns[1:], activations=layers, skips=[0.5]).ntk
    assert abs(float(kernels.ntk[1, 1]) - float(alone[0, 0])) < tolerance(1e-9, 1e-3)


@pytest.mark.slow
def test_three_kinks_close_together_are_found_and_leaky_relus_recognised_by_all_their_values():
    activation = ntk.activation(lambda z: jnp.abs(jnp.abs(z - 0.301) - 0.001))
    assert [t for t, _ in activation.kinks] == [0.3, 0.301, 0.302]
    assert ntk.activation(lambda z: jnp.maximum(z, 0.1 * z)).kink == (0.1, 1.0)
    assert ntk.activation(jax.nn.relu).kink == (0.0, 1.0)
    smooth = ntk.activation(jax.nn.softplus)
    assert smooth.smooth is not None and not smooth.kinks
    # Equal to the ReLU at many points.
    sly = ntk.activation(lambda z: jax.nn.relu(z) + jax.nn.relu(0.1 - jnp.abs(z - 1.5)))
    assert [t for t, _ in sly.kinks] == [0.0, 1.4, 1.5, 1.6]


ROW = np.array([[1.0, 2.0]]) / np.sqrt(5)

# Activations with the norms of their inputs.
FINE = {
    "step": (lambda z: jnp.tanh(1e6 * (z - 1)), 1.0),
    "peak": (lambda z: jnp.exp(-(z**2) / 2), 1e12),
    "tanh": (ntk.tanh, 1e12),
}


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FINE)
def test_details_between_all_nodes_raise_and_are_nan_when_traced(name, dtype):
    # Truth: E s'^2 is about 4/3 of the steepness times the density there: 3e5, 8e11, 5e11. At the
    # nodes all three look flat.
    fn, norm = FINE[name]
    x, activation = jnp.asarray(norm * ROW, dtype), ntk.activation(fn)
    options = {"activations": [activation], "variances": [1.0, 1.0]}
    message = "expected inputs whose kernel can be computed .* too fine details"
    with pytest.raises(FloatingPointError, match=f"^x1: {message}"):
        ntk.network_kernel(x, **options)
    with pytest.raises(FloatingPointError, match=f"^x: {message}"):
        ntk.mixture_blocks(x, [activation, ntk.relu])
    traced = jax.jit(lambda x: ntk.network_kernel(x, **options))(x)
    assert np.isnan(traced.ntk).all() and not np.isfinite(traced.error).any()


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_norms_with_resolved_steps_have_their_kernels(dtype):
    # Truth: E tanh'(u)^2 tends to (4/3) / (scale sqrt(2 pi)), and E tanh^2 to 1.
    x = jnp.asarray(1e8 * ROW, dtype)
    kernels = ntk.network_kernel(x, activations=[ntk.tanh], variances=[1.0, 1.0])
    assert abs(float(kernels.ntk[0, 0]) / (1e8 * 4 / 3 / np.sqrt(2 * np.pi)) - 1) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("steep_first", [True, False])
def test_a_step_between_the_nodes_is_nan_next_to_kinks(steep_first):
    layers = [ntk.activation(FINE["step"][0]), ntk.activation(jax.nn.relu6)]
    options = {"activations": layers if steep_first else layers[::-1], "variances": [1.0] * 3}
    traced = jax.jit(lambda x: ntk.network_kernel(x, **options))(jnp.asarray(ROW))
    assert np.isnan(traced.ntk).all() and not np.isfinite(traced.error).any()


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["elu", "soft_sign", "celu", "hard_swish"])
@pytest.mark.parametrize("scale", [5.0, 50.0])
def test_kinks_at_large_norms_use_the_series_if_their_pieces_cancel(name, scale, dtype):
    # Unscaled images have such norms.
    s = ntk.activation(getattr(jax.nn, name))
    x = jnp.asarray(scale * np.array([[1.0, 0.0], [0.6, 0.8], [0.96, 0.28]]), dtype)
    kernels = ntk.network_kernel(x, activations=[s], variances=[1.0, 1.0])
    # Panels grow from the kinks on.
    near = [t + side * 2.0**k for t, _ in s.kinks for side in (-1, 0, 1) for k in range(-6, 7)]
    for i, j in ((0, 0), (0, 1), (0, 2)):
        cosine = float(x[i] @ x[j]) / scale**2
        truth = one_layer(s, sorted({*near}), scale, scale, min(cosine, 1.0))
        assert abs(float(kernels.ntk[i, j]) - truth) <= float(kernels.error[i, j]) + 1e-6 * truth
        assert float(kernels.error[i, j]) < 0.02 * float(kernels.ntk[0, 0])


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(4))
def test_steep_functions_of_nearly_equal_rows_are_within_their_error(seed, dtype):
    # The rounding of rho counts times the squared slope.
    draw = np.random.default_rng(9 + seed)
    x = draw.normal(size=(4, 3))
    x /= np.linalg.norm(x, axis=1)[:, None]
    x[1] = x[0] + 10.0 ** draw.uniform(-5, -2) * draw.normal(size=3)
    x[3] = x[2] + 10.0 ** draw.uniform(-5, -2) * draw.normal(size=3)
    x = jnp.asarray(50 * x, dtype)
    activation = ntk.network_kernel(x, activations=[ntk.activation(jnp.sin)], variances=[1.0, 1.0])
    exact = np.asarray(x).astype(np.longdouble)
    for i, j in ((0, 1), (2, 3), (0, 2)):
        apart, c = ((exact[i] - exact[j]) ** 2).sum(), exact[i] @ exact[j]
        together = ((exact[i] + exact[j]) ** 2).sum()
        near, far = np.exp(-apart / 2), np.exp(-together / 2)
        truth = (near - far) / 2 + c * (near + far) / 2
        assert abs(float(activation.ntk[i, j]) - truth) <= float(activation.error[i, j])


@pytest.mark.long
@float64_only
def test_elu_at_a_norm_of_1e12_is_a_relu():
    # The curvature at 0, times 1e24 on both sides, must not cancel.
    x = jnp.asarray(1e12 * ROW)
    elu = ntk.activation(jax.nn.elu)
    kernels = jax.jit(lambda x: ntk.network_kernel(x, activations=[elu], variances=[1.0, 1.0]))(x)
    assert abs(float(kernels.ntk[0, 0]) - 1e24) <= float(kernels.error[0, 0]) + 1e12
    assert float(kernels.error[0, 0]) < 1e-12 * 1e24


@pytest.mark.parametrize("scale", [1e-21, 1e20])
def test_rows_with_squares_out_of_range_are_nan_when_traced(scale):
    x = jnp.asarray(scale * ROW, jnp.float32)
    assert np.isnan(jax.jit(lambda x: ntk.network_kernel(x, activations=[ntk.relu]))(x).ntk).all()
    assert not np.asarray(ntk.network_kernel(0 * x, activations=[ntk.relu]).ntk).any()
