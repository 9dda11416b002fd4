"""Geometries of the hyperparameters, as optax transformations that act on ``alpha`` itself.

A simplex is the last axis of a leaf of ``alpha``: one per edge of a cell, one per layer. Each
transformation takes the gradient in ``alpha``, or an optimizer's update, and returns an update that
ends exactly on the set. ``optax.partition`` uses different geometries for different leaves.

A geometry is the last transformation of a chain, after an optimizer that descends. Its state holds
its new point, so that :func:`bilevel.descent` detects transformations after it.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from bilevel.constraints import project_simplex
from bilevel.contracts import Pytree
from bilevel.internal import checks


def tangent() -> optax.GradientTransformation:
    """Project a gradient onto the simplices: subtract its mean over the last axis.

    Put it before an optimizer that rescales coordinates one by one, as in ``optax.chain(tangent(),
    optax.adam(lr), exponentiate())``. A component common to all coordinates cannot move ``alpha``,
    but Adam would take the coordinates for equally steep.

    Examples
    --------
    >>> optimizer = tangent()
    >>> alpha = jnp.array([0.5, 0.5])
    >>> optimizer.update(jnp.array([3.0, 1.0]), optimizer.init(alpha))[0]
    Array([ 1., -1.], dtype=float...)
    """

    def along(g):
        g = _limit_magnitude(g)
        return g - jnp.sum(g / g.shape[-1], axis=-1, keepdims=True)

    return optax.stateless(lambda updates, _: jax.tree.map(along, updates))


def exponentiate() -> optax.GradientTransformation:
    """Update simplices exponentially: chain it after an optimizer.

    ``alpha <- alpha exp(u) / sum(alpha exp(u))`` with ``u`` the incoming update. So
    ``optax.chain(optax.sgd(lr), exponentiate())`` is exponentiated gradient, mirror descent in the
    entropy (Kivinen & Warmuth 1997; GAEA: Li, Khodak, Balcan & Talwalkar 2021). A coordinate that
    is exactly 0 stays 0.

    Raises
    ------
    ValueError
        If a concrete ``alpha`` is not on the simplex.

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
        update = _limit_magnitude(update).astype(checks.at_least_float32(update.dtype))
        # Shifting by the largest exponent in the support makes exp safe for updates of any size.
        shift = jnp.max(jnp.where(support, update, -jnp.inf), axis=-1, keepdims=True)
        weights = jnp.where(support, alpha * jnp.exp(jnp.where(support, update - shift, 0)), 0)
        # All products can be tiny, if alpha is tiny where the exponent is largest: we scale first.
        weights = weights / jnp.max(weights, axis=-1, keepdims=True)
        weights = jnp.where(jnp.isnan(update), jnp.nan, weights)  # also outside the support
        return (weights / jnp.sum(weights, axis=-1, keepdims=True)).astype(alpha.dtype)

    return _landing_on(_Exponentiated, functools.partial(jax.tree.map, move), check_simplex)


def project(onto: str | Callable[[Pytree], Pytree] = "simplex") -> optax.GradientTransformation:
    """Project ``alpha + update`` onto a set, in the Euclidean norm: chain it after an optimizer.

    Parameters
    ----------
    onto : {"simplex", "box"} or callable
        Simplices on the last axes (Duchi et al. 2008), the box [0, 1], or any function from a point
        (a pytree like ``alpha``) to its projection.

    Raises
    ------
    ValueError
        If the name is unknown, or a concrete ``alpha`` is not on the named set.

    Examples
    --------
    >>> optimizer = optax.chain(optax.sgd(1.0), project("simplex"))
    >>> alpha = jnp.array([0.5, 0.5])
    >>> updates, _ = optimizer.update(jnp.array([0.0, -0.2]), optimizer.init(alpha), alpha)
    >>> optax.apply_updates(alpha, updates)
    Array([0.4, 0.6], dtype=float...)
    """
    if callable(onto):
        return _landing_on(
            _Projected, lambda alpha, u: onto(optax.apply_updates(alpha, u)), lambda leaf: None
        )
    if onto == "simplex":
        nearest, check = project_simplex, check_simplex
    elif onto == "box":
        nearest, check = functools.partial(jnp.clip, min=0, max=1), check_box
    else:
        raise ValueError(f'onto: expected "simplex", "box" or a callable, got {onto!r}.')
    move = functools.partial(jax.tree.map, lambda a, u: nearest(a + u))
    return _landing_on(_Projected, move, check)


