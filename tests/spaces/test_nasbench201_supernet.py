"""The supernet of NAS-Bench-201, against numpy and against the networks at its corners."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, batch, finite_differences

import bilevel
from bilevel.spaces.nasbench201 import (
    all_networks,
    encode,
    genotypes,
    nasbench201_space,
    parameter_count,
)
from bilevel.spaces.nasbench201.genotype import (
    EDGES,
    PRIMITIVES,
    Genotype,
    draw_corner,
    genotype,
)
from bilevel.spaces.nasbench201.supernet import WeightedEdge, mixed_cell

KEY = jax.random.key(0)
SIZES = {"nor_conv_1x1": 1, "nor_conv_3x3": 3}


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def shifted(x, size):
    """The views of x [n, h, w, c] that a window sees, zeros around; and which pixels are inside."""
    reach, (_, h, w, _) = size // 2, x.shape
    padding = [(0, 0), (reach, reach), (reach, reach), (0, 0)]
    for a in range(size):
        for b in range(size):
            yield tuple(np.pad(y, padding)[:, a : a + h, b : b + w] for y in (x, np.ones_like(x)))


def operation(name, kernels, x):
    """By definition: ReLU, convolution, and batch normalisation without scale; mean of pixels."""
    if name == "none":
        return np.zeros_like(x)
    if name == "skip_connect":
        return x
    if name == "avg_pool_3x3":
        values, inside = zip(*shifted(x, 3), strict=True)
        return sum(values) / sum(inside)
    size = SIZES[name]
    kernel = kernels[name]["conv"]["kernel"].astype(float).reshape(size**2, *[x.shape[-1]] * 2)
    views = [view for view, _ in shifted(np.maximum(x, 0), size)]
    y = sum(view @ k for view, k in zip(views, kernel, strict=True))
    return (y - y.mean((0, 1, 2))) / np.sqrt(y.var((0, 1, 2)) + 1e-5)


@pytest.mark.parametrize("names", [PRIMITIVES, ("nor_conv_1x1", "none", "skip_connect")])
def test_a_mixed_cell_adds_weighted_operations_over_all_edges(names):
    x, alpha = normal(3, 5, 4, 2), np.random.default_rng(1).dirichlet(np.ones(len(names)), 6)
    shapes = jax.eval_shape(WeightedEdge(names).init, KEY, x, alpha[0])["params"]
    kernels = jax.tree.map(lambda leaf: normal(6, *leaf.shape, seed=2), shapes)
    nodes = [x, 0.0, 0.0, 0.0]
    for edge, (source, node) in enumerate(EDGES):
        own = jax.tree.map(lambda leaf, edge=edge: leaf[edge], kernels)
        for name, weight in zip(names, alpha[edge], strict=True):
            nodes[node] = nodes[node] + weight * operation(name, own, nodes[source])
    ours = jax.jit(functools.partial(mixed_cell, names))(
        kernels, jnp.asarray(alpha), jnp.asarray(x)
    )
    assert_close(ours, nodes[3])


def weights_of_networks(w, template):
    """The supernet's weights by the networks' names, the norms of the edges at scale 1, shift 0."""
    cells = len(template) // 3 - 1  # beside stem and head, two reductions

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
        kernels = w[f"cells_{stage}"][name][part]["kernel"]
        return kernels[cell, int(edge.removeprefix("edge_"))]

    return jax.tree_util.tree_map_with_path(leaf, template)


@pytest.mark.long
def test_at_a_corner_the_supernet_is_the_genotypes_network():
    size = {"classes": 4, "cells": 2, "channels": 2}
    space, networks = nasbench201_space(**size), all_networks(**size)
    w = space.init(KEY, batch(1, 8, 8, 1))
    # Scales and shifts of stem, reductions and head that are not where they start.
    w = jax.tree.map(lambda p: p + 0.1 * normal(*p.shape, seed=p.size), w)
    x = jnp.asarray(normal(3, 8, 8, 1))
    named = weights_of_networks(w, jax.eval_shape(lambda: networks.init(KEY, (8, 8, 1))))
    supernet, network = jax.jit(space.apply), jax.jit(networks.apply)
    mixed = [Genotype(PRIMITIVES[:0:-1] + PRIMITIVES[:2]), Genotype((*PRIMITIVES, "none"))]
    for actual in (*mixed, genotype(draw_corner(KEY)), genotypes()[0]):
        logits = supernet(w, jnp.asarray(space.one_hot(actual)), x)
        assert_close(logits, network(named, encode(actual), x), f64=1e-6)


@pytest.mark.long
def test_hypergradients_of_the_supernet_are_finite_differences():
    """Second order, exactly; in float64, along one random direction of alpha."""
    if jnp.zeros(()).dtype != jnp.float64:
        pytest.skip("finite differences want float64")
    # There are 3 x 3 convolutions outside the cells; on the edges they would take long to compile.
    names = ("none", "skip_connect", "nor_conv_1x1")
    space = nasbench201_space(names, classes=3, cells=1, channels=2)
    w = jax.tree.map(lambda a: a.astype(float), space.init(KEY, batch(1, 8, 8, 1)))
    x, labels = jnp.asarray(normal(2, 6, 8, 8, 1)), jnp.arange(6) % 3
    train, valid = ((part, labels) for part in x)
    alpha = jnp.asarray(np.random.default_rng(3).dirichlet(np.ones(3), 6))
    solver = bilevel.one_step(0.1)

    fn = jax.jit(bilevel.hypergradient(space.problem, solver, diagnostics=False))
    hyper, direction = fn(alpha, w, train, valid), normal(6, 3, seed=4)

    def along(t):  # the ReLUs' corners are nowhere near in so small a step
        return fn(alpha + 1e-3 * t * direction, w, train, valid).value

    truth = finite_differences(along, 0.0) / 1e-3
    assert_close(np.vdot(hyper.grad, direction), truth, f64=1e-6)
    np.testing.assert_array_equal(hyper.grad[:, 0], 0)  # `none` sends nothing


@pytest.mark.long
def test_the_supernet_is_the_same_without_remat_and_close_in_bfloat16():
    x, labels = jnp.asarray(normal(4, 8, 8, 1), jnp.float32), jnp.array([0, 1, 2, 0])
    options = {"classes": 3, "cells": 2, "channels": 2}
    plain, kept, half = (
        nasbench201_space(("skip_connect", "nor_conv_1x1"), **options, **more)
        for more in ({}, {"remat": False}, {"dtype": jnp.bfloat16})
    )
    w, alpha = plain.init(KEY, batch(1, 8, 8, 1)), plain.start()
    assert {leaf.dtype for leaf in jax.tree.leaves(w)} == {np.dtype("float32")}

    def gradients(space):
        return jax.jit(jax.grad(space.problem.outer, 1))(w, alpha, (x, labels))

    assert_close(gradients(kept), gradients(plain), f64=1e-5)
    logits = [jax.jit(space.apply)(w, alpha, x) for space in (half, plain)]
    assert logits[0].dtype == jnp.float32
    assert np.abs(logits[0] - logits[1]).max() > 0
    assert_close(*logits, f64=0.05, f32=0.05)


def test_parameters_are_the_genotypes_of_all_convolutions_without_norms():
    """Counted from the genotypes' own parameter counts, whose edges have norms."""
    w = jax.eval_shape(lambda: nasbench201_space().init(KEY, batch(1, 32, 32, 3)))
    outside, *convolutions = (
        parameter_count(Genotype((name,) * 6)) for name in ("none", "nor_conv_1x1", "nor_conv_3x3")
    )
    norms = 2 * 5 * 6 * (16 + 32 + 64)
    expected = outside + sum(count - outside - norms for count in convolutions)
    assert sum(leaf.size for leaf in jax.tree.leaves(w)) == expected


