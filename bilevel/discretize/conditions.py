"""Condition 6 of Roberts et al., tested on rows; :mod:`bilevel.discretize` has the mathematics."""

import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from bilevel.discretize.judgement import (
    check_confidence,
    pairwise,
    quantile,
    standard_error_over_rows,
)
from bilevel.internal.checks import (
    at_least_float32,
    check_finite,
    float_array,
    nan_where,
    real_array,
    simplex,
    simplex_slack,
)


class ConditionSix(NamedTuple):
    """Result of :func:`condition_six`. Verdicts are 1 yes, -1 no, 0 undecided by the rows.

    "By itself" means at the given confidence. "Together" means that all such statements hold
    simultaneously with it. The last seven are None without targets.
    """

    verdict: jax.Array  # [h, h], int8: D_i >= D_j, each by itself
    D: jax.Array  # [h]; NaN where alpha_i = 1
    difference: jax.Array  # [h, h], D_i - D_j
    half_width: jax.Array  # [h, h], of its interval, each by itself
    argmax: jax.Array  # [], int: a
    condition: jax.Array  # [], int8: D_j >= D_a for all j, together
    nearest: jax.Array  # [], int8: f_a is nearest to f_alpha, together
    trust: jax.Array  # [], int8: L_a is the smallest L_j, together
    L: jax.Array | None = None  # [h]
    L_alpha: jax.Array | None = None  # [], the mixture's own loss
    loss_order: jax.Array | None = None  # [h, h], int8: L_i <= L_j, each by itself
    realizability: jax.Array | None = None  # [], max_i |L_i - (1 - alpha_i)^2 D_i|
    slack: jax.Array | None = None  # [h], s_i
    slack_half_width: jax.Array | None = None  # [h], of its interval, together
    stationarity: jax.Array | None = None  # [], g = max_i -s_i, at least 0


def condition_six(
    outputs: chex.Array,
    alpha: chex.Array,
    targets: chex.Array | None = None,
    *,
    confidence: float = 0.95,
) -> ConditionSix:
    """Test on rows whether ``argmax(alpha)`` is the best choice at the shared weights.

    This is Condition 6 of Roberts, Liang & Sala, with Theorem 7; see :mod:`bilevel.discretize`.
    ``D_i - D_j`` is the mean over rows of ``1/2 |f_i - f_gamma(i)|^2 - 1/2 |f_j - f_gamma(j)|^2``,
    so its interval is that of a mean (Student's t; simultaneous ones by Bonferroni).

    ``trust`` answers the question. With targets it compares the losses and assumes nothing. Without
    targets it is ``nearest``, which is right **if alpha minimises the loss over the simplex at
    W***; rows without targets cannot show this. Then ``condition = 1`` rules out ``nearest = -1``.
    ``condition = -1`` rules out nothing, because Condition 6 is not necessary: for
    ``E f f' = diag(1, 3, 1)`` and alpha = (.55, .35, .1) it fails and the argmax is best. A choice
    of ``alpha_j = 0`` nearer than the argmax leaves ``nearest`` undecided, since outputs do not
    show s_j.

    With targets, two fields measure the assumptions, in units of the loss. ``realizability`` is 0
    under the paper's Assumption 3. ``stationarity`` bounds by how much moving alpha could lower the
    mixture's loss at these weights; it is 0 where alpha minimises it. ``slack + slack_half_width <
    0`` anywhere rejects that.

    Parameters
    ----------
    outputs : array [n, h] or [n, h, o]
        ``f_i`` of the network with choice i alone, at the shared weights, on n test rows. Rows to
        which the weights or alpha were fitted make the intervals too narrow.
    alpha : array [h]
        On the simplex.
    targets : array [n] or [n, o], optional
    confidence : float

    Raises
    ------
    ValueError
        If shapes do not match, there are fewer than 2 rows, alpha is off the simplex, an entry is
        NaN, or ``confidence`` is outside (0, 1).

    Notes
    -----
    - h = 2: ``D_1 = D_2``, so the condition always holds (Theorem 1), here without rounding errors.
    - ``alpha_a = 1``: gamma and D_a do not exist, but ``(1 - alpha_a)^2 D_a`` is 0, and
      ``condition`` is 1; each pair with a is undecided.
    - L is at the *shared* weights; the paper does not treat choices that are retrained one by one.
    - Memory: ``outputs`` a few times. Time: ``n h^2 o``.

    Examples
    --------
    Among 0, z and -z the first is best, not the argmax. ``y = f_alpha``, so Condition 6 fails:

    >>> z = jnp.linspace(-3, 3, 101)
    >>> outputs, alpha = jnp.stack([0 * z, z, -z], axis=1), jnp.array([0.2, 0.45, 0.35])
    >>> result = condition_six(outputs, alpha, outputs @ alpha)
    >>> int(result.argmax), int(result.condition), int(result.trust)
    (1, -1, -1)
    >>> (result.L / result.L[0]).round().tolist()
    [1.0, 81.0, 121.0]
    """
    check_confidence(confidence)
    outputs, alpha, targets = _aligned(outputs, alpha, targets)
    return _condition_six_on_rows(outputs, alpha, targets, confidence)


