"""Lemma 5 of Roberts et al.: a point of the simplex as a vertex and a point of its face."""

import chex
import jax
import jax.numpy as jnp

from bilevel.internal.checks import (
    at_least_float32,
    check_floating,
    concrete,
    integer,
    nan_where,
    offending,
    real_array,
    simplex,
    simplex_slack,
)


def factor_simplex(alpha: chex.Array, i: int | chex.Array) -> jax.Array:
    """Lemma 5 (Lemma 2 for h = 3): ``alpha = alpha_i e_i + (1 - alpha_i) gamma``.

    ``gamma = alpha_{-i} / (1 - alpha_i)`` lies on the face opposite to vertex i: it has a 0 there.
    The paper states it for i = 1 and interior alpha.

    Parameters
    ----------
    alpha : array [..., h]
        On the simplex.
    i : int
        A vertex; may be traced.

    Returns
    -------
    gamma : array [..., h]
        NaN for ``alpha_i = 1``: every point of the face then factors alpha. NaN, too, for a traced
        i that is no vertex.

    Raises
    ------
    ValueError
        If ``i`` is no vertex, or ``alpha`` off the simplex.

    Examples
    --------
    >>> factor_simplex(jnp.array([0.2, 0.45, 0.35]), 0)
    Array([0. , 0.5625, 0.4375], dtype=float...)
    """
    alpha = _on_simplex(alpha)
    h = alpha.shape[-1]
    if concrete(i) and not integer("i", i, 0) < h:
        raise ValueError(f"i: expected 0 to {h - 1}, got {i}.")
    others = jnp.where(jnp.arange(h) == i, 0, alpha)
    others = nan_where((i < 0) | (i >= h), others)
    # The sum is 1 - alpha_i without its cancellation near a vertex.
    total = jnp.sum(others, axis=-1, keepdims=True)
    # XLA multiplies by a reciprocal, and x (1 / x) need not be 1: for h = 2 it has to be.
    gamma = others / total
    rounded = jnp.where((others == total) & (total > 0), 1, gamma)
    return gamma + jax.lax.stop_gradient(rounded - gamma)  # a constant 1 has no derivative


def simplex_factors(alpha: chex.Array) -> jax.Array:
    """Lemma 5 applied to its own gamma: ``beta_i = alpha_i / sum_{j >= i} alpha_j``.

    Maps the interior of the simplex onto the open cube, (0, 1)^(h - 1); on the boundary, where
    nothing is left to divide, beta is 0. Inverse: :func:`simplex_from_factors`.

    Parameters
    ----------
    alpha : array [..., h]
        On the simplex.

    Returns
    -------
    beta : array [..., h - 1]
        NaN for a traced alpha off the simplex.

    Raises
    ------
    ValueError
        If ``alpha`` is off the simplex.

    Examples
    --------
    >>> simplex_factors(jnp.array([0.2, 0.4, 0.4]))
    Array([0.2, 0.5], dtype=float...)
    """
    alpha = _on_simplex(alpha)
    left = jnp.cumsum(alpha[..., ::-1], axis=-1)[..., ::-1]
    # Asked this way round, NaN stays NaN.
    return jnp.where(left == 0, 0, alpha / jnp.where(left == 0, 1, left))[..., :-1]


def simplex_from_factors(beta: chex.Array) -> jax.Array:
    """``alpha_i = beta_i prod_{k < i} (1 - beta_k)``, with ``beta_h = 1``: stick breaking.

    Parameters
    ----------
    beta : array [..., h - 1]
        In [0, 1].

    Returns
    -------
    alpha : array [..., h]
        NaN for a traced beta outside [0, 1].

    Raises
    ------
    ValueError
        If ``beta`` is not an array of real floating-point numbers in [0, 1].

    Examples
    --------
    >>> simplex_from_factors(jnp.array([0.2, 0.5]))
    Array([0.2, 0.4, 0.4], dtype=float...)
    """
    beta = real_array("beta", beta)
    check_floating("beta", beta)
    if beta.ndim < 1:
        raise ValueError(f"beta: expected shape [..., h - 1], got {beta.shape}.")
    # Of quotients of equal numbers: a few roundings above 1.
    inside = (beta >= 0) & (beta <= 1 + 4 * jnp.finfo(beta.dtype).eps)
    if concrete(beta) and not inside.all():
        raise ValueError(f"beta: expected numbers in [0, 1], got {offending(beta, inside)}.")
    beta = nan_where(~inside.all(-1, keepdims=True), beta)
    one = jnp.ones((*beta.shape[:-1], 1), beta.dtype)
    left = jnp.cumprod(1 - beta, axis=-1)
    return jnp.concatenate([beta, one], -1) * jnp.concatenate([one, left], -1)


def _on_simplex(alpha: jax.Array) -> jax.Array:
    """``alpha``, refused off the simplex; where it is traced, NaN there."""
    alpha = real_array("alpha", alpha)
    check_floating("alpha", alpha)
    if alpha.ndim < 1 or alpha.size == 0:
        raise ValueError(f"alpha: expected shape [..., h], got {alpha.shape}.")
    simplex("alpha", alpha)
    total = alpha.astype(at_least_float32(alpha.dtype)).sum(-1, keepdims=True)
    near = jnp.abs(total - 1) <= simplex_slack(alpha.dtype)
    return nan_where(~((alpha >= 0).all(-1, keepdims=True) & near), alpha)
