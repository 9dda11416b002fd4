"""Helpers of the scores: a network's weights, its loss, and the signs of its ReLUs."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from ntk.internal.checks import (
    at_least_float32,
    check_finite,
    concrete,
    function,
    nan_unless,
    real_array,
)
from ntk.internal.compile_cache import fresh, program
from ntk.internal.products import matmul
from ntk.scores.find_relus import is_relu, mark_relus
from ntk.scores.find_weights import multiplied
from ntk.scores.visit_operations import visit_chosen_operations

Pytree = Any
Apply = Callable[[Pytree, jax.Array], jax.Array]
Batch = tuple[jax.Array, jax.Array]


def check_score_arguments(
    apply: Apply, params: Pytree, batch: Batch
) -> tuple[Apply, Pytree, jax.Array, jax.Array]:
    """Return ``(apply, params, x, y)`` if the batch and its logits fit a score.

    The first two take the trained part: the collection "params" of flax, or all of ``params``.
    """
    function("apply", apply, "(params, x) -> logits")
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise ValueError(f"batch: expected a pair (x, y), got {type(batch).__name__}.")
    x, y = (real_array("batch", part) for part in batch)
    if not x.size or not x.ndim:
        raise ValueError(f"batch: expected inputs [n, ...] with n at least 1, got {x.shape}.")
    if y.shape != x.shape[:1] or not jnp.issubdtype(y.dtype, jnp.integer):
        raise ValueError(
            f"batch: expected {len(x)} integer labels, got {y.dtype} of the shape {y.shape}."
        )
    for name, tree in ("params", params), ("batch", x):
        check_finite(name, jax.tree.map(partial(real_array, name), tree))
    # Squares of gradients overflow in 16 bits.
    params, x = jax.tree.map(_widen_to_float32, (params, x))
    logits = logits_like(apply, params, x)
    if len(logits.shape) != 2 or logits.shape[0] != len(x):
        raise ValueError(f"apply: expected logits [{len(x)}, classes], got {logits.shape}.")
    classes = logits.shape[1]
    apply, params = _in_parameters(apply, params)
    if not concrete(y):
        return apply, nan_unless(((y >= 0) & (y < classes)).all(), params), x, y
    labels = np.asarray(y)  # jnp's minimum would be traced under jit
    if labels.min() < 0 or labels.max() >= classes:
        raise ValueError(
            f"batch: expected labels from 0 to {classes - 1}, got {labels.min()} to {labels.max()}."
        )
    return apply, params, x, y


def _widen_to_float32(leaf: Any) -> Any:
    """Return a leaf of 16-bit floating-point values in 32 bits."""
    dtype = jnp.result_type(leaf)
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits >= 32:
        return leaf
    return jnp.asarray(leaf).astype(jnp.float32)


def logits_like(apply: Apply, params: Pytree, x: chex.Array) -> Any:
    """Return the shape and type of the logits."""
    return jax.eval_shape(fresh(apply), params, x)


def is_weight(apply: Apply, params: Pytree, x: chex.Array, *more: str) -> list[bool]:
    """Return whether each leaf is a kernel, by its name or its use, or named in ``more``."""
    paths = jax.tree_util.tree_leaves_with_path(params)
    names = [_leaf_name(path) for path, _ in paths]
    if "kernel" in names:
        return [name in ("kernel", *more) for name in names]
    weights = multiplied(apply, params, x)
    keep = [i in weights and jnp.ndim(leaf) >= 2 for i, (_, leaf) in enumerate(paths)]
    if not any(keep):
        raise ValueError(
            'params: expected leaves named "kernel", or of two or more axes and used in a matrix '
            "product, got none."
        )
    return [k or name in more for k, name in zip(keep, names, strict=True)]


def _leaf_name(path: tuple) -> str:
    """Return the last name on a leaf's path; nnx states add "value" after the array's own name."""
    words = [jax.tree_util.keystr((entry,), simple=True) for entry in path]
    named = [word for word in words if word not in ("value", "raw_value")]
    return (named or words or [""])[-1]


def _in_parameters(apply: Apply, params: Pytree) -> tuple[Apply, Pytree]:
    """Return ``apply`` as a function of the floating-point leaves of the collection "params"."""
    if not isinstance(params, Mapping) or "params" not in params or len(params) == 1:
        return _restrict_to_floating(apply, params)
    return _restrict_to_floating(lambda p, x: apply({**params, "params": p}, x), params["params"])


def _restrict_to_floating(apply: Apply, params: Pytree) -> tuple[Apply, Pytree]:
    def is_none(leaf):
        return leaf is None

    def is_floating(leaf):
        return jnp.issubdtype(jnp.result_type(leaf), jnp.floating)

    if all(map(is_floating, jax.tree.leaves(params))):
        return apply, params
    alone = jax.tree.map(lambda leaf: leaf if is_floating(leaf) else None, params)

    def merged(p, x):
        whole = jax.tree.map(lambda a, b: b if a is None else a, p, params, is_leaf=is_none)
        return apply(whole, x)

    return merged, alone


def split_weights(
    apply: Apply, params: Pytree, x: chex.Array, *more: str
) -> tuple[list[jax.Array], Callable]:
    """Return the kernels and the leaves named in ``more``, and a function that replaces them."""
    keep = is_weight(apply, params, x, *more)
    leaves, structure = jax.tree.flatten(params)

    def rebuild(replaced: list[jax.Array]) -> Pytree:
        replacements = iter(replaced)
        chosen = zip(leaves, keep, strict=True)
        merged = [next(replacements) if k else leaf for leaf, k in chosen]
        return jax.tree.unflatten(structure, merged)

    return list(itertools.compress(leaves, keep)), rebuild


def mean_cross_entropy(logits: chex.Array, y: chex.Array) -> jax.Array:
    """Return the mean cross-entropy of ``logits`` [n, classes] and labels ``y`` [n]."""
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1))


def mean_loss(apply: Apply, params: Pytree, x: chex.Array, y: chex.Array) -> jax.Array:
    """Return the mean cross-entropy of the network on inputs ``x`` with labels ``y``."""
    return mean_cross_entropy(apply(params, x), y)


def summed(terms: Iterable[chex.Array]) -> jax.Array:
    """Return the sum of scalars."""
    return jnp.sum(jnp.stack(list(terms)))


def inner_product(a: list[chex.Array], b: list[chex.Array]) -> jax.Array:
    """Return the inner product of two lists of arrays of the same shapes."""
    return summed(jnp.sum(u * v) for u, v in zip(a, b, strict=True))


def power_of_two_scale(x: jax.Array, axis: int | None = None) -> jax.Array:
    """Return a power of two of the size of the largest entry, axes kept; 1 if all entries are 0."""
    size = jnp.max(jnp.abs(jax.lax.stop_gradient(x)), axis=axis, keepdims=True, initial=0)
    exponent = jnp.frexp(size)[1] - 1
    return jnp.where(size > 0, jnp.ldexp(jnp.ones_like(size), exponent), 1)


def overflow_safe_norm(x: jax.Array) -> jax.Array:
    """Return the 2-norm of all entries, also if their squares overflow."""
    size = power_of_two_scale(x)
    return (size * jnp.linalg.norm((x / size).ravel())).reshape(())


def for_each(function: Callable, xs: Pytree, batch_size: int | None = None) -> Pytree:
    """Return ``lax.map(function, xs)``, compiled once per program, not per function object."""

    def run(xs):
        return jax.lax.map(function, xs, batch_size=batch_size)

    return program(run, xs)(xs)


def gram_of_rows(rows: chex.Array) -> jax.Array:
    """Return ``rows rows'`` in at least 32 bits."""
    dtype = at_least_float32(rows.dtype)
    return matmul(rows, rows.T, preferred_element_type=dtype)


