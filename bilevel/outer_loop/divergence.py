"""Detect early that a search diverges, and then shorten the steps of alpha.

A search diverges if the direction of alpha and the outer loss both grow far beyond their values in
the first half of the steps, and stay there. Three cases do not count: a transient at the start
grows only like a low power of the steps, an outlier does not stay, and an escape from a saddle
lowers the loss. The checks compare means over windows of a few steps. If the search diverges, it
resumes from the last good state, with steps of alpha a quarter as long.
"""

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bilevel.contracts import DescentState, Pytree, Tables
from bilevel.internal.checks import gradient_transformation
from bilevel.outer_loop import geometry

NOISY, EXACT = 8, 2  # steps of a window, in a single loop and in other searches
_MARKS = np.unique(np.round(2 ** (np.arange(61) / 2)).astype(np.int64))  # windows done
_FAR, _AGAIN = 16.0, 8.0  # growth that counts as divergence, the first time and later
_SAVED = 4  # windows between two copies of the state
_UNSURE, _SETTLED = 2.0, 8  # a good state has less growth, and at least this many windows
_STAYS = 4  # windows in a row that are far before the search counts as divergent
_FAST, _VERY_FAR = 2, 2.0**14  # the number of windows if growth is very fast
_SHORTER = 0.25
_MOST = 8  # returns before the search ends
GAVE_UP = -1  # instead of the number of a quantity that is not finite


class DivergenceMonitor(NamedTuple):
    """Observations of a search. Pairs are the norm of the direction and the outer loss."""

    scale: jax.Array  # []: alpha's steps, relative to the optimizer's
    times: jax.Array  # [], int: how often they were shortened
    recent: jax.Array  # [2]: sums over the steps of the current window
    streak: jax.Array  # [], int: windows in a row that were far
    top: jax.Array  # [2]: largest means so far
    marks: jax.Array  # [3, 2]: those at 1/2, 1/sqrt(2) and 1 of the windows at the last mark
    least: jax.Array  # []: smallest mean of outer losses
    good: Pytree  # the last good state, without tables
    begun: jax.Array  # [], int: windows done at the start, or at the last return to that state


def init_divergence_monitor(state: DescentState) -> DivergenceMonitor:
    """Return the monitor of a search that begins in ``state``."""
    zero, pairs = np.zeros((), int), np.zeros((3, 2))  # by numpy, so that no programs are compiled
    start: Any = np.ones(()), zero, pairs[0], zero, pairs[0], pairs, pairs[0, 0]
    # Copies, since a search donates the buffers of its loop: none may be there twice.
    copies = jax.tree.map(lambda x: jnp.array(x, copy=True), (*start, _remove_tables(state), zero))
    return DivergenceMonitor(*copies)


def observed(
    monitor: DivergenceMonitor, direction: jax.Array, value: jax.Array, good: jax.Array
) -> DivergenceMonitor:
    """Add the direction's norm and the outer loss of a step, if the step was ``good``."""
    pair = jnp.stack([direction.astype(float), value.astype(float)])
    limit = float(jnp.finfo(pair.dtype).max) * 2.0**-20
    pair = jnp.clip(jnp.where(good, pair, 0.0), -limit, limit)
    return monitor._replace(recent=monitor.recent + pair)


def check_divergence(
    monitor: DivergenceMonitor, state: DescentState, number, trouble, restart: Callable, window: int
) -> tuple[DivergenceMonitor, DescentState, jax.Array]:
    """Check the search after step ``number``, if a window of ``window`` steps ends there.

    ``restart(solver_state, number)`` adapts an earlier solver state to the present step. ``number``
    is the same in all copies under vmap, so that nothing is computed between windows.
    """
    leaves = jax.tree.leaves(state.solver_state, is_leaf=_is_tables)
    tables = [x for x in leaves if _is_tables(x)]

    def ended(monitor, small, trouble, number):
        windows = (number + 1) // window
        diverged, steady, seen = _judge_window(monitor, windows, window)
        diverged = diverged & (trouble == 0)  # a search that ended does not change

        def back_or_saved(good, small, number, diverged):
            back = functools.partial(_restore_good_state, good, small, number, restart)
            good, small = jax.lax.cond(diverged, lambda: (good, back()), lambda: (small, small))
            return good, small, number, diverged

        changed = diverged | (steady & (windows % _SAVED == 0))
        pair = monitor.good, small, number, diverged
        good, small, *_ = _in_place_if(back_or_saved, changed, pair)
        gave_up = diverged & (seen.times > _MOST)
        seen = where(trouble == 0, seen._replace(good=()), monitor._replace(good=()))
        return seen._replace(good=good), small, jnp.where(gave_up, GAVE_UP, trouble), number

    args = monitor, _remove_tables(state), trouble, number
    monitor, small, trouble, _ = _in_place_if(ended, (number + 1) % window == 0, args)
    return monitor, _replace_tables(small, tables), trouble


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _in_place_if(change: Callable[..., tuple], condition: jax.Array, args: tuple) -> tuple:
    """Return ``change(*args)`` under a condition, else ``args``, which are not copied."""
    # A branch of `cond` copies the arguments that it returns; a loop without a step does not.
    begin = condition, args
    once = lambda pair: (jnp.zeros_like(pair[0]), change(*pair[1]))  # noqa: E731
    return jax.lax.while_loop(lambda pair: pair[0], once, begin)[1]


