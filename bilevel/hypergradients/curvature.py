"""The smallest eigenvalue of the lower Hessian at a point, and solves with that Hessian.

A small Hessian is formed and inverted by matrix products alone, because LAPACK's threads wait for
each other on a busy machine. LAPACK decomposes it only if it is not clearly positive definite, or
if the inverse is not accurate. For more weights, conjugate gradients solve for random vectors.
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
from bilevel.internal.precision import uniform_hash
from bilevel.solvers.inverses import hessian_matrix, row_products
from ntk.internal.jaxprs import operation_names
from ntk.internal.sharding import pcast_varying, varying

DENSE_SIZE = 512
"""Weights up to which the Hessian is formed: 512 products at once, and 6 p^3 multiply-adds."""

_ROUNDINGS = 10  # the error of a matrix's eigenvalues, in units of roundoff of the largest one
_SURE = 3  # an eigenvalue counts as positive from 3 times its error on
_BLOCK = 32  # rows that are eliminated together
_ACCURATE = 0.1  # |I - R H|_F of an inverse R that is used
_POWERS = 16  # power iterations: the largest eigenvalue to a factor of p^(1/32)
_PROBES = 3  # one probe misses a singular direction in 16 % of cases, three in 0.4 %
_ASYMMETRY = 1000  # units of roundoff that a symmetric Hessian's products may differ by
_TOGETHER = 100_000
"""Weights up to which probes and samples are solved for together, in one batch of products."""
PRODUCTS = 1000
"""Default maximum number of Hessian products of one iterative solve."""


class Curvature(NamedTuple):
    """Estimates of a Hessian's spectrum, and a solver for its linear systems."""

    solve: Callable[..., Pytree]  # (b, aim) -> x; iterative solves stop at |b - H x| <= aim
    lowest: jax.Array  # [], the smallest eigenvalue, or up to a few times that eigenvalue
    condition: jax.Array  # [], about the largest eigenvalue over the smallest
    definite: jax.Array  # [], bool: positive definite, beyond rounding
    free: jax.Array | None  # [p, p], basis of the free directions (curvature 0 up to rounding)
    flat: jax.Array  # [], bool: positive definite except in free directions, which solves omit
    floor: jax.Array | None  # [], proved lower bound of the eigenvalues, if the Hessian is formed
    batch: Callable  # maps a function of Hessian products over a leading axis


def is_small(like: Pytree, quadratic: bool) -> bool:
    """Return whether :func:`curvature` should form the Hessian."""
    return optax.tree.size(like) <= DENSE_SIZE * (2 if quadratic else 1)


def curvature(hvp: LinearMap, like: Pytree, products: int, dense: bool) -> Curvature:
    """Return the curvature of ``hvp``; ``like`` is a pytree with the shapes of its argument."""
    if dense:
        return formed(hvp, like)
    return iterative(hvp, like, products, probed(hvp, like, products))


def _batching(hvp: LinearMap, like: Pytree) -> Callable:
    """Return ``jax.vmap``, or a loop for too many weights and for XLA's Fourier transforms."""
    few = optax.tree.size(like) <= _TOGETHER
    if few and "fft" not in operation_names(jax.make_jaxpr(hvp)(like)):
        return jax.vmap
    return lambda function: lambda *stacked: jax.lax.map(lambda x: function(*x), stacked)


def is_symmetric(hvp: LinearMap, like: Pytree) -> jax.Array:
    """Return whether ``u . (H v)`` and ``v . (H u)`` agree for two random vectors."""
    flat, unravel = ravel_pytree(like)
    u, v = map(unravel, pcast_varying(uniform_hash(jnp.arange(2), flat), varying(flat)))
    hu, hv = hvp(u), hvp(v)
    difference = optax.tree.vdot(u, hv) - optax.tree.vdot(v, hu)
    allowed = _ASYMMETRY * jnp.finfo(flat.dtype).eps * (optax.tree.norm(hu) + optax.tree.norm(hv))
    return ~(jnp.abs(difference) > allowed)  # NaN is reported apart


class _HessianFactors(NamedTuple):
    """``H = V C^-1 V'`` with orthogonal V."""

    vectors: jax.Array  # [p, p]
    core: jax.Array  # [p, p]
    smallest: jax.Array  # the smallest eigenvalue of the matrix
    lowest: jax.Array  # the smallest eigenvalue outside the free directions
    definite: jax.Array
    free: jax.Array  # [p, p]
    flat: jax.Array


