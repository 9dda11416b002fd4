"""Test kernels of infinite width: reference values, neural-tangents, wide networks, edges."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_gradient, float64_only, tolerance, unit_rows

import ntk
import ntk.scores
from ntk import neural_tangents
from ntk.bounds.constants import hermite_coefficients
from ntk.infinite import network_kernel

LEAKY = ntk.leaky_relu(0.1)


def rows(n, d, seed=0):
    return np.random.default_rng(seed).standard_normal((n, d)) / np.sqrt(d)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("activations", "skips", "nngp", "kernel"),
    [
        ([ntk.relu] * 3, [1.0, 1.0], 7.340684097418, 15.97730386979),
        ([ntk.tanh] * 2, [0.5], None, 2.8754751694),
        pytest.param([ntk.tanh] * 2, [-1.0], None, 4.1635212587, marks=pytest.mark.long),
    ],
)
def test_diagonals_are_the_values_of_an_independent_computation(activations, skips, nngp, kernel):
    kernels = ntk.network_kernel(unit_rows(0, 2, 3), activations=activations, skips=skips)
    assert_close(kernels.ntk[0, 0], kernel, f64=2e-11, f32=1e-5)
    if nngp:
        assert_close(kernels.nngp[0, 0], nngp, f64=1e-12, f32=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "variances"),
    [
        (("relu", "erf", "leaky"), (0.7, 2.0, 1.3, 1.0)),
        pytest.param(("identity", "gelu", "relu"), (0.5, 1.5, 2.5, 2.0), marks=pytest.mark.long),
    ],
)
def test_networks_without_skips_agree_with_neural_tangents(names, variances):
    stax = neural_tangents().stax
    x = rows(7, 5)
    pairs = {
        "relu": (ntk.relu, stax.Relu()),
        "leaky": (LEAKY, stax.LeakyRelu(0.1)),
        "erf": (ntk.erf, stax.Erf()),
        "gelu": (ntk.gelu, stax.Gelu()),
        "identity": (ntk.identity, stax.Identity()),
    }
    ours, theirs = zip(*(pairs[name] for name in names), strict=True)
    # Their first layer divides by the number of inputs.
    scales = np.sqrt([variances[0] * x.shape[1], *variances[1:]])
    parts = [stax.Dense(1, W_std=float(s)) for s in scales]
    layers = [layer for pair in zip(parts, theirs, strict=False) for layer in pair]
    *_, kernel = stax.serial(*layers, parts[-1])
    # Under jit, XLA would lose sqrt(eps) on the diagonal of their ReLU.
    expected = kernel(jnp.asarray(x), None, ("nngp", "ntk"))
    kernels = ntk.network_kernel(x, activations=list(ours), variances=variances)
    assert_close(kernels.nngp, expected.nngp, f64=1e-12, f32=1e-5)
    assert_close(kernels.ntk, expected.ntk, f64=1e-12, f32=1e-5)


def finite_kernel(key, x, width, activations, skips, variances):
    """Return the NTK of one finite network of the module's formula, by brute force."""
    sizes = [x.shape[1], *[width] * len(activations), 1]
    parts = zip(jax.random.split(key, len(sizes) - 1), sizes[1:], sizes[:-1], strict=True)
    weights = [jax.random.normal(k, (m, n)) for k, m, n in parts]

    def network(weights, x):
        f = x
        for i, w in enumerate(weights):
            u = jnp.sqrt(variances[i] / (1 if i == 0 else width)) * w @ f
            if i == len(weights) - 1:
                return u[0]
            f = activations[i](u) + (skips[i - 1] * f if i else 0.0)

    gradients = jax.vmap(jax.grad(network), (None, 0))(weights, x)
    flat = jnp.concatenate([g.reshape(len(x), -1) for g in gradients], 1)
    return flat @ flat.T


