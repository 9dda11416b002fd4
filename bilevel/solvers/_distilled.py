"""Distill the whole past of the training into the derivative of one optimizer step."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from bilevel.contracts import LowerSolver, Pytree
from bilevel.internal.checks import at_least_float32, real_number
from bilevel.solvers._mixed_mode import detached
from bilevel.solvers._unrolled import unrolled


class DistilledState(NamedTuple):
    """State of :func:`distilled`."""

    optimizer: Pytree
    mean: Pytree  # like w, w*: a mean of the weights so far; later ones count more
    total: jax.Array  # [], S: the sum of their weights


def distilled(
    optimizer: optax.GradientTransformation | float | Callable[[Pytree], Any],
    *,
    decay: float,
    scale: float = 1.0,
) -> LowerSolver:
    """Take one optimizer step with a derivative that represents all steps so far: HyperDistill.

        w  = Phi(w_, alpha),    S = 1 + decay S_,    w* = (decay S_ w*_ + w_) / S
        dw / d alpha  ~  scale S  d_alpha Phi(w*, alpha)

    An underscore means "before the step". One derivative at a mean of the past weights replaces the
    sum over past products of Jacobians (Lee et al. 2022, Eqs. 8 and 13). Use it if ``alpha`` moves
    after every step of the weights and one step does not show the effect of ``alpha``.

    Parameters
    ----------
    optimizer : optax.GradientTransformation, float, or function
        A float is the step size of plain gradient descent. A function ``alpha -> optimizer``
        makes rates hyperparameters, as in :func:`bilevel.unrolled`.
    decay : float
        gamma in [0, 1): the fraction of an effect that remains after a step of training. 0 gives
        :func:`bilevel.one_step`.
    scale : float
        theta. The paper fits it to exact hypergradients (see :func:`bilevel.truncation`).

    Returns
    -------
    LowerSolver
        Reverse and forward mode; the derivative in the starting point is zero.

    Raises
    ------
    ValueError
        If ``decay`` is not in [0, 1).

    Notes
    -----
    Time of two lower gradients and one derivative of one in ``alpha``; memory 3 copies of ``w``.

    References
    ----------
    Lee, Lee, Shin, Yang, Hospedales & Hwang (2022), Online Hyperparameter Meta-Learning with
    Hypergradient Distillation.

    Examples
    --------
    At decay 1/2, a second step counts 1.5 times:

    >>> lower = lambda w, alpha, batch: 0.5 * jnp.sum((w - alpha) ** 2)
    >>> solver = distilled(0.1, decay=0.5)
    >>> state = solver.run(lower, 1.0, jnp.zeros(1), solver.init(jnp.zeros(1)), None)[1]
    >>> jax.jacobian(lambda a: solver.run(lower, a, jnp.ones(1), state, None)[0])(1.0)
    Array([0.15], dtype=float...)
    """
    if not 0 <= real_number("decay", decay) < 1:
        raise ValueError(f"decay: expected at least 0 and under 1, got {decay}.")
    one = unrolled(optimizer, 1)

    def init(w):
        return _initial_state(one.init(w), w)

    def init_at(alpha, w):
        return _initial_state(one.start(alpha, w), w)

    def run(lower, alpha, w, state, batch):
        def stepped(alpha, w, rule, batch):
            return one.run(lower, alpha, w, rule, batch)

        before = decay * state.total
        total = jax.lax.stop_gradient(before + 1)

        def mixed(old, new):
            return ((before * old + new) / total).astype(new.dtype)

        mean = jax.lax.stop_gradient(jax.tree.map(mixed, state.mean, w))
        moved, rule = detached(stepped, alpha, w, state.optimizer, batch)
        there, _ = stepped(alpha, mean, jax.lax.stop_gradient(state.optimizer), batch)

        def with_slope(x, y):
            return x + (scale * total).astype(x.dtype) * (y - jax.lax.stop_gradient(y))

        w = jax.tree.map(with_slope, moved, there)
        return w, DistilledState(rule, mean, total)

    return LowerSolver(
        init,
        run,
        gradients=4,
        init_at=init_at if one.init_at else None,
        inner=one.inner,
        constraint=one.constraint,
    )


def _initial_state(optimizer: Pytree, w: Pytree) -> DistilledState:
    dtype = at_least_float32(*jax.tree.leaves(w))
    return DistilledState(optimizer, jax.tree.map(jnp.asarray, w), jnp.zeros((), dtype))
