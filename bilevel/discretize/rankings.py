"""Discrete choices from alpha, their rankings, and the agreement of two rankings.

Simplices are the last axis of a leaf of alpha. NaN counts as the largest entry of a traced alpha.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import scipy.special

from bilevel.contracts import Pytree
from bilevel.discretize.judgement import (
    check_confidence,
    pairwise,
    quantile,
    standard_error_over_rows,
)
from bilevel.internal.checks import as_floating, concrete, function, integer, prng_key, real_array


def argmax(alpha: Pytree) -> Pytree:
    """Return the index of the largest entry of every simplex (last axis), the first of equal ones.

    Raises
    ------
    ValueError
        If a leaf is empty or, not traced, has NaN.

    Examples
    --------
    >>> argmax({"edge": jnp.array([[0.2, 0.8], [0.5, 0.5]])})
    {'edge': Array([1, 0], dtype=int...)}
    """
    return jax.tree.map(lambda a: jnp.argmax(_check_alpha(a), axis=-1), alpha)


def top_k(alpha: Pytree, k: int) -> Pytree:
    """Return the indices [..., k] of the k largest entries of every simplex, best first.

    Raises
    ------
    ValueError
        If a leaf is empty or, not traced, has NaN, or ``k`` is not from 1 to their number.

    Examples
    --------
    >>> top_k(jnp.array([0.2, 0.5, 0.3]), 2)
    Array([1, 2], dtype=int...)
    """
    k = integer("k", k, 1)

    def largest(a):
        a = _check_alpha(a)
        if k > a.shape[-1]:
            raise ValueError(f"k: expected 1 to {a.shape[-1]}, got {k}.")
        return jax.lax.top_k(a, k)[1]

    return jax.tree.map(largest, alpha)


def rank_by_alpha(alpha: Pytree) -> Pytree:
    """Return the indices [..., h] of every simplex, largest entry first, equal ones in their order.

    Raises
    ------
    ValueError
        If a leaf is empty or, not traced, has NaN.

    Examples
    --------
    >>> rank_by_alpha(jnp.array([0.2, 0.5, 0.3]))
    Array([1, 2, 0], dtype=int...)
    """

    def descending(a):  # negation fails for bools and wraps for bytes
        return jnp.argsort(_check_alpha(a), axis=-1, stable=True, descending=True)

    return jax.tree.map(descending, alpha)


class Ranking(NamedTuple):
    """Choices by their losses; the last three are None if losses are scalars."""

    order: jax.Array  # [m], int: best first, NaN last
    losses: jax.Array  # [m]
    standard_error: jax.Array | None = None  # [m]
    difference: jax.Array | None = None  # [m, m], losses[i] - losses[j]
    half_width: jax.Array | None = None  # [m, m], of the interval of each difference by itself


def rank_by_shared_weights(
    evaluate: Callable[[Any], jax.Array], choices: Pytree, *, confidence: float = 0.95
) -> Ranking:
    """Rank discrete choices by their losses at the shared weights.

    Parameters
    ----------
    evaluate : ``evaluate(choice) -> loss``
        A scalar, or the losses [n] of n rows, the same rows for every choice. Rows give standard
        errors and intervals of differences, paired by rows (Student's t).
    choices : pytree of arrays [m, ...]
        ``jnp.eye(h)`` for the vertices of a simplex. Evaluated one at a time, compiled once.
    confidence : float
        Confidence of each interval by itself.

    Raises
    ------
    ValueError
        If ``evaluate`` is not a function, ``choices`` is empty, losses have another shape, or
        ``confidence`` is outside (0, 1).

    Examples
    --------
    >>> y = jnp.array([1.0, 3.0])
    >>> ranking = rank_by_shared_weights(lambda c: (y - c) ** 2, jnp.array([0.0, 2.0]))
    >>> ranking.order, ranking.losses
    (Array([1, 0], dtype=int...), Array([5., 1.], dtype=float...))
    """
    check_confidence(confidence)
    function("evaluate", evaluate, "choice -> loss")
    if not all(map(np.size, jax.tree.leaves(choices))) or not jax.tree.leaves(choices):
        raise ValueError("choices: expected at least one on the leading axis, got none.")
    losses = as_floating("evaluate", jax.lax.map(evaluate, choices))
    if losses.ndim == 1:
        return Ranking(jnp.argsort(losses), losses)
    if losses.ndim != 2 or losses.shape[1] < 2:
        raise ValueError(
            "evaluate: expected a scalar or the losses of at least 2 rows, "
            f"got shape {losses.shape[1:]}."
        )
    means, error = losses.mean(axis=1), standard_error_over_rows(losses.T)
    difference, spread = pairwise(losses.T)
    half_width = quantile(confidence, losses.shape[1]) * spread
    return Ranking(jnp.argsort(means), means, error, difference, half_width)


class Agreement(NamedTuple):
    """Two rank correlations with their intervals; see :func:`rank_agreement`."""

    kendall: jax.Array  # [], tau-b
    kendall_interval: jax.Array  # [2]
    spearman: jax.Array  # []
    spearman_interval: jax.Array  # [2]


def rank_agreement(
    key: chex.PRNGKey,
    a: chex.Array,
    b: chex.Array,
    *,
    confidence: float = 0.95,
    resamples: int = 1000,
) -> Agreement:
    """Return Kendall's tau-b and Spearman's rho of two score vectors, both with ties.

    Both are NaN if all scores of one vector are equal.
    An interval covers the correlation over the population of the m choices. Each end is the wider
    one of two intervals. The first has percentiles of a bootstrap over choices. The second is
    Fisher's z, with the variance ``0.437 / (m - 4)`` for tau (Fieller, Hartley & Pearson 1957) and
    ``(1 + rho^2 / 2) / (m - 3)`` for rho (Bonett & Wright 2000). At m = 5 and a normal correlation
    of 0.9 the bootstrap's 95 % intervals alone cover 72 %. Fisher's z covers 89 to 99 % of untied
    normal pairs, m = 5 to 30, and needs 5 choices.

    Parameters
    ----------
    key : jax.Array
        For the bootstrap.
    a, b : arrays [m]
        Scores of the same choices, e.g. alpha and minus the loss.
    confidence, resamples : float, int
        Time: ``resamples m^2``.

    Raises
    ------
    ValueError
        If ``key`` is not a PRNG key, lengths differ or are under 2, a score is NaN, ``confidence``
        is outside (0, 1), or ``resamples`` is under 1.

    Examples
    --------
    >>> result = rank_agreement(jax.random.key(0), jnp.arange(5), jnp.array([0, 2, 1, 3, 4]))
    >>> round(float(result.kendall), 3), round(float(result.spearman), 3)
    (0.8, 0.9)
    """
    check_confidence(confidence)
    prng_key("key", key)
    resamples = integer("resamples", resamples, 1)
    a, b = real_array("a", a), real_array("b", b)
    if a.ndim != 1 or a.shape != b.shape or a.size < 2:
        raise ValueError(
            f"a, b: expected two vectors of one length, at least 2, got {a.shape} and {b.shape}."
        )
    _check_no_nan("a", a)
    _check_no_nan("b", b)
    return _agreement_intervals(key, a, b, confidence, resamples)


@functools.partial(jax.jit, static_argnums=(3, 4))
def _agreement_intervals(key, a, b, confidence, resamples) -> Agreement:
    m = a.size
    normal = scipy.special.ndtri((1 + confidence) / 2)
    levels = jnp.array([(1 - confidence) / 2, (1 + confidence) / 2])
    picks = jax.random.bits(key, (resamples, m)) % m  # uneven by m / 2^32; compiles fast

    r = jnp.stack(_tau_and_rho(a, b))
    resampled = jax.lax.map(lambda p: _tau_and_rho(a[p], b[p]), picks, batch_size=50)
    # The correlation of resamples that repeat one choice is NaN.
    low, high = jnp.nanquantile(jnp.stack(resampled), levels, axis=1)
    # Half of the step from perfect agreement to the next best keeps z finite.
    near_one = 1 - jnp.array([2 / (m * (m - 1)), 6 / (m * (m * m - 1))])
    z = jnp.arctanh(jnp.clip(r, -near_one, near_one))
    freedom = jnp.maximum(m - jnp.array([4, 3]), 0)
    reach = normal * jnp.sqrt(jnp.array([0.437, 1 + r[1] ** 2 / 2]) / freedom.astype(r.dtype))
    ends = jnp.stack([r, low, high, jnp.tanh(z - reach), jnp.tanh(z + reach)])
    tau, rho = jnp.stack([ends.min(axis=0), ends.max(axis=0)], axis=1)
    return Agreement(r[0], tau, r[1], rho)


def _tau_and_rho(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return tau-b and rho from the signs of all differences."""

    def signs(v):  # without subtraction: unsigned integers would wrap, infinities give NaN
        row, column = v[None], v[:, None]
        above = (column > row).astype(float) - (column < row).astype(float)
        return jnp.where(jnp.isnan(v).any(), jnp.nan, above)

    x, y = signs(a), signs(b)

    def cosine(x, y):
        return jnp.vdot(x, y) / jnp.sqrt(jnp.vdot(x, x) * jnp.vdot(y, y))

    # The number below minus the number above is twice the mean rank, centred.
    return cosine(x, y), cosine(x.sum(axis=1), y.sum(axis=1))


def _check_alpha(alpha: Any) -> jax.Array:
    alpha = real_array("alpha", alpha)
    if alpha.ndim == 0 or alpha.size == 0:
        raise ValueError(f"alpha: expected entries on the last axis, got shape {alpha.shape}.")
    _check_no_nan("alpha", alpha)
    return alpha


def _check_no_nan(name: str, x: jax.Array) -> None:
    if concrete(x) and bool(jnp.isnan(x).any()):
        raise ValueError(f"{name}: expected numbers, got NaN.")
