"""The DARTS search space: a network with a mixture of operations on every edge (Liu et al. 2019).

Cells are stacked; those at one and at two thirds are reduction cells, which halve the image and
double the channels. All normal cells share one ``alpha`` [14, 8], all reduction cells another. A
cell's inputs are the outputs of the two cells before it. The paper's alpha are logits: its softmax
is the geometry :func:`bilevel.softmax`. Both losses are the mean cross-entropy; the optimizer adds
weight decay.

The edges of a cell are a loop (``nn.scan``): a cell compiles one edge, a reduction cell two.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bilevel.nets.convolution import materialized
from bilevel.nets.layers import Conv, Standardize, cast_images, pixel_means
from bilevel.spaces.cells import MixedOperation, candidate_names, check_sizes, supernet_space
from bilevel.spaces.darts.genotype import EDGES, NODES, PRIMITIVES, draw_corner, genotype, one_hot
from bilevel.spaces.darts.network import FactorizedReduce, ReluConvNorm, reductions, run_operation
from bilevel.spaces.space import Space, on_simplices


class MixedEdge(nn.Module):
    """An edge's share of its node; states are arrays [nodes, n, h, w, channels]."""

    operations: tuple[str, ...]
    channels: int
    stride: int
    remat: bool

    @nn.compact
    def __call__(self, states: jax.Array, edge: Any) -> Any:
        """Map ``states`` = (inputs or None, nodes) along ``edge`` = (source, node, alpha [h])."""
        inputs, nodes = states
        source, node, alpha = edge
        # In memory, so that the updates of `nodes`, here and backward, are not fused with it.
        x = materialized((nodes if inputs is None else inputs)[source], alpha[0])
        # Inside a loop, XLA does not merge the recomputation with the original.
        mixed = nn.remat(MixedOperation, prevent_cse=False) if self.remat else MixedOperation
        norms: dict[str, Any] = {"norm": Standardize, "pool_norm": Standardize}
        run = functools.partial(run_operation, channels=self.channels, stride=self.stride, **norms)
        y = mixed(self.operations, run, name="operations")(x, alpha)
        return (inputs, nodes.at[node].add(materialized(y, alpha[0]))), None


# The leading axis of the parameters is the edge.
MixedEdges: Any = nn.scan(MixedEdge, variable_axes={"params": 0}, split_rngs={"params": True})


