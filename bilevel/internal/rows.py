"""Select rows of arrays and of sparse matrices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bilevel.contracts import Pytree
from bilevel.internal.checks import concrete, count_rows, integer, is_sparse


def taken(data: Pytree, drawn: jax.Array) -> Pytree:
    """Return the rows ``drawn`` [k] of all arrays and BCSR matrices in ``data``."""

    def of(x):
        return sparse_rows(x, drawn) if is_sparse(x) else jnp.asarray(x)[drawn]

    return jax.tree.map(of, data, is_leaf=is_sparse)


def sparse_rows(matrix: Any, drawn: jax.Array, width: int | None = None) -> Any:
    """Return rows of a BCSR matrix, each padded to ``width`` entries with zeros."""
    if type(matrix).__name__ != "BCSR" or len(matrix.shape) != 2 or matrix.n_batch:
        raise ValueError(
            f"data: expected dense arrays or BCSR matrices [n, d], got a {type(matrix).__name__} "
            f"of shape {matrix.shape}; jax.experimental.sparse.BCSR.from_bcoo(matrix) makes one."
        )
    if width is None:  # the largest number of entries in a row, or a bound if traced
        width = min(matrix.shape[1], matrix.nse)
        if concrete(matrix.indptr):
            width = int(np.diff(np.asarray(matrix.indptr)).max())
        width = max(1, width)
    start = matrix.indptr[drawn]
    place = jnp.arange(width, dtype=start.dtype)[None]
    present = place < (matrix.indptr[drawn + 1] - start)[:, None]
    at = jnp.where(present, start[:, None] + place, 0)
    value, column = (jnp.where(present, x[at], 0) for x in (matrix.data, matrix.indices))
    ends = width * jnp.arange(len(drawn) + 1, dtype=start.dtype)
    return type(matrix)((value.ravel(), column.ravel(), ends), shape=(len(drawn), matrix.shape[1]))


def check_batch_size(data: Pytree, batch_size: int) -> int:
    """Return the number of rows of ``data``; raise if it is less than ``batch_size``."""
    n = count_rows("data", data)
    if not integer("batch_size", batch_size, 1) <= n:
        raise ValueError(f"batch_size: expected 1 to the {n} rows of the data, got {batch_size}.")
    return n
