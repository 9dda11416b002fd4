"""Expectations of all pairs of two sets of inputs: a polynomial in the correlation, and kinks.

A function of the pre-activation is split, ``f(s z) = r(z) + k(z)``: a sum k of truncated powers
with f's jumps up to the seventh derivative, and a regular remainder r. By Mehler's formula,

    E[f(u) g(u')] = E[k_f(z) k_g(z')] + sum_n (r_n r'_n + r_n k'_n + k_n r'_n) rho^n

for the Hermite coefficients of r and k. The first term has a closed form
(:mod:`ntk.expectations.truncated_powers`; arc-cosines if the only kink is at 0). So n1 x n2 pairs
cost n1 + n2 sets of coefficients and a few multiply-adds per pair, for all norms and correlations.

The error bound has four parts: the remainders of r and k after K polynomials, times ``|rho|^K``;
the nodes' error, from the last Legendre coefficients of f on each panel; the error of rho, times
the norms of f' and g'; at jumps, the modulus of continuity of the arc sine.

Reference: Mehler (1866); Daniely, Frostig & Singer (2016), the dual of an activation.
"""

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from ntk.expectations.gaussian import DENSITY, Grid, arc_cosines, kink_series, reciprocal, root
from ntk.expectations.kinks import ORDERS
from ntk.expectations.truncated_powers import truncated_powers
from ntk.internal.derivative_rules import custom_jvp
from ntk.internal.products import einsum, matmul

_UNROLLED = 16  # Horner steps per pass over a tile of the kernel


class Pieces(NamedTuple):
    """Truncated powers at the kinks: ``sum_jm weights_jm (side_j z - place_j)_+^m / m!``."""

    place: jax.Array  # [n, kinks], |t|
    side: jax.Array  # [n, kinks], 1 or -1
    weights: jax.Array  # [n, kinks, orders]


class Expansion(NamedTuple):
    """One function of the pre-activation over its norm, on n inputs (or 1 for equal norms).

    Derivatives treat the norm that it is divided by as a constant.
    """

    norm: jax.Array  # [n], root of E f(u)^2
    mean: jax.Array  # [n], E f(u)
    regular: jax.Array  # [n, K], Hermite coefficients of r
    sides: jax.Array  # [n, 2], (left, right) values at a kink at 0, times |z|^degree
    pieces: Pieces  # the other kinks
    kinked: jax.Array  # [n, K], Hermite coefficients of the pieces; [n, 0] without
    # Parts of the error, all without derivatives:
    noise: jax.Array  # [n], error of f itself: nodes, rounding, scale
    size: jax.Array  # [n], norms of r and k together; roundoff is relative to it
    missed: jax.Array  # [n, 2], norms of the remainders of r and k after K polynomials
    steep: jax.Array  # [n], norm of the derivative of the first K polynomials
    jump: jax.Array  # [n], sum of the sizes of jumps


class Function(NamedTuple):
    """A function to expand: values of f(scale z) on a grid, and its kinks."""

    right: jax.Array  # [n, m], f(scale z) at the nodes z > 0
    left: jax.Array  # [n, m], and at -z
    sides: jax.Array  # [2], kink at 0 that is not in right and left, times |u|^degree
    places: jax.Array  # [kinks], of u
    jumps: jax.Array  # [n, kinks, orders], of f and its derivatives, for the pieces


def expand(f: Function, scale, error, odd, grid: Grid) -> Expansion:
    """Return the expansion of f at standard deviations ``scale`` [n] of relative ``error`` [n]."""
    power = jnp.where(odd, scale, 1)[:, None]  # odd: the kink at 0 is of degree 1
    sides, pieces = f.sides[None] * power, _pieces(f, scale)
    right = f.right - _evaluate_pieces(pieces, grid.z)
    left = f.left - _evaluate_pieces(pieces, -grid.z)
    # E[f h_n] [n, K]; coefficients that vanish by symmetry are exactly 0.
    roots = grid.roots[None]
    pairs = matmul((right + left) * roots, grid.even), matmul((right - left) * roots, grid.odd)
    regular = jnp.stack(pairs, axis=-1).reshape(len(right), -1)
    kinked = _piece_coefficients(pieces, regular.shape[1])
    # Moments of r and the kink at 0 by quadrature on panels that end at 0; the pieces' exactly.
    power = jnp.where(odd, grid.z, 1)[None]
    ends = right + sides[:, 1:] * power, left + jnp.where(odd, -power, power) * sides[:, :1]
    square = ((grid.roots[None] * ends[0]) ** 2 + (grid.roots[None] * ends[1]) ** 2).sum(1)
    mean = matmul(ends[0] + ends[1], grid.roots**2)
    own = jnp.zeros_like(scale)
    if pieces.place.shape[1]:
        own = _piece_products(pieces, pieces)
        square += own + 2 * (regular * kinked).sum(1)
        mean += kinked[:, 0]
    norm = root(square)
    unit = jax.lax.stop_gradient(reciprocal(norm))
    errors = jax.lax.stop_gradient(
        _expansion_errors(right, left, sides, regular, kinked, own, pieces, norm, error, odd, grid)
    )
    over = unit[:, None]
    pieces = pieces._replace(weights=pieces.weights * over[..., None])
    return Expansion(norm, mean, regular * over, sides * over, pieces, kinked * over, *errors)


