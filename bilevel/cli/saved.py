"""The flags of an earlier run, from its ``config.json``."""

import json
import pathlib
from typing import Any, get_args

from bilevel.cli import flags


def read(path: pathlib.Path, flag: str) -> dict[str, Any]:
    """What the file holds; ``flag`` is named where it cannot be used."""
    try:
        saved = json.loads(path.read_bytes())
        got = f"a {type(saved).__name__}"
    except FileNotFoundError:
        got = "no such file"
    except OSError as error:
        got = str(error.strerror)
    except (ValueError, RecursionError):  # not JSON, not text, or nested too deeply
        got = "something else"
    else:
        if isinstance(saved, dict):
            return saved
    raise ValueError(
        f"{flag}: expected the flags of a run in {flags.shown(path)}, as a JSON object, got {got}."
    )


def values(path: pathlib.Path, kind: type) -> dict[str, Any]:
    """What the file has for the flags of a command, ``kind``; each is checked by itself."""
    hints, found = flags.hints(kind), {}
    for name, value in read(path, "config").items():
        if name not in hints:
            raise ValueError(
                f"config: expected the flags of a run of this command and space in "
                f"{flags.shown(path)}, got {flags.shown(name)} among them."
            )
        found[name] = as_flag(hints[name], value)
        if expected := flags.fault(hints[name], found[name]):
            raise ValueError(
                f"config: {name} in {flags.shown(path)}: {expected}, got {flags.shown(value)}."
            )
    return found


def as_flag(hint: Any, value: Any) -> Any:
    """A value from JSON as a flag of the type ``hint``: tuples and paths, which JSON has not."""
    if isinstance(value, list):
        return tuple(value)
    is_path = isinstance(value, str) and pathlib.Path in get_args(hint)
    return pathlib.Path(value) if is_path else value
