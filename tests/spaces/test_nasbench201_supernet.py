"""The supernet of NAS-Bench-201, compared with the networks at its vertices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, batch

from bilevel.spaces.nasbench201 import (
    all_networks,
    encode,
    genotypes,
    nasbench201_space,
    parameter_count,
)
from bilevel.spaces.nasbench201.genotype import PRIMITIVES, Genotype

KEY = jax.random.key(0)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


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
        kernels = w[f"cells_{stage}"][name][part]["kernel"]
        return kernels[cell, int(edge.removeprefix("edge_"))]

    return jax.tree_util.tree_map_with_path(leaf, template)


@pytest.mark.long
def test_at_a_corner_the_supernet_is_the_genotypes_network():
    size = {"classes": 4, "cells": 2, "channels": 2}
    space, networks = nasbench201_space(**size), all_networks(**size)
    w = space.init(KEY, batch(1, 8, 8, 1))
    w = jax.tree.map(lambda p: p + 0.1 * normal(*p.shape, seed=p.size), w)
    x = jnp.asarray(normal(3, 8, 8, 1))
    named = weights_of_networks(w, jax.eval_shape(lambda: networks.init(KEY, (8, 8, 1))))
    supernet, network = jax.jit(space.apply), jax.jit(networks.apply)
    mixed = [Genotype(PRIMITIVES[:0:-1] + PRIMITIVES[:2]), Genotype((*PRIMITIVES, "none"))]
    for actual in (*mixed, space.discretize(space.draw(KEY)), genotypes()[0]):
        logits = supernet(w, jnp.asarray(space.one_hot(actual)), x)
        assert_close(logits, network(named, encode(actual), x), f64=1e-6)


def test_parameters_are_the_genotypes_of_all_convolutions_without_norms():
    """Counted from the genotypes' own parameter counts, which include norms."""
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
    equal = space.discretize(np.full((6, 3), 0.2))  # the first wins, and `none` may
    assert equal.operations == ("avg_pool_3x3",) * 6
    assert space.discretize(np.eye(3)[[1] * 6]).operations == ("none",) * 6
