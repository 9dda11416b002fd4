"""A genotype's network, as NAS-Bench-201 trained it.

    stem - cells at c channels - reduction - cells at 2 c - reduction - cells at 4 c - head

Published: 3 x 5 cells of one genotype and c = 16, trained for 200 epochs by SGD with Nesterov's
momentum 0.9, rate 0.1 with a cosine to 0, weight decay 5e-4, images shifted and mirrored. Weights
are named by place: ``w["cell_3"]["edge_2"]["nor_conv_3x3"]["conv"]["kernel"]``.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from bilevel.nets.convolution import average_pooling
from bilevel.nets.layers import Conv, Standardize, batch_norm, cast_images, pixel_means
from bilevel.nets.training import TrainableNetwork
from bilevel.spaces.cells import check_sizes, even_sides, trainable_network
from bilevel.spaces.nasbench201.genotype import EDGES, SIZES, Genotype, check_operations

Norm = Callable[..., nn.Module]

STAGES = 3

standardize = functools.partial(Standardize, affine=True)
"""The norm of supernets and train-free scores: batch statistics, learned scale and shift."""


class Stem(nn.Module):
    """3 x 3 convolution, norm."""

    channels: int
    norm: Norm

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [n, h, w, c] to [n, h, w, channels]."""
        return self.norm(name="norm")(Conv(self.channels, 3, name="conv")(x))


class ConvolutionBlock(nn.Module):
    """ReLU, convolution, norm."""

    channels: int
    size: int
    norm: Norm
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [n, h, w, c] to [n, h', w', channels]."""
        x = Conv(self.channels, self.size, self.stride, name="conv")(nn.relu(x))
        return self.norm(name="norm")(x)


def add_edges(edge: Callable[[int, jax.Array], Any], x: jax.Array) -> jax.Array:
    """Return the output of a cell with input ``x``; edge k adds ``edge(k, source)`` to its node."""
    nodes = [x, *[jnp.zeros_like(x)] * STAGES]
    for k, (source, node) in enumerate(EDGES):
        nodes[node] += edge(k, nodes[source])
    return checkpoint_name(nodes[-1], "layer")  # as ntk.scores.wrcor counts them


class GenotypeCell(nn.Module):
    """A genotype's cell; the number of channels stays."""

    genotype: Genotype
    norm: Norm

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [n, h, w, c] to the same shape."""

        def edge(k, x):
            name = self.genotype.operations[k]
            return 0 if name == "none" else Edge(name, self.norm, name=f"edge_{k}")(x)

        return add_edges(edge, x)


class Edge(nn.Module):
    """An operation other than ``none``."""

    operation: str
    norm: Norm

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [n, h, w, c] to the same shape."""
        return run_operation(self.norm, self.operation, x)


def run_operation(norm: Norm, name: str, x: jax.Array) -> jax.Array:
    """Apply an operation other than ``none`` inside a module."""
    if name == "skip_connect":
        return x
    if name == "avg_pool_3x3":
        return average_pooling(x, 3, padding=1)
    return ConvolutionBlock(x.shape[-1], SIZES[name], norm, name=name)(x)


class Reduction(nn.Module):
    """The residual block that halves the image and doubles the channels."""

    norm: Norm

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [n, h, w, c] to [n, ceil(h / 2), ceil(w / 2), 2 c]."""
        channels = 2 * x.shape[-1]
        y = ConvolutionBlock(channels, 3, self.norm, 2, name="first")(x)
        y = ConvolutionBlock(channels, 3, self.norm, name="second")(y)
        pooled = average_pooling(even_sides(x, mode="edge"), 2, stride=2)
        return checkpoint_name(y + Conv(channels, name="shortcut")(pooled), "layer")


class Head(nn.Module):
    """Norm, ReLU, mean over pixels, linear."""

    classes: int
    norm: Norm

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [n, h, w, c] to logits [n, classes]."""
        x = nn.relu(self.norm(name="norm")(x))
        return nn.Dense(self.classes, name="classifier")(pixel_means(x))


class NasBench201Network(nn.Module):
    """The whole network, from images to logits."""

    genotype: Genotype
    classes: int
    cells: int  # of a stage
    channels: int  # of the first stage
    norm: Norm
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array]:
        """Map images [n, h, w, c] to (logits [n, classes],)."""
        x = Stem(self.channels, self.norm, name="stem")(cast_images(x, self.dtype))
        for stage in range(STAGES):
            if stage:
                x = Reduction(self.norm, name=f"reduction_{stage}")(x)
            for cell in range(stage * self.cells, (stage + 1) * self.cells):
                x = GenotypeCell(self.genotype, self.norm, name=f"cell_{cell}")(x)
        return (Head(self.classes, self.norm, name="head")(x),)


def nasbench201_network(
    genotype: Genotype, *, classes: int = 10, cells: int = 5, channels: int = 16, dtype: Any = None
) -> TrainableNetwork:
    """Make the network of a genotype, to be trained by :func:`bilevel.nets.from_scratch`.

    The defaults are the benchmark's on CIFAR-10. ``cells`` is the number per stage, ``channels``
    that of the first stage, ``dtype`` that of activations, by default the images'. Parameters and
    averages are float32. The loss has no options. Deviations from the benchmark: the classifier's
    bias starts at 0; running variances are without the factor m / (m - 1).
    """
    check_operations(genotype)
    check_sizes(classes, cells, channels)

    def module(train):
        norm = batch_norm(train, dtype)
        return NasBench201Network(genotype, classes, cells, channels, norm, dtype)

    return trainable_network(module, STAGES - 1)
