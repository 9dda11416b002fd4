"""Exact kernels of an infinitely wide network, by blocks and tiles of pairs of inputs.

The features of each block of inputs come first (:mod:`ntk.networks.moments`). The pairs of two
blocks depend only on them, tile by tile (:mod:`ntk.networks.position_pairs`).
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
from ntk.infinite.input_pairs import same_inputs
from ntk.infinite.layer_expansions import (
    RESOLUTIONS,
    TRACED,
    Resolution,
    check_resolved,
    is_resolved,
    largest_error,
)
from ntk.internal.checks import check_finite, concrete, float_array, nan_where
from ntk.internal.sharding import without_explicit_axes
from ntk.internal.tiles import CPU_TILE, assemble, device_tile_entries, take_rows
from ntk.kernels.record import Kernels
from ntk.networks import walk
from ntk.networks.moments import LayerFeatures, Raw
from ntk.networks.plan import NetworkPlan, plan_network
from ntk.networks.position_pairs import Tile, map_strips
from ntk.networks.windows import outer

if TYPE_CHECKING:
    from ntk.networks.network import Network

ENTRIES = 2**18  # pairs of positions in a tile if positions are mixed
CACHED = 2**16, 64  # otherwise: pairs, and inputs on a side, for a processor's cache
NUMBERS = 2**26  # numbers that a block of inputs stores, about


class Level(NamedTuple):
    """How functions are expanded: by tables if possible, or all one by one."""

    how: Resolution
    tables: bool = True


TABLE_NOISE = 4096  # units of roundoff in tables, which more terms cannot reduce
LEVELS = (
    Level(RESOLUTIONS[1]),  # as cheap as fewer terms, because a series ends when it has converged
    Level(Resolution(4096, 0.25)),  # norms up to 16 need no finer panels
    Level(RESOLUTIONS[2], tables=False),
)


def exact_kernels(
    network: "Network", x1: chex.Array, x2: chex.Array | None, alpha: Mapping[str, Any] | None
) -> Kernels:
    """Return the kernels as :meth:`ntk.networks.Network.kernel` does, with its errors."""
    x1, x2 = _check_network_inputs(x1, x2)
    plan = plan_network(network, x1.shape[1:-1], alpha, x1.dtype)
    if not concrete(x1 + 0, x2, plan.numbers):  # `+ 0` also detects a jit around concrete inputs
        plan, a, b = _at_level(plan, Level(TRACED), x1, x2)
        return _kernels_of_pairs(*_static(plan, x1.dtype), plan.numbers, a, b)
    kernels = _kernels_by_block(plan, x1, x2)
    cancelling = "features that cancel where they are pooled"
    check_resolved("x1", kernels.ntk, "patches", cancelling)
    return kernels


def _check_network_inputs(x1, x2):
    arrays = []
    for name, x in (("x1", x1), ("x2", x2)):
        if x is None:
            continue
        x = without_explicit_axes(float_array(name, x))
        if x.ndim not in (2, 3, 4) or 0 in x.shape:
            expected = "[n, d], [n, length, channels] or [n, height, width, channels]"
            raise ValueError(f"{name}: expected a nonempty array {expected}, got shape {x.shape}.")
        check_finite(name, x, "entries")
        arrays.append(x)
    if x2 is None:
        return arrays[0], None
    x1, x2 = arrays
    if x2.shape[1:] != x1.shape[1:]:
        raise ValueError(f"x2: expected inputs {x1.shape[1:]} as in x1, got {x2.shape[1:]}.")
    return x1, x2.astype(x1.dtype)


def _plan_at_level(plan: NetworkPlan, level: Level, dtype) -> NetworkPlan:
    if not level.tables:
        return plan
    steps, numbers = walk.tabulate_steps(plan.steps, plan.numbers, level.how, dtype)
    return plan._replace(steps=steps, numbers=numbers)


def _sites(plan: NetworkPlan, x: jax.Array, how: Resolution) -> list[LayerFeatures]:
    """Return all layers on single inputs [n, *shape, channels], a few inputs at a time."""
    x = x.reshape(len(x), -1, x.shape[-1])
    size = max(1, 16 * ENTRIES // x.shape[1] ** 2) if plan.full and concrete(x) else len(x)
    blocks = (Raw(x[i : i + size]) for i in range(0, len(x), size))
    walk_block = functools.partial(walk.walk_features, plan.steps, plan.numbers)
    parts = [walk_block(block, None, plan.full, how) for block in blocks]
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)


def _at_level(plan: NetworkPlan, level: Level, x1, x2):
    """Return the plan at a level, and its layers on both sets of inputs; None without ``x2``."""
    plan = _plan_at_level(plan, level, x1.dtype)
    return plan, *(None if x is None else _sites(plan, x, level.how) for x in (x1, x2))


def _static(plan: NetworkPlan, dtype):
    """Return the pairs' static arguments: the steps, and the number of inputs in a tile."""
    counts = [count for step in plan.steps for count in step.position_counts()]
    positions = max(counts, default=1)
    entries, most = (ENTRIES, CPU_TILE) if plan.full else CACHED
    if jax.default_backend() != "cpu":
        entries = most = device_tile_entries(dtype)
    size = math.isqrt(entries // (positions**2 if plan.full else positions))
    return walk.skeletons(plan.steps), plan.full, min(max(size, 1), most)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _kernels_of_pairs(steps, full: bool, size: int, numbers, a, b) -> Kernels:
    last = a[-1].after.square
    n1, n2 = len(last), len(last if b is None else b[-1].after.square)

    def tile(i, j, size1, size2):
        left, right = take_rows(a, i, size1, n1), take_rows(a if b is None else b, j, size2, n2)
        same = same_inputs(i, j, size1, size2) if b is None else None
        state = walk.walk_pairs(steps, numbers, left, right, None, Tile(full, same))
        return _checked_kernels(left[-1].after, right[-1].after, state)

    return assemble(tile, n1, n2, symmetric=b is None, size=size)


def _checked_kernels(a, b, state) -> Kernels:
    sizes = outer(a.norm, b.norm, True)[0]
    nngp, ntk = sizes * (1 - 2 * state.p[0]), state.tangent[0]
    own = outer(root(a.tangent), root(b.tangent), True)[0]
    # K is a part of T here, so one bound holds for both.
    error = own * state.tangent_error + state.tangent_excess + sizes * state.second_error
    error = jax.lax.stop_gradient(error)

    def judged(entries, *_):
        nngp, ntk, error, own = entries
        bad = ~(error <= largest_error(ntk.dtype) * own)
        return nan_where(bad, nngp), nan_where(bad, ntk), jnp.where(bad, jnp.inf, error)

    entries = [x[None] for x in (nngp, ntk, error, own)]
    return Kernels(*(x[0] for x in map_strips(judged, entries, full=False)))


def _kernels_by_block(plan: NetworkPlan, x1, x2) -> Kernels:
    """Return the kernels of all pairs, block by block; without ``x2`` the upper triangle."""
    own = walk.count_values(plan.steps) + walk.count_patch_values(plan.steps, x1.shape[-1])
    size = max(1, NUMBERS // own)
    columns, level = x1 if x2 is None else x2, 0
    starts1, starts2 = (range(0, len(x), size) for x in (x1, columns))
    if len(starts1) == len(starts2) == 1:
        return _kernels_at_lowest_level(plan, x1, x2, level)[0]
    result = [np.zeros((len(x1), len(columns)), x1.dtype) for _ in range(3)]
    for i in starts1:
        for j in starts2:
            if x2 is None and j < i:
                continue
            alone = x2 is None and i == j
            right = None if alone else columns[j : j + size]
            kernels, level = _kernels_at_lowest_level(plan, x1[i : i + size], right, level)
            for whole, part in zip(result, jax.tree.leaves(kernels), strict=True):
                whole[i : i + size, j : j + size] = part
                if x2 is None and not alone:
                    whole[j : j + size, i : i + size] = part.T
    return Kernels(*map(jnp.asarray, result))


def _kernels_at_lowest_level(plan: NetworkPlan, x1, x2, level: int) -> tuple[Kernels, int]:
    """Return the kernels at the lowest level that resolves them, and that level."""
    while True:
        now, a, b = _at_level(plan, LEVELS[level], x1, x2)
        noise = TABLE_NOISE if LEVELS[level].tables else 512
        leaves = jax.tree.leaves((a, b), is_leaf=lambda leaf: isinstance(leaf, Expansion))
        expansions = [leaf for leaf in leaves if isinstance(leaf, Expansion)]
        if level + 1 == len(LEVELS) or is_resolved(expansions, noise):
            return _kernels_of_pairs(*_static(now, x1.dtype), now.numbers, a, b), level
        level = _next_level(plan, [a] if b is None else [a, b], level, x1.dtype)


def _next_level(plan: NetworkPlan, sides, level: int, dtype) -> int:
    """Return the lowest level above with tables that resolve the norms of these sites."""
    for above in range(level + 1, len(LEVELS)):
        if not LEVELS[above].tables:
            break
        now = _plan_at_level(plan, LEVELS[above], dtype)
        values = [f for sites in sides for f in walk.table_values(now.steps, now.numbers, sites)]
        if not values or is_resolved(values, TABLE_NOISE):
            return above
    return above
