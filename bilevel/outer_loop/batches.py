"""Rows of the data for each step of a search: what :func:`bilevel.search` takes as ``batches``."""

from collections.abc import Callable

import jax

from bilevel.contracts import Joint, Partition, Pytree
from bilevel.internal.checks import function, integer, prng_key
from bilevel.internal.rows import check_batch_size, taken


def minibatches(batch_size: int) -> Callable[[jax.Array, Pytree], Pytree]:
    """``batches(key, data) -> batch`` for :func:`bilevel.search`: rows drawn independently.

    The same row may come twice. Drawing them all different would sort a random number for each row
    of the data at every step. Matrices of format BCSR (:mod:`jax.experimental.sparse`) stay sparse;
    inside a search a batch of theirs takes as much memory as a dense one.

    Raises
    ------
    ValueError
        For a ``batch_size`` under 1; when called with fewer rows than that, or with arrays of
        different numbers of rows.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> minibatches(2)(jax.random.key(0), (jnp.arange(5), jnp.zeros((5, 3))))[1].shape
    (2, 3)
    """
    batch_size = integer("batch_size", batch_size, 1)

    def batches(key, data):
        prng_key("key", key)
        n = check_batch_size(data, batch_size)
        drawn = jax.random.randint(key, (batch_size,), 0, n)
        return taken(data, drawn)

    return batches


def partition(batch_size: int) -> Partition:
    """``batches`` for :func:`bilevel.search` by a single-loop method: the same ones in every epoch.

    Batch i has the rows from ``i * batch_size`` on, as they lie: shuffle sorted data once. An epoch
    takes each batch of ``train`` once, in an order of its own, and so, for itself, does one of
    ``valid``. Where ``batch_size`` does not divide the rows, the last batch is smaller and weighs
    less: estimates stay unbiased. Data with fewer rows than that are one batch.

    The losses have to be means over the rows of a batch, plus terms of ``w`` and ``alpha``.

    Raises
    ------
    ValueError
        For a ``batch_size`` under 1; when called, as other solvers would.

    Examples
    --------
    >>> partition(64)
    Partition(batch_size=64)
    """
    return Partition(integer("batch_size", batch_size, 1))


def jointly(sample: Callable[[jax.Array, Pytree, Pytree], tuple[Pytree, Pytree]]) -> Joint:
    """``batches`` for :func:`bilevel.search` of ``sample(key, train, valid) -> (train, valid)``.

    For batches that belong together: the support and the query rows of the same tasks.

    Raises
    ------
    ValueError
        For what is no function.

    Examples
    --------
    >>> def of_tasks(key, support, query):
    ...     tasks = jax.random.choice(key, 5, (2,), replace=False)
    ...     return support[tasks], query[tasks]
    >>> import jax.numpy as jnp
    >>> train, valid = jointly(of_tasks)(jax.random.key(0), jnp.arange(5), 10 * jnp.arange(5))
    >>> bool((valid == 10 * train).all())
    True
    """
    function("sample", sample, "(key, train, valid) -> (train, valid)")
    return Joint(sample)