@functools.partial(jax.jit, static_argnums=3)
def _condition_six_on_rows(outputs, alpha, targets, confidence) -> ConditionSix:
    n, h, _ = outputs.shape
    pair = quantile(confidence, n)
    together = quantile(confidence, n, statements=h - 1)
    a = jnp.argmax(alpha)

    # An accelerator's default precision would round outputs that have to cancel.
    mix = functools.partial(jnp.einsum, precision="highest")
    gamma = jax.vmap(factor_simplex, (None, 0))(alpha, jnp.arange(h))
    mixture = mix("k,nko->no", alpha, outputs)
    away = outputs - mixture[:, None]
    squares = [outputs - mix("ik,nko->nio", gamma, outputs), away]
    if targets is not None:
        squares.append(outputs - targets[:, None])
    rows = 0.5 * jnp.sum(jnp.stack(squares, axis=1) ** 2, axis=-1)  # [n, 2 or 3, h]
    D, distance, *L = rows.mean(axis=0)
    difference, spread = pairwise(rows)
    verdicts = _verdict(difference, pair * spread)
    argmax_least = _verdict(difference, together * spread)[..., a]

    nearest = jnp.where(alpha > 0, argmax_least[1], jnp.maximum(argmax_least[1], 0)).min()
    without = ConditionSix(
        verdict=verdicts[0],
        D=D,
        difference=difference[0],
        half_width=pair * spread[0],
        argmax=a,
        condition=jnp.where(alpha[a] < 1, argmax_least[0].min(), jnp.int8(1)),
        nearest=nearest,
        trust=nearest,
    )
    if targets is None:
        return without

    slacks = mix("no,nko->nk", mixture - targets, away)
    slack = slacks.mean(axis=0)
    return without._replace(
        trust=argmax_least[2].min(),
        L=L[0],
        L_alpha=0.5 * jnp.sum((mixture - targets) ** 2, axis=-1).mean(),
        loss_order=verdicts[2].T,
        realizability=jnp.max(jnp.abs(L[0] - distance)),
        slack=slack,
        slack_half_width=quantile(confidence, n, statements=h) * standard_error_over_rows(slacks),
        stationarity=jnp.maximum(jnp.max(-slack), 0),
    )


def factor_simplex(alpha: chex.Array, i: int | chex.Array) -> jax.Array:
    """Return ``gamma`` in ``alpha = alpha_i e_i + (1 - alpha_i) gamma`` (Lemma 5).

    ``alpha`` is [..., h]. ``gamma = alpha_{-i} / (1 - alpha_i)`` has a 0 at vertex i. It is NaN off
    the simplex, for ``alpha_i = 1``, and for ``i`` out of range.
    """
    alpha = jnp.asarray(alpha)
    mass = alpha.astype(at_least_float32(alpha.dtype)).sum(-1, keepdims=True)
    near = jnp.abs(mass - 1) <= simplex_slack(alpha.dtype)
    alpha = nan_where(~((alpha >= 0).all(-1, keepdims=True) & near), alpha)
    h = alpha.shape[-1]
    others = jnp.where(jnp.arange(h) == i, 0, alpha)
    others = nan_where((i < 0) | (i >= h), others)
    # The sum is 1 - alpha_i without its cancellation near a vertex.
    total = jnp.sum(others, axis=-1, keepdims=True)
    # XLA multiplies by a reciprocal, and x (1 / x) need not be 1; for h = 2 gamma must be exact.
    gamma = others / total
    rounded = jnp.where((others == total) & (total > 0), 1, gamma)
    return gamma + jax.lax.stop_gradient(rounded - gamma)  # the derivative of a constant 1 is 0


def _verdict(difference: jax.Array, half_width: jax.Array) -> jax.Array:
    """Return whether ``difference >= 0``: 1, -1, or 0 if undecided or NaN."""
    yes, no = difference - half_width >= 0, difference + half_width < 0
    return yes.astype(jnp.int8) - no.astype(jnp.int8)


def _aligned(outputs: Any, alpha: Any, targets: Any) -> tuple:
    """Return ``outputs`` [n, h, o], ``alpha`` [h], ``targets`` [n, o] or None, all floating."""
    given = real_array("alpha", alpha)
    arrays = {"outputs": outputs, "alpha": given, "targets": targets}
    arrays = {k: None if x is None else float_array(k, x) for k, x in arrays.items()}
    for name, x in arrays.items():
        check_finite(name, x)
    outputs, alpha, targets = arrays.values()
    if outputs.ndim not in (2, 3) or outputs.shape[0] < 2 or outputs.size == 0:
        raise ValueError(
            "outputs: expected shape [n, h] or [n, h, o] with at least 2 rows, "
            f"got {outputs.shape}."
        )
    n, h, *o = outputs.shape
    if alpha.shape != (h,):
        raise ValueError(f"alpha: expected shape ({h},), got {alpha.shape}.")
    simplex("alpha", given)
    if given.dtype.itemsize < 4:  # in 16 bits the sum is only near 1
        alpha = alpha / alpha.sum()
    if targets is not None:
        if targets.shape != (n, *o):
            raise ValueError(f"targets: expected shape {(n, *o)}, got {targets.shape}.")
        targets = targets.reshape(n, -1)
    return outputs.reshape(n, h, -1), alpha, targets
