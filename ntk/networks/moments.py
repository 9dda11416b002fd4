"""What every layer does to single inputs: second moments, means and tangents at each position.

With s2 the second moment of the features at a position, mu their mean and t the tangent kernel of
an input with itself, as :mod:`ntk.networks.position_pairs` has them for two inputs:

========  ==============================  ==========  ==============================
layer     s2                              mu          t
========  ==============================  ==========  ==============================
weights   c_w mean s2 + c_b               0           s2 + c_w mean t
act       E s(u)^2, u ~ N(0, s2)          E s(u)      E s'(u)^2 t
pool      mean of S over two positions    mean mu     mean of T over two positions
flatten   mean s2                         mean mu     mean t
add       sum w^2 s2 + 2 w w' mu mu'      sum w mu    sum w^2 t
========  ==============================  ==========  ==============================

Means are over the window or all positions. Errors are bounded per input: ``noise`` is that of s2,
relative to it, and ``mean_noise`` that of mu.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ntk.expectations.gaussian import DENSITY, reciprocal, root
from ntk.expectations.hermite import Expansion, Pieces
from ntk.infinite.input_pairs import normalize_rows
from ntk.infinite.layer_expansions import Resolution, common_kinks, expand_layer, squared_norms
from ntk.networks import tables
from ntk.networks.plan import (
    Average,
    Closed,
    Diagonal,
    Flat,
    Kinked,
    Linear,
    Smooth,
    Sum,
    Tabulated,
)
from ntk.networks.windows import extract_patches, outer, pooled, single

POSITIONS = 2**14  # whose tables are looked up at a time


class Raw(NamedTuple):
    """The data themselves, before the first layer with weights."""

    x: jax.Array  # [n, P, C]


class Moments(NamedTuple):
    """The table's columns after a layer, and bounds of their errors."""

    square: jax.Array  # [n, P], s2
    tangent: jax.Array  # [n, P], t
    mean: jax.Array  # [n, P], mu
    noise: jax.Array  # [n]
    mean_noise: jax.Array  # [n]

    @property
    def norm(self) -> jax.Array:
        """[n, P], root of s2."""
        return root(self.square)


class LayerFeatures(NamedTuple):
    """One layer on single inputs: all that pairs of them need."""

    before: Any  # Raw or Moments
    after: Any
    value: Expansion | None = None  # of a smooth activation and its slope, [n, P, ...]
    slope: Expansion | None = None
    gain: Any = None  # [n], how pooling or a sum magnifies relative errors
    tangent_gain: Any = None
    branches: tuple[Any, ...] = ()  # of a sum: the sites of each
    units: Any = None  # of the data's patches, UnitRows [n, P, ...]


def epsilon(x: jax.Array) -> float:
    """The rounding unit of an array."""
    return float(jnp.finfo(x.dtype).eps)


def linear_features(step: Linear, numbers: Any, before: Raw | Moments) -> LayerFeatures:
    """``dense`` and ``conv``."""
    weight, bias = numbers
    if isinstance(before, Raw):
        patched = vectors(step, numbers, before)
        square = squared_norms(patched)
        eps, none = epsilon(square), jnp.zeros(len(square), square.dtype)
        after = Moments(square, square, 0 * square, none + 8 * eps, none)
        units = normalize_rows(patched.reshape(-1, patched.shape[2]), after.norm.ravel())
        shaped = jax.tree.map(lambda x: x.reshape(*square.shape, *x.shape[1:]), units)
        return LayerFeatures(before, after, units=shaped)
    size = np.prod(step.windows.window, dtype=int).item()
    square, tangent = (
        weight * single(x, step.windows) / size for x in (before.square, before.tangent)
    )
    square = square + bias
    noise = before.noise + (4 + sum(step.windows.window)) * epsilon(square)
    after = Moments(square, square + tangent, 0 * square, noise, 0 * noise)
    return LayerFeatures(before, after)


def vectors(step: Linear, numbers: Any, before: Raw | Moments) -> jax.Array:
    """What a layer with weights takes the inner products of, [n, P', length].

    The patches of the data; else the norms in each patch, as if all correlations were 1.
    """
    weight, bias = numbers
    x = before.x if isinstance(before, Raw) else before.norm[..., None]
    found = extract_patches(x, step.windows)
    found = found.reshape(*found.shape[:2], -1)
    found = found * root(weight / found.shape[2])
    if step.bias:
        ones = jnp.ones((*found.shape[:2], 1), found.dtype)
        found = jnp.concatenate([found, root(bias) * ones], 2)
    return found


