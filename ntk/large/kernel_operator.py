"""Kernels as operators: products ``K v`` of kernels that are larger than memory.

A kernel of n inputs has n^2 entries, 14 GB for 60,000 inputs in float32; the inputs have n d.
Conjugate gradients and Lanczos need only products. So :class:`KernelOperator` computes entries in
tiles, multiplies and drops them. The kernel of a finite network, :class:`ntk.EmpiricalOperator`,
needs no tiles. Both are pytrees: they pass through ``jit`` as arguments.
"""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ntk.internal.batched_rows import length
from ntk.internal.checks import (
    check_finite,
    common_dtype,
    concrete,
    function,
    integer,
    offending,
    one_of,
    real_array,
)
from ntk.internal.compile_cache import program
from ntk.internal.sharding import (
    keeping_rows,
    reshard_rows,
    row_sharding,
    sharded,
    without_explicit_axes,
)
from ntk.kernels.functions import KernelFunction, kernel_matrix
from ntk.large import tiled_products


class Operator:
    """A matrix known by its products, and the checks of their arguments.

    Subclasses have inputs ``x`` of the rows and ``x2`` of the columns (None for the same), and the
    names of the fields that are arrays and of those that are static.
    """

    arrays: tuple[str, ...]
    static: tuple[str, ...]
    x: Any
    x2: Any
    dtype: Any
    _programs: dict

    @property
    def shape(self) -> tuple[int, int]:
        """Return the numbers of rows and columns."""
        return length(self.x), length(self._of_columns)

    @property
    def _of_columns(self):
        return self.x if self.x2 is None else self.x2

    def __getstate__(self) -> Any:
        return self.__dict__ | {"_programs": {}}  # compiled programs belong to this process

    def __matmul__(self, v: chex.Array) -> jax.Array:
        v = real_array("v", v)
        rows = self.shape[1]
        if v.ndim not in (1, 2) or v.shape[0] != rows or not v.size:
            raise ValueError(f"v: expected shape [{rows}] or [{rows}, columns], got {v.shape}.")
        v = without_explicit_axes(v.astype(common_dtype(v, self.dtype)))
        product = self._run("_product", v.reshape(rows, -1))
        return product.reshape(-1, *v.shape[1:])

    def columns(self, indices: chex.Array) -> jax.Array:
        """Return some columns of K, [n, k].

        Parameters
        ----------
        indices : array [k] of int

        Raises
        ------
        ValueError
            If they are not a list of integers from 0 to n - 1.
        """
        indices = real_array("indices", indices)
        if indices.ndim != 1 or not jnp.issubdtype(indices.dtype, jnp.integer):
            got = f"{indices.dtype} of shape {indices.shape}"
            raise ValueError(f"indices: expected integers [k], got {got}.")
        if concrete(indices):
            given = np.asarray(indices)
            good = (given >= 0) & (given < self.shape[1])
            if not good.all():
                last, got = self.shape[1] - 1, offending(given, good)
                raise ValueError(f"indices: expected integers from 0 to {last}, got {got}.")
        return self._run("_columns", without_explicit_axes(indices))

    def at(self, x: Any) -> Any:
        """Return the operator ``k(x, X)`` (m, n) of other inputs and those of the rows.

        Parameters
        ----------
        x : array [m, ...], or pytree of such arrays for a finite network

        Raises
        ------
        ValueError
            If ``x`` is not finite or its samples have another shape.
        """
        return self._at(x)

    def _at(self, x: Any) -> Any:
        raise NotImplementedError

    def diagonal(self) -> jax.Array:
        """Return the diagonal ``k(x_i, x_i)`` [n] of the rows' inputs, even if ``x2`` is given."""
        return self._run("_diagonal")

    def _run(self, name: str, *args):
        """Run the method of that name, compiled once for an operator."""
        method = getattr(type(self), name)
        if not concrete(self, args):
            return method(self, *args)
        key = name, jax.sharding.get_abstract_mesh(), *map(jax.typeof, args)
        if key not in self._programs:
            self._programs[key] = program(method, self, *args)
        return self._programs[key](self, *args)


def pytree(cls: type["Operator"]) -> type:
    """Register a class of operators as pytrees with their arrays as leaves."""

    def flatten(operator):
        fields = [[getattr(operator, name) for name in names] for names in (cls.arrays, cls.static)]
        return fields[0], tuple(fields[1])

    def unflatten(static, arrays):
        new: Any = object.__new__(cls)
        for name, value in zip((*cls.arrays, *cls.static), (*arrays, *static), strict=True):
            setattr(new, name, value)
        new._programs = {}
        return new

    jax.tree_util.register_pytree_node(cls, flatten, unflatten)
    return cls


