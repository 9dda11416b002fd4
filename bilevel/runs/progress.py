"""Progress bars on standard error, by default only in a terminal; in notebooks, below the cell."""

import contextlib
import io
import sys
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

_NOTEBOOK_COLUMNS = 120
_NOTEBOOK_SECONDS = 0.2  # between two updates of the text: each is a message to the browser

Show = Callable[[int, Callable[[], dict[str, Any]]], None]
Record = Callable[[dict[str, Any]], None]


class Phases:
    """The bars of a command's phases; ``record`` receives a dict for each change."""

    def __init__(self, draw: Callable[..., None] | None, record: Record | None = None):
        self._draw, self._record = draw, record
        self.phase = ""

    def enter(self, phase: str) -> None:
        """Begin ``phase``, which ends the one before it."""
        self.phase = phase
        self._change(0, 1)

    def end(self) -> None:
        """End the last phase."""
        self._change(1, 1)

    def loop(self, total: int, text: str) -> Show:
        """Return ``show(done, values)`` for the loop of this phase; see :func:`progress_bar`."""

        def show(done, values):
            if self._draw is not None or self._record is not None:
                current = values()
                self._change(done, total, text.format(**current), {"done": done, **current})

        return show

    def _change(self, done: int, total: int, text: str = "", values: Any = None) -> None:
        if self._record is not None:
            self._record({"phase": self.phase, "share": done / total, **(values or {})})
        if self._draw is not None:
            self._draw(self.phase, done, total, text)


_run: ContextVar[Phases | None] = ContextVar("run", default=None)


@contextlib.contextmanager
def phases(progress: bool | None, record: Record | None = None) -> Iterator[Phases]:
    """Yield the bars of a run. Loops within the block fill the bar of their phase."""
    with _bars(progress) as draw:
        run = Phases(draw, record)
        token = _run.set(run)
        try:
            yield run
            run.end()
        except KeyboardInterrupt as stop:
            raise KeyboardInterrupt(str(stop) or f"interrupted in phase {run.phase!r}") from None
        finally:
            _run.reset(token)


@contextlib.contextmanager
def progress_bar(progress: bool | None, label: str, total: int, text: str) -> Iterator[Show]:
    """Yield ``show(done, values)``; ``values()`` returns the fields of the format string ``text``.

    ``values`` is called only if something is shown, because it may have to read from a device.
    """
    run = _run.get()
    if run is not None:
        yield (run if progress is not False else Phases(None)).loop(total, text)
        return
    with _bars(progress) as draw:
        alone = Phases(draw)
        alone.phase = label
        if draw is not None:
            draw(label, 0, total, "")
        yield alone.loop(total, text)


@contextlib.contextmanager
def _bars(progress: bool | None) -> Iterator[Callable[..., None] | None]:
    """Yield ``draw(label, done, total, text)``, which draws one bar for each label."""
    from rich import progress as rich

    display = _notebook_display()
    console = _console(progress, display is not None)
    if console is None:
        yield None
        return
    bars = rich.Progress(
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TextColumn("{task.fields[text]}", markup=False),
        rich.TimeRemainingColumn(),
        console=console,
    )
    tasks: dict[str, rich.TaskID] = {}

    def draw(label, done, total, text):
        if label not in tasks:
            for task in bars.tasks:
                bars.update(task.id, completed=task.total)
            tasks[label] = bars.add_task(label, total=total, text="")
        bars.update(tasks[label], completed=done, total=total, text=text)

    if display is None:
        with bars:
            yield draw
        return
    # One output of the cell; every update replaces its text.
    handle, shown_at = display({"text/plain": ""}, raw=True, display_id=True), 0.0

    def draw_in_cell(*values):
        nonlocal shown_at
        draw(*values)
        if time.monotonic() > shown_at + _NOTEBOOK_SECONDS:
            handle.update({"text/plain": _text(bars)}, raw=True)
            shown_at = time.monotonic()

    try:
        yield draw_in_cell
    finally:
        handle.update({"text/plain": _text(bars)}, raw=True)


def _console(progress: bool | None, notebook: bool) -> Any:
    """Return the console to draw on, or None if nothing is drawn."""
    from rich.console import Console

    if progress is False:
        return None
    if notebook:
        # rich's own live display needs ipywidgets here: without it, a warning and an empty box.
        options: dict[str, Any] = {"force_jupyter": False, "force_terminal": False}
        return Console(file=io.StringIO(), width=_NOTEBOOK_COLUMNS, color_system=None, **options)
    console = Console(stderr=True)
    return console if progress or console.is_terminal else None


def _notebook_display() -> Callable[..., Any] | None:
    """Return IPython's ``display`` in the kernel of a notebook, else None."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if not hasattr(shell, "kernel"):  # as in IPython in a terminal
        return None
    from IPython.display import display

    return display


def _text(bars: Any) -> str:
    """Return the text that ``bars`` draws on a terminal without colors."""
    with bars.console.capture() as captured:
        bars.console.print(bars)
    return captured.get().rstrip()
