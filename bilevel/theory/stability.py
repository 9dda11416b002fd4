"""Measure the Lipschitz constant of a training algorithm in its hyperparameters.

Generalization after a search over alpha needs an algorithm A that is Lipschitz in alpha, at least
approximately. The bound grows only with the logarithm of the constant L (Oymak, Li,
Soltanolkotabi, Generalization Guarantees for Neural Architecture Search with Train-Validation
Split, ICML 2021, Theorem 1, Assumption 1).
"""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from bilevel.contracts import Pytree
from bilevel.internal.checks import (
    check_finite,
    common_dtype,
    concrete,
    function,
    integer,
    positive,
    real_array,
)


def lipschitz(
    algorithm: Callable[[Pytree], Pytree],
    alphas: Pytree,
    deltas: chex.Array,
    *,
    directions: Pytree | None = None,
    norm: Callable[[Pytree], jax.Array] = optax.tree.norm,
    batch_size: int | None = None,
) -> jax.Array:
    """Return the normalised distances ``norm(A(alpha + delta u) - A(alpha)) / delta``, [m, k].

    Their maximum is a lower bound of A's Lipschitz constant (Oymak et al. 2021, Assumption 1 for
    predictions, section 7a and Figure 2 for weights). If A is Lipschitz only approximately (ReLU:
    units that switch), they grow as ``delta`` shrinks.

    Parameters
    ----------
    algorithm : ``algorithm(alpha) -> weights``, or predictions: any pytree
        Pure: its constants (initial weights, data, order of the batches) are the same in all runs.
    alphas : pytree of arrays with leading axis m, for instance [m] or [m, h]
    deltas : array [k], positive
    directions : pytree like ``alphas``, or like one alpha, optional
        Directions u, scaled to unit 2-norm over all leaves of an alpha; by default +1, for
        ``alphas`` [m] only. On simplices, ``point - alphas`` moves towards ``point`` and stays
        on them while delta is at most the distance.
    norm : ``norm(difference) -> array``
        Applied to a difference of outputs; the 2-norm over all leaves by default. If it returns
        several values, the result has more axes. Assumption 1 needs the sup norm over the inputs of
        predictions.
    batch_size : int, optional
        Number of alphas that run at a time, each with its k neighbours; by default all.

    Raises
    ------
    ValueError
        If ``algorithm`` is not a function, arguments are empty, not finite or of shapes that do not
        fit, a delta is not positive, or a direction is missing or of length 0.

    Notes
    -----
    ``alpha + delta u`` is not projected: in section 7a it may leave [0, 1]. The divisor is the
    length of the step as rounded; the quotient is NaN if this is 0.

    ``A(alpha + delta u) - A(alpha)`` cancels, and iterations can amplify the roundoff of the
    outputs. To measure this for alphas of order one, take ``tiny = 64 * jnp.finfo(dtype).eps``.
    The distances at ``deltas`` contain, in quadrature, about
    ``lipschitz(algorithm, alphas, jnp.array([tiny])) * tiny / deltas``. This part also includes
    jumps of the algorithm itself.

    Cost: m (k + 1) runs of the algorithm, one program; memory of ``batch_size`` (k + 1) runs.

    Examples
    --------
    Gradient descent on ``mu/2 theta^2 - M alpha theta``: the constant is ``M / mu``, here 4.

    >>> def train(alpha):
    ...     step = lambda _, theta: theta - 0.5 * (theta - 4 * alpha)
    ...     return jax.lax.fori_loop(0, 60, step, 0.0)
    >>> lipschitz(train, jnp.array([0.0, 0.5]), jnp.array([0.1, 0.01])).round(3)
    Array([[4., 4.],
           [4., 4.]], dtype=float...)
    """
    function("algorithm", algorithm, "alpha -> weights")
    deltas = real_array("deltas", positive("deltas", deltas))
    if deltas.ndim != 1 or deltas.size == 0:
        raise ValueError(f"deltas: expected shape [k] with k at least 1, got {deltas.shape}.")
    alphas = _points(alphas)
    units = _unit_directions(alphas, directions)
    if batch_size is not None:
        integer("batch_size", batch_size, 1)

    def moved(delta, unit):
        dtype = common_dtype(delta, unit)
        return delta.astype(dtype) * unit.astype(dtype)

    def around(alpha, unit):
        def step(delta):
            return jax.tree.map(lambda a, u: a + moved(delta, u).astype(a.dtype), alpha, unit)

        points = jax.vmap(step)(jnp.concatenate([jnp.zeros_like(deltas[:1]), deltas]))
        # The run at alpha belongs to the same vmap, so the algorithm is compiled once.
        outputs = jax.tree.map(_signed, jax.vmap(algorithm)(points))

        def distance(point, output):
            length = optax.tree.norm(optax.tree.sub(point, alpha))
            return norm(optax.tree.sub(output, _index_leaves(outputs, 0))) / length

        return jax.vmap(distance)(*_index_leaves((points, outputs), slice(1, None)))

    size = len(jax.tree.leaves(alphas)[0]) if batch_size is None else batch_size
    return jax.lax.map(lambda pair: around(*pair), (alphas, units), batch_size=size)


def _signed(x: jax.Array) -> jax.Array:
    """Return integers and bools as floats, because their differences would wrap around."""
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(float)


def _index_leaves(tree: Pytree, index: int | slice) -> Pytree:
    return jax.tree.map(lambda leaf: leaf[index], tree)


def _points(alphas: Pytree) -> Pytree:
    alphas = jax.tree.map(lambda a: real_array("alphas", a), alphas)
    alphas = jax.tree.map(lambda a: a.astype(common_dtype(a, float)), alphas)
    shapes = [leaf.shape for leaf in jax.tree.leaves(alphas)]
    if not shapes or not all(shape and shape[0] == shapes[0][0] > 0 for shape in shapes):
        raise ValueError(
            f"alphas: expected arrays with one leading axis of length at least 1, got {shapes}."
        )
    check_finite("alphas", alphas)
    return alphas


def _unit_directions(alphas: Pytree, directions: Pytree | None) -> Pytree:
    """Return one direction for each alpha, of length 1 over all leaves."""
    if directions is None:
        if [leaf.ndim for leaf in jax.tree.leaves(alphas)] != [1]:
            shapes = jax.tree.map(jnp.shape, alphas)
            raise ValueError(f"directions: expected some for alphas of shape {shapes}, got None.")
        return jax.tree.map(jnp.ones_like, alphas)
    try:
        directions = jax.tree.map(
            lambda a, u: jnp.broadcast_to(jnp.asarray(u, a.dtype), a.shape), alphas, directions
        )
    except (TypeError, ValueError):
        raise ValueError(
            "directions: expected arrays like those of alphas, or of one alpha, "
            f"got {jax.tree.map(jnp.shape, directions)}."
        ) from None
    check_finite("directions", directions)
    lengths = jax.vmap(optax.tree.norm)(directions)
    if concrete(lengths) and not np.asarray(lengths).all():
        raise ValueError("directions: expected lengths above 0, got a direction of length 0.")
    return jax.vmap(lambda u, length: optax.tree.scale(1 / length, u))(directions, lengths)
