"""Short tables that results print as."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from ntk.internal.checks import concrete

_READ = 2**20  # entries up to which an array is read for a table


def table(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """Return ``title`` and a line for each pair of a name and a description."""
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    return "\n".join([title, *(f"  {name:{width}}  {text}" for name, text in rows)])


def value(x: Any) -> float | None:
    """Return a scalar as a Python number; None if it is traced, batched, deleted or elsewhere."""
    return float(x) if _readable(x) and np.ndim(x) == 0 else None


def number(x: Any, form: str = ".4g") -> str:
    """Return a scalar as text; dtype and shape if it is traced, batched, deleted or elsewhere."""
    if (known := value(x)) is not None:
        return format(known, form)
    return arrays(x)


def arrays(tree: Any) -> str:
    """Return dtype and shape of an array; of a larger pytree, the number of arrays and entries."""
    leaves = jax.tree.leaves(tree)
    if len(leaves) == 1:
        (leaf,) = leaves
        return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else repr(leaf)
    return f"{len(leaves)} arrays of {sum(map(np.size, leaves)):,} entries"


def norm(tree: Any) -> float | None:
    """Return the 2-norm of a pytree; None if an array is large, traced, deleted or elsewhere."""
    leaves = jax.tree.leaves(tree)
    if not all(map(_readable, leaves)):
        return None
    return float(np.sqrt(sum(np.sum(np.square(np.asarray(x, float))) for x in leaves)))


def largest(x: Any) -> float | None:
    """Return the largest entry; None if the array is large, traced, deleted or elsewhere."""
    return float(np.max(x)) if _readable(x) and np.size(x) else None


def ends(x: Any) -> str:
    """Return the first and the last value of a vector as text; its dtype and shape otherwise."""
    if not _readable(x) or np.ndim(x) != 1 or not np.size(x):
        return arrays(x)
    values = np.asarray(x)  # indexing an array on a device would compile a program
    return f"{number(values[0])} -> {number(values[-1])}"


def _readable(x: Any) -> bool:
    if not concrete(x) or np.size(x) > _READ:
        return False
    if isinstance(x, jax.Array):
        number = x.dtype == bool or jax.numpy.issubdtype(x.dtype, np.number)
        return bool(number and x.is_fully_addressable and not x.is_deleted())
    return isinstance(x, (np.ndarray, np.generic, float, int))
