"""The DARTS search space: a network whose every edge mixes the operations (Liu et al. 2019).

    node_j = sum_{i < j} sum_o alpha_(i,j),o o(node_i),    alpha_(i,j) on the simplex

Cells are stacked; those at one and at two thirds are reduction cells, which halve the image and
double the channels. All normal cells share one ``alpha`` [14, 8], all reduction cells another:
224 numbers. A cell's inputs are the outputs of the two cells before it.

==========  ==========================================================================
paper       here
==========  ==========================================================================
alpha       weights on the simplex. The paper's alpha are logits: its softmax is the
            geometry here, :func:`bilevel.softmax`
w           the convolutions' kernels, the stem's norm, the classifier
L_train     ``problem.lower``, mean cross-entropy; weight decay is the optimizer's
L_val       ``problem.outer``, the same
==========  ==========================================================================

All edges of a cell do the same eight things, one after another in a loop over one compiled program
(``nn.scan``): a cell has one to compile instead of 14, a reduction cell two.
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
from bilevel.nets.layers import Conv, Standardize, accumulation_dtype, cast_images, draw_parameters
from bilevel.spaces.darts.genotype import (
    EDGES,
    NODES,
    draw_corner,
    genotype,
    one_hot,
)
from bilevel.spaces.darts.operations import (
    PRIMITIVES,
    FactorizedReduce,
    ReluConvNorm,
    check_image_size,
    check_network_sizes,
    make_operation,
    reductions,
)
from bilevel.spaces.space import Space
from bilevel.spaces.targets import cross_entropy_problem, predict_labels


class MixedOperation(nn.Module):
    """The operations on one edge, each times its weight, added up."""

    operations: tuple[str, ...]
    channels: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array, alpha: jax.Array) -> jax.Array:
        """``x`` [n, h, w, channels] and ``alpha`` [h] -> [n, h', w', channels]."""
        total: Any = 0.0
        for name, weight in zip(self.operations, alpha.astype(x.dtype), strict=True):
            if name != "none":
                module = make_operation(name, self.channels, self.stride, Standardize, Standardize)
                total += weight * module(x)
        return total


class MixedEdge(nn.Module):
    """An edge's share of its node; states are arrays [nodes, n, h, w, channels]."""

    operations: tuple[str, ...]
    channels: int
    stride: int
    remat: bool

    @nn.compact
    def __call__(self, states: jax.Array, edge: Any) -> Any:
        """``states`` = (inputs or None, nodes), ``edge`` = (source, node, alpha [h])."""
        inputs, nodes = states
        source, node, alpha = edge
        # In memory, so that the update of `nodes`, here and in the backward pass, is of that alone.
        x = materialized((nodes if inputs is None else inputs)[source], alpha[0])
        # Inside a loop, remat needs no barrier against merging what it computes twice.
        mixed = nn.remat(MixedOperation, prevent_cse=False) if self.remat else MixedOperation
        y = mixed(self.operations, self.channels, self.stride, name="operations")(x, alpha)
        return (inputs, nodes.at[node].add(materialized(y, alpha[0]))), None


# Parameters lead with the edge.
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
        """Two arrays [n, h, w, c] and ``alpha`` [14, h] -> [n, h', w', 4 channels]."""
        adapt = FactorizedReduce if self.reduced else ReluConvNorm
        before_last = adapt(self.channels, Standardize)(before_last)
        last = ReluConvNorm(self.channels, Standardize)(last)
        inputs, edges = jnp.stack([before_last, last]), np.array(EDGES)
        # EDGES is by node: whatever leads into a node comes before all that leads out of it.
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
        """``alpha`` {"normal", "reduce"} and images [n, h, w, c] -> logits [n, classes]."""
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
        pooled = last.mean((1, 2), dtype=accumulation_dtype(last.dtype))
        logits = nn.Dense(self.classes)(pooled)
        if len(reductions(self.cells)) == self.cells:
            # Without normal cells their alpha has no effect. It is read all the same, since a
            # search refuses a leaf that nothing reads, and a genotype has both kinds.
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
    """The DARTS supernet as a search space.

    ``alpha`` is {"normal": [14, h], "reduce": [14, h]}, the operations' weights on every edge.
    Batches are ``(x, labels)``: images [n, h, w, c], integer labels [n]; outputs are logits
    [n, classes], normalised by the batch. An architecture is a :class:`Genotype`; its corner has
    zeros on the edges that it leaves out.

    Parameters
    ----------
    operations : names in ``PRIMITIVES``, one other than "none" among them
    classes, cells, channels : int
        The defaults are the published search's on CIFAR-10; ``channels`` are the first cell's.
    dtype : dtype, optional
        Of activations; ``jnp.bfloat16`` for mixed precision. Parameters are float32, batch
        statistics, the classifier and losses float32 at least. By default the images'.
    remat : bool
        Whether to keep only an edge's input for the backward pass and compute the edge again. On a
        CPU that takes a sixth of the memory, and less time: what is not written need not be read.

    Returns
    -------
    Space

    Raises
    ------
    ValueError
        For unknown operations, fewer than two classes, or images smaller than the reductions.

    Notes
    -----
    Deviation: the classifier's bias starts at 0.

    Cost: memory for the 14 inputs of edges of every cell, without ``remat`` for all activations. On
    a CPU of two cores a search step takes two thirds of the time and a fifth of the memory that
    PyTorch's takes (``benchmarks/deep_search/darts_step.py``). Compiling takes longer than many
    steps: half a minute for 3 cells and 4 operations, half as long again for 8.

    References
    ----------
    Liu, Simonyan & Yang (2019), DARTS: Differentiable Architecture Search, section 2.

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
    check_network_sizes(classes, cells, channels)
    supernet = Supernet(names, classes, cells, channels, dtype, remat)

    def init(key, batch):
        shape = batch[0].shape[1:]
        check_image_size(shape, cells)
        images = jax.ShapeDtypeStruct((1, *shape), jnp.float32)
        return draw_parameters(key, jax.eval_shape(supernet.init, key, start(), images)["params"])

    def start():
        shape, dtype = (len(EDGES), len(names)), jnp.result_type(float)  # not a weak type
        return {kind: jnp.full(shape, 1 / len(names), dtype) for kind in _KINDS}

    def apply(w, alpha, x):
        if x.ndim != 4:
            raise ValueError(f"x: expected images [n, h, w, c], got {x.shape}.")
        check_image_size(x.shape, cells)
        return supernet.apply({"params": w}, alpha, x)

    return Space(
        names=names,
        sets="simplex",
        start=start,
        init=init,
        apply=apply,
        problem=cross_entropy_problem(apply),
        predict=predict_labels,
        draw=functools.partial(draw_corner, operations=names),
        discretize=functools.partial(genotype, operations=names),
        one_hot=functools.partial(one_hot, operations=names),
    )


_KINDS = ("normal", "reduce")


def weight_count(params: Any) -> int:
    """How many numbers ``params`` holds, the auxiliary head's left out as in published counts.

    Examples
    --------
    >>> weight_count({"a": jnp.ones((2, 3)), "auxiliary": {"b": jnp.ones(5)}})
    6
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return sum(math.prod(x.shape) for path, x in leaves if "auxiliary" not in str(path))
