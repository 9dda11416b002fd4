"""The operations of the DARTS cell, and the network of a genotype (Liu et al. 2019).

======================  ===============================================================
operation               program, for stride s
======================  ===============================================================
``none``                zeros; mixtures skip it
``max_pool_3x3``        padding 1
``avg_pool_3x3``        padding 1, mean over the pixels inside the image
``skip_connect``        identity; :class:`FactorizedReduce` at stride 2
``sep_conv_3x3, 5x5``   twice [ReLU, depthwise k x k, 1 x 1, norm], stride s then 1
``dil_conv_3x3, 5x5``   ReLU, depthwise k x k of dilation 2 and stride s, 1 x 1, norm
======================  ===============================================================

``norm()`` makes the normalisation layer: :class:`Standardize` in the supernet, batch normalisation
with running averages in networks trained from scratch.

A genotype's network is trained from scratch (section 3.3). Its cells have two edges into each node,
each with one operation. Regularised by

    drop path    an edge's output is dropped for an example with probability ``drop_path``
                 (identities never), and divided by 1 - ``drop_path`` otherwise
    cutout       a square of each training image is set to 0 (DeVries & Taylor 2017)
    auxiliary    a second classifier after the second reduction, its loss times 0.4

As published: 600 epochs of SGD, batch 96, rate 0.025 with a cosine to 0, momentum 0.9, weight decay
3e-4, gradients clipped to norm 5, ``drop_path`` rising linearly from 0 to 0.2, cutout 16.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from bilevel.nets.convolution import average_pooling, max_pooling
from bilevel.nets.layers import Conv, Norm, batch_norm, cast_images, pixel_means
from bilevel.nets.training import TrainableNetwork
from bilevel.spaces.cells import check_sizes, even_sides, trainable_network
from bilevel.spaces.darts.genotype import NODES, Genotype, check_genotype


class ReluConvNorm(nn.Module):
    """ReLU, 1 x 1 convolution, norm."""

    channels: int
    norm: Norm

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [n, h, w, c] to [n, h, w, channels]."""
        return self.norm()(Conv(self.channels)(nn.relu(x)))


class FactorizedReduce(nn.Module):
    """ReLU, two 1 x 1 convolutions of stride 2, the second one pixel off, norm.

    An odd side gets a zero at its end for the second; the reference requires even sides.
    """

    channels: int
    norm: Norm

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [n, h, w, c] to [n, ceil(h / 2), ceil(w / 2), channels]."""
        x = nn.relu(x)
        half = self.channels // 2
        even = Conv(half, stride=2)(x)
        shifted = Conv(self.channels - half, stride=2)(even_sides(x)[:, 1:, 1:])
        return self.norm()(jnp.concatenate([even, shifted], axis=-1))


class SeparableConv(nn.Module):
    """Twice ReLU, depthwise and 1 x 1 convolution, norm; the stride is the first one's."""

    channels: int
    stride: int
    norm: Norm
    size: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [n, h, w, channels] to [n, h', w', channels]."""
        for stride in (self.stride, 1):
            x = Conv(self.channels, self.size, stride, depthwise=True)(nn.relu(x))
            x = self.norm()(Conv(self.channels)(x))
        return x


class DilatedConv(nn.Module):
    """ReLU, depthwise convolution of dilation 2, 1 x 1 convolution, norm."""

    channels: int
    stride: int
    norm: Norm
    size: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [n, h, w, channels] to [n, h', w', channels]."""
        x = Conv(self.channels, self.size, self.stride, 2, depthwise=True)(nn.relu(x))
        return self.norm()(Conv(self.channels)(x))


def run_operation(
    name: str, x: jax.Array, channels: int, stride: int, norm: Norm, pool_norm: Norm | None = None
) -> jax.Array:
    """Apply an operation other than ``none`` inside a module; ``pool_norm`` follows pooling."""
    if name == "skip_connect":
        return x if stride == 1 else FactorizedReduce(channels, norm)(x)
    if name in _POOLS:
        x = _POOLS[name](x, 3, stride=stride, padding=1)
        return x if pool_norm is None else pool_norm()(x)
    return _CONVOLUTIONS[name[:3]](channels, stride, norm, size=int(name[-1]))(x)


_POOLS = {"max_pool_3x3": max_pooling, "avg_pool_3x3": average_pooling}
_CONVOLUTIONS: dict[str, Callable[..., nn.Module]] = {"sep": SeparableConv, "dil": DilatedConv}


