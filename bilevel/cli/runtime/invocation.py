"""The call of the command: its line, its output, its record, and the versions."""

import contextlib
import dataclasses
import datetime
import pathlib
import platform
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from importlib import metadata
from typing import Any


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a command. ``line`` is None when it is called from Python.

    ``given`` are the names of the flags in the line. ``record`` receives the content of the
    progress bars, with or without bars.
    """

    line: str | None = None
    table: bool = True
    progress: bool = True
    record: Callable[[dict[str, Any]], None] | None = None
    given: frozenset[str] = frozenset()


_call: ContextVar[Call | None] = ContextVar("call", default=None)


@contextlib.contextmanager
def made(call: Call) -> Iterator[None]:
    """Make :func:`current` return ``call`` within the ``with`` block."""
    token = _call.set(call)
    try:
        yield
    finally:
        _call.reset(token)


def current() -> Call:
    """Return the call that is running."""
    return _call.get() or Call()


def recorder(path: pathlib.Path, command: str, resume: bool) -> Callable[[dict[str, Any]], None]:
    """Return a function that appends a line of JSON to ``path``, for ``--log``.

    A resumed run skips the steps of its phases that the file has.
    """
    from bilevel.outer_loop.metrics_log import Lines

    lines = Lines("log", path, resume=True)
    known = [line for line in lines.lines if line.get("command") == command] if resume else []
    recorded = {(line.get("phase"), line.get("done")) for line in known if "done" in line}

    def record(shown):
        if (shown["phase"], shown.get("done")) not in recorded:
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
            lines.append([{"time": now, "command": command, **shown}])

    return record


def versions() -> dict[str, str]:
    """Return the versions of the package, JAX and Python from metadata, without importing JAX."""
    names = ("bilevel", "jax", "jaxlib")
    return {name: _version(name) for name in names} | {"python": platform.python_version()}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # on the path, but not installed
        return "unknown"
