"""Test kernels of networks of layers: other implementations, wide networks, quadrature, edges."""

import ctypes
import gc
import itertools
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generated import expectation
from helpers import assert_close, assert_gradient, float64_only, long_except, normal

import ntk
from ntk import networks as nets
from ntk.compat.load import neural_tangents
from ntk.internal import tiles
from ntk.networks import infinite_kernel, position_pairs
from ntk.networks.plan import plan_network

WEIGHTS = (2.0, 0.09)  # variances of weights and biases
RELU, SMOOTH = nets.act(ntk.relu), nets.act(ntk.gelu)


@pytest.fixture(autouse=True)
def _forget_large_programs():
    """Free compiled programs, which take up to 400 MB per test."""
    yield
    if infinite_kernel._kernels_of_pairs._cache_size():
        jax.clear_caches()
        gc.collect()
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)


def myrtle_like(activation):
    conv = nets.serial(nets.conv(3, 2.0), nets.act(activation))
    end = nets.global_average_pool(), nets.dense(1.0, 0.1)
    return nets.serial(conv, nets.average_pool(2), conv, *end)


@pytest.mark.long
@pytest.mark.parametrize(
    ("layers", "skips", "both"),
    [
        ([ntk.tanh, ntk.relu, ntk.gelu], None, False),
        ([{ntk.relu: 0.5, ntk.tanh: 0.3}, ntk.swish, ntk.leaky_relu(0.1)], [0.7, -0.4], True),
    ],
    ids=["three", "mixed"],
)
def test_dense_networks_have_the_kernels_of_network_kernel(layers, skips, both):
    x, y = normal(0, 5, 7) / 2, normal(1, 3, 7) / 2
    first, *blocks = [nets.act(s) for s in layers]
    blocks = [nets.serial(nets.dense(2.0), block) for block in blocks]
    if skips:
        blocks = [nets.residual(b, skip=a) for b, a in zip(blocks, skips, strict=True)]
    net = nets.serial(nets.dense(7.0), first, *blocks, nets.dense(2.0))
    for pair in ((x, y),) if both else ((x,),):
        expected = ntk.network_kernel(*pair, activations=layers, skips=skips)
        assert_close(tuple(net.kernel(*pair)), tuple(expected), f64=1e-12, f32=1e-5)


def of_stax(name):
    stax = neural_tangents().stax
    layer = {"relu": stax.Relu, "erf": stax.Erf, "gelu": stax.Gelu}[name]()
    std = {"W_std": math.sqrt(WEIGHTS[0]), "b_std": math.sqrt(WEIGHTS[1])}

    def conv(*window, strides=1, padding="SAME"):
        ours = nets.conv(window, *WEIGHTS, strides=strides, padding=padding)
        return ours, stax.Conv(1, window, strides=(strides,) * 2, padding=padding, **std)

    dense = nets.dense(*WEIGHTS), stax.Dense(1, **std)
    act, flat = (nets.act(getattr(ntk, name)), layer), (nets.flatten(), stax.Flatten())
    gap = nets.global_average_pool(), stax.GlobalAvgPool()
    pool = nets.average_pool(2), stax.AvgPool((2, 2), strides=(2, 2))

    def serial(*layers):
        ours, theirs = zip(*layers, strict=True)
        return nets.serial(*ours), stax.serial(*theirs)

    def residual(branch, shortcut):
        parallel = stax.parallel(branch[1], stax.Identity() if shortcut is None else shortcut[1])
        theirs = stax.serial(stax.FanOut(2), parallel, stax.FanInSum())
        return nets.residual(branch[0], shortcut=shortcut and shortcut[0]), theirs

    same, small, circular = conv(3, 3), conv(3, 3, strides=2), conv(3, 3, padding="CIRCULAR")
    plain = residual(serial(act, same, act, same), None)
    smaller = residual(serial(act, small), conv(1, 1, strides=2))
    return {
        "bias": serial(dense, act, dense, act, dense),
        "padding": serial(circular, act, conv(3, 2, padding="VALID"), act, flat, dense),
        "pool": serial(same, act, pool, same, act, flat, dense),
        "residual": serial(same, plain, smaller, act, gap, dense),
    }


