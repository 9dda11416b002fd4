"""Exact kernels of an infinitely wide network, by blocks and tiles of pairs of inputs.

A block of inputs is walked through alone first (:mod:`ntk.networks.moments`); the pairs of two
blocks then need no more than that, tile by tile (:mod:`ntk.networks.position_pairs`), so that
memory is that of two blocks, a tile, and the result.
"""

import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from ntk.expectations.gaussian import root
from ntk.expectations.hermite import Expansion
from ntk.infinite.input_pairs import TILE, assemble, mirror_triangle, take_rows
from ntk.infinite.layer_expansions import (
    RESOLUTIONS,
    TRACED,
    Resolution,
    is_resolved,
    largest_error,
)
from ntk.internal.checks import check_finite, concrete, float_array, nan_where
from ntk.internal.sharding import without_explicit_axes
from ntk.kernels.record import Kernels
from ntk.networks import moments, tables
from ntk.networks.moments import LayerFeatures, Raw
from ntk.networks.plan import (
    Average,
    Closed,
    Diagonal,
    Flat,
    Kinked,
    Linear,
    NetworkPlan,
    Smooth,
    Sum,
    Tabulated,
    plan_network,
    skeleton,
)
from ntk.networks.position_pairs import Tile, step_pairs, walk_pairs
from ntk.networks.strips import map_strips
from ntk.networks.windows import outer

if TYPE_CHECKING:
    from ntk.networks.network import Network

ENTRIES = 2**18  # pairs of positions that a tile has, where positions are mixed
CACHED = 2**16, 64  # where they are not: pairs and inputs on a side, for a processor's cache
NUMBERS = 2**26  # that a block of inputs keeps, about


class Level(NamedTuple):
    """How functions are expanded: those that can be by tables, or all one by one."""

    how: Resolution
    tables: bool = True


TABLE_NOISE = 4096  # rounding units: of tables, which more terms do not mend
LEVELS = (
    Level(RESOLUTIONS[1]),  # as cheap as fewer terms: of those, no more are summed than it takes
    Level(Resolution(4096, 0.25)),  # norms up to 16 need no finer panels
    Level(RESOLUTIONS[2], tables=False),
)


def exact_kernels(
    network: "Network",
    x1: chex.Array,
    x2: chex.Array | None = None,
    *,
    alpha: Mapping[str, Any] | None = None,
) -> Kernels:
    """Exact NNGP and NTK of an infinitely wide network.

    Raises
    ------
    ValueError, FloatingPointError
        As :meth:`ntk.networks.Network.kernel`.
    """
    x1, x2 = _check_network_inputs(x1, x2)
    found = plan_network(network, x1.shape[1:-1], alpha, x1.dtype)
    if not concrete(x1 + 0, x2, found.numbers):  # by a jit around too, of values
        return _block(found, x1, x2, Level(TRACED))
    kernels = _kernels_by_block(found, x1, x2)
    if bool(np.isnan(kernels.ntk).any()):
        raise FloatingPointError(
            f"x1: expected inputs whose kernel can be computed in {x1.dtype}, got an entry with "
            "too large an error: nearly collinear patches at too large a variance, features that "
            "cancel where they are pooled, or errors that grow from layer to layer."
        )
    return kernels


def _check_network_inputs(x1, x2):
    arrays = []
    for name, x in (("x1", x1), ("x2", x2)):
        if x is None:
            continue
        x = without_explicit_axes(float_array(name, x))
        if x.ndim not in (2, 3, 4) or 0 in x.shape:
            raise ValueError(
                f"{name}: expected a nonempty array [n, d], [n, length, channels] or "
                f"[n, height, width, channels], got shape {x.shape}."
            )
        check_finite(name, x, "entries")
        arrays.append(x)
    if x2 is None:
        return arrays[0], None
    x1, x2 = arrays
    if x2.shape[1:] != x1.shape[1:]:
        raise ValueError(f"x2: expected inputs {x1.shape[1:]} as in x1, got {x2.shape[1:]}.")
    return x1, x2.astype(x1.dtype)


