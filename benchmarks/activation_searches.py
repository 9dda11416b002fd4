"""The searches of `bilevel search`, used by `argmax_trust.py` and `search_error.py`."""

import jax
import jax.numpy as jnp
import optax

import bilevel
import bilevel.data
from bilevel import LowerSolver
from bilevel.spaces import activation_space
from bilevel.strategies.activation_search import ActivationTask, set_up

NAMES = ("relu", "leaky_relu", "sigmoid", "tanh", "swish", "gelu")
STEPS, INNER_STEPS = 20, 50  # steps of alpha and of the weights


def task_of(
    data="digits", *, seeds=1, seed=0, outer="hinge", width=512, train=300, valid=300, test=2000
) -> ActivationTask:
    """Return a task with separate rows and initial weights for each seed."""
    space = activation_space(NAMES, width=width, classes=10, outer=outer)
    keys = [jax.random.split(key) for key in jax.random.split(jax.random.key(seed), seeds)]
    sizes = {"train": train, "valid": valid, "test": test}
    rows = bilevel.data.draw_splits(data, [of_rows for of_rows, _ in keys], **sizes)
    return set_up(space, rows, [of_weights for _, of_weights in keys], classes=10)


def search(task: ActivationTask, solver: LowerSolver, steps=STEPS) -> jax.Array:
    """Return the alphas after a search from the uniform alpha: [seeds, h]."""
    seeds, h = len(task.w0), len(task.space.names)
    adam = optax.chain(bilevel.tangent(), optax.adam(0.3), bilevel.exponentiate())
    start = jnp.full((seeds, h), 1 / h), task.w0, task.train, task.valid
    problem = bilevel.stack_problems(task.space.problem)
    return bilevel.search(problem, solver, adam, *start, steps=steps, progress=False).alpha