@pytest.mark.long
@float64_only
@pytest.mark.filterwarnings("ignore:`FanIn` layers assume")
@pytest.mark.parametrize(
    ("activation", "name"),
    # Every kind of layer, and every method for activations in both layouts.
    [("relu", "residual"), ("relu", "padding"), ("erf", "pool"), ("gelu", "bias")],
)
def test_kernels_are_those_of_neural_tangents(activation, name):
    net, (_, _, theirs) = of_stax(activation)[name]
    shape = (7,) if name == "bias" else (4, 5, 3)
    x, y = normal(0, 3, *shape), normal(1, 2, *shape)
    expected, kernels = theirs(x, y), net.kernel(x, y)
    for a, b in ((kernels.nngp, expected.nngp), (kernels.ntk, expected.ntk)):
        np.testing.assert_allclose(a, b, rtol=1e-10)
        assert float(jnp.max(jnp.abs(a - b) - kernels.error)) <= 0
    # Theirs are 1e-8 off on the diagonal, where ours is exact.
    np.testing.assert_allclose(net.kernel(x).ntk, theirs(x).ntk, rtol=1e-7)


@pytest.mark.long
@float64_only
def test_a_pooled_network_equals_quadrature_at_every_pair_of_positions():
    # By hand: windows of a sequence of 3, zeros outside, tanh, the mean, dense.
    x = np.random.default_rng(0).standard_normal((2, 3, 2))
    end = nets.global_average_pool(), nets.dense(0.7, 0.1)
    net = nets.serial(nets.conv(2, 1.5, 0.2), nets.act(ntk.tanh), *end)
    padded = np.pad(x, ((0, 0), (0, 1), (0, 0)))
    patches = [[padded[i, p : p + 2].ravel() for p in range(3)] for i in range(2)]
    second, tangent = np.zeros((2, 2)), np.zeros((2, 2))
    slope = lambda z: 1 - np.tanh(z) ** 2  # noqa: E731
    for i, j, p, q in itertools.product(range(2), range(2), range(3), range(3)):
        a, b = patches[i][p], patches[j][q]
        c = 1.5 / 4 * np.array([a @ a, b @ b, a @ b]) + 0.2
        second[i, j] += expectation(np.tanh, np.tanh, *c) / 9
        tangent[i, j] += expectation(slope, slope, *c) * c[2] / 9
    kernels = net.kernel(jnp.asarray(x))
    nngp = 0.7 * second + 0.1
    np.testing.assert_allclose(kernels.nngp, nngp, rtol=1e-11)
    np.testing.assert_allclose(kernels.ntk, nngp + 0.7 * tangent, rtol=1e-11)


EVERYTHING = nets.serial(
    nets.conv(3, 2.0, 0.1),
    nets.act([ntk.relu, ntk.tanh], "first"),
    nets.residual(nets.serial(nets.conv(3, 1.5, padding="CIRCULAR"), RELU), skip="gate"),
    nets.average_pool(2),
    nets.add([nets.conv(1, 0.5), nets.conv(2)], [0.6, 0.5]),
    SMOOTH,
    nets.global_average_pool(),
    nets.dense(1.0, 0.2),
)
ALPHA = {"first": np.array([0.4, 0.7]), "gate": np.array(0.6)}


