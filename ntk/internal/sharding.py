"""Where arrays lie: over the devices of a mesh, by rows or otherwise.

``jax.make_mesh`` makes axes *explicit*: the sharding is then part of an array's type, and
operations that do not say how their result is sharded are errors. The programs here leave that to
the compiler. So arrays of explicit axes are taken as the same arrays over the same devices with
*automatic* axes, which moves no data; under ``jax.set_mesh``, where there can be no other mesh,
they are copied to all devices.
"""

from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ntk.internal.checks import concrete


class RowSharding(NamedTuple):
    """Rows divided among the devices along one or several axes of a mesh."""

    mesh: Mesh
    axis: Any  # a name, or a tuple of names

    @property
    def devices(self) -> int:
        """Return the number of devices that hold the rows."""
        names = self.axis if isinstance(self.axis, tuple) else (self.axis,)
        size = 1
        for name in names:
            size *= self.mesh.shape[name]
        return size


def without_explicit_axes(x: Any) -> Any:
    """The arrays of a tree without explicit axes: of automatic ones, or copied to all devices."""
    return jax.tree.map(_leaf_without_explicit_axes, x)


def _leaf_without_explicit_axes(x):
    sharding = jax.typeof(x).sharding if not concrete(x) else getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not _explicit(sharding.mesh):
        return x
    if concrete(x) and not in_explicit_mesh():
        mesh = Mesh(sharding.mesh.devices, sharding.mesh.axis_names)
        return jax.device_put(x, NamedSharding(mesh, sharding.spec))
    # All else is to be of that mesh: a traced array, and what is made under `jax.set_mesh`.
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec()))


def reshard_rows(x: Any, rows: "RowSharding | None") -> Any:
    """``x`` as ``rows`` says, where a ``shard_map`` of explicit axes asks for it."""
    if rows is None or not _explicit(rows.mesh):
        return x
    return jax.sharding.reshard(x, NamedSharding(rows.mesh, PartitionSpec(rows.axis)))


def keeping_rows(x: Any) -> Any:
    """Return :func:`without_explicit_axes`, but keep rows divided in the mesh of ``set_mesh``."""
    return x if in_explicit_mesh() and row_sharding(x) else without_explicit_axes(x)


def in_explicit_mesh() -> bool:
    """Whether ``jax.set_mesh`` says so."""
    return _explicit(jax.sharding.get_abstract_mesh())


def _explicit(mesh) -> bool:
    return AxisType.Explicit in getattr(mesh, "axis_types", ())


def row_sharding(x: Any) -> RowSharding | None:
    """How the first axis of an array is divided; None where it is not, or ``x`` is traced."""
    sharding = getattr(x, "sharding", None) if concrete(x) else None
    if not isinstance(sharding, NamedSharding) or not sharding.spec:
        return None
    mesh, axis = sharding.mesh, sharding.spec[0]
    if axis is None or not isinstance(mesh, Mesh):
        return None
    rows = RowSharding(mesh, axis)
    return rows if rows.devices > 1 else None
