"""Find the weights among a network's parameters: leaves that multiply functions of the input.

A bias can have two axes, and a network a single input, so shapes do not distinguish the two. We
read the program instead. A weight enters a matrix product, a convolution or a table look-up with
data on the other side, alone or combined with other leaves (scaled, normalised, low-rank product).
"""

from collections.abc import Callable, Iterable
from typing import Any

import chex
import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from ntk.internal.compile_cache import fresh
from ntk.internal.jaxprs import inner_jaxprs, interpret, scan_operands, settle_carry

Leaves = frozenset[int] | None  # leaves that a value depends on; None: it depends on the input

_PRODUCTS = {"dot_general", "conv_general_dilated", "gather"}


def multiplied(apply: Callable, params: Any, x: chex.Array) -> set[int]:
    """Return the indices of the leaves of ``params`` that are weights in ``apply(params, x)``."""
    weights: set[int] = set()

    def follow(program: ClosedJaxpr, inputs: list[Leaves]) -> list[Leaves]:
        return interpret(program, inputs, rule, constant=lambda _: frozenset())

    def rule(eqn: JaxprEqn, sources: list[Leaves]) -> list[Leaves]:
        name = eqn.primitive.name
        if name in _PRODUCTS and None in sources:
            weights.update(*(s or () for s in (sources[:1] if name == "gather" else sources)))
        if name == "while":
            body, sources = eqn.params["body_jaxpr"], sources[eqn.params["cond_nconsts"] :]
            constants = eqn.params["body_nconsts"]
            return follow_loop(body, sources, constants, len(sources) - constants)
        if name == "scan":
            return follow_loop(eqn.params["jaxpr"], sources, *scan_operands(eqn))
        if name == "cond":
            branches = [follow(branch, sources[1:]) for branch in eqn.params["branches"]]
            return [_union([sources[0], *leaves]) for leaves in zip(*branches, strict=True)]
        for inner in inner_jaxprs(eqn):
            if len(inner.jaxpr.invars) == len(sources):
                return follow(inner, sources)
        return [_union(sources)] * len(eqn.outvars)

    def follow_loop(body, sources, constants, carried):
        def follow_body(facts):
            return follow(body, facts)

        return settle_carry(follow_body, sources, constants, carried, lambda *pair: _union(pair))

    leaves = [frozenset([i]) for i in range(len(jax.tree.leaves(params)))]
    follow(jax.make_jaxpr(fresh(apply))(params, x), [*leaves, None])
    return weights


def _union(sources: Iterable[Leaves]) -> Leaves:
    sources = list(sources)
    return None if None in sources else frozenset().union(*sources)  # type: ignore[arg-type]