def kinked_expansion(sides, scale, error, degree: int, shape: tuple[int, int]) -> Expansion:
    """Return the expansion of a kink at 0; ``shape``: numbers of other coefficients and kinks."""
    eps = float(jnp.finfo(scale.dtype).eps)
    sides = sides.reshape(-1, 2) * (scale if degree else jnp.ones_like(scale))[:, None]
    norm = root((sides**2).sum(1) / 2)
    mean = (sides[:, 1] - sides[:, 0]) * DENSITY if degree else sides.sum(1) / 2
    sides = sides * jax.lax.stop_gradient(reciprocal(norm))[:, None]
    terms, kinks = shape
    one, none = jnp.ones_like(scale), jnp.zeros((len(scale), terms), scale.dtype)
    jump = jnp.abs(sides[:, 1] - sides[:, 0])
    place = jnp.zeros((len(scale), kinks), scale.dtype)
    pieces = Pieces(place, place + 1, jnp.zeros((*place.shape, ORDERS), scale.dtype))
    noise = (4 * eps + degree * error / 2) * one
    missed = jnp.zeros((len(scale), 2), scale.dtype)
    errors = jax.lax.stop_gradient((noise, one, missed, degree * one, (1 - degree) * jump))
    return Expansion(norm, mean, none, sides, pieces, none if kinks else none[:, :0], *errors)


def piece_norms(weights: jax.Array, place: jax.Array) -> jax.Array:
    """Bound norms of truncated powers: ``E[(z - t)_+^2m] <= exp(-t^2 / 2) E[z_+^2m]``, t >= 0."""
    order = np.arange(ORDERS)
    at_zero = np.sqrt(np.cumprod(np.maximum(2 * order - 1, 1)) / 2)
    at_zero = (at_zero / np.cumprod(np.maximum(order, 1))).astype(place.dtype)
    return jnp.abs(weights) * at_zero[None, None] * jnp.exp(-(place**2) / 4)[..., None]


def _pieces(f: Function, scale: jax.Array) -> Pieces:
    at = f.places[None] * reciprocal(scale)[:, None]
    # A kink beyond this reach does not matter, but its powers would be large.
    reach = 11.5 if scale.dtype.itemsize == 8 else 7.6
    seen = (scale[:, None] > 0) & (jnp.abs(at) < reach)
    side = jnp.where(f.places < 0, -1, 1).astype(scale.dtype)[None] * jnp.ones_like(at)
    order = np.arange(ORDERS)[None, None]
    # (t - z)_+^m / m! jumps by -(-1)^m in its m-th derivative.
    sign = jnp.where(side[..., None] > 0, 1.0, -((-1.0) ** order)).astype(scale.dtype)
    base = jnp.where(f.jumps == 0, 1, scale[:, None, None])  # powers can overflow
    weights = sign * f.jumps * base ** order.astype(base.dtype)
    return Pieces(jnp.where(seen, jnp.abs(at), 0), side, jnp.where(seen[..., None], weights, 0))


def _evaluate_pieces(pieces: Pieces, z: jax.Array) -> jax.Array:
    """Return the pieces at points z: [n, m]."""
    total = jnp.zeros((len(pieces.place), len(z)), z.dtype)
    for j in range(pieces.place.shape[1]):
        place, side = pieces.place[:, j, None], pieces.side[:, j, None]
        beyond = side * z[None] - place
        inside, power = beyond > 0, jnp.maximum(beyond, 0)
        value = jnp.zeros_like(total)
        for m in reversed(range(1, ORDERS)):
            value = (value + pieces.weights[:, j, m, None]) * power / m
        value += pieces.weights[:, j, 0, None] * jnp.where(inside, 1, 0)
        total += value
    return total


