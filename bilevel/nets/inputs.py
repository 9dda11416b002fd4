"""Normalisation as part of a network, so that rows can stay bytes or a memory map."""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from bilevel.nets.convolution import average_pooling
from bilevel.nets.images import pooling_factor
from bilevel.nets.training import TrainableNetwork

_CHUNK = 1024  # rows in float64 at a time


class InputScale(NamedTuple):
    """Normalisation of inputs: mean 0 and variance 1 of channels, or rows of unit norm."""

    mean: np.ndarray  # [c] of images, [d] of flat rows
    deviation: np.ndarray  # like the mean
    factor: int = 1  # images are averaged down by this factor
    unit: bool = False  # whether rows are flat and scaled to unit norm

    def __call__(self, x: chex.Array) -> jax.Array:
        """Return the rows in the form of the network."""
        x = jnp.asarray(x)
        x = x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(float)
        x = x[..., None] if x.ndim == 3 else x
        x = x.reshape(len(x), -1) if self.unit else x
        x = average_pooling(x, self.factor, stride=self.factor) if self.factor > 1 else x
        x = (x - self.mean.astype(x.dtype)) / self.deviation.astype(x.dtype)
        norm = jnp.linalg.norm(x, axis=1, keepdims=True) if self.unit else 1
        return x / jnp.where(norm == 0, 1, norm)


def image_scale(x: chex.Array, pixels: int | None = None) -> InputScale:
    """Return the scale of :func:`bilevel.nets.unit_images` for images [n, h, w] or [n, h, w, c]."""
    if np.ndim(x) not in (3, 4) or np.size(x) == 0:
        raise ValueError(f"x: expected images [n, h, w] or [n, h, w, c], got {np.shape(x)}.")
    factor = pooling_factor(np.shape(x)[1:3], pixels)
    mean = _mean(x, lambda a: _averaged_down(a, factor).mean((1, 2)))
    variance = _mean(x, lambda a: ((_averaged_down(a, factor) - mean) ** 2).mean((1, 2)))
    deviation = np.sqrt(variance)
    if not (deviation > 1e-12 * (1 + np.abs(mean))).all():  # NaN too
        raise ValueError(f"x: expected channels that vary, got deviations {deviation}.")
    return InputScale(mean, deviation, factor)


def row_scale(x: chex.Array) -> InputScale:
    """Return the scale of :func:`bilevel.spaces.unit_inputs` for rows, and standardize vectors."""
    mean = _mean(x, lambda a: a.reshape(len(a), -1))
    deviation = np.ones_like(mean)
    if np.ndim(x) == 2:
        deviation = np.sqrt(_mean(x, lambda a: (a - mean) ** 2))
        # Columns of one value are not divided.
        deviation = np.where(deviation > 1e-12 * (1 + np.abs(mean)), deviation, 1)
    return InputScale(mean, deviation, unit=True)


def _mean(x: Any, function: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return the mean over rows of ``function(x)``, computed in float64 and chunk by chunk."""
    starts = range(0, len(x), _CHUNK)
    chunks = (np.asarray(x[start : start + _CHUNK], np.float64) for start in starts)
    return np.sum([function(chunk).sum(0) for chunk in chunks], axis=0) / len(x)


def _averaged_down(x: np.ndarray, factor: int) -> np.ndarray:
    """Return images [n, h, w, c], averaged down."""
    n, h, w = x.shape[:3]
    blocks = x.reshape(n, h // factor, factor, w // factor, factor, -1)
    return blocks.mean((2, 4)) if factor > 1 else x.reshape(n, h, w, -1)


def with_scale(
    network: TrainableNetwork,
    scale: InputScale,
    augment: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
) -> TrainableNetwork:
    """Return the network of inputs ``scale(x)``; ``augment(key, x)`` changes training batches."""

    def init(key, shape):
        scaled = jax.eval_shape(scale.__call__, jax.ShapeDtypeStruct((1, *shape), jnp.float32))
        return network.init(key, scaled.shape[1:])

    def apply(w, averages, x):
        return network.apply(w, averages, scale(x))

    def loss(w, averages, batch, key, *options):
        x, labels = batch
        x = scale(x)
        if augment is not None:
            key, augment_key = jax.random.split(key)
            x = augment(augment_key, x)
        return network.loss(w, averages, (x, labels), key, *options)

    return TrainableNetwork(init, apply, loss, network.predict)


def normalized(
    network: TrainableNetwork, x: chex.Array, *, pixels: int | None = None
) -> TrainableNetwork:
    """Make a network of images that normalises its inputs by the statistics of ``x``.

    Parameters
    ----------
    network : TrainableNetwork of images [n, h, w, c] with channels of mean 0 and variance 1
    x : array [n, h, w, c] or [n, h, w], training images of any scale
    pixels : int, optional
        Average images down to at most this many pixels a side; see :func:`unit_images`.

    Raises
    ------
    ValueError
        If ``x`` are not images, ``pixels`` is out of reach, or a channel has one value only.

    Notes
    -----
    The statistics are computed in float64, 1,024 rows at a time.

    Examples
    --------
    >>> network = TrainableNetwork(None, lambda w, averages, x: x, None, None)
    >>> x = np.arange(32, dtype=np.uint8).reshape(2, 4, 4)
    >>> outputs = normalized(network, x, pixels=2).apply(None, None, x)
    >>> outputs.shape, float(abs(outputs.mean()).round(3)), float(outputs.std().round(3))
    ((2, 2, 2, 1), 0.0, 1.0)
    """
    return with_scale(network, image_scale(x, pixels))
