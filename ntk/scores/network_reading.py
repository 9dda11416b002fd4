"""Helpers of the scores: checked arguments, a network's weights and its loss."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from ntk.internal import checks
from ntk.internal.compile_cache import fresh, program
from ntk.internal.jaxprs import inner_jaxprs, interpret, scan_operands, settle_carry
from ntk.internal.products import matmul

Pytree = Any
Apply = Callable[[Pytree, jax.Array], jax.Array]
Batch = tuple[jax.Array, jax.Array]
Leaves = frozenset[int] | None  # leaves that a value depends on; None: it depends on the input

_PRODUCTS = {"dot_general", "conv_general_dilated", "gather"}


def check_score_arguments(
    apply: Apply, params: Pytree, batch: Batch
) -> tuple[Apply, Pytree, jax.Array, jax.Array]:
    """Return checked arguments, with ``params`` of only the trained part (flax: "params")."""
    checks.function("apply", apply, "(params, x) -> logits")
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise ValueError(f"batch: expected a pair (x, y), got {type(batch).__name__}.")
    x, y = (checks.real_array("batch", part) for part in batch)
    if not x.size or not x.ndim:
        raise ValueError(f"batch: expected inputs [n, ...] with n at least 1, got {x.shape}.")
    if y.shape != x.shape[:1] or not jnp.issubdtype(y.dtype, jnp.integer):
        raise ValueError(
            f"batch: expected {len(x)} integer labels, got {y.dtype} of the shape {y.shape}."
        )
    for name, tree in ("params", params), ("batch", x):
        checks.check_finite(name, jax.tree.map(partial(checks.real_array, name), tree))
    # Squares of gradients overflow in 16 bits.
    params, x = jax.tree.map(_widen_to_float32, (params, x))
    logits = logits_like(apply, params, x)
    if len(logits.shape) != 2 or logits.shape[0] != len(x):
        raise ValueError(f"apply: expected logits [{len(x)}, classes], got {logits.shape}.")
    classes = logits.shape[1]
    apply, params = _in_parameters(apply, params)
    if not checks.concrete(y):
        return apply, checks.nan_unless(((y >= 0) & (y < classes)).all(), params), x, y
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
    weights = _multiplied_leaves(apply, params, x)
    keep = [i in weights and jnp.ndim(leaf) >= 2 for i, (_, leaf) in enumerate(paths)]
    if not any(keep):
        raise ValueError(
            'params: expected leaves named "kernel", or of two or more axes and used in a matrix '
            "product, got none."
        )
    return [k or name in more for k, name in zip(keep, names, strict=True)]


def _multiplied_leaves(apply: Callable, params: Any, x: chex.Array) -> set[int]:
    """Return the indices of the leaves of ``params`` that multiply functions of the input.

    A bias can have two axes, and a network a single input, so shapes do not distinguish the two. A
    weight enters a matrix product, a convolution or a table look-up with data on the other side,
    alone or combined with other leaves (scaled, normalised, low-rank product).
    """
    weights: set[int] = set()

    def follow(program: ClosedJaxpr, inputs: list[Leaves]) -> list[Leaves]:
        return interpret(program, inputs, rule, constant=lambda _: frozenset())

    def rule(eqn: JaxprEqn, sources: list[Leaves]) -> list[Leaves]:
        name = eqn.primitive.name
        if name in _PRODUCTS and None in sources:
            weights.update(*(s or () for s in (sources[:1] if name == "gather" else sources)))
        if name == "while":
            body, sources = eqn.params["body_jaxpr"], sources[eqn.params["cond_nconsts"] :]
            constants = eqn.params["body_nconsts"]
            return follow_loop(body, sources, constants, len(sources) - constants)
        if name == "scan":
            return follow_loop(eqn.params["jaxpr"], sources, *scan_operands(eqn))
        if name == "cond":
            branches = [follow(branch, sources[1:]) for branch in eqn.params["branches"]]
            return [_union([sources[0], *leaves]) for leaves in zip(*branches, strict=True)]
        for inner in inner_jaxprs(eqn):
            if len(inner.jaxpr.invars) == len(sources):
                return follow(inner, sources)
        return [_union(sources)] * len(eqn.outvars)

    def follow_loop(body, sources, constants, carried):
        def follow_body(facts):
            return follow(body, facts)

        return settle_carry(follow_body, sources, constants, carried, lambda *pair: _union(pair))

    leaves = [frozenset([i]) for i in range(len(jax.tree.leaves(params)))]
    follow(jax.make_jaxpr(fresh(apply))(params, x), [*leaves, None])
    return weights


def _union(sources: Iterable[Leaves]) -> Leaves:
    sources = list(sources)
    return None if None in sources else frozenset().union(*sources)  # type: ignore[arg-type]


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
    dtype = checks.at_least_float32(rows.dtype)
    return matmul(rows, rows.T, preferred_element_type=dtype)


def growing_axes(shape: tuple, other: tuple) -> list[int]:
    """Return the axes that grow with the number of samples."""
    return [i for i, (a, b) in enumerate(zip(shape, other, strict=True)) if a != b]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def with_statistic(statistic: Callable, out: jax.Array, about: Pytree, total: jax.Array):
    """Return ``out``; the gradient in ``total`` is ``statistic(about, gradient in out)``."""
    return out


def _statistic_backward(statistic, about, g):
    return g, jax.tree.map(jnp.zeros_like, about), statistic(about, g)


with_statistic.defvjp(lambda statistic, out, about, total: (out, about), _statistic_backward)