def _piece_coefficients(pieces: Pieces, terms: int) -> jax.Array:
    """Return Hermite coefficients of the pieces, [n, K]; [n, 0] without any."""
    n, kinks = pieces.place.shape
    if not kinks:
        return jnp.zeros((n, 0), pieces.place.dtype)
    h = pieces.place
    order = jnp.arange(1, terms).astype(h.dtype)

    def next_degree(carry, k):
        before, now = carry
        return (now, (h * now - jnp.sqrt(k - 1) * before) / jnp.sqrt(k)), now

    density = DENSITY * jnp.exp(-(h**2) / 2)
    (_, last), first_orders = jax.lax.scan(next_degree, (jnp.zeros_like(h), density), order)
    # By parts: E[f h_n] = E[f' h_{n-1}] / sqrt(n), down to the point mass.
    current = jnp.moveaxis(jnp.concatenate([first_orders, last[None]]), 0, -1)
    upper = jax.scipy.special.erfc(h / np.sqrt(2).item()) / 2

    def integrate(carry, x):
        below, first, series, total = carry  # first: of order m, below: of m - 1
        weight, m = x
        higher = series[..., :-1] / jnp.sqrt(order)[None, None]
        series = jnp.concatenate([first[..., None], higher], axis=-1)
        total += weight[..., None] * series
        return (first, (below - h * first) / (m + 1), series, total), None

    orders = jnp.moveaxis(pieces.weights, 2, 0), jnp.arange(ORDERS).astype(h.dtype)
    start = density, upper, current, jnp.zeros_like(current)
    (*_, total), _ = jax.lax.scan(integrate, start, orders)
    parity = jnp.where((np.arange(terms) % 2 == 1)[None, None], pieces.side[..., None], 1)
    return (parity * total).sum(1)


def _piece_products(a: Pieces, b: Pieces) -> jax.Array:
    """Return ``E[k_a(z) k_b(z)]`` [n]."""
    total = jnp.zeros(len(a.place), a.place.dtype)
    for i in range(a.place.shape[1]):
        for j in range(b.place.shape[1]):
            opposite = jnp.where(a.side[:, i] * b.side[:, j] > 0, 0.0, 1.0).astype(total.dtype)
            powers = truncated_powers(ORDERS, a.place[:, i], b.place[:, j], opposite, 1 - opposite)
            total += einsum("nk,kln,nl->n", a.weights[:, i], powers, b.weights[:, j])
    return total


def _expansion_errors(right, left, sides, regular, kinked, own, pieces, norm, error, odd, grid):
    """Return the last five fields of :class:`Expansion`."""
    eps = float(jnp.finfo(norm.dtype).eps)
    over, terms = reciprocal(norm), regular.shape[1]
    e, o = (right + left) * grid.roots[None], (right - left) * grid.roots[None]
    halves = enumerate(((e, grid.even), (o, grid.odd)))
    remainder = [x - 2 * matmul(regular[:, k::2], basis.T) for k, (x, basis) in halves]
    # Beyond the last node, polynomials have at most 1 % of a kink's remainder.
    missed_regular = 1.01 * root(sum((part**2).sum(1) for part in remainder) / 2)
    size = root(((e**2).sum(1) + (o**2).sum(1)) / 2)
    slant = jnp.abs(sides[:, 1] - sides[:, 0])
    (step, step_end), (relu, relu_end) = (kink_series(degree, terms) for degree in (0, 1))
    missed_kinked = slant * jnp.where(odd, relu_end, step_end)
    straight = jnp.where(jnp.arange(terms)[None] == jnp.where(odd, 1, 0), sides[:, :1], 0)
    known = jnp.asarray(np.stack([step, relu]), norm.dtype)
    bent = (sides[:, 1:] - sides[:, :1]) * jnp.where(odd, known[1:], known[:1])
    total = regular + straight + bent
    if kinked.shape[1]:
        gone = jnp.maximum(own - (kinked**2).sum(1), 0) + 4 * eps * own
        missed_kinked += root(gone)
        total += kinked
    order = jnp.sqrt(jnp.arange(terms)).astype(norm.dtype)[None]
    slope = order * total  # slope_k belongs to h_(k-1)
    steep = root((slope**2).sum(1))
    # z f'(z) in the same basis: z h_k is in that of h_(k-1) and h_(k+1).
    stretch = (order * slope).at[:, :-2].add(order[:, 1:-1] * slope[:, 2:])
    stretch = root((stretch**2).sum(1))
    noise = 4 * eps * (size + root(own) + norm)
    noise += 2 * root(tails(right, grid) + tails(left, grid))
    noise += error / 2 * stretch
    noise *= over
    if kinked.shape[1]:
        # The terms of the squared norm can cancel to 0, to roundoff, or to the remainder of the
        # product of r and k.
        product = missed_regular * missed_kinked
        # Only pieces of the same side cancel.
        piece_sizes = piece_norms(pieces.weights, pieces.place).sum(2)
        bulk = sum(jnp.where(pieces.side == side, piece_sizes, 0).sum(1) ** 2 for side in (1, -1))
        noise += ((4 * eps * (bulk + size**2) + product) * over) * over
        noise = jnp.where((norm > 0) | (own == 0), noise, jnp.inf)
    jump = jnp.abs(pieces.weights[..., 0]).sum(1) + jnp.where(odd, 0, slant)
    missed = jnp.stack([missed_regular * over, missed_kinked * over], 1)
    sizes = size + root(own) + root((sides**2).sum(1) / 2)
    return noise, sizes * over, missed, steep * over, jump * over


