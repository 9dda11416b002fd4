"""Read from the program of a lower loss whether it is quadratic and depends on ``alpha``."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core

from bilevel.contracts import Loss, Pytree
from bilevel.problem.hoist import _types
from bilevel.problem.problem import _FORM, Problem, lower_gradient, split_losses
from ntk.internal.derivative_rules import in_loops, may_be_lost
from ntk.internal.jaxprs import interpret, scan_operands, settle_carry


def is_quadratic(lower: Loss, w: Pytree, alpha: Pytree, batch: Pytree) -> bool:
    """Return whether ``lower`` is quadratic in ``w``, read from the program of its gradient.

    True is a proof: every step of that program is affine in ``w``. Kinks, rounding and stopped
    gradients give False, and so may an unusual form of a quadratic. Tracing decides; running is
    free.
    """
    closed = jax.make_jaxpr(lower_gradient(lower, alpha, batch))(w)
    finest = min(map(_eps, _types(w)), default=0.0)
    degrees = _degrees(closed, [1] * len(closed.jaxpr.invars), finest)
    return max(degrees, default=0) <= 1


def depends_on_alpha(loss: Loss, w: Pytree, alpha: Pytree, batch: Pytree) -> bool:
    """Return whether ``loss`` depends on ``alpha``, read from its program."""
    return any(leaves_used_by(loss, w, alpha, batch))


def leaves_used_by(loss: Loss, w: Pytree, alpha: Pytree, batch: Pytree) -> list[bool]:
    """Return for each leaf of ``alpha`` whether ``loss`` depends on it, read from its program."""
    return _inputs_read(jax.make_jaxpr(lambda alpha: loss(w, alpha, batch))(alpha))


def with_rules(
    problem: Problem, w: Pytree, alpha: Pytree, batch: Pytree
) -> tuple[Problem, list[bool]]:
    """Return ``problem`` with custom derivatives kept inside loops, and the leaves that it uses.

    Second derivatives would lose these rules: :mod:`ntk.internal.derivative_rules`.
    """
    loss = split_losses(problem).lower
    closed = jax.make_jaxpr(lambda alpha: loss(w, alpha, batch)[0])(alpha)
    if may_be_lost(closed):
        form = (getattr(problem, name, False) for name in _FORM)
        problem = Problem(in_loops(problem.lower), problem.outer, *form)
    return problem, _inputs_read(closed)


def check_depends_on_alpha(alpha: Pytree, needed: list[bool]) -> None:
    """Raise if a leaf of ``alpha`` is ``needed`` and nothing depends on it."""
    if any(needed):
        raise ValueError(
            f"{leaf_names(alpha, needed)}: expected to enter the lower loss, the outer loss or the "
            "solver, got one that enters none of them: its hypergradient would be 0."
        )


def leaf_names(alpha: Pytree, chosen: list[bool]) -> str:
    """Return the paths of the chosen leaves, or ``alpha`` for all leaves."""
    if all(chosen):
        return "alpha"
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(alpha)]
    return ", ".join(
        f"alpha{path}" for path, is_chosen in zip(paths, chosen, strict=True) if is_chosen
    )


def outputs_reading(function: Callable, argument: Pytree) -> list[bool]:
    """Return for each leaf of ``function(argument)`` whether it depends on the argument."""
    closed = jax.make_jaxpr(function)(argument)
    return [bool(read) for read in _sources(closed, [1] * len(closed.jaxpr.invars))]


def _inputs_read(closed: core.ClosedJaxpr) -> list[bool]:
    count = len(closed.jaxpr.invars)
    outputs = _sources(closed, [1 << i for i in range(count)])
    return [any(read >> i & 1 for read in outputs) for i in range(count)]


def _sources(program: core.ClosedJaxpr, inputs: list[int]) -> list[int]:
    """Propagate sets through a program: a value's set is the union over the values it depends on.

    A set is an integer with one bit per member, so one pass serves all members.
    """
    inputs = _without_empty(program.jaxpr.invars, inputs)
    return interpret(program, inputs, _equation_sources, constant=lambda _: 0, enter=_READ)


def _nothing_for_empty(rule: Callable) -> Callable:
    """Return ``rule`` with 0 for arrays without entries."""

    def facts(equation: core.JaxprEqn, inputs: list[int]) -> list[int]:
        outputs = rule(equation, inputs) if any(inputs) else [0] * len(equation.outvars)
        return _without_empty(equation.outvars, outputs)

    return facts


def _without_empty(variables: list[core.Var], facts: list[int]) -> list[int]:
    shapes = (getattr(v.aval, "shape", ()) for v in variables)
    return [0 if 0 in shape else x for shape, x in zip(shapes, facts, strict=True)]


@_nothing_for_empty
def _equation_sources(equation: core.JaxprEqn, inputs: list[int]) -> list[int]:
    name, params, count = equation.primitive.name, equation.params, len(equation.outvars)
    if name == "cond" and not inputs[0]:
        branches = [_sources(branch, inputs[1:]) for branch in params["branches"]]
        return [functools.reduce(operator.or_, sets) for sets in zip(*branches, strict=True)]
    if name == "custom_linear_solve":
        system = sum(params["const_lengths"])
        if not any(inputs[:system]):
            solve, constants = params["jaxprs"].solve, params["const_lengths"].solve
            return _sources(solve, [0] * constants + inputs[system:])[:count]
    if name == "scan":
        body = functools.partial(_sources, params["jaxpr"])
        return settle_carry(body, inputs, *scan_operands(equation), operator.or_)
    return [functools.reduce(operator.or_, inputs, 0)] * count


_OTHER = 2  # neither constant (0) nor affine (1)


_CALLS = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2", "shard_map")


_READ = (*_CALLS, "custom_jvp_call", "custom_vjp_call")


def _degrees(program: core.ClosedJaxpr, inputs: list[int], coarsest: float) -> list[int]:
    """Return an upper bound on the degree in ``w`` of each output, from the degrees of the inputs.

    A cast to a type with an eps above ``coarsest`` is rounding, and not linear.
    """
    rule = _nothing_for_empty(functools.partial(_output_degrees, coarsest))
    inputs = _without_empty(program.jaxpr.invars, inputs)
    return interpret(program, inputs, rule, constant=lambda _: 0, enter=_CALLS)


def _output_degrees(coarsest: float, equation: core.JaxprEqn, degrees: list[int]) -> list[int]:
    """Return the degrees of one operation's results."""
    name, params = equation.primitive.name, equation.params
    count = len(equation.outvars)
    if name == "scan":
        body = functools.partial(_degrees, params["jaxpr"], coarsest=coarsest)
        return settle_carry(body, degrees, *scan_operands(equation), max)
    if name == "custom_linear_solve":
        system = sum(params["const_lengths"])
        if any(degrees[:system]):
            return [_OTHER] * count
        # The solution is linear in the right-hand side, as far as its program reads it.
        solve, constants = params["jaxprs"].solve, params["const_lengths"].solve
        read = _degrees(solve, [0] * constants + degrees[system:], coarsest)
        return [max(degrees) if reads else 0 for reads in read[:count]]
    if name == "cond" and degrees[0] == 0:
        branches = [_degrees(branch, degrees[1:], coarsest) for branch in params["branches"]]
        return [max(of_branches) for of_branches in zip(*branches, strict=True)]
    return [_result_degree(equation, name, degrees, coarsest)] * count


