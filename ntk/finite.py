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
such products, and if their gradients add up: ``ntk._uses`` and ``ntk._products``.

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
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from ntk import _compat, _layers
from ntk._checks import array, short, whole
from ntk._layers import Plan
from ntk._programs import program
from ntk._rows import blocks, joined, length, mapped, mesh_for, mirrored, sharded, transposed
from ntk._sample import Apply, Network, network

METHODS = "auto", "layerwise", "jacobian", "neural_tangents"
OUTPUTS = "sum", "trace", "full"

# --- Gradients, and their Gram matrices -----------------------------------------------------------


def _plan(net: Network, method: str) -> Plan | None:
    if method == "neural_tangents":
        return None
    plan = _layers.plan(net, factored=method != "jacobian")
    if method == "layerwise" and not plan.layered:
        raise ValueError(
            "method: expected an apply that multiplies by leaves of params for 'layerwise', got "
            "one in which no leaf is used in products alone."
        )
    return plan


_MUCH = 2**26  # bytes of per-sample gradients of which one should know


def _warn(net: Network, plan: Plan | None, outputs: str, rows: int):
    """Say which parameters cost memory, if they do."""
    o = 1 if outputs == "sum" else net.jaxpr.outvars[0].aval.size
    variables = [*net.jaxpr.constvars, *net.jaxpr.invars]
    cost = {
        name: rows * o * variables[i].aval.size * max(4, variables[i].aval.dtype.itemsize)
        for i, name in zip(net.trained, net.names, strict=True)
        if plan is not None and i in plan.rest
    }
    total = sum(cost.values())
    if total < _MUCH:
        return
    largest = sorted(cost, key=cost.__getitem__, reverse=True)
    named = [name for name in largest if cost[name] * 100 > total][:5]
    more = f" and {len(cost) - len(named)} more" if len(cost) > len(named) else ""
    warnings.warn(
        f"params: the gradients of {', '.join(named)}{more} are formed sample by sample, "
        f"{total / 1e9:.2g} GB at a time, because these are not used in products alone; "
        "a smaller batch_size takes less memory.",
        UserWarning,
        stacklevel=3,
    )


def _factors(net: Network, plan: Plan | None, outputs: str) -> tuple[Callable, Callable]:
    """``factors(inputs, x)`` and ``gram(inputs, factors, factors)``."""
    if plan is None:
        return lambda inputs, x: x, _neural_tangents(net, outputs)
    letters = _layers.FULL if outputs == "full" else _layers.TRACE

    def gram(inputs, left, right):
        return _layers.gram(plan, letters, left, right)

    return functools.partial(_layers.factors, plan, outputs), gram


def _neural_tangents(net: Network, outputs: str):
    nt = _compat.neural_tangents()

    def gram(inputs, x1, x2):
        def batch(trained, x):
            merged = net.merged(inputs, trained)
            y = jax.vmap(functools.partial(net, merged))(x)
            return y.sum(1, keepdims=True) if outputs == "sum" else y

        kernel = nt.empirical_ntk_fn(
            batch,
            trace_axes=(),
            vmap_axes=0,
            implementation=nt.NtkImplementation.NTK_VECTOR_PRODUCTS,
        )
        k = kernel(x1, x2, [inputs[i] for i in net.trained])
        return k if outputs == "full" else jnp.einsum("abii->ab", k)

    return gram


