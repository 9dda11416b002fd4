"""All networks of NAS-Bench-201 as one function, compared with a network written with ``lax``."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import assert_close
from jax.flatten_util import ravel_pytree

import ntk
from bilevel.nets.layers import Standardize
from bilevel.spaces.nasbench201 import all_networks, encode, parameter_count
from bilevel.spaces.nasbench201._all_networks import _edge
from bilevel.spaces.nasbench201.genotype import EDGES, PRIMITIVES, parse_genotype
from bilevel.spaces.nasbench201.network import Edge, nasbench201_network

KEY = jax.random.key(0)
NETWORKS = all_networks(classes=3, cells=1, channels=2)
X = jax.random.normal(jax.random.key(1), (4, 8, 8, 3))
Y = jnp.array([0, 1, 2, 1])
ALL = "|avg_pool_3x3~0|+|nor_conv_3x3~0|nor_conv_1x1~1|+|skip_connect~0|none~1|nor_conv_3x3~2|"
CELLS = {
    "every operation": ALL,
    "one that ends nowhere": ALL.replace("|nor_conv_3x3~2|", "|none~2|"),
    "dead": "|none~0|+|none~0|nor_conv_3x3~1|+|none~0|nor_conv_1x1~1|nor_conv_3x3~2|",
    "identity": "|skip_connect~0|+|none~0|skip_connect~1|+|skip_connect~0|none~1|skip_connect~2|",
}
GENOTYPES = {name: parse_genotype(text) for name, text in CELLS.items()}


@functools.cache
def weights():
    """With scales and biases that are not 1 and 0."""
    w = NETWORKS.init(KEY, X.shape[1:])
    flat, unravel = ravel_pytree(w)
    moved = unravel(flat + 0.1 * jax.random.normal(KEY, flat.shape, flat.dtype))
    return jax.tree.map(lambda leaf: leaf.astype(X.dtype), moved)


def by_hand(w, genotype, x):
    """The network, operation by operation, without the package's convolutions."""

    def norm(w, x):
        mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
        return w["scale"] * (x - mean) / jnp.sqrt(variance + 1e-5) + w["bias"]

    def conv(w, x, stride=1):
        axes, p = ("NHWC", "HWIO", "NHWC"), w["kernel"].shape[0] // 2
        options = {"padding": [(p, p), (p, p)], "dimension_numbers": axes}
        return jax.lax.conv_general_dilated(x, w["kernel"], (stride, stride), **options)

    def block(w, x, stride=1):
        return norm(w["norm"], conv(w["conv"], jnp.maximum(x, 0), stride))

    def mean(x, size, stride, padding):
        def total(x):
            pads = [(0, 0), (padding, padding), (padding, padding), (0, 0)]
            shape, strides = (1, size, size, 1), (1, stride, stride, 1)
            return jax.lax.reduce_window(x, 0.0, jax.lax.add, shape, strides, pads)

        return total(x) / total(jnp.ones_like(x))

    operations = {
        "none": lambda w, x: 0 * x,
        "skip_connect": lambda w, x: x,
        "nor_conv_1x1": lambda w, x: block(w["nor_conv_1x1"], x),
        "nor_conv_3x3": lambda w, x: block(w["nor_conv_3x3"], x),
        "avg_pool_3x3": lambda w, x: mean(x, 3, 1, 1),
    }
    x = norm(w["stem"]["norm"], conv(w["stem"]["conv"], x))
    for stage in range(3):
        if stage:
            r = w[f"reduction_{stage}"]
            y = block(r["second"], block(r["first"], x, 2))
            x = y + conv(r["shortcut"], mean(x, 2, 2, 0))
        nodes = [x, 0.0, 0.0, 0.0]
        edges = zip(EDGES, genotype.operations, strict=True)
        for e, ((source, node), name) in enumerate(edges):
            edge = w[f"cell_{stage}"][f"edge_{e}"]
            nodes[node] += operations[name](edge, nodes[source] + 0 * x)
        x = nodes[3]
    x = jnp.maximum(norm(w["head"]["norm"], x), 0).mean((1, 2))
    return x @ w["head"]["classifier"]["kernel"] + w["head"]["classifier"]["bias"]


