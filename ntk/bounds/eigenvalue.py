"""Bounds of a neural tangent kernel's smallest eigenvalue that hold, without open constants.

:mod:`ntk.infinite` has the recursion of S and D. ``B_{L-1} = c_L 1 1'`` and ``B_{l-1} = (c_l D_l +
a_{l-1}^2) o B_l``, o entry by entry. The lower bounds use Schur (1911): ``lambda_min(A o B) >=
lambda_min(A) min_i B_ii`` for positive semidefinite A and B.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp

from ntk.bounds.bound import Bound, Mixture, holds, lower_bound, upper_bound
from ntk.expectations.hermite import coefficients
from ntk.infinite.layer_expansions import (
    RESOLUTIONS,
    TRACED,
    check_input_pair,
    check_resolved,
    duals_of_rows,
    is_resolved,
    parse_architecture,
    propagate_features,
)
from ntk.internal.checks import concrete, integer
from ntk.kernels.symmetric import square_matrix, symmetric_matrix
from ntk.spectrum.eigenvalues import min_eigenvalue


def diagonal_upper_bound(K: chex.Array) -> Bound:
    """Return ``lambda_min(K) <= min_i K_ii <= tr K / N``, for every symmetric K.

    The value is ``min_i K_ii``; ``terms`` also has ``tr K / N``. Eigen-NAS (Zhu et al. 2022,
    section 5.2) divides the trace by the input dimension instead: :func:`eigen_nas_as_printed`.

    Parameters
    ----------
    K : array [N, N], or [n, n, o, o] of o outputs: the matrix [n o, n o]

    Raises
    ------
    ValueError
        If K is not a finite symmetric matrix.

    Examples
    --------
    >>> bound = diagonal_upper_bound(jnp.diag(jnp.array([1.0, 3.0])))
    >>> bound.value, bound.terms["tr K / N"]
    (Array(1., dtype=float...), Array(2., dtype=float...))
    """
    diagonal = jnp.diag(symmetric_matrix(square_matrix(K)))
    terms = {"smallest diagonal entry": diagonal.min(), "tr K / N": diagonal.mean()}
    return upper_bound(diagonal.min(), terms)


def frobenius_upper_bound(K: chex.Array) -> Bound:
    """Return ``lambda_min(K) <= |K|_F / sqrt(N)``, the quantity of KNAS with its constant.

    The value is at least ``tr K / N``, by the Cauchy-Schwarz inequality. Source: Xu et al. (2021).

    Parameters
    ----------
    K : array [N, N], or [n, n, o, o] of o outputs: the matrix [n o, n o]

    Raises
    ------
    ValueError
        If K is not a finite symmetric matrix.

    Examples
    --------
    >>> frobenius_upper_bound(jnp.eye(4)).value
    Array(1., dtype=float...)
    """
    K = symmetric_matrix(square_matrix(K))
    norm = jnp.linalg.norm(K)
    terms = {"|K|_F": norm, "tr K / N": jnp.trace(K) / len(K)}
    return upper_bound(norm / math.sqrt(len(K)), terms)


def schur_lower_bound(
    x: chex.Array,
    *,
    activations: Sequence[Mixture],
    skips: Sequence[Any] | chex.Array | None = None,
    variances: Sequence[Any] | chex.Array | None = None,
) -> Bound:
    """Return a lower bound of lambda_min of the NTK from the kernels of single layers.

        lambda_min(NTK) >= c_L lambda_min(S_{L-1})
                           + sum_l max{ lambda_min(c_l S_{l-1}) min_i (D_l o B_l)_ii,
                                        lambda_min(c_l S_{l-1} o D_l) min_i (B_l)_ii }

    ``terms`` has the contributions of the output layer ("layer L") and of each hidden layer.

    Parameters
    ----------
    x : array [N, d]
    activations, skips, variances
        L - 1 activations, L - 2 skips and L variances of :func:`ntk.network_kernel`.

    Raises
    ------
    ValueError
        If ``x`` or the architecture does not fit :func:`ntk.network_kernel`.
    FloatingPointError
        If the kernel cannot be resolved.

    Notes
    -----
    Weyl's inequality over the layers' parts of the kernel, then Schur's for each. True up to
    rounding, not certified: values up to ``(8 L + N) eps`` times the kernel's diagonal (with kinks,
    ``sqrt(eps)`` times) count as vacuous. Time: 3 L eigenvalue problems of size N, and one kernel.
    Memory: 2 L matrices [N, N].

    Examples
    --------
    >>> from ntk.expectations.activations import relu
    >>> bound = jax.jit(lambda x: schur_lower_bound(x, activations=[relu]).value)
    >>> bound(jnp.eye(3)).round(2)  # the smallest eigenvalue is the same here: 2 - 1 / pi
    Array(1.68, dtype=float...)
    """
    x, _ = check_input_pair("x", x)
    layers, weights, skips, variances = parse_architecture(activations, skips, variances, x.dtype)
    features, slopes = _layer_kernels(x, layers, weights, skips, variances)
    depth = len(variances)
    terms = {f"layer {depth}": variances[-1] * min_eigenvalue(features[-1])}
    above = jnp.full_like(features[0], variances[-1])  # B_l
    diagonal = variances[-1] * jnp.diag(features[-1])  # of the NTK
    for i in reversed(range(depth - 1)):  # layer i + 1
        forward, slope = variances[i] * features[i], slopes[i]
        apart = min_eigenvalue(forward) * jnp.diag(slope * above).min()
        together = min_eigenvalue(forward * slope) * jnp.diag(above).min()
        terms[f"layer {i + 1}"] = jnp.maximum(apart, together)
        diagonal += jnp.diag(forward * slope * above)
        if i:
            above = (variances[i] * slope + skips[i - 1] ** 2) * above
    # With a kink, the error of a kernel entry near correlation 1 is the root of the roundoff.
    kinked = any(s.smooth is None or s.kinks for layer in layers for s in layer)
    eps = jnp.finfo(x.dtype).eps
    noise = (eps**0.5 if kinked else (8 * depth + len(x)) * eps) * diagonal.max()
    return lower_bound(jnp.stack(list(terms.values())).sum(), terms, noise)


def hermite_lower_bound(
    x: chex.Array,
    *,
    activations: Sequence[Mixture],
    skips: Sequence[Any] | chex.Array | None = None,
    variances: Sequence[Any] | chex.Array | None = None,
    terms: int = 16,
) -> Bound:
    """Return a lower bound from the data's correlations alone: a corrected Theorem 1 of Zhu et al.

    For inputs of equal norm, with rho their correlations, a_k the Hermite coefficients of the first
    activation, y the variance of its argument and K = ``terms``:

        lambda_min(NTK) >= B_1 [ sum_{0<k<K} q_k lambda_min(rho^{ok})
                        + (E s^2 + y E s'^2 - sum_{k<K} q_k) lambda_min(rho^{oK}) ]
        q_k = a_k^2 + y b_{k-1}^2, b of the slope: (k + 1) a_k^2 if s is continuous
        B_1 = c_L prod_{1<l<L} (c_l E s_l'(u_l)^2 + a_{l-1}^2)

    ``Bound.terms`` has the factor B_1, the sum, and the remainder for k >= K.

    Parameters
    ----------
    x : array [N, d]
        Rows of equal norm, not 0.
    activations, skips, variances
        L - 1 activations, L - 2 skips and L variances of :func:`ntk.network_kernel`.
    terms : int
        Even. The value grows with ``terms``.

    Raises
    ------
    ValueError
        If an argument does not fit :func:`ntk.network_kernel`, norms are unequal (unless traced),
        or ``terms`` is odd.

    Notes
    -----
    With ``C_l = Cov s_l + a^2 C_{l-1}``, at most S_l, the layers' parts telescope to at least
    ``C_1 o B_1``, and the first layer adds ``c_1 S_0 o D_1 o B_1``. Both are power series in rho,
    and lambda_min(rho^{ok}) grows with k (Schur). Time: ``terms`` eigenvalue problems of size N.
    Zhu et al. 2022, Theorem 1, has k = 1 only, and replaces lambda_min(rho) by N / d, which belongs
    to the d x d matrix X'X: :func:`zhu_theorem1_as_printed`.

    Examples
    --------
    >>> from ntk.expectations.activations import relu
    >>> x = jnp.array([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]])  # more inputs than dimensions
    >>> bound = jax.jit(lambda x: hermite_lower_bound(x, activations=[relu, relu]).value)
    >>> bool(bound(x) > 0.1)
    True
    """
    x, _ = check_input_pair("x", x)
    layers, weights, skips, variances = parse_architecture(activations, skips, variances, x.dtype)
    squares = (x * x).sum(1)
    rounding = (16 + math.sqrt(x.shape[1])) * jnp.finfo(x.dtype).eps  # of normalised rows
    equal = holds(jnp.ptp(squares) <= rounding * squares.min())
    if equal is False or holds(squares.min() > 0) is False:
        got = f"squares from {squares.min()} to {squares.max()}"
        raise ValueError(f"x: expected rows of equal norm, not 0, got {got}.")
    if integer("terms", terms, 2) % 2:
        raise ValueError(f"terms: expected an even number, got {terms}.")
    how = TRACED._replace(terms=max(terms, TRACED.terms))
    features = propagate_features(layers, weights, skips, variances, squares[:1], how)
    first, above = features[0], variances[-1]
    for c, a, one in zip(variances[1:-1], skips, features[1:], strict=True):
        above = above * (c * one.slope.norm[0] ** 2 + a**2)
    a, b = coefficients(first.value, 1, terms)[0], coefficients(first.slope, 0, terms)[0]
    # We do not use (k + 1) a_k^2, because the kernel's slope omits the point mass at a jump.
    parts = a**2 + first.scale[0] ** 2 * jnp.pad(b[:-1], (1, 0)) ** 2
    slope = first.slope.norm[0] ** 2
    tail_sum = jnp.maximum(first.second[0] + first.scale[0] ** 2 * slope - parts.sum(), 0)
    rho = jnp.where(jnp.eye(len(x), dtype=bool), 1, x @ x.T / squares[0])
    powers = itertools.accumulate([rho] * terms, jnp.multiply)
    smallest = jnp.stack([min_eigenvalue(power) for power in powers])
    series, tail = parts[1:] @ smallest[:-1], tail_sum * smallest[-1]
    named = {"B_1": above, f"k < {terms}": series, f"k >= {terms}": tail}
    noise = len(x) * jnp.finfo(x.dtype).eps * above * (parts.sum() + tail_sum)
    needs = (("inputs have equal norms", equal),)
    return lower_bound(above * (series + tail), named, noise, assumptions=needs)


def _layer_kernels(x, layers, weights, skips, variances):
    """Return ``[S_0, ..., S_{L-1}]`` and ``[D_1, ..., D_{L-1}]``, each [N, N]."""
    squares = (x * x).sum(1)
    traced = not concrete(x, weights, skips, variances)
    for how in (TRACED,) if traced else RESOLUTIONS:
        features = propagate_features(layers, weights, skips, variances, squares, how)
        kernels = _recursion(x, features, skips, variances)
        if not concrete(kernels):
            return kernels
        if is_resolved([f for one in features for f in (one.value, one.slope)]):
            break
    check_resolved("x", kernels[0][-1] + kernels[1][-1])
    return kernels


@jax.jit
def _recursion(x, layers, skips, variances):
    same = jnp.eye(len(x), dtype=bool)
    second_moments, slopes = [jnp.where(same, (x * x).sum(1), x @ x.T)], []
    for i, one in enumerate(layers):
        below, scale = second_moments[-1], one.scale
        size = scale[:, None] * scale[None]
        rho = variances[i] * below / jnp.where(size > 0, size, 1)
        value, slope = duals_of_rows((one.value, one.slope), rho, float(jnp.finfo(rho.dtype).eps))
        a = skips[i - 1] if i else 0.0
        cross = one.value.mean[:, None] * one.below[None]
        second = value + a * (cross + cross.T) + a**2 * below
        second_moments.append(jnp.where(same, one.second[:, None], second))
        slopes.append(slope)
    return second_moments, slopes
