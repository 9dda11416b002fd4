"""The algorithm of :mod:`ntk.spectrum.eigenvalues` for eager calls on a CPU, by LAPACK.

Nothing is compiled, and LAPACK's triangular solves of one vector are faster than XLA's products.
"""

from collections.abc import Callable

import numpy as np
import scipy.linalg

SMALL = 64  # up to this number of rows the full spectrum is cheapest
BASIS = 48  # vectors of a Lanczos basis; a restart keeps a third of them
STEP = 8  # vectors between convergence checks
CYCLES, TRIES = 3, 10  # maximum restarts per shift, and maximum shifts

_Solve = Callable[[np.ndarray], np.ndarray]


def eigenvector_by_lapack(K: np.ndarray) -> np.ndarray:
    """Return a unit eigenvector of the smallest eigenvalue of a finite symmetric ``K``."""
    n, eps = len(K), float(np.finfo(K.dtype).eps)
    if n <= SMALL:
        return scipy.linalg.eigh(K)[1][:, 0]
    norm = float(scipy.linalg.get_lapack_funcs("lange", (K,))("1", K.T)) or 1.0
    relative = max(1e-11, 10 * eps)
    vector, shift, value, distance = np.zeros(n, K.dtype), 4.0, 0.0, 0.0
    for attempt in range(TRIES):
        solve, shift = _shifted_solver(K, norm, value, distance, limit=shift)
        start = vector + 0.1 * _random_direction(attempt, n, K.dtype)

        def allowed(theta, shift=shift):  # as in `ntk.spectrum.eigenvalues`
            error = max(relative * abs(1 / theta - shift), eps if shift else 0.0)
            return max(error * theta, 10 * eps) * theta

        vector, theta, residual = _dominant_eigenpair(solve, start, allowed)
        # One more step removes components of distant eigenvalues.
        vector = solve(vector)
        vector /= _scaled_length(vector)
        if residual <= allowed(theta):
            break
        # Eigenvalues that are crowded relative to 0 are far apart relative to a close shift.
        value, distance = 1 / theta - shift, 2 * residual / theta / theta + 20 * eps
    return vector


def _shifted_solver(
    K: np.ndarray, norm: float, value: float, distance: float, limit: float
) -> tuple[_Solve, float]:
    """Return ``v -> (K / norm + shift I)^-1 v`` and ``shift = distance - value``.

    The distance grows until the matrix is positive definite; the shift ``limit`` always suffices.
    """
    potrf = scipy.linalg.get_lapack_funcs("potrf", (K,))
    trsv = scipy.linalg.get_blas_funcs("trsv", (K,))
    A = np.empty_like(K, order="C")
    while True:
        shift = min(distance - value, limit)
        np.divide(K, norm, out=A)
        A.ravel()[:: len(K) + 1] += shift
        # LAPACK stores columns. The transpose of a symmetric matrix is factorized without a copy.
        factor, failure = potrf(A.T, lower=1, overwrite_a=1, clean=0)
        # The inverse of a smaller matrix would overflow.
        if not failure and factor.diagonal().min() > (1e8 * np.finfo(K.dtype).tiny) ** 0.5:
            break
        if shift >= limit:
            raise ValueError("K: expected a matrix whose sums of rows are finite, got larger ones.")
        distance = max(16 * distance, 10 * float(np.finfo(K.dtype).eps))
    return lambda v: trsv(factor, trsv(factor, v, lower=1), lower=1, trans=1), shift


def _random_direction(i: int, n: int, dtype: np.dtype) -> np.ndarray:
    v = np.random.default_rng(i).standard_normal(n).astype(dtype)
    return v / _scaled_length(v)


def _scaled_length(v: np.ndarray) -> float:
    """Return the length of a vector, also if squares of its entries overflow or underflow."""
    largest = np.abs(v).max()
    return largest * np.linalg.norm(v / largest) if largest else largest


def _dominant_eigenpair(
    solve: _Solve, start: np.ndarray, allowed: Callable[[float], float]
) -> tuple[np.ndarray, float, float]:
    """Return a unit vector, theta and the residual of the largest eigenvalue of ``solve``."""
    n, dtype = len(start), start.dtype
    keep, eps = BASIS // 3, float(np.finfo(dtype).eps)
    V, T = np.zeros((BASIS, n), dtype), np.zeros((BASIS, BASIS), dtype)
    v, size = start / _scaled_length(start), 0
    for _ in range(CYCLES):
        for filled in range(size + STEP, BASIS + STEP, STEP):
            for j in range(size, filled):
                V[j] = v
                basis = V[: j + 1]
                w = solve(v)
                h = basis @ w  # T's column j, with the coupling to vectors from before a restart
                scale = _scaled_length(w)
                w -= h @ basis
                # In an invariant subspace w is noise; a random direction leads to the others.
                exhausted = _scaled_length(w) <= 10 * eps * scale
                if exhausted:
                    w = _random_direction(j + 1, n, dtype)
                again = basis @ w
                w -= again @ basis
                T[: j + 1, j] = T[j, : j + 1] = h if exhausted else h + again
                length = _scaled_length(w)
                v = w / length
            size = filled
            theta, S = scipy.linalg.eigh(T[:size, :size])
            coupling = 0.0 if exhausted else length
            residual = float(coupling * abs(S[-1, -1]))
            if residual <= allowed(float(theta[-1])):
                break
        best = S[:, -1] @ V[:size]
        if residual <= allowed(float(theta[-1])):
            break
        V[:keep] = S[:, -keep:].T @ V
        T[:] = np.diag(np.r_[theta[-keep:], np.zeros(BASIS - keep, dtype)])
        size = keep
    return best / _scaled_length(best), float(theta[-1]), residual
