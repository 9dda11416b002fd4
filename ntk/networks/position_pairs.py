"""What every layer does to pairs of inputs, at pairs of positions.

With S and T the second moment and the tangent kernel of the features at a pair of positions, and
p = (1 - S / (s s')) / 2 the angle between them, kept instead of S:

========  ==================================================  ================================
layer     S                                                   T
========  ==================================================  ================================
weights   c_w mean S + c_b                                    S + c_w mean T, S and T the new
act       E s(u) s(u'), (u, u') ~ N(0, S)                     E s'(u) s'(u') T
pool      mean S over both windows                            mean T
flatten   mean S over equal positions                         mean T
add       sum w^2 S + sum over k != l of w_k w_l mu_k mu_l'   sum w^2 T
========  ==================================================  ================================

**Near-duplicates.** A layer with weights adds up vectors of norms s_o with angles p_o, so that

    p = chord(s, s') + c_w mean(s_o s'_o p_o) / (s s'),

the half chord between the vectors of norms in the two windows; nothing is subtracted. With the same
in sums and the closed form of ReLU-like layers, an angle of 1e-9 between two patches of the data
is carried through to the first smooth activation or pooling. After these, p = (1 - S / (s s')) / 2.

**The error**, in numbers for each pair of inputs, all positions together. That of p is at most
``slack sqrt(p) + floor``; that of S ``second_error`` and that of T ``tangent_error``, relative to
the root of both inputs' own; what T is off at kinks, mostly at near-duplicates, is in
``tangent_excess``, the sum over all positions. Windows and sums keep such bounds, by
Cauchy-Schwarz, and every layer adds its rounding.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ntk.expectations.gaussian import arc_cosines, reciprocal
from ntk.expectations.hermite import moves
from ntk.infinite.input_pairs import half_chords
from ntk.networks import smooth_duals
from ntk.networks.moments import LayerFeatures, Moments, Raw, epsilon, vectors
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
from ntk.networks.strips import count_loop_parts, map_strips
from ntk.networks.windows import (
    as_pair_rows,
    equal_positions,
    min_over_positions,
    outer,
    pooled,
    shares,
    sum_over_positions,
    sum_pair_windows,
)


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
    """What a tile is."""

    full: bool
    same: jax.Array | None  # [n1, n2], inputs that meet themselves


def walk_pairs(
    steps: Any, numbers: Any, a: Any, b: Any, state: PairState | None, tile: Tile
) -> tuple[PairState | None, Tile]:
    """All steps; ``a`` and ``b`` are the sites of both sides."""
    for step, number, left, right in zip(steps, numbers, a, b, strict=True):
        state = step_pairs(step, number, left, right, state, tile)
        if isinstance(step, Diagonal):
            tile = tile._replace(full=False)
    return state, tile


def step_pairs(
    step: Any, numbers: Any, a: LayerFeatures, b: LayerFeatures, state: PairState | None, tile: Tile
) -> PairState | None:
    """One step; the state is None on the data.

    Raises
    ------
    AssertionError
        For what is no step.
    """
    match step:
        case Linear() if isinstance(a.before, Raw):
            return _after_first_weights(a, b, tile)
        case Sum():
            return _after_sum(step, numbers, a, b, state, tile)
    if state is None:
        return None
    match step:
        case Linear():
            return _after_linear(step, numbers, a, b, state, tile)
        case Kinked():
            return _after_kinked(numbers, a, b, state, tile)
        case Smooth():
            assert a.value is not None
            return _after_duals(
                smooth_duals.duals_by_position, a, b, state, tile, a.value.regular.shape[2]
            )
        case Tabulated():
            how = functools.partial(smooth_duals.by_tables, numbers)
            return _after_duals(how, a, b, state, tile, numbers[0].terms.shape[1])
        case Closed():
            return _after_closed_form(step, numbers, a, b, state, tile)
        case Average():
            return _after_pooling(step, a, b, state, tile)
        case Diagonal():
            n1, n2 = state.slack.shape
            p, tangent = (equal_positions(x, n1, n2) for x in (state.p, state.tangent))
            return state._replace(p=p, tangent=tangent)
        case Flat():
            return _after_flatten(a, b, state, tile)
    raise AssertionError(step)


# ----------------------------------------------------------------------------- layers


def _after_first_weights(a: LayerFeatures, b: LayerFeatures, tile: Tile) -> PairState:
    """Weights on the data: their patches' angles."""
    p = _masked(_patch_half_chords(a, b, tile), tile)
    sizes = outer(a.after.norm, b.after.norm, tile.full)
    none = jnp.zeros((len(a.after.square), len(b.after.square)), p.dtype)
    eps = epsilon(p)
    slack, floor = none + 8 * eps, none + 4 * eps**1.5
    return PairState(p, sizes * (1 - 2 * p), slack, floor, none + 24 * eps, none + 24 * eps, none)


