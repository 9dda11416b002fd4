"""``--devices``: copies that a command computes side by side, over several devices."""

from typing import Literal

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from bilevel.protocols import Pytree


def over(devices: int | Literal["all"], copies: int, what: str, tree: Pytree) -> Pytree:
    """``tree``, whose arrays lead with an axis of ``copies``, spread over so many devices.

    Raises
    ------
    ValueError
        For more devices than there are, or as many as do not divide the copies.
    """
    found = jax.device_count()
    count = found if devices == "all" else devices
    if count > found:
        raise ValueError(f"devices: expected at most the {found} that JAX finds, got {count}.")
    if copies % count:
        raise ValueError(f"devices: expected a divisor of the {copies} {what}, got {count}.")
    if count == 1:
        return tree
    mesh = jax.make_mesh(
        (count,), ("copies",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count]
    )
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec("copies")))
