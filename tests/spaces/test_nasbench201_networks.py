"""All networks of NAS-Bench-201 and their supernet, compared with a network by ``lax``."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, batch, normal
from jax.flatten_util import ravel_pytree

import ntk
from bilevel.nets.layers import Standardize
from bilevel.spaces.nasbench201 import all_networks, genotypes, nasbench201_space, parameter_count
from bilevel.spaces.nasbench201.genotype import EDGES, PRIMITIVES, Genotype, encode, parse_genotype
from bilevel.spaces.nasbench201.network import Edge, _edge, nasbench201_network

key = functools.partial(jax.random.key, 0)
NETWORKS = all_networks(classes=3, cells=1, channels=2)
X = np.random.default_rng(1).normal(size=(4, 8, 8, 3)).astype(jnp.result_type(float))
Y = np.array([0, 1, 2, 1])
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
    flat, unravel = ravel_pytree(NETWORKS.init(key(), X.shape[1:]))
    moved = unravel(flat + 0.1 * jax.random.normal(key(), flat.shape, flat.dtype))
    return jax.tree.map(lambda leaf: leaf.astype(X.dtype), moved)


def by_hand(w, genotype, x):
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
            x = block(r["second"], block(r["first"], x, 2)) + conv(r["shortcut"], mean(x, 2, 2, 0))
        nodes = [x, 0.0, 0.0, 0.0]
        edges = zip(EDGES, genotype.operations, strict=True)
        for e, ((source, node), name) in enumerate(edges):
            nodes[node] += operations[name](w[f"cell_{stage}"][f"edge_{e}"], nodes[source] + 0 * x)
        x = nodes[3]
    x = jnp.maximum(norm(w["head"]["norm"], x), 0).mean((1, 2))
    return x @ w["head"]["classifier"]["kernel"] + w["head"]["classifier"]["bias"]


def loss(logits):
    return optax.softmax_cross_entropy_with_integer_labels(logits, Y).mean()


def with_gradient(apply):
    """Logits of X, and the gradient of their loss."""
    return jax.jit(lambda w, g: (apply(w, g, X), jax.grad(lambda w: loss(apply(w, g, X)))(w)))


ARRAY_FORM = with_gradient(NETWORKS.apply)  # traced once for all genotypes


@pytest.mark.long
@pytest.mark.parametrize("name", GENOTYPES)
def test_both_forms_and_their_gradients_are_those_of_the_network_by_hand(name):
    w, genotype = weights(), GENOTYPES[name]
    expected = with_gradient(lambda w, _, x: by_hand(w, genotype, x))(w, None)
    assert_close(ARRAY_FORM(w, encode(genotype)), expected)
    own = NETWORKS.select(w, genotype)
    assert_close(jax.jit(lambda w: NETWORKS.apply(w, genotype, X))(own), expected[0])


@pytest.mark.long
def test_edges_that_are_computed_again_have_the_same_gradients(monkeypatch):
    w, cell = weights(), encode(GENOTYPES["every operation"])

    def program():
        return str(jax.make_jaxpr(with_gradient(NETWORKS.apply))(w, cell))

    assert "SaveOnlyTheseNames" in program()
    monkeypatch.setattr("bilevel.spaces.nasbench201.network._MOST_STORED", 0)
    assert "SaveOnlyTheseNames" not in program()
    assert_close(with_gradient(NETWORKS.apply)(w, cell), ARRAY_FORM(w, cell))


@pytest.mark.long
@pytest.mark.parametrize("name", PRIMITIVES)
def test_an_edges_hessian_vector_product_is_the_operations(name):
    """Forward over reverse, through the derivative rule of the switch."""
    w = weights()["cell_0"]["edge_0"]
    x = jax.random.normal(key(), (3, 4, 4, 2), X.dtype)
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
        run = jax.jit(ntk.scores.wrcor, static_argnums=(0, 1))
        return run(None, lambda w, x: NETWORKS.apply(w, g, x), NETWORKS.select(w, g), (X, Y))

    assert_close(score(encode(genotype)), score(genotype))
    assert abs(score(genotype)) > 0


@pytest.mark.long
def test_parameters_of_the_published_network_are_counted_exactly():
    for genotype in GENOTYPES.values():
        network = nasbench201_network(genotype)
        w, _ = jax.eval_shape(lambda network=network: network.init(key(), (32, 32, 3)))
        assert sum(leaf.size for leaf in jax.tree.leaves(w)) == parameter_count(genotype)


@pytest.mark.long
def test_the_training_network_has_the_loss_of_the_shared_network():
    genotype = GENOTYPES["every operation"]
    network = nasbench201_network(genotype, classes=3, cells=1, channels=2)
    own = NETWORKS.select(weights(), genotype)
    _, averages = network.init(key(), X.shape[1:])
    value, new = network.loss(own, averages, (X, Y), key())
    assert_close(value, loss(NETWORKS.apply(own, genotype, X)))
    arguments = X, own["stem"]["conv"]["kernel"], (1, 1), "SAME"
    stem = jax.lax.conv_general_dilated(*arguments, dimension_numbers=("NHWC", "HWIO", "NHWC"))
    # Averages are float32, whatever the images are.
    assert_close(new["stem"]["norm"]["mean"], 0.1 * stem.mean((0, 1, 2)), f64=1e-6)


def weights_of_networks(w, template):
    """The supernet's weights by the networks' names, the norms of the edges at scale 1, shift 0."""
    cells = len(template) // 3 - 1  # without stem, head and two reductions

    def leaf(path, empty):
        first, *rest = [key.key for key in path]
        if not first.startswith("cell_"):
            branch = w[first]
            for name in rest:
                branch = branch[name]
            return branch
        edge, name, part, _ = rest
        if part == "norm":
            return jnp.full(empty.shape, float(rest[-1] == "scale"))
        stage, cell = divmod(int(first.removeprefix("cell_")), cells)
        return w[f"cells_{stage}"][name][part]["kernel"][cell, int(edge.removeprefix("edge_"))]

    return jax.tree_util.tree_map_with_path(leaf, template)


@pytest.mark.long
def test_at_a_corner_the_supernet_is_the_genotypes_network():
    size = {"classes": 4, "cells": 2, "channels": 2}
    space, networks = nasbench201_space(**size), all_networks(**size)
    w = space.init(key(), batch(1, 8, 8, 1))
    w = jax.tree.map(lambda p: p + 0.1 * normal(p.size, *p.shape), w)
    x = normal(0, 3, 8, 8, 1)
    named = weights_of_networks(w, jax.eval_shape(lambda: networks.init(key(), (8, 8, 1))))
    supernet, network = jax.jit(space.apply), jax.jit(networks.apply)
    mixed = [Genotype(PRIMITIVES[:0:-1] + PRIMITIVES[:2]), Genotype((*PRIMITIVES, "none"))]
    for actual in (*mixed, space.discretize(space.draw(key())), genotypes()[0]):
        logits = supernet(w, jnp.asarray(space.one_hot(actual)), x)
        assert_close(logits, network(named, encode(actual), x), f64=1e-6)


def test_parameters_are_the_genotypes_of_all_convolutions_without_norms():
    """Counted from the genotypes' own parameter counts, which include norms."""
    w = jax.eval_shape(lambda: nasbench201_space().init(key(), batch(1, 32, 32, 3)))
    names = "none", "nor_conv_1x1", "nor_conv_3x3"
    outside, *convolutions = (parameter_count(Genotype((name,) * 6)) for name in names)
    norms = 2 * 5 * 6 * (16 + 32 + 64)
    expected = outside + sum(count - outside - norms for count in convolutions)
    assert sum(leaf.size for leaf in jax.tree.leaves(w)) == expected


def test_drawn_vertices_are_uniform_genotypes():
    names = ("avg_pool_3x3", "none", "nor_conv_1x1")
    space = nasbench201_space(names)
    drawn = np.asarray(jax.vmap(space.draw)(jax.random.split(key(), 3000)))
    np.testing.assert_array_equal(drawn.sum(-1), 1)
    # Truth: a third each; 4 standard errors of 3000 draws.
    np.testing.assert_allclose(drawn.mean(0), 1 / 3, atol=4 * (2 / 9 / 3000) ** 0.5)
    corner = drawn[0]
    parsed = space.discretize(corner)
    assert parsed.operations == tuple(np.array(names)[corner.argmax(1)])
    np.testing.assert_array_equal(space.one_hot(parsed), corner)
    equal = space.discretize(np.full((6, 3), 0.2))  # the first wins, and `none` may
    assert equal.operations == ("avg_pool_3x3",) * 6
    assert space.discretize(np.eye(3)[[1] * 6]).operations == ("none",) * 6
