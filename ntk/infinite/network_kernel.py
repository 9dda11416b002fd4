"""Infinitely wide networks with mixed activations and skip connections: exact kernels.

The network of Zhu et al. 2022, Eq. (1), in NTK parameterization and without biases:

    f_1 = s_1(W_1 x),    f_l = s_l(W_l f_{l-1}) + a_{l-1} f_{l-1}  (1 < l < L),    f = W_L f_{L-1}

with W_l = sqrt(c_l / fan) O_l, O_l ~ N(0, 1) entrywise (``fan`` is the width, and 1 for l = 1).
As the width grows, with S_0 = X X', T_0 = 0 and (u, u') ~ N(0, c_l S_{l-1}):

    G = E s_l(u) s_l(u'),   D = E s_l'(u) s_l'(u'),   m = E s_l(u)
    S_l = G + a (m mu' + mu m') + a^2 S_{l-1},        mu_l = m + a mu_{l-1}
    T_l = D o c_l (S_{l-1} + T_{l-1}) + a^2 T_{l-1}
    NNGP = c_L S_{L-1},    NTK = c_L (S_{L-1} + T_{L-1})

Kernels come in tiles, 256 x 256 on a CPU: each tile runs through all layers while it is in the
cache, so only the results have the size of the data squared.

**The error.** Every entry has a bound of its error through the layers: e_S of S, e_T of T and e_p
of ``p = (1 - rho) / 2``. With the norms |s| and |s'| of each layer's functions at both inputs,

    e_S <- e_G + 2 |a| e_mu |mu| + a^2 e_S,    e_G = |d/drho E s s'| 2 e_p + ...
    e_T <- c |D| (e_S + e_T) + c e_D |S + T| + a^2 e_T,    e_p <- e_S / (2 sqrt(S_ii S_jj)) + ...

They include rounding, too few coefficients and too coarse nodes (:mod:`ntk.expectations.hermite`).
Coefficients and nodes are added until the bound is as small as rounding, or stalls.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from ntk.expectations.activations import Activation
from ntk.expectations.gaussian import kinked_gap, reciprocal, root
from ntk.expectations.hermite import Pair, expectations
from ntk.infinite.input_pairs import (
    UnitRows,
    half_chord_errors,
    half_chords,
    normalize_rows,
    pad_rows,
    same_inputs,
)
from ntk.infinite.layer_expansions import (
    RESOLUTIONS,
    TRACED,
    Layer,
    LayerKernels,
    Resolution,
    check_input_pair,
    check_resolved,
    common_kinks,
    duals_of_rows,
    equal_norms,
    expand_layer,
    is_resolved,
    largest_error,
    parse_architecture,
    propagate_features,
    rounded_features,
    squared_norms,
)
from ntk.internal.checks import concrete, nan_where
from ntk.internal.products import matmul
from ntk.internal.tiles import assemble, device_tile_size, take_rows
from ntk.kernels.record import Kernels


def network_kernel(
    x1: chex.Array,
    x2: chex.Array | None = None,
    *,
    activations: Sequence[Activation | Mapping[Activation, Any]],
    skips: Sequence[Any] | chex.Array | None = None,
    variances: Sequence[Any] | chex.Array | None = None,
) -> Kernels:
    """Compute the exact NNGP and NTK of an infinitely wide network, by the module's formula.

    Parameters
    ----------
    x1 : array [n1, d]
    x2 : array [n2, d], optional
        Default: ``x1``; then the kernels are symmetric (exactly, unless traced) and their diagonals
        are free of series errors.
    activations : L - 1 entries
        Each an activation (or any smooth function), or ``{activation: weight}`` for their sum.
    skips : L - 2 reals, optional
        Weights of the skip connections, the paper's alpha; none by default.
    variances : L nonnegative reals, optional
        The numbers c. Default: (1, 2, ..., 2), the convention of Lemma 1.

    Raises
    ------
    ValueError
        If a shape or count is wrong, or a value is complex or not finite. Traced values are not
        checked.
    FloatingPointError
        If an entry's error is over 1e-6 of the diagonal (2 % in float32) even with 4096 Hermite
        coefficients: nearly collinear inputs into smooth activations at a variance far over 25.
        Traced inputs get 512 coefficients, and such entries are NaN, with an infinite error.

    Notes
    -----
    Differentiable to any order in skips, weights, variances and inputs. The slope of an activation
    ignores its jumps, as gradients of a network do. The derivative of a kinked activation's kernel
    at two equal (or opposite) inputs is infinite in general. It is taken along paths on which they
    stay equal (or opposite).

    Compiled once for a depth, a size and a number of kinks away from 0, and once more for the first
    smooth activation. Unless traced, up to 256 inputs are padded to the next power of two, and up
    to 2048 to whole tiles.

    Memory: the three results, a few tiles, and ``2 terms`` numbers for each layer and distinct norm
    (usually 256 terms; none if all is ReLU-like). Time: at most ``2 terms`` multiply-adds per layer
    and pair.

    Near-duplicates: angles down to 1e-9 have a relative error of 1e-11, also behind ReLU-like
    layers. A smooth layer loses angles under 1e-8 in rounding, which matters only at a later kink.
    An input and its copy in ``x2`` can lose 3e-8 of an entry after a smooth layer and two kinked
    ones. The error includes it.

    Source: Zhu et al. 2022, Eq. (1). Their Lemma 1 drops the means and cross terms and is wrong
    with skips: :func:`lemma1_kernel_as_printed`.

    Examples
    --------
    >>> from ntk.expectations.activations import relu
    >>> x = jnp.array([[1.0, 0.0], [0.0, 1.0]])
    >>> network_kernel(x, activations=[relu, relu]).ntk.round(4)  # 3 on the diagonal: L
    Array([[3.    , 0.6857],
           [0.6857, 3.    ]], dtype=float...)
    """
    x1, x2 = check_input_pair("x1", x1, "x2", x2)
    layers, *network = parse_architecture(activations, skips, variances, x1.dtype)
    if not concrete(x1, x2, network):
        kernels, _ = _kernels_and_features(layers, x1, x2, network, TRACED, False)
        return kernels
    n1, n2 = len(x1), len(x1 if x2 is None else x2)
    x1, x2 = pad_rows(x1), pad_rows(x2)
    equal = equal_norms(x1, x2)
    goal = 1e4 * float(jnp.finfo(x1.dtype).eps)
    for how in RESOLUTIONS:
        kernels = None  # frees the coarser kernels first
        kernels, rows = _kernels_and_features(layers, x1, x2, network, how, equal)
        if not concrete(kernels):  # a jit around the call can trace concrete inputs
            return _first_entries(kernels, n1, n2)
        error, largest, lost = map(float, _extremes(kernels, n1, n2))
        expansions = [f for r in rows for one in r for f in (one.value, one.slope)]
        if error <= goal * largest or is_resolved(expansions):
            break
    if lost:
        check_resolved("x1", kernels.ntk[:n1, :n2])
    return _first_entries(kernels, n1, n2)


def _first_entries(kernels: Kernels, n1: int, n2: int) -> Kernels:
    """Return [n1, n2] of padded kernels; a slice of the whole would be a copy."""
    if kernels.ntk.shape == (n1, n2):
        return kernels
    return jax.tree.map(lambda k: k[:n1, :n2], kernels)


@jax.jit
def _extremes(kernels: Kernels, n1: int, n2: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the largest error and NTK of the first [n1, n2], and whether an entry is NaN."""
    rows, columns = (jnp.arange(n) for n in kernels.ntk.shape)
    inside = (rows < n1)[:, None] & (columns < n2)[None]
    lost = jnp.isnan(kernels.ntk)
    error = jnp.max(jnp.where(inside, kernels.error, 0))
    largest = jnp.max(jnp.where(inside & ~lost, jnp.abs(kernels.ntk), 0))
    return error, largest, (inside & lost).any()