@pytest.mark.long
@pytest.mark.parametrize(
    ("net", "alpha"),
    [
        (EVERYTHING, ALPHA),
        (nets.serial(nets.conv(3, 2.0, strides=2), RELU, nets.flatten(), nets.dense(1, 0.5)), None),
    ],
    ids=["everything", "flatten"],
)
def test_the_mean_kernel_of_wide_networks_tends_to_the_infinite_one(net, alpha):
    # The bias falls like 1 / width, the spread of one network's kernel like 1 / sqrt(width).
    images = normal(0, 3, 4, 4, 2)
    exact = net.kernel(images, alpha=alpha)
    scale = float(jnp.max(exact.ntk))
    spreads, keys = [], jax.random.split(jax.random.key(0), 64)
    for width in (16, 64):
        module = net.module(width=width, outputs=1)

        def one(key, module=module):
            params = module.init(key, images, alpha)
            apply = lambda params, x: module.apply(params, x, alpha)  # noqa: E731
            return ntk.empirical_kernel(apply, params, images, method="jacobian")

        kernels = jax.jit(lambda keys: jax.lax.map(one, keys))(keys)
        spreads.append(float(jnp.max(jnp.std(kernels, 0))) / scale)
        # Four standard errors of 64 networks, and a bias of 1 / width.
        off = float(jnp.max(jnp.abs(jnp.mean(kernels, 0) - exact.ntk))) / scale
        assert off < 4 * spreads[-1] / 8 + 1 / width
    assert 1.5 < spreads[0] / spreads[1] < 2.8


@pytest.mark.long
@float64_only
def test_the_gradient_in_alpha_is_that_of_finite_differences():
    images, weights = normal(0, 2, 4, 4, 2), normal(3, 2, 2)
    net = nets.serial(
        nets.conv(3, 2.0, 0.1),
        nets.act([ntk.relu, ntk.tanh], "first"),
        nets.residual(nets.conv(3, 1.5), skip="gate"),
        nets.global_average_pool(),
        nets.dense(1.0, 0.2),
    )

    def loss(alpha):
        kernels = net.kernel(images, alpha=alpha)
        return jnp.sum(weights * kernels.ntk) + kernels.nngp[0, 1]

    assert_gradient(loss, ALPHA, f64=1e-6)


@pytest.mark.long
@float64_only
def test_the_gradient_in_the_inputs_is_that_of_finite_differences():
    x, y = normal(0, 2, 3, 2), normal(1, 1, 3, 2)
    net = nets.serial(nets.conv(2, 2.0, 0.1), RELU, nets.average_pool(2), nets.conv(1), SMOOTH)
    net = nets.serial(net, nets.flatten(), nets.dense())
    assert_gradient(lambda x: jnp.sum(net.kernel(x, y).ntk), x, f64=1e-6)


@pytest.mark.long
def test_jit_and_vmap_over_alpha_agree_with_one_at_a_time():
    images = normal(0, 2, 4, 4, 2)
    one = lambda alpha: EVERYTHING.kernel(images, alpha=alpha).ntk  # noqa: E731
    several = [ALPHA, EVERYTHING.start()]
    expected = jnp.stack([one(alpha) for alpha in several])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *several)
    assert_close(jax.jit(one)(ALPHA), expected[0], f64=1e-12, f32=1e-5)
    assert_close(jax.vmap(one)(stacked), expected, f64=1e-12, f32=1e-5)


def test_the_search_space_of_a_network():
    branch = nets.serial(nets.conv(3), nets.act({ntk.relu: "a", ntk.tanh: "b"}))
    net = nets.serial(nets.conv(1, "v"), nets.add([branch, nets.conv(1)], "mix"))
    assert net.names == {"v": (), "mix": ("0", "1"), "a": (), "b": ()}
    assert_close(net.start(), {"v": 1.0, "mix": [0.5, 0.5], "a": 1.0, "b": 1.0})


