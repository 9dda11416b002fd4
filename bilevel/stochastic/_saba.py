"""SABA: SOBA with SAGA's estimates."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from bilevel.contracts import Pytree, SingleLoop, Tables
from bilevel.internal.checks import common_dtype
from bilevel.stochastic import _steps as steps
from bilevel.stochastic._blocks import BatchedData, Oracle, zeros_of_shape
from bilevel.stochastic._oracles import (
    Iterate,
    adjoint_metrics,
    directions,
    lower_oracle,
    outer_oracle,
)

_LOST = 3.0  # averaged relative residual above which the adjoint restarts; an adjoint of 0 has 1
_SHORTER = 0.25  # factor of the step's length at a restart
_SHORTEST = 50  # minimum number of steps to average over


class Saga(NamedTuple):
    """The last estimates of each batch of one loss; 0 for batches that were not drawn yet."""

    mean: Pytree  # of the table's rows
    lost: Pytree  # the accumulated rounding error of the mean
    row: Pytree  # the table's row of the next batch: see `_saga`
    table: Pytree  # [batches, ...]


class AdjointMonitor(NamedTuple):
    """Whether the adjoint diverges: see :func:`_monitor_adjoint`."""

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


def _table_row(table: Pytree, i) -> Pytree:
    return jax.tree.map(lambda t: jax.lax.dynamic_index_in_dim(t, i, keepdims=False), table)


def _saga(blocks: BatchedData, oracle: Oracle, saga: Saga, number, i, following):
    """Return the estimate from batch ``i``, its loss and aux, and the table with it.

    In the first epoch after a start the estimate is the batch's own, because the mean does not
    cover all rows yet. The previous step read the old row after writing its own. Reading a row
    before writing it, in one step, makes XLA copy the table.
    """
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
    return estimate, loss_and_aux, Saga(mean, lost, _table_row(table, following), table)


def _monitor_adjoint(monitor: AdjointMonitor, residual, number, epoch: int) -> tuple:
    """Return the monitor after a step, and whether the adjoint is lost: worse than 0.

    Steps are as long as the curvature of a few batches allows. If other batches are steeper, the
    adjoint diverges. Then steps become shorter, and it restarts from 0 with new tables.
    """
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

    Tables hold the last five derivatives of each batch, so the directions become exact at a fixed
    point, and constant rates converge.

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
    >>> import bilevel
    >>> bilevel.saba(0.3).draws
    (1, 1)
    """
    mover = steps.mover(step_size)

    def init(problem, alpha, w, indices, train, valid):
        point = Iterate(w, optax.tree.zeros_like(w), alpha)
        below = _empty_saga(train, lower_oracle(problem, point))
        above = _empty_saga(valid, outer_oracle(problem, point))
        one = jnp.ones((), common_dtype(*jax.tree.leaves(w)))
        monitor = AdjointMonitor(one, 0 * one, jnp.zeros((), indices.number.dtype))
        mover_state = mover.init(problem, w, alpha, train)
        return SabaState(point.v, monitor, Tables((below, above, mover_state)))

    def step(problem, alpha, w, state, indices, train, valid):
        point = Iterate(w, state.v, alpha)
        at_train, at_valid = lower_oracle(problem, point), outer_oracle(problem, point)
        of_train, of_valid, mover_state = state.tables.content
        number = indices.number - state.monitor.begun
        lower, below, of_train = _saga(
            train, at_train, of_train, number, indices.train[0], indices.next_train
        )
        outer, above, of_valid = _saga(
            valid, at_valid, of_valid, number, indices.valid[0], indices.next_valid
        )
        step_directions = directions(lower, outer)
        around = indices.number, problem, w, alpha, train
        report = adjoint_metrics(problem, below, above, step_directions, outer.w)
        monitor = state.monitor
        (w, v), mover_state = mover.move(
            (w, state.v), step_directions[:2], mover_state, *around, shorter=monitor.length
        )
        if step_size is None:
            residual, epoch = report["noisy_residual"], memory(train, valid)
            monitor, lost = _monitor_adjoint(monitor, residual, indices.number, epoch)
            v = optax.tree.where(lost, optax.tree.zeros_like(v), v)
        tables = Tables((of_train, of_valid, mover_state))
        return step_directions.alpha, w, SabaState(v, monitor, tables), report

    def memory(train, valid):
        return max(train.count, valid.count)

    def restart(state, number, train, valid):
        monitor = state.monitor
        begun = (number + 1 + memory(train, valid)).astype(monitor.begun.dtype)
        return state._replace(monitor=monitor._replace(begun=begun))

    return SingleLoop(init, step, lambda state: state.v, memory=memory, restart=restart)
