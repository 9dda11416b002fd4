"""Define the bilevel problem, and the derivatives of its lower loss that other modules use.

The papers write L_V or f for ``outer``, L_T or g for ``lower``, and H for ``d^2 lower / dw^2``.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import optax

from bilevel.contracts import LinearMap, Loss, Pytree, Stateful
from bilevel.internal.checks import check_loss_pair, scalar_loss
from bilevel.internal.custom_rules import REVERSE_OVER_REVERSE, exact_order, linearize_custom_rules
from bilevel.internal.precision import like_variables


@dataclasses.dataclass(frozen=True)
class Problem:
    """Minimize ``outer(w*(alpha), alpha, valid)``, ``w*(alpha) = argmin_w lower(w, alpha, train)``.

    Attributes
    ----------
    lower, outer : ``loss(w, alpha, batch) -> scalar``
        Pure functions of any pytrees. They may close over further hyperparameters, also traced
        ones: derivatives with respect to those are right too.
    has_aux : bool
        Whether both return ``(loss, aux)``. ``aux`` is any pytree of arrays (e.g. metrics) and is
        not differentiated. It is returned as ``HyperGradient.aux``, and for every step of a search
        as ``history["aux"]``, ``{"lower": ..., "outer": ...}``.
    stateful : bool
        Whether weights are :class:`bilevel.Stateful`, and ``lower`` returns ``(loss, variables)``
        (with ``has_aux``: ``(loss, (variables, aux))``): batch statistics, moving averages.
    differentiated : bool
        Whether derivatives pass through these variables. By default they do not.

    Raises
    ------
    ValueError
        If a loss is not callable, or ``differentiated`` is given without ``stateful``.

    Examples
    --------
    >>> problem = Problem(
    ...     lower=lambda w, alpha, batch: 0.5 * ((w - batch) ** 2 + alpha * w**2),
    ...     outer=lambda w, alpha, batch: (w - batch) ** 2,
    ... )
    >>> float(problem.outer(1.0, 0.0, 3.0))
    4.0

    The largest residual as an auxiliary output:

    >>> import bilevel
    >>> import jax.numpy as jnp
    >>> def squares(w, alpha, batch):
    ...     residual = jnp.abs(w - batch)
    ...     return 0.5 * jnp.sum(residual**2 + alpha * w**2), residual.max()
    >>> problem = Problem(squares, squares, has_aux=True)
    >>> fn = bilevel.hypergradient(problem, bilevel.implicit(), diagnostics=False)
    >>> fn(jnp.array(1.0), jnp.zeros(2), jnp.array([2.0, 4.0]), jnp.zeros(2)).aux
    {'lower': Array(2., dtype=float...), 'outer': Array(2., dtype=float...)}
    """

    lower: Loss
    outer: Loss
    has_aux: bool = False
    stateful: bool = False
    differentiated: bool = False

    def __post_init__(self) -> None:
        if self.differentiated and not self.stateful:
            raise ValueError("differentiated: expected stateful=True beside it, got False.")
        for name in ("lower", "outer"):
            loss = getattr(self, name)
            if not callable(loss):
                raise ValueError(
                    f"{name}: expected a function (w, alpha, batch) -> scalar, got {loss!r}."
                )


_FORM = "has_aux", "stateful", "differentiated"


class SplitLosses(NamedTuple):
    """The losses of a problem in one form, independent of its options."""

    lower: Callable[[Pytree, Pytree, Pytree], tuple]  # -> loss, variables or None, aux or None
    outer: Callable[[Pytree, Pytree, Pytree], tuple]  # -> loss, aux or None


def split_losses(problem: Problem) -> SplitLosses:
    """Return the losses with their outputs split into loss, variables and aux."""
    has_aux, stateful, differentiated = (getattr(problem, name, False) for name in _FORM)

    def lower(w, alpha, batch):
        if stateful:  # flax's nnx mutates variables only in a tree that was just unflattened
            w = jax.tree.map(lambda x: x, w)
        returned = problem.lower(w, alpha, batch)
        if not (has_aux or stateful):
            return scalar_loss("lower", returned), None, None
        form = "(loss, aux), as has_aux=True says"
        if stateful:
            form = "(loss, variables), as stateful=True says"
        loss, extras = check_loss_pair("lower", returned, form)
        scalar_loss("lower", loss)
        if not stateful:
            return loss, None, extras
        form = "(loss, (variables, aux)), as stateful=True and has_aux=True say"
        variables, aux = check_loss_pair("lower", extras, form) if has_aux else (extras, None)
        variables = like_variables(variables, w.variables)
        return loss, variables if differentiated else jax.lax.stop_gradient(variables), aux

    def outer(w, alpha, batch):
        returned = problem.outer(w, alpha, batch)
        loss, aux = returned, None
        if has_aux:
            loss, aux = check_loss_pair("outer", returned, "(loss, aux), as has_aux=True says")
        return scalar_loss("outer", loss), aux

    return SplitLosses(lower, outer)


def at_variables(problem: Problem, variables: Pytree) -> Problem:
    """Return the problem as losses of ``params`` alone, without aux."""
    losses = split_losses(problem)
    stateful = getattr(problem, "stateful", False)

    def whole(params):
        return Stateful(params, variables) if stateful else params

    return Problem(
        lambda w, alpha, batch: losses.lower(whole(w), alpha, batch)[0],
        lambda w, alpha, batch: losses.outer(whole(w), alpha, batch)[0],
    )


def stack_problems(problem: Problem) -> Problem:
    """Combine many independent copies of ``problem`` into one: every array gains a leading axis.

    The losses are sums over the copies, so each copy has the hypergradient, steps and geometry that
    it would have alone. One search runs all copies (seeds, splits) with one progress bar and one
    checkpoint. Auxiliary outputs gain the axis too.

    The copies interact if a solver or optimizer uses a norm over all weights, such as
    ``optax.clip_by_global_norm`` or the relative tolerance of an iterative solver. ``jax.vmap`` of
    :func:`bilevel.search` keeps copies independent.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> one = Problem(lambda w, a, b: (w - a) ** 2, lambda w, a, b: (w - b) ** 2)
    >>> stack_problems(one).outer(jnp.zeros(3), jnp.ones(3), jnp.ones(3))
    Array(3., dtype=float...)
    """

    def total(loss: Loss) -> Loss:
        def of_all(w, alpha, batch):
            values = jax.vmap(loss)(w, alpha, batch)
            return (values[0].sum(), values[1]) if isinstance(values, tuple) else values.sum()

        return of_all

    return dataclasses.replace(problem, lower=total(problem.lower), outer=total(problem.outer))


def lower_gradient(lower: Loss, alpha: Pytree, batch: Pytree) -> Callable[[Pytree], Pytree]:
    """Return ``w -> d lower / dw``."""
    return lambda w: jax.grad(lower)(w, alpha, batch)


def hessian_operator(
    lower: Loss, w: Pytree, alpha: Pytree, batch: Pytree
) -> tuple[Pytree, LinearMap]:
    """Return the lower gradient at ``w`` and ``v -> H v``, linearized once for many products."""
    return linearize_custom_rules(lower_gradient(lower, alpha, batch), w)


def mixed_product(loss: Callable, w: Pytree, alpha: Pytree, v: Pytree) -> Pytree:
    """Return ``grad_alpha (v . grad_w loss)``, for any derivative rules in ``loss(w, alpha)``."""

    def work(alpha):
        if order == REVERSE_OVER_REVERSE:
            return optax.tree.vdot(v, jax.grad(loss)(w, alpha))
        return jax.jvp(lambda w: loss(w, alpha), (w,), (v,))[1]

    order = exact_order(jax.make_jaxpr(loss)(w, alpha))
    return jax.grad(work)(alpha)
