"""The networks of NAS-Bench-201: one genotype's, as trained there, and all as one function.

    stem - cells at c channels - reduction - cells at 2 c - reduction - cells at 4 c - head

Published: 3 x 5 cells of one genotype and c = 16, trained for 200 epochs by SGD with Nesterov's
momentum 0.9, rate 0.1 with a cosine to 0, weight decay 5e-4, images shifted and mirrored. Weights
are named by place: ``w["cell_3"]["edge_2"]["nor_conv_3x3"]["conv"]["kernel"]``.

:func:`all_networks` takes a :class:`Genotype`, known when tracing, or an array of six indices of
operations (:func:`encode`). With arrays, one compiled program serves all networks, with the same
results. The array form is fast on a CPU:

- An edge is ``lax.switch`` over the operations. Its derivative is another ``switch``, over the
  derivatives of the branches (``jax.custom_vjp``: no forward mode, but forward over reverse). JAX's
  own derivative would store the residuals of all branches.
- The cells of a stage run in one loop over their stacked weights, and are compiled once.
- A cell stores its input and its edges' outputs before the norms; the backward pass recomputes the
  rest. On a CPU it recomputes these outputs too, if they are large. An operation without effect on
  the output is not run.

Under ``vmap`` over genotypes every branch is run, which is right on a GPU with small batches.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.ad_checkpoint import checkpoint_name

from bilevel.contracts import Pytree
from bilevel.internal.checks import concrete
from bilevel.nets import layers
from bilevel.nets.convolution import average_pooling, convolve_images
from bilevel.nets.training import TrainableNetwork
from bilevel.spaces.cells import check_images, check_sizes, even_sides, trainable_network
from bilevel.spaces.nasbench201.genotype import EDGES, PRIMITIVES, SIZES, Genotype, check_operations

Norm = Callable[..., nn.Module]

STAGES = 3

standardize = functools.partial(layers.Standardize, affine=True)
"""The norm of supernets and train-free scores: batch statistics, learned scale and shift."""


class Stem(nn.Module):
    """3 x 3 convolution, norm."""

    channels: int
    norm: Norm

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [n, h, w, c] to [n, h, w, channels]."""
        return self.norm(name="norm")(layers.Conv(self.channels, 3, name="conv")(x))


class ConvolutionBlock(nn.Module):
    """ReLU, convolution, norm."""

    channels: int
    size: int
    norm: Norm
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [n, h, w, c] to [n, h', w', channels]."""
        x = layers.Conv(self.channels, self.size, self.stride, name="conv")(nn.relu(x))
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
        return checkpoint_name(y + layers.Conv(channels, name="shortcut")(pooled), "layer")


class Head(nn.Module):
    """Norm, ReLU, mean over pixels, linear."""

    classes: int
    norm: Norm

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [n, h, w, c] to logits [n, classes]."""
        x = nn.relu(self.norm(name="norm")(x))
        return nn.Dense(self.classes, name="classifier")(layers.pixel_means(x))


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
        x = Stem(self.channels, self.norm, name="stem")(layers.cast_images(x, self.dtype))
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
        norm = layers.batch_norm(train, dtype)
        return NasBench201Network(genotype, classes, cells, channels, norm, dtype)

    return trainable_network(module, STAGES - 1)


_SAVED = "edge"  # the outputs that the backward pass does not recompute
_MOST_STORED = 2**24  # bytes of them for a stage on a CPU, where glibc asks for pages beyond 2^25


class AllNetworks(NamedTuple):
    """All networks of the space; see :func:`all_networks`.

    ``init(key, shape) -> w`` is for images of ``shape`` (h, w, c),
    ``apply(w, genotype, x) -> logits`` [n, classes] for x [n, h, w, c]; ``apply_unnormalized`` has
    no batch normalisation. ``select(w, genotype) -> w`` has the weights of a genotype's own
    operations: for a Genotype without the others, for an array with zeros for them; ``apply`` takes
    either.
    """

    init: Callable[[jax.Array, tuple[int, ...]], Pytree]
    apply: Callable[[Pytree, Any, jax.Array], jax.Array]
    apply_unnormalized: Callable[[Pytree, Any, jax.Array], jax.Array]
    select: Callable[[Pytree, Any], Pytree]


