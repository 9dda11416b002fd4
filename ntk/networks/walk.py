"""Networks step by step: on single inputs, on pairs of inputs, and in the finite network."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ntk.expectations.hermite import Expansion
from ntk.infinite.layer_expansions import Resolution
from ntk.networks.contracts import FiniteLayer, LayerStep
from ntk.networks.moments import LayerFeatures
from ntk.networks.position_pairs import PairState, Tile
from ntk.networks.windows import equal_positions

Steps = Sequence[LayerStep]


@dataclasses.dataclass(frozen=True)
class Diagonal(LayerStep):
    """Drop all pairs except equal positions. Plans insert it."""

    def features(self, numbers, before):
        """Return the features unchanged."""
        return LayerFeatures(before, before)

    def pairs(self, numbers, a, b, state, tile):
        """Go from the full layout to the diagonal one."""
        n1, n2 = state.slack.shape
        p, tangent = (equal_positions(x, n1, n2) for x in (state.p, state.tangent))
        return state._replace(p=p, tangent=tangent)

    def apply(self, numbers, x, finite):
        """Return ``x`` unchanged."""
        return x


def walk_features(steps: Steps, numbers, before, state, full, how) -> list[LayerFeatures]:
    """Return the sites; ``state`` holds every input's pairs with itself, for pooling."""
    sites = []
    for i, (step, number) in enumerate(zip(steps, numbers, strict=True)):
        site = step.visit(number, before, state, full, how)
        sites.append(site)
        full = full and not isinstance(step, Diagonal)
        if full and any(later.pools() for later in steps[i + 1 :]):
            state = _pairs_with_itself(step.skeleton(), number, site, state)
        before = site.after
    return sites


@functools.partial(jax.jit, static_argnums=0)
def _pairs_with_itself(step, number, sites, state):
    """Return the step's pairs of all positions of one input, for each input."""
    tile = Tile(True, jnp.ones((1, 1), bool))

    def one(x):
        site, state = x
        site = jax.tree.map(lambda leaf: leaf[None], site)
        return _step_pairs(step, number, site, site, state, tile)

    return jax.lax.map(one, (sites, state))


def walk_pairs(steps: Steps, numbers, a, b, state: PairState | None, tile: Tile) -> Any:
    """Return the state after all steps, from the sites of both sides; None on the data."""
    for step, number, left, right in zip(steps, numbers, a, b, strict=True):
        state = _step_pairs(step, number, left, right, state, tile)
        if isinstance(step, Diagonal):
            tile = tile._replace(full=False)
    return state


def _step_pairs(step, number, a, b, state, tile) -> PairState | None:
    if state is None:
        return step.pairs_of_data(number, a, b, tile)
    return step.pairs(number, a, b, state, tile)


def apply_steps(steps: Steps, numbers: Any, x: jax.Array, finite: FiniteLayer) -> jax.Array:
    """Apply the layers of the finite network, all of one width."""
    for step, number in zip(steps, numbers, strict=True):
        x = step.apply(number, x, finite)
    return x


def skeletons(steps: Steps) -> tuple[LayerStep, ...]:
    """Return the steps without the names of activations."""
    return tuple(step.skeleton() for step in steps)


def tabulate_steps(steps: Steps, numbers, how: Resolution, dtype) -> tuple[tuple, list]:
    """Return steps and numbers with tables in them."""
    pairs = [s.tabulate(n, how, dtype) for s, n in zip(steps, numbers, strict=True)]
    return tuple(s for s, _ in pairs), [n for _, n in pairs]


def table_values(steps: Steps, numbers: Any, sites: Sequence[LayerFeatures]) -> Iterator[Expansion]:
    """Yield expansions by the tables of the steps at the norms of the sites."""
    for step, number, site in zip(steps, numbers, sites, strict=True):
        yield from step.table_values(number, site)


def count_values(steps: Steps, positions: int = 1) -> int:
    """Return about how many numbers an input stores for all steps."""
    total = 0
    for step in steps:
        total += step.values_per_input(positions)
        positions = max(step.position_counts(), default=positions)
    return total


def count_patch_values(steps: Steps, channels: int) -> int:
    """Return how many numbers an input's patches take."""
    values = (step.patch_values(channels) for step in steps)
    return next((value for value in values if value is not None), 0)
