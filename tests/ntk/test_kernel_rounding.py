"""Stated errors of infinite-width kernels bound the true ones, and are not much larger."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import float64_only, long_except, unit_rows

import ntk
from ntk.expectations.gaussian import root
from ntk.infinite.input_pairs import half_chord_errors, half_chords, normalize_rows

# Truths are 80-bit numbers.
pytestmark = float64_only
DTYPES = [np.float32, np.float64]


def pair_rows(seed, d, gap, sign, dtype):
    """Rows, and rows that are at this distance from them, or from their negatives."""
    rng = np.random.default_rng(seed)
    x, noise = rng.normal(size=(2, 30, d))
    y = sign * x * rng.uniform(0.5, 2, size=(30, 1)) + gap * noise
    return x.astype(dtype), y.astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [2, 10, 3000])
def test_angles_are_right_to_their_stated_errors(d, dtype):
    unit = jax.jit(lambda x: normalize_rows(x, root((x * x).sum(1))))

    @jax.jit
    def angles(x, y):
        a, b = unit(x), unit(y)
        p, q = half_chords(a, b)
        return p, q, half_chord_errors(a, b, p, q)

    for seed, (gap, sign) in enumerate((g, s) for g in (0, 1e-7, 1e-4, 1) for s in (1, -1)):
        x, y = pair_rows(seed, d, gap, sign, dtype)
        p, q, error = (np.asarray(a, np.longdouble) for a in angles(x, y))
        x, y = (a / np.sqrt((a * a).sum(1))[:, None] for a in map(np.longdouble, (x, y)))
        near, far = (((x[:, None] + s * y[None]) ** 2).sum(-1) / 4 for s in (-1, 1))
        off = np.where(near < far, np.abs(p - near), np.abs(q - far))
        assert (off <= error).all(), (off / error).max()


def tanh_moment(slope, sx, sy, rho):
    """The mean of ``f(u) f(u')``, f = tanh or its slope, by the trapezoidal rule in 80 bits.

    Its error is e^-45 for s <= 1.75: the pole of tanh(s z) is at pi / (2 s), the step is 1/8.
    """
    z = np.arange(-104, 105).astype(np.longdouble) / 8
    weights = np.exp(-(z**2) / 2)
    weights /= weights.sum()

    def f(u):
        value = np.tanh(u)
        return 1 - value**2 if slope else value

    second = rho * z[:, None] + np.sqrt(max(1 - rho**2, 0)) * z[None]
    return weights * f(sx * z) @ (f(sy * second) @ weights)


def relu_moment(slope, sx, sy, rho):
    """The same for ReLU: Cho & Saul's arc-cosines in 80 bits."""
    pi = np.arccos(np.longdouble(-1))
    angle = np.arccos(np.clip(rho, -1, 1))
    if slope:
        return (pi - angle) / (2 * pi)
    return sx * sy * (np.sin(angle) + (pi - angle) * np.cos(angle)) / (2 * pi)


def true_kernel(x, moment, depth):
    x = np.longdouble(x)
    second, tangent = x @ x.T, 0
    for _ in range(depth):
        scale = np.sqrt(np.diag(second))
        rho, n = second / np.outer(scale, scale), range(len(x))
        np.fill_diagonal(rho, 1)  # an arc-cosine next to 1 would lose half of the digits
        value, slope = (
            np.array([[moment(k, scale[i], scale[j], rho[i, j]) for j in n] for i in n])
            for k in (False, True)
        )
        second, tangent = value, slope * (second + tangent)
    return second + tangent


CASES = [
    (ntk.tanh, tanh_moment, np.float64),
    (ntk.relu, relu_moment, np.float32),
    (ntk.tanh, tanh_moment, np.float32),
    (ntk.relu, relu_moment, np.float64),
]


@pytest.mark.parametrize(("s", "moment", "dtype"), long_except(CASES[:2], CASES))
def test_kernels_are_right_to_their_stated_errors(s, moment, dtype):
    x = np.random.default_rng(0).normal(size=(5, 4))
    x[4] = x[3] + 1e-3 * x[0]
    for rows in (x / np.linalg.norm(x, axis=1, keepdims=True), x / 2):
        rows = rows.astype(dtype)
        kernels = ntk.network_kernel(rows, activations=[s, s], variances=[1.0] * 3)
        off = np.abs(np.asarray(kernels.ntk) - true_kernel(rows, moment, 2))
        assert (off <= np.asarray(kernels.error)).all()


@pytest.mark.parametrize("s", long_except([ntk.relu], [ntk.tanh, ntk.relu]), ids=lambda s: s.name)
def test_float32_states_at_most_thirty_times_its_error(s):
    x = np.float32(unit_rows(0, 200, 100))
    kernels = ntk.network_kernel(x, activations=[s] * 3)
    truth = ntk.network_kernel(np.float64(x), activations=[s] * 3)
    off = np.abs(np.float64(kernels.ntk) - truth.ntk)
    assert kernels.ntk.dtype == jnp.float32
    assert (off <= kernels.error).all()
    assert float(kernels.error.max()) <= 30 * off.max()


KINDS = ["equal norms", "near-duplicates", "norms", "scale", "opposite", "positive"]


def draw_rows(rng, kind):
    x = rng.normal(size=(16, 20))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    if kind == "near-duplicates":
        x = x[:1] + 10.0 ** rng.uniform(-7, 0, size=(16, 1)) * x
    if kind == "norms":
        x *= 10 ** rng.uniform(-2, 0.7, size=(16, 1))
    if kind == "scale":
        x *= 10.0 ** rng.uniform(-3, 2)
    if kind == "opposite":
        x[8:] = -x[:8] * (1 + 1e-6 * rng.normal(size=(8, 1)))
    return np.float32(np.abs(x) if kind == "positive" else x)


@pytest.mark.long
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize(
    "s", [ntk.tanh, ntk.relu, ntk.leaky_relu(0.1), ntk.gelu], ids=lambda s: s.name
)
def test_float32_is_right_to_its_stated_error_for_random_inputs(s, depth):
    rng = np.random.default_rng(depth)
    computed = 0
    for case in range(240):
        x = draw_rows(rng, KINDS[case % len(KINDS)])
        skips = [float(np.float32(a)) for a in rng.uniform(-1, 1, depth - 1) * rng.integers(0, 2)]
        network = {"activations": [s] * depth, "skips": skips}
        try:
            kernels = ntk.network_kernel(x, **network)
        except FloatingPointError:  # the stated error is too large
            continue
        truth = ntk.network_kernel(np.float64(x), **network)
        off = np.abs(np.float64(kernels.ntk) - truth.ntk)
        assert (off <= np.float64(kernels.error) + truth.error).all(), (case, skips)
        computed += 1
    assert computed > 200
