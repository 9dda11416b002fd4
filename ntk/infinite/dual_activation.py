"""The dual of two activations, ``E[a(u) b(u')]`` of a Gaussian pair, accurate to rounding.

    (u, u') ~ N(0, [[vx, c], [c, vy]]),   rho = c / sqrt(vx vy),   p, q = (1 -+ rho) / 2

======================  =======================================================================
a, b                    method
======================  =======================================================================
kinked, kinked          closed form in the angle ``2 atan2(sqrt p, sqrt q)``
kinks in other places   the series of :mod:`ntk.expectations.hermite`, kinks in closed form
kinked, smooth          one-dimensional: a half line, and a correction at its edge
smooth, the same        closed form for erf and GELU, and their derivatives
smooth, smooth          trapezoid on ``u = sx (sqrt q z1 + sqrt p z2)``,
                        ``u' = sy (sqrt q z1 - sqrt p z2)``: the symmetric root, good at any rho
======================  =======================================================================

For tanh' at variance 4 and rho = 0.99, 101 nodes on each axis have a relative error of 5e-8, and
100 Gauss-Hermite nodes 3e-4.
"""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np

from ntk.expectations.activations import Activation, Function, activation, as_piecewise
from ntk.expectations.gaussian import DENSITY, hermite_grid, kinked_pair, reciprocal
from ntk.expectations.hermite import Pair, expectations
from ntk.infinite.layer_expansions import (
    RESOLUTIONS,
    TRACED,
    Layer,
    common_kinks,
    expand_layer,
    is_resolved,
    largest_error,
)
from ntk.internal.checks import common_dtype, concrete, float_array, nan_where, offending
from ntk.internal.derivative_rules import custom_jvp
from ntk.internal.products import matmul
from ntk.internal.sharding import without_explicit_axes

_TOLERANCE = 1e-14  # of the trapezoid rule, over sqrt(E a^2 E b^2): 50 roundoff units in float64
_ENTRIES = 2**22  # values of the integrand in memory at a time, about
_BLOCK = 1024  # nodes of an entry's grid at a time
_GROUP = 32  # entries of a kernel at a time


def dual(
    a: Activation | Function,
    b: Activation | Function,
    vx: chex.Array,
    vy: chex.Array,
    c: chex.Array,
    *,
    max_variance: float | None = None,
) -> jax.Array:
    """Return ``E[a(u) b(u')]`` with ``(u, u') ~ N(0, [[vx, c], [c, vy]])``, elementwise.

    Parameters
    ----------
    a, b : Activation or function
        Activations, their ``derivative``, or smooth functions.
    vx, vy, c : array
        Variances and covariance, with ``|c| <= sqrt(vx vy)``. They broadcast to the result's shape.
    max_variance : float, optional
        The largest variance to resolve; smooth pairs beyond it are NaN. Default: the largest of
        ``vx`` and ``vy``, or 25 if they are traced.

    Raises
    ------
    ValueError
        If a variance is negative or not finite, or a covariance is over ``sqrt(vx vy)`` by more
        than rounding. Traced values are not checked.

    Notes
    -----
    Derivatives of every order are duals too (Price 1958): dE/dc = E[a' b'], dE/dvx = E[a'' b]/2,
    finite at rho = +-1. If a step's dual has an infinite slope there, its derivative is 0.

    A smooth pair takes 20,000 evaluations at a variance of 1 and 60,000 at 4 for tanh in float64, a
    fifth of that in float32. Other pairs take a few thousand or none. Whole kernels are cheaper in
    :func:`ntk.network_kernel`.

    Examples
    --------
    >>> from ntk.expectations.activations import relu, tanh
    >>> jax.jit(lambda c: dual(relu, relu, 1.0, 1.0, c))(1.0)
    Array(0.5, dtype=float...)
    >>> jax.jit(jax.grad(lambda c: dual(tanh, tanh, 1.0, 1.0, c)))(0.5).round(6)  # Price's theorem
    Array(0.384747, dtype=float...)
    """
    a, b = activation(a), activation(b)
    arrays = (float_array(name, x) for name, x in (("vx", vx), ("vy", vy), ("c", c)))
    vx, vy, c = jnp.broadcast_arrays(*arrays)
    dtype = common_dtype(vx, vy, c)
    vx, vy, c = (x.astype(dtype) for x in (vx, vy, c))
    largest = 25.0
    if concrete(vx, vy, c):
        _check_covariances(vx, vy, c)
        largest = max(float(vx.max(initial=0)), float(vy.max(initial=0)))
    max_variance = largest if max_variance is None else max_variance
    sx, sy, p, q = _standardised(vx, vy, c)
    if a == b and a.closed:
        return a.closed[0](vx, vy, c, 4 * vx * vy * p * q)
    flat = [x.ravel() for x in (sx, sy, p, q)]
    if a.kinks or b.kinks:
        return _piecewise(a, b, *flat).reshape(vx.shape)
    rtol = max(_TOLERANCE, float(jnp.finfo(dtype).eps))
    if a.smooth is None or b.smooth is None:
        return _expectation(a, b, rtol, *flat).reshape(vx.shape)
    vx, vy, sx, sy, p, q = without_explicit_axes((vx, vy, sx, sy, p, q))
    # The number of nodes follows the variance, so entries that will be NaN get variance 0.
    beyond = ~(jnp.maximum(vx, vy) <= max_variance * (1 + 1e-6))
    sx, sy = (jnp.where(beyond, 0, x) for x in (sx, sy))
    expectation = _expectation(a, b, rtol, *(x.ravel() for x in (sx, sy, p, q))).reshape(vx.shape)
    return nan_where(beyond, expectation)


