"""Test empirical kernels against the Jacobian of the batch and neural-tangents."""

import functools
import textwrap

import flax.linen as nn
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_close, drawn, finite_differences, long_except, normal, on_devices

from ntk.compat.load import neural_tangents
from ntk.empirical import blocks, factored_gradients, kernels, network_program
from ntk.empirical.kernels import empirical_kernel, empirical_nngp, gradient_norms
from ntk.internal.batched_rows import transpose_kernel


def setup(model, x, seed=1):
    """Draw variables in the tests' precision, none near zero."""
    return drawn(jax.eval_shape(model.init, jax.random.key(0), x), seed)


def brute_force(*args):
    """Return the kernel for each kind of outputs by the Jacobian of the batch."""
    full = helpers.tangent_kernel(*args)
    return {"sum": full.sum((2, 3)), "trace": np.einsum("abii->ab", full), "full": full}


def layers(outputs=1):
    hidden = nn.Dense(6), nn.tanh, nn.Dense(6, use_bias=False), nn.silu
    return nn.Sequential([*hidden, nn.Dense(outputs)])


@functools.cache
def perceptron():
    model, x1, x2 = layers(outputs=3), normal(1, 5, 4), normal(2, 3, 4)
    return model, setup(model, x1), x1, x2


class Then(nn.Module):
    """A layer, a nonlinearity that keeps every entry apart, and a dense layer."""

    layer: nn.Module
    outputs: int = 2

    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(self.layer(x))
        return nn.Dense(self.outputs)(x.reshape(len(x), -1))


@pytest.mark.long
@pytest.mark.parametrize("method", kernels.METHODS[1:])
def test_methods_agree_for_one_and_for_two_sets_of_samples(method):
    model, params, x1, x2 = perceptron()
    for outputs, other in zip(kernels.OUTPUTS, (None, None, x2), strict=True):
        got = empirical_kernel(model.apply, params, x1, other, method=method, outputs=outputs)
        assert_close(got, brute_force(model.apply, params, x1, other)[outputs], f64=1e-12, f32=1e-4)


@pytest.mark.long
def test_gradient_norms_are_the_diagonal():
    model, params, x, _ = perceptron()
    expected = brute_force(model.apply, params, x)
    for outputs, size in (("sum", None), ("trace", 2)):
        got = gradient_norms(model.apply, params, x, outputs=outputs, batch_size=size)
        assert_close(got, np.diag(expected[outputs]), f64=1e-12, f32=1e-4)


def test_kernel_is_exactly_symmetric():
    model, params, x, _ = perceptron()
    for size in (None, 2):
        k = empirical_kernel(model.apply, params, x, outputs="full", batch_size=size)
        assert (k == k.transpose(1, 0, 3, 2)).all()


def test_outputs_without_an_axis_are_one_output():
    apply, w, x = (lambda w, x: jnp.tanh(x @ w)), normal(1, 3), normal(3, 4, 3)
    assert empirical_kernel(apply, w, x, outputs="full").shape == (4, 4, 1, 1)


def test_kernel_of_outputs_that_ignore_the_parameters_is_zero():
    got = empirical_kernel(lambda w, x: x, normal(1, 2), normal(2, 3, 2))
    assert (got == jnp.zeros((3, 3))).all()


def test_kernel_has_the_precision_of_the_parameters():
    model, x = layers(), jnp.ones((2, 3), jnp.float32)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), setup(model, x))
    assert empirical_kernel(model.apply, params, x).dtype == jnp.float32


@pytest.mark.long
@pytest.mark.parametrize("outputs", ["trace", "full"])
def test_patch_gram_explicit_gradients_and_their_chunks_agree(outputs, monkeypatch):
    model, x = Then(nn.Conv(6, (3, 3), feature_group_count=2), 3), normal(1, 3, 4, 4, 2)
    params = setup(model, x)
    expected = brute_force(model.apply, params, x)[outputs]
    for patches, chunk in ((True, 2**26), (True, 1), (False, 2**26), (False, 1)):
        monkeypatch.setattr(factored_gradients, "_pairs_are_cheaper", lambda *_, p=patches: p)
        monkeypatch.setattr(factored_gradients, "device_chunk_entries", lambda dtype, c=chunk: c)

        def apply(params, x):  # a new function for a new compilation
            return model.apply(params, x)

        got = empirical_kernel(apply, params, x, outputs=outputs)
        assert_close(got, expected, f64=1e-12, f32=1e-4)
        if outputs != "full":
            norms = gradient_norms(apply, params, x, outputs=outputs)
            assert_close(norms, np.diag(expected), f64=1e-12, f32=1e-4)


def test_batch_normalisation_on_running_averages():
    norm = nn.BatchNorm(use_running_average=True)
    model, x = nn.Sequential([nn.Dense(3), norm, nn.tanh, nn.Dense(1)]), normal(1, 4, 2)
    params = setup(model, x)
    # Running averages of the variance must be positive.
    params["batch_stats"] = jax.tree.map(jnp.abs, params["batch_stats"])
    of_params = jax.jit(lambda trained, x: model.apply({**params, "params": trained}, x))
    got = empirical_kernel(model.apply, params, x, method="layerwise")
    assert_close(got, brute_force(of_params, params["params"], x)["sum"], f64=1e-12, f32=1e-4)


