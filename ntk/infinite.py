"""Infinitely wide networks with mixed activations and skip connections: exact kernels.

The network of Zhu et al. 2022, Eq. (1), in NTK parameterization and without biases:

    f_1 = s_1(W_1 x),    f_l = s_l(W_l f_{l-1}) + a_{l-1} f_{l-1}  (1 < l < L),    f = W_L f_{L-1}

with W_l = sqrt(c_l / fan) O_l, O_l ~ N(0, 1) entrywise (``fan`` is the width, and 1 for l = 1).
As the width grows, with S_0 = X X', T_0 = 0 and (u, u') ~ N(0, c_l S_{l-1}):

    G = E s_l(u) s_l(u'),   D = E s_l'(u) s_l'(u'),   m = E s_l(u)
    S_l = G + a (m mu' + mu m') + a^2 S_{l-1},        mu_l = m + a mu_{l-1}
    T_l = D o c_l (S_{l-1} + T_{l-1}) + a^2 T_{l-1}
    NNGP = c_L S_{L-1},    NTK = c_L (S_{L-1} + T_{L-1})

=======  ================  ================================================================
paper    here              what
=======  ================  ================================================================
sigma_l  ``activations``   L - 1 of them, each one activation or a weighted sum
alpha_l  ``skips``         L - 2 real weights a
2        ``variances``     L numbers c, (1, 2, ..., 2) by default: Lemma 1's convention
=======  ================  ================================================================

Kernels come in tiles of 256 x 256: each tile runs through all layers while it is in the cache, so
only the results have the size of the data squared.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ntk.activations import Activation
from ntk.architecture import (
    Diagonal,
    check_resolved,
    equal_norms,
    has_closed_dual,
    inputs,
    is_traced,
    moments,
    needed_terms,
    parse,
    run_diagonals,
    runs,
)
from ntk.gaussian import kinked_gap, reciprocal, root
from ntk.mehler import Layer, coefficients, derivative, expectations, kinks
from ntk.pairs import UnitRows, assemble, half_chords, mirrored, take_rows, unit


class Kernels(NamedTuple):
    """The two kernels of an infinitely wide network.

    Attributes
    ----------
    nngp : array [n1, n2], covariance of the outputs at initialisation.
    ntk : array [n1, n2], inner products of the outputs' gradients.
    """

    nngp: jax.Array
    ntk: jax.Array


def network_kernel(
    x1: jax.Array,
    x2: jax.Array | None = None,
    *,
    activations: Sequence[Activation | Mapping[Activation, Any]],
    skips: Sequence[Any] | jax.Array | None = None,
    variances: Sequence[Any] | jax.Array | None = None,
) -> Kernels:
    """Exact NNGP and NTK of an infinitely wide network, layer by layer as in the module's formula.

    Parameters
    ----------
    x1 : array [n1, d]
    x2 : array [n2, d], optional
        ``x1`` by default: then the kernels are symmetric (exactly, unless traced) and their
        diagonals have no error of a series.
    activations : L - 1 entries
        Each an activation (or any smooth function), or ``{activation: weight}`` for their sum.
    skips : L - 2 reals, optional
        Weights of the skip connections; none by default.
    variances : L nonnegative reals, optional
        (1, 2, ..., 2) by default.

    Returns
    -------
    Kernels

    Raises
    ------
    ValueError
        For a wrong shape or count, or a value that is not finite, unless it is traced.
    FloatingPointError
        If 4096 Hermite coefficients are too few: nearly collinear inputs into smooth activations
        at a variance far over 25. Where inputs are traced, 512 are kept, and such entries are NaN.

    Examples
    --------
    >>> from ntk.activations import relu
    >>> x = jnp.array([[1.0, 0.0], [0.0, 1.0]])
    >>> network_kernel(x, activations=[relu, relu]).ntk.round(4)  # 3 on the diagonal: L
    Array([[3.    , 0.6857],
           [0.6857, 3.    ]], dtype=float...)

    Notes
    -----
    Differentiable to any order in skips, weights, variances and inputs; compiled once for a depth
    and a size. The derivative of a kinked activation's kernel at two equal (or opposite) inputs,
    infinite in general, is taken along paths that keep them so.

    Memory: the two results, 2 x ``terms`` numbers for each layer with a smooth activation and each
    input of a norm of its own (256 terms while variances stay under about 2), a few tiles. Time:
    2 ``terms`` multiply-adds per layer and pair, fewer where no correlation is near 1.

    Near-duplicates: the angle between two inputs is found to 1e-11 of itself down to 1e-9 (from a
    Gram matrix in two exact parts), and carried through networks of ReLU-like layers; after a
    smooth layer angles under 1e-8 are lost in rounding, which only a later kink can show (3e-8 of
    an entry, where an input meets its copy in ``x2`` after a smooth layer and two kinked ones).

    References
    ----------
    Zhu et al. 2022, Eq. (1). Their Lemma 1 drops the means and cross terms and is wrong with skips:
    :func:`lemma1_kernel_as_printed`.
    """
    x1, x2 = inputs("x1", x1, "x2", x2)
    layers, *network = parse(activations, skips, variances, x1.dtype)
    traced = is_traced((x1, x2, network))
    equal = not traced and equal_norms(x1, x2)
    terms = 512 if traced else needed_terms(layers, x1, x2, *network)
    kernels = _kernels(x1, x2, *network, layers=layers, terms=terms, equal=equal)
    if is_traced(kernels):
        return kernels
    check_resolved("x1", kernels.ntk, terms)
    if x2 is not None:
        return kernels
    return Kernels(*(mirrored(k) for k in kernels))


def lemma1_kernel_as_printed(
    x: jax.Array,
    *,
    activations: Sequence[Activation | Mapping[Activation, Any]],
    skips: Sequence[Any] | jax.Array | None = None,
) -> Kernels:
    """Zhu et al. 2022, Lemma 1, as printed; right only without skip connections.

    With A^(1) = G^(1) = X X', (u, u') ~ N(0, A^(l-1)), and alpha as printed:

        G^(l) = 2 E s(u) s(u'),   Gdot^(l) = 2 E s'(u) s'(u'),   A^(l) = G^(l) + alpha_{l-2} A^(l-1)
        K = G^(L) + sum_l G^(l) o Gdot^(l+1) o prod_{k > l+1} (Gdot^(k) + alpha_{k-2})

    Three errors for skips: the forward factor is G where the kernel with its skip, A, belongs;
    the cross terms ``alpha (m mu' + mu m')`` are missing (they vanish for odd activations only);
    and alpha stands where alpha^2 should. For three ReLU layers with alpha = (1, 1) and unit
    inputs the diagonal is 9 as printed, 12 with the first error mended, 15.977 in truth.

    Parameters
    ----------
    x : array [n, d]
    activations, skips : as in :func:`network_kernel`.

    Returns
    -------
    Kernels
        ``nngp`` is G^(L).

    Examples
    --------
    >>> from ntk.activations import relu
    >>> x, layers = jnp.eye(2), [relu, relu, relu]
    >>> lemma1_kernel_as_printed(x, activations=layers, skips=[1, 1]).ntk[0, 0].round(3)
    Array(9., dtype=float...)
    >>> network_kernel(x, activations=layers, skips=[1, 1]).ntk[0, 0].round(3)
    Array(15.977, dtype=float...)
    """
    x, _ = inputs("x", x)
    layers, weights, skips, variances = parse(activations, skips, None, x.dtype)
    traced = is_traced((x, weights, skips))
    terms = 512 if traced else needed_terms(layers, x, None, weights, skips, variances)
    kernels = _lemma1(x, weights, skips, layers=layers, terms=terms)
    if not is_traced(kernels):
        check_resolved("x", kernels.ntk, terms)
    return kernels


# ----------------------------------------------------------------------------- all pairs


class _Run(NamedTuple):
    """Consecutive layers of the same activations: one compiled body, scanned over."""

    diagonal: Diagonal  # [n, run]
    values: Any  # Hermite coefficients [n, run, terms] of s, or None
    slopes: Any  # and of s'


class _Rows(NamedTuple):
    """What the tiles need of one set of inputs; leading axis n, or 1 for equal norms."""

    unit_rows: UnitRows
    norms: jax.Array
    runs: list[_Run]  # one for each of runs(layers)


def _rows(x, layers, weights, skips, variances, terms, equal) -> _Rows:
    squares = (x * x).sum(1)
    norms = root(squares)
    if equal:
        squares, norms = squares[:1], norms[:1]
    found = []
    stacked = run_diagonals(layers, weights, skips, variances, squares)
    for (layer, part), diagonal in zip(runs(layers), stacked, strict=True):
        of_run = functools.partial(_tables, jnp.stack(weights[part]), diagonal.scale, terms)
        found.append(_Run(_swap(diagonal), of_run(layer), of_run(derivative(layer))))
    return _Rows(unit(x, norms), norms, found)


def _tables(weights, scales, terms: int, layer: Layer):
    """Hermite coefficients [n, run, terms] of a run of layers, or None where none are needed."""
    if has_closed_dual(layer) or all(s.smooth is None for s in layer):
        return None

    def one(x):
        return coefficients(layer, *x, terms)  # type: ignore[call-arg]

    # Derivatives are taken by Price's theorem: these must not carry any.
    return jax.lax.stop_gradient(jnp.moveaxis(jax.lax.map(one, (weights, scales)), 2, 0))


def _swap(tree):
    """The first two axes of every leaf exchanged."""
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), tree)


def _pairs(layer: Layer, w, terms, a: Diagonal, b: Diagonal, p, q, tables):
    """``E s(u) s(u')``, all pairs of a tile."""
    if has_closed_dual(layer):
        sx, sy = a.scale[:, None], b.scale[None]
        vx, vy = jnp.broadcast_to(sx**2, p.shape), jnp.broadcast_to(sy**2, p.shape)
        return w[0] ** 2 * layer[0].closed(vx, vy, (q - p) * sx * sy)  # type: ignore[misc]
    tables = (None if table is None else table.T for table in tables)
    return expectations(layer, layer, terms, w, w, a.scale, b.scale, p, q, *tables)


class _State(NamedTuple):
    """All pairs of a tile after a layer, [n1, n2]."""

    second: jax.Array  # S
    tangent: jax.Array  # T
    sizes: jax.Array  # products of the features' norms
    p: jax.Array  # (1 - rho) / 2 of the features
    q: jax.Array  # (1 + rho) / 2


def _tile(a: _Rows, b: _Rows, same, weights, skips, variances, layers, terms) -> Kernels:
    """All layers of one tile; ``same`` [n1, n2] marks inputs paired with themselves, or None."""
    p, q = half_chords(a.unit_rows, b.unit_rows)
    if same is not None:
        # Their entries come from the diagonal; here, the series need no terms for them.
        p, q = (jnp.where(same, 0.5, half) for half in (p, q))
    sizes = a.norms[:, None] * b.norms
    second = (q - p) * sizes
    if same is not None:
        second = jnp.where(same, sizes, second)
    state = _State(second, jnp.zeros_like(second), jnp.broadcast_to(sizes, p.shape), p, q)
    # The first layer has no skip.
    skips = jnp.concatenate([jnp.zeros(1, skips.dtype), skips])
    homogeneous = True
    for (layer, part), run_a, run_b in zip(runs(layers), a.runs, b.runs, strict=True):
        homogeneous = homogeneous and all(s.smooth is None for s in layer)
        step = functools.partial(_layer, layer=layer, terms=terms, same=same, exact=homogeneous)
        inputs = (
            _swap(run_a),
            _swap(run_b),
            jnp.stack(weights[part]),
            skips[part],
            variances[part],
        )
        state, _ = jax.lax.scan(lambda state, x: (step(state, *x), None), state, inputs)  # noqa: B023
    last = variances[-1]
    return Kernels(last * state.second, last * (state.second + state.tangent))


def _layer(state: _State, a: _Run, b: _Run, w, skip, c, *, layer, terms, same, exact) -> _State:
    """One step of the module's recursion.

    ``exact``: everything so far scales with the input's norm, so that correlation lost in this
    layer adds to what was lost before without the cancellation of ``1 - rho``.
    """
    below, tangent, sizes, p, q = state
    da, db = a.diagonal, b.diagonal
    value = _pairs(layer, w, terms, da, db, p, q, (a.values, b.values))
    slope = _pairs(derivative(layer), w, terms, da, db, p, q, (a.slopes, b.slopes))
    cross = da.mean[:, None] * db.below + da.below[:, None] * db.mean
    second = value + skip * cross + skip**2 * below
    if same is not None:
        # da and db agree where an input meets itself.
        second = jnp.where(same, da.second[:, None], second)
        slope = jnp.where(same, da.slope[:, None], slope)
    tangent = c * slope * (below + tangent) + skip**2 * tangent
    roots = jnp.broadcast_to(root(da.second)[:, None] * root(db.second), p.shape)
    if exact:
        lost = kinked_gap(kinks(layer, w), p, q) * da.scale[:, None] * db.scale
        p = (lost + skip**2 * 2 * p * sizes) * reciprocal(2 * roots)
    else:
        p = (1 - second * reciprocal(roots)) / 2
    p = jnp.where(roots > 0, jnp.clip(p, 0, 1), 0.5)
    if same is not None:
        p = jnp.where(same, 0.5, p)
    return _State(second, tangent, roots, p, 1 - p)


@functools.partial(jax.jit, static_argnames=("layers", "terms", "equal"))
def _kernels(x1, x2, weights, skips, variances, *, layers, terms, equal) -> Kernels:
    prepare = functools.partial(
        _rows,
        layers=layers,
        weights=weights,
        skips=skips,
        variances=variances,
        terms=terms,
        equal=equal,
    )
    rows = prepare(x1)
    columns = rows if x2 is None else prepare(x2)
    n1, n2 = len(x1), len(x1 if x2 is None else x2)

    def tile(i, j, size1, size2):
        a, b = take_rows(rows, i, size1, n1), take_rows(columns, j, size2, n2)
        same = None
        if x2 is None:
            same = (i + jnp.arange(size1))[:, None] == j + jnp.arange(size2)
        return _tile(a, b, same, weights, skips, variances, layers, terms)

    return assemble(tile, n1, n2, symmetric=x2 is None)


@functools.partial(jax.jit, static_argnames=("layers", "terms"))
def _lemma1(x, weights, skips, *, layers, terms) -> Kernels:
    second = x @ x.T
    forward, tangent = second, jnp.zeros_like(second)
    for i, layer in enumerate(layers):
        scale = root(jnp.diag(second))
        rho = second * reciprocal(scale[:, None] * scale)
        same = jnp.eye(len(x), dtype=bool)
        p = jnp.where(same, 0.5, jnp.clip((1 - rho) / 2, 0, 1))
        w, slopes = weights[i], derivative(layer)
        pairs = [expectations(f, f, terms, w, w, scale, scale, p, 1 - p) for f in (layer, slopes)]
        square, _, slope = moments(layer, w, scale)
        g, g_dot = (
            2 * jnp.where(same, diagonal[:, None], pair)
            for diagonal, pair in zip((square, slope), pairs, strict=True)
        )
        alpha = skips[i - 1] if i else 0.0
        tangent = forward * g_dot + tangent * (g_dot + alpha)
        forward = g
        second = g + (alpha * second if i else 0.0)
    return Kernels(forward, forward + tangent)
