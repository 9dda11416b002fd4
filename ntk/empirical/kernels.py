"""Empirical kernels of finite networks: the neural tangent kernel, and the NNGP kernel.

For a network ``f(θ, x)`` with outputs ``f_1 .. f_o``, the tangent kernel is the Gram matrix of its
per-sample parameter gradients,

    K(x, x')_ij = <∇_θ f_i(x), ∇_θ f_j(x')>,

summed over the leaves of θ. A layer ``y_p = W' a_p`` acts on the positions ``p`` of its input: one
for a dense layer, one per patch, token, or step of a recurrent network. With the sensitivities
``s_p = ∂f/∂y_p`` it has the gradient ``∇_W f = Σ_p a_p s_p'``, and contributes

    Σ_{p,q} <a_p(x), a_q(x')> <s_p(x), s_q(x')>,

with one position ``(A A') o (B B')``: no gradient of the size of ``W`` is formed. For a table with
``y_p`` in row ``t_p``, ``<a_p, a_q>`` is 1 if ``t_p = t_q``, otherwise 0. The method
``"layerwise"`` reads ``a`` and ``s`` off one backward pass per output. For many positions it forms
the gradients from ``a`` and ``s`` if that is cheaper. It differentiates other parameters per
sample. :mod:`ntk.empirical.weight_products` finds the layers in the program (jaxpr) of ``apply``.

=============  =======================================================
letter         name
=============  =======================================================
f, θ           ``apply``, ``params``
a, A           a layer's inputs: ``columns``, [n, positions, groups, inputs per group]
s, B           sensitivities of its outputs, [n, o, positions, groups, outputs per group]
K              the kernel, [n1, n2] or [n1, n2, o, o]
=============  =======================================================
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ntk.empirical import blocks
from ntk.empirical.factored_gradients import plan_gradients
from ntk.empirical.network_program import Apply, NetworkProgram, array_dtype, trace_network
from ntk.internal.batched_rows import length
from ntk.internal.checks import check_finite, float_array, integer, one_of, real_array
from ntk.internal.compile_cache import program
from ntk.internal.sharding import mesh_for, without_explicit_axes

METHODS = "auto", "layerwise", "jacobian", "neural_tangents"
OUTPUTS = "sum", "trace", "full"


def _check_finite_arrays(name: str, tree):
    for leaf in jax.tree.leaves(tree):
        array_dtype(name, leaf)  # raises for leaves that are not arrays
        check_finite(name, leaf)


def _check_samples(name: str, x, like=None):
    """Return a pytree of arrays with a leading axis of samples; a list is one array."""
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


def check_and_trace(
    apply: Apply, params: Any, batch_size: int | None, x1: Any, x2: Any = None, name: str = "x1"
) -> tuple[NetworkProgram, Any, Any]:
    """Check the shared arguments; return the network's program and samples of the same dtypes."""
    if batch_size is not None:
        integer("batch_size", batch_size, 1)
    x1 = _check_samples(name, x1)
    if x2 is not None:
        x2 = _check_samples("x2", x2, like=x1)
        types = jax.tree.map(jnp.result_type, x1, x2)
        x1, x2 = (jax.tree.map(lambda x, t: x.astype(t), x, types) for x in (x1, x2))
    _check_finite_arrays("params", params)
    return trace_network(apply, params, x1), x1, x2


def _rows_held(batch_size, x1, x2) -> int:
    """Return the largest number of samples with gradients in memory together."""
    n1, n2 = length(x1), length(x1 if x2 is None else x2)
    first, second = min(batch_size or n1, n1), min(batch_size or n2, n2)
    return first if x2 is None and first == n1 else first + second


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
    """Compute the empirical neural tangent kernel ``K = J J'`` of ``apply(params, x)``.

    Parameters
    ----------
    apply : callable
        ``apply(params, x) -> [n, o]`` or ``[n]``, sample by sample: it is called with one sample at
        a time. It may return a pytree of such arrays, which are concatenated. With a flax
        module's ``model.apply``, ``params`` are its variables, and only the collection ``"params"``
        is differentiated; otherwise every leaf of floating point numbers.
    params : pytree
    x1 : array, [n1, ...], or pytree of such arrays
        Samples. A list is one array.
    x2 : like ``x1``, [n2, ...], optional
        Samples of the columns. Default: ``x1``, with an exactly symmetric result.
    method : {"auto", "layerwise", "jacobian", "neural_tangents"}
        ``"layerwise"`` keeps the gradients of matrices, filters and tables in factors if they are
        used in products alone, and takes the per-sample Jacobian of other parameters.
        ``"jacobian"`` takes the Jacobian of all parameters. ``"auto"`` is ``"layerwise"`` if there
        are such products, else ``"jacobian"``. ``"neural_tangents"``: its implementation 2.
    outputs : {"sum", "trace", "full"}
        ``"sum"``: the kernel of the scalar ``Σ_i f_i``, ``Σ_ij K_ij``; for o = 1 it is *the*
        kernel. ``"trace"``: ``Σ_i K_ii``. ``"full"``: all ``K_ij``, [n1, n2, o, o].
    batch_size : int, optional
        Rows and columns handled at a time; all by default.

    Raises
    ------
    ValueError
        If an argument is out of its range, samples or parameters are not finite, ``apply`` does not
        return one row for one sample or takes batch statistics (flax's BatchNorm), or
        ``"layerwise"`` finds no product.

    Warns
    -----
    UserWarning
        If per-sample gradients, except with ``"jacobian"``, take over 64 MB. It names the leaves.

    Notes
    -----
    Let F and B be the cost of a forward and a backward pass of one sample, W the number of weights
    and w the width of all layers together. ``"layerwise"``: N(F + oB) + O(N² w) flops for dense
    layers, O(N w + N²) memory; a layer of q positions q² times as much, or N² times its weights,
    whichever is cheaper. ``"jacobian"``: N(F + oB) + O(N² o W), memory N o W. In batches of b,
    memory is that of 2b samples, and the N(F + oB) is paid N/2b times (N/b with ``x2``). Methods:
    Novak, Sohl-Dickstein & Schoenholz, "Fast finite width neural tangent kernel" (ICML 2022),
    section 3; kernel: Jacot, Gabriel & Hongler (2018).

    The rows are divided over all local devices, unless the caller has placed an array
    (``jax.device_put``) or traces this function.

    The Jacobian takes weights that are normalised, masked, or used in two orientations; weights in
    ``cond`` and ``while``; weights that enter a function with its own derivative rule; and, at
    little cost, biases and scales.

    Only flax's ``BatchNorm`` (linen, nnx) is detected, and only in functions that are traced here.
    Other batch normalisation uses the statistics of one sample. ``apply`` is traced at every call,
    and compiled if its program is new. ``jax.jit`` around the call saves the tracing too.

    Examples
    --------
    >>> apply = lambda w, x: x @ w
    >>> empirical_kernel(apply, jnp.ones(2), jnp.array([[1.0, 0.0], [1.0, 1.0]]))
    Array([[1., 1.],
           [1., 2.]], dtype=float...)
    """
    one_of("method", method, METHODS)
    one_of("outputs", outputs, OUTPUTS)
    net, x1, x2 = check_and_trace(apply, params, batch_size, x1, x2)
    plan = blocks.plan_for_method(net, method)
    if method != "jacobian":
        blocks.warn_about_memory(net, plan, outputs, _rows_held(batch_size, x1, x2))
    run = functools.partial(
        blocks.blockwise_kernel, net, plan, outputs, batch_size, mesh_for(params, x1, x2)
    )
    return program(run, net.inputs, x1, x2)(net.inputs, x1, x2)


