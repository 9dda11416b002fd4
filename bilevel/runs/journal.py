"""Write a run's solves as lines of JSON, which a resumed run reads instead of solving again.

Every line ends with a checksum of itself and of the first line. Solves of damaged lines, and of
lines of another run, are repeated.
"""

import hashlib
import json
import os
import pathlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np

from bilevel.runs import records as store
from bilevel.runs.fingerprint import describe_difference

Record = dict[str, Any]
_CHECK = b', "sha256": "'  # separates a line's record from its checksum


class Journal:
    """Results by name, each computed once, and written to a file if there is one."""

    def __init__(self, file: BinaryIO | None = None, head: bytes = b""):
        self.records: dict[str, Record] = {}
        self.file = file
        self.head = head  # the first line
        self.waiting: list[bytes] = []

    def cached(self, name: str, compute: Callable[[], Record]) -> Record:
        """Return the record called ``name``. Compute and write it if it is missing."""
        if name not in self.records:
            record = compute()
            if self.file is not None:
                self.write(self.file, _encode_record({"name": name, **record}, self.head))
            self.records[name] = record
        return self.records[name]

    def write(self, file: BinaryIO, line: bytes) -> None:
        """Write the waiting lines and this one, as far as the disk has room."""
        self.waiting.append(line)
        with store.warn_if_disk_full(f"journal: a line of {file.name}"):
            while self.waiting:
                store.append_whole(file, self.waiting[0])
                del self.waiting[0]


@contextmanager
def opened(path: Any, resume: bool, header: Record) -> Iterator[Journal]:
    """Open the journal at ``path`` (None: in memory only); raise if another run wrote it."""
    if path is None:
        if resume:
            raise ValueError("resume: expected a journal to resume from, got None.")
        yield Journal()
        return
    path = pathlib.Path(path)
    with store.open_to_append("journal", path, resume=resume) as file:
        store.lock(file, "journal", path)
        yield _resumable(file, header)


def _encode_record(record: Record, head: bytes = b"") -> bytes:
    text = json.dumps(record, default=_to_json_number).encode()
    return text[:-1] + _CHECK + hashlib.sha256(head + text).hexdigest().encode() + b'"}\n'


def _to_json_number(x: Any) -> Any:
    return np.asarray(x).item()


def _decode_record(line: bytes, head: bytes = b"") -> Record | None:
    """Return the record in ``line``, or None if :func:`_encode_record` did not write the line."""
    text, _, check = line.rpartition(_CHECK)
    text += b"}"
    if check != hashlib.sha256(head + text).hexdigest().encode() + b'"}':
        return None
    return json.loads(text)


def _resumable(file: BinaryIO, header: Record) -> Journal:
    """Return the journal in a file. A last line that was cut short is removed."""
    file.seek(0)
    first, *lines = file.read().split(b"\n")
    if not lines and _encode_record(header).startswith(first):  # not even the header was finished
        file.truncate(0)
        journal = Journal(file, _encode_record(header))
        journal.write(file, journal.head)
        return journal
    _check_header(_decode_record(first) if lines else None, header, file.name)
    *lines, unfinished = lines
    file.seek(-len(unfinished), os.SEEK_END)
    file.truncate()
    journal = Journal(file, first + b"\n")
    records = [_decode_record(line, journal.head) for line in lines]
    if None in records:
        message = f"journal: {records.count(None)} damaged lines of {file.name} are solved again."
        warnings.warn(message, stacklevel=5)
    journal.records = {record.pop("name"): record for record in records if record is not None}
    return journal


def _check_header(saved: Record | None, header: Record, file: str) -> None:
    """Raise ``ValueError`` if the first line belongs to another run."""
    if saved is None or saved.keys() != header.keys():
        raise ValueError(f"journal: expected a journal, got another or a damaged file, {file}.")
    for name, value in json.loads(json.dumps(header, default=_to_json_number)).items():
        if name == "problem" and (other := describe_difference(saved[name], value)):
            raise ValueError(
                f"journal: expected that of a run of this problem, got one of {other} in {file}."
            )
        if saved[name] != value:
            raise ValueError(
                f"journal: expected that of a run with {name} {value}, got {saved[name]} in {file}."
            )
