"""Fingerprints of values, the same in every process: to tell whether two runs are the same.

Of an array, dtype, shape and every byte enter, wherever it lies and however it is cut up; of a
container, its type and structure; of a function, its code, constants and defaults, the values it
closes over, and the globals it uses. File names, line numbers, comments, docstrings and addresses
do not. Left out is what cannot be seen: what extension types do not pickle, and code of installed
packages, but for functions that are themselves part of the value.
"""

import collections
import copyreg
import dataclasses
import datetime
import dis
import enum
import functools
import hashlib
import itertools
import json
import math
import pathlib
import random
import re
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from bilevel.internal.processes import gathered, is_multiprocess, is_sharded, sum_across
from ntk.internal.checks import concrete

_PLAIN = (
    *(bool, int, float, complex, str, bytes, range, slice),
    *(types.NoneType, types.EllipsisType, np.dtype, enum.Enum, datetime.date, pathlib.PurePath),
)
_OURS = pathlib.Path(__file__).parents[1]
_LIBRARIES = (_OURS, _OURS.with_name("ntk"), pathlib.Path(sysconfig.get_path("stdlib")))
_LONG = 100  # characters or items; of longer texts and tuples only a digest is kept


def fingerprint(value: Any, *, small: bool = False) -> dict[str, str]:
    """The fingerprint of ``value``: a short text for each of its parts, by the part's path.

    With ``small`` of code and numbers alone: of arrays dtype and shape, of objects their class.

    Examples
    --------
    >>> fingerprint({"rate": 0.1, "x": np.zeros(2, np.float32)})
    {'': 'dict 2', 'rate': '= 0.1', 'x': 'float32[2] ...'}
    >>> slope = 2.5
    >>> fingerprint({"loss": lambda x: slope * x})["loss.slope"]
    '= 2.5'
    """
    walk = _Walk(small)
    walk.visit("", value)
    return walk.texts


def digest(value: Any) -> str:
    """A :func:`fingerprint` as 64 hexadecimal digits."""
    return _hash(json.dumps(fingerprint(value)).encode(), 64)


def check_same(parts: Mapping[str, Any]) -> None:
    """Refuse parts, by name, that other processes have other values of.

    Raises
    ------
    ValueError
        In all processes.
    """
    if not is_multiprocess():
        return
    for name, part in parts.items():
        own = np.frombuffer(bytes.fromhex(digest(part)), np.uint32)
        # Every process sees all of them, and so comes to the same verdict.
        if (np.ptp(gathered(own).astype(np.int64), axis=0) > 0).any():
            raise ValueError(
                f"{name}: expected the same values in every process, or arrays over the devices of "
                "all of them (jax.make_array_from_process_local_data), got others in some."
            )


def describe_difference(then: Mapping[str, str], now: Mapping[str, str]) -> str:
    """What differs between two fingerprints of dicts, in words for the user; "" where nothing does.

    Examples
    --------
    >>> then = fingerprint({"optimizer": {"rate": 0.1}})
    >>> describe_difference(then, fingerprint({"optimizer": {"rate": 0.2}}))
    'another optimizer (rate was 0.1, is 0.2)'
    """
    for path in (*now, *then):
        was, now_is = then.get(path, ""), now.get(path, "")
        if was == now_is:
            continue
        part = re.split(r"[.\[]", path)[0]
        if was[:2] == now_is[:2] == "= ":
            return f"another {part} ({path.rpartition('.')[2]} was {was[2:]}, is {now_is[2:]})"
        shapes = [word.rpartition(" ")[0] for word in (was, now_is)]
        if shapes[0] != shapes[1] and all(shape.endswith("]") for shape in shapes):
            return f"another {part} ({path} was {shapes[0]}, is {shapes[1]})"
        return f"another {part}" + (f" ({path} differs)" if path != part else "")
    return ""


