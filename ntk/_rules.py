"""Derivatives of our own that loops do not lose.

Where the reverse pass of a loop (``lax.scan``, ``lax.map``) is differentiated once more, JAX takes
its body apart to bring out what does not change from pass to pass. Functions with a derivative of
their own (``jax.custom_jvp``) are opened in it, and second derivatives are then those of their
code: infinite where the rule knows a limit, 0 where a loop ended early. What ``jax.checkpoint``
holds is not opened.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax


def custom_jvp(function: Callable, nondiff_argnums: tuple[int, ...] = ()) -> Any:
    """``jax.custom_jvp``, with ``defjvp``, whose rule is kept by loops too.

    What the rule computes besides the value is computed in the reverse pass, not kept for it.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> @custom_jvp
    ... def cube(x):
    ...     return jax.lax.stop_gradient(x) ** 3
    >>> @cube.defjvp
    ... def _(primals, tangents):
    ...     (x,), (dx,) = primals, tangents
    ...     return cube(x), 3 * x**2 * dx
    >>> looped = lambda x: jax.lax.map(lambda k: cube(k * x), jnp.ones(1))[0]
    >>> float(jax.grad(jax.grad(looped))(2.0))
    12.0
    """
    rule = jax.custom_jvp(function, nondiff_argnums=nondiff_argnums)
    held: Any = jax.checkpoint(rule, prevent_cse=False, static_argnums=nondiff_argnums)
    kept: Any = functools.wraps(function)(lambda *args: held(*args))
    kept.defjvp = rule.defjvp
    return kept