@_in_place_if.defjvp
def _in_place_if_derivative(change, primals, tangents):
    # Reverse mode passes through a branch, not through a loop.
    condition, args = primals
    branch = lambda *args: jax.lax.cond(condition, change, lambda *same: same, *args)  # noqa: E731
    return jax.jvp(branch, args, tangents[1])


def _judge_window(
    monitor: DivergenceMonitor, windows: jax.Array, window: int
) -> tuple[jax.Array, jax.Array, DivergenceMonitor]:
    """Return whether the search diverges, whether its state is good, and the new monitor."""
    mean, done = monitor.recent / window, windows - monitor.begun
    first = done == 1
    least = jnp.where(first, mean[1], jnp.minimum(monitor.least, mean[1]))
    before = jnp.where(first, mean, monitor.marks[0])  # the largest in the first half
    rise, usual = mean[1] - least, before[1] - least

    def beyond(factor):
        return (mean[0] > factor * before[0]) & (rise > factor * usual)

    far = beyond(jnp.where(monitor.times > 0, _AGAIN, _FAR))
    far = far & (rise > usual + jnp.abs(before[1]))
    streak = jnp.where(far, monitor.streak + 1, 0)
    fast = (streak >= _FAST) & (mean[0] > _VERY_FAR * before[0])
    diverged = (streak >= _STAYS) | fast
    top = jnp.where(first, mean, jnp.maximum(mean, monitor.top))
    moved = jnp.concatenate([monitor.marks[1:], top[None]])
    marks = jnp.where((done == jnp.asarray(_MARKS, done.dtype)).any(), moved, monitor.marks)
    marks = jnp.where(first, jnp.broadcast_to(mean[None], marks.shape), marks)
    seen = monitor._replace(
        scale=jnp.where(diverged, _SHORTER, 1.0).astype(monitor.scale.dtype) * monitor.scale,
        times=monitor.times + diverged.astype(monitor.times.dtype),
        recent=jnp.zeros_like(monitor.recent),
        streak=jnp.where(diverged, 0, streak),
        top=top,
        marks=marks,
        least=least,
        begun=jnp.where(diverged, windows.astype(monitor.begun.dtype), monitor.begun),
    )
    return diverged, (done >= _SETTLED) & ~(diverged | beyond(_UNSURE)), seen


def _restore_good_state(good, small, number, restart: Callable) -> Pytree:
    """Return the last good state; optimizer counts and the number of steps carry over."""

    def floats(old, new):
        return old if jnp.issubdtype(new.dtype, jnp.inexact) else new

    return good._replace(
        solver_state=restart(good.solver_state, number),
        optimizer_state=jax.tree.map(floats, good.optimizer_state, small.optimizer_state),
        step=small.step,
    )


def shortened(old: DescentState, new: DescentState, scale: jax.Array) -> DescentState:
    """Take ``scale`` times the step of alpha, except for leaves that a geometry has moved."""
    landed = geometry.paths(new.optimizer_state)

    def part(path, before, after):
        if path in landed:
            return after
        shorter = before + scale.astype(after.dtype) * (after - before)
        return jnp.where(scale == 1, after, shorter)

    return new._replace(alpha=jax.tree.map_with_path(part, old.alpha, new.alpha))


def shortening(
    optimizer: optax.GradientTransformation, scale: jax.Array
) -> optax.GradientTransformationExtraArgs:
    """Make geometries take ``scale`` times the step of ``optimizer``; they end on their sets."""
    inner = gradient_transformation("optimizer", optimizer)

    def update(updates, state, params=None, **extra_args):
        if geometry.geometry_names(state):
            extra_args["shorten"] = scale
        return inner.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def messages(scale: Any) -> tuple[str, ...]:
    """Return messages about a search that took ``scale`` times the optimizer's steps."""
    scale = float(scale)
    if scale == 1:
        return ()
    if round(np.log(scale) / np.log(_SHORTER)) > _MOST:
        return (
            f"alpha diverged, also with {scale:.0e} times the optimizer's steps. The result is the "
            "last good point. Remedies: a smaller step_size or rate of the solver, or another "
            "start.",
        )
    return (
        f"alpha diverged, so the search returned to an earlier point and took {scale:.2g} times "
        "the optimizer's steps from there (`step_scale`). Remedy: a learning rate smaller by this "
        "factor.",
    )


def where(condition: jax.Array, new: Pytree, old: Pytree) -> Pytree:
    """Return ``new`` where the condition holds, else ``old``. :class:`Tables` are always new."""

    def choose(x, y):
        return x if _is_tables(x) else jnp.where(condition, x, y)

    return jax.tree.map(choose, new, old, is_leaf=_is_tables)


def _is_tables(x: Any) -> bool:
    return isinstance(x, Tables)


def _replace_tables(state: DescentState, tables: Iterable[Tables]) -> DescentState:
    remaining = iter(tables)
    solver_state = jax.tree.map(
        lambda x: next(remaining) if _is_tables(x) else x, state.solver_state, is_leaf=_is_tables
    )
    return state._replace(solver_state=solver_state)


def _remove_tables(state: DescentState) -> DescentState:
    return _replace_tables(state, itertools.repeat(Tables(())))
