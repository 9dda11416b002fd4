"""The record of an infinitely wide network's two kernels, with a bound of their error."""

import dataclasses
import math
from collections.abc import Iterator

import jax

from ntk.internal import summary


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Kernels:
    """The two kernels of an infinitely wide network; ``nngp, ntk = kernels`` unpacks them.

    Attributes
    ----------
    nngp : array [n1, n2], covariance of the outputs at initialisation.
    ntk : array [n1, n2], inner products of the outputs' gradients.
    error : array [n1, n2], a bound of the error of the entries of both; infinite if not computed.
    """

    nngp: jax.Array
    ntk: jax.Array
    error: jax.Array | float = math.inf

    def __repr__(self) -> str:
        error = summary.largest(self.error)
        rows = [("nngp", summary.arrays(self.nngp)), ("ntk", summary.arrays(self.ntk))]
        text = summary.arrays(self.error) if error is None else f"at most {error:.2g} in each entry"
        return summary.table("Kernels", [*rows, ("error", text)])

    def __iter__(self) -> Iterator[jax.Array]:
        return iter((self.nngp, self.ntk))
