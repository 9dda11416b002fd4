"""SOBA, and SOBA with averaged directions."""

from typing import NamedTuple

import optax

from bilevel.contracts import Pytree, SingleLoop
from bilevel.internal.checks import check_in_range
from bilevel.stochastic import _steps as steps
from bilevel.stochastic._oracles import (
    Directions,
    Iterate,
    directions,
    lower_oracle,
    metrics,
    outer_oracle,
    relative_adjoint_residual,
)
from bilevel.stochastic._steps import Rate


class SobaState(NamedTuple):
    """State of :func:`soba`."""

    v: Pytree  # like w: the adjoint


class AveragedState(NamedTuple):
    """State of :func:`ma_soba`."""

    v: Pytree  # like w: the adjoint
    direction: Pytree  # like alpha: the average


def estimates(problem, alpha, w, v, indices, train, valid) -> tuple[Directions, dict]:
    """The three directions from a batch each, and the metrics."""
    point = Iterate(w, v, alpha)
    lower, below = train.at(indices.train[0], lower_oracle(problem, point))
    outer, above = valid.at(indices.valid[0], outer_oracle(problem, point))
    step_directions = directions(lower, outer)
    noisy = relative_adjoint_residual(step_directions, outer.w)
    return step_directions, metrics(problem, below, above, step_directions.w, noisy_residual=noisy)


def soba(step_size: Rate) -> SingleLoop:
    """SOBA: stochastic steps of ``w``, its adjoint ``v`` and ``alpha`` at once.

        D_w = dg/dw,  D_v = d2g/dw2 v - df/dw,  D_alpha = df/dalpha - d2g/dalpha dw v,

    each on a batch: ``(w, v) -= step_size (D_w, D_v)``, and D_alpha goes to the optimizer.

    Parameters
    ----------
    step_size : positive number, or schedule ``steps done -> number``
        Under 1 / L, L the largest curvature of the lower loss on any batch.

    Returns
    -------
    SingleLoop
        For :func:`bilevel.search`, with ``batches=bilevel.partition(...)``.

    Raises
    ------
    ValueError
        For a ``step_size`` that is not positive.

    Notes
    -----
    A step: 3 lower oracles (a gradient, 2 products), 2 outer ones, a batch of each loss. Memory:
    two copies of ``w`` beyond it, one of ``alpha``. With constant rates it stalls at the noise of
    its directions; with rates t^-1/2, for both optimizers, E|dh|^2 falls under eps after about
    eps^-2 samples where g is strongly convex. Nothing is proved on a simplex or another set.

    References
    ----------
    Dagreou, Ablin, Vaiter & Moreau (2022), A framework for bilevel optimization that enables
    stochastic and global variance reduction algorithms, Algorithm 1.

    Examples
    --------
    >>> import bilevel, jax, jax.numpy as jnp
    >>> problem = bilevel.Problem(
    ...     lower=lambda w, alpha, batch: 0.5 * jnp.mean((w - alpha - batch) ** 2),
    ...     outer=lambda w, alpha, batch: 0.5 * jnp.mean((w - batch) ** 2),
    ... )
    >>> x = jnp.linspace(-1.0, 1.0, 10)
    >>> options = {"steps": 300, "batches": bilevel.partition(4), "key": jax.random.key(0)}
    >>> args = optax.sgd(0.1), jnp.zeros(1), jnp.zeros(1), x, 2 + x
    >>> bilevel.search(problem, bilevel.soba(0.3), *args, **options).alpha.round(0)
    Array([2.], dtype=float...)
    """
    rate = steps.check_rate("step_size", step_size)

    def init(problem, alpha, w, indices, train, valid):
        return SobaState(optax.tree.zeros_like(w))

    def step(problem, alpha, w, state, indices, train, valid):
        step_directions, report = estimates(problem, alpha, w, state.v, indices, train, valid)
        w, v = steps.against((w, state.v), step_directions[:2], steps.rate_at(rate, indices.number))
        return step_directions.alpha, w, SobaState(v), report

    return SingleLoop(init, step, lambda state: state.v)


def ma_soba(step_size: Rate, average: float = 0.1) -> SingleLoop:
    """SOBA whose direction for ``alpha`` is a moving average: ``h <- (1 - average) h + average D``.

    Parameters
    ----------
    step_size : positive number, or schedule
        As that of :func:`bilevel.soba`.
    average : float
        The weight of the newest direction, in (0, 1]; 1 is :func:`bilevel.soba`.

    Returns
    -------
    SingleLoop
        For :func:`bilevel.search`, with ``batches=bilevel.partition(...)``.

    Raises
    ------
    ValueError
        For a ``step_size`` that is not positive, or an ``average`` off (0, 1].

    Notes
    -----
    One more copy of ``alpha`` than SOBA. ``h`` starts at 0, so ``alpha`` begins slowly. The rate is
    that of SOBA with steps of T^-1/2, under smoothness of first and second derivatives only.
    Nothing is proved on a simplex or another set; an averaged direction is the better one there.

    References
    ----------
    Chen, Xiao & Balasubramanian (2023), Optimal algorithms for stochastic bilevel optimization
    under relaxed smoothness conditions, Algorithm 1.

    Examples
    --------
    >>> import bilevel
    >>> bilevel.ma_soba(0.1, average=0.05).draws
    (1, 1)
    """
    rate = steps.check_rate("step_size", step_size)
    check_in_range("average", average, 0, 1 + 1e-12)

    def init(problem, alpha, w, indices, train, valid):
        return AveragedState(optax.tree.zeros_like(w), optax.tree.zeros_like(alpha))

    def step(problem, alpha, w, state, indices, train, valid):
        step_directions, report = estimates(problem, alpha, w, state.v, indices, train, valid)
        change = optax.tree.sub(step_directions.alpha, state.direction)
        direction = steps.against(state.direction, change, -average)
        w, v = steps.against((w, state.v), step_directions[:2], steps.rate_at(rate, indices.number))
        return direction, w, AveragedState(v, direction), report

    return SingleLoop(init, step, lambda state: state.v)
