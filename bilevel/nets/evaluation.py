"""Means over whole data sets, batch by batch, through one compiled program; two errors compared.

All batches have one size. A part's last batch is its last rows, weighted by the number of rows that
are not in the batch before. If the size does not divide the part, its mean stands for these rows.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import scipy.special

from bilevel.contracts import Pytree
from bilevel.internal.checks import integer, one_a_row

Part = tuple[chex.Array, chex.Array]
"""Inputs [n, ...] and labels [n]."""


class Batches(NamedTuple):
    """Rows of several parts in batches of one size; see :func:`in_batches`."""

    rows: tuple[jax.Array, jax.Array]  # inputs [k, size, ...], labels [k, size]
    weights: jax.Array  # [parts, k]: weight of each batch's mean in each part's mean
    new: jax.Array  # [k, size], bool: rows that are in no earlier batch


def in_batches(parts: Sequence[Part], size: int) -> Batches:
    """Return the rows of several parts in batches of ``size``, or of the smallest part's length."""
    lengths = [len(labels) for _, labels in parts]
    if not lengths or min(lengths) < 1:
        raise ValueError(f"parts: expected rows in each of them, got {lengths}.")
    size = min(integer("size", size, 1), *lengths)
    rows, weights, new = [], [], []
    for x, labels in parts:
        n = len(labels)
        starts = np.minimum(np.arange(0, n, size), n - size)
        index = starts[:, None] + np.arange(size)
        rows.append((x[index], labels[index]))
        fresh = np.diff(starts, prepend=-size)  # rows that are not in the batch before
        weights.append(fresh / n)
        new.append(np.arange(size) >= size - fresh[:, None])
    stacked = jax.tree.map(lambda *a: jnp.concatenate(a), *rows)
    shares = jnp.asarray(jax.scipy.linalg.block_diag(*weights))
    return Batches(stacked, shares, jnp.asarray(np.concatenate(new)))


def over_batches(mean: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Return ``f(w, other, batches) -> [parts]`` of ``mean(w, other, batch)``, a mean over rows."""

    def of_all(w, other, batches):
        means = jax.lax.map(lambda batch: mean(w, other, batch), batches.rows)
        # 0 times an infinite mean of another part would be NaN.
        return jnp.where(batches.weights > 0, batches.weights * means[None], 0).sum(axis=1)

    return of_all


def wrong_rows(
    predict: Callable[[jax.Array], jax.Array], outputs: chex.Array, labels: chex.Array
) -> jax.Array:
    """Return [n], bool: rows with a wrong label, or with outputs that are not finite."""
    known = jnp.isfinite(outputs).reshape(len(outputs), -1).all(axis=1)
    guesses = predict(outputs)
    one_a_row(labels, guesses.shape)
    return (guesses != labels) | ~known


def error_rates(model: Any) -> Callable[[Pytree, Pytree, Sequence[Part], int], list[float]]:
    """Return ``rates(w, other, parts, batch_size)``: each part's share of wrong rows.

    ``model`` is a Space, with ``alpha`` as ``other``, or a TrainableNetwork, with its averages.
    """

    @jax.jit
    def shares(w, other, batches):
        def wrong(batch):
            x, labels = batch
            return wrong_rows(model.predict, model.apply(w, other, x), labels)

        counts = (jax.lax.map(wrong, batches.rows) & batches.new).sum(axis=1)
        part = (batches.weights > 0).astype(counts.dtype)
        return part @ counts / (part @ batches.new.sum(axis=1))

    def of_parts(w, other, parts, batch_size):
        return shares(w, other, in_batches(parts, batch_size)).tolist()

    return of_parts


def standard_error_over_seeds(x: np.ndarray) -> float:
    """Return the standard error of the mean of ``x`` [seeds]; NaN for one seed."""
    return float(x.std(ddof=1) / np.sqrt(len(x))) if len(x) > 1 else float("nan")


def compare_errors(ours: np.ndarray, baseline: np.ndarray, rows: int) -> str:
    """Compare two test errors [seeds]: the difference in points, its 95 % interval, a verdict.

    The interval is Student's of the seeds' differences. For one seed it is that of Agresti & Caffo
    (2000) for independent rows, which is too wide, as both networks have the same rows.
    """
    ours, baseline = np.asarray(ours), np.asarray(baseline)
    differences, seeds = ours - baseline, len(ours)
    if by_seeds := bool(np.ptp(differences) > 1e-9):
        center = differences.mean()
        error = standard_error_over_seeds(differences)
        width = scipy.special.stdtrit(seeds - 1, 0.975) * error
    else:
        rates = [(np.mean(rate) * rows + 1) / (rows + 2) for rate in (ours, baseline)]
        center = rates[0] - rates[1]
        width = 1.96 * np.sqrt(sum(rate * (1 - rate) for rate in rates) / (rows + 2))
    low, high = 100 * (center - width), 100 * (center + width)
    verdict = "no clear difference" if low <= 0 <= high else "clearly worse"
    verdict = "clearly better" if high < 0 else verdict
    basis = f"{seeds} seeds" if by_seeds else f"{rows} test rows"
    return (
        f"{verdict} ({100 * differences.mean():+.1f} points, 95 % interval {low:+.1f} to "
        f"{high:+.1f}, from {basis})"
    )
