"""Smooth activations at all standard deviations at once: one small table for a layer.

Every position has its norm s. Expanding the activation at each norm would take thousands of numbers
per position, but the expansion is smooth in s. With z ~ N(0, 1), x(s) from [0, END] to [-1, 1],
logarithmic over most of it, and Chebyshev polynomials T_j,

    f(s z) = f(0) + s sum_j T_j(x(s)) g_j(z) + the kink at 0, s^d (left, right) |z|^d.

So f is a short vector ``v(s) = (1, s T_0, s T_1, ..., s^d left, s^d right)`` in a fixed basis. Its
Gram matrices and Hermite coefficients are the table. Norms and bounds are quadratic forms in v. The
terms of Mehler's series (:mod:`ntk.expectations.hermite`) are a product of v and the table,
computed for one tile of pairs at a time. For an analytic f the g_j fall geometrically, and the last
of them measure the truncation error. Activations with kinks elsewhere are expanded one by one.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ntk.expectations.gaussian import Grid, hermite_grid, kink_series, reciprocal, root
from ntk.expectations.hermite import Expansion, Pieces, tails
from ntk.infinite.layer_expansions import Layer, Resolution, kinks_at_zero, sample_smooth_part
from ntk.internal.products import einsum, matmul

END = 16.0  # the largest norm; beyond, the error is infinite
_BEND = 0.25  # where x turns from linear to logarithmic
_SIZES = {8: 112, 4: 40}  # how many g_j, by bytes of a number


class ActivationTable(NamedTuple):
    """A function at all norms; the basis has b entries."""

    terms: jax.Array  # [b, K], Hermite coefficients, without those of the kink
    mean: jax.Array  # [b]
    gram: jax.Array  # [b, b], inner products
    regular: jax.Array  # [b, b], without the kink
    missed_regular: jax.Array  # [b, b], of the regular part beyond K polynomials
    steep: jax.Array  # [b, b], of the derivatives of K polynomials
    stretch: jax.Array  # [b, b], of z times that
    sides: jax.Array  # [2], left and right at the kink; [0] without one
    nodes: jax.Array  # bound of the quadrature error, over the norm
    tail: jax.Array  # norms of the last g_j: the truncation error, over s
    rounding: jax.Array  # of the sum of the g_j, over s
    missed: jax.Array  # norm of a kink of jump 1 beyond K polynomials


def tabulate_layer(layer: Layer, weights, how: Resolution, dtype) -> tuple[ActivationTable, ...]:
    """Return tables of ``sum_i weights_i s_i`` and of its slope, with at most a kink at 0."""
    grid = jax.tree.map(lambda x: jnp.asarray(x, dtype), hermite_grid(*how))
    scales = jnp.asarray(np.append(_chebyshev_nodes(dtype)[1], 0), dtype)
    u = scales[:, None] * grid.z[None]
    values = sample_smooth_part(layer, weights, u)  # of s and s', at u and -u
    sides = jnp.stack(kinks_at_zero(layer, weights))
    sides = sides if any(s.smooth is None for s in layer) else sides[:0]
    return tuple(_tabulate_function(values[k], sides, grid, 1 - k) for k in (0, 1))


def _chebyshev_nodes(dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return Chebyshev points x, and their norms s."""
    size = _SIZES[jnp.dtype(dtype).itemsize]
    x = np.cos(np.pi * (np.arange(size) + 0.5) / size)
    return x, _BEND * np.expm1((x + 1) / 2 * np.log1p(END / _BEND))


@functools.partial(jax.jit, static_argnums=3)
def _tabulate_function(values, sides, grid: Grid, degree: int) -> ActivationTable:
    dtype = values.dtype
    x, scales = _chebyshev_nodes(dtype)
    size = len(x)
    chebyshev = np.polynomial.chebyshev.chebvander(x, size - 1).T * 2 / size
    chebyshev[0] /= 2
    start = values[:, -1:]
    over = jnp.asarray(1 / scales, dtype)[:, None]
    rates = matmul(jnp.asarray(chebyshev, dtype), (values[:, :-1] - start) * over[None])
    ends = jnp.concatenate([start, rates], 1)  # right and left [1 + size, m]
    roots = grid.roots[None]
    e, o = (ends[0] + ends[1]) * roots, (ends[0] - ends[1]) * roots
    terms = jnp.stack([matmul(e, grid.even), matmul(o, grid.odd)], -1).reshape(1 + size, -1)
    count = terms.shape[1]
    own = root(((values * roots[None]) ** 2).sum((0, 2)))
    at = root(tails(values[0], grid) + tails(values[1], grid)) * reciprocal(own)
    regular = _summed_gram(e, o) / 2
    back = functools.partial(einsum, "ik,mk->im")  # no transpose of the large arrays
    missed = e - 2 * back(terms[:, ::2], grid.even), o - 2 * back(terms[:, 1::2], grid.odd)
    missed_regular = _summed_gram(*missed) / 2
    norms = root(jnp.diag(regular)[1:])
    total, jump = terms, 0.0
    if len(sides):
        power = grid.roots * (grid.z if degree else 1)
        sign = -1 if degree else 1  # |z|^d is -z on the left
        e = jnp.concatenate([e, jnp.stack([sign * power, power])])
        o = jnp.concatenate([o, jnp.stack([-sign * power, power])])
        series, jump = kink_series(degree, count)
        kink_rows = np.stack([(np.arange(count) == degree) - series, series])
        total = jnp.concatenate([terms, jnp.asarray(kink_rows, dtype)])
        terms = jnp.pad(terms, ((0, 2), (0, 0)))
        regular, missed_regular = (jnp.pad(x, ((0, 2), (0, 2))) for x in (regular, missed_regular))
    order = jnp.asarray(np.sqrt(np.arange(count)), dtype)[None]
    slope = order * total  # slope_k belongs to h_(k-1)
    stretch = (order * slope).at[:, :-2].add(order[:, 1:-1] * slope[:, 2:])
    eps = float(jnp.finfo(dtype).eps)
    rounding = eps * ((4 + jnp.arange(size, dtype=dtype)) * norms).sum()
    bounds = 4 * at.max(), norms[-4:].sum(), rounding, jnp.asarray(jump, dtype)
    gram = _summed_gram(e, o) / 2
    grams = gram, regular, missed_regular, _summed_gram(slope), _summed_gram(stretch)
    mean = matmul(e, grid.roots)
    return ActivationTable(terms, mean, *grams, sides, *jax.lax.stop_gradient(bounds))


