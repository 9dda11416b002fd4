"""The order of decompositions, which XLA on CPUs does not keep.

Under ``vmap`` a decomposition (Cholesky, LU, eigenvalues, a triangular solve) is one call for the
whole batch, which hands its parts to XLA's threads and waits for them on one of these. Where two
such calls are ready at the same time on a machine of two threads, each waits for a thread that the
other holds, for ever. (Seen in jaxlib 0.10.2 to 0.12.0.1: two batched Cholesky decompositions of
400 x 40 x 40 in one program stand still within a second.) So one is made to come after the other.
"""

import jax
import jax.numpy as jnp

from bilevel.contracts import Pytree


def after(before: Pytree, tree: Pytree) -> Pytree:
    """``tree``, but not before the numbers in ``before`` are known; NaN where one is not finite.

    XLA may not drop ``0 * x``, which is not 0 for every x. Barriers it drops before it schedules.
    """
    zero = sum(jnp.sum(0 * x) for x in jax.tree.leaves(before))
    return jax.tree.map(lambda x: x + jnp.asarray(zero).astype(x.dtype), tree)
