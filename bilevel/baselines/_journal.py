"""A run's solves as lines of JSON: written as they come, replayed instead of solved again."""

import hashlib
import json
import pathlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import jax
import numpy as np

Record = dict[str, Any]


class Journal:
    """Results by name, each computed once; backed by a file where there is one."""

    def __init__(self, records: dict[str, Record] | None = None, file: BinaryIO | None = None):
        self.records = records or {}
        self.file = file

    def once(self, name: str, compute: Callable[[], Record]) -> Record:
        """The result of this name, computed and written down if it is not known."""
        if name not in self.records:
            record = compute()
            if self.file is not None:
                _write(self.file, {"name": name, **record})
            self.records[name] = record
        return self.records[name]


@contextmanager
def opened(path: Any, resume: bool, header: Record) -> Iterator[Journal]:
    """The journal at ``path`` (None: in memory only), checked to be that of this run."""
    if path is None:
        if resume:
            raise ValueError("resume: expected a journal to resume from, got None.")
        yield Journal()
        return
    path = pathlib.Path(path)
    if path.exists() and not resume:
        raise ValueError(f"journal: expected a new file or resume=True, got the existing {path}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        lines = _resumable(file, header)
        if not lines:
            _write(file, header)
        yield Journal({line.pop("name"): line for line in lines[1:]}, file)


def _write(file: BinaryIO, record: Record) -> None:
    file.write(_line(record))
    file.flush()


def _line(record: Record) -> bytes:
    return json.dumps(record, default=np.generic.item).encode() + b"\n"


def _resumable(file: BinaryIO, header: Record) -> list[Record]:
    """The lines, checked to be this run's; a last one that was cut short is dropped."""
    file.seek(0)
    *complete, rest = file.read().split(b"\n")
    try:
        lines = [json.loads(line) for line in complete]
        ours = lines[0].keys() == header.keys() if lines else _line(header).startswith(rest)
    except (ValueError, AttributeError):
        ours = False
    if not ours:
        raise ValueError(f"journal: expected a journal, got another file, {file.name}.")
    for name, value in json.loads(_line(header)).items():
        if lines and lines[0][name] != value:
            raise ValueError(
                f"journal: expected that of a run with {name} {value}, "
                f"got {lines[0][name]} in {file.name}."
            )
    file.seek(-len(rest), 2)
    file.truncate()
    return lines


def digest(configs: tuple) -> str:
    """A fingerprint of the configurations that is the same in every process."""
    leaves, structure = jax.tree.flatten(configs)
    found = hashlib.sha256(str(structure).encode())
    for leaf in leaves:
        if isinstance(leaf, np.ndarray | jax.Array):
            found.update(f"{leaf.dtype}{leaf.shape}".encode() + np.asarray(leaf).tobytes())
        else:
            # Without the address, which the repr of a function has in it.
            found.update(re.sub(r" at 0x[0-9a-f]+", "", repr(leaf)).encode() + b"\0")
    return found.hexdigest()
