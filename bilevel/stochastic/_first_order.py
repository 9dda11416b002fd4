"""Methods with first derivatives only: penalties (F2SA, MEHA) and a dynamic barrier (BOME)."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from bilevel.contracts import SingleLoop
from bilevel.internal.checks import check_at_least, check_in_range, integer, positive, positives
from bilevel.problem.problem import split_losses
from bilevel.stochastic import _steps as steps
from bilevel.stochastic._oracles import Slopes, at_both, lower_loss, metrics, slopes_oracle


def f2sa(
    step_size: steps.Rate, penalty: float = 10.0, *, growth: float = 1 / 7, inner: int = 1
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
        lambda, at the first step. Noise in the direction grows in proportion, so large penalties
        need ``y`` and ``w`` close to their minimizers.
    growth : float
        1/7 in the theory; 0 keeps the penalty constant.
    inner : int
        Steps of ``y`` and ``w`` per step of ``alpha``; each takes a batch of each loss.

    Raises
    ------
    ValueError
        If ``step_size`` or ``penalty`` is not positive, ``growth`` is negative, or ``inner`` is
        under 1.

    Notes
    -----
    Per inner step: 2 lower gradients, on one batch and as one program, and an outer one. Memory:
    one more copy of ``w``. It takes eps^-3.5 samples for E|dh|^2 <= eps, without second
    derivatives, if g is strongly convex; nothing is proved for a simplex. The rate of ``alpha``
    should be well below step_size / penalty: the difference of ``y`` and ``w`` lags behind
    ``alpha``, and the penalty multiplies this lag.

    References
    ----------
    Kwon, Kwon, Wright & Nowak (2023), A fully first-order method for stochastic bilevel
    optimization, Algorithm 1; the step of ``y`` is c / (2 penalty) there, and the direction is
    taken after the moves. Here it is taken before the last one, whose gradients it shares.

    Examples
    --------
    >>> f2sa(0.5, inner=2).draws
    (2, 2)
    """
    rate = steps.as_schedule("step_size", step_size)
    positive("penalty", penalty)
    check_at_least("growth", growth, 0)
    inner = integer("inner", inner, 1)

    def step(problem, alpha, w, y, indices, train, valid):
        now, c = _grown(penalty, growth, indices.number), rate(indices.number)
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

        pair = jax.lax.fori_loop(0, inner - 1, once, (y, w)) if inner > 1 else (y, w)
        at_y, at_w, of_outer, below, above = slopes(pair, inner - 1)
        gap = optax.tree.sub(at_y.alpha, at_w.alpha)
        direction = steps.against(of_outer.alpha, gap, -now)
        report = metrics(problem, below, above, at_w.w)
        y, w = moved(pair, at_y, at_w, of_outer)
        return direction, w, y, report

    return SingleLoop(_copy_weights, step, draws=(inner, inner))


def meha(
    step_size: steps.Rate, *, proximity: float = 10.0, penalty: float = 1.0, growth: float = 0.25
) -> SingleLoop:
    """MEHA: gradient steps on a penalty for being above the lower loss's Moreau envelope.

        theta -= eta (dg(theta)/dw + (theta - w) / gamma),
        w     -= eta (df/dw / c + dg(w)/dw - (w - theta) / gamma),
        direction = df/dalpha + c (dg(w)/dalpha - dg(theta)/dalpha),

    with the penalty c times ``(1 + steps done)^growth``.

    Parameters
    ----------
    step_size : positive number, or schedule ``steps done -> number``
        eta.
    proximity : float
        gamma; ``g + |.|^2 / (2 gamma)`` has to be convex.
    penalty : float
        c, at the first step.
    growth : float
        In [0, 1/2), the range of the theory.

    Raises
    ------
    ValueError
        If a number is not positive, or ``growth`` is not in [0, 1/2).

    Notes
    -----
    Per step: 2 lower gradients, on one batch and as one program, and an outer one. Memory: one more
    copy of ``w``. The lower loss may be nonconvex. The residual of a relaxed problem then falls as
    K^-((1 - 2 growth) / 2) in the deterministic case; nothing is proved on batches. The direction
    is c times the paper's, to have the size of a hypergradient, so the paper's rate of ``alpha`` is
    c times ours. All steps start from the same point; the paper's ``w`` uses the new ``alpha``.

    References
    ----------
    Liu, Liu, Yao, Zeng & Zhang (2024), Moreau envelope for nonconvex bi-level optimization: a
    single-loop and Hessian-free solution strategy, Algorithm 1.

    Examples
    --------
    >>> meha(0.3).draws
    (1, 1)
    """
    rate = steps.as_schedule("step_size", step_size)
    positives(proximity=proximity, penalty=penalty)
    check_in_range("growth", growth, -1e-12, 0.5)

    def step(problem, alpha, w, theta, indices, train, valid):
        c, eta = _grown(penalty, growth, indices.number), rate(indices.number)
        lower, outer = lower_loss(problem), split_losses(problem).outer
        pair = at_both(lambda w: slopes_oracle(lower, w, alpha), theta, w)
        (at_theta, at_w), below = train.at(indices.train[0], pair)
        of_outer, above = valid.at(indices.valid[0], slopes_oracle(outer, w, alpha))
        pull = optax.tree.scale(1 / proximity, optax.tree.sub(w, theta))
        gap = optax.tree.sub(at_w.alpha, at_theta.alpha)
        direction = steps.against(of_outer.alpha, gap, -c)
        along = optax.tree.add_scale(optax.tree.sub(at_w.w, pull), 1 / c, of_outer.w)
        report = metrics(problem, below, above, at_w.w)
        theta = steps.against(theta, optax.tree.sub(at_theta.w, pull), eta)
        return direction, steps.against(w, along, eta), theta, report

    return SingleLoop(_copy_weights, step)


