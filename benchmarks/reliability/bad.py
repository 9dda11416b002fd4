"""What may be wrong with an argument: bad values by the argument's kind.

A kind ends in ``?`` where None is allowed. All but the last few of ``array`` are also what may be
wrong with a leaf of a tree.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Mistakes = dict[str, Callable[[], Any]]


def mistakes(kind: str, value: Any, rng: np.random.Generator) -> Mistakes:
    """Bad values for an argument of this kind, by name, made when called."""
    by_name = _KINDS[kind.rstrip("?")](value, rng)
    if kind.endswith("?"):
        by_name.pop("none", None)
    return by_name


def planted(tree: Any, number: float, rng: np.random.Generator) -> Any:
    """``tree`` with one entry of one floating leaf replaced."""
    leaves, structure = jax.tree.flatten(tree)
    floating = [i for i, x in enumerate(leaves) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    which = floating[rng.integers(len(floating))]
    array = np.array(leaves[which])
    array.flat[rng.integers(array.size)] = number
    leaves[which] = jnp.asarray(array) if isinstance(leaves[which], jax.Array) else array
    return jax.tree.unflatten(structure, leaves)


def _everything(value, rng) -> Mistakes:
    return {
        "none": lambda: None,
        "a text": lambda: "text",
        "a function": lambda: lambda *a: 0.0,
    }


def _tree(value, rng) -> Mistakes:
    return {
        "nan": lambda: planted(value, np.nan, rng),
        "inf": lambda: planted(value, np.inf, rng),
        "complex": lambda: jax.tree.map(lambda x: jnp.asarray(x) + 1j, value),
        "empty": lambda: (
            jax.tree.map(lambda x: jnp.asarray(x)[..., :0], value)
            if all(np.ndim(x) for x in jax.tree.leaves(value))
            else {}
        ),
    } | _everything(value, rng)


def _values(value, rng) -> Mistakes:  # of what the user's own functions take
    return {"nan": lambda: planted(value, np.nan, rng), "inf": lambda: planted(value, np.inf, rng)}


def _array(value, rng) -> Mistakes:
    by_name = _tree(value, rng) | {
        "one axis more": lambda: jnp.asarray(value)[None, None, None],
        "a scalar": lambda: jnp.asarray(value).ravel()[0],
    }
    return by_name


def _numbers(value, rng) -> Mistakes:  # of any shape
    return _tree(value, rng)


def _rows(value, rng) -> Mistakes:  # an array whose length has to be that of others
    return _array(value, rng) | {"one row more": lambda: jnp.concatenate([value, value[:1]])}


def _simplex(value, rng) -> Mistakes:
    def negative():
        array = np.array(value)
        array[..., 0], array[..., 1] = array[..., 0] + array[..., 1] + 0.5, -0.5
        return jnp.asarray(array)

    by_name = {"off the simplex": lambda: jax.tree.map(lambda a: jnp.asarray(a) * 1.5, value)}
    if not isinstance(value, dict) and np.shape(value)[-1] > 1:
        by_name["negative"] = negative
    return (
        _array(value, rng) | by_name if not isinstance(value, dict) else _tree(value, rng) | by_name
    )


def _matrix(value, rng) -> Mistakes:
    def skewed():
        array = np.array(value)
        array[0, -1] += 1 + abs(array).max()
        return jnp.asarray(array)

    by_name = {"not square": lambda: jnp.asarray(value)[:, :-1]} if len(value) > 1 else {}
    return _array(value, rng) | by_name | ({"not symmetric": skewed} if len(value) > 1 else {})


def _labels(value, rng) -> Mistakes:
    return {
        "negative": lambda: jnp.asarray(value) - 100,
        "fractions": lambda: jnp.asarray(value) + 0.5,
        "empty": lambda: jnp.asarray(value)[:0],
        "one row more": lambda: jnp.concatenate([jnp.asarray(value), jnp.asarray(value)[:1]]),
    } | _everything(value, rng)


def _choice(*values: tuple[str, Any]) -> Callable:
    def kind(value, rng) -> Mistakes:
        return {name: lambda bad=bad: bad for name, bad in values} | _everything(value, rng)

    return kind


_NAN, _HALF = ("nan", float("nan")), ("a fraction", 2.5)
_KINDS: dict[str, Callable[[Any, np.random.Generator], Mistakes]] = {
    "tree": _tree,
    "values": _values,
    "array": _array,
    "numbers": _numbers,
    "rows": _rows,
    "simplex": _simplex,
    "matrix": _matrix,
    "labels": _labels,
    "count": _choice(("zero", 0), ("negative", -1), _HALF, _NAN),
    "whole": _choice(("negative", -1), _HALF, _NAN),
    "positive": _choice(("zero", 0.0), ("negative", -1.0), _NAN, ("inf", float("inf"))),
    "above zero": _choice(("zero", 0.0), ("negative", -1.0), _NAN),
    "nonnegative": _choice(("negative", -1.0), _NAN),
    "fraction": _choice(("zero", 0.0), ("one", 1.0), ("negative", -0.1), _NAN),
    "unit": _choice(("negative", -0.1), ("above one", 1.1), _NAN),
    "finite": _choice(_NAN, ("inf", float("inf"))),
    "name": _choice(("unknown", "nonsense"), ("no name", ""), ("a number", 3)),
    "names": _choice(("unknown", ("nonsense",)), ("none at all", ()), ("a number", 3)),
    "function": lambda value, rng: {
        "none": lambda: None,
        "a text": lambda: "text",
        "a number": lambda: 3.0,
        "an array": lambda: jnp.ones(3),
    },
    "key": _choice(("an integer", 0), ("a number", 2.5)),
    "record": lambda value, rng: _everything(value, rng) | {"a number": lambda: 3.0},
    "sequence": lambda value, rng: {
        "none at all": lambda: [],
        "none": lambda: None,
        "a number": lambda: 3,
    },
    "text": lambda value, rng: {
        "none": lambda: None,
        "nonsense": lambda: "nonsense",
        "a number": lambda: 3,
    },
}
