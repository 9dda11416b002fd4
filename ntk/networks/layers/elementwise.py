"""Elementwise functions: ``act``.

The step of an ``act`` depends on its activations. ReLU-like ones, erf and GELU have closed forms;
all others are expanded, by tables if possible.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ntk.expectations.activations import Activation, erf, gelu, in_a_network
from ntk.expectations.gaussian import DENSITY, arc_cosines, reciprocal, root
from ntk.expectations.hermite import Expansion
from ntk.infinite.layer_expansions import (
    TRACED,
    common_kinks,
    evaluate_layer,
    expand_layer,
    kinks_at_zero,
)
from ntk.internal.checks import concrete, sequence
from ntk.networks import tables
from ntk.networks.contracts import Layer, LayerStep, Planned, compiled_features
from ntk.networks.moments import LayerFeatures, Moments, epsilon
from ntk.networks.network import Network
from ntk.networks.plan import check_choice
from ntk.networks.position_pairs import (
    PairState,
    angle_error,
    by_tables,
    duals_by_position,
    map_state_strips,
    met_in_strip,
    norm_noise,
    state_after_duals,
    state_after_smooth,
)
from ntk.networks.windows import sum_over_positions

_POSITIONS = 2**14  # positions evaluated at a time


def act(activations: Any, weights: Any = None) -> Network:
    """Apply an activation, or a weighted sum of several.

    Parameters
    ----------
    activations : activation, smooth function, ``{activation: weight}``, or list of activations
    weights : str or sequence of numbers and names, optional
        Weights of a list. A single name is a vector in ``alpha`` with all weights: a choice.

    Raises
    ------
    ValueError
        If ``activations`` is empty, or the number of weights differs.

    Examples
    --------
    >>> import ntk
    >>> act({ntk.relu: 0.3, ntk.tanh: "b"}).names
    {'b': ()}
    """
    if isinstance(activations, Mapping):
        activations, weights = list(activations), list(activations.values())
    elif callable(activations):
        activations, weights = [activations], [1.0]
    activations = tuple(map(in_a_network, sequence("activations", activations, "activations")))
    if not activations:
        raise ValueError("activations: expected at least one, got none.")
    return Network((_Elementwise(activations, check_choice(weights, len(activations))),))


@dataclasses.dataclass(frozen=True, eq=False)
class _Elementwise(Layer):
    """``act``: activations, and their weights (numbers or names) or one name for all."""

    activations: tuple[Activation, ...]
    weights: tuple[Any, ...] | str

    combinator: ClassVar[str] = "act"

    def plan(self, signal, values):
        if not signal.gaussian:
            expected = "a layer with weights between it and the last act"
            raise ValueError(f"act: expected {expected}, got none.")
        weights = values.weights(self.weights)
        return Planned(*self._step(weights, values.finite), signal._replace(gaussian=False))

    def _step(self, weights: jax.Array, finite: bool) -> tuple[LayerStep, Any]:
        if finite:
            return _Elements(self.activations), weights
        if all(s.smooth is None for s in self.activations):
            return _Kinked(), jnp.stack(kinks_at_zero(self.activations, weights))
        if len(self.activations) == 1 and self.activations[0] in (erf, gelu):
            return _Closed(self.activations[0]), weights[0]
        return _Smooth(self.activations), weights

    def entries(self):
        return [(self.weights, tuple(s.name for s in self.activations))]


@dataclasses.dataclass(frozen=True)
class _Elements(LayerStep):
    """Any activations, in a finite network; numbers: their weights."""

    activations: tuple[Activation, ...]

    def apply(self, numbers, x, finite):
        return evaluate_layer(self.activations, numbers, x)


@dataclasses.dataclass(frozen=True)
class _Kinked(LayerStep):
    """Activations that are linear on both sides of 0; numbers: (left, right) slopes."""

    def features(self, numbers, before):
        left, right = numbers
        power = (left**2 + right**2) / 2
        mean = (right - left) * DENSITY * before.norm
        noise = before.noise + 16 * epsilon(mean)
        mean_noise = jax.lax.stop_gradient(jnp.abs(mean).max(1) * noise)
        square, tangent = power * before.square, power * before.tangent
        return LayerFeatures(before, Moments(square, tangent, mean, noise, mean_noise))

    def pairs(self, numbers, a, b, state, tile):
        left, right = numbers
        power, bend = (left**2 + right**2) / 2, (right - left) ** 2
        over = reciprocal(power)
        eps = epsilon(state.p)

        def one(entries, _left, _right, pairs):
            (p, tangent), (slack, floor, *_) = entries, pairs
            step, _, gap = arc_cosines(p, 1 - p)
            after = (p * (left * right) + gap * (bend / 2)) * over
            off = jnp.abs(tangent) * angle_error(slack * jnp.sqrt(p) + floor, p)
            if tile.same is not None:
                off = jnp.where(met_in_strip(_left, _right, pairs), 0, off)
            # The dual of the slopes is the factor of T.
            return after, tangent * (left * right + bend * step), jax.lax.stop_gradient(off)

        known = jax.lax.stop_gradient((state.slack, state.floor))
        after, tangent, off = map_state_strips(one, state, tile, pairs=known)
        n1, n2 = state.slack.shape
        # If the dual falls with the angle, a small angle may come from a large one.
        monotone = left * right >= 0
        floor = state.floor + jnp.where(monotone, 0, state.slack)
        slack = jnp.where(monotone, state.slack, 0) + 8 * eps
        # S moves by E f' f' <= power with S below, by |E f f - S E f' f'| <= 0.7 power with norms.
        by_angle = 2 * (slack + floor) + norm_noise(a.after, b.after)
        by_norm = state.second_error + 0.7 * norm_noise(a.before, b.before)
        second = 8 * eps + jnp.minimum(by_angle, by_norm)
        worst = power + bend * jnp.sqrt(slack + floor)
        error = state.tangent_error * (1 + bend * over * jnp.sqrt(slack + floor)) + 16 * eps
        excess = bend * sum_over_positions(off, tile.full, n1, n2) + worst * state.tangent_excess
        errors = jax.lax.stop_gradient((slack, floor, second, error, excess))
        return PairState(after, tangent, *errors)


@dataclasses.dataclass(frozen=True)
class _Smooth(LayerStep):
    """Other activations, none in a skeleton; numbers: their weights."""

    activations: tuple[Activation, ...]

    def visit(self, numbers, before, state, full, how):
        n, positions = before.square.shape
        layer, error = self.activations, jnp.repeat(before.noise, positions)
        kinks = common_kinks([layer])
        expansions = expand_layer(layer, numbers, before.norm.ravel(), error, kinks, how)
        shaped = jax.tree.map(lambda x: x.reshape(n, positions, *x.shape[1:]), expansions)
        return _features_from_expansions(before, *shaped)

    def pairs(self, numbers, a, b, state, tile):
        terms = a.value.regular.shape[2]
        return state_after_duals(duals_by_position, a, b, state, tile, terms)

    def values_per_input(self, positions):
        """Return the numbers in an expansion at a usual resolution."""
        return 600 * positions

    def skeleton(self):
        return _Smooth(())

    def tabulate(self, numbers, how, dtype):
        """Return tables, unless there is a kink away from 0."""
        layer = self.activations
        if any(s.kinks for s in layer):
            return self, numbers
        if not concrete(numbers + 0):
            return _Tabulated(), tables.tabulate_layer(layer, numbers, how, dtype)
        weights = tuple(np.asarray(numbers).tolist())
        return _Tabulated(), _shared_tables(layer, weights, how, dtype)


@functools.lru_cache(maxsize=16)
def _shared_tables(activations, weights, how, dtype):
    """Return tables for concrete weights: equal layers share them."""
    return tables.tabulate_layer(activations, jnp.asarray(weights, dtype), how, dtype)


@dataclasses.dataclass(frozen=True)
class _Tabulated(LayerStep):
    """A ``Smooth`` with no kink except at 0; numbers: tables of it and of its slope."""

    def visit(self, numbers, before, state, full, how):
        """Run :meth:`features` without terms, so that one program serves any number of them."""
        numbers = [t._replace(terms=t.terms[:, :0]) for t in numbers]
        return compiled_features(self, numbers, before)

    def features(self, numbers, before):
        """Evaluate tables at every norm, some images at a time to bound memory."""

        def one(x):
            norm, noise = x
            error = jnp.broadcast_to(noise, norm.shape)
            return tuple(tables.evaluated(t, norm, error, 1 - k) for k, t in enumerate(numbers))

        batch = max(1, _POSITIONS // before.square.shape[1])
        expansions = jax.lax.map(one, (before.norm, before.noise), batch_size=batch)
        return _features_from_expansions(before, *expansions)

    def pairs(self, numbers, a, b, state, tile):
        how = functools.partial(by_tables, numbers)
        return state_after_duals(how, a, b, state, tile, numbers[0].terms.shape[1])

    def table_values(self, numbers, site):
        again = self.visit(numbers, site.before, None, False, TRACED)
        yield again.value
        yield again.slope


@jax.jit
def _features_from_expansions(before: Moments, value: Expansion, slope: Expansion) -> LayerFeatures:
    regular, rough = value.missed[..., 0], value.missed[..., 1]
    eps = epsilon(value.norm)
    noise = (2 * value.noise + 2 * regular * rough + 4 * eps * value.size**2).max(1) + 4 * eps
    mean_noise = (value.norm * value.noise).max(1)
    tangent = slope.norm**2 * before.tangent
    after = Moments(value.norm**2, tangent, value.mean, noise, mean_noise)
    return LayerFeatures(before, after, value, slope)


@dataclasses.dataclass(frozen=True)
class _Closed(LayerStep):
    """An activation with closed formulas for its duals, erf or GELU; numbers: its weight."""

    activation: Activation

    def features(self, numbers, before):
        """Evaluate the formulas. Derivatives are at most 1.13, u times second ones at most 0.83."""
        v, size = before.square, jnp.abs(numbers)
        s, slope = self.activation, self.activation.derivative
        norms = [root(f.closed[0](v, v, v, 0 * v)) for f in (s, slope, slope.derivative)]
        # The means are at least 0, and their squares are the duals at correlation 0.
        mean = root(s.closed[0](v, v, 0 * v, v * v))
        eps, error = epsilon(v), before.noise[:, None]
        moves = (1.13 * jnp.sqrt(v), 0.83)
        expansions = []
        for k in (0, 1):
            over = reciprocal(norms[k])
            noise = 16 * eps + error / 2 * moves[k] * over
            steep = root(v) * norms[k + 1] * over
            zero, two = jnp.zeros_like(v), jnp.zeros((*v.shape, 2), v.dtype)
            errors = noise, zero + 1, two, steep, zero
            expansions.append(tables.without_terms(size * norms[k], numbers * mean, two, errors))
        value, slopes = expansions
        square, tangent = value.norm**2, slopes.norm**2 * before.tangent
        noise = jax.lax.stop_gradient((2 * value.noise).max(1) + 4 * eps)
        mean_noise = jax.lax.stop_gradient((value.norm * value.noise).max(1))
        after = Moments(square, tangent, value.mean, noise, mean_noise)
        return LayerFeatures(before, after, value, slopes)

    def pairs(self, numbers, a, b, state, tile):
        """Compute :func:`state_after_duals` in one pass."""
        formulas = [s.closed[0] for s in (self.activation, self.activation.derivative)]
        sides = [[s.before.square, s.before.norm, reciprocal(s.after.norm)] for s in (a, b)]

        def one(entries, left, right, pairs):
            (p, tangent), (vx, sx, over_x), (vy, sy, over_y) = entries, left[:3], right[:3]
            met = None if tile.same is None else met_in_strip(left, right, pairs)
            inside = p if met is None else jnp.where(met, 0.5, p)
            c, det = sx * sy * (1 - 2 * inside), 4 * vx * vy * inside * (1 - inside)
            value, slope = (f(vx, vy, c, det) for f in formulas)
            known = over_x * over_y
            after = jnp.where(known > 0, jnp.clip((1 - numbers**2 * value * known) / 2, 0, 1), 0.5)
            slope = numbers**2 * slope
            if met is None:
                return after, tangent * slope
            # Entries of inputs with themselves are known exactly.
            return jnp.where(met, 0, after), tangent * jnp.where(met, left[3] * right[3], slope)

        if tile.same is not None:
            sides = [[*side, s.slope.norm] for side, s in zip(sides, (a, b), strict=True)]
        after, tangent = map_state_strips(one, state, tile, *sides)
        return state_after_smooth(after, tangent, a, b, state, None, 0)
