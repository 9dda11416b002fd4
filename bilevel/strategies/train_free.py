"""Search without training: by the tangent kernel of networks at initialization.

===================  ==========================================================================
:func:`eigen_nas`    keeps the random architectures with the largest ``lambda_min`` at infinite
                     width, to be trained (Zhu et al. 2022, Algorithm 1)
:func:`te_nas`       prunes a supernet, one operation of every edge at a time, by the kernel's
                     condition number and the number of linear regions (Chen, Gong & Wang 2021)
:func:`nasi`         one step of alpha along the gradient of the kernel's trace (Shu et al. 2022)
===================  ==========================================================================

:mod:`ntk.scores` scores single networks.

References
----------
Zhu, Liu, Chrysos, Cevher, Generalization Properties of NAS under Activation and Skip Connection
Search, NeurIPS 2022: Algorithm 1 with Flag = Eigen-NAS, section 5.2. Chen, Gong, Wang, Neural
Architecture Search on ImageNet in Four GPU Hours, ICLR 2021, section 3;
https://github.com/VITA-Group/TENAS (``prune_func_rank``). Shu, Cai, Dai, Ooi, Low, NASI: Label- and
Data-agnostic Neural Architecture Search at Initialization, ICLR 2022, section 4.
"""

import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

import ntk
from bilevel.internal.checks import integer, prng_key
from bilevel.outer_loop.batches import minibatches
from bilevel.spaces.skips import SkipArchitecture, SkipSpace
from bilevel.spaces.space import Space

_SINGULAR = 1e5  # the condition number of a numerically singular kernel
_DIGITS = 3  # significant digits of the ranked changes


class EigenNAS(NamedTuple):
    """Result of :func:`eigen_nas`."""

    architectures: tuple[SkipArchitecture, ...]  # by decreasing eigenvalue
    eigenvalues: np.ndarray  # [keep]


def eigen_nas(
    key: chex.PRNGKey, space: SkipSpace, x: chex.Array, *, pool: int = 200, keep: int = 5
) -> EigenNAS:
    """Return the ``keep`` of ``pool`` random architectures with the best infinite kernels.

    They have the largest ``lambda_min`` of the exact NTK on the rows ``x``, the subject of the
    paper's Theorem 3. Its Algorithm 1 computes the mean diagonal entry instead
    (:func:`ntk.scores.eigen_nas`). The next step is to train the architectures and choose among
    them by validation error. Time: ``pool`` kernels and their eigenvalues, in one program.

    Parameters
    ----------
    key, space : jax.Array, SkipSpace
    x : [n, inputs]
        In float64 for more than seven layers: see :func:`bilevel.spaces.skip_space`.
    pool, keep : int
        All are returned if the ``pool`` draws have fewer than ``keep`` different architectures.

    Raises
    ------
    ValueError
        If ``pool`` or ``keep`` is under 1, ``keep`` is above ``pool``, or a kernel is not finite.

    Examples
    --------
    >>> from bilevel.spaces.skips import skip_space
    >>> space = skip_space(["relu", "leaky_relu"], depth=3, width=4)
    >>> x = jax.random.normal(jax.random.key(0), (4, 4))
    >>> result = eigen_nas(jax.random.key(1), space, x, pool=8, keep=2)
    >>> len(result.architectures), bool(result.eigenvalues[0] >= result.eigenvalues[1] > 0)
    (2, True)
    """
    prng_key("key", key)
    integer("pool", pool, 1)
    if integer("keep", keep, 1) > pool:
        raise ValueError(f"keep: expected at most the pool's {pool}, got {keep}.")
    corners = [space.draw(k) for k in jax.random.split(key, pool)]
    drawn = {space.discretize(corner): corner for corner in corners}  # without repetitions
    dtype = jnp.result_type(x)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves).astype(dtype), *drawn.values())

    @jax.jit
    def eigenvalues(corners, x):
        return jax.lax.map(lambda c: ntk.min_eigenvalue(space.kernel(c, x).ntk), corners)

    smallest = np.asarray(eigenvalues(stacked, jnp.asarray(x)))
    if not np.isfinite(smallest).all():
        raise ValueError(
            f"x: expected rows whose kernels are finite, got some of "
            f"{len(smallest)} that are not; deep networks need float64."
        )
    best, architectures = np.argsort(-smallest, kind="stable")[:keep], list(drawn)
    return EigenNAS(tuple(architectures[i] for i in best), smallest[best])


