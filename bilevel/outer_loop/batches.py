"""Samplers of rows for each step of a search, the argument ``batches`` of :func:`search`."""

from collections.abc import Callable

import jax

from bilevel.contracts import Joint, Partition, Pytree
from bilevel.internal.checks import function, integer, prng_key
from bilevel.internal.rows import check_batch_size, taken


def minibatches(batch_size: int) -> Callable[[jax.Array, Pytree], Pytree]:
    """Return a sampler ``batches(key, data) -> batch`` that draws rows independently.

    A row can be drawn twice: distinct rows would need a sort of all rows at every step. Matrices of
    format BCSR (:mod:`jax.experimental.sparse`) stay sparse, but inside a search their batches take
    as much memory as dense ones.

    Raises
    ------
    ValueError
        If ``batch_size`` is less than 1. The sampler raises it if the data has fewer rows, or
        arrays with different numbers of rows.

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
    """Return the ``batches`` of a single-loop method: every epoch visits the same batches.

    Batch i has the rows from ``i * batch_size`` on, so shuffle sorted data once. An epoch visits
    each batch of ``train`` once, in a new random order; the order of ``valid`` is drawn separately.
    The last batch can be smaller; its smaller weight keeps estimates unbiased. Data with fewer rows
    are one batch. Losses have to be means over rows, plus terms of ``w`` and ``alpha``.

    Raises
    ------
    ValueError
        If ``batch_size`` is less than 1. Also if the result is called, as other solvers do.

    Examples
    --------
    >>> partition(64)
    Partition(batch_size=64)
    """
    return Partition(integer("batch_size", batch_size, 1))


def jointly(sample: Callable[[jax.Array, Pytree, Pytree], tuple[Pytree, Pytree]]) -> Joint:
    """Return the ``batches`` of ``sample(key, train, valid) -> (train, valid)``.

    Use it for batches that belong together, e.g. the support and the query rows of the same tasks.

    Raises
    ------
    ValueError
        If ``sample`` is not a function.

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
