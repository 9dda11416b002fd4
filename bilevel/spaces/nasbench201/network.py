"""A genotype's network, as NAS-Bench-201 trained it.

    stem - cells at c channels - reduction - cells at 2 c - reduction - cells at 4 c - head

Stem: 3 x 3 convolution, norm. Reduction: a residual block of two [ReLU, 3 x 3 convolution, norm],
the first of stride 2, beside average pooling and a 1 x 1 convolution. Head: norm, ReLU, mean over
pixels, linear. All cells have the same genotype, each its own weights; published: 3 x 5 cells and
c = 16, trained for 200 epochs by SGD with Nesterov's momentum .9, rate .1 with a cosine to 0,
weight decay 5e-4, images moved and mirrored.

Weights are named by where they stand: ``w["cell_3"]["edge_2"]["nor_conv_3x3"]["conv"]["kernel"]``,
edges in the order of :data:`EDGES`. A genotype's ``w`` holds those of its own operations only.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from bilevel.internal.checks import integer
from bilevel.nets.convolution import average_pooling
from bilevel.nets.layers import Conv, accumulation_dtype, cast_images, draw_parameters
from bilevel.nets.training import TrainableNetwork
from bilevel.spaces.nasbench201.genotype import EDGES, SIZES, Genotype, check_operations
from bilevel.spaces.targets import label_losses

Norm = Callable[..., nn.Module]

STAGES = 3


class Stem(nn.Module):
    """3 x 3 convolution, norm."""

    channels: int
    norm: Norm

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[n, h, w, c] -> [n, h, w, channels]."""
        return self.norm(name="norm")(Conv(self.channels, 3, name="conv")(x))


class ConvolutionBlock(nn.Module):
    """ReLU, convolution, norm."""

    channels: int
    size: int
    norm: Norm
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[n, h, w, c] -> [n, h', w', channels]."""
        x = Conv(self.channels, self.size, self.stride, name="conv")(nn.relu(x))
        return self.norm(name="norm")(x)


class GenotypeCell(nn.Module):
    """A genotype's cell; the channels stay."""

    genotype: Genotype
    norm: Norm

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[n, h, w, c] -> the same."""
        nodes = [x, *[jnp.zeros_like(x)] * STAGES]
        for edge, ((source, node), name) in enumerate(
            zip(EDGES, self.genotype.operations, strict=True)
        ):
            if name != "none":
                nodes[node] += Edge(name, self.norm, name=f"edge_{edge}")(nodes[source])
        return checkpoint_name(nodes[-1], "layer")  # as ntk.scores.wrcor counts them


class Edge(nn.Module):
    """An operation other than ``none``."""

    operation: str
    norm: Norm

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[n, h, w, c] -> the same."""
        if self.operation == "skip_connect":
            return x
        if self.operation == "avg_pool_3x3":
            return average_pooling(x, 3, padding=1)
        size = SIZES[self.operation]
        return ConvolutionBlock(x.shape[-1], size, self.norm, name=self.operation)(x)


class Reduction(nn.Module):
    """The residual block that halves the image and doubles the channels."""

    norm: Norm

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[n, h, w, c] -> [n, ceil(h / 2), ceil(w / 2), 2 c]."""
        channels = 2 * x.shape[-1]
        y = ConvolutionBlock(channels, 3, self.norm, 2, name="first")(x)
        y = ConvolutionBlock(channels, 3, self.norm, name="second")(y)
        pooled = average_pooling(jnp.pad(x, _to_even(x), mode="edge"), 2, stride=2)
        return checkpoint_name(y + Conv(channels, name="shortcut")(pooled), "layer")


def _to_even(x: jax.Array) -> list[tuple[int, int]]:
    """An odd side's last pixels count twice; the published images have even sides."""
    return [(0, 0), (0, x.shape[1] % 2), (0, x.shape[2] % 2), (0, 0)]


class Head(nn.Module):
    """Norm, ReLU, mean over pixels, linear."""

    classes: int
    norm: Norm

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[n, h, w, c] -> logits [n, classes]."""
        x = nn.relu(self.norm(name="norm")(x))
        return nn.Dense(self.classes, name="classifier")(
            x.mean((1, 2), dtype=accumulation_dtype(x.dtype))
        )


class NasBench201Network(nn.Module):
    """The whole network, from images to logits."""

    genotype: Genotype
    shape: "Shape"
    norm: Norm
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Images [n, h, w, c] -> logits [n, classes]."""
        x = Stem(self.shape.channels, self.norm, name="stem")(cast_images(x, self.dtype))
        for stage in range(STAGES):
            if stage:
                x = Reduction(self.norm, name=f"reduction_{stage}")(x)
            for cell in self.shape.stage(stage):
                x = GenotypeCell(self.genotype, self.norm, name=f"cell_{cell}")(x)
        return Head(self.shape.classes, self.norm, name="head")(x)


