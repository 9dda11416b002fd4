"""Sums of networks: ``add`` and ``residual``."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ntk.expectations.gaussian import reciprocal, root
from ntk.internal.checks import sequence
from ntk.networks import walk
from ntk.networks.contracts import Layer, LayerStep, Planned, Signal
from ntk.networks.moments import LayerFeatures, Moments, epsilon
from ntk.networks.network import Network, check_network, serial
from ntk.networks.plan import check_choice, plan_layers
from ntk.networks.position_pairs import (
    PairState,
    norm_half_chords,
    norm_noise,
    state_of_moments,
    zero_where_same,
)
from ntk.networks.windows import outer


def add(branches: Sequence[Network], weights: Any = None) -> Network:
    """Return ``sum_k w_k branch_k(f)``: a mixture of networks with independent random weights.

    All branches except one must have a layer with weights.

    Parameters
    ----------
    branches : sequence of networks
    weights : str or sequence of numbers and names, optional
        A single name is a vector in ``alpha`` with all weights: a choice. 1 by default.

    Raises
    ------
    ValueError
        If ``branches`` is empty or contains other objects than networks, or the number of weights
        differs.

    Examples
    --------
    >>> from ntk import networks as nets
    >>> add([nets.conv(1), nets.conv(3)], "size").names
    {'size': ('0', '1')}
    """
    branches = tuple(map(check_network, sequence("branches", branches, "networks")))
    if not branches:
        raise ValueError("branches: expected at least one network, got none.")
    return Network((_Add(branches, check_choice(weights, len(branches))),))


def residual(branch: Network, *, skip: Any = 1.0, shortcut: Network | None = None) -> Network:
    """Return ``branch(f) + skip shortcut(f)``.

    Parameters
    ----------
    branch : Network
    skip : number or name
    shortcut : Network, optional
        The identity, ``serial()``, by default; a convolution if the branch changes the size.

    Examples
    --------
    >>> from ntk import networks as nets
    >>> residual(nets.conv(3), skip="gate").names
    {'gate': ()}
    """
    return add([branch, serial() if shortcut is None else shortcut], [1.0, skip])


@dataclasses.dataclass(frozen=True, eq=False)
class _Add(Layer):
    """``add``: branches, and their weights (numbers or names) or one name for all."""

    branches: tuple[Network, ...]
    weights: tuple[Any, ...] | str

    combinator: ClassVar[str] = "add"

    def plan(self, signal, values):
        plans = [plan_layers(network, signal, values) for network in self.branches]
        branches = tuple(tuple(steps) for steps, _, _ in plans)
        numbers, ends = [number for _, number, _ in plans], [end for _, _, end in plans]
        if len({(end.shape, end.flat) for end in ends}) > 1:
            shapes = [end.shape for end in ends]
            raise ValueError(f"add: expected branches of one shape, got shapes {shapes}.")
        fresh = list(map(_has_weights, self.branches))
        if sum(not f for f in fresh) > 1 or (signal.raw and not all(fresh)):
            where = "every branch except one (on the data: in every branch)"
            got = f"{sum(fresh)} of {len(fresh)}"
            raise ValueError(f"add: expected a layer with weights in {where}, got {got}.")
        means = sum(not end.gaussian for end in ends) > 1
        end = Signal(ends[0].shape, all(e.gaussian for e in ends), flat=ends[0].flat)
        return Planned(_Sum(branches, means), (values.weights(self.weights), numbers), end)

    def entries(self):
        yield self.weights, tuple(str(k) for k in range(len(self.branches)))
        for branch in self.branches:
            for layer in branch.layers:
                yield from layer.entries()

    def has_weights(self):
        return all(map(_has_weights, self.branches))


def _has_weights(network: Network) -> bool:
    return any(layer.has_weights() for layer in network.layers)


@dataclasses.dataclass(frozen=True)
class _Sum(LayerStep):
    """``sum_k w_k branch_k(f)``; numbers: (weights, numbers of the branches)."""

    branches: tuple[tuple[LayerStep, ...], ...]
    means: bool  # whether two parts have means, so that their covariance counts

    weighted: ClassVar[bool] = True

    def visit(self, numbers, before, state, full, how):
        weights, inner = numbers
        pairs = zip(self.branches, inner, strict=True)
        branches = [walk.walk_features(s, n, before, state, full, how) for s, n in pairs]
        ends = [sites[-1].after if sites else before for sites in branches]
        site = _sum_features(self.skeleton(), weights, before, ends)
        return site._replace(branches=tuple(branches))

    def pairs_of_data(self, numbers, a, b, tile):
        return self.pairs(numbers, a, b, None, tile)

    def pairs(self, numbers, a, b, state, tile):
        """Combine the branches' angles; if means count, their second moments."""
        weights, inner = numbers
        branches = zip(self.branches, inner, a.branches, b.branches, strict=True)
        ends: list[Any] = [walk.walk_pairs(*branch, state, tile) for branch in branches]
        tops = [[(sites[-1].after if sites else s.before) for sites in s.branches] for s in (a, b)]
        tangent, excess = (
            _total(w**2 * getattr(end, name) for w, end in zip(weights, ends, strict=True))
            for name in ("tangent", "tangent_excess")
        )
        sizes = [outer(top.norm, other.norm, tile.full) for top, other in zip(*tops, strict=True)]
        eps = epsilon(tangent)
        names = "slack", "floor", "second_error", "tangent_error"
        slack, floor, second_error, tangent_error = (
            _largest(getattr(end, name) for end in ends) for name in names
        )
        rounding = (4 + len(ends)) * eps
        second_error, tangent_error = second_error + rounding, tangent_error + rounding
        noise = _largest(norm_noise(*pair) for pair in zip(*tops, strict=True))
        if self.means:
            parts = zip(weights, sizes, ends, strict=True)
            second = _total(w**2 * s * (1 - 2 * e.p) for w, s, e in parts)
            means = [[w * top.mean for w, top in zip(weights, side, strict=True)] for side in tops]
            left, right = (_total(side) for side in means)
            second = second + outer(left, right, tile.full)
            for left, right in zip(*means, strict=True):
                second = second - outer(left, right, tile.full)
            error = second_error * a.gain[:, None] * b.gain[None]
            error += _relative_mean_error(a, b, means)
            return state_of_moments(second, tangent, (error, tangent_error, excess), a, b, tile)
        total = outer(a.after.norm, b.after.norm, tile.full)
        parts = zip(weights, sizes, ends, strict=True)
        p = _total(w**2 * s * e.p for w, s, e in parts) * reciprocal(total)
        va, vb = (
            jnp.stack([jnp.abs(w) * top.norm for w, top in zip(weights, side, strict=True)], 2)
            for side in tops
        )
        p = p + norm_half_chords(va, vb, a.after.norm, b.after.norm, tile.full)
        p = zero_where_same(jnp.where(total > 0, jnp.minimum(p, 1), 0.5), tile)
        slack = slack + 2 * noise + (20 + len(ends)) * eps
        floor = floor + 4 * eps**1.5 + noise**2
        return PairState(p, tangent, slack, floor, second_error, tangent_error, excess)

    def apply(self, numbers, x, finite):
        branches = zip(*numbers, self.branches, strict=True)
        return sum(w * walk.apply_steps(steps, n, x, finite) for w, n, steps in branches)

    def pools(self):
        return any(step.pools() for branch in self.branches for step in branch)

    def position_counts(self):
        steps = [step for branch in self.branches for step in branch]
        return (1, *(count for step in steps for count in step.position_counts()))

    def values_per_input(self, positions):
        inner = sum(walk.count_values(branch, positions) for branch in self.branches)
        return inner + super().values_per_input(positions)

    def patch_values(self, channels):
        return sum(walk.count_patch_values(branch, channels) for branch in self.branches)

    def skeleton(self):
        return dataclasses.replace(self, branches=tuple(map(walk.skeletons, self.branches)))

    def tabulate(self, numbers, how, dtype):
        weights, inner = numbers
        branches = zip(self.branches, inner, strict=True)
        parts = [walk.tabulate_steps(steps, n, how, dtype) for steps, n in branches]
        step = dataclasses.replace(self, branches=tuple(s for s, _ in parts))
        return step, (weights, [n for _, n in parts])

    def table_values(self, numbers, site):
        for branch, inner, own in zip(self.branches, numbers[1], site.branches, strict=True):
            yield from walk.table_values(branch, inner, own)


