"""F2SA: hypergradients from first derivatives alone, by a penalty."""

from typing import Any, NamedTuple

import jax
import optax

from bilevel.contracts import Pytree, SingleLoop
from bilevel.internal.checks import integer, nonnegative, positive
from bilevel.problem.problem import split_losses
from bilevel.stochastic import _steps as steps
from bilevel.stochastic._oracles import Slopes, at_both, lower_loss, metrics, slopes_oracle
from bilevel.stochastic._steps import Rate


class F2saState(NamedTuple):
    """State of :func:`f2sa`."""

    y: Pytree  # like w: near the minimiser of f / penalty + g


def f2sa(
    step_size: Rate, penalty: float = 10.0, *, growth: float = 1 / 7, inner: int = 1
) -> SingleLoop:
    """F2SA: the hypergradient as a difference of two first-order problems, without products.

        y -= c/2 (dg(y)/dw + df(y)/dw / penalty),    w -= c dg(w)/dw,
        direction = df(y)/dalpha + penalty (dg(y)/dalpha - dg(w)/dalpha),

    with the penalty times ``(1 + steps done)^growth``. Its bias is of the order of 1 / penalty.

    Parameters
    ----------
    step_size : positive number, or schedule ``steps done -> number``
        c. In the theory it falls as t^(-4/7).
    penalty : float
        lambda, at the first step. Large ones want ``y`` and ``w`` close to their minimisers: noise
        in the direction grows in proportion.
    growth : float
        1/7 in the theory; 0 keeps the penalty.
    inner : int
        Steps of ``y`` and ``w``, a batch of each loss for each, per step of ``alpha``.

    Returns
    -------
    SingleLoop
        For :func:`bilevel.search`, with ``batches=bilevel.partition(...)``.

    Raises
    ------
    ValueError
        For a ``step_size`` or ``penalty`` that is not positive, a negative ``growth``, or ``inner``
        under 1.

    Notes
    -----
    An inner step: 2 lower gradients, on one batch and as one program, and an outer one. Memory: one
    copy of ``w`` beyond it. eps^-3.5 samples for E|dh|^2 <= eps, without second derivatives, where
    g is strongly convex; nothing is proved here for a simplex. The rate of ``alpha`` wants to be
    well under step_size / penalty: the difference of ``y`` and ``w`` lags behind ``alpha``, and the
    penalty multiplies what it lags.

    References
    ----------
    Kwon, Kwon, Wright & Nowak (2023), A fully first-order method for stochastic bilevel
    optimization, Algorithm 1; the step of ``y`` is c / (2 penalty) there, and the direction is
    taken after the moves. Here it is taken before the last one, whose gradients it shares.

    Examples
    --------
    >>> import bilevel, jax.numpy as jnp
    >>> problem = bilevel.Problem(
    ...     lower=lambda w, alpha, batch: 0.5 * jnp.mean((w - alpha - batch) ** 2),
    ...     outer=lambda w, alpha, batch: 0.5 * jnp.mean((w - batch) ** 2),
    ... )
    >>> x = jnp.linspace(-1.0, 1.0, 10)
    >>> args = optax.sgd(0.1), jnp.zeros(1), jnp.zeros(1), x, 2 + x
    >>> bilevel.search(problem, bilevel.f2sa(0.5), *args, steps=200).alpha.round(2)
    Array([2.], dtype=float...)
    """
    rate = steps.check_rate("step_size", step_size)
    positive("penalty", penalty)
    nonnegative("growth", growth)
    inner = integer("inner", inner, 1)

    def init(problem, alpha, w, indices, train, valid):
        return F2saState(jax.tree.map(jax.numpy.copy, w))

    def step(problem, alpha, w, state, indices, train, valid):
        now: Any = penalty * (1.0 + jax.numpy.asarray(indices.number, float)) ** growth
        c = steps.rate_at(rate, indices.number)
        lower, outer = lower_loss(problem), split_losses(problem).outer

        def slopes(pair, j):
            y, w = pair
            pair_oracle = at_both(lambda w: slopes_oracle(lower, w, alpha), y, w)
            (at_y, at_w), below = train.at(indices.train[j], pair_oracle)
            of_outer, above = valid.at(indices.valid[j], slopes_oracle(outer, y, alpha))
            return at_y, at_w, of_outer, below, above

        def moved(pair, at_y: Slopes, at_w: Slopes, of_outer: Slopes):
            y, w = pair
            along = optax.tree.add_scale(at_y.w, 1 / now, of_outer.w)
            return steps.against(y, along, c / 2), steps.against(w, at_w.w, c)

        def once(j, pair):
            return moved(pair, *slopes(pair, j)[:3])

        pair = jax.lax.fori_loop(0, inner - 1, once, (state.y, w)) if inner > 1 else (state.y, w)
        at_y, at_w, of_outer, below, above = slopes(pair, inner - 1)
        gap = optax.tree.sub(at_y.alpha, at_w.alpha)
        direction = steps.against(of_outer.alpha, gap, -now)
        report = metrics(problem, below, above, at_w.w)
        y, w = moved(pair, at_y, at_w, of_outer)
        return direction, w, F2saState(y), report

    return SingleLoop(init, step, draws=(inner, inner))