def all_networks(
    *, classes: int = 10, cells: int = 5, channels: int = 16, dtype: Any = None
) -> AllNetworks:
    """Make all networks of NAS-Bench-201 on shared weights.

    Parameters
    ----------
    classes, cells, channels : int
        The defaults are the benchmark's on CIFAR-10; ``cells`` per stage, ``channels`` of the first
        stage.
    dtype : dtype, optional
        Dtype of activations, by default the images'; parameters are float32.

    Raises
    ------
    ValueError
        If a genotype is neither a Genotype nor six integers, or images are under 4 x 4.

    Notes
    -----
    Memory: for every cell 7 arrays of its input's size (on a CPU only the input, if the arrays of a
    stage have more than 16 MiB), and one cell's activations. Reference: Dong & Yang (2020), section
    2.

    Examples
    --------
    >>> from bilevel.spaces.nasbench201 import encode, genotypes
    >>> networks = all_networks(cells=1, channels=1)
    >>> w = jax.jit(networks.init, static_argnums=1)(jax.random.key(0), (4, 4, 1))
    >>> x = jnp.ones((2, 4, 4, 1))
    >>> logits = jax.jit(networks.apply)
    >>> [logits(w, encode(g), x).shape for g in genotypes()[:2]]  # compiled once
    [(2, 10), (2, 10)]
    """
    check_sizes(classes, cells, channels)
    sizes = classes, cells, channels

    def own(genotype, image):
        images = jax.ShapeDtypeStruct((1, *image), jnp.float32)
        network = NasBench201Network(genotype, *sizes, standardize)
        return flatten_dict(jax.eval_shape(network.init, jax.random.key(0), images)["params"])

    def init(key, image):
        check_images((1, *image), STAGES - 1)
        ours = [own(Genotype((name,) * len(EDGES)), image) for name in SIZES]
        # The draw depends on the order.
        shapes = unflatten_dict(dict(sorted({**ours[0], **ours[1]}.items())))
        return layers.draw_parameters(key, shapes)

    def apply(w, genotype, x, norm=standardize):
        check_images(x.shape, STAGES - 1)
        if isinstance(genotype, Genotype):
            check_operations(genotype)
            return NasBench201Network(genotype, *sizes, norm, dtype).apply({"params": w}, x)[0]
        which = _reaching(_indices(genotype))
        x = Stem(channels, norm).apply({"params": w["stem"]}, layers.cast_images(x, dtype))
        for stage in range(STAGES):
            if stage:
                x = Reduction(norm).apply({"params": w[f"reduction_{stage}"]}, x)
            weights = [w[f"cell_{i}"] for i in range(stage * cells, (stage + 1) * cells)]
            x = _cells(norm is standardize, which, weights, x)
        return Head(classes, norm).apply({"params": w["head"]}, x)

    def select(w, genotype):
        if isinstance(genotype, Genotype):
            check_operations(genotype)
            keep = own(genotype, (4, 4, w["stem"]["conv"]["kernel"].shape[2]))
            return unflatten_dict({k: leaf for k, leaf in flatten_dict(w).items() if k in keep})
        which = _indices(genotype)

        def zero_unless_chosen(path, leaf):
            names = [key.key for key in path]
            if not names[0].startswith("cell_"):
                return leaf
            edge = int(names[1].removeprefix("edge_"))
            return jnp.where(which[edge] == PRIMITIVES.index(names[2]), leaf, 0)

        return jax.tree_util.tree_map_with_path(zero_unless_chosen, w)

    apply_unnormalized = functools.partial(apply, norm=lambda name: lambda x: x)
    return AllNetworks(init, apply, apply_unnormalized, select)


