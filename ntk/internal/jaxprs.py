"""The equations of JAX's programs (jaxprs): the only file that knows where JAX versions differ.

Up to JAX 0.10 a program with its constants, ``ClosedJaxpr``, is a type of its own; from 0.11 on it
is the ``Jaxpr`` itself. How many of a scan's operands are constants and how many are carried has
other names in each version, and follows from the shapes in all of them.
"""

from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

# Operations that run one program on their operands as they are.
CALLS = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint"}
    | {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
)


def as_closed_jaxpr(program: Jaxpr | ClosedJaxpr) -> ClosedJaxpr:
    """The program with its constants; one that comes without has none."""
    return program if isinstance(program, ClosedJaxpr) else ClosedJaxpr(program, [])


def inner_jaxprs(eqn: JaxprEqn) -> list[ClosedJaxpr]:
    """The programs among an equation's parameters: bodies of calls and loops, branches."""
    bodies = []
    for parameter in eqn.params.values():
        for value in parameter if isinstance(parameter, tuple | list) else [parameter]:
            if isinstance(value, Jaxpr | ClosedJaxpr):
                bodies.append(as_closed_jaxpr(value))
    return bodies


def operation_names(program: ClosedJaxpr) -> set[str]:
    """Return the names of all operations in a program, those of inner programs included."""
    inner = [operation_names(body) for eqn in program.jaxpr.eqns for body in inner_jaxprs(eqn)]
    return set().union(*inner, (eqn.primitive.name for eqn in program.jaxpr.eqns))


def needed(jaxpr: Jaxpr, live: list[bool]) -> list[tuple[JaxprEqn, list[bool]]]:
    """The equations behind the live outputs, with which of their own outputs are used."""
    wanted = {v for v, a in zip(jaxpr.outvars, live, strict=True) if a and _variable(v)}
    needed_equations = []
    for eqn in reversed(jaxpr.eqns):
        used = [v in wanted for v in eqn.outvars]
        if any(used):
            needed_equations.append((eqn, used))
            wanted.update(filter(_variable, eqn.invars))
    return needed_equations[::-1]


def _variable(v) -> bool:
    return not isinstance(v, Literal)


def scan_operands(eqn: JaxprEqn) -> tuple[int, int]:
    """How many operands of a ``scan`` its body gets unchanged, and how many it carries.

    What it scans over has an axis more outside the body than inside; so has what it stacks.
    """
    body = eqn.params["jaxpr"].jaxpr
    scanned, stacked = (
        sum(
            _number_of_axes(out) > _number_of_axes(ins)
            for out, ins in zip(outer, inner, strict=True)
        )
        for outer, inner in ((eqn.invars, body.invars), (eqn.outvars, body.outvars))
    )
    carried = len(eqn.outvars) - stacked
    return len(eqn.invars) - scanned - carried, carried


def shape_and_dtype(variable: Var | Literal) -> jax.ShapeDtypeStruct:
    """The shape and the type of a variable."""
    aval: Any = variable.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _number_of_axes(variable: Var | Literal) -> int:
    return len(getattr(variable.aval, "shape", ()))


def bind(eqn: JaxprEqn, inputs: list, params: dict | None = None) -> list:
    """The equation's outputs for these inputs, and for other parameters if given."""
    params = eqn.params if params is None else params
    outputs = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(params))
    return outputs if eqn.primitive.multiple_results else [outputs]
