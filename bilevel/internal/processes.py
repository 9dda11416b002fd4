"""Coordinate several processes of one search: common decisions, and one writer.

Under ``jax.distributed`` every process runs the same program. Decisions from one process's clock,
keyboard or disk have to be shared first: otherwise one process waits in a sum that the others never
reach. In a single process these functions return their arguments.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import jax
import numpy as np

from ntk.internal.sharding import put_with_sharding

Pytree = Any
T = TypeVar("T")


class LostProcessError(RuntimeError):
    """Another process of this run ended, raised, or can no longer be reached."""


def is_multiprocess() -> bool:
    """Return whether the run has more than one process."""
    return jax.process_count() > 1


def is_first_process() -> bool:
    """Return whether this is the process that draws, prints and writes."""
    return jax.process_index() == 0


def gathered(values: Any) -> np.ndarray:
    """Return the processes' arrays of one shape, stacked: [processes, ...]."""
    if not is_multiprocess():
        return np.asarray(values)[None]
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(np.asarray(values)))


def any_process(flag: Any) -> bool:
    """Return whether ``flag`` is true in any process."""
    return bool(flag) if not is_multiprocess() else bool(gathered(np.int32(bool(flag))).any())


def maximum(number: int) -> int:
    """Return the largest of the processes' integers, which are less than 2^31."""
    return number if not is_multiprocess() else int(gathered(np.int32(number)).max())


def broadcast_first(number: int) -> int:
    """Return the first process's integer, which is less than 2^31."""
    return number if not is_multiprocess() else int(gathered(np.int32(number))[0])


def broadcast_first_string(compute: Callable[[], str]) -> str:
    """Return ``compute()`` of the first process, which alone calls it."""
    return gather_strings(lambda: compute() if is_first_process() else "")[0]


def gather_strings(compute: Callable[[], str]) -> list[str]:
    """Return ``compute()`` of every process; if it raises in one, all raise.

    ``compute`` may not use arrays over several processes: a process that raises would be missed.
    """
    if not is_multiprocess():
        return [compute()]
    text, failed = "", None
    try:
        text = compute()
    except Exception as error:
        text, failed = str(error), error
    encoded = np.frombuffer(text.encode(), np.uint8)
    kinds = ValueError, OSError, Exception
    kind = next((i for i, kind in enumerate(kinds) if isinstance(failed, kind)), -1)
    heads = gathered(np.array([len(encoded), kind], np.int32))
    padded = np.zeros(heads[:, 0].max(), np.uint8)
    padded[: len(encoded)] = encoded
    rows = zip(gathered(padded), heads, strict=True)
    texts = [row[: head[0]].tobytes().decode() for row, head in rows]
    if failed is not None:
        raise failed
    for rank, (text, (_, kind)) in enumerate(zip(texts, heads.tolist(), strict=True)):
        if kind == len(kinds) - 1:
            raise LostProcessError(f"process {rank} of {len(texts)} raised: {text}")
        if kind >= 0:
            raise kinds[kind](text)
    return texts


def all_or_none(compute: Callable[[], T]) -> T:
    """Return ``compute()``; if it raises in one process, all raise (:func:`gather_strings`)."""
    results: list[T] = []

    def run():
        results.append(compute())
        return ""

    gather_strings(run)
    return results[0]


def sum_across(number: int) -> int:
    """Return the sum of the processes' integers modulo 2^64."""
    halves = gathered(np.array([number & 0xFFFFFFFF, number >> 32], np.uint32)).tolist()
    return sum(low + (high << 32) for low, high in halves) % 2**64


def is_sharded(x: Any) -> bool:
    """Return whether no single process holds all of an array."""
    return isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated)


def to_numpy(x: Any) -> np.ndarray:
    """Return the whole array, however it is sharded; every process has to call this."""
    if is_sharded(x):
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.asarray(x)


def put_like(value: Any, like: jax.Array) -> jax.Array:
    """Return ``value``, equal in every process, with the sharding of ``like``."""
    return put_with_sharding(value, like.sharding) if like.committed else jax.device_put(value)


# How XLA's errors start when a sum over processes fails; some of them come as ValueErrors.
_OF_THE_CONNECTION = (
    *("UNKNOWN:", "UNAVAILABLE:", "INTERNAL:", "ABORTED:"),
    *("DEADLINE_EXCEEDED:", "CANCELLED:", "FAILED_PRECONDITION:"),
)


@contextmanager
def report_lost_process(what: str) -> Iterator[None]:
    """Raise :class:`LostProcessError` if another process is lost inside the block."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if not (is_multiprocess() and str(error).startswith(_OF_THE_CONNECTION)):
            raise
        raise LostProcessError(
            f"{what}: another of the {jax.process_count()} processes ended or cannot be reached; "
            "a checkpoint, where there is one, is whole, and resume=True goes on from it."
        ) from error
