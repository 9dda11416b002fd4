"""SOBA's directions with less variance: estimates by SAGA (SABA) and by PAGE (SPABA)."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from bilevel.contracts import Pytree, SingleLoop, Tables
from bilevel.internal.checks import check_in_range, common_dtype
from bilevel.stochastic import _oracles as oracles
from bilevel.stochastic import _steps as steps
from bilevel.stochastic._blocks import BatchedData, Oracle, zeros_of_shape
from bilevel.stochastic._oracles import Iterate, Lower, Slopes, tree_norm

# SABA
_LOST = 3.0  # averaged relative residual above which the adjoint restarts; an adjoint of 0 has 1
_SHORTER = 0.25  # factor of the step's length at a restart
_SHORTEST = 50  # minimum number of steps to average over
# SPABA
_STEPS = 1000  # from one full pass to the next, if the steps are measured
_DRIFT = 0.3  # allowed error of the summed adjoint direction at a pass, in outer gradients
_LENGTHS = 0.25, 1.2  # limits of the factor of the steps' length after a pass
_ERROR = 0.1  # allowed relative error of alpha's summed direction at a pass
_TRUSTS, _LEAST_TRUST = (0.5, 1.05), 1 / 32  # factors after a pass, and the least trust


class Saga(NamedTuple):
    """The last estimates of each batch of one loss; 0 for batches that were not drawn yet."""

    mean: Pytree  # of the table's rows
    lost: Pytree  # the accumulated rounding error of the mean
    row: Pytree  # the table's row of the next batch: see `_saga`
    table: Pytree  # [batches, ...]


class AdjointMonitor(NamedTuple):
    """Whether the adjoint diverges."""

    length: jax.Array  # [], in (0, 1]: factor of the measured length of a step
    residual: jax.Array  # [], averaged over about an epoch
    begun: jax.Array  # [], int: the step an epoch after which the tables are full


class SabaState(NamedTuple):
    """State of :func:`saba`."""

    v: Pytree  # like w: the adjoint
    monitor: AdjointMonitor
    tables: Tables  # a `Saga` of the lower and one of the outer loss; the metric, if any


def _empty_saga(blocks: BatchedData, oracle: Oracle) -> Saga:
    nothing = zeros_of_shape(lambda: blocks.at(0, oracle)[0])
    table = jax.tree.map(lambda x: jnp.zeros((blocks.count, *x.shape), x.dtype), nothing)
    return Saga(nothing, nothing, nothing, table)


def _saga(blocks: BatchedData, oracle: Oracle, saga: Saga, number, i, following):
    """Return the estimate from batch ``i``, its loss and aux, and the table with it."""
    new, loss_and_aux = blocks.at(i, oracle)
    change = optax.tree.sub(new, saga.row)
    full = number >= blocks.count
    estimate = optax.tree.where(full, optax.tree.add(change, saga.mean), new)
    # Kahan summation: in float32 the rounding of 100,000 sums would exceed the mean.
    due = optax.tree.add_scale(saga.lost, 1 / blocks.count, change)
    mean = optax.tree.add(saga.mean, due)
    lost = optax.tree.sub(due, optax.tree.sub(mean, saga.mean))
    table = jax.tree.map(
        lambda t, x: jax.lax.dynamic_update_index_in_dim(t, x, i, 0), saga.table, new
    )
    # Reading the next row now, after writing this one, saves XLA a copy of the table.
    row = jax.tree.map(lambda t: jax.lax.dynamic_index_in_dim(t, following, keepdims=False), table)
    return estimate, loss_and_aux, Saga(mean, lost, row, table)


def _monitor_adjoint(monitor: AdjointMonitor, residual, number, epoch: int) -> tuple:
    """Return the monitor after a step, and whether the adjoint is lost: worse than 0."""
    since = max(epoch, _SHORTEST)
    average = monitor.residual + (residual - monitor.residual) / since
    average = jnp.where(number - monitor.begun < epoch, 0, average).astype(residual.dtype)
    lost = average > _LOST
    monitor = AdjointMonitor(
        jnp.where(lost, _SHORTER, 1).astype(residual.dtype) * monitor.length,
        jnp.where(lost, 0, average),
        # Two epochs of steps contain every batch; one epoch of steps across two may not.
        jnp.where(lost, number + 1 + epoch, monitor.begun),
    )
    return monitor, lost


def saba(step_size: steps.Rate | None = None) -> SingleLoop:
    """SABA: :func:`bilevel.soba` with SAGA's estimates (new - last of this batch + mean).

    The directions become exact at a fixed point, so constant rates converge.

    Parameters
    ----------
    step_size : positive number, or schedule ``steps done -> number``, optional
        Of ``w`` and ``v``; a third of 1 / L is safe, L the largest curvature of the lower loss on
        any batch. By default steps are taken in a metric, from measured curvature; then use
        :func:`bilevel.paced` for ``alpha``.

    Raises
    ------
    ValueError
        If ``step_size`` is not positive.

    Notes
    -----
    Per step: 3 lower oracles and 2 outer ones, from one batch of each loss. The first epoch's steps
    are SOBA's, and fill the tables. Memory: 2 p + dim(alpha) numbers per batch of train and
    p + dim(alpha) per batch of valid; :func:`bilevel.spaba` needs less. It takes
    (n + m)^(2/3) / eps samples for E|dh|^2 <= eps, with linear convergence under the
    Polyak-Lojasiewicz inequality. Nothing is proved on a simplex or another set. Under ``vmap``
    every copy has its tables.

    Without a step size, an adjoint with an averaged residual of three times that of 0 restarts
    from 0, with steps a quarter as long. Rows with heavy tails need this.

    References
    ----------
    Dagreou, Ablin, Vaiter & Moreau (2022), A framework for bilevel optimization that enables
    stochastic and global variance reduction algorithms, Algorithm 2.

    Examples
    --------
    >>> saba(0.3).draws
    (1, 1)
    """
    mover = steps.mover(step_size)

    def init(problem, alpha, w, indices, train, valid):
        point = Iterate(w, optax.tree.zeros_like(w), alpha)
        below = _empty_saga(train, oracles.lower_oracle(problem, point))
        above = _empty_saga(valid, oracles.outer_oracle(problem, point))
        one = jnp.ones((), common_dtype(*jax.tree.leaves(w)))
        monitor = AdjointMonitor(one, 0 * one, jnp.zeros((), indices.number.dtype))
        mover_state = mover.init(problem, w, alpha, train)
        return SabaState(point.v, monitor, Tables((below, above, mover_state)))

    def step(problem, alpha, w, state, indices, train, valid):
        point, monitor = Iterate(w, state.v, alpha), state.monitor
        at_train = oracles.lower_oracle(problem, point)
        at_valid = oracles.outer_oracle(problem, point)
        of_train, of_valid, mover_state = state.tables.content
        number = indices.number - monitor.begun
        lower, below, of_train = _saga(
            train, at_train, of_train, number, indices.train[0], indices.next_train
        )
        outer, above, of_valid = _saga(
            valid, at_valid, of_valid, number, indices.valid[0], indices.next_valid
        )
        directions = oracles.directions(lower, outer)
        report = oracles.adjoint_metrics(problem, below, above, directions, outer.w)
        around = indices.number, problem, w, alpha, train
        (w, v), mover_state = mover.move(
            (w, state.v), directions[:2], mover_state, *around, shorter=monitor.length
        )
        if step_size is None:
            residual, epoch = report["noisy_residual"], memory(train, valid)
            monitor, lost = _monitor_adjoint(monitor, residual, indices.number, epoch)
            v = optax.tree.where(lost, optax.tree.zeros_like(v), v)
        tables = Tables((of_train, of_valid, mover_state))
        return directions.alpha, w, SabaState(v, monitor, tables), report

    def memory(train, valid):
        return max(train.count, valid.count)

    def restart(state, number, train, valid):
        monitor = state.monitor
        begun = (number + 1 + memory(train, valid)).astype(monitor.begun.dtype)
        return state._replace(monitor=monitor._replace(begun=begun))

    return SingleLoop(init, step, lambda state: state.v, memory=memory, restart=restart)


class SpabaState(NamedTuple):
    """State of :func:`spaba`."""

    v: Pytree  # like w: the adjoint
    length: jax.Array  # [], in (0, 1]: factor of the measured length of a step
    trust: jax.Array  # [], in (0, 1]: factor of alpha's direction
    stale: jax.Array  # [], bool: whether the next step takes all data
    last: Tables  # the last point and its estimates; the metric, if any


def _full_pass_probability(train: BatchedData, valid: BatchedData, measured: bool) -> float:
    """Return the chance of a full pass: the work of the other steps, or up to four times that."""
    count = train.count + valid.count
    equal = 2 / (2 + count)
    return max(equal, min(8 / (8 + count), 1 / _STEPS)) if measured else equal


def _limit_directions(
    summed: Iterate, exact_estimates: tuple[Lower, Slopes], v: Pytree, length, trust
) -> tuple[Iterate, Pytree, tuple[jax.Array, jax.Array]]:
    """Return exact directions, the adjoint, and the lengths of steps and of alpha's direction."""
    lower, outer = exact_estimates
    _, exact, along = oracles.directions(lower, outer)
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
    return oracles.directions(lower, outer), v, (jnp.minimum(factor * length, 1), trust)


