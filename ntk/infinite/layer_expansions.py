"""The layers of a network of Zhu et al. 2022, Eq. (1), on single inputs.

Pairs of inputs need an expansion of every layer's activation at each input. It consists of arrays,
so that one program serves all activations.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from ntk.expectations.activations import Activation, in_a_network, relu
from ntk.expectations.gaussian import hermite_grid, reciprocal, root
from ntk.expectations.hermite import (
    Expansion,
    Function,
    Pair,
    expand,
    expectations,
    kinked_expansion,
    piece_norms,
)
from ntk.expectations.kinks import ORDERS
from ntk.internal.checks import check_finite, concrete, float_array, nan_where, real_array
from ntk.internal.products import einsum
from ntk.internal.sharding import without_explicit_axes

Layer = tuple[Activation, ...]  # to be summed with weights
Kinks = tuple[float, ...] | None

_KINKED = (Activation("left", kink=(1.0, 0.0)), relu)  # summed with the slopes on both sides


def evaluate_layer(layer: Layer, weights: chex.Array, u: chex.Array) -> jax.Array:
    """Return ``sum_i weights_i s_i(u)``, elementwise."""
    return sum(weights[i] * s(u) for i, s in enumerate(layer))


def layer_derivative(layer: Layer) -> Layer:
    """Return the derivatives, to be summed with the same weights."""
    return tuple(s.derivative for s in layer)


def kink_places(layer: Layer) -> tuple[float, ...]:
    """Return the places where the sum is not smooth, except 0."""
    return tuple(sorted({t for s in layer for t, _ in s.kinks if t}))


def kinks_at_zero(layer: Layer, weights: chex.Array) -> tuple[jax.Array, jax.Array]:
    """Return (left, right) of the sum of the activations that are linear on both sides of 0."""
    kinked = [(i, s) for i, s in enumerate(layer) if s.smooth is None]
    left, right = (
        sum((weights[i] * s.kink[side] for i, s in kinked), 0 * weights[0]) for side in (0, 1)
    )
    return left, right


def parse_architecture(
    activations: Sequence[Any], skips: Any, variances: Any, dtype: Any = float
) -> tuple[tuple[Layer, ...], list[jax.Array], jax.Array, jax.Array]:
    """Check a network, and return static layers and arrays of weights, skips and variances."""
    if not isinstance(activations, list | tuple) or not activations:
        raise ValueError(f"activations: expected a list of at least one, got {activations!r}.")
    layers, weights = [], []
    for entry in activations:
        mixture = list(entry.items()) if isinstance(entry, Mapping) else [(entry, 1.0)]
        if not mixture:
            raise ValueError("activations: expected at least one in each layer, got none.")
        layer = tuple(in_a_network(s) for s, _ in mixture)
        w = _check_numbers("activations: weights", [w for _, w in mixture], len(mixture), dtype)
        if all(s.smooth is None for s in layer):
            layer, w = _KINKED, jnp.stack(kinks_at_zero(layer, w))
        layers.append(layer)
        weights.append(w)
    count = len(layers)
    skips = [0.0] * (count - 1) if skips is None else skips
    skips = _check_numbers("skips", skips, count - 1, dtype)
    variances = [1.0] + [2.0] * count if variances is None else variances
    variances = _check_numbers("variances", variances, count + 1, dtype)
    if concrete(variances) and bool((np.asarray(variances) < 0).any()):
        raise ValueError(f"variances: expected nonnegative numbers, got {variances}.")
    return tuple(layers), weights, skips, variances


def _check_numbers(name: str, values: Any, count: int, dtype: Any) -> jax.Array:
    if isinstance(values, list | tuple):
        arrays = [real_array(name, v).astype(dtype) for v in values]
        if any(v.ndim for v in arrays):
            raise ValueError(f"{name}: expected {count} numbers, got arrays.")
        values = jnp.stack(arrays) if arrays else jnp.zeros(0)
    values = real_array(name, values).astype(dtype)
    if values.shape != (count,):
        raise ValueError(f"{name}: expected {count} numbers, got shape {values.shape}.")
    check_finite(name, values)
    return values


def check_input_pair(name: str, x: Any, name2: str = "", x2: Any = None) -> tuple[jax.Array, Any]:
    """Return both sets of inputs as floating arrays [n, d] and [n2, d], checked; None stays."""
    x = _check_input_rows(name, x)
    if x2 is None:
        return x, None
    x2 = _check_input_rows(name2, x2).astype(x.dtype)
    if x2.shape[1] != x.shape[1]:
        raise ValueError(f"{name2}: expected {x.shape[1]} columns as in {name}, got {x2.shape[1]}.")
    return x, x2


def _check_input_rows(name: str, x: Any) -> jax.Array:
    x = without_explicit_axes(float_array(name, x))
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"{name}: expected a nonempty array [n, d], got shape {x.shape}.")
    check_finite(name, x, "entries")
    with jax.ensure_compile_time_eval():  # checks concrete inputs inside a jit too
        lost = concrete(x) and bool(_has_lost_squares(x))
    if lost:
        raise ValueError(
            f"{name}: expected rows whose squared norms are within the range of {x.dtype}, got "
            f"entries up to {np.abs(x).max():.2g}, and a row whose square is not."
        )
    return x


@jax.jit
def _has_lost_squares(x: jax.Array) -> jax.Array:
    return jnp.isnan(squared_norms(x)).any()


def squared_norms(x: chex.Array) -> jax.Array:
    """Return ``|x|^2`` over the last axis; NaN if it over- or underflows."""
    squares = (x * x).sum(-1)
    limits = jnp.finfo(x.dtype)
    lost = (squares < float(limits.tiny) / float(limits.eps)) & (x != 0).any(-1)
    return jnp.where(lost | ~jnp.isfinite(squares), jnp.nan, squares)


def equal_norms(x1: chex.Array, x2: chex.Array | None) -> bool:
    """Return whether all inputs have one norm, up to rounding."""
    squares = np.concatenate([np.sum(np.square(x), 1) for x in (x1, x2) if x is not None])
    return bool(np.ptp(squares) <= 8 * np.finfo(squares.dtype).eps * squares.max())


class Resolution(NamedTuple):
    """The number of Hermite polynomials, and the largest width of a panel of nodes."""

    terms: int
    width: float


_CANCELLING = {4: 8, 8: 256}  # largest norm of a piece over its function's, by bytes of a number

RESOLUTIONS = (Resolution(256, 0.5), Resolution(1024, 0.5), Resolution(4096, 0.125))
TRACED = Resolution(512, 0.25)


def is_resolved(expansions: Sequence[Expansion], noise: float = 512) -> bool:
    """Return whether finer expansions gain nothing; ``noise`` [roundoff units] is unavoidable."""
    for f in expansions:
        eps = float(jnp.finfo(f.norm.dtype).eps)
        regular, kinked = np.asarray(f.missed).T
        most = np.asarray(f.noise).max()
        if (regular * (regular + 2 * kinked)).max() > 64 * eps or most > noise * eps:
            return False
    return True


def largest_error(dtype: Any) -> float:
    """Return the largest accepted error of an entry, relative to the diagonal."""
    return 64 * float(jnp.finfo(dtype).eps) ** 0.5


_FINE = "an activation with too fine details"


def check_resolved(name: str, kernel: chex.Array, rows="inputs", cause=_FINE) -> None:
    """Raise ``FloatingPointError`` for a NaN entry, the mark of too large an error."""
    if bool(np.isnan(kernel).any()):
        raise FloatingPointError(
            f"{name}: expected inputs whose kernel can be computed in {kernel.dtype}, got an entry "
            f"with too large an error: nearly collinear {rows} at too large a variance, {cause}, "
            "or errors that grow from layer to layer."
        )


def expand_layer(
    layer: Layer, w: chex.Array, scale: chex.Array, error: chex.Array, kinks: Kinks, how: Resolution
) -> tuple[Expansion, Expansion]:
    """Return expansions of ``sum_i w_i s_i(u)`` and its slope, for standard deviations [n] of u.

    ``kinks`` come from :func:`common_kinks`; None means at most a kink at 0, in closed form.
    """
    if all(s.smooth is None for s in layer):
        return _expand_kinked(layer, w, scale, error, kinks, how)
    assert kinks is not None
    table = jax.tree.map(lambda x: x.astype(scale.dtype), hermite_grid(*how))
    return _expand_both(*_sample_layer(layer, w, scale, table.z, kinks), scale, error, table)


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def _expand_kinked(layer, w, scale, error, kinks, how):
    sides = jnp.stack(kinks_at_zero(layer, w))
    shape = (0, 0) if kinks is None else (how.terms, len(kinks))
    return tuple(kinked_expansion(sides, scale, error, degree, shape) for degree in (1, 0))


@functools.partial(jax.jit, static_argnums=(0, 4))
def _sample_layer(layer: Layer, w, scale, z, kinks: tuple[float, ...]):
    """Return values of s and s' at u and -u [2, 2, n, m], the kink at 0, and other kinks' jumps."""
    sides = jnp.stack(kinks_at_zero(layer, w))
    u = jnp.concatenate([scale[:, None] * z[None], _probes(scale)], axis=1)
    values = sample_smooth_part(layer, w, u)
    at = np.zeros((len(layer), len(kinks), ORDERS))
    own = [i for i, s in enumerate(layer) if s.kinks]
    for i in own:
        for place, jumps in layer[i].kinks:
            at[i, kinks.index(place)] = jumps
    total = einsum("i,ijm->jm", w, jnp.asarray(at, scale.dtype))
    if own and 0.0 in kinks:
        # If there are other kinks, the kink at 0 is handled like them.
        linear = jnp.stack([jnp.stack([u, -u]), jnp.ones_like(values[0])])
        values = values + sides[::-1, None, None] * linear
        total = total.at[kinks.index(0.0), 1].add(sides[1] - sides[0])
        sides = jnp.zeros_like(sides)
    return values, sides, jnp.asarray(kinks, scale.dtype), total


def sample_smooth_part(layer: Layer, w, u: jax.Array) -> jax.Array:
    """Return the sum of the smooth activations, and its slope, at u and -u, [2, 2, ...]."""
    values = jnp.zeros((2, 2, *u.shape), u.dtype)
    for i, s in enumerate(layer):
        if s.smooth is not None:
            values += w[i] * _sample_both_signs(s, u)
    return values


@functools.partial(jax.jit, static_argnums=0)
def _sample_both_signs(s: Activation, u: jax.Array) -> jax.Array:
    signed = jnp.stack([u, -u])
    return jnp.stack([s(signed), s.derivative(signed)])


def _probes(scale: jax.Array) -> jax.Array:
    """Return places [n, 28] of the line itself, whatever the standard deviation."""
    places = jnp.asarray(1e-6 * 2.0 ** np.arange(28), scale.dtype)
    return jnp.broadcast_to(places, (len(scale), len(places)))


@jax.jit
def _expand_both(values, sides, places, jumps, scale, error, table):
    values, probed = jnp.split(values, [len(table.z)], axis=-1)
    jumps = jnp.where(_worthwhile(values, places, jumps, scale, table), jumps[None], 0)
    jump_pair = jnp.stack([jumps, jnp.pad(jumps[..., 1:], ((0, 0), (0, 0), (0, 1)))])

    def one(x):  # a loop, so that it is compiled once
        (right, left), jumps, odd = x
        return expand(Function(right, left, sides, places, jumps), scale, error, odd, table)

    expansions = jax.lax.map(one, (values, jump_pair, jnp.array([True, False])))
    value, slope = (jax.tree.map(lambda x, i=i: x[i], expansions) for i in (0, 1))
    # The slope's norm bounds the steepness of a function, except at jumps.
    steep = slope.norm * scale * reciprocal(value.norm) * (1 + slope.noise)
    steep = jnp.where(value.jump > 0, value.steep, steep)
    value = value._replace(steep=jax.lax.stop_gradient(steep))
    unseen = _unseen(value, slope, values, probed[0], places, scale, table)
    return tuple(f._replace(noise=jnp.where(unseen, jnp.inf, f.noise)) for f in (value, slope))


def _worthwhile(values, places, jumps, scale, table):
    """Return which jumps [n, kinks, orders] of the function and its derivatives become pieces.

    A piece much larger than the function cancels, to ``eps |piece|^2 / |f|^2``. A kink of order m
    without a piece has an error of about ``|piece|^2 K^-(m + 1/2) / |f|^2``, which is worse for
    jumps and corners. In float64 orders 2 and 3 only help together with the next one.
    """
    norms = values * jnp.expand_dims(table.roots, (0, 1, 2))
    norms = jax.lax.stop_gradient(root((norms**2).sum((1, 3))))
    slopes = jnp.pad(jumps[:, 1:], ((0, 0), (0, 1)))
    most = _CANCELLING[scale.dtype.itemsize]
    order = jnp.arange(ORDERS, dtype=scale.dtype)[None, None]
    power, place = scale[:, None, None] ** order, places[None] * reciprocal(scale)[:, None]
    pairs = (jumps, norms[0]), (slopes, norms[1])
    fits, slope_fits = (
        piece_norms(j[None] * power, place) <= most * norm[:, None, None] for j, norm in pairs
    )
    fits = fits.at[..., 1:].min(slope_fits[..., :-1])
    if scale.dtype.itemsize == 8:
        fits = fits.at[..., 2:4].set(fits[..., 4:5])
    return fits | (order < 2)


def _unseen(value, slope, values, probed, places, scale, table):
    """Return whether [n] the function has steps or peaks between the nodes, which no term shows."""
    tolerance = 4096 * float(jnp.finfo(scale.dtype).eps)
    # By parts, sqrt(k + 1) E[r h_(k + 1)] = E[r' h_k] for the regular parts. A step that the nodes
    # of the slope miss breaks this equality.
    k = np.arange(8)
    rise = jnp.asarray(np.sqrt(k + 1), scale.dtype)[None] * value.regular[:, k + 1]
    gap = rise * value.norm[:, None] - slope.regular[:, k] * (scale * slope.norm)[:, None]
    sizes = value.size * value.norm + slope.size * scale * slope.norm
    apart = jnp.abs(gap).max(1) > tolerance * sizes
    # Between the innermost nodes a smooth function must be close to a cubic.
    end, u = scale * table.z[0], _probes(scale)
    smooth = (jnp.abs(places)[None] > end[:, None]).all(1)
    inside = (u < end[:, None]) & smooth[:, None]
    cubic = _cubic(values[:, :, :, 0], end, u)
    change = jnp.where(inside, jnp.abs(probed - cubic), 0).max((0, 2))
    size = value.norm + jnp.where(inside, jnp.abs(probed), 0).max((0, 2))
    return jax.lax.stop_gradient(apart | (change > 1e-5 * size))


def _cubic(ends, end, u):
    """Return at u and -u [2, n, m] the cubic of values and slopes at ``end`` and ``-end`` [n]."""
    (right, left), slopes = ends[0][..., None], ends[1][..., None] * end[None, :, None]
    x = jnp.stack([u, -u]) / jnp.where(end > 0, end, 1)[None, :, None]
    chord = (right - left) / 2
    even, odd = (slopes[0] - slopes[1]) / 4, (slopes[0] + slopes[1] - 2 * chord) / 4
    mean, chord, even, odd = (a[None] for a in ((right + left) / 2, chord, even, odd))
    return mean + chord * x + (even + odd * x) * (x**2 - 1)


def common_kinks(layers: Sequence[Layer]) -> Kinks:
    """Return all kinks outside the closed forms, of all layers; None if all are closed."""
    activations = [s for layer in layers for s in layer]
    if all(s.smooth is None for s in activations):
        return None
    places = {t for s in activations for t, _ in s.kinks}
    if any(s.smooth is None for s in activations) and places:
        places.add(0.0)
    return tuple(sorted(places))


def duals_of_rows(expansions: tuple[Expansion, ...], rho, error: float) -> list[jax.Array]:
    """Return ``E f(u) f(u')`` [n, n] of a function and its slope; ``error`` is of (1 - rho) / 2."""
    same = jnp.eye(len(rho), dtype=bool)
    # The diagonal is known. In the series its correlation of 1 would need all terms.
    p = jnp.where(same, 0.5, jnp.clip((1 - rho) / 2, 0, 1))
    pairs = expectations(expansions, expansions, (1, 0), Pair(p, 1 - p, jnp.full_like(p, error)))
    duals = []
    for f, (value, off) in zip(expansions, pairs, strict=True):
        bad = ~(off <= largest_error(value.dtype) * f.norm[:, None] * f.norm[None])
        duals.append(jnp.where(same, f.norm[:, None] ** 2, nan_where(bad, value)))
    return duals


class LayerKernels(NamedTuple):
    """One layer, on single inputs; every field [n], or [1] for equal norms."""

    scale: jax.Array  # standard deviation of the pre-activation u
    below: jax.Array  # mean of the features below, mu_{l-1}
    second: jax.Array  # S_l: second moment of the features
    tangent: jax.Array  # T_l
    value: Expansion
    slope: Expansion
    # Error bounds of `below`, and of S_l (relative):
    below_error: jax.Array
    second_error: jax.Array


def propagate_features(
    layers: Sequence[Layer], weights, skips, variances, squares, how: Resolution, error=None
) -> list[LayerKernels]:
    """Apply the formulas of ``network_kernel`` to squared norms [n] of a relative ``error`` [n]."""
    kinks = common_kinks(layers)
    zeros = jnp.zeros_like(squares)
    if error is None:
        error = 8 * float(jnp.finfo(squares.dtype).eps) * jnp.ones_like(squares)
    # Second moment, T and mean of the features below; errors of the second moment and the mean.
    state = squares, zeros, zeros, error, zeros
    skips = jnp.concatenate([jnp.zeros_like(skips, shape=1), skips])  # 0 for the first layer

    def one(state, x, layer):
        w, a, c = x
        second, _, below, error, below_error = state
        scale = root(c * second)
        value, slope = expand_layer(layer, w, scale, error, kinks, how)
        state = _propagate_layer(a, c, *state, value, slope)
        second, tangent, _, error, _ = state
        kernels = LayerKernels(scale, below, second, tangent, value, slope, below_error, error)
        return state, kernels

    inputs = [(w, skips[i], variances[i]) for i, w in enumerate(weights)]
    if len(set(layers)) == 1 and not concrete(squares, weights, skips, variances):
        # Under a caller's jit a scan compiles one layer instead of all.
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *inputs)
        _, stacked_kernels = jax.lax.scan(lambda s, x: one(s, x, layers[0]), state, stacked)
        return [jax.tree.map(lambda x, i=i: x[i], stacked_kernels) for i in range(len(layers))]
    layer_kernels = []
    for layer, x in zip(layers, inputs, strict=True):
        state, kernels = one(state, x, layer)
        layer_kernels.append(kernels)
    return layer_kernels