class _Walk:
    """Goes through a value, depth first, and notes a short text for every part."""

    def __init__(self, small: bool) -> None:
        self.small = small
        self.texts: dict[str, str] = {}
        # By address: an object's path, and the object, which has to live so that no other gets
        # its address.
        self.met: dict[int, tuple[str, Any]] = {}

    def visit(self, path: str, x: Any) -> None:
        while path in self.texts:
            path += "'"
        if isinstance(x, jax.Array | np.ndarray | np.generic):
            self.texts[path] = (
                f"{x.dtype}{list(x.shape)}" if self.small and x.ndim else _of_array(x)
            )
        elif isinstance(x, _PLAIN):
            self.texts[path] = _of_plain_value(x)
        elif id(x) in self.met:
            self.texts[path] = f"as {self.met[id(x)][0]}"
        else:
            self.met[id(x)] = path, x
            self.texts[path], parts = self._described(x)
            for name, part in parts:
                self.visit(path + name if path else name.lstrip("."), part)

    def _described(self, x: Any) -> tuple[str, Iterator[tuple[str, Any]]]:
        """A short text for ``x`` itself, and its parts by name."""
        kind = type(x)
        if isinstance(x, Mapping):
            items = ((f".{_key(k)}", v) for k, v in x.items())
            return f"{kind.__name__} {len(x)}", itertools.chain(items, _beside_items(x))
        if isinstance(x, set | frozenset):
            return f"{kind.__name__} {_hash(''.join(sorted(map(digest, x))).encode())}", iter(())
        if isinstance(x, tuple | list):
            if len(x) > _LONG and all(isinstance(item, _PLAIN) for item in x):
                return f"{_qualified_name(kind)} {len(x)} {_hash(repr(x).encode())}", iter(())
            names = getattr(x, "_fields", None) or range(len(x))
            paths = (f".{n}" if isinstance(n, str) else f"[{n}]" for n in names)
            own = zip(paths, x, strict=True)
            return f"{_qualified_name(kind)} {len(x)}", itertools.chain(own, _beside_items(x))
        if isinstance(x, types.FunctionType):
            return f"code {_hash(_code(x.__code__))}", _of_function(x)
        if isinstance(x, types.MethodType):
            return "method", iter(((".__func__", x.__func__), (".__self__", x.__self__)))
        if isinstance(x, functools.partial):
            parts = (("", x.func), (".args", x.args), (".keywords", x.keywords))
            return "partial", ((name or ".func", part) for name, part in parts)
        if isinstance(x, type):
            return f"class {_qualified_name(x)}", _of_class(x)
        if isinstance(x, types.ModuleType):
            return f"{kind.__name__} {_qualified_name(x)}", iter(())
        if isinstance(x, types.BuiltinFunctionType):
            return f"{kind.__name__} {_qualified_name(x)}", _of_builtin(x)
        seen = _of_object(x)
        if self.small:
            seen = ((n, part) for n, part in seen if n in (".__wrapped__", ".__class__"))
        return f"{_qualified_name(kind)} object", seen


def _of_builtin(f: types.BuiltinFunctionType) -> Iterator[tuple[str, Any]]:
    """Whose method it is, if it is one: of a dict's ``get``, of an array's ``dot``."""
    own = getattr(f, "__self__", None)
    if own is not None and not isinstance(own, types.ModuleType):
        yield ".__self__", own


def _of_function(f: types.FunctionType) -> Iterator[tuple[str, Any]]:
    yield from ((f".{k}", v) for k, v in (f.__kwdefaults__ or {}).items())
    yield from ((f".defaults[{i}]", v) for i, v in enumerate(f.__defaults__ or ()))
    for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
        try:
            yield f".{name}", _as_used(name, cell.cell_contents, f.__code__)
        except ValueError:  # not filled yet
            continue
    # Globals of the user's own functions only: those of packages hold caches, which change.
    if _of_a_library(f.__code__.co_filename):
        return
    for name in sorted(_globals(f.__code__)):
        if name not in f.__globals__:
            continue
        value = f.__globals__[name]
        yield f".{name}", _as_used(name, value, f.__code__)
        if isinstance(value, types.ModuleType):
            yield from _of_module(f".{name}", value, _names_in_code(f.__code__))


