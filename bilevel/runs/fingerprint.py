"""Fingerprints of values and programs, equal in every process, to recognize the same run.

- Arrays: dtype, shape and all bytes, independent of the devices that hold the parts.
- Programs of JAX (:func:`program_digest`): all operations, with the constants that they close over.
- Functions that JAX does not trace: bytecode, defaults, the values that they close over, and the
  globals that they read. Functions of installed packages count by their closures only.
- Other objects: class and fields, or else their ``repr``.

Names of files, line numbers, comments and addresses do not count.
"""

import dis
import functools
import hashlib
import json
import math
import pathlib
import re
import sys
import sysconfig
import types
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from bilevel.internal.processes import gathered, is_multiprocess, is_sharded, sum_across
from ntk.internal.checks import concrete

_PLAIN = bool, int, float, complex, str, bytes, range, slice, types.NoneType, np.dtype
_ARRAYS = jax.Array, np.ndarray, np.generic
_OURS = pathlib.Path(__file__).parents[1]
_LIBRARIES = _OURS, _OURS.with_name("ntk"), pathlib.Path(sysconfig.get_path("stdlib"))
_LONG = 100  # characters or items; of longer ones only a hash is stored
_ADDRESS = re.compile(" at 0x[0-9a-fA-F]+")
_PYTHON = f"Python {sys.version_info.major}.{sys.version_info.minor}"


def fingerprint(value: Any, *, small: bool = False) -> dict[str, str]:
    """Return a short string for each part of ``value``, by the path of the part.

    With ``small``, arrays count by dtype and shape only, and objects by their class.
    """
    words: set[str] = set()
    parts = value if isinstance(value, dict) else {"": value}
    for complete in (True, False):  # the first walk collects the names in all code
        walk = _Walk(small, words, complete=complete)
        for name, part in parts.items():
            walk.visit(str(name), part)
    return walk.texts


def digest(value: Any) -> str:
    """Return a :func:`fingerprint` as 64 hexadecimal digits."""
    return _hash(json.dumps(fingerprint(value)).encode(), 64)


