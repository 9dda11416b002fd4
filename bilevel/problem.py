"""The bilevel problem, and the derivatives of its lower loss that every other module uses.

==========  =====================================================
paper       here
==========  =====================================================
L_V, f      ``outer(w, alpha, batch)``, the validation loss
L_T, g      ``lower(w, alpha, batch)``, the training loss
H           ``d^2 lower / dw^2``, through ``hessian_operator``
==========  =====================================================
"""

import dataclasses
from collections.abc import Callable

import jax
from jax.extend import core

from bilevel.protocols import LinearMap, Loss, Pytree


@dataclasses.dataclass(frozen=True)
class Problem:
    """Minimise ``outer(w*(alpha), alpha, valid)``, ``w*(alpha) = argmin_w lower(w, alpha, train)``.

    Parameters
    ----------
    lower, outer : ``loss(w, alpha, batch) -> scalar``
        Pure functions of any pytrees. They may close over further hyperparameters, traced ones
        included: derivatives with respect to those are right too.

    Raises
    ------
    ValueError
        If either is not callable.

    Examples
    --------
    >>> problem = Problem(
    ...     lower=lambda w, alpha, batch: 0.5 * ((w - batch) ** 2 + alpha * w**2),
    ...     outer=lambda w, alpha, batch: (w - batch) ** 2,
    ... )
    >>> float(problem.outer(1.0, 0.0, 3.0))
    4.0
    """

    lower: Loss
    outer: Loss

    def __post_init__(self) -> None:
        for name in ("lower", "outer"):
            loss = getattr(self, name)
            if not callable(loss):
                raise ValueError(
                    f"{name}: expected a function (w, alpha, batch) -> scalar, got {loss!r}."
                )


def side_by_side(problem: Problem) -> Problem:
    """Many independent copies of ``problem`` as one: every array gains a leading axis.

    The losses are sums over the copies, so each copy's hypergradient, steps and geometry are what
    they would be alone, and one search runs them all (seeds, splits) with one progress bar and
    one checkpoint.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> one = Problem(lambda w, a, b: (w - a) ** 2, lambda w, a, b: (w - b) ** 2)
    >>> side_by_side(one).outer(jnp.zeros(3), jnp.ones(3), jnp.ones(3))
    Array(3., dtype=float...)
    """

    def total(loss: Loss) -> Loss:
        return lambda w, alpha, batch: jax.vmap(loss)(w, alpha, batch).sum()

    return Problem(total(problem.lower), total(problem.outer))


def gradient(lower: Loss, alpha: Pytree, batch: Pytree) -> Callable[[Pytree], Pytree]:
    """``w -> d lower / dw``, a function of ``w`` alone."""
    return lambda w: jax.grad(lower)(w, alpha, batch)


def hessian_operator(
    lower: Loss, w: Pytree, alpha: Pytree, batch: Pytree
) -> tuple[Pytree, LinearMap]:
    """The lower gradient at ``w`` and ``v -> H v`` there, linearised once for many products."""
    return jax.linearize(gradient(lower, alpha, batch), w)


def is_quadratic(lower: Loss, w: Pytree, alpha: Pytree, batch: Pytree) -> bool:
    """Whether ``lower`` is quadratic in ``w``, read off the program of its Hessian product.

    True only if no output of ``v -> H v`` depends on ``w``, so the answer is a proof; a quadratic
    written in an unusual way may get False. Decided while tracing, at no cost at run time.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> is_quadratic(lambda w, a, b: jnp.sum(a * (w - b) ** 2), jnp.ones(2), jnp.ones(2), 1.0)
    True
    >>> is_quadratic(lambda w, a, b: jnp.sum(a * (w - b) ** 4), jnp.ones(2), jnp.ones(2), 1.0)
    False
    """

    def product(v, w):
        return jax.jvp(gradient(lower, alpha, batch), (w,), (v,))[1]

    closed = jax.make_jaxpr(product)(w, w)
    leaves = len(jax.tree.leaves(w))
    return not any(_depends(closed.jaxpr, [False] * leaves + [True] * leaves))


def _depends(jaxpr: core.Jaxpr, inputs: list[bool]) -> list[bool]:
    """Which outputs of ``jaxpr`` depend on the marked inputs (never too few)."""
    marked = {v for v, mark in zip(jaxpr.invars, inputs, strict=True) if mark}

    def is_marked(atom) -> bool:
        return not isinstance(atom, core.Literal) and atom in marked

    for equation in jaxpr.eqns:
        marks = [is_marked(v) for v in equation.invars]
        if any(marks):
            body = equation.params.get("jaxpr") if equation.primitive.name in _CALLS else None
            # Other primitives with programs inside (loops, branches) count as one opaque step.
            outputs = _depends(getattr(body, "jaxpr", body), marks) if body else None
            marked |= {v for i, v in enumerate(equation.outvars) if outputs is None or outputs[i]}
    return [is_marked(v) for v in jaxpr.outvars]


_CALLS = ("jit", "pjit", "closed_call", "checkpoint", "remat2")