def _of_module(path: str, module: types.ModuleType, words: set[str]) -> Iterator[tuple[str, Any]]:
    """What ``words`` name of a module that the user wrote, and of such modules in it."""
    if _of_a_library(_module_file(module.__name__)):
        return
    for attribute in sorted(words & set(vars(module))):
        value = vars(module)[attribute]
        yield f"{path}.{attribute}", value
        if isinstance(value, types.ModuleType) and value.__name__.startswith(module.__name__ + "."):
            yield from _of_module(f"{path}.{attribute}", value, words)


def _as_used(name: str, x: Any, code: types.CodeType) -> Any:
    """``x``, or, if it is a record of settings, only those fields that ``code`` names.

    So a function that closes over all flags of a command does not change with the flags that it
    does not use. Fields that are no plain values (numbers, words) are all kept, and so is the whole
    record if ``code`` names none of its fields, uses a method or property of it, or does anything
    else with ``name``, such as to hand it on.
    """
    fields = x if isinstance(x, dict) else getattr(x, "__dict__", None)
    if not isinstance(fields, dict) or isinstance(x, type | types.FunctionType | types.ModuleType):
        return x
    words = _names_in_code(code)
    methods = (not isinstance(getattr(type(x), word, None), _PLAIN) for word in words)
    if not words & set(fields) or any(methods) or not _only_read_from(name, code):
        return x
    return {k: v for k, v in fields.items() if k in words or not isinstance(v, _PLAIN)}


def _only_read_from(name: str, code: types.CodeType) -> bool:
    """Whether all that ``code`` does with a variable is to read an attribute or a named item."""
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    steps = [i for i in dis.get_instructions(code) if i.opname not in _SILENT]
    for i, step in enumerate(steps):
        if step.argval != name or step.opname in _CLOSING or not step.opname.startswith("LOAD"):
            continue
        after = [s.argrepr if s.opname == "BINARY_OP" else s.opname for s in steps[i + 1 : i + 3]]
        if after[:1] not in (["LOAD_ATTR"], ["LOAD_METHOD"]) and after not in _ITEM:
            return False
    return all(_only_read_from(name, c) for c in inner)


_SILENT = ("CACHE", "EXTENDED_ARG", "NOP")
_CLOSING = ("LOAD_CLOSURE", "LOAD_CONST", "LOAD_ATTR", "LOAD_METHOD")  # a cell; a word; another's
_ITEM = (["LOAD_CONST", "BINARY_SUBSCR"], ["LOAD_CONST", "[]"])


def _of_object(x: Any) -> Iterator[tuple[str, Any]]:
    """An object's fields, and its class."""
    if hasattr(x, "__wrapped__"):
        yield ".__wrapped__", x.__wrapped__
    yield from ((f".{name}", value) for name, value in _fields(x).items())
    yield ".__class__", type(x)


def _fields(x: Any) -> dict[str, Any]:
    """What an object consists of, by name: of libraries' objects only what does not change."""
    own, declared = _own(x), {}
    if isinstance(x, random.Random):
        own.pop("gauss_next", None)  # where it stands
    if dataclasses.is_dataclass(x):
        declared = {f.name: getattr(x, f.name, None) for f in dataclasses.fields(x)}
    if not _of_a_library(_module_file(type(x).__module__)):
        inherits = any(_of_a_library(_module_file(k.__module__)) for k in type(x).__mro__[:-1])
        if declared and inherits:  # flax numbers its modules, in fields that it does not declare
            own = {k: v for k, v in own.items() if k[0] != "_"}
        return declared | own
    if declared:
        return declared
    own = {k: v for k, v in own.items() if isinstance(v, _KEPT)}
    public = {k: v for k, v in own.items() if k[0] != "_"} | _of_pytree(x)
    return public or own or _reduced(x)


_KEPT = (*_PLAIN, jax.Array, np.ndarray, types.FunctionType, tuple, list, dict)


def _own(x: Any) -> dict[str, Any]:
    """The fields of an object itself, in ``__dict__`` or in slots."""
    slots = (vars(kind).get("__slots__", ()) for kind in type(x).__mro__)
    names = itertools.chain(*((s,) if isinstance(s, str) else s for s in slots))
    fields = {name: getattr(x, name) for name in names if name[:2] != "__" and hasattr(x, name)}
    fields |= getattr(x, "__dict__", {})
    return {name: value for name, value in fields.items() if name != "__doc__"}