LAYERS = {
    # layer, input shape without samples
    "groups": (nn.Conv(4, (3, 3), padding=((2, 0), (0, 1)), feature_group_count=2), (5, 4, 4)),
    "circular": (nn.Conv(2, (3, 3), padding="CIRCULAR", kernel_dilation=(1, 2)), (5, 4, 2)),
    "strides": (nn.Conv(2, (2, 3), strides=(2, 1), padding="VALID"), (5, 4, 2)),
    "depthwise": (nn.Conv(4, (3, 3), strides=2, feature_group_count=4), (5, 4, 4)),
    "spaced input": (nn.Conv(2, (3, 3), input_dilation=2, padding=1), (3, 2, 2)),
    "cropped": (nn.Conv(2, (2, 2), padding=((-1, 0), (0, -2))), (5, 6, 2)),
    "causal": (nn.Conv(3, 3, kernel_dilation=2, padding="CAUSAL"), (7, 2)),
    "three axes": (nn.Conv(2, (2, 1, 2), strides=(2, 1, 1)), (3, 4, 3, 2)),
    "transposed": (nn.ConvTranspose(2, (3,)), (4, 2)),
    "local": (nn.ConvLocal(2, (3,)), (4, 2)),
    "several axes": (nn.DenseGeneral((2, 3), axis=(1, 2)), (2, 2)),
    "weight normalisation": (nn.WeightNorm(nn.Dense(3)), (2,)),
}


@pytest.mark.parametrize("name", long_except(["groups", "circular"], LAYERS))
def test_layers_have_the_kernel_of_the_jacobian(name):
    layer, shape = LAYERS[name]
    model, x = Then(layer), normal(1, 2, *shape)
    params = setup(model, x)

    def of_params(params, x):
        return model.apply({"params": params}, x)

    expected = brute_force(of_params, params["params"], x)["sum"]
    assert_close(empirical_kernel(model.apply, params, x), expected, f64=1e-12, f32=1e-4)
    net = network_program.trace_network(of_params, params["params"], x)
    plan = factored_gradients.plan_gradients(net, factored=True)
    assert len(plan.layered) == (1 if name == "weight normalisation" else 2)


def test_layers_that_compute_in_half_precision_are_near_the_jacobian():
    half = functools.partial(nn.Dense, dtype=jnp.bfloat16)
    model = nn.Sequential([half(16), nn.tanh, half(1, param_dtype=jnp.bfloat16)])
    x = normal(1, 3, 4)
    params = jax.jit(model.init)(jax.random.key(0), x)
    got = empirical_kernel(model.apply, params, x)
    expected = empirical_kernel(model.apply, params, x, method="jacobian")
    assert got.dtype == expected.dtype  # and not bfloat16
    assert_close(got, expected, f64=0.03, f32=0.03)


@pytest.mark.long
@pytest.mark.parametrize("oblong", [False, True])
@pytest.mark.parametrize("size, outputs", [(1, "trace"), (2, "full"), (3, "sum"), (20, "sum")])
def test_batches_do_not_matter(size, outputs, oblong):
    model, params, x1, x2 = perceptron()
    other = x2 if oblong else None
    got = empirical_kernel(model.apply, params, x1, other, outputs=outputs, batch_size=size)
    assert_close(got, brute_force(model.apply, params, x1, other)[outputs], f64=1e-12, f32=1e-4)
    # The flags of the tests let XLA compute a kernel of one block twice, rounded unequally.
    assert oblong or size == 20 or bool((got == transpose_kernel(got)).all())


def test_kernel_vector_product_is_the_kernel_times_the_vector():
    model, params, x, _ = perceptron()
    v, w = normal(2, 5), normal(3, 5, 3)
    expected = brute_force(model.apply, params, x)
    kv, kw = expected["sum"] @ v, np.einsum("abij,bj->ai", expected["full"], w)
    for size in (None, 2):
        product = kernels.kernel_vector_product(model.apply, params, x, batch_size=size)
        assert_close((product(v), jax.jit(product)(w)), (kv, kw), f64=1e-12, f32=1e-4)
        # The program for integers must not serve floating point vectors of the same shape.
        assert_close(product(np.arange(5)), expected["sum"] @ np.arange(5), f64=1e-12, f32=1e-4)
        assert_close(product(v.astype(np.float32)), kv, f64=1e-6, f32=1e-4)


def test_derivatives_in_the_parameters_are_those_of_finite_differences():
    model, x = layers(), normal(1, 3, 2)
    params, weights = setup(model, x), normal(2, 3, 3)

    def loss(params, **options):
        return jnp.sum(weights * empirical_kernel(model.apply, params, x, **options))

    expected = finite_differences(jax.jit(functools.partial(loss, method="jacobian")), params)
    for size in (None, 2):
        value = functools.partial(loss, batch_size=size, method="layerwise")
        assert_close(jax.jit(jax.grad(value))(params), expected, f64=1e-9, f32=3e-2)


