"""The supernet of NAS-Bench-201: every edge mixes the five operations, on shared weights.

    node_j = sum_{i < j} sum_o alpha_(i,j),o o(node_i),    alpha_(i,j) on the simplex

The genotype's network with :func:`mixed_cell` for its cell; all cells share one ``alpha`` [6, 5],
each has its own weights. As in the benchmark's own weight-sharing searches, an operation's norm is
on the batch's statistics and has no scale or shift, which the weight of its operation could undo;
stem, reductions and head are those of :mod:`bilevel.spaces.nasbench201.network`.

==========  ==========================================================================
paper       here
==========  ==========================================================================
alpha       weights on the simplex; softmax or the mirror map is the outer geometry
w           convolutions' kernels, norms of stem, reductions and head, the classifier
L_train     ``problem.lower``, mean cross-entropy; weight decay is the optimizer's
L_val       ``problem.outer``, the same
==========  ==========================================================================

At a corner, ``one_hot(genotype)``, it is that genotype's network.
"""

import functools
from collections.abc import Sequence
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bilevel.contracts import Pytree
from bilevel.nets.convolution import average_pooling
from bilevel.nets.layers import Standardize, cast_images, draw_parameters
from bilevel.spaces.nasbench201.genotype import (
    EDGES,
    PRIMITIVES,
    SIZES,
    Genotype,
    check_operations,
)
from bilevel.spaces.nasbench201.network import (
    STAGES,
    ConvolutionBlock,
    Head,
    Reduction,
    Shape,
    Stem,
    check_image_shape,
)
from bilevel.spaces.space import Space, on_simplices
from bilevel.spaces.targets import cross_entropy_problem, predict_labels


class WeightedEdge(nn.Module):
    """The operations on one edge, each times its weight, added up."""

    operations: tuple[str, ...]

    @nn.compact
    def __call__(self, x: jax.Array, alpha: jax.Array) -> jax.Array:
        """``x`` [n, h, w, c] and ``alpha`` [o] -> the same as ``x``."""
        total = jnp.zeros_like(x)
        for name, weight in zip(self.operations, alpha.astype(x.dtype), strict=True):
            if name == "skip_connect":
                total += weight * x
            elif name == "avg_pool_3x3":
                total += weight * average_pooling(x, 3, padding=1)
            elif name != "none":
                module = ConvolutionBlock(x.shape[-1], SIZES[name], Standardize, name=name)
                total += weight * module(x)
        return total


def mixed_cell(
    operations: tuple[str, ...], w: Pytree, alpha: chex.Array, x: chex.Array
) -> jax.Array:
    """A cell of the supernet: ``w`` leads with the edge, ``alpha`` [6, o], ``x`` [n, h, w, c]."""

    def edge(nodes, edge):
        source, node, weights, alpha = edge
        y = WeightedEdge(operations).apply({"params": weights}, nodes[source], alpha)
        return nodes.at[node].add(y), None

    nodes = jnp.zeros((1 + STAGES, *x.shape), x.dtype).at[0].set(x)
    # EDGES is by node: whatever leads into a node comes before all that leads out of it.
    return jax.lax.scan(edge, nodes, (*np.array(EDGES).T, w, alpha))[0][-1]


def _named_layers(operations: tuple[str, ...], shape: Shape) -> dict[str, nn.Module]:
    """What the network is made of, in order, by the names of the weights."""
    layers: dict[str, nn.Module] = {"stem": Stem(shape.channels, _standardize)}
    for stage in range(STAGES):
        if stage:
            layers[f"reduction_{stage}"] = Reduction(_standardize)
        layers[f"cells_{stage}"] = WeightedEdge(operations)
    return layers | {"head": Head(shape.classes, _standardize)}


_standardize = functools.partial(Standardize, affine=True)


