"""Diagnostics of a search of architectures: the entropy of alpha, the curvature of its loss.

Growth of :func:`alpha_curvature` predicts bad generalisation (Zela, Elsken, Saikia, Marrakchi, Brox
& Hutter, Understanding and Robustifying Differentiable Architecture Search, ICLR 2020).
"""

from collections.abc import Callable

import chex
import jax
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from bilevel.contracts import Loss, Pytree


def entropy(alpha: chex.Array) -> jax.Array:
    """Return the entropy of simplices, in nats: of ``alpha`` [..., h] on its last axis, [...].

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> entropy(jnp.array([[0.5, 0.5], [1.0, 0.0]])).round(4)
    Array([0.6931, 0.    ], dtype=float...)
    """
    return jax.scipy.special.entr(alpha).sum(axis=-1)


def simplices(sets: Pytree, alpha: Pytree) -> list[jax.Array]:
    """List the leaves of ``alpha`` that are on simplices; ``sets`` can be a prefix of ``alpha``."""
    parts = jax.tree.map(lambda word, part: part if word == "simplex" else None, sets, alpha)
    return jax.tree.leaves(parts)


def simplex_tangent(sets: Pytree, direction: Pytree) -> Pytree:
    """Return the part of a direction of ``alpha`` that stays in the planes of its simplices."""

    def along(word, part):
        if word != "simplex":
            return part
        return jax.tree.map(lambda v: v - v.mean(axis=-1, keepdims=True), part)

    return jax.tree.map(along, sets, direction)


_DENSE = 16  # largest size of alpha with a dense Hessian


def alpha_curvature(loss: Loss, sets: Pytree = "simplex") -> Callable[..., float]:
    """Return ``curvature(w, alpha, batch)``, the largest eigenvalue of the loss's Hessian in alpha.

    Lanczos's method uses Hessian-vector products along the simplices: one compiled program, called
    from the host. The result is a float with relative error 1e-4. Arrays must be concrete.

    Parameters
    ----------
    loss : ``loss(w, alpha, batch) -> scalar``
        ``space.problem.outer``.
    sets : pytree of {"simplex", "box", "free"}
        ``space.sets``. Directions out of the simplices have curvature 0, so the result is never
        negative if there are simplices. The paper's alpha are logits, with other values.

    Raises
    ------
    ValueError
        If second derivatives are not finite in a call.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> curvature = alpha_curvature(lambda w, alpha, batch: w * jnp.sum(alpha**2))
    >>> round(curvature(3.0, jnp.full((2, 4), 0.25), None), 3)
    6.0
    """

    @jax.jit
    def product(v, w, alpha, batch):
        flat, unravel = ravel_pytree(alpha)

        def along(v):
            return ravel_pytree(simplex_tangent(sets, unravel(v)))[0]

        slope = jax.grad(lambda a: loss(w, unravel(a), batch))
        return along(jax.jvp(slope, (flat,), (along(v.astype(flat.dtype)),))[1])

    def largest(w, alpha, batch):
        from scipy.sparse.linalg import LinearOperator, eigsh

        def hessian_product(v):
            return np.asarray(product(v, w, alpha, batch), float)

        size = ravel_pytree(alpha)[0].size
        least = 0.0 if "simplex" in jax.tree.leaves(sets) else -np.inf
        start = np.random.default_rng(0).normal(size=size)
        first = hessian_product(start)
        if not np.isfinite(first).all():
            raise ValueError(
                "alpha: expected a loss whose second derivatives are finite there, got a NaN or an "
                "infinity."
            )
        if not first.any():  # a loss linear in alpha
            return 0.0
        if size <= _DENSE:
            hessian = np.stack([hessian_product(v) for v in np.eye(size)])
            return max(least, float(np.linalg.eigvalsh(hessian)[-1]))
        operator = LinearOperator((size, size), hessian_product, dtype=float)
        eigenvalues = eigsh(operator, 1, which="LA", v0=start, tol=1e-4, return_eigenvectors=False)
        return max(least, float(eigenvalues[0]))

    return largest


def kernel_diagonal(apply: Callable, w: Pytree, alpha: Pytree, x: chex.Array) -> jax.Array:
    """Return the mean over rows ``x`` of the tangent kernel's entry (x, x), of the first output.

    Its inverse is the scale of step sizes for gradient descent on a mean loss.
    """

    def entry(row):
        slope = jax.grad(lambda w: apply(w, alpha, row[None]).reshape(-1)[0])(w)
        return optax.tree.norm(slope, squared=True)

    return jax.lax.map(entry, x).mean()
