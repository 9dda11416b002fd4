"""Functions cut off from differentiation."""

from collections.abc import Callable

import jax

from bilevel.contracts import Pytree
from ntk.internal.compile_cache import fresh


def detached(function: Callable, *args: Pytree) -> Pytree:
    """Return ``function(*args)`` without derivatives, also in closed-over values.

    The inputs are stopped, so ``function`` may contain loops without a reverse mode.
    """
    converted, hoisted = jax.closure_convert(fresh(function), *args)
    return converted(*jax.lax.stop_gradient((*args, *hoisted)))