# The `point` of each state is like alpha: where the geometry moved it to.


class _Exponentiated(NamedTuple):
    point: Pytree


class _Projected(NamedTuple):
    point: Pytree


class SoftmaxState(NamedTuple):
    """State of :func:`softmax`."""

    logits: Pytree  # like alpha
    optimizer: optax.OptState  # of the logits
    point: Pytree


def softmax(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Optimize logits: ``alpha = softmax(logits)`` on the last axes (DARTS, Liu et al. 2019).

    The gradient in ``alpha`` is pulled back, ``alpha * (g - <alpha, g>)``, and ``optimizer`` moves
    the logits. The returned update is the change of ``alpha``.

    Parameters
    ----------
    optimizer : optax.GradientTransformation
        Optimizer of the logits, which start at ``log(alpha)``. Weight decay shrinks the logits.

    Raises
    ------
    ValueError
        If a concrete ``alpha`` is not on the simplex.

    Examples
    --------
    >>> optimizer = softmax(optax.sgd(1.0))
    >>> alpha = jnp.array([0.5, 0.5])
    >>> updates, _ = optimizer.update(jnp.array([-2.0, 2.0]), optimizer.init(alpha), alpha)
    >>> [round(a, 4) for a in optax.apply_updates(alpha, updates).tolist()]
    [0.8808, 0.1192]
    """
    inner = checks.gradient_transformation("optimizer", optimizer)

    def init(alpha):
        jax.tree.map(check_simplex, alpha)
        logits = jax.tree.map(lambda a: jnp.log(jnp.maximum(a, jnp.finfo(a.dtype).tiny)), alpha)
        # Zero logits for a uniform start, as in DARTS: softmax ignores a shift.
        logits = jax.tree.map(lambda z: z - jnp.max(z, axis=-1, keepdims=True), logits)
        return SoftmaxState(logits, inner.init(logits), jax.tree.map(jnp.copy, alpha))

    def update(updates, state, params=None, *, shorten=None, **extra):
        _check_update(updates, params, check_simplex)

        def pull_back(logits, g):
            alpha = _softmax_in_float32(logits)
            g = _limit_magnitude(g)  # so that the difference below cannot overflow
            return alpha * (g - jnp.sum(alpha * g, axis=-1, keepdims=True))

        slopes = jax.tree.map(pull_back, state.logits, updates)
        if "value_fn" in extra:  # a function of alpha, but the optimizer moves logits
            of_alpha = extra["value_fn"]

            @functools.wraps(of_alpha)  # optax reads the names of its arguments
            def of_logits(logits, **extra_args):
                return of_alpha(jax.tree.map(_softmax_in_float32, logits), **extra_args)

            extra |= {"value_fn": of_logits}
        if "grad" in extra:
            extra |= {"grad": slopes}
        step, inner_state = inner.update(slopes, state.optimizer, state.logits, **extra)
        step = _shorter(step, shorten)
        logits = jax.tree.map(_limit_magnitude, optax.apply_updates(state.logits, step))
        updates = optax.tree.sub(jax.tree.map(_softmax_in_float32, logits), params)
        return updates, SoftmaxState(logits, inner_state, optax.apply_updates(params, updates))

    return optax.GradientTransformationExtraArgs(init, update)


def _limit_magnitude(x: jax.Array) -> jax.Array:
    """Clip ``x`` to an eighth of the largest finite value, so that a difference cannot overflow.

    NaN stays NaN. The clip also keeps a compiler from fusing ``lr * g - max(lr * g)`` into one
    multiply-add without rounding of ``lr * g``. If both terms are equal, that result would not
    be 0: for values of 1e27 it was 1e17.
    """
    limit = jnp.finfo(x.dtype).max / 8
    return jnp.clip(x, -limit, limit)


def _softmax_in_float32(logits: jax.Array) -> jax.Array:
    # Half precision is too coarse for long sums.
    return jax.nn.softmax(logits.astype(checks.at_least_float32(logits.dtype))).astype(logits.dtype)


def _landing_on(kind: type, move: Callable, check: Callable) -> optax.GradientTransformation:
    """Return a transformation that takes alpha to ``move(alpha, updates)``."""

    def init(params):
        jax.tree.map(check, params)
        return kind(jax.tree.map(jnp.copy, params))

    def update(updates, state, params=None, *, shorten=None, **_):
        _check_update(updates, params, check)
        # b - a >= -a, also after rounding, so that a + (b - a) is never negative for a, b >= 0.
        updates = optax.tree.sub(move(params, _shorter(updates, shorten)), params)
        return updates, kind(optax.apply_updates(params, updates))

    return optax.GradientTransformationExtraArgs(init, update)


def _shorter(updates: Pytree, scale: jax.Array | None) -> Pytree:
    """Return ``scale`` times the updates, for a search that diverged."""
    if scale is None:
        return updates
    return jax.tree.map(lambda u: scale.astype(u.dtype) * u, updates)


def _check_update(updates: Pytree, params: Pytree, check: Callable) -> None:
    """Raise if alpha is missing or off its set, or has another shape, which would broadcast."""
    if params is None:
        raise ValueError("params: expected alpha as the third argument of update, got None.")
    try:
        jax.tree.map(check, params)
    except ValueError as error:
        raise ValueError(f"{error} A geometry has to be the last of its chain.") from None
    for update, alpha in zip(jax.tree.leaves(updates), jax.tree.leaves(params), strict=True):
        if jnp.shape(update) != jnp.shape(alpha):
            raise ValueError(
                f"updates: expected the shape {jnp.shape(alpha)} of alpha, got {jnp.shape(update)}."
            )


def check_simplex(alpha: chex.Array) -> None:
    """Raise if a concrete ``alpha`` is negative, or its sum over the last axis is not one."""
    if jnp.ndim(alpha) == 0:
        raise ValueError("alpha: expected a simplex on the last axis of every leaf, got a scalar.")
    _check_entries(alpha)
    checks.simplex("alpha", alpha)


def check_box(alpha: chex.Array) -> None:
    """Raise if a concrete ``alpha`` has an entry outside [0, 1]."""
    _check_entries(alpha)
    if not checks.concrete(alpha):
        return
    values = np.asarray(alpha, dtype=np.float64)
    if not ((values >= 0) & (values <= 1)).all():
        raise ValueError(
            "alpha: expected entries in the box [0, 1], "
            f"got entries from {values.min():.3g} to {values.max():.3g}."
        )


def _check_entries(alpha: jax.Array) -> None:
    checks.check_floating("alpha", alpha)
    if not jnp.size(alpha):
        raise ValueError(f"alpha: expected entries, got none in the shape {jnp.shape(alpha)}.")


MISPLACED = (
    "optimizer: expected {}() as the last transformation, since it takes alpha onto its set, got "
    "another one after it that moves alpha on."
)
_ASCENDING = (
    "optimizer: expected {}() with an optimizer that goes against the gradient, such as "
    "optax.sgd(learning_rate), got one that follows it."
)

_NAMES = {_Exponentiated: "exponentiate", _Projected: "project", SoftmaxState: "softmax"}


def check_last(state: optax.OptState, alpha: Pytree) -> Pytree:
    """Return ``alpha``; raise if a transformation moved it after its geometry in ``state``."""
    return _refused(MISPLACED, geometry_names(state), moved_on(state, alpha), alpha)


def check_descends(
    optimizer: optax.GradientTransformation, state: optax.OptState, alpha: Pytree
) -> Pytree:
    """Return ``alpha``; raise if ``optimizer`` has a geometry and follows the gradient uphill."""
    if not (names := geometry_names(state)):
        return alpha
    return _refused(_ASCENDING, names, _compiled_ascends(optimizer, alpha), alpha)


def geometries(state: optax.OptState) -> list[Any]:
    """Return the states of the geometries in an optimizer's state."""
    leaves = jax.tree.leaves(state, is_leaf=lambda x: type(x) in _NAMES)
    return [x for x in leaves if type(x) in _NAMES]


def paths(state: optax.OptState) -> set:
    """Return the paths of alpha's leaves that a geometry moves."""
    points = [jax.tree_util.tree_leaves_with_path(g.point) for g in geometries(state)]
    return {path for leaves in points for path, _ in leaves}


def geometry_names(state: optax.OptState) -> list[str]:
    """Return the public names of these geometries."""
    return [_NAMES[type(geometry)] for geometry in geometries(state)]


def moved_on(state: optax.OptState, alpha: Pytree) -> list[jax.Array]:
    """Return for each geometry whether ``alpha`` moved after it: a bool []. NaN is not a move."""
    return [_any_leaf(_differs_beyond_rounding, g.point, alpha) for g in geometries(state)]


def trial_arguments(loss: Callable, alpha: Pytree) -> dict[str, Any]:
    """Return the further arguments of an optimizer's trial step from ``alpha``."""

    # Line searches pass on the arguments of a single loop.
    def value_fn(alpha, residual=None, memory=None):
        return loss(alpha)

    return {"value": loss(alpha), "value_fn": value_fn, "residual": 0.0, "memory": 1}


def ascends(optimizer: optax.GradientTransformation, alpha: Pytree) -> list[jax.Array]:
    """Return for each geometry whether a first step follows the gradient instead of descending.

    Two trial gradients, g and -g, each give a step from the middle of the set. The optimizer
    ascends if the difference of the steps points along g; weight decay and noise cancel in it.
    """
    pairs = jax.tree.map(_middle_and_slope, alpha)
    start, slope = jax.tree.transpose(jax.tree.structure(alpha), None, pairs)

    def after(sign):
        g = jax.tree.map(lambda g: sign * g, slope)

        # A loss with this gradient, far above any assumed minimum (polyak_sgd's f_min).
        extra_args = trial_arguments(lambda a: 1e3 + optax.tree.vdot(g, a), start)
        rule = optax.with_extra_args_support(optimizer)
        _, state = rule.update(g, rule.init(start), start, grad=g, **extra_args)
        return [geometry.point for geometry in geometries(state)]

    gaps = map(optax.tree.sub, after(1), after(-1))
    return [_any_leaf(_points_along, gap, slope) for gap in gaps]


_compiled_ascends = jax.jit(ascends, static_argnums=0)


def _refused(message: str, names: list[str], wrong: list[jax.Array], alpha: Pytree) -> Pytree:
    """Raise if a geometry is ``wrong``; if that is traced, ``alpha`` becomes NaN instead."""
    for name, bad in zip(names, wrong, strict=True):
        if not checks.concrete(bad):
            alpha = jax.tree.map(lambda a, bad=bad: jnp.where(bad, jnp.nan, a), alpha)
        elif bad:
            raise ValueError(message.format(name))
    return alpha


def _middle_and_slope(alpha: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the middle of the set, and a gradient there: -1 to 1 along the last axis."""
    size = alpha.shape[-1] if alpha.ndim else 1
    # In float32 at least, because half precision loses small steps.
    middle = jnp.full(alpha.shape, 1, checks.at_least_float32(alpha.dtype)) / size
    slope = jnp.linspace(-1, 1, size, dtype=middle.dtype)
    return middle, jnp.broadcast_to(slope if alpha.ndim else slope[0], alpha.shape)


def _differs_beyond_rounding(point: jax.Array, alpha: jax.Array) -> jax.Array:
    # Another program can round the same sum differently, so two units of roundoff do not count.
    # Rounding never makes a nonnegative entry negative, so a negative entry counts as a move.
    slack = 2 * jnp.finfo(point.dtype).eps * jnp.maximum(1, jnp.abs(point))
    moved = ~(jnp.abs(alpha - point) <= slack) | ((alpha < 0) & (point >= 0))
    return jnp.isfinite(point) & moved


def _points_along(step: jax.Array, slope: jax.Array) -> jax.Array:
    return jnp.vdot(step, slope) > 16 * jnp.finfo(step.dtype).eps * step.size


def _any_leaf(test: Callable, part: Pytree, all_: Pytree) -> jax.Array:
    """Return whether ``test`` holds for a leaf of ``part``, a tree with some leaves of ``all_``."""
    leaves = dict(jax.tree_util.tree_leaves_with_path(all_))
    leaf_tests = [test(x, leaves[k]).any() for k, x in jax.tree_util.tree_leaves_with_path(part)]
    return functools.reduce(jnp.logical_or, leaf_tests, jnp.zeros((), bool))
