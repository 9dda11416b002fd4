"""Train-free scores by the activation patterns of ReLUs."""

import chex
import jax
import jax.numpy as jnp

from ntk.scores.network_reading import (
    Apply,
    Batch,
    Pytree,
    check_score_arguments,
    distinct_patterns,
    sign_agreements,
    used_sign_agreements,
)
from ntk.scores.registry import ScoreDescription


@ScoreDescription(
    "``log det`` of agreements of ReLU signs",
    gradients="none",
    batch_norm="joint",
    published="nwot",
)
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
    >>> score = naswot(None, lambda w, x: jax.nn.relu(x) @ w, jnp.ones((2, 2)), (x, y))
    >>> bool(jnp.isclose(score, jnp.log(2 * 2 - 1 * 1)))
    True
    """
    apply, params, x, _ = check_score_arguments(apply, params, batch)
    agreements = sign_agreements(apply, params, x)
    _, logdet = jnp.linalg.slogdet(agreements.astype(float))
    return jnp.where(distinct_patterns(agreements) < len(x), -jnp.inf, logdet)


@ScoreDescription("number of distinct ReLU sign patterns", gradients="none", batch_norm="joint")
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
    agreements = sign_agreements if unused else used_sign_agreements
    return distinct_patterns(agreements(apply, params, x))
