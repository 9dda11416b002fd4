"""Shared parts of the spaces of convolutional cells: DARTS and NAS-Bench-201.

A cell is a graph. Every edge carries one operation, or a mixture of all with the weights ``alpha``:

    node_j = sum_{i < j} sum_o alpha_(i,j),o o(node_i),    alpha_(i,j) on the simplex
"""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from bilevel.contracts import Pytree
from bilevel.internal.checks import integer
from bilevel.nets.layers import draw_parameters
from bilevel.nets.training import TrainableNetwork
from bilevel.spaces.space import Space
from bilevel.spaces.targets import cross_entropy_problem, label_losses, predict_labels

_AUXILIARY_WEIGHT = 0.4  # of the loss of a second classifier


def edges_by_node(nodes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the edges (source, node) from every earlier node, by node and source."""
    return tuple((source, node) for node in nodes for source in range(node))


def candidate_names(operations: Sequence[str], primitives: Sequence[str]) -> tuple[str, ...]:
    """Return a supernet's operations: distinct ``primitives``, at least one other than "none"."""
    names = tuple(operations)
    for name in names:
        if name not in primitives:
            raise ValueError(
                f"operations: expected names among {', '.join(primitives)}, got {name!r}."
            )
    if set(names) <= {"none"} or len(set(names)) < len(names):
        raise ValueError(
            f"operations: expected distinct names, one other than 'none', got {list(names)}."
        )
    return names


def check_sizes(classes: int, cells: int, channels: int, least_channels: int = 1) -> None:
    """Raise unless there are 2 classes, 1 cell and ``least_channels`` channels or more."""
    integer("classes", classes, 2)
    integer("cells", cells, 1)
    integer("channels", channels, least_channels)


def check_images(shape: tuple[int, ...], halvings: int) -> None:
    """Raise unless ``shape`` is [n, h, w, c], large enough to be halved ``halvings`` times."""
    least = 2**halvings
    if len(shape) != 4 or min(shape[1:3]) < least:
        raise ValueError(
            f"x: expected images [n, h, w, c] of at least {least} x {least} pixels, got {shape}."
        )


def even_sides(x: jax.Array, mode: str = "constant") -> jax.Array:
    """Pad images [n, h, w, c] at the end of odd sides; published ones have even sides."""
    return jnp.pad(x, [(0, 0), (0, x.shape[1] % 2), (0, x.shape[2] % 2), (0, 0)], mode=mode)


class MixedOperation(nn.Module):
    """The weighted sum of all operations on an edge; ``run(name, x)`` applies all except "none"."""

    operations: tuple[str, ...]
    run: Callable[[str, jax.Array], jax.Array]

    @nn.compact
    def __call__(self, x: jax.Array, alpha: jax.Array, total: Any = 0.0) -> jax.Array:
        """Map ``x`` [n, h, w, c], ``alpha`` [operations] to [n, h', w', c'] plus ``total``."""
        for name, weight in zip(self.operations, alpha.astype(x.dtype), strict=True):
            if name != "none":
                total += weight * self.run(name, x)
        return total


def supernet_space(
    names: tuple[str, ...],
    halvings: int,
    shapes: Callable[[jax.Array, jax.ShapeDtypeStruct], Pytree],
    run: Callable[[Pytree, Pytree, jax.Array], Any],
    **fields: Any,
) -> Space:
    """Make the space of a supernet of images: its checks, initial weights, losses and predictions.

    ``shapes(key, image)`` has the shapes of the weights for images like ``image`` [1, h, w, c], and
    ``run(w, alpha, x)`` is the network. ``fields`` are the other fields of the space.
    """

    def init(key, batch):
        check_images(batch[0].shape, halvings)
        image = jax.ShapeDtypeStruct((1, *batch[0].shape[1:]), jnp.float32)
        return draw_parameters(key, shapes(key, image))

    def apply(w, alpha, x):
        check_images(x.shape, halvings)
        return run(w, alpha, x)

    return Space(
        names=names,
        sets="simplex",
        init=init,
        apply=apply,
        problem=cross_entropy_problem(apply),
        predict=predict_labels,
        **fields,
    )


def trainable_network(module: Callable[[bool], nn.Module], halvings: int) -> TrainableNetwork:
    """Make a genotype's network, to be trained from scratch.

    ``module(train)`` maps images, and in training the options of the loss, to a tuple of logits; a
    second entry belongs to an auxiliary classifier. Its stream of random numbers is "drop_path".
    """

    def init(key, image):
        check_images((1, *image), halvings)
        keys = {"params": key, "drop_path": key}  # for the shapes only
        images = jax.ShapeDtypeStruct((1, *image), jnp.float32)
        shapes = jax.eval_shape(module(True).init, keys, images)
        averages = {"mean": jnp.zeros, "var": jnp.ones}
        return draw_parameters(key, shapes["params"]), jax.tree_util.tree_map_with_path(
            lambda path, leaf: averages[path[-1].key](leaf.shape, leaf.dtype), shapes["batch_stats"]
        )

    def apply(w, averages, x):
        check_images(x.shape, halvings)
        return module(False).apply({"params": w, "batch_stats": averages}, x)[0]

    def loss(w, averages, batch, key, *options):
        x, labels = batch
        check_images(x.shape, halvings)
        (logits, *auxiliary), new = module(True).apply(
            {"params": w, "batch_stats": averages},
            x,
            *options,
            rngs={"drop_path": key},
            mutable=["batch_stats"],
        )
        value = label_losses(logits, labels).mean()
        for second in auxiliary:
            value += _AUXILIARY_WEIGHT * label_losses(second, labels).mean()
        # Statistics have the images' precision; the averages keep their dtype.
        return value, jax.tree.map(lambda x, a: x.astype(a.dtype), new["batch_stats"], averages)

    return TrainableNetwork(init, apply, loss, predict_labels)