def tails(values: jax.Array, grid: Grid) -> jax.Array:
    """Return squared norms [n] of the last Legendre coefficients of values [n, m] on each panel."""
    panels = values.reshape(len(values), -1, len(grid.last))
    return matmul(jnp.abs(matmul(panels, grid.last)).max(2) ** 2, grid.mass)


class Pair(NamedTuple):
    """All pairs of a tile, [n1, n2]."""

    p: jax.Array  # (1 - rho) / 2
    q: jax.Array  # (1 + rho) / 2
    error: jax.Array  # of p and q


def expectations(
    fs: tuple[Expansion, ...], gs: tuple[Expansion, ...], degrees: tuple[int, ...], pair: Pair
) -> list[tuple[jax.Array, jax.Array]]:
    """Return ``E[f(u) g(u')]`` of all pairs, [n1, n2], and a bound of its error, for each f and g.

    Each f and g is the derivative of the one before. All functions share the places of their kinks.
    Values are finite for every error, so that no entry affects another one or its derivatives.
    """
    kinked = _pairs_of_pieces([f.pieces for f in fs], [g.pieces for g in gs], pair)
    # Near 1 we compute rho from p and near -1 from q, because the other one has lost digits.
    rho = pair.q - pair.p
    near = jnp.where(pair.p < pair.q, 1 - 2 * pair.p, 2 * pair.q - 1)
    rho = rho + jax.lax.stop_gradient(near - rho)
    values_and_errors: list[tuple[jax.Array, jax.Array]] = []
    slope: jax.Array | float = 1.0
    for f, g, degree, total in reversed([*zip(fs, gs, degrees, kinked, strict=True)]):
        # The expansions are divided by these norms, which count as constants.
        size = jax.lax.stop_gradient(f.norm[:, None] * g.norm[None])
        value = total + _sides(f.sides, g.sides, degree, pair.p, pair.q)
        value += _series(f, g, degree, rho)
        error = _pair_error_bound(f, g, pair, slope)
        slope = jnp.minimum(jnp.abs(jax.lax.stop_gradient(value)) + error, 1)
        values_and_errors.insert(0, (size * value, size * error))
    return values_and_errors


def on_diagonal(f: Expansion, g: Expansion, equal: chex.Array) -> tuple[jax.Array, jax.Array]:
    """Return ``E[f(u) g(u)]`` [n] of two slopes at the same input, and a bound of its error."""
    size = jax.lax.stop_gradient(f.norm * g.norm)
    (lf, rf), (lg, rg) = f.sides.T, g.sides.T
    value = (lf * lg + rf * rg) / 2 + _piece_products(f.pieces, g.pieces)
    bound = f.noise + g.noise + 4 * float(jnp.finfo(size.dtype).eps) * f.size * g.size
    if f.regular.shape[1]:
        kinks_f, kinks_g = (_kink_part(h, 0, h.regular.shape[1]) for h in (f, g))
        value += (f.regular * (g.regular + kinks_g) + kinks_f * g.regular).sum(1)
        regular = jnp.where(equal, 0, f.missed[:, 0] * g.missed[:, 0])
        bound += regular + f.missed[:, 0] * g.missed[:, 1] + f.missed[:, 1] * g.missed[:, 0]
    # The norm of one function is more accurate than its series.
    value = jnp.where(equal, f.norm * g.norm, size * value)
    return value, jax.lax.stop_gradient(size * bound)