def lemma1_kernel_as_printed(
    x: chex.Array,
    *,
    activations: Sequence[Activation | Mapping[Activation, Any]],
    skips: Sequence[Any] | chex.Array | None = None,
) -> Kernels:
    """Compute Lemma 1 of Zhu et al. 2022 as printed; it is right only without skip connections.

    With A^(1) = G^(1) = X X', (u, u') ~ N(0, A^(l-1)), and alpha as printed:

        G^(l) = 2 E s(u) s(u'),   Gdot^(l) = 2 E s'(u) s'(u'),   A^(l) = G^(l) + alpha_{l-2} A^(l-1)
        K = G^(L) + sum_l G^(l) o Gdot^(l+1) o prod_{k > l+1} (Gdot^(k) + alpha_{k-2})

    It has three errors for skips. The forward factor is G instead of A, the kernel with its skip.
    The cross terms ``alpha (m mu' + mu m')`` are missing (they vanish for odd activations only). It
    uses alpha instead of alpha^2. For three ReLU layers with alpha = (1, 1) and unit inputs the
    diagonal is 9 as printed, 12 with the first error fixed, and 15.977 in truth. The result's
    ``nngp`` is G^(L); its ``error`` is not computed.

    Parameters
    ----------
    x : array [n, d]
    activations, skips : sequences
        As in :func:`network_kernel`.

    Raises
    ------
    ValueError, FloatingPointError
        If :func:`network_kernel` raises them for these arguments.

    Examples
    --------
    >>> from ntk.expectations.activations import relu
    >>> def diagonal(kernel):
    ...     options = {"activations": [relu, relu, relu], "skips": [1, 1]}
    ...     return jax.jit(lambda x: kernel(x, **options).ntk[0, 0])(jnp.eye(2)).round(3)
    >>> diagonal(lemma1_kernel_as_printed), diagonal(network_kernel)
    (Array(9., dtype=float...), Array(15.977, dtype=float...))
    """
    x, _ = check_input_pair("x", x)
    layers, weights, skips, _ = parse_architecture(activations, skips, None, x.dtype)
    how = RESOLUTIONS[-2] if concrete(x, weights, skips) else TRACED
    kernels = _lemma1(layers, x, weights, skips, how)
    if concrete(kernels):
        check_resolved("x", kernels.ntk)
    return kernels


