"""Means over whole data sets, batch by batch, through one compiled program.

Rows come in batches of one size, so that nothing is compiled anew for another part: a part's last
batch is its last rows, and counts by the rows that the one before has not. Where the size divides
the part, that is the mean; elsewhere the last batch's mean stands for that of its new rows.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from bilevel.contracts import Pytree
from bilevel.internal.checks import integer, one_a_row

Part = tuple[chex.Array, chex.Array]
"""Inputs [n, ...] and labels [n]."""


class Batches(NamedTuple):
    """Several parts' rows in batches of one size; see :func:`in_batches`."""

    rows: tuple[jax.Array, jax.Array]  # inputs [k, size, ...], labels [k, size]
    weights: jax.Array  # [parts, k]: of the batches' means in the parts'
    new: jax.Array  # [k, size], bool: which rows no batch before had


def in_batches(parts: Sequence[Part], size: int) -> Batches:
    """The rows of several parts in batches of ``size``, or of the smallest part if that is less.

    Parameters
    ----------
    parts : sequence of (inputs [n, ...], labels [n])
    size : int

    Raises
    ------
    ValueError
        For a ``size`` under 1, or a part without rows.

    Examples
    --------
    >>> batches = in_batches([(jnp.zeros((5, 2)), jnp.arange(5))], 2)
    >>> batches.rows[1].tolist(), batches.weights.round(1).tolist()
    ([[0, 1], [2, 3], [3, 4]], [[0.4..., 0.4..., 0.2...]])
    """
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
        fresh = np.diff(starts, prepend=-size)  # rows that the batch before has not
        weights.append(fresh / n)
        new.append(np.arange(size) >= size - fresh[:, None])
    stacked = jax.tree.map(lambda *a: jnp.concatenate(a), *rows)
    shares = jnp.asarray(jax.scipy.linalg.block_diag(*weights))
    return Batches(stacked, shares, jnp.asarray(np.concatenate(new)))


def over_batches(mean: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """``f(w, other, batches) -> [parts]`` of ``mean(w, other, batch)``, a mean over a batch's rows.

    Pure. Memory: that of one batch.

    Examples
    --------
    >>> parts = [(jnp.zeros(4), jnp.arange(4.0)), (jnp.zeros(2), jnp.ones(2))]
    >>> f = over_batches(lambda w, _, batch: w * batch[1].mean())
    >>> f(2.0, None, in_batches(parts, 2))
    Array([3., 2.], dtype=float...)
    """

    def of_all(w, other, batches):
        means = jax.lax.map(lambda batch: mean(w, other, batch), batches.rows)
        # A part's mean is not touched by what is infinite in another one: 0 times that is NaN.
        return jnp.where(batches.weights > 0, batches.weights * means[None], 0).sum(axis=1)

    return of_all


def wrong_rows(
    predict: Callable[[jax.Array], jax.Array], outputs: chex.Array, labels: chex.Array
) -> jax.Array:
    """[n], bool: another label than ``labels``, or outputs that are not finite and predict nothing.

    Raises
    ------
    ValueError
        Unless there is one label a row.

    Examples
    --------
    >>> outputs = jnp.array([[2.0, 1.0], [2.0, 1.0], [jnp.nan, 1.0]])
    >>> wrong_rows(lambda f: jnp.argmax(f, axis=-1), outputs, jnp.array([0, 1, 0]))
    Array([False,  True,  True], dtype=bool)
    """
    known = jnp.isfinite(outputs).reshape(len(outputs), -1).all(axis=1)
    guesses = predict(outputs)
    one_a_row(labels, guesses.shape)
    return (guesses != labels) | ~known


def error_rates(model: Any) -> Callable[[Pytree, Pytree, Sequence[Part], int], list[float]]:
    """``rates(w, other, parts, batch_size) ->`` each part's share of wrong rows, compiled once.

    Every row counts once, in the first batch that has it. Outputs that are not finite are wrong.

    Parameters
    ----------
    model : Space or TrainableNetwork
        Anything with ``apply(w, other, x)`` and ``predict``: ``other`` is a space's ``alpha``, or
        the running averages of a network.

    Returns
    -------
    function

    Raises
    ------
    ValueError
        When called with a ``batch_size`` under 1, or a part without rows.

    Examples
    --------
    >>> from bilevel.spaces.skips import skip_space
    >>> space = skip_space(["relu"], depth=3, width=4, classes=3)
    >>> part = jnp.eye(6), jnp.arange(6) % 3
    >>> w = space.init(jax.random.key(0), part)
    >>> rates = error_rates(space)(w, space.start(), [part, part], 4)
    >>> len(rates), rates[0] == rates[1]
    (2, True)
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
