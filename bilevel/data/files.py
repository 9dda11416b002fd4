"""Find data files, plain or compressed, read them, and check their digests."""

import gzip
import hashlib
import io
import lzma
import os
import re
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def user_cache() -> Path | None:
    """Return the user's cache folder of this package, or None for a user without a home."""
    import pooch  # a slow import that runs without files do not need

    try:
        folder = pooch.os_cache("bilevel")
    except RuntimeError:
        return None
    # Older versions of platformdirs return a folder "~" in the working directory.
    return folder if folder.is_absolute() else None


def data_folders(name: str) -> list[Path]:
    """List where the files of dataset ``name`` may be: ``$BILEVEL_DATA``, then the user's cache."""
    roots = os.environ.get("BILEVEL_DATA"), user_cache()
    return [Path(root) / name for root in roots if root]


def in_words(folders: list[Path]) -> str:
    """Name the folders that were searched."""
    return " or ".join(map(str, folders)) or "$BILEVEL_DATA, as this user has no home"


_DECOMPRESS: dict[str, Any] = {"": bytes, ".gz": gzip.decompress, ".xz": lzma.decompress}


def find_file(folder: Path, *files: str) -> Path | None:
    """Return the path of the first of ``files`` in ``folder`` (plain, .gz or .xz), or None."""
    paths = (folder / f"{file}{suffix}" for file in files for suffix in _DECOMPRESS)
    return next((path for path in paths if path.exists()), None)


def read_file(folder: Path, file: str) -> tuple[Path, bytes]:
    """Return the path and the decompressed bytes of a file that ``find_file`` finds."""
    path = find_file(folder, file)
    if path is None:
        raise FileNotFoundError(f"{folder}: expected {file}, plain, .gz or .xz, got no such file")
    decompress = _DECOMPRESS[path.name.removeprefix(file)]
    try:
        return path, decompress(path.read_bytes())
    except (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError) as error:
        raise ValueError(f"{path}: expected an intact {path.suffix} file, got: {error}") from error


def members(path: Path, digest: str, pattern: str) -> Iterator[tuple[str, bytes]]:
    """Yield name and bytes of each file of a folder or tar archive if the name matches."""
    if path.is_dir():
        for file in path.rglob("*"):
            if re.search(pattern, file.as_posix()):
                yield file.as_posix(), file.read_bytes()
        return
    content = path.read_bytes()
    check_digest(path, content, digest)
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            content_of = archive.extractfile(member) if re.search(pattern, member.name) else None
            if content_of is not None:
                yield member.name, content_of.read()


def check_length(path: str | Path, content: bytes, length: int, what: str) -> None:
    """Raise ``ValueError`` unless ``content`` has ``length`` bytes."""
    if len(content) != length:
        raise ValueError(f"{path}: expected {length} bytes for {what}, got {len(content)}")


def check_digest(path: str | Path, content: bytes, digest: str) -> None:
    """Raise ``ValueError`` unless ``content`` has the ``digest`` "sha256:..." or "md5:..."."""
    algorithm, _, expected = digest.partition(":")
    computed = hashlib.new(algorithm, content, usedforsecurity=False).hexdigest()
    if computed != expected:
        raise ValueError(f"{path}: expected content of {algorithm} {expected}, got {computed}")
