"""The history of a search: what is kept of every step, and in which row."""

import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bilevel.contracts import Pytree
from bilevel.internal.processes import to_numpy

_LARGE = 2**16  # bytes; the history of a larger alpha is kept only where it is asked for


def select_metrics(names: Sequence[str] | None, row: dict[str, Any], rows: int) -> dict[str, Any]:
    """What of a step's ``row`` the history of so many rows is to have.

    Raises
    ------
    ValueError
        If ``names`` is a string, or has a name that ``row`` lacks.
    """
    if isinstance(names, str):
        raise ValueError(f"history: expected a sequence of names, got the string {names!r}.")
    if names is not None:
        for name in names:
            if name not in row:
                raise ValueError(
                    f"history: expected names among {', '.join(sorted(row))}, got {name!r}."
                )
        return {name: row[name] for name in sorted(names)}
    kept = dict(row)
    for name in ("alpha", "aux"):
        size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(row.get(name)))
        if size > _LARGE:
            del kept[name]
            warnings.warn(
                f"history: {name}'s would take {rows * size / 2**20:,.0f} MiB and is left out; "
                f"name {name} in `history` to keep it.",
                stacklevel=4,
            )
    return kept


def history_length(steps: int, every: int) -> int:
    """Rows of the history of ``steps`` steps, one for ``every`` steps or what is left of them."""
    return -(-steps // every)


def step_of(row: int, count: int, every: int) -> int:
    """The step, from 1, whose values a row has, of a history of ``count`` steps.

    Examples
    --------
    >>> [step_of(row, 25, 10) for row in range(3)]
    [10, 20, 25]
    """
    return min((row + 1) * every, count)


def empty_history(row: Pytree, rows: int) -> Pytree:
    """``rows`` rows of zeros."""
    return jax.tree.map(lambda x: jnp.zeros((rows, *x.shape), x.dtype), row)


def missing_value(x: Any) -> jax.Array:
    """The placeholder of a metric before the first step, which nothing reads."""
    return jnp.zeros(x.shape, x.dtype)  # not NaN: `jax_debug_nans` ends the search at one


def write_row(
    history: dict[str, Any],
    row: dict[str, Any],
    before: dict[str, Any],
    number: jax.Array,
    done: jax.Array,
    good: jax.Array,
    every: int,
) -> dict[str, Any]:
    """``history`` with step ``number``'s ``row``; where the step was not ``good``, as it was.

    ``before`` is the row of the last good step; ``done`` counts the good steps, and stays from the
    first bad one on. Nothing is read from the history: XLA would copy it at every step.
    """
    place = number // every
    begun = (done > 0) & ((done - 1) // every == place)  # by a good step: ``before`` is there

    def write(h, x, x_before):
        # With one row a step, that of a bad one has not been written to.
        old = jnp.where(begun, x_before, jnp.zeros_like(x)) if every > 1 else jnp.zeros_like(x)
        return jax.lax.dynamic_update_index_in_dim(h, jnp.where(good, x, old), place, 0)

    return {
        name: jax.tree.map(write, h, row[name], before.get(name, row[name]))
        for name, h in history.items()
    }


def truncate(history: Pytree, count: int) -> Pytree:
    """The first ``count`` rows, cut in numpy: JAX would compile a program for every count."""
    return jax.tree.map(lambda h: to_numpy(h)[:count], history)
