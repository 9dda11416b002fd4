"""An optimizer of alpha that waits for the weights, and slows down if the adjoint lags."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from bilevel.contracts import Pytree
from bilevel.internal.checks import common_dtype, gradient_transformation

_UNIT = 50  # minimum number of steps that together move alpha by the rate
_SLOWING = 10  # units until the rate starts to fall
_PARTS = 8  # parts of a unit; sizes are averaged over a part, and the pace is halved per part
_LOST, _FOLLOWED = 0.3, 0.1  # residuals above which alpha slows down, below which it speeds up
_GROWN, _FORGOTTEN = 2.0, 1.1  # growth of the gradient that slows; growth of its least size by part
_SLOWEST = 2.0**-10
_LONGEST = 2.0  # times 1 / curvature: stability limit of gradient descent for a unit's steps
_KEPT = 0.9  # factor of the largest curvature, per part
_CALM = 0.1  # fraction of the largest gradient below which Adam's steps fall with the gradient


class UpdateCurvature(NamedTuple):
    """How fast the optimizer's update changes as alpha moves."""

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
    """Pace an optimizer of ``alpha``, for :func:`spaba` and :func:`saba` without a step size.

    ``alpha`` waits until the adjoint's residual is small. Then a unit of steps together is one step
    of the optimizer: fifty steps, or the steps from one of SPABA's full passes to the next, or an
    epoch of SABA, if that is longer. After ten units the rate falls as 1 / sqrt(1 + units / 10). If
    the adjoint lags, the pace is halved until it follows. A unit moves by at most 2 / curvature, so
    that alpha does not oscillate; the curvature is the change of the optimizer's update along
    alpha's movement, measured eight times per unit.

    Parameters
    ----------
    optimizer : optax.GradientTransformation, optional
        Default: Adam with a rate of 2 and steps that become small with the gradient, for
        hyperparameters that are logarithms or of the order of 1.

    Returns
    -------
    optax.GradientTransformationExtraArgs
        Geometries come after it: ``optax.chain(paced(), bilevel.exponentiate())``.

    Raises
    ------
    ValueError
        If ``optimizer`` is not an optimizer; in a search, if the solver is not a single loop.

    Notes
    -----
    A heuristic: no theorem covers it. The residual is |D_v| / |df/dw|, of variance-reduced
    directions. Above 0.3 the pace is halved, eight times per unit; under 0.1 it grows by a quarter,
    up to 1. SOBA's directions never have a small residual. Memory: that of the optimizer and two
    copies of ``alpha``.

    Examples
    --------
    >>> state = paced().init(jnp.zeros(1))
    >>> state.pace, bool(state.going)
    (Array(1., dtype=float...), False)
    """
    optimizer = _calm_adam(2.0) if optimizer is None else optimizer
    inner = gradient_transformation("optimizer", optimizer)

    def init(alpha):
        one = jnp.ones((), common_dtype(*jax.tree.leaves(alpha)))
        begun = jnp.zeros((), int), jnp.zeros((), bool)
        zeros = optax.tree.zeros_like(alpha)
        bent = UpdateCurvature(0 * one, zeros, zeros)
        # `jax_debug_infs` would raise at infinity.
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
    """Measure the curvature along the last movement, if that is ``due``: a Rayleigh quotient."""
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
    """Return Adam with steps ``m / (sqrt(v) + calm sqrt(max v))``.

    For small gradients this is gradient descent with momentum; Adam's own steps keep their size.
    """

    def init(alpha):
        zeros = optax.tree.zeros_like(alpha)
        return _CalmState(zeros, zeros, zeros, jnp.zeros((), int))

    def update(gradient, state, params=None):
        number = state.number + 1
        times = number.astype(float)

        def averaged(old, new, b):
            return jax.tree.map(lambda o, n: (b * o + (1 - b) * n).astype(o.dtype), old, new)

        def step(m, v, top):
            size = jnp.sqrt(v) + _CALM * jnp.sqrt(top)
            return (-rate / (1 - b1**times) * m / jnp.where(size > 0, size, 1)).astype(m.dtype)

        mean = averaged(state.mean, gradient, b1)
        square = averaged(state.square, jax.tree.map(jnp.square, gradient), b2)
        unbiased = jax.tree.map(lambda x: x / (1 - b2**times), square)
        largest = jax.tree.map(
            lambda old, new: jnp.maximum(old, new).astype(old.dtype), state.largest, unbiased
        )
        moves = jax.tree.map(step, mean, unbiased, largest)
        return moves, _CalmState(mean, square, largest, number)

    return optax.GradientTransformation(init, update)
