"""Ctrl-C that is not lost."""

import _thread
import contextlib
import sys
import threading
from collections.abc import Iterator

_SECONDS = 0.05  # to wait before Ctrl-C is raised again: the code that lost it is over by then


class Stopped(Exception):
    """A run was interrupted; the sentence says what is left of it."""


@contextlib.contextmanager
def heard() -> Iterator[None]:
    """Within the ``with`` block, a Ctrl-C that Python reports as lost is sent again.

    What is raised in a finalizer or while garbage is collected is printed and then ignored. JAX has
    code that runs at every collection, so that one Ctrl-C in two at compilation came to nothing.
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
