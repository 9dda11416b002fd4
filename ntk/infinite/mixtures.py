"""Mixtures of activations in one hidden layer: kernels quadratic in the weights of the mixture.

    f(x) = v' s_alpha(W x),    s_alpha = sum_i alpha_i s_i,    K_alpha = sum_ij alpha_i alpha_j K_ij
    K_ij = c0 (X X') o E[s_i'(u) s_j'(u')],    u = w.x,  w ~ N(0, I)

with W trained and v fixed, of variance c0 over the width: Oymak et al. 2021, section 4.2.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from ntk.expectations.activations import Activation, Function, in_a_network
from ntk.expectations.gaussian import root
from ntk.expectations.hermite import Pair, expectations, on_diagonal
from ntk.infinite.input_pairs import (
    half_chord_errors,
    half_chords,
    normalize_rows,
    pad_rows,
    same_inputs,
)
from ntk.infinite.layer_expansions import (
    RESOLUTIONS,
    TRACED,
    Layer,
    Resolution,
    check_input_pair,
    check_resolved,
    common_kinks,
    expand_layer,
    is_resolved,
    largest_error,
    squared_norms,
)
from ntk.internal.checks import check_finite, concrete, describe, nan_where, real_array
from ntk.internal.products import einsum
from ntk.internal.tiles import assemble, device_tile_size, mirror_triangle, take_rows


def mixture_blocks(
    x: chex.Array,
    activations: Sequence[Activation | Function],
    *,
    x2: chex.Array | None = None,
    scale: float | chex.Array = 1.0,
    error: bool = False,
) -> Any:
    """Return the kernels K_ij that a mixture of activations combines, by the module's formula.

    Parameters
    ----------
    x : array [n, d]
        The variance of u is ``|x|^2``, not divided by d.
    activations : sequence of Activation or function
        h activations, or smooth functions.
    x2 : array [n2, d], optional
        The second set of inputs, for predictions. Default: ``x``.
    scale : float
        c0, the variance of the output weights times the width.
    error : bool
        Whether to return a bound of the entries' errors too, for the certificates.

    Returns
    -------
    array [h, h, n, n2], or two of them with ``error``
        ``blocks[j, i] = blocks[i, j].T`` without ``x2``; exactly, unless traced.

    Raises
    ------
    ValueError
        If a shape is wrong, or an input is complex or not finite. Traced values are not checked.
    FloatingPointError
        If an entry's error is too large even with 4096 Hermite coefficients. Such entries of traced
        inputs are NaN.

    Notes
    -----
    Memory: ``3 h^2 n n2`` numbers. Slopes ignore the jumps of an activation, as gradients of a
    network do. Source: Oymak et al. 2021, section 4.2 and Theorem 3 (with ``scale`` 1). Only the
    hidden layer's weights are trained; the signs of the output weights cancel.

    Examples
    --------
    >>> from ntk.expectations.activations import identity, relu
    >>> blocks = jax.jit(lambda x: mixture_blocks(x, [relu, identity]))(jnp.eye(3))
    >>> blocks.shape, bool(jnp.allclose(blocks[0, 0], jnp.eye(3) / 2))
    ((2, 2, 3, 3), True)
    """
    if not isinstance(activations, Sequence) or not activations:
        got = "none" if isinstance(activations, Sequence) else describe(activations)
        raise ValueError(f"activations: expected at least one, got {got}.")
    layer = tuple(in_a_network(s) for s in activations)
    x, x2 = check_input_pair("x", x, "x2", x2)
    if not concrete(x, x2, scale):
        blocks_and_errors, _ = _blocks_and_slopes(layer, x, x2, scale, TRACED)
        return blocks_and_errors if error else blocks_and_errors[0]
    n1, n2 = len(x), len(x if x2 is None else x2)
    x, second = pad_rows(x), pad_rows(x2)
    goal = 1e4 * float(jnp.finfo(x.dtype).eps)
    for how in RESOLUTIONS:
        blocks_and_errors, slopes = _blocks_and_slopes(layer, x, second, scale, how)
        blocks, bound = (k[..., :n1, :n2] for k in blocks_and_errors)
        if not concrete(blocks):
            return (blocks, bound) if error else blocks
        largest = np.abs(np.asarray(blocks)).max()
        if float(np.asarray(bound).max() / largest) <= goal or is_resolved(slopes):
            break
    check_resolved("x", blocks)
    if x2 is None:
        blocks, bound = _exactly_symmetric(blocks), _exactly_symmetric(bound)
    return (blocks, bound) if error else blocks


def mixture_kernel(alpha: chex.Array, blocks: chex.Array) -> jax.Array:
    """Return ``K_alpha = sum_ij alpha_i alpha_j K_ij`` [n1, n2], quadratic in alpha.

    Parameters
    ----------
    alpha : array [h]
    blocks : array [h, h, n1, n2]

    Raises
    ------
    ValueError
        If the shapes do not fit, or ``alpha`` is not finite.

    Examples
    --------
    >>> mixture_kernel(jnp.array([0.5, 0.5]), jnp.ones((2, 2, 1, 1)))
    Array([[1.]], dtype=float...)
    """
    alpha, blocks = real_array("alpha", alpha), real_array("blocks", blocks)
    if alpha.ndim != 1:
        raise ValueError(f"alpha: expected an array [h], got shape {alpha.shape}.")
    check_finite("alpha", alpha, "weights")
    h = len(alpha)
    if blocks.ndim != 4 or blocks.shape[:2] != (h, h):
        expected = f"[{h}, {h}, n1, n2] as alpha has"
        raise ValueError(f"blocks: expected shape {expected}, got {blocks.shape}.")
    return einsum("i,ijnm,j->nm", alpha, blocks, alpha)


def _blocks_and_slopes(layer: Layer, x1, x2, scale, how: Resolution):
    kinks = common_kinks([layer])
    one = np.ones(1, x1.dtype)
    slopes = []
    for x in (x1, x2):
        if x is not None:
            norms, error = _norms_and_error(x)
            slopes.append([expand_layer((s,), one, norms, error, kinks, how)[1] for s in layer])
    scale = jnp.asarray(scale, x1.dtype)
    blocks_and_errors = _blocks_with_errors(x1, x2, slopes[0], slopes[-1], scale)
    return blocks_and_errors, [slope for of_x in slopes for slope in of_x]


@jax.jit
def _norms_and_error(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    norms = root(squared_norms(x))
    return norms, jnp.full_like(norms, 8 * float(jnp.finfo(x.dtype).eps))


@jax.jit
def _blocks_with_errors(x1, x2, slopes1, slopes2, scale):
    """Return ``(blocks, error)`` from the expansions of the h slopes."""
    h = len(slopes1)

    def prepare(x, slopes):
        rows = jax.tree.map(lambda *leaves: jnp.stack(leaves, 1), *slopes)  # [n, h, ...]
        norms = root(squared_norms(x))
        return normalize_rows(x, norms), norms, rows

    rows = prepare(x1, slopes1)
    columns = rows if x2 is None else prepare(x2, slopes2)
    n1, n2 = len(x1), len(columns[1])

    def block(i, j):
        def take(rows, start, size, n, index):
            units, norms, slopes = take_rows(rows, start, size, n)
            pick = functools.partial(jax.lax.dynamic_index_in_dim, axis=1, keepdims=False)
            return units, norms, jax.tree.map(lambda x: pick(x, index), slopes)

        def tile(r, c, size1, size2):
            ua, na, f = take(rows, r, size1, n1, i)
            ub, nb, g = take(columns, c, size2, n2, j)
            p, q = half_chords(ua, ub)
            eps = float(jnp.finfo(p.dtype).eps)
            same = same_inputs(r, c, size1, size2) if x2 is None else None
            if same is not None:
                # Entries with rho = 1 come from `on_diagonal`; here they need no terms.
                p, q = (jnp.where(same, 0.5, half) for half in (p, q))
            error = half_chord_errors(ua, ub, p, q)
            ((dual, bound),) = expectations((f,), (g,), (0,), Pair(p, q, error))
            sizes = na[:, None] * nb[None]
            covariance = (q - p) * sizes
            size = f.norm[:, None] * g.norm[None]
            if same is not None:
                covariance = jnp.where(same, sizes, covariance)
                value, off = on_diagonal(f, g, i == j)
                dual = jnp.where(same, value[:, None], dual)
                bound = jnp.where(same, off[:, None], bound)
            total = jnp.abs(covariance) * bound + sizes * (2 * error + 8 * eps) * jnp.abs(dual)
            bad = ~(total <= largest_error(p.dtype) * sizes * size)
            total = jnp.where(bad, jnp.inf, jnp.abs(scale) * total)
            dual = nan_where(bad, dual)
            return scale * covariance * dual, jax.lax.stop_gradient(total)

        size = device_tile_size(max(n1, n2), 1, x1.dtype)
        return assemble(tile, n1, n2, symmetric=False, size=size)

    pairs = [(i, j) for i in range(h) for j in range(h) if x2 is not None or i <= j]
    pair_blocks = jax.lax.map(lambda pair: block(*pair), jnp.asarray(pairs))
    if x2 is not None:
        return jax.tree.map(lambda x: x.reshape(h, h, n1, n2), pair_blocks)

    def symmetric(blocks):
        upper = dict(zip(pairs, blocks, strict=True))
        every = itertools.product(range(h), repeat=2)
        flat = [upper[i, j] if i <= j else upper[j, i].T for i, j in every]
        return jnp.stack(flat).reshape(h, h, n1, n1)

    return jax.tree.map(symmetric, pair_blocks)


@jax.jit
def _exactly_symmetric(blocks: jax.Array) -> jax.Array:
    own = jnp.arange(len(blocks))
    return blocks.at[own, own].set(mirror_triangle(blocks[own, own]))
