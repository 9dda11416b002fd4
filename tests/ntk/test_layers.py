"""Test which weights are kept in factors, and kernels against the Jacobian of the batch."""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_close, drawn, normal, tangent_kernel
from jax import lax
from jax.numpy import tanh

from ntk.empirical import factored_gradients, network_program
from ntk.empirical.kernels import empirical_kernel, gradient_norms, kernel_vector_product


def layered(apply, params, x):
    net = network_program.trace_network(apply, params, x)
    plan = factored_gradients.plan_gradients(net, factored=True)
    return {n for i, n in zip(net.trained, net.names, strict=True) if i in plan.layered}


def check(apply, params, x, expected, f64=1e-12):
    assert layered(apply, params, x) == set(expected.split())
    truth = tangent_kernel(apply, params, x)
    assert_close(empirical_kernel(apply, params, x, outputs="full"), truth, f64=f64, f32=1e-4)
    assert_close(empirical_kernel(apply, params, x), truth.sum((2, 3)), f64=f64, f32=1e-4)
    norms = gradient_norms(apply, params, x, outputs="trace")
    assert_close(norms, np.diag(np.einsum("abii->ab", truth)), f64=f64, f32=1e-4)


def matrices(*shapes):
    return {"abcd"[i]: normal(i, *shape) for i, shape in enumerate(shapes)}


@jax.custom_jvp
def doubled(w, x):
    return x @ w


@doubled.defjvp
def _(primals, tangents):  # deliberately not the derivative
    (w, x), (dw, dx) = primals, tangents
    return x @ w, 2 * (x @ dw) + dx @ w


def recurrent(x, a, b, c):
    def step(h, x):
        h = tanh(x @ a + h @ b)
        return h, h

    h, _ = lax.scan(step, jnp.zeros((len(x), 3), x.dtype), jnp.swapaxes(x, 0, 1))
    return h @ c


def scanned_twice(x, a, b, scaled):
    """Scan over layers, and for each of them over time."""

    def over_time(h, w):
        def step(h, _):
            return tanh(h @ scaled(w) @ b), None

        w = scaled(w)
        return lax.scan(step, h, None, length=2)[0], None

    return lax.scan(over_time, x, a, reverse=True)[0]


def emitted(x, a):
    x, again = lax.scan(lambda x, w: (tanh(x @ w), -w), x, a)
    return x * jnp.sin(again).sum()


def channels_first(x, a):
    """Use the layout of images and filters in PyTorch and equinox."""
    x = x.reshape(-1, 2, 3, 2)
    options = {"window_strides": (2, 1), "padding": ((1, 0), (0, 1)), "feature_group_count": 2}
    x = lax.conv_general_dilated(x, a, **options)
    return tanh(x).reshape(len(x), -1)[:, :3]


SERIES = normal(9, 3, 4, 2)
IMAGES = normal(7, 3, 2, 3, 2)
X = normal(8, 3, 2)


def case(function, names, shapes, x=X):
    shapes = [tuple(int(d) for d in shape if d != "_") for shape in shapes.split()]
    return (lambda weights, x: function(x, **weights)), matrices(*shapes), x, names


