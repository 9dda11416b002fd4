"""Every space keeps the one contract; so does a user's own, with every strategy and the command."""

import math
import operator
import pathlib
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close

from bilevel import strategies
from bilevel.cli import main
from bilevel.discretize import diagnostics
from bilevel.spaces import Space, targets
from bilevel.spaces.activations import activation_space, sign_labels
from bilevel.spaces.darts import darts_space
from bilevel.spaces.features import feature_space
from bilevel.spaces.nasbench201 import nasbench201_space
from bilevel.spaces.skips import skip_space

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
RNG = np.random.default_rng(0)
X, IMAGES = RNG.normal(size=(6, 5)), RNG.normal(size=(6, 8, 8, 1))
LABELS = np.arange(6) % 3
SIGNS = 2 * np.eye(3)[LABELS] - 1
shape_of = operator.attrgetter("shape", "dtype")


def blocks(space):
    return space, (space.blocks(X), SIGNS)


OPERATIONS, SIZE = ("none", "skip_connect"), {"classes": 3, "cells": 1, "channels": 2}
SPACES = {
    "activations": lambda: (activation_space(["relu", "tanh"], width=8, classes=3), (X, SIGNS)),
    "kernels": lambda: blocks(activation_space(["relu", "leaky_relu"], width=math.inf, classes=3)),
    "features": lambda: blocks(feature_space([jnp.sin, jnp.cos, lambda x: x**2])),
    "skips": lambda: (skip_space(["relu", "tanh"], depth=4, width=4, classes=3), (X, LABELS)),
    "darts": lambda: (darts_space(OPERATIONS, **SIZE), (IMAGES, LABELS)),
    "nasbench201": lambda: (nasbench201_space(OPERATIONS, **SIZE), (IMAGES, LABELS)),
    "own": lambda: (runpy.run_path(str(EXAMPLES / "own_space.py"))["looks"](3), (IMAGES, LABELS)),
}


@pytest.fixture(scope="module", params=SPACES)
def case(request):
    return SPACES[request.param]()


def test_the_contract(case):
    space, batch = case
    assert isinstance(space, Space)
    alpha, w = space.start(), jax.jit(space.init)(jax.random.key(0), batch)
    for leaf in diagnostics.simplices(space.sets, alpha):
        assert leaf.shape[-1] == len(space.names)
        np.testing.assert_allclose(leaf, 1 / len(space.names), rtol=1e-6)
    assert all(leaf.dtype == jnp.result_type(float) for leaf in jax.tree.leaves(alpha))
    # The weights depend on the shapes of the batch only.
    shapes = jax.eval_shape(space.init, jax.random.key(0), batch)
    assert jax.tree.map(shape_of, w) == jax.tree.map(shape_of, shapes)
    assert space.predict(jax.jit(space.apply)(w, alpha, batch[0])).shape == LABELS.shape
    for loss in space.problem.lower, space.problem.outer:
        slopes = jax.jit(jax.grad(loss, (0, 1)))(w, alpha, batch)
        assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(slopes))


@pytest.mark.long
def test_corners_and_architectures_are_the_same_thing(case):
    space, _ = case
    assert str(space.discretize(space.start()))
    for key in jax.random.split(jax.random.key(0), 5):
        corner = jax.jit(space.draw)(key)
        assert jax.tree.map(shape_of, corner) == jax.tree.map(shape_of, space.start())
        for leaf in diagnostics.simplices(space.sets, corner):
            assert np.isin(leaf, (0, 1)).all()
        architecture = space.discretize(corner)
        again = space.one_hot(architecture)
        assert space.discretize(again) == architecture
        jax.tree.map(np.testing.assert_array_equal, corner, again)
    drawn = (space.draw(key) for key in jax.random.split(jax.random.key(0), 20))
    assert len({str(space.discretize(corner)) for corner in drawn}) > 1


@pytest.mark.long
@pytest.mark.parametrize("name", ["darts", "gaea", "joint", "unrolled", "weight_sharing"])
def test_a_users_space_is_searched_by_every_strategy(name):
    space, batch = SPACES["own"]()
    options = {"weight_optimizer": optax.sgd(0.1, momentum=0.9), "batch_size": 3}
    if name != "weight_sharing":
        options["alpha_optimizer"] = 0.3
    plan, key = getattr(strategies, name)(space, **options), jax.random.key(0)
    w = space.init(key, batch)
    result = strategies.run(plan, space.start(), w, batch, batch, steps=3, key=key, progress=False)
    assert_close(result.alpha.sum(-1), np.ones(2), f32=1e-5)
    assert bool((result.w["last"] != w["last"]).any())
    assert set(space.discretize(result.alpha)) <= set(space.names)


@pytest.mark.long
def test_a_users_space_goes_through_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    small = ("--steps", "4", "--epochs", "1", "--batch-size", "10", "--train", "30", "--test", "40")
    line = ["search-own", "--space", "own_space:looks", *small, "--valid", "30", "--random", "1"]
    assert main([*line, "--strategy", "gaea", "--out", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out
    for text in ("search", "random", "supernet", "found: ('", "Hessian", "no estimate"):
        assert text in printed
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"result.json", "arrays.npz", "search.png", "networks.jsonl"} <= files


@pytest.mark.parametrize("dtype", [int, np.uint8, np.uint32])
def test_signs_are_one_versus_rest_and_predictions_undo_them(dtype):
    labels = np.array([0, 1, 0], dtype)
    for sign in sign_labels, jax.jit(sign_labels, static_argnums=1):
        np.testing.assert_array_equal(sign(labels, 2), [-1, 1, -1])
        np.testing.assert_array_equal(sign(labels, 3), [[1, -1, -1], [-1, 1, -1], [1, -1, -1]])
        for classes in (2, 300):
            np.testing.assert_array_equal(targets.predict_labels(sign(labels, classes)), labels)


def test_labels_of_bytes_and_of_halves():
    bytes_ = jnp.array([0, 255], jnp.uint8)
    assert_close(targets.label_losses(jnp.zeros((2, 256)), bytes_), np.log([256, 256]), f32=1e-6)
    assert jnp.isnan(targets.label_losses(jnp.array([3.0]), jnp.array([1.5]))).all()


@pytest.mark.parametrize("name", ["hinge", "logistic"])
def test_labels_0_and_1_have_no_margin(name):
    loss = targets.OUTER_LOSSES[name]
    losses = loss(jnp.ones(3), jnp.array([0.0, 1.0, -1.0]))
    assert jnp.isnan(losses[0]) and jnp.isfinite(losses[1:]).all()
    assert jnp.isnan(jax.grad(loss)(1.0, 0.0))
