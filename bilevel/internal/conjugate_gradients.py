"""Solve symmetric systems by conjugate gradients and detect nonpositive curvature."""

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from bilevel.contracts import LinearMap, Pytree
from bilevel.internal.checks import at_least_float32, nan_unless_finite
from bilevel.internal.precision import coarsest_eps
from ntk.internal.sharding import pcast_varying, varying, while_loop

REROUNDING_FACTOR = 1.37  # no power of 2: a product with a scaled vector is rounded differently
_SMALL = 2**16  # entries up to which a leaf is joined: larger copies cost more than an operation
_AGREED = 300  # a curvature is trusted above this multiple of its change under that factor


class ConjugateGradients(NamedTuple):
    """Result of :func:`solve_conjugate_gradients`."""

    x: Pytree
    residual: jax.Array  # [], 2-norm of b - H x by CG's recursion
    iterations: jax.Array  # [], int
    positive: jax.Array  # [], bool: no direction without positive curvature ended it
    curvature: jax.Array  # [], the largest curvature met
    downhill: Pytree  # the step along a last direction of negative curvature, were it positive


def solve_conjugate_gradients(
    hvp: LinearMap, b: Pytree, x0: Pytree | None, *, steps: chex.Numeric, threshold: chex.Array
) -> ConjugateGradients:
    """Solve ``H x = b`` until the residual's 2-norm is below ``threshold``.

    The iteration stops at a direction of nonpositive curvature and keeps the iterate before it. If
    the residual has grown by then (``H`` singular and ``b`` out of its range), it keeps the iterate
    with the smallest residual. A curvature below ten units of roundoff of the largest one counts
    only if a second, differently rounded product confirms it, e.g. in directions that only a
    penalty bends. Hestenes & Stiefel (1952).
    """
    pack, unpack = packing(b)
    b = pack(b)

    def product(v):
        return pack(hvp(unpack(v)))

    x = optax.tree.zeros_like(b) if x0 is None else pack(x0)
    r = b if x0 is None else optax.tree.sub(b, product(x))
    # The unit is the first residual, so that squares of tiny numbers do not underflow.
    unit = largest_magnitude(r)
    unit = jnp.where(unit == 0, 1, unit)
    r = jax.tree.map(lambda leaf: leaf / unit, r)
    rr = optax.tree.vdot(r, r)
    eps = jnp.finfo(rr.dtype).eps
    floor = jnp.maximum((threshold / unit) ** 2, eps**4)

    dtype = at_least_float32(rr.dtype)  # counts up to 2^24

    def together(*scalars):  # so that one operation writes all scalars of an iteration
        return jnp.stack([x.astype(dtype) for x in scalars])

    def apart(scalars):
        *values, k, going = scalars
        return *(x.astype(rr.dtype) for x in values), k, going > 0

    def unfinished(carry):
        *_, rr, k, going = apart(carry[-1])
        return (k < steps) & (rr > floor) & going

    def step(carry):
        best, x, r, p, scalars = carry
        _, steepest, trusted, seen, least, rr, k, _ = apart(scalars)
        again = seen > 0
        factor = jnp.where(again, REROUNDING_FACTOR, 1).astype(rr.dtype)
        hp = optax.tree.scale(1 / factor, product(optax.tree.scale(factor, p)))
        pp = optax.tree.vdot(p, p)
        bend = optax.tree.vdot(p, hp) / pp
        steepest = jnp.maximum(steepest, jnp.abs(bend))
        # A curvature below roundoff counts if a differently rounded product confirms it.
        noise = _AGREED * jnp.abs(bend - seen)
        agrees = again & (bend > noise)
        trusted = jnp.where(agrees, noise, trusted)
        # NaN compares false, so the loop continues and NaN reaches the result.
        low = bend <= jnp.minimum(10 * eps * steepest, trusted)
        moves = ~low | agrees
        length = jnp.where(moves, rr / jnp.where(moves, bend * pp, 1), 0)
        x = optax.tree.add_scale(x, length * unit, p)
        r = optax.tree.add_scale(r, -length, hp)
        rr_next = optax.tree.vdot(r, r)
        p = optax.tree.where(moves, optax.tree.add_scale(r, rr_next / rr, p), p)
        look = ~moves & ~again & (bend > 0)
        seen = jnp.where(look, bend, 0)
        best = optax.tree.where(rr_next < least, x, best)
        least = jnp.where(rr_next < least, rr_next, least)
        scalars = bend, steepest, trusted, seen, least, rr_next, k + 1, moves | look
        return best, x, r, p, together(*scalars)

    zero, one = jnp.zeros_like(rr), jnp.ones_like(rr)
    most = jnp.full_like(rr, jnp.finfo(rr.dtype).max)
    scalars = together(zero, zero, most, zero, rr, rr, zero, one)
    best, x, _, p, scalars = while_loop(unfinished, step, (x, x, r, r, scalars))
    bend, steepest, *_, least, rr_last, k, going = apart(scalars)
    grown = ~going & (rr_last > rr) & jnp.isfinite(rr_last)
    x, rr = optax.tree.where(grown, (best, least), (x, rr_last))
    negative = ~going & (bend < -10 * eps * steepest)
    length = rr_last / jnp.where(negative, -bend * optax.tree.vdot(p, p), 1)
    downhill = optax.tree.scale(jnp.where(negative, length * unit, 0), p)
    x, downhill = unpack(nan_unless_finite(x, rr)), unpack(downhill)
    positive = going | (rr <= floor)
    return ConjugateGradients(x, jnp.sqrt(rr) * unit, k.astype(int), positive, steepest, downhill)


def packing(like: Pytree) -> tuple[Callable[[Pytree], Pytree], Callable[[Pytree], Pytree]]:
    """Return ``pack``, which joins the small leaves of trees like this one, and its inverse.

    A device starts every operation of a loop separately. Steps and inner products over one array
    take one operation instead of one for each leaf. Leaves of several dtypes stay apart.
    """
    leaves, tree = jax.tree.flatten(like)
    small = [x.size <= _SMALL for x in leaves]
    if sum(small) < 2 or len({x.dtype for x in leaves}) > 1:
        return lambda tree: tree, lambda packed: packed
    shapes = [x.shape for x, joins in zip(leaves, small, strict=True) if joins]
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])

    def pack(tree):
        leaves = jax.tree.leaves(tree)
        joined = [x.ravel() for x, joins in zip(leaves, small, strict=True) if joins]
        apart = [x for x, joins in zip(leaves, small, strict=True) if not joins]
        return [jnp.concatenate(pcast_varying(joined, varying(joined))), *apart]

    def unpack(packed):
        joined, *apart = packed
        pieces = jnp.split(joined, ends[:-1])
        parts = iter([x.reshape(shape) for x, shape in zip(pieces, shapes, strict=True)])
        rest = iter(apart)
        return jax.tree.unflatten(tree, [next(parts if joins else rest) for joins in small])

    return pack, unpack


def largest_magnitude(tree: Pytree) -> jax.Array:
    """Return the largest absolute value; its square may be out of range."""
    return jnp.stack([jnp.max(jnp.abs(leaf), initial=0) for leaf in jax.tree.leaves(tree)]).max()


def default_tolerance(tree: Pytree) -> float:
    """Return 1e-10 in float64, and ten units of roundoff in narrower types."""
    return max(1e-10, 10 * coarsest_eps(tree))
