"""Read the structure of a lower loss from its program, and compute its constant parts once."""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend import core

from bilevel.contracts import Loss, Pytree
from bilevel.problem.problem import _FORM, Problem, lower_gradient, split_losses
from ntk.internal.derivative_rules import in_loops, may_be_lost
from ntk.internal.jaxprs import bind, inner_jaxprs, interpret, scan_operands, settle_carry


def is_quadratic(lower: Loss, w: Pytree, alpha: Pytree, batch: Pytree) -> bool:
    """Return whether ``lower`` is quadratic in ``w``, read from the program of its gradient.

    True is a proof: every step of that program is affine in ``w``. Kinks, rounding and stopped
    gradients give False, and so may an unusual form of a quadratic.
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
    """Return ``problem`` with custom derivatives kept inside loops, and the leaves that it uses."""
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
    """Propagate sets, integers with one bit per member: a value has the union over its inputs."""

    def union(_: core.JaxprEqn, sets: list[int]) -> int:
        return functools.reduce(operator.or_, sets, 0)

    enter = (*_CALLS, "custom_jvp_call", "custom_vjp_call")
    return _facts(program, inputs, _Facts(union, operator.or_, lambda sets, read: read, enter))


_CALLS = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2", "shard_map")
_OTHER = 2  # neither constant (0) nor affine (1)


def _degrees(program: core.ClosedJaxpr, inputs: list[int], coarsest: float) -> list[int]:
    """Bound each output's degree in ``w``; a cast to an eps above ``coarsest`` is not linear."""

    def solved(degrees: list[int], read: int) -> int:
        # The solution is linear in the right-hand side, as far as its program reads it.
        return max(degrees) if read else 0

    result = functools.partial(_result_degree, coarsest)
    return _facts(program, inputs, _Facts(result, max, solved, _CALLS))


class _Facts(NamedTuple):
    """How integers, facts about values, pass through a program. 0 says nothing about a value."""

    result: Callable[[core.JaxprEqn, list[int]], int]  # of an operation, from facts of its inputs
    join: Callable[[int, int], int]  # a fact that holds for both of two values
    solved: Callable[[list[int], int], int]  # of a linear solve, from the one of its program
    enter: tuple[str, ...]  # calls that are interpreted


def _facts(program: core.ClosedJaxpr, inputs: list[int], kind: _Facts) -> list[int]:
    """Return the facts about a program's outputs. Arrays without entries have 0."""

    def rule(equation: core.JaxprEqn, facts: list[int]) -> list[int]:
        outputs = (
            _output_facts(equation, facts, kind) if any(facts) else [0] * len(equation.outvars)
        )
        return _without_empty(equation.outvars, outputs)

    inputs = _without_empty(program.jaxpr.invars, inputs)
    return interpret(program, inputs, rule, constant=lambda _: 0, enter=kind.enter)


def _without_empty(variables: list[core.Var], facts: list[int]) -> list[int]:
    shapes = (getattr(v.aval, "shape", ()) for v in variables)
    return [0 if 0 in shape else x for shape, x in zip(shapes, facts, strict=True)]


def _output_facts(equation: core.JaxprEqn, inputs: list[int], kind: _Facts) -> list[int]:
    name, params, count = equation.primitive.name, equation.params, len(equation.outvars)
    if name == "cond" and not inputs[0]:
        branches = [_facts(branch, inputs[1:], kind) for branch in params["branches"]]
        return [functools.reduce(kind.join, facts) for facts in zip(*branches, strict=True)]
    if name == "scan":
        body = functools.partial(_facts, params["jaxpr"], kind=kind)
        return settle_carry(body, inputs, *scan_operands(equation), kind.join)
    if name == "custom_linear_solve":
        system = sum(params["const_lengths"])
        if not any(inputs[:system]):
            solve, constants = params["jaxprs"].solve, params["const_lengths"].solve
            read = _facts(solve, [0] * constants + inputs[system:], kind)
            return [kind.solved(inputs, fact) for fact in read[:count]]
    return [kind.result(equation, inputs)] * count


def _result_degree(coarsest: float, equation: core.JaxprEqn, degrees: list[int]) -> int:
    name = equation.primitive.name
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


def hoist_constants(lower: Loss, w: Pytree, alpha: Pytree, batch: Pytree) -> Loss:
    """Return ``lower`` at this ``alpha`` and ``batch``, with constant parts computed already.

    Functions inside :func:`jax.checkpoint` or a custom rule are left unchanged.
    """
    trace = jax.make_jaxpr(lambda w: lower(w, alpha, batch))
    run = _without_the_known(trace(w), [_MOVING] * len(jax.tree.leaves(w)))[1]
    own = _types(w)

    def loss(w, _, __):
        # Line searches can widen the weights, which needs another program.
        return run(jax.tree.leaves(w))[0] if _types(w) == own else lower(w, alpha, batch)

    return loss


def _types(w: Pytree) -> list:
    return [jax.numpy.result_type(x) for x in jax.tree.leaves(w)]


_MOVING = object()  # stands for a value that is not known yet


def _without_the_known(
    closed: core.ClosedJaxpr, inputs: list
) -> tuple[list, Callable[[list], list]]:
    """Return the outputs that do not need moving inputs, and a function for all outputs."""
    results: list[tuple] = []  # of each equation, in order: the known outputs or a function

    def known(equation, values):
        if all(value is not _MOVING for value in values):
            outputs = bind(equation, values)
            results.append((outputs, None))
        elif equation.primitive.name in ("jit", "pjit"):
            outputs, inner = _without_the_known(inner_jaxprs(equation)[0], values)
            results.append((outputs, inner))
        else:
            outputs = [_MOVING] * len(equation.outvars)
            results.append((outputs, functools.partial(bind, equation)))
        return outputs

    outputs = interpret(closed, inputs, known)

    def run(inputs):
        steps = iter(results)

        def again(_, values):
            outputs, step = next(steps)
            return outputs if step is None else step(values)

        return interpret(closed, inputs, again)

    return outputs, run
