"""BOME: the lower problem's optimality as a constraint, kept by a dynamic barrier."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from bilevel.contracts import SingleLoop
from bilevel.internal.checks import integer, nonnegative
from bilevel.problem.problem import split_losses
from bilevel.stochastic import _steps as steps
from bilevel.stochastic._oracles import at_both, lower_loss, metrics, slopes_oracle
from bilevel.stochastic._steps import Rate


class BomeState(NamedTuple):
    """State of :func:`bome`: there is none."""


def bome(step_size: Rate, *, inner: int = 10, control: float = 0.5) -> SingleLoop:
    """BOME: descent of the outer loss that must not increase the lower loss's distance to its end.

        y = w after ``inner`` steps of the lower loss g at rate c,    q = g(w) - g(y),
        dq = (dg(w)/dalpha - dg(y)/dalpha,  dg(w)/dw),
        lambda = max(0, control - <df, dq> / |dq|^2),
        w -= c (df/dw + lambda dq/dw),    direction = df/dalpha + lambda dq/dalpha

    q, an estimate of how far ``w`` is from the minimum in value, falls at least at the rate that
    ``control`` sets; beyond that the outer loss f falls as it can. First derivatives alone.

    Parameters
    ----------
    step_size : positive number, or schedule ``steps done -> number``
        c, of ``w`` and of the inner steps. The rate of ``alpha`` is the optimizer's; the paper has
        one for both.
    inner : int
        Steps to ``y``, all on one batch.
    control : float
        eta: 0 lets q be as it is, 0.5 is the paper's.

    Returns
    -------
    SingleLoop
        For :func:`bilevel.search`.

    Raises
    ------
    ValueError
        For a ``step_size`` that is not positive, ``inner`` under 1, or a negative ``control``.

    Notes
    -----
    A step: ``inner + 2`` lower gradients and an outer one. Memory: one copy of ``w`` beyond it. For
    lower losses of any kind that gradient descent brings to their minima (Polyak-Lojasiewicz),
    deterministic; on batches nothing is proved.

    References
    ----------
    Ye, Liu, Wright, Stone & Liu (2022), BOME! Bilevel optimization made easy: a simple first-order
    approach, Algorithm 1.

    Examples
    --------
    >>> import bilevel
    >>> problem = bilevel.Problem(
    ...     lower=lambda w, alpha, batch: 0.5 * jnp.mean((w - alpha - batch) ** 2),
    ...     outer=lambda w, alpha, batch: 0.5 * jnp.mean((w - batch) ** 2),
    ... )
    >>> x = jnp.linspace(-1.0, 1.0, 10)
    >>> args = optax.sgd(0.1), jnp.zeros(1), jnp.zeros(1), x, 2 + x
    >>> bilevel.search(problem, bilevel.bome(0.1), *args, steps=400).alpha.round(1)
    Array([2.], dtype=float...)
    """
    rate = steps.check_rate("step_size", step_size)
    inner = integer("inner", inner, 1)
    nonnegative("control", control)

    def init(problem, alpha, w, indices, train, valid):
        return BomeState()

    def step(problem, alpha, w, state, indices, train, valid):
        c = steps.rate_at(rate, indices.number)
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
        # A gap of nothing but roundings, as at a start that solves the lower problem, is no wall.
        size = optax.tree.norm(gap, squared=True)
        size += jnp.finfo(size.dtype).eps * optax.tree.norm(of_outer, squared=True)
        share = optax.tree.vdot(of_outer, gap) / jnp.where(size > 0, size, 1)
        along = optax.tree.add_scale(of_outer, jnp.maximum(control - share, 0), gap)
        report = metrics(problem, below, above, at_w.w)
        return along.alpha, steps.against(w, along.w, c), state, report

    return SingleLoop(init, step)
