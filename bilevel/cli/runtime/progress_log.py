"""``--log``: what the progress bar shows, as lines of JSON."""

import datetime
import math
import pathlib
from collections.abc import Callable
from typing import Any


def recorder(path: pathlib.Path, command: str) -> Callable[[dict[str, Any]], None]:
    """What appends to the file at ``path`` a line for each thing that the ``command`` shows."""
    from bilevel.outer_loop.metrics_log import Lines

    lines = Lines("log", path, resume=True)

    def record(shown):
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        lines.append(
            [{"time": now, "command": command, **{k: _json_scalar(v) for k, v in shown.items()}}]
        )

    return record


def _json_scalar(x: Any) -> Any:
    """A text or a number as JSON has them: it has no NaN."""
    if isinstance(x, str | int):
        return x
    return float(x) if math.isfinite(x) else None