def _after_linear(
    step: Linear, numbers, a: LayerFeatures, b: LayerFeatures, state: PairState, tile: Tile
) -> PairState:
    windows, (weight, bias) = step.windows, numbers
    n1, n2 = state.slack.shape
    size = np.prod(windows.window, dtype=int).item()

    def mean(x):
        return weight / size * sum_pair_windows(x, windows, tile.full, n1, n2)

    below = outer(a.before.norm, b.before.norm, tile.full)
    sizes = outer(a.after.norm, b.after.norm, tile.full)
    p = state.p
    # Without the new p, which would be computed once more for it.
    tangent = mean(state.tangent + below * (1 - 2 * p)) + bias
    eps, noise = epsilon(p), _noise(a.before, b.before)
    slack, floor = state.slack, state.floor
    if size > 1 or step.bias or windows.before != windows.after:
        p = mean(below * p) * reciprocal(sizes)
        va, vb = (vectors(step, numbers, s.before) for s in (a, b))
        p = p + _of_norms(va, vb, a.after.norm, b.after.norm, tile.full)
        p = _masked(jnp.where(sizes > 0, jnp.minimum(p, 1), 0.5), tile)
        slack = slack + 2 * noise + (20 + sum(windows.window)) * eps
        floor = floor + 4 * eps**1.5 + noise**2
    rounding = (4 + sum(windows.window)) * eps
    second = state.second_error + rounding
    error = jnp.maximum(second, state.tangent_error) + rounding
    excess = jax.lax.stop_gradient(weight * shares(windows) * state.tangent_excess)
    return PairState(p, tangent, slack, floor, second, error, excess)


def _patch_half_chords(a: LayerFeatures, b: LayerFeatures, tile: Tile) -> jax.Array:
    """Half chords of the patches of the data, by products of matrices."""
    sides = [jax.tree.map(lambda x: as_pair_rows(x, tile.full), site.units) for site in (a, b)]
    if len(sides[0].high) == 1:  # a loop over one is slow
        return half_chords(*(jax.tree.map(lambda x: x[0], side) for side in sides))[0][None]
    return jax.vmap(half_chords)(*sides)[0]


def _of_norms(va, vb, norms_a, norms_b, full: bool) -> jax.Array:
    """The half chord between short vectors [n, P, k]: a quarter of the squared distance."""
    units = []
    for v, norms in ((va, norms_a), (vb, norms_b)):
        # A loop, so that each entry's row lies in memory as the pairs want it.
        over = reciprocal(norms)
        units.append(
            jax.lax.map(lambda x, over=over: as_pair_rows(x * over, full), jnp.moveaxis(v, 2, 0))
        )
    gaps = (a[:, :, None] - b[:, None, :] for a, b in zip(*units, strict=True))
    return functools.reduce(jnp.add, (gap * gap for gap in gaps)) / 4


