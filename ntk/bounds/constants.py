"""Constants of an activation in the bounds: Hermite coefficients, betas, Lipschitz constant."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ntk.bounds.bound import Mixture
from ntk.expectations.gaussian import gaussian_mean
from ntk.expectations.hermite import coefficients
from ntk.infinite.layer_expansions import (
    TRACED,
    Layer,
    LayerKernels,
    Resolution,
    evaluate_layer,
    kink_places,
    layer_derivative,
    parse_architecture,
    propagate_features,
)
from ntk.internal.checks import concrete, real_number

_FAR = 1e6  # where activations have reached their asymptotes


class Betas(NamedTuple):
    """Zhu's constants: 2 E[s(u)^2] / y, and upper and lower values of 2 E[s'(u)^2]; u ~ N(0, y)."""

    beta1: jax.Array
    beta2: jax.Array
    beta3: jax.Array


def hermite_coefficients(activation: Mixture, *, terms: int = 32) -> jax.Array:
    """Return ``mu_k = E[s(z) h_k(z)]`` [terms], h_k orthonormal Hermite polynomials."""
    how = TRACED._replace(terms=max(terms, TRACED.terms))
    (layer,) = unit_features([activation], None, how)
    return coefficients(layer.value, 1, terms)[0]


def unit_features(
    activations: Sequence[Mixture], skips: Any, how: Resolution = TRACED
) -> list[LayerKernels]:
    """Return the layers of a network, with variances (1, 2, ..., 2), on an input of norm 1."""
    layers, weights, skips, variances = parse_architecture(activations, skips, None)
    return propagate_features(layers, weights, skips, variances, jnp.ones(1), how)


def table1(activation: Mixture, t: float = math.inf) -> Betas:
    """Return Zhu's Table 1: suprema over y of beta_1 and beta_2, infimum over y <= t of beta_3.

    Parameters
    ----------
    activation : activation, or {activation: weight}
        With slopes that have limits at both ends.
    t : float
        The largest pre-activation variance. It matters if the slope tends to 0, as for sigmoid and
        tanh; their beta_3 are the paper's f_S(t) and f_T(t).

    Raises
    ------
    ValueError
        If ``t`` is not positive.

    Notes
    -----
    A scan of log y over [-14, 14], refined around its best node, and the limits at 0 and infinity.
    The paper prints beta_2 = 1.22 for swish, a bound: ``max a^2 + (1 - a)^2`` over its slopes a.
    The supremum is 1.01678, at y = 42.3.

    Examples
    --------
    >>> from ntk.expectations.activations import swish, tanh
    >>> [round(float(beta), 4) for beta in table1(swish)]
    [1.0, 1.0168, 0.5]
    >>> round(float(table1(tanh, 3.0).beta3), 4)
    0.584
    """
    if not real_number("t", t) > 0:
        raise ValueError(f"t: expected a positive variance, got {t}.")
    (layer,), (weights,), _, _ = parse_architecture([activation], None, None)
    return _table1_betas(layer, weights, float(t))


@functools.partial(jax.jit, static_argnums=0)
def _table1_betas(layer: Layer, weights: jax.Array, t: float) -> Betas:
    value = functools.partial(evaluate_layer, layer, weights)
    slope = functools.partial(evaluate_layer, layer_derivative(layer), weights)
    kinks = kink_places(layer)

    def limit(z):
        return slope(jnp.asarray(z)) ** 2 + slope(-jnp.asarray(z)) ** 2

    def twice_mean_square(fn, log_y):
        return 2 * gaussian_mean(lambda u: fn(u) ** 2, jnp.exp(log_y / 2), kinks)

    def beta1(log_y):
        return twice_mean_square(value, log_y) / jnp.exp(log_y)

    beta2 = functools.partial(twice_mean_square, slope)
    near, far = limit(1e-9), limit(_FAR)
    ends = jnp.array([0.0, 1e-30, -1e-30])  # at 0 a step has its middle value
    start = jnp.where((jnp.abs(value(ends)) <= 1e-20).all(), near, jnp.inf)
    end = jnp.where(jnp.isinf(t), far, near)
    low, high = -14.0, jnp.where(jnp.isinf(t), 14.0, jnp.log(t))
    smallest = -_supremum(lambda log_y: -beta2(log_y), jnp.minimum(low, high - 1), high)
    return Betas(
        functools.reduce(jnp.maximum, (_supremum(beta1, low, 14.0), start, far)),
        functools.reduce(jnp.maximum, (_supremum(beta2, low, 14.0), near, far)),
        functools.reduce(jnp.minimum, (smallest, near, end)),
    )


def activation_lipschitz(activation: Mixture) -> jax.Array:
    """Return ``Lip = sup |s'|``: a scan of ``|z| < 11,000`` and of kinks, refined at its best node.

    Nodes are 1e-3 apart near 0, and farther apart in proportion to z. The scan misses a steeper
    smooth piece between two nodes. A slope that grows at the ends raises ``ValueError``.
    """
    (layer,), (weights,), _, _ = parse_architecture([activation], None, None)
    for s, weight in zip(layer, weights, strict=True):
        places = [t for t, sizes in s.kinks if sizes[0]]
        if places and not (concrete(weight) and weight == 0):
            raise ValueError(
                f"activation: expected a Lipschitz function, got one that jumps at {places[0]:g}."
            )
    largest_slope, far = _largest_slopes(layer_derivative(layer), weights, kink_places(layer))
    if concrete(largest_slope) and not far <= 1.01 * largest_slope:
        raise ValueError(f"activation: expected a Lipschitz function, got slope {far} at {_FAR}.")
    return largest_slope


@functools.partial(jax.jit, static_argnums=(0, 2))
def _largest_slopes(
    slope: Layer, weights: jax.Array, kinks: tuple[float, ...]
) -> tuple[jax.Array, jax.Array]:
    """Return the largest slope in size within the scan and next to kinks, and at both ends."""

    def size(z):
        return jnp.abs(evaluate_layer(slope, weights, z))

    largest = _supremum(lambda v: size(jnp.sinh(v)), -10.0, 10.0, nodes=20_001)
    apart = 1e-6 * (1 + np.abs(kinks))
    sides = jnp.asarray(np.concatenate([kinks - apart, kinks + apart]), float)
    largest = jnp.maximum(largest, jnp.max(size(sides), initial=0.0))
    return largest, jnp.max(size(jnp.array([-_FAR, _FAR])))


def _supremum(fn: Callable[[jax.Array], jax.Array], low, high, nodes: int = 129) -> jax.Array:
    """Return the largest value of ``fn`` on an interval, by scans around the best node."""

    def finer(nodes, bracket):
        low, high, best = bracket
        grid = low + (high - low) * jnp.linspace(0, 1, nodes)
        values = fn(grid)
        i = jnp.argmax(values)
        best = jnp.maximum(best, values[i])
        return grid[jnp.maximum(i - 1, 0)], grid[jnp.minimum(i + 1, nodes - 1)], best

    start = tuple(jnp.asarray(x, float) for x in (low, high, -jnp.inf))
    return jax.lax.fori_loop(0, 4, lambda _, bracket: finer(129, bracket), finer(nodes, start))[2]
