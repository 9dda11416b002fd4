"""Records on the disk: written whole or not at all, checked when read, with one writer at a time.

A record is an ``.npz`` file. The CRC-32 that zip stores for every array detects flipped bits. A
record is written under another name, flushed to the disk and renamed, so that a killed process
leaves the previous record.
"""

import json
import os
import pathlib
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any, BinaryIO

import numpy as np

try:
    import fcntl
except ImportError:  # Windows, where a second writer is not detected
    fcntl = None  # type: ignore[assignment]

_PART = ".part"  # ends the name of a file that is being written


class DamagedError(ValueError):
    """The file was cut short or changed, or does not contain a record."""


def write_arrays(
    path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray], notes: Any = None
) -> None:
    """Write ``arrays`` and ``notes``, a JSON value. ``OSError`` leaves the previous record."""
    arrays = {name: np.asarray(x) for name, x in arrays.items()}
    # numpy's format knows bfloat16 and its like as bytes only.
    foreign = {name: x.dtype.name for name, x in arrays.items() if x.dtype.kind == "V"}
    stored = {k: x.view(f"u{x.itemsize}") if k in foreign else x for k, x in arrays.items()}
    stored["notes"] = np.array(json.dumps({"notes": notes, "dtypes": foreign}))
    with atomic_write(path) as file:
        savez(file, stored)


def savez(file: IO[bytes], arrays: Mapping[str, Any]) -> None:
    """Write ``arrays`` in numpy's format; raise ``ValueError`` for arrays of Python objects."""
    # numpy before 2.2 saves its argument `allow_pickle` as one more array.
    stored: dict[str, Any] = {name: np.asarray(x) for name, x in arrays.items()}
    for name, x in stored.items():
        if x.dtype.hasobject:
            raise ValueError(f"{name}: expected numbers or strings, got an array of objects.")
    np.savez(file, **stored)


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a file that replaces ``path`` once it is complete and on the disk."""
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
    if fcntl is not None:  # flush the renaming to the disk
        handle = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def open_to_append(name: str, path: str | os.PathLike[str], *, resume: bool) -> BinaryIO:
    """Open an unbuffered file; raise ``ValueError`` if it exists without ``resume``."""
    file = pathlib.Path(path)
    if file.exists() and not resume:
        raise ValueError(f"{name}: expected a new file or resume=True, got the existing {path}.")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return file.open("a+b", buffering=0)
    except OSError as error:
        raise ValueError(
            f"{name}: expected a file to write in, got {path} ({error.strerror})."
        ) from error


def append_whole(file: IO[bytes], content: bytes) -> None:
    """Append all of ``content`` to an unbuffered file, or raise ``OSError`` and append nothing."""
    end = file.seek(0, os.SEEK_END)
    try:
        if file.write(content) < len(content):  # a disk that fills up takes a part
            raise OSError("no room for a whole line")
    except OSError:
        file.truncate(end)
        raise


def read_arrays(path: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], Any]:
    """Return the arrays and notes of a record; raise ``DamagedError`` if it is not intact."""
    if checksums(path) is None:
        raise DamagedError(f"file: expected a record as it was written, got a damaged {path}.")
    with np.load(path, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    text = json.loads(arrays.pop("notes").item())
    for name, dtype in text["dtypes"].items():
        arrays[name] = arrays[name].view(np.dtype(dtype))
    return arrays, text["notes"]


def read_one(path: str | os.PathLike[str], name: str) -> np.ndarray:
    """Return one array of a record that is intact."""
    with np.load(path, allow_pickle=False) as archive:
        dtype = json.loads(archive["notes"].item())["dtypes"].get(name)
        return archive[name] if dtype is None else archive[name].view(np.dtype(dtype))


def read_notes(path: str | os.PathLike[str]) -> Any:
    """Return the notes of a record that is intact."""
    with np.load(path, allow_pickle=False) as archive:
        return json.loads(archive["notes"].item())["notes"]


def checksums(path: str | os.PathLike[str]) -> list[int] | None:
    """Return the CRC-32 of each array of a record, or None if the record is damaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            # A flipped bit can cut the list of members short, so that the notes at its end are
            # missing, or give two members the same name. zip detects all other flips.
            names = [member.filename for member in members]
            complete = names[-1] == "notes.npy" and len({*names}) == len(names)
            return [m.CRC for m in members] if complete and archive.testzip() is None else None
    except Exception:  # zipfile raises seven kinds of exceptions for flipped bits
        return None


@contextmanager
def locked(path: str | os.PathLike[str], name: str, *, directory: bool = True) -> Iterator[None]:
    """Hold the lock on ``path``: a directory, made if needed, or a record.

    The system releases the lock when the process ends. Half-written files of killed processes are
    removed. ``ValueError`` names the argument ``name``.
    """
    path = pathlib.Path(path)
    lock_file = path / "lock" if directory else path.with_name(path.name + ".lock")
    try:
        lock_file.parent.mkdir(parents=True, exist_ok=True)
        file = lock_file.open("ab")
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
    """Lock an open file until it is closed; raise ``ValueError`` if another process holds it."""
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
    """Turn an ``OSError``, e.g. of a full disk, into a warning that the record is missing."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        message = f"{name}: could not be written ({reason}); the run continues without it."
        warnings.warn(message, stacklevel=3)
