"""Duals ``E s(u) s(u')`` of smooth activations and of their slopes, at pairs of positions.

They come from a series for each position, or from one table for the layer, with error bounds.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ntk.expectations.gaussian import reciprocal
from ntk.expectations.hermite import Pair, expectations, moves, polynomial
from ntk.networks import tables
from ntk.networks.moments import LayerFeatures, epsilon
from ntk.networks.position_pairs import (
    PairState,
    Tile,
    angle_error,
    count_loop_parts,
    norm_noise,
    same_positions,
)
from ntk.networks.windows import as_pair_rows, min_over_positions, outer


def duals_by_position(
    a: LayerFeatures, b: LayerFeatures, p: jax.Array, full: bool
) -> list[jax.Array]:
    """Return duals of expansions; each position's largest correlation ends its series."""

    def one(x):
        fs, gs, p = x
        pair = Pair(p, 1 - p, jnp.zeros_like(p))
        return [value for value, _ in expectations(fs, gs, (1, 0), pair)]

    fs, gs = (jax.tree.map(lambda x: as_pair_rows(x, full), (s.value, s.slope)) for s in (a, b))
    return jax.lax.map(one, (fs, gs, p))


def by_tables(
    activation_tables: Any, a: LayerFeatures, b: LayerFeatures, p: jax.Array, full: bool
) -> list[jax.Array]:
    """Return duals of tabulated functions, with terms for one position at a time."""
    # In the full layout the rows come image after image: each image's largest correlation ends its
    # series, and strips of that size stay in the processor's cache.
    strip = p.shape[1] // len(a.before.square) if full else p.shape[1]

    def one(x):
        (sa, fs), (sb, gs), p = x
        fs, gs = (
            tuple(
                f._replace(regular=tables.table_coefficients(t, s, f.norm, 1 - k))
                for k, (t, f) in enumerate(zip(activation_tables, expansions, strict=True))
            )
            for s, expansions in ((sa, fs), (sb, gs))
        )

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


def state_after_duals(
    how, a: LayerFeatures, b: LayerFeatures, state: PairState, tile: Tile, terms: int
) -> PairState:
    """Return the state after an activation with the duals ``how(a, b, p, full)`` of K ``terms``."""
    assert a.slope is not None and b.slope is not None
    same = same_positions(state.p, tile)
    # Entries of inputs with themselves are known, so a series needs no terms for them.
    value, slope = how(a, b, state.p if same is None else jnp.where(same, 0.5, state.p), tile.full)
    p = state.p
    sizes = outer(a.after.norm, b.after.norm, tile.full)
    after = jnp.clip((1 - value * reciprocal(sizes)) / 2, 0, 1)
    after = jnp.where(sizes > 0, after, 0.5)
    if same is not None:
        slopes = outer(a.slope.norm, b.slope.norm, tile.full)
        after, slope = jnp.where(same, 0, after), jnp.where(same, slopes, slope)
    ends = _extreme_angles(p, state, tile)
    return state_after_smooth(after, state.tangent * slope, a, b, state, ends, terms)


def state_after_smooth(
    after, tangent, a: LayerFeatures, b: LayerFeatures, state: PairState, ends, terms: int
) -> PairState:
    """Return the state, with its errors."""
    assert a.slope is not None and b.slope is not None
    off, off_slope = _bound_dual_errors((a.value, a.slope), (b.value, b.slope), state, ends, terms)
    eps = epsilon(after)
    floor = jnp.minimum((off + norm_noise(a.after, b.after)) / 2 + 4 * eps, 1)
    error = state.tangent_error + (off_slope + 4 * eps) * (1 + state.tangent_error)
    most = a.slope.norm.max(1)[:, None] * b.slope.norm.max(1)[None] * (1 + off_slope)
    excess = most * state.tangent_excess
    errors = jax.lax.stop_gradient((0 * floor, floor, off + 4 * eps, error, excess))
    return PairState(after, tangent, *errors)


def _extreme_angles(p: jax.Array, state: PairState, tile: Tile) -> tuple[jax.Array, jax.Array]:
    """Return the smallest p and 1 - p [n1, n2] over distinct positions."""
    p = jax.lax.stop_gradient(p)
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
        fs, *args = x
        return tuple(_dual_error_bound(f, g, *args, terms) for f, g in zip(fs, gs, strict=True))

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
