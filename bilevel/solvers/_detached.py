"""Functions cut off from differentiation."""

from collections.abc import Callable

import jax

from bilevel.contracts import Pytree
from ntk.internal.compile_cache import fresh


def detached(function: Callable, *args: Pytree) -> Pytree:
    """``function(*args)`` cut off from differentiation, closed-over values included.

    Stopping the inputs rather than the output keeps JAX from tracing a derivative only to throw it
    away, and lets ``function`` contain loops that have no reverse mode.
    """
    converted, hoisted = jax.closure_convert(fresh(function), *args)
    return converted(*jax.lax.stop_gradient((*args, *hoisted)))
