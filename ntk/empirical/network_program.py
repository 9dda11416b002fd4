"""A network's outputs for one sample, as a program (jaxpr) of all its inputs."""

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from ntk.empirical.weight_products import inlined
from ntk.internal import checks

Apply = Callable[[Any, Any], Any]


class NetworkProgram(NamedTuple):
    """The outputs of one sample, [o]: all that ``apply`` returns, concatenated."""

    jaxpr: Jaxpr  # its constants and inputs: ``inputs``, then the leaves of the sample
    inputs: list  # what apply closes over, and the leaves of params
    trained: list[int]  # which of these are differentiated
    names: list[str]  # of the trained ones

    def outputs(self, inputs, x) -> jax.Array:
        """Return the outputs [o] of the sample ``x``."""
        constants = len(self.jaxpr.constvars)
        arguments = [*inputs[constants:], *jax.tree.leaves(x)]
        return jax.core.eval_jaxpr(self.jaxpr, inputs[:constants], *arguments)[0]


def replaced(values: list, places: list[int], others: Sequence) -> list:
    """Return the values, with others in some places."""
    by_place = dict(zip(places, others, strict=True))
    return [by_place.get(i, value) for i, value in enumerate(values)]


def trace_network(apply: Apply, params, x) -> NetworkProgram:
    """Return the present program of ``apply``, for samples like those of ``x`` [n, ...]."""
    checks.function("apply", apply, "(params, x) -> [n, o]")
    variables = isinstance(getattr(apply, "__self__", None), nn.Module)
    if variables and "params" not in params:
        raise ValueError(
            "params: expected the variables {'params': ...} of the flax module, "
            f"got {jax.tree.structure(params)}."
        )
    flat, structure = jax.tree.flatten_with_path(params)
    trained = [
        i
        for i, (path, leaf) in enumerate(flat)
        if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
        and (not variables or getattr(path[0], "key", None) == "params")
    ]
    if not trained:
        raise ValueError("params: expected at least one leaf of floating point numbers, got none.")

    def forward(leaves, x):
        with nn.intercept_methods(_refuse_batch_statistics), _nnx_without_batch_statistics():
            y = apply(jax.tree.unflatten(structure, leaves), jax.tree.map(lambda x: x[None], x))
        return jnp.concatenate([_output_row(leaf) for leaf in jax.tree.leaves(y)])

    sample = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), x)
    leaves = [leaf for _, leaf in flat]
    jaxpr, consts = inlined(jax.make_jaxpr(forward)(leaves, sample))
    count = len(consts)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in flat]
    places = [count + i for i in trained]
    return NetworkProgram(jaxpr, [*consts, *leaves], places, [names[i] for i in trained])


def array_dtype(name: str, leaf: Any) -> Any:
    """Return the dtype of an array; raise ``ValueError`` for anything else."""
    try:
        return jnp.result_type(leaf)
    except TypeError:
        raise ValueError(f"{name}: expected arrays, got {checks.describe(leaf)}.") from None


def _output_row(y) -> jax.Array:
    shape = jnp.shape(y)
    if shape[:1] != (1,):
        raise ValueError(f"apply: expected outputs [n, o] or [n], got the shape {shape} for n = 1.")
    if not jnp.issubdtype(jnp.result_type(y), jnp.floating):
        raise ValueError(
            f"apply: expected outputs of floating point numbers, got {jnp.result_type(y)}."
        )
    return jnp.reshape(y, -1)


def _refuse_batch_statistics(next_function, args, kwargs, context):
    if isinstance(context.module, nn.BatchNorm) and context.method_name == "__call__":
        given = args[1] if len(args) > 1 else kwargs.get("use_running_average")
        if not nn.merge_param("use_running_average", context.module.use_running_average, given):
            raise ValueError(_BATCH_STATISTICS)
    return next_function(*args, **kwargs)


_BATCH_STATISTICS = (
    "apply: expected BatchNorm with use_running_average=True, got batch statistics, through which "
    "samples interact."
)


@contextlib.contextmanager
def _nnx_without_batch_statistics():
    """Raise ``ValueError`` for batch statistics of nnx, by a patch of its class's call."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:  # a model of nnx would have imported it
        yield
        return
    original = nnx.BatchNorm.__call__

    def call(self, x, use_running_average=None, **kwargs):
        average = self.use_running_average if use_running_average is None else use_running_average
        if average is not None and not average:
            raise ValueError(_BATCH_STATISTICS)
        return original(self, x, use_running_average, **kwargs)

    nnx.BatchNorm.__call__ = call
    try:
        yield
    finally:
        nnx.BatchNorm.__call__ = original
