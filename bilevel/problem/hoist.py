"""Compute the parts of a lower loss that do not depend on the weights once, outside of loops."""

import functools
from collections.abc import Callable

import jax
from jax.extend import core

from bilevel.contracts import Loss, Pytree
from ntk.internal.jaxprs import bind, inner_jaxprs, interpret


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
