"""Several devices: loops inside ``jax.shard_map``, and arrays that lie on a mesh.

Inside ``jax.shard_map`` every array has a type that says over which mesh axes it varies. Starts of
loops are constants or replicated weights, while what the loop makes of them varies with the data;
and the gradient in weights that do not vary is summed over the devices. So weights become varying,
over the axes that their loss varies over, before anything is differentiated or repeated: each
device then solves its own lower problem. A loss that sums over devices (``jax.lax.psum``) does not
vary, nor do its weights.

Outside of it, functions follow the arrays that they are given: XLA spreads the work over the mesh
that the arrays lie on, whether its axes are automatic or explicit. On one device nothing here does
anything.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from bilevel.contracts import Pytree
from bilevel.internal.processes import put_with_sharding
from ntk.internal.checks import concrete
from ntk.internal.compile_cache import program


def varying(tree: Pytree) -> frozenset[str]:
    """The mesh axes that any leaf, an array or its type, varies over."""
    return frozenset().union(*(_varying_axes(x) for x in jax.tree.leaves(tree)))


def _varying_axes(x) -> frozenset[str]:
    kind = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    manual = getattr(kind, "manual_axis_type", None)  # JAX's name for it; the second is its older
    return getattr(manual, "varying", None) or getattr(kind, "vma", None) or frozenset()


def pcast_varying(tree: Pytree, axes: frozenset[str]) -> Pytree:
    """``tree``, varying over ``axes`` too."""

    def lift(x):
        missing = tuple(axes - varying(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(lift, tree)


def match_varying_axes(step: Callable[[Pytree], Pytree], start: Pytree) -> Pytree:
    """``start`` of the repeated ``step``, varying over what one step makes of it."""
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return start
    return pcast_varying(start, varying((start, jax.eval_shape(step, start))))


def while_loop(unfinished: Callable, step: Callable, start: Pytree) -> Pytree:
    """:func:`jax.lax.while_loop` from a start that may vary less than its steps do."""
    return jax.lax.while_loop(unfinished, step, match_varying_axes(step, start))


def do_while(unfinished: Callable, step: Callable, start: Pytree) -> Pytree:
    """A step, and then further ones while ``unfinished``; compiled once, unlike a step before."""

    def going(carry):
        state, first = carry
        return first | unfinished(state)

    def once(carry):
        return step(carry[0]), carry[1] & False  # of the same axes

    return while_loop(going, once, (start, jnp.array(True)))[0]


def repeat_step(step: Callable[[Pytree], Pytree], start: Pytree, times: int) -> Pytree:
    """``step(step(... start))``."""
    return jax.lax.fori_loop(0, times, lambda _, x: step(x), match_varying_axes(step, start))


def with_automatic_axes(
    function: Callable[..., Any], args: tuple[Any, ...], like: Callable[[], Pytree]
) -> Pytree:
    """``function(*args)`` on a mesh with explicit axes as on one whose axes are automatic.

    There every operation wants to be told how its result is to lie; here XLA decides, but for the
    results of ``function``: each lies as its place in ``like()`` does, an array, or is replicated
    where there stands None, for one or all of a tree. (Already the gradient of a mean over rows
    that are spread over devices is one that JAX refuses to guess.)
    """
    mesh = explicit_mesh(args)
    if mesh is None:
        return function(*args)
    out = jax.tree.map(_place, like(), is_leaf=lambda x: x is None)
    run = jax.sharding.auto_axes(function, axes=mesh.explicit_axes, out_sharding=out)
    if not concrete(args):
        with jax.sharding.use_abstract_mesh(mesh):  # of the caller's jit, who need not set one
            return run(*args)
    with on_mesh(args):
        return program(run, *args)(*args)


@contextmanager
def on_mesh(tree: Pytree) -> Iterator[None]:
    """Within, new arrays can be combined with those of ``tree`` on a mesh with explicit axes."""
    if explicit_mesh(tree) is None or not concrete(tree):
        yield
        return
    meshes = [x.sharding.mesh for x in jax.tree.leaves(tree) if explicit_mesh(x) is not None]
    with jax.set_mesh(meshes[0]):
        yield


def explicit_mesh(tree: Pytree) -> jax.sharding.AbstractMesh | None:
    """The mesh with explicit axes that an array of ``tree`` lies on; None where there is none."""
    for x in jax.tree.leaves(tree):
        mesh = jax.typeof(x).sharding.mesh if isinstance(x, jax.Array) else None
        if mesh is not None and mesh.explicit_axes:
            return mesh
    return None


def _place(x: Any) -> PartitionSpec:
    return PartitionSpec() if x is None else jax.typeof(x).sharding.spec


def shard_like(tree: Pytree, others: Pytree) -> Pytree:
    """``tree``, of whose arrays those of the shape of one of ``others`` lie as it, on its mesh."""
    lying = [x for x in jax.tree.leaves(others) if explicit_mesh(x) is not None]
    places = {x.shape: jax.typeof(x).sharding for x in lying}

    def place(x):
        return jax.sharding.reshard(x, places[x.shape]) if x.shape in places else x

    return jax.tree.map(place, tree)


def replicate_like(tree: Pytree, others: Pytree) -> Pytree:
    """``tree`` with the arrays that nobody placed replicated over the mesh of the ``others``.

    So a loop's arrays lie from its first step on as they do after it: one compilation.
    """
    shardings = [x.sharding for x in jax.tree.leaves(others) if isinstance(x, jax.Array)]
    meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding) and s.num_devices > 1]
    if not meshes:
        return tree
    everywhere = NamedSharding(meshes[0], PartitionSpec())
    return jax.tree.map(lambda x: x if x.committed else put_with_sharding(x, everywhere), tree)


def keep_sharding(function: Callable, first: Pytree) -> Callable:
    """``function(first, ...)``, a loop's step, whose result lies as ``first``, an array, does."""
    many = [isinstance(x.sharding, NamedSharding) for x in jax.tree.leaves(first)]
    if not any(many) or explicit_mesh(first) is not None:
        return function
    shardings = jax.tree.map(lambda x: x.sharding, first)

    def run(first, *args):
        return jax.lax.with_sharding_constraint(function(first, *args), shardings)

    return run
