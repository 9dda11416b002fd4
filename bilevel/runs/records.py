"""Records that outlive a process: written whole or not at all, checked when read, by one writer.

A record is an ``.npz`` file, which ``numpy.load`` opens, and behind it the SHA-256 of all its
bytes: a flipped bit anywhere is found. It is written under another name, brought to the disk and
then renamed, so that a process killed at any moment leaves the record before it.

Search checkpoints, the journals of the baselines and the scores of ``bilevel rank`` are kept by
what is here.
"""

import hashlib
import json
import os
import pathlib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

import numpy as np

try:
    import fcntl
except ImportError:  # not on Windows, where nothing tells of a second writer
    fcntl = None  # type: ignore[assignment]

_DIGEST = hashlib.sha256().digest_size
_PART = ".part"  # ends the name of a file that is being written


class DamagedError(ValueError):
    """A record is not what was written: cut short, changed, or of another kind."""


def write_arrays(
    path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray], notes: Any = None
) -> None:
    """Put ``arrays`` and ``notes``, a value that JSON knows, at ``path``; whole or not at all.

    Raises
    ------
    OSError
        If it cannot be written; what was at ``path`` before stays.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_arrays(f"{folder}/x.npz", {"x": np.ones(2)}, {"step": 3})
    ...     read_arrays(f"{folder}/x.npz")
    ({'x': array([1., 1.])}, {'step': 3})
    """
    arrays = {name: np.asarray(x) for name, x in arrays.items()}
    # numpy's format knows bfloat16 and its like as bytes only.
    foreign = {name: x.dtype.name for name, x in arrays.items() if x.dtype.kind == "V"}
    stored = {k: x.view(f"u{x.itemsize}") if k in foreign else x for k, x in arrays.items()}
    stored["notes"] = np.array(json.dumps({"notes": notes, "dtypes": foreign}))
    with atomic_write(path) as file:
        savez(file, stored)
        file.write(_sha256_of_prefix(file, file.seek(0, os.SEEK_END)))


def savez(file: IO[bytes], arrays: Mapping[str, Any]) -> None:
    """Write ``arrays`` in numpy's format, without pickle.

    Raises
    ------
    ValueError
        If an array holds Python objects.
    """
    # numpy before 2.2 saves its argument `allow_pickle` as one more array.
    stored: dict[str, Any] = {name: np.asarray(x) for name, x in arrays.items()}
    for name, x in stored.items():
        if x.dtype.hasobject:
            raise ValueError(f"{name}: expected numbers or strings, got an array of objects.")
    np.savez(file, **stored)


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A file to write in that takes the place of ``path`` once it is whole and on the disk.

    Raises
    ------
    OSError
        If it cannot be written; what was at ``path`` before stays.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with atomic_write(f"{folder}/x.txt") as file:
    ...         _ = file.write(b"whole")
    ...     pathlib.Path(folder, "x.txt").read_bytes()
    b'whole'
    """
    path = pathlib.Path(path)
    part = path.with_name(path.name + _PART)
    try:
        with part.open("w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def read_arrays(path: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], Any]:
    """The arrays and notes that :func:`write_arrays` put at ``path``.

    Raises
    ------
    DamagedError
        If they are not, to the last bit.
    """
    with open(path, "rb") as file:
        if not _matches_checksum(file):
            raise DamagedError(f"file: expected a record as it was written, got a damaged {path}.")
        file.seek(0)
        with np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    text = json.loads(arrays.pop("notes").item())
    for name, dtype in text["dtypes"].items():
        arrays[name] = arrays[name].view(np.dtype(dtype))
    return arrays, text["notes"]


def read_one(path: str | os.PathLike[str], name: str) -> np.ndarray:
    """One of the arrays alone, unchecked: of a record that is known to be :func:`is_intact`."""
    with np.load(path, allow_pickle=False) as archive:
        dtype = json.loads(archive["notes"].item())["dtypes"].get(name)
        return archive[name] if dtype is None else archive[name].view(np.dtype(dtype))


def checksum(path: str | os.PathLike[str]) -> bytes:
    """The checksum that the record at ``path`` ends with: tells it from others, if it is whole."""
    with open(path, "rb") as file:
        file.seek(-_DIGEST, os.SEEK_END)
        return file.read()


def read_notes(path: str | os.PathLike[str]) -> Any:
    """The notes alone, unchecked: of a record that is known to be :func:`is_intact`."""
    with np.load(path, allow_pickle=False) as archive:
        return json.loads(archive["notes"].item())["notes"]


def is_intact(path: str | os.PathLike[str]) -> bool:
    """Whether the record at ``path`` can be read, and is as it was written."""
    try:
        with open(path, "rb") as file:
            return _matches_checksum(file)
    except OSError:
        return False


@contextmanager
def locked(path: str | os.PathLike[str], name: str, *, directory: bool = True) -> Iterator[None]:
    """Be the one process that writes at ``path``, a directory made if needed, or a single record.

    The system lets go of the lock when the process ends, however it ends; what a killed writer
    left half written is removed. ``name`` is what the user calls ``path``.

    Raises
    ------
    ValueError
        If another process has it, or it cannot be made or written.
    """
    path = pathlib.Path(path)
    beside = path / "lock" if directory else path.with_name(path.name + ".lock")
    try:
        beside.parent.mkdir(parents=True, exist_ok=True)
        file = beside.open("ab")
    except OSError as error:
        raise ValueError(
            f"{name}: expected a place to write in, got {path} ({error.strerror})."
        ) from error
    with file:
        lock(file, name, path)
        half_written = path.glob(f"*{_PART}") if directory else [path.with_name(path.name + _PART)]
        for part in half_written:
            part.unlink(missing_ok=True)
        yield


def lock(file: IO[bytes], name: str, path: str | os.PathLike[str]) -> None:
    """Lock an open file for as long as it is open.

    Raises
    ------
    ValueError
        If another process has it: a sentence that names ``name`` and ``path``.
    """
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"{name}: expected one that no other run is writing, got {path}, which is in use."
        ) from None


@contextmanager
def warn_if_disk_full(name: str) -> Iterator[None]:
    """A full disk within costs the record, with a warning, and not the run that is recorded."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        warnings.warn(
            f"{name}: could not be written ({reason}); the run goes on without it.", stacklevel=3
        )


def _sha256_of_prefix(file: IO[bytes], size: int) -> bytes:
    """The SHA-256 of the first ``size`` bytes."""
    sha256 = hashlib.sha256()
    file.seek(0)
    while size > 0:
        block = file.read(min(size, 2**20))
        sha256.update(block)
        size -= len(block) or size
    return sha256.digest()


def _matches_checksum(file: IO[bytes]) -> bool:
    size = file.seek(0, os.SEEK_END) - _DIGEST
    return size > 0 and _sha256_of_prefix(file, size) == file.read(_DIGEST)


def _sync_directory(directory: pathlib.Path) -> None:
    """Bring a renaming to the disk, where the system knows how."""
    if fcntl is None:
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
