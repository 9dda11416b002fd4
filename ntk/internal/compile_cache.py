"""Cache compiled programs by their content.

``jax.jit`` caches a program by the identity of the Python function, which can read a value that
changes: a field, a global, a list. Here a function is traced at every call, and XLA is skipped if
the same program is known. Arrays that the function closes over may differ.
"""

import collections
import functools
import hashlib
from collections.abc import Callable
from typing import Any

import jax

_CAPACITY = 128  # programs; the least recently used program is dropped first
_programs: collections.OrderedDict[tuple, Callable] = collections.OrderedDict()


def fresh(function: Callable) -> Callable:
    """Return the same function as an object that no cache of JAX has seen."""
    return lambda *args: function(*args)


def program(function: Callable, *args: Any, donate: tuple[int, ...] = ()) -> Callable:
    """Compile ``function`` as it is now for ``args``; it may overwrite those in ``donate``."""
    closed, shapes = jax.make_jaxpr(fresh(function), return_shape=True)(*args)
    structure = jax.tree.structure(shapes)

    def run(constants, *args):
        flat = jax.core.eval_jaxpr(closed.jaxpr, constants, *jax.tree.leaves(args))
        return jax.tree.unflatten(structure, flat)

    # With `jax_debug_infs` JAX runs the program again at an infinity, and needs its arguments.
    donate = () if jax.config.jax_debug_infs else donate  # type: ignore[attr-defined]
    compiled: Callable = jax.jit(run, donate_argnums=tuple(i + 1 for i in donate))
    leaves = jax.tree.leaves((closed.consts, args))
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        compiled = _reuse_compiled(compiled, (closed.consts, *args), structure)
    return functools.partial(compiled, closed.consts)


def _reuse_compiled(compiled, args, structure) -> Callable:
    """Return ``compiled``, or the earlier program with the same text."""
    text = compiled.lower(*args).as_text()
    if "callback" in text:  # the text does not name the Python functions that it calls
        return compiled
    key = jax.tree.structure(args), structure, hashlib.sha256(text.encode()).digest()
    reused = _programs.setdefault(key, compiled)
    _programs.move_to_end(key)
    if len(_programs) > _CAPACITY:
        _programs.popitem(last=False)
    return reused