def _summed_gram(*parts) -> jax.Array:
    return functools.reduce(jnp.add, (matmul(part, part.T) for part in parts))


def basis_vector(table: ActivationTable, scale: jax.Array, degree: int) -> jax.Array:
    """Return v(s) [..., b] of norms s, for a function with a kink of this degree."""
    size = len(table.mean) - 1 - len(table.sides)
    x = 2 * jnp.log1p(scale / _BEND) / np.log1p(END / _BEND).item() - 1
    x = jnp.minimum(x, 1)

    def following(carry, _):
        before, now = carry
        return (now, 2 * x * now - before), now

    polynomials = jax.lax.scan(following, (x, jnp.ones_like(x)), length=size)[1]
    parts = [jnp.ones_like(x)[None], scale[None] * polynomials]
    if len(table.sides):
        power = scale if degree else jnp.ones_like(scale)
        parts.append(jnp.stack([power * side for side in table.sides]))
    return jnp.moveaxis(jnp.concatenate(parts), 0, -1)


def evaluated(table: ActivationTable, scale: jax.Array, error: jax.Array, degree: int) -> Expansion:
    """Return the function at norms [N] with an ``error`` [N]: an expansion without its terms."""
    v = basis_vector(table, scale, degree)
    mean, square = matmul(v, table.mean), _form(v, table.gram)
    norm = root(square)
    sides = jnp.zeros((*norm.shape, 2), norm.dtype)
    power = scale if degree else jnp.ones_like(scale)
    if len(table.sides):
        unit = jax.lax.stop_gradient(reciprocal(norm))
        sides = jnp.stack([(power * unit) * side for side in table.sides], -1)
    errors = _table_errors(table, v, scale, norm, error, power, degree)
    return without_terms(norm, mean, sides, errors)


def without_terms(norm: jax.Array, mean: jax.Array, sides: jax.Array, errors: Any) -> Expansion:
    """Return an expansion of no terms, with the last five fields from ``errors``."""
    none = jnp.zeros((*norm.shape, 0), norm.dtype)
    pieces = Pieces(none, none, none[..., None])
    return Expansion(norm, mean, none, sides, pieces, none, *jax.lax.stop_gradient(errors))


def _form(v, matrix) -> jax.Array:
    return (matmul(v, matrix) * v).sum(-1)


def _table_errors(table: ActivationTable, v, scale, norm, error, power, degree: int):
    """Return the last five fields of an expansion."""
    eps, over = float(jnp.finfo(norm.dtype).eps), reciprocal(norm)
    grams = table.regular, table.missed_regular, table.steep, table.stretch
    size, missed_regular, steep, stretch = (root(jnp.maximum(_form(v, m), 0)) for m in grams)
    slant = power * jnp.abs(table.sides[1] - table.sides[0]) if len(table.sides) else 0 * norm
    off = scale * (table.tail + table.rounding) + table.nodes * size
    noise = 4 * eps * (size + norm) + off + (error / 2 + 4 * eps) * stretch
    noise = jnp.where(scale <= END, noise, jnp.inf)
    missed = jnp.stack([missed_regular * over, slant * table.missed * over], -1)
    jump = jnp.zeros_like(norm) if degree else slant * over
    return noise * over, size * over + 1, missed, steep * over, jump


def table_coefficients(table: ActivationTable, scale, norm, degree: int) -> jax.Array:
    """Return Hermite coefficients of the regular part over the function's norms, [..., K]."""
    v = basis_vector(table, scale, degree) * jax.lax.stop_gradient(reciprocal(norm))[..., None]
    return matmul(v, table.terms)