@pytest.mark.long
def test_a_choice_of_one_is_that_one():
    images = normal(0, 2, 4, 4, 2)
    head = nets.serial(nets.flatten(), nets.dense())
    ways = [nets.conv(1, 2.0), nets.serial(nets.conv(3), RELU, nets.conv(3))]
    net = nets.serial(nets.conv(1), RELU, nets.add(ways, "way"), SMOOTH, head)
    for k, way in enumerate(ways):
        kernels = net.kernel(images, alpha={"way": jnp.eye(2)[k]})
        expected = nets.serial(nets.conv(1), RELU, way, SMOOTH, head).kernel(images)
        assert_close(tuple(kernels), tuple(expected), f64=1e-13, f32=1e-5)


def with_duplicates(*shape):
    """Return inputs at distances 0, 1e-9 and 1e-4, zeros, and a constant."""
    x = np.random.default_rng(0).standard_normal((2, *shape))
    return np.stack([x[0], x[0] + 1e-9, x[0] * (1 + 1e-4), x[1], 0 * x[0], 0 * x[0] + 0.5])


@pytest.mark.long
@float64_only
@pytest.mark.parametrize(
    ("activation", "pooled"),
    [*itertools.product((ntk.relu, ntk.tanh), (False, True)), (ntk.leaky_relu(-0.5), False)],
)
def test_float32_is_within_its_error_of_float64(activation, pooled):
    conv = nets.serial(nets.conv(3, 2.0, 0.01), nets.act(activation))
    pool = nets.average_pool(2) if pooled else nets.serial()
    end = nets.global_average_pool() if pooled else nets.flatten()
    block = nets.residual(nets.serial(nets.act(activation), nets.conv(3)))
    net = nets.serial(conv, pool, nets.conv(1), block, nets.act(activation), end, nets.dense())
    # Both get data rounded to float32, so that only the arithmetic differs.
    x = jnp.asarray(with_duplicates(4, 4, 2), jnp.float32)
    rough, fine = net.kernel(x), net.kernel(x.astype(float))
    assert rough.ntk.dtype == jnp.float32
    for a, b in zip(rough, fine, strict=True):
        assert np.all(np.abs(np.asarray(a, float) - np.asarray(b)) <= np.asarray(rough.error))
    assert float(jnp.max(rough.error)) < 2e-2 * float(jnp.max(rough.ntk))
    assert float(jnp.max(fine.error)) < 1e-6 * float(jnp.max(fine.ntk))


VARIANCES = [(1e-12, ntk.gelu), (1e-4, ntk.erf), (1e3, ntk.gelu)]


@pytest.mark.slow
@float64_only
@pytest.mark.parametrize("variance, activation", long_except(VARIANCES[:1], VARIANCES), ids=repr)
def test_closed_formulas_keep_their_digits_at_any_variance(activation, variance):
    net = nets.serial(nets.dense(variance), nets.act(activation), nets.dense())
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)
    x = jnp.concatenate([x, x[:1] * 1.001, -x[:1]])
    rough, fine = net.kernel(x), net.kernel(x.astype(float))
    for a, b in ((rough.nngp, fine.nngp), (rough.ntk, fine.ntk)):
        off = np.abs(np.asarray(a, float) - np.asarray(b))
        assert np.all(off <= np.asarray(rough.error))
        # The formulas are much better than the bound, relative to the diagonal.
        assert np.max(off) < 1e-6 * np.max(np.asarray(b))


@pytest.mark.long
@float64_only
def test_near_duplicates_keep_their_angle_through_convolutions_with_biases():
    # T of a network of one position falls by (pi - angle) / pi at a ReLU: its slope is infinite.
    layers = [nets.serial(nets.conv(1, 2.0), RELU)] * 3
    net = nets.serial(*layers, nets.flatten(), nets.dense(2.0))
    turn = lambda angle: [[[math.cos(angle), math.sin(angle)]]]  # noqa: E731
    same, apart = (net.kernel(jnp.asarray(turn(0.0)), jnp.asarray(turn(a))).ntk for a in (0, 1e-9))
    # 1 + 1 + 1 + 1 on the diagonal; each of the terms loses its angles over pi, 6 in all.
    assert float(same[0, 0] - apart[0, 0]) == pytest.approx(6e-9 / math.pi, rel=1e-5)