# ----------------------------------------------------------------------------- tables


def _plan_at_level(found: NetworkPlan, level: Level, dtype) -> NetworkPlan:
    """The plan with tables in it."""
    if not level.tables:
        return found
    steps, numbers = _tabulate_steps(found.steps, found.numbers, level.how, dtype)
    return found._replace(steps=steps, numbers=numbers)


def _tabulate_steps(steps, numbers, how: Resolution, dtype):
    pairs = [_tabulate_step(s, n, how, dtype) for s, n in zip(steps, numbers, strict=True)]
    return tuple(s for s, _ in pairs), [n for _, n in pairs]


def _tabulate_step(step, number, how: Resolution, dtype):
    match step:
        case Smooth(tuple() as layer) if not any(s.kinks for s in layer):
            kinked = any(s.smooth is None for s in layer)
            if concrete(number + 0):
                both = _shared_tables(layer, tuple(np.asarray(number).tolist()), how, dtype)
            else:
                both = tables.tabulate_layer(layer, number, how, dtype)
            return Tabulated(kinked), both
        case Sum():
            weights, inner = number
            parts = [
                _tabulate_steps(s, n, how, dtype) for s, n in zip(step.branches, inner, strict=True)
            ]
            step = step._replace(branches=tuple(s for s, _ in parts))
            return step, (weights, [n for _, n in parts])
    return step, number


@functools.lru_cache(maxsize=16)
def _shared_tables(activations, weights, how, dtype):
    """Tables for weights that are known: equal layers share them."""
    return tables.tabulate_layer(activations, jnp.asarray(weights, dtype), how, dtype)


# ----------------------------------------------------------------------------- single inputs


def _sites(found: NetworkPlan, x: jax.Array, how: Resolution) -> list[LayerFeatures]:
    """All layers on single inputs [n, *shape, channels], a few at a time."""
    x = x.reshape(len(x), -1, x.shape[-1])
    size = max(1, 16 * ENTRIES // x.shape[1] ** 2) if found.full and concrete(x) else len(x)
    parts = [
        _features_of_steps(found.steps, found.numbers, Raw(x[i : i + size]), None, found.full, how)
        for i in range(0, len(x), size)
    ]
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)


def _features_of_steps(
    steps, numbers, before, state, full: bool, how: Resolution
) -> list[LayerFeatures]:
    """The sites; ``state`` is that of every input's pairs with itself, for pooling."""
    sites = []
    for i, (step, number) in enumerate(zip(steps, numbers, strict=True)):
        site = _features_of_step(step, number, before, state, full, how)
        sites.append(site)
        full = full and not isinstance(step, Diagonal)
        if full and _pool_in(steps[i + 1 :]):
            state = _with_itself(skeleton((step,))[0], number, site, state)
        before = site.after
    return sites


def _pool_in(steps) -> bool:
    return any(
        isinstance(s, Average) or (isinstance(s, Sum) and any(map(_pool_in, s.branches)))
        for s in steps
    )


def _features_of_step(step, number, before, state, full: bool, how: Resolution) -> LayerFeatures:
    match step:
        case Smooth():
            return moments.smooth_features(step, number, before, how)
        case Sum():
            weights, inner = number
            branches = [
                _features_of_steps(s, n, before, state, full, how)
                for s, n in zip(step.branches, inner, strict=True)
            ]
            ends = [sites[-1].after if sites else before for sites in branches]
            site = _total(skeleton((step,))[0], weights, before, ends)
            return site._replace(branches=tuple(branches))
        case Average():
            return _average(step, before, state)
        case Tabulated():
            # Single inputs need no terms: one program, however many.
            number = [t._replace(terms=t.terms[:, :0]) for t in number]
    return _features_of_plain_step(step, number, before)


