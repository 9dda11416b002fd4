"""The effect of every layer on pairs of inputs, at pairs of positions.

With S and T the second moment and the tangent kernel of the features at a pair of positions. The
angle p = (1 - S / (s s')) / 2 between them is stored instead of S.

========  ==================================================  ================================
layer     S                                                   T
========  ==================================================  ================================
weights   c_w mean S + c_b                                    S + c_w mean T, S and T the new
act       E s(u) s(u'), (u, u') ~ N(0, S)                     E s'(u) s'(u') T
pool      mean S over both windows                            mean T
flatten   mean S over equal positions                         mean T
add       sum w^2 S + sum over k != l of w_k w_l mu_k mu_l'   sum w^2 T
========  ==================================================  ================================

**Near-duplicates.** A layer with weights adds up vectors of norms s_o with angles p_o, so

    p = chord(s, s') + c_w mean(s_o s'_o p_o) / (s s'),

with the half chord between the vectors of norms in the two windows; nothing is subtracted. Sums use
the same formula, and ReLU-like layers their closed form. So an angle of 1e-9 between two patches of
the data is kept up to the first smooth activation or pooling. Then p = (1 - S / (s s')) / 2.

**The error** is bounded for each pair of inputs, all positions together. The error of p is at most
``slack sqrt(p) + floor``. The errors of S and T are ``second_error`` and ``tangent_error``,
relative to the root of both inputs' own values. ``tangent_excess`` bounds the error of T at kinks,
mostly at near-duplicates, summed over all positions. By Cauchy-Schwarz, windows and sums keep
such bounds, and every layer adds its rounding.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ntk.expectations.gaussian import reciprocal
from ntk.expectations.hermite import Pair, expectations, moves, polynomial
from ntk.internal.tiles import device_strip_entries
from ntk.networks import tables
from ntk.networks.moments import Moments, epsilon
from ntk.networks.windows import as_pair_rows, min_over_positions, outer


class PairState(NamedTuple):
    """All pairs of a tile after a layer; [G, A, B] as in :mod:`ntk.networks.windows`."""

    p: jax.Array
    tangent: jax.Array  # T
    slack: jax.Array  # [n1, n2]
    floor: jax.Array  # [n1, n2]
    second_error: jax.Array  # [n1, n2]
    tangent_error: jax.Array  # [n1, n2]
    tangent_excess: jax.Array  # [n1, n2]


class Tile(NamedTuple):
    """The kind of a tile."""

    full: bool
    same: jax.Array | None  # [n1, n2], whether an input meets itself


def norm_half_chords(va, vb, norms_a, norms_b, full: bool) -> jax.Array:
    """Return a quarter of the squared distance between short unit vectors [n, P, k]."""
    units = []
    for v, norms in ((va, norms_a), (vb, norms_b)):
        # A loop gives each entry's row the memory layout that the pairs need.
        over = reciprocal(norms)
        rows = jnp.moveaxis(v, 2, 0)
        units.append(jax.lax.map(lambda x, over=over: as_pair_rows(x * over, full), rows))
    gaps = (a[:, :, None] - b[:, None, :] for a, b in zip(*units, strict=True))
    return functools.reduce(jnp.add, (gap * gap for gap in gaps)) / 4


def map_state_strips(fn, state: PairState, tile: Tile, left=(), right=(), pairs=()):
    """Run :func:`map_strips` on p and T, with the last arrays for :func:`met_in_strip`."""
    if tile.same is not None:
        pairs = (*pairs, tile.same)
        if tile.full:
            sizes = zip(state.slack.shape, state.p.shape[1:], strict=True)
            one, other = (jnp.broadcast_to(jnp.arange(k // n), (n, k // n)) for n, k in sizes)
            left, right = (*left, one), (*right, other)
    entries = (state.p, state.tangent)
    return map_strips(fn, entries, left=left, right=right, pairs=pairs, full=tile.full)


def met_in_strip(left, right, pairs) -> jax.Array:
    """Return, in strips, the positions of inputs that meet themselves."""
    same = pairs[-1]
    whole = left and jnp.issubdtype(left[-1].dtype, jnp.integer)
    return same & (left[-1] == right[-1]) if whole else same


def state_of_moments(second, tangent, errors, a, b, tile: Tile) -> PairState:
    """Return the state with these S, T and last three errors."""
    sizes = outer(a.after.norm, b.after.norm, tile.full and second.shape[0] == 1)
    p = jnp.clip((1 - second * reciprocal(sizes)) / 2, 0, 1)
    p = zero_where_same(jnp.where(sizes > 0, p, 0.5), tile)
    eps = epsilon(p)
    floor = jnp.minimum((errors[0] + norm_noise(a.after, b.after)) / 2 + 4 * eps, 1)
    return PairState(p, tangent, *jax.lax.stop_gradient((0 * floor, floor, *errors)))


def norm_noise(a: Moments, b: Moments) -> jax.Array:
    """Return the relative error of the products of the norms, [n1, n2]."""
    return (a.noise[:, None] + b.noise[None]) / 2


def same_positions(p: jax.Array, tile: Tile) -> jax.Array | None:
    """Return where positions meet themselves, to broadcast with [G, A, B]; or None."""
    if tile.same is None:
        return None
    if not tile.full:
        return tile.same[None]
    positions = p.shape[1] // len(tile.same)
    row, column = (jnp.arange(n) for n in p.shape[1:])
    images = tile.same
    if images.size > 1:
        images = images[row // positions][:, column // positions]
    return (images & (row[:, None] % positions == column[None] % positions))[None]


def zero_where_same(p: jax.Array, tile: Tile) -> jax.Array:
    """Return the angles, 0 where an input meets itself."""
    same = same_positions(p, tile)
    return p if same is None else jnp.where(same, 0, p)


def angle_error(error, p) -> jax.Array:
    """Bound the error of ``asin(sqrt p) / pi`` by the error at p = 0, and by the slope at p."""
    slope = error / 3 * jax.lax.rsqrt(jnp.maximum(p * (1 - p), jnp.finfo(p.dtype).tiny))
    return jnp.minimum(slope, 0.4 * jnp.sqrt(error))


def map_strips(fn: Callable, entries, *, left=(), right=(), pairs=(), full: bool) -> tuple:
    """Return ``fn(entries, left, right, pairs)`` of broadcasting arrays, strip by strip of a tile.

    XLA does not fuse a loop with later operations. Fused, each later layer would compute all arc
    cosines below it again. ``entries`` are [G, A, B] in the layout of ``full``; ``left`` and
    ``right`` are of single inputs, [n1, P] and [n2, P]; ``pairs`` are [n1, n2].
    """
    shape = entries[0].shape
    groups, a, b = shape
    if not full and groups > 1:  # some positions at a time
        count = count_loop_parts(groups, a * b)
        entries = [x.reshape(count, -1, a, b) for x in entries]
        left = [x.T.reshape(count, -1, a, 1) for x in left]
        right = [x.T.reshape(count, -1, 1, b) for x in right]
        return _map_and_reshape(lambda x: fn(*x, pairs), (entries, left, right), shape)
    if not full:  # some inputs
        count = count_loop_parts(a, b)
        rows = [x.reshape(count, -1, b) for x in (*entries, *pairs)]
        left = [x.reshape(count, -1, 1) for x in left]
        right, k = [x.reshape(1, b) for x in right], len(entries)
        return _map_and_reshape(lambda x: fn(x[0][:k], x[1], right, x[0][k:]), (rows, left), shape)
    n1, n2 = (side[0].shape[0] if side else 0 for side in (left, right))
    if pairs:
        n1, n2 = pairs[0].shape
    n1, n2 = n1 or 1, n2 or 1
    count = n1 * count_loop_parts(a // n1, b)  # a part of one input's positions
    entries = [x.reshape(count, -1, n2, b // n2) for x in entries]
    left = [x.reshape(count, -1, 1, 1) for x in left]
    pairs = [jnp.repeat(x, count // n1, 0).reshape(count, 1, n2, 1) for x in pairs]
    right = [x.reshape(1, n2, -1) for x in right]
    return _map_and_reshape(lambda x: fn(x[0], x[1], right, x[2]), (entries, left, pairs), shape)


def _map_and_reshape(fn, arrays, shape) -> tuple[jax.Array, ...]:
    return tuple(x.reshape(shape) for x in jax.lax.map(fn, arrays))


def count_loop_parts(length: int, per_entry: int) -> int:
    """Return the fewest equal parts of an axis, at least two, each small enough for a strip."""
    divisors = [k for k in range(2, length + 1) if length % k == 0] or [1]
    most = device_strip_entries()  # may be exceeded if the axis has no such parts
    return next((k for k in divisors if length // k * per_entry <= most), divisors[-1])


def duals_by_position(a, b, p: jax.Array, full: bool) -> list[jax.Array]:
    """Return ``E s(u) s(u')`` of a smooth activation and of its slope, by series per position."""

    def one(x):
        fs, gs, p = x
        pair = Pair(p, 1 - p, jnp.zeros_like(p))
        return [value for value, _ in expectations(fs, gs, (1, 0), pair)]

    fs, gs = (jax.tree.map(lambda x: as_pair_rows(x, full), (s.value, s.slope)) for s in (a, b))
    return jax.lax.map(one, (fs, gs, p))


def by_tables(activation_tables: Any, a, b, p: jax.Array, full: bool) -> list[jax.Array]:
    """Return :func:`duals_by_position` from a table for the layer, one position at a time."""
    # In the full layout the rows come image after image: each image's largest correlation ends its
    # series, and strips of that size stay in the processor's cache.
    strip = p.shape[1] // len(a.before.square) if full else p.shape[1]

    def with_terms(scale, expansions):
        functions = enumerate(zip(activation_tables, expansions, strict=True))
        return tuple(
            f._replace(regular=tables.table_coefficients(table, scale, f.norm, 1 - k))
            for k, (table, f) in functions
        )

    def one(x):
        *sides, p = x
        fs, gs = (with_terms(*side) for side in sides)

        def rows_of(x):
            fs, p = x
            if len(activation_tables[0].sides):
                pair = Pair(p, 1 - p, jnp.zeros_like(p))
                return [value for value, _ in expectations(fs, gs, (1, 0), pair)]
            return [
                jax.lax.stop_gradient(f.norm[:, None] * g.norm[None])
                * _by_parity(f.regular.T, g.regular.T, 1 - 2 * p)
                for f, g in zip(fs, gs, strict=True)
            ]

        if strip == len(p):
            return rows_of((fs, p))
        split = jax.tree.map(lambda x: x.reshape(len(x) // strip, strip, *x.shape[1:]), (fs, p))
        return [x.reshape(p.shape) for x in jax.lax.map(rows_of, split)]

    sides = [
        jax.tree.map(lambda x: as_pair_rows(x, full), (s.before.norm, (s.value, s.slope)))
        for s in (a, b)
    ]
    return jax.lax.map(one, (*sides, p))


def _by_parity(a, b, rho) -> jax.Array:
    """Return ``sum_k a_k b_k rho^k``, with half of the terms for odd and even functions."""
    even, odd = (polynomial(a[i::2], b[i::2], rho * rho) for i in (0, 1))
    return even + rho * odd


def state_after_duals(how, a, b, state: PairState, tile: Tile, terms: int) -> PairState:
    """Return the state after an activation with the duals ``how(a, b, p, full)`` of K ``terms``."""
    same = same_positions(state.p, tile)
    # Entries of inputs with themselves are known, so a series needs no terms for them.
    value, slope = how(a, b, state.p if same is None else jnp.where(same, 0.5, state.p), tile.full)
    sizes = outer(a.after.norm, b.after.norm, tile.full)
    after = jnp.clip((1 - value * reciprocal(sizes)) / 2, 0, 1)
    after = jnp.where(sizes > 0, after, 0.5)
    if same is not None:
        slopes = outer(a.slope.norm, b.slope.norm, tile.full)
        after, slope = jnp.where(same, 0, after), jnp.where(same, slopes, slope)
    tangent, ends = state.tangent * slope, _extreme_angles(state, tile)
    return state_after_smooth(after, tangent, a, b, state, ends, terms)


def state_after_smooth(after, tangent, a, b, state: PairState, ends, terms: int) -> PairState:
    """Return the state, with its errors."""
    off, off_slope = _bound_dual_errors((a.value, a.slope), (b.value, b.slope), state, ends, terms)
    eps = epsilon(after)
    floor = jnp.minimum((off + norm_noise(a.after, b.after)) / 2 + 4 * eps, 1)
    error = state.tangent_error + (off_slope + 4 * eps) * (1 + state.tangent_error)
    most = a.slope.norm.max(1)[:, None] * b.slope.norm.max(1)[None] * (1 + off_slope)
    excess = most * state.tangent_excess
    errors = jax.lax.stop_gradient((0 * floor, floor, off + 4 * eps, error, excess))
    return PairState(after, tangent, *errors)


def _extreme_angles(state: PairState, tile: Tile) -> tuple[jax.Array, jax.Array]:
    """Return the smallest p and 1 - p [n1, n2] over distinct positions."""
    p = jax.lax.stop_gradient(state.p)
    same = same_positions(p, tile)
    n1, n2 = state.slack.shape
    inside = p if same is None else jnp.where(same, 0.5, p)
    least, most = (min_over_positions(x, tile.full, n1, n2) for x in (inside, -inside))
    return least, 1 + most


def _bound_dual_errors(fs, gs, state: PairState, ends, terms: int):
    """Return :func:`_dual_error_bound` for each f and g, some rows at a time."""
    worst = state.slack + state.floor
    count = count_loop_parts(len(worst), worst.shape[1])
    parts = fs, worst, ends
    split = jax.tree.map(lambda x: x.reshape(count, len(x) // count, *x.shape[1:]), parts)

    def one(x):
        fs, worst, ends = x
        pairs = zip(fs, gs, strict=True)
        return tuple(_dual_error_bound(f, g, worst, ends, terms) for f, g in pairs)

    # Without this loop XLA would fuse every later layer with all bounds below it, and repeat them.
    bounds = jax.lax.map(one, jax.lax.stop_gradient(split))
    return (x.reshape(worst.shape) for x in bounds)


def _dual_error_bound(f, g, worst, ends, terms: int) -> jax.Array:
    """Bound the error of ``E f g`` over both norms [n1, n2]; ``worst`` is the error of p."""
    f, g = jax.lax.stop_gradient((f, g))

    def most(x):
        return x.max(1)

    eps = epsilon(worst)
    total = most(f.noise)[:, None] + most(g.noise)[None]
    total += 4 * eps * most(f.size)[:, None] * most(g.size)[None]
    jump = most(f.jump)[:, None] * most(g.jump)[None]
    total += moves(jump) * most(f.steep)[:, None] * most(g.steep)[None] * worst
    if ends is None:  # a closed form of a function without jumps
        return total
    power = 1 - 2 * jnp.minimum(*ends)
    for _ in range(max(terms, 1).bit_length() - 1):
        power = power * power
    (rf, kf), (rg, kg) = ((most(h.missed[..., 0]), most(h.missed[..., 1])) for h in (f, g))
    total += power * (rf[:, None] * (rg + kg)[None] + kf[:, None] * rg[None])
    moved = jnp.maximum(*(angle_error(worst, end) for end in ends))
    return total + jump * moved