def _piecewise(a: Activation, b: Activation, sx, sy, p, q) -> jax.Array:
    """Return ``E[a(u) b(u')]`` [n] if a or b has kinks without a closed form."""
    layers: list[Layer] = [(as_piecewise("a, b", s),) for s in (a, b)]
    kinks, one = common_kinks(layers), jnp.ones(1, p.dtype)
    error = jnp.full_like(p, float(jnp.finfo(p.dtype).eps))
    for how in RESOLUTIONS if concrete(sx, sy, p, q) else (TRACED,):
        sides = zip(layers, (sx, sy), strict=True)
        f, g = (expand_layer(layer, one, s, error, kinks, how)[0] for layer, s in sides)
        duals = _duals_by_entry(f, g, p, q)
        if not concrete(duals) or is_resolved([f, g]):
            break
    return duals


@jax.jit
def _duals_by_entry(f, g, p, q):
    def one(f, g, p, q):
        f, g, p, q = jax.tree.map(lambda x: x[None], (f, g, p, q))
        error = jnp.full((1, 1), float(jnp.finfo(p.dtype).eps), p.dtype)
        ((value, bound),) = expectations((f,), (g,), (1,), Pair(p[None], q[None], error))
        bad = ~(bound <= largest_error(p.dtype) * f.norm[:, None] * g.norm[None])
        return nan_where(bad, value)[0, 0]

    return jax.lax.map(lambda x: one(*x), (f, g, p, q))


def _check_covariances(vx, vy, c) -> None:
    vx, vy, c = (np.asarray(x, float) for x in (vx, vy, c))
    for name, v in (("vx", vx), ("vy", vy)):
        good = np.isfinite(v) & (v >= 0)
        if not good.all():
            got = offending(v, good)
            raise ValueError(f"{name}: expected finite variances of at least 0, got {got}.")
    good = np.abs(c) <= np.sqrt(vx) * np.sqrt(vy) * (1 + 1e-5)
    if not good.all():
        raise ValueError(f"c: expected at most sqrt(vx vy) in size, got {offending(c, good)}.")


