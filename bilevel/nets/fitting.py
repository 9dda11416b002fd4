"""Train networks on rows that stay on the host, for data larger than the device's memory."""

import functools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from bilevel.contracts import Pytree
from bilevel.discretize import diagnostics
from bilevel.internal.checks import integer, one_a_row, positive, prng_key
from bilevel.internal.rows import check_batch_size
from bilevel.nets.evaluation import Part, wrong_rows
from bilevel.nets.training import TrainableNetwork, from_scratch, training_step
from bilevel.runs.checkpoint import saving
from bilevel.runs.fingerprint import fingerprint
from bilevel.runs.interrupts import held_signals
from bilevel.runs.progress import progress_bar

_SAVE_SECONDS = 30.0  # between two checkpoints
_ERRORS = 20  # test errors of a learning curve at most: each takes a pass over the test rows
_TEST_BATCH = 256  # rows of a batch without gradients
_RATE = 3.0  # default rate times the tangent kernel's mean diagonal entry
_SCALE_ROWS = 32  # rows for this mean; more would not change the rate's first digit


class Fitted(NamedTuple):
    """Result of :func:`fit`."""

    w: Any
    averages: Any
    losses: np.ndarray  # [epochs], the mean of each epoch's batches
    errors: np.ndarray  # [epochs], test error after each epoch; NaN if not evaluated


def fit(
    key: chex.PRNGKey,
    network: TrainableNetwork,
    train: tuple[chex.Array, chex.Array],
    *,
    test: tuple[chex.Array, chex.Array] | None = None,
    optimizer: optax.GradientTransformation | float,
    epochs: int = 30,
    batch_size: int = 64,
    checkpoint: str | pathlib.Path | None = None,
    progress: bool | None = None,
    callback: Callable[[int, float], None] | None = None,
) -> Fitted:
    """Train a network from scratch, and follow its test error.

    Parameters
    ----------
    key : jax.Array
        For initial weights, the order of the rows, and random numbers of the loss.
    network : TrainableNetwork
        From :func:`bilevel.spaces.network_at`, :func:`bilevel.spaces.darts.darts_network`, or four
        functions; see :func:`bilevel.nets.from_scratch`.
    train : pair ``(x [n, ...], labels [n])``; arrays or memory maps of numpy stay on the host
    test : pair of arrays, optional
        Rows for the test error: after the last epoch, and after at most 19 others.
    optimizer : optax.GradientTransformation or float
        A float is the learning rate of SGD with momentum 0.9, with a cosine decay to 0.
    epochs, batch_size : int
        Each epoch leaves out the n modulo ``batch_size`` rows that its order puts last.
    checkpoint : path, optional
        Directory of checkpoints, every 30 seconds and at Ctrl-C or SIGTERM. A call with the same
        arguments resumes from the last one, and ends in the same bits as an uninterrupted one.
    progress : bool, optional
        Whether to show a progress bar. Default: in a terminal.
    callback : ``callback(epochs_done, loss)``, optional

    Returns
    -------
    Fitted
        ``w`` and ``averages``, for ``network.apply(w, averages, x)``; ``losses`` and ``errors``
        [epochs]. Outputs that are not finite count as errors.

    Raises
    ------
    ValueError
        If an argument is of another kind, ``batch_size`` is not from 1 to n, ``epochs`` is under 1,
        or ``checkpoint`` belongs to another network, key, optimizer or data.
    KeyboardInterrupt
        If Ctrl-C stops the training; the checkpoint then has the last step.

    Notes
    -----
    Memory of the device: four copies of the weights, and the activations of one batch.

    Examples
    --------
    >>> from bilevel.spaces import network_at, skip_space, unit_inputs
    >>> x = unit_inputs(jax.random.normal(jax.random.key(0), (64, 5)))
    >>> space = skip_space(["relu", "tanh"], depth=3, width=16, classes=2)
    >>> network = network_at(space, space.discretize(space.draw(jax.random.key(1))))
    >>> data = x, (x[:, 0] > 0).astype(int)
    >>> fitted = fit(jax.random.key(2), network, data, test=data, optimizer=0.5, batch_size=16)
    >>> bool(fitted.losses[-1] < fitted.losses[0]), bool(fitted.errors[-1] < 0.2)
    (True, True)
    """
    prng_key("key", key)
    n, epochs = check_batch_size(train, batch_size), integer("epochs", epochs, 1)
    data = _on_host("train", train)
    judged = None if test is None else _on_host("test", test)
    per_epoch = n // batch_size
    steps = epochs * per_epoch
    if not isinstance(optimizer, optax.GradientTransformation):
        schedule = optax.cosine_decay_schedule(float(positive("optimizer", optimizer)), steps)
        optimizer = optax.sgd(schedule, momentum=0.9)
    init_key, order_key, loss_key = jax.random.split(key, 3)
    init, _ = from_scratch(network, optimizer, batch_size=batch_size)

    def start(key):
        return init(key, data[0].shape[1:]), jnp.zeros(epochs, jnp.result_type(float))

    with (
        held_signals(terminations=checkpoint is not None) as came,
        saving(checkpoint, seconds=_SAVE_SECONDS) as saver,
        progress_bar(progress, "training", epochs, "loss {loss:.3f}") as show,
    ):
        if saver.directory is not None:
            parts = {"network": network, "key": key, "train": data, "test": judged}
            parts |= {"optimizer": optimizer, "sizes": (epochs, batch_size)}
            saver.belong_to(fingerprint(parts))
        carry, errors, done = jax.jit(start)(init_key), np.full(epochs, np.nan), saver.step or 0
        if done:
            carry, errors = saver.restore((carry, errors))
            carry, errors = jax.tree.map(jnp.asarray, carry), np.array(errors)
        for i in range(done, steps):
            epoch, batch = divmod(i, per_epoch)
            if batch == 0 or i == done:
                order = np.asarray(jax.random.permutation(jax.random.fold_in(order_key, epoch), n))
            rows = order[batch * batch_size : (batch + 1) * batch_size]
            step_key = jax.random.fold_in(loss_key, i)
            place = np.int32(epoch), np.float32(1 / per_epoch)
            carry = _step(network, optimizer, carry, step_key, data[0][rows], data[1][rows], *place)
            if batch + 1 == per_epoch:
                errors[epoch] = _error_at(epoch, epochs, network, carry[0], judged)
                loss = float(carry[1][epoch])
                show(epoch + 1, lambda loss=loss: {"loss": loss})  # type: ignore[misc]
                if callback is not None:
                    callback(epoch + 1, loss)
            ended = came()
            last = bool(ended) or i + 1 == steps
            saver.save(i + 1, lambda carry=carry: (carry, errors), last=last)  # type: ignore[misc]
            if ended:
                raise KeyboardInterrupt(f"{ended} in epoch {epoch + 1}")
    state, losses = carry
    return Fitted(state.w, state.averages, np.asarray(losses), errors)


