"""The bounds of Khodak et al. (2020): excess risk of the bilevel solution, and its corollaries.

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

_CLAIM = "l_D(w, c) - min l_D <= value"
_SETTING = (
    ("loss in [0, B]", None),
    ("V is independent of T", None),
    ("(w, c) minimises l_V over the version spaces", None),
)
_LINEAR = (("the loss is Lipschitz and convex, features are bounded", None),)


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

    The bound is vacuous from B on. ``terms`` contain the epsilon taken.

    Parameters
    ----------
    entropy : array_like
        Lambda, or an upper bound of it: log |C| for one minimiser per configuration.
    n_valid, delta, B : float
        |V|; delta is in (0, 1/3), losses are in [0, B].
    epsilon : array_like
        Radii; broadcast with ``entropy``.
    lipschitz : float, optional
        L; not needed for ``epsilon = 0``.
    excess : scalar
        epsilon*, of the best configuration's weights trained on T; 0 leaves it out.

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
    if lipschitz is None and (not concrete(epsilon) or np.any(np.asarray(epsilon) != 0)):
        raise ValueError(
            "lipschitz: expected the loss's constant for a positive epsilon, got none."
        )
    slope = 0.0 if lipschitz is None else 2 * one_positive("lipschitz", lipschitz)
    factors = 0.5**0.5, 0.5**0.5
    return _theorem(slope, factors, entropy, n_valid, delta, B, epsilon, excess)


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
    entropy, n_valid, delta, B, epsilon, excess
        See :func:`khodak_theorem_a2`.

    Raises
    ------
    ValueError
        If a number is out of range.

    Examples
    --------
    >>> round(float(khodak_theorem_a2_as_printed(math.log(256), 1000).value), 4)
    0.1694
    """
    return _as_printed((0.5**0.5, 2**0.5), entropy, n_valid, delta, B, epsilon, excess)


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
    entropy, n_valid, delta, B, epsilon, excess
        See :func:`khodak_theorem_a2`.

    Raises
    ------
    ValueError
        If a number is out of range.

    Examples
    --------
    >>> round(float(khodak_theorem_3_1_as_printed(math.log(256), 1000).value), 4)
    0.196
    """
    return _as_printed((0.0, 1.5 * 2**0.5), entropy, n_valid, delta, B, epsilon, excess)


def khodak_corollary_a1(w_norm: Any, n_train: Any, *, delta: float = 0.05, C: float) -> Bound:
    """Bound epsilon* of regularised linear classification: Corollary A.1, with another lambda.

        l_D(w, c*) - l_D(w*, c*) <= C sqrt((|w*|^2 + 1) log(1/delta) / |T|)

    The printed ``lambda = sqrt(log(1/delta) / |T|)`` gives ``(|w*|^2 + 1) sqrt(log(1/delta) /
    |T|)`` only (Sridharan, Shalev-Shwartz & Srebro 2008). Counterexample: x = 1/W, y = 1, the hinge
    loss and ``W^2 = 1 / lambda``. w* = W is perfect, the solution has risk 1/2 for every |T|, and
    the rate falls as ``|T|^(-1/4)``. The lambda in ``terms``, divided by ``sqrt(|w*|^2 + 1)``,
    gives the rate. It is for the objective ``lambda |w|^2 + sum_T l``; the corollary's own is for
    the mean over T.

    Parameters
    ----------
    w_norm, n_train : scalar
        |w*|, of the best weights of the best configuration; |T|.
    delta, C : float
        delta is in (0, 1/3). C is the constant in O; it contains the loss's Lipschitz constant and
        the norm of the features.

    Raises
    ------
    ValueError
        If a number is out of range.

    Examples
    --------
    >>> bound = khodak_corollary_a1(3.0, 1000, delta=0.05, C=1.0)
    >>> round(float(bound.value), 4), round(float(bound.terms["rate at the printed lambda"]), 4)
    (0.1731, 0.5473)
    """
    C, n_train = one_positive("C", C), one_positive("n_train", n_train)
    size, root = _norm_rate(w_norm, n_train, delta)
    terms = {
        "lambda, for sums": n_train * root / size,
        "rate at the printed lambda": C * size**2 * root,
    }
    claim = "l_D(w, c*) - l_D(w*, c*) <= value"
    needs = (("lambda is the one of the terms", None), *_LINEAR)
    return _rate_bound(C, size * root, terms, delta, claim=claim, assumptions=needs)


def khodak_corollary_a2(
    w_norm: Any, n_train: Any, n_valid: Any, configurations: Any, *, delta: float = 0.05, C: float
) -> Bound:
    """Bound the excess risk of feature-map selection with a Lipschitz loss: Corollary A.2 (3.1).

        l_D(w, c) - l_D(w*, c*) <= C (sqrt((|w*|^2 + 1) log(1/delta) / |T|)
                                      + sqrt(log((|C| + 1) / delta) / |V|))

    It needs the lambda of :func:`khodak_corollary_a1`. The main text has the two logarithms outside
    their roots, a weaker statement. The appendix leaves out the probability, and its Setting A.2
    has the square loss, which is not Lipschitz.

    Parameters
    ----------
    w_norm, n_train, n_valid, configurations : scalar
        |w*|, |T|, |V| and the number of configurations |C|.
    delta, C : float
        See :func:`khodak_corollary_a1`. C contains also the loss's bound B.

    Raises
    ------
    ValueError
        If a number is out of range.

    Examples
    --------
    >>> round(float(khodak_corollary_a2(3.0, 1000, 1000, 256, C=1.0).value), 4)
    0.2655
    """
    size, root = _norm_rate(w_norm, n_train, delta)
    valid = _validation_rate(n_valid, configurations, delta)
    terms = {"training": size * root, "validation": valid}
    needs = (("lambda is that of Corollary A.1 here", None), *_LINEAR)
    return _rate_bound(C, size * root + valid, terms, delta, assumptions=needs)


def khodak_corollary_a3(
    n_train: Any, n_valid: Any, configurations: Any, *, delta: float = 0.05, C: float
) -> Bound:
    """Bound the risk of selection among random Fourier features: Corollary A.3.

    The comparison is with the best kernel's space:

        l_D(w, c) - min_c min_{h in H_c} l_D(h) <= C (log(1/delta)^2 / sqrt(|T|)
                                                      + sqrt(log((|C| + 1) / delta) / |V|))

    Square loss, ``O(sqrt(|T|) log(sqrt(|T|) / delta))`` features, and the printed lambda ``1 /
    sqrt(|T|)`` for the mean over T. It follows from Rudi & Rosasco (2017), Theorem 1, with the
    logarithm of ``18 / delta``; for delta under 1/3 C absorbs the difference. ``terms`` has
    ``sqrt(|T|)``, lambda for the sum over T.

    Parameters
    ----------
    n_train, n_valid, configurations : scalar
        |T|, |V| and |C|.
    delta, C : float
        delta is in (0, 1/3), C the constant in O.

    Raises
    ------
    ValueError
        If a number is out of range.

    Examples
    --------
    >>> round(float(khodak_corollary_a3(10_000, 1000, 256, C=1.0).value), 4)
    0.1822
    """
    n_train = one_positive("n_train", n_train)
    valid = _validation_rate(n_valid, configurations, delta)
    train = math.log(1 / delta) ** 2 / jnp.sqrt(n_train)
    terms = {"training": train, "validation": valid, "lambda, for sums": jnp.sqrt(n_train)}
    needs = (
        ("bounded labels and kernels; each H_c has a function of least risk", None),
        ("O(sqrt(|T|) log(sqrt(|T|) / delta)) features", None),
    )
    claim = "l_D(w, c) - min_c min_{H_c} l_D <= value"
    bound = _rate_bound(C, train + valid, terms, delta, claim=claim, assumptions=needs)
    hidden = (*bound.unspecified, "constant of the number of features")
    return dataclasses.replace(bound, unspecified=hidden)


def khodak_corollary_a4(
    entropy: Any,
    n_train: Any,
    n_valid: Any,
    *,
    delta: float = 0.05,
    B: float = 1.0,
    epsilon: Any = 0.0,
    lipschitz: float | None = None,
    excess: Any = 0.0,
) -> Bound:
    """Bound the excess risk of unregularised training: Corollary A.4 with proved constants.

        l_D(w, c) - min l_D <= epsilon* + B sqrt(log(1/delta) / (2 |T|)) + the rest of Theorem A.2

    For neural networks. epsilon* bounds the generalization error ``l_D - l_T`` of an empirical risk
    minimiser of c*. The second term is Hoeffding's inequality for the fixed ``(w*, c*)``, a fourth
    event. The printed corollary has the terms of :func:`khodak_theorem_a2_as_printed`, false in the
    same cases.

    Parameters
    ----------
    entropy, n_train, n_valid, delta, B, epsilon, lipschitz
        See :func:`khodak_theorem_a2`; n_train is |T|, and delta is in (0, 1/4). The bound holds
        with probability ``1 - 4 delta``.
    excess : scalar
        epsilon*, of the generalization error; 0 leaves it out.

    Raises
    ------
    ValueError
        If a number is out of range, or a positive epsilon comes without ``lipschitz``.

    Examples
    --------
    >>> round(float(khodak_corollary_a4(math.log(256), 1000, 1000).value), 4)  # 0.0387 more
    0.1428
    """
    n_train = one_positive("n_train", n_train)
    check_range(delta, B, events=4)
    train = B * jnp.sqrt(math.log(1 / delta) / 2 / n_train)
    options = {"delta": delta, "B": B, "epsilon": epsilon, "lipschitz": lipschitz}
    bound = khodak_theorem_a2(entropy, n_valid, excess=excess + train, **options)
    needs = (
        ("the training objective is l_T", None),
        ("l_D - l_T <= epsilon* for some of its minimisers for c*", None),
    )
    return dataclasses.replace(
        bound,
        terms=bound.terms | {"of the training risk": train},
        assumptions=_SETTING + needs,
        probability=1 - 4 * delta,
    )


def _theorem(slope, factors, entropy, n_valid, delta, B, epsilon, excess) -> Bound:
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
        _CLAIM,
        value,
        parts | {"epsilon": epsilon[best]},
        vacuous=~(value < B),
        assumptions=(*_SETTING, ("some trained weights of c* have excess risk epsilon*", None)),
        probability=1 - 3 * delta,
    )


def _as_printed(factors, *arguments) -> Bound:
    bound = _theorem(3.0, factors, *arguments)
    exact = holds(bound.terms["epsilon"] == 0)
    flat = ("epsilon = 0, or the loss is 3/2-Lipschitz", exact or None)
    return dataclasses.replace(bound, assumptions=(*bound.assumptions, flat))


def _rate_bound(C, rate, terms, delta, *, assumptions, claim=_CLAIM) -> Bound:
    value = one_positive("C", C) * rate
    return Bound(
        claim,
        value,
        terms,
        vacuous=~(value < 1),
        assumptions=(*assumptions, ("loss in [0, 1], else C is larger", None)),
        unspecified=("C, supplied: constant of O",),
        probability=f"1 - O({delta:g})",
    )


def _norm_rate(w_norm, n_train, delta):
    """Return ``sqrt(|w*|^2 + 1)`` and ``sqrt(log(1/delta) / |T|)``."""
    check_range(delta)
    n_train = one_positive("n_train", n_train)
    w_norm = nonnegative("w_norm", w_norm)
    return jnp.sqrt(w_norm**2 + 1), jnp.sqrt(math.log(1 / delta) / n_train)


def _validation_rate(n_valid, configurations, delta) -> jax.Array:
    check_range(delta)
    n_valid = one_positive("n_valid", n_valid)
    configurations = one_positive("configurations", configurations)
    return jnp.sqrt(jnp.log((configurations + 1) / delta) / n_valid)
