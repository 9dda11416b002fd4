"""ReLUs however they are written: ``jax.nn.relu``, ``maximum(x, 0)``, ``where(x > 0, x, 0)``, ...

``marked(fn)`` computes what ``fn`` does, with every ReLU as a call named "relu" of one argument.
It interprets the program of ``fn`` while that is traced: what is concrete then is a constant.

==============================================  ================================================
``max(x, 0)``, also as a clip                   a ReLU
``where(x > 0, x, 0)`` and ``x * (x > 0)``      a ReLU, with any of the four comparisons
``min(ReLU, c)``, as ReLU6                      a second kink, at c
``max(0, variance)``, of squares and sums         no ReLU: normalisations guard against rounding so
==============================================  ================================================
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from ntk._programs import fresh

_INLINED = {"jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint"}
_INLINED |= {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
_COMPARISONS = {"gt": True, "ge": True, "lt": False, "le": False}
_KEEP_SQUARES = {"reduce_sum", "reshape", "broadcast_in_dim", "convert_element_type", "squeeze"}
_KEEP_SQUARES |= {"add", "sub", "div", "mul", "psum", "transpose", "stop_gradient", "copy", "max"}


def is_relu(eqn: JaxprEqn) -> bool:
    return eqn.params.get("name") == "relu" and len(eqn.invars) == 1


def marked(fn: Callable) -> Callable:
    """The same function of pytrees of arrays, its ReLUs marked; to be traced."""

    def marked(*args):
        closed, shapes = jax.make_jaxpr(fresh(fn), return_shape=True)(*args)
        outputs = _Marking().run(closed, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return marked


@jax.jit
def relu(x):
    return jnp.maximum(x, 0)


class _Marking:
    """Facts about the traced values met so far, by their identity; they are kept alive with it."""

    def __init__(self):
        self.tests = {}  # mask -> x and whether the mask is of x > 0
        self.rectified, self.squares, self.alive = set(), set(), []

    def run(self, closed: ClosedJaxpr, args) -> list:
        jaxpr = closed.jaxpr
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True))

        def value(v):
            return v.val if isinstance(v, Literal) else values[v]

        for eqn in jaxpr.eqns:
            inputs = [value(v) for v in eqn.invars]
            outputs = self.step(eqn, inputs)
            self.alive += [*inputs, *outputs]
            values.update(zip(eqn.outvars, outputs, strict=True))
        return [value(v) for v in jaxpr.outvars]

    def step(self, eqn: JaxprEqn, inputs: list) -> list:
        name = eqn.primitive.name
        if name in _INLINED:
            inner = next(p for p in eqn.params.values() if isinstance(p, Jaxpr | ClosedJaxpr))
            inner = ClosedJaxpr(inner, []) if isinstance(inner, Jaxpr) else inner
            return self.run(inner, inputs)
        if not any(isinstance(x, jax.core.Tracer) for x in inputs):
            with jax.ensure_compile_time_eval():
                return _bind(eqn, inputs, eqn.params)
        x = self.relu_of(name, inputs)
        if x is not None and jnp.issubdtype(x.dtype, jnp.floating):
            y = relu(x)
            self.rectified.add(id(y))
            return [y]
        if name == "min" and (c := _constant(inputs)) is not None:
            y = next(x for x in inputs if isinstance(x, jax.core.Tracer))
            if id(y) in self.rectified and c > 0:
                return [jnp.where(relu(y - c) > 0, jnp.asarray(c, y.dtype), y)]
        outputs = _bind(eqn, inputs, {k: _inside(p) for k, p in eqn.params.items()})
        self.note(eqn, inputs, outputs[0] if outputs else None)
        return outputs

    def relu_of(self, name: str, inputs: list):
        """The x of which this operation is a ReLU, or None."""
        if name == "max" and _constant(inputs) == 0:
            x = next(x for x in inputs if isinstance(x, jax.core.Tracer))
            return None if id(x) in self.squares else x
        if name == "select_n" and len(inputs) == 3 and id(inputs[0]) in self.tests:
            x, positive = self.tests[id(inputs[0])]
            off, on = inputs[1:] if positive else inputs[:0:-1]
            return x if on is x and _zero(off) else None
        if name == "mul":
            for mask, x in (inputs, inputs[::-1]):
                tested, positive = self.tests.get(id(mask), (None, False))
                if tested is x and positive:
                    return x
        return None

    def note(self, eqn: JaxprEqn, inputs: list, output) -> None:
        """What there is to know of the output."""
        name = eqn.primitive.name
        traced = [x for x in inputs if isinstance(x, jax.core.Tracer)]
        if name in _COMPARISONS and _constant(inputs) == 0:
            first = traced[0] is inputs[0]
            self.tests[id(output)] = traced[0], _COMPARISONS[name] is first
        if name == "convert_element_type" and id(inputs[0]) in self.tests:
            self.tests[id(output)] = self.tests[id(inputs[0])]
        square = name == "square" or (name == "integer_pow" and eqn.params["y"] % 2 == 0)
        square |= name == "mul" and len(traced) == 2 and traced[0] is traced[1]
        if square or (name in _KEEP_SQUARES and all(id(x) in self.squares for x in traced)):
            self.squares.add(id(output))


def _constant(inputs: list) -> float | None:
    """The one number that the second of two operands consists of."""
    known = [np.asarray(x) for x in inputs if not isinstance(x, jax.core.Tracer)]
    if len(inputs) != 2 or len(known) != 1 or not known[0].size:
        return None
    first = known[0].flat[0]
    return float(first) if (known[0] == first).all() else None


def _zero(x) -> bool:
    return not isinstance(x, jax.core.Tracer) and not np.asarray(x).any()


def _inside(parameter):
    """Programs in the parameters of loops and branches, marked in their turn."""
    if isinstance(parameter, tuple | list) and any(isinstance(p, ClosedJaxpr) for p in parameter):
        return type(parameter)(map(_inside, parameter))
    if not isinstance(parameter, ClosedJaxpr):
        return parameter
    like = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in parameter.in_avals]
    return jax.make_jaxpr(lambda *args: _Marking().run(parameter, args))(*like)


def _bind(eqn: JaxprEqn, inputs: list, params: dict) -> list:
    outputs = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(params))
    return outputs if eqn.primitive.multiple_results else [outputs]
