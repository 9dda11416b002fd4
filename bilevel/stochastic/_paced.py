"""An optimizer of alpha that waits for the weights, and for the adjoint when it falls behind."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from bilevel.contracts import Pytree
from bilevel.internal.checks import common_dtype, gradient_transformation

_UNIT = 50  # steps in which alpha moves by the rate, or as many as directions remember
_SLOWING = 10  # of those, after which, and after ten times as many, it moves more slowly
_PARTS = 8  # of a unit: how long sizes are averaged, and until the pace is halved
_LOST, _FOLLOWED = 0.3, 0.1  # residuals above which alpha slows down, below which it speeds up
_GROWN, _FORGOTTEN = 2.0, 1.1  # of the gradient: growth that slows; of its least size, by part
_SLOWEST = 2.0**-10
_LONGEST = 2.0  # times 1 / curvature: a unit's steps together, where gradient descent is stable
_KEPT = 0.9  # of the largest curvature, by the part
_CALM = 0.1  # of the largest gradient: under it, Adam's steps fall with the gradient


class UpdateCurvature(NamedTuple):
    """How fast the optimizer's update turns around as alpha moves: see :func:`_bent`."""

    largest: jax.Array  # []: change of the update, by the distance; slowly forgotten
    update: Pytree  # like alpha: the optimizer's, at the last measurement
    moved: Pytree  # like alpha: the movement since then


class PacedState(NamedTuple):
    """State of :func:`paced`."""

    optimizer: optax.OptState
    pace: jax.Array  # [], in (0, 1]
    residual: jax.Array  # [], averaged
    size: jax.Array  # [], averaged: of the gradient
    least: jax.Array  # [], of those sizes, slowly forgotten
    curvature: UpdateCurvature
    number: jax.Array  # [], int: updates since alpha began to move
    going: jax.Array  # [], bool: whether it has


