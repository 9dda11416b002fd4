"""Train-free scores of the neural tangent kernel of a batch.

    K_ij = <grad f(x_i), grad f(x_j)> = sum_l K_l,    f the sum of the logits, l a leaf of params

Every sample passes through the network alone, except in :func:`te_nas`.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from ntk.internal.checks import concrete, nan_unless, real_array
from ntk.kernels.functions import as_kernel_matrix
from ntk.kernels.symmetric import square_matrix, symmetric_matrix
from ntk.scores.network_reading import (
    Apply,
    Batch,
    Pytree,
    check_score_arguments,
    for_each,
    gram_of_rows,
    is_weight,
    logits_like,
    overflow_safe_norm,
    power_of_two_scale,
    split_weights,
    summed,
)
from ntk.scores.registry import ScoreDescription
from ntk.spectrum import eigenvalues

_kernel_score = functools.partial(
    ScoreDescription, gradients="n, singly", batch_norm="alone", together="kernel_scores"
)


def kernel_scores(
    key: chex.PRNGKey, apply: Apply, params: Pytree, batch: Batch
) -> dict[str, jax.Array]:
    """Return all scores of this family by name, at the cost of one, and K itself as ``kernel``."""
    apply, params, x, y = check_score_arguments(apply, params, batch)
    classes = logits_like(apply, params, x).shape[1]
    gradients = _sample_gradients(apply, params, x)
    # K itself can overflow.
    size = _gradient_scale(gradients)
    K, size = _sum_of_grams([g / size for g in gradients]), size.reshape(())
    scores = _scores_of_matrix(K, eigenvalues.eigenvalues(K), size, y, classes)
    row_scale = _gradient_scale(gradients, axis=1)
    cosines = _sum_of_grams([g / row_scale for g in gradients])
    of_weights = itertools.compress(gradients, is_weight(apply, params, x))
    return {
        "kernel": K * size * size,
        **scores,
        "cosine_min_eigenvalue": _min_eigenvalue_of_cosines(cosines),
        "log_traces": summed(map(_log_trace, of_weights)),
    }


def of_kernel(
    K: chex.Array, y: chex.Array | None = None, *, x: chex.Array | None = None
) -> dict[str, jax.Array]:
    """Return the scores of this family that depend on the kernel only, by name, for any kernel.

    Parameters
    ----------
    K : array [n, n] or [n, n, o, o], :class:`ntk.Kernels` or kernel function
        Symmetric, up to rounding. A kernel of o outputs is a matrix of pairs, ``[n o, n o]``.
    y : integer array [n], optional
        Labels from 0, known when tracing, for ``label_energy``; without labels it is left out.
        For a kernel of o outputs, labels are below o: output a fits the indicator of class a.
    x : array [n, ...], optional
        Inputs, if ``K`` is a kernel function (:func:`ntk.kernel_matrix`).

    Returns
    -------
    dict of scalar
        ``eigen_nas``, ``min_eigenvalue``, ``condition_number``, ``cosine_min_eigenvalue``,
        ``spectral_entropy``, ``label_energy``.

    Raises
    ------
    ValueError
        If ``K`` is not finite, symmetric and positive semidefinite, ``x`` is missing or
        superfluous, or ``y`` are not n labels.

    Examples
    --------
    >>> x, y = jnp.diag(jnp.array([1.0, 2.0])), jnp.array([0, 1])
    >>> result = of_kernel(lambda x1, x2: x1 @ x2.T, y, x=x)
    >>> float(result["eigen_nas"]), float(result["condition_number"])
    (2.5, 4.0)
    """
    K = real_array("K", as_kernel_matrix(K, x))
    n, outputs = K.shape[0] if K.ndim else 0, K.shape[3] if K.ndim == 4 else 1
    K = symmetric_matrix(square_matrix(K))
    # We scale K first, because products of eigenvalues can overflow.
    size = jnp.sqrt(power_of_two_scale(K)).reshape(())
    K = K / size / size
    values = eigenvalues.eigenvalues(K)
    good = values[0] >= -(jnp.finfo(K.dtype).eps ** 0.5) * values[-1]
    if concrete(good) and not good:
        raise ValueError(
            "K: expected a positive semidefinite matrix, got one with the eigenvalue "
            f"{values[0] * size * size:.3g}."
        )
    K, values = nan_unless(good, (K, values))
    if y is None:
        return _scores_of_matrix(K, values, size, None, 0)
    y = np.asarray(real_array("y", y))
    if y.shape != (n,) or not np.issubdtype(y.dtype, np.integer) or y.min() < 0:
        raise ValueError(f"y: expected {n} labels from 0, got {y.dtype} of shape {y.shape}.")
    classes = int(y.max()) + 1
    if n < len(K) and classes > outputs:
        raise ValueError(
            f"y: expected labels below {outputs}, the outputs of K, got the label {classes - 1}."
        )
    return _scores_of_matrix(K, values, size, jnp.asarray(y), outputs if n < len(K) else classes)


def _scores_of_matrix(
    K: jax.Array, values: jax.Array, size: jax.Array, y: jax.Array | None, classes: int
) -> dict[str, jax.Array]:
    """Return the scores of ``size^2 K``, for a ``K`` with these eigenvalues."""
    scores = {
        "eigen_nas": jnp.trace(K) / len(K) * size * size,
        "min_eigenvalue": jnp.maximum(values[0], 0) * size * size,
        "condition_number": _condition(values),
        "cosine_min_eigenvalue": _min_eigenvalue_of_cosines(K),
        "spectral_entropy": _entropy_of_spectrum(values),
    }
    if y is None:
        return scores
    return scores | {"label_energy": _label_energy_of_matrix(K, values, y, classes) / size / size}


@_kernel_score("``tr K / n``")
def eigen_nas(key: chex.PRNGKey, apply: Apply, params: Pytree, batch: Batch) -> jax.Array:
    """Return Eigen-NAS: ``tr K / n``, the mean squared norm of a sample's gradient.

    ``K_ij = <grad f(x_i), grad f(x_j)>`` is the neural tangent kernel of ``f``, the sum of the
    logits, in all of ``params``; every sample alone.

    Notes
    -----
    Zhu et al. (2022), section 5.2, rank by ``tr K / d``, which they claim is between
    ``lambda_min(K)`` and ``|K|_F``. Both inequalities fail in general; ``lambda_min <= tr K / n <=
    |K|_F / sqrt(n)`` holds. For fixed n and d the ranking is the same. Time: one gradient per
    sample; memory: one gradient.

    Examples
    --------
    >>> x, y = jnp.array([[3.0, 0.0], [0.0, 1.0]]), jnp.array([0, 1])
    >>> float(eigen_nas(None, lambda w, x: x @ w, jnp.ones((2, 2)), (x, y)))
    10.0
    """
    apply, params, x, _ = check_score_arguments(apply, params, batch)
    gradient = _sample_gradient(apply)
    return jnp.mean(for_each(lambda xi: jnp.sum(ravel_pytree(gradient(params, xi))[0] ** 2), x))


@_kernel_score("``lambda_min(K)``")
def min_eigenvalue(key: chex.PRNGKey, apply: Apply, params: Pytree, batch: Batch) -> jax.Array:
    """Return ``lambda_min(K)`` exactly, for the kernel K of :func:`eigen_nas`, its upper bound.

    Memory: n gradients; time: one gradient per sample, ``n^2 p``.

    Examples
    --------
    >>> x, y = jnp.array([[3.0, 0.0], [0.0, 1.0]]), jnp.array([0, 1])
    >>> round(float(min_eigenvalue(None, lambda w, x: x @ w, jnp.ones((2, 2)), (x, y))), 4)
    2.0
    """
    apply, params, x, _ = check_score_arguments(apply, params, batch)
    K = _sum_of_grams(_sample_gradients(apply, params, x))
    # A zero eigenvalue is rounded to either sign.
    return jnp.maximum(eigenvalues.min_eigenvalue(K), 0)


@_kernel_score("``lambda_min`` of ``K_ij / sqrt(K_ii K_jj)``")
def cosine_min_eigenvalue(
    key: chex.PRNGKey, apply: Apply, params: Pytree, batch: Batch
) -> jax.Array:
    """Return ``lambda_min`` of the kernel of cosines, ``K_ij / sqrt(K_ii K_jj)``: at most 1.

    It measures how different the samples' gradients are, independently of their norms, which
    dominate :func:`eigen_nas`. The value is 0 if a gradient is 0.

    Examples
    --------
    >>> x, y = jnp.array([[3.0, 0.0], [0.0, 1.0]]), jnp.array([0, 1])
    >>> round(float(cosine_min_eigenvalue(None, lambda w, x: x @ w, jnp.ones((2, 2)), (x, y))), 4)
    1.0
    """
    return kernel_scores(key, apply, params, batch)["cosine_min_eigenvalue"]


@_kernel_score("``lambda_max(K) / lambda_min(K)``", smaller_is_better=True)
def condition_number(key: chex.PRNGKey, apply: Apply, params: Pytree, batch: Batch) -> jax.Array:
    """Return ``lambda_max(K) / lambda_min(K)``: smaller is better; :func:`te_nas` samples jointly.

    The value is ``inf`` if ``lambda_min`` is at most ``n eps lambda_max``, 0 up to rounding.

    Examples
    --------
    >>> x, y = jnp.array([[3.0, 0.0], [0.0, 1.0]]), jnp.array([0, 1])
    >>> round(float(condition_number(None, lambda w, x: x @ w, jnp.ones((2, 2)), (x, y))), 3)
    9.0
    """
    return kernel_scores(key, apply, params, batch)["condition_number"]


@ScoreDescription(
    "``lambda_max(K) / lambda_min(K)``", gradients="n", batch_norm="joint", smaller_is_better=True
)
def te_nas(key: chex.PRNGKey, apply: Apply, params: Pytree, batch: Batch) -> jax.Array:
    """Return TE-NAS's condition number ``lambda_max(K) / lambda_min(K)``: smaller is better.

    K is the kernel of :func:`eigen_nas`, except that the batch is joint, and all tensors count that
    PyTorch calls ``weight``: kernels, and scales of normalisations (leaves named ``scale``). Chen,
    Gong & Wang (ICLR 2021) prune a supernet by the ranks of kappa and of :func:`regions` together.

    Notes
    -----
    The value is ``inf`` if ``lambda_min`` is at most ``n eps lambda_max``, 0 up to rounding. Their
    code divides by the rounded eigenvalue, so a negative one ranks first. Time: n gradients of the
    whole batch; memory: n gradients, and eight backward passes.

    Examples
    --------
    >>> x, y = jnp.array([[3.0, 0.0], [0.0, 1.0]]), jnp.array([0, 1])
    >>> round(float(te_nas(None, lambda w, x: x @ w, jnp.ones((2, 2)), (x, y))), 3)
    9.0
    """
    apply, params, x, _ = check_score_arguments(apply, params, batch)
    weights, rebuild = split_weights(apply, params, x, "scale")
    _, pull_back = jax.vjp(lambda w: jnp.sum(apply(rebuild(w), x), axis=1), weights)
    units = jnp.eye(len(x), dtype=logits_like(apply, params, x).dtype)
    # Eight rows at a time share the recomputation of the backward pass.
    rows = for_each(lambda unit: ravel_pytree(pull_back(unit))[0], units, batch_size=8)
    return _condition(eigenvalues.eigenvalues(gram_of_rows(rows / power_of_two_scale(rows))))


@_kernel_score("entropy of K's eigenvalues, which add to 1")
def spectral_entropy(key: chex.PRNGKey, apply: Apply, params: Pytree, batch: Batch) -> jax.Array:
    """Return ``-sum_i p_i log p_i`` of ``p = lambda / tr K``: the entropy of K's spectrum.

    At most ``log n``; 0 for a kernel of rank one or 0.

    Examples
    --------
    >>> x, y = jnp.array([[1.0, 0.0], [0.0, 1.0]]), jnp.array([0, 1])
    >>> spectral_entropy(None, lambda w, x: x @ w, jnp.ones((2, 2)), (x, y))  # log 2
    Array(0.6931, dtype=float...)
    """
    return kernel_scores(key, apply, params, batch)["spectral_entropy"]


@_kernel_score("``-y'K^-1 y`` of the centred one-hot labels")
def label_energy(key: chex.PRNGKey, apply: Apply, params: Pytree, batch: Batch) -> jax.Array:
    """Return ``-sum_c y_c' K^-1 y_c`` over the centred indicators y_c of the classes.

    It is minus the squared norm of the smallest function that fits the labels. This norm bounds the
    excess risk (:func:`ntk.excess_risk_term`). The value is ``-inf`` if K is singular to rounding.

    Examples
    --------
    >>> x, y = jnp.array([[3.0, 0.0], [0.0, 1.0]]), jnp.array([0, 1])
    >>> # two classes, indicators +-1/2: -2 (1/18 + 1/2) / 4
    >>> round(float(label_energy(None, lambda w, x: x @ w, jnp.ones((2, 2)), (x, y))), 4)
    -0.2778
    """
    return kernel_scores(key, apply, params, batch)["label_energy"]


@_kernel_score("``sum_l log tr K_l / n``, layer by layer")
def log_traces(key: chex.PRNGKey, apply: Apply, params: Pytree, batch: Batch) -> jax.Array:
    """Return ``sum_l log(tr K_l / n)`` over the layers with a nonzero gradient.

    Examples
    --------
    >>> x, y = jnp.array([[3.0, 0.0], [0.0, 1.0]]), jnp.array([0, 1])
    >>> log_traces(None, lambda w, x: x @ w, jnp.ones((2, 2)), (x, y))  # log 10
    Array(2.3026, dtype=float...)
    """
    return kernel_scores(key, apply, params, batch)["log_traces"]


def _sample_gradient(apply: Apply) -> Callable[[Pytree, jax.Array], Pytree]:
    """Return the gradient of one sample's summed logits, as a function of params and sample."""
    return jax.grad(lambda p, xi: jnp.sum(apply(p, xi[None])))


