"""What a flag may be: the rules that the types of a command's flags carry, checked in one place.

    steps: Count = 20            # Count = Annotated[int, Whole(1)]
    pixels: Count | None = None

A command's flags are a frozen dataclass that extends :class:`Flags`. What one flag may be stands in
its type; what several have to be together, in the class's own ``check_values``; what they take of
the memory, in ``memory``. All of it is known before anything is loaded, made or compiled.
"""

import dataclasses
import math
import pathlib
import re
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from bilevel.cli.flags import memory_estimate as memory

_COUNTED = 10**8  # the largest count: commands multiply it, and the product has to fit in 32 bits
_HELD = 10**18  # the largest size: no limit of its own, since the memory sets one


@dataclasses.dataclass(frozen=True)
class Whole:
    """A whole number from ``least`` to ``most``."""

    least: int
    most: int = _COUNTED

    def fault(self, value: int) -> str | None:
        """What was expected, or None where ``value`` is right."""
        if value < self.least:
            return f"expected at least {self.least}"
        return f"expected at most {self.most}" if value > self.most else None


@dataclasses.dataclass(frozen=True)
class Positive:
    """A positive number that float32 can tell from 0, and that is no typing mistake."""

    least: float = 1e-12
    most: float = 1e6

    def fault(self, value: float) -> str | None:
        """What was expected, or None where ``value`` is right."""
        if not value > 0:  # NaN too
            return "expected a positive number"
        if value < self.least:
            return f"expected at least {self.least:g}"
        return f"expected at most {self.most:g}" if value > self.most else None


@dataclasses.dataclass(frozen=True)
class Share:
    """At least 0 and under 1."""

    def fault(self, value: float) -> str | None:
        """What was expected, or None where ``value`` is right."""
        return None if 0 <= value < 1 else "expected at least 0 and under 1"


@dataclasses.dataclass(frozen=True)
class Names:
    """Different names among those ``known``; with ``functions`` also MODULE:FUNCTION."""

    known: tuple[str, ...]
    least: int = 1
    functions: bool = False

    def fault(self, value: tuple[str, ...]) -> str | None:
        """What was expected, or None where ``value`` is right."""
        expected = f"expected names among {', '.join(self.known)}"
        if self.functions:
            expected += ", or MODULE:FUNCTION"
        if len(value) < self.least:
            return expected
        if len(set(value)) < len(value):
            return "expected different names"
        names = {name for name in value if not (self.functions and names_function(name))}
        return None if names <= set(self.known) else expected


@dataclasses.dataclass(frozen=True)
class Folder:
    """A path of characters that can be printed."""

    def fault(self, value: pathlib.Path) -> str | None:
        """What was expected, or None where ``value`` is right."""
        return None if str(value).isprintable() else "expected printable characters"


@dataclasses.dataclass(frozen=True)
class Importable:
    """A function of a module."""

    def fault(self, value: str) -> str | None:
        """What was expected, or None where ``value`` is right."""
        expected = "expected MODULE:FUNCTION, as in my_module:my_space"
        return None if names_function(value) else expected


def names_function(value: str) -> bool:
    """Return whether ``value`` has the form MODULE:FUNCTION."""
    return bool(re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", value, re.ASCII))


Count = Annotated[int, Whole(1)]
CountOrNone = Annotated[int, Whole(0)]  # zero of them is none
Size = Annotated[int, Whole(1, _HELD)]
Sample = Annotated[int, Whole(2, _HELD)]  # one row has no variance, and minus its mean it is 0
Layers = Annotated[int, Whole(1, 1000)]  # each layer is traced by itself, which takes time
Epochs = Annotated[int, Whole(1, 10_000)]
Seed = Annotated[int, Whole(0, 2**32 - 1)]  # seeds that both JAX and numpy take
Rate = Annotated[float, Positive()]
Out = Annotated[pathlib.Path, Folder()]


@dataclasses.dataclass(frozen=True)
class Flags:
    """Flags of a command."""

    def check(self) -> None:
        """Raise a ValueError that names the flag, if a flag cannot be used."""
        self.check_values()
        memory.check(self, self.memory())

    def check_values(self) -> None:
        """Make all checks of :meth:`check` that need no JAX; only the device's memory does."""
        for name, hint in hints(type(self)).items():
            value = getattr(self, name)
            if expected := fault(hint, value):
                raise ValueError(f"{name}: {expected}, got {shown(value)}.")

    def memory(self) -> dict[tuple[str, ...], int]:
        """The least bytes that arrays take, by the flags that make them so large."""
        return {}


def hints(flags: type) -> dict[str, Any]:
    """The type of every flag, with its rules."""
    resolved = get_type_hints(flags, include_extras=True)
    return {field.name: resolved[field.name] for field in dataclasses.fields(flags)}


def fault(hint: Any, value: Any) -> str | None:
    """What the type ``hint`` expects, or None where ``value`` is right."""
    options = get_args(hint)
    if get_origin(hint) is Annotated:
        kind, *rules = options
        return fault(kind, value) or next(filter(None, (r.fault(value) for r in rules)), None)
    if get_origin(hint) in (Union, types.UnionType):
        faults = [fault(option, value) for option in options]
        return None if None in faults else faults[0]
    if get_origin(hint) is Literal:
        return None if value in options else f"expected one of {', '.join(options)}"
    if get_origin(hint) is tuple:
        names = isinstance(value, tuple) and all(isinstance(name, str) for name in value)
        return None if names else "expected names"
    kinds, expected = _KINDS[hint]
    wrong = not isinstance(value, kinds) or (isinstance(value, bool) and hint is not bool)
    return expected if wrong else None


_KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
    int: ((int,), "expected a whole number"),
    float: ((int, float), "expected a number"),
    bool: ((bool,), "expected true or false"),
    str: ((str,), "expected a text"),
    pathlib.Path: ((pathlib.Path,), "expected a path"),
    type(None): ((type(None),), "expected none"),
}


def shown(value: Any) -> str:
    """A flag's value in an error: short, whatever it is."""
    if value == ():
        return "none"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**20:
        return f"about 10^{math.log10(abs(value)):.0f}"
    if isinstance(value, tuple) and (names := " ".join(map(str, value))).isprintable():
        text = names
    else:
        text = repr(str(value) if isinstance(value, pathlib.Path) else value)
    return text if len(text) <= 80 else f"{text[:60]}... of {len(str(value))} characters"