def _sides(a, b, degree: int, p, q):
    """Return ``E[f g]`` for kinks at 0, each ``left z^d + (right - left) relu^(1 - d)``."""
    step, relu, _ = arc_cosines(p, q)
    (lf, rf), (lg, rg) = (a[:, 0, None], a[:, 1, None]), (b[None, :, 0], b[None, :, 1])
    jf, jg = rf - lf, rg - lg
    straight = q - p if degree else jnp.ones_like(p)
    return (lf * lg + (lf * jg + jf * lg) / 2) * straight + jf * jg * (relu if degree else step)


def _pairs_of_pieces(a: list[Pieces], b: list[Pieces], pair: Pair) -> list[jax.Array]:
    """Return ``E[k_f(z) k_g(z')]`` for each pair of lists."""
    kinks = a[0].place.shape[1]
    none = [jnp.zeros_like(pair.p) for _ in a]
    if not kinks or not b[0].place.shape[1]:
        return none

    def add(totals, index):
        i, j = index
        take = functools.partial(jax.lax.dynamic_index_in_dim, axis=1, keepdims=False)
        opposite = take(a[0].side, i)[:, None] * take(b[0].side, j)[None] < 0
        p, q = jnp.where(opposite, pair.q, pair.p), jnp.where(opposite, pair.p, pair.q)
        thresholds = take(a[0].place, i)[:, None], take(b[0].place, j)[None]
        h, k = (jnp.broadcast_to(x, p.shape) for x in thresholds)
        powers = truncated_powers(ORDERS, h, k, p, q)
        for t, (f, g) in enumerate(zip(a, b, strict=True)):
            wf, wg = take(f.weights, i), take(g.weights, j)
            rows = (powers * wg.T[None, :, None]).sum(1)
            totals[t] += (rows * wf.T[..., None]).sum(0)
        return totals, None

    kink_pairs = [(i, j) for i in range(kinks) for j in range(b[0].place.shape[1])]
    return jax.lax.scan(add, none, jnp.asarray(kink_pairs))[0]


def _series(f: Expansion, g: Expansion, degree: int, rho):
    """Return ``sum_n (r_n (r'_n + k'_n) + k_n r'_n) rho^n``."""
    if not f.regular.shape[1]:
        return jnp.zeros_like(rho)
    terms = f.regular.shape[1]
    kinks_f, kinks_g = _kink_part(f, degree, terms), _kink_part(g, degree, terms)
    total = polynomial(f.regular.T, (g.regular + kinks_g).T, rho)
    return total + polynomial(kinks_f.T, g.regular.T, rho)


def coefficients(f: Expansion, degree: int, terms: int) -> jax.Array:
    """Return the Hermite coefficients ``E f(u) h_k(z)`` [n, terms] of the function itself."""
    total = _kink_part(f, degree, terms)
    if f.regular.shape[1]:
        total += f.regular[:, :terms]
    return jax.lax.stop_gradient(f.norm)[:, None] * total


def _kink_part(f: Expansion, degree: int, terms: int) -> jax.Array:
    series = jnp.asarray(kink_series(degree, terms)[0], f.norm.dtype)
    part = (f.sides[:, 1:] - f.sides[:, :1]) * series[None]
    part = part.at[:, degree].add(f.sides[:, 0])
    return part + f.kinked[:, :terms] if f.kinked.shape[1] else part