def test_a_batched_kernel_takes_little_memory_beyond_its_result():
    kernel = functools.partial(empirical_kernel, lambda w, x: jnp.tanh(x @ w), batch_size=90)
    n = 1000  # the last block overlaps its neighbour
    arguments = jnp.ones((4, 3), jnp.float32), jax.ShapeDtypeStruct((n, 4), jnp.float32)
    memory = jax.jit(kernel).lower(*arguments).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= 0.25 * memory.output_size_in_bytes


@pytest.mark.parametrize("outputs", ["sum", "trace"])
def test_tiles_of_a_kernel_do_not_show(outputs, monkeypatch):
    model, params, x1, x2 = perceptron()
    expected = [brute_force(model.apply, params, x1, x)[outputs] for x in (None, x2)]
    monkeypatch.setattr(blocks, "device_gram_tile_size", lambda n, arrays, dtype: min(2, n))
    for x, truth in zip((None, x2), expected, strict=True):
        got = empirical_kernel(lambda *a: model.apply(*a), params, x1, x, outputs=outputs)
        assert_close(got, truth, f64=1e-12, f32=1e-4)
        assert x is not None or bool((got == got.T).all())
    weights = normal(3, 5, 5)

    def total(a):
        def apply(params, x):
            return a * model.apply(params, x)

        return jnp.sum(weights * empirical_kernel(apply, params, x1, outputs=outputs))

    # The kernel of a f is a^2 K.
    assert_close(jax.grad(total)(3.0), 6 * jnp.sum(weights * expected[0]), f64=1e-10, f32=1e-3)


def test_kernel_maps_over_parameters():
    model, x = layers(), normal(1, 3, 2)
    several = [setup(model, x, seed) for seed in (1, 2)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *several)
    got = jax.vmap(lambda p: empirical_kernel(model.apply, p, x, batch_size=2))(stacked)
    expected = np.stack([brute_force(model.apply, p, x)["sum"] for p in several])
    assert_close(got, expected, f64=1e-12, f32=1e-4)


@pytest.mark.slow
def test_rows_are_divided_among_devices():
    program = """
    import jax, json, numpy as np, flax.linen as nn
    from ntk.empirical.kernels import empirical_kernel, gradient_norms

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.LayerNorm()(nn.tanh(nn.Conv(3, (3,))(x)))
            return nn.Dense(2)(x.reshape(len(x), -1))

    x = np.random.default_rng(0).normal(size=(10, 5, 2))
    apply = Network().apply
    params = jax.jit(Network().init)(jax.random.key(1), x)
    placed = jax.device_put((params, x), jax.devices()[0])
    alone = empirical_kernel(apply, *placed)
    square = empirical_kernel(apply, params, x)
    oblong = empirical_kernel(apply, params, x, x[:7], batch_size=2)
    norms = gradient_norms(apply, params, x)
    devices = [len(k.devices()) for k in (alone, square, oblong, norms)]
    alone = np.asarray(alone)
    pairs = (square, alone), (oblong, alone[:, :7]), (norms, np.diag(alone))
    error = max(abs(np.asarray(k) - expected).max() for k, expected in pairs) / abs(alone).max()
    print(json.dumps([devices, float(error)]))
    """
    devices, error = on_devices(4, textwrap.dedent(program))
    assert devices == [1, 4, 4, 4] and error < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("size", [None, 2])
def test_nngp_kernels_are_the_products_of_the_outputs_and_those_of_neural_tangents(size):
    model, params, x1, x2 = perceptron()
    y1, y2 = model.apply(params, x1), model.apply(params, x2)
    for other, y in ((None, y1), (x2, y2)):
        mean = empirical_nngp(model.apply, params, x1, other, batch_size=size)
        assert_close(mean, y1 @ y.T / 3, f64=1e-13, f32=1e-5)
        full = empirical_nngp(model.apply, params, x1, other, outputs="full", batch_size=size)
        assert_close(full, jnp.einsum("ai,bj->abij", y1, y), f64=1e-13, f32=1e-5)
        peer = neural_tangents().empirical_nngp_fn(model.apply)(x1, other, params)
        assert_close(mean, peer, f64=1e-13, f32=1e-5)
        if other is None:
            assert (mean == mean.T).all() and (full == full.transpose(1, 0, 3, 2)).all()


@pytest.mark.long
def test_batch_statistics_of_nnx_raise_and_averages_do_not():
    x, rngs = np.ones((3, 2)), nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(2, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs))
    original = nnx.BatchNorm.__call__
    for mode in (model.train, model.eval):
        mode()
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        apply = lambda p, x, graph=graph, rest=rest: nnx.merge(graph, p, rest)(x)  # noqa: E731
        if mode == model.train:
            with pytest.raises(ValueError, match=r"^apply: expected BatchNorm with use_running_av"):
                empirical_kernel(apply, params, x)
        else:
            # Untrained averages are 0 and 1.
            kernel = empirical_kernel(apply, params, x)
            # flax computes some sums in float32.
            assert_close(kernel, brute_force(apply, params, x)["sum"], f64=1e-6, f32=1e-4)
        assert nnx.BatchNorm.__call__ is original
