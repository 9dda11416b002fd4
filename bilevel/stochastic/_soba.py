"""SOBA, SOBA with averaged directions, and AmIGO, which takes several inner steps."""

from typing import NamedTuple

import jax
import optax

from bilevel.contracts import Pytree, SingleLoop
from bilevel.internal.checks import check_in_range, integer
from bilevel.stochastic import _oracles as oracles
from bilevel.stochastic import _steps as steps
from bilevel.stochastic._oracles import Iterate


class SobaState(NamedTuple):
    """State of :func:`soba` and :func:`amigo`."""

    v: Pytree  # like w: the adjoint


class AveragedState(NamedTuple):
    """State of :func:`ma_soba`."""

    v: Pytree  # like w: the adjoint
    direction: Pytree  # like alpha: the average


def estimates(problem, alpha, w, v, indices, train, valid) -> tuple[Iterate, dict]:
    """Return the three directions from a batch each, and the metrics."""
    point = Iterate(w, v, alpha)
    lower, below = train.at(indices.train[0], oracles.lower_oracle(problem, point))
    outer, above = valid.at(indices.valid[0], oracles.outer_oracle(problem, point))
    directions = oracles.directions(lower, outer)
    return directions, oracles.adjoint_metrics(problem, below, above, directions, outer.w)


def soba(step_size: steps.Rate) -> SingleLoop:
    """SOBA: stochastic steps of ``w``, its adjoint ``v`` and ``alpha`` at once.

        D_w = dg/dw,  D_v = d2g/dw2 v - df/dw,  D_alpha = df/dalpha - d2g/dalpha dw v,

    each on a batch: ``(w, v) -= step_size (D_w, D_v)``, and D_alpha goes to the optimizer.

    Parameters
    ----------
    step_size : positive number, or schedule ``steps done -> number``
        Under 1 / L, L the largest curvature of the lower loss on any batch.

    Raises
    ------
    ValueError
        If ``step_size`` is not positive.

    Notes
    -----
    Per step: 3 lower oracles (a gradient, 2 products) and 2 outer ones, on a batch of each loss.
    Memory: two more copies of ``w`` and one of ``alpha``. With constant rates it stalls at the
    noise of its directions. With rates t^-1/2, for both optimizers, E|dh|^2 falls below eps after
    about eps^-2 samples if g is strongly convex. Nothing is proved on a simplex or another set.

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
    rate = steps.as_schedule("step_size", step_size)

    def step(problem, alpha, w, state, indices, train, valid):
        directions, report = estimates(problem, alpha, w, state.v, indices, train, valid)
        w, v = steps.against((w, state.v), directions[:2], rate(indices.number))
        return directions.alpha, w, SobaState(v), report

    return SingleLoop(_start_adjoint, step, lambda state: state.v)


def _start_adjoint(problem, alpha, w, indices, train, valid):
    return SobaState(optax.tree.zeros_like(w))


def ma_soba(step_size: steps.Rate, average: float = 0.1) -> SingleLoop:
    """SOBA with an averaged direction of ``alpha``: ``h <- (1 - average) h + average D``.

    Parameters
    ----------
    step_size : positive number, or schedule ``steps done -> number``
        Under 1 / L, as for :func:`bilevel.soba`.
    average : float
        The weight of the newest direction, in (0, 1]; 1 is :func:`bilevel.soba`.

    Raises
    ------
    ValueError
        If ``step_size`` is not positive, or ``average`` is not in (0, 1].

    Notes
    -----
    It needs one more copy of ``alpha`` than SOBA. ``h`` starts at 0, so ``alpha`` begins slowly.
    The rate is that of SOBA with steps of T^-1/2, under smoothness of first and second derivatives
    only. Nothing is proved on a simplex or another set; the averaged direction is better there.

    References
    ----------
    Chen, Xiao & Balasubramanian (2023), Optimal algorithms for stochastic bilevel optimization
    under relaxed smoothness conditions, Algorithm 1.

    Examples
    --------
    >>> ma_soba(0.1, average=0.05).draws
    (1, 1)
    """
    rate = steps.as_schedule("step_size", step_size)
    check_in_range("average", average, 0, 1 + 1e-12)

    def init(problem, alpha, w, indices, train, valid):
        return AveragedState(optax.tree.zeros_like(w), optax.tree.zeros_like(alpha))

    def step(problem, alpha, w, state, indices, train, valid):
        directions, report = estimates(problem, alpha, w, state.v, indices, train, valid)
        change = optax.tree.sub(directions.alpha, state.direction)
        direction = steps.against(state.direction, change, -average)
        w, v = steps.against((w, state.v), directions[:2], rate(indices.number))
        return direction, w, AveragedState(v, direction), report

    return SingleLoop(init, step, lambda state: state.v)


def amigo(step_size: steps.Rate, *, inner: int = 10) -> SingleLoop:
    """AmIGO: ``inner`` warm-started SGD steps of ``w`` and of its adjoint per step of ``alpha``.

    Parameters
    ----------
    step_size : positive number, or schedule ``steps of alpha done -> number``
        Of ``w`` and of the adjoint: under 1 / L, as for :func:`bilevel.soba`.
    inner : int
        Steps of each, on new batches.

    Raises
    ------
    ValueError
        If ``step_size`` is not positive, or ``inner`` is under 1.

    Notes
    -----
    Per step: 2 ``inner`` + 1 batches of train, for a gradient, a product or both, and one batch of
    valid, for all outer gradients. Memory: that of SOBA. It takes eps^-2 samples for E|dh|^2 <= eps
    with constant rates and large batches, if g is strongly convex. stocBiO is the same with an
    adjoint that starts at 0. Nothing is proved on a simplex or another set.

    References
    ----------
    Arbel & Mairal (2022), Amortized implicit differentiation for stochastic bilevel optimization,
    Algorithm 1.

    Examples
    --------
    >>> amigo(0.1, inner=5).draws
    (11, 1)
    """
    rate = steps.as_schedule("step_size", step_size)
    inner = integer("inner", inner, 1)

    def step(problem, alpha, w, state, indices, train, valid):
        now, loss = rate(indices.number), oracles.lower_loss(problem)

        def descend(j, w):
            slopes, _ = train.at(indices.train[j], oracles.slopes_oracle(loss, w, alpha))
            return steps.against(w, slopes.w, now)

        w = jax.lax.fori_loop(0, inner, descend, w)
        outer, above = valid.at(
            indices.valid[0], oracles.outer_oracle(problem, Iterate(w, state.v, alpha))
        )

        def solve(j, v):
            point = Iterate(w, v, alpha)
            lower, _ = train.at(indices.train[inner + j], oracles.lower_oracle(problem, point))
            return steps.against(v, oracles.directions(lower, outer).v, now)

        v = jax.lax.fori_loop(0, inner, solve, state.v)
        lower, below = train.at(
            indices.train[-1], oracles.lower_oracle(problem, Iterate(w, v, alpha))
        )
        directions = oracles.directions(lower, outer)
        report = oracles.adjoint_metrics(problem, below, above, directions, outer.w)
        return directions.alpha, w, SobaState(v), report

    return SingleLoop(_start_adjoint, step, lambda state: state.v, draws=(2 * inner + 1, 1))
