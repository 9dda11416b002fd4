"""SABA: SOBA whose every estimate is SAGA's."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from bilevel.protocols import Pytree, SingleLoop, Tables
from bilevel.stochastic import _steps as steps
from bilevel.stochastic._blocks import Blocks, Oracle
from bilevel.stochastic._oracles import (
    Point,
    directions,
    lower_oracle,
    metrics,
    outer_oracle,
    residual,
)
from bilevel.stochastic._steps import Rate


class Saga(NamedTuple):
    """The last estimates of each batch of one loss; 0 of those that have not come yet."""

    mean: Pytree  # of the table's rows
    lost: Pytree  # what rounding left off the mean so far
    row: Pytree  # the table's row of the next batch: see `_saga`
    table: Pytree  # [batches, ...]


class SabaState(NamedTuple):
    """State of :func:`saba`."""

    v: Pytree  # like w: the adjoint
    tables: Tables  # a `Saga` of the lower and one of the outer loss; the metric, if any


def _empty(blocks: Blocks, oracle: Oracle) -> Saga:
    shapes = jax.eval_shape(lambda: blocks.at(0, oracle)[0])
    nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    table = jax.tree.map(lambda s: jnp.zeros((blocks.count, *s.shape), s.dtype), shapes)
    return Saga(nothing, nothing, nothing, table)


def _row(table: Pytree, i) -> Pytree:
    return jax.tree.map(lambda t: jax.lax.dynamic_index_in_dim(t, i, keepdims=False), table)


def _saga(blocks: Blocks, oracle: Oracle, saga: Saga, number, i, following):
    """The estimate from batch ``i``, what came beside it, and the table with it.

    In the first epoch it is the batch's own, as the mean is not yet that of all rows.

    The old row comes from the step before, which read it after it had written its own. Reading a
    row before it is written, in one step, makes XLA copy the table.
    """
    new, rest = blocks.at(i, oracle)
    change = optax.tree.sub(new, saga.row)
    full = number >= blocks.count
    estimate = jax.tree.map(lambda c, m: c + jnp.where(full, m, 0), change, saga.mean)
    # Compensated, after Kahan: in float32 the rounding of 100,000 sums would outweigh the mean.
    due = optax.tree.add_scale(saga.lost, 1 / blocks.count, change)
    mean = optax.tree.add(saga.mean, due)
    lost = optax.tree.sub(due, optax.tree.sub(mean, saga.mean))
    table = jax.tree.map(
        lambda t, x: jax.lax.dynamic_update_index_in_dim(t, x, i, 0), saga.table, new
    )
    return estimate, rest, Saga(mean, lost, _row(table, following), table)


def saba(step_size: Rate | None = None) -> SingleLoop:
    """SABA: :func:`bilevel.soba` with SAGA's estimates, new - what this batch gave last + mean.

    Of all five derivatives the last ones of each batch are in tables: the directions become exact
    at a fixed point, and constant rates converge.

    Parameters
    ----------
    step_size : positive number, or schedule ``steps done -> number``, optional
        Of ``w`` and ``v``; a third of 1 / L is safe, L the largest curvature of the lower loss on
        any batch. By default steps are taken in a metric, from measured curvature; then ``alpha``
        wants :func:`bilevel.paced`.

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
    A step: 3 lower oracles, 2 outer ones, from one batch of each loss. The first epoch's steps are
    SOBA's, and fill the tables. Memory: for every batch of train 2 p + dim(alpha) numbers, of valid
    p + dim(alpha); where that is too much there is :func:`bilevel.spaba`. (n + m)^(2/3) / eps
    samples for E|dh|^2 <= eps, linear convergence under the Polyak-Lojasiewicz inequality. Nothing
    is proved on a simplex or another set. Under ``vmap`` the tables are as many times larger.

    References
    ----------
    Dagreou, Ablin, Vaiter & Moreau (2022), A framework for bilevel optimization that enables
    stochastic and global variance reduction algorithms, Algorithm 2.

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
    >>> bilevel.search(problem, bilevel.saba(0.3), *args, **options).alpha.round(4)
    Array([2.], dtype=float...)
    """
    if step_size is not None:
        steps.checked("step_size", step_size)
    mover = steps.mover(step_size)

    def init(problem, alpha, w, turn, train, valid):
        point = Point(w, optax.tree.zeros_like(w), alpha)
        below = _empty(train, lower_oracle(problem, point))
        above = _empty(valid, outer_oracle(problem, point))
        return SabaState(point.v, Tables((below, above, mover.init(problem, w, alpha, train))))

    def step(problem, alpha, w, state, turn, train, valid):
        point = Point(w, state.v, alpha)
        at_train, at_valid = lower_oracle(problem, point), outer_oracle(problem, point)
        of_train, of_valid, kept = state.tables.content
        lower, below, of_train = _saga(
            train, at_train, of_train, turn.number, turn.train[0], turn.next_train
        )
        outer, above, of_valid = _saga(
            valid, at_valid, of_valid, turn.number, turn.valid[0], turn.next_valid
        )
        found = directions(lower, outer)
        around = turn.number, problem, w, alpha, train
        (w, v), kept = mover.move((w, state.v), found[:2], kept, *around)
        noisy = residual(found, outer.w)
        report = metrics(problem, below, above, found.w, noisy_residual=noisy)
        return found.alpha, w, SabaState(v, Tables((of_train, of_valid, kept))), report

    def memory(train, valid):
        return max(train.count, valid.count)

    return SingleLoop(init, step, lambda state: state.v, memory=memory)
