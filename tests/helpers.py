"""Shared by the tests: tolerances by precision, and derivatives by finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree


def tolerance(f64=1e-9, f32=1e-3):
    """The tolerance for the precision that the tests run in."""
    return f64 if jax.config.jax_enable_x64 else f32


def assert_close(actual, expected, *, f64=1e-9, f32=1e-3):
    """Equal pytrees, up to the precision's tolerance relative to the largest entry expected."""
    actual, expected = (np.asarray(ravel_pytree(tree)[0]) for tree in (actual, expected))
    assert actual.shape == expected.shape
    scale = np.max(np.abs(expected), initial=1e-30)
    np.testing.assert_allclose(actual / scale, expected / scale, rtol=0, atol=tolerance(f64, f32))


def finite_differences(function, x):
    """Jacobian of ``function`` (scalar, or any pytree, flattened) in the pytree ``x``: [..., size].

    Central and of fourth order: in float64 good to 1e-11, where ``function`` is good to rounding.
    """
    flat, unravel = ravel_pytree(x)
    h = tolerance(1e-3, 3e-2)

    def at(i, t):
        value = ravel_pytree(function(unravel(flat.at[i].add(t * h))))[0]
        return np.asarray(value, np.float64)

    columns = [
        (8 * (at(i, 1) - at(i, -1)) - (at(i, 2) - at(i, -2))) / (12 * h) for i in range(flat.size)
    ]
    return np.squeeze(np.stack(columns, -1), 0) if columns[0].size == 1 else np.stack(columns, -1)


def lower_hessian(lower, w, alpha, batch):
    """``d^2 lower / dw^2`` as a [p, p] array, by JAX's dense second derivative."""
    flat, unravel = ravel_pytree(w)
    return jax.hessian(lambda v: lower(unravel(v), alpha, batch))(flat)


def cast(tree, dtype):
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)
