"""Feature matrices [n, d] as arrays, in generated blocks, or sparse, and products with them."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from bilevel.internal.checks import check_finite, common_dtype, concrete, is_sparse, real_array
from ntk.internal.products import matmul


@partial(jax.tree_util.register_dataclass, data_fields=("rows", "columns"), meta_fields=("shape",))
@dataclasses.dataclass(frozen=True, eq=False)
class Blocks:
    """A feature matrix [n, d] that is generated a few rows or columns at a time.

    Attributes
    ----------
    shape : (int, int)
        n and d.
    rows : ``rows(start, size) -> [size, d]``
        ``size`` (static) rows from ``start`` (traced); rows from n on are zero.
    columns : ``columns(start, size) -> [n, size]``
        The same for columns, with zero columns from d on. Only the dual method calls it.

    Notes
    -----
    Functions made by ``jax.tree_util.Partial`` pass their arrays as arguments, so solves with equal
    shapes share one compilation. Other functions are compiled once per function object.
    """

    shape: tuple[int, int]
    rows: Callable[[Any, int], jax.Array]
    columns: Callable[[Any, int], jax.Array]

    def __post_init__(self) -> None:
        for name in ("rows", "columns"):
            function = getattr(self, name)
            # JAX also rebuilds the record with placeholders that are not functions.
            if callable(function) and not isinstance(function, jax.tree_util.Partial):
                object.__setattr__(self, name, jax.tree_util.Partial(function))


class _Entries(NamedTuple):
    """The entries of a sparse matrix, sorted by row: a product is a gather and sums of segments."""

    row: jax.Array  # [m], ascending; the last row where padded
    column: jax.Array  # [m]
    value: jax.Array  # [m], 0 where padded

    def product(self, v: jax.Array, rows: int) -> jax.Array:
        def one(v):
            dtype = common_dtype(self.value, v)
            products = self.value.astype(dtype) * v[self.column].astype(dtype)
            return jax.ops.segment_sum(products, self.row, rows, indices_are_sorted=True)

        return jax.vmap(one, 1, 1)(v)


@partial(
    jax.tree_util.register_dataclass, data_fields=("by_row", "by_column"), meta_fields=("shape",)
)
@dataclasses.dataclass(frozen=True, eq=False)
class Sparse:
    """A sparse feature matrix [n, d], made by :func:`sparse`: its entries by row and by column."""

    shape: tuple[int, int]
    by_row: _Entries
    by_column: _Entries


Features = jax.Array | Blocks | Sparse


def sparse(matrix: Any, name: str = "matrix") -> Sparse:
    """Return a sparse matrix of SciPy or JAX as features. Messages call it ``name``."""
    rows = _as_csr(name, matrix)
    check_finite(name, rows.data, "entries")
    return Sparse(rows.shape, _padded_entries(rows), _padded_entries(rows.T.tocsr()))


def _as_csr(name: str, matrix):
    """Return ``matrix`` in SciPy's format of compressed rows."""
    if hasattr(matrix, "tocsr"):
        return matrix.tocsr()
    if hasattr(matrix, "to_bcoo"):
        matrix = matrix.to_bcoo()
    if not (is_sparse(matrix) and hasattr(matrix, "indices")):
        kind = type(matrix).__name__
        raise ValueError(f"{name}: expected a sparse matrix of SciPy or JAX, got {kind}.")
    if not concrete(matrix):
        raise ValueError(
            f"{name}: expected a sparse matrix with known entries, got a traced one; "
            "call bilevel.linear.matrices.sparse(matrix) outside of jit."
        )
    if len(matrix.shape) != 2 or matrix.n_batch or matrix.n_dense:
        raise ValueError(
            f"{name}: expected a sparse matrix [n, d], got shape {matrix.shape} with "
            f"{matrix.n_batch} batch and {matrix.n_dense} dense dimensions."
        )
    from scipy.sparse import coo_array

    value, place = np.asarray(matrix.data), np.asarray(matrix.indices)
    inside = (place < np.array(matrix.shape)).all(1)  # JAX pads with places outside
    return coo_array((value[inside], tuple(place[inside].T)), shape=matrix.shape).tocsr()