def spaba(step_size: steps.Rate | None = None, *, probability: float | None = None) -> SingleLoop:
    """SPABA: :func:`bilevel.soba` with estimates by PAGE, without tables.

    With ``probability`` a step takes all data. Otherwise it adds to the last estimates the
    difference between the two points on one batch.

    Parameters
    ----------
    step_size : positive number, or schedule ``steps done -> number``, optional
        As for :func:`bilevel.saba`.
    probability : float in [0, 1], optional
        Probability of a full pass. Default for n batches of both losses: 2 / (2 + n), so passes
        cost about as much as the other steps. Without a step size and for large n it is 1 / 1000,
        up to 8 / (8 + n), because the passes also judge the measured steps.

    Raises
    ------
    ValueError
        If ``step_size`` is not positive, or ``probability`` is not in [0, 1].

    Notes
    -----
    Per step: twice SOBA's oracles, at two points as one program; a full pass goes through the data
    in wide batches. Memory: 6 more copies of ``w``, 3 of ``alpha``, and the metric. It takes
    n^(1/2) / eps samples in order for E|dh|^2 <= eps, which is optimal (and the same for SRBA, with
    passes at fixed times). The paper also clips ``v``, and draws batches independently; ours come
    in shuffled epochs. Nothing is proved on a simplex or another set. Under ``vmap`` over keys
    every step costs a full pass: loop over those.

    Without a step size, every pass compares the adjoint's residual with the sum since the last one.
    If they differ by more than 0.3 of the outer gradient, steps become shorter, and an adjoint that
    is worse than 0 restarts from 0. If the sums of alpha's direction are wrong by more than a tenth
    of it, its direction is shortened, to 1/32 at least.

    References
    ----------
    Chu, Xu, Yao & Zhang (2024), SPABA: a single-loop and probabilistic stochastic bilevel algorithm
    achieving optimal sample complexity, Algorithm 1. Li, Bao, Zhang & Richtarik (2021), PAGE.

    Examples
    --------
    >>> spaba(0.3, probability=0.1).draws
    (1, 1)
    """
    mover = steps.mover(step_size)
    if probability is not None:
        check_in_range("probability", probability, -1e-12, 1 + 1e-12)

    by_default = functools.partial(_full_pass_probability, measured=step_size is None)

    def often(train, valid):
        return by_default(train, valid) if probability is None else probability

    def init(problem, alpha, w, indices, train, valid):
        point = Iterate(w, optax.tree.zeros_like(w), alpha)
        directions = oracles.directions(*oracles.full_estimates(problem, point, train, valid))
        length = jnp.ones((), common_dtype(*jax.tree.leaves(w)))
        last = Tables((point, directions, mover.init(problem, w, alpha, train)))
        return SpabaState(point.v, length, length, jnp.zeros((), bool), last)

    def step(problem, alpha, w, state, indices, train, valid):
        point = Iterate(w, state.v, alpha)
        before, last, mover_state = state.last.content

        def at_both_points(oracle, data, i):
            return data.at(i, oracles.at_both(lambda at: oracle(problem, at), before, point))

        of_lower = at_both_points(oracles.lower_oracle, train, indices.train[0])
        of_outer = at_both_points(oracles.outer_oracle, valid, indices.valid[0])
        ((lower_before, lower), below), ((outer_before, outer), above) = of_lower, of_outer
        own, earlier = map(oracles.directions, (lower, lower_before), (outer, outer_before))
        change = optax.tree.sub(own, earlier)
        passing = (indices.uniform < often(train, valid)) | state.stale

        def exact():
            return oracles.full_estimates(problem, point, train, valid)

        v, scales = state.v, (state.length, state.trust)
        length, trust = scales
        if step_size is not None:
            directions = jax.lax.cond(
                passing, lambda: oracles.directions(*exact()), lambda: optax.tree.add(last, change)
            )
        else:
            summed = optax.tree.add(last, change)
            directions, v, judged = jax.lax.cond(
                passing,
                lambda: _limit_directions(summed, exact(), state.v, *scales),
                lambda: (summed, state.v, scales),
            )
            length, trust = optax.tree.where(state.stale, scales, judged)
        around = indices.number, problem, w, alpha, train
        pair, mover_state = mover.move((w, v), directions[:2], mover_state, *around, shorter=length)
        report = oracles.adjoint_metrics(problem, below, above, directions, outer.w)
        last = Tables((point._replace(v=v), directions, mover_state))
        stale = jnp.zeros_like(state.stale)
        along = optax.tree.scale(trust, directions.alpha)
        return along, pair[0], SpabaState(pair[1], length, trust, stale, last), report

    def memory(train, valid):  # its errors add up from pass to pass
        return 1 / (often(train, valid) or by_default(train, valid))

    def restart(state, number, train, valid):
        return state._replace(stale=jnp.ones_like(state.stale))

    return SingleLoop(init, step, lambda state: state.v, memory=memory, restart=restart)
