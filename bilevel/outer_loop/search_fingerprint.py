"""Fingerprint of a search, which its checkpoints must have: programs of its parts, and its data."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bilevel.contracts import Joint, Partition, Pytree, SingleLoop
from bilevel.internal.checks import gradient_transformation
from bilevel.outer_loop.stream import Chunk, Stream
from bilevel.problem.problem import Problem
from bilevel.runs.fingerprint import fingerprint, program_digest
from ntk.internal.compile_cache import fresh

# Messages name the first part that differs: a part contains earlier parts, a step contains all.
PARTS = "batches", "lower loss", "outer loss", "optimizer", "solver"


def recorded(problem: Problem) -> tuple[Problem, dict[str, tuple]]:
    """Return the problem, and the argument shapes of the first call of each of its losses."""
    calls: dict[str, tuple] = {}

    def recording(name: str, loss: Callable) -> Callable:
        def call(*args):
            calls.setdefault(name, shapes(args))
            return loss(*args)

        return call

    lower, outer = (recording(f"{k} loss", getattr(problem, k)) for k in ("lower", "outer"))
    form = (getattr(problem, k, False) for k in ("has_aux", "stateful", "differentiated"))
    return Problem(lower, outer, *form), calls


def search_programs(setup: Any, state: Pytree, data: tuple, traced: tuple) -> dict[str, str]:
    """Return a digest of the program of each part, on one device.

    ``traced`` is ``(program, calls)`` of a step on the arrays of this search.
    """
    step, calls = traced
    args = shapes((state, state.step, canonical(setup, data)))
    types = [(x.shape, x.dtype) for x in jax.tree.leaves(args)]
    arguments = [v.aval for v in step.jaxpr.invars]
    # JAX reshards constants on a mesh.
    on_a_mesh = any(not x.sharding.mesh.empty for x in arguments)
    if [(x.shape, x.dtype) for x in arguments] != types or on_a_mesh:
        problem, calls = recorded(setup.problem)
        step = jax.make_jaxpr(fresh(setup._replace(problem=problem).step))(*args)
    losses = {"lower loss": setup.problem.lower, "outer loss": setup.problem.outer}
    programs = {name: _digest(losses[name], *args) for name, args in calls.items()}
    optimizer = functools.partial(_optimizer_step, setup.optimizer)
    programs["optimizer"] = _digest(optimizer, shapes(state.alpha))
    if not isinstance(setup.batches, Stream | Partition | None):
        train, valid, key = shapes(data)
        sides = (train, valid) if isinstance(setup.batches, Joint) else (valid,)
        programs["batches"] = _digest(setup.batches, key, *sides)
    programs["solver"] = program_digest(step)
    return {name: programs[name] for name in PARTS if name in programs}


def search_values(setup: Any, start: dict[str, Pytree]) -> dict[str, str]:
    """Return the fingerprint of the arrays in ``start``, and of the options."""
    options = {"diagnostics": setup.diagnostics, "history": str(setup.history)}
    if isinstance(setup.batches, Partition):
        options["batches"] = str(setup.batches)
    streamed = setup.batches.fingerprint() if isinstance(setup.batches, Stream) else {}
    return fingerprint(start | options) | streamed


def canonical(setup: Any, data: tuple) -> tuple:
    """Return a step's data in shapes that do not depend on the length of the search or chunk."""
    chunk, *others = data
    if isinstance(chunk, Chunk):
        pairs = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype), chunk.pairs
        )
        return (Chunk(chunk.first, pairs), *others)
    if not isinstance(setup.solver, SingleLoop):
        return data
    train, valid, order = data
    lengths = (*(1 + n for n in setup.solver.draws), 1)
    same = (jax.ShapeDtypeStruct((n,), x.dtype) for n, x in zip(lengths, order, strict=True))
    return train, valid, type(order)(*same)


def shapes(tree: Pytree) -> Pytree:
    """Return the tree with shapes and dtypes instead of arrays."""

    def shape(x):
        kind = x if hasattr(x, "dtype") else jax.typeof(x)
        return jax.ShapeDtypeStruct(kind.shape, kind.dtype)

    return jax.tree.map(shape, tree)


def _digest(function: Callable, *args: Pytree) -> str:
    return program_digest(jax.make_jaxpr(fresh(function))(*args))


def _optimizer_step(optimizer: Any, alpha: Pytree) -> Pytree:
    """Return the first state of the optimizer, and its step along ``alpha`` from there."""
    optimizer = gradient_transformation("optimizer", optimizer)
    state, value = optimizer.init(alpha), jnp.zeros(())
    more = {"value": value, "value_fn": lambda _: value, "residual": 0.0, "memory": 1}
    return state, optimizer.update(alpha, state, alpha, grad=alpha, **more)
