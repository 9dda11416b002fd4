"""The supernet of NAS-Bench-201: every edge mixes the five operations, on shared weights.

All cells share one ``alpha`` [6, 5], each has its own weights. As in the benchmark's own searches,
an operation's norm uses the batch's statistics and has no scale or shift, which could undo the
weight of the operation. Both losses are the mean cross-entropy; the optimizer adds weight decay.
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
from bilevel.nets.layers import Standardize, cast_images
from bilevel.spaces.cells import MixedOperation, candidate_names, check_sizes, supernet_space
from bilevel.spaces.nasbench201 import network
from bilevel.spaces.nasbench201.genotype import EDGES, PRIMITIVES, Genotype, check_operations
from bilevel.spaces.nasbench201.network import STAGES, standardize
from bilevel.spaces.space import Space, on_simplices


def mixed_edge(operations: tuple[str, ...]) -> MixedOperation:
    """Make the operations on one edge; their norms have no scale or shift."""
    return MixedOperation(operations, functools.partial(network.run_operation, Standardize))


def mixed_cell(
    operations: tuple[str, ...], w: Pytree, alpha: chex.Array, x: chex.Array
) -> jax.Array:
    """Apply a supernet cell to ``x`` [n, h, w, c]; ``w`` leads with the edge, ``alpha`` [6, o]."""

    def edge(nodes, edge):
        source, node, weights, alpha = edge
        x = nodes[source]
        y = mixed_edge(operations).apply({"params": weights}, x, alpha, jnp.zeros_like(x))
        return nodes.at[node].add(y), None

    nodes = jnp.zeros((1 + STAGES, *x.shape), x.dtype).at[0].set(x)
    # EDGES is sorted by node: all edges into a node come before the edges out of it.
    return jax.lax.scan(edge, nodes, (*np.array(EDGES).T, w, alpha))[0][-1]


def _repeated(repeats: tuple[int, ...], leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*repeats, *leaf.shape), leaf.dtype)


def nasbench201_space(
    operations: Sequence[str] = PRIMITIVES,
    *,
    classes: int = 10,
    cells: int = 5,
    channels: int = 16,
    dtype: Any = None,
    remat: bool = True,
) -> Space:
    """Make the supernet of NAS-Bench-201 as a search space.

    ``alpha`` [6, o] has the operations' weights on every edge. Batches are ``(x, labels)``: images
    [n, h, w, c], integer labels [n]; outputs are logits [n, classes], normalised by the batch. An
    architecture is a :class:`Genotype`, the largest weight on each edge: "none" counts like any
    other, unlike in DARTS; among equal weights the first wins. At a vertex, the supernet is the
    genotype's network.

    Parameters
    ----------
    operations : names in ``PRIMITIVES``, at least one other than "none"
    classes, cells, channels : int
        The defaults are the benchmark's on CIFAR-10; ``cells`` per stage, ``channels`` of the first
        stage.
    dtype : dtype, optional
        Dtype of activations, by default the images'; ``jnp.bfloat16`` for mixed precision.
        Parameters are float32; batch statistics, the classifier and losses have at least float32.
    remat : bool
        Whether the backward pass recomputes each cell from its input, to store less.

    Raises
    ------
    ValueError
        If operations are unknown, there are fewer than two classes, or images are under 4 x 4.
        ``discretize`` and ``one_hot`` raise it for weights and genotypes of another space.

    Notes
    -----
    Dong & Yang (2020), section 2; section 5 for searches with shared weights. Deviation: the
    classifier's bias starts at 0.

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
    names = candidate_names(operations, PRIMITIVES)
    check_sizes(classes, cells, channels)
    choices = on_simplices(names, (len(EDGES),))
    # In order, by the names of the weights.
    layers: dict[str, nn.Module] = {"stem": network.Stem(channels, standardize)}
    for stage in range(STAGES):
        if stage:
            layers[f"reduction_{stage}"] = network.Reduction(standardize)
        layers[f"cells_{stage}"] = mixed_edge(names)
    layers["head"] = network.Head(classes, standardize)

    def shapes(key, x):
        weights = {}
        for name, layer in layers.items():
            mixed = isinstance(layer, MixedOperation)
            inputs = (x, choices.start()[0]) if mixed else (x,)
            x, variables = jax.eval_shape(layer.init_with_output, key, *inputs)
            repeat = functools.partial(_repeated, (cells, len(EDGES)) if mixed else ())
            weights[name] = jax.tree.map(repeat, variables.get("params", {}))
        return weights

    def run(w, alpha, x):
        x = cast_images(x, dtype)

        def cell(x, weights):
            return mixed_cell(names, weights, alpha, x), None

        # Inside a loop, XLA does not merge the recomputation with the original.
        step = jax.checkpoint(cell, prevent_cse=False) if remat else cell
        for name, layer in layers.items():
            if isinstance(layer, MixedOperation):
                x, _ = jax.lax.scan(step, x, w[name], length=cells)
            else:
                x = layer.apply({"params": w[name]}, x)
        return x

    def one_hot(genotype):
        check_operations(genotype)
        return choices.one_hot(genotype.operations)

    return supernet_space(
        names,
        STAGES - 1,
        shapes,
        run,
        start=choices.start,
        draw=choices.draw,
        discretize=lambda alpha: Genotype(choices.discretize(alpha)),
        one_hot=one_hot,
    )