def te_nas(
    key: chex.PRNGKey,
    space: Space,
    thin: Space,
    batch: tuple[chex.Array, chex.Array],
    crops: chex.Array,
    *,
    repeats: int = 3,
) -> Any:
    """Prune the supernet by TE-NAS; return the remaining architecture.

    Every round removes each remaining operation in turn from edges with several. It measures how
    much the condition number of the supernet's tangent kernel falls, and how much the number of
    linear regions grows. Both are ranked over all operations, and every edge loses the operation
    with the smallest sum of ranks. Operations called "none" go before the first round, as in the
    authors' code. The remaining operations of an edge share its weight equally.

    The authors' code too counts an infinite or NaN condition number as 1e5, and linear regions one
    image at a time, so that batch normalisation sees one image. It has its own weight variances;
    here ``init`` draws the weights. Time: ``repeats`` kernels and counts of regions per remaining
    operation and round, on NAS-Bench-201 24 + 18 + 12, in one program.

    Parameters
    ----------
    key : jax.Array
    space, thin : Space
        ``alpha`` [edges, operations] on simplices. ``thin`` has the same architectures in a network
        of few channels, for the regions.
    batch, crops : (x, labels), [m, ...]
        Inputs for the kernel; the labels are not used. Small inputs of ``thin``; the authors take
        3,000 of 3 x 3 pixels.
    repeats : int
        Number of weight draws over which the changes are averaged.

    Raises
    ------
    ValueError
        If ``alpha`` is not one array [edges, operations] on simplices, the same in both spaces.

    Examples
    --------
    >>> from bilevel.spaces import Space, on_simplices
    >>> from bilevel.spaces.targets import cross_entropy_problem, predict_labels
    >>> operations = {"identity": lambda x: x, "relu": jax.nn.relu}
    >>> def apply(w, alpha, x):  # one edge; alpha [1, 2]
    ...     return sum(a * f(x) for a, f in zip(alpha[0], operations.values())) @ w
    >>> space = Space(
    ...     tuple(operations), "simplex", **on_simplices(tuple(operations), (1,))._asdict(),
    ...     init=lambda key, batch: jax.random.normal(key, (4, 3)), apply=apply,
    ...     problem=cross_entropy_problem(apply), predict=predict_labels,
    ... )
    >>> x = jax.random.normal(jax.random.key(0), (3, 4))
    >>> te_nas(jax.random.key(1), space, space, (x, jnp.arange(3)), x, repeats=1)
    ('relu',)
    """
    prng_key("key", key)
    integer("repeats", repeats, 1)
    shape = _one_choice_per_row(space, "space")
    if _one_choice_per_row(thin, "thin") != shape or thin.names != space.names:
        raise ValueError("thin: expected the architectures of `space`, got others.")

    @jax.jit
    def condition(key, alpha):
        w = space.init(key, batch)
        value = ntk.scores.te_nas(None, lambda w, x: space.apply(w, alpha, x), w, batch)
        return jnp.where(jnp.isfinite(value), value, _SINGULAR)

    labels = jnp.zeros(len(crops), int)

    @jax.jit
    def regions(key, alpha):
        def one_by_one(w, x):
            return jax.vmap(lambda image: thin.apply(w, alpha, image[None])[0])(x)

        w = thin.init(key, (crops, labels))
        return ntk.scores.regions(None, one_by_one, w, (crops, labels), unused=False)

    left = np.array([[name != "none" for name in space.names]] * shape[0])
    while (several := left.sum(1) > 1).any():
        places = np.nonzero(left & several[:, None])
        key, *keys = jax.random.split(key, 1 + repeats)
        falls, grows = (
            np.mean([_changes(score, k, left, places) for k in keys], axis=0)
            for score in (condition, regions)
        )
        ranks = np.full(left.shape, np.inf)
        ranks[places] = _ranks(-falls) + _ranks(grows)
        left[several, ranks.argmin(1)[several]] = False
    return space.discretize(_shared(left))


def _one_choice_per_row(space: Space, name: str) -> tuple[int, ...]:
    """Return the shape of ``alpha``, checked to be [edges, operations] on simplices."""
    alpha = space.start()
    shape = jnp.shape(alpha) if isinstance(alpha, jax.Array) else ()
    if space.sets != "simplex" or len(shape) != 2 or shape[1] != len(space.names):
        raise ValueError(
            f"{name}: expected alpha [edges, operations] on simplices, got shapes "
            f"{jax.tree.map(jnp.shape, alpha)} on {space.sets}."
        )
    return shape


