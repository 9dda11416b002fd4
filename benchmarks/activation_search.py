"""Searches of activations, several seeds side by side, as `bilevel search` sets them up.

What `argmax_trust.py` and `search_error.py` share: the task of the seeds, the search, networks
trained at an alpha, and hypergradients there. Leading axis everywhere: seeds.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

import bilevel
import bilevel.data
from bilevel.protocols import LowerSolver
from bilevel.spaces.activations import ActivationSpace, activation_space, sign_labels, unit_inputs

NAMES = ("relu", "leaky_relu", "sigmoid", "tanh", "swish", "gelu")
STEPS, INNER_STEPS = 20, 50  # of alpha, of the weights
SOLVERS = ("unrolled", "truncated", "first-order", "implicit")


class Task(NamedTuple):
    space: ActivationSpace
    w0: jax.Array  # [seeds, width, inputs]
    curvatures: jax.Array  # [seeds, h]
    train: tuple[jax.Array, jax.Array]  # [seeds, n, inputs], [seeds, n, classes]
    valid: tuple[jax.Array, jax.Array]
    test: tuple[jax.Array, jax.Array]


def task_of(
    data="digits", *, seeds=1, seed=0, outer="hinge", width=512, train=300, valid=300, test=2000
) -> Task:
    """Rows and initial weights of its own for every seed."""
    space = activation_space(NAMES, width=width, classes=10, outer=outer)
    keys = jax.random.split(jax.random.key(seed), seeds)
    keys = [jax.random.split(key) for key in keys]  # of the rows, of the weights
    drawn = bilevel.data.samples(data, [k for k, _ in keys], train=train, valid=valid, test=test)
    parts, weights = [], []
    for (_, key), rows in zip(keys, drawn, strict=True):
        xs, ys = unit_inputs(*(x for x, _ in rows)), [sign_labels(y, 10) for _, y in rows]
        parts.append(tuple(zip(xs, ys, strict=True)))
        weights.append(space.init(key, parts[-1][0]))
    train, valid, test = jax.tree.map(lambda *x: jnp.stack(x), *parts)
    w0 = jnp.stack(weights)
    return Task(space, w0, jax.jit(jax.vmap(space.curvatures))(w0, train[0]), train, valid, test)


def solver_of(task: Task, inner_steps=INNER_STEPS, kind="unrolled") -> LowerSolver:
    """One of ``SOLVERS``: through all steps, the last quarter, or none; or implicit, damped."""
    backprop = {"truncated": max(1, inner_steps // 4), "first-order": 0}.get(kind)
    solver = task.space.solver(task.curvatures, inner_steps, backprop=backprop)
    if kind != "implicit":
        return solver
    # More weights than labels: the Hessian is singular, and damping picks the small motions.
    damping = 1e-2 * task.curvatures.max()
    return bilevel.implicit(solver, bilevel.cg(steps=inner_steps, damping=damping))


def search(task: Task, solver: LowerSolver, steps=STEPS) -> jax.Array:
    """The alphas found [seeds, h], from the uniform one."""
    seeds, h = len(task.w0), len(task.space.names)
    adam = optax.chain(bilevel.tangent(), optax.adam(0.3), bilevel.exponentiate())
    start = jnp.full((seeds, h), 1 / h), task.w0, task.train, task.valid
    problem = bilevel.side_by_side(task.space.problem)
    return bilevel.search(problem, solver, adam, *start, steps=steps, progress=False).alpha


def hypergradient(task: Task, solver: LowerSolver, alpha: jax.Array) -> bilevel.HyperGradient:
    problem = bilevel.side_by_side(task.space.problem)
    fn = bilevel.hypergradient(problem, solver, diagnostics=False)
    return jax.jit(fn)(alpha, task.w0, task.train, task.valid)


def trained(task: Task, solver: LowerSolver, alpha: jax.Array) -> jax.Array:
    """Weights trained from the start at ``alpha``."""
    lower = bilevel.side_by_side(task.space.problem).lower
    return _trained(solver, lower, alpha, task.w0, task.train)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _trained(solver, lower, alpha, w, batch):
    return solver.run(lower, alpha, w, solver.init(w), batch)[0]
