"""Evaluate a network with a visit at chosen operations, such as its ReLUs.

The network's jaxpr is evaluated equation by equation, as far as the outputs depend on it. Loops
(``scan``) and branches (``cond``, ``switch``) are entered. The total of the visits is carried
through them, and only the branch taken adds to it. A call without a chosen operation is unchanged
and keeps its derivative rule. A call that is entered loses its custom derivative rule.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from ntk.internal.compile_cache import fresh
from ntk.internal.jaxprs import CALLS, bind, inner_jaxprs, needed, scan_operands


def visit_chosen_operations(
    fn: Callable,
    is_chosen: Callable[[JaxprEqn], bool],
    visit: Callable[..., tuple[list, Any]],
    total: Any,
    params: Any,
    x: jax.Array,
    what: str,
) -> tuple[Any, Any]:
    """Return ``fn(params, x)``, and the ``total`` of the visits at chosen operations.

    ``visit(eqn, other, inputs, outputs, total) -> (outputs, total)`` can replace the outputs by
    arrays like them, and add to the total. ``other`` is the same operation for one sample more: an
    axis of another length is the samples'. ``what`` names the operations in errors. A chosen
    operation in a loop other than ``scan``, or none at all, raises ``ValueError``.
    """
    closed, shapes = jax.make_jaxpr(fresh(fn), return_shape=True)(params, x)
    longer = jax.ShapeDtypeStruct((len(x) + 1, *x.shape[1:]), x.dtype)
    try:
        other = jax.make_jaxpr(fresh(fn))(params, longer)
    except (TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            "apply: expected a function of any number of samples, got an error for one more: "
            f"{reason}"
        ) from error
    live = [True] * len(closed.jaxpr.outvars)
    if not _reaches(is_chosen, closed.jaxpr, live):
        raise ValueError(f"apply: expected logits that depend on a {what}, got none on the way.")

    def run(closed: ClosedJaxpr, other: ClosedJaxpr, live: list[bool], args, total):
        """Return the outputs, with None for outputs that are not live, and the total."""
        jaxpr = closed.jaxpr
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True))

        def value(v):
            return v.val if isinstance(v, Literal) else values[v]

        for (eqn, used), paired in _paired(needed(jaxpr, live), needed(other.jaxpr, live)):
            outputs, total = evaluate(eqn, paired, used, [value(v) for v in eqn.invars], total)
            values.update(zip(eqn.outvars, outputs, strict=True))
        return [value(v) if a else None for v, a in zip(jaxpr.outvars, live, strict=True)], total

    def evaluate(eqn: JaxprEqn, other: JaxprEqn, used: list[bool], inputs: list, total):
        if is_chosen(eqn):
            return visit(eqn, other, inputs, bind(eqn, inputs), total)
        pairs = zip(_live_inner_jaxprs(eqn, used), inner_jaxprs(other), strict=True)
        inside = [(inner, reference, alive) for (inner, alive), reference in pairs]
        if not any(_reaches(is_chosen, inner.jaxpr, alive) for inner, _, alive in inside):
            return bind(eqn, inputs), total
        name = eqn.primitive.name
        if name in CALLS:
            return run(*inside[0], inputs, total)
        if name == "cond":
            branches = [branch(*programs) for programs in inside]
            return jax.lax.switch(inputs[0], branches, total, *inputs[1:])
        if name == "scan":
            return scan(eqn, *inside[0], inputs, total)
        raise ValueError(f"apply: expected no {what} inside `{name}`, got one.")

    def branch(inner: ClosedJaxpr, reference: ClosedJaxpr, live: list[bool]):
        def run_branch(total, *operands):
            return run(inner, reference, live, operands, total)

        # Without checkpoints a derivative would store the residuals of all branches.
        return jax.checkpoint(run_branch, prevent_cse=False)

    def scan(eqn: JaxprEqn, inner: ClosedJaxpr, reference, live: list[bool], inputs: list, total):
        constants, carried = scan_operands(eqn)
        consts, inputs = inputs[:constants], inputs[constants:]
        state, xs = inputs[:carried], inputs[carried:]

        def body(carry, x):
            state, total = carry
            outputs, total = run(inner, reference, live, [*consts, *state, *x], total)
            return (outputs[:carried], total), outputs[carried:]

        options = {k: eqn.params[k] for k in ("length", "reverse", "unroll")}
        (state, total), stacked = jax.lax.scan(body, (state, total), xs, **options)
        return [*state, *stacked], total

    outputs, total = run(closed, other, live, jax.tree.leaves((params, x)), total)
    return jax.tree.unflatten(jax.tree.structure(shapes), outputs), total


def _paired(needed: list, others: list) -> list:
    """Return each operation with the same operation of the other program."""
    names = [[eqn.primitive.name for eqn, _ in equations] for equations in (needed, others)]
    if names[0] != names[1]:
        raise ValueError(
            "apply: expected the same operations for any number of samples, got others for one "
            "more."
        )
    return [(one, eqn) for one, (eqn, _) in zip(needed, others, strict=True)]


def _reaches(is_chosen, jaxpr: Jaxpr, live: list[bool]) -> bool:
    """Return whether a live output depends on a chosen operation."""
    for eqn, used in needed(jaxpr, live):
        inside = _live_inner_jaxprs(eqn, used)
        if is_chosen(eqn) or any(_reaches(is_chosen, inner.jaxpr, a) for inner, a in inside):
            return True
    return False


def _live_inner_jaxprs(eqn: JaxprEqn, used: list[bool]) -> list[tuple[ClosedJaxpr, list[bool]]]:
    """Return the jaxprs in an equation's parameters; loops need all of their outputs."""
    direct = eqn.primitive.name in CALLS or eqn.primitive.name == "cond"
    return [
        (inner, used if direct else [True] * len(inner.jaxpr.outvars))
        for inner in inner_jaxprs(eqn)
    ]