def _after_kinked(
    numbers, a: LayerFeatures, b: LayerFeatures, state: PairState, tile: Tile
) -> PairState:
    left, right = numbers
    over = reciprocal((left**2 + right**2) / 2)
    power, bend = (left**2 + right**2) / 2, (right - left) ** 2
    eps = epsilon(state.p)

    def one(entries, _left, _right, pairs):
        (p, tangent), (slack, floor, *_) = entries, pairs
        step, _, gap = arc_cosines(p, 1 - p)
        after = (p * (left * right) + gap * (bend / 2)) * over
        off = jnp.abs(tangent) * _moved(slack * jnp.sqrt(p) + floor, p)
        if tile.same is not None:
            off = jnp.where(_met(_left, _right, pairs), 0, off)
        # The dual of the slopes is the factor of T.
        return after, tangent * (left * right + bend * step), jax.lax.stop_gradient(off)

    known = jax.lax.stop_gradient((state.slack, state.floor))
    after, tangent, off = _strips_of_state(one, state, tile, pairs=known)
    n1, n2 = state.slack.shape
    # Where the dual falls with the angle, a small one may come of a large one.
    monotone = left * right >= 0
    floor = state.floor + jnp.where(monotone, 0, state.slack)
    slack = jnp.where(monotone, state.slack, 0) + 8 * eps
    # S moves by E f' f' <= power with S below, by |E f f - S E f' f'| <= 0.7 power with its norms.
    second = 8 * eps + jnp.minimum(
        2 * (slack + floor) + _noise(a.after, b.after),
        state.second_error + 0.7 * _noise(a.before, b.before),
    )
    worst = power + bend * jnp.sqrt(slack + floor)
    error = state.tangent_error * (1 + bend * over * jnp.sqrt(slack + floor)) + 16 * eps
    excess = bend * sum_over_positions(off, tile.full, n1, n2) + worst * state.tangent_excess
    found = jax.lax.stop_gradient((slack, floor, second, error, excess))
    return PairState(after, tangent, *found)


def _after_duals(
    how, a: LayerFeatures, b: LayerFeatures, state: PairState, tile: Tile, terms: int
) -> PairState:
    """An activation whose duals ``how(a, b, p, full)`` gives, of itself and its slope.

    ``terms``: of the series that it takes.
    """
    assert a.slope is not None and b.slope is not None
    same = _same(state.p, tile)
    # Entries of inputs with themselves are known; here, a series needs no terms for them.
    value, slope = how(a, b, state.p if same is None else jnp.where(same, 0.5, state.p), tile.full)
    p = state.p
    sizes = outer(a.after.norm, b.after.norm, tile.full)
    after = jnp.clip((1 - value * reciprocal(sizes)) / 2, 0, 1)
    after = jnp.where(sizes > 0, after, 0.5)
    if same is not None:
        slopes = outer(a.slope.norm, b.slope.norm, tile.full)
        after, slope = jnp.where(same, 0, after), jnp.where(same, slopes, slope)
    return _after_smooth(after, state.tangent * slope, a, b, state, _ends(p, state, tile), terms)


def _after_smooth(
    after, tangent, a: LayerFeatures, b: LayerFeatures, state: PairState, ends, terms: int
) -> PairState:
    """The state, with its errors."""
    assert a.slope is not None and b.slope is not None
    off, off_slope = _bounds((a.value, a.slope), (b.value, b.slope), state, ends, terms)
    eps = epsilon(after)
    floor = jnp.minimum((off + _noise(a.after, b.after)) / 2 + 4 * eps, 1)
    error = state.tangent_error + (off_slope + 4 * eps) * (1 + state.tangent_error)
    most = a.slope.norm.max(1)[:, None] * b.slope.norm.max(1)[None] * (1 + off_slope)
    excess = most * state.tangent_excess
    errors = jax.lax.stop_gradient((0 * floor, floor, off + 4 * eps, error, excess))
    return PairState(after, tangent, *errors)


