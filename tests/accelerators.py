"""Simulate on a CPU how an accelerator multiplies float32 matrices: with rounded operands."""

import contextlib
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.interpreters import mlir
from jax._src.lax import lax as lax_internals

from ntk.internal.products import FULL


@contextlib.contextmanager
def rounded_products(bits):
    """Round the operands of matrix products to ``bits`` bits, unless their precision is highest.

    TF32 keeps 10 bits, bfloat16 keeps 7. Matrix-vector products stay exact, as on a GPU.
    """

    def product(a, b, *, dimension_numbers, precision, **options):
        (left, right), batch = dimension_numbers
        vector = any(
            x.ndim == len(axes) + len(batch[0]) or _free_size(x, axes, batched) == 1
            for x, axes, batched in ((a, left, batch[0]), (b, right, batch[1]))
        )
        if a.dtype == b.dtype == jnp.float32 and precision != FULL and not vector:
            a, b = (lax.reduce_precision(x, 8, bits) for x in (a, b))
        return exact(a, b, dimension_numbers=dimension_numbers, **options)

    def exact(a, b, **options):
        return lax_internals.dot_general_p.bind(a, b, precision=FULL, **options)

    def lowered(context, *operands, precision, **options):
        if precision == FULL:
            return usual(context, *operands, precision=precision, **options)
        return mlir.lower_fun(
            lambda a, b: product(a, b, precision=precision, **options), multiple_results=False
        )(context, *operands)

    primitive, rules = lax_internals.dot_general_p, mlir._platform_specific_lowerings["cpu"]
    before = rules[primitive]
    usual = before.rule
    mlir.register_lowering(primitive, lowered, platform="cpu")
    jax.clear_caches()
    try:
        yield
    finally:
        rules[primitive] = before
        jax.clear_caches()


def _free_size(x, contracted, batched):
    return math.prod(n for axis, n in enumerate(x.shape) if axis not in (*contracted, *batched))