FUNCTIONS = {
    # function of x and weights; those in factors; shapes of a, b, c, d with a digit for each axis
    "two layers": case(lambda x, a, b, c: tanh(x @ a + c) @ b, "a b", "23 32 3"),
    "weight on the left": case(lambda x, a, b: (b @ tanh(a @ x.T)).T, "a b", "32 23"),
    "checkpointed": case(
        lambda x, a, b: jax.checkpoint(lambda a, x: tanh(x @ a))(a, x) @ b, "a b", "23 32"
    ),
    "mapped": case(lambda x, a, b: jax.vmap(lambda x: tanh(x @ a) @ b)(x), "a b", "23 32"),
    "looped": case(lambda x, a, b: lax.map(lambda x: tanh(x @ a) @ b, x), "a b", "23 32"),
    "scaled by numbers": case(
        lambda x, a, b, c, d: tanh(x @ (a / jnp.sqrt(2.0))) @ (-0.5 * b / d), "a b", "23 32 1 11"
    ),
    "scaled by the sample": case(
        lambda x, a, b: tanh(x @ (a * x[0, 0])) @ b, "a b", "23 32", x=X[:1]
    ),
    "rearranged": case(lambda x, a, b: tanh(x @ a.T[::-1]) @ b.reshape(3, 2), "a b", "32 23"),
    "normalised": case(lambda x, a: x @ (a / jnp.linalg.norm(a)), "", "23"),
    "divided by": case(lambda x, a: x @ (1 / a), "", "23"),
    "masked": case(lambda x, a: x @ (a * jnp.eye(2, 3)), "", "23"),
    "its own number": case(lambda x, a: jnp.sin(x * a * a), "", "1"),
    "a number that is a weight": case(lambda x, a, b: tanh(x[:, :1] @ a) @ (b * a), "b", "11 12"),
    "used twice, times numbers": case(lambda x, a: tanh(tanh(x @ (3 * a)) @ (a / 2)), "a", "22"),
    "inputs of two shapes": case(lambda x, a: tanh(x @ a).sum(1) @ a, "a", "22", x=SERIES),
    "tied": case(lambda x, a: tanh(x @ a) @ a.T, "", "23"),
    "a product of weights": case(lambda x, a, b: tanh(x @ (a @ b)), "b", "21 13"),
    "learned inputs": case(lambda x, a, b, c: x @ (tanh(a @ b) @ c), "b c", "23 33 32"),
    "a number times a repeated number": case(
        lambda x, a, b: x @ lax.mul(a, jnp.broadcast_to(x[0, 0], (2, 2))) @ b, "b", "_ 22", x=X[:1]
    ),
    "no inputs": case(lambda x, a, b: jnp.zeros((1, 0)) @ a + x @ b, "a b", "02 22", x=X[:1]),
    "no steps": case(
        lambda x, a, b, c: recurrent(x[:, :0], a, b, c), "a b c", "23 33 32", x=SERIES
    ),
    "pieces": case(lambda x, a, b: tanh(x @ a[0]) @ a[1] @ b[:2] @ b[2:], "a b", "222 42"),
    "pieces that overlap": case(lambda x, a: tanh(x @ a[:2]) @ a[1:], "", "32"),
    "every other row": case(lambda x, a: tanh(x @ a[::2]), "", "42"),
    "split": case(lambda x, a: sum(tanh(x @ w) for w in jnp.split(a, 3, axis=1)), "a", "26"),
    "joined": case(lambda x, a, b: tanh(x @ jnp.concatenate([a, b.T], 1)), "a b", "23 32"),
    "joined with a multiple": case(
        lambda x, a, b: tanh(x @ jnp.concatenate([a, 2 * b], 1)), "", "23 22"
    ),
    "joined with itself": case(lambda x, a: tanh(x @ jnp.concatenate([a, a], 1)), "", "23"),
    "a piece joined with one that is used": case(
        lambda x, a, b: (x @ jnp.concatenate([a[:, :1], b], 1)) @ jnp.sin(b) + tanh(x @ a[:, 1:]),
        "",
        "22 21",
    ),
    "a rule of its own": case(lambda x, a, b: tanh(doubled(a, x)) @ b, "b", "23 32"),
    "a stopped gradient": case(lambda x, a, b: x @ lax.stop_gradient(a) @ b, "b", "23 32"),
    "a branch": case(
        lambda x, a, b: lax.cond(x[0, 0] > 0, lambda: x @ a, lambda: 2 * x @ a) @ b,
        "b",
        "23 32",
        x=X[:1],
    ),
    "unused": case(lambda x, a, b: x @ a, "a", "23 23"),
    "an output": case(lambda x, a: x @ a + a[:1, 0], "", "23"),
    "recurrent": case(recurrent, "a b c", "23 33 32", x=SERIES),
    "put out by a loop": case(emitted, "", "322"),
    "channels first": case(channels_first, "a", "4122", x=IMAGES),
    "slices of a loop, and all of it": case(
        lambda x, a: lax.scan(lambda h, w: (tanh(h @ a) * (h @ w)[:, None], None), x, a)[0],
        "",
        "22",
    ),
    "carried": case(
        lambda x, a: lax.fori_loop(0, 2, lambda _, c: (c[0] @ c[1], c[1].T), (x, a))[0], "", "22"
    ),
    "scaled in front of a loop, in it, and in a loop in it": case(
        lambda x, a, b, c: scanned_twice(x, a / 3, b * c, lambda w: 0.7 * w), "a b", "324 42 _"
    ),
    "batches of matrices": case(
        lambda x, a, b: tanh(jnp.einsum("npi,pij->npj", x, a)).sum(1) @ b, "a b", "423 32", x=SERIES
    ),
    "several contracted axes": case(
        lambda x, a, b: tanh(jnp.einsum("npi,ijp->nj", x, a)) @ b, "a b", "234 32", x=SERIES
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("apply, params, x, names", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_functions_have_the_kernel_of_the_jacobian(apply, params, x, names):
    check(apply, params, x, names)


TOKENS = np.array([[0, 1, 2, 1], [4, 1, 1, 0], [3, 3, 3, 3]])
TABLE = {"table": normal(1, 5, 3), "w": normal(2, 3, 2)}
LOOKUPS = {
    "take": lambda e, t: jnp.take(e, t, axis=0),
    "take, beyond the end": lambda e, t: jnp.nan_to_num(jnp.take(e, 2 * t, axis=0)),
    "take, clipped": lambda e, t: jnp.take(e, 2 * t, axis=0, mode="clip"),
    "take, wrapped": lambda e, t: jnp.take(e, 7 * t, axis=0, mode="wrap"),
    "indexed": lambda e, t: e[t],
    "indexed, beyond the end": lambda e, t: e[2 * t],
    "indexed one by one": lambda e, t: jax.vmap(jax.vmap(lambda t: e[t]))(t),
    "indexed in a loop": lambda e, t: jnp.swapaxes(lax.map(lambda t: e[t], t.T), 0, 1),
    "indexed along another axis": lambda e, t: jnp.moveaxis(e.T[:, t], 0, -1),
}


@pytest.mark.long
@pytest.mark.parametrize("read", LOOKUPS.values(), ids=LOOKUPS.keys())
def test_tables_are_kept_as_rows(read, monkeypatch):
    def apply(p, t):
        return tanh(read(p["table"], t)).sum(1) @ p["w"]

    check(apply, TABLE, TOKENS, "table w")
    monkeypatch.setattr(factored_gradients, "device_chunk_entries", lambda dtype: 1)
    for pairs in (True, False):
        monkeypatch.setattr(factored_gradients, "_pairs_are_cheaper", lambda *_, p=pairs: p)
        check(apply, TABLE, TOKENS, "table w")


def test_weights_may_be_cast():
    # Only the Jacobian's sensitivities are rounded by the cast.
    def apply(p, t):
        half = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), p)
        return tanh(half["table"][t]).sum(1).astype(float) @ half["w"].astype(float)

    check(apply, TABLE, TOKENS, "table w", f64=1e-6)


def test_table_read_in_two_places_is_one_table():
    def apply(p, t):
        return (tanh(p["table"][t[:, 0]]) * p["table"][t[:, 1:]].sum(1)) @ p["w"]

    check(apply, TABLE, TOKENS, "table w")


def test_tables_that_are_slices_of_a_loop_are_left_to_the_jacobian():
    params = {"tables": normal(1, 2, 5, 3), "w": normal(2, 3, 2)}

    def apply(p, t):
        start = jnp.zeros((*t.shape, 3), p["w"].dtype)
        h, _ = lax.scan(lambda h, e: (tanh(h + e[t]), None), start, p["tables"])
        return h.sum(1) @ p["w"]

    check(apply, params, TOKENS, "w")


class Block(nn.Module):
    @nn.compact
    def __call__(self, t):
        x = nn.Embed(5, 4)(t) + self.param("positions", nn.initializers.ones, (t.shape[-1], 4))
        x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
        hidden = nn.gelu(nn.DenseGeneral((2, 2))(x)).reshape(x.shape)
        x = x + nn.Einsum((4, 4), "abc,cd->abd")(hidden)
        return nn.Dense(2)(x.mean(1))


class Steps(nn.Module):
    cell: type

    @nn.compact
    def __call__(self, x):
        cell = self.cell(3, param_dtype=x.dtype)  # also the dtype of the carry
        return nn.Dense(2)(nn.RNN(cell)(x)[:, -1])


PARTS = ("query", "key", "value", "out")
ATTENTION = "".join(f" params/MultiHeadDotProductAttention_0/{name}/kernel" for name in PARTS)
LINEN = {
    "attention": (
        Block(),
        TOKENS,
        "params/Embed_0/embedding params/DenseGeneral_0/kernel params/Einsum_0/kernel "
        "params/Dense_0/kernel" + ATTENTION,
    ),
    "lstm, joined": (
        Steps(nn.OptimizedLSTMCell),
        SERIES,
        "params/Dense_0/kernel"
        + "".join(f" params/OptimizedLSTMCell_0/{a}{b}/kernel" for a in "ih" for b in "figo"),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("model, x, names", LINEN.values(), ids=LINEN.keys())
def test_linen(model, x, names):
    check(model.apply, drawn(jax.eval_shape(model.init, jax.random.key(0), x)), x, names)


class Perceptron(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(2, 3, (3,), padding="CIRCULAR", rngs=rngs)
        self.norm = nnx.BatchNorm(3, use_running_average=True, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(1, 3, decode=False, rngs=rngs)
        self.cell = nnx.RNN(nnx.GRUCell(3, 3, rngs=rngs))
        self.out = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x):
        x = self.attention(nnx.silu(self.norm(self.conv(x))))
        return self.out(self.cell(x, initial_carry=jnp.zeros((len(x), 3), x.dtype))[:, -1])


@pytest.mark.long
def test_nnx():
    structure, trained, others = nnx.split(Perceptron(nnx.Rngs(0)), nnx.Param, ...)

    def apply(params, x):
        return nnx.merge(structure, params, others)(x)

    attention = "".join(f" attention/{name}/kernel" for name in PARTS)
    names = "conv/kernel cell/cell/dense_i/kernel cell/cell/dense_h/kernel out/kernel" + attention
    names = " ".join(f"{name}/value" for name in names.split())
    # The softmax of nnx computes in float32.
    check(jax.jit(apply), drawn(trained), SERIES, names, f64=1e-8)


@pytest.mark.long
def test_samples_and_outputs_may_be_pytrees():
    params = matrices((2, 3), (3, 2))
    x = {"tokens": TOKENS, "rows": X}

    def apply(p, x):
        h = tanh(x["rows"] @ p["a"])
        return {"one": h @ p["b"], "two": (x["tokens"].sum(1) * h[:, 0], h[:, None, :2])}

    def joined(p, x):
        y = apply(p, x)
        flat = y["two"][1].reshape(len(x["rows"]), -1)
        return jnp.concatenate([y["one"], y["two"][0][:, None], flat], 1)

    check(apply, params, x, "a b")
    expected = empirical_kernel(joined, params, x, outputs="full")
    for size in (None, 2):
        got = empirical_kernel(apply, params, x, x, outputs="full", batch_size=size)
        assert_close(got, expected, f64=1e-12, f32=1e-4)
    v = normal(3, 3, 5)
    product = kernel_vector_product(apply, params, x, batch_size=2)(v)
    assert_close(product, jnp.einsum("abij,bj->ai", expected, v), f64=1e-12, f32=1e-4)


def test_both_sets_of_samples_may_be_of_different_types():
    apply, params = (lambda w, x: tanh(x @ w)), normal(1, 2)
    whole = jnp.array([[1, 2], [0, 3]])
    got = empirical_kernel(apply, params, whole, X)
    assert_close(got, empirical_kernel(apply, params, whole * 1.0, X), f64=1e-14, f32=1e-6)


@pytest.mark.long
def test_one_warning_names_the_parameters_that_cost_memory():
    params = {"tied": jnp.ones((40, 50)), "free": jnp.ones((50, 40)), "few": jnp.ones(40)}

    def apply(p, x):
        hidden = x @ p["tied"]
        return tanh(hidden + tanh(hidden @ p["free"] @ p["tied"])) @ p["tied"].T * p["few"]

    x = jnp.ones((300, 40))
    with pytest.warns(UserWarning) as seen:
        empirical_kernel(apply, params, x, outputs="trace")
    assert len(seen) == 1 and seen[0].filename == __file__
    size = 300 * 40 * (40 * 50 + 40) * jnp.ones(1).itemsize
    text = str(seen[0].message)
    assert text.startswith("params: the gradients of tied, few are formed sample by sample")
    assert f"{size / 1e9:.2g} GB" in text
    with warnings.catch_warnings(action="error"):
        empirical_kernel(apply, params, x[:50], outputs="trace", method="jacobian")
        empirical_kernel(apply, params, x)
        gradient_norms(apply, params, x, outputs="trace", batch_size=5)


def test_a_table_costs_no_memory_of_its_size():
    params = {"table": jnp.ones((20000, 64)), "w": jnp.ones((64, 1))}
    t = jnp.asarray(np.random.default_rng(0).integers(0, 20000, (100, 32)))

    def apply(p, t):
        return tanh(p["table"][t]).sum(1) @ p["w"]

    run = jax.jit(lambda p: empirical_kernel(apply, p, t))
    memory = run.lower(params).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 100e6 * jnp.ones(1).itemsize / 4
