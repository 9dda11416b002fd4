"""Train networks from scratch: the last step after a search of an architecture.

:func:`train` is the second half of Algorithm 1 of Zhu et al. 2022, for the network of any space.
:func:`from_scratch` is the training that DARTS and NAS-Bench-201 publish, epoch by epoch.
"""

import functools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from bilevel.contracts import Loss, Pytree
from bilevel.internal.checks import check_floating, function, integer, prng_key, real_number
from bilevel.internal.rows import check_batch_size
from bilevel.runs.checkpoint import saving
from bilevel.runs.fingerprint import fingerprint
from bilevel.runs.interrupts import held_signals


class Trained(NamedTuple):
    """Result of :func:`train`."""

    last: Pytree  # weights after the last step
    uniform: Pytree  # weights before a step drawn uniformly: the output of Algorithm 1
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
    lower : ``lower(w, architecture, batch) -> scalar``, ``problem.lower`` of the space
    architecture : SkipArchitecture, or ``alpha`` to train the supernet's mixture
    w : pytree
    data : pytree of arrays with the same number of rows N
    optimizer : optax.GradientTransformation, or SGD's step size gamma
    epochs, batch_size : int
        Default: one pass over single rows, as printed. Each epoch leaves out the N modulo
        ``batch_size`` rows that its order puts last.

    Raises
    ------
    ValueError
        If an argument is of another kind, ``epochs`` < 1, or ``batch_size`` is not from 1 to N.

    Notes
    -----
    Pure: use it under ``jit`` with ``lower`` closed over, and under ``vmap`` for several seeds.
    Memory: two copies of ``w`` in addition to the optimizer's. A space of two classes has the
    paper's loss, the logistic one of ``y f`` with y = +-1.

    Examples
    --------
    >>> loss = lambda w, _, x: -w * x.sum()
    >>> result = train(jax.random.key(0), loss, None, 0.0, jnp.ones(8), optimizer=0.5, epochs=2)
    >>> float(result.last), bool(result.uniform < result.last), result.losses.shape
    (8.0, True, (16,))
    """
    prng_key("key", key)
    function("lower", lower, "(w, architecture, batch) -> loss")
    check_floating("w", w)
    n, epochs = check_batch_size(data, batch_size), integer("epochs", epochs, 1)
    if not isinstance(optimizer, optax.GradientTransformation):
        if not callable(optimizer):  # a schedule
            real_number("optimizer", optimizer)
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


class TrainableNetwork(NamedTuple):
    """A network with batch normalisation; see :func:`from_scratch`."""

    init: Callable[[jax.Array, tuple[int, ...]], tuple[Any, Any]]
    apply: Callable[[Any, Any, jax.Array], jax.Array]
    loss: Callable[..., tuple[jax.Array, Any]]
    predict: Callable[[jax.Array], jax.Array]


class TrainingState(NamedTuple):
    """State of :func:`from_scratch`."""

    w: Any
    averages: Any
    optimizer: Any


def training_step(network, optimizer, state, batch, key, *options):
    """Return the state after a step on a batch, and the loss before it."""
    slope = jax.value_and_grad(network.loss, has_aux=True)
    (loss, averages), g = slope(state.w, state.averages, batch, key, *options)
    updates, inner = optimizer.update(g, state.optimizer, state.w)
    return TrainingState(optax.apply_updates(state.w, updates), averages, inner), loss


def from_scratch(
    network: TrainableNetwork,
    optimizer: optax.GradientTransformation,
    *,
    batch_size: int,
    augment: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Make pure functions that train from scratch, for any number of epochs.

    Parameters
    ----------
    network : TrainableNetwork
        Functions ``init(key, shape) -> (w, averages)``, ``apply(w, averages, x) -> logits``,
        ``loss(w, averages, batch, key, *options) -> (loss, averages)`` and ``predict(logits)``.
        ``averages`` are the running means and variances of batch normalisation.
    optimizer : optax.GradientTransformation
    batch_size : int
        An epoch leaves out the n modulo ``batch_size`` rows that its order puts last.
    augment : ``augment(key, x) -> x`` of a batch's images, optional

    Returns
    -------
    init : ``init(key, shape) -> TrainingState``, for images of ``shape`` (h, w, c).
    epoch : ``epoch(key, state, (x, labels), *options) -> (state, loss)``
        Every row once, in random order; the loss is the mean over its batches. ``options`` are
        those of the network's loss: ``drop_path`` of a DARTS network.

    Raises
    ------
    ValueError
        If ``epoch`` gets fewer rows than ``batch_size``.

    Examples
    --------
    >>> from bilevel.spaces.darts import darts_network
    >>> from bilevel.spaces.darts.genotype import DARTS_V2
    >>> network = darts_network(DARTS_V2, cells=1, channels=2, auxiliary=False)
    >>> init, epoch = from_scratch(network, optax.sgd(0.1), batch_size=4)
    >>> state = jax.eval_shape(lambda key: init(key, (8, 8, 1)), jax.random.key(0))
    >>> data = jnp.ones((8, 8, 8, 1)), jnp.zeros(8, int)
    >>> jax.eval_shape(epoch, jax.random.key(1), state, data)[1].shape
    ()
    """

    def init(key, shape):
        w, averages = network.init(key, shape)
        return TrainingState(w, averages, optimizer.init(w))

    def epoch(key, state, data, *options):
        x, labels = jax.tree.map(jnp.asarray, data)
        n = check_batch_size(data, batch_size)
        order_key, augment_key, drop_key = jax.random.split(key, 3)
        steps = n // batch_size
        order = jax.random.permutation(order_key, n)[: steps * batch_size]

        def step(state, batch):
            i, rows = batch
            images = x[rows]
            if augment is not None:
                images = augment(jax.random.fold_in(augment_key, i), images)
            batch = images, labels[rows]
            key = jax.random.fold_in(drop_key, i)
            return training_step(network, optimizer, state, batch, key, *options)

        batches = jnp.arange(steps), order.reshape(steps, batch_size)
        state, losses = jax.lax.scan(step, state, batches)
        return state, losses.mean()

    return init, epoch


