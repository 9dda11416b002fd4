"""The contracts that the parts of the library share: type aliases and two small records.

A bilevel problem is ``min_alpha outer(w*(alpha), alpha, valid)`` with ``w*(alpha)`` a minimiser of
``lower(., alpha, train)``. Parameters ``w`` and hyperparameters ``alpha`` are pytrees of floating
arrays; a batch is any pytree of arrays.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

Pytree = Any
Loss = Callable[[Pytree, Pytree, Pytree], jax.Array]
"""``loss(w, alpha, batch) -> scalar``."""

LinearMap = Callable[[Pytree], Pytree]
"""``hvp(v) -> H v``: linear, symmetric, on pytrees shaped like ``w``."""


class LowerSolver(NamedTuple):
    """A lower solver: a pair of pure functions, differentiable in ``alpha``.

    Attributes
    ----------
    init : ``init(w) -> state``.
        What the solver carries from one outer step to the next: optimizer momentum, the last
        adjoint as the warm start of the next linear solve.
    run : ``run(lower, alpha, w, state, batch) -> (w, state)``.
        Solves the lower problem from ``w``.
    closed_form : bool
        True where ``run`` does not call ``lower``: its adjoint then cannot be read off a tilted
        lower loss, and is solved for independently when the hypergradient is checked.
    """

    init: Callable[[Pytree], Pytree]
    run: Callable[[Loss, Pytree, Pytree, Pytree, Pytree], tuple[Pytree, Pytree]]
    closed_form: bool = False


class Point(NamedTuple):
    """Where a Hessian is taken: an inverse that works in function space needs to know."""

    w: Pytree
    alpha: Pytree
    batch: Pytree


Inverse = Callable[[LinearMap, Pytree, Pytree, Point], Pytree]
"""``inverse(hvp, b, x0, point) -> x`` with ``H x = b`` or an approximation of it, linear in ``b``
up to its tolerance; ``x0`` is a warm start that an inverse is free to ignore."""
