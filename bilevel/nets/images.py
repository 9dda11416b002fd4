"""Images for convolutional networks: normalisation, downsizing, shifts, flips and cutout."""

import math
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np

from bilevel.internal.checks import concrete, images, integer, prng_key
from bilevel.internal.precision import squarable
from bilevel.nets.convolution import average_pooling


def unit_images(
    x: chex.Array, *others: chex.Array, pixels: int | None = None
) -> tuple[jax.Array, ...]:
    """Return images with channels of mean 0 and variance 1 over all pixels of ``x``.

    Parameters
    ----------
    x, *others : arrays [n, h, w, c], or [n, h, w] of one channel
    pixels : int, optional
        Average images down to at most this many pixels a side, by the smallest factor of both.

    Returns
    -------
    tuple of arrays [n, h', w', c], of ``x`` and the others

    Raises
    ------
    ValueError
        If an argument is not images, ``others`` differ from ``x`` in size or channels, ``pixels``
        is out of reach, or a channel of ``x`` is constant. A traced channel becomes NaN instead.

    Examples
    --------
    >>> (x,) = unit_images(jnp.arange(32.0).reshape(2, 4, 4), pixels=2)
    >>> x.shape, float(abs(x.mean()).round(3)), float(x.std().round(3))
    ((2, 2, 2, 1), 0.0, 1.0)
    """
    parts = [a[..., None] if np.ndim(a) == 3 else a for a in (x, *others)]
    for name, a in zip(("x", *["others"] * len(others)), parts, strict=True):
        if images(name, a).shape[1:] != parts[0].shape[1:]:
            raise ValueError(f"{name}: expected images {parts[0].shape[1:]}, got {a.shape[1:]}.")
    parts = squarable(parts)
    factor = pooling_factor(parts[0].shape[1:3], pixels)
    if factor > 1:
        averaged = (average_pooling(a, factor, stride=factor) for a in parts)
        parts = [np.asarray(a) if concrete(a) else a for a in averaged]
    mean = _channel_means(parts[0])
    # The mean of equal values can differ from them by rounding.
    varies = parts[0].max((0, 1, 2)) > parts[0].min((0, 1, 2))
    deviation = _channel_means((parts[0] - mean) ** 2) ** 0.5 * varies
    if not concrete(deviation):
        deviation = jnp.where(deviation > 0, deviation, jnp.nan)
    elif not (deviation > 0).all():
        raise ValueError(f"x: expected channels that vary, got deviations {deviation}.")
    return tuple(jnp.asarray((a - mean) / deviation) for a in parts)


def _channel_means(x):
    # A float32 sum over all pixels would lose digits (25,000 images of CIFAR-10: variances of 1.06)
    return x.mean((1, 2)).mean(0)


def pooling_factor(sides: tuple[int, ...], pixels: int | None) -> int:
    """Return the smallest divisor of both sides that leaves at most ``pixels`` of them."""
    if pixels is None:
        return 1
    pixels, longer, common = integer("pixels", pixels, 1), max(sides), math.gcd(*sides)
    if longer // common > pixels:
        raise ValueError(
            f"pixels: expected at least {longer // common} for images of {sides[0]} x {sides[1]}, "
            f"whose sides have no larger factor in common than {common}, got {pixels}."
        )
    most = pixels * common // longer
    return next(f for f in range(1, common + 1) if common % f == 0 and common // f <= most)


def crop_and_flip(key: chex.PRNGKey, x: chex.Array, padding: int = 4) -> jax.Array:
    """Shift images [n, h, w, c] by up to ``padding`` pixels, filling with 0, and mirror half."""
    prng_key("key", key)
    x, padding = images("x", x), integer("padding", padding, 0)
    move_key, flip_key = jax.random.split(key)
    n, *shape = x.shape
    padded = jnp.pad(x, [(0, 0), (padding, padding), (padding, padding), (0, 0)])
    corners = jax.random.randint(move_key, (n, 2), 0, 2 * padding + 1)
    x = jax.vmap(lambda image, at: jax.lax.dynamic_slice(image, (*at, 0), shape))(padded, corners)
    return jnp.where(jax.random.bernoulli(flip_key, 0.5, (n, 1, 1, 1)), x[:, :, ::-1], x)


def cutout(key: chex.PRNGKey, x: chex.Array, size: int = 16) -> jax.Array:
    """Set a square of each image to 0, its centre anywhere in the image (DeVries & Taylor 2017)."""
    prng_key("key", key)
    x, size = images("x", x), integer("size", size, 0)
    n, *sides, _ = x.shape
    centres = jax.random.randint(key, (2, n, 1), 0, jnp.array(sides)[:, None, None])
    rows, columns = (
        (jnp.arange(side)[None] >= start) & (jnp.arange(side)[None] < start + size)
        for side, start in zip(sides, centres - size // 2, strict=True)
    )
    return jnp.where((rows[:, :, None] & columns[:, None, :])[..., None], 0, x)


def augmentation(moved: bool, cut: int) -> Callable[..., jax.Array] | None:
    """Return the augmentation of training images: crop and flip, and a square ``cut`` out."""
    if not (moved or cut):
        return None

    def augment(key, x):
        keys = jax.random.split(key)
        x = crop_and_flip(keys[0], x) if moved else x
        return cutout(keys[1], x, cut) if cut else x

    return augment
