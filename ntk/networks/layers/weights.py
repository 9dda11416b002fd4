"""Layers with weights: ``dense`` and ``conv``."""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ntk.expectations.gaussian import reciprocal, root
from ntk.infinite.input_pairs import half_chords, normalize_rows
from ntk.infinite.layer_expansions import squared_norms
from ntk.networks.contracts import Layer, LayerStep, Planned, Signal
from ntk.networks.moments import LayerFeatures, Moments, Raw, epsilon
from ntk.networks.network import Network
from ntk.networks.plan import Values
from ntk.networks.position_pairs import (
    PairState,
    Tile,
    norm_half_chords,
    norm_noise,
    zero_where_same,
)
from ntk.networks.windows import (
    NO_POSITIONS,
    Window,
    Windows,
    as_pair_rows,
    check_window,
    extract_patches,
    outer,
    place_windows,
    shares,
    single,
    sum_pair_windows,
)

_PADDINGS = ("SAME", "VALID", "CIRCULAR")


def dense(weight_variance: Any = 1.0, bias_variance: Any = 0.0) -> Network:
    """Apply a fully connected layer, ``sqrt(c_w / fan_in) W f + sqrt(c_b) b``.

    Parameters
    ----------
    weight_variance, bias_variance : nonnegative number or name
        c_w and c_b.

    Raises
    ------
    ValueError
        If a variance is not a nonnegative number or a name.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> dense(2.0).kernel(jnp.ones((1, 3))).nngp
    Array([[2.]], dtype=float...)
    """
    _check_variances(weight_variance, bias_variance)
    return Network((_Dense(weight_variance, bias_variance),))


def conv(
    window: Window,
    weight_variance: Any = 1.0,
    bias_variance: Any = 0.0,
    *,
    strides: Window = 1,
    padding: str = "SAME",
) -> Network:
    """Apply a convolution, ``sqrt(c_w / fan_in) W * f + sqrt(c_b) b``, to sequences or images.

    Parameters
    ----------
    window : int, or one for each axis
    weight_variance, bias_variance : nonnegative number or name
        c_w and c_b.
    strides : int, or one for each axis
    padding : "SAME", "VALID" or "CIRCULAR"
        SAME pads with zeros and keeps the number of positions, over the strides. VALID does not
        pad. CIRCULAR repeats the image.

    Raises
    ------
    ValueError
        If ``padding`` has another value, a window or strides are not positive integers, or a
        variance is not a nonnegative number or a name.

    Examples
    --------
    >>> conv(3).layers[0].padding
    'SAME'
    """
    window = check_window("window", window)
    strides = check_window("strides", strides)
    if padding not in _PADDINGS:
        raise ValueError(f"padding: expected one of {', '.join(_PADDINGS)}, got {padding!r}.")
    _check_variances(weight_variance, bias_variance)
    return Network((_Convolution(weight_variance, bias_variance, window, strides, padding),))


def _check_variances(weight_variance: Any, bias_variance: Any) -> None:
    for name, value in (("weight_variance", weight_variance), ("bias_variance", bias_variance)):
        if isinstance(value, str | jax.core.Tracer):
            continue
        number = np.asarray(value)
        if number.shape or number.dtype.kind not in "iuf" or not 0 <= number < np.inf:
            raise ValueError(f"{name}: expected a nonnegative number or a name, got {value!r}.")


@dataclasses.dataclass(frozen=True, eq=False)
class _Dense(Layer):
    weight_variance: Any
    bias_variance: Any

    combinator: ClassVar[str] = "dense"
    after_flatten: ClassVar[bool] = True

    def plan(self, signal, values):
        if math.prod(signal.shape) > 1:
            expected = "flatten or pooling before it"
            raise ValueError(f"dense: expected {expected}, got shape {signal.shape}.")
        return self._linear(NO_POSITIONS, values)

    def _linear(self, windows: Windows, values: Values) -> Planned:
        names = "weight_variance", "bias_variance"
        numbers = tuple(values.number(name, getattr(self, name), least=0) for name in names)
        none = isinstance(self.bias_variance, int | float) and self.bias_variance == 0
        return Planned(_Linear(windows, not none), numbers, Signal(windows.after, True))

    def entries(self):
        return [((self.weight_variance, self.bias_variance), None)]

    def has_weights(self):
        return True


@dataclasses.dataclass(frozen=True, eq=False)
class _Convolution(_Dense):
    window: int | tuple[int, ...]
    strides: int | tuple[int, ...]
    padding: str

    combinator: ClassVar[str] = "conv"
    after_flatten: ClassVar[bool] = False

    def plan(self, signal, values):
        if not signal.shape:
            raise ValueError("conv: expected images or sequences, got inputs without positions.")
        windows = place_windows("conv", self.window, self.strides, self.padding, signal.shape)
        return self._linear(windows, values)


