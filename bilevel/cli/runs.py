"""The directory of a run: a new one with a number of its own, or that of the run to go on with."""

import contextlib
import json
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

from bilevel import store
from bilevel._processes import first, text_of_first
from bilevel.cli import flags, report, saved
from bilevel.cli.interrupts import Stopped

_CONFIG = "config.json"


@contextlib.contextmanager
def run_directory(
    config: Any, changeable: tuple[str, ...] = (), *, keeps: str = "its results are kept"
) -> Iterator[pathlib.Path]:
    """The directory to write into; where a new run fails before its first result, it is removed.

    With ``config.resume`` it is ``config.out``, if that was the same run but for the flags that are
    ``changeable``. Ctrl-C raises :class:`Stopped`, which says what the directory ``keeps``.
    """
    goes_on = hasattr(config, "resume")
    resumed = goes_on and config.resume
    made: list[pathlib.Path] = []

    def own():
        if resumed:
            return str(_resumed(config, changeable))
        made.extend(_new(config))
        return str(made[0])

    folder = pathlib.Path(text_of_first(own))
    try:
        yield folder
        if resumed and changeable and first():
            _save_changed(folder, config, changeable)
    except BaseException as error:
        kept = resumed or _has_results(folder)
        if not kept:
            _remove(made)
        if isinstance(error, KeyboardInterrupt):
            left = keeps if kept else "nothing is kept"
            left += f" in {folder}" * (kept and not goes_on)
            left += f"; go on with --resume --out {folder}" * (kept and goes_on)
            raise Stopped(f"{str(error) or 'interrupted'}; {left}") from None
        raise


def _new(config: Any) -> list[pathlib.Path]:
    """The directory ``out``, numbered where it exists, and the parents made for it, inner first."""
    out = config.out
    if out.name in ("", ".."):
        raise ValueError(f"out: expected a path that ends in a name, got {str(out)!r}.")
    made: list[pathlib.Path] = []
    try:
        if os.path.lexists(out) and not out.is_dir():  # a link to nothing, a device
            raise ValueError(f"out: expected a directory, got the file {str(out)!r}.")
        made = [parent for parent in out.parents if not parent.exists()]
        out.parent.mkdir(parents=True, exist_ok=True)
        folder, number = out, 1
        while not _make(folder):
            number += 1
            folder = out.with_name(f"{out.name}-{number}")
        made.insert(0, folder)
        (folder / _CONFIG).write_text(_as_json(report.flags(config)))
    except OSError as error:
        _remove(made)
        raise ValueError(
            f"out: expected a directory that can be made, got {flags.shown(out)} "
            f"({error.strerror})."
        ) from None
    return made


def _as_json(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=2) + "\n"


def _make(folder: pathlib.Path) -> bool:
    """Make the directory; False if it exists, as when another run makes it at the same time."""
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


def _has_results(folder: pathlib.Path) -> bool:
    """Whether a file holds more than flags, a lock or the header of a journal."""
    files = [p for p in folder.rglob("*") if p.is_file() and p.name != _CONFIG]
    files = [path for path in files if path.name != "lock" and path.suffix != ".lock"]
    return any(
        path.read_bytes().count(b"\n") > 1 if path.suffix == ".jsonl" else path.stat().st_size > 0
        for path in files
    )


def _remove(made: list[pathlib.Path]) -> None:
    """The run's directory, and its parents unless something else is in them by now."""
    for folder in made:
        if (folder / _CONFIG).exists():
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.rmdir()


# ----------------------------------------------------------------------------- going on


def _resumed(config: Any, changeable: tuple[str, ...]) -> pathlib.Path:
    """The directory ``out``, if the run in it was asked for with the same flags."""
    folder = config.out
    if not _is_directory(folder):
        raise FileNotFoundError(f"out: expected the directory of a run, got {flags.shown(folder)}.")
    before, now = saved.read(folder / _CONFIG, "out"), report.flags(config)
    for has, others in (("with", set(before) - set(now)), ("without", set(now) - set(before))):
        if others:
            raise ValueError(
                f"out: expected a run of this command and space, got one {has} {min(others)} in "
                "its flags."
            )
    hints = flags.hints(type(config))
    for name, value in before.items():
        if expected := flags.fault(hints[name], saved.as_flag(hints[name], value)):
            raise ValueError(
                f"out: expected the flags of a run in {folder / _CONFIG}, got "
                f"{name} {flags.shown(value)} ({expected})."
            )
        if name not in {"resume", "out", "progress", *changeable} and value != now[name]:
            raise ValueError(
                f"{name}: expected {value!r} as in the run to resume, got {now[name]!r}."
            )
    return folder


def _save_changed(folder: pathlib.Path, config: Any, changeable: tuple[str, ...]) -> None:
    """Save the ``changeable`` flags as they are now: with them the run gives the result it has."""
    before, now = saved.read(folder / _CONFIG, "out"), report.flags(config)
    if (after := before | {name: now[name] for name in changeable}) != before:
        # A full disk: the result is there already.
        with contextlib.suppress(OSError), store.replaced(folder / _CONFIG) as file:
            file.write(_as_json(after).encode())


def _is_directory(path: pathlib.Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name that is too long
        return False
