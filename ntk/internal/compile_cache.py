"""Compiled programs, kept by what they compute rather than by the function that they came from.

``jax.jit`` remembers a program by the identity of the Python function. A function that reads
anything that can change (a field of its object, a global, a list it closes over) is then answered
by the program of what it was. Here a function is traced at every call, which takes a fraction of
what XLA takes, and XLA is spared where the same program, arrays it closes over aside, is known.
"""

import collections
import functools
import hashlib
from collections.abc import Callable
from typing import Any

import jax

_KEPT = 128  # programs; the one used longest ago goes first
_programs: collections.OrderedDict[tuple, Callable] = collections.OrderedDict()


def fresh(function: Callable) -> Callable:
    """The same function as an object that no cache of JAX has seen."""
    return lambda *args: function(*args)


def program(function: Callable, *args: Any, donate: tuple[int, ...] = ()) -> Callable:
    """``function`` as it is now, compiled for arguments like ``args``.

    Parameters
    ----------
    function : callable
        Of pytrees of arrays.
    *args : pytrees of arrays
        Only shapes, types and places count.
    donate : tuple of int
        Which arguments' memory the program may use up.

    Returns
    -------
    callable
        Of arguments like ``args``.

    Examples
    --------
    >>> factor = [2.0]
    >>> double = program(lambda x: factor[0] * x, 1.0)
    >>> factor[0] = 3.0
    >>> triple = program(lambda x: factor[0] * x, 1.0)
    >>> float(double(1.0)), float(triple(1.0))
    (2.0, 3.0)
    """
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
    """``compiled``, or what was compiled before from the same text."""
    text = compiled.lower(*args).as_text()
    if "callback" in text:  # of Python functions, whose names are not in the text
        return compiled
    key = jax.tree.structure(args), structure, hashlib.sha256(text.encode()).digest()
    reused = _programs.setdefault(key, compiled)
    _programs.move_to_end(key)
    if len(_programs) > _KEPT:
        _programs.popitem(last=False)
    return reused