def _indices(genotype: Any) -> jax.Array:
    which = jnp.asarray(genotype)
    if which.shape != (len(EDGES),) or not jnp.issubdtype(which.dtype, jnp.integer):
        raise ValueError(
            f"genotype: expected a Genotype or {len(EDGES)} integers, got {which.dtype} of the "
            f"shape {which.shape}."
        )
    if concrete(genotype):
        low, high = np.min(genotype), np.max(genotype)
        if low < 0 or high >= len(PRIMITIVES):
            raise ValueError(
                f"genotype: expected indices from 0 to {len(PRIMITIVES) - 1}, got {low} to {high}."
            )
    return which


def _reaching(which: jax.Array) -> jax.Array:
    """Return the genotype [6] with ``none`` for edges that do not lead to the output."""
    reaches = {EDGES[-1][1]: jnp.array(True)}
    for node in reversed(range(EDGES[-1][1])):
        out = [(e, to) for e, (source, to) in enumerate(EDGES) if source == node]
        carried = [reaches[to] & (which[e] > 0) for e, to in out]
        reaches[node] = functools.reduce(jnp.logical_or, carried)
    return which * jnp.stack([reaches[to] for _, to in EDGES])


def _cells(normalized: bool, which: jax.Array, weights: list[Pytree], x: jax.Array) -> jax.Array:
    """Apply cells one after another, by a loop over their weights."""

    def cell(x, w):
        return add_edges(lambda k, x: _edge(normalized, which[k], w[f"edge_{k}"], x), x), None

    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights)
    # A CPU computes edges again in less time than the system takes to provide many pages of memory.
    stored = len(weights) * (1 + len(EDGES)) * x.size * x.dtype.itemsize
    again = jax.default_backend() == "cpu" and stored > _MOST_STORED
    policy = None if again else jax.checkpoint_policies.save_only_these_names(_SAVED)
    return jax.lax.scan(jax.checkpoint(cell, prevent_cse=False, policy=policy), x, stacked)[0]


def _edge(normalized: bool, operation: jax.Array, w: Pytree, x: jax.Array) -> jax.Array:
    """Apply the operation in two parts: the second's derivative needs the first's output."""
    kernels, norms = ({name: w[name][part] for name in SIZES} for part in ("conv", "norm"))
    y = checkpoint_name(_switch(_LINEAR, operation, kernels, x), _SAVED)
    return _switch(_NORMS, operation, norms, y) if normalized else y


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _switch(branches: tuple[Callable, ...], which: jax.Array, w: Pytree, x: jax.Array) -> jax.Array:
    """Return ``branches[which](w, x)``."""
    return jax.lax.switch(which, branches, w, x)


def _switch_forward(branches, which, w, x):
    # `lax.switch` again, because forward over reverse mode differentiates this function.
    return jax.lax.switch(which, branches, w, x), (which, w, x)


def _switch_backward(branches, residuals, g):
    which, w, x = residuals

    def derivative(branch):
        return lambda w, x, g: jax.vjp(branch, w, x)[1](g)

    no_tangent = np.zeros(which.shape, jax.dtypes.float0)
    return no_tangent, *jax.lax.switch(which, [derivative(b) for b in branches], w, x, g)


_switch.defvjp(_switch_forward, _switch_backward)


def _apply_without_norm(name: str, kernels: Pytree, x: jax.Array) -> jax.Array:
    if name == "none":
        return jnp.zeros_like(x)
    if name in SIZES:
        return convolve_images(nn.relu(x), kernels[name]["kernel"].astype(x.dtype))
    return run_operation(standardize, name, x)


def _apply_norm(name: str, norms: Pytree, x: jax.Array) -> Any:
    return standardize().apply({"params": norms[name]}, x) if name in SIZES else x


_LINEAR = tuple(functools.partial(_apply_without_norm, name) for name in PRIMITIVES)
_NORMS = tuple(functools.partial(_apply_norm, name) for name in PRIMITIVES)
