"""Empirical kernels of finite networks: the neural tangent kernel, and the NNGP kernel.

For a network ``f(θ, x)`` with outputs ``f_1 .. f_o``, the tangent kernel is the Gram matrix of its
per-sample parameter gradients,

    K(x, x')_ij = <∇_θ f_i(x), ∇_θ f_j(x')>,

summed over the leaves of θ. A layer ``y_p = W' a_p`` that acts on the positions ``p`` of its input
(one for a dense layer on vectors, one per patch for a convolution, one per token, one per step of a
recurrent network) has the gradient ``∇_W f = Σ_p a_p s_p'`` with the sensitivities
``s_p = ∂f/∂y_p``, and so contributes

    Σ_{p,q} <a_p(x), a_q(x')> <s_p(x), s_q(x')>,

with one position ``(A A') o (B B')``: no gradient of the size of ``W`` is ever formed. For a table
of which ``y_p`` is row ``t_p``, ``<a_p, a_q>`` is 1 where ``t_p = t_q``, otherwise 0. The method
``"layerwise"`` reads ``a`` and ``s`` off one backward pass per output. Where a layer has many
positions it forms the gradients after all, from ``a`` and ``s``, whichever is cheaper. What other
parameters there are it differentiates per sample.

Layers are not known by the names of a library: they are the products with a leaf of ``params`` in
the program (jaxpr) that JAX traces of ``apply``, through ``jit``, ``remat`` and ``scan``, with the
leaf reshaped, transposed, cut, or times a number on the way. A leaf counts only if all its uses are
such products, and if their gradients add up: ``ntk.empirical.weight_products`` and
``ntk.empirical.linear_operations``.

=============  =======================================================
letter         name
=============  =======================================================
f, θ           ``apply``, ``params``
a, A           a layer's inputs: ``columns``, [n, positions, groups, inputs per group]
s, B           sensitivities of its outputs, [n, o, positions, groups, outputs per group]
K              the kernel, [n1, n2] or [n1, n2, o, o]
=============  =======================================================

Samples pass one at a time (under ``vmap``), so they cannot interact: batch normalisation has to use
its running averages. References: Jacot, Gabriel & Hongler (2018), the kernel; Novak,
Sohl-Dickstein & Schoenholz, "Fast finite width neural tangent kernel" (ICML 2022), generic methods.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ntk.empirical import blocks
from ntk.empirical.network_program import Apply, trace_network
from ntk.internal.batched_rows import length, mesh_for
from ntk.internal.checks import check_finite, describe, float_array, integer, real_array
from ntk.internal.compile_cache import program
from ntk.internal.sharding import without_explicit_axes

METHODS = "auto", "layerwise", "jacobian", "neural_tangents"
OUTPUTS = "sum", "trace", "full"


def _one_of(name: str, value, allowed):
    if value not in allowed:
        expected = ", ".join(map(repr, allowed))
        raise ValueError(f"{name}: expected one of {expected}, got {value!r}.")


def _check_finite_arrays(name: str, tree):
    for leaf in jax.tree.leaves(tree):
        try:
            jnp.result_type(leaf)
        except TypeError:
            raise ValueError(f"{name}: expected arrays, got {describe(leaf)}.") from None
        check_finite(name, leaf)


def _check_samples(name: str, x, like=None):
    """A pytree of arrays with a leading axis of samples; a list is one array."""
    whole = isinstance(x, list) or all(np.ndim(leaf) == 0 for leaf in jax.tree.leaves(x))
    x = real_array(name, x) if whole else jax.tree.map(functools.partial(real_array, name), x)
    shapes = [leaf.shape for leaf in jax.tree.leaves(x)]
    got = shapes[0] if len(shapes) == 1 else shapes
    if any(shape[:1] in ((), (0,)) for shape in shapes):
        raise ValueError(f"{name}: expected samples [n, ...] with n at least 1, got {got}.")
    if len({shape[0] for shape in shapes}) > 1:
        raise ValueError(f"{name}: expected as many samples in every array, got the shapes {got}.")
    one = jax.tree.map(lambda x: x.shape[1:], x)
    if like is not None and one != (expected := jax.tree.map(lambda x: x.shape[1:], like)):
        raise ValueError(f"{name}: expected samples of the shape {expected}, got {one}.")
    _check_finite_arrays(name, x)
    return without_explicit_axes(x)


def _check_sample_pair(x1, x2):
    """Both sets of samples, of the same types."""
    x1 = _check_samples("x1", x1)
    if x2 is None:
        return x1, None
    x2 = _check_samples("x2", x2, like=x1)
    types = jax.tree.map(jnp.result_type, x1, x2)
    return tuple(jax.tree.map(lambda x, t: x.astype(t), x, types) for x in (x1, x2))


def _rows_held(batch_size, x1, x2) -> int:
    """The most samples whose gradients are held at a time."""
    n1, n2 = length(x1), length(x1 if x2 is None else x2)
    first, second = min(batch_size or n1, n1), min(batch_size or n2, n2)
    return first if x2 is None and first == n1 else first + second


def _batch(batch_size):
    if batch_size is not None:
        integer("batch_size", batch_size, 1)


def empirical_kernel(
    apply: Apply,
    params: Any,
    x1: Any,
    x2: Any = None,
    *,
    method: str = "auto",
    outputs: str = "sum",
    batch_size: int | None = None,
) -> jax.Array:
    """Empirical neural tangent kernel ``K = J J'`` of ``apply(params, x)``.

    Parameters
    ----------
    apply : callable
        ``apply(params, x) -> [n, o]`` or ``[n]``, sample by sample: it is called with one sample
        at a time. It may return a pytree of such arrays, whose outputs are all counted in the order
        of its leaves. With a flax module's ``model.apply``, ``params`` are its variables, of which
        the collection ``"params"`` is differentiated; otherwise every leaf of floating point
        numbers.
    params : pytree
        Parameters.
    x1 : array, [n1, ...], or pytree of such arrays
        Samples. A list is one array.
    x2 : like ``x1``, [n2, ...], optional
        Samples of the columns; ``x1`` by default, with an exactly symmetric result.
    method : {"auto", "layerwise", "jacobian", "neural_tangents"}
        ``"layerwise"`` keeps the gradients of matrices, filters and tables in factors, where they
        are used in products alone, and takes the per-sample Jacobian of what other parameters there
        are. ``"jacobian"`` does so with all. ``"auto"`` is ``"layerwise"`` where it finds such
        products, ``"jacobian"`` where not. ``"neural_tangents"`` is that package's
        implementation 2.
    outputs : {"sum", "trace", "full"}
        ``"sum"``: of the scalar ``Σ_i f_i``, ``Σ_ij K_ij``: the kernel of a surrogate with one
        output, and *the* kernel where o = 1. ``"trace"``: ``Σ_i K_ii``. ``"full"``: all ``K_ij``.
    batch_size : int, optional
        Rows and columns handled at a time; all by default.

    Returns
    -------
    array, [n1, n2], or [n1, n2, o, o] with ``outputs="full"``

    Raises
    ------
    ValueError
        If an argument is out of its range, samples or parameters are not finite, ``apply`` does
        not return one row for one sample or takes batch statistics (flax's BatchNorm), or
        ``"layerwise"`` finds no product.

    Warns
    -----
    UserWarning
        If per-sample gradients take much memory though the method is ``"auto"`` or
        ``"layerwise"``, once for a call.

    Notes
    -----
    Let F and B be the cost of a forward and a backward pass of one sample, W the number of weights
    and w the width of all layers together. ``"layerwise"``: N(F + oB) + O(N² w) flops for dense
    layers, O(N w + N²) memory; a layer of q positions q² times as much, or N² times its weights,
    whichever is cheaper. ``"jacobian"``: N(F + oB) + O(N² o W), memory N o W. In batches
    of b, memory is that of 2b samples, and the N(F + oB) is paid N/2b times (N/b with ``x2``).

    With several local devices, rows are divided among them, unless the caller has placed an array
    (``jax.device_put``) or traces this function: then the caller's placement stands.

    Products are found whatever library ``apply`` is written with: flax (linen, nnx), equinox, plain
    functions; in ``jit``, ``vmap``, ``remat`` and ``scan``, over time as over layers. Left to the
    Jacobian are weights that are normalised, masked, or used as they are and transposed; those in
    ``cond`` and ``while``; and those that enter a function with a derivative rule of its own.
    Biases and scales are, too, at little cost. Where gradients of such parameters take over 64 MB,
    a ``UserWarning`` names them.

    Batch normalisation other than flax's ``BatchNorm`` (linen, nnx) is not noticed, nor in what
    was traced before: on batch statistics it gets those of one sample.
    ``apply`` is traced at every call, as the function that it is then, and compiled where it is
    not the program of an earlier call. ``jax.jit`` around the call spares the tracing too.

    References
    ----------
    Jacot, Gabriel & Hongler (2018); Novak, Sohl-Dickstein & Schoenholz (ICML 2022), section 3.

    Examples
    --------
    >>> apply = lambda w, x: x @ w
    >>> empirical_kernel(apply, jnp.ones(2), jnp.array([[1.0, 0.0], [1.0, 1.0]]))
    Array([[1., 1.],
           [1., 2.]], dtype=float...)
    """
    _one_of("method", method, METHODS)
    _one_of("outputs", outputs, OUTPUTS)
    _batch(batch_size)
    x1, x2 = _check_sample_pair(x1, x2)
    _check_finite_arrays("params", params)
    net = trace_network(apply, params, x1)
    plan = blocks.plan_for_method(net, method)
    if method != "jacobian":
        blocks.warn_about_memory(net, plan, outputs, _rows_held(batch_size, x1, x2))
    run = functools.partial(
        blocks.blockwise_kernel, net, plan, outputs, batch_size, mesh_for(params, x1, x2)
    )
    return program(run, net.inputs, x1, x2)(net.inputs, x1, x2)


def gradient_norms(
    apply: Apply,
    params: Any,
    x: Any,
    *,
    method: str = "auto",
    outputs: str = "sum",
    batch_size: int | None = None,
) -> jax.Array:
    """Squared gradient norms ``|∇_θ f(x_a)|²``: the diagonal of the kernel, without the rest.

    Parameters
    ----------
    apply : callable
        ``apply(params, x) -> [n, o]`` or ``[n]``, sample by sample.
    params : pytree
        Parameters.
    x : array, [n, ...], or pytree of such arrays
        Samples.
    method : {"auto", "layerwise", "jacobian", "neural_tangents"}
        As for :func:`empirical_kernel`.
    outputs : {"sum", "trace"}
        ``"sum"``: of the sum of the outputs; ``"trace"``: summed over the outputs.
    batch_size : int, optional
        Samples handled at a time; all by default.

    Returns
    -------
    array, [n]
        Its sum is the trace of the kernel.

    Raises
    ------
    ValueError
        If an argument is out of its range, samples or parameters are not finite, ``apply`` does
        not return one row for one sample or takes batch statistics (flax's BatchNorm), or
        ``"layerwise"`` finds no product.

    Warns
    -----
    UserWarning
        If per-sample gradients take much memory though the method is ``"auto"`` or
        ``"layerwise"``, once for a call.

    Notes
    -----
    N(F + oB) flops in the terms of :func:`empirical_kernel`, and less on top; memory O(N w) for
    dense layers, N o times a layer's weights for some convolutions: ``batch_size`` bounds it.

    Examples
    --------
    >>> gradient_norms(lambda w, x: x @ w, jnp.ones(2), jnp.array([[1.0, 0.0], [1.0, 2.0]]))
    Array([1., 5.], dtype=float...)
    """
    _one_of("method", method, METHODS)
    _one_of("outputs", outputs, ("sum", "trace"))
    _batch(batch_size)
    x = _check_samples("x", x)
    _check_finite_arrays("params", params)
    net = trace_network(apply, params, x)
    plan = blocks.plan_for_method(net, method)
    if method != "jacobian":
        blocks.warn_about_memory(net, plan, outputs, min(batch_size or length(x), length(x)))
    run = functools.partial(blocks.norms, net, plan, outputs, batch_size, mesh_for(params, x))
    return program(run, net.inputs, x)(net.inputs, x)


def empirical_nngp(
    apply: Apply,
    params: Any,
    x1: Any,
    x2: Any = None,
    *,
    outputs: str = "mean",
    batch_size: int | None = None,
) -> jax.Array:
    """Empirical NNGP kernel, the products of the outputs of ``apply(params, x)``.

    ``K(x, x') = (1 / o) Σ_i f_i(x) f_i(x')``: for independent outputs of mean 0, an estimate of
    their covariance under the distribution that ``params`` were drawn from, which is the kernel of
    the Gaussian process that the network is at infinite width.

    Parameters
    ----------
    apply : callable
        As for :func:`empirical_kernel`.
    params : pytree
        Parameters.
    x1 : array, [n1, ...], or pytree of such arrays
        Samples.
    x2 : like ``x1``, optional
        Samples of the columns; ``x1`` by default, with an exactly symmetric result.
    outputs : {"mean", "full"}
        ``"mean"`` over the outputs, or ``"full"``: all products ``f_i(x) f_j(x')``.
    batch_size : int, optional
        Samples handled at a time; all by default.

    Returns
    -------
    array, [n1, n2], or [n1, n2, o, o] with ``outputs="full"``

    Raises
    ------
    ValueError
        If an argument is out of its range, samples or parameters are not finite, or ``apply`` does
        not return one row for one sample or takes batch statistics.

    Notes
    -----
    One forward pass of each sample, and memory for one of ``batch_size``. One network's estimate
    has a relative error of the order ``1 / sqrt(o)``: average over networks, or take the last
    hidden layer as outputs.

    References
    ----------
    Lee et al. (2018), "Deep neural networks as Gaussian processes". neural-tangents'
    ``empirical_nngp_fn`` has the same conventions.

    Examples
    --------
    >>> empirical_nngp(lambda w, x: x @ w, 2 * jnp.eye(2), jnp.array([[1.0, 0.0], [1.0, 1.0]]))
    Array([[2., 2.],
           [2., 4.]], dtype=float...)
    """
    _one_of("outputs", outputs, ("mean", "full"))
    _batch(batch_size)
    x1, x2 = _check_sample_pair(x1, x2)
    _check_finite_arrays("params", params)
    net = trace_network(apply, params, x1)
    run = functools.partial(blocks.nngp, net, outputs, batch_size)
    return program(run, net.inputs, x1, x2)(net.inputs, x1, x2)


def kernel_vector_product(
    apply: Apply, params: Any, x: Any, *, batch_size: int | None = None
) -> Callable[[jax.Array], jax.Array]:
    """The map ``v -> K v``, without ``K``.

    ``J (J' v)``: a backward pass, then one in forward mode.

    Parameters
    ----------
    apply : callable
        ``apply(params, x) -> [n, o]`` or ``[n]``, sample by sample.
    params : pytree
        Parameters.
    x : array, [n, ...], or pytree of such arrays
        Samples.
    batch_size : int, optional
        Samples handled at a time; all by default.

    Returns
    -------
    callable
        Takes ``v`` [n], for the kernel of the summed outputs, or [n, o], for all of it:
        ``(K v)_ai = Σ_bj K(x_a, x_b)_ij v_bj``. Returns the same shape.

    Raises
    ------
    ValueError
        If samples or parameters are not finite, or ``apply`` does not return one row for one
        sample or takes batch statistics; when called, if ``v`` has another shape.

    Notes
    -----
    About 5 forward passes of all samples; memory one copy of the parameters and the activations
    of ``batch_size`` samples.

    Examples
    --------
    >>> product = kernel_vector_product(lambda w, x: x @ w, jnp.ones(2), jnp.eye(2))
    >>> product(jnp.array([3.0, 4.0]))
    Array([3., 4.], dtype=float...)
    """
    _batch(batch_size)
    x = _check_samples("x", x)
    _check_finite_arrays("params", params)
    net = trace_network(apply, params, x)  # as it is now, whatever becomes of apply
    run, programs = functools.partial(blocks.blockwise_vector_product, net, batch_size), {}

    def product(v):
        v = without_explicit_axes(float_array("v", v))
        kind = jax.typeof(v)
        if kind not in programs:
            programs[kind] = program(run, net.inputs, x, v)
        return programs[kind](net.inputs, x, v)

    return product
