"""Kernel ridge regression as a bilevel problem, with its closed-form solver."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bilevel.contracts import LowerSolver, Pytree
from bilevel.internal.checks import as_floating
from bilevel.problem.problem import Problem
from bilevel.spaces.targets import like_outputs


class KernelRidge(NamedTuple):
    """Fields of a space of kernels. ``batch`` is ``(inputs, y)``."""

    init: Callable[..., jax.Array]
    apply: Callable[..., jax.Array]
    problem: Problem
    solver: LowerSolver


def kernel_ridge(
    matrix: Callable[[Pytree, Any], jax.Array],
    loss: Callable,
    training: Callable[[Pytree, Any], jax.Array] | None = None,
) -> KernelRidge:
    """Make ridge regression with the kernel ``matrix(alpha, inputs)``.

    ``training(alpha, inputs)`` [n, n] is the kernel of the training rows. Default: ``matrix``.
    """
    training = training or matrix

    def init(key, batch):
        return jnp.zeros_like(as_floating("y", batch[1]))

    def apply(w, alpha, inputs):
        return matrix(alpha, inputs) @ w

    def lower(w, alpha, batch):
        inputs, y = batch
        image = training(alpha, inputs) @ w + jnp.exp(alpha["log_penalty"]) * w
        return jnp.vdot(w, 0.5 * image - like_outputs(image, y))

    def outer(w, alpha, batch):
        inputs, y = batch
        f = apply(w, alpha, inputs)
        return jnp.mean(loss(f, like_outputs(f, y)))

    def run(lower, alpha, w, state, batch):
        inputs, y = batch
        y, K = as_floating("y", y), training(alpha, inputs)
        if y.shape[:1] != K.shape[:1]:
            raise ValueError(f"y: expected {len(K)} rows as in training, got shape {y.shape}.")
        penalty = jnp.exp(alpha["log_penalty"]) * jnp.eye(len(y), dtype=y.dtype)
        return jax.scipy.linalg.solve(K + penalty, y, assume_a="pos"), state

    solver = LowerSolver(init=lambda w: (), run=run, closed_form=True, of_alpha=True)
    return KernelRidge(init, apply, Problem(lower, outer), solver)
