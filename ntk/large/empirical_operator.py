"""The tangent kernel of a finite network as an operator: ``K v = J (J' v)``, without J itself."""

from typing import Any

import jax

from ntk.empirical import blocks
from ntk.empirical.kernels import check_and_trace, empirical_kernel, gradient_norms
from ntk.empirical.network_program import Apply, trace_network
from ntk.internal.sharding import without_explicit_axes
from ntk.large.kernel_operator import Operator, pytree


@pytree
class EmpiricalOperator(Operator):
    """The tangent kernel ``J(x) J(x2)'``, [n, n2], of a finite network's summed outputs.

    Parameters
    ----------
    apply : callable
        ``apply(params, x) -> [n, o]`` or ``[n]``, as for :func:`ntk.empirical_kernel`.
    params : pytree
    x : array, [n, ...], or pytree of such arrays
        Samples of the rows.
    x2 : like ``x``, [n2, ...], optional
        Samples of the columns. Default: ``x``.
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
    >>> import jax.numpy as jnp
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