def outputs_of(network: TrainableNetwork, w: Any, averages: Any, x: Any) -> np.ndarray:
    """Return the network's outputs for all rows, through one compiled program."""
    run = jax.jit(network.apply)  # compiled once for all calls
    size, parts = min(_TEST_BATCH, len(x)), []
    for start in range(0, len(x), size):
        batch = np.asarray(x[start : start + size])
        padding = [(0, size - len(batch))] + [(0, 0)] * (batch.ndim - 1)
        padded = np.pad(batch, padding, mode="edge")
        parts.append(np.asarray(run(w, averages, padded))[: len(batch)])
    return np.concatenate(parts)


def _on_host(name: str, rows: Any) -> Part:
    """Return a pair of numpy arrays with a label for each row."""
    if not isinstance(rows, tuple | list) or len(rows) != 2:
        raise ValueError(f"{name}: expected a pair (x, labels), got a {type(rows).__name__}.")
    x, labels = (a if isinstance(a, np.ndarray) else np.asarray(a) for a in rows)
    one_a_row(labels, (len(x),))
    if len(x) == 0:
        raise ValueError(f"{name}: expected rows, got none.")
    if labels.dtype.kind not in "iub":
        raise ValueError(f"{name}: expected integer labels, got {labels.dtype}.")
    return x, labels.astype(np.int32)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _step(network, optimizer, carry, key, x, labels, epoch, weight):
    """Return the state after a batch, and the losses with ``weight`` times that of the batch."""
    state, losses = carry
    state, loss = training_step(network, optimizer, state, (x, labels), key)
    return state, losses.at[epoch].add((weight * loss).astype(losses.dtype))


def _error_at(epoch, epochs, network, state, test):
    """Return the test error if the epoch is one of the learning curve's, else NaN."""
    every = -(-epochs // _ERRORS)
    if test is None or ((epochs - 1 - epoch) % every):
        return np.nan
    outputs = outputs_of(network, state.w, state.averages, test[0])
    return float(np.mean(np.asarray(wrong_rows(network.predict, outputs, test[1]))))


def default_rate(model: Any, w: Pytree, other: Pytree, x: chex.Array) -> jax.Array:
    """Return a step size for SGD with momentum: 3 / (mean tangent kernel diagonal).

    ``model`` is a Space, with ``alpha`` as ``other``, or a TrainableNetwork, with its averages.
    """
    first = jnp.asarray(x[:_SCALE_ROWS])
    return _RATE / diagnostics.kernel_diagonal(model.apply, w, other, first)
