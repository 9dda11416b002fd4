"""Is a choice as good as the best one? By any loss that the rows of a sample have.

:func:`bilevel.discretize.condition_six` asks at the shared weights, where it is the squared loss
that the theorem is about. What a user of a choice gets is the network trained for it alone, judged
by the loss of the search, or by its errors.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bilevel.discretize._intervals import standard_error_over_rows
from bilevel.internal.checks import (
    check_at_least,
    check_finite,
    concrete,
    integer,
    nan_unless,
    real_array,
)


class Judgement(NamedTuple):
    """Result of :func:`judge_choice`."""

    as_good: jax.Array  # [], bool: none has a lower mean by more than the noise
    best: jax.Array  # [], int: of the lowest mean, the choice itself where it has that too
    rank: jax.Array  # [], int: 1 where none is lower, h where all are, 0 of no choice
    mean: jax.Array  # [h]
    worse_by: jax.Array  # [h], the choice's mean less each
    standard_error: jax.Array  # [h], of that difference, row by row


def judge_choice(losses: Any, choice: Any, *, noise: float = 1.0) -> Judgement:
    """Whether ``choice`` is within noise of the best, by losses of the same rows.

    ``L_choice - L_j <= noise * s_j`` for every j, with ``s_j`` the standard error of the mean of
    the rows' differences, so that what all choices find hard does not count as noise.

    Parameters
    ----------
    losses : array [n, h]
        Of h choices on n rows that their weights were not fitted to.
    choice : int
        Column of ``losses``; may be traced. A traced one that there is not has ``as_good`` False,
        rank 0, and NaN for what it is worse by and the errors.
    noise : float
        In standard errors. The smaller, the surer is a yes, and the rarer.

    Returns
    -------
    Judgement

    Raises
    ------
    ValueError
        For other shapes, fewer than 2 rows, NaN, a choice that there is not, negative noise.

    Notes
    -----
    A rule for a decision and no test: of h equally good choices, the chance that one is within a
    standard error of the best of all is well under 1. Time and memory: ``n h``.

    Examples
    --------
    >>> losses = jnp.array([[0.1, 0.3, 0.2], [0.5, 0.6, 0.4], [0.2, 0.5, 0.3]])
    >>> first, second = judge_choice(losses, 0), judge_choice(losses, 1)
    >>> bool(first.as_good), int(first.rank), bool(second.as_good), int(second.rank)
    (True, 1, False, 3)
    """
    losses = real_array("losses", losses) * 1.0
    if losses.ndim != 2 or len(losses) < 2 or losses.size == 0:
        raise ValueError(f"losses: expected shape [n, h] with at least 2 rows, got {losses.shape}.")
    check_finite("losses", losses)
    h = losses.shape[1]
    if concrete(choice) and not integer("choice", choice, 0) < h:
        raise ValueError(f"choice: expected 0 to {h - 1}, got {choice}.")
    check_at_least("noise", noise, 0)
    return _compare_losses(losses, jnp.asarray(choice), noise)


@jax.jit
def _compare_losses(losses, choice, noise) -> Judgement:
    there = (choice >= 0) & (choice < losses.shape[1])
    gaps = losses[:, choice, None] - losses  # of the nearest column where there is none
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