@pytree
class KernelOperator(Operator):
    """The matrix ``K(x, x2)`` of a kernel function, computed tile by tile when it is used.

    Parameters
    ----------
    kernel : function
        A traceable kernel as for :func:`ntk.kernel_matrix`: ``functools.partial`` of
        :func:`ntk.network_kernel`, a network's ``kernel``, neural-tangents' ``kernel_fn``, any
        ``k(x1, x2) -> [n1, n2]``.
    x : array [n, ...]
        Inputs of the rows. If their rows are sharded over the devices of a mesh, each device
        computes its rows of products, and results have the same sharding.
    x2 : array [n2, ...], optional
        Inputs of the columns. Default: ``x``; K is then assumed to be symmetric.
    get : {"ntk", "nngp"}
        Which kernel of a record.
    tile : int
        Maximum number of rows and columns of a tile.

    Raises
    ------
    ValueError
        If an argument is out of its range, ``kernel`` returns another shape, or inputs are not
        finite; when used, if vectors or indices have another shape.

    Notes
    -----
    ``K.shape`` is (n, n2) and ``K.dtype`` is that of the entries. ``K @ v`` for v [n2] or [n2, q]
    computes each pair of inputs once: ``n^2 / 2`` entries if K is symmetric. Memory: inputs,
    vectors and about ten tiles (of 2048 x 2048 in float32: 16 MB each). It is one compiled program
    for a kernel, a shape and a sharding. The kernel must not depend on state that changes.

    Differentiable as ``kernel`` is; reverse mode computes tiles again. Each of P devices holds
    ``n / P`` rows, and sends ``n / 2`` rows of x, v and K v for a product. It computes
    ``n^2 / (2 P)`` entries, or ``(n^2 + n^2 / P) / (2 P)`` for even P.

    Examples
    --------
    >>> K = KernelOperator(lambda x1, x2: (x1 @ x2.T) ** 2, jnp.eye(3))
    >>> K.shape, K @ jnp.ones(3)
    ((3, 3), Array([1., 1., 1.], dtype=float...))
    >>> K.at(jnp.array([[0.0, 0.0, 2.0]])) @ jnp.array([0.0, 0.0, 1.0])  # k(x, X) v
    Array([4.], dtype=float...)
    """

    arrays = "x", "x2"
    static = "kernel", "get", "tile", "_rows", "_others", "dtype"

    def __init__(
        self,
        kernel: KernelFunction,
        x: chex.Array,
        x2: chex.Array | None = None,
        *,
        get: str = "ntk",
        tile: int = 2048,
    ):
        function("kernel", kernel, "(x1, x2) -> [n1, n2]")
        one_of("get", get, ("ntk", "nngp"))
        self.kernel, self.get, self.tile = kernel, get, integer("tile", tile, 1)
        self.x = _check_operator_inputs("x", x)
        self.x2 = None if x2 is None else _check_operator_inputs("x2", x2)
        self._rows = row_sharding(self.x)
        self._others = self._rows if x2 is None else row_sharding(self.x2)
        few = _one(self.x), None if self.x2 is None else _one(self.x2)
        self.dtype = jax.eval_shape(self._tile, *few).dtype
        self._programs = {}

    def _at(self, x):
        return KernelOperator(self.kernel, x, self.x, get=self.get, tile=self.tile)

    def _tile(self, x1, x2=None):
        return kernel_matrix(self.kernel, x1, x2, get=self.get)

    def _product(self, v):
        if self.x2 is not None:
            return self._other_columns_product(v)
        if self._rows is None:
            return tiled_products.symmetric_product(self._tile, self.x, v, self.tile)
        (mesh, axis), devices = self._rows, self._rows.devices

        def own(x, v):
            return tiled_products.ring(self._tile, x, v, self.tile, axis, devices)

        product = sharded(own, mesh, (P(axis), P(axis)), P(axis))
        return without_explicit_axes(product(self.x, reshard_rows(v, self._rows)))

    def _other_columns_product(self, v):
        def run(x, x2, v):
            return tiled_products.rectangular(self._tile, x, x2, v, self.tile)

        if self._others is None:
            return self._by_rows(run, self.x2, v)
        mesh, axis = self._others

        def summed(*own):
            return jax.lax.psum(run(*own), axis)

        total = sharded(summed, mesh, (P(), P(axis), P(axis)), P())
        return total(without_explicit_axes(self.x), self.x2, reshard_rows(v, self._others))

    def _columns(self, indices):
        chosen = without_explicit_axes(self._of_columns)[indices]

        def run(x, chosen):
            return tiled_products.tiled_columns(self._tile, x, chosen, self.tile)

        columns = self._by_rows(run, chosen)
        if self.x2 is not None:
            return columns
        # The kernel of an input with itself is more accurate than that of two equal inputs.
        own = jnp.arange(len(columns), dtype=indices.dtype)[:, None] == indices[None]
        return jnp.where(own, tiled_products.tiled_diagonal(self._tile, chosen, self.tile), columns)

    def _diagonal(self):
        return self._by_rows(lambda x: tiled_products.tiled_diagonal(self._tile, x, self.tile))

    def _by_rows(self, run, *same):
        if self._rows is None:
            return run(self.x, *same)
        mesh, axis = self._rows
        by_device = sharded(run, mesh, (P(axis), *(P() for _ in same)), P(axis))
        return without_explicit_axes(by_device(self.x, *without_explicit_axes(same)))


def _check_operator_inputs(name: str, x: Any) -> jax.Array:
    x = real_array(name, x)
    if x.ndim == 0 or not x.size:
        raise ValueError(f"{name}: expected inputs [n, ...] with n at least 1, got {x.shape}.")
    check_finite(name, x, "inputs")
    return keeping_rows(x)


def _one(x):
    return jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype)
