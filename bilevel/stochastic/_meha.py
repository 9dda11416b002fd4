"""MEHA: a single loop on the Moreau envelope, for lower losses that need not be convex."""

from typing import Any, NamedTuple

import jax
import optax

from bilevel.contracts import Pytree, SingleLoop
from bilevel.internal.checks import check_in_range, positives
from bilevel.problem.problem import split_losses
from bilevel.stochastic import _steps as steps
from bilevel.stochastic._oracles import at_both, lower_loss, metrics, slopes_oracle
from bilevel.stochastic._steps import Rate


class MehaState(NamedTuple):
    """State of :func:`meha`."""

    theta: Pytree  # like w: near the proximal point of w


def meha(
    step_size: Rate, *, proximity: float = 10.0, penalty: float = 1.0, growth: float = 0.25
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

    Returns
    -------
    SingleLoop
        For :func:`bilevel.search`, with ``batches=bilevel.partition(...)``.

    Raises
    ------
    ValueError
        For numbers that are not positive, or a ``growth`` off [0, 1/2).

    Notes
    -----
    A step: 2 lower gradients, on one batch and as one program, and an outer one. Memory: one copy
    of ``w`` beyond it. The lower loss may be nonconvex; the residual of a relaxed problem then
    falls as K^-((1 - 2 growth) / 2), deterministic; on batches nothing is proved. The direction is
    c times the paper's, which makes it a hypergradient in size: its rate of ``alpha`` is c times
    ours. All steps are taken from the same point; the paper's ``w`` sees the new ``alpha``.

    References
    ----------
    Liu, Liu, Yao, Zeng & Zhang (2024), Moreau envelope for nonconvex bi-level optimization: a
    single-loop and Hessian-free solution strategy, Algorithm 1.

    Examples
    --------
    >>> import bilevel, jax.numpy as jnp
    >>> problem = bilevel.Problem(
    ...     lower=lambda w, alpha, batch: 0.5 * jnp.mean((w - alpha - batch) ** 2),
    ...     outer=lambda w, alpha, batch: 0.5 * jnp.mean((w - batch) ** 2),
    ... )
    >>> x = jnp.linspace(-1.0, 1.0, 10)
    >>> args = optax.sgd(0.05), jnp.zeros(1), jnp.zeros(1), x, 2 + x
    >>> bilevel.search(problem, bilevel.meha(0.3), *args, steps=400).alpha.round(1)
    Array([2.], dtype=float...)
    """
    rate = steps.check_rate("step_size", step_size)
    positives(proximity=proximity, penalty=penalty)
    check_in_range("growth", growth, -1e-12, 0.5)

    def init(problem, alpha, w, indices, train, valid):
        return MehaState(jax.tree.map(jax.numpy.copy, w))

    def step(problem, alpha, w, state, indices, train, valid):
        c: Any = penalty * (1.0 + jax.numpy.asarray(indices.number, float)) ** growth
        eta = steps.rate_at(rate, indices.number)
        lower, outer = lower_loss(problem), split_losses(problem).outer
        pair = at_both(lambda w: slopes_oracle(lower, w, alpha), state.theta, w)
        (at_theta, at_w), below = train.at(indices.train[0], pair)
        of_outer, above = valid.at(indices.valid[0], slopes_oracle(outer, w, alpha))
        pull = optax.tree.scale(1 / proximity, optax.tree.sub(w, state.theta))
        gap = optax.tree.sub(at_w.alpha, at_theta.alpha)
        direction = steps.against(of_outer.alpha, gap, -c)
        along = optax.tree.add_scale(optax.tree.sub(at_w.w, pull), 1 / c, of_outer.w)
        report = metrics(problem, below, above, at_w.w)
        theta = steps.against(state.theta, optax.tree.sub(at_theta.w, pull), eta)
        return direction, steps.against(w, along, eta), MehaState(theta), report

    return SingleLoop(init, step)