@functools.partial(jax.jit, static_argnums=0)
def _features_of_plain_step(step, number, before) -> LayerFeatures:
    match step:
        case Linear():
            return moments.linear_features(step, number, before)
        case Kinked():
            return moments.kinked_features(step, number, before)
        case Closed():
            return moments.closed_form_features(step, number, before)
        case Tabulated():
            return moments.tabulated_features(step, number, before)
        case Flat():
            return moments.flattened_features(step, before)
    return moments.diagonal_features(step, before)


_average = jax.jit(moments.pooled_features, static_argnums=0)
_total = jax.jit(
    lambda step, weights, before, ends: moments.sum_features(step, weights, before, (), ends),
    static_argnums=0,
)


@functools.partial(jax.jit, static_argnums=0)
def _with_itself(step, number, sites, state):
    """The step's pairs of all positions of one input, for each input."""
    tile = Tile(True, jnp.ones((1, 1), bool))

    def one(x):
        site, state = x
        site = jax.tree.map(lambda leaf: leaf[None], site)
        return step_pairs(step, number, site, site, state, tile)

    return jax.lax.map(one, (sites, state))


# ----------------------------------------------------------------------------- all pairs


def _block(found: NetworkPlan, x1, x2, level: Level) -> Kernels:
    """All pairs at once."""
    found, how = _plan_at_level(found, level, x1.dtype), level.how
    a = _sites(found, x1, how)
    b = None if x2 is None else _sites(found, x2, how)
    return _kernels_of_pairs(*_static(found), found.numbers, a, b)


