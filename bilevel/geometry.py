"""Geometries of the hyperparameters, as optax transformations that act on ``alpha`` itself.

A simplex is the last axis of a leaf of ``alpha``: one per edge of a cell, one per layer. Each
transformation takes the gradient (or the update an optimizer made of it) in ``alpha`` and returns
an update that ends exactly on the set. ``optax.partition`` mixes geometries across leaves.

==================  =======================================  =======================================
transformation      new alpha                                used by
==================  =======================================  =======================================
``exponentiate``    ``alpha exp(u) / sum(alpha exp(u))``     GAEA (Li et al. 2021); sparse alpha
``project``         ``argmin_{a in set} |a - (alpha + u)|``  projected gradient; boxes, any set
``softmax``         ``softmax(logits + u)``                  DARTS (Liu et al. 2019)
==================  =======================================  =======================================
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bilevel.protocols import Pytree


def tangent() -> optax.GradientTransformation:
    """The part of a gradient that moves within simplices: its mean over the last axis taken off.

    Put it before an optimizer that rescales coordinates one by one, as in
    ``optax.chain(tangent(), optax.adam(lr), exponentiate())``: a component common to all
    coordinates cannot move ``alpha``, but would make Adam take them for equally steep.

    Examples
    --------
    >>> optimizer = tangent()
    >>> alpha = jnp.array([0.5, 0.5])
    >>> optimizer.update(jnp.array([3.0, 1.0]), optimizer.init(alpha))[0]
    Array([ 1., -1.], dtype=float...)
    """

    def along(g):
        g = _finite(g)
        return g - jnp.sum(g / g.shape[-1], axis=-1, keepdims=True)

    return optax.stateless(lambda updates, _: jax.tree.map(along, updates))


def exponentiate() -> optax.GradientTransformation:
    """Exponentiated update on simplices: chain it after an optimizer.

    ``alpha <- alpha exp(u) / sum(alpha exp(u))`` with ``u`` the incoming update, so that
    ``optax.chain(optax.sgd(lr), exponentiate())`` is exponentiated gradient, mirror descent in the
    entropy (Kivinen & Warmuth 1997; GAEA: Li, Khodak, Balcan & Talwalkar 2021). A coordinate that
    is exactly 0 stays 0.

    Raises
    ------
    ValueError
        In ``init``, for a concrete ``alpha`` that is off the simplex.

    Examples
    --------
    >>> optimizer = optax.chain(optax.sgd(1.0), exponentiate())
    >>> alpha = jnp.array([0.5, 0.5])
    >>> updates, _ = optimizer.update(jnp.array([jnp.log(3.0), 0.0]), optimizer.init(alpha), alpha)
    >>> [round(a, 4) for a in optax.apply_updates(alpha, updates).tolist()]
    [0.25, 0.75]
    """

    def move(alpha, update):
        support = alpha > 0
        update = _finite(update)
        # Shifting by the largest exponent in the support makes exp safe for updates of any size.
        shift = jnp.max(jnp.where(support, update, -jnp.inf), axis=-1, keepdims=True)
        weights = jnp.where(support, alpha * jnp.exp(jnp.where(support, update - shift, 0)), 0)
        # alpha may be tiny exactly where the exponent is largest: scale up before summing.
        weights = weights / jnp.max(weights, axis=-1, keepdims=True)
        return weights / jnp.sum(weights, axis=-1, keepdims=True)

    return _landing_on(move, check_simplex)


def project(
    onto: str | Callable[[Pytree], Pytree] = "simplex",
) -> optax.GradientTransformation:
    """Euclidean projection of ``alpha + update``: chain it after an optimizer.

    Parameters
    ----------
    onto : {"simplex", "box"} or callable
        Simplices on the last axes (Duchi et al. 2008), the box [0, 1], or any function from a
        point (a pytree like ``alpha``) to its projection.

    Raises
    ------
    ValueError
        For an unknown name, and in ``init`` for a concrete ``alpha`` that is off the named set.

    Examples
    --------
    >>> optimizer = optax.chain(optax.sgd(1.0), project("simplex"))
    >>> alpha = jnp.array([0.5, 0.5])
    >>> updates, _ = optimizer.update(jnp.array([0.0, -0.2]), optimizer.init(alpha), alpha)
    >>> optax.apply_updates(alpha, updates)
    Array([0.4, 0.6], dtype=float...)
    """
    if onto == "simplex":
        return _landing_on(lambda a, u: project_simplex(a + u), check_simplex)
    if onto == "box":
        return _landing_on(lambda a, u: jnp.clip(a + u, 0, 1), check_box)
    if not callable(onto):
        raise ValueError(f'onto: expected "simplex", "box" or a callable, got {onto!r}.')

    def update(updates, state, params=None):
        _require_params(params)
        target = onto(optax.apply_updates(params, updates))
        return optax.tree.sub(target, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def project_simplex(point: jax.Array) -> jax.Array:
    """Euclidean projection of the last axis of ``point`` onto the probability simplex.

    Examples
    --------
    >>> project_simplex(jnp.array([1e30, 0.0, -5.0]))
    Array([1., 0., 0.], dtype=float...)
    """
    # Entries more than 1 under the largest project to 0, so clipping them changes nothing, and
    # keeps the sums below exact for points of any size.
    point = _finite(point)
    point = jnp.maximum(point - jnp.max(point, axis=-1, keepdims=True), -1)
    flat = point.reshape(-1, point.shape[-1])
    projected = jax.vmap(optax.projections.projection_simplex)(flat).reshape(point.shape)
    return projected / jnp.sum(projected, axis=-1, keepdims=True)


class SoftmaxState(NamedTuple):
    """State of :func:`softmax`."""

    logits: Pytree  # like alpha
    optimizer: optax.OptState  # of the logits


def softmax(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Optimize logits: ``alpha = softmax(logits)`` on the last axes (DARTS, Liu et al. 2019).

    The gradient in ``alpha`` is pulled back, ``alpha * (g - <alpha, g>)``, given to ``optimizer``
    for the logits, and the update returned is that of ``alpha``.

    Parameters
    ----------
    optimizer : optax.GradientTransformation
        For the logits, whose start is ``log(alpha)``: weight decay shrinks those.

    Raises
    ------
    ValueError
        In ``init``, for a concrete ``alpha`` that is off the simplex.

    Examples
    --------
    >>> optimizer = softmax(optax.sgd(1.0))
    >>> alpha = jnp.array([0.5, 0.5])
    >>> updates, _ = optimizer.update(jnp.array([-2.0, 2.0]), optimizer.init(alpha), alpha)
    >>> [round(a, 4) for a in optax.apply_updates(alpha, updates).tolist()]
    [0.8808, 0.1192]
    """
    inner = optax.with_extra_args_support(optimizer)

    def init(alpha):
        jax.tree.map(check_simplex, alpha)
        logits = jax.tree.map(lambda a: jnp.log(jnp.maximum(a, jnp.finfo(a.dtype).tiny)), alpha)
        # Zero logits for a uniform start, as in DARTS: softmax does not see the shift.
        logits = jax.tree.map(lambda z: z - jnp.max(z, axis=-1, keepdims=True), logits)
        return SoftmaxState(logits, inner.init(logits))

    def update(updates, state, params=None, **extra):
        _require_params(params)

        def pull_back(logits, g):
            alpha = jax.nn.softmax(logits)
            g = _finite(g)  # so that the difference below cannot overflow
            return alpha * (g - jnp.sum(alpha * g, axis=-1, keepdims=True))

        slopes = jax.tree.map(pull_back, state.logits, updates)
        step, inner_state = inner.update(slopes, state.optimizer, state.logits, **extra)
        logits = jax.tree.map(_finite, optax.apply_updates(state.logits, step))
        alpha = jax.tree.map(jax.nn.softmax, logits)
        return optax.tree.sub(alpha, params), SoftmaxState(logits, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _finite(x: jax.Array) -> jax.Array:
    """``x`` with its entries kept far enough from infinity for a difference; NaN stays NaN.

    It also keeps a compiler from fusing ``lr * g - max(lr * g)`` into one multiply-add, whose
    unrounded product differs from the maximum even where the two are equal: by 1e17 for 1e27.
    """
    limit = jnp.finfo(x.dtype).max / 8
    return jnp.clip(x, -limit, limit)


def _landing_on(move: Callable, check: Callable) -> optax.GradientTransformation:
    """A stateless transformation whose update takes every leaf from alpha to ``move(alpha, u)``."""

    def init(params):
        jax.tree.map(check, params)
        return optax.EmptyState()

    def update(updates, state, params=None):
        _require_params(params)
        # Rounding is monotone, so a + (b - a) is never negative for a, b >= 0.
        return jax.tree.map(lambda a, u: move(a, u) - a, params, updates), state

    return optax.GradientTransformation(init, update)


def _require_params(params) -> None:
    if params is None:
        raise ValueError("params: expected alpha as the third argument of update, got None.")


def check_simplex(alpha: jax.Array) -> None:
    """Raise unless the last axis of a concrete ``alpha`` is nonnegative and sums to one."""
    if jnp.ndim(alpha) == 0:
        raise ValueError("alpha: expected a simplex on the last axis of every leaf, got a scalar.")
    if isinstance(alpha, jax.core.Tracer):
        return
    values = np.asarray(alpha, dtype=np.float64)
    # A user's own decimals, such as 0.33, 0.33, 0.34, or one float32 rounding per entry, pass.
    off = np.abs(values.sum(-1) - 1).max()
    if not (off <= 1e-4 and values.min() >= 0):
        raise ValueError(
            "alpha: expected points of the simplex on the last axis (nonnegative, sum 1), "
            f"got sums off by up to {off:.3g} and a smallest entry of {values.min():.3g}."
        )


def check_box(alpha: jax.Array) -> None:
    """Raise unless every entry of a concrete ``alpha`` lies in [0, 1]."""
    if isinstance(alpha, jax.core.Tracer):
        return
    values = np.asarray(alpha, dtype=np.float64)
    if not ((values >= 0) & (values <= 1)).all():
        raise ValueError(
            "alpha: expected entries in the box [0, 1], "
            f"got entries from {values.min():.3g} to {values.max():.3g}."
        )
