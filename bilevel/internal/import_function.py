"""User-defined functions, named MODULE:FUNCTION. JAX is not imported."""

import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable
from typing import Any


def names_function(value: str) -> bool:
    """Return whether ``value`` has the form MODULE:FUNCTION."""
    return bool(re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", value, re.ASCII))


def check_module(flag: str, name: str) -> None:
    """Raise ``ValueError`` if the module does not exist; nothing is imported."""
    _add_working_directory()
    root = name.partition(":")[0].partition(".")[0]
    if root not in sys.modules and importlib.util.find_spec(root) is None:
        raise ValueError(f"{flag}: expected MODULE:FUNCTION, got {name!r} (no module {root!r}).")


def imported(flag: str, name: str) -> Callable[..., Any]:
    """Return the function MODULE:FUNCTION, or raise ``ValueError`` if it does not exist."""
    module, _, function = name.partition(":")
    _add_working_directory()
    try:
        target = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{flag}: expected MODULE:FUNCTION, got {name!r} ({error}).") from None
    if not callable(target):
        raise ValueError(f"{flag}: expected {name} to be a function, got {target!r}.")
    return target


def _add_working_directory() -> None:
    """Look for modules where ``python -m`` does, too."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def called(flag: str, name: str, *arguments: Any) -> Any:
    """Return the value of the function MODULE:FUNCTION, if it takes these arguments."""
    function = imported(flag, name)
    takes(flag, name, function, len(arguments))
    return function(*arguments)


def takes(flag: str, name: str, function: Callable, count: int) -> None:
    """Raise ``ValueError`` if a function does not take ``count`` arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of functions in C, which say nothing
        return
    try:
        signature.bind(*range(count))
    except TypeError:
        words = f"{count} argument" + "s" * (count != 1)
        raise ValueError(
            f"{flag}: expected {name} to be a function of {words}, got {name}{signature}."
        ) from None
