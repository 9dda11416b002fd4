"""Arrays over several processes on the disk: each writes the parts that it holds, to its own file.

So a checkpoint needs no process that has room for all of it. Parts are boxes of whole arrays, of
which any number of processes can read what their devices need: the record of process k of step 12
is ``12-k.npz``. The checksums of all records belong to the step: ``12.npz`` is written after them,
has them, and is what makes them count.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from bilevel.internal import processes
from bilevel.runs import records as store


def write_own_shards(step: pathlib.Path, arrays: Mapping[str, jax.Array]) -> list[str]:
    """Write the parts of ``arrays`` that are here; the checksums of all processes' records.

    Raises
    ------
    ValueError, OSError
        In all processes, where one cannot write.
    """
    own: dict[str, np.ndarray] = {}
    places: dict[str, list] = {}
    for name, x in arrays.items():
        for shard in x.addressable_shards:
            if shard.replica_id == 0:
                key = f"{name}.{len(own)}"
                own[key], places[key] = np.asarray(shard.data), _box(shard.index, x.shape)

    def written():
        path = shard_file(step, jax.process_index())
        path.parent.mkdir(parents=True, exist_ok=True)
        store.write_arrays(path, own, places)
        return store.checksum(path).hex()

    return processes.gather_strings(written)


def shard_file(step: pathlib.Path, rank: int) -> pathlib.Path:
    """Where process ``rank`` writes, beside the file of the step."""
    return step.with_name(f"{step.stem}-{rank}.npz")


def shard_files(step: pathlib.Path) -> list[pathlib.Path]:
    """All that there are of a step."""
    return list(step.parent.glob(f"{step.stem}-*.npz"))


def are_shards_intact(step: pathlib.Path, stamps: Sequence[str]) -> bool:
    """Whether the records are those that were written; each process looks at its share of them."""
    count = jax.process_count()
    paths = {k: shard_file(step, k) for k in range(jax.process_index(), len(stamps), count)}
    return all(
        store.is_intact(p) and store.checksum(p).hex() == stamps[k] for k, p in paths.items()
    )


def read_sharded_array(step: pathlib.Path, count: int, name: str, like: Any) -> Any:
    """The array ``name`` out of ``count`` records: its parts on this process's devices, as in like.

    Raises
    ------
    DamagedError
        If some of it is nowhere.
    """
    paths = [shard_file(step, rank) for rank in range(count)]
    pieces = [
        (path, key, box)
        for path in paths
        for key, box in store.read_notes(path).items()
        if key.rpartition(".")[0] == name
    ]

    def part(index):
        wanted = _box(index, like.shape)
        block, filled = np.empty([b - a for a, b in wanted], like.dtype), 0
        for path, key, box in pieces:
            overlap = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, box, strict=True)]
            if all(a < b for a, b in overlap):
                piece = store.read_one(path, key)[_slices_within(overlap, box)]
                block[_slices_within(overlap, wanted)] = piece
                filled += piece.size
        if filled != block.size:
            raise store.DamagedError(f"checkpoint: expected all of an array at {step}, got a part.")
        return block

    if isinstance(like, jax.Array):
        return jax.make_array_from_callback(like.shape, like.sharding, part)
    return part((slice(None),) * len(like.shape))


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    return [cut.indices(n)[:2] for cut, n in zip(index, shape, strict=True)]


def _slices_within(box: Sequence, outer: Sequence) -> tuple[slice, ...]:
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box, outer, strict=True))
