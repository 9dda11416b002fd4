"""Convolutions with their own derivatives, compared with XLA's; pooling by loops in numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close

from bilevel.nets.convolution import average_pooling, convolve_images, materialized, max_pooling


def xla(x, kernel, *, stride=1, dilation=1, padding=None, groups=1):
    p = dilation * (len(kernel) - 1) // 2 if padding is None else padding
    options = {"rhs_dilation": (dilation, dilation), "feature_group_count": groups}
    options["dimension_numbers"] = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (stride,) * 2, [(p, p)] * 2, **options)


def arrays(size, inner, outputs, channels, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(2, 7, 6, channels), (size, size, inner, outputs)]
    return [jnp.asarray(rng.normal(size=shape), float) for shape in shapes]


DENSE = {"inner": 3, "outputs": 4, "channels": 3, "groups": 1}
WIDE = {"inner": 17, "outputs": 2, "channels": 17, "groups": 1}
DEPTHWISE = {"inner": 1, "outputs": 3, "channels": 3, "groups": 3}
CASES = [
    (DENSE, 1, {"stride": 2}),
    (DENSE, 3, {"stride": 2}),
    (DENSE, 3, {"dilation": 2}),
    (DENSE, 2, {"padding": 0}),
    (DENSE, 3, {"padding": 3, "dilation": 2}),
    (WIDE, 3, {"padding": 0}),
    ({"inner": 1, "outputs": 2, "channels": 1, "groups": 1}, 3, {"stride": 2}),
    (DEPTHWISE, 3, {"stride": 2}),
    (DEPTHWISE, 3, {"dilation": 2, "stride": 2}),
    (DEPTHWISE, 3, {"padding": 0}),
    ({"inner": 1, "outputs": 4, "channels": 2, "groups": 2}, 3, {}),
]


@pytest.mark.parametrize(("kind", "size", "window"), CASES)
def test_values_and_both_gradients_are_those_of_xla(kind, size, window, monkeypatch):
    monkeypatch.setattr("bilevel.nets.convolution._BLOCK_BYTES", 1)  # one image in a block
    jax.clear_caches()  # programs of other sizes of blocks
    x, kernel = arrays(size, kind["inner"], kind["outputs"], kind["channels"])
    window = {"groups": kind["groups"], **window}

    @functools.partial(jax.jit, static_argnums=0)
    def derivatives(conv, x, kernel, dx, dk):
        y, dy = jax.jvp(functools.partial(conv, **window), (x, kernel), (dx, dk))
        _, pull = jax.vjp(functools.partial(conv, **window), x, kernel)
        return y, dy, pull(jnp.sin(y))

    dx, dk = arrays(size, kind["inner"], kind["outputs"], kind["channels"], seed=1)
    ours = derivatives(convolve_images, x, kernel, dx, dk)
    assert_close(ours, derivatives(xla, x, kernel, dx, dk))


@pytest.mark.parametrize("dtype", [np.uint8, np.int32])
def test_images_of_whole_numbers_are_not_rounded(dtype):
    x = (10 * np.arange(16, dtype=dtype)).reshape(1, 4, 4, 1)
    kernel = np.full((3, 3, 1, 1), 1 / 9)
    assert_close(convolve_images(x, kernel), convolve_images(x.astype(float), kernel))
    assert_close(average_pooling(x, 2, stride=2)[0, :, :, 0], [[25.0, 45], [105, 125]])
    largest = (max_pooling(images, 3, padding=1) for images in (x, x.astype(float)))
    np.testing.assert_array_equal(*largest)


@pytest.mark.parametrize("kind", [DENSE, WIDE])
def test_no_images_have_no_outputs_and_a_kernel_without_gradient(kind):
    x, kernel = arrays(3, kind["inner"], kind["outputs"], kind["channels"])
    y, pull = jax.vjp(convolve_images, x[:0], kernel)
    assert y.shape == (0, 7, 6, kind["outputs"])
    dx, dk = pull(y)
    assert dx.shape == (0, *x.shape[1:])
    np.testing.assert_array_equal(dk, 0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "stride"), [(DENSE, 2), (DENSE, 1), (WIDE, 1), (DEPTHWISE, 2), (DEPTHWISE, 1)]
)
def test_second_derivatives_in_both_modes_and_under_vmap_are_xlas(kind, stride):
    x, kernel = arrays(2, kind["inner"], kind["outputs"], kind["channels"])
    kernels = jnp.stack([kernel, 2 * kernel[::-1]])

    @functools.partial(jax.jit, static_argnums=0)
    def second(conv, x, kernels):
        def loss(x, kernel):
            return jnp.sum(jnp.tanh(conv(x, kernel, stride=stride, groups=kind["groups"])))

        def squared_gradient(x, kernel):
            return sum(jnp.sum(g**2) for g in jax.grad(loss, (0, 1))(x, kernel))

        def along(x, kernel):
            return jax.jvp(jax.grad(loss, (0, 1)), (x, kernel), (x, kernel))[1]

        batched = functools.partial(jax.vmap, in_axes=(None, 0))
        return batched(jax.grad(squared_gradient, (0, 1)))(x, kernels), batched(along)(x, kernels)

    assert_close(second(convolve_images, x, kernels), second(xla, x, kernels))


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "channels"), [(np.float32, 3), (np.float32, 1), (float, 1), (float, 17)]
)
@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)])
def test_blocks_and_batches_have_xlas_derivatives(dtype, channels, axes, monkeypatch):
    """Blocks hold two or three of six images."""
    monkeypatch.setattr("bilevel.nets.convolution._BLOCK_BYTES", 3 * 8 * 6 * 9 * channels * 4)
    rng = np.random.default_rng(0)
    shapes = (2, 6, 8, 6, channels), (2, 3, 3, channels, 4)
    arguments = [rng.normal(size=shape).astype(dtype) for shape in shapes]
    arguments[1] /= 3 * channels**0.5  # otherwise the tanh saturates, and derivatives cancel
    arguments = [a if axis == 0 else a[0] for a, axis in zip(arguments, axes, strict=True)]

    @functools.partial(jax.jit, static_argnums=0)
    def derivatives(conv, *arguments):
        def loss(*arguments):
            return jnp.sum(jnp.tanh(jax.vmap(conv, axes)(*arguments)))

        gradient = jax.grad(loss, (0, 1))
        _, product = jax.jvp(gradient, arguments, arguments)
        return jax.jvp(loss, arguments, arguments), gradient(*arguments), product

    jax.clear_caches()  # programs of other sizes of blocks
    ours = derivatives(convolve_images, *map(jnp.asarray, arguments))
    with jax.enable_x64(True):
        exact = derivatives(xla, *(jnp.asarray(a, float) for a in arguments))
    assert jax.tree.leaves(ours)[0].dtype == jax.dtypes.canonicalize_dtype(dtype)
    tol = 3e-5 if ours[1][0].dtype == np.float32 else 1e-12
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tol, atol=tol), ours, exact)


@pytest.mark.parametrize(("channels", "stride"), [(1, 1), (1, 2), (3, 1), (3, 2), (17, 1), (17, 2)])
def test_a_block_in_float64_is_precise_after_its_end(channels, stride):
    """JAX lowers a compiled program, and transposes from outside, after the block; 1e60 is inf."""

    def energy(conv, x, kernel, scale):
        y = conv(x.astype(float) * scale, kernel.astype(float) * scale, stride=stride)
        return jnp.sum((y / scale**2) ** 2)

    def block(*xk):
        with jax.enable_x64(True):
            value, inner = jax.value_and_grad(energy, (1, 2))(convolve_images, *xk, 1e30)
            return value.astype(np.float32), inner

    with jax.enable_x64(False):
        arguments = [a.astype(np.float32) for a in arrays(3, channels, 4, channels)]
        expected = jax.value_and_grad(energy, (1, 2))(xla, *arguments, 1.0)
        assert_close(jax.jit(block)(*arguments), expected)
        assert_close(jax.jit(jax.grad(lambda *xk: block(*xk)[0], (0, 1)))(*arguments), expected[1])


@pytest.mark.parametrize("channels", [3, 17])
def test_hessian_products_and_gradients_run_only_canonical_convolutions(channels):
    """XLA's CPU code is ten times slower for kernels [.., outputs, inputs] or with reversals."""
    x, kernel = arrays(3, channels, 4, channels)

    def product(x, kernel):
        gradient = jax.grad(lambda *xk: jnp.sum(jnp.tanh(convolve_images(*xk))), (0, 1))
        return jax.jvp(gradient, (x, kernel), (x, kernel))

    text = jax.jit(product).lower(x, kernel).compile().as_text()
    lines = [line for line in text.splitlines() if " convolution(" in line]
    assert bool(lines) == (channels == 17)  # products serve few channels
    assert all("b01f_01io->b01f" in line and "rhs_reversal" not in line for line in lines)


