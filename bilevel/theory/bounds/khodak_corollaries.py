"""Corollaries A.1 to A.4 of Khodak et al. (2020): linear models, and finitely many configurations.

:mod:`bilevel.theory.bounds.khodak` has the notation and the reference.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from bilevel.internal.checks import nonnegative
from bilevel.theory.bounds._terms import check_range, one_positive
from bilevel.theory.bounds.khodak import CLAIM, SETTING, khodak_theorem_a2
from ntk.bounds import Bound

_LINEAR = (("the loss is Lipschitz and convex, features are bounded", None),)


def khodak_corollary_a1(w_norm: Any, n_train: Any, *, delta: float = 0.05, C: float) -> Bound:
    """Bound epsilon* of regularised linear classification: Corollary A.1, with another lambda.

        l_D(w, c*) - l_D(w*, c*) <= C sqrt((|w*|^2 + 1) log(1/delta) / |T|)

    The printed ``lambda = sqrt(log(1/delta) / |T|)`` gives ``(|w*|^2 + 1) sqrt(log(1/delta) /
    |T|)`` only (Sridharan, Shalev-Shwartz & Srebro 2008). Counterexample: x = 1/W, y = 1, the hinge
    loss and ``W^2 = 1 / lambda``. w* = W is perfect, the solution has risk 1/2 for every |T|, and
    the rate falls as ``|T|^(-1/4)``. The lambda in ``terms``, divided by ``sqrt(|w*|^2 + 1)``,
    gives the rate.

    Parameters
    ----------
    w_norm : scalar
        |w*|, of the best weights of the best configuration.
    n_train : scalar
        |T|.
    delta, C : float
        delta is in (0, 1/3). C is the constant in O; it contains the loss's Lipschitz constant and
        the norm of the features.

    Returns
    -------
    Bound
        ``terms``: lambda for the objective ``lambda |w|^2 + sum_T l`` (the corollary's own is for
        the mean over T), and the rate at the printed lambda.

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
    w_norm : scalar
        |w*|, of the best weights of the best configuration.
    n_train, n_valid, configurations : scalar
        |T|, |V| and |C|.
    delta, C : float
        delta is in (0, 1/3). C is the constant in O; it contains the loss's Lipschitz constant and
        bound B, and the norm of the features.

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
    logarithm of ``18 / delta``; for delta under 1/3 C absorbs the difference.

    Parameters
    ----------
    n_train, n_valid, configurations : scalar
        |T|, |V| and |C|.
    delta, C : float
        delta is in (0, 1/3), C the constant in O.

    Returns
    -------
    Bound
        ``terms``: the two rates, and lambda for the sum over T, ``sqrt(|T|)``.

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
    hidden = ("constant of the number of features",)
    return _rate_bound(
        C, train + valid, terms, delta, claim=claim, assumptions=needs, unspecified=hidden
    )


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
    entropy : array_like
        Lambda, or an upper bound of it: log |C| for one minimiser per configuration.
    n_train, n_valid : float
        |T| and |V|.
    delta, B : float
        delta is in (0, 1/4), losses are in [0, B].
    epsilon : array_like
        Radii; broadcast with ``entropy``.
    lipschitz : float, optional
        L; not needed for ``epsilon = 0``.
    excess : scalar
        epsilon*, of the generalization error; 0 leaves it out.

    Returns
    -------
    Bound
        Vacuous from B on. Holds with probability ``1 - 4 delta``.

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
    bound = khodak_theorem_a2(
        entropy,
        n_valid,
        delta=delta,
        B=B,
        epsilon=epsilon,
        lipschitz=lipschitz,
        excess=excess + train,
    )
    needs = (
        ("the training objective is l_T", None),
        ("l_D - l_T <= epsilon* for some of its minimisers for c*", None),
    )
    return dataclasses.replace(
        bound,
        terms=bound.terms | {"of the training risk": train},
        assumptions=SETTING + needs,
        probability=1 - 4 * delta,
    )


def _rate_bound(C, rate, terms, delta, *, assumptions, claim=CLAIM, unspecified=()) -> Bound:
    C = one_positive("C", C)
    value = C * rate
    return Bound(
        claim,
        value=value,
        terms=terms,
        vacuous=~(value < 1),
        assumptions=(*assumptions, ("loss in [0, 1], else C is larger", None)),
        unspecified=("C, supplied: constant of O", *unspecified),
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
