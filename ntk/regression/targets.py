"""Check a kernel and the targets of a regression, and return a matrix and columns.

A kernel ``[n1, n2, outputs, outputs]`` becomes a matrix of pairs (input, output). For a kernel
``[n1, n2]`` all outputs have the same matrix; each is a column.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ntk.internal import checks
from ntk.internal.sharding import without_explicit_axes
from ntk.kernels.functions import as_kernel_matrix as kernel
from ntk.kernels.symmetric import flatten_outputs, square_matrix, symmetric_matrix
from ntk.spectrum.eigenvalues import min_eigenvalue


class TrainingSet(NamedTuple):
    """A training set of ``N`` rows: n, or n times the outputs."""

    matrix: jax.Array  # [N, N]
    columns: jax.Array  # [N, q], the targets
    shape: tuple[int, ...]  # of the targets: [n] or [n, outputs]
    full: bool  # whether the kernel has the shape [n, n, outputs, outputs]


def check_training_set(K: Any, y: Any, name: str = "K", *, x: Any = None) -> TrainingSet:
    """Return kernel and targets in one floating type; errors call the kernel ``name``."""
    K, y = checks.real_array(name, kernel(K, x, name)), checks.real_array("y", y)
    K, y = without_explicit_axes((K, y))
    n, full = len(K) if K.ndim else 0, K.ndim == 4
    matrix = symmetric_matrix(square_matrix(K, name), name)
    if full and y.shape != (n, K.shape[3]):
        raise ValueError(f"y: expected shape [{n}, {K.shape[3]}], as {name} has it, got {y.shape}.")
    y = checks.regression_targets(y, n)
    dtype = checks.at_least_float32(matrix, y)
    columns = y.astype(dtype).reshape(len(matrix), -1)
    return TrainingSet(matrix.astype(dtype), columns, y.shape, full)


def check_cross_kernel(name: str, cross: Any, of: TrainingSet) -> tuple[jax.Array, tuple[int, ...]]:
    """Return the kernel of m other inputs with those of ``of``, and the results' shape."""
    cross = without_explicit_axes(checks.float_array(name, cross))
    n, *outputs = of.shape
    behind = (n, *2 * outputs) if of.full else (n,)
    if cross.shape[1:] != behind or not cross.ndim:
        expected = ", ".join(map(str, behind))
        raise ValueError(f"{name}: expected shape [m, {expected}], got {cross.shape}.")
    checks.check_finite(name, cross, "entries")
    return flatten_outputs(cross), (len(cross), *outputs)


def as_kernel(matrix: jax.Array, outputs: int) -> jax.Array:
    """Reshape [..., n1 outputs, n2 outputs] to [..., n1, n2, outputs, outputs]."""
    *first, rows, columns = matrix.shape
    split = matrix.reshape(*first, rows // outputs, outputs, columns // outputs, outputs)
    return jnp.swapaxes(split, -3, -2)


def with_penalty(matrix: jax.Array, penalty: Any) -> jax.Array:
    """Return ``K + penalty I``; a traced negative penalty gives NaN."""
    number = checks.nonnegative_number("penalty", penalty).astype(matrix.dtype)
    return matrix + number * jnp.eye(len(matrix), dtype=matrix.dtype)


def kernel_entry_error(dtype: Any) -> float:
    """Return the error of a kernel's entry over the root of both variances: 64 roundoffs."""
    return 64 * float(jnp.finfo(dtype).eps)


def cholesky(matrix: jax.Array, penalty: Any) -> jax.Array:
    """Return the lower factor of ``K + penalty I``; NaN if traced and singular to rounding."""
    shifted = with_penalty(matrix, penalty)
    factor = jax.lax.linalg.cholesky(shifted, symmetrize_input=False)
    sizes, error = jnp.diagonal(jax.lax.stop_gradient(shifted)), kernel_entry_error(matrix.dtype)
    # Errors of the entries count to first order only if this product is below 1.
    good = error * _inverse_norm(jax.lax.stop_gradient(factor), jnp.sqrt(sizes)) < 1
    if not checks.concrete(good):
        return checks.nan_unless(good, factor)
    if np.isnan(factor[-1, -1]):
        raise ValueError(
            "K: expected a positive definite matrix (a larger penalty makes it one), "
            f"got a smallest eigenvalue of {float(min_eigenvalue(shifted)):.3g}."
        )
    if not good:
        raise ValueError(
            f"penalty: expected at least {2 * error * float(jnp.max(sizes)):.2g} for this kernel "
            f"in {matrix.dtype}, got {float(penalty):.3g}: the kernel is singular to rounding, and "
            "results would have no correct digits. Add a penalty, or compute kernels in float64 "
            "(jax_enable_x64)."
        )
    return factor


@jax.jit
def _inverse_norm(factor: jax.Array, size: jax.Array) -> jax.Array:
    """Estimate from below the norm of ``D (L L')^-1 D``, with ``D = diag(size)``."""

    def step(carry, _):
        v, _ = carry
        w = size * jax.scipy.linalg.cho_solve((factor, True), size * v)
        length = jnp.linalg.norm(w)
        return (w / jnp.where(length > 0, length, 1), length), None

    n = len(size)
    start = jax.random.normal(jax.random.key(0), (n,), size.dtype)
    (_, norm), _ = jax.lax.scan(step, (start / jnp.linalg.norm(start), size[0]), length=10)
    return norm
