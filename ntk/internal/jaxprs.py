"""Read and run JAX's programs (jaxprs). No other file knows the differences between JAX versions.

Up to JAX 0.10 a program with its constants, ``ClosedJaxpr``, is a separate type. From 0.11 on it is
the ``Jaxpr`` itself.
"""

import functools
import operator
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

# Operations that run one program on their unchanged operands.
CALLS = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint"}
    | {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
)


def interpret(
    program: Jaxpr | ClosedJaxpr,
    inputs: Sequence,
    rule: Callable[[JaxprEqn, list], list],
    *,
    consts: Sequence | None = None,
    constant: Callable[[Any], Any] = lambda x: x,
    enter: Container[str] = (),
) -> list:
    """Return the program's outputs if ``rule(eqn, inputs) -> outputs`` replaces its operations.

    Values can be arrays or facts about arrays. ``constant(x)`` is the value of a constant or
    literal ``x``. ``consts`` replaces the program's constants. Calls named in ``enter`` are
    interpreted too. The rule gets all other equations, including loops and branches.
    """
    jaxpr = program if isinstance(program, Jaxpr) else program.jaxpr
    consts = as_closed_jaxpr(program).consts if consts is None else consts
    values = dict(zip(jaxpr.constvars, map(constant, consts), strict=True))
    values.update(zip(jaxpr.invars, inputs, strict=True))

    def read(atoms):
        return [constant(v.val) if isinstance(v, Literal) else values[v] for v in atoms]

    for eqn in jaxpr.eqns:
        if eqn.primitive.name in enter:
            inner = inner_jaxprs(eqn)[0]
            outputs = interpret(inner, read(eqn.invars), rule, constant=constant, enter=enter)
        else:
            outputs = rule(eqn, read(eqn.invars))
        values.update(zip(eqn.outvars, outputs, strict=True))
    return read(jaxpr.outvars)


def settle_carry(
    body: Callable[[list], list], facts: list, constants: int, carried: int, join: Callable
) -> list:
    """Return facts about the outputs of ``body`` once the joined facts of its carry are stable."""
    while True:
        outputs = body(facts)
        carry = facts[constants : constants + carried]
        joined = [join(old, new) for old, new in zip(carry, outputs, strict=False)]
        if joined == carry:
            return outputs
        facts = [*facts[:constants], *joined, *facts[constants + carried :]]


def bind_scan(eqn: JaxprEqn, body: Callable, inputs: Sequence, more: Any = None) -> Any:
    """Run a ``scan`` with another body, which may also map a value ``more`` in every step.

    ``body(inputs) -> outputs``, or with ``more`` ``body(inputs, more) -> outputs, more``.
    """
    constants, carried = scan_operands(eqn)
    consts, state = list(inputs[:constants]), list(inputs[constants : constants + carried])

    def step(state, slices):
        xs, more = slices
        operands = [*consts, *state, *xs]
        outputs, more = body(operands, more) if more is not None else (body(operands), None)
        return list(outputs[:carried]), (list(outputs[carried:]), more)

    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    slices = list(inputs[constants + carried :]), more
    state, (stacked, collected) = lax.scan(step, state, slices, **options)
    return [*state, *stacked] if more is None else ([*state, *stacked], collected)


def as_closed_jaxpr(program: Jaxpr | ClosedJaxpr) -> ClosedJaxpr:
    """Return the program with its constants; a ``Jaxpr`` without constants gets none."""
    return program if isinstance(program, ClosedJaxpr) else ClosedJaxpr(program, [])


def inner_jaxprs(eqn: JaxprEqn) -> list[ClosedJaxpr]:
    """Return the programs among an equation's parameters: bodies of calls and loops, branches."""
    parameters = jax.tree.leaves(list(eqn.params.values()))
    return [as_closed_jaxpr(p) for p in parameters if isinstance(p, Jaxpr | ClosedJaxpr)]


def replace_equations(program: Any, rule: Callable[[JaxprEqn], JaxprEqn]) -> Any:
    """Return the program with ``rule`` of every equation, also in its inner programs."""
    replace = functools.partial(replace_equations, rule=rule)
    if isinstance(program, Jaxpr):
        inner = [eqn.replace(params=jax.tree.map(replace, eqn.params)) for eqn in program.eqns]
        return program.replace(eqns=list(map(rule, inner)))
    if isinstance(program, ClosedJaxpr):
        return program.replace(jaxpr=replace(program.jaxpr))
    return program


def all_equations(program: Jaxpr | ClosedJaxpr) -> Iterator[JaxprEqn]:
    """Yield the equations of a program, each followed by the equations of its inner programs."""
    for eqn in as_closed_jaxpr(program).jaxpr.eqns:
        yield eqn
        for body in inner_jaxprs(eqn):
            yield from all_equations(body)


def operation_names(program: Jaxpr | ClosedJaxpr) -> set[str]:
    """Return the names of all operations in a program and its inner programs."""
    return {eqn.primitive.name for eqn in all_equations(program)}


def needed(jaxpr: Jaxpr, live: list[bool]) -> list[tuple[JaxprEqn, list[bool]]]:
    """Return the equations behind the live outputs, and which of their outputs are used."""
    outputs = zip(jaxpr.outvars, live, strict=True)
    wanted = {v for v, used in outputs if used and not isinstance(v, Literal)}
    needed_equations = []
    for eqn in reversed(jaxpr.eqns):
        used = [v in wanted for v in eqn.outvars]
        if any(used):
            needed_equations.append((eqn, used))
            wanted.update(v for v in eqn.invars if not isinstance(v, Literal))
    return needed_equations[::-1]


def scan_operands(eqn: JaxprEqn) -> tuple[int, int]:
    """Return how many operands of a ``scan`` are constants, and how many are carried."""
    body = eqn.params["jaxpr"].jaxpr

    def axes(variables):
        return [len(getattr(variable.aval, "shape", ())) for variable in variables]

    # The parameters' names differ between versions. Scanned operands and stacked outputs have one
    # axis more outside the body than inside.
    scanned = sum(map(operator.gt, axes(eqn.invars), axes(body.invars)))
    stacked = sum(map(operator.gt, axes(eqn.outvars), axes(body.outvars)))
    carried = len(eqn.outvars) - stacked
    return len(eqn.invars) - scanned - carried, carried


def shape_and_dtype(variable: Var | Literal) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of a variable."""
    aval: Any = variable.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def bind(eqn: JaxprEqn, inputs: list, params: dict | None = None) -> list:
    """Return the equation's outputs for these inputs, and for other parameters if given."""
    params = eqn.params if params is None else params
    outputs = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(params))
    return outputs if eqn.primitive.multiple_results else [outputs]