def _reduced(x: Any) -> dict[str, Any]:
    """What :mod:`pickle` would keep of an object that shows no fields: a fraction, a pattern.

    Where an iterator or a generator of random numbers stands is no part of a problem.
    """
    if isinstance(x, _STANDING):
        return {}
    try:
        special = copyreg.dispatch_table.get(type(x))
        parts = special(x) if special else x.__reduce_ex__(2)
    except Exception:  # no pickle of it: a file, a lock, a generator
        return {}
    if isinstance(parts, str):
        return {"reduced": parts}
    return {"reduced": [list(p) if isinstance(p, Iterator) else p for p in parts[1:]]}


_STANDING = (
    *(Iterator, random.Random),
    *(np.random.Generator, np.random.BitGenerator, np.random.RandomState),
)


def _beside_items(x: Any) -> Iterator[tuple[str, Any]]:
    """The fields of a container of the user's own class, the factory of a ``defaultdict``."""
    if isinstance(x, collections.defaultdict):
        yield ".default_factory", x.default_factory
    if not _of_a_library(_module_file(type(x).__module__)):
        yield from ((f".{name}", value) for name, value in _own(x).items())


def _of_pytree(x: Any) -> dict[str, Any]:
    """The parts that JAX sees of an object: the weights in a state of nnx, one by one."""
    flattened = jax.tree_util.default_registry.flatten_one_level(x)
    if flattened is None:
        return {}
    children, static = flattened
    plain = isinstance(static, tuple) and all(isinstance(item, _PLAIN) for item in static)
    parts = {f"children[{i}]": child for i, child in enumerate(children)}
    return parts | {"static": static} if plain else parts


def _of_class(x: type) -> Iterator[tuple[str, Any]]:
    """The functions and settings of classes that the user wrote."""
    for kind in x.__mro__:
        if _of_a_library(_module_file(kind.__module__)):
            continue
        for name, value in sorted(vars(kind).items()):
            for function in (getattr(value, part, None) for part in _INSIDE):
                if isinstance(function, types.FunctionType):
                    yield f".{name}", function
            settings = isinstance(value, (*_PLAIN, tuple, list, Mapping, jax.Array, np.ndarray))
            if isinstance(value, types.FunctionType) or (settings and not name.startswith("__")):
                yield f".{name}", value


_INSIDE = ("__func__", "fget", "func")  # of a static or class method, a property, a cached one


def _module_file(module: str) -> str | None:
    """The file of a module; None for those built into Python."""
    if module == "__main__":
        return module
    return getattr(sys.modules.get(module), "__file__", None)


def _of_a_library(file: str | None) -> bool:
    if file is None:
        return True
    path = pathlib.Path(file)
    installed = {"site-packages", "dist-packages"} & set(path.parts)
    return bool(installed) or any(path.is_relative_to(home) for home in _LIBRARIES)


def _code(code: types.CodeType) -> bytes:
    """The instructions of ``code``, without line numbers, file name and docstring."""
    words = [code.co_exceptiontable]
    for step in dis.get_instructions(code):
        words.append(step.opname.encode())
        if step.opcode in dis.hasconst:
            words.append(_constant(step.argval))
        else:
            words.append(str(step.argrepr if step.opcode in dis.hasname else step.arg).encode())
    return b"\0".join(words)


def _constant(x: Any) -> bytes:
    if isinstance(x, types.CodeType):
        return _code(x)
    if isinstance(x, frozenset):
        return b"".join(sorted(map(_constant, x)))
    return f"{type(x).__name__} {x!r}".encode()


def _globals(code: types.CodeType) -> set[str]:
    """Names of the globals that ``code`` reads, or a function defined in it."""
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    loaded = {i.argval for i in dis.get_instructions(code) if i.opname in _LOADS}
    return loaded.union(*map(_globals, inner))


_LOADS = ("LOAD_GLOBAL", "LOAD_NAME")