@custom_jvp
def _standardised(vx, vy, c):
    """Return ``(sx, sy, p, q)``; p and q are exact to rounding of the arguments."""
    sx, sy = jnp.sqrt(vx), jnp.sqrt(vy)
    # Scaling by powers of 2 is exact, and keeps the products below from under- and overflow.
    ex, ey = (jnp.frexp(jnp.where(s > 0, s, 1))[1] for s in (sx, sy))
    vx, vy, c = jnp.ldexp(vx, -2 * ex), jnp.ldexp(vy, -2 * ey), jnp.ldexp(c, -ex - ey)
    size = jnp.sqrt(vx * vy)
    # The smaller half comes from the determinant, because size - |c| would cancel.
    small = jnp.maximum(_determinant(vx, vy, c), 0) / jnp.where(size > 0, size + jnp.abs(c), 1)
    small = jnp.where(size > 0, small / jnp.where(size > 0, 2 * size, 1), 0.5)
    p, q = jnp.where(c >= 0, small, 1 - small), jnp.where(c >= 0, 1 - small, small)
    return sx, sy, p, q


@_standardised.defjvp
def _standardised_jvp(primals, tangents):
    vx, vy, c = primals
    dvx, dvy, dc = tangents
    sx, sy, p, q = _standardised(vx, vy, c)
    rx, ry = reciprocal(sx), reciprocal(sy)
    drho = rx * ry * dc - (q - p) * (dvx * rx**2 + dvy * ry**2) / 2
    return (sx, sy, p, q), (dvx * rx / 2, dvy * ry / 2, -drho / 2, drho / 2)


def _determinant(vx, vy, c):
    """Return ``vx vy - c^2`` without cancellation: both products in two parts, by Dekker (1971)."""
    first, first_rest = _two_product(vx, vy)
    second, second_rest = _two_product(c, c)
    return (first - second) + (first_rest - second_rest)


def _two_product(x, y):
    product = x * y
    (xh, xl), (yh, yl) = _split_bits(x), _split_bits(y)
    return product, (((xh * yh - product) + xh * yl) + xl * yh) + xl * yl


def _split_bits(x):
    # A compiler that fuses multiply-adds or reassociates would undo Veltkamp's multiplication.
    integer, bits = {8: (jnp.int64, 27), 4: (jnp.int32, 12)}[x.dtype.itemsize]
    mask = jnp.array(-(2**bits), integer)
    high = jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(x, integer) & mask, x.dtype)
    return high, x - high


