"""Check kernel matrices: square, finite, and symmetric up to rounding.

Eigenvalue routines read one triangle: of a matrix that is not symmetric they return meaningless
values. The two halves of a kernel can be rounded differently. Sums of p products in two orders
differ by about ``sqrt(p) eps``, so 1000 eps covers a million weights. Products with [n, n] matrices
differ by less than ``n eps``. Larger differences are not roundoff.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ntk.internal import checks


def flatten_outputs(K: Any) -> Any:
    """Flatten [n1, n2, outputs, outputs] to [n1 outputs, n2 outputs]; return others unchanged."""
    if K.ndim != 4:
        return K
    n1, n2, a, b = K.shape
    return K.transpose(0, 2, 1, 3).reshape(n1 * a, n2 * b)


def square_matrix(K: Any, name: str = "K") -> Any:
    """Return a kernel as a square matrix: ``[n, n]``, or ``[n, n, o, o]`` as ``[n o, n o]``.

    Row ``i o + a`` belongs to input i and output a.
    """
    K = K if isinstance(K, np.ndarray) else checks.real_array(name, K)
    shape = K.shape
    if len(shape) not in (2, 4) or shape[0] != shape[1] or shape[-1] != shape[-2] or not K.size:
        raise ValueError(
            f"{name}: expected a square matrix, got shape {shape}. Kernels have the shape [n, n] "
            "or [n, n, outputs, outputs]."
        )
    return flatten_outputs(K)


def allowed_asymmetry(dtype: Any, n: int) -> float:
    """Return the allowed difference of entries (i, j) and (j, i), relative to the largest entry."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return 0.0  # integers are exact
    # 16-bit values are summed in 32 bits, and rounded once.
    summed = jnp.finfo(checks.at_least_float32(dtype)).eps
    return 2 * float(jnp.finfo(dtype).eps) + max(1000, n) * float(summed)


def symmetric_matrix(K: Any, name: str = "K", *, stack: bool = False) -> jax.Array:
    """Return ``K`` [n, n] (``stack``: [..., n, n]) in floating point, exactly symmetric.

    A traced matrix that is not finite and symmetric becomes NaN, its derivative too.
    """
    K = checks.real_array(name, K)
    if K.ndim < 2 or (K.ndim > 2 and not stack) or K.shape[-1] != K.shape[-2] or not K.size:
        expected = "square matrices [..., n, n]" if stack else "a square matrix"
        raise ValueError(f"{name}: expected {expected}, got shape {K.shape}.")
    allowed = allowed_asymmetry(K.dtype, K.shape[-1])
    K = checks.float_array(name, K)
    if not checks.concrete(K):
        half, known = _symmetrize(K, allowed)
        return checks.nan_unless(known, half)
    if _equals_transpose(K):
        return K
    with jax.ensure_compile_time_eval():  # the caller may trace other arguments
        half, known = _symmetrize(K, allowed)
        valid = bool(known.all())
    if not valid:
        check_symmetric(np.asarray(K), allowed, name)  # raises the right message
    return half


def host_matrix(K: jax.Array) -> np.ndarray | None:
    """Return a concrete ``K`` as a numpy array without a copy; None if it is not on one CPU."""
    return np.asarray(K) if [d.platform for d in K.devices()] == ["cpu"] else None


def _equals_transpose(K: jax.Array) -> bool:
    """Return whether ``K`` is finite and equal to its transpose. False if it is not on one CPU."""
    matrix, size = host_matrix(K), 128  # strips of rows fit into a cache: several times as fast
    if K.ndim != 2 or matrix is None:
        return False
    for i in range(0, len(matrix), size):
        rows = matrix[i : i + size, i:]
        if not (np.isfinite(rows).all() and (rows == matrix[i:, i : i + size].T).all()):
            return False
    return True


@functools.partial(jax.jit, static_argnums=1)
def _symmetrize(K: jax.Array, allowed: float) -> tuple[jax.Array, jax.Array]:
    """Return the symmetric part, and whether matrices are finite and symmetric, [..., 1, 1]."""
    off, largest = _half_asymmetry(jnp, jax.lax.stop_gradient(K))
    # We compare entry by entry, because a compiled maximum over NaN need not be NaN.
    known = (jnp.isfinite(K) & (off <= allowed * largest)).all((-1, -2), keepdims=True)
    return K / 2 + jnp.swapaxes(K, -1, -2) / 2, known


def check_symmetric(K: np.ndarray, allowed: float, name: str) -> None:
    """Raise ValueError unless ``K`` [..., n, n] is finite and symmetric up to ``allowed``."""
    checks.check_finite(name, K, "entries")
    off, largest = _half_asymmetry(np, K)
    if (off > allowed * largest).any():
        *which, _, _ = np.unravel_index(np.argmax(off - allowed * largest), off.shape)
        differ, explained = 2 * float(off[*which].max()), 2 * allowed * float(largest[*which].max())
        raise ValueError(
            f"{name}: expected a symmetric matrix, got entries (i, j) and (j, i) that differ by "
            f"{differ:.3g}, where rounding explains {explained:.1g}."
        )


def _half_asymmetry(xp, K):
    """Return half of ``|K_ij - K_ji|`` and of the largest entry; the whole could overflow."""
    off = xp.abs(K / 2 - xp.swapaxes(K, -1, -2) / 2)
    return off, xp.max(xp.abs(K), axis=(-1, -2), keepdims=True) / 2
