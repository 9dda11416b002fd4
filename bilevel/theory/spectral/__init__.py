"""The mixture of feature maps by one eigenvector (Oymak et al. 2021, section 5).

With the h feature maps of an input as the rows of a matrix X [h, p], the mixture's prediction is

    theta' phi_alpha(x) = alpha' X theta = <X, alpha theta'>

so that mixture and weights together are one matrix of rank 1. n < p + h samples do not determine
this matrix, but they can determine alpha, in two stages (Theorem 4):

    M = sum_V y_i X_i,   alpha^ = the top left singular vector of M        (on validation rows)
    theta^ = argmin_theta sum_T (y_i - alpha^' X_i theta)^2                (on training rows)

alpha^ is the top eigenvector of the h x h Gram matrix ``M M'``, with entries ``y' K_ij y`` for the
kernels ``K_ij = Phi_i Phi_j'``. So features can come a few columns at a time
(:class:`bilevel.theory.spectral.columns.Columns`), and p can be infinite.

X_1..n are ``features`` [n, h, p], ``Columns``, or the kernels [h, h, n, n]; y are ``labels`` [n],
or [n, c]: c outputs, with an M each, share alpha. :func:`spectral_alpha` has unit norm and an
arbitrary sign; theta^ is ``Phi_alpha' dual`` of :func:`spectral_estimator`, never formed. rho^2 is
``correlation_squared``, ``(alpha*' alpha^)^2`` for unit vectors; p_bar and h_bar are ``p / n`` and
``h / n``, with n rows in V and n in T.

Reference: Oymak, Li & Soltanolkotabi (2021), "Generalization Guarantees for Neural Architecture
Search with Train-Validation Split", section 5. In its definition of V, ``X~_i`` belongs to
``y~_i``, and the unit vectors of Theorem 4 are alpha* and theta*.
"""

from bilevel.theory.spectral.estimator import (
    noise_gram,
    simplex_start,
    spectral_alpha,
    spectral_estimator,
)
from bilevel.theory.spectral.limits import spectral_limits, spectral_sample

__all__ = [
    "noise_gram",
    "simplex_start",
    "spectral_alpha",
    "spectral_estimator",
    "spectral_limits",
    "spectral_sample",
]
