"""Save and restore a pytree of arrays, whole or not at all, with a CRC-32 of every array.

A checkpoint directory holds numbered steps, each a record of :mod:`bilevel.runs.records`: the
newest one, and the one before in case the newest is damaged. If multiple processes share arrays,
process k writes its shards of step 12 to ``12-k.npz``. Then ``12.npz`` receives the checksums of
these files, which makes the step valid. Any number of processes, on any devices, can read them.
"""

import pathlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bilevel.contracts import Pytree
from bilevel.internal import processes
from bilevel.internal.checks import describe, integer
from bilevel.runs import records
from bilevel.runs.fingerprint import describe_difference

__all__ = ["latest", "restore", "save"]

_KEEP = 2  # steps kept: the newest, and one to fall back on


def save(directory: str | pathlib.Path, step: int, tree: Pytree, label: Any = 0) -> None:
    """Write ``tree`` as step ``step`` of ``directory``. Later steps are removed.

    Parameters
    ----------
    directory : path
        Created if it does not exist.
    step : int
        At least 0.
    tree : pytree of arrays
        With multiple processes, all processes call. The first one writes, and each process writes
        its shards of arrays that span processes.
    label : int, or dict of str
        Fingerprint of the run that the tree belongs to. :func:`restore` compares it.

    Raises
    ------
    ValueError
        If ``step`` is not an integer of at least 0, or ``label`` has another type.
    OSError
        If the step cannot be written. Earlier steps stay.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(folder, 3, {"w": np.ones(2)})
    ...     latest(folder), restore(folder, {"w": np.zeros(2)})
    (3, {'w': array([1., 1.])})
    """
    step, directory, label = integer("step", step, 0), pathlib.Path(directory), _encode_label(label)
    arrays = {str(i): _raw(x) for i, x in enumerate(jax.tree.leaves(tree))}
    notes = {"step": step, "label": label, "leaves": _leaf_paths(tree)}
    shared = {name: x for name, x in arrays.items() if processes.is_sharded(x)}
    if shared:
        notes["parts"] = _write_own_shards(_step_file(directory, step), shared)
        notes["shared"] = {name: [x.dtype.name, list(x.shape)] for name, x in shared.items()}
    if not processes.is_first_process():
        return
    directory.mkdir(parents=True, exist_ok=True)
    own = {name: np.asarray(x) for name, x in arrays.items() if name not in shared}
    records.write_arrays(_step_file(directory, step), own, notes)
    existing = steps(directory)
    retained = [k for k in existing if k <= step][:_KEEP]
    for file in (_step_file(directory, k) for k in existing if k not in retained):
        for path in (file, *directory.glob(f"{file.stem}-*.npz")):  # shards alone do not count
            path.unlink(missing_ok=True)


def steps(directory: str | pathlib.Path) -> list[int]:
    """Return the steps in ``directory``, the newest first. Damaged ones are included."""
    names = (path.stem for path in pathlib.Path(directory).glob("*.npz"))
    return sorted((int(name) for name in names if name.isdecimal()), reverse=True)


def latest(directory: str | pathlib.Path) -> int | None:
    """Return the newest undamaged step in ``directory``, or None if it has no steps.

    Damaged steps are skipped with a warning. With multiple processes, all processes call.

    Raises
    ------
    DamagedError
        If all steps are damaged.
    ValueError
        If processes see different steps.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     print(latest(folder))
    ...     save(folder, 3, {"w": np.ones(2)})
    ...     print(latest(folder))
    None
    3
    """
    existing = steps(directory)
    seen = processes.gathered(np.int32(max(existing, default=-1))).tolist()
    if len(set(seen)) > 1:
        raise ValueError(
            f"checkpoint: expected a directory that all processes see, got {directory}, where they "
            f"see the steps {seen} (-1: none)."
        )
    for step in existing:
        if not processes.any_process(not _is_intact_step(directory, step)):
            return step
        if processes.is_first_process():
            message = f"checkpoint: step {step} in {directory} is damaged and passed over."
            warnings.warn(message, stacklevel=2)
    if existing:
        raise records.DamagedError(
            f"checkpoint: expected an undamaged step in {directory}, got damaged ones only; remove "
            "the directory to start anew."
        )
    return None


def _is_intact_step(directory: str | pathlib.Path, step: int) -> bool:
    """Return whether the files of a step are undamaged; each process checks its share of shards."""
    file = _step_file(directory, step)
    if records.checksums(file) is None:
        return False
    stamps = records.read_notes(file).get("parts", [])
    own = range(jax.process_index(), len(stamps), jax.process_count())
    return all(str(records.checksums(_shard_file(file, k))) == stamps[k] for k in own)