def _names_in_code(code: types.CodeType) -> set[str]:
    """All names and texts in ``code``: among them the attributes and keys that it uses."""
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    strings = {c for c in code.co_consts if isinstance(c, str)}
    return strings.union(code.co_names, *map(_names_in_code, inner))


def _of_plain_value(x: Any) -> str:
    word = repr(x)
    # As the integer: the first call of an optax schedule turns its number of steps into a float.
    if type(x) is float and x.is_integer() and word != "-0.0":
        word = word.removesuffix(".0")
    return f"= {word}" if len(word) <= _LONG else f"{type(x).__name__} {_hash(word.encode())}"


def _of_array(x: Any) -> str:
    if not concrete(x):
        return f"traced {x.aval}"
    kind = x.dtype
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(kind, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if is_sharded(x):
        own = [(np.asarray(s.data), s.index) for s in x.addressable_shards if s.replica_id == 0]
        return f"{kind}{list(x.shape)} {sum_across(_sum_of_entries(own, x.shape)):016x}"
    x = np.asarray(x)
    if x.dtype == object:
        return f"object{list(x.shape)} {digest(x.tolist())[:8]}"
    size = x.itemsize // (2 if x.dtype.kind == "c" else 1)
    if x.dtype.names or x.dtype.kind in "SU" or size not in (1, 2, 4, 8):
        return f"{kind}{list(x.shape)} {_hash(np.ascontiguousarray(x).tobytes())}"
    return f"{kind}{list(x.shape)} {_sum_of_entries([(x, (slice(None),) * x.ndim)], x.shape):016x}"


_BLOCK = 2**16  # numbers mixed at a time: they stay in the processor's cache


def _sum_of_entries(parts: list[tuple[np.ndarray, tuple]], shape: tuple[int, ...]) -> int:
    """The sum of all entries, each mixed with its place in the whole array, modulo 2^64.

    It is the same whatever parts the array is cut into, and however many processes have them.
    """
    return sum(_sum_of_part(part, index, shape) for part, index in parts) % 2**64


def _sum_of_part(part: np.ndarray, index: tuple, shape: tuple[int, ...]) -> int:
    if part.dtype.kind == "c":
        of_each = (_sum_of_part(x, index, shape) for x in (part.real, part.imag))
        return sum(k * total for k, total in zip((1, 3), of_each, strict=True))
    starts = [cut.indices(n)[0] for cut, n in zip(index, shape, strict=True)]
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    if part.shape[1:] == shape[1:]:  # whole rows follow each other
        part, starts, strides = part.reshape(-1), [sum(starts[:1]) * sum(strides[:1])], [1]
    inner = np.zeros(1, np.uint64)
    for n, start, stride in zip(part.shape[1:], starts[1:], strides[1:], strict=True):
        along = np.arange(start, start + n, dtype=np.uint64) * np.uint64(stride)
        inner = np.add.outer(inner, along).ravel()
    rows, total = part.reshape(len(part), inner.size), 0
    step = max(1, _BLOCK // max(inner.size, 1))
    for i in range(0, len(rows), step):
        block = np.ascontiguousarray(rows[i : i + step])
        words = block.view(f"u{block.itemsize}").astype(np.uint64)
        first = starts[0] + i
        outer = np.arange(first, first + len(block), dtype=np.uint64) * np.uint64(strides[0])
        total += int(_mixed(words ^ _mixed(np.add.outer(outer, inner))).sum(dtype=np.uint64))
    return total


def _mixed(z: np.ndarray) -> np.ndarray:
    """Every bit of a 64-bit word depends on every other (Steele, Lea & Flood 2014, SplitMix64)."""
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _hash(x: Any, digits: int = 32) -> str:
    return hashlib.sha256(x).hexdigest()[:digits]


def _key(x: Any) -> str:
    return x if isinstance(x, str) else repr(x) if isinstance(x, _PLAIN) else digest(x)[:8]


def _qualified_name(x: Any) -> str:
    module = getattr(x, "__module__", None)
    name = str(getattr(x, "__qualname__", None) or getattr(x, "__name__", ""))
    return name if module in (None, "builtins", "__main__") else f"{module}.{name}"
