"""The lower Hessian at a point: its smallest eigenvalue, and solves that know it.

A residual says little where directions are soft: in one of curvature mu, ``w`` may be off by the
residual over mu. So nothing is known of a solution before mu is. Up to 512 weights the Hessian is
decomposed. Beyond, conjugate gradients solve for a random vector, in which soft directions weigh as
much as any other, and once more for what that left: a direction in which the Hessian is not
positive is met but for .6 % of such vectors.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from bilevel.contracts import LinearMap, Pytree
from bilevel.internal.conjugate_gradients import REROUNDING_FACTOR, solve_conjugate_gradients
from bilevel.internal.decomposition_order import after
from bilevel.solvers.inverses import hessian_matrix, row_products
from ntk.internal.sharding import do_while, pcast_varying, varying

DENSE_SIZE = 512
"""Weights up to which the Hessian is decomposed: 512 products at once, and a p^3 step."""

_ROUNDINGS = 10  # the error of a matrix's eigenvalues, in roundings of the largest one
_SURE = 3  # an eigenvalue counts as positive from so many times its own error on
_REST = 0.02  # a direction is missed by a probe with under .008 / sqrt(p) of it: .6 % of probes
_CONTINUED = 4  # how often conjugate gradients may be restarted in one solve
_ASYMMETRY = 1000  # units of roundoff that a symmetric Hessian's products may differ by
PRODUCTS = 1000
"""Most Hessian products of one iterative solve, where nobody says otherwise."""


class Curvature(NamedTuple):
    """A Hessian as far as it is known."""

    solve: Callable[[Pytree], Pytree]  # b -> x with H x = b, exactly or to a percent of x
    lowest: jax.Array  # [], the smallest eigenvalue, or a few times it
    condition: jax.Array  # [], the largest over the smallest, about
    definite: jax.Array  # [], bool: positive definite, beyond rounding
    free: jax.Array | None  # [p, p], orthonormal columns and 0: where it is 0, up to rounding
    flat: jax.Array  # [], bool: positive definite but for free directions, which ``solve`` leaves
    spectrum: tuple[jax.Array, jax.Array] | None  # eigenvalues [p] and vectors, where decomposed


def is_small(like: Pytree) -> bool:
    """Whether :func:`curvature` decomposes the Hessian."""
    return sum(x.size for x in jax.tree.leaves(like)) <= DENSE_SIZE


def curvature(hvp: LinearMap, like: Pytree, products: int = PRODUCTS) -> Curvature:
    """What is known of ``hvp``; ``like`` is any pytree of its shapes.

    Cost: p products, or as many as conjugate gradients take for two right-hand sides, at most
    ``products`` each; where these do not suffice, the Hessian is not found definite.
    """
    return _decomposed(hvp, like) if is_small(like) else _iterated(hvp, like, products)


def is_symmetric(hvp: LinearMap, like: Pytree) -> jax.Array:
    """Whether ``u . (H v)`` and ``v . (H u)`` agree for two random vectors; two products.

    An asymmetry of 1,000 units of roundoff is found, for a matrix of independent entries.
    """
    flat, unravel = ravel_pytree(like)
    pair = jax.random.normal(jax.random.key(1), (2, flat.size), flat.dtype)
    u, v = (unravel(pcast_varying(x, varying(flat))) for x in pair)
    hu, hv = hvp(u), hvp(v)
    difference = optax.tree.vdot(u, hv) - optax.tree.vdot(v, hu)
    allowed = _ASYMMETRY * jnp.finfo(flat.dtype).eps * (optax.tree.norm(hu) + optax.tree.norm(hv))
    return ~(jnp.abs(difference) > allowed)  # NaN has a reason of its own


# ------------------------------------------------------------------------------------- dense


class _HessianFactors(NamedTuple):
    """``H = V C^-1 V'`` with orthogonal V."""

    vectors: jax.Array  # [p, p]
    core: jax.Array  # [p, p], diagonal but for soft directions
    lowest: jax.Array  # outside the free directions
    definite: jax.Array
    free: jax.Array  # [p, p]
    flat: jax.Array


def _decomposed(hvp: LinearMap, like: Pytree) -> Curvature:
    flat, unravel = ravel_pytree(like)

    def of_columns(columns):
        return row_products(lambda v: ravel_pytree(hvp(unravel(v)))[0], columns.T).T

    values, vectors = hessian_eigenpairs(hvp, like)
    highest = jnp.max(jnp.abs(values))
    noise = _ROUNDINGS * jnp.finfo(flat.dtype).eps * highest
    factors = jax.lax.cond(
        values[0] > 10 * noise,
        lambda: _HessianFactors(
            vectors,
            jnp.diag(1 / values),
            values[0],
            values[0] > _SURE * noise,
            jnp.zeros_like(vectors),
            values[0] < 0,
        ),
        lambda: _sharpened(of_columns, values, vectors, noise),
    )

    def solve(b):
        flat, unravel = ravel_pytree(b)
        return unravel(factors.vectors @ (factors.core @ (factors.vectors.T @ flat)))

    _, _, lowest, definite, free, flat = factors
    return Curvature(solve, lowest, highest / lowest, definite, free, flat, (values, vectors))