class _InputFeatures(NamedTuple):
    """The features of one set of inputs for its tiles; leading axis n, or 1 for equal norms."""

    unit_rows: UnitRows
    norms: jax.Array
    spread: jax.Array  # relative error of the norms if one stands for all
    layers: LayerKernels  # of all layers, [n, L - 1, ...]


def _kernels_and_features(layers: Sequence[Layer], x1, x2, network, how: Resolution, equal: bool):
    inputs = [x for x in (x1, x2) if x is not None]
    features = [_features_of_inputs(layers, x, network, how, equal) for x in inputs]
    rows = [_stack_layers(sites) for sites in features]
    _, skips, variances = network
    homogeneous = [all(s.smooth is None for s in layer) for layer in layers]
    exact = jnp.asarray([all(homogeneous[: i + 1]) for i in range(len(layers))])
    size = device_tile_size(max(map(len, inputs)), len(layers), x1.dtype)
    options = {"equal": equal, "size": size}
    args = x1, x2, rows[0], rows[-1], skips, variances, exact
    return _kernels_from_features(*args, **options), features


@jax.jit
def _stack_layers(features: list[LayerKernels]) -> LayerKernels:
    """Return the features of all layers, [n, L - 1, ...]. Apart, some 30 stacks take 4 ms."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves, 1), *features)


def _features_of_inputs(layers, x, network, how, equal) -> list[LayerKernels]:
    # For one row float64 costs nothing, and its errors do not count next to float32's.
    wide = equal and x.dtype == jnp.float32 and not common_kinks(layers)
    # A jit around the call can trace concrete inputs, which `+ 0` shows.
    if wide and concrete(x + 0, network):
        with jax.enable_x64(True):
            x, *network = jax.tree.map(lambda a: np.asarray(a, np.float64), (x, *network))
            return rounded_features(_propagate(layers, x, network, how, equal), jnp.float32)
    return _propagate(layers, x, network, how, equal)


def _propagate(layers, x, network, how, equal) -> list[LayerKernels]:
    weights, skips, variances = network
    squares, error = _squares_and_errors(x, equal)
    return propagate_features(layers, weights, skips, variances, squares, how, error)


@functools.partial(jax.jit, static_argnums=1)
def _squares_and_errors(x, equal):
    """Return squared norms and their relative errors, [n] or [1]."""
    squares = squared_norms(x)
    error = 8 * float(jnp.finfo(x.dtype).eps) + jnp.zeros_like(squares)
    if equal:
        # One row stands for all; their norms agree up to rounding of the inputs' dtype.
        squares, error = squares[:1], error[:1] + _spread(squares)
    return squares, error


def _spread(sizes: jax.Array) -> jax.Array:
    """Return the largest relative distance from the first size."""
    spread = jnp.max(jnp.abs(sizes - sizes[0])) * reciprocal(sizes[0])
    return jax.lax.stop_gradient(spread)


@functools.partial(jax.jit, static_argnames=("equal", "size"))
def _kernels_from_features(
    x1, x2, rows1, rows2, skips, variances, exact, *, equal, size
) -> Kernels:
    def prepare(x, rows):
        norms = root(squared_norms(x))
        spread = jnp.zeros_like(norms)
        if equal:
            spread, norms = _spread(norms)[None], norms[:1]
        return _InputFeatures(normalize_rows(x, norms), norms, spread, rows)

    rows = prepare(x1, rows1)
    columns = rows if x2 is None else prepare(x2, rows2)
    n1, n2 = len(x1), len(x1 if x2 is None else x2)

    def tile(i, j, size1, size2):
        a, b = take_rows(rows, i, size1, n1), take_rows(columns, j, size2, n2)
        same = same_inputs(i, j, size1, size2) if x2 is None else None
        return _tile(a, b, same, skips, variances, exact)

    return assemble(tile, n1, n2, symmetric=x2 is None, size=size)


class _TileState(NamedTuple):
    """All pairs of a tile after a layer, [n1, n2]."""

    second: jax.Array  # S
    tangent: jax.Array  # T
    sizes: jax.Array  # products of the features' norms
    pair: Pair  # the angle between the features
    second_error: jax.Array
    tangent_error: jax.Array


def _tile(a: _InputFeatures, b: _InputFeatures, same, skips, variances, exact) -> Kernels:
    """Return all layers of one tile; ``same`` [n1, n2] holds where an input meets itself."""
    p, q = half_chords(a.unit_rows, b.unit_rows)
    if same is not None:
        # The entries of inputs with themselves come from the diagonal, so they need no terms here.
        p, q = (jnp.where(same, 0.5, half) for half in (p, q))
    eps = float(jnp.finfo(p.dtype).eps)
    sizes = a.norms[:, None] * b.norms[None]
    second = (q - p) * sizes
    if same is not None:
        second = jnp.where(same, sizes, second)
    error = half_chord_errors(a.unit_rows, b.unit_rows, p, q)
    spread = a.spread[:, None] + b.spread[None]
    tangent, norms = jnp.zeros_like(second), jnp.broadcast_to(sizes, p.shape)
    second_error = jax.lax.stop_gradient(sizes) * (2 * error + 5 * eps + spread)
    none = jnp.zeros_like(second)
    state = _TileState(second, tangent, norms, Pair(p, q, error), second_error, none)
    skips = jnp.concatenate([jnp.zeros(1, skips.dtype), skips])  # 0 for the first layer
    # A step gets the features with few entries from the step before. XLA would slice the scanned
    # arrays for every entry of the tile, which takes three times as long on a CPU.
    (few_a, many_a, join_a), (few_b, many_b, join_b) = map(_split_layers, (a.layers, b.layers))
    many = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), (many_a, many_b))
    following = [jnp.roll(x, -1, 0) for x in (few_a, few_b)]

    def step(carry, x):
        state, few_a, few_b = carry
        (many_a, many_b), next_a, next_b, skip, c, exact = x
        layer = join_a(few_a, many_a), join_b(few_b, many_b), skip, c, exact
        return (_layer(state, *layer, same=same), next_a, next_b), None

    layers = many, *following, skips, variances[:-1], exact
    carry, _ = jax.lax.scan(step, (state, few_a[0], few_b[0]), layers)
    last, state = variances[-1], carry[0]
    nngp, ntk = last * state.second, last * (state.second + state.tangent)
    total = state.second_error + state.tangent_error + 2 * eps * jnp.abs(ntk / last)
    diagonals = (r.layers.second[:, -1] + r.layers.tangent[:, -1] for r in (a, b))
    left, right = map(root, diagonals)
    bad = ~(total <= largest_error(p.dtype) * left[:, None] * right[None])
    error = jax.lax.stop_gradient(jnp.where(bad, jnp.inf, last * total))
    return Kernels(nan_where(bad, nngp), nan_where(bad, ntk), error)


_FEW = 8  # entries for an input


def _split_layers(layers: LayerKernels) -> tuple[jax.Array, LayerKernels, Callable]:
    """Return features with few entries, [L - 1, k, n], the others, and a function to join them."""
    is_few = jax.tree.map(lambda x: math.prod(x.shape[2:]) <= _FEW, layers)
    few = jax.tree.map(lambda x, keep: x if keep else None, layers, is_few)
    many = jax.tree.map(lambda x, drop: None if drop else x, layers, is_few)
    _, unravel = ravel_pytree(jax.tree.map(lambda x: x[0, 0], few))
    of_inputs = jax.vmap(lambda x: ravel_pytree(x)[0], out_axes=1)

    def join(packed, many):
        parts = jax.vmap(unravel, in_axes=1)(packed)
        return jax.tree.map(
            lambda x, y: y if x is None else x, parts, many, is_leaf=lambda x: x is None
        )

    return jax.vmap(of_inputs, in_axes=1)(few), many, join


def _layer(state, a: LayerKernels, b: LayerKernels, skip, c, exact, *, same) -> _TileState:
    """Take one step of the module's recursion.

    ``exact`` means that all layers so far scale with the input's norm. The correlation lost here
    then adds to the earlier loss, without the cancellation of ``1 - rho``.
    """
    below, tangent, sizes, pair, *_ = state
    fs, gs = (a.value, a.slope), (b.value, b.slope)
    (value, value_error), (slope, slope_error) = expectations(fs, gs, (1, 0), pair)
    cross = a.value.mean[:, None] * b.below[None] + a.below[:, None] * b.value.mean[None]
    second = value + skip * cross + skip**2 * below
    if same is not None:
        # a and b agree where an input meets itself.
        second = jnp.where(same, a.second[:, None], second)
        slope = jnp.where(same, a.slope.norm[:, None] ** 2, slope)
    roots = jnp.broadcast_to(root(a.second)[:, None] * root(b.second)[None], pair.p.shape)
    scales = a.scale[:, None] * b.scale[None]
    # One input may be 0, so the slopes on both sides come from all of them.
    norm = jax.lax.stop_gradient(a.value.norm)
    sides = (a.value.sides * norm[:, None]).sum(0) * reciprocal(a.scale.sum())
    lost = kinked_gap(sides, pair.p, pair.q) * scales + skip**2 * 2 * pair.p * sizes
    p = jnp.where(exact, lost * reciprocal(roots), 1 - second * reciprocal(roots)) / 2
    p = jnp.where(roots > 0, jnp.clip(p, 0, 1), 0.5)
    if same is not None:
        p = jnp.where(same, 0.5, p)
    layer = state, a, b, skip, c, exact, same
    values = value_error, slope_error, slope, roots, scales, p
    errors = _layer_error_bounds(*jax.lax.stop_gradient((*layer, *values)))
    total = c * slope * (below + tangent) + skip**2 * tangent
    return _TileState(second, total, roots, Pair(p, 1 - p, errors[0]), *errors[1:])


def _layer_error_bounds(
    state, a, b, skip, c, exact, same, value_error, slope_error, slope, roots, scales, p
):
    """Return error bounds of p, S and T after the layer."""
    eps = float(jnp.finfo(p.dtype).eps)
    below, tangent, sizes, pair, below_error, tangent_error = state
    # Without a skip nothing is added.
    off = value_error + skip**2 * below_error + eps * jnp.where(skip == 0, 1, 4) * roots
    off += jnp.abs(skip) * _mean_product_error(a, b)
    diagonal = a.second[:, None] * a.second_error[:, None]
    relative = (a.second_error[:, None] + b.second_error[None]) / 2
    slopes = jnp.abs(slope)
    # The gap's derivative with p is twice the product of both slopes.
    steep = jnp.minimum(slopes + slope_error, a.slope.norm[:, None] * b.slope.norm[None])
    lost = 2 * pair.error * (steep * scales + skip**2 * sizes)
    scaled = lost * reciprocal(2 * roots) + 8 * eps * p
    error = jnp.where(exact, scaled, (off * reciprocal(roots) + relative) / 2 + eps)
    tangent_error = (
        c * slopes * (below_error + tangent_error)
        + c * slope_error * (jnp.abs(below + tangent) + below_error + tangent_error)
        + skip**2 * tangent_error
        + 2 * eps * (c * slopes * jnp.abs(below + tangent) + skip**2 * jnp.abs(tangent))
    )
    if same is not None:
        off = jnp.where(same, diagonal, off)
    return error, off, tangent_error


def _mean_product_error(a: LayerKernels, b: LayerKernels):
    """Bound the error of ``m mu' + mu m'``."""

    def product(x, dx, y, dy):
        return dx[:, None] * jnp.abs(y)[None] + jnp.abs(x)[:, None] * dy[None]

    off, other = (f.value.norm * f.value.noise for f in (a, b))
    error = product(a.value.mean, off, b.below, b.below_error)
    return error + product(a.below, a.below_error, b.value.mean, other)


def _lemma1(layers, x, weights, skips, how: Resolution) -> Kernels:
    second = matmul(x, x.T)
    forward, tangent = second, jnp.zeros_like(second)
    kinks = common_kinks(layers)
    for i, layer in enumerate(layers):
        scale = root(jnp.diag(second))
        rho = second * reciprocal(scale[:, None] * scale[None])
        none = jnp.zeros_like(scale)
        expansions = expand_layer(layer, weights[i], scale, none, kinks, how)
        g, g_dot = (2 * dual for dual in duals_of_rows(expansions, rho, 0.0))
        alpha = skips[i - 1] if i else 0.0
        tangent = forward * g_dot + tangent * (g_dot + alpha)
        forward = g
        second = g + (alpha * second if i else 0.0)
    return Kernels(forward, forward + tangent, jnp.full_like(forward, jnp.inf))
