"""Train-free scores by the ReLUs of a network: sign patterns, and correlations of samples."""

from functools import partial

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
    growing_axes,
    mean_cross_entropy,
    with_statistic,
)
from ntk.scores.registry import ScoreDescription
from ntk.scores.visit_operations import visit_chosen_operations

_relu_score = partial(ScoreDescription, batch_norm="joint")


@_relu_score("``log det`` of agreements of ReLU signs", gradients="none", published="nwot")
def naswot(key: chex.PRNGKey, apply: Apply, params: Pytree, batch: Batch) -> jax.Array:
    """Return NASWOT: ``log det K_H``; ``K_H[i, j]`` counts ReLUs where i and j agree in sign.

    ``K_H = sum B B' + (1 - B)(1 - B)'`` [n, n] over the ReLUs, with ``B = 1[input > 0]``
    [n, units], jointly. Mellor et al. (ICML 2021). It uses no labels and no gradients.

    Only ReLUs that the logits depend on count, as in the original also through a product with 0. In
    ``lax.switch`` only the branch taken counts.

    Raises
    ------
    ValueError
        If the logits depend on no ReLU, or on one in a loop other than ``scan``, or if the samples
        share an axis of a ReLU's input with another dimension.

    Notes
    -----
    A ReLU is ``jax.nn.relu`` or an equivalent form from any library: ``maximum(x, 0)``, ``where(x >
    0, x, 0)``, ``x * (x > 0)``, ``clip(x, 0)``; ReLU6 has two kinks. Other activations do not
    count, nor does ``maximum(0, variance)`` in a normalisation. The score is ``-inf`` if two
    samples agree everywhere. With fewer units than samples the determinant is 0 up to rounding.
    Counts are exact up to 2^24 units. Time: one forward pass and ``n^2`` per unit.

    Examples
    --------
    >>> x, y = jnp.array([[1.0, 1.0], [1.0, -1.0]]), jnp.array([0, 1])
    >>> naswot(None, lambda w, x: jax.nn.relu(x) @ w, jnp.ones((2, 2)), (x, y))  # log(2 * 2 - 1)
    Array(1.0986, dtype=float...)
    """
    apply, params, x, _ = check_score_arguments(apply, params, batch)
    agreements = _sign_agreements(apply, params, x)
    _, logdet = jnp.linalg.slogdet(agreements.astype(float))
    return jnp.where(_distinct_patterns(agreements) < len(x), -jnp.inf, logdet)


@_relu_score("number of distinct ReLU sign patterns", gradients="none")
def regions(
    key: chex.PRNGKey, apply: Apply, params: Pytree, batch: Batch, *, unused: bool = True
) -> jax.Array:
    """Return TE-NAS's R: the number of linear regions of the samples, by ReLU sign patterns.

    ReLUs are those of :func:`naswot`, jointly. With ``unused=False`` only ReLUs count that change a
    logit; this leaves out operations with weight 0 in a supernet. Chen, Gong & Wang (ICLR 2021) use
    3,000 crops of 3 x 3 pixels and a thin network, so that several samples share a region. Memory:
    n^2, and a backward pass for ``unused=False``.

    Examples
    --------
    >>> x, y = jnp.array([[1.0, 1.0], [1.0, -1.0], [2.0, 3.0]]), jnp.array([0, 1, 0])
    >>> int(regions(None, lambda w, x: jax.nn.relu(x) @ w, jnp.ones((2, 2)), (x, y)))
    2
    """
    apply, params, x, _ = check_score_arguments(apply, params, batch)
    agreements = _sign_agreements if unused else _used_sign_agreements
    return _distinct_patterns(agreements(apply, params, x))


def _sign_agreements(apply: Apply, params: Pytree, x: chex.Array) -> jax.Array:
    """Return the number of ReLUs with the same sign for samples i and j: [n, n], float32."""

    def count(eqn, other, inputs, outputs, total):
        axis = _samples_axis(eqn, other, len(x))
        return outputs, total if axis is None else total + _same_signs(inputs[0], axis)

    start = jnp.zeros((len(x), len(x)), jnp.float32)
    return visit_chosen_operations(mark_relus(apply), is_relu, count, start, params, x, "ReLU")[1]


