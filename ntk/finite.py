"""Empirical neural tangent kernels of finite networks.

For a network ``f(θ, x)`` with outputs ``f_1 .. f_o``, the kernel is the Gram matrix of its
per-sample parameter gradients,

    K(x, x')_ij = <∇_θ f_i(x), ∇_θ f_j(x')>,

summed over the leaves of θ. A layer ``y_p = W' a_p`` that acts on the positions ``p`` of its input
(one for a dense layer on vectors, one per patch for a convolution) has the gradient
``∇_W f = Σ_p a_p s_p'`` with the sensitivities ``s_p = ∂f/∂y_p``, and so contributes

    Σ_{p,q} <a_p(x), a_q(x')> <s_p(x), s_q(x')>,

with one position ``(A A') o (B B')``: no gradient of the size of ``W`` is ever formed. The method
``"layerwise"`` reads ``a`` and ``s`` of flax's Dense and Conv layers off one backward pass per
output. Where a layer has many positions it forms the gradients after all, from patches, whichever
is cheaper. What other parameters there are it differentiates per sample.

Which parameters a layer owns is not guessed from names: a call counts if the arrays that it reads
*are* leaves of ``params``, and if the outputs depend on these leaves through such calls only.
Normalised or tied weights, overridden layers, and layers inside ``nn.scan``, ``nn.remat``,
``nn.jit``, or a ``vmap``, ``jit`` or ``scan`` of the caller's, are left to the per-sample Jacobian.

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
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from ntk import _checks, _compat, _layers
from ntk._checks import array, short, whole
from ntk._programs import program

Apply = Callable[[Any, jax.Array], jax.Array]

METHODS = "auto", "layerwise", "jacobian", "neural_tangents"
OUTPUTS = "sum", "trace", "full"

# --- One sample's outputs, as a function of the leaves that are trained ---------------------------


def _refuse_batch_statistics(next_function, args, kwargs, context):
    if isinstance(context.module, nn.BatchNorm) and context.method_name == "__call__":
        given = args[1] if len(args) > 1 else kwargs.get("use_running_average")
        if not nn.merge_param("use_running_average", context.module.use_running_average, given):
            raise ValueError(
                "apply: expected BatchNorm with use_running_average=True, "
                "got batch statistics, through which samples interact."
            )
    return next_function(*args, **kwargs)


def _split(apply: Apply, params) -> tuple[list, Callable]:
    """The trained leaves of ``params``, and ``forward(leaves, x)`` for one sample ``x``."""
    _checks.function("apply", apply, "(params, x) -> [n, o]")
    variables = isinstance(getattr(apply, "__self__", None), nn.Module)
    if variables and "params" not in params:
        raise ValueError(
            "params: expected the variables {'params': ...} of the flax module, "
            f"got {jax.tree.structure(params)}."
        )
    flat, structure = jax.tree.flatten(params["params"] if variables else params)
    trained = [i for i, x in enumerate(flat) if jnp.issubdtype(jnp.result_type(x), jnp.floating)]
    if not trained:
        raise ValueError("params: expected at least one leaf of floating point numbers, got none.")

    def forward(leaves, x):
        merged = list(flat)
        for i, leaf in zip(trained, leaves, strict=True):
            merged[i] = leaf
        tree = jax.tree.unflatten(structure, merged)
        with nn.intercept_methods(_refuse_batch_statistics):
            y = apply({**params, "params": tree} if variables else tree, x[None])
        shape = jnp.shape(y)
        if shape[:1] != (1,):
            raise ValueError(
                f"apply: expected outputs [n, o] or [n], got the shape {shape} for n = 1."
            )
        return y[0].reshape(-1)

    return [flat[i] for i in trained], forward


# --- Rows in batches and over devices -------------------------------------------------------------


def _map(function, xs):
    """``lax.map`` without a loop around a single step."""
    if len(jax.tree.leaves(xs)[0]) == 1:
        only = function(jax.tree.map(lambda x: x[0], xs))
        return jax.tree.map(lambda y: y[None], only)
    return lax.map(function, xs)


def _blocks(x, size: int, multiple: int = 1):
    """Rows in blocks [blocks, size, ...]; the last ones are filled up with the first row."""
    count = -(-len(x) // (size * multiple)) * multiple
    filler = jnp.broadcast_to(x[:1], (count * size - len(x), *x.shape[1:]))
    return jnp.concatenate([x, filler]).reshape(count, size, *x.shape[1:])


def _transposed(k):
    """``K(x', x)_ji`` for ``K(x, x')_ij``."""
    return k.T if k.ndim == 2 else k.transpose(1, 0, 3, 2)


def _mirrored(k):
    """Exactly symmetric: the lower triangle replaced by the upper one."""
    n, o = k.shape[0], k.shape[2:3]
    index = np.arange(n * math.prod(o)).reshape(n, 1, *o, *(1 for _ in o))
    return jnp.where(index <= _transposed(index), k, _transposed(k))


def _joined(blocks, n1: int, n2: int):
    """[t1, t2, b1, b2, ...] to [n1, n2, ...]."""
    t1, t2, b1, b2 = blocks.shape[:4]
    return jnp.swapaxes(blocks, 1, 2).reshape(t1 * b1, t2 * b2, *blocks.shape[4:])[:n1, :n2]


def _sharded(function, mesh, *specs):
    if mesh is None:
        return function
    # Samples are independent: no device needs another's. Without check_vma, which would sum the
    # sensitivities of perturbations that are the same everywhere.
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P("rows"), check_vma=False)


def _method(apply, method, outputs, params, x):
    """``leaves``, ``factors(leaves, x)``, ``gram(leaves, factors, factors)`` and the plan."""
    leaves, forward = _split(apply, params)
    if method == "neural_tangents":
        return leaves, lambda leaves, x: x, _neural_tangents(forward, outputs), None
    sample = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    plan = _layers.plan(forward, leaves, sample, intercept=method != "jacobian")
    if method == "layerwise" and not plan.layered:
        raise ValueError(
            "method: expected an apply that calls flax's Dense or Conv on leaves of params for "
            "'layerwise', got one that does not."
        )
    factors = functools.partial(_layers.factors, forward, plan, outputs)
    return leaves, factors, functools.partial(_layers.gram, plan, outputs == "full"), plan


def _neural_tangents(forward, outputs: str):
    nt = _compat.neural_tangents()

    def batch(leaves, x):
        y = jax.vmap(functools.partial(forward, leaves))(x)
        return y.sum(1, keepdims=True) if outputs == "sum" else y

    kernel = nt.empirical_ntk_fn(
        batch,
        trace_axes=(),
        vmap_axes=0,
        implementation=nt.NtkImplementation.NTK_VECTOR_PRODUCTS,
    )

    def gram(leaves, x1, x2):
        k = kernel(x1, x2, leaves)
        return k if outputs == "full" else jnp.einsum("abii->ab", k)

    return gram


def _kernel(apply, method, outputs, batch_size, mesh, params, x1, x2):
    leaves, factors, gram, _ = _method(apply, method, outputs, params, x1)
    devices = 1 if mesh is None else mesh.size
    blocks1 = _blocks(x1, min(batch_size or len(x1), -(-len(x1) // devices)), devices)
    t = len(blocks1)
    if x2 is None:
        # Row i of blocks takes columns i .. i + t/2, cyclically: each pair of blocks once (or
        # twice at a distance t/2), and every row the same work.
        blocks2, columns = blocks1, (np.arange(t)[:, None] + np.arange(t // 2 + 1)) % t
    else:
        blocks2 = _blocks(x2, min(batch_size or len(x2), len(x2)))
        columns = np.tile(np.arange(len(blocks2)), (t, 1))
    # Differentiated, a batched kernel forms each block again: otherwise it would hold them all.
    again = jax.checkpoint if batch_size else lambda function: function

    def rows(leaves, blocks1, columns, blocks2):
        @again
        def row(block_and_columns):
            block, columns = block_and_columns
            left = factors(leaves, block)

            @again
            def entry(column):
                return gram(leaves, left, factors(leaves, blocks2[column]))

            if x2 is not None:
                return _map(entry, columns)
            diagonal = gram(leaves, left, left)[None]
            if len(columns) == 1:
                return diagonal
            return jnp.concatenate([diagonal, _map(entry, columns[1:])])

        return _map(row, (blocks1, columns))

    run = _sharded(rows, mesh, P(), P("rows"), P("rows"), P())
    found = run(leaves, blocks1, jnp.asarray(columns), blocks2)
    if x2 is not None:
        return _joined(found, len(x1), len(x2))
    row = np.arange(t)[:, None]
    both = jnp.zeros((t, t, *found.shape[2:]), found.dtype)
    both = both.at[columns, row].set(jax.vmap(jax.vmap(_transposed))(found))
    return _mirrored(_joined(both.at[row, columns].set(found), len(x1), len(x1)))


def _norms(apply, method, outputs, batch_size, mesh, params, x):
    leaves, factors, gram, plan = _method(apply, method, outputs, params, x)
    devices = 1 if mesh is None else mesh.size
    blocks = _blocks(x, min(batch_size or len(x), -(-len(x) // devices)), devices)

    def rows(leaves, blocks):
        def norms(block):
            if plan is None:
                return jax.vmap(lambda x: gram(leaves, x[None], x[None])[0, 0])(block)
            return _layers.squared_norms(plan, leaves, factors(leaves, block))

        return _map(norms, blocks)

    return _sharded(rows, mesh, P(), P("rows"))(leaves, blocks).reshape(-1)[: len(x)]


def _product(forward, batch_size, leaves, x, v):
    def outputs(leaves, block):
        y = jax.vmap(functools.partial(forward, leaves))(block)
        return y.sum(1) if v.ndim == 1 else y

    out = jax.eval_shape(outputs, leaves, x)
    if v.shape != out.shape:
        raise ValueError(f"v: expected the shape [n] or [n, o] = {list(out.shape)}, got {v.shape}.")
    size = min(batch_size or len(x), len(x))
    blocks, count = _blocks(x, size), -(-len(x) // size)
    cotangents = jnp.concatenate([v, jnp.zeros((count * size - len(v), *v.shape[1:]), v.dtype)])
    cotangents = cotangents.reshape(count, size, *v.shape[1:]).astype(out.dtype)

    def pull(total, block_and_cotangent):
        block, cotangent = block_and_cotangent
        _, pullback = jax.vjp(lambda leaves: outputs(leaves, block), leaves)
        return jax.tree.map(jnp.add, total, pullback(cotangent)[0]), None

    zeros = jax.tree.map(jnp.zeros_like, leaves)
    if count == 1:
        direction, _ = pull(zeros, (blocks[0], cotangents[0]))
    else:
        direction, _ = lax.scan(pull, zeros, (blocks, cotangents))

    def push(block):
        return jax.jvp(lambda leaves: outputs(leaves, block), (leaves,), (direction,))[1]

    return _map(push, blocks).reshape(-1, *v.shape[1:])[: len(x)]


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
    x = array(name, x)
    if x.ndim == 0 or len(x) == 0:
        raise ValueError(f"{name}: expected samples [n, ...] with n at least 1, got {x.shape}.")
    if like is not None and x.shape[1:] != like.shape[1:]:
        raise ValueError(
            f"{name}: expected samples of the shape {like.shape[1:]}, got {x.shape[1:]}."
        )
    _finite(name, x)
    return x


def _batch(batch_size):
    if batch_size is not None:
        whole("batch_size", batch_size, 1)


def _mesh(*arrays) -> jax.sharding.Mesh | None:
    """All local devices, unless the caller has placed the arrays, or traces them."""
    devices = jax.local_devices()
    leaves = jax.tree.leaves(arrays)
    placed = any(isinstance(x, jax.core.Tracer) or getattr(x, "committed", False) for x in leaves)
    if len(devices) == 1 or placed or getattr(jax.config, "jax_default_device", None) is not None:
        return None
    return jax.sharding.Mesh(np.array(devices), ("rows",))


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
    x1 = _samples("x1", x1)
    x2 = None if x2 is None else _samples("x2", x2, like=x1)
    _finite("params", params)
    mesh = _mesh(params, x1, x2)
    run = functools.partial(_kernel, apply, method, outputs, batch_size, mesh)
    return program(run, params, x1, x2)(params, x1, x2)


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
    run = functools.partial(_norms, apply, method, outputs, batch_size, _mesh(params, x))
    return program(run, params, x)(params, x)


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
    leaves, forward = _split(apply, params)
    network = jax.make_jaxpr(forward)(leaves, x[0])  # as it is now, whatever becomes of apply

    def snapshot(leaves, x):
        return jax.core.eval_jaxpr(network.jaxpr, network.consts, *leaves, x)[0]

    run, programs = functools.partial(_product, snapshot, batch_size), {}

    def product(v):
        v = jnp.asarray(v)
        if v.shape not in programs:
            programs[v.shape] = program(run, leaves, x, v)
        return programs[v.shape](leaves, x, v)

    return product
