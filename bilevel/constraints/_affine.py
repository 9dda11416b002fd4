"""Linear equations on all weights together."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bilevel.constraints._members import on_vector, require, value_at
from bilevel.contracts import Constraint
from bilevel.internal.checks import concrete, describe, offending
from ntk.internal.products import matmul

_RANK = 1e-12  # singular values below this share of the largest one count as 0


def affine(matrix: Any, right: Any) -> Constraint:
    """Require ``matrix @ w = right``, with ``w`` in the order of ``ravel_pytree``.

    Parameters
    ----------
    matrix : array [m, p] or [p]
        Known values. Rows may be linearly dependent. Its pseudo-inverse is computed once.
    right : array [m], or ``right(alpha) -> array [m]``
        Right-hand sides that some weights attain.
    """
    if not concrete(matrix):
        raise ValueError("matrix: expected known values, got traced ones.")
    try:
        rows = np.atleast_2d(np.asarray(matrix, np.float64))
    except (TypeError, ValueError):
        raise ValueError(f"matrix: expected an array [m, p], got {describe(matrix)}.") from None
    if rows.ndim != 2 or 0 in rows.shape:
        raise ValueError(f"matrix: expected an array [m, p], got shape {np.shape(matrix)}.")
    if not np.isfinite(rows).all():
        number = offending(rows, np.isfinite(rows))
        raise ValueError(f"matrix: expected finite numbers, got {number}.")
    inverse = np.linalg.pinv(rows, rcond=_RANK)
    unreachable = np.eye(len(rows)) - rows @ inverse

    def check(a, b, inverse):
        size = jnp.linalg.norm(b)
        missed = jnp.linalg.norm(matmul(jnp.asarray(unreachable, b.dtype), b))
        eps = float(jnp.finfo(b.dtype).eps)
        expected = "right-hand sides that some weights attain (a set that is not empty)"
        return require("right", missed <= 1000 * eps * len(rows) * size, expected, missed)

    if not callable(right):
        known = np.asarray(right, np.float64) if concrete(right) else None
        if known is not None and known.shape in ((), (len(rows),)):
            values = np.broadcast_to(known, (len(rows),))
            missed = np.linalg.norm(unreachable @ values)
            if not missed <= 1e-6 * np.linalg.norm(values):
                raise ValueError(
                    "right: expected right-hand sides that some weights attain, got an empty set: "
                    f"every w misses them by {missed:.3g}."
                )

    def resolved(w, alpha):
        leaves = optax.tree.size(w)
        if leaves != rows.shape[1]:
            raise ValueError(
                f"matrix: expected {leaves} columns, one per weight, got {rows.shape[1]}."
            )
        value = value_at(right, alpha)
        if jnp.shape(value) not in ((), (len(rows),)):
            raise ValueError(
                f"right: expected one number per row of the matrix, {len(rows)}, "
                f"got shape {jnp.shape(value)}."
            )
        dtype = jnp.result_type(*jax.tree.leaves(w))
        b = jnp.broadcast_to(jnp.asarray(value, dtype), (len(rows),))
        return jnp.asarray(rows, dtype), b, jnp.asarray(inverse, dtype)

    return on_vector(
        parameters=resolved,
        blank=lambda size: (),
        identify=lambda w, g, eta, *_: (),
        prox=lambda code, z, eta, a, b, inverse: z - matmul(inverse, matmul(a, z) - b),
        step=lambda code, w, g, eta, a, b, inverse: (
            -eta * (g - matmul(inverse, matmul(a, g))) - matmul(inverse, matmul(a, w) - b)
        ),
        tangent=lambda code, w, v, a, b, inverse: v - matmul(inverse, matmul(a, v)),
        margins=lambda code, w, g, *_: (),
        check=check,
    )
