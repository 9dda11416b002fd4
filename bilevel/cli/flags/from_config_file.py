"""The flags of a run in its ``config.json``: written, read, and compared. JAX is not imported."""

import dataclasses
import json
import os
import pathlib
from typing import Any, get_args

from bilevel.cli.flags import rules
from bilevel.cli.flags.commands import Job, Resumable

CONFIG = "config.json"


def flags_of(config: Job) -> dict[str, Any]:
    """Return a configuration as JSON values: paths are strings, tuples are lists."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def read(path: pathlib.Path, flag: str) -> dict[str, Any]:
    """Return the content of the file; an error names ``flag``."""
    try:
        saved = json.loads(path.read_bytes())
        if isinstance(saved, dict):
            return saved
        got = f"a {type(saved).__name__}"
    except FileNotFoundError:
        got = "no such file"
    except OSError as error:
        got = str(error.strerror)
    except (ValueError, RecursionError):  # not JSON, not text, or nested too deeply
        got = "something else"
    raise ValueError(
        f"{flag}: expected the flags of a run in {rules.shown(path)}, as a JSON object, got {got}."
    )


def values(path: pathlib.Path, kind: type) -> dict[str, Any]:
    """Return the flags of a command, ``kind``, that the file has. Each is checked by itself."""
    hints, flags = rules.hints(kind), {}
    for name, value in read(path, "config").items():
        if name not in hints:
            raise ValueError(
                f"config: expected the flags of a run of this command and space in "
                f"{rules.shown(path)}, got {rules.shown(name)} among them."
            )
        if isinstance(value, list):  # JSON lacks tuples and paths
            value = tuple(value)
        is_path = isinstance(value, str) and pathlib.Path in get_args(hints[name])
        flags[name] = pathlib.Path(value) if is_path else value
        if expected := rules.fault(hints[name], flags[name]):
            raise ValueError(
                f"config: {name} in {rules.shown(path)}: {expected}, got {rules.shown(value)}."
            )
    return flags


def check_directory(config: Job) -> None:
    """Raise if ``config.out`` cannot be the directory of a new run, or of the run to resume."""
    out = config.out
    if isinstance(config, Resumable) and config.resume:
        _check_resumed(config)
    elif out.name in ("", ".."):
        raise ValueError(f"out: expected a path that ends in a name, got {str(out)!r}.")
    elif os.path.lexists(out) and not os.path.isdir(out):  # a link to nothing, a device
        raise ValueError(f"out: expected a directory, got the file {str(out)!r}.")


def _check_resumed(config: Resumable) -> None:
    """Raise unless ``out`` holds the run that these flags resume."""
    folder = config.out
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"out: expected the directory of a run, got {rules.shown(folder)}.")
    before, now = read(folder / CONFIG, "out"), flags_of(config)
    if others := set(before) ^ set(now):
        raise ValueError(
            "out: expected a run of this command and space, got one whose flags differ in "
            f"{rules.shown(min(others))}."
        )
    for name in set(before) - {"resume", "out", "progress", *config.changeable}:
        value, own = before[name], now[name]
        if value != own or isinstance(value, bool) != isinstance(own, bool):
            raise ValueError(
                f"{name}: expected {rules.shown(value)} as in the run to resume, got {own!r}."
            )