def _longer(shape: tuple, other: tuple) -> list[int]:
    """Return the axes that grow with the number of samples."""
    return [i for i, (a, b) in enumerate(zip(shape, other, strict=True)) if a != b]


def sign_agreements(apply: Apply, params: Pytree, x: chex.Array) -> jax.Array:
    """Return the number of ReLUs with the same sign for samples i and j: [n, n], float32."""

    def count(eqn, other, inputs, outputs, total):
        axis = samples_axis(eqn, other, len(x))
        return outputs, total if axis is None else total + _same_signs(inputs[0], axis)

    start = jnp.zeros((len(x), len(x)), jnp.float32)
    return visit_chosen_operations(mark_relus(apply), is_relu, count, start, params, x, "ReLU")[1]


def used_sign_agreements(apply: Apply, params: Pytree, x: chex.Array) -> jax.Array:
    """Return :func:`sign_agreements` of only the ReLUs that the logits depend on."""

    def count_if_used(axis, u, g):
        return jnp.where((g != 0).any(), _same_signs(u, axis), 0)

    def response(total):
        def probe(eqn, other, inputs, outputs, nothing):
            axis = samples_axis(eqn, other, len(x))
            if axis is not None:
                count = partial(count_if_used, axis)
                outputs = [with_statistic(count, outputs[0], inputs[0], total)]
            return outputs, nothing

        logits, _ = visit_chosen_operations(
            mark_relus(apply), is_relu, probe, (), params, x, "ReLU"
        )
        # With random weights, derivatives do not cancel in the sum.
        return jnp.sum(logits * jax.random.normal(jax.random.key(0), logits.shape, logits.dtype))

    return jax.grad(response)(jnp.zeros((len(x), len(x)), jnp.float32))


