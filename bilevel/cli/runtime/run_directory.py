"""The directory of a run: a new one with a number, or the directory of the run to resume."""

import contextlib
import itertools
import pathlib
import shutil
from collections.abc import Iterator

from bilevel.cli.flags import from_config_file, rules
from bilevel.cli.flags.commands import Job, Resumable
from bilevel.cli.runtime.data import FILE, Data, check_digest, save_digest
from bilevel.cli.runtime.interrupts import Stopped
from bilevel.internal.processes import broadcast_first_string, is_first_process
from bilevel.runs import records


@contextlib.contextmanager
def run_directory(
    config: Job, data: Data | None = None, *, keeps: str = "its results are saved"
) -> Iterator[pathlib.Path]:
    """Yield the directory to write into; if a new run fails before its first result, remove it.

    A resumed run has the directory of the run with the same flags, apart from
    ``config.changeable``, and the same data. Ctrl-C raises :class:`Stopped` with the text
    ``keeps``.
    """
    resumable = isinstance(config, Resumable)
    resumed = isinstance(config, Resumable) and config.resume
    made: list[pathlib.Path] = []

    def own():
        from_config_file.check_directory(config)
        if resumed:
            if data is not None:
                check_digest(config.out, data)
            return str(config.out)
        made.extend(_new(config))
        if data is not None:
            save_digest(made[0], data)
        return str(made[0])

    folder = pathlib.Path(broadcast_first_string(own))
    try:
        yield folder
        if resumed and config.changeable and is_first_process():
            _save_changed(folder, config)
    except BaseException as error:
        keeps_results = resumed or _has_results(folder)
        if not keeps_results:
            _remove(made)
        if isinstance(error, KeyboardInterrupt):
            left = keeps if keeps_results else "nothing is saved"
            left += f" in {folder}" * (keeps_results and not resumable)
            left += f"; resume with --resume --out {folder}" * (keeps_results and resumable)
            raise Stopped(f"{str(error) or 'interrupted'}; {left}") from None
        raise


def _new(config: Job) -> list[pathlib.Path]:
    """Make the directory ``out``, or a numbered one, and its parents; return them, inner first."""
    out = config.out
    made: list[pathlib.Path] = []
    try:
        made = [parent for parent in out.parents if not parent.exists()]
        out.parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            folder = out if number == 1 else out.with_name(f"{out.name}-{number}")
            with contextlib.suppress(FileExistsError):  # also if another run has just made it
                folder.mkdir()
                break
        made.insert(0, folder)
        text = from_config_file.dump(from_config_file.flags_of(config))
        (folder / from_config_file.CONFIG).write_text(text)
    except OSError as error:
        _remove(made)
        raise ValueError(
            f"out: expected a directory that can be made, got {rules.shown(out)} "
            f"({error.strerror})."
        ) from None
    return made


def _has_results(folder: pathlib.Path) -> bool:
    """Return whether a file holds more than flags, a lock or the header of a journal."""
    begun = from_config_file.CONFIG, FILE
    files = [p for p in folder.rglob("*") if p.is_file() and p.name not in begun]
    files = [path for path in files if path.name != "lock" and path.suffix != ".lock"]
    return any(
        path.read_bytes().count(b"\n") > 1 if path.suffix == ".jsonl" else path.stat().st_size > 0
        for path in files
    )


def _remove(made: list[pathlib.Path]) -> None:
    """Remove the run's directory, and its parents unless they contain something else."""
    for folder in made:
        if (folder / from_config_file.CONFIG).exists():
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.rmdir()


def _save_changed(folder: pathlib.Path, config: Job) -> None:
    """Save the flags that give the present result."""
    file = folder / from_config_file.CONFIG
    before, now = from_config_file.read(file, "out"), from_config_file.flags_of(config)
    after = before | {name: now[name] for name in config.changeable}
    # If the disk is full, the result is already written.
    with contextlib.suppress(OSError), records.atomic_write(file) as saved:
        saved.write(from_config_file.dump(after).encode())
