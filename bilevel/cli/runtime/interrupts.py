"""Keep Ctrl-C from being lost."""

import _thread
import contextlib
import sys
import threading
from collections.abc import Iterator

_SECONDS = 0.05  # wait before Ctrl-C is raised again, so that the code that lost it has ended


class Stopped(Exception):
    """A run was interrupted; the message names the saved part."""


@contextlib.contextmanager
def heard() -> Iterator[None]:
    """Within the ``with`` block, send a Ctrl-C again that Python reports as lost.

    Python ignores exceptions in finalizers and during garbage collection. JAX has code that runs at
    every collection, so that one Ctrl-C in two during compilation was lost.
    """
    usual = sys.unraisablehook

    def hook(lost: "sys.UnraisableHookArgs") -> None:
        if issubclass(lost.exc_type, KeyboardInterrupt):
            again = threading.Timer(_SECONDS, _thread.interrupt_main)
            again.daemon = True
            again.start()
        else:
            usual(lost)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = usual