def test_other_devices_run_the_plain_convolution(monkeypatch):
    x, kernel = arrays(3, 1, 3, 3)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    program = jax.make_jaxpr(jax.grad(lambda k: convolve_images(x, k, groups=3).sum()))(kernel)
    assert "conv_general_dilated" in str(program) and "scan" not in str(program)
    assert_close(convolve_images(x, kernel, groups=3), xla(x, kernel, groups=3))


@pytest.mark.parametrize("kind", [DENSE, DEPTHWISE])
def test_unused_derivatives_are_not_computed(kind):
    """The gradient in the kernel is the one with products of matrices, or a loop over examples."""
    arguments = arrays(3, kind["inner"], kind["outputs"], kind["channels"])

    def total(x, kernel):
        return jnp.sum(convolve_images(x, kernel, groups=kind["groups"]))

    mark = "dot_general" if kind["groups"] == 1 else "scan"
    marked = [mark in str(jax.make_jaxpr(jax.grad(total, i))(*arguments)) for i in (0, 1)]
    assert marked == [False, True]


def test_materialized_is_the_identity_and_stays_in_the_program():
    x, dx = jnp.array([1.0, -2.0, jnp.nan]), jnp.array([3.0, jnp.inf, 5.0])
    for number in (0.5, -0.5, jnp.nan):
        y, pull_back = jax.vjp(lambda x, number=number: materialized(x, number), x)
        np.testing.assert_array_equal(y, x)
        np.testing.assert_array_equal(pull_back(dx)[0], dx)
        np.testing.assert_array_equal(jax.jvp(pull_back, (dx,), (x,))[1][0], x)
    numbers = jnp.array([1.0, -1.0])
    np.testing.assert_array_equal(jax.vmap(materialized, (None, 0))(x, numbers), [x, x])
    program = jax.jit(lambda x, number: 2 * materialized(3 * x, number)).lower(x, 0.5).compile()
    assert jax.default_backend() != "cpu" or "conditional" in program.as_text()