@pytest.mark.long
@float64_only
def test_zeros_have_kernels_of_zeros():
    net = nets.serial(nets.conv(3), RELU, nets.conv(3), SMOOTH, nets.flatten(), nets.dense())
    kernels = net.kernel(jnp.zeros((1, 4, 4, 2)), normal(0, 1, 4, 4, 2))
    assert float(jnp.max(jnp.abs(kernels.ntk))) == 0
    gradient = jax.grad(lambda x: jnp.sum(net.kernel(x).ntk))(jnp.zeros((1, 4, 4, 2)))
    assert bool(jnp.all(jnp.isfinite(gradient)))


@pytest.mark.long
def test_symmetric_kernels_are_exactly_symmetric_and_agree_with_two_arguments():
    images = normal(0, 3, 4, 4, 2)
    net = myrtle_like(ntk.tanh)
    kernels, both = net.kernel(images), net.kernel(images, images)
    assert bool(jnp.all(kernels.ntk == kernels.ntk.T))
    off = ~np.eye(3, dtype=bool)
    assert_close(kernels.ntk[off], both.ntk[off], f64=1e-12, f32=1e-4)
    assert np.all(np.abs(kernels.ntk - both.ntk) <= both.error + kernels.error)


@pytest.mark.long
@pytest.mark.parametrize("activation", [ntk.erf, ntk.gelu])
@pytest.mark.parametrize("variance", [0.01, 4.0, 40.0])
def test_closed_formulas_are_within_their_error_of_the_series(activation, variance):
    x = jnp.asarray(with_duplicates(3))
    net = nets.serial(nets.dense(3 * variance), nets.act(activation))
    net = nets.serial(net, nets.dense(variance), nets.act(activation), nets.dense())
    # A sum of two halves uses the series.
    halves = nets.act([activation, activation], [0.5, 0.5])
    series = nets.serial(nets.dense(3 * variance), halves, nets.dense(variance), halves)
    kernels, expected = net.kernel(x), nets.serial(series, nets.dense()).kernel(x)
    for a, b in zip(kernels, expected, strict=True):
        assert np.all(np.abs(a - b) <= kernels.error + expected.error)
    scale = jnp.sqrt(jnp.outer(jnp.diag(kernels.ntk), jnp.diag(kernels.ntk)))
    largest = 1e-8 if x.dtype == jnp.float64 else 2e-2
    assert float(jnp.max(kernels.error[:4, :4] / scale[:4, :4])) < largest


@pytest.mark.long
@float64_only
def test_norms_beyond_the_table_are_expanded_one_by_one():
    # A cube of standard deviation 30: E u^3 v^3 = 9 ab c + 6 c^3, of slopes 9 (ab + 2 c^2).
    net = nets.serial(nets.dense(2.0), nets.act(lambda u: u**3), nets.dense())
    a, c = 900.0, 900 * np.array([[1.0, 0.6], [0.6, 1.0]])
    nngp, kernels = 9 * a * a * c + 6 * c**3, net.kernel(jnp.asarray([[30.0, 0.0], [18.0, 24.0]]))
    np.testing.assert_allclose(kernels.nngp, nngp, rtol=1e-10)
    np.testing.assert_allclose(kernels.ntk, nngp + 9 * (a * a + 2 * c**2) * c, rtol=1e-10)