@pytest.mark.long
def test_wide_networks_converge_to_the_kernel_like_one_over_root_width():
    x = jnp.asarray(rows(3, 4, seed=1))
    skips, variances = [0.7, -0.5], [1.0, 2.0, 1.5, 2.0]
    options = dict(activations=[ntk.relu, {ntk.swish: 0.6, ntk.relu: 0.4}, ntk.tanh], skips=skips)
    exact = ntk.network_kernel(x, variances=variances, **options).ntk

    @functools.partial(jax.jit, static_argnums=1)
    def sample(keys, width, variances):
        activations = [ntk.relu, lambda u: 0.6 * ntk.swish(u) + 0.4 * ntk.relu(u), ntk.tanh]
        architecture = width, activations, skips, variances
        return jax.lax.map(lambda key: finite_kernel(key, x, *architecture), keys)

    errors = {}
    for width, seeds in ((16, 128), (256, 32)):
        keys = jax.random.split(jax.random.key(width), seeds)
        sampled = sample(keys, width, jnp.array(variances))
        errors[width] = float(jnp.sqrt(jnp.mean((sampled - exact) ** 2)))
    # 16 times the width: a quarter of the error, within the spread of 32 seeds.
    assert 2.8 < errors[16] / errors[256] < 5.6
    # The mean over seeds is right to its standard error (six entries: 3.5 is one in 400).
    deviations = jnp.abs(sampled.mean(0) - exact) / (sampled.std(0) / seeds**0.5)
    assert float(deviations.max()) < 3.5
    # Networks do not converge to Lemma 1 as printed (here with its variances).
    own = ntk.network_kernel(x, **options).ntk
    printed = ntk.lemma1_kernel_as_printed(x, **options).ntk
    sampled = sample(keys, width, jnp.array([1.0, 2.0, 2.0, 2.0])).mean(0)
    assert float(jnp.abs(sampled - own).max()) < 0.3 * float(jnp.abs(sampled - printed).max())


@pytest.mark.long
def test_derivatives_in_skips_weights_variances_and_inputs_are_finite_differences():
    x = rows(3, 2, seed=2) * np.array([[1.0], [0.4], [1.6]])

    def total(arguments):
        skips, weights, variances, x = arguments
        layers = [{ntk.tanh: weights[0], ntk.relu: weights[1]}, ntk.gelu]
        kernels = ntk.network_kernel(x, activations=layers, skips=skips, variances=variances)
        return jnp.sum(jnp.sin(jnp.arange(9.0).reshape(3, 3) + kernels.ntk + kernels.nngp))

    at = jnp.array([-0.3]), jnp.array([0.4, 0.7]), jnp.array([1.0, 1.5, 2.0]), jnp.asarray(x)
    assert_gradient(total, at, f64=1e-8, f32=2e-2)


@pytest.mark.long
def test_relu_networks_have_derivatives_at_duplicate_opposite_and_zero_inputs():
    x = jnp.array([[1.0, 0.5], [1.0, 0.5], [-1.0, -0.5], [0.0, 0.0]])

    def total(skips):
        kernels = ntk.network_kernel(x, activations=[ntk.relu] * 3, skips=skips)
        return jnp.sum(kernels.ntk * jnp.arange(16.0).reshape(4, 4))

    assert_gradient(total, jnp.array([0.5, -0.8]), f64=1e-8, f32=2e-2)


@pytest.mark.long
@float64_only
def test_second_derivatives_are_those_of_a_quadratic_form_where_a_weight_is_0():
    """The jvp of a grad must use our derivative rules; the kernel is quadratic in the weights."""
    a, b = jnp.array([[0.8, 0.6], [1.0, 0.0]]), jnp.array([[1.0, 0.0]])

    def slope(w, x):
        layer = {ntk.relu: w[0], ntk.tanh: w[1]}
        of = lambda x: ntk.network_kernel(x, b, activations=[layer]).nngp.sum()  # noqa: E731
        return jax.grad(of)(x)

    first = jax.jit(slope)
    second = jax.jit(lambda w, v: jax.jvp(lambda w: slope(w, a[:1]), (w,), (v,))[1])
    for w in ([0.0, 1.0], [1.0, 0.0], [0.3, 0.7]):
        w = jnp.array(w)
        for v in jnp.eye(2):
            # Central differences are exact for a quadratic form.
            assert_close(second(w, v), (first(w + v, a[:1]) - first(w - v, a[:1])) / 2, f64=1e-10)


