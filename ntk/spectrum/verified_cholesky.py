"""Prove that float64 matrices with entries of about 1 are positive definite, by Cholesky's method.

:mod:`ntk.spectrum.certificate` has the slack for roundoff, and its proof.
"""

import functools
import math

import numpy as np
import scipy.linalg
import scipy.sparse.linalg
import threadpoolctl

UNIT = 2.0**-53  # the relative error of one rounding in float64
TINY = 1e-290  # covers underflows, in matrices with entries of about 1
SUMMED = 1 + 1e-9  # covers the roundoff of a sum of up to 10^6 nonnegative numbers

# A search through the process's libraries.
_loaded_libraries = functools.cache(threadpoolctl.ThreadpoolController)


def shifted_bound(A, shift) -> float | None:
    """Return ``shift - slack`` if Cholesky proves that ``lambda_min(A)`` is above it, else None."""
    B = A.copy()
    B[np.diag_indices_from(B)] -= shift
    lost = cholesky_slack(B.diagonal())
    if not B.diagonal().min() > 0:
        return None
    factor, failure = scipy.linalg.lapack.dpotrf(B.T, lower=1, overwrite_a=1, clean=0)
    if failure or not np.isfinite(factor.diagonal()).all():
        return None
    return down(shift - lost)


def cholesky_slack(diagonal) -> float:
    """Return the slack of the proof, for the ``B`` with this diagonal."""
    n = len(diagonal)
    g = (n + 2) * UNIT / (1 - (n + 2) * UNIT)
    return 1.01 * (g / (1 - g) * diagonal.sum() + UNIT * diagonal.max()) + TINY


def smallest(A, shift=0.0):
    """Return an estimate of the smallest eigenvalue, and a unit eigenvector; not rigorous.

    By Lanczos on the inverse of ``A + shift I``, with a larger shift if this is not definite.
    """
    n = len(A)
    if n > 100:
        while True:
            factor, failure = scipy.linalg.lapack.dpotrf(A + shift * np.eye(n), clean=0)
            if not failure:
                break
            shift = max(16 * shift, 10 * UNIT * np.abs(A).sum(1).max(), TINY)
        inverse = scipy.sparse.linalg.LinearOperator(
            (n, n), lambda v: scipy.linalg.lapack.dpotrs(factor, v)[0], dtype=float
        )
        start = np.random.default_rng(0).standard_normal(n)
        try:
            theta, x = scipy.sparse.linalg.eigsh(inverse, k=1, v0=start, tol=1e-9, maxiter=10)
            return 1 / theta[0] - shift, x[:, 0]
        except scipy.sparse.linalg.ArpackError:
            pass  # for crowded eigenvalues the full decomposition takes no longer
    values, vectors = scipy.linalg.eigh(A, subset_by_index=[0, 0])
    return values[0], vectors[:, 0]


def norm_bound(e) -> float:
    """Return a bound of the spectral norm of all matrices with entries of size up to ``e``."""
    return np.sqrt(e.sum(0).max()) * np.sqrt(e.sum(1).max()) * SUMMED + TINY


def threads(n):
    """Limit BLAS to one thread for small matrices; with more, threads wait 50 times as long."""
    return _loaded_libraries().limit(limits=1 if n < 2000 else None, user_api="blas")


def down(x) -> float:
    """Return the next smaller float64."""
    return float(np.nextafter(x, -np.inf))


def up(x) -> float:
    """Return the next larger float64."""
    return float(np.nextafter(x, np.inf))


def power_of_two(array) -> float:
    """Return a power of two of the size of the largest entry, so that division by it is exact."""
    largest = float(np.abs(array).max())
    return 2.0 ** np.clip(math.frexp(largest)[1], -900, 900) if largest else 1.0