@functools.partial(jax.jit, static_argnums=1)
def rounded_features(layer_kernels: list[LayerKernels], dtype: Any) -> list[LayerKernels]:
    """Return the features in a shorter dtype, with its rounding in their errors."""
    eps = float(jnp.finfo(dtype).eps)

    def rounded(f: Expansion) -> Expansion:
        # Half a unit of roundoff of the norm, and of every coefficient.
        return f._replace(noise=f.noise + eps / 2 * (1 + f.size))

    def of_layer(layer: LayerKernels) -> LayerKernels:
        value, slope = rounded(layer.value), rounded(layer.slope)
        below_error = layer.below_error + eps / 2 * jnp.abs(layer.below)
        errors = {"below_error": below_error, "second_error": layer.second_error + eps}
        return layer._replace(value=value, slope=slope, **errors)

    return jax.tree.map(lambda x: x.astype(dtype), list(map(of_layer, layer_kernels)))


@jax.jit
def _propagate_layer(a, c, second, tangent, below, error, below_error, value, slope):
    """Return the state, which begins with ``second``, one layer up for single inputs."""
    mean, square = value.mean, value.norm**2
    above = square + 2 * a * mean * below + a**2 * second
    tangent = c * slope.norm**2 * (second + tangent) + a**2 * tangent
    regular, kinked = value.missed.T
    off = value.norm * value.noise
    eps = float(jnp.finfo(above.dtype).eps)
    own = 2 * value.noise + 2 * regular * kinked + 4 * eps * value.size**2
    lost = square * own + a**2 * second * error
    lost += 2 * jnp.abs(a) * (off * jnp.abs(below) + jnp.abs(mean) * below_error)
    mean = mean + a * below
    error = jax.lax.stop_gradient(lost * reciprocal(above) + 4 * eps)
    return above, tangent, mean, error, jax.lax.stop_gradient(off + jnp.abs(a) * below_error)