@pytest.mark.long
@float64_only
def test_second_derivatives_at_equal_rows_are_finite():
    x = jnp.asarray(rows(3, 3)[[0, 0, 1, 2]] * np.sqrt(3))

    def total(w):
        layers = [{ntk.gelu: w}, {ntk.gelu: w}]
        return ntk.network_kernel(x, activations=layers, skips=[0.5]).ntk.sum()

    first = jax.jit(jax.grad(total))
    second = jax.jit(lambda w: jax.jvp(jax.grad(total), (w,), (1.0,))[1])(0.9)
    assert_close(second, (first(0.9 + 1e-4) - first(0.9 - 1e-4)) / 2e-4, f64=1e-6)


@pytest.mark.long
def test_the_whole_spectrum_of_transformations_works():
    skips = jnp.array([[0.0], [0.5], [1.0]])
    kernel = functools.partial(ntk.network_kernel, rows(3, 3), activations=[ntk.relu, ntk.tanh])
    together = jax.jit(jax.vmap(lambda skips: kernel(skips=skips).ntk))(skips)
    assert_close(together, jnp.stack([kernel(skips=a).ntk for a in skips]), f64=1e-13, f32=1e-5)


@pytest.mark.long
@float64_only
@pytest.mark.parametrize(
    ("angle", "skips", "diagonal", "gap"),
    [
        (1e-9, [0.0, 0.0], 4.0, 1.9098593184272695e-9),
        (1e-9, [0.5, -1.0], 8.0090504314238601, 3.1540907829927089e-9),
        (1e-6, [0.0, 0.0], 4.0, 1.909860641626731e-6),
        (1e-2, [0.5, -1.0], 8.0090504314238601, 0.031867056243310179),
    ],
)
def test_near_duplicates_keep_their_distance_in_relu_networks(angle, skips, diagonal, gap):
    # Truth: the closed forms in mpmath with 60 digits. K_11 - K_12 is the smallest eigenvalue.
    x = np.array([[1.0, 0.0], [np.cos(angle), np.sin(angle)]])
    kernel = np.asarray(ntk.network_kernel(x, activations=[ntk.relu] * 3, skips=skips).ntk)
    assert kernel[0, 0] == pytest.approx(diagonal, rel=1e-14)
    # One unit of roundoff in the entries is 1e-15, compared with a gap from 1e-9 on.
    assert kernel[0, 0] - kernel[0, 1] == pytest.approx(gap, rel=1e-11 + 4e-15 / gap)


def test_opposite_inputs_of_one_relu_layer_have_kernel_zero():
    x = rows(1, 3)
    kernels = ntk.network_kernel(np.concatenate([x, -x]), activations=[ntk.relu])
    # The angle pi is found to 1e-12.
    assert abs(float(kernels.ntk[0, 1])) < tolerance(1e-12, 1e-5)


@pytest.mark.slow
def test_zero_inputs_have_zero_kernels_and_disturb_nothing():
    x = rows(3, 4)
    others = np.ix_([0, 2], [0, 2])
    arguments = dict(activations=[ntk.relu, {ntk.swish: 0.5, LEAKY: 0.5}], skips=[0.5])
    without = ntk.network_kernel(x, **arguments)
    x[1] = 0
    kernels = ntk.network_kernel(x, **arguments)
    assert not np.asarray(kernels.ntk)[1].any()
    assert_close(kernels.ntk[others], without.ntk[others], f64=1e-13)


@pytest.mark.long
def test_zero_inputs_of_functions_that_do_not_vanish_there_have_their_kernel():
    # Features at 0 are cos(0) = 1, slopes 0: NNGP c_2, NTK c_2.
    kernels = ntk.network_kernel(np.zeros((1, 2)), activations=[jnp.cos])
    assert_close(kernels.ntk[0, 0], 2.0, f64=1e-14, f32=1e-6)


