"""The history of a search: the metrics of its steps, in rows."""

import dataclasses
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bilevel.contracts import Pytree
from bilevel.internal.checks import describe, integer
from bilevel.internal.processes import to_numpy

_LARGE = 2**16  # bytes; the history has a larger alpha only if the user names it


@dataclasses.dataclass(frozen=True)
class History:
    """Metrics and steps that a search records: ``bilevel.search(..., history=...)``.

    Attributes
    ----------
    names : sequence of str, optional
        Names of metrics, and ``"alpha"``. Default: all, without an alpha or an aux over 64 KiB.
    every : int
        Number of steps for each row, which holds the metrics of the last of them. Default: 1.

    Raises
    ------
    ValueError
        If ``names`` is a string, or ``every`` is less than 1.

    Examples
    --------
    >>> import bilevel, optax
    >>> problem = bilevel.Problem(
    ...     lower=lambda w, alpha, batch: 0.5 * (w - alpha) ** 2,
    ...     outer=lambda w, alpha, batch: (w - 1.0) ** 2,
    ... )
    >>> result = bilevel.search(
    ...     problem, bilevel.implicit(), optax.sgd(0.25), jnp.array(0.0), jnp.array(0.0),
    ...     None, None, steps=40, history=bilevel.History(["value"], every=10), progress=False,
    ... )
    >>> result.history["value"].shape
    (4,)
    """

    names: Sequence[str] | None = None
    every: int = 1

    def __post_init__(self):
        if self.names is not None:
            object.__setattr__(self, "names", _sequence_of_names("names", self.names))
        object.__setattr__(self, "every", integer("every", self.every, 1))

    def __str__(self) -> str:
        names = "all" if self.names is None else ", ".join(sorted(self.names))
        return names if self.every == 1 else f"{names}, every {self.every} steps"


def as_history(history: History | Sequence[str] | None) -> History:
    """Return the argument ``history`` of a search as a :class:`History`."""
    if history is None or isinstance(history, History):
        return history or History()
    return History(_sequence_of_names("history", history))


def _sequence_of_names(argument: str, names: Sequence[str]) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        got = f"the string {names!r}" if isinstance(names, str) else describe(names)
        raise ValueError(f"{argument}: expected a sequence of names, got {got}.")
    return tuple(names)


def select_metrics(names: Sequence[str] | None, row: dict[str, Any], rows: int) -> dict[str, Any]:
    """Return the metrics of a step that a history with ``rows`` rows holds."""
    if names is not None:
        for name in names:
            if name not in row:
                raise ValueError(
                    f"history: expected names among {', '.join(sorted(row))}, got {name!r}."
                )
        return {name: row[name] for name in sorted(names)}
    selected = dict(row)
    for name in ("alpha", "aux"):
        size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(row.get(name)))
        if size > _LARGE:
            del selected[name]
            warnings.warn(
                f"history: {name}'s would take {rows * size / 2**20:,.0f} MiB and is left out; "
                f"name {name} in `history` to keep it.",
                stacklevel=4,
            )
    return selected


def history_length(steps: int, every: int) -> int:
    """Return the number of rows for ``steps`` steps; the last row can have fewer steps."""
    return -(-steps // every)


def step_of(row: int, count: int, every: int) -> int:
    """Return the step, from 1, that a row of a history of ``count`` steps describes."""
    return min((row + 1) * every, count)


def zeros_like(row: Pytree, *rows: int) -> Pytree:
    """Return zeros like a row, or like ``rows`` rows, for the time before the first step."""
    # No NaN, because `jax_debug_nans` would end the search.
    return jax.tree.map(lambda x: jax.device_put(np.zeros((*rows, *x.shape), x.dtype)), row)


def write_row(history, row, before, number, done, good, every: int) -> dict[str, Any]:
    """Return ``history`` with the ``row`` of step ``number``, if the step is ``good``.

    ``before`` is the row of the last good step, and ``done`` the number of good steps. Nothing is
    read from the history, because XLA would copy it at every step.
    """
    place = number // every
    begun = (done > 0) & ((done - 1) // every == place)  # then the row holds ``before``

    def write(h, x, x_before):
        # With one row for each step, the row of a bad step is still zero.
        old = jnp.where(begun, x_before, jnp.zeros_like(x)) if every > 1 else jnp.zeros_like(x)
        return jax.lax.dynamic_update_index_in_dim(h, jnp.where(good, x, old), place, 0)

    return {k: jax.tree.map(write, h, row[k], before.get(k, row[k])) for k, h in history.items()}


def truncate(history: Pytree, count: int) -> Pytree:
    """Return the first ``count`` rows. JAX would compile a program for every count, numpy not."""
    return jax.tree.map(lambda h: to_numpy(h)[:count], history)