def loss(logits):
    return optax.softmax_cross_entropy_with_integer_labels(logits, Y).mean()


@functools.cache
def array_form():
    """Logits and gradient, traced once for all genotypes."""
    return jax.jit(
        lambda w, which: (
            NETWORKS.apply(w, which, X),
            jax.grad(lambda w: loss(NETWORKS.apply(w, which, X)))(w),
        )
    )


@pytest.mark.long
@pytest.mark.parametrize("name", GENOTYPES)
def test_both_forms_and_their_gradients_are_those_of_the_network_by_hand(name):
    w, genotype = weights(), GENOTYPES[name]
    of_array = array_form()(w, encode(genotype))
    expected = jax.jit(
        lambda w: (by_hand(w, genotype, X), jax.grad(lambda w: loss(by_hand(w, genotype, X)))(w))
    )(w)
    assert_close(of_array, expected)
    own = NETWORKS.select(w, genotype)
    assert_close(jax.jit(lambda w: NETWORKS.apply(w, genotype, X))(own), expected[0])


@pytest.mark.long
@pytest.mark.parametrize("name", PRIMITIVES)
def test_an_edges_hessian_vector_product_is_the_operations(name):
    """Forward over reverse, through the derivative rule of the switch."""
    w = weights()["cell_0"]["edge_0"]
    x = jax.random.normal(KEY, (3, 4, 4, 2), X.dtype)
    v = jax.tree.map(jnp.ones_like, (w, x))

    def product(edge):
        gradient = jax.grad(lambda w, x: jnp.sum(jnp.sin(edge(w, x))), argnums=(0, 1))
        return jax.jit(lambda *at: jax.jvp(gradient, at, v)[1])(w, x)

    def alone(w, x):
        if name == "none":
            return 0 * x
        return Edge(name, functools.partial(Standardize, affine=True)).apply({"params": w}, x)

    which = jnp.array(PRIMITIVES.index(name))
    assert_close(product(functools.partial(_edge, True, which)), product(alone))


@pytest.mark.long
def test_a_score_of_layers_is_the_same_for_both_forms():
    genotype, w = GENOTYPES["one that ends nowhere"], weights()

    def score(g):
        def run(w):
            return ntk.scores.wrcor(None, lambda w, x: NETWORKS.apply(w, g, x), w, (X, Y))

        return jax.jit(run)(NETWORKS.select(w, g))

    assert_close(score(encode(genotype)), score(genotype))
    assert abs(score(genotype)) > 0


@pytest.mark.long
def test_parameters_of_the_published_network_are_counted_exactly():
    for genotype in GENOTYPES.values():
        network = nasbench201_network(genotype)
        w, _ = jax.eval_shape(lambda network=network: network.init(KEY, (32, 32, 3)))
        assert sum(leaf.size for leaf in jax.tree.leaves(w)) == parameter_count(genotype)


@pytest.mark.long
def test_weights_selected_by_an_array_are_0_elsewhere():
    w, genotype = weights(), GENOTYPES["every operation"]
    masked = NETWORKS.select(w, encode(genotype))
    own = NETWORKS.select(w, genotype)
    total = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(masked))
    assert_close(total, sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(own)))
    assert jax.tree.structure(masked) == jax.tree.structure(w)


@pytest.mark.long
def test_the_training_network_has_the_loss_of_the_shared_network():
    genotype = GENOTYPES["every operation"]
    network = nasbench201_network(genotype, classes=3, cells=1, channels=2)
    own = NETWORKS.select(weights(), genotype)
    _, averages = network.init(KEY, X.shape[1:])
    value, new = network.loss(own, averages, (X, Y), KEY)
    assert_close(value, loss(NETWORKS.apply(own, genotype, X)))
    stem = jax.lax.conv_general_dilated(
        X, own["stem"]["conv"]["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    # Averages are float32, whatever the images are.
    assert_close(new["stem"]["norm"]["mean"], 0.1 * stem.mean((0, 1, 2)), f64=1e-6)
