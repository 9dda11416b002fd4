"""Excess risk of the bilevel solution, by the entropy of the version spaces (Khodak et al. 2020).

A configuration c and weights w are selected on validation data V among the minimisers of training
objectives on T, the version spaces H_c(T) = {h_{w,c} : w minimises L_T(., c)}:

    (w, c)  minimises  l_V(w, c)   subject to   h_{w,c} in H_c(T)
    Lambda(epsilon) = log N(union of H_c(T) over c, epsilon),    N: covering number in sup norm

With one minimiser for each of finitely many configurations, ``Lambda = log |C|`` at every epsilon.
The defaults are for this case, ``epsilon = 0``. If several radii are given, the radius of the
smallest bound is taken; radii may depend on T only. Each of three or four events fails with
probability at most delta. Theorem 3.1 omits L, the loss's Lipschitz constant in the prediction.

Reference: Khodak, Li, Roberts, Balcan & Talwalkar (2020), "A Simple Setting for Understanding
Neural Architecture Search with Weight-Sharing".
"""

import dataclasses
import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from bilevel.internal.checks import concrete, nonnegative
from bilevel.theory.bounds._terms import broadcast_nonnegative, check_range, one_positive
from ntk.bounds import Bound
from ntk.bounds.bound import holds

CLAIM = "l_D(w, c) - min l_D <= value"
SETTING = (
    ("loss in [0, B]", None),
    ("V is independent of T", None),
    ("(w, c) minimises l_V over the version spaces", None),
)
TRAINABLE = (("some trained weights of c* have excess risk epsilon*", None),)


def version_entropy(log_covering_numbers: chex.Array) -> jax.Array:
    """Return ``log sum_c N(H_c(T), epsilon)`` [...], at least the version entropy of finite C.

    For one minimiser per configuration every N is 1, and this is log |C|. The paper's
    ``log |C| + max_c log N(H_c(T), epsilon)`` (Definition 3.1, A.2) is never less.

    Parameters
    ----------
    log_covering_numbers : array [..., |C|]
        ``log N(H_c(T), epsilon)`` for each c, in any number of rows (one for each epsilon).

    Raises
    ------
    ValueError
        If the last axis is missing or empty, or an entry is negative or NaN.

    Examples
    --------
    >>> version_entropy(jnp.zeros(256)).round(4)  # log 256
    Array(5.5452, dtype=float...)
    """
    logs = nonnegative("log_covering_numbers", log_covering_numbers)
    if logs.ndim == 0:
        raise ValueError("log_covering_numbers: expected one per configuration, got a scalar.")
    return jax.nn.logsumexp(logs, axis=-1)


def khodak_theorem_a2(
    entropy: Any,
    n_valid: float,
    *,
    delta: float = 0.05,
    B: float = 1.0,
    epsilon: Any = 0.0,
    lipschitz: float | None = None,
    excess: Any = 0.0,
) -> Bound:
    """Bound the excess risk of the bilevel solution: Theorem A.2 with constants that are proved.

        l_D(w, c) - min l_D <= epsilon* + B sqrt(log(1/delta) / (2 |V|))
            + inf_epsilon 2 L epsilon + B sqrt((Lambda(epsilon) + log(1/delta)) / (2 |V|))

    Parameters
    ----------
    entropy : array_like
        Lambda, or an upper bound of it: log |C| for one minimiser per configuration.
    n_valid : float
        |V|.
    delta, B : float
        delta is in (0, 1/3), losses are in [0, B].
    epsilon : array_like
        Radii; broadcast with ``entropy``.
    lipschitz : float, optional
        L; not needed for ``epsilon = 0``.
    excess : scalar
        epsilon*, of the best configuration's weights trained on T; 0 leaves it out.

    Returns
    -------
    Bound
        Vacuous from B on. ``terms`` contain the epsilon taken.

    Raises
    ------
    ValueError
        If a number is out of range, or a positive epsilon comes without ``lipschitz``.

    Examples
    --------
    >>> bound = khodak_theorem_a2(math.log(256), 1000)
    >>> round(float(bound.value), 6), round(bound.probability, 2)
    (0.104051, 0.85)
    >>> {name: round(float(term), 4) for name, term in bound.terms.items() if term}
    {'selected risk': 0.0387, 'entropy': 0.0653}
    """
    slope = _twice_lipschitz(lipschitz, epsilon)
    return _theorem(entropy, n_valid, delta, B, epsilon, excess, slope, (0.5**0.5, 0.5**0.5))


