"""What ``bilevel search`` says of its hypergradient's error, against training to the end."""

import jax.numpy as jnp
import numpy as np

from bilevel.cli.search import Search, hypergradient, hypergradient_error, setup

SMALL = Search(
    activations=("relu", "tanh"), inner_steps=12, width=64, train=40, valid=40, seeds=3, seed=1
)


def test_the_error_of_the_hypergradient_is_known_to_a_factor():
    task, alpha = setup(SMALL), jnp.array([[0.5, 0.5], [0.9, 0.1], [0.3, 0.7]])
    # Truth: training until it interpolates, thirty times as long.
    truth = hypergradient(task, task.space.solver(task.curvatures, 360), alpha).grad
    for backprop in (None, 0):
        solver = task.space.solver(task.curvatures, SMALL.inner_steps, backprop=backprop)
        claimed = hypergradient_error(task._replace(solver=solver), SMALL, alpha)
        error = np.linalg.norm(hypergradient(task, solver, alpha).grad - truth, axis=-1)
        ratio = np.array(claimed["error"]) / error
        assert (ratio > 1 / 3).all() and (ratio < 10).all(), ratio
        np.testing.assert_allclose(claimed["norm"], np.linalg.norm(truth, axis=-1), rtol=0.5)
