"""The network that a genotype stands for, to be trained from scratch (Liu et al. 2019, 3.3).

Its cells have two edges into each node instead of all, each with one operation, and batch
normalisation with learned scales and with running averages for predictions. Regularised by

    drop path    an edge's output is dropped for an example with probability ``drop_path``
                 (identities never), and divided by 1 - ``drop_path`` otherwise
    cutout       a square of each training image is set to 0 (DeVries & Taylor 2017)
    auxiliary    a second classifier after the second reduction, its loss times 0.4

:func:`training` has the loop. As published: 600 epochs of SGD, batch 96, rate .025 with a cosine to
0, momentum .9, weight decay 3e-4, gradients clipped to norm 5, ``drop_path`` rising linearly from 0
to .2, cutout 16.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from bilevel.spaces.convolution import average_pool
from bilevel.spaces.darts._genotype import NODES, Genotype, check_genotype
from bilevel.spaces.darts.operations import (
    Conv,
    FactorizedReduce,
    Identity,
    Norm,
    ReluConvNorm,
    activations,
    check_images,
    check_network,
    initial,
    operation,
    reductions,
    wide,
)
from bilevel.spaces.training import row_count

_AUXILIARY_WEIGHT = 0.4


class Cell(nn.Module):
    """A cell of a genotype; ``drop`` acts on the output of every edge but identities."""

    genotype: Genotype
    channels: int
    stride: int
    reduced: bool
    norm: Norm
    drop: Callable[[jax.Array], jax.Array]

    @nn.compact
    def __call__(self, before_last, last):
        """Two arrays [n, h, w, c] -> [n, h', w', concat * channels]."""
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
        edge = operation(name, self.channels, stride, self.norm)
        y = edge(states[source])
        return y if isinstance(edge, Identity) else self.drop(y)


class AuxiliaryHead(nn.Module):
    """The second classifier, for images of at least 8 x 8 where it stands."""

    classes: int
    norm: Norm

    @nn.compact
    def __call__(self, x):
        """[n, h, w, c] -> logits [n, classes]."""
        if min(x.shape[1:3]) < 8:
            raise ValueError(
                "auxiliary: expected at least 8 x 8 pixels after two reductions "
                f"(images of 29 x 29), got {x.shape[1]} x {x.shape[2]}; use auxiliary=False."
            )
        x = average_pool(nn.relu(x), 5, stride=3)
        x = nn.relu(self.norm()(Conv(128)(x)))
        x = nn.relu(self.norm()(Conv(768, 2, padding=0)(x)))
        return nn.Dense(self.classes)(x.mean((1, 2), dtype=wide(x.dtype)))


class Network(nn.Module):
    """The whole network; random numbers of the stream ``drop_path`` when ``train``."""

    genotype: Genotype
    classes: int
    cells: int
    channels: int
    auxiliary: bool
    dtype: Any

    @nn.compact
    def __call__(self, x, train: bool, drop_path=0.0):
        """Images [n, h, w, c] -> logits [n, classes], and the auxiliary ones when ``train``."""
        norm = functools.partial(
            nn.BatchNorm,
            use_running_average=not train,
            momentum=0.9,
            epsilon=1e-5,
            dtype=self.dtype,
        )

        def drop(y):
            if not train:
                return y
            keep = jax.random.bernoulli(
                self.make_rng("drop_path"), 1 - drop_path, (len(y), 1, 1, 1)
            )
            return y * (keep / (1 - drop_path)).astype(y.dtype)

        before_last = last = norm()(Conv(3 * self.channels, 3)(activations(x, self.dtype)))
        channels, reduced, second = self.channels, False, None
        for cell in range(self.cells):
            reduce = cell in reductions(self.cells)
            channels *= 1 + reduce
            layer = Cell(self.genotype, channels, 1 + reduce, reduced, norm, drop)
            before_last, last, reduced = last, layer(before_last, last), reduce
            if train and self.auxiliary and cell == 2 * self.cells // 3:
                second = AuxiliaryHead(self.classes, norm, name="auxiliary")(last)
        return nn.Dense(self.classes)(last.mean((1, 2), dtype=wide(last.dtype))), second


class DartsNetwork(NamedTuple):
    """A genotype's network; see :func:`darts_network`.

    Attributes
    ----------
    init : ``init(key, shape) -> (w, averages)``, for images of ``shape`` (h, w, c).
        ``averages``: the running means and variances of batch normalisation.
    apply : ``apply(w, averages, x [n, h, w, c]) -> logits`` [n, classes].
    loss : ``loss(w, averages, batch, key, drop_path=0.0) -> (loss, averages)``
        Of a training batch ``(x, labels)``, for ``jax.grad(..., has_aux=True)``.
    predict : ``predict(logits) -> labels`` [n].
    """

    init: Callable[[jax.Array, tuple[int, ...]], tuple[Any, Any]]
    apply: Callable[[Any, Any, jax.Array], jax.Array]
    loss: Callable[..., tuple[jax.Array, Any]]
    predict: Callable[[jax.Array], jax.Array]


def darts_network(
    genotype: Genotype,
    *,
    classes: int = 10,
    cells: int = 20,
    channels: int = 36,
    auxiliary: bool = True,
    dtype: Any = None,
) -> DartsNetwork:
    """The network of a genotype, to be trained from scratch.

    Parameters
    ----------
    genotype : Genotype
    classes, cells, channels : int
        The defaults are the published evaluation's on CIFAR-10.
    auxiliary : bool
        Whether training has the auxiliary classifier; images have to be 29 x 29 or larger.
    dtype : dtype, optional
        Of activations, by default the images'; parameters and averages are float32.

    Raises
    ------
    ValueError
        For a genotype that cannot be built, or images that are too small.

    Notes
    -----
    Running variances are of the batch, without the factor m / (m - 1) of the reference.

    Examples
    --------
    >>> from bilevel.spaces.darts import DARTS_V2, parameter_count
    >>> network = darts_network(DARTS_V2, cells=2, channels=4, auxiliary=False)
    >>> w, averages = jax.eval_shape(lambda key: network.init(key, (8, 8, 3)), jax.random.key(0))
    >>> parameter_count(w)
    1990

    References
    ----------
    Liu, Simonyan & Yang (2019), section 3.3 and appendix A.2.
    """
    check_genotype(genotype)
    check_network(classes, cells, channels)
    module = Network(genotype, classes, cells, channels, auxiliary, dtype)

    def init(key, shape):
        check_images(shape, cells)
        images = jax.ShapeDtypeStruct((1, *shape), jnp.float32)
        keys = {"params": key, "drop_path": key}  # for the shapes only
        shapes = jax.eval_shape(functools.partial(module.init, train=True), keys, images)
        averages = {"mean": jnp.zeros, "var": jnp.ones}
        return initial(key, shapes["params"]), jax.tree_util.tree_map_with_path(
            lambda path, leaf: averages[path[-1].key](leaf.shape, leaf.dtype),
            shapes["batch_stats"],
        )

    def apply(w, averages, x):
        return module.apply({"params": w, "batch_stats": averages}, x, train=False)[0]

    def loss(w, averages, batch, key, drop_path=0.0):
        x, labels = batch
        (logits, second), new = module.apply(
            {"params": w, "batch_stats": averages},
            x,
            train=True,
            drop_path=drop_path,
            rngs={"drop_path": key},
            mutable=["batch_stats"],
        )

        def entropy(logits):
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value = entropy(logits)
        if second is not None:
            value += _AUXILIARY_WEIGHT * entropy(second)
        # Wide images have wide statistics; the averages stay what they are.
        return value, jax.tree.map(lambda x, a: x.astype(a.dtype), new["batch_stats"], averages)

    def predict(logits):
        return jnp.argmax(logits, axis=-1)

    return DartsNetwork(init, apply, loss, predict)


class TrainingState(NamedTuple):
    """State of :func:`training`."""

    w: Any
    averages: Any
    optimizer: Any


def training(
    network: DartsNetwork,
    optimizer: optax.GradientTransformation,
    *,
    batch_size: int,
    augment: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
) -> tuple[Callable, Callable]:
    """Training from scratch as a pair of pure functions, for as many epochs as one likes.

    Parameters
    ----------
    network : DartsNetwork
    optimizer : optax.GradientTransformation
    batch_size : int
        An epoch leaves out the n modulo ``batch_size`` rows that its order puts last.
    augment : ``augment(key, x) -> x``, optional
        Of a batch's images: :func:`cutout`, :func:`crop_and_flip`.

    Returns
    -------
    init : ``init(key, shape) -> TrainingState``, for images of ``shape`` (h, w, c).
    epoch : ``epoch(key, state, (x, labels), drop_path=0.0) -> (state, loss)``
        Every row once, in random order; the loss is the mean over its batches.

    Raises
    ------
    ValueError
        By ``epoch``, for fewer rows than ``batch_size``.

    Examples
    --------
    >>> from bilevel.spaces.darts import DARTS_V2
    >>> network = darts_network(DARTS_V2, cells=1, channels=2, auxiliary=False)
    >>> init, epoch = training(network, optax.sgd(0.1), batch_size=4)
    >>> state = jax.eval_shape(lambda key: init(key, (8, 8, 1)), jax.random.key(0))
    >>> data = jnp.ones((8, 8, 8, 1)), jnp.zeros(8, int)
    >>> jax.eval_shape(epoch, jax.random.key(1), state, data)[1].shape
    ()
    """

    def init(key, shape):
        w, averages = network.init(key, shape)
        return TrainingState(w, averages, optimizer.init(w))

    def epoch(key, state, data, drop_path=0.0):
        x, labels = jax.tree.map(jnp.asarray, data)
        n = row_count(data, batch_size)
        order_key, augment_key, drop_key = jax.random.split(key, 3)
        steps = n // batch_size
        order = jax.random.permutation(order_key, n)[: steps * batch_size]
        slope = jax.value_and_grad(network.loss, has_aux=True)

        def step(state, batch):
            i, rows = batch
            images = x[rows]
            if augment is not None:
                images = augment(jax.random.fold_in(augment_key, i), images)
            batch = images, labels[rows]
            key = jax.random.fold_in(drop_key, i)
            (loss, averages), g = slope(state.w, state.averages, batch, key, drop_path)
            updates, inner = optimizer.update(g, state.optimizer, state.w)
            return TrainingState(optax.apply_updates(state.w, updates), averages, inner), loss

        batches = jnp.arange(steps), order.reshape(steps, batch_size)
        state, losses = jax.lax.scan(step, state, batches)
        return state, losses.mean()

    return init, epoch


def crop_and_flip(key: jax.Array, x: jax.Array, padding: int = 4) -> jax.Array:
    """Images moved by up to ``padding`` pixels, zeros coming in, and half of them mirrored.

    Parameters
    ----------
    key : jax.Array
    x : array [n, h, w, c], normalised: 0 should be the mean
    padding : int

    Examples
    --------
    >>> x = jnp.ones((3, 4, 4, 1)).at[:, 0].set(2)
    >>> crop_and_flip(jax.random.key(0), x, padding=0)[:, 0, 0, 0]
    Array([2., 2., 2.], dtype=float...)
    """
    move_key, flip_key = jax.random.split(key)
    n, *shape = x.shape
    padded = jnp.pad(x, [(0, 0), (padding, padding), (padding, padding), (0, 0)])
    corners = jax.random.randint(move_key, (n, 2), 0, 2 * padding + 1)
    x = jax.vmap(lambda image, at: jax.lax.dynamic_slice(image, (*at, 0), shape))(padded, corners)
    return jnp.where(jax.random.bernoulli(flip_key, 0.5, (n, 1, 1, 1)), x[:, :, ::-1], x)


def cutout(key: jax.Array, x: jax.Array, size: int = 16) -> jax.Array:
    """Images with a square set to 0, its centre anywhere in the image, cut off at the borders.

    Parameters
    ----------
    key : jax.Array
    x : array [n, h, w, c], normalised: 0 should be the mean
    size : int

    Examples
    --------
    >>> x = cutout(jax.random.key(0), jnp.ones((4, 32, 32, 3)))
    >>> bool((x.min((1, 2, 3)) == 0).all()), x.max()
    (True, Array(1., dtype=float...))

    References
    ----------
    DeVries & Taylor (2017), Improved Regularization of CNNs with Cutout.
    """
    n, *sides, _ = x.shape
    centres = jax.random.randint(key, (2, n, 1), 0, jnp.array(sides)[:, None, None])
    rows, columns = (
        (jnp.arange(side) >= start) & (jnp.arange(side) < start + size)
        for side, start in zip(sides, centres - size // 2, strict=True)
    )
    return jnp.where((rows[:, :, None] & columns[:, None, :])[..., None], 0, x)
