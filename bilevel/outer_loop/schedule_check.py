"""Check whether the inner optimizer's schedule leaves later outer steps without a step size.

A schedule's count carries over from one outer step to the next. So a schedule for one lower solve
ends long before the search does.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bilevel.contracts import Inner, Pytree, params_of
from bilevel.internal.checks import gradient_transformation
from bilevel.outer_loop.descent import run_once

_SCHEDULED = (  # optax's states with the count of a schedule; one of them is not public
    "ScaleByScheduleState",
    "InjectHyperparamsState",
    "InjectStatefulHyperparamsState",
    "WrappedScheduleState",
)
_OUTER, _INNER = 16, 8  # steps at which a schedule is evaluated


def spent_share(solver: Any, alpha: Pytree, w: Pytree, steps: int) -> jax.Array | None:
    """Return the share of ``steps`` outer steps with the inner schedule below 1 % of its peak.

    A solver without a schedule that carries over to the next step gives None.
    """
    inner = getattr(solver, "inner", None)
    if inner is None:
        return None
    state = jax.eval_shape(lambda alpha, w: inner.rule(alpha).init(params_of(w)), alpha, w)
    if not any(map(_is_scheduled, jax.tree.leaves(state, is_leaf=_is_scheduled))):
        return None
    return run_once(functools.partial(_share_below_peak, inner, steps), alpha, w)


def _share_below_peak(inner: Inner, steps: int, alpha: Pytree, w: Pytree) -> jax.Array:
    """Compare rates, the sizes of updates by ones, at 16 outer steps and 8 inner steps of each."""
    optimizer = gradient_transformation("optimizer", inner.rule(alpha))
    w = params_of(w)
    state = optimizer.init(w)
    ones = optax.tree.ones_like(w)

    def rate(count):
        extra_args = {"value": jnp.ones(()), "grad": ones, "value_fn": lambda w: jnp.ones(())}
        updates, _ = optimizer.update(ones, _at_count(state, count), w, **extra_args)
        return optax.tree.norm(updates)

    outer = np.unique(np.linspace(0, steps - 1, _OUTER).astype(int))
    within = np.unique(np.linspace(0, inner.steps - 1, _INNER).astype(int))
    counts = jnp.asarray(outer[:, None] * inner.steps + within)
    rates = jax.lax.map(rate, counts.ravel()).reshape(counts.shape).max(1)
    return jnp.mean(rates < 0.01 * rates.max())


def _is_scheduled(x: Any) -> bool:
    return type(x).__name__ in _SCHEDULED


def _at_count(state: Pytree, count: jax.Array) -> Pytree:
    """Return an optimizer's state with the counts of its schedules set to ``count``."""

    def moved(x):
        if not _is_scheduled(x):
            return x
        parts = {name: _at_count(part, count) for name, part in x._asdict().items()}
        return type(x)(**parts | {"count": count.astype(jnp.result_type(x.count))})

    return jax.tree.map(moved, state, is_leaf=_is_scheduled)