def _copy_weights(problem, alpha, w, indices, train, valid):
    return jax.tree.map(jnp.copy, w)


def _grown(penalty: float, growth: float, number: jax.Array) -> Any:
    return penalty * (1.0 + jnp.asarray(number, float)) ** growth


def bome(step_size: steps.Rate, *, inner: int = 10, control: float = 0.5) -> SingleLoop:
    """BOME: descend the outer loss without increasing the lower loss's distance to its minimum.

        y = w after ``inner`` steps of the lower loss g at rate c,    q = g(w) - g(y),
        dq = (dg(w)/dalpha - dg(y)/dalpha,  dg(w)/dw),
        lambda = max(0, control - <df, dq> / |dq|^2),
        w -= c (df/dw + lambda dq/dw),    direction = df/dalpha + lambda dq/dalpha

    q falls at least at the rate given by ``control``; within this the outer loss f falls.

    Parameters
    ----------
    step_size : positive number, or schedule ``steps done -> number``
        c, of ``w`` and of the inner steps. The optimizer sets the rate of ``alpha``; the paper uses
        one rate for both.
    inner : int
        Steps to ``y``, all on one batch.
    control : float
        eta: 0 ignores q, 0.5 is the paper's value.

    Raises
    ------
    ValueError
        If ``step_size`` is not positive, ``inner`` is under 1, or ``control`` is negative.

    Notes
    -----
    Per step: ``inner + 2`` lower gradients and an outer one. Memory: one more copy of ``w``. The
    theory covers deterministic lower losses that gradient descent minimizes (Polyak-Lojasiewicz);
    nothing is proved on batches.

    References
    ----------
    Ye, Liu, Wright, Stone & Liu (2022), BOME! Bilevel optimization made easy: a simple first-order
    approach, Algorithm 1.

    Examples
    --------
    >>> bome(0.1, inner=5).draws
    (1, 1)
    """
    rate = steps.as_schedule("step_size", step_size)
    inner = integer("inner", inner, 1)
    check_at_least("control", control, 0)

    def step(problem, alpha, w, state, indices, train, valid):
        c = rate(indices.number)
        lower, outer = lower_loss(problem), split_losses(problem).outer

        def slopes(batch, weight):
            def closer(_, y):
                slope = jax.grad(lower, has_aux=True)(y, alpha, batch)[0]
                return steps.against(y, slope, c)

            y = jax.lax.fori_loop(0, inner, closer, w)
            return at_both(lambda w: slopes_oracle(lower, w, alpha), y, w)(batch, weight)

        (at_y, at_w), below = train.at(indices.train[0], slopes)
        of_outer, above = valid.at(indices.valid[0], slopes_oracle(outer, w, alpha))
        gap: Any = at_w._replace(alpha=optax.tree.sub(at_w.alpha, at_y.alpha))
        # At a lower solution the gap is roundoff and must not constrain the step.
        size = optax.tree.norm(gap, squared=True)
        size += jnp.finfo(size.dtype).eps * optax.tree.norm(of_outer, squared=True)
        share = optax.tree.vdot(of_outer, gap) / jnp.where(size > 0, size, 1)
        along = optax.tree.add_scale(of_outer, jnp.maximum(control - share, 0), gap)
        report = metrics(problem, below, above, at_w.w)
        return along.alpha, steps.against(w, along.w, c), state, report

    return SingleLoop(lambda *_: (), step)