def _after_closed_form(
    step: Closed, weight, a: LayerFeatures, b: LayerFeatures, state: PairState, tile: Tile
) -> PairState:
    """Erf and GELU: as :func:`_after_duals`, in one pass."""
    assert a.value is not None and b.value is not None
    formulas = [s.closed[0] for s in (step.activation, step.activation.derivative)]
    sides: list[Any] = [(s.before.square, s.before.norm, reciprocal(s.after.norm)) for s in (a, b)]

    def one(entries, left, right, pairs):
        (p, tangent), (vx, sx, over_x), (vy, sy, over_y) = entries, left[:3], right[:3]
        met = None if tile.same is None else _met(left, right, pairs)
        inside = p if met is None else jnp.where(met, 0.5, p)
        c, rest = sx * sy * (1 - 2 * inside), 4 * vx * vy * inside * (1 - inside)
        value, slope = (f(vx, vy, c, rest) for f in formulas)
        known = over_x * over_y
        after = jnp.where(known > 0, jnp.clip((1 - weight**2 * value * known) / 2, 0, 1), 0.5)
        slope = weight**2 * slope
        if met is None:
            return after, tangent * slope
        # Entries of inputs with themselves are known.
        return jnp.where(met, 0, after), tangent * jnp.where(met, left[3] * right[3], slope)

    if tile.same is not None:
        assert a.slope is not None and b.slope is not None
        slopes = a.slope.norm, b.slope.norm
        sides = [(*side, norm) for side, norm in zip(sides, slopes, strict=True)]
    after, tangent = _strips_of_state(one, state, tile, *sides)
    return _after_smooth(after, tangent, a, b, state, None, 0)


def _after_pooling(
    step: Average, a: LayerFeatures, b: LayerFeatures, state: PairState, tile: Tile
) -> PairState:
    windows = step.windows
    n1, n2 = state.slack.shape
    size = np.prod(windows.window, dtype=int).item() ** 2
    below = outer(a.before.norm, b.before.norm, True) * (1 - 2 * state.p)
    second, tangent = (pooled(x, windows, n1, n2) / size for x in (below, state.tangent))
    eps = (4 + 2 * sum(windows.window)) * epsilon(second)
    error = (state.second_error + eps) * a.gain[:, None] * b.gain[None]
    tangent_error = (state.tangent_error + eps) * a.tangent_gain[:, None] * b.tangent_gain[None]
    excess = shares(windows) ** 2 * state.tangent_excess
    return _subtracted(second, tangent, (error, tangent_error, excess), a, b, tile)


def _after_flatten(a: LayerFeatures, b: LayerFeatures, state: PairState, tile: Tile) -> PairState:
    n1, n2 = state.slack.shape
    p, tangent = state.p, state.tangent
    if tile.full:
        p, tangent = (equal_positions(x, n1, n2) for x in (p, tangent))
    second = outer(a.before.norm, b.before.norm, False) * (1 - 2 * p)
    eps = epsilon(p)
    error = state.second_error + 8 * eps
    second, tangent = (x.mean(0, keepdims=True) for x in (second, tangent))
    errors = error, state.tangent_error + 8 * eps, state.tangent_excess / len(p)
    return _subtracted(second, tangent, errors, a, b, tile)


