"""Theorem 1 of Oymak et al. with every constant, proved: validation and test agree over all alpha.

f_alpha is the predictor that training returns for alpha in Delta. N(eps) balls of radius eps cover
Delta (:mod:`bilevel.theory.bounds.covering`). Assumptions:

- ``|f_a(x) - f_b(x)| <= L |a - b|_2`` for all x and all a, b in Delta;
- losses are in [0, b] and Gamma-Lipschitz in the prediction;
- the n_V validation rows are independent of each other and of the training.

Each of at most two events fails with probability ``exp(-tau)``. Every radius eps is valid. We take
the best of about 500 radii between ``exp(-30)`` and 1, in units of the radius at which the cover
alone costs b.

Reference: Theorem 1 of Oymak et al. (2021), which is for sub-exponential losses.
"""

import bisect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bilevel.internal.checks import function, nonnegative, positive, positives
from bilevel.theory.bounds._terms import confidence
from bilevel.theory.bounds.covering import Covering
from ntk.bounds import Bound

_CAP = 10**15  # rows; every integer up to it is exact in float64
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
    """Bound the difference between validation risk and risk, for all alpha at once.

    This is Theorem 1, Eq. (2), with constants:

        sup_alpha |L(f_alpha) - L_V(f_alpha)|
            <= min_eps 2 Gamma L eps + b sqrt((log N(eps) + tau) / (2 n_V))

    With ``variance = v``, Bernstein's ``sqrt(2 v t / n_V) + b t / (3 n_V)``, t = log N + tau,
    replaces the radical if it is smaller.

    Parameters
    ----------
    n_valid : scalar
        n_V, the number of validation rows.
    covering : function
        ``radii [m] -> log N [m]``, of the set Delta. ``terms`` has log N at the radius eps taken.
    L, Gamma, b : scalar
        The bound grows with log L. :func:`feature_map_lipschitz` gives L for feature maps.
    variance : scalar, optional
        An upper bound of the loss's variance over rows, for every f_alpha. Most losses are far
        below b, so the variance makes the bound useful.
    tau : float
        Above log 2. The bound holds with probability ``1 - 2 exp(-tau)``; it is vacuous from b on.

    Raises
    ------
    ValueError
        If a number is out of range, or ``covering`` is not a function.

    Examples
    --------
    >>> from bilevel.theory.bounds import ball_covering
    >>> bound = uniform_convergence(1000, covering=ball_covering(9, 1.0), L=100.0)
    >>> round(float(bound.value), 6), round(bound.probability, 6)
    (0.231776, 0.900426)
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
        b,
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
    """Bound the excess risk of the alpha selected on validation data.

    This is Theorem 1, Eq. (3), with constants:

        L(f_selected) - min_alpha L(f_alpha)
            <= gap + b sqrt(tau / (2 n_V)) + delta,    gap: value of `uniform_convergence`

    The paper has ``2 gap + delta`` (in ``terms``): the best alpha needs no uniform statement.

    Parameters
    ----------
    n_valid, covering, L, Gamma, b, variance, tau
        See :func:`uniform_convergence`; the probability is the same.
    delta : scalar
        The selected alpha has ``L_V(f_selected) <= min L_V + delta``.

    Raises
    ------
    ValueError
        If a number is out of range, or ``covering`` is not a function.

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
        value,
        {"gap": gap.value, "best alpha": best, "2 gap + delta": 2 * gap.value + delta},
        vacuous=~(value < b),
        assumptions=(*gap.assumptions, ("the validation risk is within delta of its least", None)),
        probability=gap.probability,
    )


