"""Training convolutional networks from scratch, as published for DARTS and NAS-Bench-201.

Batch normalisation learns scales and keeps running averages for predictions: a network is a pair of
pytrees, weights ``w`` and ``averages``. Training images can be moved, mirrored, cut out of.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from bilevel.checks import images, prng_key, whole
from bilevel.spaces.training import row_count


class TrainableNetwork(NamedTuple):
    """A network with batch normalisation, to be trained from scratch by :func:`training`.

    Attributes
    ----------
    init : ``init(key, shape) -> (w, averages)``, for images of ``shape`` (h, w, c).
        ``averages``: the running means and variances of batch normalisation.
    apply : ``apply(w, averages, x [n, h, w, c]) -> logits`` [n, classes].
    loss : ``loss(w, averages, batch, key, *options) -> (loss, averages)``
        Of a training batch ``(x, labels)``, for ``jax.grad(..., has_aux=True)``.
    predict : ``predict(logits) -> labels`` [n].
    """

    init: Callable[[jax.Array, tuple[int, ...]], tuple[Any, Any]]
    apply: Callable[[Any, Any, jax.Array], jax.Array]
    loss: Callable[..., tuple[jax.Array, Any]]
    predict: Callable[[jax.Array], jax.Array]


class TrainingState(NamedTuple):
    """State of :func:`training`."""

    w: Any
    averages: Any
    optimizer: Any


def training(
    network: TrainableNetwork,
    optimizer: optax.GradientTransformation,
    *,
    batch_size: int,
    augment: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
) -> tuple[Callable, Callable]:
    """Training from scratch as a pair of pure functions, for as many epochs as one likes.

    Parameters
    ----------
    network : TrainableNetwork
    optimizer : optax.GradientTransformation
    batch_size : int
        An epoch leaves out the n modulo ``batch_size`` rows that its order puts last.
    augment : ``augment(key, x) -> x``, optional
        Of a batch's images: :func:`cutout`, :func:`crop_and_flip`.

    Returns
    -------
    init : ``init(key, shape) -> TrainingState``, for images of ``shape`` (h, w, c).
    epoch : ``epoch(key, state, (x, labels), *options) -> (state, loss)``
        Every row once, in random order; the loss is the mean over its batches. ``options`` are
        the network's loss's: ``drop_path`` of a DARTS network.

    Raises
    ------
    ValueError
        By ``epoch``, for fewer rows than ``batch_size``.

    Examples
    --------
    >>> from bilevel.spaces.darts import DARTS_V2, darts_network
    >>> network = darts_network(DARTS_V2, cells=1, channels=2, auxiliary=False)
    >>> init, epoch = training(network, optax.sgd(0.1), batch_size=4)
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
        n = row_count(data, batch_size)
        order_key, augment_key, drop_key = jax.random.split(key, 3)
        steps = n // batch_size
        order = jax.random.permutation(order_key, n)[: steps * batch_size]
        slope = jax.value_and_grad(network.loss, has_aux=True)

        def step(state, batch):
            i, rows = batch
            images = x[rows]
            if augment is not None:
                images = augment(jax.random.fold_in(augment_key, i), images)
            batch = images, labels[rows]
            key = jax.random.fold_in(drop_key, i)
            (loss, averages), g = slope(state.w, state.averages, batch, key, *options)
            updates, inner = optimizer.update(g, state.optimizer, state.w)
            return TrainingState(optax.apply_updates(state.w, updates), averages, inner), loss

        batches = jnp.arange(steps), order.reshape(steps, batch_size)
        state, losses = jax.lax.scan(step, state, batches)
        return state, losses.mean()

    return init, epoch


def crop_and_flip(key: chex.PRNGKey, x: chex.Array, padding: int = 4) -> jax.Array:
    """Images moved by up to ``padding`` pixels, zeros coming in, and half of them mirrored.

    Parameters
    ----------
    key : jax.Array
    x : array [n, h, w, c], normalised: 0 should be the mean
    padding : int

    Raises
    ------
    ValueError
        For what is no key, are no images, or a ``padding`` under 0.

    Examples
    --------
    >>> x = jnp.ones((3, 4, 4, 1)).at[:, 0].set(2)
    >>> crop_and_flip(jax.random.key(0), x, padding=0)[:, 0, 0, 0]
    Array([2., 2., 2.], dtype=float...)
    """
    prng_key("key", key)
    x, padding = images("x", x), whole("padding", padding, 0)
    move_key, flip_key = jax.random.split(key)
    n, *shape = x.shape
    padded = jnp.pad(x, [(0, 0), (padding, padding), (padding, padding), (0, 0)])
    corners = jax.random.randint(move_key, (n, 2), 0, 2 * padding + 1)
    x = jax.vmap(lambda image, at: jax.lax.dynamic_slice(image, (*at, 0), shape))(padded, corners)
    return jnp.where(jax.random.bernoulli(flip_key, 0.5, (n, 1, 1, 1)), x[:, :, ::-1], x)


def cutout(key: chex.PRNGKey, x: chex.Array, size: int = 16) -> jax.Array:
    """Images with a square set to 0, its centre anywhere in the image, cut off at the borders.

    Parameters
    ----------
    key : jax.Array
    x : array [n, h, w, c], normalised: 0 should be the mean
    size : int

    Raises
    ------
    ValueError
        For what is no key, are no images, or a ``size`` under 0.

    Examples
    --------
    >>> x = cutout(jax.random.key(0), jnp.ones((4, 32, 32, 3)))
    >>> bool((x.min((1, 2, 3)) == 0).all()), x.max()
    (True, Array(1., dtype=float...))

    References
    ----------
    DeVries & Taylor (2017), Improved Regularization of CNNs with Cutout.
    """
    prng_key("key", key)
    x, size = images("x", x), whole("size", size, 0)
    n, *sides, _ = x.shape
    centres = jax.random.randint(key, (2, n, 1), 0, jnp.array(sides)[:, None, None])
    rows, columns = (
        (jnp.arange(side) >= start) & (jnp.arange(side) < start + size)
        for side, start in zip(sides, centres - size // 2, strict=True)
    )
    return jnp.where((rows[:, :, None] & columns[:, None, :])[..., None], 0, x)
