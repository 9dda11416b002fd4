"""What scores read off a network: its weights, its loss, the signs of its ReLUs."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from ntk._intercept import fold
from ntk._programs import fresh

Pytree = Any
Apply = Callable[[Pytree, jax.Array], jax.Array]
Batch = tuple[jax.Array, jax.Array]


def check(apply: Apply, params: Pytree, batch: Batch) -> Batch:
    """The batch as arrays, if it and the logits it leads to are what a score needs."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise ValueError(f"batch: expected a pair (x, y), got {type(batch).__name__}.")
    x, y = map(jnp.asarray, batch)
    if not x.size or not x.ndim:
        raise ValueError(f"batch: expected inputs [n, ...] with n at least 1, got {x.shape}.")
    if y.shape != x.shape[:1] or not jnp.issubdtype(y.dtype, jnp.integer):
        raise ValueError(
            f"batch: expected {len(x)} integer labels, got {y.dtype} of the shape {y.shape}."
        )
    for name, tree in ("params", params), ("batch", x):
        for leaf in jax.tree.leaves(tree):
            if not isinstance(leaf, jax.core.Tracer) and not np.isfinite(leaf).all():
                raise ValueError(f"{name}: expected finite numbers, got NaN or infinity.")
    logits = logits_like(apply, params, x)
    if len(logits.shape) != 2 or logits.shape[0] != len(x):
        raise ValueError(f"apply: expected logits [{len(x)}, classes], got {logits.shape}.")
    classes = logits.shape[1]
    if not isinstance(y, jax.core.Tracer):
        labels = np.asarray(y)  # jnp's minimum would be traced under jit
        if labels.min() < 0 or labels.max() >= classes:
            raise ValueError(
                f"batch: expected labels from 0 to {classes - 1}, "
                f"got {labels.min()} to {labels.max()}."
            )
    return x, y


def logits_like(apply: Apply, params: Pytree, x: jax.Array) -> Any:
    """Shape and type of the logits."""
    return jax.eval_shape(fresh(apply), params, x)


def is_weight(params: Pytree, *more: str) -> list[bool]:
    """Of each leaf: whether it is a kernel, or named in ``more``."""
    paths = jax.tree_util.tree_leaves_with_path(params)
    names = [jax.tree_util.keystr(path[-1:], simple=True) for path, _ in paths]
    if "kernel" in names:
        return [name in ("kernel", *more) for name in names]
    keep = [jnp.ndim(leaf) >= 2 for _, leaf in paths]
    if not any(keep):
        raise ValueError('params: expected leaves named "kernel" or of two or more axes, got none.')
    return keep


def split_weights(params: Pytree, *more: str) -> tuple[list[jax.Array], Callable]:
    """The kernels, and the leaves named in ``more``; and how to put others in their place."""
    keep = is_weight(params, *more)
    leaves, structure = jax.tree.flatten(params)

    def rebuild(replaced: list[jax.Array]) -> Pytree:
        replacements = iter(replaced)
        chosen = zip(leaves, keep, strict=True)
        merged = [next(replacements) if k else leaf for leaf, k in chosen]
        return jax.tree.unflatten(structure, merged)

    return [leaf for leaf, k in zip(leaves, keep, strict=True) if k], rebuild


def cross_entropy(logits: jax.Array, y: jax.Array) -> jax.Array:
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1))


def mean_loss(apply: Apply, params: Pytree, x: jax.Array, y: jax.Array) -> jax.Array:
    return cross_entropy(apply(params, x), y)


def loss_gradient(apply: Apply, params: Pytree, batch: Batch) -> tuple[list, list]:
    """The weights, and the gradient in them of the mean cross-entropy."""
    x, y = check(apply, params, batch)
    weights, rebuild = split_weights(params)
    return weights, jax.grad(lambda w: mean_loss(apply, rebuild(w), x, y))(weights)


def summed(terms: Iterable[jax.Array]) -> jax.Array:
    return jnp.sum(jnp.stack(list(terms)))


def inner_product(a: list[jax.Array], b: list[jax.Array]) -> jax.Array:
    return summed(jnp.sum(u * v) for u, v in zip(a, b, strict=True))


def map_gradients(reduce: Callable, apply: Apply, params: Pytree, x: jax.Array) -> jax.Array:
    """``reduce`` of the gradient of each sample's summed logits, one after another."""
    gradient = jax.grad(lambda p, xi: jnp.sum(apply(p, xi[None])))
    return jax.lax.map(lambda xi: reduce(ravel_pytree(gradient(params, xi))[0]), x)


def gram(rows: jax.Array) -> jax.Array:
    return jnp.matmul(rows, rows.T, precision="highest")


def sign_agreements(apply: Apply, params: Pytree, x: jax.Array) -> jax.Array:
    """How many ReLUs have the same sign for samples i and j: [n, n], float32."""
    n = len(x)

    def is_relu(eqn):
        return eqn.params.get("name") == "relu" and len(eqn.invars) == 1

    def count(eqn, inputs, outputs, total):
        if inputs[0].shape[:1] != (n,):
            raise ValueError(
                f"apply: expected ReLU inputs with the {n} samples on the leading axis, "
                f"got the shape {inputs[0].shape}."
            )
        signs = jnp.where(inputs[0].reshape(n, -1) > 0, 1, -1).astype(jnp.float32)
        return outputs, total + (signs.shape[1] + gram(signs)) / 2

    return fold(apply, is_relu, count, jnp.zeros((n, n), jnp.float32), params, x, what="ReLU")[1]


def distinct_patterns(agreements: jax.Array) -> jax.Array:
    """The number of different patterns, given how many units any two have in common."""
    same = agreements == agreements[0, 0]  # a pattern agrees with itself everywhere
    return jnp.sum(~jnp.any(jnp.tril(same, -1), axis=1))


def layer_axes(eqn) -> tuple[int, int] | None:
    """Axes of samples and channels in the output of a convolution or of ``x @ w``, else None."""
    numbers = eqn.params.get("dimension_numbers")
    if eqn.primitive.name == "conv_general_dilated":
        return numbers.out_spec[:2]
    if eqn.primitive.name == "dot_general" and not any(numbers[1]):
        return 0, -1
    return None


def layer_saliency(apply: Apply, params: Pytree, x: jax.Array, y: jax.Array) -> jax.Array:
    """``sum_c mean_n (sum_positions a * dL/da)^2 / 2`` over the outputs a of all layers."""

    def is_layer(eqn):
        axes = layer_axes(eqn)
        shape = eqn.outvars[0].aval.shape if axes else ()
        return axes is not None and len(shape) > 1 and shape[axes[0]] == len(x)

    def loss(total):
        def probe(eqn, inputs, outputs, nothing):
            return [saliency(layer_axes(eqn), outputs[0], total)], nothing

        logits, _ = fold(apply, is_layer, probe, (), params, x, what="matrix product")
        return cross_entropy(logits, y)

    return jax.grad(loss)(jnp.zeros((), logits_like(apply, params, x).dtype))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def saliency(axes: tuple[int, int], a: jax.Array, total: jax.Array) -> jax.Array:
    """``a`` itself; its part of the Fisher score comes back as the gradient in ``total``."""
    return a


def _saliency_backward(axes, residuals, g):
    a, total = residuals
    per_channel = jnp.moveaxis(a * g, axes, (0, -1))
    per_channel = per_channel.reshape(len(per_channel), -1, per_channel.shape[-1]).sum(1)
    return g, (jnp.sum(jnp.mean(per_channel**2, axis=0)) / 2).astype(total.dtype)


saliency.defvjp(lambda axes, a, total: (a, (a, total)), _saliency_backward)
