"""Duals ``E s(u) s(u')`` of smooth activations and of their slopes, at pairs of positions.

By a series of each position's own, or by one table for the layer.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ntk.expectations.hermite import Pair, expectations, polynomial
from ntk.networks import tables
from ntk.networks.moments import LayerFeatures
from ntk.networks.windows import as_pair_rows


def duals_by_position(
    a: LayerFeatures, b: LayerFeatures, p: jax.Array, full: bool
) -> list[jax.Array]:
    """Duals of expansions, one position after another.

    A series ends where its own largest correlation lets it.
    """

    def one(x):
        fs, gs, p = x
        pair = Pair(p, 1 - p, jnp.zeros_like(p))
        return [value for value, _ in expectations(fs, gs, (1, 0), pair)]

    fs, gs = (jax.tree.map(lambda x: as_pair_rows(x, full), (s.value, s.slope)) for s in (a, b))
    return jax.lax.map(one, (fs, gs, p))


def by_tables(
    both: Any, a: LayerFeatures, b: LayerFeatures, p: jax.Array, full: bool
) -> list[jax.Array]:
    """Duals of tabulated functions, one position after another: their terms are made here.

    In the full layout image after image of the rows: each ends its series where its own largest
    correlation lets it, and strips of that size stay in the processor's cache.
    """
    strip = p.shape[1] // len(a.before.square) if full else p.shape[1]

    def one(x):
        (sa, fs), (sb, gs), p = x
        fs, gs = (
            tuple(
                f._replace(regular=tables.table_coefficients(t, s, f.norm, 1 - k))
                for k, (t, f) in enumerate(zip(both, found, strict=True))
            )
            for s, found in ((sa, fs), (sb, gs))
        )

        def rows_of(x):
            fs, p = x
            if len(both[0].sides):
                pair = Pair(p, 1 - p, jnp.zeros_like(p))
                return [value for value, _ in expectations(fs, gs, (1, 0), pair)]
            return [
                jax.lax.stop_gradient(f.norm[:, None] * g.norm[None])
                * _by_parity(f.regular.T, g.regular.T, 1 - 2 * p)
                for f, g in zip(fs, gs, strict=True)
            ]

        if strip == len(p):
            return rows_of((fs, p))
        split = jax.tree.map(lambda x: x.reshape(len(x) // strip, strip, *x.shape[1:]), (fs, p))
        return [x.reshape(p.shape) for x in jax.lax.map(rows_of, split)]

    sides = [
        jax.tree.map(lambda x: as_pair_rows(x, full), (s.before.norm, (s.value, s.slope)))
        for s in (a, b)
    ]
    return jax.lax.map(one, (*sides, p))


def _by_parity(a, b, rho) -> jax.Array:
    """``sum_k a_k b_k rho^k``; of odd and even functions half of the terms are no work."""
    even, odd = (polynomial(a[i::2], b[i::2], rho * rho) for i in (0, 1))
    return even + rho * odd
