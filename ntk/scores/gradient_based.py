"""Train-free scores by gradients of the loss and of the inputs, and by the size of the weights."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from ntk.internal.checks import at_least_float32, concrete, integer
from ntk.internal.compile_cache import program
from ntk.scores.network_reading import (
    Apply,
    Batch,
    Pytree,
    check_score_arguments,
    for_each,
    growing_axes,
    inner_product,
    logits_like,
    mean_cross_entropy,
    mean_loss,
    overflow_safe_norm,
    power_of_two_scale,
    split_weights,
    summed,
    with_statistic,
)
from ntk.scores.registry import ScoreDescription
from ntk.scores.visit_operations import visit_chosen_operations

_joint_score = functools.partial(ScoreDescription, gradients="1", batch_norm="joint")


@ScoreDescription("``|mean_i grad ell_i|^2``", gradients="n, singly", batch_norm="alone")
def knas(key: chex.PRNGKey, apply: Apply, params: Pytree, batch: Batch) -> jax.Array:
    """Return KNAS: ``(1/n^2) sum_ij <grad ell_i, grad ell_j> = |mean_i grad ell_i|^2``.

    ``ell_i`` is the cross-entropy of sample i alone; the gradient is in all of ``params``. Xu et
    al. (ICML 2021), the mean of the Gram matrix. Their code differs: :func:`knas_released`.

    Examples
    --------
    >>> x, y = jnp.array([[1.0], [1.0]]), jnp.array([0, 0])
    >>> float(knas(None, lambda w, x: x @ w, jnp.zeros((1, 2)), (x, y)))
    0.5
    """
    apply, params, x, y = check_score_arguments(apply, params, batch)

    def loss(p):
        return jnp.mean(jax.lax.map(lambda s: mean_loss(apply, p, s[0][None], s[1][None]), (x, y)))

    return jnp.sum(ravel_pytree(program(jax.grad(loss), params)(params))[0] ** 2)


@ScoreDescription("covariance between two halves", gradients="n, singly", batch_norm="alone")
def knas_released(key: chex.PRNGKey, apply: Apply, params: Pytree, batch: Batch) -> jax.Array:
    """Return KNAS of its released code (50 samples there): a covariance between halves.

    ``sum_t sum_{i < 50} <g_ti[first half] - mean, g_ti[second half] - mean> / n^2``: ``g_ti`` [n]
    holds entry i of the gradient of each sample's cross-entropy, the sample alone, in tensor t,
    for the first eleven leaves of ``params`` with at least 50 entries. The expectation is 0 for
    independent samples: the score measures the order of the batch.

    Raises
    ------
    ValueError
        If the number of samples is odd, or no leaf of ``params`` has 50 entries.

    Notes
    -----
    Leaves are in JAX's order and entries in their memory layout, so values differ from PyTorch's
    KNAS. The code's "first 100 entries" are cut to 50 by its loop.

    Examples
    --------
    >>> x, y = jnp.ones((4, 50)), jnp.array([0, 1, 0, 1])
    >>> # 50 entries, 4 samples: 50 <(-.5, .5), (-.5, .5)> / 4^2
    >>> float(knas_released(None, lambda w, x: x @ w, jnp.zeros((50, 2)), (x, y)))
    1.5625
    """
    apply, params, x, y = check_score_arguments(apply, params, batch)
    if len(x) % 2:
        raise ValueError(f"batch: expected an even number of samples, got {len(x)}.")
    if all(jnp.size(leaf) < 50 for leaf in jax.tree.leaves(params)):
        raise ValueError("params: expected a leaf of at least 50 entries, got none.")

    def entries(sample):
        xi, yi = sample
        g = jax.grad(lambda p: mean_loss(apply, p, xi[None], yi[None]))(params)
        tensors = [leaf.ravel() for leaf in jax.tree.leaves(g) if leaf.size >= 50]
        return jnp.stack([tensor[:50] for tensor in tensors[:11]])

    g = for_each(entries, (x, y))
    first, second = (half - half.mean(0, keepdims=True) for half in jnp.split(g, 2))
    return jnp.sum(first * second) / len(x) ** 2


@_joint_score("``|grad L|^2``, penalised where large")
def nasi(
    key: chex.PRNGKey,
    apply: Apply,
    params: Pytree,
    batch: Batch,
    *,
    penalty: float = 2.0,
    threshold: float = 500.0,
) -> jax.Array:
    """Return NASI: ``r - penalty max(0, r - threshold)`` with ``r = |grad L|^2``, L the mean loss.

    ``r`` approximates the trace norm of the NTK; above the threshold training would diverge. Shu
    et al. (ICLR 2022) call ``penalty`` mu and ``threshold`` nu (500 at the start of the adaptive
    variant, 100 in the fixed one). Cross-entropy, gradient in all of ``params``, jointly.

    Examples
    --------
    >>> x, y = jnp.array([[1.0], [1.0]]), jnp.array([0, 0])
    >>> args = (lambda w, x: x @ w, jnp.zeros((1, 2)), (x, y))
    >>> float(nasi(None, *args)), float(nasi(None, *args, threshold=0.25))
    (0.5, 0.0)
    """
    apply, params, x, y = check_score_arguments(apply, params, batch)
    g, _ = ravel_pytree(jax.grad(lambda p: mean_loss(apply, p, x, y))(params))
    r = jnp.sum(g**2)
    return r - penalty * jnp.maximum(0, r - threshold)


@_joint_score("``sum_l |grad_l L|``", together="gradient_scores", published="grad_norm")
def grad_norm(key: chex.PRNGKey, apply: Apply, params: Pytree, batch: Batch) -> jax.Array:
    """Return ``sum_l |dL / dw_l|``: the gradient's 2-norms, summed over the layers' weights.

    Mean cross-entropy of the batch, jointly. zero-cost-nas.

    Examples
    --------
    >>> x, y = jnp.array([[2.0]]), jnp.array([0])
    >>> round(float(grad_norm(None, lambda w, x: x @ w, jnp.zeros((1, 2)), (x, y))), 4)
    1.4142
    """
    return gradient_scores(key, apply, params, batch)["grad_norm"]


@_joint_score("``sum |w * grad L|``", together="gradient_scores", published="snip")
def snip(key: chex.PRNGKey, apply: Apply, params: Pytree, batch: Batch) -> jax.Array:
    """Return ``sum |w * dL/dw|`` over the weights: first-order changes of the loss without w.

    Mean cross-entropy of the batch, jointly. Lee et al. (ICLR 2019), summed as in zero-cost-nas.

    Examples
    --------
    >>> x, y = jnp.array([[2.0]]), jnp.array([0])
    >>> round(float(snip(None, lambda w, x: x @ w, jnp.ones((1, 2)), (x, y))), 4)
    2.0
    """
    return gradient_scores(key, apply, params, batch)["snip"]


def gradient_scores(
    key: chex.PRNGKey, apply: Apply, params: Pytree, batch: Batch
) -> dict[str, jax.Array]:
    """Return :func:`grad_norm` and :func:`snip`, by name, from one gradient."""
    apply, params, x, y = check_score_arguments(apply, params, batch)
    weights, rebuild = split_weights(apply, params, x)
    g = jax.grad(lambda w: mean_loss(apply, rebuild(w), x, y))(weights)
    return {
        "grad_norm": summed(overflow_safe_norm(leaf) for leaf in g),
        "snip": summed(jnp.sum(jnp.abs(a * b)) for a, b in zip(weights, g, strict=True)),
    }


@_joint_score("``-sum w * (H grad L)``", gradients="2", published="grasp")
def grasp(key: chex.PRNGKey, apply: Apply, params: Pytree, batch: Batch) -> jax.Array:
    """Return ``-sum w * (H g)``: the change of the gradient flow ``|g|^2`` without the weights.

    g and H are the gradient and Hessian of the mean cross-entropy in the weights, jointly, without
    temperature. Wang, Zhang & Grosse (ICLR 2020), summed as in zero-cost-nas. Time: two gradients.

    Examples
    --------
    >>> x, y = jnp.array([[2.0]]), jnp.array([0])
    >>> w = jnp.array([[1.0, 0.0]])
    >>> round(float(grasp(None, lambda w, x: x @ w, w, (x, y))), 4)
    0.2002
    """
    apply, params, x, y = check_score_arguments(apply, params, batch)
    weights, rebuild = split_weights(apply, params, x)
    gradient = jax.grad(lambda w: mean_loss(apply, rebuild(w), x, y))
    _, product = jax.jvp(gradient, (weights,), (gradient(weights),))
    return -inner_product(weights, product)


@_joint_score("``sum_c mean_n (a . dL/da)^2 / 2``", published="fisher")
def fisher(key: chex.PRNGKey, apply: Apply, params: Pytree, batch: Batch) -> jax.Array:
    """Return ``sum_c (1/2) mean_n (sum_positions a * dL/da)^2`` over the channels c of all layers.

    ``a`` [n, positions, channels] is the output of a convolution or matrix product, axes in any
    order (``lax.conv_general_dilated``; ``lax.dot_general`` without batch axes, with the matrix's
    own axes as channels). L is the mean cross-entropy of the batch, jointly. Turner et al. (ICLR
    2020), summed as in zero-cost-nas.

    Raises
    ------
    ValueError
        If no convolution or product is in the network, or one is in a loop other than ``scan``.

    Notes
    -----
    ``a`` is taken before a bias is added, in zero-cost-nas after. The two agree for biases of 0,
    flax's initialisation. To find the axis of the samples, the network's program is traced again
    with one sample more; products without such an axis are ignored.

    Examples
    --------
    >>> x, y = jnp.array([[2.0]]), jnp.array([0])
    >>> round(float(fisher(None, lambda w, x: x @ w, jnp.ones((1, 2)), (x, y))), 4)
    1.0
    """
    apply, params, x, y = check_score_arguments(apply, params, batch)
    axes_of_layers = []
    dtype = logits_like(apply, params, x).dtype

    def saliency(axes, a, g):
        samples, channels = axes
        per_channel = jnp.moveaxis(a * g, (samples, *channels), (0, *range(-len(channels), 0)))
        size = math.prod(a.shape[c] for c in channels)
        per_channel = per_channel.reshape(len(per_channel), -1, size).sum(1)
        return (jnp.sum(jnp.mean(per_channel**2, axis=0)) / 2).astype(dtype)

    def loss(total):
        def probe(eqn, other, inputs, outputs, nothing):
            axes = _layer_axes(eqn, other, len(x))
            axes_of_layers.append(axes)
            if axes:
                (a,) = outputs
                outputs = [with_statistic(functools.partial(saliency, axes), a, a, total)]
            return outputs, nothing

        logits, _ = visit_chosen_operations(
            apply, _is_layer, probe, (), params, x, "matrix product"
        )
        if not any(axes_of_layers):
            raise ValueError(
                f"apply: expected a layer with the {len(x)} samples on an axis of its output, "
                "got none."
            )
        return mean_cross_entropy(logits, y)

    return jax.grad(loss)(jnp.zeros((), dtype))


def _is_layer(eqn) -> bool:
    """Return whether this is a convolution, or a product without batch axes."""
    name, numbers = eqn.primitive.name, eqn.params.get("dimension_numbers")
    return name == "conv_general_dilated" or (name == "dot_general" and not any(numbers[1]))


def _layer_axes(eqn, other, n: int) -> tuple[int, tuple[int, ...]] | None:
    """Return the axes of samples and channels in a layer's output; None for other products.

    The channels of ``x @ w`` are the axes of the operand that does not grow with the batch.
    """
    shape, grown = (e.outvars[0].aval.shape for e in (eqn, other))
    axes = growing_axes(shape, grown)
    if len(axes) != 1 or (shape[axes[0]], grown[axes[0]]) != (n, n + 1):
        return None
    numbers = eqn.params["dimension_numbers"]
    if eqn.primitive.name == "conv_general_dilated":
        return axes[0], (numbers.out_spec[1],)
    left, right = (v.aval.ndim - len(c) for v, c in zip(eqn.invars, numbers[0], strict=True))
    channels = range(left, left + right) if axes[0] < left else range(left)
    return (axes[0], tuple(channels)) if channels else None


@_joint_score("``sum_l log sum_w mean|g| / std(g)``", gradients="one per part")
def zico(
    key: chex.PRNGKey, apply: Apply, params: Pytree, batch: Batch, *, parts: int = 2
) -> jax.Array:
    """Return ZiCo: ``sum_l log sum_w mean|g_w| / std(g_w)`` over ``parts`` batches.

    The batch is cut into equal parts in its order; each part goes through jointly. g is the
    gradient of a part's mean cross-entropy, std is without Bessel's correction. Weights with
    constant gradient, and layers of only such weights, do not count. Li et al. (ICLR 2023).

    Raises
    ------
    ValueError
        If ``parts`` is under 2 or does not divide the number of samples.

    Examples
    --------
    >>> x, y = jnp.array([[2.0], [6.0]]), jnp.array([0, 0])  # gradients -1, 1 and -3, 3
    >>> zico(None, lambda w, x: x @ w, jnp.zeros((1, 2)), (x, y))  # log 4
    Array(1.3863, dtype=float...)
    """
    apply, params, x, y = check_score_arguments(apply, params, batch)
    if integer("parts", parts, 0) < 2 or len(x) % parts:
        raise ValueError(f"parts: expected 2 or more, dividing the {len(x)} samples, got {parts}.")
    weights, rebuild = split_weights(apply, params, x)

    def gradient(part):
        return jax.grad(lambda w: mean_loss(apply, rebuild(w), *part))(weights)

    cut = jax.tree.map(lambda a: a.reshape(parts, -1, *a.shape[1:]), (x, y))
    return summed(_log_signal(g) for g in for_each(gradient, cut))


def _log_signal(g: jax.Array) -> jax.Array:
    """Return ``log sum mean|g| / std(g)`` over the first axis of gradients; 0 for an empty sum."""
    g = g / power_of_two_scale(g)  # the squares of small gradients would be 0
    mean, deviation = jnp.mean(jnp.abs(g), axis=0), jnp.std(g, axis=0)
    # The deviation is nonnegative; comparing with 0 keeps NaN.
    varies = jnp.where(deviation == 0, 1, deviation)
    total = jnp.sum(jnp.where(deviation == 0, 0, mean / varies))
    return jnp.log(jnp.where(total == 0, 1, total))


@_joint_score("spectrum of the inputs' gradients", published="jacov")
def jacov(key: chex.PRNGKey, apply: Apply, params: Pytree, batch: Batch) -> jax.Array:
    """Return ``-sum_i log(lambda_i + eps) + 1 / (lambda_i + eps)``, with ``eps = 1e-5``.

    ``lambda`` are the eigenvalues of the correlation matrix [n, n] of the inputs' gradients of
    the sum of all logits, jointly. Mellor et al. (2020, the first version of NASWOT), as
    ``jacob_cov`` in zero-cost-nas. It is larger if the gradients distinguish the samples.

    Notes
    -----
    We use singular values, because ``eps`` is below float32's rounding of the matrix. An input with
    gradient 0 has correlation 0 with every other one (the original returns NaN).

    Examples
    --------
    >>> x, y = jnp.array([[1.0, -1.0], [-1.0, 1.0]]), jnp.array([0, 1])  # eigenvalues 0 and 2
    >>> round(float(jacov(None, lambda w, x: jnp.abs(x) @ w, jnp.ones((2, 2)), (x, y))))
    -99990
    """
    apply, params, x, _ = check_score_arguments(apply, params, batch)
    x = x.astype(at_least_float32(x.dtype))  # images may come as integers
    g = jax.grad(lambda x: jnp.sum(apply(params, x)))(x).reshape(len(x), -1)
    g = g / power_of_two_scale(g, axis=1)  # correlations do not change, and squares stay in range
    g = g - g.mean(1, keepdims=True)
    norms = jnp.linalg.norm(g, axis=1, keepdims=True)
    singular = jnp.linalg.svd(g / jnp.where(norms > 0, norms, 1), compute_uv=False)
    values = jnp.zeros(len(x), g.dtype).at[: singular.size].set(singular**2) + 1e-5
    return -jnp.sum(jnp.log(values) + 1 / values)


@ScoreDescription(
    "``log sum |w * dR/dw|`` at ``|w|``", gradients="1", batch_norm="removed", published="synflow"
)
def synflow(key: chex.PRNGKey, apply: Apply, params: Pytree, batch: Batch) -> jax.Array:
    """Return ``log sum w * dR/dw`` over the weights, at the absolute values of all ``params``.

    R is the sum of the logits at an input of ones. Only the shape of the batch is used, no data.
    Tanaka et al. (NeurIPS 2020), summed as in zero-cost-nas, with NASLib's logarithm. ``apply``
    must not contain batch normalisation with batch statistics; running averages are unchanged.

    Raises
    ------
    ValueError
        If the sum is not a positive finite number. It is NaN if an argument is traced.

    Notes
    -----
    R grows exponentially with depth. Like the original, this always computes in float64, also
    without JAX's x64 mode: R can reach 1e308, or 1e102 if an activation cubes its input. A network
    that casts to a smaller type (flax's ``dtype=``) overflows in it. A sum of 0 gives ``-inf``.

    Examples
    --------
    >>> x, y = jnp.zeros((1, 2)), jnp.array([0])
    >>> synflow(None, lambda w, x: x @ w, jnp.array([[1.0, -2.0], [3.0, 4.0]]), (x, y))  # log 10
    Array(2.3026, dtype=float...)
    """
    apply, params, x, _ = check_score_arguments(apply, params, batch)
    dtype = logits_like(apply, params, x).dtype
    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: jnp.abs(leaf).astype(jnp.float64), params)
        ones = jnp.ones_like(x[:1])  # integers, as of tokens, stay integers
        ones = ones.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else ones
        weights, rebuild = split_weights(apply, params, ones)
        g = jax.grad(lambda w: jnp.sum(apply(rebuild(w), ones)))(weights)
        total = inner_product(weights, g)
        good = (total >= 0) & (total < jnp.inf)
        score = jnp.log(jnp.where(good, total, jnp.nan))
        if concrete(total) and not good:
            raise ValueError(
                "params: expected a network whose synflow sum is nonnegative and below 1e308, got "
                f"{float(total):.3g}. Scale the weights down, or let the network compute in the "
                "type of its parameters."
            )
    return score.astype(at_least_float32(dtype))


@ScoreDescription("``sum_l |w_l|``", gradients="none", batch_norm="unused", published="l2_norm")
def l2_norm(key: chex.PRNGKey, apply: Apply, params: Pytree, batch: Batch) -> jax.Array:
    """Return ``sum_l |w_l|``: the 2-norms of the layers' weights. zero-cost-nas.

    Examples
    --------
    >>> x, y = jnp.array([[2.0]]), jnp.array([0])
    >>> float(l2_norm(None, lambda w, x: x @ w, jnp.array([[3.0, 4.0]]), (x, y)))
    5.0
    """
    apply, params, x, _ = check_score_arguments(apply, params, batch)
    weights, _ = split_weights(apply, params, x)
    return summed(overflow_safe_norm(leaf) for leaf in weights)
