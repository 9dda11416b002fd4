"""Metrics as lines of JSON, appended as a run goes on: for ``tail -f``, pandas and dashboards."""

import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, BinaryIO

import jax
import numpy as np

from bilevel.internal.processes import is_first_process
from bilevel.outer_loop.history import history_length, step_of
from bilevel.runs import records as store

_SMALL = 16  # entries of an array that is still written


def log(path: str | os.PathLike[str], *, resume: bool = False) -> Callable[[Any], None]:
    """``callback`` for :func:`bilevel.search` that appends every step's metrics to a file.

    A line for each row of the history, ``{"step": 1, "value": ..., "lower": ..., "grad_norm":
    ...}``, with what else is there: ``aux`` and ``alpha``, by their paths
    (``aux.outer.accuracy``), arrays of up to 16 entries as lists, larger ones not. What is not
    finite is ``null``.

    Parameters
    ----------
    path : path
        Its folder is made if needed.
    resume : bool
        Whether to go on with a file, as a search with ``resume=True`` does: steps that it has are
        not written again, and a last line that was cut short is written anew.

    Returns
    -------
    callback
        ``search(..., callback=bilevel.log("run.jsonl"), every=100)`` writes the last 100 lines
        every 100 steps. A full disk costs the lines, with a warning, and not the run. Of several
        processes the first one writes.

    Raises
    ------
    ValueError
        If the file exists and ``resume`` is false, or it cannot be written.

    Examples
    --------
    >>> import tempfile
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import bilevel
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
    # Not before JAX's processes have met: this would keep them from it.
    if jax.distributed.is_initialized() and not is_first_process():
        return lambda result: None
    lines = Lines("path", path, resume=resume)

    def callback(result):
        count, every = int(result.state.step), result.history_every
        total = history_length(count, every)
        columns = [
            (name, np.asarray(rows))
            for name, rows in _named(result.history)
            if np.size(rows) <= _SMALL * total
        ]
        lines.append(
            {"step": step_of(i, count, every)}
            | {name: without_nan(rows[i].tolist()) for name, rows in columns}
            for i in range(lines.last // every, total)
            if step_of(i, count, every) > lines.last
        )

    return callback


class Lines:
    """A file of JSON lines, each written whole; ``last`` is the ``step`` of the last one.

    Raises
    ------
    ValueError
        If ``path`` exists without ``resume``, cannot be written, or has no lines of JSON.
    """

    def __init__(self, name: str, path: str | os.PathLike[str], *, resume: bool):
        self._path, self.last = pathlib.Path(path), 0
        if self._path.exists() and not resume:
            raise ValueError(
                f"{name}: expected a new file or resume=True, got the existing {path}."
            )
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a+b") as file:
                self.last = _last_step(file)
        except OSError as error:
            raise ValueError(
                f"{name}: expected a file to write in, got {path} ({error.strerror})."
            ) from None
        except ValueError:
            raise ValueError(f"{name}: expected lines of JSON, got another file, {path}.") from None

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append lines: all of them, or none where the disk is full."""
        records = list(records)
        text = b"".join(json.dumps(record).encode() + b"\n" for record in records)
        with store.warn_if_disk_full(f"log: lines of {self._path}"):
            _append(self._path, text)
            self.last = records[-1].get("step", 0) if records else self.last


def _append(path: pathlib.Path, text: bytes) -> None:
    with path.open("ab", buffering=0) as file:
        end = file.tell()
        try:
            if file.write(text) < len(text):  # a disk that fills up takes what it has room for
                raise OSError("no room for whole lines")
        except OSError:
            file.truncate(end)
            raise


def _last_step(file: BinaryIO) -> int:
    """The number in the last line that is whole; the beginning of another one is cut off.

    Raises
    ------
    ValueError
        For another file, which stays as it is.
    """
    file.seek(0)
    *lines, unfinished = file.read().split(b"\n")
    last = json.loads(lines[-1]) if lines else {}
    if unfinished:
        try:
            last = json.loads(unfinished)
            file.write(b"\n")
        except ValueError:
            if not lines and not unfinished.startswith(b"{"):
                raise
            file.seek(-len(unfinished), os.SEEK_END)
            file.truncate()
    return last.get("step", 0) if isinstance(last, dict) else 0


def _named(tree: Any) -> Iterator[tuple[str, Any]]:
    """The leaves by their paths, with dots."""
    for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        yield jax.tree_util.keystr(path, simple=True, separator="."), x


def without_nan(value: Any) -> Any:
    """``value`` as JSON has it: null where a number is not finite.

    Examples
    --------
    >>> without_nan({"gap": [0.5, float("nan")]})
    {'gap': [0.5, None]}
    """
    if isinstance(value, Mapping):
        return {key: without_nan(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
