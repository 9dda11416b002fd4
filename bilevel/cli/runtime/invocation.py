"""How the command was called: the line, what it may show, and by which versions."""

import contextlib
import dataclasses
import platform
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from importlib import metadata
from typing import Any


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a command: its line (None when called from Python), and what it may show.

    ``record`` is given what the progress bar shows, whether there is a bar or not.
    """

    line: str | None = None
    table: bool = True
    progress: bool = True
    record: Callable[[dict[str, Any]], None] | None = None


_call: ContextVar[Call | None] = ContextVar("call", default=None)


@contextlib.contextmanager
def made(call: Call) -> Iterator[None]:
    """Make ``call`` what :func:`current` returns, within the ``with`` block."""
    token = _call.set(call)
    try:
        yield
    finally:
        _call.reset(token)


def current() -> Call:
    """The call that is running."""
    return _call.get() or Call()


def versions() -> dict[str, str]:
    """Versions of the package, JAX and Python, from the metadata: JAX is not imported."""
    names = ("bilevel", "jax", "jaxlib")
    return {name: _version(name) for name in names} | {"python": platform.python_version()}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # on the path, but not installed
        return "unknown"
