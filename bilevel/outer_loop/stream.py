"""Batches from an iterator, for data larger than memory."""

import contextlib
import dataclasses
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from bilevel.contracts import Pytree
from bilevel.internal.checks import check_data, describe
from bilevel.internal.processes import all_or_none, is_multiprocess, is_sharded
from bilevel.runs.fingerprint import check_same, digest, fingerprint

_BYTES = 2**26  # of a chunk, if the user does not set its number of steps
_STEPS = 32

Pairs = Iterable[tuple[Pytree, Pytree]]


@dataclasses.dataclass(frozen=True)
class Stream:
    """Source of pairs of batches; :func:`bilevel.stream` makes it."""

    source: Pairs | Callable[[int], Pairs]

    def pairs(self, step: int) -> Iterator[tuple[Pytree, Pytree]]:
        """Return the pairs for the steps from ``step`` on."""
        if callable(self.source):
            return iter(self.source(step))
        begun = inspect.isgenerator(self.source) and (
            inspect.getgeneratorstate(self.source) != inspect.GEN_CREATED
        )
        if step and begun:
            raise ValueError(
                f"source: expected an iterable that begins anew, to pass {step} pairs over, got a "
                "generator that has begun; make a new one, or a function step -> iterable."
            )
        return itertools.islice(iter(self.source), step, None)

    def fingerprint(self) -> dict[str, str]:
        """Return the fingerprint of the function's code and constants, not of files it reads."""
        if isinstance(self.source, types.FunctionType | functools.partial):
            parts = fingerprint({"batches": self.source}, small=True)
            return {path: part for path, part in parts.items() if path}
        return {"batches": "an iterable"}


def stream(source: Pairs | Callable[[int], Pairs]) -> Stream:
    """Return the ``batches`` of an iterator, for :func:`bilevel.search` on data larger than memory.

    Parameters
    ----------
    source : iterable of (train, valid), or ``source(step) -> iterable``
        The pair of batches of each outer step, all of the same shapes: grain, ``tf.data``, a torch
        ``DataLoader``, any iterable of pytrees that numpy can convert. A search that resumes at
        step k skips k pairs of an iterable, and passes k to a function. It raises ``ValueError`` if
        the function's code or constants changed; the data that it reads are not compared.

    Returns
    -------
    batches
        For ``search(..., None, None, batches=stream(source), steps=...)``. If the iterator ends
        before the steps, the search stops, and ``stopped`` says so.

    Raises
    ------
    ValueError
        If ``source`` is neither an iterable nor a function. During the search: if it resumes with a
        generator that has begun, or an item is not a pair, has zero rows, other shapes than earlier
        pairs, or values that are not finite.

    Notes
    -----
    A chunk, by default 32 steps or 64 MiB, is one compiled loop. While it runs, a thread reads the
    next chunk and sends it to the device, so that two are in memory. A solver that draws batches
    itself draws them from the first part of the pair. With multiple processes, every process reads
    the same pairs, or the search ends in all of them.

    Examples
    --------
    >>> import bilevel, itertools, optax
    >>> import jax.numpy as jnp
    >>> def pairs(step):  # e.g. read from a file
    ...     return ((np.full(4, i), np.full(2, 10.0 + i)) for i in itertools.count(step))
    >>> problem = bilevel.Problem(
    ...     lower=lambda w, alpha, batch: 0.5 * jnp.mean((w - alpha - batch) ** 2),
    ...     outer=lambda w, alpha, batch: jnp.mean((w - batch) ** 2),
    ... )
    >>> result = bilevel.search(
    ...     problem, bilevel.implicit(), optax.sgd(0.25), jnp.array(0.0), jnp.array(0.0),
    ...     None, None, batches=bilevel.stream(pairs), steps=3, progress=False,
    ... )
    >>> result.history["value"]
    Array([100. , 25. , 6.25], dtype=float...)
    """
    if isinstance(source, str) or not (callable(source) or isinstance(source, Iterable)):
        raise ValueError(
            "source: expected an iterable of pairs (train, valid) or a function step -> iterable, "
            f"got {describe(source)}."
        )
    return Stream(source)


class Chunk(NamedTuple):
    """The pairs of the steps from ``first`` on, stacked. Pairs after the last step repeat it."""

    first: Any  # [], int
    pairs: tuple[Pytree, Pytree]  # leaves [steps, ...]


def of_step(data: tuple, step: jax.Array) -> tuple:
    """Return ``train, valid, key`` of one step."""
    chunk, _, key = data
    if not isinstance(chunk, Chunk):
        return data
    train, valid = jax.tree.map(lambda x: x[step - chunk.first], chunk.pairs)
    return train, valid, key