@pytest.mark.long
def test_one_program_serves_every_skip_weight_and_input_of_a_depth():
    before = network_kernel._kernels_from_features._cache_size()
    for seed, skip, weight in ((0, 0.5, 0.2), (1, 0.3, 0.6), (2, 0.0, 0.5)):
        layers = [{ntk.relu: weight, ntk.swish: 1 - weight}] * 4
        ntk.network_kernel(unit_rows(seed, 5, 6), activations=layers, skips=[skip] * 3)
    assert network_kernel._kernels_from_features._cache_size() == before + 1


@pytest.mark.long
def test_blocks_at_correlation_one_half_are_those_of_an_independent_computation():
    x = np.array([[1.0, 0.0], [0.5, np.sqrt(0.75)]])
    relu, tanh, swish, sigmoid = range(4)
    blocks = ntk.mixture_blocks(x, [ntk.relu, ntk.tanh, ntk.swish, ntk.sigmoid])
    for a, b, value in [
        (relu, relu, 1 / 3),
        (relu, swish, 0.321611374541),
        (relu, tanh, 0.302852754801),
        (tanh, tanh, 0.384747028441),
        (swish, swish, 0.312279615294),
        (sigmoid, sigmoid, 0.0431900204623),
        (tanh, sigmoid, 0.128108539209),
    ]:
        assert_close(blocks[a, b, 0, 1], value / 2, f64=5e-12, f32=1e-5)


@pytest.mark.long
def test_blocks_between_sets_and_transposes_are_consistent():
    x = rows(7, 3)
    activations = [ntk.relu, ntk.tanh, ntk.erf]
    blocks = ntk.mixture_blocks(x, activations)
    cross = ntk.mixture_blocks(x[:3], activations, x2=x[3:])
    assert_close(cross, blocks[:, :, :3, 3:], f64=1e-13, f32=1e-5)
    assert_close(blocks, blocks.transpose(1, 0, 3, 2), f64=1e-15, f32=1e-6)


@pytest.mark.long
def test_mixture_blocks_are_differentiable_in_the_inputs():
    x, weights = rows(2, 3), jnp.array([[1, 2], [3, 4]])

    def total(x):
        return jnp.sum(ntk.mixture_blocks(x, [ntk.relu, ntk.tanh])[0, 1] * weights)

    assert_gradient(total, x, f64=1e-8, f32=2e-2)


