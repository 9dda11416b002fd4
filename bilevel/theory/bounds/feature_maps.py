"""Lipschitz constants of a ridge regression's predictor in its feature map.

Selection of feature maps (Oymak et al. 2021, Definition 2; Scenario 1): for weights alpha of h maps
phi_i, and a penalty lambda, on n_T training rows,

    f(x) = theta'phi_alpha(x),    phi_alpha = sum_i alpha_i phi_i,
    theta = argmin |y - Phi theta|^2 + lambda |theta|^2 = Phi'(Phi Phi' + lambda I)^-1 y.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bilevel.internal.checks import count, positives


class FeatureMapLipschitz(NamedTuple):
    """Result of :func:`feature_map_lipschitz`."""

    alpha: jax.Array  # [], for alpha in l2 norm, at fixed lambda
    penalty: jax.Array  # [], for lambda, at fixed alpha

    @property
    def joint(self) -> jax.Array:
        """For (alpha, lambda) in l2 norm."""
        return jnp.hypot(self.alpha, self.penalty)


def feature_map_lipschitz(
    n_train: Any, *, h: int, B: Any, y_norm: Any, lambda0: Any, R: Any = 1.0
) -> FeatureMapLipschitz:
    """Return sup-norm Lipschitz constants of ``alpha -> f_alpha`` and ``lambda -> f_alpha``.

        t = |y| min(1 / sqrt(lambda0), R sqrt(n_T B) / lambda0)            bounds |theta|
        L_alpha = sqrt(h B) (t + R |y| sqrt(2 n_T B) / lambda0)
        L_lambda = R sqrt(B) t / lambda0

    The product rule with norms of each factor, as behind Oymak et al. 2021, Lemma 1, gives terms of
    order ``n_T^1.5 / lambda0^2`` instead of ``sqrt(n_T) / lambda0``.

    Parameters
    ----------
    n_train : scalar
        n_T, training rows.
    h : int
        Number of feature maps.
    B : scalar
        ``|phi_i(x)|^2 <= B`` for all maps and all x.
    y_norm : scalar
        ``|y|_2``: at most ``sqrt(n_T)`` for labels in [-1, 1].
    lambda0 : scalar
        ``Phi Phi' + lambda I >= lambda0 I`` for all alpha and lambda: the smallest penalty. For
        n_T <= p, add a lower bound of the smallest eigenvalue, e.g. of :func:`ntk.certify_simplex`.
    R : scalar
        ``|alpha|_1 <= R``: 1 on the simplex.

    Returns
    -------
    FeatureMapLipschitz
        For a search over log lambda, multiply ``penalty`` by the largest lambda.

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