def test_drawn_corners_are_genotypes_and_all_alike():
    names = ("avg_pool_3x3", "none", "nor_conv_1x1")
    space = nasbench201_space(names)
    drawn = np.asarray(jax.vmap(space.draw)(jax.random.split(KEY, 3000)))
    np.testing.assert_array_equal(drawn.sum(-1), 1)
    # Truth: a third each; 4 standard errors of 3000 draws.
    np.testing.assert_allclose(drawn.mean(0), 1 / 3, atol=4 * (2 / 9 / 3000) ** 0.5)
    corner = drawn[0]
    parsed = space.discretize(corner)
    assert parsed.operations == tuple(np.array(names)[corner.argmax(1)])
    np.testing.assert_array_equal(space.one_hot(parsed), corner)
    np.testing.assert_array_equal(nasbench201_space().draw(KEY), draw_corner(KEY))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nasbench201_space(["conv_7x7"]), "operations: expected names among none, skip"),
        (lambda: nasbench201_space(["none"]), "operations: expected distinct names, one other"),
        (lambda: nasbench201_space(["skip_connect"] * 2), "operations: expected distinct"),
        (lambda: nasbench201_space(classes=1), "classes: expected at least 2, got 1"),
        (lambda: nasbench201_space(cells=0), "cells: expected at least 1, got 0"),
        (lambda: nasbench201_space().init(KEY, batch(1, 3, 32, 3)), "at least 4 x 4 pixels"),
        (
            lambda: nasbench201_space().apply({}, {}, jnp.zeros((5, 32, 32))),
            r"x: expected images \[n, h, w, c\]",
        ),
        (
            lambda: nasbench201_space(["none", "skip_connect"]).discretize(np.ones((6, 5))),
            r"alpha: expected \(6, 2\) finite weights, got \(6, 5\)",
        ),
        (
            lambda: nasbench201_space(["none", "skip_connect"]).one_hot(genotypes()[-1]),
            "architecture: expected 6 of none, skip_connect, got",
        ),
    ],
)
def test_bad_input_is_named_in_one_sentence(build, message):
    with pytest.raises(ValueError, match=message) as error:
        build()
    assert str(error.value).count(". ") == 0
