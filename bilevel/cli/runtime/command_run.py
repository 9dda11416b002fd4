"""The common run of all commands: flags and data, memory, run directory, result, table."""

import pathlib
import time
from typing import Any, ClassVar

from rich.console import Console

from bilevel.cli.flags import from_config_file
from bilevel.cli.runtime import invocation, memory, report
from bilevel.cli.runtime.data import Data, opened
from bilevel.cli.runtime.run_directory import run_directory
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
            about = {
                "config": from_config_file.flags_of(self.config),
                "data": self.data.record(),
            }
            result = about | result | report.origin()
            report.write_results(self.folder, result, arrays)
            self.save_figures(result)
            console = report.screen()
            sentence, times = self.show(console, result)
            report.print_end(console, sentence, self.folder, self.figure, times)
        return result
