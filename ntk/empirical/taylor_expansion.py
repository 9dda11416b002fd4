"""Networks expanded in their parameters: training if the tangent kernel does not change.

    f_k(θ, x) = Σ_{i <= k} (1 / i!) (d/dt)^i f(θ0 + t (θ - θ0), x) at t = 0

The first order is the linearised network. Its gradient at any θ is that of ``f`` at ``θ0``, so its
kernel is the empirical one at ``θ0`` throughout training.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from ntk.empirical.network_program import Apply, array_dtype, replaced
from ntk.internal.checks import function, integer


def taylor_expand(apply: Apply, params: Any, order: int) -> Apply:
    """Return the Taylor polynomial of ``apply`` in its parameters about ``params``.

    Parameters
    ----------
    apply : callable
        ``apply(params, x)``; it may return a pytree.
    params : pytree
        ``θ0``. Leaves that are not floating point are constants.
    order : int
        The highest power of ``θ - θ0``, at least 0.

    Returns
    -------
    callable
        ``expanded(params, x)``, which returns the same structure as ``apply``.

    Raises
    ------
    ValueError
        If ``apply`` is not a function or ``order`` is negative; when called, if its parameters are
        not like ``params``.

    Notes
    -----
    Forward mode within forward mode: up to ``2^order`` calls of ``apply``, which a compiler merges:
    order 5 took three times as long as order 2. At a kink (ReLU at 0) JAX chooses the derivatives.
    Sources: Lee et al. (2019), "Wide neural networks of any depth evolve as linear models"; Bai &
    Lee (2020), "Beyond linearization", for the second order.

    Examples
    --------
    >>> cube = taylor_expand(lambda w, x: w**3 * x, 1.0, 2)
    >>> float(cube(2.0, 1.0))  # 1 + 3 + 3; the cube itself is 8
    7.0
    """
    function("apply", apply, "(params, x)")
    integer("order", order, 0)
    flat, structure = jax.tree.flatten(params)
    free = [i for i, leaf in enumerate(flat) if _is_float(leaf)]
    start = [jnp.asarray(flat[i]) for i in free]

    def expanded(params, x):
        leaves = _matching_leaves(structure, flat, params)
        step = [jnp.asarray(leaves[i]) - flat[i] for i in free]
        step = [d.astype(leaf.dtype) for d, leaf in zip(step, start, strict=True)]

        def along(values):
            return apply(jax.tree.unflatten(structure, replaced(flat, free, values)), x)

        terms = _directional_derivatives(along, order, start, step)
        weights = [1 / math.factorial(i) for i in range(1, order + 1)]

        def total(value, *derivatives):
            if not jnp.issubdtype(jnp.result_type(value), jnp.inexact):
                return value  # integers are not differentiated
            return value + sum(w * d for w, d in zip(weights, derivatives, strict=True))

        return jax.tree.map(total, *terms)

    return expanded


def _directional_derivatives(f, order: int, start: list, step: list) -> list:
    """Return ``f`` at ``start``, and its derivatives along ``step`` there."""
    # JAX's `jet` was slower at all orders, and fails at ReLUs.
    if order == 0:
        return [f(start)]
    lower, derivatives = jax.jvp(
        lambda at: _directional_derivatives(f, order - 1, at, step), (start,), (step,)
    )
    return [*lower, derivatives[-1]]


def _is_float(leaf) -> bool:
    dtype = array_dtype("params", leaf)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise ValueError(f"params: expected real numbers, got {dtype}.")
    return bool(jnp.issubdtype(dtype, jnp.floating))


def _matching_leaves(structure, flat: list, params) -> list:
    """Return the leaves of ``params``, which must be like the point of expansion."""
    leaves, other = jax.tree.flatten(params)
    if other != structure:
        raise ValueError(f"params: expected {structure}, got {other}.")
    for leaf, first in zip(leaves, flat, strict=True):
        _is_float(leaf)  # raises for leaves that are not real arrays
        if jnp.shape(leaf) != jnp.shape(first):
            raise ValueError(
                f"params: expected leaves of the shapes at the point of expansion, such as "
                f"{jnp.shape(first)}, got {jnp.shape(leaf)}."
            )
    return leaves
