"""An optimizer of alpha that waits for the weights, and for the adjoint when it falls behind."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from bilevel.checks import at_least, gradient_transformation

_LOST, _FOLLOWED = 0.3, 0.1  # residuals above which alpha slows down, below which it speeds up
_AVERAGED = 8  # parts of an epoch: how long these are averaged, and between two changes of pace
_SHORTEST = 100  # steps that stand for an epoch, where one has fewer: what weights need to follow
_GROWN, _FORGOTTEN = (
    2.0,
    1.1,
)  # of the size of the gradient: growth that slows; of the least, by part
_CALM = 0.1  # of the largest gradient: under it, Adam's steps fall with the gradient


class PacedState(NamedTuple):
    """State of :func:`paced`."""

    optimizer: optax.OptState
    pace: jax.Array  # [], at most 1
    residual: jax.Array  # [], averaged
    size: jax.Array  # [], averaged: of the gradient
    least: jax.Array  # [], of those sizes, slowly forgotten
    number: jax.Array  # [], int: updates seen


def paced(
    optimizer: optax.GradientTransformation | None = None, warmup: float = 2.0
) -> optax.GradientTransformationExtraArgs:
    """An optimizer of ``alpha`` for :func:`bilevel.saba` and :func:`bilevel.spaba`, by epochs.

    ``alpha`` waits for ``warmup`` epochs, while weights and adjoint come near their solutions. Then
    an epoch of steps is one of the optimizer's: rates do not depend on the number of batches. And
    where the adjoint falls behind, by its residual, the pace is halved until it has caught up.

    Parameters
    ----------
    optimizer : optax.GradientTransformation, optional
        By default ``optax.adam(0.3)``: hyperparameters that are logarithms or of the order of 1.
    warmup : float
        Epochs of train or of valid, whichever has more batches.

    Returns
    -------
    optax.GradientTransformationExtraArgs
        Geometries come after it: ``optax.chain(paced(), bilevel.exponentiate())``.

    Raises
    ------
    ValueError
        For what is no optimizer, and a negative ``warmup``; when called, by what is no single loop.

    Notes
    -----
    A heuristic: no theorem covers it. The residual is |D_v| / |df/dw|, of variance-reduced
    directions: above 0.3 the pace is halved, eight times an epoch, under 0.1 it grows by a quarter,
    up to 1. SOBA's directions never have a small one.

    Examples
    --------
    >>> import bilevel
    >>> problem = bilevel.Problem(
    ...     lower=lambda w, alpha, batch: 0.5 * jnp.mean((w - alpha - batch) ** 2),
    ...     outer=lambda w, alpha, batch: 0.5 * jnp.mean((w - batch) ** 2),
    ... )
    >>> x = jnp.linspace(-1.0, 1.0, 10)
    >>> options = {"steps": 3000, "batches": bilevel.partition(4), "key": jax.random.key(0)}
    >>> args = paced(), jnp.zeros(1), jnp.zeros(1), x, 2 + x
    >>> bilevel.search(problem, bilevel.saba(), *args, **options).alpha.round(2)
    Array([2.], dtype=float...)
    """
    inner = gradient_transformation(
        "optimizer", _calm_adam(0.3) if optimizer is None else optimizer
    )
    at_least("warmup", warmup, 0)

    def init(alpha):
        one = jnp.ones((), jnp.result_type(*jax.tree.leaves(alpha)))
        return PacedState(inner.init(alpha), one, one, 0 * one, jnp.inf * one, jnp.zeros((), int))

    def update(updates, state, params=None, *, residual=None, epoch=None, **told):
        if residual is None or epoch is None:
            raise ValueError(
                "optimizer: expected bilevel.paced with bilevel.saba() or bilevel.spaba(), got it "
                "with a solver that reports no residual of its adjoint."
            )
        epoch = max(_SHORTEST, epoch)
        part = max(1, epoch // _AVERAGED)
        due = state.number % part == part - 1

        def averaged(old, new):
            return (old + (new - old) / part).astype(old.dtype)

        going = state.number >= warmup * epoch
        average = averaged(state.residual, residual)
        size = averaged(state.size, optax.tree.norm(updates))
        lost = (average > _LOST) | (size > _GROWN * state.least)
        grown = jnp.where(average < _FOLLOWED, 1.25 * state.pace, state.pace)
        changed = jnp.where(lost, state.pace / 2, jnp.minimum(1, grown))
        pace = jnp.where(going & due, changed, state.pace)
        least = jnp.minimum(_FORGOTTEN * state.least, size)
        least = jnp.where(going, jnp.where(due, least, state.least), jnp.inf).astype(size.dtype)
        found, after = inner.update(updates, state.optimizer, params, **told)
        scale = jnp.where(going, pace / epoch, 0)
        found = jax.tree.map(lambda u: jnp.where(going, scale * u, 0).astype(u.dtype), found)
        after = jax.tree.map(lambda a, b: jnp.where(going, a, b), after, state.optimizer)
        return found, PacedState(after, pace, average, size, least, state.number + 1)

    return optax.GradientTransformationExtraArgs(init, update)


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

        def averaged(old, new, b):
            return jax.tree.map(lambda o, n: (b * o + (1 - b) * n).astype(o.dtype), old, new)

        mean = averaged(state.mean, gradient, b1)
        square = averaged(state.square, jax.tree.map(jnp.square, gradient), b2)
        unbiased = jax.tree.map(lambda x: x / (1 - b2**number), square)
        largest = jax.tree.map(
            lambda x, y: jnp.maximum(x, y).astype(x.dtype), state.largest, unbiased
        )

        def step(m, v, top):
            size = jnp.sqrt(v) + _CALM * jnp.sqrt(top)
            return (-rate / (1 - b1**number) * m / jnp.where(size > 0, size, 1)).astype(m.dtype)

        return jax.tree.map(step, mean, unbiased, largest), _CalmState(
            mean, square, largest, number
        )

    return optax.GradientTransformation(init, update)
