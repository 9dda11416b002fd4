"""Progress on standard error, by default only if that is a terminal; in notebooks, below the cell.

A long loop has a bar of its own (:func:`progress_bar`), unless it is part of a run that has one bar
for all its phases (:func:`run_bar`): then it fills that phase's share.
"""

import contextlib
import datetime
import io
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

_NOTEBOOK_COLUMNS = 120
_NOTEBOOK_SECONDS = 0.2  # between two updates of the text: each is a message to the browser
_SAYS = 0.03  # the share of the run that has to be done before the time left is estimated

Show = Callable[[int, Callable[[], dict[str, Any]]], None]


class RunBar:
    """The bar of a run; ``work`` has its phases in order and how long each takes, in any unit.

    What it would show, ``record`` is given too, as a dict.
    """

    def __init__(
        self,
        work: Mapping[str, float],
        update: Callable[..., None] | None,
        record: Callable[[dict[str, Any]], None] | None = None,
    ):
        self._work, self._update = dict(work), update  # None: nothing is shown
        self._record = record
        self.phase: str = ""
        self._before = 0.0
        self._earlier = 0.0  # work that an earlier, interrupted run had done

    def enter(self, phase: str) -> None:
        """Begin ``phase``; all phases before it in ``work`` count as done."""
        names = list(self._work)
        self._before = sum(self._work[name] for name in names[: names.index(phase)])
        self.phase = phase
        self.show(0.0, "")

    def show(self, share: float, text: str) -> None:
        """Show the ``share`` of the phase that is done, and ``text`` beside it."""
        if self._record is not None:
            self._record({"phase": self.phase, "share": share, "text": text})
        self._draw(share, text)

    def _draw(self, share: float, text: str) -> None:
        if self._update is not None:
            done = self._before + share * self._work[self.phase]
            self._update(completed=done, description=self.phase, text=text, earlier=self._earlier)

    def loop(self, total: int, text: str) -> Show:
        """What :func:`progress_bar` yields, for a loop that is the whole phase."""
        first = True

        def show(done, values):
            nonlocal first
            if first:  # in a resumed run, an earlier one did all of this but the last step
                self._earlier += (done - 1) / total * self._work[self.phase]
                first = False
            if self._update is None and self._record is None:
                return
            current, share = values(), done / total
            if self._record is not None:
                self._record({"phase": self.phase, "share": share, "done": done, **current})
            said = text.format(task=SimpleNamespace(fields=current))
            self._draw(share, f"{done}/{total}  {said}")

        return show


def remaining(elapsed: float, done: float, left: float, total: float) -> str:
    """An estimate of the time, where ``done`` of ``total`` took ``elapsed`` seconds; or nothing."""
    if done < _SAYS * total or not left:
        return ""
    return f"{datetime.timedelta(seconds=round(elapsed * left / done))} left"


_run: ContextVar[RunBar | None] = ContextVar("run", default=None)


@contextmanager
def run_bar(
    progress: bool | None,
    work: Mapping[str, float],
    record: Callable[[dict[str, Any]], None] | None = None,
) -> Iterator[RunBar]:
    """One bar for the phases in ``work``; loops within have none of their own.

    Ctrl-C says the phase that it came in, unless it has something to say already.

    Raises
    ------
    KeyboardInterrupt
        If the run is interrupted; the message names the phase.
    """
    from rich.progress import BarColumn, ProgressColumn, TaskProgressColumn, TextColumn
    from rich.text import Text

    class Remaining(ProgressColumn):
        max_refresh = 0.5

        def render(self, task):
            done = task.completed - task.fields["earlier"]
            return Text(remaining(task.elapsed or 0.0, done, task.remaining, task.total))

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TaskProgressColumn(),
        Remaining(),
        TextColumn("{task.fields[text]}", markup=False),
    )
    with contextlib.ExitStack() as stack:
        update = None
        if (console := _console(progress)) is not None:
            update = stack.enter_context(
                _display_bar(console, columns, sum(work.values()), "", text="", earlier=0)
            )
        bar = RunBar(work, update, record)
        token = _run.set(bar)
        try:
            yield bar
            bar.show(1.0, "")
        except KeyboardInterrupt as stop:
            raise KeyboardInterrupt(str(stop) or f"interrupted in phase {bar.phase!r}") from None
        finally:
            _run.reset(token)


@contextmanager
def progress_bar(
    progress: bool | None, label: str, total: int, text: str, fields: Sequence[str]
) -> Iterator[Show]:
    """``show(done, values)``, with ``values()`` giving the ``fields`` that ``text`` has in it.

    ``values`` is called only where there is a bar: what it reads may have to come from a device.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    run = _run.get()
    if run is not None and progress is not False:
        yield run.loop(total, text)
        return
    console = None if run is not None else _console(progress)
    if console is None:
        yield lambda done, values: None
        return
    columns = (
        TextColumn(label),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(text),
        TimeRemainingColumn(),
    )
    with _display_bar(console, columns, total, label, **dict.fromkeys(fields, math.nan)) as update:
        yield lambda done, values: update(completed=done, **values())


def _console(progress: bool | None) -> Any:
    """The console to show progress on: standard error, or that of a notebook; None for neither."""
    from rich.console import Console

    display = _notebook_display()
    if display is not None:
        # rich's own live display needs ipywidgets here: without it, a warning and an empty box.
        console = Console(
            file=io.StringIO(),
            width=_NOTEBOOK_COLUMNS,
            force_jupyter=False,
            force_terminal=False,
            color_system=None,
        )
        return console if progress is not False else None
    console = Console(stderr=True)
    return console if (console.is_terminal if progress is None else progress) else None


def _notebook_display() -> Callable[..., Any] | None:
    """Return IPython's ``display`` in the kernel of a notebook, else None."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if not hasattr(shell, "kernel"):  # as in IPython in a terminal
        return None
    from IPython.display import display

    return display


@contextmanager
def _display_bar(
    console: Any, columns: Sequence[Any], total: float, label: str, **fields: Any
) -> Iterator[Callable[..., None]]:
    from rich.progress import Progress

    bar = Progress(*columns, console=console)
    task = bar.add_task(label, total=total, **fields)
    display = _notebook_display()
    if display is None:
        with bar:
            yield lambda **values: bar.update(task, **values)
        return
    # One output of the cell; every update replaces its text.
    handle, shown_at = display({"text/plain": _text(bar)}, raw=True, display_id=True), 0.0

    def update(**values):
        nonlocal shown_at
        bar.update(task, **values)
        if time.monotonic() > shown_at + _NOTEBOOK_SECONDS:
            handle.update({"text/plain": _text(bar)}, raw=True)
            shown_at = time.monotonic()

    try:
        yield update
    finally:
        handle.update({"text/plain": _text(bar)}, raw=True)


def _text(bar: Any) -> str:
    """What ``bar`` would draw on a terminal without colors."""
    with bar.console.capture() as captured:
        bar.console.print(bar)
    return captured.get().rstrip()
