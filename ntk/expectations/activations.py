"""Activations for the kernels: linear on both sides of a kink at 0, or piecewise smooth.

A *kinked* activation is ``right z`` for z > 0 and ``left z`` for z < 0; its derivatives are a step
and a point mass at 0. A *smooth* one is any function that is smooth except at listed ``kinks``; JAX
differentiates it on each piece.

==============================  ==========================================================
name                            s(z)
==============================  ==========================================================
``relu``, ``leaky_relu(eta)``   max(z, 0); max(z, eta z)
``sigmoid``                     1 / (1 + exp(-z)) - 1/2: centred, as in Zhu et al. 2022
``tanh``, ``erf``               the functions of these names
``swish``                       z / (1 + exp(-z))
``gelu``                        z Phi(z), Phi the normal distribution function
``identity``                    z
``activation(fn)``              any piecewise smooth function: ELU, hard tanh, steps, ...
==============================  ==========================================================
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ntk.expectations.gaussian import arcsine
from ntk.expectations.kinks import (
    ORDERS,
    Function,
    Kink,
    elementwise_derivative,
    find_kinks,
    jumps,
    linear_sides,
)
from ntk.internal.checks import concrete, real_number


@dataclasses.dataclass(frozen=True)
class Activation:
    """An elementwise function with the data for its Gaussian expectations; callable and hashable.

    Attributes
    ----------
    name : str
    smooth : callable, optional
        The function, or None for a kinked one.
    kink : (left, right)
        On both sides of 0, the slopes of a kinked one of degree 1, or the values for degree 0. For
        degree -1 only a point mass ``right - left`` at 0 is left.
    degree : {1, 0, -1}
        For kinked functions only.
    strip : float
        Distance of the nearest complex singularity of ``smooth`` from the real axis.
        :func:`ntk.dual` chooses its nodes by it.
    kinks : sequence
        Places where ``smooth`` is not smooth, each with the jumps (right minus left) of the
        function and its first seven derivatives.
    closed : callable, optional
        ``(vx, vy, c, vx vy - c^2) -> E[s(u) s(u')]`` in closed form, if known, and the same for
        derivatives of s that lose digits by Price's theorem.
    """

    name: str
    smooth: Function | None = None
    kink: tuple[float, float] = (0.0, 0.0)
    degree: int = 1
    strip: float = math.inf
    closed: tuple[Callable[..., jax.Array], ...] = ()
    kinks: tuple[Kink, ...] = ()

    def __repr__(self) -> str:
        return f"ntk.{self.name}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Activations of this module pickle by name, because a copied function is not equal.
        return self.name if globals().get(self.name) is self else super().__reduce_ex__(protocol)

    def __call__(self, z: Any) -> jax.Array:
        """Return ``s(z)`` elementwise; half the jump at the kink of a step."""
        z = jnp.asarray(z)
        z = z if jnp.issubdtype(z.dtype, jnp.inexact) else z.astype(float)
        if self.smooth is not None:
            return self.smooth(z)
        if self.degree < 0:
            raise ValueError(f"z: expected a function with values, got the point mass {self.name}.")
        left, right = self.kink
        if self.degree == 1:
            return jnp.where(z > 0, right * z, left * z)
        return jnp.where(z > 0, right, jnp.where(z < 0, left, (left + right) / 2)).astype(z.dtype)

    @property
    def derivative(self) -> "Activation":
        """``s'``, also an activation; for a point mass (degree -1) it raises ``ValueError``."""
        name = self.name + "'"
        if self.smooth is None:
            if self.degree < 0:
                raise ValueError(f"derivative: expected degree 0 or 1, got {self.name}, degree -1.")
            return Activation(name, kink=self.kink, degree=self.degree - 1)
        closed = self.closed[1:] or tuple(_differentiated_dual(dual) for dual in self.closed)
        # At a jump the slope is the one of each side, as in a network's gradient.
        kinks = tuple((t, (*jumps[1:], 0.0)) for t, jumps in self.kinks)
        slope = _differentiated(self.smooth)
        return Activation(name, slope, strip=self.strip, closed=closed, kinks=kinks)

    @property
    def euler(self) -> "Activation":
        """``z s'(z)``, the derivative of ``s(r z)`` in ``r`` at 1."""
        if self.smooth is None:
            left, right = (self.degree * value for value in self.kink)
            return Activation(f"z {self.name}'", kink=(left, right), degree=self.degree)

        def euler_jumps(t, jumps):  # (z s')^(m) = z s^(m+1) + m s^(m)
            pairs = zip(jumps, (*jumps[1:], 0.0), strict=True)
            return tuple(t * higher + m * jump for m, (jump, higher) in enumerate(pairs))

        kinks = tuple((t, euler_jumps(t, jumps)) for t, jumps in self.kinks)
        return Activation(f"z {self.name}'", _euler(self.smooth), strip=self.strip, kinks=kinks)


# Cached, so that derivatives of equal activations are equal.
_differentiated = functools.cache(elementwise_derivative)


@functools.cache
def _euler(fn: Function) -> Function:
    return lambda z: jax.jvp(fn, (z,), (z,))[1]


@functools.cache
def _differentiated_dual(closed):
    # Price's theorem: dE[f(u) g(u')]/dc = E[f'(u) g'(u')].
    def derivative(vx, vy, c, det):
        along = jnp.ones_like(c), -2 * c
        return jax.jvp(lambda c, det: closed(vx, vy, c, det), (c, det), along)[1]

    return derivative


def _erf_dual(vx, vy, c, det):
    """Return the dual of erf by Williams (1997), Eq. (11)."""
    # We take roots of single variances, because there are fewer variances than pairs.
    over = jax.lax.rsqrt(1 + 2 * vx) * jax.lax.rsqrt(1 + 2 * vy)
    determinant = (1 + 2 * vx) + 2 * vy + 4 * det
    return 2 / jnp.pi * arcsine(2 * c * over, determinant * over**2)


def _gelu_dual(vx, vy, c, det):
    """Return the dual of GELU, by Stein's lemma from E[Phi(u) Phi(u')] and E[phi(u) phi(u')]."""
    inside, density, _ = _normals(vx, vy, c, det)
    return c * inside + density * (det + c**2 * (1 / (1 + vx) + 1 / (1 + vy)))


def _gelu_slope_dual(vx, vy, c, det):
    """Return the derivative of :func:`_gelu_dual` in c, simplified to avoid cancellation."""
    inside, density, square = _normals(vx, vy, c, det)
    return inside + c * density * (1 / (1 + vx) + 1 / (1 + vy) + square)


def _normals(vx, vy, c, det):
    """Return ``E[Phi(u) Phi(u')]``, ``E[phi(u) phi(u')]``, and ``1 / |1 + covariance|``."""
    over = jax.lax.rsqrt(1 + vx) * jax.lax.rsqrt(1 + vy)
    determinant = (1 + vx) + vy + det
    root = jax.lax.rsqrt(determinant)
    angle = arcsine(c * over, determinant * over**2)
    return 0.25 + angle / (2 * jnp.pi), root / (2 * jnp.pi), root**2


def leaky_relu(slope: float) -> Activation:
    """Return the leaky ReLU: ``z`` for z > 0, ``slope z`` for z < 0.

    Parameters
    ----------
    slope : float
        Zhu's eta; 0 is the ReLU, 1 the identity, -1 the absolute value.

    Raises
    ------
    ValueError
        If ``slope`` is not a finite number known when tracing.

    Examples
    --------
    >>> leaky_relu(0.1)(jnp.array([-1.0, 2.0]))
    Array([-0.1, 2. ], dtype=float...)
    """
    if not concrete(real_number("slope", slope)) or not math.isfinite(slope):
        raise ValueError(f"slope: expected a finite number known when tracing, got {slope}.")
    return Activation(f"leaky_relu({float(slope):g})", kink=(float(slope), 1.0))


def activation(
    fn: Function,
    *,
    name: str | None = None,
    strip: float = 1.0,
    kinks: Sequence[float] | None = None,
) -> Activation:
    """Return any piecewise smooth elementwise function as an :class:`Activation`.

    Parameters
    ----------
    fn : callable
        Elementwise function, differentiable by JAX on each of its pieces. Pass the same object each
        time: a new ``lambda`` is a different activation and is analysed again.
    name : str, optional
    strip : float
        For :func:`ntk.dual` only: ``fn`` is assumed analytic in ``|Im z| < strip``. Too large a
        value loses digits there, too small a value only costs time.
    kinks : places where the function or one of its derivatives jumps, optional
        Default: search for up to 16 places. If given, nothing may jump elsewhere.

    Raises
    ------
    ValueError
        If ``fn`` is not callable or not elementwise, its values or slopes are not finite, its slope
        differs from JAX's derivative, it has more than 16 kinks, or one that ``kinks`` omits; or
        ``strip`` is not positive.

    Notes
    -----
    Jumps of ``fn`` and its first two derivatives are searched in two thousand cells of ``|z| <
    120``, to the last digit. Two kinks 1e-3 apart are detected; a spike narrower than the cells
    (1/64 for ``|z| < 12``) can be missed. A function that is linear on both sides of 0, up to the
    ends, gets the closed form of leaky ReLUs.

    Examples
    --------
    >>> activation(lambda z: jnp.clip(z, -1, 2)).kinks[1][:2]  # at 2 its slope falls by 1
    (2.0, (0.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
    """
    if not callable(fn):
        raise ValueError(f"fn: expected an elementwise function, got {fn!r}.")
    if isinstance(fn, Activation):
        return fn
    if not real_number("strip", strip) > 0:
        raise ValueError(f"strip: expected a positive number, got {strip}.")
    shape = jax.eval_shape(fn, jax.ShapeDtypeStruct((3,), float)).shape
    if shape != (3,):
        raise ValueError(f"fn: expected an elementwise function, got shape {shape} from (3,).")
    given = None if kinks is None else tuple(sorted(map(float, kinks)))
    sides, kink_jumps = _sides_and_kinks(fn, given)
    name = name or str(getattr(fn, "__name__", "activation"))
    if sides is None:
        return Activation(name, fn, strip=strip, kinks=kink_jumps)
    return Activation(name, kink=sides)


@functools.cache
def _sides_and_kinks(fn: Function, given: tuple[float, ...] | None):
    """Return the slopes of a function that is linear on both sides of 0, or None, and the kinks."""
    places = find_kinks(fn)
    if given is not None:
        missing = [t for t in places if not any(abs(t - k) <= 1e-9 * abs(t) for k in given)]
        if missing:
            got = f"{list(given)} without {missing[0]:g}"
            raise ValueError(f"kinks: expected all places where fn jumps or bends, got {got}.")
        places = given
    sides = linear_sides(fn) if set(places) <= {0.0} else None
    return sides, () if sides is not None else jumps(fn, places)


def in_a_network(fn: Function) -> Activation:
    """Return ``fn`` as an activation for networks; steps with a kink at 0 become piecewise."""
    s = activation(fn)
    return s if s.smooth is not None or s.degree == 1 else as_piecewise("activations", s)


@functools.cache
def as_piecewise(argument: str, s: Activation) -> Activation:
    """Return a kinked activation with its kink at 0 among ``kinks``."""
    if s.smooth is not None:
        return s
    if s.degree < 0:
        raise ValueError(f"{argument}: expected functions of values, got the point mass {s.name}.")
    jumps = [0.0] * ORDERS
    jumps[s.degree] = s.kink[1] - s.kink[0]
    return Activation(s.name, s.__call__, kinks=((0.0, tuple(jumps)),))


relu: Activation = Activation("relu", kink=(0.0, 1.0))
identity: Activation = Activation("identity", kink=(1.0, 1.0))
# The formula is odd, so that expectations that vanish by symmetry are exactly 0.
sigmoid: Activation = Activation("sigmoid", lambda z: jnp.tanh(z / 2) / 2, strip=math.pi)
tanh: Activation = Activation("tanh", jnp.tanh, strip=math.pi / 2)
swish: Activation = Activation("swish", jax.nn.swish, strip=math.pi)
_exact_gelu = functools.partial(jax.nn.gelu, approximate=False)
gelu: Activation = Activation("gelu", _exact_gelu, closed=(_gelu_dual, _gelu_slope_dual))
erf: Activation = Activation("erf", jax.lax.erf, closed=(_erf_dual,))
