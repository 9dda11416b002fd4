"""Means over rows: confidence intervals of their differences, and the judgement of a choice.

:func:`bilevel.discretize.condition_six` judges a choice at the shared weights. In
:func:`judge_choice` each network is trained for one choice alone.
"""

import math
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import scipy.special

from bilevel.internal.checks import check_finite, nan_unless, real_number


def pairwise(rows: chex.Array) -> tuple[jax.Array, jax.Array]:
    """Return means over the leading axis, and standard errors, of ``rows[..., i] - rows[..., j]``.

    Both are [..., m, m]. Errors come from the differences: covariances would make equal columns
    differ.
    """

    def against(column):
        gaps = column[..., None] - rows
        return gaps.mean(axis=0), standard_error_over_rows(gaps)

    # One column at a time, because n m^2 values at once would be too many.
    means, errors = jax.lax.map(against, jnp.moveaxis(rows, -1, 0))
    return jnp.moveaxis(means, 0, -2), jnp.moveaxis(errors, 0, -2)


def standard_error_over_rows(rows: chex.Array) -> jax.Array:
    """Return the standard error of the mean over the leading axis."""
    return rows.std(axis=0, ddof=1) / math.sqrt(len(rows))


def quantile(confidence: float, n: int, statements: int = 1) -> float:
    """Return Student's t for two-sided intervals of a mean of n, all valid simultaneously."""
    miss = (1 - confidence) / max(statements, 1)
    return float(scipy.special.stdtrit(n - 1, 1 - miss / 2))


def check_confidence(confidence: float) -> None:
    """Raise ``ValueError`` if ``confidence`` is not a number in (0, 1)."""
    if not 0 < real_number("confidence", confidence) < 1:
        raise ValueError(f"confidence: expected a number in (0, 1), got {confidence}.")


class Judgement(NamedTuple):
    """Result of :func:`judge_choice`."""

    as_good: jax.Array  # [], bool: no mean is lower by more than the noise
    best: jax.Array  # [], int: the lowest mean; the choice itself if tied
    rank: jax.Array  # [], int: 1 + the number of lower means; 0 for a choice out of range
    mean: jax.Array  # [h]
    worse_by: jax.Array  # [h], the choice's mean minus each mean
    standard_error: jax.Array  # [h], of that difference, row by row


def judge_choice(losses: Any, choice: Any, *, noise: float = 1.0) -> Judgement:
    """Return whether ``choice`` is within noise of the best, by ``losses`` [n, h] on n rows.

    The rule is ``L_choice - L_j <= noise * s_j`` for every j, with ``s_j`` the standard error of
    the mean of the rows' differences. This is a decision rule, not a test. A traced choice out of
    range has ``as_good`` False, rank 0, and NaN in the other fields.
    """
    losses = jnp.asarray(losses) * 1.0
    check_finite("losses", losses)
    return _compare_losses(losses, jnp.asarray(choice), noise)


@jax.jit
def _compare_losses(losses, choice, noise) -> Judgement:
    there = (choice >= 0) & (choice < losses.shape[1])
    gaps = losses[:, choice, None] - losses  # a choice out of range takes the nearest column
    worse_by, error = gaps.mean(axis=0), standard_error_over_rows(gaps)
    best = jnp.argmax(worse_by)
    keeps, rank = there & ~(worse_by[best] > 0), 1 + (worse_by > 0).sum()
    worse_by, error = nan_unless(there, (worse_by, error))
    return Judgement(
        as_good=(worse_by <= noise * error).all(),
        best=jnp.where(keeps, choice, best),
        rank=jnp.where(there, rank, 0),
        mean=losses.mean(axis=0),
        worse_by=worse_by,
        standard_error=error,
    )
