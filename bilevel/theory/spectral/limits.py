"""The exact asymptotics of Theorem 4's two stages, and its experiment."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from bilevel.internal.checks import (
    check_finite,
    integer,
    nan_where,
    nonnegative,
    positive,
    prng_key,
)
from bilevel.theory.spectral.estimator import top_eigenvector


class SpectralLimits(NamedTuple):
    """Result of :func:`spectral_limits`."""

    correlation_squared: jax.Array  # of alpha^ with alpha*
    risk: jax.Array  # E (y - f)^2 of the two-stage estimator
    optimal_risk: jax.Array  # with alpha* known: 1 - n/p, or 0 for p <= n
    excess: jax.Array  # risk - optimal_risk, without cancellation
    recovers: jax.Array  # bool: p h < n^2


def spectral_limits(p_over_n: Any, h_over_n: Any) -> SpectralLimits:
    """Return the exact asymptotics of Theorem 4, as n, p, h grow in proportion.

    With ``P = p/n`` and ``H = h/n``:

        rho^2 = (1 - P H) / (1 + H)   if p h < n^2, else 0
        risk  = rho^2 (1 - 1/P) + (1 - rho^2) / (1 - 1/P)   for P > 1
                (1 - rho^2) / (1 - P)                        for P < 1

    ``risk`` and ``excess`` are infinite for p = n, as for least squares, unless h_over_n is 0.

    Parameters
    ----------
    p_over_n, h_over_n : array_like
        Positive (h_over_n may be 0); broadcast with each other.

    Raises
    ------
    ValueError
        If a concrete number is out of range.

    Notes
    -----
    Given y, M is a rank-1 perturbation of size ``sqrt(n/p)`` of a Gaussian matrix of variance 1/p;
    its top left singular vector is known in the limit (Benaych-Georges & Nadakuditi 2012, "The
    singular values and vectors of low rank perturbations of large rectangular random matrices",
    Theorem 2.9). T is independent of alpha^, so that the second stage is least squares with noise
    of variance ``1 - rho^2``.

    ``p h = n^2`` is the sharp threshold, which the paper found "necessary" up to a constant. Its
    constants are large: ``1 - rho^2 <= 2 P H`` instead of 64 in (11), and the excess risk is at
    most ``2.25 H / (1 - 1/P)`` instead of 200 in (12). Finite sizes have larger correlations.

    Examples
    --------
    >>> limits = spectral_limits(2.0, 0.05)
    >>> limits.correlation_squared, limits.risk
    (Array(0.857142..., dtype=float...), Array(0.714285..., dtype=float...))
    """
    check_finite("h_over_n", h_over_n)
    P = jnp.asarray(positive("p_over_n", p_over_n), float)
    H = nonnegative("h_over_n", h_over_n).astype(float)
    try:
        P, H = jnp.broadcast_arrays(P, H)
    except ValueError:
        raise ValueError(
            f"h_over_n: expected a shape that broadcasts with {P.shape}, got {H.shape}."
        ) from None
    recovers = P * H < 1
    lost = jnp.where(P * H >= 1, 1, H * (1 + P) / (1 + H))  # 1 - rho^2; NaN stays NaN
    optimal = jnp.where(P > 1, 1 - 1 / P, 0)
    # At p = n both denominators are 0.
    many = jnp.where(P > 1, P, 2)
    over = lost * (2 * many - 1) / (many * (many - 1))
    under = lost / jnp.where(P < 1, 1 - P, 1)
    excess = jnp.where(P > 1, over, jnp.where(P < 1, under, jnp.where(lost > 0, jnp.inf, 0)))
    bad = ~((P > 0) & (H >= 0))  # traced values were not checked
    masked = [nan_where(bad, x) for x in (1 - lost, optimal + excess, optimal, excess)]
    return SpectralLimits(masked[0], masked[1], masked[2], masked[3], recovers)


class SpectralSample(NamedTuple):
    """Result of :func:`spectral_sample`."""

    correlation_squared: jax.Array
    risk: jax.Array  # E (y - f)^2 over new rows, given the estimate


def spectral_sample(key: chex.PRNGKey, n: int, p: int, h: int) -> SpectralSample:
    """Return one run of Theorem 4's experiment, in distribution, from far fewer random numbers.

    It draws h p + n p Gaussian numbers instead of 2 n h p. M comes from its decomposition, with
    ``|y|^2`` chi-squared with n degrees of freedom; the second stage draws mixed features only.

    Parameters
    ----------
    key : jax PRNG key
    n, p, h : int
        n is the number of rows in V, and in T.

    Raises
    ------
    ValueError
        If ``key`` is not a PRNG key, or a size is under 1.

    Examples
    --------
    >>> bool(spectral_sample(jax.random.key(0), n=100, p=150, h=2).correlation_squared > 0.9)
    True
    """
    prng_key("key", key)
    for name, number in (("n", n), ("p", p), ("h", h)):
        integer(name, number, 1)
    for_size, for_m, for_phi, for_noise = jax.random.split(key, 4)
    size = jnp.sum(jax.random.normal(for_size, (n,)) ** 2)
    # In these coordinates alpha* and theta* are the first unit vectors.
    m = jnp.sqrt(size) * jax.random.normal(for_m, (h, p))
    m = m.at[0, 0].set(size)
    rho = top_eigenvector(m @ m.T)[0]
    lost = jnp.maximum(1 - rho**2, 0)
    phi = jax.random.normal(for_phi, (n, p))
    y = rho * phi[:, 0] + jnp.sqrt(lost) * jax.random.normal(for_noise, (n,))
    if p >= n:
        theta = phi.T @ jax.scipy.linalg.solve(phi @ phi.T, y, assume_a="pos")
    else:
        theta = jax.scipy.linalg.solve(phi.T @ phi, phi.T @ y, assume_a="pos")
    return SpectralSample(rho**2, jnp.sum(theta.at[0].add(-rho) ** 2) + lost)
