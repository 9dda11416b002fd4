"""Handle Ctrl-C and SIGTERM between two chunks of a loop instead of in the middle of one.

Clusters that reclaim a machine send SIGTERM, and SIGKILL some seconds later. A run with a
checkpoint first writes its state and then ends by the signal.
"""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

# The words that `came` returns. If processes see different signals, SIGTERM counts.
_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
_deferred: ContextVar[list[int] | None] = ContextVar("deferred", default=None)


@contextlib.contextmanager
def held_signals(*, interrupts: bool = True, terminations: bool) -> Iterator[Callable[[], str]]:
    """Hold Ctrl-C, with ``interrupts``, and SIGTERM, with ``terminations``, until the block ends.

    The block receives ``came()``, which returns "interrupted" or "terminated" if a signal came,
    else "". The answer is the same in all processes, and all of them call it. After the block,
    SIGTERM goes to the previous handler, which ends the process by default. A second signal of the
    same kind is delivered at once.
    """
    seen: list[int] = []
    usual: dict[int, Any] = {}
    agreed = ""

    def note(number, frame):
        if number in seen:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            signal.signal(number, usual[number])
            signal.raise_signal(number)
        seen.append(number)

    def came():
        nonlocal agreed
        from bilevel.internal.processes import maximum  # imports JAX; help does not need it

        own = "terminated" if signal.SIGTERM in seen else "interrupted" if seen else ""
        words = ["", *_WORDS.values()]
        agreed = words[maximum(words.index(own))]
        return agreed

    # Only the main thread may set handlers. We keep handlers that Python did not set (None), and a
    # program that ignores SIGTERM continues.
    if threading.current_thread() is threading.main_thread():
        numbers = [signal.SIGINT] * interrupts + [signal.SIGTERM] * terminations
        usual = {number: signal.getsignal(number) for number in numbers}
        usual = {number: handler for number, handler in usual.items() if handler is not None}
        if usual.get(signal.SIGTERM) is signal.SIG_IGN:
            del usual[signal.SIGTERM]
    for number in usual:
        signal.signal(number, note)
    try:
        yield came
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
        deferred = _deferred.get()
        if agreed == "terminated" and deferred is not None:
            deferred.append(signal.SIGTERM)
        elif agreed == "terminated" or signal.SIGTERM in seen:
            terminate()


def terminate() -> None:
    """Send SIGTERM to this process; it returns only if the program handles the signal."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # None, closed, or a full disk
            stream.flush()  # or the text in the buffers is lost with the process
    signal.raise_signal(signal.SIGTERM)


@contextlib.contextmanager
def deferred_terminations() -> Iterator[list[int]]:
    """Within the block, a held SIGTERM that ``came()`` reported does not end the process.

    The caller ends the process after the block, if the yielded list has an entry.
    """
    deferred: list[int] = []
    token = _deferred.set(deferred)
    try:
        yield deferred
    finally:
        _deferred.reset(token)