def gradient_norms(
    apply: Apply, params: Any, x: Any, *, outputs: str = "sum", batch_size: int | None = None
) -> jax.Array:
    """Return squared gradient norms ``|∇_θ f(x_a)|²`` [n]: the diagonal of the kernel.

    ``outputs`` is "sum" or "trace". It costs N(F + oB) flops and a little more. Memory: O(N w) for
    dense layers, N o times a layer's weights for some convolutions; ``batch_size`` bounds it.
    """
    one_of("outputs", outputs, ("sum", "trace"))
    net, x, _ = check_and_trace(apply, params, batch_size, x, name="x")
    plan = plan_gradients(net, factored=True)
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
    """Compute the empirical NNGP kernel: products of the outputs of ``apply(params, x)``.

    ``K(x, x') = (1 / o) Σ_i f_i(x) f_i(x')``. For independent outputs of mean 0 it estimates their
    covariance over ``params``, the kernel of the Gaussian process at infinite width.

    Parameters
    ----------
    apply, params, x1, x2
        See :func:`empirical_kernel`.
    outputs : {"mean", "full"}
        ``"mean"`` over outputs, [n1, n2], or all ``f_i(x) f_j(x')``, [n1, n2, o, o].
    batch_size : int, optional
        Samples handled at a time; all by default.

    Raises
    ------
    ValueError
        If an argument is out of its range, samples or parameters are not finite, or ``apply`` does
        not return one row for one sample or takes batch statistics.

    Notes
    -----
    One forward pass of each sample, and memory for ``batch_size`` passes. One network's estimate
    has a relative error of the order ``1 / sqrt(o)``: average over networks, or take the last
    hidden layer as outputs. The conventions are those of neural-tangents' ``empirical_nngp_fn``.
    Source: Lee et al. (2018), "Deep neural networks as Gaussian processes".

    Examples
    --------
    >>> empirical_nngp(lambda w, x: x @ w, 2 * jnp.eye(2), jnp.array([[1.0, 0.0], [1.0, 1.0]]))
    Array([[2., 2.],
           [2., 4.]], dtype=float...)
    """
    one_of("outputs", outputs, ("mean", "full"))
    net, x1, x2 = check_and_trace(apply, params, batch_size, x1, x2)
    run = functools.partial(blocks.nngp, net, outputs, batch_size)
    return program(run, net.inputs, x1, x2)(net.inputs, x1, x2)


def kernel_vector_product(
    apply: Apply, params: Any, x: Any, *, batch_size: int | None = None
) -> Callable[[jax.Array], jax.Array]:
    """Return the map ``v -> K v = J (J' v)``, without ``K``: a backward and a forward-mode pass.

    Parameters
    ----------
    apply, params, x
        See :func:`empirical_kernel`; ``x`` are samples [n, ...].
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
    About 5 forward passes; memory: the parameters and the activations of ``batch_size`` samples.

    Examples
    --------
    >>> product = kernel_vector_product(lambda w, x: x @ w, jnp.ones(2), jnp.eye(2))
    >>> product(jnp.array([3.0, 4.0]))
    Array([3., 4.], dtype=float...)
    """
    # The program is traced once, so later changes of apply do not matter.
    net, x, _ = check_and_trace(apply, params, batch_size, x, name="x")
    run, programs = functools.partial(blocks.blockwise_vector_product, net, batch_size), {}

    def product(v):
        v = without_explicit_axes(float_array("v", v))
        kind = jax.typeof(v)
        if kind not in programs:
            programs[kind] = program(run, net.inputs, x, v)
        return programs[kind](net.inputs, x, v)

    return product
