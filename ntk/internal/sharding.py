"""How arrays are sharded over devices, and loops inside ``jax.shard_map``.

``jax.make_mesh`` makes axes *explicit*: the sharding is then part of an array's type, and an
operation is an error if the sharding of its result is ambiguous. Our programs leave shardings to
the compiler, so they need *automatic* axes. :func:`with_automatic_axes` calls a function in this
way, and its results get explicit shardings again. :func:`without_explicit_axes` changes arrays.

Inside ``jax.shard_map`` the type of an array contains the mesh axes over which it varies. JAX sums
the gradient in weights that do not vary. So weights become varying, over the axes of their loss,
before they are differentiated or a loop starts: each device then solves a separate lower problem.
A loss that sums over devices (``jax.lax.psum``) does not vary, and neither do its weights.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ntk.internal.checks import concrete
from ntk.internal.compile_cache import program

Pytree = Any


def varying(tree: Pytree) -> frozenset[str]:
    """Return the mesh axes over which any leaf, an array or its type, varies."""
    return frozenset().union(*(_varying_axes(x) for x in jax.tree.leaves(tree)))


def _varying_axes(x) -> frozenset[str]:
    kind = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    manual = getattr(kind, "manual_axis_type", None)  # `vma` in older versions of JAX
    return getattr(manual, "varying", None) or getattr(kind, "vma", None) or frozenset()


def pcast_varying(tree: Pytree, axes: frozenset[str]) -> Pytree:
    """Return ``tree``, varying over ``axes`` too."""

    def lift(x):
        missing = tuple(axes - varying(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(lift, tree)


def match_varying_axes(step: Callable[[Pytree], Pytree], start: Pytree) -> Pytree:
    """Return the ``start`` of a loop, varying over the same axes as the result of one step."""
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return start
    return pcast_varying(start, varying((start, jax.eval_shape(step, start))))


def while_loop(unfinished: Callable, step: Callable, start: Pytree) -> Pytree:
    """Run :func:`jax.lax.while_loop` from a start that may vary less than its steps do."""
    return jax.lax.while_loop(unfinished, step, match_varying_axes(step, start))


def explicit_mesh(tree: Pytree) -> jax.sharding.AbstractMesh | None:
    """Return the mesh of the first array in ``tree`` that has explicit axes, or None."""
    for x in jax.tree.leaves(tree):
        mesh = jax.typeof(x).sharding.mesh if isinstance(x, jax.Array) else None
        if mesh is not None and mesh.explicit_axes:
            return mesh
    return None


def _in_explicit_mesh() -> bool:
    """Return whether ``jax.set_mesh`` set a mesh with explicit axes."""
    return bool(jax.sharding.get_abstract_mesh().explicit_axes)


def with_automatic_axes(
    function: Callable, args: tuple, like: Callable[[], Pytree], *, compiled: bool = False
) -> Pytree:
    """Return ``function(*args)``, computed with automatic axes on a mesh with explicit ones.

    Each result is sharded like its place in the tree ``like()``; None there means replicated.
    Without this, JAX raises an error even for the gradient of a mean over sharded rows.
    ``compiled`` computes functions of known arrays as one program that later calls use again.
    """
    mesh = explicit_mesh(args)
    if mesh is None:
        known = all(isinstance(x, jax.Array | np.ndarray) for x in jax.tree.leaves(args))
        at_once = jax.config.jax_disable_jit  # type: ignore[attr-defined]
        if compiled and known and concrete(args) and not at_once:
            return program(function, *args)(*args)
        return function(*args)
    out = jax.tree.map(_spec, like(), is_leaf=lambda x: x is None)
    run = jax.sharding.auto_axes(function, axes=mesh.explicit_axes, out_sharding=out)
    if not concrete(args):
        with jax.sharding.use_abstract_mesh(mesh):  # the caller's jit may have set no mesh
            return run(*args)
    with on_mesh(args):
        return program(run, *args)(*args)


def _spec(x: Any) -> PartitionSpec:
    return PartitionSpec() if x is None else jax.typeof(x).sharding.spec


@contextmanager
def on_mesh(tree: Pytree) -> Iterator[None]:
    """Let new arrays be combined with the arrays of ``tree`` on a mesh with explicit axes."""
    if explicit_mesh(tree) is None or not concrete(tree):
        yield
        return
    meshes = [x.sharding.mesh for x in jax.tree.leaves(tree) if explicit_mesh(x) is not None]
    with jax.set_mesh(meshes[0]):
        yield


def without_explicit_axes(tree: Pytree) -> Pytree:
    """Return the arrays with automatic axes, which moves no data.

    Under ``jax.set_mesh``, where no other mesh is possible, they are copied to all devices.
    """

    def change(x):
        mesh = explicit_mesh(x)
        if mesh is None:
            return x
        if concrete(x) and not _in_explicit_mesh():
            automatic = Mesh(x.sharding.mesh.devices, mesh.axis_names)
            return jax.device_put(x, NamedSharding(automatic, x.sharding.spec))
        mesh = x.sharding.mesh if concrete(x) else mesh
        return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec()))

    return jax.tree.map(change, tree)


def shard_like(tree: Pytree, others: Pytree) -> Pytree:
    """Shard every array as the one in ``others`` with its shape, if that one has explicit axes."""
    explicit = [x for x in jax.tree.leaves(others) if explicit_mesh(x) is not None]
    shardings = {x.shape: jax.typeof(x).sharding for x in explicit}

    def place(x):
        return jax.sharding.reshard(x, shardings[x.shape]) if x.shape in shardings else x

    return jax.tree.map(place, tree)


def put_with_sharding(value: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """Shard ``value``, which is the same in every process."""
    if isinstance(value, jax.Array) and value.sharding == sharding:
        return value
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        data = put_with_sharding(jax.random.key_data(value), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    value = np.asarray(value)
    return jax.make_array_from_callback(value.shape, sharding, lambda part: value[part])


def replicate_like(tree: Pytree, others: Pytree) -> Pytree:
    """Replicate the uncommitted arrays of ``tree``, a loop's start, over the mesh of ``others``."""
    shardings = [x.sharding for x in jax.tree.leaves(others) if isinstance(x, jax.Array)]
    meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding) and s.num_devices > 1]
    if not meshes:
        return tree
    everywhere = NamedSharding(meshes[0], PartitionSpec())
    return jax.tree.map(lambda x: x if x.committed else put_with_sharding(x, everywhere), tree)


