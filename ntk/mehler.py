"""Expectations of all pairs of two sets of inputs: one polynomial in the correlation each.

By Mehler's formula, for standard deviations sx, sy and correlation rho,

    E[f(u) g(u')] = sum_k a_k(sx) b_k(sy) rho^k,    a_k(s) = E[f(s z) h_k(z)],

so all n1 x n2 pairs cost n1 + n2 sets of coefficients, matrix products with a table of Hermite
functions, and ``terms`` multiply-adds per pair: no quadrature per pair, any norms. f and g are
weighted sums of activations. Smooth terms make the coefficients small fast; two kinks, whose
series would converge slowly, are taken out and put back in closed form.

Reference: Mehler (1866); Daniely, Frostig & Singer (2016), the dual of an activation.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ntk.activations import Activation
from ntk.gaussian import hermite, kink_coefficients, kinked_pair, reciprocal

Layer = tuple[Activation, ...]
"""Activations to be summed with weights; kinked ones of one degree."""

_UNROLLED = 16  # Horner steps in one pass over a tile


def evaluate(layer: Layer, weights: jax.Array, u: jax.Array) -> jax.Array:
    """``sum_i weights_i s_i(u)``, elementwise."""
    return sum(weights[i] * s(u) for i, s in enumerate(layer))  # type: ignore[return-value]


def derivative(layer: Layer) -> Layer:
    """The derivatives, to be summed with the same weights."""
    return tuple(s.derivative for s in layer)


def kinks(layer: Layer, weights: jax.Array) -> tuple[jax.Array, jax.Array] | None:
    """(left, right) of the sum of the kinked activations; None without any."""
    kinked = [(i, s) for i, s in enumerate(layer) if s.smooth is None]
    if not kinked:
        return None
    left, right = (jnp.stack([weights[i] * s.kink[side] for i, s in kinked]) for side in (0, 1))
    return left.sum(), right.sum()


def coefficients(layer: Layer, weights: jax.Array, scale: jax.Array, terms: int):
    """Hermite coefficients [terms, n] of the sum of the smooth activations; None without any."""
    smooth = [(i, s) for i, s in enumerate(layer) if s.smooth is not None]
    if not smooth:
        return None
    fn = functools.partial(
        evaluate, tuple(s for _, s in smooth), weights[np.array([i for i, _ in smooth])]
    )
    return hermite(fn, scale, terms).T


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def expectations(f: Layer, g: Layer, terms: int, wf, wg, sx, sy, p, q, cf=None, cg=None):
    """``E[f(u) g(u')]`` of all pairs, [n1, n2].

    Parameters
    ----------
    f, g : layers; static.
    terms : int, static
        Coefficients kept, a multiple of 16. Where that is not enough for a relative error of
        1e-8 the entry is NaN; no more are summed than the largest correlation asks for.
    wf, wg : weights [len(f)], [len(g)]
    sx, sy : standard deviations [n1], [n2]; or [1] where they are all equal.
    p, q : [n1, n2]
        ``(1 - rho) / 2`` and ``(1 + rho) / 2``.
    cf, cg : results of :func:`coefficients`, if at hand.

    Notes
    -----
    Differentiable to any order in weights, deviations and p, q (as far as derivatives of kinks
    go), by Price's theorem and its companions for the deviations:

        dE/drho = sx sy E[f'(u) g'(u')],    sx dE/dsx = E[u f'(u) g(u')].

    Memory: [n1, n2] a few times, and ``terms (n1 + n2)`` coefficients.
    """
    jumps = kinks(f, wf), kinks(g, wg)
    total = jnp.zeros_like(p)
    kinked_f, kinked_g = _kinked(f), _kinked(g)
    if kinked_f and kinked_g:
        total += kinked_pair(kinked_f, kinked_g, jumps, sx[:, None], sy[None], p, q)
    a = coefficients(f, wf, sx, terms) if cf is None else cf
    b = coefficients(g, wg, sy, terms) if cg is None else cg
    ka = _kink_terms(kinked_f, jumps[0], sx, terms)
    kb = _kink_terms(kinked_g, jumps[1], sy, terms)
    if a is None and b is None:
        return total
    return total + _series(a, b, ka, kb, q - p)


@functools.partial(expectations.defjvp, symbolic_zeros=True)
def _expectations_jvp(f, g, terms, primals, tangents):
    wf, wg, sx, sy, p, q, *_ = primals
    dwf, dwg, dsx, dsy, dp, dq = (_instantiated(t) for t in tangents[:6])

    def expect(f, g, wf=wf, wg=wg):
        return expectations(f, g, terms, wf, wg, sx, sy, p, q)

    change = jnp.zeros_like(p)
    drho = sum((sign * t for sign, t in ((1, dq), (-1, dp)) if t is not None), start=0.0)
    if dp is not None or dq is not None:
        change += expect(derivative(f), derivative(g)) * sx[:, None] * sy[None] * drho
    if dsx is not None:
        change += (dsx * reciprocal(sx))[:, None] * expect(_euler(f), g)
    if dsy is not None:
        change += (dsy * reciprocal(sy))[None] * expect(f, _euler(g))
    one = jnp.ones(1, p.dtype)
    if dwf is not None:
        change += sum(dwf[i] * expect((s,), g, wf=one) for i, s in enumerate(f))
    if dwg is not None:
        change += sum(dwg[i] * expect(f, (s,), wg=one) for i, s in enumerate(g))
    return expectations(f, g, terms, *primals), change


def _instantiated(tangent):
    return None if isinstance(tangent, jax.custom_derivatives.SymbolicZero) else tangent


def _euler(layer: Layer) -> Layer:
    return tuple(s.euler for s in layer)


def _kinked(layer: Layer) -> Activation | None:
    kinked = [s for s in layer if s.smooth is None]
    if len({s.degree for s in kinked}) > 1:
        raise ValueError(f"layer: expected kinked activations of one degree, got {layer}.")
    return kinked[0] if kinked else None


def _kink_terms(kinked: Activation | None, jumps, scale, terms: int):
    """Hermite coefficients [terms, n] of ``left z^d + (right - left) relu^(1 - d)``."""
    if kinked is None:
        return None
    left, right = jumps
    series = (right - left) * jnp.asarray(kink_coefficients(kinked.degree, terms), scale.dtype)
    if kinked.degree >= 0:
        series = series.at[kinked.degree].add(left)
    power = {1: scale, 0: jnp.ones_like(scale), -1: reciprocal(scale)}[kinked.degree]
    return series[:, None] * power


def _series(a, b, ka, kb, rho):
    """``sum_k rho^k ((a + ka)(b + kb) - ka kb)_k``, [n1, n2]; None stands for 0."""
    if a is None:
        products = [(ka, b)]
    elif b is None:
        products = [(a, kb)]
    else:
        products = [(a if ka is None else a + ka, b if kb is None else b + kb)]
        if ka is not None and kb is not None:
            products.append((-ka, kb))
    none = jnp.zeros(len(products[0][0]), rho.dtype)
    size_a, size_b, size_ka, size_kb = (
        none if x is None else jnp.abs(x).max(axis=1) for x in (a, b, ka, kb)
    )
    sizes = size_a * size_b + size_a * size_kb + size_ka * size_b
    blocks, unconverged = _convergence(sizes, rho)
    total = _polynomial(products, rho, blocks)
    return jnp.where(unconverged, jnp.nan, total)


def _convergence(sizes: jax.Array, rho: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Blocks of terms to sum, and the entries [n1, n2] for which all are too few."""
    terms = len(sizes)
    # An entry that is NaN already decides nothing for the others.
    largest = jnp.max(jnp.where(jnp.isnan(rho), 0, jnp.abs(rho)), initial=0)
    tails = jnp.cumsum((sizes * largest ** jnp.arange(terms))[::-1])[::-1]
    needed = jnp.sum(tails > 4 * jnp.finfo(rho.dtype).eps * tails[0])
    blocks = (needed + _UNROLLED - 1) // _UNROLLED
    # What follows the last block, if the terms stopped falling there.
    beyond = jnp.abs(rho) ** terms * sizes[-_UNROLLED:].sum() * terms / _UNROLLED
    # float32 coefficients have a noise of 1e-7 themselves.
    allowed = max(1e-8, 100 * float(jnp.finfo(rho.dtype).eps))
    return blocks, beyond > allowed * tails[0]


def _polynomial(products, rho: jax.Array, blocks: jax.Array) -> jax.Array:
    """Horner's rule over ``blocks`` of 16 coefficients, the highest first."""

    def block(i, total):
        start = (blocks - 1 - i) * _UNROLLED
        pieces = [
            tuple(jax.lax.dynamic_slice_in_dim(side, start, _UNROLLED) for side in pair)
            for pair in products
        ]
        for k in reversed(range(_UNROLLED)):
            total = total * rho + sum(left[k][:, None] * right[k] for left, right in pieces)
        return total

    return jax.lax.fori_loop(0, blocks, block, jnp.zeros_like(rho))