def _after_sum(
    step: Sum, numbers, a: LayerFeatures, b: LayerFeatures, state: PairState | None, tile: Tile
) -> PairState:
    weights, inner = numbers
    ends: list[PairState] = []
    for k, steps in enumerate(step.branches):
        end, _ = walk_pairs(steps, inner[k], a.branches[k], b.branches[k], state, tile)
        assert end is not None  # every branch on the data has weights
        ends.append(end)
    tops = [
        [(s.branches[k][-1].after if s.branches[k] else s.before) for k in range(len(ends))]
        for s in (a, b)
    ]
    tangent, excess = (
        functools.reduce(jnp.add, (w**2 * t for w, t in zip(weights, ts, strict=True)))
        for ts in ([e.tangent for e in ends], [e.tangent_excess for e in ends])
    )
    sizes = [outer(top.norm, other.norm, tile.full) for top, other in zip(*tops, strict=True)]
    eps = epsilon(tangent)
    slack, floor, second_error, tangent_error = (
        functools.reduce(jnp.maximum, (getattr(end, name) for end in ends))
        for name in ("slack", "floor", "second_error", "tangent_error")
    )
    second_error, tangent_error = (e + (4 + len(ends)) * eps for e in (second_error, tangent_error))
    noise = functools.reduce(jnp.maximum, (_noise(*pair) for pair in zip(*tops, strict=True)))
    if step.means:
        parts = zip(weights, sizes, ends, strict=True)
        second = functools.reduce(jnp.add, (w**2 * s * (1 - 2 * e.p) for w, s, e in parts))
        means = [[w * top.mean for w, top in zip(weights, side, strict=True)] for side in tops]
        left, right = (functools.reduce(jnp.add, side) for side in means)
        second = second + outer(left, right, tile.full)
        for left, right in zip(*means, strict=True):
            second = second - outer(left, right, tile.full)
        error = second_error * a.gain[:, None] * b.gain[None]
        error += _relative_mean_error(a, b, means)
        return _subtracted(second, tangent, (error, tangent_error, excess), a, b, tile)
    total = outer(a.after.norm, b.after.norm, tile.full)
    parts = zip(weights, sizes, ends, strict=True)
    p = functools.reduce(jnp.add, (w**2 * s * e.p for w, s, e in parts)) * reciprocal(total)
    sides = [
        jnp.stack([jnp.abs(w) * top.norm for w, top in zip(weights, side, strict=True)], 2)
        for side in tops
    ]
    p = p + _of_norms(sides[0], sides[1], a.after.norm, b.after.norm, tile.full)
    p = _masked(jnp.where(total > 0, jnp.minimum(p, 1), 0.5), tile)
    slack = slack + 2 * noise + (20 + len(ends)) * eps
    floor = floor + 4 * eps**1.5 + noise**2
    return PairState(p, tangent, slack, floor, second_error, tangent_error, excess)


# ----------------------------------------------------------------------------- common parts