@functools.partial(custom_jvp, nondiff_argnums=(0, 1, 2))
def _expectation(a: Activation, b: Activation, rtol: float, sx, sy, p, q):
    """Return ``E[a(u) b(u')]`` [n], from standard deviations and correlations [n]."""
    if a.smooth is None and b.smooth is None:
        return kinked_pair(a, b, sx, sy, p, q)
    if b.smooth is None:
        return _expectation(b, a, rtol, sy, sx, p, q)
    if a.smooth is None:
        one = functools.partial(_kinked_smooth, a, b)
        batch = _ENTRIES // (2 * len(hermite_grid(256).z))
        return jax.lax.map(lambda x: one(*x), (sx, sy, p, q), batch_size=batch)
    # A group takes the time of its largest grid, so entries are sorted by variance.
    order, n = jnp.argsort(jnp.maximum(sx, sy)), len(sx)
    groups = max(1, -(-n // _GROUP))
    size = -(-n // groups)
    padding = 0, groups * size - n
    split = (jnp.pad(x[order], padding).reshape(groups, size) for x in (sx, sy, p, q))
    one = functools.partial(_smooth_dual, a, b, rtol)
    values = jax.lax.map(lambda x: one(*x), tuple(split)).ravel()[:n]
    return jnp.zeros_like(values).at[order].set(values)


@_expectation.defjvp
def _expectation_jvp(a, b, rtol, primals, tangents):
    sx, sy, *_ = primals
    dsx, dsy, dp, dq = tangents

    def expect(a, b):
        return _expectation(a, b, rtol, *primals)

    change = sx * sy * expect(a.derivative, b.derivative) * (dq - dp)
    change += expect(a.euler, b) * reciprocal(sx) * dsx
    change += expect(a, b.euler) * reciprocal(sy) * dsy
    return expect(a, b), change


def _smooth_dual(a, b, rtol, sx, sy, p, q):
    """Return ``E[a(u) b(u')]`` of a group of entries: each node grid in blocks, row after row."""
    # The rule is exact to rtol if 2 pi / spacing is beyond the spectra of the Gaussian, a and b.
    size = math.log(1 / rtol)
    gaussian = math.sqrt(2 * size)
    slope = (1.4 * gaussian + size / min(a.strip, b.strip)) * 1.1
    spacing = 2 * math.pi / (gaussian + jnp.maximum(sx, sy) * slope)
    count = 2 * jnp.ceil((gaussian + 1.5) / spacing).astype(int) + 1
    spacing, count = spacing[:, None], count[:, None]
    sx, sy, along, across = (x[:, None] for x in (sx, sy, jnp.sqrt(q), jnp.sqrt(p)))
    steps, divisor = jnp.arange(_BLOCK)[None], count.astype(sx.dtype)

    def add(state):
        row, column, total = state
        # Node (row, column + steps) is in the row below. Half a step keeps floor exact.
        place = (column + steps).astype(sx.dtype)
        beyond = jnp.floor((place + 0.5) / divisor)
        rows = row.astype(sx.dtype) + beyond
        inside = rows < divisor
        nodes = rows, place - beyond * divisor
        z, w = (jnp.where(inside, spacing * (k - (divisor - 1) / 2), 0) for k in nodes)
        density = jnp.where(inside, jnp.exp(-(z**2 + w**2) / 2), 0)
        u, v = along * z, across * w
        total = total + a(sx * (u + v)) * b(sy * (u - v)) * density
        column = column + _BLOCK
        return row + column // count, column % count, total

    # The zeros depend on all arguments, so they vary over the same axes in a `shard_map`.
    none = jnp.zeros_like((sx + sy + along + across) * steps.astype(sx.dtype))
    start = jnp.zeros_like(count), jnp.zeros_like(count), none
    total = jax.lax.while_loop(lambda state: jnp.any(state[0] < count), add, start)[2]
    return (spacing[:, 0] * DENSITY) ** 2 * total.sum(1)


def _kinked_smooth(a, b, sx, sy, p, q):
    """Return the dual of ``a = left z^d + (right - left) relu^(1 - d)`` and b, z for ``u' / sy``.

    Given z, ``u / sx`` is N(rho z, s^2), s = sqrt(1 - rho^2), so that with y = rho z / s

        E[step(u) b] = E[b(sy z) Phi(y)],    E[relu(u) b] = sx E[b(sy z) s (y Phi(y) + phi(y))].

    Both factors are a kink (y's positive part) plus a bump of width s / |rho|, on its own scale.
    """
    left, right = a.kink
    jump = right - left
    grid = hermite_grid(256)
    t, weights = (jnp.asarray(x, sx.dtype) for x in (grid.z, grid.roots**2))
    rho, s = q - p, 2 * jnp.sqrt(p * q)
    steep = jnp.where(rho >= 0, 1.0, -1.0).astype(sx.dtype)

    def half(fn):
        return matmul(fn(t), weights)

    if a.degree < 0:
        return jump * DENSITY * reciprocal(sx) * half(lambda z: b(sy * s * z) + b(-sy * s * z))
    narrow = jnp.minimum(s, jnp.abs(rho)) * reciprocal(jnp.abs(rho))
    narrow = jnp.where(jnp.abs(rho) > s, narrow, 1.0)
    z = narrow * t
    # The bump's argument |rho| z / s, where s may be 0 and z with it.
    y = jnp.where(jnp.abs(rho) > s, t, jnp.abs(rho) * z / jnp.where(s > 0, s, 1))
    # On the bump's scale the nodes' own density is replaced by the one at z.
    local = weights * jnp.exp((t**2 - z**2) / 2) * narrow
    ahead, behind = b(steep * sy * z), b(-steep * sy * z)
    beyond = jax.scipy.special.ndtr(-y)
    if a.degree == 0:
        edge = half(lambda z: b(steep * sy * z)) + matmul((behind - ahead) * beyond, local)
        return left * half(lambda z: b(sy * z) + b(-sy * z)) + jump * edge
    bump = DENSITY * jnp.exp(-(y**2) / 2) - y * beyond
    edge = jnp.abs(rho) * half(lambda z: z * b(steep * sy * z))
    edge += s * matmul((ahead + behind) * bump, local)
    return sx * (left * rho * half(lambda z: z * (b(sy * z) - b(-sy * z))) + jump * edge)
