"""Store arrays that span multiple processes: each process writes its shards to a separate file.

So no process needs memory for a whole array, and any number of processes can read the shards that
their devices need. Process k writes ``12-k.npz`` for step 12. After that, ``12.npz`` receives the
checksums of these files, which makes the step valid.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from bilevel.internal import processes
from bilevel.runs import records as store


def write_own_shards(step: pathlib.Path, arrays: Mapping[str, jax.Array]) -> list[str]:
    """Write this process's shards of ``arrays``; return the checksums of all processes' files.

    If one process cannot write, all raise its ``ValueError`` or ``OSError``.
    """
    own: dict[str, np.ndarray] = {}
    places: dict[str, list] = {}
    for name, x in arrays.items():
        for shard in x.addressable_shards:
            if shard.replica_id == 0:
                key = f"{name}.{len(own)}"
                own[key], places[key] = np.asarray(shard.data), _ranges(shard.index, x.shape)

    def written():
        path = shard_file(step, jax.process_index())
        path.parent.mkdir(parents=True, exist_ok=True)
        store.write_arrays(path, own, places)
        return str(store.checksums(path))

    return processes.gather_strings(written)


def shard_file(step: pathlib.Path, rank: int) -> pathlib.Path:
    """Return the file of process ``rank``, next to the file of the step."""
    return step.with_name(f"{step.stem}-{rank}.npz")


def shard_files(step: pathlib.Path) -> list[pathlib.Path]:
    """Return the files of all processes of a step."""
    return list(step.parent.glob(f"{step.stem}-*.npz"))


def are_shards_intact(step: pathlib.Path, stamps: Sequence[str]) -> bool:
    """Return whether the files have the checksums ``stamps``; each process checks its share."""
    own = range(jax.process_index(), len(stamps), jax.process_count())
    return all(str(store.checksums(shard_file(step, k))) == stamps[k] for k in own)


def read_sharded_array(step: pathlib.Path, count: int, name: str, like: Any) -> Any:
    """Return the shards of array ``name`` for this process's devices, as ``like`` is sharded.

    ``count`` is the number of files. If they lack a part, the function raises ``DamagedError``.
    """
    paths = [shard_file(step, rank) for rank in range(count)]
    pieces = [
        (path, key, box)
        for path in paths
        for key, box in store.read_notes(path).items()
        if key.rpartition(".")[0] == name
    ]

    def part(index):
        target = _ranges(index, like.shape)
        block, filled = np.empty([b - a for a, b in target], like.dtype), 0
        for path, key, box in pieces:
            overlap = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(target, box, strict=True)]
            if all(a < b for a, b in overlap):
                piece = store.read_one(path, key)[_slices_within(overlap, box)]
                block[_slices_within(overlap, target)] = piece
                filled += piece.size
        if filled != block.size:
            raise store.DamagedError(f"checkpoint: expected all of an array at {step}, got a part.")
        return block

    if isinstance(like, jax.Array):
        return jax.make_array_from_callback(like.shape, like.sharding, part)
    return part((slice(None),) * len(like.shape))


def _ranges(index: tuple[slice, ...], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    return [cut.indices(n)[:2] for cut, n in zip(index, shape, strict=True)]


def _slices_within(box: Sequence, outer: Sequence) -> tuple[slice, ...]:
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box, outer, strict=True))