@dataclasses.dataclass(frozen=True)
class _Linear(LayerStep):
    """``sqrt(c_w / fan_in) W * f + sqrt(c_b) b``; numbers: (c_w, c_b)."""

    windows: Windows
    bias: bool

    weighted: ClassVar[bool] = True
    makes_outputs: ClassVar[bool] = True

    def features(self, numbers, before):
        """Sum second moments and tangents over windows; on the data, take its patches."""
        weight, bias = numbers
        windows = self.windows
        if isinstance(before, Raw):
            patched = self._vectors(numbers, before)
            square = squared_norms(patched)
            eps, none = epsilon(square), jnp.zeros(len(square), square.dtype)
            after = Moments(square, square, 0 * square, none + 8 * eps, none)
            units = normalize_rows(patched.reshape(-1, patched.shape[2]), after.norm.ravel())
            shaped = jax.tree.map(lambda x: x.reshape(*square.shape, *x.shape[1:]), units)
            return LayerFeatures(before, after, units=shaped)
        below = before.square, before.tangent
        square, tangent = (weight * single(x, windows) / windows.size for x in below)
        square = square + bias
        noise = before.noise + (4 + sum(windows.window)) * epsilon(square)
        after = Moments(square, square + tangent, 0 * square, noise, 0 * noise)
        return LayerFeatures(before, after)

    def _vectors(self, numbers: Any, before: Raw | Moments) -> jax.Array:
        """Return the patches [n, P', length] of the data, or of the norms after the first layer."""
        weight, bias = numbers
        x = before.x if isinstance(before, Raw) else before.norm[..., None]
        patches = extract_patches(x, self.windows)
        patches = patches.reshape(*patches.shape[:2], -1)
        patches = patches * root(weight / patches.shape[2])
        if self.bias:
            ones = jnp.ones((*patches.shape[:2], 1), patches.dtype)
            patches = jnp.concatenate([patches, root(bias) * ones], 2)
        return patches

    def pairs_of_data(self, numbers, a, b, tile):
        p = zero_where_same(_patch_half_chords(a, b, tile), tile)
        sizes = outer(a.after.norm, b.after.norm, tile.full)
        none = jnp.zeros((len(a.after.square), len(b.after.square)), p.dtype)
        eps = epsilon(p)
        slack, floor = none + 8 * eps, none + 4 * eps**1.5
        tangent = sizes * (1 - 2 * p)
        return PairState(p, tangent, slack, floor, none + 24 * eps, none + 24 * eps, none)

    def pairs(self, numbers, a, b, state, tile):
        """Return the angle of vectors of norms with angles, and windows' means of the tangents."""
        windows, (weight, bias) = self.windows, numbers
        n1, n2 = state.slack.shape
        size = windows.size

        def mean(x):
            return weight / size * sum_pair_windows(x, windows, tile.full, n1, n2)

        below = outer(a.before.norm, b.before.norm, tile.full)
        sizes = outer(a.after.norm, b.after.norm, tile.full)
        p = state.p
        # This form avoids the new p, which XLA would compute a second time.
        tangent = mean(state.tangent + below * (1 - 2 * p)) + bias
        eps, noise = epsilon(p), norm_noise(a.before, b.before)
        slack, floor = state.slack, state.floor
        if size > 1 or self.bias or windows.before != windows.after:
            p = mean(below * p) * reciprocal(sizes)
            va, vb = (self._vectors(numbers, s.before) for s in (a, b))
            p = p + norm_half_chords(va, vb, a.after.norm, b.after.norm, tile.full)
            p = zero_where_same(jnp.where(sizes > 0, jnp.minimum(p, 1), 0.5), tile)
            slack = slack + 2 * noise + (20 + sum(windows.window)) * eps
            floor = floor + 4 * eps**1.5 + noise**2
        rounding = (4 + sum(windows.window)) * eps
        second = state.second_error + rounding
        error = jnp.maximum(second, state.tangent_error) + rounding
        excess = jax.lax.stop_gradient(weight * shares(windows) * state.tangent_excess)
        return PairState(p, tangent, slack, floor, second, error, excess)

    def apply(self, numbers, x, finite):
        windows, (weight_variance, bias_variance) = self.windows, numbers
        channels, features = x.shape[-1], finite.features
        shapes = {"kernel": (*windows.window, channels, features)}
        shapes |= {"bias": (features,)} if self.bias else {}
        weights = finite.weights(x.dtype, **shapes)
        kernel = weights["kernel"]
        kernel = kernel * jnp.sqrt(weight_variance * features / kernel.size)
        if windows.window:
            out = _convolve(windows, x, kernel)
        else:
            out = x.reshape(len(x), channels) @ kernel
        if self.bias:
            out = out + jnp.sqrt(bias_variance) * weights["bias"]
        return out

    def position_counts(self):
        return self.windows.position_counts()

    def patch_values(self, channels):
        """Return the size of three copies of the patches."""
        return 3 * math.prod(self.windows.after) * self.windows.size * channels


def _patch_half_chords(a: LayerFeatures, b: LayerFeatures, tile: Tile) -> jax.Array:
    """Return half chords of the patches of the data, by products of matrices."""
    sides = [jax.tree.map(lambda x: as_pair_rows(x, tile.full), site.units) for site in (a, b)]
    if len(sides[0].high) == 1:  # vmap over one group is slow
        return half_chords(*(jax.tree.map(lambda x: x[0], side) for side in sides))[0][None]
    return jax.vmap(half_chords)(*sides)[0]


def _convolve(windows: Windows, x: jax.Array, kernel: jax.Array) -> jax.Array:
    pads = list(windows.pads)
    if windows.wrap:
        x, pads = jnp.pad(x, [(0, 0), *pads, (0, 0)], mode="wrap"), [(0, 0)] * len(pads)
    axes = "HW"[: len(pads)]
    form = (f"N{axes}C", f"{axes}IO", f"N{axes}C")
    return jax.lax.conv_general_dilated(x, kernel, windows.strides, pads, dimension_numbers=form)