def khodak_theorem_a2_as_printed(
    entropy: Any,
    n_valid: float,
    *,
    delta: float = 0.05,
    B: float = 1.0,
    epsilon: Any = 0.0,
    excess: Any = 0.0,
) -> Bound:
    """Return Theorem A.2 of Khodak et al. 2020; false for a steep loss with a coarse cover.

        l_D(w, c) - min l_D <= epsilon* + B sqrt(log(1/delta) / (2 |V|))
            + inf_epsilon 3 epsilon + B sqrt(2 (Lambda(epsilon) + log(1/delta)) / |V|)

    Counterexample: all functions into [-e, e], covered by the zero function, so that Lambda(e) = 0.
    The loss ``(e - y f) / (2 e)`` is in [0, 1], L = 1 / (2 e). The solution e y on V, -e y
    elsewhere, has excess risk 1, and the value is ``3 e + O(1 / sqrt |V|)``. The theorem is true
    for 2 L <= 3 and for finite C at epsilon = 0; ``assumptions`` reports this.

    Parameters
    ----------
    entropy : array_like
        Lambda, or an upper bound of it: log |C| for one minimiser per configuration.
    n_valid, delta, B : float
        |V|; delta is in (0, 1/3), losses are in [0, B].
    epsilon, excess : array_like, scalar
        Radii, which broadcast with ``entropy``; epsilon*, of the best configuration's trained
        weights.

    Raises
    ------
    ValueError
        If a number is out of range.

    Examples
    --------
    >>> round(float(khodak_theorem_a2_as_printed(math.log(256), 1000).value), 4)
    0.1694
    """
    bound = _theorem(entropy, n_valid, delta, B, epsilon, excess, 3.0, (0.5**0.5, 2**0.5))
    return _as_printed(bound)


def khodak_theorem_3_1_as_printed(
    entropy: Any,
    n_valid: float,
    *,
    delta: float = 0.05,
    B: float = 1.0,
    epsilon: Any = 0.0,
    excess: Any = 0.0,
) -> Bound:
    """Return Theorem 3.1 of Khodak et al. 2020; false in the cases of the printed Theorem A.2.

        l_D(w, c) - min l_D <= epsilon*
            + inf_epsilon 3 epsilon + (3 B / 2) sqrt(2 (Lambda(epsilon) + log(1/delta)) / |V|)

    It is never smaller than :func:`khodak_theorem_a2_as_printed`, and equal for Lambda = 0. Read
    "B-bounded" as in [0, B]: losses in [-B, B] need 2 B instead of B. ``assumptions`` reports
    whether the theorem is known to hold.

    Parameters
    ----------
    entropy : array_like
        Lambda, or an upper bound of it: log |C| for one minimiser per configuration.
    n_valid, delta, B : float
        |V|; delta is in (0, 1/3), losses are in [0, B].
    epsilon, excess : array_like, scalar
        Radii, which broadcast with ``entropy``; epsilon*, of the best configuration's trained
        weights.

    Raises
    ------
    ValueError
        If a number is out of range.

    Examples
    --------
    >>> round(float(khodak_theorem_3_1_as_printed(math.log(256), 1000).value), 4)
    0.196
    """
    bound = _theorem(entropy, n_valid, delta, B, epsilon, excess, 3.0, (0.0, 1.5 * 2**0.5))
    return _as_printed(bound)


def _theorem(entropy, n_valid, delta, B, epsilon, excess, slope, factors) -> Bound:
    """Return the common form; ``factors`` multiply the square roots without and with Lambda."""
    check_range(delta, B)
    n_valid = one_positive("n_valid", n_valid)
    excess = nonnegative("excess", excess)
    pair = broadcast_nonnegative(entropy=entropy, epsilon=epsilon)
    entropy, epsilon = (array.ravel() for array in pair)
    confidence, scale = math.log(1 / delta), B / jnp.sqrt(n_valid)
    spread = factors[1] * scale * jnp.sqrt(entropy + confidence)
    best = jnp.argmin(slope * epsilon + spread)
    parts = {
        "excess of the trained weights": excess,
        "selected risk": factors[0] * scale * math.sqrt(confidence),
        "cover": slope * epsilon[best],
        "entropy": spread[best],
    }
    value = sum(parts.values())
    return Bound(
        CLAIM,
        value=value,
        terms=parts | {"epsilon": epsilon[best]},
        vacuous=~(value < B),
        assumptions=SETTING + TRAINABLE,
        probability=1 - 3 * delta,
    )


def _as_printed(bound: Bound) -> Bound:
    exact = holds(bound.terms["epsilon"] == 0)
    flat = ("epsilon = 0, or the loss is 3/2-Lipschitz", exact or None)
    return dataclasses.replace(bound, assumptions=(*bound.assumptions, flat))


def _twice_lipschitz(lipschitz: float | None, epsilon: Any) -> float:
    """Return 2 L, or 0 if L is None and every radius is 0."""
    if lipschitz is not None:
        return 2 * one_positive("lipschitz", lipschitz)
    if not concrete(epsilon) or np.any(np.asarray(epsilon) != 0):
        raise ValueError(
            "lipschitz: expected the loss's constant for a positive epsilon, got none."
        )
    return 0.0
