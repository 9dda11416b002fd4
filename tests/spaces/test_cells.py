"""The supernets of cells, DARTS and NAS-Bench-201: their precision, memory and derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, batch, finite_differences, normal

import bilevel
from bilevel.spaces.darts import darts_space
from bilevel.spaces.nasbench201 import nasbench201_space

key = functools.partial(jax.random.key, 0)
SPACES = {"darts": darts_space, "nasbench201": nasbench201_space}
SIZE = {"classes": 3, "cells": 1, "channels": 2}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "operation"), [("darts", "max_pool_3x3"), ("nasbench201", "nor_conv_1x1")]
)
def test_the_supernet_is_the_same_without_remat_and_close_in_bfloat16(name, operation):
    x, labels = jnp.asarray(normal(0, 4, 8, 8, 1), jnp.float32), jnp.array([0, 1, 2, 0])
    make = functools.partial(SPACES[name], ("none", "skip_connect", operation), **SIZE)
    plain, stored, half = make(), make(remat=False), make(dtype=jnp.bfloat16)
    w, alpha = plain.init(key(), batch(1, 8, 8, 1)), plain.start()
    assert {leaf.dtype for leaf in jax.tree.leaves(w)} == {np.dtype("float32")}

    def gradients(space):
        return jax.jit(jax.grad(space.problem.lower, (0, 1)))(w, alpha, (x, labels))

    reference = gradients(plain)
    of_alpha = reference[1]["reduce"] if name == "darts" else reference[1]
    assert np.abs(of_alpha[:, 0]).max() == 0  # `none` sends nothing
    assert np.abs(of_alpha[:, 1:]).min() > 0
    assert_close(gradients(stored), reference, f64=1e-5)
    logits = [jax.jit(space.apply)(w, alpha, x) for space in (half, plain)]
    assert logits[0].dtype == jnp.float32
    assert np.abs(logits[0] - logits[1]).max() > 0
    assert_close(*logits, f64=0.05, f32=0.05)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "operation", "side"),
    [("darts", "max_pool_3x3", 4), ("nasbench201", "nor_conv_1x1", 8)],
)
def test_hypergradients_of_the_supernet_are_finite_differences(name, operation, side):
    if jnp.zeros(()).dtype != jnp.float64:
        pytest.skip("finite differences want float64")
    space = SPACES[name](("none", "skip_connect", operation), **SIZE)
    w = jax.tree.map(lambda a: a.astype(float), space.init(key(), batch(1, side, side, 1)))
    x, labels = normal(0, 2, 6, side, side, 1), jnp.arange(6) % 3
    train, valid = ((part, labels) for part in x)
    rng = np.random.default_rng(3)
    alpha = jax.tree.map(lambda a: jnp.asarray(rng.dirichlet(np.ones(3), len(a))), space.start())
    direction = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape)), alpha)

    fn = jax.jit(bilevel.hypergradient(space.problem, bilevel.one_step(0.1), diagnostics=False))
    hyper = fn(alpha, w, train, valid)

    def along(t):  # the ReLUs' corners are nowhere near in so small a step
        moved = jax.tree.map(lambda a, d: a + 1e-3 * t * d, alpha, direction)
        return fn(moved, w, train, valid).value

    def slope(gradient):
        return sum(map(np.vdot, jax.tree.leaves(gradient), jax.tree.leaves(direction)))

    truth = finite_differences(along, 0.0) / 1e-3
    assert_close(slope(hyper.grad), truth, f64=1e-6)
    first_order = jax.jit(jax.grad(space.problem.outer, 1))(hyper.w, alpha, valid)
    assert abs(slope(first_order) - truth) > 1e-3 * abs(truth)