def restore(directory: str | pathlib.Path, like: Pytree, label: Any = 0) -> Pytree:
    """Return the arrays of the newest undamaged step, in the structure of ``like``.

    Arrays that span processes get the sharding of their counterparts in ``like``, for any number of
    processes. Other arrays are numpy arrays.

    Raises
    ------
    FileNotFoundError
        If ``directory`` has no steps.
    DamagedError
        If all steps are damaged.
    ValueError
        If the label differs, or the names, shapes or dtypes of the arrays differ from ``like``.
    """
    step = latest(directory)
    if step is None:
        raise FileNotFoundError(f"checkpoint: expected a saved step in {directory}, found none.")
    _check_step_and_label(directory, step, label)
    return _read_step(directory, step, like)


def _encode_label(label: Any) -> int | dict[str, str]:
    """Return ``label`` in the form that JSON keeps."""
    if isinstance(label, Mapping):
        words = [*label.keys(), *label.values()]
        if all(isinstance(word, str) for word in words):
            return dict(label)
    elif isinstance(label, int | np.integer):
        return int(label)
    raise ValueError(f"label: expected an int or a dict from str to str, got {describe(label)}.")


def _check_step_and_label(
    directory: str | pathlib.Path, step: int, label: Any, *, partly: bool = False
) -> None:
    """Raise unless a step has its file's number and this label, or with ``partly`` its parts."""
    notes = records.read_notes(_step_file(directory, step))
    if notes["step"] != step:
        raise records.DamagedError(
            f"checkpoint: expected step {step} in {_step_file(directory, step)}, "
            f"got {notes['step']}."
        )
    saved, label = notes["label"], _encode_label(label)
    if isinstance(label, Mapping) and isinstance(saved, Mapping):
        parts = {path.partition(".")[0] for path in label}
        if partly:
            saved = {k: v for k, v in saved.items() if k.partition(".")[0] in parts}
        other = describe_difference(saved, label)
    else:
        other = "" if saved == label else "another label"
    if other:
        raise ValueError(
            f"checkpoint: expected one of this very run in {directory}, got one of {other}."
        )


def _read_step(directory: str | pathlib.Path, step: int, like: Pytree) -> Pytree:
    file = _step_file(directory, step)
    arrays, notes = records.read_arrays(file)
    leaves, structure = jax.tree.flatten(like)
    names, parts, shared = _leaf_paths(like), notes.get("parts", []), notes.get("shared", {})
    if len(arrays) + len(shared) != len(leaves):
        raise ValueError(
            f"checkpoint: expected {len(leaves)} arrays in {directory}, got "
            f"{len(arrays) + len(shared)}."
        )
    for name, saved in zip(names, notes.get("leaves", names), strict=True):
        if name != saved:
            raise ValueError(
                f"checkpoint: expected an array {name} in {directory}, got one {saved}."
            )

    def leaf(name, like):
        raw, sharded = _raw(like), name in shared
        dtype, shape = shared[name] if sharded else (arrays[name].dtype, arrays[name].shape)
        expected = np.dtype(getattr(raw, "dtype", type(raw))), np.shape(raw)
        if (np.dtype(dtype), tuple(shape)) != expected:
            raise ValueError(
                f"checkpoint: expected an array of {expected[0]}{list(expected[1])} in "
                f"{directory}, got {dtype}{list(shape)}."
            )
        array = _read_sharded_array(file, len(parts), name, raw) if sharded else arrays[name]
        if not _is_key(like):
            return array
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(like))

    return jax.tree.unflatten(structure, [leaf(str(i), x) for i, x in enumerate(leaves)])