@pytest.mark.long
@pytest.mark.parametrize("activation", [ntk.relu, ntk.tanh])
def test_blocks_and_tiles_do_not_matter(activation, monkeypatch):
    x, y = normal(0, 3, 4, 4, 2), normal(1, 2, 4, 4, 2)
    net = myrtle_like(activation)
    expected = net.kernel(x), net.kernel(x, y)
    monkeypatch.setattr(infinite_kernel, "NUMBERS", 1)
    monkeypatch.setattr(infinite_kernel, "ENTRIES", 1)
    kernels = net.kernel(x), net.kernel(x, y)
    for a, b in zip(kernels, expected, strict=True):
        assert_close(tuple(a), tuple(b), f64=1e-13, f32=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("pooled", [True, False])
def test_strips_of_a_tile_do_not_matter(pooled, monkeypatch):
    x = normal(0, 3, 4, 4, 2)
    end = nets.global_average_pool() if pooled else nets.flatten()
    net = nets.serial(nets.conv(3, 2.0), nets.act(ntk.relu), nets.conv(3), end, nets.dense())
    expected = net.kernel(x)
    for entries in (1, 2**30):  # the second is that of an accelerator: two strips
        monkeypatch.setattr(position_pairs, "device_strip_entries", lambda n=entries: n)
        infinite_kernel._kernels_of_pairs.clear_cache()
        assert_close(tuple(net.kernel(x)), tuple(expected), f64=1e-13, f32=1e-5)
    infinite_kernel._kernels_of_pairs.clear_cache()


def test_strips_follow_the_device(monkeypatch):
    assert position_pairs.count_loop_parts(1024, 119**2) == 512
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(tiles, "_memory", lambda: 60 * 10**9)
    assert position_pairs.count_loop_parts(1024, 119**2) == 2


@pytest.mark.long
def test_memory_of_the_pairs_is_that_of_the_results_and_of_a_tile():
    net = myrtle_like(ntk.relu)
    sizes, level = [], infinite_kernel.LEVELS[0]
    for n in (32, 96):
        x = normal(0, n, 8, 8, 2)
        plan = plan_network(net, (8, 8), None, x.dtype)
        static = infinite_kernel._static(plan, x.dtype)
        sites = jax.eval_shape(lambda x, p=plan: infinite_kernel._sites(p, x, level), x)
        program = infinite_kernel._kernels_of_pairs.lower(*static, plan.numbers, sites, None)
        memory = program.compile().memory_analysis()
        own = 3 * n * n * x.dtype.itemsize
        sizes.append(memory.temp_size_in_bytes - 2 * own)  # a scan stores its results twice
    assert sizes[1] < 1.2 * sizes[0]
    assert sizes[1] < 16 * infinite_kernel.ENTRIES * x.dtype.itemsize


@pytest.mark.long
def test_one_program_serves_all_activations_of_a_kind():
    images = normal(0, 2, 4, 4, 2)
    myrtle_like(ntk.tanh).kernel(images), myrtle_like(ntk.relu).kernel(images)
    before = infinite_kernel._kernels_of_pairs._cache_size()
    myrtle_like(ntk.swish).kernel(images), myrtle_like(ntk.leaky_relu(0.2)).kernel(images)
    assert infinite_kernel._kernels_of_pairs._cache_size() == before


@pytest.mark.long
@float64_only
def test_too_large_an_error_raises_and_is_nan_under_jit():
    # tanh of standard deviation 3000 is a step that no 4096 polynomials resolve.
    x = jnp.asarray([[1.0, 0.0], [1.0, 1e-5]])
    net = nets.serial(nets.dense(2e7), nets.act(ntk.tanh), nets.dense())
    with pytest.raises(FloatingPointError, match="x1: expected inputs whose kernel"):
        net.kernel(x, x)
    kernels = jax.jit(lambda x: net.kernel(x, x))(x)
    assert bool(jnp.isnan(kernels.ntk[0, 1])) and float(kernels.error[0, 1]) == np.inf


def test_the_finite_network_takes_integers():
    module = nets.serial(nets.dense(), nets.act(ntk.relu), nets.dense()).module(width=8)
    pixels = np.array([[1, 2], [0, 255]], np.uint8)
    params = module.init(jax.random.key(0), pixels)
    expected = module.apply(params, jnp.asarray(pixels, float))
    np.testing.assert_array_equal(module.apply(params, pixels), expected)