@pytest.mark.long
def test_lemma_1_as_printed_is_right_without_skips_and_misses_those_of_relu_networks():
    x, layers = unit_rows(0, 5, 3), [ntk.relu, ntk.tanh, ntk.swish]
    kernels = ntk.lemma1_kernel_as_printed, ntk.network_kernel
    printed, exact = (kernel(x, activations=layers) for kernel in kernels)
    assert_close(printed.ntk, exact.ntk, f64=1e-9, f32=1e-4)
    assert_close(printed.nngp, exact.nngp, f64=1e-9, f32=1e-4)
    # Printed: 9. Truth: 15.977.
    options = {"activations": [ntk.relu] * 3, "skips": [1.0, 1.0]}
    printed = ntk.lemma1_kernel_as_printed(unit_rows(0, 2, 3), **options)
    assert_close(jnp.diag(printed.ntk), [9.0, 9.0], f64=1e-12, f32=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("variance", [9.0, 100.0, 900.0])
def test_blocks_at_large_variances_are_the_duals_or_nan_never_wrong(variance, traced):
    x = np.sqrt(variance) * np.array([[1.0, 0.0], [np.cos(1), np.sin(1)]])
    blocks = functools.partial(ntk.mixture_blocks, activations=[ntk.tanh])
    entries = (jax.jit(blocks) if traced else blocks)(x)[0, 0, 0, 1]
    c = variance * np.cos(1)
    slope = ntk.tanh.derivative
    assert_close(entries, c * ntk.dual(slope, slope, variance, variance, c), f64=1e-10, f32=1e-4)


@pytest.mark.long
def test_ten_mixed_layers_have_a_float32_kernel():
    x, layers = jnp.asarray(rows(4, 3), jnp.float32), [{ntk.relu: 0.5, ntk.tanh: 0.5}] * 10
    kernel = functools.partial(ntk.network_kernel, activations=layers)
    rough = kernel(x)
    assert float(jnp.max(rough.error)) < 5e-3 * float(jnp.max(rough.ntk))
    if jax.config.jax_enable_x64:
        fine = kernel(x.astype(float))
        for a, b in ((rough.nngp, fine.nngp), (rough.ntk, fine.ntk)):
            assert np.all(np.abs(np.asarray(a, float) - b) <= rough.error + fine.error)


@pytest.mark.long
def test_lemma_1_raises_for_unresolved_entries_and_has_infinite_errors():
    sine = ntk.activation(lambda z: jnp.sin(30 * z))
    x = 2 * jnp.array([[1.0, 0.0], [1.0, 1e-3]])
    with pytest.raises(FloatingPointError, match="x: expected inputs whose kernel"):
        ntk.lemma1_kernel_as_printed(x, activations=[sine, sine])
    traced = jax.jit(lambda x: ntk.lemma1_kernel_as_printed(x, activations=[sine, sine]))(x)
    assert bool(jnp.isnan(traced.ntk).any() and jnp.isinf(traced.error).all())


@pytest.mark.long
def test_a_traced_nan_gives_nan():
    x = jnp.asarray(rows(3, 2)).at[1, 0].set(jnp.nan)
    kernel = jax.jit(lambda x: ntk.network_kernel(x, activations=[ntk.relu]).ntk)(x)
    blocks = jax.jit(lambda x: ntk.mixture_blocks(x, [ntk.relu, ntk.identity]))(x)
    for matrix in (kernel, *blocks.reshape(4, 3, 3)):
        expected = np.zeros((3, 3), bool)
        expected[1] = expected[:, 1] = True
        np.testing.assert_array_equal(np.isnan(matrix), expected)


@pytest.mark.long
def test_more_rows_or_another_activation_compile_nothing():
    x = unit_rows(0, 301, 6)
    whole = ntk.network_kernel(x, activations=[ntk.tanh, ntk.relu])
    before = network_kernel._kernels_from_features._cache_size()
    fewer = ntk.network_kernel(x[:290], activations=[ntk.tanh, ntk.relu])
    other = ntk.network_kernel(x[:299], activations=[ntk.erf, ntk.leaky_relu(0.1)])
    assert network_kernel._kernels_from_features._cache_size() == before
    np.testing.assert_allclose(fewer.ntk, whole.ntk[:290, :290], rtol=1e-14)
    # Truth: one row, in tiles of another size, without the pair of an input and its copy.
    row = ntk.network_kernel(x[:1], x[:299], activations=[ntk.erf, ntk.leaky_relu(0.1)])
    np.testing.assert_allclose(other.ntk[:1, 1:], row.ntk[:, 1:], atol=1e-12)


@pytest.mark.long
def test_a_step_is_a_step_in_every_network():
    """The slope of a ReLU as an activation is a step, not a ReLU."""
    x, step = jnp.array([[1.0, 0], [0.6, 0.8], [0, 1]]), ntk.relu.derivative
    truth = ntk.dual(step, step, 1.0, 1.0, x @ x.T)
    deep = ntk.networks.serial(ntk.networks.dense(), ntk.networks.act(step), ntk.networks.dense())
    kernels = ntk.network_kernel(x, activations=[step], variances=(1, 1)), deep.kernel(x)
    for kernel in kernels:
        assert_close(kernel.nngp, truth, f32=1e-5)
    # Gradients ignore the jump of a step, so its slope is 0.
    assert_close(ntk.mixture_blocks(x, [step, ntk.relu])[0, 0], np.zeros((3, 3)))
    assert_close(hermite_coefficients(step, terms=2), [0.5, (2 * np.pi) ** -0.5])