def _result_degree(equation: core.JaxprEqn, name: str, degrees: list[int], coarsest: float) -> int:
    if name in _LINEAR:
        return max(degrees)
    if name in _PRODUCTS:
        return min(sum(degrees), _OTHER)
    # Linear in some operands if the others (a predicate, indices, a divisor) are constant.
    free = degrees[_LINEAR_IN[name]] if name in _LINEAR_IN else []
    if sum(free) == sum(degrees):
        return max(free, default=0)
    if name == "convert_element_type":
        new = equation.params["new_dtype"]
        if jax.numpy.issubdtype(new, jax.numpy.floating) and _eps(new) <= coarsest:
            return max(degrees)
    return _OTHER


def _eps(dtype: Any) -> float:
    return float(jax.numpy.finfo(dtype).eps)


_PRODUCTS = ("mul", "dot_general", "conv_general_dilated")


_LINEAR = (
    *("add", "add_any", "sub", "neg", "reduce_sum", "cumsum", "psum", "psum_invariant"),
    *("broadcast_in_dim", "reshape", "squeeze", "transpose", "rev", "slice", "split", "pad"),
    *("concatenate", "stack", "unstack", "copy", "pvary", "pcast", "sharding_constraint"),
    "optimization_barrier",
)


_LINEAR_IN = {
    "div": slice(0, 1),
    "select_n": slice(1, None),
    "gather": slice(0, 1),
    "dynamic_slice": slice(0, 1),
    "dynamic_update_slice": slice(0, 2),
    "scatter-add": slice(0, None, 2),  # the operand and the updates, not the indices
    "scatter": slice(0, None, 2),
    "triangular_solve": slice(1, 2),
}
