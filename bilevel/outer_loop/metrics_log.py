"""Append metrics as lines of JSON during a run: for ``tail -f``, pandas and dashboards."""

import json
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

import jax
import numpy as np

from bilevel.internal.processes import is_first_process
from bilevel.outer_loop.history import history_length, step_of
from bilevel.runs import records as store

_SMALL = 16  # largest number of entries in an array that is written


def log(path: str | os.PathLike[str], *, resume: bool = False) -> Callable[[Any], None]:
    """Return a ``callback`` for :func:`bilevel.search` that appends every step's metrics to a file.

    Each row of the history is a line, ``{"step": 1, "value": ..., ...}``. ``aux`` and ``alpha`` are
    named by their paths (``aux.outer.accuracy``). Arrays of up to 16 entries are lists; larger
    arrays are left out. Values that are not finite are ``null``.

    Parameters
    ----------
    path : path
        Its folder is created if needed.
    resume : bool
        Whether to append to an existing file, as a search with ``resume=True`` does. Steps in the
        file are not written again. An incomplete last line is replaced.

    Returns
    -------
    callback
        With ``every=100``, a search writes 100 lines at once. If the disk is full, lines are lost
        with a warning, and the run continues. With multiple processes, the first one writes.

    Raises
    ------
    ValueError
        If the file exists and ``resume`` is false, or the file cannot be written.

    Examples
    --------
    >>> import bilevel, optax, tempfile
    >>> import jax.numpy as jnp
    >>> problem = bilevel.Problem(
    ...     lower=lambda w, alpha, batch: 0.5 * (w - alpha) ** 2,
    ...     outer=lambda w, alpha, batch: (w - 1.0) ** 2,
    ... )
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = bilevel.search(
    ...         problem, bilevel.unrolled(1.0, 1), optax.sgd(0.25), jnp.array(0.0), jnp.array(0.0),
    ...         None, None, steps=3, callback=bilevel.log(f"{folder}/run.jsonl"), progress=False,
    ...     )
    ...     print(pathlib.Path(folder, "run.jsonl").read_text().splitlines()[1])
    {"step": 2, "alpha": 0.75, "grad_norm": 1.0, "lower": 0.0, "value": 0.25}
    """
    # We first check for distributed JAX, because `is_first_process` would prevent its later start.
    if jax.distributed.is_initialized() and not is_first_process():
        return lambda result: None
    lines = Lines("path", path, resume=resume)
    last = lines.lines[-1].get("step", 0) if lines.lines else 0

    def callback(result):
        nonlocal last
        count, every = int(result.state.step), result.history_every
        total = history_length(count, every)
        columns = [
            (jax.tree_util.keystr(name, simple=True, separator="."), np.asarray(rows))
            for name, rows in jax.tree_util.tree_leaves_with_path(result.history)
            if np.size(rows) <= _SMALL * total
        ]
        records = [
            {"step": step_of(i, count, every)} | {name: rows[i].tolist() for name, rows in columns}
            for i in range(last // every, total)
            if step_of(i, count, every) > last
        ]
        if lines.append(records):
            last = max(last, count)  # a resumed search begins before the last line of the file

    return callback


class Lines:
    """A file of JSON lines, each written whole. ``lines`` holds the lines of an existing file."""

    def __init__(self, name: str, path: str | os.PathLike[str], *, resume: bool):
        self._path = pathlib.Path(path)
        with store.open_to_append(name, path, resume=resume) as file:
            try:
                self.lines = _read_lines(file)
            except ValueError:
                raise ValueError(
                    f"{name}: expected lines of JSON, got another file, {path}."
                ) from None

    def append(self, records: Sequence[Mapping[str, Any]]) -> bool:
        """Append all records, or none of them if the disk is full, with a warning and False."""
        text = "".join(json.dumps(without_nan(record)) + "\n" for record in records).encode()
        with store.warn_if_disk_full(f"log: lines of {self._path}"):
            with self._path.open("ab", buffering=0) as file:
                store.append_whole(file, text)
            return True
        return False


def _read_lines(file: IO[bytes]) -> list[dict[str, Any]]:
    """Return the lines; remove an incomplete last one. Raise ``ValueError`` for other files."""
    file.seek(0)
    *whole, unfinished = file.read().split(b"\n")
    lines = [json.loads(line) for line in whole]
    if not all(isinstance(line, dict) for line in lines):
        raise ValueError
    if unfinished:
        try:
            lines.append(json.loads(unfinished))
            file.write(b"\n")
        except ValueError:
            if not lines and not unfinished.startswith(b"{"):
                raise
            file.truncate(file.tell() - len(unfinished))
    return lines


def without_nan(value: Any) -> Any:
    """Return ``value`` with None in place of NaN and infinities."""
    if isinstance(value, Mapping):
        return {key: without_nan(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
