"""SPABA: the single loop's directions estimated by PAGE."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from bilevel.contracts import Pytree, SingleLoop, Tables
from bilevel.internal.checks import check_in_range, common_dtype
from bilevel.stochastic import _steps as steps
from bilevel.stochastic._blocks import BatchedData
from bilevel.stochastic._oracles import (
    Iterate,
    Lower,
    Slopes,
    adjoint_metrics,
    at_both,
    directions,
    full_estimates,
    lower_oracle,
    outer_oracle,
    tree_norm,
)

_STEPS = 1000  # from one full pass to the next
_DRIFT = 0.3  # allowed error of the summed adjoint direction at a pass, in outer gradients
_LENGTHS = 0.25, 1.2  # limits of the factor of the steps' length after a pass
_ERROR = 0.1  # allowed relative error of alpha's summed direction at a pass
_TRUSTS, _LEAST_TRUST = (0.5, 1.05), 1 / 32  # factors after a pass, and the least trust


class SpabaState(NamedTuple):
    """State of :func:`spaba`."""

    v: Pytree  # like w: the adjoint
    length: jax.Array  # [], in (0, 1]: factor of the measured length of a step
    trust: jax.Array  # [], in (0, 1]: factor of alpha's direction
    stale: jax.Array  # [], bool: whether the next step takes all data
    last: Tables  # the last point and its estimates; the metric, if any


def _full_pass_probability(train: BatchedData, valid: BatchedData) -> float:
    """Return the chance of a full pass: the work of the other steps, or up to four times that."""
    count = train.count + valid.count
    return max(2 / (2 + count), min(8 / (8 + count), 1 / _STEPS))


def _limit_directions(
    summed: Iterate, exact_estimates: tuple[Lower, Slopes], v: Pytree, length, trust
) -> tuple[Iterate, Pytree, tuple[jax.Array, jax.Array]]:
    """Return exact directions, the adjoint, and the lengths of steps and of alpha's direction.

    The adjoint's residual estimates accumulate an error between passes. Steps become shorter until
    it is a fraction of the outer gradient. An adjoint that is worse than 0 restarts from 0, where
    its products are known. Alpha's direction is shortened until its sums, too, are right from one
    pass to the next.
    """
    lower, outer = exact_estimates
    _, exact, along = directions(lower, outer)
    size = tree_norm(outer.w)
    drift = tree_norm(optax.tree.sub(summed.v, exact)) / jnp.where(size > 0, size, 1)
    error = tree_norm(optax.tree.sub(summed.alpha, along))
    allowed = _ERROR * tree_norm(along) / jnp.where(error > 0, error, 1)
    change = jnp.where(error > 0, jnp.clip(allowed, *_TRUSTS), _TRUSTS[1])
    trust = jnp.clip(change.astype(trust.dtype) * trust, _LEAST_TRUST, 1)
    factor = jnp.clip(_DRIFT / drift, *_LENGTHS)
    of_v = lower.product, lower.cross, v
    product, cross, v = optax.tree.where(tree_norm(exact) > size, optax.tree.zeros_like(of_v), of_v)
    lower = Lower(lower.slope, product, cross)
    return directions(lower, outer), v, (jnp.minimum(factor * length, 1), trust)


def spaba(step_size: steps.Rate | None = None, *, probability: float | None = None) -> SingleLoop:
    """SPABA: :func:`bilevel.soba` with estimates by PAGE, without tables.

    With ``probability`` a step takes all data. Otherwise it adds to the last estimates the
    difference between the two points on one batch.

    Parameters
    ----------
    step_size : positive number, or schedule ``steps done -> number``, optional
        Of ``w`` and ``v``; a third of 1 / L is safe, L the largest curvature of the lower loss on
        any batch. By default steps are taken in a metric, from measured curvature; then use
        :func:`bilevel.paced` for ``alpha``.
    probability : float in [0, 1], optional
        Probability of a full pass. Default for n batches of both losses: 2 / (2 + n), so passes
        cost about as much as the other steps. For large n it is 1 / 1000, up to 8 / (8 + n): rows
        are cheaper in passes, and ``alpha`` must not move long without one.

    Raises
    ------
    ValueError
        If ``step_size`` is not positive, or ``probability`` is not in [0, 1].

    Notes
    -----
    Per step: twice SOBA's oracles, at two points as one program; a full pass goes through the data
    in wide batches. Memory: 6 more copies of ``w``, 3 of ``alpha``, and the metric. It takes
    n^(1/2) / eps samples in order for E|dh|^2 <= eps, which is optimal (and the same for SRBA, with
    passes at fixed times). The paper also clips ``v``; we do not. Batches come in shuffled epochs;
    the proof draws them independently. Nothing is proved on a simplex or another set. Under
    ``vmap`` over keys every step costs a full pass: loop over those.

    Without a step size, every pass compares the adjoint's residual with the sum since the last one.
    If they differ by more than 0.3 of the outer gradient, steps become shorter, and an adjoint that
    is worse than 0 restarts from 0. If the sums of alpha's direction are wrong by more than a tenth
    of it, alpha moves too fast for them: its direction is shortened, to 1/32 at least.

    References
    ----------
    Chu, Xu, Yao & Zhang (2024), SPABA: a single-loop and probabilistic stochastic bilevel algorithm
    achieving optimal sample complexity, Algorithm 1. Li, Bao, Zhang & Richtarik (2021), PAGE.

    Examples
    --------
    >>> import bilevel
    >>> bilevel.spaba(0.3, probability=0.1).draws
    (1, 1)
    """
    mover = steps.mover(step_size)
    if probability is not None:
        check_in_range("probability", probability, -1e-12, 1 + 1e-12)

    def often(train, valid):
        return _full_pass_probability(train, valid) if probability is None else probability

    def init(problem, alpha, w, indices, train, valid):
        point = Iterate(w, optax.tree.zeros_like(w), alpha)
        step_directions = directions(*full_estimates(problem, point, train, valid))
        length = jnp.ones((), common_dtype(*jax.tree.leaves(w)))
        last = Tables((point, step_directions, mover.init(problem, w, alpha, train)))
        return SpabaState(point.v, length, length, jnp.zeros((), bool), last)

    def step(problem, alpha, w, state, indices, train, valid):
        point = Iterate(w, state.v, alpha)
        before, last, mover_state = state.last.content

        def at_both_points(oracle):
            return at_both(lambda point: oracle(problem, point), before, point)

        (lower_before, lower), below = train.at(indices.train[0], at_both_points(lower_oracle))
        (outer_before, outer), above = valid.at(indices.valid[0], at_both_points(outer_oracle))
        change = optax.tree.sub(directions(lower, outer), directions(lower_before, outer_before))
        passing = (indices.uniform < often(train, valid)) | state.stale

        def exact():
            return full_estimates(problem, point, train, valid)

        scales = length, trust = state.length, state.trust
        if step_size is not None:
            v = state.v
            step_directions = jax.lax.cond(
                passing, lambda: directions(*exact()), lambda: optax.tree.add(last, change)
            )
        else:
            summed = optax.tree.add(last, change)
            step_directions, v, judged = jax.lax.cond(
                passing,
                lambda: _limit_directions(summed, exact(), state.v, *scales),
                lambda: (summed, state.v, scales),
            )
            length, trust = optax.tree.where(state.stale, scales, judged)
        around = indices.number, problem, w, alpha, train
        pair, mover_state = mover.move(
            (w, v), step_directions[:2], mover_state, *around, shorter=length
        )
        report = adjoint_metrics(problem, below, above, step_directions, outer.w)
        last = Tables((point._replace(v=v), step_directions, mover_state))
        stale = jnp.zeros_like(state.stale)
        along = optax.tree.scale(trust, step_directions.alpha)
        return along, pair[0], SpabaState(pair[1], length, trust, stale, last), report

    def memory(train, valid):  # its errors add up from pass to pass
        return 1 / (often(train, valid) or _full_pass_probability(train, valid))

    def restart(state, number, train, valid):
        return state._replace(stale=jnp.ones_like(state.stale))

    return SingleLoop(init, step, lambda state: state.v, memory=memory, restart=restart)
