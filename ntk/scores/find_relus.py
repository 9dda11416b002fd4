"""Find ReLUs in any form: ``jax.nn.relu``, ``maximum(x, 0)``, ``where(x > 0, x, 0)``, ...

``mark_relus(fn)`` computes ``fn`` with every ReLU as a call named "relu" of one argument. It
interprets the program of ``fn`` during tracing, when concrete values are constants. A ReLU of a
constant is also a ReLU, because the same network can have it traced, as an argument of a branch.

==============================================  ================================================
``max(x, 0)``, also as a clip                   a ReLU
``where(x > 0, x, 0)`` and ``x * (x > 0)``      a ReLU, with any of the four comparisons
``min(ReLU, c)``, as ReLU6                      a second kink, at c
``max(0, variance)``, of squares and sums         not a ReLU: normalisations guard against rounding
==============================================  ================================================
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from ntk.internal.compile_cache import fresh
from ntk.internal.jaxprs import CALLS, bind, inner_jaxprs, interpret, scan_operands

_COMPARISONS = {"gt": True, "ge": True, "lt": False, "le": False}
_KEEP_SQUARES = {"reduce_sum", "reshape", "broadcast_in_dim", "convert_element_type", "squeeze"}
_KEEP_SQUARES |= {"add", "sub", "div", "mul", "psum", "transpose", "stop_gradient", "copy", "max"}


def is_relu(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a ReLU marked by :func:`mark_relus`."""
    return eqn.params.get("name") == "relu" and len(eqn.invars) == 1


def mark_relus(fn: Callable) -> Callable:
    """Return the same function of pytrees of arrays with marked ReLUs, for use while tracing."""

    def marked(*args):
        closed, shapes = jax.make_jaxpr(fresh(fn), return_shape=True)(*args)
        outputs = _ReluMarking().run(closed, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return marked


@jax.jit
def relu(x):
    """Return ``max(x, 0)``. The name of this compiled function marks a ReLU."""
    return jnp.maximum(x, 0)


class _ReluMarking:
    """Facts about the values seen so far, by identity; ``alive`` keeps the values alive."""

    def __init__(self):
        self.tests = {}  # mask -> x and whether the mask is of x > 0
        self.rectified, self.squares, self.alive = set(), set(), []

    def run(self, closed: ClosedJaxpr, args) -> list:
        def rule(eqn, inputs):
            outputs = self.step(eqn, inputs)
            self.alive += [*inputs, *outputs]
            return outputs

        return interpret(closed, args, rule, enter=CALLS)

    def step(self, eqn: JaxprEqn, inputs: list) -> list:
        name = eqn.primitive.name
        x = self.relu_of(name, inputs, eqn.outvars)
        if x is not None and jnp.issubdtype(jnp.result_type(x), jnp.floating):
            y = relu(x)
            self.rectified.add(id(y))
            return [y]
        if name == "min":
            for y, c in (inputs, inputs[::-1]):
                if id(y) in self.rectified and (_constant_value(c) or 0) > 0:
                    return [jnp.where(relu(y - c) > 0, jnp.asarray(c, y.dtype), y)]
        constant = not any(isinstance(x, jax.core.Tracer) for x in inputs)
        if constant and not inner_jaxprs(eqn):
            with jax.ensure_compile_time_eval():
                outputs = bind(eqn, inputs)
        else:
            outputs = bind(eqn, inputs, self.inside(eqn, inputs))
        self.note(eqn, inputs, outputs[0] if outputs else None)
        return outputs

    def relu_of(self, name: str, inputs: list, outputs: list):
        """Return the x if this operation is a ReLU of x, otherwise None."""
        if name == "max":
            for x, zero in (inputs, inputs[::-1]):
                if _constant_value(zero) == 0 and jnp.shape(x) == outputs[0].aval.shape:
                    return x if self.squares.isdisjoint(map(id, inputs)) else None
        if name == "select_n" and len(inputs) == 3 and id(inputs[0]) in self.tests:
            x, positive = self.tests[id(inputs[0])]
            off, on = inputs[1:] if positive else inputs[:0:-1]
            return x if on is x and _constant_value(off) == 0 else None
        if name == "mul":
            for mask, x in (inputs, inputs[::-1]):
                tested, positive = self.tests.get(id(mask), (None, False))
                if tested is x and positive:
                    return x
        return None

    def note(self, eqn: JaxprEqn, inputs: list, output) -> None:
        """Record facts about the output."""
        name = eqn.primitive.name
        if name in _COMPARISONS:
            for x, zero in (inputs, inputs[::-1]):
                if _constant_value(zero) == 0 and jnp.shape(x) == output.shape:
                    self.tests[id(output)] = x, _COMPARISONS[name] is (x is inputs[0])
                    break
        if name == "convert_element_type" and id(inputs[0]) in self.tests:
            self.tests[id(output)] = self.tests[id(inputs[0])]
        square = name == "square" or (name == "integer_pow" and eqn.params["y"] % 2 == 0)
        square |= name == "mul" and inputs[0] is inputs[1]
        if name in _KEEP_SQUARES and not self.squares.isdisjoint(map(id, inputs)):
            traced = [id(x) for x in inputs if isinstance(x, jax.core.Tracer)]
            square |= self.squares.issuperset(traced)
        if square:
            self.squares.add(id(output))

    def inside(self, eqn: JaxprEqn, inputs: list) -> dict:
        """Return the parameters, with marked programs of branches and loops."""
        known_args = inputs[1:] if eqn.primitive.name == "cond" else []
        if eqn.primitive.name == "scan":
            known_args = inputs[: scan_operands(eqn)[0]]

        def marked(parameter):
            if not isinstance(parameter, ClosedJaxpr):
                return parameter
            like = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in parameter.in_avals]
            return jax.make_jaxpr(lambda *args: self.within(parameter, known_args, args))(*like)

        return jax.tree.map(marked, eqn.params)

    def within(self, program: ClosedJaxpr, known_args: list, args) -> list:
        """Return the program's outputs; facts about ``known_args``, the first ones, carry over."""
        own = {
            id(x): arg if isinstance(x, jax.core.Tracer) else x
            for x, arg in zip(known_args, args, strict=False)
        }
        inner = _ReluMarking()
        inner.squares, inner.rectified = (
            {id(own[x]) for x in facts & own.keys()} for facts in (self.squares, self.rectified)
        )
        inner.tests = {
            id(own[mask]): (own[id(x)], positive)
            for mask, (x, positive) in self.tests.items()
            if mask in own and id(x) in own
        }
        return inner.run(program, [*(own[id(x)] for x in known_args), *args[len(known_args) :]])


def _constant_value(x) -> float | None:
    """Return the value of a constant with equal entries, otherwise None."""
    if isinstance(x, jax.core.Tracer) or not np.size(x):
        return None
    flat = np.ravel(x)
    return float(flat[0]) if (flat == flat[0]).all() else None
