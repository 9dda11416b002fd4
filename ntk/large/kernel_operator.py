"""Kernels as operators: products ``K v`` of kernels that are larger than memory.

A kernel of 60,000 inputs has 14 GB of entries in float32. Conjugate gradients and Lanczos need only
products: :class:`KernelOperator` computes entries in tiles, multiplies and drops them. The kernel
``J J'`` of a finite network, :class:`EmpiricalOperator`, needs no tiles: ``K v = J (J' v)``. Both
are pytrees, and pass through ``jit`` as arguments.
"""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ntk.empirical import blocks
from ntk.empirical.kernels import check_and_trace, empirical_kernel, gradient_norms
from ntk.empirical.network_program import Apply, trace_network
from ntk.internal import checks
from ntk.internal.batched_rows import length
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
    """A matrix known by its products, and the checks of their arguments."""

    arrays: tuple[str, ...]  # names of the fields that are leaves of the pytree
    static: tuple[str, ...]  # names of the other fields
    x: Any  # inputs of the rows
    x2: Any  # inputs of the columns; None for the same
    dtype: Any
    _programs: dict

    def __init_subclass__(cls) -> None:
        jax.tree_util.register_pytree_node(cls, cls._flatten, cls._unflatten)

    def _flatten(self):
        fields = [[getattr(self, name) for name in names] for names in (self.arrays, self.static)]
        return fields[0], tuple(fields[1])

    @classmethod
    def _unflatten(cls, static, arrays):
        new = object.__new__(cls)
        fields = zip((*cls.arrays, *cls.static), (*arrays, *static), strict=True)
        new.__dict__.update(fields, _programs={})
        return new

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
        v = checks.real_array("v", v)
        rows = self.shape[1]
        if v.ndim not in (1, 2) or v.shape[0] != rows or not v.size:
            raise ValueError(f"v: expected shape [{rows}] or [{rows}, columns], got {v.shape}.")
        v = without_explicit_axes(v.astype(checks.common_dtype(v, self.dtype)))
        product = self._run("_product", v.reshape(rows, -1))
        return product.reshape(-1, *v.shape[1:])

    def columns(self, indices: chex.Array) -> jax.Array:
        """Return the columns of K at ``indices`` [k], integers from 0 to n - 1: [n, k].

        Raises
        ------
        ValueError
            If ``indices`` has other values.
        """
        indices = checks.real_array("indices", indices)
        if indices.ndim != 1 or not jnp.issubdtype(indices.dtype, jnp.integer):
            got = f"{indices.dtype} of shape {indices.shape}"
            raise ValueError(f"indices: expected integers [k], got {got}.")
        if checks.concrete(indices):
            last, given = self.shape[1] - 1, np.asarray(indices)
            if not (good := (given >= 0) & (given <= last)).all():
                got = checks.offending(given, good)
                raise ValueError(f"indices: expected integers from 0 to {last}, got {got}.")
        return self._run("_columns", without_explicit_axes(indices))

    def at(self, x: Any) -> Any:
        """Return the operator ``k(x, X)`` (m, n) of other inputs x [m, ...] and those of the rows.

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
        if not checks.concrete(self, args):
            return method(self, *args)
        key = name, jax.sharding.get_abstract_mesh(), *map(jax.typeof, args)
        if key not in self._programs:
            self._programs[key] = program(method, self, *args)
        return self._programs[key](self, *args)


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
    for a kernel, a shape and a sharding. The kernel must not depend on state that changes. Reverse
    mode computes tiles again. For a product each of P devices sends ``n / 2`` rows of x, v and K v,
    and computes ``n^2 / (2 P)`` entries, or ``(n^2 + n^2 / P) / (2 P)`` for even P.

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
        checks.function("kernel", kernel, "(x1, x2) -> [n1, n2]")
        checks.one_of("get", get, ("ntk", "nngp"))
        self.kernel, self.get, self.tile = kernel, get, checks.integer("tile", tile, 1)
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


class EmpiricalOperator(Operator):
    """The tangent kernel ``J(x) J(x2)'``, [n, n2], of a finite network's summed outputs.

    Parameters
    ----------
    apply : callable
        ``apply(params, x) -> [n, o]`` or ``[n]``, as for :func:`ntk.empirical_kernel`.
    params : pytree
    x, x2 : arrays [n, ...] and [n2, ...], or pytrees of such arrays
        Samples of the rows and of the columns. Default of ``x2``: ``x``.
    batch_size : int, optional
        Samples handled at a time; all by default.

    Raises
    ------
    ValueError
        If :func:`ntk.empirical_kernel` raises it for these arguments; when used, if vectors or
        indices have another shape.

    Notes
    -----
    ``K.shape`` is (n, n2) and ``K.dtype`` is that of the entries. ``K @ v`` takes about 5 forward
    passes of all samples for each column of v. Memory, for each column: a copy of the parameters
    and the activations of ``batch_size`` samples.

    Examples
    --------
    >>> x = jnp.array([[1.0, 0.0], [1.0, 1.0]])
    >>> K = EmpiricalOperator(lambda w, x: x @ w, jnp.ones(2), x)
    >>> K @ jnp.array([1.0, 0.0]), K.diagonal()
    (Array([1., 1.], dtype=float...), Array([1., 2.], dtype=float...))
    """

    arrays = "params", "x", "x2"
    static = "apply", "batch_size", "dtype"

    def __init__(
        self, apply: Apply, params: Any, x: Any, x2: Any = None, *, batch_size: int | None = None
    ):
        self.apply, self.batch_size = apply, batch_size
        self.params = without_explicit_axes(params)
        net, self.x, self.x2 = check_and_trace(apply, self.params, batch_size, x, x2)
        sample = jax.tree.map(lambda x: x[0], self.x)
        self.dtype = jax.eval_shape(net.outputs, net.inputs, sample).dtype
        self._programs = {}

    def _at(self, x):
        return EmpiricalOperator(self.apply, self.params, x, self.x, batch_size=self.batch_size)

    def _product(self, v):
        net = trace_network(self.apply, self.params, self.x)

        def product(v):
            return blocks.blockwise_vector_product(
                net, self.batch_size, net.inputs, self._of_columns, v, at=self.x
            )

        return jax.vmap(product, 1, 1)(v)

    def _columns(self, indices):
        chosen = jax.tree.map(lambda x: x[indices], self._of_columns)
        return empirical_kernel(self.apply, self.params, self.x, chosen, batch_size=self.batch_size)

    def _diagonal(self):
        return gradient_norms(self.apply, self.params, self.x, batch_size=self.batch_size)


def _check_operator_inputs(name: str, x: Any) -> jax.Array:
    x = checks.real_array(name, x)
    if x.ndim == 0 or not x.size:
        raise ValueError(f"{name}: expected inputs [n, ...] with n at least 1, got {x.shape}.")
    checks.check_finite(name, x, "inputs")
    return keeping_rows(x)


def _one(x):
    return jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype)
