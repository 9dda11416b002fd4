"""AmIGO: a few steps of the weights, then of the adjoint, then one of alpha."""

from typing import NamedTuple

import jax
import optax

from bilevel.contracts import Pytree, SingleLoop
from bilevel.internal.checks import integer
from bilevel.stochastic import _steps as steps
from bilevel.stochastic._oracles import (
    Iterate,
    directions,
    lower_loss,
    lower_oracle,
    metrics,
    outer_oracle,
    relative_adjoint_residual,
    slopes_oracle,
)
from bilevel.stochastic._steps import Rate


class AmigoState(NamedTuple):
    """State of :func:`amigo`."""

    v: Pytree  # like w: the adjoint, where the next system's steps start


def amigo(step_size: Rate, *, inner: int = 10) -> SingleLoop:
    """AmIGO: ``inner`` SGD steps of ``w``, as many of its adjoint, both warm, for one of ``alpha``.

    Parameters
    ----------
    step_size : positive number, or schedule ``steps of alpha done -> number``
        Of ``w`` and of the adjoint: under 1 / L, L the largest curvature of the lower loss on any
        batch.
    inner : int
        Steps of each, on fresh batches.

    Returns
    -------
    SingleLoop
        For :func:`bilevel.search`, with ``batches=bilevel.partition(...)``.

    Raises
    ------
    ValueError
        For a ``step_size`` that is not positive, or ``inner`` under 1.

    Notes
    -----
    A step: 2 ``inner`` + 1 batches of train, for a gradient, a product or both, and one of valid,
    for the outer gradient of all. Memory: that of SOBA. eps^-2 samples for
    E|dh|^2 <= eps with constant rates and large batches, where g is strongly convex. stocBiO is the
    same with an adjoint that starts anew. Nothing is proved on a simplex or another set.

    References
    ----------
    Arbel & Mairal (2022), Amortized implicit differentiation for stochastic bilevel optimization,
    Algorithm 1.

    Examples
    --------
    >>> import bilevel
    >>> bilevel.amigo(0.1, inner=5).draws
    (11, 1)
    """
    rate = steps.check_rate("step_size", step_size)
    inner = integer("inner", inner, 1)

    def init(problem, alpha, w, indices, train, valid):
        return AmigoState(optax.tree.zeros_like(w))

    def step(problem, alpha, w, state, indices, train, valid):
        now = steps.rate_at(rate, indices.number)
        loss = lower_loss(problem)

        def descend(j, w):
            slopes, _ = train.at(indices.train[j], slopes_oracle(loss, w, alpha))
            return steps.against(w, slopes.w, now)

        w = jax.lax.fori_loop(0, inner, descend, w)

        outer, above = valid.at(indices.valid[0], outer_oracle(problem, Iterate(w, state.v, alpha)))

        def solve(j, v):
            point = Iterate(w, v, alpha)
            lower, _ = train.at(indices.train[inner + j], lower_oracle(problem, point))
            return steps.against(v, directions(lower, outer).v, now)

        v = jax.lax.fori_loop(0, inner, solve, state.v)
        lower, below = train.at(indices.train[-1], lower_oracle(problem, Iterate(w, v, alpha)))
        step_directions = directions(lower, outer)
        noisy = relative_adjoint_residual(step_directions, outer.w)
        report = metrics(problem, below, above, step_directions.w, noisy_residual=noisy)
        return step_directions.alpha, w, AmigoState(v), report

    return SingleLoop(init, step, lambda state: state.v, draws=(2 * inner + 1, 1))
