"""Mixtures of activations in one hidden layer: kernels quadratic in the weights of the mixture.

    f(x) = v' s_alpha(W x),    s_alpha = sum_i alpha_i s_i,    K_alpha = sum_ij alpha_i alpha_j K_ij
    K_ij = c0 (X X') o E[s_i'(u) s_j'(u')],    u = w.x,  w ~ N(0, I)

with W trained and v fixed, of variance c0 over the width: Oymak et al. 2021, section 4.2.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ntk.activations import Activation, Function, activation
from ntk.architecture import check_resolved, inputs, is_traced, needed_terms
from ntk.gaussian import mean, root
from ntk.mehler import Layer, coefficients, derivative, evaluate, expectations
from ntk.pairs import assemble, half_chords, mirrored, take_rows, unit


def mixture_blocks(
    x: jax.Array,
    activations: Sequence[Activation | Function],
    *,
    x2: jax.Array | None = None,
    scale: float | jax.Array = 1.0,
) -> jax.Array:
    """The kernels K_ij that a mixture of activations mixes; see the module's formula.

    Parameters
    ----------
    x : array [n, d]
        The variance of u is ``|x|^2``, not divided by d.
    activations : h activations or smooth functions.
    x2 : array [n2, d], optional
        The second set of inputs, for predictions; ``x`` by default.
    scale : float
        c0, the variance of the output weights times the width.

    Returns
    -------
    array [h, h, n, n2]
        ``blocks[j, i] = blocks[i, j].T`` without ``x2``; exactly, unless traced.

    Raises
    ------
    ValueError, FloatingPointError
        As :func:`ntk.network_kernel`.

    Examples
    --------
    >>> from ntk.activations import relu, tanh
    >>> blocks = mixture_blocks(jnp.eye(3), [relu, tanh])
    >>> blocks.shape, bool(jnp.allclose(blocks[0, 0], jnp.eye(3) / 2))
    ((2, 2, 3, 3), True)

    Notes
    -----
    Memory: h^2 n n2 numbers, and half as many while they are put together.

    References
    ----------
    Oymak et al. 2021, section 4.2 and Theorem 3 (where K has no ``scale``). Only the hidden layer's
    weights are trained; the signs of the output weights cancel.
    """
    layer = tuple(activation(s) for s in activations)
    if not layer:
        raise ValueError("activations: expected at least one, got none.")
    x, x2 = inputs("x", x, "x2", x2)
    traced = is_traced((x, x2, scale))
    one = jnp.ones(1, x.dtype)
    terms = 512
    if not traced:
        # A network of one hidden layer for each.
        network = ([one], jnp.zeros(0, x.dtype), jnp.ones(2, x.dtype))
        terms = max(needed_terms(((s,),), x, x2, *network) for s in layer)
    blocks = _blocks(x, x2, scale, layer=layer, terms=terms)
    if is_traced(blocks):
        return blocks
    check_resolved("x", blocks, terms)
    return blocks if x2 is not None else _exactly_symmetric(blocks)


def mixture_kernel(alpha: jax.Array, blocks: jax.Array) -> jax.Array:
    """``K_alpha = sum_ij alpha_i alpha_j K_ij``, quadratic in alpha.

    Parameters
    ----------
    alpha : array [h]
    blocks : array [h, h, n1, n2]

    Returns
    -------
    array [n1, n2]

    Raises
    ------
    ValueError
        If the shapes do not fit.

    Examples
    --------
    >>> mixture_kernel(jnp.array([0.5, 0.5]), jnp.ones((2, 2, 1, 1)))
    Array([[1.]], dtype=float...)
    """
    alpha, blocks = jnp.asarray(alpha), jnp.asarray(blocks)
    if alpha.ndim != 1:
        raise ValueError(f"alpha: expected an array [h], got shape {alpha.shape}.")
    if not is_traced(alpha) and not bool(np.isfinite(alpha).all()):
        raise ValueError(f"alpha: expected finite weights, got {alpha}.")
    if blocks.ndim != 4 or blocks.shape[:2] != (*alpha.shape, *alpha.shape):
        raise ValueError(
            f"blocks: expected shape [{len(alpha)}, {len(alpha)}, n1, n2] as alpha has, "
            f"got {blocks.shape}."
        )
    return jnp.einsum("i,ijnm,j->nm", alpha, blocks, alpha)


@functools.partial(jax.jit, static_argnames=("layer", "terms"))
def _blocks(x1, x2, scale, *, layer: Layer, terms: int) -> jax.Array:
    h, slopes = len(layer), derivative(layer)
    choices = jnp.eye(h, dtype=x1.dtype)  # one activation of the layer, as weights

    def prepare(x):
        norms = root((x * x).sum(1))
        tables = jax.lax.map(lambda w: _table(slopes, w, norms, terms), choices)
        return unit(x, norms), norms, jax.tree.map(lambda t: jnp.moveaxis(t, 0, 1), tables)

    rows = prepare(x1)
    columns = rows if x2 is None else prepare(x2)
    n1, n2 = len(x1), len(columns[1])
    on_diagonal = None if x2 is not None else jnp.moveaxis(_moments(slopes, rows[1]), 2, 0)

    def block(i, j):
        def tile(r, c, size1, size2):
            ua, na, ta = take_rows(rows, r, size1, n1)
            ub, nb, tb = take_rows(columns, c, size2, n2)
            p, q = half_chords(ua, ub)
            sizes = na[:, None] * nb
            covariance = (q - p) * sizes
            if on_diagonal is not None:
                same = (r + jnp.arange(size1))[:, None] == c + jnp.arange(size2)
                p, q = (jnp.where(same, 0.5, half) for half in (p, q))
                covariance = jnp.where(same, sizes, covariance)
            ca, cb = (None if t is None else t[:, k].T for t, k in ((ta, i), (tb, j)))
            dual = expectations(slopes, slopes, terms, choices[i], choices[j], na, nb, p, q, ca, cb)
            if on_diagonal is not None:
                known = take_rows(on_diagonal, r, size1, n1)[:, i, j]
                dual = jnp.where(same, known[:, None], dual)
            return scale * covariance * dual

        return assemble(tile, n1, n2, symmetric=False)

    pairs = [(i, j) for i in range(h) for j in range(h) if x2 is not None or i <= j]
    found = jax.lax.map(lambda pair: block(*pair), jnp.asarray(pairs))
    if x2 is not None:
        return found.reshape(h, h, n1, n2)
    upper = dict(zip(pairs, found, strict=True))

    def place(i, j):
        return upper[i, j] if i <= j else upper[j, i].T

    return jnp.stack([jnp.stack([place(i, j) for j in range(h)]) for i in range(h)])


@jax.jit
def _exactly_symmetric(blocks: jax.Array) -> jax.Array:
    own = jnp.arange(len(blocks))
    return blocks.at[own, own].set(mirrored(blocks[own, own]))


def _table(slopes: Layer, w: jax.Array, norms: jax.Array, terms: int):
    found = coefficients(slopes, w, norms, terms)
    # Derivatives are taken by Price's theorem: these must not carry any.
    return None if found is None else jax.lax.stop_gradient(found.T)


def _moments(slopes: Layer, norms: jax.Array) -> jax.Array:
    """``E[s_i'(u) s_j'(u)]`` [h, h, n]."""

    def row(w):
        def product(s, u):
            return evaluate(slopes, w, u) * s(u)

        return jnp.stack([mean(functools.partial(product, s), norms) for s in slopes])

    return jax.lax.map(row, jnp.eye(len(slopes), dtype=norms.dtype))
