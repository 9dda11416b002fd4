"""Estimate the directions of steps from batches."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from bilevel.contracts import Pytree
from bilevel.problem.problem import Problem, at_variables, split_losses
from bilevel.problem.structure import depends_on_alpha
from bilevel.stochastic._blocks import BatchedData, Oracle


class Lower(NamedTuple):
    """Derivatives of the lower loss g at (w, alpha), v the adjoint."""

    slope: Pytree  # d g / dw
    product: Pytree  # - d^2 g / dw^2 v
    cross: Pytree  # like alpha: - d^2 g / dalpha dw v, the sign that its direction has


class Slopes(NamedTuple):
    """First derivatives of a loss at (w, alpha)."""

    w: Pytree
    alpha: Pytree  # None for a loss without alpha, which saves zeros


class Iterate(NamedTuple):
    """Weights, adjoint and hyperparameters: a point, or the negative steps of a point."""

    w: Pytree
    v: Pytree
    alpha: Pytree


def lower_oracle(problem: Problem, point: Iterate) -> Oracle:
    """Return an oracle of ``(Lower, (loss, aux))``; its products share one pass."""
    loss = lower_loss(problem)

    def oracle(batch, weight):
        slope_at = jax.grad(weighted_loss(loss, weight), has_aux=True)
        slope, pull, loss_and_aux = jax.vjp(
            lambda w, alpha: slope_at(w, alpha, batch), point.w, point.alpha, has_aux=True
        )
        return Lower(slope, *pull(optax.tree.scale(-1, point.v))), loss_and_aux

    return oracle


def slopes_oracle(loss: Callable, w: Pytree, alpha: Pytree) -> Oracle:
    """Return an oracle of ``(Slopes, (loss, aux))`` for a loss that returns ``(loss, aux)``."""

    def oracle(batch, weight):
        slopes_at = jax.grad(weighted_loss(loss, weight), (0, 1), has_aux=True)
        slopes, loss_and_aux = slopes_at(w, alpha, batch)
        return Slopes(*slopes), loss_and_aux

    return oracle


def outer_oracle(problem: Problem, point: Iterate) -> Oracle:
    """Return an oracle of ``(Slopes, (loss, aux))`` of the outer loss."""
    loss, bare = split_losses(problem).outer, at_variables(problem, None).outer

    def oracle(batch, weight):
        slopes, loss_and_aux = slopes_oracle(loss, point.w, point.alpha)(batch, weight)
        if not depends_on_alpha(bare, point.w, point.alpha, batch):
            slopes = slopes._replace(alpha=None)
        return slopes, loss_and_aux

    return oracle


def weighted_loss(loss: Callable, weight: float) -> Callable:
    """Return ``weight`` times a loss that returns ``(loss, aux)``, and that pair."""

    def scaled(w, alpha, batch):
        loss_and_aux = loss(w, alpha, batch)
        return loss_and_aux[0] if weight == 1 else weight * loss_and_aux[0], loss_and_aux

    return scaled


def lower_loss(problem: Problem) -> Callable:
    """Return the lower loss as a function that returns ``(loss, aux)``."""
    lower = split_losses(problem).lower
    return lambda w, alpha, batch: lower(w, alpha, batch)[::2]


def directions(lower: Lower, outer: Slopes) -> Iterate:
    """Return the single loop's directions: D_w, D_v and D_alpha of Dagreou et al. (2022)."""
    along = lower.cross if outer.alpha is None else optax.tree.add(outer.alpha, lower.cross)
    adjoint = jax.tree.map(lambda p, o: -(p + o), lower.product, outer.w)
    return Iterate(lower.slope, adjoint, along)


def at_both(oracle_at: Callable[[Any], Oracle], first: Any, second: Any) -> Oracle:
    """Return one oracle for two points: a pair of estimates, and the second's loss and aux."""
    stacked = jax.tree.map(lambda a, b: jnp.stack([a, b]), first, second)

    def oracle(batch, weight):
        estimates, loss_and_aux = jax.vmap(lambda point: oracle_at(point)(batch, weight))(stacked)
        at_first, at_second = (jax.tree.map(lambda x, i=i: x[i], estimates) for i in (0, 1))
        return (at_first, at_second), jax.tree.map(lambda x: x[1], loss_and_aux)

    return oracle


def metrics(problem: Problem, lower: tuple, outer: tuple, slope: Pytree) -> dict[str, Any]:
    """Return the losses on a step's batches, and the size of the lower direction."""
    report = {"value": outer[0], "lower": lower[0], "noisy_stationarity": tree_norm(slope)}
    if getattr(problem, "has_aux", False):
        report["aux"] = {"lower": lower[1], "outer": outer[1]}
    return report


def adjoint_metrics(
    problem: Problem, lower: tuple, outer: tuple, directions: Iterate, force: Pytree
) -> dict[str, Any]:
    """Return :func:`metrics`, and the relative residual of ``H v = force`` on these estimates."""
    size = tree_norm(force)
    noisy = tree_norm(directions.v) / jnp.where(size > 0, size, 1)
    return metrics(problem, lower, outer, directions.w) | {"noisy_residual": noisy}


def tree_norm(x: Pytree) -> jax.Array:
    """Return the 2-norm by a product of vectors, which XLA computes faster than a sum."""
    return jnp.sqrt(optax.tree.vdot(x, x))


def full_estimates(
    problem: Problem, point: Iterate, train: BatchedData, valid: BatchedData
) -> tuple[Lower, Slopes]:
    """Return the derivatives of both losses on all data."""
    return train.mean(lower_oracle(problem, point)), valid.mean(outer_oracle(problem, point))


def full_direction(
    problem: Problem, w: Pytree, v: Pytree, alpha: Pytree, train: BatchedData, valid: BatchedData
) -> Pytree:
    """Return the direction of ``alpha`` on all data, at an adjoint ``v``."""
    return directions(*full_estimates(problem, Iterate(w, v, alpha), train, valid)).alpha
