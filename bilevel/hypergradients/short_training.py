"""Measure the error of hypergradients of short trainings: truncation, and random batches."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from bilevel.contracts import Pytree, params_of
from bilevel.hypergradients.hypergradient import (
    HyperGradient,
    check_variables,
    first_state,
    solution,
)
from bilevel.internal.checks import check_floating, check_losses, describe, function, integer
from bilevel.problem.problem import Problem, split_losses
from bilevel.solvers import unrolled


class Truncation(NamedTuple):
    """Result of :func:`truncation`."""

    value: jax.Array  # [], outer loss after all steps
    grads: Pytree  # like alpha, leading axis steps + 1: entry K is for ``backprop=K``
    bias: jax.Array  # [steps + 1], |grads[K] - grads[steps]| / |grads[steps]|, 2-norms; may be inf


class Spread(NamedTuple):
    """Result of :func:`standard_error`."""

    grad: Pytree  # like alpha, the mean over the microbatches
    error: Pytree  # like alpha, the standard error of that mean, entry by entry
    relative: jax.Array  # [], |error| / |grad|, 2-norms; inf if the mean is 0


def truncation(
    problem: Problem,
    optimizer: optax.GradientTransformation | float | Callable[[Pytree], Any],
    steps: int,
    *,
    batches: Callable[[jax.Array, Pytree], Pytree] | None = None,
) -> Callable[[Pytree, Pytree, Pytree, Pytree], Truncation]:
    """Compute the hypergradients of ``unrolled(optimizer, steps, backprop=K)`` for all K at once.

        G_K = d_alpha outer(w_T)  +  sum_{t > T - K} (dw_T / dw_t)' (d_alpha w_t)' d_w outer(w_T)

    The terms of the sum are the derivatives in ``steps`` copies of ``alpha``, one for each step.
    One reverse pass computes all of them (Shaban et al. 2019, Eqs. 5 and 8).

    Parameters
    ----------
    problem : Problem
    optimizer, steps, batches
        The arguments of :func:`bilevel.unrolled`.

    Returns
    -------
    ``fn(alpha, w0, train, valid) -> Truncation(value, grads, bias)``
        Pure. Derivatives of the starting point in ``alpha`` are not included.

    Raises
    ------
    ValueError
        If ``problem`` is not a problem, or ``steps`` is under 1.

    Notes
    -----
    Cost: the time of one hypergradient through all steps; memory of ``steps`` copies of ``alpha``,
    ``w`` and the optimizer's state.

    References
    ----------
    Shaban, Cheng, Hatch & Boots (2019), Truncated Back-propagation for Bilevel Optimization.

    Examples
    --------
    A step moves w half way to alpha. The exact slope is 1 - 1 / 2^T; the last step has 1 / 2:

    >>> problem = Problem(
    ...     lower=lambda w, alpha, batch: 0.5 * (w - alpha) ** 2,
    ...     outer=lambda w, alpha, batch: w,
    ... )
    >>> fn = jax.jit(truncation(problem, 0.5, 3))
    >>> fn(jnp.array(1.0), jnp.array(0.0), None, None).grads
    Array([0. , 0.5 , 0.75 , 0.875], dtype=float...)
    """
    check_losses("problem", problem)
    steps = integer("steps", steps, 1)
    if batches is not None:
        function("batches", batches, "(key, data) -> batch")
    one = unrolled(optimizer, 1)
    solve, of_problem = solution(problem, one), split_losses(problem)

    def fn(alpha, w0, train, valid):
        check_floating("alpha", alpha)
        check_floating("w0", params_of(w0))
        alpha, w0 = jax.tree.map(jnp.asarray, (alpha, w0))

        check_variables(problem, w0, alpha, valid)

        def step(carry, inputs):
            number, alpha = inputs
            batch = train
            if batches is not None:
                key, data = train
                batch = batches(jax.random.fold_in(key, number), data)
            return solve(alpha, *carry, batch), None

        state = first_state(one, alpha, w0)

        def value(alphas, alpha):
            start = w0, state
            (w, _), _ = jax.lax.scan(step, start, (jnp.arange(steps), alphas))
            return of_problem.outer(w, alpha, valid)[0]

        copies = jax.tree.map(lambda a: jnp.broadcast_to(a, (steps, *a.shape)), alpha)
        outer_loss, (terms, direct) = jax.value_and_grad(value, (0, 1))(copies, alpha)
        grads = jax.tree.map(_sums_from_the_end, direct, terms)
        last = jax.tree.map(lambda g: g[-1], grads)
        away = jax.vmap(lambda g: optax.tree.norm(optax.tree.sub(g, last)))(grads)
        size = optax.tree.norm(last)
        return Truncation(outer_loss, grads, _relative_error(away, size))

    return fn


def _sums_from_the_end(direct: jax.Array, terms: jax.Array) -> jax.Array:
    """Return ``direct`` plus the last 0, 1, ... of the ``terms``."""
    return direct[None] + jnp.concatenate([jnp.zeros_like(terms[:1]), jnp.cumsum(terms[::-1], 0)])


def _relative_error(error: jax.Array, size: jax.Array) -> jax.Array:
    """Return ``error / size``, with 0 / 0 = 0."""
    return jnp.where(error == 0, 0, error / size)


def standard_error(
    fn: Callable[..., HyperGradient], parts: int
) -> Callable[[Pytree, Pytree, Pytree, Pytree], Spread]:
    """Estimate the standard error of a hypergradient over batches, from ``parts`` microbatches.

    Both batches are cut along their first axis into ``parts`` of equal size; keys among the leaves
    are split. The standard error is the spread of the parts' hypergradients over sqrt(parts).

    Parameters
    ----------
    fn : ``fn(alpha, w0, train, valid) -> HyperGradient``
        A result of :func:`bilevel.hypergradient`; ``diagnostics=False`` saves their cost.
    parts : int
        At least 2; 8 to 32 give the error to a quarter or an eighth of itself.

    Returns
    -------
    ``spread(alpha, w0, train, valid) -> Spread(grad, error, relative)``
        Pure.

    Raises
    ------
    ValueError
        If ``parts`` is under 2; at run time, if they do not divide the rows of a batch.

    Notes
    -----
    Cost: the time of one hypergradient on the whole batch, memory of one on a part. The mean has
    the bias of batches of the parts' size, of the order of 1 / rows, because hypergradients are
    not linear in the batch.

    Examples
    --------
    >>> import bilevel
    >>> problem = Problem(
    ...     lower=lambda w, alpha, batch: 0.5 * (w - alpha) ** 2,
    ...     outer=lambda w, alpha, batch: jnp.mean(batch) * w,
    ... )
    >>> fn = bilevel.hypergradient(problem, bilevel.implicit())
    >>> rows = jnp.array([1.0, 3.0, 5.0, 7.0])
    >>> standard_error(fn, 2)(jnp.array(0.0), jnp.array(0.0), None, rows)
    Spread(grad=Array(4., dtype=...), error=Array(2., dtype=...), relative=Array(0.5, dtype=...))
    """
    function("fn", fn, "(alpha, w0, train, valid) -> HyperGradient")
    count = integer("parts", parts, 2)

    def spread(alpha, w0, train, valid):
        cut = _split_microbatches("train", train, count), _split_microbatches("valid", valid, count)
        grads = jax.lax.map(lambda batches: fn(alpha, w0, *batches).grad, cut)
        mean = jax.tree.map(lambda g: g.mean(0), grads)
        error = jax.tree.map(lambda g: g.std(0, ddof=1) / count**0.5, grads)
        size = optax.tree.norm(mean)
        return Spread(mean, error, _relative_error(optax.tree.norm(error), size))

    return spread


def _split_microbatches(name: str, batch: Pytree, count: int) -> Pytree:
    """Return leaves [n, ...] as [count, n / count, ...], and keys as [count] of them."""

    def cut(x):
        x = jnp.asarray(x)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.split(x, count)
        if x.ndim == 0 or x.shape[0] % count:
            rows = f"{x.shape[0]} rows" if x.ndim else f"a number, {describe(float(x))}"
            raise ValueError(
                f"parts: expected a divisor of the rows of {name}, got {count} and {rows}."
            )
        return x.reshape(count, x.shape[0] // count, *x.shape[1:])

    return jax.tree.map(cut, batch)