def _used_sign_agreements(apply: Apply, params: Pytree, x: chex.Array) -> jax.Array:
    """Return :func:`_sign_agreements` of only the ReLUs that the logits depend on."""

    def count_if_used(axis, u, g):
        return jnp.where((g != 0).any(), _same_signs(u, axis), 0)

    def response(total):
        def probe(eqn, other, inputs, outputs, nothing):
            axis = _samples_axis(eqn, other, len(x))
            if axis is not None:
                count = partial(count_if_used, axis)
                outputs = [with_statistic(count, outputs[0], inputs[0], total)]
            return outputs, nothing

        logits, _ = visit_chosen_operations(
            mark_relus(apply), is_relu, probe, (), params, x, "ReLU"
        )
        # With random weights, derivatives do not cancel in the sum.
        return jnp.sum(logits * jax.random.normal(jax.random.key(0), logits.shape, logits.dtype))

    return jax.grad(response)(jnp.zeros((len(x), len(x)), jnp.float32))


def _distinct_patterns(agreements: chex.Array) -> jax.Array:
    """Return the number of different patterns, given the units that any two have in common."""
    same = agreements == agreements[0, 0]  # a pattern agrees with itself everywhere
    count = jnp.sum(~jnp.any(jnp.tril(same, -1), axis=1)).astype(agreements.dtype)
    return jnp.where(jnp.isnan(agreements).any(), jnp.nan, count)


def _same_signs(u: jax.Array, axis: int) -> jax.Array:
    u = jnp.moveaxis(u, axis, 0).reshape(u.shape[axis], -1)
    signs = jnp.where(u > 0, 1, -1).astype(jnp.float32)
    signs = jnp.where(jnp.isnan(u), jnp.nan, signs)
    return (signs.shape[1] + gram_of_rows(signs)) / 2


def _samples_axis(eqn, other, n: int) -> int | None:
    """Return the axis of the samples in a ReLU's input; None for one of weights or statistics."""
    shape, grown = (e.invars[0].aval.shape for e in (eqn, other))
    axes = growing_axes(shape, grown)
    if not axes:
        return None
    if len(axes) > 1 or (shape[axes[0]], grown[axes[0]]) != (n, n + 1):
        raise ValueError(
            f"apply: expected ReLU inputs with the {n} samples on an axis, got the shape {shape}."
        )
    return axes[0]


@_relu_score("``log det`` of correlations at the ReLUs", gradients="1")
def wrcor(key: chex.PRNGKey, apply: Apply, params: Pytree, batch: Batch) -> jax.Array:
    """Return WRCor: ``log |det K|``, with ``K = sum_l 2^l sum_i |A_i| + |G_i|`` over the ReLUs.

    This is the weighted response correlation. K is [n, n]; i runs over the ReLUs of the layers l =
    0, 1, ... ``A_i[s, t]`` is the correlation, over the units, of samples s and t in the ReLU's
    input, and ``G_i`` the same for the gradients of the mean cross-entropy in this input, jointly.
    Jing et al. (arXiv 2507.08841), Eq. (10) and (11). As in their code, matrices with a constant
    row do not count. At the last ReLU, which is in place, that code uses outputs instead of inputs.

    ``jax.ad_checkpoint.checkpoint_name(x, "layer")`` in the network ends a layer: the cells of
    NAS-Bench-201 in their code and in our networks. Without any such name, every ReLU is a layer.

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
    >>> wrcor(None, lambda w, x: jax.nn.relu(x) @ w, jnp.eye(3, 2), (x, y))  # log(2^2 - 1.5^2)
    Array(0.5596, dtype=float...)
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
    """Return ``sum_l 2^(l - L) (|A_l| + |G_l|)`` [n, n] over the ReLUs of layers 0..L, and L."""
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
        axis = _samples_axis(eqn, other, n)
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
            axis = _samples_axis(eqn, other, n)
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
