"""The estimates that steps are made of, each from one batch and in one or two passes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from bilevel.problem import Problem, parts
from bilevel.protocols import Pytree
from bilevel.stochastic._blocks import Blocks, Oracle


class Lower(NamedTuple):
    """Derivatives of the lower loss g at (w, alpha), v the adjoint."""

    slope: Pytree  # d g / dw
    product: Pytree  # d^2 g / dw^2 v
    cross: Pytree  # like alpha: d^2 g / dalpha dw v


class Slopes(NamedTuple):
    """First derivatives of a loss at (w, alpha)."""

    w: Pytree
    alpha: Pytree


class Directions(NamedTuple):
    """Against these go ``w``, the adjoint ``v`` and ``alpha``."""

    w: Pytree
    v: Pytree
    alpha: Pytree


class Point(NamedTuple):
    """Where derivatives are taken."""

    w: Pytree
    v: Pytree
    alpha: Pytree


def lower_oracle(problem: Problem, point: Point) -> Oracle:
    """``batch -> (Lower, (loss, aux))``: the products share a pass."""
    loss = lower_loss(problem)

    def oracle(batch):
        def slope(w, alpha):
            rest, slope = jax.value_and_grad(loss, has_aux=True)(w, alpha, batch)
            return slope, rest

        slope, pull, rest = jax.vjp(slope, point.w, point.alpha, has_aux=True)
        return Lower(slope, *pull(point.v)), rest

    return oracle


def slopes_oracle(loss: Callable, w: Pytree, alpha: Pytree) -> Oracle:
    """``batch -> (Slopes, (loss, aux))`` of a loss as the next two functions give it."""

    def oracle(batch):
        rest, slopes = jax.value_and_grad(loss, (0, 1), has_aux=True)(w, alpha, batch)
        return Slopes(*slopes), rest

    return oracle


def outer_oracle(problem: Problem, point: Point) -> Oracle:
    """``batch -> (Slopes, (loss, aux))`` of the outer loss."""
    return slopes_oracle(parts(problem).outer, point.w, point.alpha)


def lower_loss(problem: Problem) -> Callable:
    """The lower loss as a function that returns ``(loss, aux)``."""
    lower = parts(problem).lower
    return lambda w, alpha, batch: lower(w, alpha, batch)[::2]


def directions(lower: Lower, outer: Slopes) -> Directions:
    """The single loop's directions: D_w, D_v and D_alpha of Dagreou et al. (2022)."""
    return Directions(
        lower.slope,
        optax.tree.sub(lower.product, outer.w),
        optax.tree.sub(outer.alpha, lower.cross),
    )


def at_both(oracle_at: Callable[[Any], Oracle], first: Any, second: Any) -> Oracle:
    """One oracle at two points, on the same batch, as one wider program: its estimates as a pair.

    What comes beside the estimates is that of the second point.
    """
    stacked = jax.tree.map(lambda a, b: jax.numpy.stack([a, b]), first, second)

    def oracle(batch):
        estimates, rest = jax.vmap(lambda point: oracle_at(point)(batch))(stacked)
        pick = lambda i, tree: jax.tree.map(lambda x: x[i], tree)  # noqa: E731
        return (pick(0, estimates), pick(1, estimates)), pick(1, rest)

    return oracle


def metrics(problem: Problem, lower: tuple, outer: tuple, slope: Pytree, **more) -> dict[str, Any]:
    """What a step reports: the losses on its batches, and the size of the lower direction."""
    found = {"value": outer[0], "lower": lower[0], "noisy_stationarity": optax.tree.norm(slope)}
    if getattr(problem, "has_aux", False):
        found["aux"] = {"lower": lower[1], "outer": outer[1]}
    return found | more


def residual(directions: Directions, outer: Pytree) -> jax.Array:
    """How far the adjoint is from solving its equation on these estimates, relative."""
    size = optax.tree.norm(outer)
    return optax.tree.norm(directions.v) / jax.numpy.where(size > 0, size, 1)


def full_direction(
    problem: Problem, w: Pytree, v: Pytree, alpha: Pytree, train: Blocks, valid: Blocks
) -> Pytree:
    """The direction of ``alpha`` on all data, at an adjoint ``v``."""
    point = Point(w, v, alpha)
    lower, outer = (
        train.mean(lower_oracle(problem, point)),
        valid.mean(outer_oracle(problem, point)),
    )
    return directions(lower, outer).alpha
