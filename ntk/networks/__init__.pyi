# The public names of `ntk.networks`, and where they are: each is imported when it is first used.

from .layers import (
    Network,
    act,
    add,
    average_pool,
    conv,
    dense,
    flatten,
    global_average_pool,
    identity,
    residual,
    serial,
)

__all__ = [
    "Network",
    "act",
    "add",
    "average_pool",
    "conv",
    "dense",
    "flatten",
    "global_average_pool",
    "identity",
    "residual",
    "serial",
]
