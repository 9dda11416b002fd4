"""What ``bilevel search`` says of its hypergradient's error, against training to the end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bilevel import data
from bilevel.spaces.activations import activation_space
from bilevel.strategies.activation_search import (
    hypergradient_error,
    seed_hypergradients,
    set_up,
    solver,
)


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