def kinked_features(step: Kinked, numbers: Any, before: Moments) -> LayerFeatures:
    """Activations that are linear on both sides of 0."""
    left, right = numbers
    power = (left**2 + right**2) / 2
    mean = (right - left) * DENSITY * before.norm
    noise = before.noise + 16 * epsilon(mean)
    mean_noise = jax.lax.stop_gradient(jnp.abs(mean).max(1) * noise)
    return LayerFeatures(
        before, Moments(power * before.square, power * before.tangent, mean, noise, mean_noise)
    )


def tabulated_features(step: Tabulated, both: Any, before: Moments) -> LayerFeatures:
    """Smooth activations, of which ``both`` has tables for themselves and for their slopes.

    A few images at a time: a position takes some hundred numbers.
    """

    def one(x):
        norm, noise = x
        error = jnp.broadcast_to(noise, norm.shape)
        return tuple(tables.evaluated(t, norm, error, 1 - k) for k, t in enumerate(both))

    batch = max(1, POSITIONS // before.square.shape[1])
    found = jax.lax.map(one, (before.norm, before.noise), batch_size=batch)
    return _features_from_expansions(before, *found)


def smooth_features(step: Smooth, weights: Any, before: Moments, how: Resolution) -> LayerFeatures:
    """Any other activations, by their expansions at every position."""
    assert step.activations is not None
    n, positions = before.square.shape
    layer = step.activations
    error = jnp.repeat(before.noise, positions)
    both = expand_layer(layer, weights, before.norm.ravel(), error, common_kinks([layer]), how)
    return _features_from_expansions(
        before, *jax.tree.map(lambda x: x.reshape(n, positions, *x.shape[1:]), both)
    )


@jax.jit
def _features_from_expansions(before: Moments, value: Expansion, slope: Expansion) -> LayerFeatures:
    regular, rough = value.missed[..., 0], value.missed[..., 1]
    eps = epsilon(value.norm)
    noise = (2 * value.noise + 2 * regular * rough + 4 * eps * value.size**2).max(1) + 4 * eps
    mean_noise = (value.norm * value.noise).max(1)
    tangent = slope.norm**2 * before.tangent
    after = Moments(value.norm**2, tangent, value.mean, noise, mean_noise)
    return LayerFeatures(before, after, value, slope)


def closed_form_features(step: Closed, weight: Any, before: Moments) -> LayerFeatures:
    """Erf and GELU, whose derivatives are at most 1.13, and u times their second at most 0.83."""
    v, size = before.square, jnp.abs(weight)
    s, slope = step.activation, step.activation.derivative
    norms = [root(f.closed[0](v, v, v, 0 * v)) for f in (s, slope, slope.derivative)]
    # Both have a mean of at least 0, whose square is the dual at correlation 0.
    mean = root(s.closed[0](v, v, 0 * v, v * v))
    eps, error = epsilon(v), before.noise[:, None]
    moves = (1.13 * jnp.sqrt(v), 0.83)
    found = []
    for k in (0, 1):
        over = reciprocal(norms[k])
        noise = 16 * eps + error / 2 * moves[k] * over
        steep = root(v) * norms[k + 1] * over
        found.append(_expansion_without_terms(size * norms[k], weight * mean, noise, steep))
    value, slopes = found
    after = Moments(
        value.norm**2,
        slopes.norm**2 * before.tangent,
        value.mean,
        jax.lax.stop_gradient((2 * value.noise).max(1) + 4 * eps),
        jax.lax.stop_gradient((value.norm * value.noise).max(1)),
    )
    return LayerFeatures(before, after, value, slopes)


def _expansion_without_terms(norm, mean, noise, steep) -> Expansion:
    """An expansion of no terms, for the errors of a function whose pairs are a formula."""
    none, zero = jnp.zeros((*norm.shape, 0), norm.dtype), jnp.zeros_like(norm)
    two = jnp.zeros((*norm.shape, 2), norm.dtype)
    pieces = Pieces(none, none, none[..., None])
    noise, steep = jax.lax.stop_gradient((noise, steep))
    return Expansion(norm, mean, none, two, pieces, none, noise, zero + 1, two, steep, zero)


def pooled_features(step: Average, before: Raw | Moments, state: Any) -> LayerFeatures:
    """Pooling; ``state`` of the pairs [n, 1, P, P] of every input with itself."""
    windows = step.windows
    size = np.prod(windows.window, dtype=int).item()
    if isinstance(before, Raw):
        x = [single(before.x[..., c], windows) for c in range(before.x.shape[2])]
        return LayerFeatures(before, Raw(jnp.stack(x, 2) / size))

    def with_itself(x):
        both = jax.vmap(lambda x: pooled(x, windows, 1, 1))(x)[:, 0]
        return jnp.diagonal(both, axis1=1, axis2=2) / size**2

    norms = jax.vmap(lambda x: outer(x[None], x[None], True))(before.norm)
    means = [single(root(x), windows) / size for x in (before.square, before.tangent)]
    square, tangent = (
        # What is left of sums that cancel is rounding; so small, it counts as all wrong.
        jnp.maximum(with_itself(x), 4 * epsilon(x) * mean**2)
        for x, mean in zip((norms * (1 - 2 * state.p), state.tangent), means, strict=True)
    )
    gain, tangent_gain = (
        jax.lax.stop_gradient((mean * reciprocal(root(x))).max(1))
        for x, mean in zip((square, tangent), means, strict=True)
    )
    eps = epsilon(square)
    worst = jnp.maximum(before.noise, state.second_error[:, 0, 0])
    noise = (worst + (4 + 2 * sum(windows.window)) * eps) * gain**2
    after = Moments(
        square,
        tangent,
        single(before.mean, windows) / size,
        jax.lax.stop_gradient(noise),
        before.mean_noise,
    )
    return LayerFeatures(before, after, gain=gain, tangent_gain=tangent_gain)


def diagonal_features(step: Diagonal, before: Raw | Moments) -> LayerFeatures:
    """Only the pairs change."""
    return LayerFeatures(before, before)


def flattened_features(step: Flat, before: Raw | Moments) -> LayerFeatures:
    """All positions into one vector."""
    if isinstance(before, Raw):
        return LayerFeatures(before, Raw(before.x.reshape(len(before.x), 1, -1)))
    square, tangent, mean = (x.mean(1, keepdims=True) for x in before[:3])
    noise = before.noise + 8 * epsilon(square)
    return LayerFeatures(before, Moments(square, tangent, mean, noise, before.mean_noise))


def sum_features(
    step: Sum, weights: Any, before: Any, branches: Any, ends: list[Moments]
) -> LayerFeatures:
    """``add``, of branches that end in ``ends``."""
    eps = epsilon(weights)
    shares = [w**2 * end.square for w, end in zip(weights, ends, strict=True)]
    plain = functools.reduce(jnp.add, shares)
    tangent = functools.reduce(
        jnp.add, (w**2 * end.tangent for w, end in zip(weights, ends, strict=True))
    )
    means = [w * end.mean for w, end in zip(weights, ends, strict=True)]
    mean = functools.reduce(jnp.add, means)
    worst = functools.reduce(jnp.maximum, (end.noise for end in ends)) + (4 + len(ends)) * eps
    sizes = jnp.abs(weights)
    mean_noise = functools.reduce(
        jnp.add, (s * end.mean_noise for s, end in zip(sizes, ends, strict=True))
    )
    square, gain = plain, jnp.ones_like(worst)
    if step.means:
        crossed = mean**2 - functools.reduce(jnp.add, (m**2 for m in means))
        square = jnp.maximum(plain + crossed, 4 * eps * plain)
        over = reciprocal(root(square))
        gain = jax.lax.stop_gradient((root(plain) * over).max(1))
        absolute = functools.reduce(jnp.add, map(jnp.abs, means))
        worst = worst * gain**2 + 2 * (absolute * over).max(1) * mean_noise * over.max(1)
    after = Moments(square, tangent, mean, *map(jax.lax.stop_gradient, (worst, mean_noise)))
    return LayerFeatures(before, after, gain=gain, branches=branches)
