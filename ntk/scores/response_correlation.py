"""The score WRCor: correlations between samples at the ReLUs, of inputs and of gradients."""

import chex
import jax
import jax.numpy as jnp

from ntk.internal.checks import at_least_float32
from ntk.scores.find_relus import is_relu, mark_relus
from ntk.scores.network_reading import (
    Apply,
    Batch,
    Pytree,
    check_score_arguments,
    gram_of_rows,
    mean_cross_entropy,
    samples_axis,
    with_statistic,
)
from ntk.scores.registry import ScoreDescription
from ntk.scores.visit_operations import visit_chosen_operations


@ScoreDescription("``log det`` of correlations at the ReLUs", gradients="1", batch_norm="joint")
def wrcor(key: chex.PRNGKey, apply: Apply, params: Pytree, batch: Batch) -> jax.Array:
    """Return WRCor: ``log |det K|``, with ``K = sum_l 2^l sum_i |A_i| + |G_i|`` over the ReLUs.

    This is the weighted response correlation. K is [n, n]; i runs over the ReLUs of the layers l =
    0, 1, ... ``A_i[s, t]`` is the correlation, over the units, of samples s and t in the ReLU's
    input, and ``G_i`` the same for the gradients of the mean cross-entropy in this input, jointly.
    Jing et al. (arXiv 2507.08841), Eq. (10) and (11). A matrix with a constant row lacks
    correlations and is left out, as in their code.

    ``jax.ad_checkpoint.checkpoint_name(x, "layer")`` in the network ends a layer. Without any such
    name, every ReLU is a layer, in the order of the program. Their code takes the cells of
    NAS-Bench-201 for layers, and so do our networks. At its last ReLU, which is in place, that code
    uses outputs instead of inputs.

    Raises
    ------
    ValueError
        If the logits depend on no ReLU, or on one in a loop other than ``scan``, or if the samples
        share an axis of a ReLU's input with another dimension.

    Notes
    -----
    The score is ``-inf`` if two samples are alike at every ReLU, or no ReLU has correlations. Time:
    one forward and one backward pass, and ``n^2`` per unit.

    Examples
    --------
    >>> x, y = jnp.array([[1.0, 2.0, 4.0], [4.0, 1.0, 2.0]]), jnp.array([0, 1])
    >>> score = wrcor(None, lambda w, x: jax.nn.relu(x) @ w, jnp.eye(3, 2), (x, y))
    >>> bool(jnp.isclose(score, jnp.log(2**2 - 1.5**2)))
    True
    """
    apply, params, x, y = check_score_arguments(apply, params, batch)
    K, last = _response_correlations(apply, params, x, y)
    _, logdet = jnp.linalg.slogdet(K)
    largest = jnp.max(K - jnp.diag(jnp.diag(K)))
    alike = largest >= K[0, 0] * (1 - len(x) * float(jnp.finfo(jnp.float32).eps))
    return jnp.where(alike, -jnp.inf, logdet + len(x) * last * jnp.log(2.0))


def _response_correlations(
    apply: Apply, params: Pytree, x: chex.Array, y: chex.Array
) -> tuple[jax.Array, jax.Array]:
    """Return ``sum_l 2^(l - L) (|C_l| + |C'_l|)`` [n, n] over the ReLUs of layers 0..L, and L.

    C are correlations of the samples' inputs of a ReLU, C' of the loss's gradients in them.
    """
    n, network = len(x), mark_relus(apply)
    zero, nothing = jnp.zeros(()), jnp.zeros((n, n))
    ends, relus = [], []

    def through(visit, total):
        return visit_chosen_operations(
            network, lambda eqn: _is_end(eqn) or is_relu(eqn), visit, total, params, x, "ReLU"
        )

    def count(eqn, other, inputs, outputs, counts):
        if _is_end(eqn):
            ends.append(eqn)
            return outputs, counts + jnp.array([1.0, 0.0])
        axis = samples_axis(eqn, other, n)
        relus.append(axis)
        return outputs, counts + jnp.array([0.0, float(axis is not None)])

    _, counts = through(count, jnp.zeros(2))
    if not relus:
        raise ValueError("apply: expected logits that depend on a ReLU, got none on the way.")
    every_relu = not ends  # without names of layers, every ReLU is a layer
    last = counts[1] - 1 if every_relu else counts[0]

    def loss(total):
        def probe(eqn, other, inputs, outputs, state):
            layer, K = state
            if _is_end(eqn):
                return outputs, (layer + 1, K)
            axis = samples_axis(eqn, other, n)
            if axis is None:
                return outputs, state
            u, weight = inputs[0], jnp.exp2(layer - last)
            K = K + weight * _absolute_correlations(u, axis)

            def of_gradients(about, g):
                u, weight = about
                return weight * _absolute_correlations(jnp.where(u > 0, g, 0), axis)

            output = with_statistic(of_gradients, outputs[0], (u, weight), total)
            return [output], (layer + int(every_relu), K)

        logits, (_, K) = through(probe, (zero, nothing))
        return mean_cross_entropy(logits, y), K

    G, K = jax.grad(loss, has_aux=True)(nothing)
    return K + G, last


def _is_end(eqn) -> bool:
    return eqn.primitive.name == "name" and eqn.params["name"] == "layer"


def _absolute_correlations(u: jax.Array, axis: int) -> jax.Array:
    """Return the absolute correlations of the samples; all 0 if a sample is constant."""
    u = jnp.moveaxis(u, axis, 0).reshape(u.shape[axis], -1)
    u = u.astype(at_least_float32(u.dtype))
    size = jnp.abs(u).max(axis=1, keepdims=True)  # squares of small gradients would be 0
    u = u / jnp.where(size > 0, size, 1)
    centred = u - u.mean(axis=1, keepdims=True)
    deviation = jnp.sqrt(jnp.mean(centred**2, axis=1, keepdims=True))
    constant = deviation <= 8 * jnp.finfo(u.dtype).eps
    C = jnp.abs(gram_of_rows(centred / jnp.where(constant, 1, deviation))) / u.shape[1]
    C = jnp.where(constant.any(), 0, C).astype(float)
    return jnp.where(jnp.isnan(u).any(), jnp.nan, C)