@functools.partial(jax.jit, static_argnums=0)
def _sum_features(step: _Sum, weights: Any, before: Any, ends: list[Moments]) -> LayerFeatures:
    """Return the sum of branches that end in ``ends``, without the branches' sites."""
    eps = epsilon(weights)
    shares = [w**2 * end.square for w, end in zip(weights, ends, strict=True)]
    plain = _total(shares)
    tangent = _total(w**2 * end.tangent for w, end in zip(weights, ends, strict=True))
    means = [w * end.mean for w, end in zip(weights, ends, strict=True)]
    mean = _total(means)
    worst = _largest(end.noise for end in ends) + (4 + len(ends)) * eps
    sizes = jnp.abs(weights)
    mean_noise = _total(s * end.mean_noise for s, end in zip(sizes, ends, strict=True))
    square, gain = plain, jnp.ones_like(worst)
    if step.means:
        crossed = mean**2 - _total(m**2 for m in means)
        square = jnp.maximum(plain + crossed, 4 * eps * plain)
        over = reciprocal(root(square))
        gain = jax.lax.stop_gradient((root(plain) * over).max(1))
        absolute = _total(map(jnp.abs, means))
        worst = worst * gain**2 + 2 * (absolute * over).max(1) * mean_noise * over.max(1)
    after = Moments(square, tangent, mean, *map(jax.lax.stop_gradient, (worst, mean_noise)))
    return LayerFeatures(before, after, gain=gain)


def _total(terms) -> Any:
    return functools.reduce(jnp.add, terms)


def _largest(bounds) -> Any:
    return functools.reduce(jnp.maximum, bounds)


def _relative_mean_error(a: LayerFeatures, b: LayerFeatures, means) -> jax.Array:
    """Bound the error of products of means, over both norms."""
    errors = []
    for site, side in ((a, means[0]), (b, means[1])):
        over = reciprocal(site.after.norm)
        absolute = _total(map(jnp.abs, side))
        errors.append(((absolute * over).max(1), over.max(1) * site.after.mean_noise))
    (size, off), (other, other_off) = errors
    return jax.lax.stop_gradient(size[:, None] * other_off[None] + off[:, None] * other[None])
