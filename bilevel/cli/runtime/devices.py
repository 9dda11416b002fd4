"""``--devices`` and ``--distributed``: spread a command over several devices or processes."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from bilevel.contracts import Pytree
from bilevel.internal.processes import is_multiprocess, to_numpy
from ntk.internal.sharding import put_with_sharding

# Seconds without a heartbeat after which a process counts as lost, and seconds to wait at the end.
_LOST, _SHUTDOWN = 20, 10


def join() -> None:
    """Meet the other processes of this command.

    No computation of JAX may come before. If JAX finds no other processes, ``ValueError``.
    """
    try:
        jax.distributed.initialize(
            heartbeat_timeout_seconds=_LOST, shutdown_timeout_seconds=_SHUTDOWN
        )
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            "distributed: expected processes that JAX can bring together (started by SLURM, "
            f"Kubernetes, Open MPI or on TPUs), got: {error}"
        ) from None


def spread_over_devices(
    devices: int | Literal["all"], copies: int, what: str, tree: Pytree
) -> Pytree:
    """Return ``tree``, equal in all processes, with its leading axis spread over ``devices``."""
    count = count_for(devices, copies, what)
    if count == 1:
        return tree
    mesh = jax.make_mesh(
        (count,), ("copies",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count]
    )
    sharding = NamedSharding(mesh, PartitionSpec("copies"))
    return jax.tree.map(lambda x: put_with_sharding(x, sharding), tree)


def count_for(devices: int | Literal["all"], copies: int, what: str) -> int:
    """Return the number of devices that the flag means, if it divides the ``copies``."""
    available = jax.device_count()
    count = available if devices == "all" or (is_multiprocess() and devices == 1) else devices
    if count > available:
        raise ValueError(f"devices: expected at most the {available} that JAX finds, got {count}.")
    if is_multiprocess() and count < available:
        raise ValueError(f"devices: expected all {available} of several processes, got {count}.")
    if copies % count:
        raise ValueError(f"devices: expected a divisor of the {copies} {what}, got {count}.")
    return count


def here(tree: Pytree) -> Pytree:
    """Return ``tree`` whole in every process. Every process has to call this."""
    return jax.tree.map(lambda x: jnp.asarray(to_numpy(x)), tree) if is_multiprocess() else tree