def keep_sharding(function: Callable, first: Pytree) -> Callable:
    """Return a loop's step ``function(first, ...)`` with a result sharded like ``first``."""
    many = [isinstance(x.sharding, NamedSharding) for x in jax.tree.leaves(first)]
    if not any(many) or explicit_mesh(first) is not None:
        return function
    shardings = jax.tree.map(lambda x: x.sharding, first)

    def run(first, *args):
        return jax.lax.with_sharding_constraint(function(first, *args), shardings)

    return run


class RowSharding(NamedTuple):
    """Rows divided among the devices along one or several axes of a mesh."""

    mesh: Mesh
    axis: Any  # a name, or a tuple of names

    @property
    def devices(self) -> int:
        """Return the number of devices that hold the rows."""
        names = self.axis if isinstance(self.axis, tuple) else (self.axis,)
        return math.prod(self.mesh.shape[name] for name in names)


def row_sharding(x: Any) -> RowSharding | None:
    """Return how the first axis of an array is divided. None if undivided or traced."""
    sharding = getattr(x, "sharding", None) if concrete(x) else None
    if not isinstance(sharding, NamedSharding) or not sharding.spec:
        return None
    mesh, axis = sharding.mesh, sharding.spec[0]
    if axis is None or not isinstance(mesh, Mesh):
        return None
    rows = RowSharding(mesh, axis)
    return rows if rows.devices > 1 else None


def reshard_rows(x: Any, rows: RowSharding | None) -> Any:
    """Return ``x`` sharded as ``rows``, if a ``shard_map`` over explicit axes needs it."""
    if rows is None or not rows.mesh.explicit_axes:
        return x
    return jax.sharding.reshard(x, NamedSharding(rows.mesh, PartitionSpec(rows.axis)))


def keeping_rows(x: Any) -> Any:
    """Return ``x`` with automatic axes, but keep rows divided in the mesh of ``set_mesh``."""
    return x if _in_explicit_mesh() and row_sharding(x) else without_explicit_axes(x)


def sharded(function: Callable, mesh: Mesh | None, in_specs: tuple, out_specs: Any) -> Callable:
    """Return ``function`` of each device's part, or ``function`` itself without a mesh."""
    if mesh is None:
        return function
    options = {"mesh": mesh, "in_specs": in_specs, "out_specs": out_specs}
    # With `check_vma`, JAX would sum sensitivities of perturbations that are equal on all devices.
    return jax.shard_map(function, **options, check_vma=False)


def mesh_for(*arrays: Pytree) -> Mesh | None:
    """Return all local devices, unless the caller has placed or traces the arrays."""
    devices = jax.local_devices()
    leaves = jax.tree.leaves(arrays)
    placed = not concrete(leaves) or any(getattr(x, "committed", False) for x in leaves)
    if len(devices) == 1 or placed or getattr(jax.config, "jax_default_device", None) is not None:
        return None
    return Mesh(np.array(devices), ("rows",))
