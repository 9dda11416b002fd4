"""A network of Zhu et al. 2022, Eq. (1), as arrays, and what its layers do to single inputs.

The formulas are those of :mod:`ntk.infinite`, on the diagonal; they need no pairs, and say how many
Hermite coefficients the pairs will.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ntk.activations import Activation, activation, relu
from ntk.gaussian import DENSITY, hermite, mean, root
from ntk.mehler import Layer, derivative, evaluate, kinks

_TERMS = (128, 256, 512, 1024, 2048, 4096)
_KINKED = (Activation("left", kink=(1.0, 0.0)), relu)  # summed with the slopes on both sides


def parse(
    activations: Sequence[Any], skips: Any, variances: Any, dtype: Any = float
) -> tuple[tuple[Layer, ...], list[jax.Array], jax.Array, jax.Array]:
    """``(layers, weights, skips, variances)``: what is static, and arrays of the rest; checked.

    Parameters
    ----------
    activations, skips, variances : as :func:`ntk.network_kernel` takes them.
    dtype : of the arrays; the inputs'.

    Examples
    --------
    >>> layers, weights, skips, variances = parse([relu, {relu: 0.5}], None, None)
    >>> variances
    Array([1., 2., 2.], dtype=float...)
    """
    if not isinstance(activations, list | tuple) or not activations:
        raise ValueError(f"activations: expected a list of at least one, got {activations!r}.")
    layers, weights = [], []
    for entry in activations:
        mixture = entry if isinstance(entry, Mapping) else {entry: 1.0}
        if not mixture:
            raise ValueError("activations: expected at least one in each layer, got none.")
        layer = tuple(activation(s) for s in mixture)
        w = _numbers("activations: weights", list(mixture.values()), len(mixture), dtype)
        if all(s.smooth is None for s in layer):
            # All kinked layers in one form, so that they make one run.
            layer, w = _KINKED, jnp.stack(kinks(layer, w))  # type: ignore[arg-type]
        layers.append(layer)
        weights.append(w)
    depth = len(layers) + 1
    skips = _numbers("skips", [0.0] * (depth - 2) if skips is None else skips, depth - 2, dtype)
    default = [1.0] + [2.0] * (depth - 1)
    variances = _numbers("variances", default if variances is None else variances, depth, dtype)
    if not isinstance(variances, jax.core.Tracer) and bool((np.asarray(variances) < 0).any()):
        raise ValueError(f"variances: expected nonnegative numbers, got {variances}.")
    return tuple(layers), weights, skips, variances


def _numbers(name: str, values: Any, count: int, dtype: Any) -> jax.Array:
    if isinstance(values, list | tuple):
        values = jnp.stack([jnp.asarray(v, dtype) for v in values]) if values else jnp.zeros(0)
    values = jnp.asarray(values, dtype)
    if values.shape != (count,):
        raise ValueError(f"{name}: expected {count} numbers, got shape {values.shape}.")
    if not isinstance(values, jax.core.Tracer) and not bool(np.isfinite(values).all()):
        raise ValueError(f"{name}: expected finite numbers, got {values}.")
    return values


def inputs(name: str, x: Any, name2: str = "", x2: Any = None):
    """Both sets of inputs as floating arrays [n, d] and [n2, d], checked; None stays None."""
    x = _rows(name, x)
    if x2 is None:
        return x, None
    x2 = _rows(name2, x2).astype(x.dtype)
    if x2.shape[1] != x.shape[1]:
        raise ValueError(f"{name2}: expected {x.shape[1]} columns as in {name}, got {x2.shape[1]}.")
    return x, x2


def _rows(name: str, x: Any) -> jax.Array:
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        x = x.astype(float)
    elif x.dtype.itemsize < 4:
        x = x.astype(jnp.float32)
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"{name}: expected a nonempty array [n, d], got shape {x.shape}.")
    if not isinstance(x, jax.core.Tracer) and not bool(np.isfinite(x).all()):
        raise ValueError(f"{name}: expected finite entries, got NaN or infinity.")
    return x


def is_traced(tree: Any) -> bool:
    """Whether any leaf has no value yet."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def check_resolved(name: str, kernel: jax.Array, terms: int) -> None:
    """Raise FloatingPointError where ``terms`` Hermite coefficients have left a NaN."""
    if bool(np.isnan(kernel).any()):
        raise FloatingPointError(
            f"{name}: expected inputs whose kernel {terms} Hermite coefficients resolve, got "
            "nearly collinear ones at too large a variance for the smooth activations."
        )


def _squares(x1, x2) -> np.ndarray:
    return np.concatenate([np.sum(np.square(x), 1) for x in (x1, x2) if x is not None])


def equal_norms(x1: jax.Array, x2: jax.Array | None) -> bool:
    """Whether all inputs have one norm, up to rounding."""
    squares = _squares(x1, x2)
    return bool(np.ptp(squares) <= 8 * np.finfo(squares.dtype).eps * squares.max())