def samples_axis(eqn, other, n: int) -> int | None:
    """Return the axis of the samples in a ReLU's input; None for one of weights or statistics."""
    shape, grown = (e.invars[0].aval.shape for e in (eqn, other))
    axes = _longer(shape, grown)
    if not axes:
        return None
    if len(axes) > 1 or (shape[axes[0]], grown[axes[0]]) != (n, n + 1):
        raise ValueError(
            f"apply: expected ReLU inputs with the {n} samples on an axis, got the shape {shape}."
        )
    return axes[0]


def _same_signs(u: jax.Array, axis: int) -> jax.Array:
    u = jnp.moveaxis(u, axis, 0).reshape(u.shape[axis], -1)
    signs = jnp.where(u > 0, 1, -1).astype(jnp.float32)
    signs = jnp.where(jnp.isnan(u), jnp.nan, signs)
    return (signs.shape[1] + gram_of_rows(signs)) / 2


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def with_statistic(statistic: Callable, out: jax.Array, about: Pytree, total: jax.Array):
    """Return ``out``; the gradient in ``total`` is ``statistic(about, g)``.

    ``g`` is the gradient in ``out``. The gradient in ``about`` is 0.
    """
    return out


def _statistic_backward(statistic, about, g):
    return g, jax.tree.map(jnp.zeros_like, about), statistic(about, g)


with_statistic.defvjp(
    lambda statistic, out, about, total: (out, about),
    _statistic_backward,
)


def distinct_patterns(agreements: chex.Array) -> jax.Array:
    """Return the number of different patterns, a float; NaN if a pattern has a NaN.

    ``agreements``: how many units any two patterns have in common.
    """
    same = agreements == agreements[0, 0]  # a pattern agrees with itself everywhere
    count = jnp.sum(~jnp.any(jnp.tril(same, -1), axis=1)).astype(agreements.dtype)
    return jnp.where(jnp.isnan(agreements).any(), jnp.nan, count)


def is_layer(eqn) -> bool:
    """Return whether this is a convolution, or a product without batch axes."""
    name, numbers = eqn.primitive.name, eqn.params.get("dimension_numbers")
    return name == "conv_general_dilated" or (name == "dot_general" and not any(numbers[1]))


def layer_axes(eqn, other, n: int) -> tuple[int, tuple[int, ...]] | None:
    """Return the axes of samples and channels in a layer's output; None for other products.

    The channels of ``x @ w`` are the axes of the operand that does not grow with the batch.
    """
    shape, grown = (e.outvars[0].aval.shape for e in (eqn, other))
    axes = _longer(shape, grown)
    if len(axes) != 1 or (shape[axes[0]], grown[axes[0]]) != (n, n + 1):
        return None
    numbers = eqn.params["dimension_numbers"]
    if eqn.primitive.name == "conv_general_dilated":
        return axes[0], (numbers.out_spec[1],)
    left, right = (v.aval.ndim - len(c) for v, c in zip(eqn.invars, numbers[0], strict=True))
    channels = range(left, left + right) if axes[0] < left else range(left)
    return (axes[0], tuple(channels)) if channels else None


def layer_saliency(apply: Apply, params: Pytree, x: chex.Array, y: chex.Array) -> jax.Array:
    """Return ``sum_c mean_n (sum_positions a * dL/da)^2 / 2`` over the outputs a of all layers."""
    axes_of_layers = []
    dtype = logits_like(apply, params, x).dtype

    def saliency(axes, a, g):
        samples, channels = axes
        per_channel = jnp.moveaxis(a * g, (samples, *channels), (0, *range(-len(channels), 0)))
        size = math.prod(a.shape[c] for c in channels)
        per_channel = per_channel.reshape(len(per_channel), -1, size).sum(1)
        return (jnp.sum(jnp.mean(per_channel**2, axis=0)) / 2).astype(dtype)

    def loss(total):
        def probe(eqn, other, inputs, outputs, nothing):
            axes = layer_axes(eqn, other, len(x))
            axes_of_layers.append(axes)
            if axes:
                (a,) = outputs
                outputs = [with_statistic(partial(saliency, axes), a, a, total)]
            return outputs, nothing

        logits, _ = visit_chosen_operations(apply, is_layer, probe, (), params, x, "matrix product")
        if not any(axes_of_layers):
            raise ValueError(
                f"apply: expected a layer with the {len(x)} samples on an axis of its output, "
                "got none."
            )
        return mean_cross_entropy(logits, y)

    return jax.grad(loss)(jnp.zeros((), dtype))
