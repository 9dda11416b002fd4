"""The theorems of Oymak et al. 2021, corrected or as printed, with their open constants.

Each theorem hides an absolute constant: the caller supplies ``C``, and ``Bound.unspecified`` lists
its parts. :mod:`bilevel.theory.bounds.convergence` has bounds without open constants.

    n_T, n_V          rows for training, for validation
    h, h_eff, C_bar   dimension of alpha; :func:`effective_dimension` of Delta and its radius
    L, Gamma          Lipschitz constants of ``alpha -> f_alpha`` (sup norm) and of the loss
    B, R, lambda_0    ``|phi_i(x)|^2 <= B``, ``|alpha|_1 <= R``, ``Phi Phi' + lambda I >= lambda_0``
    tau, t            each event fails with probability ``exp(-tau)``
    delta             the validation risk is within delta of its minimum

Reference: Oymak, Li & Soltanolkotabi (2021), "Generalization Guarantees for Neural Architecture
Search with Train-Validation Split".
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bilevel.internal.checks import concrete, count, nonnegative, positives
from bilevel.theory.bounds._terms import (
    UNIT_LOSS,
    broadcast_nonnegative,
    confidence,
    end_to_end,
    log_product,
)
from ntk.bounds import Bound
from ntk.bounds.bound import holds


class FeatureMapLipschitz(NamedTuple):
    """Result of :func:`feature_map_lipschitz`."""

    alpha: jax.Array  # [], for alpha in l2 norm, at fixed lambda
    penalty: jax.Array  # [], for lambda, at fixed alpha

    @property
    def joint(self) -> jax.Array:
        """For (alpha, lambda) in l2 norm."""
        return jnp.hypot(self.alpha, self.penalty)


class OymakTheorem1(NamedTuple):
    """Result of :func:`oymak_theorem1`."""

    risk: Bound  # Eq. (2)
    selection: Bound  # Eq. (3)
    hypergradient: Bound  # Eq. (4)


class OymakTheorem4(NamedTuple):
    """Result of :func:`oymak_theorem4_as_printed`."""

    correlation: Bound  # Eq. (11), from below
    risk: Bound  # Eq. (12), from above


def oymak_h_bar(n_valid: Any, *, h_eff: Any, C_bar: Any, L: Any, Gamma: Any = 1.0) -> jax.Array:
    """Return Theorem 1's ``h_bar = h_eff log(C_bar L Gamma n_V / h_eff)``; 0 if this is negative.

    It is log N(eps) at ``eps = h_eff / (L Gamma n_V)``; this eps must be at most C_bar. All
    arguments are scalars.

    Raises
    ------
    ValueError
        If a number is not positive.

    Examples
    --------
    >>> oymak_h_bar(1000, h_eff=10, C_bar=3.0, L=100.0).round(2)
    Array(103.09, dtype=float...)
    """
    n_valid, h_eff, C_bar, L, Gamma = positives(
        n_valid=n_valid, h_eff=h_eff, C_bar=C_bar, L=L, Gamma=Gamma
    )
    inside = log_product((C_bar, 1), (L, 1), (Gamma, 1), (n_valid, 1), (h_eff, -1))
    return h_eff * jnp.maximum(inside, 0.0)


def oymak_theorem1(
    n_valid: Any, h_bar: Any, *, h: int, tau: float = 3.0, delta: Any = 0.0, C: Any
) -> OymakTheorem1:
    """Return Theorem 1: the validation risk and its hypergradient are near the expected ones.

        sup_alpha |L(f_alpha) - L_V(f_alpha)| <= sqrt(C (h_bar + tau) / n_V)                    (2)
        L(f_selected) <= min_alpha L(f_alpha) + 2 sqrt(C (h_bar + tau) / n_V) + delta           (3)
        sup_alpha |grad L_V - grad L|_2 <= sqrt(C (h + h_bar + tau) / n_V)                      (4)

    These are rates: C contains the sub-exponential norm of the loss.

    Parameters
    ----------
    n_valid, h_bar, h : scalar, scalar, int
        n_V; from :func:`oymak_h_bar` or :func:`oymak_lemma1`; the dimension of alpha.
    tau : float
        Above log 2: each of (2) with (3), and (4), holds with probability ``1 - 2 exp(-tau)``.
    delta, C : scalar
        C is the theorem's constant, without a default.

    Raises
    ------
    ValueError
        If a number is out of range.

    Examples
    --------
    >>> h_bar = oymak_h_bar(1000, h_eff=10, C_bar=3.0, L=100.0)
    >>> bounds = oymak_theorem1(1000, h_bar, h=10, C=1.0)
    >>> [round(float(bound.value), 4) for bound in bounds]
    [0.3257, 0.6514, 0.3407]
    """
    chance = confidence("tau", tau, events=2)
    n_valid, C = positives(n_valid=n_valid, C=C)
    count("h", h)
    h_bar, delta = nonnegative("h_bar", h_bar), nonnegative("delta", delta)
    gap, gradient = (jnp.sqrt(C * (d + tau) / n_valid) for d in (h_bar, h + h_bar))
    setting = (
        ("alpha -> f_alpha is L-Lipschitz in the sup norm", None),
        ("the loss is Gamma-Lipschitz, with sub-exponential noise", None),
        UNIT_LOSS,
    )
    enough = ("n_V >= h_bar + tau", holds(n_valid >= h_bar + tau))
    smooth = ("the gradients of f_alpha and of the loss are so too", None)
    most = ("n_V >= h + h_bar + tau", holds(n_valid >= h + h_bar + tau))

    def bound(claim, value, *assumptions, **terms):
        return Bound(
            claim,
            value,
            {"h_bar": h_bar} | terms,
            vacuous=~(value < 1),
            assumptions=setting + assumptions,
            unspecified=("C, supplied: with the sub-exponential norm",),
            probability=chance,
        )

    claim = "L(f_selected) - min L(f_alpha) <= value"
    return OymakTheorem1(
        bound("sup |L(f_alpha) - L_V(f_alpha)| <= value", gap, enough),
        bound(claim, 2 * gap + delta, enough, gap=gap, delta=delta),
        bound("sup |grad L_V - grad L|_2 <= value", gradient, most, smooth),
    )


def oymak_proposition1(
    n_train: Any,
    n_valid: Any,
    *,
    risk: Any,
    complexity: Any,
    h_eff: Any,
    t: float = 4.0,
    delta: Any = 0.0,
    C: Any,
) -> Bound:
    """Return Proposition 1: a rate, with the risk that training guarantees for the best alpha.

        L(f_selected) <= min_alpha (L(f_alpha^D) + C_alpha / sqrt(n_T))
                         + sqrt(C (h_eff + t) / n_V) + delta

    Eq. (5) assumes ``L(f_alpha) <= L(f_alpha^D) + (C_alpha + C_0 sqrt(t)) / sqrt(n_T)`` for one
    alpha, with ``t + h_eff`` for all of them. The result drops the second part. O~(1 / sqrt(n_V))
    contains it for ``n_V <= O(n_T)`` only; we assume this, the paper does not.

    Parameters
    ----------
    n_train, n_valid : scalar
    risk, complexity : array_like [...]
        ``L(f_alpha^D)``, the risk after training on the distribution, and ``C_alpha`` of the
        trained class, for the same alphas.
    h_eff : scalar
    t : float
        Above log 3; the probability is ``1 - 3 exp(-t)``.
    delta, C : scalar
        C stands for the constants and logarithms in O~: of the Lipschitz constants, n_T and n_V.

    Raises
    ------
    ValueError
        If a number is out of range, or shapes do not broadcast.

    Examples
    --------
    >>> bound = oymak_proposition1(
    ...     10_000, 1000, risk=[0.1, 0.05], complexity=[1.0, 10.0], h_eff=6, C=1.0
    ... )
    >>> round(float(bound.terms["best alpha"]), 4), round(float(bound.value), 4)
    (0.11, 0.21)
    """
    chance = confidence("t", t, events=3)
    n_train, n_valid, h_eff, C = positives(n_train=n_train, n_valid=n_valid, h_eff=h_eff, C=C)
    risk, complexity = broadcast_nonnegative(risk=risk, complexity=complexity)
    best = jnp.min(risk + complexity / jnp.sqrt(n_train))
    return end_to_end(
        {"best alpha": best, "validation": jnp.sqrt(C * (h_eff + t) / n_valid)},
        delta,
        assumptions=(
            ("Eq. (5) holds for every alpha", None),
            ("f_alpha, f_alpha^D and C_alpha are Lipschitz in alpha", None),
            ("n_V <= n_T", holds(n_valid <= n_train)),
        ),
        unspecified=("C, supplied: constants and logarithms of O~",),
        probability=chance,
    )


def oymak_lemma1(n_train: Any, *, h: int, B: Any, lambda0: Any, R: Any = 1.0) -> jax.Array:
    """Return Lemma 1: h_bar of Theorem 1 for the selection of a feature map and its ridge penalty.

        h_bar = (h + 1) log(20 R^3 B n_T^2 lambda_0^-2 (B n_T + 1)),    and 0 where that is negative

    For labels in [-1, 1], a convex set and a bounded, 1-Lipschitz loss. Pass the value to
    :func:`oymak_theorem1`. :func:`feature_map_lipschitz` has the explicit constant.

    Parameters
    ----------
    n_train, h : scalar, int
        n_T; the number of feature maps.
    B, lambda0, R : scalar
        lambda0: smallest penalty + inf over alpha of the smallest eigenvalue of ``Phi Phi'``.

    Raises
    ------
    ValueError
        If a number is not positive, or R < 1.

    Examples
    --------
    >>> oymak_lemma1(100, h=5, B=1.0, lambda0=0.1).round(2)
    Array(128.56, dtype=float...)
    """
    n_train, B, lambda0, R = positives(n_train=n_train, B=B, lambda0=lambda0, R=R)
    count("h", h)
    if concrete(R) and R < 1:
        raise ValueError(f"R: expected a number of at least 1, got {R}.")
    inside = log_product((20.0, 1), (R, 3), (B, 1), (n_train, 2), (lambda0, -2))
    inside += jnp.logaddexp(0.0, log_product((B, 1), (n_train, 1)))
    return (h + 1) * jnp.maximum(inside, 0.0)


def feature_map_lipschitz(
    n_train: Any, *, h: int, B: Any, y_norm: Any, lambda0: Any, R: Any = 1.0
) -> FeatureMapLipschitz:
    """Return sup-norm Lipschitz constants of ``alpha -> f_alpha`` and ``lambda -> f_alpha``.

    Ridge regression selects feature maps phi_i by alpha (Definition 2, Scenario 1):

        f(x) = theta'phi_alpha(x),    phi_alpha = sum_i alpha_i phi_i,
        theta = argmin |y - Phi theta|^2 + lambda |theta|^2 = Phi'(Phi Phi' + lambda I)^-1 y

        t = |y| min(1 / sqrt(lambda0), R sqrt(n_T B) / lambda0)            bounds |theta|
        L_alpha = sqrt(h B) (t + R |y| sqrt(2 n_T B) / lambda0)
        L_lambda = R sqrt(B) t / lambda0

    The product rule with norms of each factor, as behind Lemma 1 of the paper, gives terms of order
    ``n_T^1.5 / lambda0^2`` instead of ``sqrt(n_T) / lambda0``. For a search over log lambda,
    multiply ``penalty`` by the largest lambda.

    Parameters
    ----------
    n_train, h : scalar, int
        n_T, the number of training rows; the number of feature maps.
    B : scalar
        ``|phi_i(x)|^2 <= B`` for all maps and all x.
    y_norm : scalar
        ``|y|_2``: at most ``sqrt(n_T)`` for labels in [-1, 1].
    lambda0 : scalar
        ``Phi Phi' + lambda I >= lambda0 I`` for all alpha and lambda: the smallest penalty. For
        n_T <= p, add a lower bound of the smallest eigenvalue, e.g. of :func:`ntk.certify_simplex`.
    R : scalar
        ``|alpha|_1 <= R``: 1 on the simplex.

    Raises
    ------
    ValueError
        If a number is not positive.

    Examples
    --------
    >>> L = feature_map_lipschitz(100, h=3, B=1.0, y_norm=10.0, lambda0=0.1)
    >>> round(float(L.alpha), 1)  # the `L` of `uniform_convergence`
    2504.3
    """
    count("h", h)
    n_train, B, y_norm, lambda0, R = positives(
        n_train=n_train, B=B, y_norm=y_norm, lambda0=lambda0, R=R
    )
    features = jnp.sqrt(n_train * B)
    theta = y_norm * jnp.minimum(1 / jnp.sqrt(lambda0), R * features / lambda0)
    moved = math.sqrt(2) * features * y_norm / lambda0
    return FeatureMapLipschitz(
        alpha=jnp.sqrt(h * B) * (theta + R * moved),
        penalty=R * jnp.sqrt(B) * theta / lambda0,
    )


def oymak_lemma2(mu: Any, *, cross: Any = None, smoothness: Any = None) -> jax.Array:
    """Return Lemma 2, corrected: the Lipschitz constant of ``theta_alpha = argmin L(alpha, .)``.

        (a)  cross / mu,  if |grad_theta L(a, .) - grad_theta L(b, .)| <= cross |a - b|
        (b)  sqrt(smoothness / mu),  if L is *jointly* convex, and smooth in alpha

    The example of :func:`oymak_lemma2_as_printed` attains (a), and
    ``(sqrt(mu) theta - sqrt(smoothness) alpha)^2 / 2`` attains (b).

    Parameters
    ----------
    mu : scalar
        L is mu-strongly convex in theta.
    cross, smoothness : scalar, exactly one of them

    Raises
    ------
    ValueError
        If neither or both of ``cross`` and ``smoothness`` are given, or a number is not positive.

    Examples
    --------
    >>> oymak_lemma2(0.25, cross=1.0), oymak_lemma2(0.25, smoothness=1.0)
    (Array(4., dtype=float...), Array(2., dtype=float...))
    """
    if (cross is None) == (smoothness is None):
        raise ValueError(f"cross: expected either it or smoothness, got {cross} and {smoothness}.")
    if cross is None:
        return oymak_lemma2_as_printed(mu, smoothness)  # the same formula
    mu, cross = positives(mu=mu, cross=cross)
    return jnp.asarray(cross / mu)


def oymak_lemma2_as_printed(mu: Any, smoothness: Any) -> jax.Array:
    """Return ``sqrt(smoothness / mu)`` for every L that is mu-strongly convex in theta; false.

    ``L(alpha, theta) = mu theta^2 / 2 - M alpha theta`` is linear in alpha, and ``theta_alpha = (M
    / mu) alpha``. With the smoothness of the cross term M the value is ``sqrt(M / mu)`` instead: 2
    against 4 for M = 1, mu = 1/4. See :func:`oymak_lemma2`. The paper calls the smoothness L_bar.

    Raises
    ------
    ValueError
        If a number is not positive.

    Examples
    --------
    >>> oymak_lemma2_as_printed(0.25, 1.0)
    Array(2., dtype=float...)
    """
    mu, smoothness = positives(mu=mu, smoothness=smoothness)
    return jnp.sqrt(smoothness / mu)


def oymak_theorem4_as_printed(p_over_n: Any, h_over_n: Any, *, c: Any) -> OymakTheorem4:
    """Return Theorem 4: overlap and risk of the two-stage spectral estimator; true, and very loose.

        lim rho^2 >= 1 - 64 p_bar h_bar,                       p_bar h_bar <= 1/6              (11)
        lim risk <= 1 - 1/p_bar + 200 h_bar / (1 - 1/p_bar),   p_bar h_bar <= c                (12)

    (11) is vacuous unless ``p_bar h_bar < 1/64``. The limits are known exactly
    (:func:`bilevel.spectral_limits`): 2 is enough instead of 64, 2.25 instead of 200, and the
    overlap is 0 from ``p_bar h_bar = 1`` on.

    Parameters
    ----------
    p_over_n, h_over_n, c : scalar
        p_bar > 1, h_bar < 1, and the "sufficiently small constant" of (12).

    Raises
    ------
    ValueError
        If a number is not positive.

    Examples
    --------
    >>> bounds = oymak_theorem4_as_printed(2.0, 0.005, c=0.01)
    >>> [round(float(bound.value), 4) for bound in bounds]  # exactly: 0.9851, 0.5224
    [0.36, 2.5]
    """
    p, h, c = map(jnp.asarray, positives(p_over_n=p_over_n, h_over_n=h_over_n, c=c))
    product, known = p * h, 1 - 1 / p
    least, search = 1 - 64 * product, 200 * h / known
    setting = (
        ("p > n", holds(p > 1)),
        ("h < n", holds(h < 1)),
        ("Gaussian features, no noise, alpha* and theta* of norm 1", None),
    )
    return OymakTheorem4(
        Bound(
            "lim rho^2 >= value",
            least,
            {"ph / n^2": product},
            vacuous=~(least > 0),
            assumptions=(*setting, ("ph / n^2 <= 1/6", holds(product <= 1 / 6))),
        ),
        Bound(
            "lim L(alpha, theta) <= value",
            known + search,
            {"risk(alpha*)": known, "estimating alpha*": search},
            vacuous=~(known + search < 1),
            assumptions=(*setting, ("ph / n^2 <= c", holds(product <= c))),
            unspecified=("c, supplied: sufficiently small",),
        ),
    )
