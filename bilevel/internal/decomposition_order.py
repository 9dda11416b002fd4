"""Force the order of matrix decompositions, which XLA on CPUs does not keep.

Under ``vmap`` a decomposition (Cholesky, LU, eigenvalues, a triangular solve) is one call for the
whole batch. It distributes its parts over XLA's threads and waits on one of them. On a machine with
two threads, two such calls at the same time deadlock. (Seen in jaxlib 0.10.2 to 0.12.0.1 with two
batched Cholesky decompositions of 400 x 40 x 40 in one program.)
"""

import jax
import jax.numpy as jnp

from bilevel.contracts import Pytree


def after(before: Pytree, tree: Pytree) -> Pytree:
    """Return ``tree``, computed after ``before``; NaN if ``before`` is not finite."""
    # XLA may not drop `0 * x`, because it is not 0 for every x. It drops barriers too early.
    zero = sum(jnp.sum(0 * x) for x in jax.tree.leaves(before))
    return jax.tree.map(lambda x: x + jnp.asarray(zero).astype(x.dtype), tree)
