"""The types of the flags with their ranges, checked before JAX is imported.

A rule is called with a value and returns its expectation as text, or None if the value is right.
"""

import dataclasses
import math
import pathlib
import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from bilevel.internal.import_function import names_function

Rule = Callable[[Any], str | None]


def between(least: float, most: float = 10**8, under: float = math.inf) -> Rule:
    """Accept a number from ``least`` to ``most``, by default so that products of counts are small.

    A number ``under`` and above is not accepted.
    """

    def rule(value):
        if not value >= least:  # NaN too
            return f"expected at least {least}"
        if value > most:
            return f"expected at most {most}"
        return f"expected under {under}" if value >= under else None

    return rule


def form(accepts: Callable[[Any], bool], expected: str) -> Rule:
    """Accept a value for which ``accepts`` returns True."""
    return lambda value: None if accepts(value) else f"expected {expected}"


def names(known: tuple[str, ...], least: int = 1, functions: bool = False) -> Rule:
    """Accept different names among those ``known``; with ``functions`` also MODULE:FUNCTION."""

    def rule(value):
        if len(set(value)) < len(value):
            return "expected different names"
        unknown = {name for name in value if not (functions and names_function(name))} - set(known)
        if len(value) >= least and not unknown:
            return None
        others = ", or MODULE:FUNCTION" if functions else ""
        return f"expected names among {', '.join(known)}{others}"

    return rule


Count = Annotated[int, between(1)]
CountOrNone = Annotated[int, between(0)]  # 0 switches it off
Size = Annotated[int, between(1, 10**9)]  # the memory sets the limit
Channels = Annotated[int, between(1, 10**6)]  # so that their squares can be counted
Sample = Annotated[int, between(2, 10**9)]  # the variance of one row is 0
Layers = Annotated[int, between(1, 1000)]  # each layer is traced by itself, which takes time
Epochs = Annotated[int, between(1, 10_000)]
Seed = Annotated[int, between(0, 2**32 - 1)]  # seeds that both JAX and numpy take
Rate = Annotated[float, between(1e-12, 1e6)]  # not 0 in float32
Out = Annotated[pathlib.Path, form(lambda path: str(path).isprintable(), "printable characters")]
Importable = Annotated[str, form(names_function, "MODULE:FUNCTION, as in my_module:my_space")]


def hints(flags: type) -> dict[str, Any]:
    """Return the type of every flag, with its range."""
    resolved = get_type_hints(flags, include_extras=True)
    return {field.name: resolved[field.name] for field in dataclasses.fields(flags)}


_KINDS: dict[Any, tuple[type | tuple[type, ...], str]] = {
    int: (int, "an integer"),
    float: ((int, float), "a number"),
    bool: (bool, "true or false"),
    str: (str, "a string"),
    pathlib.Path: (pathlib.Path, "a path"),
    type(None): (type(None), "none"),
}


def fault(hint: Any, value: Any) -> str | None:
    """Return the expectation of the type ``hint``, or None if ``value`` is right."""
    options = get_args(hint)
    if get_origin(hint) is Annotated:
        kind, *rules = options
        return fault(kind, value) or next(filter(None, (rule(value) for rule in rules)), None)
    if get_origin(hint) in (Union, types.UnionType):
        faults = [fault(option, value) for option in options]
        return None if None in faults else faults[0]
    if get_origin(hint) is Literal:
        return None if value in options else f"expected one of {', '.join(options)}"
    if get_origin(hint) is tuple:
        strings = isinstance(value, tuple) and all(isinstance(name, str) for name in value)
        return None if strings else "expected names"
    kinds, expected = _KINDS[hint]
    wrong = not isinstance(value, kinds) or (isinstance(value, bool) and hint is not bool)
    return f"expected {expected}" if wrong else None


def shown(value: Any) -> str:
    """Return a short form of a flag's value, for an error."""
    if value == ():
        return "none"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**20:
        return f"about 10^{math.log10(abs(value)):.0f}"
    if isinstance(value, tuple) and (words := " ".join(map(str, value))).isprintable():
        text = words
    else:
        text = repr(str(value) if isinstance(value, pathlib.Path) else value)
    return text if len(text) <= 80 else f"{text[:60]}... of {len(str(value))} characters"
