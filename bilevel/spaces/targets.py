"""Shared parts of the spaces: targets of classification, losses, a mixture with a penalty.

Two classes have one output ``f`` [n], more have one each, ``f`` [n, classes] (one-vs-rest). The
targets ``y`` are like ``f``, with entries +-1; the margin is ``y f``.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from bilevel.contracts import Pytree
from bilevel.internal.checks import concrete, integer, one_a_row, real_array
from bilevel.problem.problem import Problem
from bilevel.spaces.space import on_simplices


def _of_margin(loss: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array, jax.Array], Any]:
    """Return ``loss(y f)``, NaN with its derivative unless y is 1 or -1."""
    return lambda f, y: loss(y * f) * jnp.where(jnp.abs(y) == 1, 1, jnp.nan).astype(f.dtype)


OUTER_LOSSES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "hinge": _of_margin(lambda margin: jnp.maximum(1 - margin, 0)),
    "logistic": _of_margin(lambda margin: jax.nn.softplus(-margin)),
    "squared": lambda f, y: (f - y) ** 2,
}
"""Elementwise losses. "squared" takes any real targets. The others take the margin ``y f``,
y = +-1, and are NaN for other targets."""


def sign_labels(labels: chex.Array, classes: int, dtype: Any = float) -> jax.Array:
    """Return labels 0..classes-1 as +-1: [n] for two classes, one-vs-rest [n, classes] for more.

    Traced labels out of range become NaN.
    """
    labels = real_array("labels", labels)
    if labels.ndim != 1:
        raise ValueError(f"labels: expected one a row, shape [n], got shape {labels.shape}.")
    classes = integer("classes", classes, 2)
    signs, known = _signs(labels, classes, dtype)
    if concrete(labels) and not np.asarray(known).all():
        wrong = labels[~known][0]
        raise ValueError(f"labels: expected integers from 0 to {classes - 1}, got {wrong}.")
    return signs


@functools.partial(jax.jit, static_argnums=(1, 2))
def _signs(labels: jax.Array, classes: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    labels = _without_bytes(labels)
    known = _known(labels, classes)
    if classes == 2:
        return jnp.where(known, (2 * labels - 1).astype(dtype), jnp.nan), known
    signs = 2 * jax.nn.one_hot(labels, classes, dtype=dtype) - 1
    return jnp.where(known[:, None], signs, jnp.nan), known


def like_outputs(f: jax.Array, y: chex.Array) -> jax.Array:
    """Return floating-point targets ``y`` if their shape is that of the outputs ``f``.

    [n] and [n, 1] would broadcast to [n, n], and negation of bytes wraps.
    """
    y = real_array("y", y)
    if y.shape != f.shape:
        raise ValueError(f"y: expected one for each output, shape {f.shape}, got shape {y.shape}.")
    return y if jnp.issubdtype(y.dtype, jnp.floating) else y.astype(f.dtype)


def validation_loss(
    apply: Callable[[Pytree, Pytree, Any], jax.Array], outer: str
) -> Callable[..., jax.Array]:
    """Return the mean of an outer loss over batches ``(x, y)``, with ``y`` like the outputs."""

    def loss(w, alpha, batch):
        x, y = batch
        f = apply(w, alpha, x)
        return jnp.mean(OUTER_LOSSES[outer](f, like_outputs(f, y)))

    return loss


def predict_labels(f: chex.Array) -> jax.Array:
    """Return integer labels [n]: the sign of ``f`` [n], the largest of ``f`` [n, classes]."""
    if f.ndim == 1:
        return (f > 0).astype(int)
    if f.shape[-1] == 1:
        raise ValueError(f"f: expected outputs [n], or [n, classes] of several, got {f.shape}.")
    return jnp.argmax(f, axis=-1)


def label_losses(f: chex.Array, labels: chex.Array) -> jax.Array:
    """Return every row's cross-entropy, of the sigmoid for ``f`` [n], the softmax for [n, classes].

    It is NaN, with its derivatives, for labels that are not 0 .. classes - 1.
    """
    one_a_row(labels, f.shape[:1])
    labels = _without_bytes(jnp.asarray(labels))
    if f.ndim == 1:
        losses, classes = optax.sigmoid_binary_cross_entropy(f, labels), 2
    else:
        losses = optax.softmax_cross_entropy_with_integer_labels(f, labels)
        classes = f.shape[-1]
    return losses * jnp.where(_known(labels, classes), 1, jnp.nan).astype(f.dtype)


def _without_bytes(labels: jax.Array) -> jax.Array:
    """Return labels as floats or ints: in bytes, 2 * 0 - 1 is 255; bools cannot be rounded."""
    return labels if jnp.issubdtype(labels.dtype, jnp.floating) else labels.astype(int)


def _known(labels: jax.Array, classes: int) -> jax.Array:
    return (labels >= 0) & (labels < classes) & (labels == jnp.round(labels))


def cross_entropy_problem(apply: Callable[[Pytree, Pytree, jax.Array], jax.Array]) -> Problem:
    """Make the problem of batches ``(x, labels)`` with the mean cross-entropy as both losses."""

    def loss(w, alpha, batch):
        x, labels = batch
        return label_losses(apply(w, alpha, x), labels).mean()

    return Problem(loss, loss)


def beside_penalty(**alpha: Pytree) -> dict[str, Pytree]:
    """Return ``alpha`` with the first "log_penalty" of ridge regressions, log 0.1."""
    return alpha | {"log_penalty": jnp.log(jnp.asarray(0.1, jnp.result_type(float)))}


def mixture_and_penalty(names: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a :class:`Space` for alpha {"mixture": [h], "log_penalty"}."""
    choice = on_simplices(names)

    return {
        "sets": {"mixture": "simplex", "log_penalty": "free"},
        "start": lambda: beside_penalty(mixture=choice.start()),
        "draw": lambda key: beside_penalty(mixture=choice.draw(key)),
        "discretize": lambda alpha: choice.discretize(alpha["mixture"]),
        "one_hot": lambda name: beside_penalty(mixture=choice.one_hot(name)),
    }