class Shape(NamedTuple):
    """What is the same for all genotypes."""

    classes: int
    cells: int  # of a stage
    channels: int  # of the first stage

    def stage(self, stage: int) -> range:
        """The numbers of a stage's cells."""
        return range(stage * self.cells, (stage + 1) * self.cells)

    def check(self) -> None:
        """Refuse sizes that make no network.

        Raises
        ------
        ValueError
            For fewer than 2 classes, 1 cell or 1 channel.
        """
        for name, least in (("classes", 2), ("cells", 1), ("channels", 1)):
            integer(name, getattr(self, name), least)


def check_image_shape(shape: tuple[int, ...]) -> None:
    """Refuse a shape that is not that of images [n, h, w, c] of at least 4 x 4 pixels.

    Raises
    ------
    ValueError
        For another number of axes, or smaller images.
    """
    least = 2 ** (STAGES - 1)
    if len(shape) != 4 or min(shape[1:3]) < least:
        raise ValueError(
            f"x: expected images [n, h, w, c] of at least {least} x {least} pixels, got {shape}."
        )


def nasbench201_network(
    genotype: Genotype, *, classes: int = 10, cells: int = 5, channels: int = 16, dtype: Any = None
) -> TrainableNetwork:
    """The network of a genotype, to be trained from scratch.

    Parameters
    ----------
    genotype : Genotype
    classes, cells, channels : int
        The defaults are the benchmark's on CIFAR-10; ``cells`` are those of each of three stages,
        ``channels`` the first one's.
    dtype : dtype, optional
        Of activations, by default the images'; parameters and averages are float32.

    Returns
    -------
    TrainableNetwork
        For :func:`bilevel.nets.from_scratch`; its loss has no options.

    Raises
    ------
    ValueError
        For a genotype that cannot be built, or images under 4 x 4.

    Notes
    -----
    Kernels start from U(-1, 1) / sqrt(fan-in) as the benchmark's. Deviations: the classifier's
    bias starts at 0; running variances are without the factor m / (m - 1).

    References
    ----------
    Dong & Yang (2020), NAS-Bench-201, section 2.

    Examples
    --------
    >>> from bilevel.spaces.nasbench201.genotype import parse_genotype
    >>> cell = "|nor_conv_3x3~0|+|none~0|skip_connect~1|+|none~0|none~1|nor_conv_1x1~2|"
    >>> network = nasbench201_network(parse_genotype(cell))
    >>> w, averages = jax.eval_shape(lambda key: network.init(key, (32, 32, 3)), jax.random.key(0))
    >>> sum(leaf.size for leaf in jax.tree.leaves(w))  # 73,306 + 243,040 + 28,000
    344346
    """
    check_operations(genotype)
    shape = Shape(classes, cells, channels)
    shape.check()

    def module(train):
        norm = functools.partial(
            nn.BatchNorm, use_running_average=not train, momentum=0.9, epsilon=1e-5, dtype=dtype
        )
        return NasBench201Network(genotype, shape, norm, dtype)

    def init(key, image):
        check_image_shape((1, *image))
        images = jax.ShapeDtypeStruct((1, *image), jnp.float32)
        shapes = jax.eval_shape(module(True).init, key, images)
        averages = {"mean": jnp.zeros, "var": jnp.ones}
        return draw_parameters(key, shapes["params"]), jax.tree_util.tree_map_with_path(
            lambda path, leaf: averages[path[-1].key](leaf.shape, leaf.dtype),
            shapes["batch_stats"],
        )

    def apply(w, averages, x):
        check_image_shape(x.shape)
        return module(False).apply({"params": w, "batch_stats": averages}, x)

    def loss(w, averages, batch, key):
        x, labels = batch
        check_image_shape(x.shape)
        logits, new = module(True).apply(
            {"params": w, "batch_stats": averages}, x, mutable=["batch_stats"]
        )
        value = label_losses(logits, labels).mean()
        # Wide images have wide statistics; the averages stay what they are.
        return value, jax.tree.map(lambda x, a: x.astype(a.dtype), new["batch_stats"], averages)

    def predict(logits):
        return jnp.argmax(logits, axis=-1)

    return TrainableNetwork(init, apply, loss, predict)