def hessian_eigenpairs(hvp: LinearMap, like: Pytree) -> tuple[jax.Array, jax.Array]:
    """Eigenvalues [p], ascending, and eigenvectors [p, p] of ``hvp``; p products.

    They wait for the numbers in ``like``, which come of the solver's own decompositions.
    """
    return jnp.linalg.eigh(hessian_matrix(lambda v: hvp(after(like, v)), like))


def _sharpened(products, values, vectors, rounding) -> _HessianFactors:
    """The same, with eigenvalues near ``rounding`` found anew, as Rayleigh quotients.

    Those of a matrix are lost in the rounding of its largest entries. Those of a product need not
    be: where ``X v = 0`` to rounding, so is the whole data term of ``v' (X'X + penalty I) v``,
    squared. What rounding is left shows when the same product is taken of other numbers.

    If that does not make the Hessian definite, directions whose eigenvalue is 0 up to ``rounding``
    count as free: the inverse is that of the other directions.
    """
    p = len(values)
    soft = values < 100 * rounding
    soft_block = soft[:, None] & soft[None]
    scaled = jnp.asarray(REROUNDING_FACTOR, values.dtype)
    quotients = jnp.where(soft_block, vectors.T @ products(vectors), 0)
    again = jnp.where(soft_block, vectors.T @ (products(scaled * vectors) / scaled), 0)
    spread = jnp.maximum(
        jnp.linalg.norm(quotients - quotients.T), jnp.linalg.norm(quotients - again)
    )
    noise = spread / jnp.sqrt(soft.sum().astype(spread.dtype))
    scale = jnp.max(jnp.abs(quotients))
    scale = jnp.where(scale > 0, scale, 1)
    # The stiff directions wait outside the soft ones' range.
    outside = jnp.diag(jnp.where(soft, 0, 4 * p * scale))
    sharp, turn = jnp.linalg.eigh((quotients + quotients.T) / 2 + outside)
    inner = sharp < 2 * p * scale
    definite = sharp[0] > _SURE * noise
    free = inner & ~definite & (jnp.abs(sharp) <= rounding)
    flat = free.any() & (sharp[0] >= -rounding)
    stiff = inner & ~free
    inside = (turn * jnp.where(stiff, 1 / jnp.where(stiff, sharp, 1), 0)[None]) @ turn.T
    core = jnp.where(soft_block, inside, 0) + jnp.diag(jnp.where(soft, 0, 1 / values))
    lowest = jnp.min(jnp.where(stiff, sharp, jnp.inf))
    lowest = jnp.minimum(lowest, jnp.min(jnp.where(soft, jnp.inf, values)))
    lowest = jnp.where(flat, lowest, sharp[0])
    return _HessianFactors(
        vectors, core, lowest, definite, (vectors @ turn) * free[None].astype(turn.dtype), flat
    )


# --------------------------------------------------------------------------------- iterative


def _iterated(hvp: LinearMap, like: Pytree, products: int) -> Curvature:
    flat, unravel = ravel_pytree(like)
    probe = jax.random.normal(jax.random.key(0), flat.shape, flat.dtype)
    b = unravel(pcast_varying(probe / jnp.linalg.norm(probe), varying(flat)))
    # Of unit length, it has some 1 / sqrt(p) of any one direction: a tenth of that is left.
    threshold = 0.1 / jnp.sqrt(flat.size).astype(flat.dtype)

    def unfinished(carry):
        *_, definite, k = carry
        return definite & (k < 2)

    def look(carry):
        b, threshold, lowest, definite, k = carry
        x = solve_conjugate_gradients(hvp, b, None, steps=products, threshold=threshold).x
        product = hvp(x)
        residual, square = optax.tree.sub(b, product), optax.tree.vdot(x, x)
        left = optax.tree.norm(residual)
        bend = optax.tree.vdot(x, product) / jnp.where(square > 0, square, 1)
        definite = definite & (left <= 2 * threshold) & (bend > 0)
        # What is left has all that the first look saw too little of; as it is, or at its length.
        b = optax.tree.where(
            left > 0, optax.tree.scale(1 / jnp.where(left > 0, left, 1), residual), b
        )
        return b, jnp.full_like(threshold, _REST), jnp.minimum(lowest, bend), definite, k + 1

    most = jnp.full_like(threshold, jnp.finfo(threshold.dtype).max)
    start = b, threshold, most, most > 0, jnp.zeros((), int)
    *_, lowest, definite, _ = do_while(unfinished, look, start)

    def solve(b):
        def unfinished(carry):
            x, left, k = carry
            return (k < _CONTINUED) & (left > 1e-2 * lowest * optax.tree.norm(x))

        def further(carry):
            x, _, k = carry
            # The first aim knows no x; those after it leave x off by half a percent, at most.
            aim = jnp.where(k == 0, 1e-3 * optax.tree.norm(b), 5e-3 * lowest * optax.tree.norm(x))
            solved = solve_conjugate_gradients(hvp, b, x, steps=products, threshold=aim)
            return solved.x, solved.residual, k + 1

        start = optax.tree.zeros_like(b), most, jnp.zeros((), int)
        return do_while(unfinished, further, start)[0]

    condition = optax.tree.norm(hvp(b)) / lowest
    return Curvature(solve, lowest, condition, definite, None, definite & False, None)