class Feed:
    """The data of a search's steps. ``first`` is the first data; later data have its shapes."""

    def __init__(self, data: tuple):
        self.first = data

    def __call__(self, done: int, count: int) -> tuple[tuple, int]:
        """Return the data of the next steps, and the number of steps; here all data in memory."""
        return self.first, count


class _Streaming(Feed):
    """Chunks of an iterator's pairs; a thread reads one chunk ahead."""

    def __init__(self, pool, batches, key, step, steps, every, chunk):
        self._pool, self._key, self._steps, self._every = pool, key, steps, every
        pairs = batches.pairs(step)
        first = all_or_none(lambda: next(pairs, None))
        ended = first is None
        if ended and step:  # it ended at the checkpoint; the previous pair has the shapes
            first = all_or_none(lambda: next(batches.pairs(step - 1), None))
        if first is None:
            raise ValueError(f"batches: expected a pair (train, valid) at step {step}, got none.")
        _check_pair(first, step)
        self._kinds = [_dtype_and_shape(x) for x in jax.tree.leaves(first)]
        self._structure: Any = jax.tree.structure(first)
        size = sum(np.asarray(x).nbytes for x in jax.tree.leaves(first))
        self._size = chunk or max(1, min(_STEPS, _BYTES // max(size, 1)))
        self._pairs = itertools.chain([] if ended else [first], pairs)
        self._next = pool.submit(self._read, step)

        def alike(x):  # needs no memory, because this would be a third chunk
            x = np.asarray(x)
            return np.broadcast_to(np.zeros((), x.dtype), (self._size, *x.shape))

        super().__init__((Chunk(np.asarray(step), jax.tree.map(alike, tuple(first))), None, key))

    def __call__(self, done: int, count: int) -> tuple[tuple, int]:
        """Return the chunk from step ``done`` on, and start to read the next one."""
        data, length, mark = all_or_none(self._next.result)
        check_same({"batches": mark})
        if length:
            self._next = self._pool.submit(self._read, done + length)
        return data, length

    def _read(self, step: int) -> tuple[tuple, int, str]:
        """Return the next chunk on the device, its number of steps, and a digest for processes."""
        left = self._steps - step
        if self._every is not None:  # a chunk ends before a callback
            left = min(left, self._every - step % self._every)
        batch_pairs = list(itertools.islice(self._pairs, min(self._size, left)))
        if not batch_pairs:
            return (), 0, ""
        for number, pair in enumerate(batch_pairs, step):
            self._check(pair, number)
        # The last pair fills up the chunk, so that all chunks have one shape and one program.
        full = batch_pairs + [batch_pairs[-1]] * (self._size - len(batch_pairs))
        pairs = jax.tree.map(lambda *xs: np.stack([np.asarray(x) for x in xs]), *map(tuple, full))
        mark = digest(pairs) if is_multiprocess() else ""
        chunk = Chunk(np.asarray(step), jax.device_put(pairs))
        return (chunk, None, self._key), len(batch_pairs), mark

    def _check(self, pair: Any, step: int) -> None:
        _check_pair(pair, step)
        if jax.tree.structure(pair) != self._structure:
            raise ValueError(
                f"batches: expected pairs of one structure, got another at step {step}."
            )
        for kind, x in zip(self._kinds, jax.tree.leaves(pair), strict=True):
            if _dtype_and_shape(x) != kind:
                raise ValueError(
                    f"batches: expected batches of one shape, got {_dtype_and_shape(x)} after "
                    f"{kind} at step {step}; leave out a last, shorter one."
                )


def _check_pair(pair: Any, step: int) -> None:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ValueError(
            f"batches: expected a pair (train, valid) at step {step}, got {describe(pair)}."
        )
    if any(map(is_sharded, jax.tree.leaves(pair))):
        raise ValueError(
            f"batches: expected the whole batch in every process at step {step}, got an array over "
            "the devices of several."
        )
    for side, batch in zip(("train", "valid"), pair, strict=True):
        check_data(f"batches, {side} at step {step}", jax.tree.map(np.asarray, batch))


def _dtype_and_shape(x: Any) -> str:
    x = np.asarray(x)
    return f"{x.dtype}{list(x.shape)}"


@contextlib.contextmanager
def feeding(batches, data, step, steps, every, chunk) -> Iterator[Feed]:
    """Yield the feed of the steps from ``step`` on: from memory, or from a stream."""
    if not isinstance(batches, Stream):
        yield Feed(data)
        return
    step = min(step, steps - 1)  # a finished search still needs the shapes
    with ThreadPoolExecutor(1, thread_name_prefix="bilevel stream") as pool:
        yield _Streaming(pool, batches, data[2], step, steps, every, chunk)
