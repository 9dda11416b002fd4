"""The common run of all commands: flags and data, memory, run directory, result, table."""

import contextlib
import datetime
import importlib.util
import itertools
import json
import pathlib
import shutil
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
from rich.console import Console

from bilevel.cli.flags import from_config_file, rules
from bilevel.cli.flags.commands import Job, Resumable
from bilevel.cli.runtime import invocation, memory, report
from bilevel.cli.runtime.data import FILE, Data, check_digest, opened, save_digest
from bilevel.internal.processes import broadcast_first_string, is_first_process
from bilevel.runs import records
from bilevel.runs.progress import Phases, phases

Result = dict[str, Any]
"""The content of ``result.json``."""


class CommandRun:
    """A run of a command. Subclasses compute the result, draw its figures and print it."""

    images: ClassVar[bool] = False  # whether the rows have to be images
    labels: ClassVar[bool] = True  # whether they have to have classes
    keeps: ClassVar[str] = "its results are saved"  # in the message of Ctrl-C
    figure: ClassVar[str] = "search.png"

    # Set when the run begins.
    folder: pathlib.Path
    bars: Phases

    def __init__(self, config: Any):
        self.began = time.perf_counter()
        self.config, self.data = self.opened(config)

    def opened(self, config: Any) -> tuple[Any, Data]:
        """Return the flags, with sizes that fit the data, and the data."""
        return opened(config, images=self.images, labels=self.labels)

    def arrays(self) -> list[memory.Parts]:
        """Return the shapes of the arrays that are alive together in each stage."""
        raise NotImplementedError

    def result(self) -> tuple[Result, dict[str, Any]]:
        """Return entries of ``result.json``, and the arrays of ``arrays.npz``."""
        raise NotImplementedError

    def save_figures(self, result: Result) -> None:
        """Save the figures."""

    def show(self, console: Console, result: Result) -> tuple[str, str]:
        """Print the table; return the result in one sentence, and the times."""
        raise NotImplementedError

    def seconds(self) -> float:
        """Return the seconds since the run began."""
        return time.perf_counter() - self.began

    def run(self) -> Result:
        """Run the job; print its table, write its run directory, return ``result.json``."""
        call = invocation.current()
        progress = self.config.progress if call.progress else False
        with (
            memory.fitting(self.config, *self.arrays()),
            run_directory(self.config, self.data, keeps=self.keeps) as self.folder,
        ):
            with phases(progress, call.record) as self.bars:
                self.bars.enter("data")
                result, arrays = self.result()
            result = {
                "config": from_config_file.flags_of(self.config),
                "data": self.data.record(),
                **result,
                "command": call.line,
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "versions": invocation.versions(),
                "jax": jax.__version__,
                "device": str(jax.devices()[0].device_kind),
            }
            report.write_results(self.folder, result, arrays)
            self.save_figures(result)
            console, figure = report.screen(), self.folder / self.figure
            sentence, times = self.show(console, result)
            console.print(f"Result: {sentence}")
            figures = f"; figure: {figure}" if figure.exists() else ""
            if not importlib.util.find_spec("matplotlib"):
                figures = "; no figure without matplotlib (the extra `plots`)"
            results = f"{times}; results: {self.folder}{figures}"
            console.print(results, soft_wrap=True)  # to be copied
        return result


@contextlib.contextmanager
def run_directory(
    config: Job, data: Data | None = None, *, keeps: str = CommandRun.keeps
) -> Iterator[pathlib.Path]:
    """Yield the directory to write into; if a new run fails before its first result, remove it.

    A resumed run has the directory of the run with the same flags, apart from
    ``config.changeable``, and the same data. Ctrl-C raises ``Stopped`` with ``keeps``.
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
            raise invocation.Stopped(f"{str(error) or 'interrupted'}; {left}") from None
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
        text = json.dumps(from_config_file.flags_of(config), indent=2)
        (folder / from_config_file.CONFIG).write_text(text + "\n")
    except OSError as error:
        _remove(made)
        raise ValueError(
            f"out: expected a directory that can be made, got {rules.shown(out)} "
            f"({error.strerror})."
        ) from None
    return made


def _has_results(folder: pathlib.Path) -> bool:
    """Return whether a file holds more than flags, a lock or the header of a journal."""
    begun = from_config_file.CONFIG, FILE, "lock"
    return any(
        path.read_bytes().count(b"\n") > 1 if path.suffix == ".jsonl" else path.stat().st_size > 0
        for path in folder.rglob("*")
        if path.is_file() and path.name not in begun and path.suffix != ".lock"
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
        saved.write(json.dumps(after, indent=2).encode() + b"\n")