def _sample_gradients(apply: Apply, params: Pytree, x: jax.Array) -> list[jax.Array]:
    """Return for each leaf [n, size]: the gradient of each sample's summed logits."""
    gradient = _sample_gradient(apply)
    gradients = for_each(lambda xi: jax.tree.map(jnp.ravel, gradient(params, xi)), x)
    return jax.tree.leaves(gradients)


def _sum_of_grams(gradients: list[jax.Array]) -> jax.Array:
    return functools.reduce(operator.add, map(gram_of_rows, gradients))


def _gradient_scale(gradients: list[jax.Array], axis: int | None = None) -> jax.Array:
    """Return the largest entry of all leaves, or of every row (``axis=1``), as a power of two."""
    return power_of_two_scale(jnp.concatenate(gradients, axis=1), axis=axis)


def _log_trace(g: jax.Array) -> jax.Array:
    """Return ``log |g|^2 / n``, 0 for a gradient of 0; the square itself can overflow."""
    size = overflow_safe_norm(g)
    # A norm is nonnegative; comparing with 0 keeps NaN.
    return jnp.where(size == 0, 0, 2 * jnp.log(jnp.where(size == 0, 1, size)) - math.log(len(g)))


def _min_eigenvalue_of_cosines(K: jax.Array) -> jax.Array:
    norms = jnp.sqrt(jnp.diagonal(K))
    inverse = jnp.where(norms > 0, 1 / jnp.where(norms > 0, norms, 1), 0)
    return jnp.maximum(eigenvalues.eigenvalues(inverse[:, None] * K * inverse[None])[0], 0)


