# The public names of `ntk.networks`, and where they are: each is imported when it is first used.

from .finite import module
from .kernel import kernel
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
    "kernel",
    "module",
    "residual",
    "serial",
]
