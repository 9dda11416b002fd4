"""Theorem 1 of Oymak et al. with every constant, proved: validation and test agree over all alpha.

f_alpha is what training returns for alpha in Delta. On n_V validation rows, independent of
training, its risk, the excess risk of the alpha selected by it, and its hypergradient are near
those on the distribution, *uniformly* in alpha, once n_V is well above log N(eps): N(eps) balls of
radius eps cover Delta (:mod:`bilevel.theory.bounds.covering`).

==========  =============  ================================================================
paper       here           what
==========  =============  ================================================================
n_V         ``n_valid``    validation rows, independent of each other and of the training
N_eps       ``covering``   ``radii -> log N(radii)`` of Delta
L           ``L``          ``|f_a(x) - f_b(x)| <= L |a - b|_2`` for all x, a and b in Delta
Gamma       ``Gamma``      Lipschitz constant of the loss in the prediction
            ``b``          losses are in [0, b]
tau         ``tau``        each of at most two events fails with probability ``exp(-tau)``
delta       ``delta``      by how much the selected alpha misses the least validation risk
==========  =============  ================================================================

The radius eps is no property of the problem: every one is valid, and the best of some 500 between
``exp(-30)`` and 1, in units of the radius where the cover alone costs b, is taken.

Reference: Oymak, Li & Soltanolkotabi (2021), "Generalization Guarantees for Neural Architecture
Search with Train-Validation Split", Theorem 1. Not its proof: the losses are bounded here, not
sub-exponential, which is what makes constants possible.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bilevel.internal.checks import function, nonnegative, positives
from bilevel.theory.bounds._terms import confidence
from bilevel.theory.bounds.covering import Covering
from ntk.bounds import Bound

_SAMPLE = ("validation rows are i.i.d. and independent of the training", None)
_VARIANCE = ("the variance of the loss is at most the given one for all alpha", None)
_FAMILY = (
    ("loss in [0, b], Gamma-Lipschitz in the prediction", None),
    ("alpha -> f_alpha is L-Lipschitz in the sup norm", None),
    _SAMPLE,
)


def uniform_convergence(
    n_valid: Any,
    *,
    covering: Covering,
    L: Any,
    Gamma: Any = 1.0,
    b: Any = 1.0,
    variance: Any = None,
    tau: float = 3.0,
) -> Bound:
    """Validation risk against risk, for all alpha at once: Theorem 1, Eq. (2), with constants.

        sup_alpha |L(f_alpha) - L_V(f_alpha)|
            <= min_eps 2 Gamma L eps + b sqrt((log N(eps) + tau) / (2 n_V))

    Proof. For each centre of a cover, by Hoeffding's inequality, the difference exceeds the radical
    with probability at most ``2 exp(-tau) / N``: for none of them, up to ``2 exp(-tau)``. Any other
    alpha is within eps of a centre; the losses of the two differ by Gamma L eps at most on every
    row, and so do their risks, and their validation risks. With ``variance = v``, Bernstein's
    inequality has ``sqrt(2 v t / n_V) + b t / (3 n_V)``, t = log N + tau, in the place of the
    radical; the smaller of the two is taken.

    Parameters
    ----------
    n_valid : scalar
        n_V.
    covering : function
        ``radii [m] -> log N [m]``, of the set Delta.
    L, Gamma, b : scalar
        L is logarithmic in effect; :func:`feature_map_lipschitz` for selection of feature maps.
    variance : scalar, optional
        At least that of the loss of every f_alpha, over rows. Losses are mostly far below their
        largest value b: where it is known, this is what makes the bound useful.
    tau : float
        Above log 2.

    Returns
    -------
    Bound
        Vacuous from b on. Holds with probability ``1 - 2 exp(-tau)``. ``terms``: both parts,
        log N and eps.

    Raises
    ------
    ValueError
        For a number out of range, or a covering that is no function.

    Examples
    --------
    >>> from bilevel.theory.bounds import ball_covering
    >>> print(uniform_convergence(1000, covering=ball_covering(9, 1.0), L=100.0))
    sup |L(f_alpha) - L_V(f_alpha)| <= value = 0.231776
      cover = 0.0101...
      deviation = 0.2216...
      log N = 95.2...
      epsilon = 5.07...e-05
      assumes loss in [0, b], Gamma-Lipschitz in the prediction: not checked
      assumes alpha -> f_alpha is L-Lipschitz in the sup norm: not checked
      assumes validation rows are i.i.d. and independent of the training: not checked
      probability: 0.900426
    """
    chance = confidence("tau", tau, events=2)
    n_valid, L, Gamma, b = positives(n_valid=n_valid, L=L, Gamma=Gamma, b=b)
    spread = None if variance is None else nonnegative("variance", variance)

    def deviation(logs):
        share = (logs + tau) / n_valid
        hoeffding = b * jnp.sqrt(share / 2)
        if spread is None:
            return hoeffding
        return jnp.minimum(hoeffding, jnp.sqrt(2 * spread * share) + b * share / 3)

    return _uniform(
        "sup |L(f_alpha) - L_V(f_alpha)| <= value",
        covering,
        2 * Gamma * L,
        deviation,
        scale=b,
        assumptions=_FAMILY if spread is None else (*_FAMILY, _VARIANCE),
        probability=chance,
    )


def selection_risk(
    n_valid: Any,
    *,
    covering: Covering,
    L: Any,
    Gamma: Any = 1.0,
    b: Any = 1.0,
    variance: Any = None,
    tau: float = 3.0,
    delta: Any = 0.0,
) -> Bound:
    """Excess risk of the alpha selected on validation data: Theorem 1, Eq. (3), with constants.

        L(f_selected) - min_alpha L(f_alpha)
            <= gap + b sqrt(tau / (2 n_V)) + delta,    gap: value of `uniform_convergence`

    Not ``2 gap + delta``, as in the paper (``terms`` has it): only the risk of the selected alpha
    needs a uniform statement. For the best alpha, which does not depend on the validation rows,
    Hoeffding's inequality is enough. Each of the two is needed on one side only, so that both hold
    with probability ``1 - 2 exp(-tau)``.

    Parameters
    ----------
    n_valid : scalar
        n_V, the number of validation rows.
    covering : function
        ``radii [m] -> log N [m]``, of the set Delta.
    L, Gamma, b : scalar
        Lipschitz constants of ``alpha -> f_alpha`` and of the loss, and the largest loss.
    variance : scalar, optional
        An upper bound of the variance of the loss, the same for every f_alpha.
    tau : float
        Above log 2; the bound holds with probability ``1 - 2 exp(-tau)``.
    delta : scalar
        ``L_V(f_selected) <= min L_V + delta``.

    Returns
    -------
    Bound

    Raises
    ------
    ValueError
        For a number out of range, or a covering that is no function.

    Examples
    --------
    >>> from bilevel.theory.bounds import ball_covering
    >>> bound = selection_risk(1000, covering=ball_covering(9, 1.0), L=100.0)
    >>> round(float(bound.value), 4), round(float(bound.terms["2 gap + delta"]), 4)
    (0.2705, 0.4636)
    """
    delta = nonnegative("delta", delta)
    gap = uniform_convergence(
        n_valid, covering=covering, L=L, Gamma=Gamma, b=b, variance=variance, tau=tau
    )
    best = b * jnp.sqrt(tau / 2 / n_valid)
    value = gap.value + best + delta
    return Bound(
        "L(f_selected) - min L(f_alpha) <= value",
        value=value,
        terms={"gap": gap.value, "best alpha": best, "2 gap + delta": 2 * gap.value + delta},
        vacuous=~(value < b),
        assumptions=(*gap.assumptions, ("the validation risk is within delta of its least", None)),
        probability=gap.probability,
    )


def hypergradient_convergence(
    n_valid: Any, *, covering: Covering, G: Any, L: Any, tau: float = 3.0
) -> Bound:
    """Hypergradient of the validation risk, for all alpha: Theorem 1, Eq. (4), with constants.

        sup_alpha |grad L_V(f_alpha) - grad L(f_alpha)|_2
            <= min_eps 2 L eps + G (1 + sqrt(2 (log N(eps) + tau))) / sqrt(n_V)

    for hypergradients ``grad_alpha l(y, f_alpha(x))`` of single rows that are at most G and, with
    another L than elsewhere here, L-Lipschitz in alpha (both in l2 norm).

    Proof. Let Z be the distance, for one alpha, of the mean over V from its expectation: the mean
    of Z is at most the root of that of Z^2, which is at most G / sqrt(n_V). Exchange of one row
    changes Z by 2 G / n_V at most, so by McDiarmid's inequality it exceeds its mean by
    ``G sqrt(2 s / n_V)`` with probability at most ``exp(-s)``. Take s = log N + tau for the centres
    of a cover; from there to any other alpha both gradients move by L eps at most.

    Parameters
    ----------
    n_valid : scalar
        n_V, the number of validation rows.
    covering : function
        ``radii [m] -> log N [m]``, of the set Delta.
    G, L : scalar
        Where alpha -> f_alpha is L-Lipschitz, its gradient at most R and R L-Lipschitz, the loss
        and its derivative Gamma-Lipschitz (the paper's assumptions): Gamma R, and 2 Gamma R L.
    tau : float
        Positive.

    Returns
    -------
    Bound
        Vacuous from 2 G on. Holds with probability ``1 - exp(-tau)``.

    Raises
    ------
    ValueError
        For a number out of range, or a covering that is no function.

    Notes
    -----
    The paper has h + h_eff in the place of h_eff, "unavoidable due to the vectorial nature" of the
    gradient: for noise with sub-exponential *coordinates*, whose norm G is of order sqrt(h). In
    terms of the norm the dimension of alpha does not occur.

    Examples
    --------
    >>> from bilevel.theory.bounds import ball_covering
    >>> bound = hypergradient_convergence(1000, covering=ball_covering(9, 1.0), G=1.0, L=100.0)
    >>> round(float(bound.value), 4)
    0.4809
    """
    chance = confidence("tau", tau, events=1)
    n_valid, G, L = positives(n_valid=n_valid, G=G, L=L)

    def deviation(logs):
        return G * (1 + jnp.sqrt(2 * (logs + tau))) / jnp.sqrt(n_valid)

    return _uniform(
        "sup |grad L_V(f_alpha) - grad L(f_alpha)|_2 <= value",
        covering,
        2 * L,
        deviation,
        scale=2 * G,
        assumptions=(
            ("hypergradients of single rows are at most G", None),
            ("hypergradients of single rows are L-Lipschitz in alpha", None),
            _SAMPLE,
        ),
        probability=chance,
    )


def _uniform(
    claim: str,
    covering: Covering,
    slope: jax.Array,
    deviation: Callable[[jax.Array], jax.Array],
    *,
    scale: jax.Array,
    assumptions: tuple,
    probability: float,
) -> Bound:
    """``min_eps slope eps + deviation(log N(eps))``; vacuous from ``scale`` on."""
    function("covering", covering, "radii -> log N(radii)")

    def radius(log_radius):
        radii = jnp.exp(log_radius) * scale / slope
        return jnp.maximum(radii, jnp.finfo(radii.dtype).tiny)  # every one is valid but 0

    def value(log_radius):
        radii = radius(log_radius)
        return slope * radii + deviation(covering(radii))

    # At the minimum over eps a small change of eps does not change the value to first order: so the
    # derivative of the value is the one at this eps. Not where the covering jumps there, to one
    # ball: what moves with the jump has a derivative of 0.
    epsilon = jax.lax.stop_gradient(radius(_minimise(value, -30.0, 0.0)))
    logs = covering(epsilon[None])[0]
    parts = {"cover": slope * epsilon, "deviation": deviation(logs)}
    total = parts["cover"] + parts["deviation"]
    return Bound(
        claim,
        value=total,
        terms=parts | {"log N": logs, "epsilon": epsilon},
        vacuous=~(total < scale),
        assumptions=assumptions,
        probability=probability,
    )


def _minimise(function: Callable[[jax.Array], jax.Array], low: float, high: float) -> jax.Array:
    """A minimiser on [low, high]: four grids of 129 points, each around the last one's best."""
    bounds = jnp.array([low, high])
    for _ in range(4):
        grid = jnp.linspace(bounds[0], bounds[1], 129)
        best = jnp.argmin(function(grid))
        bounds = grid[jnp.clip(jnp.array([best - 1, best + 1]), 0, 128)]
    return grid[best]