def nasbench201_space(
    operations: Sequence[str] = PRIMITIVES,
    *,
    classes: int = 10,
    cells: int = 5,
    channels: int = 16,
    dtype: Any = None,
    remat: bool = True,
) -> Space:
    """The supernet of NAS-Bench-201 as a search space.

    ``alpha`` [6, o] has the operations' weights on every edge. Batches are ``(x, labels)``: images
    [n, h, w, c], integer labels [n]; outputs are logits [n, classes], normalised by the batch. An
    architecture is a :class:`Genotype`, the largest weight on each edge: "none" counts like any
    other, unlike in DARTS; of equal weights the first wins.

    Parameters
    ----------
    operations : names in ``PRIMITIVES``, one other than "none" among them
    classes, cells, channels : int
        The defaults are the benchmark's on CIFAR-10; ``cells`` are those of each of three stages,
        ``channels`` the first one's.
    dtype : dtype, optional
        Of activations; ``jnp.bfloat16`` for mixed precision. Parameters are float32, batch
        statistics, the classifier and losses float32 at least. By default the images'.
    remat : bool
        Whether to keep only a cell's input for the backward pass and compute the cell again.

    Returns
    -------
    Space

    Raises
    ------
    ValueError
        For unknown operations, fewer than two classes, or images under 4 x 4; by ``discretize``
        and ``one_hot``, for weights and genotypes of another space.

    Notes
    -----
    Deviation: the classifier's bias starts at 0.

    Cost: memory for the inputs of all cells and the activations of one, without ``remat`` for all
    activations. Edges of a cell, and cells of a stage, are two loops around one compiled program:
    a stage has one edge to compile, however many cells there are.

    References
    ----------
    Dong & Yang (2020), NAS-Bench-201, section 2; section 5 for searches with shared weights.

    Examples
    --------
    >>> space = nasbench201_space(["none", "skip_connect"], cells=1, channels=2)
    >>> batch = jnp.ones((5, 8, 8, 3)), jnp.zeros(5, int)
    >>> w = jax.eval_shape(space.init, jax.random.key(0), batch)
    >>> jax.eval_shape(space.apply, w, space.start(), batch[0]).shape
    (5, 10)
    >>> print(space.discretize(space.draw(jax.random.key(0))))
    |skip_connect~0|+|none~0|none~1|+|skip_connect~0|skip_connect~1|skip_connect~2|
    """
    names = tuple(operations)
    for name in names:
        if name not in PRIMITIVES:
            raise ValueError(
                f"operations: expected names among {', '.join(PRIMITIVES)}, got {name!r}."
            )
    if set(names) <= {"none"} or len(set(names)) < len(names):
        raise ValueError(
            f"operations: expected distinct names, one other than 'none', got {list(names)}."
        )
    shape = Shape(classes, cells, channels)
    shape.check()
    layers = _named_layers(names, shape)

    choices = on_simplices(names, (len(EDGES),))

    def init(key, batch):
        image = batch[0].shape[1:]
        check_image_shape((1, *image))
        x = jax.ShapeDtypeStruct((1, *image), jnp.float32)
        shapes = {}
        for name, layer in layers.items():
            mixed = isinstance(layer, WeightedEdge)
            inputs = (x, choices.start()[0]) if mixed else (x,)
            x, variables = jax.eval_shape(layer.init_with_output, key, *inputs)
            repeats = (cells, len(EDGES)) if mixed else ()
            shapes[name] = jax.tree.map(
                lambda leaf, repeats=repeats: jax.ShapeDtypeStruct(
                    (*repeats, *leaf.shape), leaf.dtype
                ),
                variables.get("params", {}),
            )
        return draw_parameters(key, shapes)

    def apply(w, alpha, x):
        check_image_shape(x.shape)
        x = cast_images(x, dtype)

        def cell(x, weights):
            return mixed_cell(names, weights, alpha, x), None

        # Inside a loop, remat needs no barrier against merging what it computes twice.
        step = jax.checkpoint(cell, prevent_cse=False) if remat else cell
        for name, layer in layers.items():
            if isinstance(layer, WeightedEdge):
                x, _ = jax.lax.scan(step, x, w[name], length=cells)
            else:
                x = layer.apply({"params": w[name]}, x)
        return x

    def discretize(alpha):
        return Genotype(choices.discretize(alpha))

    def one_hot(genotype):
        check_operations(genotype)
        return choices.one_hot(genotype.operations)

    return Space(
        names=names,
        sets="simplex",
        start=choices.start,
        init=init,
        apply=apply,
        problem=cross_entropy_problem(apply),
        predict=predict_labels,
        draw=choices.draw,
        discretize=discretize,
        one_hot=one_hot,
    )
