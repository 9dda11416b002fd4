"""Which leaves of a network's parameters are weights: those that multiply what comes of the input.

A bias may have two axes, and a network a single input: no shape tells the two apart. So it is read
off the program: a weight goes, alone or with other leaves (scaled, normalised, as a low-rank
product), into a matrix product, a convolution or a look-up in a table with data on the other side.
"""

from collections.abc import Callable
from typing import Any

import chex
import jax
from jax.extend.core import Jaxpr, Literal

from ntk.internal.compile_cache import fresh
from ntk.internal.jaxprs import inner_jaxprs, scan_operands

Leaves = frozenset[int] | None  # what a value is made of; None: of the input, too

_PRODUCTS = {"dot_general", "conv_general_dilated", "gather"}


def multiplied(apply: Callable, params: Any, x: chex.Array) -> set[int]:
    """Indices of the leaves of ``params`` that are weights in ``apply(params, x)``."""
    closed = jax.make_jaxpr(fresh(apply))(params, x)
    leaves = [frozenset([i]) for i in range(len(jax.tree.leaves(params)))]
    weights: set[int] = set()
    _follow(closed.jaxpr, [*leaves, None], weights)
    return weights


def _follow(jaxpr: Jaxpr, inputs: list[Leaves], weights: set[int]) -> list[Leaves]:
    """What the outputs are made of; the weights that are met on the way go to ``found``."""
    made: dict = dict.fromkeys(jaxpr.constvars, frozenset())
    made |= zip(jaxpr.invars, inputs, strict=True)

    def of(v) -> Leaves:
        return frozenset() if isinstance(v, Literal) else made[v]

    for eqn in jaxpr.eqns:
        sources = [of(v) for v in eqn.invars]
        if eqn.primitive.name in _PRODUCTS and None in sources:
            for leaves in sources[:1] if eqn.primitive.name == "gather" else sources:
                weights |= leaves or frozenset()
        outputs = _follow_inner(eqn, sources, weights) or [_union_of_sources(sources)] * len(
            eqn.outvars
        )
        made |= zip(eqn.outvars, outputs, strict=True)
    return [of(v) for v in jaxpr.outvars]


def _union_of_sources(sources: list[Leaves]) -> Leaves:
    return None if None in sources else frozenset().union(*sources)  # type: ignore[arg-type]


def _follow_inner(eqn, sources: list[Leaves], weights: set[int]) -> list[Leaves] | None:
    """What a call, a branch or a loop makes; None for other operations."""
    if eqn.primitive.name == "while":
        own = eqn.params["cond_nconsts"]
        return _follow_loop(
            eqn.params["body_jaxpr"], sources[own:], eqn.params["body_nconsts"], None, weights
        )
    if eqn.primitive.name == "scan":
        return _follow_loop(eqn.params["jaxpr"], sources, *scan_operands(eqn), weights)
    if eqn.primitive.name == "cond":
        branches = [_follow(b.jaxpr, sources[1:], weights) for b in eqn.params["branches"]]
        return [
            _union_of_sources([sources[0], *of_branches])
            for of_branches in zip(*branches, strict=True)
        ]
    for inner in inner_jaxprs(eqn):
        if len(inner.jaxpr.invars) == len(sources):
            return _follow(inner.jaxpr, sources, weights)
    return None


def _follow_loop(
    body, sources: list[Leaves], constants: int, carried: int | None, weights: set[int]
):
    """Until the carry is made of nothing more."""
    sources = list(sources)
    end = len(sources) if carried is None else constants + carried
    while True:
        outputs = _follow(body.jaxpr, sources, weights)
        state = sources[constants:end]
        joined = [_union_of_sources([a, b]) for a, b in zip(state, outputs, strict=False)]
        if joined == state:
            return outputs
        sources[constants:end] = joined
