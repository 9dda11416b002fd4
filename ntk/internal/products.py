"""Products of matrices in full precision, whatever ``jax_default_matmul_precision`` is.

By default GPUs keep 10 bits of float32 factors (TF32), and TPUs keep 7 (bfloat16).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun

from ntk.internal.jaxprs import all_equations, as_closed_jaxpr, replace_equations, shape_and_dtype

matmul = functools.partial(jnp.matmul, precision="highest")
einsum = functools.partial(jnp.einsum, precision="highest")

PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
FULL = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)


def in_full_precision(program: Any) -> Callable[[jax.Array], jax.Array]:
    """Return a program of one array as a function, with all its products in full precision.

    A linearized function has fixed the precision of its products already. A batch of its
    matrix-vector products becomes a product of matrices, which accelerators round more.
    """

    def raised(eqn):
        if eqn.primitive.name not in PRODUCTS:
            return eqn
        return eqn.replace(params={**eqn.params, "precision": FULL})

    run = jaxpr_as_fun(replace_equations(as_closed_jaxpr(program), raised))
    return lambda x: run(x)[0]


def has_coarse_products(program: Any) -> bool:
    """Return whether the program asks for float32 products in less than full precision."""
    return any(
        eqn.primitive.name in PRODUCTS
        and eqn.params["precision"] != FULL
        and {shape_and_dtype(v).dtype for v in eqn.invars[:2]} == {jnp.dtype("float32")}
        for eqn in all_equations(program)
    )
