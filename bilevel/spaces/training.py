"""What deep search spaces share: minibatches for the search, SGD for the network that it finds.

:func:`train` is the second half of Algorithm 1 of Zhu et al. 2022, for the network of any space.
"""

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from bilevel.checks import function, prng_key, whole
from bilevel.protocols import Loss, Pytree


def minibatches(batch_size: int) -> Callable[[jax.Array, Pytree], Pytree]:
    """``batches(key, data) -> batch`` for :func:`bilevel.search`: rows drawn independently.

    The same row may come twice. Drawing them all different would sort a random number for each row
    of the data at every step.

    Raises
    ------
    ValueError
        For a ``batch_size`` under 1; when called with fewer rows than that.

    Examples
    --------
    >>> minibatches(2)(jax.random.key(0), (jnp.arange(5), jnp.zeros((5, 3))))[1].shape
    (2, 3)
    """
    batch_size = whole("batch_size", batch_size, 1)

    def batches(key, data):
        prng_key("key", key)
        n = row_count(data, batch_size)
        rows = jax.random.randint(key, (batch_size,), 0, n)
        return jax.tree.map(lambda a: jnp.asarray(a)[rows], data)

    return batches


def row_count(data: Pytree, batch_size: int) -> int:
    """The number of rows of ``data``, which has to hold a batch."""
    n = jax.tree.leaves(data)[0].shape[0]
    if not whole("batch_size", batch_size, 1) <= n:
        raise ValueError(f"batch_size: expected 1 to the {n} rows of the data, got {batch_size}.")
    return n


class Trained(NamedTuple):
    """What :func:`train` returns."""

    last: Pytree  # like w: after the last step
    uniform: Pytree  # like w: before a step drawn uniformly, Algorithm 1's output
    losses: jax.Array  # [steps], of each batch before its step


def train(
    key: chex.PRNGKey,
    lower: Loss,
    architecture: Pytree,
    w: Pytree,
    data: Pytree,
    *,
    optimizer: optax.GradientTransformation | float,
    epochs: int = 1,
    batch_size: int = 1,
) -> Trained:
    """Train a network by SGD from ``w``: the second half of Algorithm 1.

        W^(i+1) = W^(i) - gamma grad l(W^(i); x_i, y_i),  i = 1..N;   W^ one of W^(1), ..., W^(N)

    Parameters
    ----------
    key : jax.Array
        For the order of the rows, a new one in each epoch, and for the uniform iterate.
    lower : ``lower(w, architecture, batch) -> scalar``
        ``problem.lower`` of the space.
    architecture : SkipArchitecture, or ``alpha`` to train the supernet's network as it is.
    w : pytree
    data : pytree of arrays with the same number of rows N
    optimizer : optax.GradientTransformation or float
        A float is SGD's step size gamma.
    epochs, batch_size : int
        One pass over single rows by default, as printed. Each epoch leaves out the N modulo
        ``batch_size`` rows that its order puts last.

    Returns
    -------
    Trained
        Both the last and the uniform iterate, of the same run.

    Raises
    ------
    ValueError
        If ``key`` is no PRNG key or ``lower`` no function, ``batch_size`` is not from 1 to N, or
        ``epochs`` under 1.

    Examples
    --------
    >>> loss = lambda w, _, x: -w * x.sum()
    >>> found = train(jax.random.key(0), loss, None, 0.0, jnp.ones(8), optimizer=0.5, epochs=2)
    >>> float(found.last), bool(found.uniform < found.last), found.losses.shape
    (8.0, True, (16,))

    Notes
    -----
    Pure: put it under ``jit`` with ``lower`` (and what else is no array) closed over, and under
    ``vmap`` for several seeds. Memory: two copies of ``w`` besides the optimizer's. The paper's
    loss, the logistic one of ``y f`` with y = +-1, is that of a space of two classes.
    """
    prng_key("key", key)
    function("lower", lower, "(w, architecture, batch) -> loss")
    n, epochs = row_count(data, batch_size), whole("epochs", epochs, 1)
    if not isinstance(optimizer, optax.GradientTransformation):
        optimizer = optax.sgd(optimizer)
    per_epoch = n // batch_size
    order_key, uniform_key = jax.random.split(key)
    drawn = jax.random.randint(uniform_key, (), 0, epochs * per_epoch)
    slope = jax.value_and_grad(lower)

    def step(carry, rows):
        i, w, state, uniform = carry
        uniform = jax.lax.cond(i == drawn, lambda: w, lambda: uniform)
        batch = jax.tree.map(lambda a: jnp.asarray(a)[rows], data)
        loss, g = slope(w, architecture, batch)
        updates, state = optimizer.update(g, state, w)
        return (i + 1, optax.apply_updates(w, updates), state, uniform), loss

    def epoch(carry, key):
        order = jax.random.permutation(key, n)[: per_epoch * batch_size]
        return jax.lax.scan(step, carry, order.reshape(per_epoch, batch_size))

    w = jax.tree.map(jnp.asarray, w)
    carry = jnp.zeros((), int), w, optimizer.init(w), w
    keys = jax.random.split(order_key, epochs)
    (_, last, _, uniform), losses = jax.lax.scan(epoch, carry, keys)
    return Trained(last, uniform, losses.ravel())
