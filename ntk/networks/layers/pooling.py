"""Layers that mix positions: ``average_pool``, ``global_average_pool`` and ``flatten``."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ntk.expectations.gaussian import reciprocal, root
from ntk.networks.contracts import Layer, LayerStep, Planned
from ntk.networks.moments import LayerFeatures, Moments, Raw, epsilon
from ntk.networks.network import Network
from ntk.networks.position_pairs import state_of_moments
from ntk.networks.windows import (
    Window,
    Windows,
    check_window,
    equal_positions,
    outer,
    place_windows,
    pooled,
    shares,
    single,
)


def average_pool(window: Window, *, strides: Window | None = None) -> Network:
    """Take the mean over each window; positions left over at the end are dropped.

    Parameters
    ----------
    window : int, or one for each axis
    strides : int, or one for each axis, optional
        The window by default.

    Examples
    --------
    >>> average_pool(2).layers[0].strides
    2
    """
    window = check_window("window", window)
    strides = window if strides is None else check_window("strides", strides)
    return Network((_AveragePool(window, strides),))


def global_average_pool() -> Network:
    """Take the mean over all positions.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from ntk import networks as nets
    >>> nets.serial(nets.conv(1), global_average_pool()).kernel(jnp.ones((1, 5, 2))).nngp
    Array([[1.]], dtype=float...)
    """
    return Network((_AveragePool(None, 1),))


def flatten() -> Network:
    """Put all positions into one vector, for a ``dense`` that follows.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from ntk import networks as nets
    >>> nets.serial(flatten(), nets.dense()).kernel(jnp.ones((1, 5, 2))).nngp
    Array([[1.]], dtype=float...)
    """
    return Network((_Flatten(),))


@dataclasses.dataclass(frozen=True, eq=False)
class _AveragePool(Layer):
    """``average_pool``; a window of None is all positions."""

    window: int | tuple[int, ...] | None
    strides: int | tuple[int, ...]

    combinator: ClassVar[str] = "average_pool"

    def plan(self, signal, values):
        if not signal.shape:
            raise ValueError("average_pool: expected images or sequences, got no positions.")
        windows = place_windows("average_pool", self.window, self.strides, "VALID", signal.shape)
        shape = () if self.window is None else windows.after
        return Planned(_Average(windows), (), signal._replace(shape=shape))


@dataclasses.dataclass(frozen=True)
class _Average(LayerStep):
    """Means over windows; no numbers."""

    windows: Windows

    def visit(self, numbers, before, state, full, how):
        return _pool_features(self, before, state)

    def pairs(self, numbers, a, b, state, tile):
        windows = self.windows
        n1, n2 = state.slack.shape
        size = windows.size**2
        below = outer(a.before.norm, b.before.norm, True) * (1 - 2 * state.p)
        second, tangent = (pooled(x, windows, n1, n2) / size for x in (below, state.tangent))
        eps = (4 + 2 * sum(windows.window)) * epsilon(second)
        error = (state.second_error + eps) * a.gain[:, None] * b.gain[None]
        tangent_error = (state.tangent_error + eps) * a.tangent_gain[:, None] * b.tangent_gain[None]
        excess = shares(windows) ** 2 * state.tangent_excess
        return state_of_moments(second, tangent, (error, tangent_error, excess), a, b, tile)

    def apply(self, numbers, x, finite):
        import flax.linen as nn

        return nn.avg_pool(x, self.windows.window, self.windows.strides, "VALID")

    def pools(self):
        return True

    def position_counts(self):
        return self.windows.position_counts()


@functools.partial(jax.jit, static_argnums=0)
def _pool_features(step: _Average, before: Raw | Moments, state: Any) -> LayerFeatures:
    """Return the features; ``state`` is of the pairs [n, 1, P, P] of every input with itself."""
    windows = step.windows
    size = windows.size
    if isinstance(before, Raw):
        x = [single(before.x[..., c], windows) for c in range(before.x.shape[2])]
        return LayerFeatures(before, Raw(jnp.stack(x, 2) / size))

    def with_itself(x):
        pooled_pairs = jax.vmap(lambda x: pooled(x, windows, 1, 1))(x)[:, 0]
        return jnp.diagonal(pooled_pairs, axis1=1, axis2=2) / size**2

    norms = jax.vmap(lambda x: outer(x[None], x[None], True))(before.norm)
    means = [single(root(x), windows) / size for x in (before.square, before.tangent)]
    pairs = zip((norms * (1 - 2 * state.p), state.tangent), means, strict=True)
    # Sums that cancel leave rounding, and results of that size count as completely wrong.
    square, tangent = (jnp.maximum(with_itself(x), 4 * epsilon(x) * mean**2) for x, mean in pairs)
    pairs = zip((square, tangent), means, strict=True)
    ratios = (mean * reciprocal(root(x)) for x, mean in pairs)
    gain, tangent_gain = (jax.lax.stop_gradient(ratio.max(1)) for ratio in ratios)
    eps = epsilon(square)
    worst = jnp.maximum(before.noise, state.second_error[:, 0, 0])
    noise = (worst + (4 + 2 * sum(windows.window)) * eps) * gain**2
    mean, noise = single(before.mean, windows) / size, jax.lax.stop_gradient(noise)
    after = Moments(square, tangent, mean, noise, before.mean_noise)
    return LayerFeatures(before, after, gain=gain, tangent_gain=tangent_gain)


@dataclasses.dataclass(frozen=True)
class _Flatten(Layer, LayerStep):
    combinator: ClassVar[str] = "flatten"

    def plan(self, signal, values):
        return Planned(self, (), signal._replace(shape=(), flat=True))

    def features(self, numbers, before):
        if isinstance(before, Raw):
            return LayerFeatures(before, Raw(before.x.reshape(len(before.x), 1, -1)))
        square, tangent, mean = (x.mean(1, keepdims=True) for x in before[:3])
        noise = before.noise + 8 * epsilon(square)
        return LayerFeatures(before, Moments(square, tangent, mean, noise, before.mean_noise))

    def pairs(self, numbers, a, b, state, tile):
        n1, n2 = state.slack.shape
        p, tangent = state.p, state.tangent
        if tile.full:
            p, tangent = (equal_positions(x, n1, n2) for x in (p, tangent))
        second = outer(a.before.norm, b.before.norm, False) * (1 - 2 * p)
        eps = epsilon(p)
        error = state.second_error + 8 * eps
        second, tangent = (x.mean(0, keepdims=True) for x in (second, tangent))
        errors = error, state.tangent_error + 8 * eps, state.tangent_excess / len(p)
        return state_of_moments(second, tangent, errors, a, b, tile)

    def apply(self, numbers, x, finite):
        return x.reshape(len(x), -1)
