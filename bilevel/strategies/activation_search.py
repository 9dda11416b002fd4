"""Search activations on real data for several seeds at once: the parts of ``bilevel search``.

Every array has a leading axis of seeds. Each seed has its own rows and initial weights.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from bilevel.contracts import LowerSolver
from bilevel.discretize import condition_six
from bilevel.discretize.conditions import ConditionSix
from bilevel.discretize.judgement import Judgement, judge_choice
from bilevel.hypergradients.hypergradient import HyperGradient
from bilevel.hypergradients.hypergradient import hypergradient as of_problem
from bilevel.problem.problem import stack_problems
from bilevel.solvers import implicit
from bilevel.solvers.inverses import cg
from bilevel.spaces.activations import ActivationSpace, losses_by_row, sign_labels, unit_inputs

SOLVERS = ("unrolled", "truncated", "first-order", "implicit")
"""Ways to differentiate through the training of the weights."""

_DAMPING = 1e-2  # times the largest curvature; selects a small response if H is singular
_DIVERGED = 1e6  # loss of a diverged network, larger than any other


class ActivationTask(NamedTuple):
    """The searches of all seeds; the leading axis is the seeds."""

    space: ActivationSpace
    w0: jax.Array  # [seeds, width, inputs]
    curvatures: jax.Array  # [seeds, h]
    train: tuple[jax.Array, jax.Array]  # [seeds, n, inputs], [seeds, n, classes]
    valid: tuple[jax.Array, jax.Array]
    test: tuple[jax.Array, jax.Array]


def set_up(
    space: ActivationSpace,
    rows: Sequence[Sequence[tuple[Any, Any]]],
    keys: Sequence[chex.PRNGKey],
    *,
    classes: int,
) -> ActivationTask:
    """Return unit inputs, labels of +-1 and initial weights for every seed.

    ``rows`` has for every seed the three parts ``(x, labels from 0)``; ``keys`` draw the weights.
    """
    parts, weights = [], []
    for key, of_seed in zip(keys, rows, strict=True):
        xs = unit_inputs(*(x for x, _ in of_seed))
        ys = [sign_labels(y, classes) for _, y in of_seed]
        parts.append(tuple(zip(xs, ys, strict=True)))
        weights.append(space.init(key, parts[-1][0]))
    stack = jax.jit(lambda seeds: jax.tree.map(lambda *x: jnp.stack(x), *seeds))
    w0, (train, valid, test) = stack(list(zip(weights, parts, strict=True)))
    curvatures = jax.jit(jax.vmap(space.curvatures))(w0, train[0])
    return ActivationTask(space, w0, curvatures, train, valid, test)


def solver(
    task: ActivationTask, steps: int = 50, kind: str = "unrolled", rate: float | None = None
) -> LowerSolver:
    """Train the weights for ``steps`` steps, differentiated in one of four ways.

    The derivative goes through all steps, the last quarter of them, or none, or uses the implicit
    function theorem. The latter is damped, since the lower Hessian is singular if there are more
    weights than labels. The default ``rate`` is 1 over the curvature of each network's lower loss.
    """
    backprop = {"truncated": max(1, steps // 4), "first-order": 0}.get(kind)
    descent = task.space.solver(task.curvatures, steps, backprop=backprop, rate=rate)
    if kind != "implicit":
        return descent
    damping: Any = _DAMPING * task.curvatures.max()
    return implicit(descent, cg(damping=damping))


def train_weights(task: ActivationTask, solver: LowerSolver, alpha: chex.Array) -> jax.Array:
    """Return weights [seeds, width, inputs] trained from the start at ``alpha`` [seeds, h]."""
    return _run_solver(solver, task.space, alpha, task.w0, task.train)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run_solver(solver, space, alpha, w, batch):
    return solver.run(stack_problems(space.problem).lower, alpha, w, solver.init(w), batch)[0]


def seed_hypergradients(
    task: ActivationTask, solver: LowerSolver, alpha: chex.Array
) -> HyperGradient:
    """Return the hypergradients of all seeds at ``alpha`` [seeds, h], without diagnostics."""
    fn = of_problem(stack_problems(task.space.problem), solver, diagnostics=False)
    return jax.jit(fn)(alpha, task.w0, task.train, task.valid)


class Gap(NamedTuple):
    """Result of :func:`hypergradient_error`; [seeds] each."""

    norm: np.ndarray  # of the hypergradient of longer training
    error: np.ndarray  # norm of the difference


def hypergradient_error(
    task: ActivationTask, solver: LowerSolver, longer: LowerSolver, alpha: chex.Array
) -> Gap:
    """Return the distance of each seed's hypergradient to that of longer training.

    With more weights than labels the lower Hessian is singular, so ``info`` cannot estimate the
    error. With four times the steps the ratio of this estimate to the true error was within
    [1/3, 10] (``benchmarks/hypergradients/search_error.py``).
    """
    ours, better = (seed_hypergradients(task, way, alpha).grad for way in (solver, longer))
    norm, error = (np.linalg.norm(x, axis=-1) for x in (better, ours - better))
    return Gap(norm, error)


class ArgmaxVerdict(NamedTuple):
    """Result of :func:`judge_argmax`; every array has a leading axis of seeds."""

    choice: np.ndarray  # [seeds], index of the activation with the largest alpha
    discretise: np.ndarray  # [seeds], whether it is as good as any, by loss and by error
    by: dict[str, Judgement]  # "loss", "error": the networks of single activations, in pairs
    mixture: dict[str, np.ndarray]  # "loss", "error" of the mixture, [seeds]
    condition_six: ConditionSix  # at the shared weights, on the test rows
    stationarity: np.ndarray  # [seeds], of alpha at the shared weights, over the mixture's loss


def judge_argmax(
    task: ActivationTask, alpha: chex.Array, w: chex.Array, singles: Sequence[tuple[Any, Any]]
) -> ArgmaxVerdict:
    """Judge whether each seed's argmax, trained alone, is as good as any other activation.

    ``w`` [seeds, width, inputs] was trained at ``alpha`` [seeds, h]. ``singles`` has a pair
    ``(w, alpha)`` for each activation alone; a diverged network counts as worse than any other. The
    validation rows judge, since only ``alpha`` was fitted to them. At the shared weights of
    Condition 6, choices of small outputs look better than they are.
    """
    space, choices = task.space, np.asarray(alpha).argmax(axis=1)
    networks = (*singles, (w, alpha))
    by_row = [losses_by_row(space, *network, task.valid) for network in networks]
    by, mixture = {}, {}
    for name in ("loss", "error"):
        *alone, mixed = [
            np.nan_to_num(np.asarray(losses[name]), nan=_DIVERGED, posinf=_DIVERGED)
            for losses in by_row
        ]
        verdicts = [
            judge_choice(np.stack(losses, axis=1), choice)
            for *losses, choice in zip(*alone, choices, strict=True)
        ]
        by[name] = jax.tree.map(lambda *fields: np.stack(fields), *verdicts)
        mixture[name] = mixed.mean(axis=1)
    discretise = by["loss"].as_good & by["error"].as_good
    theory = jax.tree.map(np.asarray, _condition_six_by_seed(space, w, alpha, task.test))
    assert theory.stationarity is not None and theory.L_alpha is not None
    stationarity = theory.stationarity / theory.L_alpha
    return ArgmaxVerdict(choices, discretise, by, mixture, theory, stationarity)


@functools.partial(jax.jit, static_argnums=0)
def _condition_six_by_seed(space, w, alpha, batch) -> ConditionSix:
    def of_one_seed(w, alpha, x, y):
        vertices = jnp.eye(len(space.names), dtype=alpha.dtype)
        outputs = jax.vmap(space.apply, (None, 0, None), 1)(w, vertices, x)
        return condition_six(outputs, alpha, y)

    return jax.vmap(of_one_seed)(w, alpha, *batch)