def formed(hvp: LinearMap, like: Pytree) -> Curvature:
    """Return the curvature of ``hvp`` from its matrix."""
    flat, _ = ravel_pytree(like)
    eps = jnp.finfo(flat.dtype).eps

    def of_columns(columns):
        return row_products(hvp, like, columns.T).T

    matrix = hessian_matrix(hvp, like)
    inverse, positive = _inverted(matrix)
    highest, largest_inverse = _largest_eigenvalues(matrix, inverse, flat)
    lowest = 1 / jnp.where(largest_inverse > 0, largest_inverse, 1)
    # Newton's steps shrink by the relative error of the inverse, at most.
    error = jnp.linalg.norm(jnp.eye(flat.size, dtype=flat.dtype) - inverse @ matrix)
    # Power iterations may overestimate the smallest eigenvalue by a fifth.
    clear = positive & (lowest > 12 * _ROUNDINGS * eps * highest) & (error < _ACCURATE)

    def inverted():
        no, nothing = lowest < 0, jnp.zeros_like(matrix)
        identity = pcast_varying(jnp.eye(flat.size, dtype=flat.dtype), varying(matrix))
        return _HessianFactors(identity, inverse, lowest, lowest, ~no, nothing, no)

    def decomposed():
        symmetric = after(like, matrix)
        vectors, values = jax.lax.linalg.eigh(symmetric, symmetrize_input=False)
        return _sharpened(of_columns, values, vectors, _ROUNDINGS * eps * highest)

    factors = jax.lax.cond(clear, inverted, decomposed)

    def solve(b, aim=None):
        flat, unravel = ravel_pytree(b)
        return unravel(factors.vectors @ (factors.core @ (factors.vectors.T @ flat)))

    smallest = jnp.where(clear, _inverse_bound(inverse, error), factors.smallest)
    floor = smallest - flat.size * eps * jnp.linalg.norm(matrix)
    _, _, _, lowest, definite, free, flat = factors
    batch = _batching(hvp, like)
    return Curvature(solve, lowest, highest / lowest, definite, free, flat, floor, batch)