def _kernel(net, plan, outputs, batch_size, mesh, inputs, x1, x2):
    factors, gram = _factors(net, plan, outputs)
    n1, n2 = length(x1), length(x1 if x2 is None else x2)
    devices = 1 if mesh is None else mesh.size
    blocks1 = blocks(x1, min(batch_size or n1, -(-n1 // devices)), devices)
    t = length(blocks1)
    if x2 is None:
        # Row i of blocks takes columns i .. i + t/2, cyclically: each pair of blocks once (or
        # twice at a distance t/2), and every row the same work.
        blocks2, columns = blocks1, (np.arange(t)[:, None] + np.arange(t // 2 + 1)) % t
    else:
        blocks2 = blocks(x2, min(batch_size or n2, n2))
        columns = np.tile(np.arange(length(blocks2)), (t, 1))
    # Differentiated, a batched kernel forms each block again: otherwise it would hold them all.
    again = jax.checkpoint if batch_size else lambda function: function

    def rows(inputs, blocks1, columns, blocks2):
        @again
        def row(block_and_columns):
            block, columns = block_and_columns
            left = factors(inputs, block)

            @again
            def entry(column):
                return gram(
                    inputs, left, factors(inputs, jax.tree.map(lambda x: x[column], blocks2))
                )

            if x2 is not None:
                return mapped(entry, columns)
            diagonal = gram(inputs, left, left)[None]
            if len(columns) == 1:
                return diagonal
            return jnp.concatenate([diagonal, mapped(entry, columns[1:])])

        return mapped(row, (blocks1, columns))

    run = sharded(rows, mesh, P(), P("rows"), P("rows"), P())
    found = run(inputs, blocks1, jnp.asarray(columns), blocks2)
    if x2 is not None:
        return joined(found, n1, n2)
    row = np.arange(t)[:, None]
    both = jnp.zeros((t, t, *found.shape[2:]), found.dtype)
    both = both.at[columns, row].set(jax.vmap(jax.vmap(transposed))(found))
    return mirrored(joined(both.at[row, columns].set(found), n1, n1))


def _norms(net, plan, outputs, batch_size, mesh, inputs, x):
    factors, gram = _factors(net, plan, outputs)
    n, devices = length(x), 1 if mesh is None else mesh.size
    blocks_of_x = blocks(x, min(batch_size or n, -(-n // devices)), devices)

    def rows(inputs, blocks):
        def norms(block):
            if plan is None:
                one = jax.vmap(lambda x: jax.tree.map(lambda x: x[None], x))(block)
                return jax.vmap(lambda x: gram(inputs, x, x)[0, 0])(one)
            found = factors(inputs, block)
            return _layers.gram(plan, _layers.NORMS, found, found)

        return mapped(norms, blocks)

    return sharded(rows, mesh, P(), P("rows"))(inputs, blocks_of_x).reshape(-1)[:n]


def _product(net, batch_size, inputs, x, v):
    n = length(x)

    def outputs(trained, block):
        y = jax.vmap(functools.partial(net, net.merged(inputs, trained)))(block)
        return y.sum(1) if v.ndim == 1 else y

    trained = [inputs[i] for i in net.trained]
    out = jax.eval_shape(outputs, trained, x)
    if v.shape != out.shape:
        raise ValueError(f"v: expected the shape [n] or [n, o] = {list(out.shape)}, got {v.shape}.")
    size = min(batch_size or n, n)
    blocks_of_x, count = blocks(x, size), -(-n // size)
    cotangents = jnp.concatenate([v, jnp.zeros((count * size - n, *v.shape[1:]), v.dtype)])
    cotangents = cotangents.reshape(count, size, *v.shape[1:]).astype(out.dtype)

    def pull(total, block_and_cotangent):
        block, cotangent = block_and_cotangent
        _, pullback = jax.vjp(lambda trained: outputs(trained, block), trained)
        return jax.tree.map(jnp.add, total, pullback(cotangent)[0]), None

    zeros = jax.tree.map(jnp.zeros_like, trained)
    if count == 1:
        only = jax.tree.map(lambda x: x[0], blocks_of_x)
        direction, _ = pull(zeros, (only, cotangents[0]))
    else:
        direction, _ = lax.scan(pull, zeros, (blocks_of_x, cotangents))

    def push(block):
        return jax.jvp(lambda trained: outputs(trained, block), (trained,), (direction,))[1]

    return mapped(push, blocks_of_x).reshape(-1, *v.shape[1:])[:n]


# --- Public ---------------------------------------------------------------------------------------


def _one_of(name: str, value, allowed):
    if value not in allowed:
        expected = ", ".join(map(repr, allowed))
        raise ValueError(f"{name}: expected one of {expected}, got {value!r}.")


def _finite(name: str, tree):
    for leaf in jax.tree.leaves(tree):
        try:
            dtype = jnp.result_type(leaf)
        except TypeError:
            raise ValueError(f"{name}: expected arrays, got {short(leaf)}.") from None
        if not isinstance(leaf, jax.core.Tracer) and jnp.issubdtype(dtype, jnp.floating):
            with jax.ensure_compile_time_eval():  # where the caller traces other arguments
                finite = bool(jnp.isfinite(leaf).all())
            if not finite:
                raise ValueError(f"{name}: expected finite numbers, got NaN or infinity.")


def _samples(name: str, x, like=None):
    """A pytree of arrays with a leading axis of samples; a list is one array."""
    whole = isinstance(x, list) or all(np.ndim(leaf) == 0 for leaf in jax.tree.leaves(x))
    x = array(name, x) if whole else jax.tree.map(functools.partial(array, name), x)
    shapes = [leaf.shape for leaf in jax.tree.leaves(x)]
    got = shapes[0] if len(shapes) == 1 else shapes
    if any(shape[:1] in ((), (0,)) for shape in shapes):
        raise ValueError(f"{name}: expected samples [n, ...] with n at least 1, got {got}.")
    if len({shape[0] for shape in shapes}) > 1:
        raise ValueError(f"{name}: expected as many samples in every array, got the shapes {got}.")
    one = jax.tree.map(lambda x: x.shape[1:], x)
    if like is not None and one != (expected := jax.tree.map(lambda x: x.shape[1:], like)):
        raise ValueError(f"{name}: expected samples of the shape {expected}, got {one}.")
    _finite(name, x)
    return x


def _pair(x1, x2):
    """Both sets of samples, of the same types."""
    x1 = _samples("x1", x1)
    if x2 is None:
        return x1, None
    x2 = _samples("x2", x2, like=x1)
    types = jax.tree.map(jnp.result_type, x1, x2)
    return tuple(jax.tree.map(lambda x, t: x.astype(t), x, types) for x in (x1, x2))


def _rows_held(batch_size, x1, x2) -> int:
    """The most samples whose gradients are held at a time."""
    n1, n2 = length(x1), length(x1 if x2 is None else x2)
    first, second = min(batch_size or n1, n1), min(batch_size or n2, n2)
    return first if x2 is None and first == n1 else first + second


def _batch(batch_size):
    if batch_size is not None:
        whole("batch_size", batch_size, 1)


def empirical_kernel(
    apply: Apply,
    params,
    x1,
    x2=None,
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
        at a time. With a flax module's ``model.apply``, ``params`` are its variables, of which the
        collection ``"params"`` is differentiated; otherwise every leaf of floating point numbers.
    params : pytree
        Parameters.
    x1 : array, [n1, ...]
        Samples.
    x2 : array, [n2, ...], optional
        Samples of the columns; ``x1`` by default, with an exactly symmetric result.
    method : {"auto", "layerwise", "jacobian", "neural_tangents"}
        ``"layerwise"`` keeps the gradients of flax's Dense and Conv layers in factors, and takes
        the per-sample Jacobian of what other parameters there are. ``"jacobian"`` does so with
        all. ``"auto"`` is ``"layerwise"`` where it finds such layers, ``"jacobian"`` where not.
        ``"neural_tangents"`` is that package's implementation 2.
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
        ``"layerwise"`` finds no layer.

    Notes
    -----
    Let F and B be the cost of a forward and a backward pass of one sample, W the number of weights
    and w the width of all layers together. ``"layerwise"``: N(F + oB) + O(N² w) flops for dense
    layers, O(N w + N²) memory; a convolution of q positions q² times as much, or N² times its
    weights, whichever is cheaper. ``"jacobian"``: N(F + oB) + O(N² o W), memory N o W. In batches
    of b, memory is that of 2b samples, and the N(F + oB) is paid N/2b times (N/b with ``x2``).

    With several local devices, rows are divided among them, unless the caller has placed an array
    (``jax.device_put``) or traces this function: then the caller's placement stands.

    Batch normalisation other than flax's ``BatchNorm`` is not noticed: it gets the statistics of
    one sample. A ``jit``, ``vmap`` or ``scan`` within ``apply`` hides the layers in it from
    ``"layerwise"``, as do flax's lifted versions: right, but at the price of ``"jacobian"``.
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
    x1, x2 = _pair(x1, x2)
    _finite("params", params)
    net = network(apply, params, x1)
    plan = _plan(net, method)
    if method != "jacobian":
        _warn(net, plan, outputs, _rows_held(batch_size, x1, x2))
    run = functools.partial(_kernel, net, plan, outputs, batch_size, mesh_for(params, x1, x2))
    return program(run, net.inputs, x1, x2)(net.inputs, x1, x2)


def gradient_norms(
    apply: Apply,
    params,
    x,
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
    x : array, [n, ...]
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
        ``"layerwise"`` finds no layer.

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
    x = _samples("x", x)
    _finite("params", params)
    net = network(apply, params, x)
    plan = _plan(net, method)
    if method != "jacobian":
        _warn(net, plan, outputs, min(batch_size or length(x), length(x)))
    run = functools.partial(_norms, net, plan, outputs, batch_size, mesh_for(params, x))
    return program(run, net.inputs, x)(net.inputs, x)


def kernel_vector_product(
    apply: Apply, params, x, *, batch_size: int | None = None
) -> Callable[[jax.Array], jax.Array]:
    """The map ``v -> K v``, without ``K``.

    ``J (J' v)``: a backward pass, then one in forward mode.

    Parameters
    ----------
    apply : callable
        ``apply(params, x) -> [n, o]`` or ``[n]``, sample by sample.
    params : pytree
        Parameters.
    x : array, [n, ...]
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
    x = _samples("x", x)
    _finite("params", params)
    net = network(apply, params, x)  # as it is now, whatever becomes of apply
    run, programs = functools.partial(_product, net, batch_size), {}

    def product(v):
        v = jnp.asarray(v)
        if v.shape not in programs:
            programs[v.shape] = program(run, net.inputs, x, v)
        return programs[v.shape](net.inputs, x, v)

    return product