def _condition(values: jax.Array) -> jax.Array:
    """Return last by first of ascending eigenvalues; ``inf`` if the first is 0 to rounding."""
    singular = _is_singular(values)
    return jnp.where(singular, jnp.inf, values[-1] / jnp.where(singular, 1, values[0]))


def _is_singular(values: jax.Array) -> jax.Array:
    # NaN compares false, so it stays NaN.
    return values[0] <= len(values) * jnp.finfo(values.dtype).eps * values[-1]


def _entropy_of_spectrum(values: jax.Array) -> jax.Array:
    values = jnp.maximum(values, 0)
    total = jnp.sum(values)
    shares = values / jnp.where(total > 0, total, 1)
    # jax.scipy.special.entr computes an infinity, and jax_debug_infs would raise.
    return -jnp.sum(shares * jnp.log(jnp.where(shares > 0, shares, 1)))


def _label_energy_of_matrix(
    K: jax.Array, values: jax.Array, y: jax.Array, classes: int
) -> jax.Array:
    targets = jax.nn.one_hot(y, classes, dtype=K.dtype)
    targets = nan_unless(((y >= 0) & (y < classes)).all(), targets)
    targets -= targets.mean(axis=0, keepdims=True)
    targets = targets.reshape(len(K), -1)  # one column if K is of pairs (input, output)
    singular = _is_singular(values)
    safe = jnp.where(singular, jnp.eye(len(K), dtype=K.dtype), K)
    whitened = jax.scipy.linalg.solve_triangular(jnp.linalg.cholesky(safe), targets, lower=True)
    return jnp.where(singular, -jnp.inf, -jnp.sum(whitened**2))