class Saver:
    """Read and write the checkpoints of a run. ``step`` is the step to resume from, or None."""

    def __init__(self, directory: pathlib.Path | None, seconds: float):
        self.directory: pathlib.Path | None = directory
        self.step: int | None = None if directory is None else latest(directory)
        self._label: dict[str, str] = {}
        self._seconds = seconds
        self._saved_at, self._interval = -np.inf, seconds
        self._newest: int | None = None  # step that this run wrote last

    def belong_to(self, label: dict[str, str]) -> None:
        """Add parts to the label of later steps; raise ``ValueError`` if ``step`` has others."""
        self._label |= label
        if self.directory is not None and self.step is not None:
            _check_step_and_label(self.directory, self.step, self._label, partly=True)

    def done(self, name: str, requested: int) -> int:
        """Return the steps of the checkpoint; raise ``ValueError`` if the run asks for fewer."""
        saved = self.step or 0
        if saved > requested:
            raise ValueError(
                f"{name}: expected at least the {saved} that the checkpoint holds, got {requested}."
            )
        return saved

    def restore(self, like: Pytree) -> Pytree:
        """Return the arrays of ``step`` in the structure of ``like``."""
        assert self.directory is not None and self.step is not None
        directory, step = self.directory, self.step
        _check_step_and_label(directory, step, self._label)
        return processes.all_or_none(lambda: _read_step(directory, step, like))

    def save(self, step: int, tree: Callable[[], Pytree], *, last: bool = False) -> None:
        """Write ``tree()`` as step ``step``, if it is the ``last`` or enough seconds passed."""
        now = time.perf_counter()
        if self.directory is None:
            return
        due = processes.broadcast_first(now - self._saved_at > self._interval)
        if not (last or due) or step == self._newest:
            return
        with records.warn_if_disk_full(f"checkpoint: a step in {self.directory}"):
            save(self.directory, step, tree(), self._label)
            self._newest = step
        self._saved_at = time.perf_counter()
        self._interval = max(self._seconds, 20 * (self._saved_at - now))


@contextmanager
def saving(
    directory: str | pathlib.Path | None, *, resume: bool = True, seconds: float
) -> Iterator[Saver]:
    """Lock ``directory`` and save a run there, at most every ``seconds``; None saves nothing."""
    if directory is None:
        yield Saver(None, seconds)
        return
    directory = pathlib.Path(directory)

    def enter():
        stack.enter_context(records.locked(directory, "checkpoint"))
        if not resume and (existing := steps(directory)):
            raise ValueError(
                f"checkpoint: expected an empty directory or resume=True, got {directory} with "
                f"step {existing[0]} in it."
            )
        return ""

    with ExitStack() as stack:
        processes.broadcast_first_string(enter)
        yield Saver(directory, seconds)


def _step_file(directory: str | pathlib.Path, step: int) -> pathlib.Path:
    return pathlib.Path(directory) / f"{step}.npz"


def _leaf_paths(tree: Pytree) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _raw(x: Any) -> Any:
    return jax.random.key_data(x) if _is_key(x) else x


def _write_own_shards(step: pathlib.Path, arrays: Mapping[str, jax.Array]) -> list[str]:
    """Write this process's shards of ``arrays``; return the checksums of all processes' files."""
    own: dict[str, np.ndarray] = {}
    places: dict[str, list] = {}
    for name, x in arrays.items():
        for shard in x.addressable_shards:
            if shard.replica_id == 0:
                key = f"{name}.{len(own)}"
                own[key], places[key] = np.asarray(shard.data), _ranges(shard.index, x.shape)

    def written():
        path = _shard_file(step, jax.process_index())
        path.parent.mkdir(parents=True, exist_ok=True)
        records.write_arrays(path, own, places)
        return str(records.checksums(path))

    return processes.gather_strings(written)


def _shard_file(step: pathlib.Path, rank: int) -> pathlib.Path:
    return step.with_name(f"{step.stem}-{rank}.npz")


def _read_sharded_array(step: pathlib.Path, count: int, name: str, like: Any) -> Any:
    """Return array ``name``, sharded like ``like``, from its shards in ``count`` files."""
    pieces = [
        (path, key, box)
        for path in (_shard_file(step, rank) for rank in range(count))
        for key, box in records.read_notes(path).items()
        if key.rpartition(".")[0] == name
    ]

    def part(index):
        target = _ranges(index, like.shape)
        block, filled = np.empty([b - a for a, b in target], like.dtype), 0
        for path, key, box in pieces:
            overlap = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(target, box, strict=True)]
            if all(a < b for a, b in overlap):
                piece = records.read_one(path, key)[_slices_within(overlap, box)]
                block[_slices_within(overlap, target)] = piece
                filled += piece.size
        if filled != block.size:
            raise records.DamagedError(
                f"checkpoint: expected all of an array at {step}, got a part."
            )
        return block

    if isinstance(like, jax.Array):
        return jax.make_array_from_callback(like.shape, like.sharding, part)
    return part((slice(None),) * len(like.shape))


def _ranges(index: tuple[slice, ...], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    return [cut.indices(n)[:2] for cut, n in zip(index, shape, strict=True)]


def _slices_within(box: Sequence, outer: Sequence) -> tuple[slice, ...]:
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box, outer, strict=True))
