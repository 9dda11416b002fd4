# The public names of `ntk.networks`, and where they are: each is imported when it is first used.

from .layers import (
    act,
    add,
    average_pool,
    conv,
    dense,
    flatten,
    global_average_pool,
    residual,
    serial,
)
from .network import Network

__all__ = [
    "Network",
    "act",
    "add",
    "average_pool",
    "conv",
    "dense",
    "flatten",
    "global_average_pool",
    "residual",
    "serial",
]
