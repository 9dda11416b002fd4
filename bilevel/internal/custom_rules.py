"""Find custom derivative rules in a loss, and second derivatives that are exact with them.

The reverse pass of a training step multiplies a vector ``v`` by the transposed Jacobian ``J'`` of
the gradient ``g = grad_w loss``. Three orders of differentiation give that product:

    forward over reverse    J v,  one forward derivative of g: ``J' v`` if J is symmetric
    reverse over forward    grad (v . g) with ``v . g`` from a forward derivative of the loss
    reverse over reverse    grad (v . g) with g from a reverse derivative of the loss

J is a symmetric Hessian if all derivative rules in the loss are true derivatives. A user's
``jax.custom_jvp`` or ``jax.custom_vjp`` may not be one (gradient reversal, a straight-through
estimator, a clipped gradient). Then reverse over forward is exact with ``custom_jvp``, and reverse
over reverse with both. ``jax.lax.stop_gradient`` keeps J symmetric.
"""

import contextlib
import os
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn

import ntk
from ntk.internal.jaxprs import all_equations, operation_names

FORWARD_OVER_REVERSE = "forward over reverse"
REVERSE_OVER_FORWARD = "reverse over forward"
REVERSE_OVER_REVERSE = "reverse over reverse"

_RULE_NAMES = ("custom_jvp", "custom_vjp", "call_hi_primitive")
_CALLS = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")

# Folders where all rules are true derivatives: JAX's functions, our kernels, layers and spaces.
# (The rules of `bilevel/solvers` are not among them: they are true at exact solutions only.)
_JAX = os.path.dirname(jax.__file__)
_OURS = os.path.dirname(os.path.dirname(__file__))
_NETS, _SPACES = os.path.join(_OURS, "nets"), os.path.join(_OURS, "spaces")
_FOLDERS = _JAX, os.path.dirname(ntk.__file__), _NETS, _SPACES
_TRUE = tuple(os.path.join(folder, "") for folder in _FOLDERS)
# JAX's code for rules in general, which is behind every rule.
_MACHINERY = tuple(
    os.path.join(_JAX, "_src", name)
    for name in ("custom_derivatives.py", "linear_util.py", "api_util.py", "interpreters" + os.sep)
)


def exact_order(program: ClosedJaxpr) -> str:
    """Return the cheapest order of second derivatives that is exact for this loss."""
    kinds = {
        eqn.primitive.name
        for eqn in all_equations(program)
        if eqn.primitive.name.startswith(_RULE_NAMES) and not _is_true(eqn)
    }
    if any(name != "custom_jvp_call" for name in kinds):
        return REVERSE_OVER_REVERSE
    return REVERSE_OVER_FORWARD if kinds else FORWARD_OVER_REVERSE


def linearize_custom_rules(function: Callable, x: Any) -> tuple[Any, Callable]:
    """Return ``jax.linearize(function, x)``, also if its rules have reverse derivatives only.

    The transpose of the reverse derivative then replaces the forward derivative.
    """
    value, push = jax.linearize(function, x)
    if not operation_names(jax.make_jaxpr(push)(x)) & _NO_FORWARD_RULE:
        return value, push
    value, pull = jax.vjp(function, x)
    return value, lambda dot: jax.linear_transpose(pull, value)((dot,))[0]


# The operations by which JAX marks a missing forward derivative in a linear program.
_NO_FORWARD_RULE = {"custom_lin", "call_hi_primitive_linearized"}
NO_FORWARD_RULE = "forward-mode autodiff (jvp) to a custom_vjp"
NO_REVERSE_RULE = "Reverse-mode differentiation does not work for lax.while_loop"


@contextlib.contextmanager
def second_derivatives(own_rules: Callable[[], bool]) -> Iterator[None]:
    """Name the remedies if a second derivative does not exist."""
    try:
        yield
    except (ValueError, TypeError) as error:
        if NO_FORWARD_RULE not in str(error) and NO_REVERSE_RULE not in str(error):
            raise
        if own_rules():
            raise ValueError(
                "lower: expected a loss with second derivatives, got one with a derivative rule "
                "(custom_vjp) that cannot be differentiated again, such as diffrax's default "
                "adjoint; use adjoint=diffrax.DirectAdjoint() there, or bilevel.f2sa(step_size), "
                "which takes first derivatives only."
            ) from error
        raise ValueError(
            "solver: expected steps that reverse mode can go back through, got a loop that ends by "
            "a test (the line search of optax.lbfgs, or one of a loss); implicit(lbfgs()), "
            'mode="forward", backprop=0 and lax.scan do without.'
        ) from error


def _is_true(eqn: JaxprEqn) -> bool:
    """Return whether the rule is known to be true: all its code is in the folders above.

    JAX's own ``custom_vjp`` rules do not count: ``jax.nn.scaled_matmul`` rounds.
    """
    name = eqn.primitive.name
    if name not in _CALLS:
        return False
    folders = _TRUE if name == "custom_jvp_call" else _TRUE[1:]
    files = set(_files([eqn.params.get(key) for key in _RULES], set()))
    own = {file for file in files if not file.startswith(_MACHINERY)}
    return bool(own) and all(file.startswith(folders) for file in own)


_RULES = ("jvp_jaxpr_fun", "jvp_jaxpr_thunk", "fwd_jaxpr_thunk", "bwd")
_PARTS = ("f", "transforms", "f_transformed", "func", "args", "fun", "jvp", "fwd", "bwd")
_WRAPPERS = ("__func__", "__wrapped__")
_UNKNOWN = ""  # stands for a file


def _files(rule: Any, seen: set[int]) -> Iterator[str]:
    """Yield the files of all functions in a rule: closures, partial functions, JAX's wrappers."""
    if id(rule) in seen:
        return
    seen.add(id(rule))
    parts: list[Any] = list(rule) if isinstance(rule, tuple | list) else []
    parts += [getattr(rule, name) for name in (*_PARTS, *_WRAPPERS) if hasattr(rule, name)]
    if isinstance(rule, types.FunctionType):
        yield rule.__code__.co_filename
        for cell in rule.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                parts.append(cell.cell_contents)
    elif callable(rule) and not (parts or isinstance(rule, type | types.BuiltinFunctionType)):
        yield _UNKNOWN
    for part in parts:
        yield from _files(part, seen)