def paced(
    optimizer: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """An optimizer of ``alpha`` for :func:`bilevel.spaba` and :func:`bilevel.saba` without steps.

    ``alpha`` waits until weights and adjoint are near their solutions, by the adjoint's residual.
    Then fifty steps together are one of the optimizer's, or as many as the directions take to
    become exact again, if those are more: from one of SPABA's full passes to the next, an epoch of
    SABA. Ten such units later it is less, as 1 / sqrt(1 + units / 10). Where the adjoint falls
    behind, the pace is halved until it follows. The steps of a unit together are at most 2 /
    curvature, so that alpha does not circle around its solution: how fast the optimizer's update
    changes along alpha's movement is measured eight times in a unit.

    Parameters
    ----------
    optimizer : optax.GradientTransformation, optional
        By default Adam with a rate of 2, whose steps become small with the gradient:
        hyperparameters that are logarithms or of the order of 1.

    Returns
    -------
    optax.GradientTransformationExtraArgs
        Geometries come after it: ``optax.chain(paced(), bilevel.exponentiate())``.

    Raises
    ------
    ValueError
        For what is no optimizer; when called, by what is no single loop.

    Notes
    -----
    A heuristic: no theorem covers it. The residual is |D_v| / |df/dw|, of variance-reduced
    directions: above 0.3 the pace is halved, eight times in a unit, under 0.1 it grows by
    a quarter, up to 1. SOBA's directions never have a small one. Memory: that of the optimizer and
    two copies of ``alpha``.

    Examples
    --------
    >>> import bilevel
    >>> problem = bilevel.Problem(
    ...     lower=lambda w, alpha, batch: 0.5 * jnp.mean((w - alpha - batch) ** 2),
    ...     outer=lambda w, alpha, batch: 0.5 * jnp.mean((w - batch) ** 2),
    ... )
    >>> x = jnp.linspace(-1.0, 1.0, 10)
    >>> args = paced(), jnp.zeros(1), jnp.zeros(1), x, 2 + x
    >>> result = bilevel.search(problem, bilevel.soba(0.1), *args, steps=500, diagnostics=False)
    >>> result.alpha.round(1)
    Array([2.], dtype=float...)
    """
    inner = gradient_transformation(
        "optimizer", _calm_adam(2.0) if optimizer is None else optimizer
    )

    def init(alpha):
        one = jnp.ones((), common_dtype(*jax.tree.leaves(alpha)))
        begun = jnp.zeros((), int), jnp.zeros((), bool)
        zeros = optax.tree.zeros_like(alpha)
        bent = UpdateCurvature(0 * one, zeros, zeros)
        # Not infinity: `jax_debug_infs` ends the search at one in its state.
        most = jnp.full_like(one, jnp.finfo(one.dtype).max)
        return PacedState(inner.init(alpha), one, one, 0 * one, most, bent, *begun)

    def update(updates, state, params=None, *, residual=None, memory=None, **extra_args):
        if residual is None or memory is None:
            raise ValueError(
                "optimizer: expected bilevel.paced with bilevel.saba() or bilevel.spaba(), got it "
                "with a solver that reports no residual of its adjoint."
            )
        unit = max(_UNIT, memory)
        part = unit / _PARTS

        def averaged(old, new):
            return (old + (new - old) / part).astype(old.dtype)

        average = averaged(state.residual, residual)
        size = averaged(state.size, optax.tree.norm(updates))
        going = state.going | (average < _LOST)
        lost = (average > _LOST) | (size > _GROWN * state.least)
        factor = jnp.where(lost, 0.5, jnp.where(average < _FOLLOWED, 1.25, 1.0)) ** (1 / part)
        changed = jnp.clip(state.pace * factor, _SLOWEST, 1).astype(size.dtype)
        pace = jnp.where(going, changed, state.pace)
        least = jnp.minimum(_FORGOTTEN ** (1 / part) * state.least, size)
        least = jnp.where(going, least, jnp.finfo(size.dtype).max).astype(size.dtype)
        moves, after = inner.update(updates, state.optimizer, params, **extra_args)
        scale = pace / jnp.sqrt(1 + state.number / (_SLOWING * unit))
        bent = _bent(state.curvature, moves, state.number % max(1, round(part)) == 0)
        limit = _LONGEST / jnp.where(bent.largest > 0, bent.largest, 1)
        scale = jnp.where(bent.largest > 0, jnp.minimum(scale, limit), scale) / unit
        moves = jax.tree.map(lambda u: jnp.where(going, scale * u, 0).astype(u.dtype), moves)
        after = jax.tree.map(lambda a, b: jnp.where(going, a, b), after, state.optimizer)
        number = state.number + going.astype(int)
        bent = bent._replace(moved=optax.tree.add(bent.moved, moves))
        return moves, PacedState(after, pace, average, size, least, bent, number, going)

    return optax.GradientTransformationExtraArgs(init, update)


def _bent(old: UpdateCurvature, update: Pytree, due: jax.Array) -> UpdateCurvature:
    """Measure the curvature along the last movement, if that is ``due``.

    For ``update = -P grad h(alpha)`` it is a Rayleigh quotient of ``P`` times the Hessian of h.
    Noise of the directions does not depend on the movement, so it cancels in the product.
    """
    change, moved = optax.tree.sub(update, old.update), old.moved
    square = optax.tree.vdot(moved, moved)
    quotient = -optax.tree.vdot(change, moved) / jnp.where(square > 0, square, 1)
    largest = jnp.maximum(quotient.astype(old.largest.dtype), _KEPT * old.largest)
    new = UpdateCurvature(largest, update, optax.tree.zeros_like(update))
    return jax.tree.map(lambda x, y: jnp.where(due, x, y), new, old)


class _CalmState(NamedTuple):
    mean: optax.Updates
    square: optax.Updates
    largest: optax.Updates  # of the squares
    number: jax.Array


def _calm_adam(rate: float, b1: float = 0.9, b2: float = 0.999) -> optax.GradientTransformation:
    """Adam whose steps shrink near a solution, where the gradients are not noise but small.

    ``m / (sqrt(v) + calm sqrt(max v))``: where gradients fall under a part of the largest one, this
    is gradient descent with momentum. Adam's own steps stay of one size there.
    """

    def init(alpha):
        zeros = optax.tree.zeros_like(alpha)
        return _CalmState(zeros, zeros, zeros, jnp.zeros((), int))

    def update(gradient, state, params=None):
        number = state.number + 1
        times = number.astype(float)

        def averaged(old, new, b):
            return jax.tree.map(lambda o, n: (b * o + (1 - b) * n).astype(o.dtype), old, new)

        mean = averaged(state.mean, gradient, b1)
        square = averaged(state.square, jax.tree.map(jnp.square, gradient), b2)
        unbiased = jax.tree.map(lambda x: x / (1 - b2**times), square)
        largest = jax.tree.map(
            lambda x, y: jnp.maximum(x, y).astype(x.dtype), state.largest, unbiased
        )

        def step(m, v, top):
            size = jnp.sqrt(v) + _CALM * jnp.sqrt(top)
            return (-rate / (1 - b1**times) * m / jnp.where(size > 0, size, 1)).astype(m.dtype)

        return jax.tree.map(step, mean, unbiased, largest), _CalmState(
            mean, square, largest, number
        )

    return optax.GradientTransformation(init, update)
