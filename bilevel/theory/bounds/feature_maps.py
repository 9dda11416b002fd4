"""How much the predictor of a ridge regression moves with its feature map: Lipschitz constants.

Selection of feature maps (Oymak et al. 2021, Definition 2; Scenario 1): for weights alpha of h maps
phi_i, and a penalty lambda, on n_T training rows,

    f(x) = theta'phi_alpha(x),    phi_alpha = sum_i alpha_i phi_i,
    theta = argmin |y - Phi theta|^2 + lambda |theta|^2 = Phi'(Phi Phi' + lambda I)^-1 y.

===========  ================  ==============================================================
paper        here              what
===========  ================  ==============================================================
B            ``B``             ``|phi_i(x)|^2 <= B`` for all maps and all x
R            ``R``             ``|alpha|_1 <= R``: 1 on the simplex
lambda_0     ``lambda0``       ``Phi Phi' + lambda I >= lambda0 I`` for all alpha and lambda
n_T          ``n_train``       training rows
             ``y_norm``        ``|y|_2``: at most ``sqrt(n_T)`` for labels in [-1, 1]
===========  ================  ==============================================================
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
    """Lipschitz constants, in the sup norm, of ``alpha -> f_alpha`` and ``lambda -> f_alpha``.

        t = |y| min(1 / sqrt(lambda0), R sqrt(n_T B) / lambda0)            bounds |theta|
        L_alpha = sqrt(h B) (t + R |y| sqrt(2 n_T B) / lambda0)
        L_lambda = R sqrt(B) t / lambda0

    Proof. Write M = Phi Phi' + lambda I, z = M^-1 y (at most |y| / lambda0), theta = Phi'z. In a
    basis of singular vectors, with ``s^2 + lambda >= lambda0``, ``s / (s^2 + lambda)`` is at most
    ``1 / sqrt(lambda0)``, and s at most ``|Phi| <= R sqrt(n_T B)``: so |theta| <= t. By the product
    rule, with Phi_i the features of map i (norm at most sqrt(n_T B)),

        d theta / d alpha_i = (I - Phi'M^-1 Phi) Phi_i'z - Phi'M^-1 Phi_i theta,

    along each singular vector ``(lambda u - s v) / (s^2 + lambda)`` for u, v the coordinates of
    Phi_i'z and Phi_i theta. Let ``v = sqrt(lambda0) w``: since s^2 lambda0 <= s^2 (s^2 + lambda),
    the vector ``(lambda, s sqrt(lambda0)) / (s^2 + lambda)`` has norm 1 at most, so the whole has
    squared norm at most |Phi_i'z|^2 + |Phi_i theta|^2 / lambda0, each part at most
    ``n_T B |y|^2 / lambda0^2``. Then ``df / d alpha_i = phi_i'theta + phi_alpha' d theta / d
    alpha_i`` with ``|phi_alpha| <= R sqrt(B)``; h such derivatives make sqrt(h). For lambda,
    ``d theta / d lambda = -Phi'M^-1 z``, at most t / lambda0. On a convex set, derivatives bound
    differences.

    Parameters
    ----------
    n_train : scalar
        n_T.
    h : int
        Number of feature maps.
    B, y_norm, lambda0, R : scalar
        lambda0 for the worst alpha: the smallest penalty plus, for n_T <= p, a lower bound of the
        smallest eigenvalue of Phi Phi' over the set, such as :func:`ntk.certify_simplex` finds.

    Returns
    -------
    FeatureMapLipschitz
        For a search over log lambda, multiply ``penalty`` by the largest lambda.

    Raises
    ------
    ValueError
        For a number that is not positive.

    Notes
    -----
    The product rule with norms of each factor gives terms of order ``n_T^1.5 / lambda0^2``, as
    behind Oymak et al. 2021, Lemma 1, where the above has ``sqrt(n_T) / lambda0``.

    Examples
    --------
    Three feature maps, 100 training and 5000 validation rows with the loss ``min(|y - f|, 1)``:
    how far the validation risk can be from the risk, anywhere on the simplex.

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
