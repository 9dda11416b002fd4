"""Activations, as the kernels see them: smooth, or linear on both sides of a kink at 0.

A kernel of infinite width needs Gaussian expectations of an activation ``s`` and of its
derivatives. Which formula is right depends on one thing, whether ``s`` is smooth, so an
:class:`Activation` is one of two:

==========  ====================================================  ==============================
            s(z)                                                  derivative
==========  ====================================================  ==============================
kinked      ``right z`` for z > 0, ``left z`` for z < 0           a step, then a point mass at 0
smooth      any function, analytic in ``|Im z| < strip``          by JAX
==========  ====================================================  ==============================

==============================  ==========================================================
name                            s(z)
==============================  ==========================================================
``relu``, ``leaky_relu(eta)``   max(z, 0); max(z, eta z)
``sigmoid``                     1 / (1 + exp(-z)) - 1/2: centred, as in Zhu et al. 2022
``tanh``, ``erf``               as they are
``swish``                       z / (1 + exp(-z))
``gelu``                        z Phi(z), Phi the normal distribution function
``identity``                    z
``activation(fn)``              any smooth function
==============================  ==========================================================
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Function = Callable[[Any], jax.Array]


@dataclasses.dataclass(frozen=True)
class Activation:
    """An elementwise function with what its Gaussian expectations need; call it like one.

    Hashable, and equal to another with the same fields: a compiled kernel is made once for each.

    Attributes
    ----------
    name : str
    smooth : function, or None for a kinked one.
    kink : (left, right), the values of a kinked one on both sides of 0, times ``|z|^degree``
        with the sign of z: slopes for degree 1, values for degree 0; ``right - left`` is the mass
        at 0 for degree -1, where nothing else is left.
    degree : 1, 0 or -1; kinked only.
    strip : distance of the nearest complex singularity of ``smooth`` from the real axis.
    closed : ``(vx, vy, c) -> E[s(u) s(u')]`` in closed form where there is one.

    Examples
    --------
    >>> relu(jnp.array([-1.0, 2.0]))
    Array([0., 2.], dtype=float...)
    >>> relu.derivative(jnp.array([-1.0, 2.0]))
    Array([0., 1.], dtype=float...)
    >>> leaky_relu(0.1) == leaky_relu(0.1)
    True
    """

    name: str
    smooth: Function | None = None
    kink: tuple[float, float] = (0.0, 0.0)
    degree: int = 1
    strip: float = math.inf
    closed: Callable[..., jax.Array] | None = None

    def __repr__(self) -> str:
        return f"ntk.{self.name}"

    def __call__(self, z: Any) -> jax.Array:
        """``s(z)`` elementwise; half the jump at the kink of a step."""
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
        """``s'``, an activation too."""
        name = self.name + "'"
        if self.smooth is None:
            if self.degree < 0:
                raise ValueError(f"derivative: expected degree 0 or 1, got {self.name}, degree -1.")
            return Activation(name, kink=self.kink, degree=self.degree - 1)
        closed = self.closed and _differentiated_dual(self.closed)
        return Activation(name, _differentiated(self.smooth), strip=self.strip, closed=closed)

    @property
    def euler(self) -> "Activation":
        """``z s'(z)``, the derivative of ``s(r z)`` in ``r`` at 1."""
        if self.smooth is None:
            left, right = (self.degree * value for value in self.kink)
            return Activation(f"z {self.name}'", kink=(left, right), degree=self.degree)
        return Activation(f"z {self.name}'", _euler(self.smooth), strip=self.strip)


# Cached, so that derivatives of equal activations are equal.
@functools.cache
def _differentiated(fn: Function) -> Function:
    return lambda z: jax.jvp(fn, (z,), (jnp.ones_like(z),))[1]


@functools.cache
def _euler(fn: Function) -> Function:
    return lambda z: jax.jvp(fn, (z,), (z,))[1]


@functools.cache
def _differentiated_dual(closed):
    # Price's theorem: dE[f(u) g(u')]/dc = E[f'(u) g'(u')].
    def derivative(vx, vy, c):
        return jax.jvp(lambda c: closed(vx, vy, c), (c,), (jnp.ones_like(c),))[1]

    return derivative


def _erf_dual(vx, vy, c):
    """Williams (1997), Eq. (11)."""
    return 2 / jnp.pi * jnp.arcsin(2 * c / jnp.sqrt((1 + 2 * vx) * (1 + 2 * vy)))


def _gelu_dual(vx, vy, c):
    """By Stein's lemma from E[Phi(u) Phi(u')] and E[phi(u) phi(u')]."""
    determinant = (1 + vx) * (1 + vy) - c**2
    inside = 0.25 + jnp.arcsin(c / jnp.sqrt((1 + vx) * (1 + vy))) / (2 * jnp.pi)
    density = 1 / (2 * jnp.pi * jnp.sqrt(determinant))
    curved = vx * vy + c**2 * (1 / (1 + vx) + 1 / (1 + vy) - 1)
    return c * inside + density * curved


def leaky_relu(slope: float) -> Activation:
    """``z`` for z > 0, ``slope z`` for z < 0: the ReLU family.

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
    if isinstance(slope, jax.core.Tracer) or not math.isfinite(slope):
        raise ValueError(f"slope: expected a finite number known when tracing, got {slope}.")
    return Activation(f"leaky_relu({float(slope):g})", kink=(float(slope), 1.0))


def activation(fn: Function, *, name: str | None = None, strip: float = 1.0) -> Activation:
    """Any smooth elementwise function as an :class:`Activation`; ReLU-like ones are recognised.

    Parameters
    ----------
    fn : elementwise function, infinitely often differentiable by JAX. Give the same object each
        time: a fresh ``lambda`` is another activation, and compiles another kernel.
    name : str, optional
    strip : float
        ``fn`` is taken to be analytic in ``|Im z| < strip``: quadrature nodes grow as 1 / strip. A
        value too large loses digits silently, one too small only time. tanh has pi / 2, the
        softplus pi, the arctangent 1, sine and cosine infinity.

    Raises
    ------
    ValueError
        If ``fn`` is not callable, changes the shape, has a kink or a jump (looked for at the
        integers up to 6 only) without being linear on both sides of 0, or ``strip`` is not
        positive.
        Kinks of the second derivative (ELU, soft sign) pass, and cost digits: 1e-7 or so.

    Examples
    --------
    >>> softplus = activation(jax.nn.softplus, strip=3.1)
    >>> round(float(softplus.derivative(0.0)), 6)
    0.5
    """
    if not callable(fn):
        raise ValueError(f"fn: expected an elementwise function, got {fn!r}.")
    if isinstance(fn, Activation):
        return fn
    if not strip > 0:
        raise ValueError(f"strip: expected a positive number, got {strip}.")
    shape = jax.eval_shape(fn, jax.ShapeDtypeStruct((3,), float)).shape
    if shape != (3,):
        raise ValueError(f"fn: expected an elementwise function, got shape {shape} from (3,).")
    kink = _slopes(fn)
    if kink is not None:
        return Activation(name or str(getattr(fn, "__name__", "activation")), kink=kink)
    _check_smooth(fn)
    return Activation(name or str(getattr(fn, "__name__", "activation")), fn, strip=strip)


@functools.cache
def _slopes(fn: Function) -> tuple[float, float] | None:
    """(left, right) of a function that is linear on both sides of 0, else None."""
    with jax.ensure_compile_time_eval():
        z = np.array([0.25, 0.5, 1.0, 3.0, 8.0, 64.0])
        right, left = (np.asarray(fn(jnp.asarray(side * z))) / (side * z) for side in (1, -1))
    if np.ptp(right) > 1e-6 * abs(right[0]) or np.ptp(left) > 1e-6 * abs(left[0]):
        return None
    return float(left[0]), float(right[0])


@functools.cache
def _check_smooth(fn: Function) -> None:
    """Across a jump of fn or fn', half the step sees the whole change; elsewhere, half of it."""
    with jax.ensure_compile_time_eval():
        z = jnp.arange(-6.0, 7.0)
        for values in (fn, _differentiated(fn)):
            whole, half = (
                np.abs(np.asarray(values(z + h) - values(z - h))) for h in (2.0**-8, 2.0**-9)
            )
            jump = (half > 0.75 * whole) & (whole > 2e-3)
            if jump.any():
                raise ValueError(
                    "fn: expected a smooth function, or a multiple of z on either side of 0, "
                    f"got a jump or kink at {float(z[jump.argmax()]):g}."
                )


relu = Activation("relu", kink=(0.0, 1.0))
identity = Activation("identity", kink=(1.0, 1.0))
# An odd formula: its expectations have exact zeros where they should.
sigmoid = Activation("sigmoid", lambda z: jnp.tanh(z / 2) / 2, strip=math.pi)
tanh = Activation("tanh", jnp.tanh, strip=math.pi / 2)
swish = Activation("swish", jax.nn.swish, strip=math.pi)
gelu = Activation("gelu", lambda z: jax.nn.gelu(z, approximate=False), closed=_gelu_dual)
erf = Activation("erf", jax.lax.erf, closed=_erf_dual)
