"""Judge whether a choice is as good as the best one, by the losses of rows.

:func:`bilevel.discretize.condition_six` asks this at the shared weights. Here each network is
trained for one choice alone, and judged by the loss of the search or by its errors.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bilevel.discretize._intervals import standard_error_over_rows
from bilevel.internal.checks import check_finite, nan_unless


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