def _pair_error_bound(f: Expansion, g: Expansion, pair: Pair, slope: chex.Numeric) -> jax.Array:
    """Return a bound of the error of ``E[f g]`` over both norms; ``slope`` bounds ``E[f' g']``."""
    f, g, pair = jax.lax.stop_gradient((f, g, pair))
    rho = power = jnp.abs(pair.q - pair.p)
    for _ in range(max(f.regular.shape[1], 1).bit_length() - 1):
        power = power * power
    (rf, kf), (rg, kg) = (f.missed[:, 0, None], f.missed[:, 1, None]), g.missed.T[:, None]
    eps = float(jnp.finfo(power.dtype).eps)
    total = f.noise[:, None] + g.noise[None]
    # The sum and its product with both norms, and the closed form at a kink.
    at_kink = (root((x.sides**2).sum(1)) for x in (f, g))
    total += eps * (2.5 * f.size[:, None] * g.size[None] + jnp.multiply.outer(*at_kink))
    total += power * (rf * (rg + kg) + kf * rg)
    # rho is rounded, and Horner's rule multiplies and adds: 3 k halves of a unit, or more if pieces
    # and the other terms cancel.
    horner = 3 if f.kinked.shape[1] else 1.5
    total += horner * eps * rho * f.steep[:, None] * g.steep[None]
    jump = f.jump[:, None] * g.jump[None]
    change = moves(jump) * f.steep[:, None] * g.steep[None] * pair.error
    total += jnp.where(jump > 0, change, change * slope)
    # asin(sqrt(p)) / pi moves no further than at p = 0, and by its slope elsewhere.
    inverse = reciprocal(jnp.sqrt(pair.p * pair.q))
    inverse = jnp.where(inverse > 0, inverse, 1 / float(jnp.finfo(inverse.dtype).tiny) ** 0.25)
    moved = jnp.minimum(pair.error * inverse / 3, 0.4 * jnp.sqrt(pair.error))
    return total + jump * moved


def moves(jump: jax.Array) -> jax.Array:
    """Return a bound of the change of ``E[f g]`` with p, over the norms of both slopes."""
    # By |d rho| = 2 |d p| and Cauchy-Schwarz. With jumps only K terms of the slopes are known.
    return jnp.where(jump > 0, 3, 2.1).astype(jump.dtype)


@custom_jvp
def polynomial(a: chex.Array, b: chex.Array, rho: chex.Array) -> jax.Array:
    """Return ``sum_k a_ki b_kj rho_ij^k`` [n1, n2], with the terms that the largest rho needs."""
    sizes = jnp.abs(a).max(1) * jnp.abs(b).max(1)
    # NaN entries do not affect the number of terms.
    largest = jnp.max(jnp.where(jnp.isnan(rho), 0, jnp.abs(rho)), initial=0)
    tails = jnp.cumsum((sizes * largest ** jnp.arange(len(sizes), dtype=rho.dtype))[::-1])[::-1]
    needed = jnp.sum(tails > jnp.finfo(rho.dtype).eps / 4 * jnp.minimum(tails[0], 1))
    blocks = (needed + _UNROLLED - 1) // _UNROLLED

    def block(i, total):
        start = (blocks - 1 - i) * _UNROLLED
        pieces = (jax.lax.dynamic_slice_in_dim(x, start, _UNROLLED) for x in (a, b))
        return _horner_steps(total, rho, *pieces)

    return jax.lax.fori_loop(0, blocks, block, jnp.zeros_like(rho))


@functools.partial(polynomial.defjvp, symbolic_zeros=True)
def _polynomial_jvp(primals, tangents):
    a, b, rho = primals
    zero = jax.custom_derivatives.SymbolicZero
    da, db, drho = (None if isinstance(t, zero) else t for t in tangents)
    change = jnp.zeros_like(rho)
    if drho is not None:
        order = jnp.sqrt(jnp.arange(1, len(a))).astype(a.dtype)[:, None]
        shifted = (jnp.pad(order * x[1:], ((0, 1), (0, 0))) for x in (a, b))
        change += drho * polynomial(*shifted, rho)
    if da is not None:
        change += _polynomial_by_scan(da, b, rho)
    if db is not None:
        change += _polynomial_by_scan(a, db, rho)
    return polynomial(a, b, rho), change


def _polynomial_by_scan(a, b, rho):
    """Return :func:`polynomial` with all terms, in a loop that JAX can transpose."""

    def block(total, pieces):
        return _horner_steps(total, rho, *pieces), None

    blocks = [x.reshape(-1, _UNROLLED, x.shape[1]) for x in (a, b)]
    return jax.lax.scan(block, jnp.zeros_like(rho), tuple(blocks), reverse=True)[0]


def _horner_steps(total, rho, left, right):
    for k in reversed(range(_UNROLLED)):
        total = total * rho + left[k][:, None] * right[k][None]
    return total
