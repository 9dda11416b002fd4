"""Theorems 2 and 3 of Oymak et al. 2021: the risk after selection of a kernel, by y'K^-1 y.

Interpolation with the kernel K_alpha has at most the risk of all predictors of the same norm.
Selection on validation data attains the smallest of these bounds, up to a rate in h / n_V:

    L(f_selected) <= min_alpha 2 Gamma R sqrt(B y'K_alpha^-1 y / n_T) + C sqrt(.. / n_V) + delta

The minimum over a few kernels of Delta is never below the minimum over Delta, so the bound holds.
:mod:`bilevel.theory.bounds.oymak` has the symbols and the reference (sections 4.1 and 4.2 there).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp

from bilevel.internal.checks import count, nonnegative, positives, real_array, real_number
from bilevel.theory.bounds._terms import UNIT_LOSS, confidence, end_to_end, log_product
from ntk.bounds import Bound
from ntk.bounds.bound import holds
from ntk.expectations.activations import Activation, erf, gelu, sigmoid, swish, tanh
from ntk.kernels.symmetric import symmetric_matrix
from ntk.regression.kernel_regression import excess_risk_term


def oymak_theorem2(
    K: chex.Array,
    y: chex.Array,
    n_valid: Any,
    *,
    h: int,
    B: Any,
    lambda0: Any,
    R: Any = 1.0,
    Gamma: Any = 1.0,
    tau: float = 3.0,
    p0: float = 0.0,
    delta: Any = 0.0,
    C: Any,
) -> Bound:
    """Bound the risk of the feature map selected for ridgeless regression: Theorem 2, corrected.

        L(f_selected) <= min_alpha 2 Gamma R sqrt(B y'K_alpha^-1 y / n_T)
                         + C sqrt((h log M + tau) / n_V) + delta
        M = 30 R^4 B^2 lambda_0^-2 Gamma (n_T + n_V) |y|^2,    at least 1

    R is missing in the paper, :func:`oymak_theorem2_as_printed`. For labels +-1 the first term is
    at least ``2 Gamma R sqrt(B / lambda_max(K_alpha))``. For a loss in [0, 1] it needs a kernel
    that makes many rows alike: ``lambda_max(K_alpha) > 4 R^2 B``.

    Parameters
    ----------
    K : array [..., n_T, n_T]
        ``Phi_alpha Phi_alpha'`` for one alpha or several of Delta.
    y : array [n_T]
    n_valid, h : scalar, int
        n_V; the number of feature maps.
    B, lambda0, R, Gamma : scalar
        lambda0 holds on all of Delta; :func:`ntk.certify_simplex` finds a lower bound.
    tau, p0 : float
        tau is above log 4; p0 is the probability that lambda0 fails. The bound holds with
        probability ``1 - 4 exp(-tau) - p0``.
    delta, C : scalar

    Raises
    ------
    ValueError
        If K is not square and finite, y does not fit, or a number is out of range.

    Examples
    --------
    >>> K, y = jnp.ones((64, 64)) + 0.1 * jnp.eye(64), jnp.ones(64)
    >>> bound = oymak_theorem2(K, y, 64, h=2, B=1.1, lambda0=0.1, C=1.0)
    >>> round(float(bound.terms["training"]), 4), round(float(bound.terms["validation"]), 4)
    (0.262, 0.7646)
    """
    chance = confidence("tau", tau, events=4)
    if not 0 <= real_number("p0", p0) < chance:
        raise ValueError(f"p0: expected a number in [0, 1 - 4 exp(-tau)), got {p0}.")
    count("h", h)
    n_valid, B, lambda0, R, Gamma, C = positives(
        n_valid=n_valid, B=B, lambda0=lambda0, R=R, Gamma=Gamma, C=C
    )
    family, y = _family(K, y)
    energy, definite = _energy(family, y)
    log_M = log_product((30.0, 1), (R, 4), (B, 2), (lambda0, -2), (Gamma, 1))
    log_M += log_product((len(y) + n_valid, 1), (y @ y, 1))
    dimension = h * jnp.maximum(log_M, 0.0)
    return end_to_end(
        {
            "training": 2 * Gamma * R * jnp.sqrt(B) * energy,
            "validation": C * jnp.sqrt((dimension + tau) / n_valid),
        },
        delta,
        assumptions=(
            ("K_alpha is positive definite for the alphas given", definite),
            ("K_alpha >= lambda_0 I on all of Delta", None),
            ("features have p >= n_T", None),
            ("n_T >= n_V", holds(len(y) >= n_valid)),
            ("n_V >= h log M", holds(n_valid >= dimension)),
            UNIT_LOSS,
        ),
        unspecified=("C, supplied", "constant of n_V >= O(h log M), taken as 1"),
        probability=chance - p0,
    )


def oymak_theorem2_as_printed(
    K: chex.Array, y: chex.Array, n_valid: Any, *, R: Any = 1.0, **options: Any
) -> Bound:
    """Return Theorem 2 as printed: without R in the first term, false for R > 1.

        L(f_selected) <= min_alpha 2 Gamma sqrt(B y'K_alpha^-1 y / n_T) + the rest

    B bounds single feature maps, and phi_alpha can be R times as long. With one map, Delta = {s},
    the predictor does not depend on s, and K is proportional to s^2. For random labels the first
    term is then 2.1 / s, which is arbitrarily small. ``assumptions`` reports whether R <= 1.

    Parameters
    ----------
    K, y, n_valid, R, **options
        See :func:`oymak_theorem2`.

    Raises
    ------
    ValueError
        If K is not square and finite, y does not fit, or a number is out of range.

    Examples
    --------
    >>> K, y = 100**2 * jnp.eye(8), jnp.ones(8)  # s = 100
    >>> options = {"h": 1, "B": 1.0, "R": 100.0, "lambda0": 1e4, "C": 1.0}
    >>> bounds = [f(K, y, 8, **options) for f in (oymak_theorem2_as_printed, oymak_theorem2)]
    >>> [round(float(bound.terms["training"]), 4) for bound in bounds]
    [0.02, 2.0]
    """
    bound = oymak_theorem2(K, y, n_valid, R=R, **options)
    terms = bound.terms | {"training": bound.terms["training"] / R}
    value = sum(terms.values(), jnp.zeros(()))
    needs = (*bound.assumptions, ("R <= 1", holds(R <= 1)))
    return dataclasses.replace(
        bound, value=value, terms=terms, vacuous=~(value < 1), assumptions=needs
    )


def oymak_theorem3(
    K: chex.Array,
    y: chex.Array,
    n_valid: Any,
    *,
    h: int,
    B: Any,
    activations: Sequence[Activation] | None = None,
    t: float = 3.0,
    epsilon: Any = 0.0,
    delta: Any = 0.0,
    C: Any,
) -> Bound:
    """Bound the 0-1 error of the activation selected for a wide network with one hidden layer.

        L_01(f_selected) <= min_alpha 2 B sqrt(y'K_bar_alpha^-1 y / n_T)
                            + C sqrt((h + t) / n_V) + epsilon + delta

    This is Theorem 3, with probability ``1 - 4 (exp(-t) + n_T^-3 + exp(-10 h))``. The first term is
    explicit, the second a rate.

    Parameters
    ----------
    K : array [..., n_T, n_T]
        K_bar = K_alpha / c_0 for one alpha or several, such as :func:`ntk.mixture_kernel`'s.
    y : array [n_T]
        Labels, +-1.
    n_valid, h, B : scalar, int, scalar
        n_V; the number of activations; a bound of their |sigma'| and |sigma''|.
    activations : sequence of Activation, optional
        Activations of :mod:`ntk`, to check that sigma'' exists. For other functions only the kinks
        are checked.
    t, epsilon, delta, C : scalar
        epsilon is the additional error for finite width and training time. C contains the
        logarithms in O~(h).

    Raises
    ------
    ValueError
        If K is not square and finite, y does not fit, or a number is out of range.

    Notes
    -----
    The paper does not mention three limits. First, its Delta, any subset of the unit l1 ball, must
    not come near 0, because ``K_(s alpha) = s^2 K_alpha``. On the simplex, the smallest eigenvalue
    need not be at a vertex. Second, sigma'' is unbounded for ReLU (used in Figure 2) and LeakyReLU.
    Third, f_0 at initialisation has the variance ``c_0 Var sigma_alpha(g)``, not 0.

    Examples
    --------
    >>> from ntk import relu, tanh
    >>> K, y = jnp.ones((64, 64)) + 0.1 * jnp.eye(64), jnp.ones(64)
    >>> bound = oymak_theorem3(K, y, 1000, h=2, B=1.0, activations=[relu, tanh], t=5.0, C=1.0)
    >>> round(float(bound.terms["training"]), 4)
    0.2498
    >>> [name for name, held in bound.assumptions if held is False]
    ["|sigma'| and |sigma''| are bounded"]
    """
    t, n_valid, B, C = positives(t=t, n_valid=n_valid, B=B, C=C)
    count("h", h)
    family, y = _family(K, y)
    if len(y) == 1:  # n_T^-3 = 1 leaves a probability of 0
        raise ValueError("K: expected more than one row, of which the theorem says nothing, got 1.")
    fails = math.exp(-t) + len(y) ** -3 + math.exp(-10 * h)
    if not 4 * fails < 1:
        raise ValueError(
            "t: expected a number that leaves a positive probability for n_T = "
            f"{len(y)} rows and h = {h}, got {t}."
        )
    energy, definite = _energy(family, y)
    bounded = [None] if activations is None else [_has_bounded_derivatives(s) for s in activations]
    smooth = False if False in bounded else None if None in bounded else True
    terms = {"training": 2 * B * energy, "validation": C * jnp.sqrt((h + t) / n_valid)}
    return end_to_end(
        terms | {"width and time": nonnegative("epsilon", epsilon)},
        delta,
        claim="L_01(f_selected) <= value",
        assumptions=(
            ("labels are +-1", holds(jnp.all(jnp.abs(y) == 1))),
            ("K_alpha is positive definite for the alphas given", definite),
            ("K_alpha >= lambda_0 I on all of Delta, in the unit l1 ball", None),
            ("|sigma'| and |sigma''| are bounded", smooth),
            ("inputs of norm 1; hinge loss for validation", None),
            ("n_V >= O~(h)", None),
        ),
        unspecified=(
            "C, supplied: with the logarithms of O~(h)",
            "width k: a polynomial in n_T, 1 / lambda_0 and 1 / epsilon",
            "c_0, step size and number of steps",
        ),
        probability=1 - 4 * fails,
    )


def _family(K: Any, y: Any) -> tuple[jax.Array, jax.Array]:
    """Return the kernels as [m, n, n] and the labels [n], checked."""
    K = symmetric_matrix(K, stack=True)
    y = real_array("y", y).astype(K.dtype)
    if y.shape != K.shape[-1:]:
        raise ValueError(f"y: expected shape [{K.shape[-1]}] as K has rows, got {y.shape}.")
    return K.reshape(-1, *K.shape[-2:]), y


def _energy(family: jax.Array, y: jax.Array) -> tuple[jax.Array, bool | None]:
    """Return ``min sqrt(y'K^-1 y / n)`` of the family, and whether every K is positive definite."""
    energies = jax.vmap(excess_risk_term, (0, None))(family, y).normalized
    definite = jnp.isfinite(energies)
    # A kernel without an inverse gives no bound (infinity); a NaN in it stays NaN.
    known = jnp.isfinite(family).all((1, 2))
    energies = jnp.where(definite, energies, jnp.where(known, jnp.inf, jnp.nan))
    return jnp.min(energies), holds(definite.all())


def _has_bounded_derivatives(s: Activation) -> bool | None:
    """Return whether the first two derivatives are bounded; None if this is unknown."""
    if any(any(sizes[:2]) for _, sizes in s.kinks):
        return False
    if s.smooth is None:
        return s.degree == 1 and s.kink[0] == s.kink[1]
    return True if s in (sigmoid, tanh, swish, gelu, erf) else None
