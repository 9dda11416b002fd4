"""Excess risk of the bilevel solution, by the entropy of the version spaces (Khodak et al. 2020).

A configuration c and weights w are selected on validation data V among the minimisers of training
objectives on T, the version spaces H_c(T) = {h_{w,c} : w minimises L_T(., c)}:

    (w, c)  minimises  l_V(w, c)   subject to   h_{w,c} in H_c(T)
    Lambda(epsilon) = log N(union of H_c(T) over c, epsilon),    N: covering number in sup norm

With one minimiser for each of finitely many configurations, ``Lambda = log |C|`` at every epsilon:
the defaults below are for this case, ``epsilon = 0``.

============  =====================  ===========================================================
paper         here                   what
============  =====================  ===========================================================
Lambda        ``entropy``            version entropy at ``epsilon``, :func:`version_entropy`
epsilon       ``epsilon``            radius of the cover; array_like with ``entropy``: the
                                     smallest bound of all radii is taken (they depend on T only)
|V|, |T|      ``n_valid, n_train``   numbers of rows
delta         ``delta``              each of three or four events fails with at most this
B             ``B``                  losses are in [0, B]
L             ``lipschitz``          of the loss in the prediction (missing in Theorem 3.1)
epsilon*      ``excess``             excess risk of the best configuration's trained weights
============  =====================  ===========================================================

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

from bilevel.bounds._terms import broadcast
from bilevel.checks import concrete, nonnegative, number, positive
from ntk.bounds import Bound
from ntk.bounds.bound import holds

_CLAIM = "l_D(w, c) - min l_D <= value"
_SETTING = (
    ("loss in [0, B]", None),
    ("V is independent of T", None),
    ("(w, c) minimises l_V over the version spaces", None),
)
_TRAINABLE = (("some trained weights of c* have excess risk epsilon*", None),)
_LINEAR = (("the loss is Lipschitz and convex, features are bounded", None),)


def version_entropy(log_covering_numbers: chex.Array) -> jax.Array:
    """``log sum_c N(H_c(T), epsilon)``, at least the version entropy of finitely many c.

    Covers of the parts make up a cover of the union. For one minimiser per configuration every
    N is 1, and this is log |C|. The paper's ``log |C| + max_c log N(H_c(T), epsilon)`` is never
    less.

    Parameters
    ----------
    log_covering_numbers : array [..., |C|]
        ``log N(H_c(T), epsilon)`` for each c, in any number of rows (one for each epsilon).

    Returns
    -------
    array [...]

    Raises
    ------
    ValueError
        Without configurations, or for a negative or NaN entry.

    Examples
    --------
    >>> version_entropy(jnp.zeros(256)).round(4)  # log 256
    Array(5.5452, dtype=float...)

    Reference: Khodak et al. 2020, Definition 3.1 (A.2).
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
    """Excess risk of the bilevel solution: Theorem A.2 with constants that are proved.

        l_D(w, c) - min l_D <= epsilon* + B sqrt(log(1/delta) / (2 |V|))
            + inf_epsilon 2 L epsilon + B sqrt((Lambda(epsilon) + log(1/delta)) / (2 |V|))

    Proof. T fixed, let g_1..g_N be a cover of the version spaces with radius epsilon, and u the
    good weights that Assumption A.1 grants (except with probability delta, over T). Neither depends
    on V, so by Hoeffding's inequality: (1) ``l_V(u, c*) <= l_D(u, c*) + B sqrt(log(1/delta) /
    (2|V|))`` except with probability delta; (2) ``l_D(g_k) <= l_V(g_k) + B sqrt((log N +
    log(1/delta)) / (2|V|))`` for all k, each except with probability delta / N. The solution is
    within epsilon of some g_k, so that l_D and l_V each move by L epsilon at most between the two;
    and l_V(w, c) <= l_V(u, c*). Add. A radius chosen by T is as good as a fixed one.

    Parameters
    ----------
    entropy : array_like
        Lambda, or an upper bound of it: log |C| for one minimiser per configuration.
    n_valid : float
        |V|.
    delta : float
        In (0, 1/3).
    B : float
        Losses are in [0, B].
    epsilon : array_like
        Radii; broadcast with ``entropy``.
    lipschitz : float, optional
        L; not needed for ``epsilon = 0``.
    excess : scalar
        epsilon*, of the best configuration's weights trained on T; 0 leaves it out.

    Returns
    -------
    Bound
        Vacuous from B on, which no excess risk is above. ``terms`` name the epsilon taken.

    Raises
    ------
    ValueError
        For a number out of range, or a positive epsilon without ``lipschitz``.

    Notes
    -----
    It differs from :func:`khodak_theorem_a2_as_printed` in two ways. The cover is one of functions,
    so the loss has to be Lipschitz, and moves by 2 L epsilon, not 3 epsilon. And the printed proof
    takes its Theorem A.1, which is two-sided with an exponent of a quarter of Hoeffding's; one side
    is enough, with the full exponent: the radical is half the printed one.

    Examples
    --------
    >>> print(khodak_theorem_a2(math.log(256), 1000))
    l_D(w, c) - min l_D <= value = 0.104051
      excess of the trained weights = 0
      selected risk = 0.0387...
      cover = 0
      entropy = 0.0653...
      epsilon = 0
      assumes loss in [0, B]: not checked
      assumes V is independent of T: not checked
      assumes (w, c) minimises l_V over the version spaces: not checked
      assumes some trained weights of c* have excess risk epsilon*: not checked
      probability: 0.85
    """
    slope = _slope(lipschitz, epsilon)
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
    """Khodak et al. 2020, Theorem A.2; false where a loss of large slope meets a coarse cover.

        l_D(w, c) - min l_D <= epsilon* + B sqrt(log(1/delta) / (2 |V|))
            + inf_epsilon 3 epsilon + B sqrt(2 (Lambda(epsilon) + log(1/delta)) / |V|)

    The discretisation has no Lipschitz constant L. Let H be all functions into [-e, e], covered by
    the zero function: Lambda(e) = 0. The loss ``(e - y f) / (2 e)`` is in [0, 1], L = 1 / (2 e). A
    bilevel solution f = y on V, -y elsewhere (times e) has excess risk 1, and the value is
    ``3 e + O(1 / sqrt |V|)``. For 2 L <= 3, and for finite C at epsilon = 0, it is true: it is
    above :func:`khodak_theorem_a2`. The printed proof does not give it, though. Theorem A.1
    inverted is ``3 max(epsilon, B sqrt(2 (Lambda + log(2/delta)) / |V|))``, a maximum and not a
    sum, two sides and not one: 0.446 in place of 0.169 in the example.

    Parameters
    ----------
    entropy : array_like
        Lambda, or an upper bound of it: log |C| for one minimiser per configuration.
    n_valid : float
        |V|.
    delta : float
        In (0, 1/3).
    B : float
        Losses are in [0, B].
    epsilon : array_like
        Radii; broadcast with ``entropy``.
    excess : scalar
        epsilon*, of the best configuration's weights trained on T; 0 leaves it out.

    Returns
    -------
    Bound
        As printed; ``assumptions`` says where it is known to hold.

    Raises
    ------
    ValueError
        For a number out of range.

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
    """Khodak et al. 2020, Theorem 3.1; false where :func:`khodak_theorem_a2_as_printed` is.

        l_D(w, c) - min l_D <= epsilon*
            + inf_epsilon 3 epsilon + (3 B / 2) sqrt(2 (Lambda(epsilon) + log(1/delta)) / |V|)

    Theorem A.2 with its first radical bounded by half the second; never smaller, equal for
    Lambda = 0. It does not even assume a Lipschitz loss, and "B-bounded" has to be read as in
    [0, B]: losses in [-B, B] need 2 B in the place of B.

    Parameters
    ----------
    entropy : array_like
        Lambda, or an upper bound of it: log |C| for one minimiser per configuration.
    n_valid : float
        |V|.
    delta : float
        In (0, 1/3).
    B : float
        Losses are in [0, B].
    epsilon : array_like
        Radii; broadcast with ``entropy``.
    excess : scalar
        epsilon*, of the best configuration's weights trained on T; 0 leaves it out.

    Returns
    -------
    Bound
        As printed; ``assumptions`` says where it is known to hold.

    Raises
    ------
    ValueError
        For a number out of range.

    Examples
    --------
    >>> round(float(khodak_theorem_3_1_as_printed(math.log(256), 1000).value), 4)
    0.196
    """
    bound = _theorem(entropy, n_valid, delta, B, epsilon, excess, 3.0, (0.0, 1.5 * 2**0.5))
    return _as_printed(bound)


def khodak_corollary_a1(w_norm: Any, n_train: Any, *, delta: float = 0.05, C: float) -> Bound:
    """epsilon* of regularised linear classification: Corollary A.1, with another lambda.

        l_D(w, c*) - l_D(w*, c*) <= C sqrt((|w*|^2 + 1) log(1/delta) / |T|)

    The printed ``lambda = sqrt(log(1/delta) / |T|)`` does not give this rate, for any C. Sridharan,
    Shalev-Shwartz & Srebro (2008) bound the excess by ``lambda |w*|^2 + O(log(1/delta) / (lambda
    |T|))``, which at that lambda is ``(|w*|^2 + 1) sqrt(log(1/delta) / |T|)``, without a root over
    the norm. For x = 1/W, y = 1 and the hinge loss, w* = W is perfect, the solution is
    ``min(W, 1 / (2 lambda W))``, and for ``W^2 = 1 / lambda`` its risk is 1/2 for every |T|, while
    the rate falls as ``|T|^(-1/4)``. The lambda in ``terms``, divided by ``sqrt(|w*|^2 + 1)``,
    balances both parts; it has to know |w*|, as "there exists lambda" of Corollary 3.1 permits.

    Parameters
    ----------
    w_norm : scalar
        |w*|, of the best weights of the best configuration.
    n_train : scalar
        |T|.
    delta : float
        In (0, 1/3).
    C : float
        The constant in O, with the loss's Lipschitz constant and the norm of the features.

    Returns
    -------
    Bound
        ``terms``: lambda for the objective ``lambda |w|^2 + sum_T l`` (the corollary's own is for
        the mean over T), and the rate at the printed lambda.

    Raises
    ------
    ValueError
        For a number out of range.

    Examples
    --------
    >>> bound = khodak_corollary_a1(3.0, 1000, delta=0.05, C=1.0)
    >>> round(float(bound.value), 4), round(float(bound.terms["rate at the printed lambda"]), 4)
    (0.1731, 0.5473)
    """
    positive("C", C)
    size, root = _norm_rate(w_norm, n_train, delta)
    terms = {
        "lambda, for sums": n_train * root / size,
        "rate at the printed lambda": C * size**2 * root,
    }
    claim = "l_D(w, c*) - l_D(w*, c*) <= value"
    needs = (("lambda is the one of the terms", None), *_LINEAR)
    return _rate(C, size * root, terms, delta, claim=claim, assumptions=needs)


def khodak_corollary_a2(
    w_norm: Any, n_train: Any, n_valid: Any, configurations: Any, *, delta: float = 0.05, C: float
) -> Bound:
    """Feature-map selection with a Lipschitz loss: Corollary A.2 (3.1).

        l_D(w, c) - l_D(w*, c*) <= C (sqrt((|w*|^2 + 1) log(1/delta) / |T|)
                                      + sqrt(log((|C| + 1) / delta) / |V|))

    :func:`khodak_theorem_a2` with epsilon* of :func:`khodak_corollary_a1`, whose lambda it needs.
    The main text has both logarithms outside their roots, a weaker statement. The appendix leaves
    out the probability, and its Setting A.2 says square loss, which is not Lipschitz.

    Parameters
    ----------
    w_norm : scalar
        |w*|, of the best weights of the best configuration.
    n_train, n_valid : scalar
        |T| and |V|.
    configurations : scalar
        |C|, the number of configurations.
    delta : float
        In (0, 1/3).
    C : float
        The constant in O, with the loss's Lipschitz constant and bound B, and the norm of the
        features.

    Returns
    -------
    Bound

    Raises
    ------
    ValueError
        For a number out of range.

    Examples
    --------
    >>> round(float(khodak_corollary_a2(3.0, 1000, 1000, 256, C=1.0).value), 4)
    0.2655
    """
    size, root = _norm_rate(w_norm, n_train, delta)
    valid = _validation_rate(n_valid, configurations, delta)
    terms = {"training": size * root, "validation": valid}
    needs = (("lambda is that of Corollary A.1 here", None), *_LINEAR)
    return _rate(C, size * root + valid, terms, delta, assumptions=needs)


def khodak_corollary_a3(
    n_train: Any, n_valid: Any, configurations: Any, *, delta: float = 0.05, C: float
) -> Bound:
    """Selection among random Fourier features, against the best kernel's space: Corollary A.3.

        l_D(w, c) - min_c min_{h in H_c} l_D(h) <= C (log(1/delta)^2 / sqrt(|T|)
                                                      + sqrt(log((|C| + 1) / delta) / |V|))

    Square loss, ``O(sqrt(|T|) log(sqrt(|T|) / delta))`` features, and the printed lambda
    ``1 / sqrt(|T|)`` for the mean over T: ``sqrt(|T|)`` for the sum of Algorithm 1 (``terms``).
    From Rudi & Rosasco (2017), Theorem 1, whose logarithm is of ``18 / delta``: for delta under 1/3
    C makes up for it.

    Parameters
    ----------
    n_train, n_valid : scalar
        |T| and |V|.
    configurations : scalar
        |C|, the number of configurations.
    delta : float
        In (0, 1/3).
    C : float
        The constant in O.

    Returns
    -------
    Bound
        ``terms``: both rates, and lambda for the sum over T.

    Raises
    ------
    ValueError
        For a number out of range.

    Examples
    --------
    >>> round(float(khodak_corollary_a3(10_000, 1000, 256, C=1.0).value), 4)
    0.1822
    """
    positive("n_train", n_train)
    valid = _validation_rate(n_valid, configurations, delta)
    train = math.log(1 / delta) ** 2 / jnp.sqrt(n_train)
    terms = {"training": train, "validation": valid, "lambda, for sums": jnp.sqrt(n_train)}
    needs = (
        ("bounded labels and kernels; each H_c has a function of least risk", None),
        ("O(sqrt(|T|) log(sqrt(|T|) / delta)) features", None),
    )
    claim = "l_D(w, c) - min_c min_{H_c} l_D <= value"
    hidden = ("constant of the number of features",)
    return _rate(C, train + valid, terms, delta, claim=claim, assumptions=needs, unspecified=hidden)


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
    """Unregularised training (neural networks): Corollary A.4, with constants that are proved.

        l_D(w, c) - min l_D <= epsilon* + B sqrt(log(1/delta) / (2 |T|)) + the rest of Theorem A.2

    Here epsilon* bounds the generalization error ``l_D - l_T`` of some empirical risk minimiser of
    c*, not its excess risk. Since ``l_T(w, c*) <= l_T(w*, c*)``, Hoeffding's inequality for the
    fixed ``(w*, c*)`` makes up the difference, with a fourth event. As printed, the rest is that of
    :func:`khodak_theorem_a2_as_printed`, false in the same cases.

    Parameters
    ----------
    entropy : array_like
        Lambda, or an upper bound of it: log |C| for one minimiser per configuration.
    n_train, n_valid : float
        |T| and |V|.
    delta : float
        In (0, 1/4).
    B : float
        Losses are in [0, B].
    epsilon : array_like
        Radii; broadcast with ``entropy``.
    lipschitz : float, optional
        L; not needed for ``epsilon = 0``.
    excess : scalar
        epsilon*, here of the generalization error; 0 leaves it out.

    Returns
    -------
    Bound
        Vacuous from B on. Holds with probability ``1 - 4 delta``.

    Raises
    ------
    ValueError
        For a number out of range, or a positive epsilon without ``lipschitz``.

    Examples
    --------
    >>> round(float(khodak_corollary_a4(math.log(256), 1000, 1000).value), 4)  # 0.0387 more
    0.1428
    """
    positive("n_train", n_train)
    _check_range(delta, B, events=4)
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
        assumptions=_SETTING + needs,
        probability=1 - 4 * delta,
    )


def _theorem(entropy, n_valid, delta, B, epsilon, excess, slope, factors) -> Bound:
    """The common form: factors of ``B sqrt(log(1/delta) / |V|)``, and with Lambda in the log."""
    _check_range(delta, B)
    positive("n_valid", n_valid)
    excess = nonnegative("excess", excess)
    entropy, epsilon = _radii(entropy, epsilon)
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
        value=value,
        terms=parts | {"epsilon": epsilon[best]},
        vacuous=~(value < B),
        assumptions=_SETTING + _TRAINABLE,
        probability=1 - 3 * delta,
    )


def _as_printed(bound: Bound) -> Bound:
    exact = holds(bound.terms["epsilon"] == 0)
    # With a positive radius the theorem is true for losses of a small slope only, which it does
    # not ask for.
    flat = ("epsilon = 0, or the loss is 3/2-Lipschitz", exact or None)
    return dataclasses.replace(bound, assumptions=(*bound.assumptions, flat))


def _slope(lipschitz: float | None, epsilon: Any) -> float:
    """2 L; 0 where no L is given and every radius is 0."""
    if lipschitz is not None:
        positive("lipschitz", lipschitz)
        return 2 * lipschitz
    if not concrete(epsilon) or np.any(np.asarray(epsilon) != 0):
        raise ValueError(
            "lipschitz: expected the loss's constant for a positive epsilon, got none."
        )
    return 0.0


def _rate(C, rate, terms, delta, *, assumptions, claim=_CLAIM, unspecified=()) -> Bound:
    positive("C", C)
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
    """``sqrt(|w*|^2 + 1)`` and ``sqrt(log(1/delta) / |T|)``."""
    _check_range(delta)
    positive("n_train", n_train)
    w_norm = nonnegative("w_norm", w_norm)
    return jnp.sqrt(w_norm**2 + 1), jnp.sqrt(math.log(1 / delta) / n_train)


def _validation_rate(n_valid, configurations, delta) -> jax.Array:
    _check_range(delta)
    positive("n_valid", n_valid)
    positive("configurations", configurations)
    return jnp.sqrt(jnp.log((configurations + 1) / delta) / n_valid)


def _check_range(delta: float, B: float = 1.0, events: int = 3) -> None:
    if not 0 < number("delta", delta) < 1 / events:
        raise ValueError(f"delta: expected a number in (0, 1/{events}), got {delta}.")
    positive("B", B)


def _radii(entropy: Any, epsilon: Any) -> tuple[jax.Array, jax.Array]:
    """Both as vectors of one length."""
    entropy, epsilon = broadcast(entropy=entropy, epsilon=epsilon)
    return entropy.ravel(), epsilon.ravel()