def check_same(parts: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` in all processes if a part, by name, is not the same in all of them."""
    if not is_multiprocess():
        return
    for name, part in parts.items():
        own = np.frombuffer(bytes.fromhex(digest(part)), np.uint32)
        if (np.ptp(gathered(own).astype(np.int64), axis=0) > 0).any():
            raise ValueError(
                f"{name}: expected the same values in every process, or arrays over the devices of "
                "all of them (jax.make_array_from_process_local_data), got others in some."
            )


def describe_difference(then: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return what differs between two fingerprints, in words for the user; "" if nothing does.

    Programs of another JAX, and functions of another Python, are not compared, with a warning.
    """
    versions = set()
    for path in dict.fromkeys((*now, *then)):
        was, now_is = then.get(path, ""), now.get(path, "")
        if was == now_is:
            continue
        part = path.partition(".")[0]
        if was[:2] == now_is[:2] == "= ":
            return f"another {part} ({path.rpartition('.')[2]} was {was[2:]}, is {now_is[2:]})"
        version, current = (text.partition(" of ")[2] for text in (was, now_is))
        if version and current and version != current:
            versions.add(f"{version}, this is {current}")
            continue
        shapes = [word.rpartition(" ")[0] for word in (was, now_is)]
        if shapes[0] != shapes[1] and all(shape.endswith("]") for shape in shapes):
            return f"another {part} ({path} was {shapes[0]}, is {shapes[1]})"
        return f"another {part}" + (f" ({path} differs)" if path != part else "")
    for version in sorted(versions):
        warnings.warn(
            f"resume: the record is of {version}; only arrays, shapes and settings were compared.",
            stacklevel=4,
        )
    return ""


def program_digest(program: ClosedJaxpr) -> str:
    """Return a string that is equal for equal programs, on any number of devices.

    Names, shardings and the functions of custom rules do not count, but those of callbacks do.
    """
    return f"program {_hash(_Programs().closed(program).encode())} of JAX {jax.__version__}"


# Parameters of operations that do not change the result on one device.
_UNUSED = re.compile("^(name|inline|keep_unused|donated_invars)$|shard|layout|mesh")


class _Programs:
    """Hashes of programs, each inner program once."""

    def __init__(self):
        self._known: dict[int, tuple[str, Jaxpr]] = {}  # by address; the program has to live

    def closed(self, program: ClosedJaxpr) -> str:
        return self._open(program.jaxpr) + "".join(map(_of_array, program.consts))

    def _open(self, jaxpr: Jaxpr) -> str:
        if id(jaxpr) not in self._known:
            numbers: dict[Any, int] = {}

            def atom(x):
                if isinstance(x, Literal):
                    return f"{x.aval} {_of_array(x.val)}"
                return f"{numbers.setdefault(x, len(numbers))}:{_of_type(x.aval)}"

            lines = [" ".join(map(atom, (*jaxpr.constvars, *jaxpr.invars)))]
            for eqn in jaxpr.eqns:
                used = {k: v for k, v in eqn.params.items() if not _UNUSED.search(k)}
                parameters = self._parameter(used)
                inputs, outputs = (" ".join(map(atom, v)) for v in (eqn.invars, eqn.outvars))
                lines.append(f"{outputs} = {eqn.primitive.name} {parameters} {inputs}")
                if "callback" in eqn.primitive.name:
                    lines.append(digest(eqn.params["callback"]))
            lines.append(" ".join(map(atom, jaxpr.outvars)))
            self._known[id(jaxpr)] = _hash("\n".join(lines).encode()), jaxpr
        return self._known[id(jaxpr)][0]

    def _parameter(self, x: Any) -> str:
        if isinstance(x, ClosedJaxpr):
            return self.closed(x)
        if isinstance(x, Jaxpr):
            return self._open(x)
        if isinstance(x, _ARRAYS):
            return _of_array(x)
        if isinstance(x, Mapping):
            return str(sorted((str(k), self._parameter(v)) for k, v in x.items()))
        if isinstance(x, tuple | list):
            return f"{type(x).__name__} {[self._parameter(v) for v in x]}"
        if isinstance(x, set | frozenset):
            return str(sorted(map(self._parameter, x)))
        return type(x).__name__ if callable(x) else _ADDRESS.sub("", repr(x))


def _of_type(aval: Any) -> str:
    return f"{aval.dtype}{list(aval.shape)}" if hasattr(aval, "shape") else str(aval)


class _Walk:
    """Walk through a value, depth first, and record a short string for every part."""

    def __init__(self, small: bool, words: set[str], *, complete: bool):
        self._small, self._words, self._complete = small, words, complete
        self.texts: dict[str, str] = {}
        self._met: dict[int, tuple[str, Any]] = {}  # by address; the object has to live

    def visit(self, path: str, value: Any) -> None:
        leaves, structure = jax.tree_util.tree_flatten_with_path(value)
        if not jax.tree_util.treedef_is_leaf(structure):
            self.texts[path] = _ADDRESS.sub("", str(structure))
            if len(self.texts[path]) > _LONG:
                self.texts[path] = f"structure {_hash(self.texts[path].encode())}"
        if len(leaves) > _LONG and all(isinstance(leaf, _PLAIN) for _, leaf in leaves):
            self.texts[f"{path}.values"] = _hash(repr([leaf for _, leaf in leaves]).encode())
            return
        for keys, leaf in leaves:
            name = jax.tree_util.keystr(keys, simple=True, separator=".")
            self._leaf(".".join(filter(None, (path, name))), leaf)

    def _leaf(self, path: str, x: Any) -> None:
        if isinstance(x, _ARRAYS):
            shape_only = self._small and x.ndim
            self.texts[path] = f"{x.dtype}{list(x.shape)}" if shape_only else _of_array(x)
        elif isinstance(x, _PLAIN):
            self.texts[path] = _of_plain_value(x)
        elif id(x) in self._met:
            self.texts[path] = f"as {self._met[id(x)][0]}"
        else:
            self._met[id(x)] = path, x
            self.texts[path], parts = self._described(x)
            for name, part in parts:
                self.visit(f"{path}.{name}" if path else name, part)

    def _described(self, x: Any) -> tuple[str, Iterator[tuple[str, Any]]]:
        """Return a short string for ``x`` itself, and its parts by name."""
        if isinstance(x, set | frozenset):
            return f"set {_hash(''.join(sorted(map(digest, x))).encode())}", iter(())
        if isinstance(x, types.FunctionType):
            return f"code {_code(x.__code__)} of {_PYTHON}", self._of_function(x)
        if isinstance(x, types.MethodType):
            return "method", iter((("function", x.__func__), ("self", x.__self__)))
        if isinstance(x, functools.partial):
            return "partial", iter((("function", x.func), ("args", (x.args, x.keywords))))
        if isinstance(x, type):
            return f"class {_qualified_name(x)}", _of_class(x)
        if isinstance(x, types.ModuleType):
            used = {} if _of_a_library(x.__name__) else vars(x)
            return f"module {x.__name__}", ((k, used[k]) for k in sorted(self._words & set(used)))
        if isinstance(x, types.BuiltinFunctionType):
            own = None if isinstance(x.__self__, types.ModuleType) else x.__self__
            return f"builtin {_qualified_name(x)}", iter((("self", own),))
        fields = _fields(x)
        if self._small:
            fields = {k: v for k, v in fields.items() if k in ("__wrapped__", "__class__")}
        text = "" if len(fields) > 1 or self._small else _ADDRESS.sub("", repr(x))
        return f"{_qualified_name(type(x))} object {text}", iter(fields.items())

    def _of_function(self, f: types.FunctionType) -> Iterator[tuple[str, Any]]:
        if f.__name__[:2] != "__":  # methods of dataclasses name all fields
            self._words |= {name for name in _names(f.__code__) if name[:2] != "__"}
        yield "defaults", (f.__defaults__ or (), f.__kwdefaults__ or {})
        for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
            try:
                yield name, self._as_used(cell.cell_contents)
            except ValueError:  # not filled yet
                continue
        # Only globals of user-defined functions count, because globals of packages hold caches.
        if not _of_a_library(f.__module__):
            for name in sorted(_globals(f.__code__) & set(f.__globals__)):
                yield name, self._as_used(f.__globals__[name])

    def _as_used(self, x: Any) -> Any:
        """Return ``x``, or only the fields of a settings object whose names are in the code."""
        fields = x if isinstance(x, dict) else getattr(x, "__dict__", {})
        whole = isinstance(x, type | types.FunctionType | types.ModuleType)
        if self._complete or whole or not self._words & set(fields):
            return x
        if any(not isinstance(getattr(type(x), word, None), _PLAIN) for word in self._words):
            return x  # the code calls a method, which may read any field
        return {k: v for k, v in fields.items() if k in self._words or not isinstance(v, _PLAIN)}


_CHANGING = "__doc__", "gauss_next"  # the second is the state of a random generator


def _fields(x: Any) -> dict[str, Any]:
    """Return an object's class and fields, without the caches of library objects."""
    fields = dict(getattr(x, "__dict__", {}))
    if _of_a_library(type(x).__module__):
        plain = (*_PLAIN, *_ARRAYS, types.FunctionType, tuple, list, dict)
        fields = {k: v for k, v in fields.items() if isinstance(v, plain) and k not in _CHANGING}
        fields = {k: v for k, v in fields.items() if k[0] != "_"} or fields
    for kind in type(x).__mro__:
        slots = vars(kind).get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        fields |= {name: getattr(x, name) for name in names if name[:1] != "_" and hasattr(x, name)}
    if hasattr(x, "__wrapped__"):
        fields["__wrapped__"] = x.__wrapped__
    return fields | {"__class__": type(x)}


def _of_class(x: type) -> Iterator[tuple[str, Any]]:
    """Yield the functions and settings of user-defined classes."""
    for kind in x.__mro__:
        for name, value in () if _of_a_library(kind.__module__) else sorted(vars(kind).items()):
            inner = [getattr(value, part, None) for part in ("__func__", "fget", "func")]
            function = next(filter(None, inner), value)  # of a static method, a property
            settings = isinstance(value, (*_PLAIN, *_ARRAYS, tuple, list, dict))
            if isinstance(function, types.FunctionType) or (settings and name[:2] != "__"):
                yield name, function


def _of_a_library(module: str | None) -> bool:
    if module == "__main__":
        return False
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    if file is None:  # built into Python, unless it was made from a string
        return module is None or module in sys.builtin_module_names or module in sys.modules
    path = pathlib.Path(file)
    installed = {"site-packages", "dist-packages"} & set(path.parts)
    return bool(installed) or any(path.is_relative_to(home) for home in _LIBRARIES)


def _code(code: types.CodeType) -> str:
    """Hash the instructions and constants of ``code``."""
    parts = [code.co_code.hex(), *code.co_names, *code.co_varnames, code.co_exceptiontable.hex()]
    return _hash("\0".join((*parts, *map(_constant, code.co_consts))).encode())


def _constant(x: Any) -> str:
    if isinstance(x, types.CodeType):
        return _code(x)
    return f"{type(x).__name__} {sorted(map(repr, x)) if isinstance(x, frozenset) else repr(x)}"


def _inner_codes(code: types.CodeType) -> list[types.CodeType]:
    return [c for c in code.co_consts if isinstance(c, types.CodeType)]


def _globals(code: types.CodeType) -> set[str]:
    """Return the names of globals that ``code``, or a function defined in it, reads."""
    loads = "LOAD_GLOBAL", "LOAD_NAME"
    own = {step.argval for step in dis.get_instructions(code) if step.opname in loads}
    return own.union(*map(_globals, _inner_codes(code)))


def _names(code: types.CodeType) -> set[str]:
    """Return all names and strings in ``code``, which include the attributes and keys it reads."""
    strings = {c for c in code.co_consts if isinstance(c, str)}
    return strings.union(code.co_names, code.co_varnames, *map(_names, _inner_codes(code)))


def _of_plain_value(x: Any) -> str:
    word = repr(x)
    # 5.0 counts as 5: the first call of an optax schedule turns its number of steps into a float.
    if type(x) is float and x.is_integer() and word != "-0.0":
        word = word.removesuffix(".0")
    return f"= {word}" if len(word) <= _LONG else f"{type(x).__name__} {_hash(word.encode())}"


def _qualified_name(x: Any) -> str:
    module = getattr(x, "__module__", None)
    name = str(getattr(x, "__qualname__", None) or getattr(x, "__name__", ""))
    return name if module in (None, "builtins", "__main__") else f"{module}.{name}"


def _of_array(x: Any) -> str:
    if not concrete(x):
        return f"traced {x.aval}"
    x = x if hasattr(x, "dtype") else np.asarray(x)  # a literal of a program may be a number
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


_BLOCK = 2**16  # entries mixed at a time, so that they fit in the processor's cache


def _sum_of_entries(parts: list[tuple[np.ndarray, tuple]], shape: tuple[int, ...]) -> int:
    """Return the sum modulo 2^64 of all entries, each mixed with its index in the whole array."""
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
    """Mix 64-bit words: every bit depends on all others (SplitMix64, Steele et al. 2014)."""
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _hash(x: Any, digits: int = 32) -> str:
    return hashlib.sha256(x).hexdigest()[:digits]