def _inverted(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Invert a symmetric matrix; return the inverse and whether all pivots are positive.

    Gauss-Jordan elimination by blocks: the pivots are positive if and only if a matrix within the
    rounding ``p eps |matrix|`` (Higham & Mary 2019) is positive definite.
    """
    p = len(matrix)
    block = min(_BLOCK, p)
    size = -(-p // block) * block
    scale = jnp.max(jnp.abs(jnp.diag(matrix)))
    scale = jnp.where((scale > 0) & jnp.isfinite(scale), scale, 1)
    # The scaled matrix is bordered by rows of the identity.
    padded = jnp.diag((jnp.arange(size) >= p).astype(matrix.dtype))
    padded = padded.at[:p, :p].add(matrix / scale)

    def eliminate(a, start, inverse):
        """Exchange the unknowns and the right-hand sides of the rows from ``start`` on."""
        width = len(inverse)
        unit = (jnp.arange(len(a))[:, None] == (start + jnp.arange(width))[None]).astype(a.dtype)
        rows = jax.lax.dynamic_slice_in_dim(a, start, width, 0)
        columns = jax.lax.dynamic_slice_in_dim(a, start, width, 1)
        return a - (columns - unit) @ (inverse @ (rows + unit.T))

    def one_row(k, carry):
        a, least = carry
        pivot = a[k, k]
        inverse = (1 / jnp.where(pivot > 0, pivot, 1))[None, None]
        return eliminate(a, k, inverse), jnp.minimum(least, pivot)

    def one_block(k, carry):
        a, least = carry
        start = k * block
        pivots = jax.lax.dynamic_slice(a, (start, start), (block, block))
        inverse, least = jax.lax.fori_loop(0, block, one_row, (pivots, least))
        return eliminate(a, start, inverse), least

    start = padded, jnp.min(jnp.diag(padded))
    inverse, least = jax.lax.fori_loop(0, size // block, one_block, start)
    return (inverse + inverse.T)[:p, :p] / (2 * scale), least > 0


def _largest_eigenvalues(
    matrix: jax.Array, inverse: jax.Array, flat: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the largest absolute eigenvalues of two symmetric matrices, by power iterations."""
    pair = jnp.stack([matrix, inverse])

    def unit(x):
        size = jnp.linalg.norm(x, axis=1)
        return x / jnp.where(size > 0, size, 1)[:, None], size

    start = pcast_varying(uniform_hash(jnp.zeros(2), flat), varying(matrix))
    step = lambda _, vectors: unit(jnp.einsum("nij,nj->ni", pair, vectors[0]))  # noqa: E731
    highest, largest_inverse = jax.lax.fori_loop(0, _POWERS, step, unit(start))[1]
    return highest, largest_inverse


def _inverse_bound(inverse: jax.Array, error: jax.Array) -> jax.Array:
    """Bound the eigenvalues from below: |H^-1| <= |R| / (1 - error), and |R|^2 <= |R R|_F.

    ``error`` is |I - R H|_F.
    """
    size = jnp.linalg.norm(inverse)
    unit = inverse / jnp.where(size > 0, size, 1)
    bound = size * jnp.sqrt(jnp.linalg.norm(unit @ unit))
    return (1 - error) / jnp.where(bound > 0, bound, 1)


def _sharpened(products, values, vectors, rounding) -> _HessianFactors:
    """Recompute eigenvalues near ``rounding`` as Rayleigh quotients of Hessian products.

    The rounding of a matrix's largest entries hides its small eigenvalues; products can keep them.
    If the Hessian is still not definite, directions of an eigenvalue of 0 up to ``rounding`` count
    as free, and the inverse is that of the other directions.
    """
    p = len(values)
    soft = values <= 100 * rounding  # all of them if the Hessian is 0
    soft_block = soft[:, None] & soft[None]
    scaled = jnp.asarray(REROUNDING_FACTOR, values.dtype)
    # Separate products, so that their rounding differs.
    quotients = jnp.where(soft_block, vectors.T @ products(vectors), 0)
    again = jnp.where(soft_block, vectors.T @ (products(scaled * vectors) / scaled), 0)
    spread = jnp.maximum(
        jnp.linalg.norm(quotients - quotients.T), jnp.linalg.norm(quotients - again)
    )
    noise = spread / jnp.sqrt(jnp.maximum(soft.sum(), 1).astype(spread.dtype))
    scale = jnp.max(jnp.abs(quotients))
    scale = jnp.where(scale > 0, scale, 1)
    # High-curvature directions are moved out of the range of the low-curvature ones.
    outside = jnp.diag(jnp.where(soft, 0, 4 * p * scale))
    symmetric = (quotients + quotients.T) / 2 + outside
    turn, sharp = jax.lax.linalg.eigh(symmetric, symmetrize_input=False)
    inner = sharp < 2 * p * scale
    definite = sharp[0] > _SURE * noise
    free = inner & ~definite & (jnp.abs(sharp) <= rounding)
    stiff = inner & ~free
    others = stiff.any() | ~soft.all()
    flat = free.any() & others & (sharp[0] >= -rounding)
    inside = (turn * jnp.where(stiff, 1 / jnp.where(stiff, sharp, 1), 0)[None]) @ turn.T
    core = jnp.where(soft_block, inside, 0) + jnp.diag(jnp.where(soft, 0, 1 / values))
    lowest = jnp.min(jnp.where(stiff, sharp, jnp.inf))
    lowest = jnp.minimum(lowest, jnp.min(jnp.where(soft, jnp.inf, values)))
    lowest = jnp.where(flat | ~soft.any(), lowest, sharp[0])
    free_vectors = (vectors @ turn) * free[None].astype(turn.dtype)
    return _HessianFactors(vectors, core, values[0], lowest, definite, free_vectors, flat)


def iterative(hvp: LinearMap, like: Pytree, products: int, spectrum: tuple) -> Curvature:
    """Return the curvature of ``hvp`` from its :func:`probed` spectrum, or that of one nearby."""
    lowest, condition, definite = spectrum

    def solve(b, aim):
        return solve_conjugate_gradients(hvp, b, None, steps=products, threshold=aim).x

    batch = _batching(hvp, like)
    return Curvature(solve, lowest, condition, definite, None, definite & False, None, batch)


def probed(hvp: LinearMap, like: Pytree, products: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return ``lowest``, ``condition`` and ``definite`` of a :class:`Curvature`."""
    flat, unravel = ravel_pytree(like)
    # A unit vector has a part of about 1 / sqrt(p) in each direction; a tenth of it may remain.
    threshold = 0.1 / jnp.sqrt(flat.size).astype(flat.dtype)

    def look(number):
        probe = uniform_hash(number, flat)
        b = unravel(pcast_varying(probe / jnp.linalg.norm(probe), varying(flat)))
        solved = solve_conjugate_gradients(hvp, b, None, steps=products, threshold=threshold)
        product = hvp(solved.x)
        square = optax.tree.vdot(solved.x, solved.x)
        bend = optax.tree.vdot(solved.x, product) / jnp.where(square > 0, square, 1)
        left = optax.tree.norm(optax.tree.sub(b, product))
        return bend, (left <= 2 * threshold) & (bend > 0), solved.curvature

    bends, definite, highest = _batching(hvp, like)(look)(jnp.arange(_PROBES))
    lowest = jnp.min(bends)
    return lowest, jnp.max(highest) / jnp.where(lowest > 0, lowest, 1), definite.all()
