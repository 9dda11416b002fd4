"""The progress bar of long loops: on standard error, by default only where that is a terminal."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def progress_bar(
    progress: bool | None, label: str, total: int, text: str, fields: Sequence[str]
) -> Iterator[Callable[[int, Callable[[], dict[str, Any]]], None]]:
    """``show(done, values)``, with ``values()`` giving the ``fields`` that ``text`` has in it.

    ``values`` is called only where there is a bar: what it reads may have to come from a device.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    if not (console.is_terminal if progress is None else progress):
        yield lambda done, values: None
        return
    columns = (
        TextColumn(label),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(text),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        unknown: dict[str, Any] = dict.fromkeys(fields, math.nan)
        task = bar.add_task(label, total=total, **unknown)
        yield lambda done, values: bar.update(task, completed=done, **values())