_SAVE_SECONDS = 30.0  # between two checkpoints: writing one may take as long as an epoch


def run_epochs(
    program: tuple[Callable[..., Any], Callable[..., Any]],
    key: chex.PRNGKey,
    data: tuple[chex.Array, chex.Array],
    *,
    epochs: int,
    checkpoint: str | pathlib.Path,
    options: Callable[[int], tuple] = lambda epoch: (),
    callback: Callable[[int, float], None] | None = None,
) -> tuple[TrainingState, float]:
    """Run all epochs of :func:`from_scratch`'s ``program``, from the newest checkpoint.

    An interrupted training that runs again ends in the same state as an uninterrupted one. SIGTERM
    writes a checkpoint after the current epoch and then ends the process. ``options(epoch)`` are
    those of the loss; ``callback(epochs_done, loss)``. Without epochs the last loss is NaN.
    """
    prng_key("key", key)
    epochs = integer("epochs", epochs, 0)
    init, epoch = program
    init_key, order_key = jax.random.split(key)
    state = jax.jit(lambda key: init(key, data[0].shape[1:]))(init_key)
    loss = jnp.full((), jnp.nan, jnp.result_type(float))
    run = jax.jit(epoch, donate_argnums=1)
    parts = {"program": program, "key": key, "data": data, "options": options}
    with (
        held_signals(interrupts=False, terminations=True) as came,
        saving(checkpoint, seconds=_SAVE_SECONDS) as saver,
    ):
        saver.belong_to(fingerprint(parts))
        first = saver.done("epochs", epochs)
        if first:
            state, loss = jax.tree.map(jnp.asarray, saver.restore((state, loss)))
        for i in range(first, epochs):
            state, loss = run(jax.random.fold_in(order_key, i), state, data, *options(i))
            loss = loss.astype(jnp.result_type(float))
            if callback is not None:
                callback(i + 1, float(loss))
            ended = came()
            last = i + 1 == epochs or bool(ended)
            saver.save(i + 1, functools.partial(tuple, (state, loss)), last=last)
            if ended:  # the signal's handler may return; a partial run must not look complete
                raise KeyboardInterrupt(f"{ended} after epoch {i + 1}")
    return state, float(loss)