def _shared(left: np.ndarray) -> jax.Array:
    """Return ``alpha`` with equal weights for the operations left on each edge."""
    return jnp.asarray(left / left.sum(1, keepdims=True), jnp.result_type(float))


def _changes(score, key: jax.Array, left: np.ndarray, places: tuple) -> list[float]:
    """Return the relative fall of the score without each operation, on the same weights."""

    def at(gates):
        return float(score(key, _shared(gates)))

    before, changes = at(left), []
    for place in zip(*places, strict=True):
        without = left.copy()
        without[place] = False
        changes.append((before - at(without)) / before)
    return changes


def _ranks(changes: np.ndarray) -> np.ndarray:
    """Return the rank of each change from 0; equal changes share a rank."""
    rounded = [float(f"{change:.{_DIGITS - 1}e}") for change in changes]
    return np.searchsorted(sorted(set(rounded)), rounded)


def nasi(
    key: chex.PRNGKey,
    space: Space,
    rows: tuple[chex.Array, chex.Array],
    *,
    steps: int = 100,
    batch_size: int = 64,
    penalty: float = 2.0,
    threshold: float = 500.0,
) -> Any:
    """Return the architecture after one step of NASI from equal logits.

        alpha* = argmax of (1 / T) sum_t G_t / max_{s <= t} |G_s|

    ``G_t`` is the gradient in the logits, at 0, of :func:`ntk.scores.nasi` on a minibatch, at the
    mixture ``softmax(logits + Gumbel noise)`` and fixed initial weights. The temperature of the
    Gumbel softmax is 1. Time: ``steps`` second derivatives of the loss.

    Parameters
    ----------
    key, space : jax.Array, Space
        All of ``alpha`` on simplices.
    rows : (x, labels)
    steps, batch_size : int
        T, and the rows of a minibatch.
    penalty, threshold : float
        mu and nu, as in :func:`ntk.scores.nasi`.

    Raises
    ------
    ValueError
        If part of ``alpha`` is not on simplices, ``steps`` is under 1, or a gradient is not finite.

    Examples
    --------
    >>> from bilevel.spaces import activation_space
    >>> space = activation_space(["relu", "identity"], width=8, classes=3)
    >>> rows = jax.random.normal(jax.random.key(0), (3, 4)), jnp.arange(3)
    >>> nasi(jax.random.key(1), space, rows, steps=2, batch_size=2) in space.names
    True
    """
    prng_key("key", key)
    integer("steps", steps, 1)
    if set(jax.tree.leaves(space.sets)) != {"simplex"}:
        raise ValueError(f"space: expected all of alpha on simplices, got {space.sets}.")
    init_key, key = jax.random.split(key)
    w = space.init(init_key, rows)
    sample = minibatches(batch_size)
    start = jax.tree.map(jnp.zeros_like, space.start())
    score = functools.partial(ntk.scores.nasi, None, penalty=penalty, threshold=threshold)

    def value(logits, key, batch):
        def perturbed(leaf, key):
            return jax.nn.softmax(leaf + jax.random.gumbel(key, leaf.shape, leaf.dtype))

        leaves, tree = jax.tree.flatten(logits)
        keys = jax.tree.unflatten(tree, jax.random.split(key, len(leaves)))
        alpha = jax.tree.map(perturbed, logits, keys)
        return score(lambda w, x: space.apply(w, alpha, x), w, batch)

    def step(carry, key):
        total, largest = carry
        draw, noise = jax.random.split(key)
        gradient = jax.grad(value)(start, noise, sample(draw, rows))
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradient)))
        largest = jnp.maximum(largest, norm)
        scaled = 1 / jnp.where(largest > 0, largest, 1)
        return (jax.tree.map(lambda t, g: t + g * scaled, total, gradient), largest), None

    @jax.jit
    def all_steps(keys):
        return jax.lax.scan(step, (start, jnp.zeros(())), keys)[0][0]

    total = all_steps(jax.random.split(key, steps))
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(total)):
        raise ValueError("rows: expected rows whose gradients are finite, got some that are not.")
    return space.discretize(jax.tree.map(jax.nn.softmax, total))