def _strips_of_state(fn, state: PairState, tile: Tile, left=(), right=(), pairs=()):
    """:func:`map_strips` of p and T; behind what is given come what :func:`_met` needs."""
    if tile.same is not None:
        pairs = (*pairs, tile.same)
        if tile.full:
            n1, n2 = state.slack.shape
            of_each = (jnp.arange(k // n) for k, n in zip(state.p.shape[1:], (n1, n2), strict=True))
            one, other = (
                jnp.broadcast_to(x, (n, len(x))) for n, x in zip((n1, n2), of_each, strict=True)
            )
            left, right = (*left, one), (*right, other)
    entries = (state.p, state.tangent)
    return map_strips(fn, entries, left=left, right=right, pairs=pairs, full=tile.full)


def _met(left, right, pairs) -> jax.Array:
    """In strips, positions of inputs that meet themselves."""
    same = pairs[-1]
    whole = left and jnp.issubdtype(left[-1].dtype, jnp.integer)
    return same & (left[-1] == right[-1]) if whole else same


def _subtracted(
    second, tangent, errors, a: LayerFeatures, b: LayerFeatures, tile: Tile
) -> PairState:
    """The state of S and T with the last three errors of a state."""
    sizes = outer(a.after.norm, b.after.norm, tile.full and second.shape[0] == 1)
    p = jnp.clip((1 - second * reciprocal(sizes)) / 2, 0, 1)
    p = _masked(jnp.where(sizes > 0, p, 0.5), tile)
    eps = epsilon(p)
    floor = jnp.minimum((errors[0] + _noise(a.after, b.after)) / 2 + 4 * eps, 1)
    return PairState(p, tangent, *jax.lax.stop_gradient((0 * floor, floor, *errors)))


def _noise(a: Moments, b: Moments) -> jax.Array:
    """Relative error of the products of the norms, [n1, n2]."""
    return (a.noise[:, None] + b.noise[None]) / 2


def _same(p: jax.Array, tile: Tile) -> jax.Array | None:
    """Positions of inputs that meet themselves, to broadcast with [G, A, B]."""
    if tile.same is None:
        return None
    if not tile.full:
        return tile.same[None]
    positions = p.shape[1] // len(tile.same)
    row, column = (jnp.arange(n) for n in p.shape[1:])
    images = (
        tile.same[row // positions][:, column // positions] if tile.same.size > 1 else tile.same
    )
    return (images & (row[:, None] % positions == column[None] % positions))[None]


def _masked(p: jax.Array, tile: Tile) -> jax.Array:
    same = _same(p, tile)
    return p if same is None else jnp.where(same, 0, p)


def _ends(p: jax.Array, state: PairState, tile: Tile) -> tuple[jax.Array, jax.Array]:
    """The smallest p and 1 - p [n1, n2], but of a position with itself."""
    p = jax.lax.stop_gradient(p)
    same = _same(p, tile)
    n1, n2 = state.slack.shape
    inside = p if same is None else jnp.where(same, 0.5, p)
    return min_over_positions(inside, tile.full, n1, n2), 1 + min_over_positions(
        -inside, tile.full, n1, n2
    )


def _moved(error, p) -> jax.Array:
    """How far ``asin(sqrt p) / pi`` is off, at most, where p is by ``error``.

    As far as at p = 0, or by its slope ``1 / (2 pi sqrt(p (1 - p)))`` elsewhere.
    """
    slope = error / 3 * jax.lax.rsqrt(jnp.maximum(p * (1 - p), jnp.finfo(p.dtype).tiny))
    return jnp.minimum(slope, 0.4 * jnp.sqrt(error))


def _bounds(fs, gs, state: PairState, ends, terms: int):
    """:func:`_dual_error_bound` for each f and g, some rows at a time.

    A loop, as :func:`map_strips`: else every later layer would compute all bounds below it again.
    """
    worst = state.slack + state.floor
    count = count_loop_parts(len(worst), worst.shape[1])
    split = jax.tree.map(
        lambda x: x.reshape(count, len(x) // count, *x.shape[1:]), (fs, worst, ends)
    )

    def one(x):
        fs, worst, ends = x
        return tuple(
            _dual_error_bound(f, g, worst, ends, terms) for f, g in zip(fs, gs, strict=True)
        )

    found = jax.lax.map(one, jax.lax.stop_gradient(split))
    return (x.reshape(worst.shape) for x in found)


def _dual_error_bound(f, g, worst, ends, terms: int) -> jax.Array:
    """A bound of the error of ``E f g`` over both norms, for all positions, [n1, n2].

    ``worst``: error of p.
    """
    f, g = jax.lax.stop_gradient((f, g))

    def most(x):
        return x.max(1)

    eps = epsilon(worst)
    total = most(f.noise)[:, None] + most(g.noise)[None]
    total += 4 * eps * most(f.size)[:, None] * most(g.size)[None]
    jump = most(f.jump)[:, None] * most(g.jump)[None]
    total += moves(jump) * most(f.steep)[:, None] * most(g.steep)[None] * worst
    if ends is None:  # a formula, which misses nothing and is of no function that jumps
        return total
    power = 1 - 2 * jnp.minimum(*ends)
    for _ in range(max(terms, 1).bit_length() - 1):
        power = power * power
    (rf, kf), (rg, kg) = ((most(h.missed[..., 0]), most(h.missed[..., 1])) for h in (f, g))
    total += power * (rf[:, None] * (rg + kg)[None] + kf[:, None] * rg[None])
    moved = jnp.maximum(*(_moved(worst, end) for end in ends))
    return total + jump * moved


def _relative_mean_error(a: LayerFeatures, b: LayerFeatures, means) -> jax.Array:
    """Bound of the error of products of means, over both norms."""
    found = []
    for site, side in ((a, means[0]), (b, means[1])):
        over = reciprocal(site.after.norm)
        absolute = functools.reduce(jnp.add, map(jnp.abs, side))
        found.append(((absolute * over).max(1), over.max(1) * site.after.mean_noise))
    (size, off), (other, other_off) = found
    return jax.lax.stop_gradient(size[:, None] * other_off[None] + off[:, None] * other[None])