def hypergradient_convergence(
    n_valid: Any, *, covering: Covering, G: Any, L: Any, tau: float = 3.0
) -> Bound:
    """Bound the error of the validation risk's hypergradient, for all alpha at once.

    This is Theorem 1, Eq. (4), with constants:

        sup_alpha |grad L_V(f_alpha) - grad L(f_alpha)|_2
            <= min_eps 2 L eps + G (1 + sqrt(2 (log N(eps) + tau))) / sqrt(n_V)

    It needs hypergradients ``grad_alpha l(y, f_alpha(x))`` of single rows with l2 norm at most G.
    They must be L-Lipschitz in alpha; this L differs from the L of the other functions. The paper
    has h + h_eff instead of h_eff, for noise with sub-exponential *coordinates*; G is of order
    sqrt(h) then.

    Parameters
    ----------
    n_valid, covering
        See :func:`uniform_convergence`.
    G, L : scalar
        Under the paper's assumptions Gamma R and 2 Gamma R L: alpha -> f_alpha is L-Lipschitz, its
        gradient at most R and R L-Lipschitz, the loss and its derivative Gamma-Lipschitz.
    tau : float
        Positive. The bound holds with probability ``1 - exp(-tau)``; it is vacuous from 2 G on.

    Raises
    ------
    ValueError
        If a number is out of range, or ``covering`` is not a function.

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
        2 * G,
        assumptions=(
            ("hypergradients of single rows are at most G", None),
            ("hypergradients of single rows are L-Lipschitz in alpha", None),
            _SAMPLE,
        ),
        probability=chance,
    )


def sample_size(gap: float, bound: Callable[[float], Bound]) -> int:
    """Return the smallest number of validation rows for which a bound is at most ``gap``.

    Parameters
    ----------
    gap : float
    bound : function
        ``n_valid -> Bound``, with ``n_valid`` a float; not traced. It must fall with the number of
        rows. Doubling, then bisection, call it about ``2 log2(rows)`` times. Its ``assumptions``
        can need more rows.

    Raises
    ------
    ValueError
        If ``gap`` is not positive or not reached by 10^15 rows, or ``bound`` is not a function.

    Examples
    --------
    >>> import math
    >>> from bilevel.theory.bounds import khodak_theorem_a2
    >>> sample_size(0.1, lambda n: khodak_theorem_a2(math.log(256), n))
    1083
    """
    positive("gap", gap)
    function("bound", bound, "n_valid -> Bound")

    def reached(rows: int) -> bool:
        return float(bound(float(rows)).value) <= gap  # as Python floats: no rounding of gap

    below, rows = 0, 1
    while not reached(rows):
        if rows == _CAP:
            raise ValueError(f"gap: expected a value that up to {_CAP:.0e} rows reach, got {gap}.")
        below, rows = rows, min(2 * rows, _CAP)
    return bisect.bisect_left(range(rows), True, lo=below + 1, key=reached)


def _uniform(
    claim: str, covering: Covering, slope: Any, deviation: Callable, scale: Any, **details: Any
) -> Bound:
    """Return ``min_eps slope eps + deviation(log N(eps))``; vacuous from ``scale`` on."""
    function("covering", covering, "radii -> log N(radii)")

    def radius(log_radius):
        radii = jnp.exp(log_radius) * scale / slope
        return jnp.maximum(radii, jnp.finfo(radii.dtype).tiny)  # every positive radius is valid

    def value(log_radius):
        radii = radius(log_radius)
        return slope * radii + deviation(covering(radii))

    # At the minimum the derivative in eps is 0, so the value's derivative is the one at fixed eps.
    # The exception is a minimum at the jump of the covering to one ball.
    epsilon = jax.lax.stop_gradient(radius(_minimise(value, -30.0, 0.0)))
    logs = covering(epsilon[None])[0]
    parts = {"cover": slope * epsilon, "deviation": deviation(logs)}
    total = parts["cover"] + parts["deviation"]
    terms = parts | {"log N": logs, "epsilon": epsilon}
    return Bound(claim, total, terms, vacuous=~(total < scale), **details)


def _minimise(function: Callable[[jax.Array], jax.Array], low: float, high: float) -> jax.Array:
    """Return a minimiser on [low, high]: four grids of 129 points, each around the last best."""
    bounds = jnp.array([low, high])
    for _ in range(4):
        grid = jnp.linspace(bounds[0], bounds[1], 129)
        best = jnp.argmin(function(grid))
        bounds = grid[jnp.clip(jnp.array([best - 1, best + 1]), 0, 128)]
    return grid[best]
