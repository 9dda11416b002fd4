"""The common run of all commands: flags and data, memory, run directory, result, table."""

import contextlib
import datetime
import functools
import importlib.util
import itertools
import json
import pathlib
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from bilevel.cli.flags import from_config_file, rules
from bilevel.cli.flags.commands import Job, Output, Resumable
from bilevel.cli.runtime import invocation, memory, report
from bilevel.cli.runtime.data import FILE, Data, description, opened, save_or_check_digest
from bilevel.internal.processes import broadcast_first_string, is_first_process
from bilevel.runs import records
from bilevel.runs.progress import Phases, phases

Result = dict[str, Any]
"""The content of ``result.json``."""


class CommandRun:
    """A run of a command. Subclasses compute the result, draw its figures and print it."""

    images: ClassVar[bool] = False  # whether the rows have to be images
    labels: ClassVar[bool] = True  # whether they have to have classes
    trainable: ClassVar[bool] = False  # whether `bilevel train` takes the run
    keeps: ClassVar[str] = "its results are saved"  # in the message of Ctrl-C
    figure: str = "search.png"  # "" for none
    size: ClassVar[tuple[float, float]] = (11, 4.4)  # of the figure, in inches

    # Set when the run begins.
    folder: pathlib.Path
    bars: Phases

    def __init__(self, config: Any, output: Output, arguments: Sequence[str]):
        self.began = time.perf_counter()
        self.line, first = shlex.join(["bilevel", *arguments]), is_first_process()
        self.shows_progress, self.prints_json = first and not output.quiet, first and output.json
        self.console = report.screen(self.shows_progress and not output.json)
        self.record = None
        if output.log and first:
            resume = getattr(config, "resume", False)
            self.record = invocation.recorder(output.log, arguments[0], resume)
        flags = [word[2:].partition("=")[0] for word in arguments if word.startswith("--")]
        self.given = {flag.replace("-", "_") for flag in flags}
        self.config, self.data = self.opened(config)
        self.prepare()

    def prepare(self) -> None:
        """Set attributes that the shapes of the arrays need besides the flags and the data."""

    def opened(self, config: Any) -> tuple[Any, Data]:
        """Return the flags, with sizes that fit the data, and the data; describe own data."""
        config, data = opened(config, self.given, images=self.images, labels=self.labels)
        if data.dataset is not None:
            self.console.print(description(config, data), soft_wrap=True)
        return config, data

    def arrays(self) -> list[memory.Parts]:
        """Return the shapes of the arrays that are alive together in each stage."""
        raise NotImplementedError

    def result(self) -> tuple[Result, dict[str, Any]]:
        """Return entries of ``result.json``, and the arrays of ``arrays.npz``."""
        raise NotImplementedError

    def draw(self, figure: Any, result: Result) -> None:
        """Draw the figure."""
        raise NotImplementedError

    def save_figures(self, result: Result) -> None:
        """Save the figure, if there is one."""
        if self.figure:
            draw = functools.partial(self.draw, result=result)
            report.save_figure(self.folder / self.figure, self.size, draw)

    def show(self, result: Result) -> tuple[str, str]:
        """Print the table; return the result in one sentence, and the times."""
        raise NotImplementedError

    def seconds(self) -> float:
        """Return the seconds since the run began."""
        return time.perf_counter() - self.began

    def losses_in_the_bar(
        self, steps: int, text: str, copies: int, more: Callable[[Any], dict] = lambda so_far: {}
    ) -> Callable[[Any], None]:
        """Return a callback of a search that shows its mean losses, and ``more(so_far)``."""
        show = self.bars.loop(steps, text)

        def callback(so_far):
            def shown():
                last = {k: np.asarray(so_far.history[k])[-1] for k in ("lower", "value")}
                return {k: float(loss) / copies for k, loss in last.items()} | more(so_far)

            show(len(so_far.history["value"]), shown)

        return callback

    def run(self) -> None:
        """Run the job; print its table or ``result.json``, and write its run directory."""
        progress = self.config.progress if self.shows_progress else False
        with (
            memory.fitting(self.config, *self.arrays()),
            run_directory(self.config, self.data, keeps=self.keeps) as self.folder,
        ):
            with phases(progress, self.record) as self.bars:
                self.bars.enter("data")
                result, arrays = self.result()
            result = {
                "config": from_config_file.flags_of(self.config),
                "data": self.data.record(),
                **result,
                "command": self.line,
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "versions": invocation.versions(),
                "jax": jax.__version__,
                "device": str(jax.devices()[0].device_kind),
            }
            if is_first_process():
                report.write_results(self.folder, result, arrays)
                self.save_figures(result)
            sentence, times = self.show(result)
            if self.trainable:
                line = shlex.join(["bilevel", "train", str(self.folder)])
                self.console.print(f"train and save the network: {line}", soft_wrap=True)
            self.console.print(f"Result: {sentence}")
            figure = self.folder / self.figure
            figures = f"; figure: {figure}" if figure.is_file() else ""
            if not importlib.util.find_spec("matplotlib"):
                figures = "; no figure without matplotlib (the extra `plots`)"
            results = f"{times}; results: {self.folder}{figures}"
            self.console.print(results, soft_wrap=True)  # to be copied
        if self.prints_json:
            print(report.dump_without_nan(result))


@contextlib.contextmanager
def run_directory(
    config: Job, data: Data | None = None, *, keeps: str = CommandRun.keeps
) -> Iterator[pathlib.Path]:
    """Yield the directory to write into; if a new run fails before its first result, remove it.

    A resumed run has the directory of the run with the same flags, apart from
    ``config.changeable``, and the same data. Ctrl-C raises with a message that has ``keeps``.
    """
    resumable = isinstance(config, Resumable)
    resumed = isinstance(config, Resumable) and config.resume
    made: list[pathlib.Path] = []

    def own():
        from_config_file.check_directory(config)
        made.extend([] if resumed else _new(config))
        folder = config.out if resumed else made[0]
        save_or_check_digest(folder, data, resumed)
        return str(folder)

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
            where = f"; resume with --resume --out {folder}" if resumable else f" in {folder}"
            left = keeps + where if keeps_results else "nothing is saved"
            raise KeyboardInterrupt(f"{str(error) or 'interrupted'}; {left}") from None
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
