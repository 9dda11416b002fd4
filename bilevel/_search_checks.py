"""Arguments of :func:`bilevel.search`: what can be seen to be wrong before anything is compiled."""

import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bilevel._stream import Stream
from bilevel.checks import finite, floating, function, prng_key, whole
from bilevel.protocols import Joint, params_of

_LARGE = 2**16  # bytes; the history of a larger alpha is kept only where it is asked for


def check(solver, arrays, steps, batches, resume, checkpoint, callback, every, chunk) -> None:
    """Raise on anything wrong that can be seen before the first compilation."""
    alpha, w0, train, valid, key = arrays
    whole("steps", steps, 1)
    if chunk is not None:
        whole("chunk", chunk, 1)
    streamed = isinstance(batches, Stream)
    if streamed and (train is not None or valid is not None):
        raise ValueError("train, valid: expected None beside a stream of both, got data.")
    if batches is not None and not streamed:
        function("batches", batches, "(key, data) -> batch")
    if callback is not None:
        function("callback", callback, "result -> bool")
    if every is not None:
        whole("every", every, 1)
        if callback is None:
            raise ValueError(f"every: expected a callback to call so often, got none and {every}.")
    if isinstance(batches, Joint) and getattr(solver, "batches", None) is not None:
        raise ValueError("batches: expected one of valid alone, as the solver draws its own.")
    if resume and checkpoint is None:
        raise ValueError("resume: expected a checkpoint directory to resume from, got None.")
    drawn = (batches is not None and not streamed) or getattr(solver, "batches", None) is not None
    if drawn and key is None:
        raise ValueError("key: expected a PRNG key to sample batches with, got None.")
    if key is not None:
        prng_key("key", key)
    for name, tree in (("alpha", alpha), ("w0", w0)):
        if not jax.tree.leaves(tree):
            raise ValueError(f"{name}: expected at least one array, got {tree!r}.")
        floating(name, params_of(tree))
    for name, tree in (("alpha", alpha), ("w0", w0), ("train", train), ("valid", valid)):
        for x in jax.tree.leaves(tree):
            if jnp.size(x) == 0:
                shape = jnp.shape(x)
                raise ValueError(f"{name}: expected data, got an empty array of shape {shape}.")
            finite(name, x)


def chosen(names: Sequence[str] | None, row: dict[str, Any], steps: int) -> dict[str, Any]:
    """What of a step's ``row`` the history is to have."""
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
                f"history: {name}'s would take {steps * size / 2**20:,.0f} MiB and is left out; "
                f"name {name} in `history` to keep it.",
                stacklevel=4,
            )
    return kept