def _static(found: NetworkPlan):
    """What a program is compiled for, beside shapes: the steps and the inputs in a tile."""
    positions = max(_position_counts(found.steps))
    entries, most = CACHED if jax.default_backend() == "cpu" and not found.full else (ENTRIES, TILE)
    size = math.isqrt(entries // (positions**2 if found.full else positions))
    return skeleton(found.steps), found.full, min(max(size, 1), most)


def _position_counts(steps):
    yield 1
    for step in steps:
        match step:
            case Linear() | Average():
                yield math.prod(step.windows.before)
                yield math.prod(step.windows.after)
            case Sum():
                for branch in step.branches:
                    yield from _position_counts(branch)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _kernels_of_pairs(steps, full: bool, size: int, numbers, a, b) -> Kernels:
    last = a[-1].after.square
    n1, n2 = len(last), len(last if b is None else b[-1].after.square)

    def tile(i, j, size1, size2):
        left, right = take_rows(a, i, size1, n1), take_rows(a if b is None else b, j, size2, n2)
        same = None
        if b is None:
            same = (i + jnp.arange(size1))[:, None] == (j + jnp.arange(size2))[None]
        state, _ = walk_pairs(steps, numbers, left, right, None, Tile(full, same))
        kernels = _checked_kernels(left[-1].after, right[-1].after, state)
        if b is not None:
            return kernels
        return jax.tree.map(lambda k: jnp.where(i == j, mirror_triangle(k), k), kernels)

    return assemble(tile, n1, n2, symmetric=b is None, size=size)


def _checked_kernels(a, b, state) -> Kernels:
    sizes = outer(a.norm, b.norm, True)[0]
    nngp, ntk = sizes * (1 - 2 * state.p[0]), state.tangent[0]
    own = outer(root(a.tangent), root(b.tangent), True)[0]
    # K is a part of T here: one bound serves both.
    error = own * state.tangent_error + state.tangent_excess + sizes * state.second_error
    error = jax.lax.stop_gradient(error)

    def judged(entries, *_):
        nngp, ntk, error, own = entries
        bad = ~(error <= largest_error(ntk.dtype) * own)
        fields = (nan_where(bad, k) for k in (nngp, ntk))
        return (*fields, jnp.where(bad, jnp.inf, error))

    entries = [x[None] for x in (nngp, ntk, error, own)]
    return Kernels(*(x[0] for x in map_strips(judged, entries, full=False)))


# ----------------------------------------------------------------------------- blocks


def _kernels_by_block(found: NetworkPlan, x1, x2) -> Kernels:
    """All pairs, block by block: those of the upper triangle without ``x2``."""
    size = max(
        1,
        NUMBERS
        // (_values_per_input(found.steps) + _patch_values_per_input(found.steps, x1.shape[-1])),
    )
    starts1, starts2 = (range(0, len(x), size) for x in (x1, x1 if x2 is None else x2))
    if len(starts1) == len(starts2) == 1:
        return _kernels_at_lowest_level(found, x1, x2, 0)[0]
    columns, level = x1 if x2 is None else x2, 0
    result = [np.zeros((len(x1), len(columns)), x1.dtype) for _ in range(3)]
    for i in starts1:
        for j in starts2:
            if x2 is None and j < i:
                continue
            own = x2 is None and i == j
            right = None if own else columns[j : j + size]
            kernels, level = _kernels_at_lowest_level(found, x1[i : i + size], right, level)
            for whole, part in zip(result, jax.tree.leaves(kernels), strict=True):
                whole[i : i + size, j : j + size] = part
                if x2 is None and not own:
                    whole[j : j + size, i : i + size] = part.T
    return Kernels(*map(jnp.asarray, result))


def _kernels_at_lowest_level(found: NetworkPlan, x1, x2, level: int) -> tuple[Kernels, int]:
    """All pairs at the lowest level that serves, and that level."""
    while True:
        how = LEVELS[level].how
        now = _plan_at_level(found, LEVELS[level], x1.dtype)
        a = _sites(now, x1, how)
        b = None if x2 is None else _sites(now, x2, how)
        noise = TABLE_NOISE if LEVELS[level].tables else 512
        if level + 1 == len(LEVELS) or is_resolved(_expansions((a, b)), noise):
            return _kernels_of_pairs(*_static(now), now.numbers, a, b), level
        level = _next_level(found, [a] if b is None else [a, b], level, x1.dtype)


def _next_level(found: NetworkPlan, sides, level: int, dtype) -> int:
    """The lowest one above whose tables would serve the norms of these sites."""
    for above in range(level + 1, len(LEVELS)):
        if not LEVELS[above].tables:
            break
        now = _plan_at_level(found, LEVELS[above], dtype)
        values = [f for sites in sides for f in _looked_up(now.steps, now.numbers, sites)]
        if not values or is_resolved(values, TABLE_NOISE):
            return above
    return above


def _looked_up(steps, numbers, sites):
    """Expansions at the norms of the sites."""
    for step, number, site in zip(steps, numbers, sites, strict=True):
        match step:
            case Tabulated():
                again = _features_of_step(step, number, site.before, None, False, TRACED)
                yield from (again.value, again.slope)
            case Sum():
                for branch, inner, own in zip(step.branches, number[1], site.branches, strict=True):
                    yield from _looked_up(branch, inner, own)


def _expansions(sites) -> list:
    leaves = jax.tree.leaves(sites, is_leaf=lambda s: isinstance(s, Expansion))
    return [leaf for leaf in leaves if isinstance(leaf, Expansion)]


def _values_per_input(steps, positions: int = 1) -> int:
    """How many an input needs, at a usual resolution."""
    total = 0
    for step in steps:
        if isinstance(step, Sum):
            total += sum(_values_per_input(branch, positions) for branch in step.branches)
        positions = max(_position_counts((step,))) if _positions_change(step) else positions
        total += positions * (600 if isinstance(step, Smooth) else 20)
    return total


def _patch_values_per_input(steps, channels: int) -> int:
    """How many an input's patches need."""
    for step in steps:
        if isinstance(step, Linear):
            return 3 * math.prod(step.windows.after) * math.prod(step.windows.window) * channels
        if isinstance(step, Sum):
            return sum(_patch_values_per_input(branch, channels) for branch in step.branches)
    return 0


def _positions_change(step) -> bool:
    return isinstance(step, Linear | Average | Sum)
