"""Activation searches of several seeds: verdicts on the argmax, and the hypergradient's error."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import batch

from bilevel import data
from bilevel.spaces.activations import activation_space, unit_inputs
from bilevel.strategies.activation_search import (
    ActivationTask,
    hypergradient_error,
    judge_argmax,
    seed_hypergradients,
    set_up,
    solver,
    train_weights,
)


@pytest.mark.long
def test_small_outputs_that_are_wrong_are_not_to_be_trusted():
    """Their squared loss is below that of large right ones, so they won at the shared weights."""
    space = activation_space(["relu", "sigmoid", "tanh"], width=16, outer="hinge")
    keys = jax.random.split(jax.random.key(0), 2)
    w = 8 * space.init(keys[0], batch(1, 5))[None]
    x = unit_inputs(jax.random.normal(keys[1], (200, 5)))[None]
    alone = [(w, jnp.eye(3)[i][None]) for i in range(3)]
    y = jnp.sign(space.apply(w[0], jnp.eye(3)[0], x[0]))[None]  # ReLU is right, sigmoid small
    task = ActivationTask(space, w, jnp.ones((1, 3)), *[(x, y)] * 3)
    mixture = jnp.array([[0.2, 0.5, 0.3]]), 0.01 * w
    networks = [alone[0], (-0.01 * w, jnp.eye(3)[1][None]), alone[2]]
    verdict = judge_argmax(task, *mixture, networks)
    assert verdict.choice.tolist() == [1] and verdict.discretise.tolist() == [False]
    assert verdict.by["loss"].best.tolist() == verdict.by["error"].best.tolist() == [0]
    squared = [float(((space.apply(v[0], a[0], x[0]) - y[0]) ** 2).mean()) for v, a in networks]
    assert squared[1] < squared[0]
    # A diverged network ranks last.
    broken = [alone[0], (jnp.nan * w, jnp.eye(3)[1][None]), alone[2]]
    verdict = judge_argmax(task, *mixture, broken)
    assert verdict.discretise.tolist() == [False] and verdict.by["loss"].rank.tolist() == [3]
    # Its outputs are wrong for every class.
    one_class = ActivationTask(space, w, jnp.ones((1, 3)), *[(x, -jnp.ones_like(y))] * 3)
    verdict = judge_argmax(one_class, *mixture, broken)
    assert verdict.by["error"].rank.tolist() == [3] and verdict.by["error"].best.tolist() != [1]


@pytest.mark.long
def test_seeds_side_by_side_are_trained_as_they_would_be_alone():
    keys = list(jax.random.split(jax.random.key(1), 2))
    rows = data.draw_splits("digits", keys, train=30, valid=30, test=30)
    space = activation_space(["relu", "tanh"], width=32, classes=10)
    together = set_up(space, rows, keys, classes=10)
    alpha = jnp.array([[0.7, 0.3], [0.2, 0.8]])
    w = train_weights(together, solver(together, 8), alpha)
    # A given rate is the step size of SGD with Nesterov's momentum, for every seed.
    lower = jax.vmap(space.problem.lower)
    sgd = optax.sgd(0.05, 0.9, nesterov=True)
    own, state = together.w0, sgd.init(together.w0)
    for _ in range(8):
        grad = jax.grad(lambda w: lower(w, alpha, together.train).sum())(own)
        updates, state = sgd.update(grad, state)
        own = optax.apply_updates(own, updates)
    given = train_weights(together, solver(together, 8, rate=0.05), alpha)
    np.testing.assert_allclose(given, own, rtol=1e-5, atol=1e-6)
    for seed in range(2):
        alone = set_up(space, rows[seed : seed + 1], keys[seed : seed + 1], classes=10)
        single = train_weights(alone, solver(alone, 8), alpha[seed : seed + 1])
        np.testing.assert_allclose(w[seed], single[0], rtol=1e-6, atol=1e-7)


@pytest.mark.long
def test_the_error_of_the_hypergradient_is_known_to_a_factor():
    keys = [jax.random.split(key) for key in jax.random.split(jax.random.key(1), 3)]
    rows = data.draw_splits("digits", [key for key, _ in keys], train=40, valid=40, test=40)
    space = activation_space(["relu", "tanh"], width=64, classes=10)
    task = set_up(space, rows, [key for _, key in keys], classes=10)
    alpha = jnp.array([[0.5, 0.5], [0.9, 0.1], [0.3, 0.7]])
    # Truth: training until it interpolates, thirty times as long.
    truth = seed_hypergradients(task, solver(task, 360), alpha).grad
    for kind in ("unrolled", "first-order"):
        way, longer = solver(task, 12, kind), solver(task, 48)
        claimed = hypergradient_error(task, way, longer, alpha)
        error = np.linalg.norm(seed_hypergradients(task, way, alpha).grad - truth, axis=-1)
        ratio = claimed.error / error
        assert (ratio > 1 / 3).all() and (ratio < 10).all(), ratio
        np.testing.assert_allclose(claimed.norm, np.linalg.norm(truth, axis=-1), rtol=0.5)