def test_the_backward_pass_keeps_no_patches():
    x = jnp.zeros((16, 12, 12, 4))
    gradient = jax.jit(jax.grad(lambda x, k: (convolve_images(x, k, groups=4) ** 2).sum(), (0, 1)))
    memory = gradient.lower(x, jnp.zeros((5, 5, 1, 4))).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 10 * x.nbytes  # the patches are 25 times x


def test_sixteen_bits_are_summed_in_thirty_two():
    """4096 ones: a running sum in bfloat16 would stop at 256."""
    x, kernel = jnp.ones((64, 8, 8, 1), jnp.bfloat16), jnp.ones((3, 3, 1, 1), jnp.bfloat16)
    gradient = jax.grad(lambda k: convolve_images(x, k).sum(dtype=float))(kernel)
    assert gradient.dtype == jnp.bfloat16
    assert gradient[1, 1, 0, 0] == 4096


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "stride"), [((2, 5, 6, 2), 1), ((1, 7, 4, 2), 2)])
def test_pooling_is_over_the_pixels_inside_the_image(shape, stride):
    x = np.random.default_rng(0).permutation(np.prod(shape)).reshape(shape).astype(float)
    largest, mean, gradient = [], [], np.zeros(shape)
    rows, columns = ((length - 1) // stride + 1 for length in shape[1:3])
    for i, j in np.ndindex(rows, columns):
        top, left = max(stride * i - 1, 0), max(stride * j - 1, 0)
        window = x[:, top : stride * i + 2, left : stride * j + 2]
        largest.append(window.max((1, 2)))
        mean.append(window.mean((1, 2)))
        gradient += x == largest[-1][:, None, None]

    def pooled(pool, x):
        y = pool(x, 3, stride=stride, padding=1)
        return jnp.moveaxis(y, (1, 2), (0, 1)).reshape(rows * columns, len(x), -1)

    assert_close(pooled(max_pooling, jnp.asarray(x)), largest)
    assert_close(pooled(average_pooling, jnp.asarray(x)), mean)
    assert_close(jax.grad(lambda x: pooled(max_pooling, x).sum())(jnp.asarray(x)), gradient)
