# The public names of `ntk.networks`, and where they are: each is imported when it is first used.

from .layers.elementwise import act
from .layers.pooling import average_pool, flatten, global_average_pool
from .layers.sums import add, residual
from .layers.weights import conv, dense
from .network import Network, serial

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