def reductions(cells: int) -> set[int]:
    """Return the cells, counted from 0, that halve the image and double the channels."""
    return {cells // 3, 2 * cells // 3}


class Cell(nn.Module):
    """A cell of a genotype; ``drop`` acts on the outputs of all edges except identities."""

    genotype: Genotype
    channels: int
    stride: int
    reduced: bool
    norm: Norm
    drop: Callable[[jax.Array], jax.Array]

    @nn.compact
    def __call__(self, before_last: jax.Array, last: jax.Array) -> jax.Array:
        """Map two arrays [n, h, w, c] to [n, h', w', concat * channels]."""
        kind = "normal" if self.stride == 1 else "reduce"
        pairs = getattr(self.genotype, kind)
        adapt = FactorizedReduce if self.reduced else ReluConvNorm
        states = [
            adapt(self.channels, self.norm)(before_last),
            ReluConvNorm(self.channels, self.norm)(last),
        ]
        for node in NODES:
            edges = pairs[2 * (node - 2) : 2 * (node - 1)]
            states.append(sum(self._edge(name, source, states) for name, source in edges))
        concat = getattr(self.genotype, f"{kind}_concat")
        return jnp.concatenate([states[node] for node in concat], axis=-1)

    def _edge(self, name, source, states):
        stride = self.stride if source < 2 else 1
        y = run_operation(name, states[source], self.channels, stride, self.norm)
        return y if name == "skip_connect" and stride == 1 else self.drop(y)


class AuxiliaryHead(nn.Module):
    """The second classifier, for inputs of at least 8 x 8 pixels."""

    classes: int
    norm: Norm

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [n, h, w, c] to logits [n, classes]."""
        if min(x.shape[1:3]) < 8:
            raise ValueError(
                "auxiliary: expected at least 8 x 8 pixels after two reductions "
                f"(images of 29 x 29), got {x.shape[1]} x {x.shape[2]}; use auxiliary=False."
            )
        x = average_pooling(nn.relu(x), 5, stride=3)
        x = nn.relu(self.norm()(Conv(128)(x)))
        x = nn.relu(self.norm()(Conv(768, 2, padding=0)(x)))
        return nn.Dense(self.classes)(pixel_means(x))


class DartsNetwork(nn.Module):
    """The whole network; random numbers of the stream ``drop_path`` when ``train``."""

    genotype: Genotype
    classes: int
    cells: int
    channels: int
    auxiliary: bool
    dtype: Any
    train: bool

    @nn.compact
    def __call__(self, x: jax.Array, drop_path: float | jax.Array = 0.0) -> list[jax.Array]:
        """Map images [n, h, w, c] to logits [n, classes], and the auxiliary ones when ``train``."""
        norm = batch_norm(self.train, self.dtype)

        def drop(y):
            if not self.train:
                return y
            key, shape = self.make_rng("drop_path"), (len(y), 1, 1, 1)
            keep = jax.random.bernoulli(key, 1 - drop_path, shape)
            return y * (keep.astype(float) / (1 - drop_path)).astype(y.dtype)

        before_last = last = norm()(Conv(3 * self.channels, 3)(cast_images(x, self.dtype)))
        channels, reduced, auxiliary = self.channels, False, []
        for cell in range(self.cells):
            reduce = cell in reductions(self.cells)
            channels *= 1 + reduce
            layer = Cell(self.genotype, channels, 1 + reduce, reduced, norm, drop)
            before_last, last, reduced = last, layer(before_last, last), reduce
            if self.train and self.auxiliary and cell == 2 * self.cells // 3:
                auxiliary = [AuxiliaryHead(self.classes, norm, name="auxiliary")(last)]
        return [nn.Dense(self.classes)(pixel_means(last)), *auxiliary]


def darts_network(
    genotype: Genotype,
    *,
    classes: int = 10,
    cells: int = 20,
    channels: int = 36,
    auxiliary: bool = True,
    dtype: Any = None,
) -> TrainableNetwork:
    """Make the network of a genotype, to be trained by :func:`bilevel.nets.from_scratch`.

    Parameters
    ----------
    genotype : Genotype
    classes, cells, channels : int
        The defaults are the published evaluation's on CIFAR-10.
    auxiliary : bool
        Whether training has the auxiliary classifier; images must be at least 29 x 29.
    dtype : dtype, optional
        Dtype of activations, by default the images'; parameters and averages are float32.

    Raises
    ------
    ValueError
        If the genotype cannot be built, or images are too small.

    Notes
    -----
    Liu, Simonyan & Yang (2019), section 3.3 and appendix A.2. Deviations: running variances are of
    the batch, without the factor m / (m - 1). The auxiliary classifier averages over positions,
    because the reference fails for images beyond 40 x 40. Biases of both classifiers start at 0.

    Examples
    --------
    >>> from bilevel.spaces.darts.genotype import DARTS_V2
    >>> network = darts_network(DARTS_V2, cells=2, channels=4, auxiliary=False)
    >>> w, averages = jax.eval_shape(lambda key: network.init(key, (8, 8, 3)), jax.random.key(0))
    >>> sum(x.size for x in jax.tree.leaves(w))
    1990
    """
    check_genotype(genotype)
    check_sizes(classes, cells, channels, 2)
    sizes = classes, cells, channels, auxiliary, dtype
    module = functools.partial(DartsNetwork, genotype, *sizes)
    return trainable_network(module, len(reductions(cells)))