class MixedCell(nn.Module):
    """A cell of the supernet; ``reduced``: whether the cell before it was a reduction cell."""

    operations: tuple[str, ...]
    channels: int
    stride: int
    reduced: bool
    remat: bool

    @nn.compact
    def __call__(self, before_last: jax.Array, last: jax.Array, alpha: jax.Array) -> jax.Array:
        """Map two arrays [n, h, w, c] and ``alpha`` [14, h] to [n, h', w', 4 channels]."""
        adapt = FactorizedReduce if self.reduced else ReluConvNorm
        before_last = adapt(self.channels, Standardize)(before_last)
        last = ReluConvNorm(self.channels, Standardize)(last)
        inputs, edges = jnp.stack([before_last, last]), np.array(EDGES)
        # EDGES is sorted by node: all edges into a node come before the edges out of it.
        if self.stride == 1:
            nodes = jnp.concatenate([inputs, jnp.zeros((len(NODES), *last.shape), last.dtype)])
            nodes = self._mixed(1, None, nodes, edges, alpha)[2:]
        else:
            edges, outer = edges - 2, edges[:, 0] < 2
            halved = (-(-side // self.stride) for side in last.shape[1:3])
            nodes = jnp.zeros((len(NODES), len(last), *halved, self.channels), last.dtype)
            nodes = self._mixed(self.stride, inputs, nodes, edges[outer] + (2, 0), alpha[outer])
            nodes = self._mixed(1, None, nodes, edges[~outer], alpha[~outer])
        return jnp.concatenate(list(nodes), axis=-1)

    def _mixed(self, stride, inputs, nodes, edges, alpha):
        mixed = MixedEdges(self.operations, self.channels, stride, self.remat)
        return mixed((inputs, nodes), (*edges.T, alpha))[0][1]


class Supernet(nn.Module):
    """The whole network, from images to logits."""

    operations: tuple[str, ...]
    classes: int
    cells: int
    channels: int
    dtype: Any
    remat: bool

    @nn.compact
    def __call__(self, alpha: Any, x: jax.Array) -> jax.Array:
        """Map ``alpha`` {"normal", "reduce"} and images [n, h, w, c] to logits [n, classes]."""
        stem = Conv(3 * self.channels, 3)(cast_images(x, self.dtype))
        before_last = last = Standardize(affine=True)(stem)
        channels, reduced = self.channels, False
        for cell in range(self.cells):
            reduce = cell in reductions(self.cells)
            channels *= 1 + reduce
            parts = self.operations, channels, 1 + reduce, reduced, self.remat
            mixed = MixedCell(*parts, name=f"cell_{cell}")
            kind = "reduce" if reduce else "normal"
            before_last, last = last, mixed(before_last, last, alpha[kind])
            reduced = reduce
        logits = nn.Dense(self.classes)(pixel_means(last))
        if len(reductions(self.cells)) == self.cells:
            # Without normal cells their alpha has no effect. It is still read, because a search
            # raises an error for an unused leaf, and a genotype has both kinds.
            logits += 0 * alpha["normal"].sum().astype(logits.dtype)
        return logits


def darts_space(
    operations: Sequence[str] = PRIMITIVES,
    *,
    classes: int = 10,
    cells: int = 8,
    channels: int = 16,
    dtype: Any = None,
    remat: bool = True,
) -> Space:
    """Make the DARTS supernet as a search space.

    ``alpha`` is {"normal": [14, h], "reduce": [14, h]}, the operations' weights on every edge.
    Batches are ``(x, labels)``: images [n, h, w, c], integer labels [n]; outputs are logits [n,
    classes], normalised by the batch. An architecture is a :class:`Genotype`; its vertex has zeros
    on the edges without operation.

    Parameters
    ----------
    operations : names in ``PRIMITIVES``, at least one other than "none"
    classes, cells, channels : int
        The defaults are the published search's on CIFAR-10; ``channels`` are the first cell's.
    dtype : dtype, optional
        Dtype of activations, by default the images'; ``jnp.bfloat16`` for mixed precision.
        Parameters are float32; batch statistics, the classifier and losses have at least float32.
    remat : bool
        Whether the backward pass recomputes each edge from its input: a sixth of the memory, and
        on a CPU less time.

    Raises
    ------
    ValueError
        If operations are unknown, there are fewer than two classes, or images are too small for the
        reductions.

    Notes
    -----
    Liu, Simonyan & Yang (2019), section 2. Deviation: the classifier's bias starts at 0. Compiling
    takes 15 s for each cell.

    Examples
    --------
    >>> space = darts_space(["none", "skip_connect"], cells=1, channels=2)
    >>> batch = jnp.ones((5, 8, 8, 3)), jnp.zeros(5, int)
    >>> w = jax.eval_shape(space.init, jax.random.key(0), batch)
    >>> space.start()["reduce"].shape
    (14, 2)
    >>> jax.eval_shape(space.apply, w, space.start(), batch[0]).shape
    (5, 10)
    """
    names = candidate_names(operations, PRIMITIVES)
    check_sizes(classes, cells, channels, 2)
    supernet = Supernet(names, classes, cells, channels, dtype, remat)

    def start():
        uniform = on_simplices(names, (len(EDGES),)).start
        return {"normal": uniform(), "reduce": uniform()}

    return supernet_space(
        names,
        len(reductions(cells)),
        shapes=lambda key, image: jax.eval_shape(supernet.init, key, start(), image)["params"],
        run=lambda w, alpha, x: supernet.apply({"params": w}, alpha, x),
        start=start,
        draw=functools.partial(draw_corner, operations=names),
        discretize=functools.partial(genotype, operations=names),
        one_hot=functools.partial(one_hot, operations=names),
    )


def weight_count(params: Any) -> int:
    """Count the weights in ``params`` without the auxiliary head, as published counts do."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return sum(math.prod(x.shape) for path, x in leaves if "auxiliary" not in str(path))