def _padded_entries(matrix) -> _Entries:
    # Rounded up to 2 leading bits, so that matrices of similar size share a compilation.
    step = 1 << max(matrix.nnz.bit_length() - 2, 0)
    padding = (0, max(-(-matrix.nnz // step) * step, 1) - matrix.nnz)
    rows = np.repeat(np.arange(matrix.shape[0], dtype=np.int32), np.diff(matrix.indptr))
    value = matrix.data.astype(np.result_type(matrix.dtype, np.float32))
    return _Entries(
        jnp.asarray(np.pad(rows, padding, constant_values=matrix.shape[0] - 1)),
        jnp.asarray(np.pad(matrix.indices.astype(np.int32), padding)),
        jnp.asarray(np.pad(value, padding)),
    )


def sweep(
    features: Features, w: jax.Array, residual: Callable, data: tuple, memory: int
) -> tuple[jax.Array, jax.Array]:
    """Return ``f = Phi w`` [n, c] and ``Phi' residual(f, *data)`` [d, .] in one pass over rows."""
    n, d = features.shape
    if isinstance(features, Sparse):
        f = features.by_row.product(w, n)
        return f, features.by_column.product(residual(f, *data), d)
    if not isinstance(features, Blocks):
        f = matmul(features, w)
        return f, transposed_product(features, residual(f, *data))
    starts, size = block_starts(n, d, w.dtype, memory)

    def add(total, block):
        start, *data = block
        phi = features.rows(start, size)
        f = matmul(phi, w)
        return total + transposed_product(phi, residual(f, *data)), f

    blocks = (starts, *(split_rows(a, len(starts), size) for a in data))
    width = jax.eval_shape(residual, jnp.zeros((n, w.shape[1]), w.dtype), *data).shape[1]
    total, f = jax.lax.scan(add, jnp.zeros((d, width), w.dtype), blocks)
    return f.reshape(-1, w.shape[1])[:n], total


def transposed_product(phi: jax.Array, r: jax.Array) -> jax.Array:
    """Return ``phi' r`` for arrays [n, d] and [n, c]."""
    # Without barriers XLA's CPU code transposes phi instead of r, and takes 12 times as long.
    alone = jax.lax.optimization_barrier
    return alone(matmul(alone(alone(r).T), phi)).T


@partial(jax.jit, static_argnames="memory")
def features_product(features: Features, w: jax.Array, memory: int) -> jax.Array:
    """Return ``Phi w`` for ``w`` [d] or [d, c]."""
    (n, d), columns = features.shape, as_columns(w)
    if isinstance(features, Sparse):
        f = features.by_row.product(columns, n)
    elif not isinstance(features, Blocks):
        f = matmul(features, columns)
    else:
        starts, size = block_starts(n, d, w.dtype, memory)
        f = jax.lax.map(lambda start: matmul(features.rows(start, size), columns), starts)
        f = f.reshape(-1, columns.shape[1])[:n]
    return f.reshape(-1, *w.shape[1:])


def as_array(features: Blocks, memory: int) -> jax.Array:
    """Return the features as an array, generated in blocks of at most memory / 16."""
    (n, d), dtype = features.shape, dtype_of(features)
    starts, size = block_starts(n, d, dtype, memory // 4)

    def fill(i, whole):
        start = jnp.minimum(starts[i], n - size)  # the last block repeats rows
        return jax.lax.dynamic_update_slice(whole, features.rows(start, size), (start, 0))

    return jax.lax.fori_loop(0, len(starts), fill, jnp.zeros((n, d), dtype))


def column_squares(features: Features, memory: int) -> jax.Array:
    """Return the squared 2-norm of each column [d]."""
    n, d = features.shape
    if isinstance(features, Sparse):
        entries = features.by_column
        return jax.ops.segment_sum(entries.value**2, entries.row, d, indices_are_sorted=True)
    if not isinstance(features, Blocks):
        return jnp.sum(features**2, axis=0)
    starts, size = block_starts(n, d, dtype_of(features), memory)

    def add(total, start):
        return total + jnp.sum(features.rows(start, size) ** 2, axis=0), None

    return jax.lax.scan(add, jnp.zeros(d, dtype_of(features)), starts)[0]


def block_starts(total: int, width: int, dtype: Any, memory: int) -> tuple[jax.Array, int]:
    """Return starts and size of equal blocks [size, width] of at most memory / 4 each."""
    most = max(memory // (4 * width * dtype.itemsize), 1)
    count = -(-total // most)
    size = -(-total // count)
    return jnp.arange(count) * size, size


def split_rows(a: jax.Array, count: int, size: int) -> jax.Array:
    """Return rows in blocks [count, size, c]; zeros fill the last block."""
    filled = jnp.pad(a, ((0, count * size - len(a)), (0, 0)))
    return filled.reshape(count, size, -1)


def as_columns(a: chex.Array) -> jax.Array:
    """Return a vector as one column."""
    return a.reshape(len(a), -1)


def dtype_of(features: Features) -> Any:
    """Return the dtype of the numbers in the features."""
    if isinstance(features, Sparse):
        return features.by_row.value.dtype
    if isinstance(features, Blocks):
        return jax.eval_shape(lambda: features.rows(0, 1)).dtype
    return features.dtype


def checked_features(features: Any) -> Features:
    """Return ``features`` as floating-point numbers; raise unless they are a matrix."""
    if is_sparse(features):
        features = sparse(features, "features")
    if not isinstance(features, Blocks | Sparse):
        features = real_array("features", features)
        if not jnp.issubdtype(features.dtype, jnp.floating):
            features = features.astype(float)
    if len(features.shape) != 2 or 0 in features.shape:
        raise ValueError(
            f"features: expected a matrix with rows and columns, got shape {features.shape}."
        )
    if isinstance(features, Blocks):
        n, d = features.shape
        for name, expected in (("rows", (1, d)), ("columns", (n, 1))):
            shape = jax.eval_shape(lambda name=name: getattr(features, name)(0, 1)).shape
            if shape != expected:
                raise ValueError(f"{name}: expected shape {expected} for size 1, got {shape}.")
    return features
