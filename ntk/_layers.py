"""Gradients of single samples, with flax's Dense and Conv layers kept in factors.

A layer ``y_p = W' a_p`` has the gradient ``Σ_p a_p s_p'``: this module finds the layers of a
network's forward pass, collects ``a`` (inputs) and ``s`` (sensitivities) of every sample, and takes
inner products of the gradients through them. ``ntk.finite`` explains the idea.

Everything is about ``forward(leaves, x) -> [o]``, the outputs of one sample ``x`` as a function of
a list of parameter arrays. Shapes: n samples, o outputs, q positions, g groups, i and j the inputs
and outputs of a layer per group.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.dtypes import promote_dtype
from jax import lax
from jax.extend.core import Literal, get_opaque_trace_state

_einsum = functools.partial(jnp.einsum, precision="highest")  # a GPU's default keeps 10 bits


# --- Dense and Conv layers, seen from outside ---------------------------------------------------


class Call(NamedTuple):
    """One call of a layer that is linear in parameters which are leaves of ``params``."""

    kernel: int  # indices of the leaves
    bias: int | None
    groups: int
    columns: Callable  # one sample's input -> [positions, groups, inputs per group]
    inputs: Any
    outputs: Any


def _dense_columns(x):
    return x.reshape(-1, 1, x.shape[-1])


def _conv_columns(layer: nn.Conv, x):
    """Patches of ``x`` [b, *space, c] under the layer's window, as lax.conv would see them."""
    size = (layer.kernel_size,) if isinstance(layer.kernel_size, int) else layer.kernel_size
    rank = len(size)

    def per_axis(option):
        return (option or 1,) * rank if not isinstance(option, (tuple, list)) else tuple(option)

    stride, spread = per_axis(layer.strides), per_axis(layer.input_dilation)
    dilation = per_axis(layer.kernel_dilation)
    window = [(k - 1) * d + 1 for k, d in zip(size, dilation, strict=True)]
    padding = nn.linear.canonicalize_padding(layer.padding, rank)
    if padding in ("CIRCULAR", "REFLECT"):
        around = [((w - 1) // 2, w // 2) for w in window]
        x = jnp.pad(
            x, [(0, 0), *around, (0, 0)], mode="wrap" if padding == "CIRCULAR" else "reflect"
        )
        padding = "VALID"
    elif padding == "CAUSAL":
        padding = [(w - 1, 0) for w in window]
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(x.shape[1:-1], window, stride, padding)
    edges = [(low, high, s - 1) for (low, high), s in zip(padding, spread, strict=True)]
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *edges, (0, 0, 0)])
    for axis in range(rank):  # [b, ..., n, ..., c] to [b, ..., steps, k, ..., c]
        steps = (x.shape[1 + 2 * axis] - window[axis]) // stride[axis] + 1
        starts = stride[axis] * np.arange(steps)[:, None]
        at = starts + dilation[axis] * np.arange(size[axis])
        x = jnp.take(x, at, axis=1 + 2 * axis, mode="clip")
    patches = jnp.moveaxis(x, range(2, 2 * rank + 1, 2), range(-1 - rank, -1))
    groups, channels = layer.feature_group_count, x.shape[-1]
    patches = patches.reshape(-1, math.prod(size), groups, channels // groups)
    return jnp.swapaxes(patches, 1, 2).reshape(len(patches), groups, -1)


def _columns(layer: nn.Module, x) -> tuple[int, Callable] | None:
    """Groups and columns of a layer that is sure to be flax's own linear map."""
    if type(layer) not in (nn.Dense, nn.Conv):
        return None
    assert isinstance(layer, (nn.Dense, nn.Conv))
    if layer.promote_dtype is not promote_dtype:
        return None
    if isinstance(layer, nn.Dense):
        plain = layer.dot_general is None and layer.dot_general_cls is None
        return (1, _dense_columns) if plain else None
    rank = 1 if isinstance(layer.kernel_size, int) else len(layer.kernel_size)
    custom = layer.mask, layer.conv_general_dilated, layer.conv_general_dilated_cls
    if any(option is not None for option in custom) or x.ndim != rank + 2:
        return None
    # A copy without the layer's state, which holds the values of the trace.
    return layer.feature_group_count, functools.partial(_conv_columns, layer.copy(parent=None))


def _watch(forward, leaves, x, replace) -> tuple[jax.Array, list[Call]]:
    """``forward(leaves, x)`` with ``replace(call, index)`` for the outputs of its linear layers."""
    where = {id(leaf): i for i, leaf in enumerate(leaves)}
    level = get_opaque_trace_state(convention="flax")
    calls: list[Call] = []

    def leaf(layer, name):
        return where.get(id(nn.meta.unbox(layer.get_variable("params", name))))

    def interceptor(next_function, args, kwargs, context):
        layer = context.module
        if context.method_name != "__call__":
            return next_function(*args, **kwargs)
        outputs = next_function(*args, **kwargs)
        inputs = args[0] if args else kwargs.get("inputs")
        linear = _columns(layer, inputs)
        if linear is None or get_opaque_trace_state(convention="flax") != level:
            return outputs
        kernel, bias = leaf(layer, "kernel"), leaf(layer, "bias") if layer.use_bias else None
        if kernel is None or (layer.use_bias and bias is None):
            return outputs
        calls.append(Call(kernel, bias, *linear, inputs, outputs))
        return replace(calls[-1], len(calls) - 1)

    with nn.intercept_methods(interceptor):
        return forward(leaves, x), calls


class Plan(NamedTuple):
    """Which leaf of ``params`` is handled how. Static."""

    calls: list[Call]  # with the type of the outputs in place of arrays
    layered: set[int]  # leaves that the calls account for
    rest: list[int]  # leaves for the per-sample Jacobian


def _reaching(jaxpr) -> list[bool]:
    """Which inputs of a program its outputs may depend on."""
    live = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    for equation in reversed(jaxpr.eqns):
        if not live.isdisjoint(equation.outvars):
            live.update(v for v in equation.invars if not isinstance(v, Literal))
    return [v in live for v in jaxpr.invars]


def plan(forward, leaves, x, intercept: bool) -> Plan:
    """Trace one sample's forward pass, with its linear layers cut off from their parameters."""
    if not intercept:
        return Plan([], set(), list(range(len(leaves))))
    calls: list[Call] = []

    def cut(leaves, x):
        def from_inputs_only(call, _):
            y = call.outputs
            return jnp.broadcast_to(jnp.sum(call.inputs), y.shape).astype(y.dtype)

        outputs, seen = _watch(forward, leaves, x, from_inputs_only)
        calls.extend(c._replace(inputs=None, outputs=jax.typeof(c.outputs)) for c in seen)
        return outputs

    elsewhere = _reaching(jax.make_jaxpr(cut)(leaves, x).jaxpr)
    groups: dict[int, set[int]] = {}
    for call in calls:
        for leaf in (call.kernel, call.bias):
            if leaf is not None:
                groups.setdefault(leaf, set()).add(call.groups if leaf == call.kernel else 0)
    layered = {i for i, found in groups.items() if len(found) == 1 and not elsewhere[i]}
    rest = [i for i in range(len(leaves)) if i not in layered and (elsewhere[i] or i in groups)]
    if not layered and not rest:  # constant outputs: the kernel's zeros need a shape
        rest = [0]
    return Plan(calls, layered, rest)


# --- Per-sample factors of the gradient, and their Gram matrices ---------------------------------


class Factors(NamedTuple):
    """What the gradients of n samples are made of."""

    inputs: list[jax.Array]  # per call, [n, *shape of one sample's input]
    sensitivities: list[jax.Array]  # per call, [n, o, *shape of one sample's output]
    rest: list[jax.Array]  # per leaf, [n, o, *shape of the leaf]


def factors(forward, plan: Plan, outputs: str, leaves, x) -> Factors:
    """One forward pass, and one backward pass per output, of each sample in ``x`` [n, ...]."""

    def sample(x):
        def run(perturbations, rest):
            def perturb(call, k):
                return call.outputs + perturbations[k] if plan.calls else call.outputs

            merged = list(leaves)
            for i, leaf in zip(plan.rest, rest, strict=True):
                merged[i] = leaf
            y, calls = _watch(forward, merged, x, perturb)
            return y, [call.inputs for call in calls if plan.calls]

        zeros = [jnp.zeros(c.outputs.shape, c.outputs.dtype) for c in plan.calls]
        y, pullback, inputs = jax.vjp(run, zeros, [leaves[i] for i in plan.rest], has_aux=True)
        seeds = jnp.ones((1, y.size)) if outputs == "sum" else jnp.eye(y.size)
        return inputs, *jax.vmap(pullback)(seeds.reshape(-1, *y.shape).astype(y.dtype))

    return Factors(*jax.vmap(sample)(x))


def _layer_factors(plan: Plan, factors: Factors, leaf: int, kernel):
    """Columns [n, q, g, i] and sensitivities [n, o, q, g, j] of a kernel, over all its calls."""
    columns, sensitivities = [], []
    dtype = jnp.promote_types(kernel.dtype, jnp.float32)
    for call, x, s in zip(plan.calls, factors.inputs, factors.sensitivities, strict=True):
        if call.kernel == leaf:
            # In the precision in which the layer multiplies them.
            columns.append(jax.vmap(call.columns)(x.astype(s.dtype)).astype(dtype))
            split = call.groups, s.shape[-1] // call.groups
            sensitivities.append(s.reshape(*s.shape[:2], -1, *split).astype(dtype))
    return jnp.concatenate(columns, 1), jnp.concatenate(sensitivities, 2)


def _flat_factors(plan: Plan, factors: Factors) -> list[jax.Array]:
    """Gradients [n, o, p] of the leaves that are small or that no layer accounts for."""
    flat = []
    for leaf in sorted(plan.layered & {c.bias for c in plan.calls if c.bias is not None}):
        used = [
            s.sum(tuple(range(2, s.ndim - 1)), dtype=jnp.promote_types(s.dtype, jnp.float32))
            for call, s in zip(plan.calls, factors.sensitivities, strict=True)
            if call.bias == leaf
        ]
        flat.append(sum(used[1:], used[0]))
    for gradient in factors.rest:
        dtype = jnp.promote_types(gradient.dtype, jnp.float32)
        flat.append(gradient.reshape(*gradient.shape[:2], -1).astype(dtype))
    return flat


def _patch_gram_is_cheaper(n1, n2, a, s, full: bool) -> bool:
    """Estimated cost of the two ways to a layer's contribution, in flops.

    An entry that goes to memory and back counts as 16: the Gram matrices of all pairs of positions
    are what makes the first way impossible for large images.
    """
    q, g, i = a.shape[1:]
    o, j = s.shape[1], s.shape[-1]
    squared = o**2 if full else o
    pairs = n1 * n2 * q**2 * g
    gram = pairs * (i + squared * j + 16 * (1 + (o**2 if full else 1)))
    gradient = g * i * j * ((n1 + n2) * o * (q + 16) + n1 * n2 * squared)
    return gram < gradient


_CHUNK = 2**26  # entries of per-sample gradients held at a time


def _explicit_gram(a1, s1, a2, s2, spec: str):
    """Gram matrix of the per-sample gradients of a kernel, some of its outputs at a time."""
    j = s1.shape[-1]
    entries = max(len(a) * s.shape[1] * math.prod(a.shape[2:]) for a, s in ((a1, s1), (a2, s2)))
    size = max(c for c in range(1, j + 1) if j % c == 0 and (c == 1 or c * entries <= _CHUNK))

    def gradients(a, s):
        return _einsum("npgi,nopgj->nogij", a, s)

    if size == j:
        return _einsum(spec, gradients(a1, s1), gradients(a2, s2))

    def chunks(s):
        return jnp.moveaxis(s.reshape(*s.shape[:-1], -1, size), -2, 0)

    def add(total, s):
        return total + _einsum(spec, gradients(a1, s[0]), gradients(a2, s[1])), None

    start = jax.eval_shape(lambda s: add(0.0, s)[0], (s1[..., :size], s2[..., :size]))
    zeros = jnp.zeros(start.shape, start.dtype)
    return lax.scan(add, zeros, (chunks(s1), chunks(s2)))[0]


def gram(plan: Plan, full: bool, leaves, left: Factors, right: Factors):
    """``K`` between the samples of two sets of factors, [n1, n2] or [n1, n2, o, o]."""
    out = "abom" if full else "ab"
    m = "m" if full else "o"  # the letter of the second sample's outputs: summed over if shared
    total: Any = 0.0  # takes the dtype of what is added
    pairs = zip(_flat_factors(plan, left), _flat_factors(plan, right), strict=True)
    for first, second in pairs:
        total += _einsum(f"aop,b{m}p->{out}", first, second)
    for leaf in sorted(plan.layered & {c.kernel for c in plan.calls}):
        a1, s1 = _layer_factors(plan, left, leaf, leaves[leaf])
        a2, s2 = _layer_factors(plan, right, leaf, leaves[leaf])
        if _patch_gram_is_cheaper(len(a1), len(a2), a1, s1, full):
            inputs = _einsum("apgi,bqgi->gapbq", a1, a2)
            outer = "gaopbmq" if full else "gapbq"
            outputs = _einsum(f"aopgj,b{m}qgj->{outer}", s1, s2)
            total += _einsum(f"gapbq,{outer}->{out}", inputs, outputs)
        else:
            total += _explicit_gram(a1, s1, a2, s2, f"aogij,b{m}gij->{out}")
    return total


def squared_norms(plan: Plan, leaves, factors: Factors):
    """The diagonal of ``K`` summed over outputs, [n]."""
    total = sum((g**2).sum((1, 2)) for g in _flat_factors(plan, factors))
    for leaf in sorted(plan.layered & {c.kernel for c in plan.calls}):
        a, s = _layer_factors(plan, factors, leaf, leaves[leaf])
        if _patch_gram_is_cheaper(1, 1, a, s, full=False):
            inputs = _einsum("apgi,aqgi->gapq", a, a)
            total += _einsum("gapq,gapq->a", inputs, _einsum("aopgj,aoqgj->gapq", s, s))
        else:
            total += (_einsum("apgi,aopgj->aogij", a, s) ** 2).sum((1, 2, 3, 4))
    return total