def needed_terms(layers: tuple[Layer, ...], x1, x2, weights, skips, variances) -> int:
    """The fewest Hermite coefficients, 128, 256, ... 4096, that resolve every layer."""
    if all(s.smooth is None for layer in layers for s in layer):
        return _TERMS[0]
    squares = _squares(x1, x2)
    # Values, even where the caller is being traced.
    with jax.ensure_compile_time_eval():
        extremes = jnp.asarray([squares.min(), squares.max()])
        scales = [d.scale for d in _diagonals(layers, weights, skips, variances, extremes)]
        for most in (512, _TERMS[-1]):
            needed = max(
                _layer_terms(layer, w, scale, most)
                for layer, w, scale in zip(layers, weights, scales, strict=True)
            )
            # Every other coefficient may vanish by symmetry.
            if needed < most - 1:
                break
    return next((terms for terms in _TERMS if terms >= needed), _TERMS[-1])


def _layer_terms(layer: Layer, w: jax.Array, scale: jax.Array, most: int) -> int:
    """How many coefficients of s', of ``most``, matter to ``E s'(u) s'(u')`` at correlation 1."""
    smooth = [i for i, s in enumerate(layer) if s.smooth is not None]
    if not smooth or has_closed_dual(layer):
        return 0
    slopes = tuple(layer[i].derivative for i in smooth)
    slope = functools.partial(evaluate, slopes, w[np.array(smooth)])
    size = np.abs(np.asarray(hermite(slope, scale, most))).max(0)
    # The factor of a kink falls slowly; smooth ones are small together.
    kinked = len(smooth) < len(layer)
    other = (1 + np.arange(most)) ** -0.75 * size.max() if kinked else size
    tails = np.cumsum((size * other)[::-1])[::-1]
    return int(np.sum(tails > 10 * np.finfo(size.dtype).eps * tails[0]))


def has_closed_dual(layer: Layer) -> bool:
    """Whether the pairs of the layer have a closed form."""
    return len(layer) == 1 and layer[0].closed is not None


class Diagonal(NamedTuple):
    """What one layer does to single inputs; every field [n], or [1] for equal norms."""

    scale: jax.Array  # standard deviation of the pre-activation u
    mean: jax.Array  # E s(u)
    below: jax.Array  # mean of the features below, mu_{l-1}
    slope: jax.Array  # E s'(u)^2
    second: jax.Array  # S_l: second moment of the features


def runs(layers: Sequence[Layer]) -> list[tuple[Layer, slice]]:
    """Consecutive layers of the same activations: one compiled body each, scanned over."""
    ends = [i for i in range(1, len(layers)) if layers[i] != layers[i - 1]] + [len(layers)]
    return [(layers[i], slice(i, j)) for i, j in zip([0, *ends], ends, strict=False)]


def run_diagonals(
    layers: Sequence[Layer], weights: Sequence[jax.Array], skips, variances, squares: jax.Array
) -> list[Diagonal]:
    """The formulas of :mod:`ntk.infinite` for single inputs of squared norms [n], by runs.

    One :class:`Diagonal` for each of ``runs(layers)``, every field [run, n].
    """

    def step(carry, inputs, layer):
        second, below = carry
        w, a, c = inputs
        scale = root(c * second)
        g, m, slope = moments(layer, w, scale)
        second = g + 2 * a * m * below + a**2 * second
        return (second, m + a * below), Diagonal(scale, m, below, slope, second)

    skips = jnp.concatenate([jnp.zeros(1, skips.dtype), skips])  # the first layer has none
    carry, found = (squares, jnp.zeros_like(squares)), []
    for layer, part in runs(layers):
        inputs = jnp.stack(weights[part]), skips[part], variances[part]
        carry, diagonal = jax.lax.scan(functools.partial(step, layer=layer), carry, inputs)
        found.append(diagonal)
    return found


def diagonals(
    layers: Sequence[Layer], weights: Sequence[jax.Array], skips, variances, squares: jax.Array
) -> list[Diagonal]:
    """:func:`run_diagonals` layer by layer, every field [n]."""
    return [
        jax.tree.map(lambda field, i=i: field[i], run)
        for run in run_diagonals(layers, weights, skips, variances, squares)
        for i in range(len(run.scale))
    ]


def moments(layer: Layer, w: jax.Array, scale: jax.Array):
    """``(E s(u)^2, E s(u), E s'(u)^2)``, u of standard deviations ``scale`` [n]."""
    if all(s.smooth is None for s in layer):
        left, right = kinks(layer, w)  # type: ignore[misc]
        square = (left**2 + right**2) / 2
        return square * scale**2, (right - left) * DENSITY * scale, square + 0 * scale
    value = functools.partial(evaluate, layer, w)
    slope = functools.partial(evaluate, derivative(layer), w)
    return (
        mean(lambda u: value(u) ** 2, scale),
        mean(value, scale),
        mean(lambda u: slope(u) ** 2, scale),
    )


_diagonals = jax.jit(diagonals, static_argnums=0)
