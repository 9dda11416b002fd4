"""Confidence intervals of means and of their differences, from rows."""

import math

import chex
import jax
import jax.numpy as jnp
import scipy.special

from bilevel.internal.checks import real_number


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
    if not 0 < real_number("confidence", confidence) < 1:
        raise ValueError(f"confidence: expected a number in (0, 1), got {confidence}.")
