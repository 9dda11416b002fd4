"""Raise if the arrays of a job do not fit into memory, before it starts long work.

The system ends such a job without a message, after minutes or hours.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from bilevel.contracts import Pytree
from bilevel.internal.memory import available_memory

Parts = Mapping[tuple[str, ...], Pytree]
"""Shapes of arrays that are alive together, by the names of the flags that set their sizes."""


def shape(*sizes: int, dtype: Any = "float32") -> jax.ShapeDtypeStruct:
    """Return the shape of an array."""
    return jax.ShapeDtypeStruct(sizes, dtype)


def kept_for_backward(function: Callable[..., Any], *arguments: Any, **options: Any) -> Pytree:
    """Return the shapes of the arrays that the gradient in the first argument keeps."""

    def residuals(first, *others):
        return jax.vjp(lambda x: function(x, *others), first, **options)[1]

    return jax.eval_shape(residuals, *arguments)


def bytes_of(tree: Pytree) -> int:
    """Return the bytes of all arrays in ``tree``."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


@contextlib.contextmanager
def fitting(config: Any, *stages: Parts) -> Iterator[None]:
    """Run the block. If arrays of a stage or allocations fail to fit, name the flags to lower."""
    free = available_memory()
    sizes = max(
        ({flags: bytes_of(tree) for flags, tree in parts.items()} for parts in stages),
        key=lambda sizes: sum(sizes.values()),
    )
    flags = max(sizes, key=lambda flags: sizes[flags])
    names, values = ", ".join(flags), ", ".join(str(getattr(config, name)) for name in flags)
    if (need := sum(sizes.values())) > free:
        raise ValueError(
            f"{names}: expected sizes that fit in the {free / 1e9:,.1f} GB of memory available, "
            f"got {values}, with which the run takes at least {need / 1e9:,.1f} GB."
        )
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # JAX's own are RuntimeErrors
        if isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = (str(error).splitlines() or ["out of memory"])[0]
        raise ValueError(
            f"{names}: expected sizes that fit in memory, got {values}; an allocation failed: "
            f"{reason}"
        ) from error
